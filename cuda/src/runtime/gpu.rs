//! The GPU behind the runtime: its context and stream, and what cubecl wants to know about it.

use std::sync::Arc;

use cubecl::ir::features::{Plane, TypeUsage};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, VectorSize};
use cubecl::profile::TimingMethod;
use cubecl_cpp::cuda::{CudaDialect, arch::CudaArchitecture, mma::CudaWmmaCompiler};
use cubecl_cpp::shared::{CompilationOptions, CppSupportedFeatures, register_mma_features, register_wmma_features};
use cubecl_cpp::{DialectWmmaCompiler, register_supported_types};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream};

use super::compile::Target;
use super::error::Error;
use super::library::{self, Versions, driver_error};

/// Every buffer starts at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 512;

/// An opened GPU.
pub struct Gpu {
    /// The one stream that everything runs on.
    pub stream: Arc<CudaStream>,
    /// What kernels are compiled for.
    pub target: Target,
    /// Installed versions.
    pub versions: Versions,
    /// The product's name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    processors: u32,
    shared_memory: usize,
}

impl Gpu {
    /// Opens a GPU by its number and makes its context current on this thread.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        let versions = library::find()?;
        let call =
            |call: &'static str| move |e| Error::Call { call, reason: driver_error(e), last_kernel: "none".to_owned() };
        let context = CudaContext::new(ordinal).map_err(call("cuDevicePrimaryCtxRetain"))?;
        // Everything runs on one stream, in order, so no event has to say when a buffer is free.
        // SAFETY: holds for that reason.
        unsafe { context.disable_event_tracking() };
        let attribute = |which| context.attribute(which).map_err(call("cuDeviceGetAttribute"));
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let target = Target::new(
            capability,
            format!(
                "driver {} {} nvrtc {}.{} dormouse {}",
                versions.driver_cuda,
                versions.driver_release.as_deref().unwrap_or("unknown"),
                versions.nvrtc.0,
                versions.nvrtc.1,
                env!("CARGO_PKG_VERSION"),
            ),
        )?;
        Ok(Self {
            stream: context.new_stream().map_err(call("cuStreamCreate"))?,
            target,
            versions,
            name: context.name().map_err(call("cuDeviceGetName"))?,
            capability,
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        })
    }
}

/// What cubecl's front end and compiler may use on the GPU. Without one: those of an H100, for a client that answers
/// every call with the reason why there is none.
pub fn properties(gpu: Option<&Gpu>) -> (DeviceProperties, CompilationOptions) {
    let (major, minor) = gpu.map_or((9, 0), |gpu| gpu.capability);
    let version = (10 * major + minor) as u32;
    let memory = MemoryDeviceProperties { max_page_size: u64::MAX / 4, alignment: ALIGNMENT };
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: gpu.map_or(232_448, |gpu| gpu.shared_memory),
        max_cube_count: super::MAX_CUBES,
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(gpu.map_or(132, |gpu| gpu.processors)),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    register_supported_types(&mut properties);
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    for feature in [Plane::Sync, Plane::Ops, Plane::NonUniformControlFlow] {
        properties.features.plane.insert(feature);
    }
    properties.features.copy_async = version >= 80;
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    for kind in [FloatKind::F16, FloatKind::BF16] {
        properties.features.matmul.ldmatrix.insert(ElemType::Float(kind).into());
    }
    type Wmma = CudaWmmaCompiler;
    let arch = CudaArchitecture { version };
    register_wmma_features(
        <Wmma as DialectWmmaCompiler<CudaDialect<Wmma>>>::supported_wmma_combinations(&arch),
        &mut properties,
    );
    register_mma_features(
        <Wmma as DialectWmmaCompiler<CudaDialect<Wmma>>>::supported_mma_combinations(&arch),
        &mut properties,
    );
    let options = CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: version >= 90,
            fast_math: true,
            fast_tanh: version >= 75,
            elect_sync: version >= 90,
        },
    };
    (properties, options)
}
