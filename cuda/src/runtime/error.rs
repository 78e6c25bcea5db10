//! [`Error`]: everything that a device can refuse, each with what was found, what was needed and what to do.

use std::sync::Arc;

/// A fault of a device, its driver or its compiler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no NVIDIA driver on this machine.
    #[error(
        "no CUDA driver: libcuda.so is not on the library path; install the NVIDIA driver 580 or newer, or use a \
         backend that needs none"
    )]
    NoDriver,
    /// The driver is older than the CUDA that the kernels are built for.
    #[error(
        "the NVIDIA driver {found} is too old, needed {needed}; update the driver (https://www.nvidia.com/drivers), or \
         use a backend that needs none"
    )]
    DriverTooOld {
        /// What is installed.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// The driver answers but sees no GPU.
    #[error("the CUDA driver sees no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoGpu,
    /// The run-time compiler is missing.
    #[error(
        "no NVRTC: libnvrtc.so is not on the library path; install the CUDA 13 toolkit (or the wheel \
         nvidia-cuda-nvrtc) and put its lib64 on LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// The CUDA headers that generated kernels include are missing.
    #[error("no CUDA headers: cuda_fp16.h is not in {looked}; set CUDA_PATH to the root of the CUDA 13 toolkit")]
    NoHeaders {
        /// The folders that were searched.
        looked: String,
    },
    /// The library for matrix products is missing.
    #[error(
        "no cuBLASLt: libcublasLt.so is not on the library path; install the CUDA 13 toolkit (or the wheel \
         nvidia-cublas) and put its lib64 on LD_LIBRARY_PATH, or take arm plain"
    )]
    NoGemmLibrary,
    /// The committed table of product algorithms is broken.
    #[error("gemm_table.tsv, line {line}: {reason}; take the line out, or measure it again")]
    GemmTable {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// No Vulkan adapter answers.
    #[error(
        "no software Vulkan adapter answers; install Mesa's: `apt-get install mesa-vulkan-drivers libvulkan1`, or \
         set VK_ICD_FILENAMES to its lvp_icd json"
    )]
    NoAdapter,
    /// The device has no memory of that size left.
    #[error(
        "out of device memory: need {need} B, free {free} B of {total} B; this process holds {}; lower the batch or \
         free the device (`nvidia-smi` lists who uses it)",
        buffers(held)
    )]
    OutOfMemory {
        /// Bytes asked for.
        need: u64,
        /// Bytes free.
        free: u64,
        /// Bytes the device has.
        total: u64,
        /// Bytes of every buffer that this process holds.
        held: Vec<u64>,
    },
    /// The GPU took no further work: after a fault of a kernel, or of the hardware, a process cannot use it again.
    #[error(
        "the GPU is lost to this process: {call} says {reason}; the last kernel launched was `{last_kernel}`; start \
         again from the last checkpoint, and if it happens again, run `cargo xtask gate --sanitize memcheck`"
    )]
    DeviceLost {
        /// What was called.
        call: &'static str,
        /// The driver's words.
        reason: String,
        /// The last kernel that was launched before, the first suspect.
        last_kernel: String,
    },
    /// A tensor has more elements than a kernel can index.
    #[error("{op}: {elements} elements, at most {max} fit a 32-bit index; split the batch")]
    TooManyElements {
        /// The operation.
        op: &'static str,
        /// Elements asked for.
        elements: u64,
        /// The largest number allowed.
        max: u64,
    },
    /// The compiler refused a kernel.
    #[error("kernel `{kernel}` does not compile:\n{log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// The compiler's log.
        log: Arc<str>,
    },
    /// A kernel could not be launched.
    #[error("kernel `{kernel}` was not launched: {reason}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// Why.
        reason: String,
    },
    /// A call of the driver or of a runtime failed. After a kernel fault it is the next call that reports it.
    #[error("{call} failed: {reason}; the last kernel launched was `{last_kernel}`")]
    Call {
        /// What was called.
        call: &'static str,
        /// The driver's words.
        reason: String,
        /// The last kernel that was launched before, the first suspect of an asynchronous fault.
        last_kernel: String,
    },
    /// Code on the device's thread panicked; its results are not to be trusted.
    #[error("the device thread panicked: {message}")]
    Panic {
        /// The panic's message and place.
        message: String,
    },
    /// Two threads used a device while one of them was recording a step.
    #[error("kernel `{kernel}` came from another thread while a step was being captured; use one device per thread")]
    ForeignLaunch {
        /// The kernel.
        kernel: String,
    },
    /// A step asked for other memory than at its first run, so its closure is not the same every time.
    #[error(
        "step `{step}`: allocation {index} is {got}, expected {expected} as at its first run; a step issues the same \
         operations every time, so shapes and choices belong in its key"
    )]
    StepChanged {
        /// The step's purpose.
        step: &'static str,
        /// Which allocation.
        index: usize,
        /// What the first run asked for.
        expected: String,
        /// What this run asked for.
        got: String,
    },
}

/// How much buffers hold together, and the largest of them.
fn buffers(held: &[u64]) -> String {
    let mut sizes = held.to_vec();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let largest: Vec<String> = sizes.iter().take(3).map(|size| format!("{size} B")).collect();
    match &largest[..] {
        [] => "nothing".to_owned(),
        _ => format!("{} B in {} buffers, the largest {}", sizes.iter().sum::<u64>(), sizes.len(), largest.join(", ")),
    }
}

impl From<Error> for dormouse_reference::Error {
    fn from(error: Error) -> Self {
        dormouse_reference::Error::Device(Arc::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn out_of_memory_says_who_has_it() {
        let error = Error::OutOfMemory { need: 900, free: 100, total: 1000, held: vec![40, 500, 60, 300] };
        assert_eq!(
            error.to_string(),
            "out of device memory: need 900 B, free 100 B of 1000 B; this process holds 900 B in 4 buffers, the largest \
             500 B, 300 B, 60 B; lower the batch or free the device (`nvidia-smi` lists who uses it)"
        );
        let error = Error::OutOfMemory { need: 900, free: 100, total: 1000, held: Vec::new() };
        assert!(error.to_string().contains("this process holds nothing; lower"), "{error}");
    }
}
