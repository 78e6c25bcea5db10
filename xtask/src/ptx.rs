//! `cargo xtask ptx`: the gate binary's `--ptx` with NVRTC and its headers where wheels have put them.
//!
//! ```sh
//! python3 -m pip install --no-deps --target target/nvrtc nvidia-cuda-nvrtc==13.0.* nvidia-cuda-runtime==13.0.* \\
//!     nvidia-cuda-cccl==13.0.* nvidia-cuda-crt==13.0.*
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Names the folder that pip has installed into, or the root of a CUDA toolkit; `target/nvrtc` without it.
const VARIABLE: &str = "DORMOUSE_NVRTC";

/// Compiles every kernel, and shows that one which is no CUDA C++ would be noticed.
pub fn compile(root: &Path, rest: &[String]) -> Result<()> {
    let folder = folder(root);
    let toolkit = toolkit(&folder);
    if toolkit.is_none() {
        eprintln!("no CUDA headers in {} ({VARIABLE}); trying what is installed", folder.display());
    }
    crate::must(gate(root, toolkit.as_deref())?.args(rest))?;
    let whole = rest.is_empty() || *rest == ["--require", "ptx"];
    if toolkit.is_some() && whole {
        bites(gate(root, toolkit.as_deref())?.args(["rms_norm", "--mutant", "no-cuda"]))?;
    }
    Ok(())
}

/// The gate binary with NVRTC where it looks.
fn gate(root: &Path, toolkit: Option<&Path>) -> Result<Command> {
    let mut command = crate::gate_binary(root)?;
    command.arg("--ptx");
    if let Some(toolkit) = toolkit {
        // The loader reads its path when a program starts, so it is set for the program that loads NVRTC.
        let libraries = ["lib", "lib64"].map(|name| toolkit.join(name)).into_iter().filter(|path| path.is_dir());
        let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let all = libraries.chain(std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty()));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(all)?).env("CUDA_PATH", toolkit);
    }
    Ok(command)
}

/// A planted kernel that does not compile must end with exit code 1 and a line that names it.
fn bites(command: &mut Command) -> Result<()> {
    let out = command.output().context("cannot run the gate binary")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let line = text.lines().find(|line| line.contains("RefusedKernel"));
    match (out.status.code(), line) {
        (Some(1), Some(line)) => println!("the check biting (a kernel that is no CUDA C++): {}", line.trim()),
        _ => bail!("a kernel that is no CUDA C++ ended with {}: the check does not bite: {text}", out.status),
    }
    Ok(())
}

/// Where pip has installed NVRTC, if anywhere.
pub fn folder(root: &Path) -> PathBuf {
    match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => root.join("target/nvrtc"),
    }
}

/// The folder with `include` and `lib` inside what pip has installed, or the folder itself where it is a toolkit.
pub fn toolkit(folder: &Path) -> Option<PathBuf> {
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
