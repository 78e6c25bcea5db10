//! CUDA C++ to machine code with NVRTC, through a cache on disk.
//!
//! Compiling takes tenths of a second a kernel, and a program has hundreds. The key is a BLAKE3 hash of everything
//! that decides the result: source, options, driver and compiler version. A cached file starts with the hash of its
//! own contents, so a damaged one is compiled again and never loaded.
//!
//! What is cached is what the GPU runs (a cubin). PTX would be compiled by the driver once more in every process.

use std::ffi::{CStr, CString};
use std::io::Write;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result as nvrtc, sys};

use super::error::Error;

/// What kernels are compiled for and with.
#[derive(Clone, Debug)]
pub struct Target {
    /// The options given to NVRTC, in order.
    pub options: Vec<String>,
    /// Driver and compiler versions.
    pub versions: String,
}

impl Target {
    /// For a compute capability such as (9, 0). Hopper kernels may use its own instructions (`sm_90a`).
    pub fn new(capability: (i32, i32), versions: String) -> Result<Self, Error> {
        let (major, minor) = capability;
        let own = if capability == (9, 0) { "a" } else { "" };
        let mut options = vec![format!("--gpu-architecture=sm_{major}{minor}{own}"), "-lineinfo".to_owned()];
        options.extend(include_folders()?.iter().map(|folder| format!("--include-path={}", folder.display())));
        Ok(Self { options, versions })
    }

    /// The cache key of a source.
    pub fn key(&self, source: &str) -> String {
        let mut hasher = blake3::Hasher::new();
        // Every part is preceded by its length, so that no two lists of parts give one stream of bytes.
        let mut part = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        part(source);
        self.options.iter().for_each(|option| part(option));
        part(&self.versions);
        hasher.finalize().to_hex().to_string()
    }
}

/// The headers that generated kernels include: those of CUDA_PATH, else of the usual places.
fn include_folders() -> Result<Vec<PathBuf>, Error> {
    let roots: Vec<PathBuf> = match std::env::var_os("CUDA_PATH") {
        Some(root) => vec![PathBuf::from(root)],
        None => ["/usr/local/cuda", "/usr/local/cuda-13", "/opt/cuda", "/usr"].map(PathBuf::from).to_vec(),
    };
    let Some(root) = roots.iter().find(|root| root.join("include/cuda_fp16.h").is_file()) else {
        let looked = roots.iter().map(|r| r.join("include").display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(Error::NoHeaders { looked });
    };
    let include = root.join("include");
    let cccl = include.join("cccl");
    Ok(if cccl.is_dir() { vec![include, cccl] } else { vec![include] })
}

/// Where compiled kernels are kept between runs.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Absent where the system names no folder for caches.
    folder: Option<PathBuf>,
}

impl Cache {
    /// `$DORMOUSE_CACHE`, else `$XDG_CACHE_HOME/dormouse`, else `~/.cache/dormouse`; the kernels are in `cubin` there.
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = set("DORMOUSE_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|home| home.join("dormouse")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/dormouse")));
        Self { folder: folder.map(|folder| folder.join("cubin")) }
    }

    /// A cache in `folder`.
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    /// What is stored under `key`, if it is there and whole.
    pub fn load(&self, key: &str) -> Option<Vec<u8>> {
        let mut stored = std::fs::read(self.folder.as_ref()?.join(key)).ok()?;
        let code = (stored.len() >= blake3::OUT_LEN).then(|| stored.split_off(blake3::OUT_LEN))?;
        (blake3::hash(&code).as_bytes() == stored.as_slice()).then_some(code)
    }

    /// Stores code under `key`. A cache that cannot be written costs time and nothing else, so errors are dropped.
    pub fn store(&self, key: &str, code: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            // Written aside and renamed, so that another process never reads half a file.
            let aside = folder.join(format!("{key}.{}", std::process::id()));
            let mut file = std::fs::File::create(&aside)?;
            file.write_all(blake3::hash(code).as_bytes())?;
            file.write_all(code)?;
            std::fs::rename(&aside, folder.join(key))
        };
        let _ = write();
    }
}

/// Compiles a source to machine code, or takes it from the cache; true if the compiler ran.
pub fn code(kernel: &str, source: &str, target: &Target, cache: &Cache) -> Result<(Vec<u8>, bool), Error> {
    let key = target.key(source);
    if let Some(code) = cache.load(&key) {
        return Ok((code, false));
    }
    let code = compile(kernel, source, &target.options)?;
    cache.store(&key, &code);
    Ok((code, true))
}

fn compile(kernel: &str, source: &str, options: &[String]) -> Result<Vec<u8>, Error> {
    let fault = |log: String| Error::Compile { kernel: kernel.to_owned(), log: log.into() };
    let source = CString::new(source).map_err(|_| fault("the source holds a zero byte".to_owned()))?;
    let program = nvrtc::create_program(&source, None).map_err(|e| fault(format!("nvrtcCreateProgram: {e:?}")))?;
    // SAFETY: `program` was created above and is destroyed once, below.
    let result = unsafe {
        match nvrtc::compile_program(program, options) {
            Ok(()) => cubin(program).map_err(|e| fault(format!("nvrtcGetCUBIN: {e:?}"))),
            Err(error) => Err(fault(match nvrtc::get_program_log(program) {
                Ok(log) => bytes_to_string(&log).to_string_lossy().into_owned(),
                Err(_) => format!("{error:?} and no log; options {options:?}"),
            })),
        }
    };
    // SAFETY: as above; a failure to destroy leaks a little memory and changes nothing.
    let _ = unsafe { nvrtc::destroy_program(program) };
    result
}

/// The machine code of a compiled program. There is some for a real architecture such as `sm_90` only.
///
/// # Safety
/// `program` is one that has been compiled and not destroyed.
unsafe fn cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, nvrtc::NvrtcError> {
    let mut size = 0;
    // SAFETY: the caller's; the library writes as many bytes as it said just before.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &raw mut size).result()?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}

/// The text before the first zero byte.
fn bytes_to_string(chars: &[std::ffi::c_char]) -> CString {
    let bytes: Vec<u8> = chars.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    CStr::from_bytes_until_nul(&[bytes, vec![0]].concat()).expect("a zero byte was appended").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target { options: vec!["-a".into(), "-b".into()], versions: "driver 1 nvrtc 2".into() }
    }

    #[test]
    fn the_key_depends_on_source_options_and_versions() {
        let key = target().key("kernel");
        assert_eq!(key.len(), 64);
        assert_eq!(key, target().key("kernel"));
        let others = [
            target().key("kernel "),
            Target { options: vec!["-a-b".into()], ..target() }.key("kernel"),
            Target { options: vec!["-b".into(), "-a".into()], ..target() }.key("kernel"),
            Target { versions: "driver 2 nvrtc 2".into(), ..target() }.key("kernel"),
        ];
        for other in others {
            assert_ne!(other, key);
        }
    }

    #[test]
    fn a_stored_kernel_comes_back_and_a_damaged_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::in_folder(&folder.path().join("cubin"));
        assert_eq!(cache.load("key"), None);
        cache.store("key", b"\x7fELF\0\n");
        assert_eq!(cache.load("key").as_deref(), Some(&b"\x7fELF\0\n"[..]));
        let file = folder.path().join("cubin/key");
        let stored = std::fs::read(&file).unwrap();
        for damaged in [&stored[..stored.len() - 1], &stored[..blake3::OUT_LEN - 1], &[]] {
            std::fs::write(&file, damaged).unwrap();
            assert_eq!(cache.load("key"), None);
        }
    }

    #[test]
    fn an_unwritable_cache_is_no_error() {
        let cache = Cache::in_folder(Path::new("/dev/null/nowhere"));
        cache.store("key", b"code");
        assert_eq!(cache.load("key"), None);
    }
}
