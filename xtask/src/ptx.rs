//! `cargo xtask ptx`: the gate binary's `--ptx` with NVRTC and its headers where wheels have put them.
//!
//! ```sh
//! python3 -m pip install --no-deps --target target/nvrtc nvidia-cuda-nvrtc==13.0.* nvidia-cuda-runtime==13.0.* \\
//!     nvidia-cuda-cccl==13.0.* nvidia-cuda-crt==13.0.*
//! ```

use std::path::{Path, PathBuf};

use anyhow::Result;

/// Names the folder that pip has installed into, or the root of a CUDA toolkit; `target/nvrtc` without it.
const VARIABLE: &str = "DORMOUSE_NVRTC";

/// Compiles every kernel.
pub fn compile(root: &Path, rest: &[String]) -> Result<()> {
    let folder = match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => root.join("target/nvrtc"),
    };
    let mut command = crate::cargo(root);
    command.args(["run", "--quiet", "--package", "dormouse-gate", "--", "--ptx"]).args(rest);
    if let Some(toolkit) = toolkit(&folder) {
        // The loader reads its path when a program starts, so it is set for the program that loads NVRTC.
        let libraries = ["lib", "lib64"].map(|name| toolkit.join(name)).into_iter().filter(|path| path.is_dir());
        let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let all = libraries.chain(std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty()));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(all)?).env("CUDA_PATH", toolkit);
    } else {
        eprintln!("no CUDA headers in {} ({VARIABLE}); trying what is installed", folder.display());
    }
    crate::must(&mut command)
}

/// The folder with `include` and `lib` inside what pip has installed, or the folder itself where it is a toolkit.
fn toolkit(folder: &Path) -> Option<PathBuf> {
    let found = [folder.join("nvidia/cu13"), folder.to_owned()];
    found.into_iter().find(|root| root.join("include/cuda_fp16.h").is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_and_toolkits_are_found() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(toolkit(folder.path()), None);
        for root in [folder.path().to_owned(), folder.path().join("nvidia/cu13")] {
            std::fs::create_dir_all(root.join("include")).unwrap();
            std::fs::write(root.join("include/cuda_fp16.h"), "").unwrap();
            assert_eq!(toolkit(folder.path()), Some(root));
        }
    }
}
