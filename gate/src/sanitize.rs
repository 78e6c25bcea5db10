//! `--sanitize`: kernels under NVIDIA's compute-sanitizer, which sees what no comparison of results does: reads outside of
//! allocations, races in shared memory, memory that nobody wrote.
//!
//! The sanitizer watches a whole process, so the program runs itself again under it, once for every stem, with `--exercise`:
//! the smaller cases of the stem, once, in every arm and precision, and no mutants. It slows a kernel down a hundredfold.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// What the sanitizer can look for.
pub const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// The exit code that the sanitizer is told to give if it found something; no program of ours uses it.
const FOUND: i32 = 86;

/// Where a CUDA toolkit puts its programs.
const USUAL: &str = "/usr/local/cuda/bin";

/// The words before the number of cases at the end of a run with `--exercise`.
pub const DONE: &str = "exercised cases:";

/// What the sanitizer says where it cannot work, and says nothing about a kernel.
const REFUSALS: [&str; 4] =
    ["Device not supported", "Internal Sanitizer Error", "insufficient permission", "Failed to initialize"];

/// How a stem came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// So many cases ran, and nothing was found.
    Pass(usize),
    /// What was found, or why the cases did not run to their end.
    Fail(String),
    /// Why the sanitizer does not work on this machine.
    NotRun(String),
}

/// The program, in PATH or where a toolkit puts it.
#[must_use]
pub fn find() -> Option<PathBuf> {
    find_in(std::env::var_os("PATH").as_deref().map(std::env::split_paths).into_iter().flatten())
}

fn find_in(folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    folders.chain([PathBuf::from(USUAL)]).map(|folder| folder.join("compute-sanitizer")).find(|path| path.is_file())
}

/// Runs a stem of `program` under a tool of the sanitizer.
///
/// # Errors
/// The sanitizer cannot be started.
pub fn run(sanitizer: &Path, tool: &str, program: &Path, stem: &str) -> Result<Verdict> {
    let mut command = Command::new(sanitizer);
    command.args(["--tool", tool, "--error-exitcode", &FOUND.to_string(), "--print-limit", "10"]);
    command.arg(program).args([stem, "--exercise"]);
    let out = command.output().with_context(|| format!("cannot run {}", sanitizer.display()))?;
    // Its lines may come on either stream; one that the program has not ended must not swallow the first of them.
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
    Ok(judge(out.status.code(), &text))
}

/// Both must say that all is well: the sanitizer by its exit code, the program by its last words.
fn judge(code: Option<i32>, text: &str) -> Verdict {
    // The sanitizer's own lines begin with nine equals signs.
    let said = || text.lines().filter_map(|line| line.strip_prefix("=========")).map(str::trim);
    if let Some(refusal) = said().find(|line| REFUSALS.iter().any(|words| line.contains(words))) {
        return Verdict::NotRun(refusal.to_owned());
    }
    let cases = text.lines().find_map(|line| line.strip_prefix(DONE)?.trim().parse().ok());
    match (code, cases) {
        (Some(0), Some(cases)) if cases > 0 => Verdict::Pass(cases),
        (Some(FOUND), _) => {
            let words: Vec<&str> = said().filter(|line| !line.is_empty() && *line != "COMPUTE-SANITIZER").collect();
            Verdict::Fail(words.join("\n"))
        }
        (code, _) => {
            let code = code.map_or("a signal".to_owned(), |code| format!("exit code {code}"));
            let last: Vec<&str> = text.lines().rev().take(5).collect();
            let last: Vec<&str> = last.into_iter().rev().collect();
            Verdict::Fail(format!("the cases did not run to their end ({code}): {}", last.join("\n")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "========= COMPUTE-SANITIZER\nexercised cases: 12\n========= ERROR SUMMARY: 0 errors\n";
    const DIRTY: &str = "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n=========     at \
                         rms_forward+0x40\nexercised cases: 12\n========= ERROR SUMMARY: 1 error\n";

    #[test]
    fn only_a_clean_run_of_some_cases_passes() {
        assert_eq!(judge(Some(0), CLEAN), Verdict::Pass(12));
        for (code, text) in [
            (Some(FOUND), DIRTY),
            (Some(FOUND), CLEAN),
            (Some(1), CLEAN),
            (None, CLEAN),
            (Some(0), "========= ERROR SUMMARY: 0 errors"),
            (Some(0), "exercised cases: 0"),
            (Some(0), ""),
        ] {
            assert!(matches!(judge(code, text), Verdict::Fail(_)), "{code:?} {text}");
        }
        let Verdict::Fail(words) = judge(Some(FOUND), DIRTY) else { panic!("a fault was found") };
        assert!(words.starts_with("Invalid __global__ write") && words.contains("rms_forward"), "{words}");
    }

    #[test]
    fn a_machine_that_refuses_the_tool_is_no_failure_and_no_pass() {
        let refusal = "========= Error: Device not supported. Please refer to the documentation\n";
        assert!(matches!(judge(Some(1), refusal), Verdict::NotRun(_)));
        assert!(matches!(judge(Some(1), "Device not supported"), Verdict::Fail(_)), "the program's own words");
    }

    #[cfg(unix)]
    #[test]
    fn the_tool_is_found_and_gets_the_program_and_the_stem() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("compute-sanitizer");
        std::fs::write(
            &path,
            "#!/bin/sh\necho \"========= $*\"\necho 'exercised cases: 3'\n[ $2 = memcheck ] || exit 86\n",
        )
        .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_in([folder.path().to_owned()].into_iter()), Some(path.clone()));
        let run = |tool| run(&path, tool, Path::new("/bin/gate"), "kda").unwrap();
        assert_eq!(run("memcheck"), Verdict::Pass(3));
        let Verdict::Fail(words) = run("racecheck") else { panic!("the tool ended with {FOUND}") };
        assert_eq!(words, "--tool racecheck --error-exitcode 86 --print-limit 10 /bin/gate kda --exercise");
    }
}
