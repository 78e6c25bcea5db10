//! What kernels run on: our own cubecl runtime for CUDA, and cubecl's for Vulkan.
//!
//! cubecl's own CUDA runtime hides its stream, so a step cannot be captured with it. [`Cuda`] compiles kernels with
//! cubecl's public CUDA C++ compiler and NVRTC and runs them on one stream of ours. Every `#[cube]` kernel runs on it
//! unchanged. [`Engine`] is what a [`Device`](crate::Device) needs beyond launches; it is implemented for [`Cuda`] and
//! for cubecl's wgpu runtime on Mesa's software Vulkan driver, which runs every kernel on a machine without a GPU.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cubecl::client::ComputeClient;
use cubecl::device::{Device as CubeDevice, DeviceId};
use cubecl::ir::{ContiguousElements, MatrixLayout, MmaProperties, TargetProperties};
use cubecl::server::ServerError;
use cubecl::stream_id::StreamId;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use cubecl::zspace::striding::has_contiguous_row_major_strides;
use cubecl::zspace::{Shape, Strides};
use cubecl_cpp::cuda::mma::contiguous_elements_cuda;
use cudarc::driver::{CudaGraph, sys};

mod branches;
mod compile;
mod error;
pub mod gemm;
mod gpu;
mod library;
mod offline;
mod panics;
mod server;
mod shared;
mod source;
mod staging;

pub use branches::Dependencies;
pub use compile::{Cache, Target};
pub use error::Error;
pub use library::{Versions, check_driver};
pub use offline::{Compiled, Offline, OfflineDevice, OfflineServer, Variant};
pub use server::Server;
pub use shared::Shared;

/// Cubes along x, y, z that one launch may have on CUDA.
const MAX_CUBES: (u32, u32, u32) = (i32::MAX as u32, 65535, 65535);

/// What a runtime has done so far; all devices on it together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Kernels launched or recorded; replays are not counted.
    pub launches: u64,
    /// Allocations of device memory.
    pub allocations: u64,
    /// Bytes allocated and not freed.
    pub allocated: u64,
    /// Kernels that the compiler ran for; the others came from the cache on disk.
    pub compiled: u64,
}

/// How a runtime took bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It has copied them, and the host waited for the device until it had room for them.
    Waited,
    /// It has copied them and waited for nothing.
    Queued,
    /// It has not: it can only make new buffers.
    Refused,
}

/// What results depend on besides the sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// The product's name.
    pub name: String,
    /// The GPU generation that kernels are compiled for, such as `sm_90`; the backend's word where it is none of CUDA's.
    pub target: String,
    /// The driver's release.
    pub driver: String,
    /// NVRTC's version.
    pub nvrtc: String,
    /// The version of cuBLASLt.
    pub cublaslt: String,
}

/// What a [`Device`](crate::Device) needs of a runtime besides cubecl's launches.
pub trait Engine: gemm::Gemm {
    /// The backend's word in tables and on the command line.
    const WORD: &'static str;

    /// Whether steps can be captured and replayed.
    const GRAPHS: bool;

    /// A captured step.
    type Graph;

    /// Whether there is a device, or what is missing. Does not open it.
    fn available() -> Result<(), Error>;

    /// Opens the device. All clients of one runtime share one device, stream and compiled kernels.
    fn open() -> Result<ComputeClient<Self>, Error>;

    /// The device's name and versions, for people.
    fn describe(client: &ComputeClient<Self>) -> String;

    /// The hardware and its versions, for receipts.
    fn hardware(client: &ComputeClient<Self>) -> Result<Hardware, Error>;

    /// Where a kernel's argument may start inside a buffer: a multiple of this many bytes.
    fn binding_alignment(client: &ComputeClient<Self>) -> u64;

    /// Waits until every launch so far has been issued (not until it has run) and hands out what went wrong.
    fn settle(client: &ComputeClient<Self>) -> Result<(), Error>;

    /// Writes into a buffer, after all that was asked for before and before all that is asked for later.
    fn write(client: &ComputeClient<Self>, into: &gemm::Start<'_>, bytes: &[u8]) -> Result<Written, Error>;

    /// [`Engine::write`] of what is new before every step: however many bytes they are, they wait for no step that is under
    /// way, where the host has memory for that.
    fn write_every_step(client: &ComputeClient<Self>, into: &gemm::Start<'_>, bytes: &[u8]) -> Result<Written, Error> {
        Self::write(client, into, bytes)
    }

    /// What the next launch of a recording waits for: everything recorded last, branch by branch.
    fn dependencies(client: &ComputeClient<Self>) -> Result<Dependencies, Error>;

    /// Lets the next launch of a recording wait for these, in place of or besides what it would have waited for.
    fn depend(client: &ComputeClient<Self>, on: Dependencies, besides: bool) -> Result<(), Error>;

    /// Records launches from here on instead of running them.
    fn begin_capture(client: &ComputeClient<Self>) -> Result<(), Error>;

    /// Ends the recording.
    fn end_capture(client: &ComputeClient<Self>) -> Result<Self::Graph, Error>;

    /// How many nodes it has.
    fn nodes(graph: &Self::Graph) -> usize;

    /// Runs what was recorded.
    fn replay(client: &ComputeClient<Self>, graph: &Self::Graph) -> Result<(), Error>;

    /// Lets `issue` ask for work and gives the time it took on the device; waits for it.
    fn timed(client: &ComputeClient<Self>, issue: &mut dyn FnMut()) -> Result<Duration, Error>;

    /// What the runtime has done so far.
    fn activity(client: &ComputeClient<Self>) -> Activity;
}

/// CUDA: cubecl's compiler, NVRTC, one stream.
#[derive(Clone, Debug)]
pub struct Cuda;

/// A GPU by its number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CudaDevice(pub u16);

/// The kind of [`CudaDevice`] among cubecl's devices; cubecl's own runtimes use small numbers.
const CUDA_TYPE: u16 = 770;

impl CubeDevice for CudaDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: CUDA_TYPE, index_id: self.0 }
    }
}

impl cubecl::Runtime for Cuda {
    type Compiler = source::Compiler;
    type Server = Server;
    type Device = CudaDevice;

    fn client(device: &CudaDevice) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        Self::WORD
    }

    fn require_array_lengths() -> bool {
        true
    }

    fn max_cube_count() -> (u32, u32, u32) {
        MAX_CUBES
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        has_contiguous_row_major_strides(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }
    }

    fn enumerate_devices(_: u16, _: &Arc<Shared>) -> Vec<DeviceId> {
        vec![CudaDevice::default().to_id()]
    }
}

/// A captured step and the number of its nodes; empty if the step launched nothing.
pub struct Recording(Option<CudaGraph>, usize);

// SAFETY: a graph is used by one device at a time: replays run on the device thread while the caller waits.
unsafe impl Send for Recording {}

/// A shared reference that the device thread uses while the caller waits for it.
struct OnDeviceThread<'a>(&'a Recording);

// SAFETY: as for `Recording`.
unsafe impl Send for OnDeviceThread<'_> {}

impl Cuda {
    /// Runs `work` on the device thread, after every launch so far.
    fn on_device<T: Send + 'static>(
        client: &ComputeClient<Self>,
        work: impl FnOnce(&Shared) -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        let shared = client.info().clone();
        client.exclusive(move || work(&shared)).map_err(|e| Error::Panic { message: e.to_string() })?
    }

    /// Versions and name of the GPU.
    pub fn versions(client: &ComputeClient<Self>) -> Result<Versions, Error> {
        client.info().gpu.as_ref().map(|gpu| gpu.versions.clone()).map_err(Error::clone)
    }
}

impl Engine for Cuda {
    const WORD: &'static str = "cuda";
    const GRAPHS: bool = true;
    type Graph = Recording;

    fn available() -> Result<(), Error> {
        library::find().map(|_| ())
    }

    fn open() -> Result<ComputeClient<Self>, Error> {
        // Asked first, so that no thread is started where there is nothing to open.
        Self::available()?;
        panics::watch();
        let client = <Self as cubecl::Runtime>::client(&CudaDevice::default());
        match &client.info().gpu {
            Ok(_) => Ok(client),
            Err(error) => Err(error.clone()),
        }
    }

    fn describe(client: &ComputeClient<Self>) -> String {
        match &client.info().gpu {
            Ok(gpu) => {
                let Versions { driver_cuda, driver_release, nvrtc } = &gpu.versions;
                format!(
                    "{}, sm_{}{}, driver {} (CUDA {}.{}), NVRTC {}.{}",
                    gpu.name,
                    gpu.capability.0,
                    gpu.capability.1,
                    driver_release.as_deref().unwrap_or("of unknown release"),
                    driver_cuda / 1000,
                    driver_cuda % 1000 / 10,
                    nvrtc.0,
                    nvrtc.1
                )
            }
            Err(error) => error.to_string(),
        }
    }

    fn hardware(client: &ComputeClient<Self>) -> Result<Hardware, Error> {
        let gpu = client.info().gpu.as_ref().map_err(Error::clone)?;
        Ok(Hardware {
            name: gpu.name.clone(),
            target: format!("sm_{}{}", gpu.capability.0, gpu.capability.1),
            driver: gpu.versions.driver_release.clone().unwrap_or_else(|| "unknown".to_owned()),
            nvrtc: format!("{}.{}", gpu.versions.nvrtc.0, gpu.versions.nvrtc.1),
            cublaslt: library::cublaslt().unwrap_or_else(|| "absent".to_owned()),
        })
    }

    fn binding_alignment(_: &ComputeClient<Self>) -> u64 {
        4
    }

    fn settle(client: &ComputeClient<Self>) -> Result<(), Error> {
        Self::on_device(client, |shared| shared.take_error())?;
        panics::take(CudaDevice::default().to_id())
    }

    fn write(client: &ComputeClient<Self>, into: &gemm::Start<'_>, bytes: &[u8]) -> Result<Written, Error> {
        let at = gemm::address(client, into)?;
        // SAFETY: the caller keeps the buffer alive and checked that it has as many bytes.
        Self::on_device(client, |shared| unsafe { shared.write(at, bytes) })
    }

    fn write_every_step(client: &ComputeClient<Self>, into: &gemm::Start<'_>, bytes: &[u8]) -> Result<Written, Error> {
        let at = gemm::address(client, into)?;
        // SAFETY: as above.
        Self::on_device(client, |shared| unsafe { shared.write_every_step(at, bytes) })
    }

    fn dependencies(client: &ComputeClient<Self>) -> Result<Dependencies, Error> {
        Self::on_device(client, Dependencies::of)
    }

    fn depend(client: &ComputeClient<Self>, on: Dependencies, besides: bool) -> Result<(), Error> {
        Self::on_device(client, move |shared| on.set(shared, besides))
    }

    fn begin_capture(client: &ComputeClient<Self>) -> Result<(), Error> {
        let by = StreamId::current();
        Self::on_device(client, move |shared| {
            shared.take_error()?;
            // Relaxed, since a kernel that is new at capture is still loaded.
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            shared.stream()?.begin_capture(mode).map_err(shared.call("cuStreamBeginCapture"))?;
            shared.set_capturing(Some(by));
            Ok(())
        })
    }

    fn end_capture(client: &ComputeClient<Self>) -> Result<Recording, Error> {
        Self::on_device(client, |shared| {
            shared.set_capturing(None);
            // A recording that has failed has none.
            let last = Dependencies::of(shared);
            let graph = shared
                .stream()?
                .end_capture(sys::CUgraphInstantiate_flags(0))
                .map_err(shared.call("cuStreamEndCapture"));
            // A launch that failed is the cause of a capture that failed.
            shared.take_error()?;
            let graph = graph?;
            let mut nodes = 0;
            if let Some(graph) = &graph {
                graph.upload().map_err(shared.call("cuGraphUpload"))?;
                nodes = last?.check_joined(shared, graph.cu_graph())?;
            }
            Ok(Recording(graph, nodes))
        })
    }

    fn nodes(graph: &Recording) -> usize {
        graph.1
    }

    fn replay(client: &ComputeClient<Self>, graph: &Recording) -> Result<(), Error> {
        let graph = OnDeviceThread(graph);
        Self::on_device(client, move |shared| {
            // The whole wrapper moves, not only the reference in it.
            let graph = graph;
            shared.take_error()?;
            let Some(graph) = &graph.0.0 else { return Ok(()) };
            shared.wait_for_steps_before()?;
            graph.launch().map_err(shared.call("cuGraphLaunch"))?;
            shared.note_step()
        })
    }

    fn timed(client: &ComputeClient<Self>, issue: &mut dyn FnMut()) -> Result<Duration, Error> {
        let mark = || {
            Self::on_device(client, |shared| {
                let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
                shared.stream()?.record_event(flags).map_err(shared.call("cuEventRecord"))
            })
        };
        let start = mark()?;
        issue();
        let end = mark()?;
        let ms = Self::on_device(client, |shared| start.elapsed_ms(&end).map_err(shared.call("cuEventElapsedTime")))?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    fn activity(client: &ComputeClient<Self>) -> Activity {
        let shared = client.info();
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Activity {
            launches: read(&shared.launches),
            allocations: read(&shared.allocations),
            allocated: read(&shared.allocated),
            compiled: read(&shared.compiled),
        }
    }
}

/// A step that cannot be captured.
pub enum NoGraph {}

/// The software Vulkan adapter of this machine, asked for once: every question loads all Vulkan drivers.
fn software_adapter() -> Option<&'static wgpu::AdapterInfo> {
    static ADAPTER: OnceLock<Option<wgpu::AdapterInfo>> = OnceLock::new();
    let find = || {
        let descriptor = wgpu::InstanceDescriptor {
            backends: wgpu::Backends::VULKAN,
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        };
        let asked = wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::VULKAN);
        let adapters = cubecl::future::block_on(asked).into_iter().map(|adapter| adapter.get_info());
        adapters.into_iter().find(|info| info.device_type == wgpu::DeviceType::Cpu)
    };
    ADAPTER.get_or_init(find).as_ref()
}

impl Engine for WgpuRuntime {
    const WORD: &'static str = "lavapipe";
    const GRAPHS: bool = false;
    type Graph = NoGraph;

    fn available() -> Result<(), Error> {
        software_adapter().map(|_| ()).ok_or(Error::NoAdapter)
    }

    fn open() -> Result<ComputeClient<Self>, Error> {
        Self::available()?;
        panics::watch();
        Ok(<Self as cubecl::Runtime>::client(&WgpuDevice::Cpu))
    }

    fn describe(_: &ComputeClient<Self>) -> String {
        match software_adapter() {
            Some(info) => format!("{}, {} {}", info.name, info.driver, info.driver_info),
            None => Error::NoAdapter.to_string(),
        }
    }

    fn hardware(_: &ComputeClient<Self>) -> Result<Hardware, Error> {
        let info = software_adapter().ok_or(Error::NoAdapter)?;
        Ok(Hardware {
            name: info.name.clone(),
            target: Self::WORD.to_owned(),
            driver: format!("{} {}", info.driver, info.driver_info),
            nvrtc: "absent".to_owned(),
            cublaslt: "absent".to_owned(),
        })
    }

    fn binding_alignment(client: &ComputeClient<Self>) -> u64 {
        client.properties().memory.alignment.max(4)
    }

    fn settle(client: &ComputeClient<Self>) -> Result<(), Error> {
        let flushed = client.flush();
        panics::take(WgpuDevice::Cpu.to_id())?;
        flushed.map_err(|e| wgpu_error("flush", &e))
    }

    fn write(_: &ComputeClient<Self>, _: &gemm::Start<'_>, _: &[u8]) -> Result<Written, Error> {
        Ok(Written::Refused)
    }

    fn dependencies(_: &ComputeClient<Self>) -> Result<Dependencies, Error> {
        Err(no_graphs())
    }

    fn depend(_: &ComputeClient<Self>, _: Dependencies, _: bool) -> Result<(), Error> {
        Err(no_graphs())
    }

    fn begin_capture(_: &ComputeClient<Self>) -> Result<(), Error> {
        Err(no_graphs())
    }

    fn end_capture(_: &ComputeClient<Self>) -> Result<NoGraph, Error> {
        Err(no_graphs())
    }

    fn nodes(graph: &NoGraph) -> usize {
        match *graph {}
    }

    fn replay(_: &ComputeClient<Self>, graph: &NoGraph) -> Result<(), Error> {
        match *graph {}
    }

    /// Vulkan's own timers are not asked: on a software driver the host's clock says as much.
    fn timed(client: &ComputeClient<Self>, issue: &mut dyn FnMut()) -> Result<Duration, Error> {
        let wait = || cubecl::future::block_on(client.sync()).map_err(|e| wgpu_error("sync", &e));
        wait()?;
        let start = Instant::now();
        issue();
        wait()?;
        Ok(start.elapsed())
    }

    fn activity(client: &ComputeClient<Self>) -> Activity {
        let usage = client.memory_usage();
        Activity { allocated: usage.map_or(0, |usage| usage.bytes_reserved), ..Activity::default() }
    }
}

fn no_graphs() -> Error {
    Error::Call { call: "capture", reason: "this runtime records no graphs".to_owned(), last_kernel: "none".to_owned() }
}

/// An error of cubecl's Vulkan server, which does not say which kernel it belongs to.
pub(crate) fn wgpu_error(call: &'static str, error: &ServerError) -> Error {
    Error::Call { call, reason: error.to_string(), last_kernel: "unknown".to_owned() }
}
