//! Runs the program as a user would: its own process, its own folder.

#![allow(dead_code, missing_docs)]

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest that any of these processes may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder that the program runs in, removed with everything in it.
pub struct Place {
    folder: tempfile::TempDir,
}

/// What a process did.
pub struct Done {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Place {
    pub fn new() -> Place {
        Place { folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file into the folder.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The program with its arguments, not started.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    /// Runs the program to its end.
    pub fn run(&self, arguments: &[&str]) -> Done {
        Done::of(self.command(arguments).output().unwrap())
    }

    /// Runs the program under a limit on the size of a file, as a full disk would be.
    pub fn run_limited(&self, arguments: &[&str], bytes: u64) -> Done {
        self.run_under(libc::RLIMIT_FSIZE, arguments, bytes)
    }

    /// Runs the program under a limit on its memory, as `ulimit -v` sets one.
    pub fn run_in_memory(&self, arguments: &[&str], bytes: u64) -> Done {
        self.run_under(libc::RLIMIT_AS, arguments, bytes)
    }

    fn run_under(&self, resource: libc::__rlimit_resource_t, arguments: &[&str], bytes: u64) -> Done {
        let mut command = self.command(arguments);
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: setrlimit may be called between fork and exec; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(move || match libc::setrlimit(resource, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        Done::of(command.output().unwrap())
    }

    /// Starts the program and leaves it running.
    pub fn spawn(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

impl Done {
    pub fn of(output: Output) -> Done {
        // An untrained model writes bytes that are no text.
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Done { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Checks the exit code and that standard error holds every one of `words`.
    #[track_caller]
    pub fn expect(&self, code: i32, words: &[&str]) -> &Done {
        assert_eq!(self.code, Some(code), "out: {}\nerr: {}", self.out, self.err);
        for word in words {
            assert!(self.err.contains(word), "`{word}` is not in: {}", self.err);
        }
        self
    }
}

/// Waits until `path` exists; the test fails after [`PATIENCE`].
#[track_caller]
pub fn wait_for(path: &Path) {
    wait_until(&path.display().to_string(), || path.exists());
}

/// Waits until `ready`; the test fails after [`PATIENCE`].
#[track_caller]
pub fn wait_until(what: &str, ready: impl Fn() -> bool) {
    let began = Instant::now();
    while !ready() {
        assert!(began.elapsed() < PATIENCE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a signal to a process that the test started.
pub fn signal(child: &Child, signal: i32) {
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the process is our child and has not been waited for, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Arguments of a run of `steps` that takes seconds and saves every 5 steps.
pub fn train<'a>(name: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["train", "--backend", "cpu", "--preset", "tiny", "--name", name, "--steps", steps];
    for set in ["data.eval_windows=4", "data.eval_bytes=64", "log.sample_bytes=8", "checkpoint.keep_last=100"] {
        arguments.extend(["--set", set]);
    }
    arguments.extend(["--save-every", "5", "--eval-every", "1000", "--log-every", "5"]);
    arguments.extend(more);
    arguments
}
