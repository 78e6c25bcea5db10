//! The cubecl server behind [`Cuda`](super::Cuda): one stream, NVRTC, memory at fixed addresses, one launch site.
//!
//! cubecl's traits for servers are undocumented, so every use of them is in this folder. The server lives on a thread
//! of its own, which cubecl starts and which swallows panics; what goes wrong there is therefore noted in [`Shared`]
//! and handed out by the next call that can fail.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cubecl::backtrace::BackTrace;
use cubecl::bytes::Bytes;
use cubecl::device::{DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
use cubecl::prelude::{CubeCount, CubeDim, ExecutionMode};
use cubecl::profile::ProfileDuration;
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, IoError, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl_cpp::shared::CompilationOptions;
use cubecl_runtime::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
    MemoryPoolOptions, MemoryUsage, PoolType,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId, StorageUtilization};
use cubecl_runtime::timestamp_profiler::TimestampProfiler;
use cudarc::driver::{DriverError, result as cu, sys};

use super::compile::{self, Cache};
use super::error::Error;
use super::gpu::{self, ALIGNMENT, Gpu};
use super::library::driver_error;
use super::shared::Shared;
use super::source::{Compiler, Source, source};

/// An address on the device.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    /// The address.
    pub at: u64,
    /// Bytes that belong to it.
    pub size: u64,
}

/// Device memory as cubecl's memory management asks for it.
pub struct Storage {
    buffers: HashMap<StorageId, (u64, u64)>,
    shared: Arc<Shared>,
}

impl ComputeStorage for Storage {
    type Resource = Address;

    fn alignment(&self) -> usize {
        ALIGNMENT as usize
    }

    fn get(&mut self, handle: &StorageHandle) -> Address {
        Address { at: self.buffers[&handle.id].0 + handle.offset(), size: handle.size() }
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        // SAFETY: a plain allocation; the address is kept in `buffers` until it is freed.
        let Ok(at) = (unsafe { cu::malloc_sync(size as usize) }) else {
            return Err(IoError::BufferTooBig { size, backtrace: BackTrace::capture() });
        };
        self.shared.hold(at, size);
        let id = StorageId::new();
        self.buffers.insert(id, (at, size));
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        if let Some((at, size)) = self.buffers.remove(&id) {
            self.shared.release(at, size);
            // SAFETY: `at` came from `malloc_sync` and leaves the table here. cuMemFree waits for kernels that use it.
            if let Err(error) = unsafe { cu::free_sync(at) } {
                self.shared.note(self.shared.call("cuMemFree")(error));
            }
        }
    }

    fn flush(&mut self) {}
}

/// A kernel that is loaded on the device.
struct Function {
    handle: sys::CUfunction,
    shared_memory: u32,
    dim: CubeDim,
}

/// The server.
pub struct Server {
    shared: Arc<Shared>,
    memory: MemoryManagement<Storage>,
    functions: HashMap<KernelId, Function>,
    /// Device copies of metadata too long for a kernel's parameters; shapes are static, so each is uploaded once.
    metadata: HashMap<Vec<u64>, u64>,
    options: CompilationOptions,
    cache: Cache,
    utilities: Arc<ServerUtilities<Server>>,
    profiler: TimestampProfiler,
}

// SAFETY: CUfunction handles may be used from any thread of the process that has the context current.
unsafe impl Send for Server {}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

impl DeviceService for Server {
    fn init(id: DeviceId) -> Self {
        let shared = Arc::new(Shared::new(Gpu::open(usize::from(id.index_id))));
        let (properties, options) = gpu::properties(shared.gpu.as_ref().ok());
        let logger = Arc::new(ServerLogger::default());
        let memory = MemoryManagement::from_configuration(
            Storage { buffers: HashMap::new(), shared: shared.clone() },
            &properties.memory,
            // A pool that is never used: cubecl takes the place of unbound memory for one in the first pool.
            MemoryConfiguration::Custom {
                pool_options: vec![MemoryPoolOptions {
                    pool_type: PoolType::ExclusivePages { max_alloc_size: ALIGNMENT },
                    dealloc_period: None,
                }],
            },
            logger.clone(),
            // Buffers of exactly the size asked for, kept for the next request of that size.
            MemoryManagementOptions::new("dormouse").mode(MemoryAllocationMode::Persistent),
        );
        let layout = ContiguousMemoryLayoutPolicy::new(ALIGNMENT as usize);
        let utilities = Arc::new(ServerUtilities::new(properties, logger, shared.clone(), layout));
        Self {
            shared,
            memory,
            functions: HashMap::new(),
            metadata: HashMap::new(),
            options,
            cache: Cache::of_user(),
            utilities,
            profiler: TimestampProfiler::default(),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

/// A kernel's name as a person would say it: the last part of the path before type arguments.
pub fn short_name(name: &'static str) -> &'static str {
    let path = name.split('<').next().unwrap_or(name);
    path.rsplit("::").next().unwrap_or(path)
}

/// cubecl's form of an error that is noted in [`Shared`] as well.
fn server_error(error: &Error) -> ServerError {
    ServerError::Generic { reason: error.to_string(), backtrace: BackTrace::capture() }
}

impl Server {
    fn address(&mut self, binding: Binding) -> Result<Address, Error> {
        self.memory
            .get_resource(binding.memory, binding.offset_start, binding.offset_end)
            .map_err(|e| Error::Launch { kernel: "memory".to_owned(), reason: e.to_string() })
    }

    /// Compiles and loads a kernel that has not run before.
    fn load(
        &mut self,
        name: &'static str,
        kernel: &dyn CubeTask<Compiler>,
        mode: ExecutionMode,
    ) -> Result<Function, Error> {
        let fault = |reason: String| Error::Launch { kernel: name.to_owned(), reason };
        let Source { text, entry, shared_memory, dim } = source(name, kernel, &self.options, mode)?;
        let gpu = self.shared.gpu.as_ref().map_err(Error::clone)?;
        let shared_memory = shared_memory as u32;
        let (code, ran) = compile::code(name, &text, &gpu.target, &self.cache)?;
        self.shared.compiled.fetch_add(u64::from(ran), Ordering::Relaxed);
        let entry = CString::new(entry).map_err(|e| fault(e.to_string()))?;
        let driver = |what: &'static str| move |e: DriverError| fault(format!("{what}: {}", driver_error(e)));
        // SAFETY: `code` is a whole image for this GPU; the module is never unloaded, so the function stays valid.
        let handle = unsafe {
            let module = cu::module::load_data(code.as_ptr().cast::<c_void>()).map_err(driver("cuModuleLoadData"))?;
            cu::module::get_function(module, entry).map_err(driver("cuModuleGetFunction"))?
        };
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: sets a limit of a function that was just loaded.
        unsafe { cu::function::set_function_attribute(handle, attribute, shared_memory as i32) }
            .map_err(driver("cuFuncSetAttribute"))?;
        Ok(Function { handle, shared_memory, dim })
    }

    /// The one place where a kernel is launched.
    fn launch_or_fail(
        &mut self,
        kernel: Box<dyn CubeTask<Compiler>>,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        stream_id: StreamId,
    ) -> Result<(), Error> {
        let name = short_name(kernel.name());
        let fault = |reason: &str| Error::Launch { kernel: name.to_owned(), reason: reason.to_owned() };
        self.shared.check_capture(name, stream_id)?;
        let stream = self.shared.stream()?.clone();
        let CubeCount::Static(x, y, z) = count else { return Err(fault("its cube count is on the device")) };
        if !arguments.tensor_maps.is_empty() {
            return Err(fault("it wants tensor maps, which this runtime does not make"));
        }
        if x == 0 || y == 0 || z == 0 {
            return Err(fault("its cube count is zero; callers return early"));
        }
        let mut id = kernel.id();
        id.mode(mode);
        if !self.functions.contains_key(&id) {
            let function = self.load(name, kernel.as_ref(), mode)?;
            self.functions.insert(id.clone(), function);
        }
        let mut addresses = Vec::with_capacity(arguments.buffers.len() + 1);
        for binding in arguments.buffers {
            addresses.push(self.address(binding).map_err(|e| fault(&e.to_string()))?.at);
        }
        let info = &arguments.info;
        if info.dynamic_metadata_offset < info.data.len() {
            addresses.push(self.upload_metadata(&info.data[info.dynamic_metadata_offset..]).map_err(|e| match e {
                Some(error) => fault(&driver_error(error)),
                None => fault("it has new metadata while a step is being captured"),
            })?);
        }
        let function = &self.functions[&id];
        let mut parameters: Vec<*mut c_void> =
            addresses.iter().map(|address| std::ptr::from_ref(address).cast_mut().cast()).collect();
        // Scalars travel in one constant struct, which cuLaunchKernel copies.
        parameters.push(info.data.as_ptr().cast_mut().cast());
        let dim = (function.dim.x, function.dim.y, function.dim.z);
        // SAFETY: the parameters are those that the compiled kernel declares: addresses, then the struct of scalars.
        unsafe {
            cu::launch_kernel(
                function.handle,
                (x, y, z),
                dim,
                function.shared_memory,
                stream.cu_stream(),
                &mut parameters,
            )
        }
        .map_err(|e| fault(&driver_error(e)))?;
        self.shared.note_kernel(name);
        self.shared.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The device copy of metadata; an error without a driver error means that a capture forbids the upload.
    fn upload_metadata(&mut self, data: &[u64]) -> Result<u64, Option<DriverError>> {
        if let Some(&at) = self.metadata.get(data) {
            return Ok(at);
        }
        if self.shared.is_capturing() {
            return Err(None);
        }
        // SAFETY: allocates as many bytes as are copied; kept for the life of the server.
        let at = unsafe {
            let at = cu::malloc_sync(size_of_val(data))?;
            cu::memcpy_htod_sync(at, data)?;
            at
        };
        self.shared.hold(at, size_of_val(data) as u64);
        self.metadata.insert(data.to_vec(), at);
        Ok(at)
    }

    /// Waits for the stream and hands out what went wrong since the last time.
    fn wait(&mut self) -> Result<(), Error> {
        let waited = self.shared.stream()?.synchronize().map_err(self.shared.call("cuStreamSynchronize"));
        // What was noted before is the cause of what the wait reports.
        self.shared.take_error()?;
        waited
    }

    fn read_one(&mut self, descriptor: CopyDescriptor) -> Result<Bytes, Error> {
        let bytes = descriptor.shape.iter().product::<usize>() * descriptor.elem_size;
        let address = self.address(descriptor.handle)?;
        let mut host = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: the buffer has at least as many bytes as the descriptor says; the stream is idle.
            unsafe { cu::memcpy_dtoh_sync(&mut host, address.at) }.map_err(self.shared.call("cuMemcpyDtoH"))?;
        }
        Ok(Bytes::from_bytes_vec(host))
    }

    fn write_one(&mut self, descriptor: CopyDescriptor, bytes: &Bytes) -> Result<(), Error> {
        let address = self.address(descriptor.handle)?;
        let stream = self.shared.stream()?.clone();
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the buffer was allocated for these bytes, which live until the stream has been waited for.
        unsafe { cu::memcpy_htod_async(address.at, &bytes[..], stream.cu_stream()) }
            .map_err(self.shared.call("cuMemcpyHtoDAsync"))?;
        stream.synchronize().map_err(self.shared.call("cuStreamSynchronize"))
    }

    /// Reserves memory; on a refusal, frees what nobody uses and tries once more.
    fn reserve(&mut self, size: u64) -> Result<ManagedMemoryHandle, Error> {
        self.shared.stream()?;
        if let Ok(handle) = self.memory.reserve(size) {
            return Ok(handle);
        }
        self.memory.cleanup(true);
        self.memory.reserve(size).map_err(|_| self.shared.out_of_memory(size))
    }

    /// Runs `work` on the device thread: an error or a panic is noted.
    fn guarded(&mut self, work: impl FnOnce(&mut Self) -> Result<(), Error>) {
        let shared = self.shared.clone();
        match catch_unwind(AssertUnwindSafe(|| work(self))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => shared.note(error),
            Err(panic) => shared.note(Error::Panic { message: super::panics::text(panic.as_ref()) }),
        }
    }
}

impl ComputeServer for Server {
    type Kernel = Box<dyn CubeTask<Compiler>>;
    type Info = Arc<Shared>;
    type MemoryLayoutPolicy = ContiguousMemoryLayoutPolicy;
    type Storage = Storage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        self.guarded(|server| {
            let reserved = server.reserve(size)?;
            server
                .memory
                .bind(reserved, memory, 0)
                .map_err(|e| Error::Launch { kernel: "memory".to_owned(), reason: e.to_string() })
        });
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let result = self.wait().and_then(|()| descriptors.into_iter().map(|d| self.read_one(d)).collect());
        let result = result.map_err(|error| {
            let for_cubecl = server_error(&error);
            self.shared.note(error);
            for_cubecl
        });
        Box::pin(async move { result })
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        self.guarded(|server| descriptors.into_iter().try_for_each(|(d, bytes)| server.write_one(d, &bytes)));
    }

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        let result = self.wait().map_err(|error| {
            let for_cubecl = server_error(&error);
            self.shared.note(error);
            for_cubecl
        });
        Box::pin(async move { result })
    }

    fn get_resource(&mut self, binding: Binding, _: StreamId) -> Result<ManagedResource<Address>, ServerError> {
        let memory = binding.memory.clone();
        let address = self.address(binding).map_err(|e| server_error(&e))?;
        Ok(ManagedResource::new(memory, address))
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        stream_id: StreamId,
    ) {
        self.guarded(|server| server.launch_or_fail(kernel, count, arguments, mode, stream_id));
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
        self.wait().map_err(|e| server_error(&e))?;
        Ok(self.profiler.start())
    }

    fn end_profile(&mut self, _: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        if let Err(error) = self.wait() {
            self.profiler.error(ProfileError::Server(Box::new(server_error(&error))));
        }
        self.profiler.stop(token)
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, _: StreamId) {
        self.memory.mode(mode);
    }
}

impl ServerCommunication for Server {
    const SERVER_COMM_ENABLED: bool = false;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_named_by_their_last_word() {
        assert_eq!(short_name("dormouse_cuda::rms_norm::forward::Forward<f32, R>"), "Forward");
        assert_eq!(short_name("plain"), "plain");
    }

    #[test]
    fn without_a_gpu_the_server_answers_with_the_reason() {
        let mut server = <Server as DeviceService>::init(DeviceId { type_id: 1, index_id: u16::MAX });
        // No machine has that many GPUs, so this holds on one with a driver as well.
        let why = server.shared.gpu.as_ref().err().cloned().expect("a GPU with the number 65535");
        assert_eq!(server.reserve(512).err(), Some(why.clone()));
        server.initialize_memory(ManagedMemoryHandle::new(), 512, StreamId::current());
        assert_eq!(server.shared.take_error(), Err(why.clone()));
        assert!(cubecl::future::block_on(server.sync(StreamId::current())).is_err());
        assert_eq!(server.shared.take_error(), Err(why));
    }
}
