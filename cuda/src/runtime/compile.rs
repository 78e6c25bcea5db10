//! CUDA C++ to PTX with NVRTC, through a cache on disk.
//!
//! Compiling takes tenths of a second a kernel, and a program has hundreds. The key is a BLAKE3 hash of everything
//! that decides the result: source, options, driver and compiler version. A cached file starts with the hash of its
//! own contents, so a damaged one is compiled again and never loaded.

use std::ffi::{CStr, CString};
use std::io::Write;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::result as nvrtc;

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
    /// `$DORMOUSE_CACHE`, else `$XDG_CACHE_HOME/dormouse`, else `~/.cache/dormouse`; the kernels are in `ptx` there.
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = set("DORMOUSE_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|home| home.join("dormouse")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/dormouse")));
        Self { folder: folder.map(|folder| folder.join("ptx")) }
    }

    /// A cache in `folder`.
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    /// The text stored under `key`, if it is there and whole.
    pub fn load(&self, key: &str) -> Option<String> {
        let stored = std::fs::read_to_string(self.folder.as_ref()?.join(key)).ok()?;
        let (hash, text) = stored.split_once('\n')?;
        (blake3::hash(text.as_bytes()).to_hex().as_str() == hash).then(|| text.to_owned())
    }

    /// Stores a text under `key`. A cache that cannot be written costs time and nothing else, so errors are dropped.
    pub fn store(&self, key: &str, text: &str) {
        let Some(folder) = &self.folder else { return };
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            // Written aside and renamed, so that another process never reads half a file.
            let aside = folder.join(format!("{key}.{}", std::process::id()));
            let mut file = std::fs::File::create(&aside)?;
            writeln!(file, "{}", blake3::hash(text.as_bytes()).to_hex())?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&aside, folder.join(key))
        };
        let _ = write();
    }
}

/// Compiles a source to PTX, or takes it from the cache; true if the compiler ran.
pub fn ptx(kernel: &str, source: &str, target: &Target, cache: &Cache) -> Result<(CString, bool), Error> {
    let key = target.key(source);
    if let Some(text) = cache.load(&key).and_then(|text| CString::new(text).ok()) {
        return Ok((text, false));
    }
    let ptx = compile(kernel, source, &target.options)?;
    cache.store(&key, &ptx.to_string_lossy());
    Ok((ptx, true))
}

fn compile(kernel: &str, source: &str, options: &[String]) -> Result<CString, Error> {
    let fault = |log: String| Error::Compile { kernel: kernel.to_owned(), log: log.into() };
    let source = CString::new(source).map_err(|_| fault("the source holds a zero byte".to_owned()))?;
    let program = nvrtc::create_program(&source, None).map_err(|e| fault(format!("nvrtcCreateProgram: {e:?}")))?;
    // SAFETY: `program` was created above and is destroyed once, below.
    let result = unsafe {
        match nvrtc::compile_program(program, options) {
            Ok(()) => nvrtc::get_ptx(program).map_err(|e| fault(format!("nvrtcGetPTX: {e:?}"))),
            Err(error) => Err(fault(match nvrtc::get_program_log(program) {
                Ok(log) => bytes_to_string(&log).to_string_lossy().into_owned(),
                Err(_) => format!("{error:?} and no log; options {options:?}"),
            })),
        }
    };
    // SAFETY: as above; a failure to destroy leaks a little memory and changes nothing.
    let _ = unsafe { nvrtc::destroy_program(program) };
    result.map(|ptx| bytes_to_string(&ptx))
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
        let cache = Cache::in_folder(&folder.path().join("ptx"));
        assert_eq!(cache.load("key"), None);
        cache.store("key", ".version 8.0\nbody");
        assert_eq!(cache.load("key").as_deref(), Some(".version 8.0\nbody"));
        let file = folder.path().join("ptx/key");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, &text[..text.len() - 1]).unwrap();
        assert_eq!(cache.load("key"), None);
    }

    #[test]
    fn an_unwritable_cache_is_no_error() {
        let cache = Cache::in_folder(Path::new("/dev/null/nowhere"));
        cache.store("key", "text");
        assert_eq!(cache.load("key"), None);
    }
}
