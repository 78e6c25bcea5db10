//! `cargo xtask gate <stem> --bundle DIR`: a folder that runs gates on a machine with a GPU and no toolchain.
//!
//! | in the folder | what it is |
//! |---|---|
//! | `dormouse-gate` | the gate binary, release profile, stripped |
//! | `run.sh` | runs the gates of the stems on CUDA at every precision, and writes receipts |
//! | `cuda/` | NVRTC and the headers that kernels include, where `target/nvrtc` has them (see [`crate::ptx`]) |
//! | `golden/` | golden values |

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The stems and the folder of `<stem>.. --bundle DIR`, or nothing where a bundle is not asked for.
pub fn asked(rest: &[String]) -> Result<Option<(Vec<String>, PathBuf)>> {
    let (mut stems, mut folder, mut words) = (Vec::new(), None, rest.iter());
    while let Some(word) = words.next() {
        if let Some(given) = word.strip_prefix("--bundle=") {
            folder = Some(PathBuf::from(given));
        } else if word == "--bundle" {
            folder = Some(PathBuf::from(words.next().context("--bundle needs a folder")?));
        } else {
            stems.push(word.clone());
        }
    }
    let Some(folder) = folder else { return Ok(None) };
    if let Some(option) = stems.iter().find(|word| word.starts_with('-')) {
        bail!("{option}: beside --bundle there are only stems; give options to the bundle's run.sh");
    }
    Ok(Some((stems, folder)))
}

/// Builds the gate binary and fills the folder.
pub fn make(root: &Path, stems: &[String], folder: &Path) -> Result<()> {
    crate::must(crate::cargo(root).args(["build", "--release", "--package", "dormouse-gate"]))?;
    let nvrtc = crate::ptx::folder(root);
    let toolkit = crate::ptx::toolkit(&nvrtc);
    if toolkit.is_none() {
        eprintln!("no NVRTC in {}; the machine needs its own", nvrtc.display());
    }
    fill(root, stems, folder, &crate::target(root).join("release/dormouse-gate"), toolkit.as_deref())?;
    println!("copy {} to a machine with a GPU and run `./run.sh` in it", folder.display());
    Ok(())
}

fn fill(root: &Path, stems: &[String], folder: &Path, binary: &Path, toolkit: Option<&Path>) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let program = folder.join("dormouse-gate");
    fs::copy(binary, &program).with_context(|| format!("{} to {}", binary.display(), program.display()))?;
    // Line tables are three quarters of it. Without `strip` the bundle is large and works.
    if !Command::new("strip").arg("--strip-all").arg(&program).status().is_ok_and(|status| status.success()) {
        eprintln!("`strip` is missing or failed; {} keeps its symbols", program.display());
    }
    copy(&root.join("golden"), &folder.join("golden"))?;
    if let Some(toolkit) = toolkit {
        for part in ["include", "lib"] {
            copy(&toolkit.join(part), &folder.join("cuda").join(part))?;
        }
    }
    let script = folder.join("run.sh");
    fs::write(&script, text(stems, &commit(root))).with_context(|| script.display().to_string())?;
    executable(&script)
}

/// Copies a folder with all that is in it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).with_context(|| target.display().to_string())?;
        }
    }
    Ok(())
}

/// The commit with `-dirty` behind it where the tree has changes, as receipts have it.
fn commit(root: &Path) -> String {
    let git = |arguments: &[&str]| {
        let out =
            Command::new("git").current_dir(root).args(arguments).output().ok().filter(|out| out.status.success())?;
        Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    match (git(&["rev-parse", "HEAD"]), git(&["status", "--porcelain", "--untracked-files=no"])) {
        (Some(head), Some(changes)) if changes.is_empty() => head,
        (Some(head), _) => format!("{head}-dirty"),
        (None, _) => "unknown".to_owned(),
    }
}

/// The script.
fn text(stems: &[String], commit: &str) -> String {
    let (names, words) = match stems {
        [] => ("all operations".to_owned(), String::new()),
        _ => (stems.join(", "), stems.join(" ") + " "),
    };
    format!(
        r#"#!/bin/sh
# Runs the gates of {names} on this machine's GPU, at every precision, and writes receipts into receipts/.
# Needs an NVIDIA driver 580 or newer and the libraries NVRTC and cuBLASLt of CUDA 13.
# Options are passed on: ./run.sh --seed 7, ./run.sh --only diff, ./run.sh --sanitize memcheck
set -eu
cd "$(dirname "$0")"
here=$(pwd)
for folder in "$here/cuda/lib" /usr/local/cuda/lib64 /usr/local/cuda-13/lib64; do
    [ ! -d "$folder" ] || LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}$folder"
done
export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:-}}"
if [ -d "$here/cuda/include" ]; then export CUDA_PATH="$here/cuda"; fi
# Receipts say which sources were built; nothing here does.
export DORMOUSE_COMMIT={commit}
mkdir -p receipts
exec ./dormouse-gate {words}--backend cuda --require cuda --precision f32,tf32,bf16 --receipts receipts "$@"
"#
    )
}

#[cfg(unix)]
fn executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(|| path.display().to_string())
}

#[cfg(not(unix))]
fn executable(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_bundle_is_asked_for_with_stems_and_a_folder() {
        assert_eq!(asked(&words("kda --only fd")).unwrap(), None);
        let kda = Some((words("kda"), PathBuf::from("out")));
        assert_eq!(asked(&words("kda --bundle out")).unwrap(), kda);
        assert_eq!(asked(&words("--bundle=out kda")).unwrap(), kda);
        assert!(asked(&words("kda --bundle")).is_err());
        assert!(asked(&words("kda --only fd --bundle out")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_bundle_runs_its_program_from_anywhere_and_tells_it_the_commit() {
        let place = tempfile::tempdir().unwrap();
        let (root, folder) = (place.path().join("root"), place.path().join("bundle"));
        fs::create_dir_all(root.join("golden/receipts")).unwrap();
        fs::write(root.join("golden/receipts/a.toml"), "text").unwrap();
        // Stands for the gate binary: prints what it is given.
        let program = root.join("gate");
        fs::write(&program, "#!/bin/sh\necho \"$DORMOUSE_COMMIT $*\"\n").unwrap();
        executable(&program).unwrap();
        fill(&root, &words("kda linear"), &folder, &program, None).unwrap();
        let out = Command::new(folder.join("run.sh")).current_dir("/").args(["--seed", "7"]).output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&out.stdout),
            "unknown kda linear --backend cuda --require cuda --precision f32,tf32,bf16 --receipts receipts --seed 7\n"
        );
        assert!(folder.join("receipts").is_dir() && folder.join("golden/receipts/a.toml").is_file());
    }
}
