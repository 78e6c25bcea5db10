//! [`Offline`]: compiles every kernel that is launched for a GPU that is not there, and runs none.
//!
//! A machine without a GPU can still tell whether every variant of every kernel gets through cubecl's CUDA compiler and
//! NVRTC for sm_90, tensor core instructions included. Memory is addresses that nobody reads: uploads are dropped and
//! downloads are zeros.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use cubecl::backtrace::BackTrace;
use cubecl::bytes::Bytes;
use cubecl::client::ComputeClient;
use cubecl::device::{Device as CubeDevice, DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
use cubecl::ir::TargetProperties;
use cubecl::prelude::*;
use cubecl::profile::ProfileDuration;
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, IoError, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::{Shape, Strides};
use cubecl_cpp::shared::CompilationOptions;
use cubecl_runtime::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
    MemoryUsage,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId, StorageUtilization};
use cubecl_runtime::timestamp_profiler::TimestampProfiler;

use super::compile::{self, Cache, Target};
use super::error::Error;
use super::gpu::{self, ALIGNMENT};
use super::server::{Address, short_name};
use super::source::{Compiler, source};
use super::{
    Activity, Cuda, Dependencies, Engine, Hardware, MAX_CUBES, NoGraph, Written, gemm, library, no_graphs, panics,
};

/// The generation that kernels are compiled for.
const GENERATION: (i32, i32) = (9, 0);

/// The runtime that compiles and runs nothing.
#[derive(Clone, Debug)]
pub struct Offline;

/// The one device of [`Offline`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct OfflineDevice;

/// The kind of [`OfflineDevice`] among cubecl's devices.
const OFFLINE_TYPE: u16 = 771;

impl CubeDevice for OfflineDevice {
    fn from_id(_: DeviceId) -> Self {
        Self
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: OFFLINE_TYPE, index_id: 0 }
    }
}

/// One variant of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The kernel's short name.
    pub kernel: String,
    /// Bytes of machine code, or what the compiler said.
    pub bytes: Result<usize, Error>,
}

/// What the server's thread and its callers share: compilers at work, one on each core, and what they have given, in the
/// order of the launches.
#[derive(Debug, Default)]
pub struct Compiled(Mutex<Jobs>);

#[derive(Debug, Default)]
struct Jobs {
    running: VecDeque<JoinHandle<Variant>>,
    done: Vec<Variant>,
}

impl Jobs {
    /// Waits for the job that began first.
    fn wait(&mut self) {
        if let Some(job) = self.running.pop_front() {
            let died = || Error::Panic { message: "a compiler's thread panicked".to_owned() };
            let variant = job.join().unwrap_or_else(|_| Variant { kernel: "unknown".to_owned(), bytes: Err(died()) });
            self.done.push(variant);
        }
    }
}

impl Compiled {
    /// Runs a compiler in a thread of its own as soon as a core is free.
    fn start(&self, job: impl FnOnce() -> Variant + Send + 'static) {
        let mut jobs = self.lock();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if jobs.running.len() >= cores {
            jobs.wait();
        }
        jobs.running.push_back(std::thread::spawn(job));
    }

    fn take(&self) -> Vec<Variant> {
        let mut jobs = self.lock();
        while !jobs.running.is_empty() {
            jobs.wait();
        }
        std::mem::take(&mut jobs.done)
    }

    fn lock(&self) -> MutexGuard<'_, Jobs> {
        // A panic while the lock was held leaves lists behind, which are still lists.
        self.0.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

/// Addresses without memory behind them.
#[derive(Default)]
pub struct Addresses {
    next: u64,
    given: HashMap<StorageId, u64>,
}

impl ComputeStorage for Addresses {
    type Resource = Address;

    fn alignment(&self) -> usize {
        ALIGNMENT as usize
    }

    fn get(&mut self, handle: &StorageHandle) -> Address {
        Address { at: self.given[&handle.id] + handle.offset(), size: handle.size() }
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let id = StorageId::new();
        self.given.insert(id, self.next);
        self.next += size.next_multiple_of(ALIGNMENT);
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        self.given.remove(&id);
    }

    fn flush(&mut self) {}
}

/// The server.
pub struct OfflineServer {
    compiled: Arc<Compiled>,
    memory: MemoryManagement<Addresses>,
    seen: HashSet<KernelId>,
    options: CompilationOptions,
    target: Result<Target, Error>,
    cache: Cache,
    utilities: Arc<ServerUtilities<OfflineServer>>,
    profiler: TimestampProfiler,
}

impl fmt::Debug for OfflineServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfflineServer")
    }
}

impl DeviceService for OfflineServer {
    fn init(_: DeviceId) -> Self {
        let (properties, options) = gpu::properties(None);
        let logger = Arc::new(ServerLogger::default());
        let memory = MemoryManagement::from_configuration(
            Addresses::default(),
            &properties.memory,
            MemoryConfiguration::default(),
            logger.clone(),
            MemoryManagementOptions::new("offline").mode(MemoryAllocationMode::Persistent),
        );
        let compiled = Arc::new(Compiled::default());
        let layout = ContiguousMemoryLayoutPolicy::new(ALIGNMENT as usize);
        let utilities = Arc::new(ServerUtilities::new(properties, logger, compiled.clone(), layout));
        Self {
            compiled,
            memory,
            seen: HashSet::new(),
            options,
            target: target(),
            cache: Cache::of_user(),
            utilities,
            profiler: TimestampProfiler::default(),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

fn target() -> Result<Target, Error> {
    let (major, minor) = library::find_nvrtc()?;
    Target::new(GENERATION, format!("no driver, nvrtc {major}.{minor} dormouse {}", env!("CARGO_PKG_VERSION")))
}

impl OfflineServer {
    fn address(&mut self, binding: Binding) -> Result<Address, ServerError> {
        self.memory
            .get_resource(binding.memory, binding.offset_start, binding.offset_end)
            .map_err(|e| ServerError::Generic { reason: e.to_string(), backtrace: BackTrace::capture() })
    }

    /// The CUDA C++ of a kernel, written down twice: a text that comes out differently would be compiled anew in every
    /// process.
    fn source(&self, name: &str, kernel: &dyn CubeTask<Compiler>, mode: ExecutionMode) -> Result<String, Error> {
        let write = || source(name, kernel, &self.options, mode).map(|source| source.text);
        let (text, again) = (write()?, write()?);
        if let Some((one, other)) = text.lines().zip(again.lines()).find(|(one, other)| one != other) {
            let log = format!("written twice it is `{one}` and `{other}`; see runtime/source.rs");
            return Err(Error::Compile { kernel: name.to_owned(), log: log.into() });
        }
        Ok(text)
    }
}

impl ComputeServer for OfflineServer {
    type Kernel = Box<dyn CubeTask<Compiler>>;
    type Info = Arc<Compiled>;
    type MemoryLayoutPolicy = ContiguousMemoryLayoutPolicy;
    type Storage = Addresses;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        // There is an address for every size, so neither call has a reason to fail; a panic is noted by `panics`.
        let reserved = self.memory.reserve(size).expect("addresses do not run out");
        self.memory.bind(reserved, memory, 0).expect("a new handle is unbound");
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros = |d: CopyDescriptor| Bytes::from_bytes_vec(vec![0; d.shape.iter().product::<usize>() * d.elem_size]);
        let result = Ok(descriptors.into_iter().map(zeros).collect());
        Box::pin(async move { result })
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async move { Ok(()) })
    }

    fn get_resource(&mut self, binding: Binding, _: StreamId) -> Result<ManagedResource<Address>, ServerError> {
        let memory = binding.memory.clone();
        let address = self.address(binding)?;
        Ok(ManagedResource::new(memory, address))
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        _: CubeCount,
        _: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let mut id = kernel.id();
        id.mode(mode);
        if self.seen.insert(id) {
            let name = short_name(kernel.name());
            let source = self.source(name, kernel.as_ref(), mode);
            let (target, cache) = (self.target.clone(), self.cache.clone());
            self.compiled.start(move || {
                let code = source.and_then(|source| compile::code(name, &source, &target?, &cache));
                Variant { kernel: name.to_owned(), bytes: code.map(|(code, _)| code.len()) }
            });
        }
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Ok(self.memory.memory_usage())
    }

    fn memory_cleanup(&mut self, _: StreamId) {
        self.memory.cleanup(true);
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(self.profiler.start())
    }

    fn end_profile(&mut self, _: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        self.profiler.stop(token)
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, _: StreamId) {
        self.memory.mode(mode);
    }
}

impl ServerCommunication for OfflineServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl cubecl::Runtime for Offline {
    type Compiler = Compiler;
    type Server = OfflineServer;
    type Device = OfflineDevice;

    fn client(device: &OfflineDevice) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        Self::WORD
    }

    fn require_array_lengths() -> bool {
        Cuda::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        MAX_CUBES
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        Cuda::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        Cuda::target_properties()
    }

    fn enumerate_devices(_: u16, _: &Arc<Compiled>) -> Vec<DeviceId> {
        vec![OfflineDevice.to_id()]
    }
}

/// Is no CUDA C++: its comment ends early.
#[cube(launch_unchecked)]
fn refused_kernel(out: &mut Array<u32>) {
    comment!("\n*/ this is no CUDA C++ /*");
    out[0] = 0u32;
}

impl Offline {
    /// Launches a kernel that no compiler takes, to show that the check notices one.
    pub fn plant(client: &ComputeClient<Self>) {
        let memory = client.empty(4);
        // SAFETY: nothing runs.
        unsafe {
            let out = ArrayArg::from_raw_parts(memory, 1);
            refused_kernel::launch_unchecked::<Self>(client, CubeCount::new_1d(1), CubeDim::new_1d(1), out);
        }
    }

    /// The variants that were compiled since the last call.
    pub fn take(client: &ComputeClient<Self>) -> Result<Vec<Variant>, Error> {
        Self::settle(client)?;
        let compiled = client.info().clone();
        client.exclusive(move || compiled.take()).map_err(|e| Error::Panic { message: e.to_string() })
    }
}

impl Engine for Offline {
    const WORD: &'static str = "ptx";
    const GRAPHS: bool = false;
    type Graph = NoGraph;

    fn available() -> Result<(), Error> {
        target().map(|_| ())
    }

    fn open() -> Result<ComputeClient<Self>, Error> {
        Self::available()?;
        panics::watch();
        Ok(<Self as cubecl::Runtime>::client(&OfflineDevice))
    }

    fn describe(_: &ComputeClient<Self>) -> String {
        let (major, minor) = GENERATION;
        match library::find_nvrtc() {
            Ok(nvrtc) => format!("sm_{major}{minor}, NVRTC {}.{}, no GPU", nvrtc.0, nvrtc.1),
            Err(error) => error.to_string(),
        }
    }

    fn hardware(_: &ComputeClient<Self>) -> Result<Hardware, Error> {
        let nvrtc = library::find_nvrtc()?;
        let absent = || "absent".to_owned();
        Ok(Hardware {
            name: absent(),
            target: Self::WORD.to_owned(),
            driver: absent(),
            nvrtc: format!("{}.{}", nvrtc.0, nvrtc.1),
            cublaslt: absent(),
        })
    }

    fn binding_alignment(_: &ComputeClient<Self>) -> u64 {
        4
    }

    fn settle(client: &ComputeClient<Self>) -> Result<(), Error> {
        // An empty task behind all launches: when it has run, so have they.
        let waited = client.exclusive(|| ());
        panics::take(OfflineDevice.to_id())?;
        waited.map_err(|e| Error::Panic { message: e.to_string() })
    }

    fn write(_: &ComputeClient<Self>, _: &gemm::Start<'_>, _: &[u8]) -> Result<Written, Error> {
        Ok(Written::Queued)
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

    /// Nothing runs, so nothing takes time.
    fn timed(_: &ComputeClient<Self>, issue: &mut dyn FnMut()) -> Result<Duration, Error> {
        issue();
        Ok(Duration::ZERO)
    }

    fn activity(_: &ComputeClient<Self>) -> Activity {
        Activity::default()
    }
}
