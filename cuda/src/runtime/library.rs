//! Finds the driver and the run-time compiler, which are loaded when the program runs and never linked.

use cudarc::{cublaslt, driver, nvrtc};

use super::error::Error;

/// The CUDA version that the bindings are generated for, as the driver counts: 13.0.
const NEEDED_CUDA: i32 = 13000;

/// The first driver release that has it.
const NEEDED_RELEASE: &str = "580";

/// Versions of what is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The newest CUDA that the driver supports, as 1000 major + 10 minor.
    pub driver_cuda: i32,
    /// The driver's release, such as `580.65.06`, where the system says it.
    pub driver_release: Option<String>,
    /// NVRTC's version.
    pub nvrtc: (i32, i32),
}

/// Whether the driver, a GPU and the compiler are there and new enough.
pub fn find() -> Result<Versions, Error> {
    // SAFETY: loads a shared library by name and drops it again.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    let mut driver_cuda = 0;
    // SAFETY: writes one int; needs no context.
    let result = unsafe { driver::sys::cuDriverGetVersion(&mut driver_cuda) };
    result.result().map_err(|e| Error::Call {
        call: "cuDriverGetVersion",
        reason: driver_error(e),
        last_kernel: "none".to_owned(),
    })?;
    let driver_release = release();
    check_driver(driver_cuda, driver_release.as_deref())?;
    // A driver without a GPU answers CUDA_ERROR_NO_DEVICE here.
    driver::result::init().map_err(|_| Error::NoGpu)?;
    if driver::result::device::get_count().unwrap_or(0) == 0 {
        return Err(Error::NoGpu);
    }
    Ok(Versions { driver_cuda, driver_release, nvrtc: find_nvrtc()? })
}

/// The version of NVRTC, which needs no GPU.
pub fn find_nvrtc() -> Result<(i32, i32), Error> {
    // SAFETY: loads a shared library by name and drops it again.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(Error::NoCompiler);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two ints.
    match unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) } {
        nvrtc::sys::nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        other => {
            Err(Error::Call { call: "nvrtcVersion", reason: format!("{other:?}"), last_kernel: "none".to_owned() })
        }
    }
}

/// The version of cuBLASLt, where it is installed.
pub fn cublaslt() -> Option<String> {
    // SAFETY: loads a shared library by name and drops it again; the version needs no context.
    let version = unsafe { cublaslt::sys::is_culib_present().then(|| cublaslt::sys::cublasLtGetVersion()) }?;
    Some(format!("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100))
}

/// Refuses a driver that does not support CUDA 13.0.
pub fn check_driver(cuda: i32, release: Option<&str>) -> Result<(), Error> {
    if cuda >= NEEDED_CUDA {
        return Ok(());
    }
    let version = |cuda: i32| format!("CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
    let found = match release {
        Some(release) => format!("{release} ({})", version(cuda)),
        None => format!("for {}", version(cuda)),
    };
    Err(Error::DriverTooOld { found, needed: format!("{NEEDED_RELEASE} or newer ({})", version(NEEDED_CUDA)) })
}

/// The driver's release as the kernel module prints it.
fn release() -> Option<String> {
    parse_release(&std::fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// The first word that looks like `580.65.06`.
fn parse_release(text: &str) -> Option<String> {
    let is_release = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        parts.len() >= 2 && parts.iter().all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
    };
    text.split_whitespace().find(is_release).map(str::to_owned)
}

/// The driver's name and sentence for an error.
pub fn driver_error(error: driver::DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("driver error {:?}", error.0),
    }
}

/// Whether every later call of this process fails as well: the driver gives a context up after these.
pub fn ends_the_context(error: driver::DriverError) -> bool {
    use driver::sys::CUresult as Code;
    matches!(
        error.0,
        Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_LAUNCH_FAILED
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_refused_with_found_needed_and_fix() {
        assert_eq!(check_driver(13000, None), Ok(()));
        assert_eq!(check_driver(13020, Some("590.10")), Ok(()));
        assert_eq!(
            check_driver(12080, Some("570.86.15")).unwrap_err().to_string(),
            "the NVIDIA driver 570.86.15 (CUDA 12.8) is too old, needed 580 or newer (CUDA 13.0); update the driver \
             (https://www.nvidia.com/drivers), or use a backend that needs none"
        );
        let error = check_driver(11040, None).unwrap_err().to_string();
        assert!(error.starts_with("the NVIDIA driver for CUDA 11.4 is too old, needed 580 or newer"), "{error}");
    }

    #[test]
    fn a_fault_of_a_kernel_loses_the_device_and_a_refused_call_does_not() {
        use driver::DriverError;
        use driver::sys::CUresult as Code;
        assert!(ends_the_context(DriverError(Code::CUDA_ERROR_ILLEGAL_ADDRESS)));
        assert!(ends_the_context(DriverError(Code::CUDA_ERROR_LAUNCH_FAILED)));
        assert!(!ends_the_context(DriverError(Code::CUDA_ERROR_OUT_OF_MEMORY)));
        assert!(!ends_the_context(DriverError(Code::CUDA_ERROR_INVALID_VALUE)));
    }

    #[test]
    fn the_release_is_found_in_the_modules_line() {
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (user@host)";
        assert_eq!(parse_release(line).as_deref(), Some("580.65.06"));
        assert_eq!(parse_release("GCC version: gcc"), None);
    }
}
