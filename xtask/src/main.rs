//! `cargo xtask`: the one task runner. `.ci/run` calls it, and so do people.
//!
//! Of the workspace's crates it depends on `dormouse-receipts` only, which depends on none, so that it builds in seconds
//! and works while they do not.

mod bench;
mod bundle;
mod cases;
mod docs;
mod driver;
mod golden;
mod ptx;
mod receipts;
mod tidy;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

/// Tasks of the dormouse workspace.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    after_help = "Examples:\n  cargo xtask test             all tests and every gate\n  \
                  cargo xtask gate kda         the ladder of one operation\n  \
                  cargo xtask gate --help      what a gate run can be told\n  \
                  cargo xtask receipts check   which fused kernels have been shown to be right\n  \
                  cargo xtask golden check     the reference against other people's implementations\n  \
                  cargo xtask docs --check     whether generated tables are what the descriptions say\n  \
                  cargo xtask ci               what continuous integration runs"
)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every test of the workspace (with nextest where it is installed) and, beside them, the ladder of gates.
    Test {
        /// Backends whose gates must run, for those machines that have them.
        #[arg(long, default_value = "cpu")]
        require: String,
        /// Passed to the test runner, such as a name to filter by; the gates then do not run.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Run the ladder of gates; `cargo xtask gate --help` lists its options.
    #[command(disable_help_flag = true)]
    Gate {
        /// Passed to the gate binary.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Run the criterion benches (release profile) after their gate is green.
    Bench {
        /// The stem, `step` for the trainer's step, or `map` for what each lever of it is worth; all stems without one.
        name: Option<String>,
        /// For `step` and `map`: passed to `dormouse bench`, such as `--preset tiny --backend cuda --note text`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Compile every kernel for sm_90, through PTX to machine code, on a machine without a GPU; NOTRUN where NVRTC is missing.
    Ptx {
        /// Passed to the gate binary, such as stems, or `--require ptx` to fail where NVRTC is missing.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Receipts of fused kernels.
    Receipts {
        #[command(subcommand)]
        task: receipts::Task,
    },
    /// Values of other people's implementations.
    Golden {
        #[command(subcommand)]
        task: golden::Task,
    },
    /// Write the tables of the documentation that follow from the descriptions of operations.
    Docs {
        /// Write nothing and fail if one is stale.
        #[arg(long)]
        check: bool,
    },
    /// Check what the compiler does not: stems, docs, sizes, licences.
    Tidy,
    /// Format check, tidy, generated tables, lints as errors, documentation.
    Lint,
    /// `lint`, then `test`.
    Ci,
}

fn main() -> ExitCode {
    match run(Args::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(Failed(code)) = error.downcast_ref() {
                return ExitCode::from(*code);
            }
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A command that has already said what is wrong.
#[derive(Debug)]
struct Failed(u8);

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a command ended with {}", self.0)
    }
}

impl std::error::Error for Failed {}

fn run(task: Task) -> Result<()> {
    let root = root();
    match task {
        Task::Test { require, rest } => {
            driver::provide();
            if !rest.is_empty() {
                return test(&root, &rest).map(drop);
            }
            eprintln!("the gates run beside the tests; their table comes after them");
            let gates = Beside::start(gate_binary(&root)?.args(["--require", &require]))?;
            let totals = test(&root, &rest)?;
            gates.finish()?;
            bites(&root)?;
            println!("{totals}");
            Ok(())
        }
        Task::Gate { rest } => match bundle::asked(&rest)? {
            Some((stems, folder)) => bundle::make(&root, &stems, &folder),
            None => gate(&root, &rest),
        },
        Task::Bench { name, rest } if name.as_deref() == Some("step") => bench_step(&root, &rest),
        Task::Bench { name, rest } if name.as_deref() == Some("map") => bench_map(&root, &rest),
        Task::Bench { name, .. } => bench::run(&root, name.as_deref()),
        Task::Ptx { rest } => ptx::compile(&root, &rest),
        Task::Receipts { task } => receipts::run(&root, &task),
        Task::Golden { task } => golden::run(&root, &task, |rest| {
            // The table says which gate is red; the exit code only that one is.
            let out = gate_binary(&root)?.args(rest).output().context("cannot run the gate binary")?;
            Ok(String::from_utf8_lossy(&out.stdout).into_owned())
        }),
        Task::Docs { check } => write_docs(&root, check),
        Task::Tidy => tidy::check(&root),
        Task::Lint => lint(&root),
        Task::Ci => lint(&root).and_then(|()| run(Task::Test { require: "cpu".to_owned(), rest: Vec::new() })),
    }
}

/// The workspace's root, wherever the command was called.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// Runs a command; its own output says what went wrong.
fn must(command: &mut Command) -> Result<()> {
    exited(command.status().with_context(|| format!("cannot run {command:?}"))?)
}

fn exited(status: ExitStatus) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Err(Failed(code).into())
}

fn step(name: &str) {
    eprintln!("== {name}");
}

/// Runs the tests and gives the runner's totals.
fn test(root: &Path, rest: &[String]) -> Result<String> {
    let nextest = cargo(root).args(["nextest", "--version"]).output().is_ok_and(|out| out.status.success());
    let totals = if nextest {
        let mut command = cargo(root);
        // Examples are compiled by the lints; linking them here shows nothing more.
        command.args(["nextest", "run", "--workspace", "--lib", "--bins", "--tests"]).args(rest);
        last_line_with(&mut command, "tests run:")?
    } else {
        eprintln!(
            "cargo-nextest is not installed, so `cargo test` runs the tests (cargo install cargo-nextest --locked)"
        );
        must(cargo(root).args(["test", "--workspace", "--all-targets"]).args(rest))?;
        "every test of `cargo test --workspace --all-targets` passed".to_owned()
    };
    if rest.is_empty() {
        // nextest does not run doctests.
        must(cargo(root).args(["test", "--quiet", "--workspace", "--doc"]))?;
    }
    Ok(totals)
}

/// Runs a command, passes its error stream on and gives the last line of it that contains `word`.
fn last_line_with(command: &mut Command, word: &str) -> Result<String> {
    let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| format!("cannot run {command:?}"))?;
    let stream = child.stderr.take().expect("the error stream is piped");
    let mut last = String::new();
    for line in BufReader::new(stream).lines() {
        let line = line.context("the error stream is not text")?;
        eprintln!("{line}");
        if line.contains(word) {
            last = line.trim().to_owned();
        }
    }
    exited(child.wait().context("the command cannot be waited for")?)?;
    Ok(last)
}

/// Builds the gate binary and gives a command that runs it in the workspace's root.
///
/// All programs are built, because cargo chooses the features of shared dependencies by what it is asked to build: for one
/// package alone it would compile most of them again in another shape than the tests have.
fn gate_binary(root: &Path) -> Result<Command> {
    must(cargo(root).args(["build", "--quiet", "--workspace", "--bins"]))?;
    let mut command = Command::new(target(root).join("debug/dormouse-gate"));
    command.current_dir(root);
    Ok(command)
}

/// The folder that cargo builds into.
fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder))
}

fn gate<S: AsRef<std::ffi::OsStr>>(root: &Path, rest: &[S]) -> Result<()> {
    must(gate_binary(root)?.args(rest))
}

/// A program that keeps one core busy while the others do something else; what it prints comes when it is asked for.
struct Beside {
    child: Child,
    printed: Option<JoinHandle<std::io::Result<Vec<u8>>>>,
}

impl Beside {
    fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run {command:?}"))?;
        let mut stream = child.stdout.take().expect("standard output is piped");
        let read = move || {
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).map(|_| bytes)
        };
        Ok(Self { child, printed: Some(std::thread::spawn(read)) })
    }

    /// Waits for it, passes on what it printed, and fails as it does.
    fn finish(mut self) -> Result<()> {
        let printed = self.printed.take().expect("it is finished once").join().expect("a reader does not panic");
        let status = self.child.wait().context("a program beside the tests cannot be waited for")?;
        std::io::stdout().write_all(&printed.context("a program beside the tests cannot be read")?)?;
        exited(status)
    }
}

impl Drop for Beside {
    /// Nobody wants the rest of it once the tests are red; one that has ended is past killing.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Shows one gate biting: a planted fault must end with exit code 1 and a line that names the gate.
fn bites(root: &Path) -> Result<()> {
    const PLANT: [&str; 6] = ["kda", "--only", "fd", "--mutant", "dg-times-0.99", "--tsv"];
    let out = gate_binary(root)?.args(PLANT).output().context("cannot run the gate binary")?;
    if out.status.code() != Some(1) {
        bail!(
            "`cargo xtask gate {}` ended with {}, expected exit code 1: the gate does not bite",
            PLANT.join(" "),
            out.status
        );
    }
    let text = String::from_utf8_lossy(&out.stdout);
    let line =
        text.lines().find(|line| line.contains("FAIL")).context("the gate failed without a line that says so")?;
    println!("a gate biting (dg of kda times 0.99): {}", line.replace('\t', " "));
    Ok(())
}

/// The trainer, built for release.
fn release(root: &Path) -> Result<PathBuf> {
    must(cargo(root).args(["build", "--release", "--package", "dormouse"]))?;
    Ok(target(root).join("release/dormouse"))
}

/// Checks the trainer's step on this machine, times it in two processes and appends the row to benches/history.tsv.
fn bench_step(root: &Path, rest: &[String]) -> Result<()> {
    let program = release(root)?;
    step("check before bench");
    must(Command::new(&program).current_dir(root).args(["check", "--quick"]))?;
    step("bench");
    must(Command::new(&program).current_dir(root).args(["bench", "--append", "benches/history.tsv"]).args(rest))
}

/// Measures what each lever of the step of `small` is worth, and writes docs/map.md.
fn bench_map(root: &Path, rest: &[String]) -> Result<()> {
    let words = ["bench", "--preset", "small", "--precision", "bf16", "--steps", "120", "--map", "docs/map.md"];
    must(Command::new(release(root)?).current_dir(root).args(words).args(rest))
}

/// Asks the gate binary what there is, which runs no gate, and writes or checks the tables made of it.
fn write_docs(root: &Path, check: bool) -> Result<()> {
    let out = gate_binary(root)?.args(["--list", "--tsv"]).output().context("cannot run the gate binary")?;
    exited(out.status)?;
    docs::run(root, check, &String::from_utf8(out.stdout).context("the gate binary's list is not text")?)
}

fn lint(root: &Path) -> Result<()> {
    step("format");
    must(cargo(root).args(["fmt", "--all", "--", "--check"]))?;
    step("tidy");
    tidy::check(root)?;
    step("tables of the documentation");
    write_docs(root, true)?;
    step("lints");
    must(cargo(root).args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))?;
    step("docs");
    must(cargo(root).args(["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Args, Beside, Command, Failed, Task};

    #[test]
    fn a_program_beside_the_tests_fails_as_it_does_and_is_ended_where_nobody_waits() {
        let shell = |line: &str| Beside::start(Command::new("sh").args(["-c", line])).unwrap();
        assert!(shell("exit 0").finish().is_ok());
        let failed = shell("echo a gate is red; exit 7").finish().unwrap_err();
        assert_eq!(failed.downcast_ref::<Failed>().unwrap().0, 7);
        let left = shell("exec sleep 600");
        let process = std::path::PathBuf::from(format!("/proc/{}", left.child.id()));
        assert!(process.exists());
        drop(left);
        assert!(!process.exists());
    }

    #[test]
    fn required_backends_are_no_words_for_the_test_runner() {
        let parse = |words: &[&str]| match Args::try_parse_from(words).unwrap().task {
            Task::Test { require, rest } => (require, rest),
            _ => panic!("{words:?} is another task"),
        };
        assert_eq!(parse(&["xtask", "test"]), ("cpu".to_owned(), vec![]));
        assert_eq!(parse(&["xtask", "test", "--require", "cpu,lavapipe"]), ("cpu,lavapipe".to_owned(), vec![]));
        let named = ["--no-capture".to_owned(), "kda".to_owned()];
        assert_eq!(parse(&["xtask", "test", "--no-capture", "kda"]), ("cpu".to_owned(), named.to_vec()));
    }
}
