//! `dormouse-gate`: runs the ladder of gates on the backends this machine has and prints a table.
//!
//! `cargo xtask gate` calls it. Exit codes: 0 every gate that ran is green, 1 a gate is red, 2 the command line is
//! wrong.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use dormouse_harness::description::{Gate, OperationOn};
use dormouse_harness::gates::bite::{caught_by, with_mutant};
use dormouse_harness::gates::{Context, Outcome, Report, Status, ladder};
use dormouse_harness::ops::{Visitor, visit_all};
use dormouse_harness::runner::{OnBackend, plants};
use dormouse_reference::{Dual, Reference};

#[cfg(feature = "devices")]
mod devices;

/// Backends that `--require` knows.
#[cfg(feature = "devices")]
const BACKENDS: [&str; 3] = ["cpu", devices::WORDS[0], devices::WORDS[1]];
#[cfg(not(feature = "devices"))]
const BACKENDS: [&str; 1] = ["cpu"];

/// Run the ladder of gates that an operation must pass.
#[derive(Parser)]
#[command(
    name = "cargo xtask gate",
    after_help = "Examples:\n  cargo xtask gate                          every operation, every gate\n  \
                  cargo xtask gate kda                      the ladder of one operation\n  \
                  cargo xtask gate kda --only fd --seed 7   one gate, rerun with a printed seed\n  \
                  cargo xtask gate kda --mutants            list the faults that can be planted\n  \
                  cargo xtask gate kda --mutant dq-zero     plant one and see a gate bite (exits 1)"
)]
struct Args {
    /// Stems of operations; none means all of them.
    stems: Vec<String>,
    /// Run only this gate (fd, adj, form, diff, meta, det, golden, bite; poison on devices); repeatable.
    #[arg(long)]
    only: Vec<String>,
    /// Run only table cases whose name contains this.
    #[arg(long)]
    case: Option<String>,
    /// Seed of inputs, directions and random cases; a fresh one by default, printed with the table.
    #[arg(long)]
    seed: Option<u64>,
    /// Random cases per gate besides the table.
    #[arg(long, default_value_t = 16)]
    random: u32,
    /// Plant this mutant; the run must then exit 1.
    #[arg(long)]
    mutant: Option<String>,
    /// List the mutants of the chosen operations.
    #[arg(long)]
    mutants: bool,
    /// Print tab-separated lines: stem gate backend cases worst_over_tol status reason.
    #[arg(long)]
    tsv: bool,
    /// Run only on these backends: cpu, lavapipe, cuda (comma-separated; all by default).
    #[arg(long, value_delimiter = ',')]
    backend: Vec<String>,
    /// Fail if a gate of these backends did not run: cpu, lavapipe, cuda (comma-separated).
    #[arg(long, value_delimiter = ',')]
    require: Vec<String>,
    /// The folder of golden files.
    #[arg(long, default_value = "golden")]
    golden: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<ExitCode> {
    let gates = gates(&args.only)?;
    for (option, words) in [("--require", &args.require), ("--backend", &args.backend)] {
        if let Some(unknown) = words.iter().find(|r| !BACKENDS.contains(&r.as_str())) {
            bail!("{option} {unknown}: this build knows {}", BACKENDS.join(", "));
        }
    }
    let mut stems = Stems(Vec::new());
    visit_all(&mut stems);
    if let Some(unknown) = args.stems.iter().find(|s| !stems.0.contains(&s.as_str())) {
        bail!("no operation `{unknown}`; there are {}", stems.0.join(", "));
    }
    if args.mutant.is_some() && args.stems.len() != 1 {
        bail!("--mutant needs exactly one operation, such as `cargo xtask gate kda --mutant dq-zero`");
    }
    let seed = match args.seed {
        Some(seed) => seed,
        // Fresh directions and cases on every run: a gradient that is right along yesterday's directions only is wrong.
        None => SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs(),
    };
    let context = Context {
        seed,
        only: args.case.clone(),
        random_cases: args.random,
        golden: args.golden.clone(),
        stop_at_first: false,
    };
    let mut walk = Walk {
        args,
        gates: &gates,
        context: &context,
        reports: Vec::new(),
        planted: args.mutant.is_none(),
        matrix: args.stems.len() != 1,
    };
    if !args.tsv && !args.mutants && (wants(args, "cpu") || !walk.matrix) {
        walk.head();
    }
    if args.mutants || args.mutant.is_some() || wants(args, "cpu") {
        visit_all(&mut walk);
    }
    if args.mutants {
        return Ok(ExitCode::SUCCESS);
    }
    #[cfg(feature = "devices")]
    if args.mutant.is_none() {
        walk.devices();
    }
    if !walk.planted {
        bail!("no mutant `{}`; list them with --mutants", args.mutant.as_deref().unwrap_or_default());
    }
    let reports = walk.reports;
    let code = summary(args, &context, &reports);
    Ok(code)
}

fn gates(words: &[String]) -> Result<Vec<Gate>> {
    let all = || Gate::ALL.into_iter().chain([Gate::Poison]);
    if words.is_empty() {
        return Ok(all().collect());
    }
    let known: Vec<&str> = all().map(|g| g.word()).collect();
    words
        .iter()
        .map(|word| {
            let gate = all().find(|g| g.word() == word);
            gate.with_context(|| format!("no gate `{word}`; there are {}", known.join(", ")))
        })
        .collect()
}

/// Prints the closing lines; 1 if a gate is red or one that is required did not run.
fn summary(args: &Args, context: &Context, reports: &[Report]) -> ExitCode {
    let count = |status: Status| reports.iter().filter(|r| r.outcome.status == status).count();
    let not_run: Vec<&Report> = reports.iter().filter(|r| r.outcome.status == Status::NotRun).collect();
    // Golden values are other people's; a missing file is not a missing device.
    let required = |report: &&&Report| args.require.iter().any(|word| word == backend_word(report));
    let missing: Vec<_> = not_run.iter().filter(required).filter(|r| r.gate != Gate::Golden).collect();
    let absent = args.require.iter().find(|word| !reports.iter().any(|r| backend_word(r) == word.as_str()));
    if let Some(first) = missing.first() {
        let (stem, gate, backend) = (first.stem, first.gate.word(), backend_word(first));
        println!("FAIL --require {backend}: {stem} {gate} did not run: {}", first.outcome.reason);
    }
    if let Some(word) = absent {
        println!("FAIL --require {word}: no gate of it was chosen");
    }
    let required_missing = !missing.is_empty() || absent.is_some();
    if !args.tsv {
        let mutants: usize = reports.iter().filter(|r| r.gate == Gate::Bite).map(|r| r.outcome.cases).sum();
        let surviving = reports.iter().any(|r| r.gate == Gate::Bite && r.outcome.status == Status::Fail);
        if mutants > 0 && !surviving {
            println!("mutants {mutants}/{mutants} caught");
        }
        let mut line = format!("PASS {} FAIL {} NOTRUN {}", count(Status::Pass), count(Status::Fail), not_run.len());
        let mut reasons: Vec<(&str, usize)> = Vec::new();
        for report in &not_run {
            let word = report.gate.word();
            match reasons.iter_mut().find(|(w, _)| *w == word) {
                Some((_, n)) => *n += 1,
                None => reasons.push((word, 1)),
            }
        }
        if !reasons.is_empty() {
            let list: Vec<String> =
                reasons.iter().map(|(w, n)| format!("{n} x {w}, e.g. {}", reason_of(&not_run, w))).collect();
            line += &format!(": {}", list.join("; "));
        }
        println!("{line}");
        println!("seed {}", context.seed);
    }
    if count(Status::Fail) > 0 || required_missing { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// What `--require` and `--backend` call the backend of a report.
fn backend_word(report: &Report) -> &str {
    if report.backend == "reference" { "cpu" } else { report.backend.split(' ').next().unwrap_or_default() }
}

/// Whether a backend was chosen.
fn wants(args: &Args, backend: &str) -> bool {
    args.backend.is_empty() || args.backend.iter().any(|word| word == backend)
}

fn reason_of<'a>(reports: &[&'a Report], word: &str) -> &'a str {
    reports.iter().find(|r| r.gate.word() == word).map_or("", |r| r.outcome.reason.as_str())
}

/// Collects stems.
struct Stems(Vec<&'static str>);

impl Visitor for Stems {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        self.0.push(O::STEM);
    }
}

/// Runs the ladder of every chosen operation.
struct Walk<'a> {
    args: &'a Args,
    gates: &'a [Gate],
    context: &'a Context,
    reports: Vec<Report>,
    planted: bool,
    /// One line per operation instead of one per gate.
    matrix: bool,
}

impl Visitor for Walk<'_> {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        if !self.args.stems.is_empty() && !self.args.stems.iter().any(|s| s == O::STEM) {
            return;
        }
        if self.args.mutants {
            for plant in plants::<O>() {
                println!("{}\t{}\t{}", O::STEM, plant.name(), caught_by(&plant).word());
            }
            return;
        }
        let runner = OnBackend::new(Reference::<f64>::new);
        if let Some(name) = &self.args.mutant {
            let Some(plant) = plants::<O>().into_iter().find(|p| p.name() == *name) else { return };
            self.planted = true;
            for &gate in self.gates.iter().filter(|g| !matches!(g, Gate::Bite | Gate::Poison)) {
                let start = std::time::Instant::now();
                let outcome = with_mutant::<O>(&plant, gate, &runner, self.context);
                self.note(Report {
                    stem: O::STEM,
                    gate,
                    backend: format!("mutant {name}"),
                    outcome,
                    time: start.elapsed(),
                });
            }
            return;
        }
        let first = self.reports.len();
        for &gate in self.gates.iter().filter(|g| **g != Gate::Poison) {
            for report in ladder::<O>(&runner, "reference", &[gate], self.context) {
                self.note(report);
            }
        }
        if self.matrix && !self.args.tsv {
            self.row(first);
        }
    }
}

impl Walk<'_> {
    /// The table's head: operations by gates, or the gates of one operation.
    fn head(&self) {
        if !self.matrix {
            println!(
                "{:<16} {:<7} {:<14} {:>6} {:>10} {:>8}  status",
                "operation", "gate", "backend", "cases", "worst/tol", "seconds"
            );
            return;
        }
        println!(
            "worst error over tolerance by operation and gate; bite: planted faults caught; -: not applicable; ?: not run"
        );
        let of_reference = self.gates.iter().filter(|g| **g != Gate::Poison);
        let gates: String = of_reference.map(|gate| format!(" {:>8}", gate.word())).collect();
        println!("{:<16}{gates} {:>8} {:>8}", "operation", "cases", "seconds");
    }

    /// One operation's line of the matrix, and what is red below it.
    fn row(&self, first: usize) {
        let reports = &self.reports[first..];
        let Some(stem) = reports.first().map(|r| r.stem) else { return };
        let cell = |report: &Report| match report.outcome.status {
            Status::Pass if report.gate == Gate::Bite => format!("{0}/{0}", report.outcome.cases),
            Status::Pass => format!("{:.0e}", report.outcome.worst),
            Status::Fail => "FAIL".to_owned(),
            Status::NotRun => "?".to_owned(),
            Status::NotApplicable => "-".to_owned(),
        };
        let cells: String = reports.iter().map(|report| format!(" {:>8}", cell(report))).collect();
        let cases: usize = reports.iter().filter(|r| r.gate != Gate::Bite).map(|r| r.outcome.cases).sum();
        let seconds: f64 = reports.iter().map(|r| r.time.as_secs_f64()).sum();
        let backend = reports.first().map_or("cpu", backend_word);
        let name = if backend == "cpu" { stem.to_owned() } else { format!("{stem} {backend}") };
        println!("{name:<16}{cells} {cases:>8} {seconds:>8.2}");
        // One line says why a whole row did not run.
        if backend != "cpu"
            && let Some(report) = reports.iter().find(|r| r.outcome.status == Status::NotRun)
        {
            println!("  NOTRUN {name}: {}", report.outcome.reason);
        }
        for red in reports.iter().filter(|r| r.outcome.status == Status::Fail) {
            println!("  FAIL {stem} {}: {}", red.gate.word(), red.outcome.reason);
        }
    }

    /// The gates of the kernels: in a matrix, a second table.
    #[cfg(feature = "devices")]
    fn devices(&mut self) {
        let chosen: Vec<&str> = devices::WORDS.into_iter().filter(|word| wants(self.args, word)).collect();
        let gates: Vec<Gate> = Gate::DEVICE.into_iter().filter(|gate| self.gates.contains(gate)).collect();
        if chosen.is_empty() || gates.is_empty() {
            return;
        }
        let table = self.matrix && !self.args.tsv;
        if table {
            let words: String = gates.iter().map(|gate| format!(" {:>8}", gate.word())).collect();
            println!("{:<16}{words} {:>8} {:>8}", "kernels", "cases", "seconds");
        }
        let (args, context) = (self.args, self.context);
        for word in chosen {
            for stem in devices::run(word, &args.stems, &gates, context) {
                let first = self.reports.len();
                stem.into_iter().for_each(|report| self.note(report));
                if table {
                    self.row(first);
                }
            }
        }
    }

    /// Prints a line as soon as its gate has run.
    fn note(&mut self, report: Report) {
        let Outcome { status, cases, worst, reason } = &report.outcome;
        let (stem, gate) = (report.stem, report.gate.word());
        if self.args.tsv {
            println!("{stem}\t{gate}\t{}\t{cases}\t{worst:.3e}\t{}\t{reason}", report.backend, status.word());
        } else if !self.matrix {
            let worst = if *cases == 0 { "-".to_owned() } else { format!("{worst:.2e}") };
            let (backend, seconds) = (&report.backend, report.time.as_secs_f64());
            let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
            println!(
                "{stem:<16} {gate:<7} {backend:<14} {cases:>6} {worst:>10} {seconds:>8.2}  {}{reason}",
                status.word()
            );
        }
        // A reader of a pipe sees each line when its gate ends; a closed pipe ends nothing.
        let _ = std::io::stdout().flush();
        self.reports.push(report);
    }
}
