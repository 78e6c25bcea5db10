//! `dormouse-gate`: runs the ladder of gates on the backends this machine has and prints a table.
//!
//! `cargo xtask gate` calls it. Exit codes: 0 every gate that ran is green, 1 a gate is red, 2 the command line is
//! wrong.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use dormouse_harness::description::{Gate, Operation, OperationOn};
use dormouse_harness::gates::bite::{caught_by, with_mutant};
use dormouse_harness::gates::{Context, Outcome, Report, Status, ladder};
use dormouse_harness::ops::{Visitor, visit_all};
use dormouse_harness::runner::{OnBackend, Runner, plants};
use dormouse_reference::{Dual, Reference};

#[cfg(feature = "devices")]
mod devices;
mod list;
#[cfg(feature = "oracle")]
mod oracle;

/// Backends that `--require` knows.
#[cfg(feature = "devices")]
const BACKENDS: [&str; 3] = ["cpu", devices::WORDS[0], devices::WORDS[1]];
#[cfg(not(feature = "devices"))]
const BACKENDS: [&str; 1] = ["cpu"];

/// The mutant of `--ptx`.
#[cfg(feature = "devices")]
const REFUSED: &str = "no-cuda";

/// Run the ladder of gates that an operation must pass.
#[derive(Parser)]
#[command(
    name = "cargo xtask gate",
    after_help = "Examples:\n  cargo xtask gate                          every operation, every gate\n  \
                  cargo xtask gate kda                      the ladder of one operation\n  \
                  cargo xtask gate kda --only fd --seed 7   one gate, rerun with a printed seed\n  \
                  cargo xtask gate kda --mutants            list the faults that can be planted\n  \
                  cargo xtask gate kda --mutant dq-zero     plant one and see a gate bite (exits 1)\n  \
                  cargo xtask gate rms_norm --backend cuda --precision f32,tf32,bf16 --receipts golden/receipts\n  \
                  cargo xtask gate --sanitize memcheck      the kernels on CUDA under compute-sanitizer\n  \
                  cargo xtask gate kda --bundle DIR         a folder to run on a machine with a GPU and no toolchain"
)]
struct Args {
    /// Stems of operations; none means all of them.
    stems: Vec<String>,
    /// Run only this gate (fd, adj, form, oracle, diff, meta, det, golden, bite; devices: diff, meta, poison, det, bite); repeatable.
    #[arg(long)]
    only: Vec<String>,
    /// Run only table cases whose name contains this; gate bite then does not run, since a fault may need another case.
    #[arg(long)]
    case: Option<String>,
    /// Seed of inputs, directions and random cases; a fresh one by default, printed with the table.
    #[arg(long)]
    seed: Option<u64>,
    /// Random cases per gate besides the table.
    #[arg(long, default_value_t = 16)]
    random: u32,
    /// Plant this mutant, in the reference or in kernels; exits 1 if a gate turns red wherever it was planted.
    #[arg(long)]
    mutant: Option<String>,
    /// List the mutants of the chosen operations: stem, name, the gate that must turn red, backends.
    #[arg(long)]
    mutants: bool,
    /// Print tab-separated lines: stem gate backend cases worst_over_tol status reason.
    #[arg(long)]
    tsv: bool,
    /// List the gates of the chosen operations and the mutants that each must catch, tab-separated; runs nothing.
    #[arg(long, conflicts_with_all = ["mutant", "mutants"])]
    list: bool,
    /// Run only on these backends: cpu, lavapipe, cuda (comma-separated; all by default).
    #[arg(long, value_delimiter = ',')]
    backend: Vec<String>,
    /// Fail if a gate of these backends did not run: cpu, lavapipe, cuda (comma-separated).
    #[arg(long, value_delimiter = ',')]
    require: Vec<String>,
    /// Run only these kernels of devices: plain, fused (comma-separated; both by default).
    #[arg(long, value_delimiter = ',')]
    arm: Vec<String>,
    /// The arithmetic of matrix products on devices: f32, tf32, bf16 (comma-separated).
    #[arg(long, value_delimiter = ',', default_value = "f32")]
    precision: Vec<String>,
    /// Write receipts into this folder for fused kernels whose gates diff, poison, det and bite are all green.
    #[arg(long, value_name = "DIR")]
    receipts: Option<PathBuf>,
    /// Compile every kernel of the case tables for sm_90, through PTX to machine code, and run none; needs no GPU, only NVRTC and its headers.
    #[arg(long)]
    ptx: bool,
    /// Run the smaller cases on CUDA under this tool of NVIDIA's compute-sanitizer, once and without mutants; NOTRUN where
    /// the sanitizer or a GPU is missing, which `--require cuda` makes a failure.
    #[arg(long, value_name = "TOOL", value_parser = ["memcheck", "racecheck", "initcheck", "synccheck"])]
    sanitize: Option<String>,
    /// What `--sanitize` runs under the sanitizer.
    #[arg(long, hide = true)]
    exercise: bool,
    /// The folder of golden files.
    #[arg(long, default_value = "golden")]
    golden: PathBuf,
}

fn main() -> ExitCode {
    #[cfg(feature = "devices")]
    // SAFETY: no other thread exists yet.
    unsafe {
        dormouse_cuda::keep_display_out();
    }
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
        let known = |word: &str| BACKENDS.contains(&word) || (args.ptx && word == "ptx");
        if let Some(unknown) = words.iter().find(|word| !known(word)) {
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
    if let Some(wanted) = &args.case {
        let mut cases = Cases { stems: &args.stems, names: Vec::new() };
        visit_all(&mut cases);
        if !cases.names.iter().any(|(_, names)| names.iter().any(|name| name.contains(wanted.as_str()))) {
            let lines = cases.names.iter().map(|(stem, names)| format!("\n  {stem}: {}", names.join(", ")));
            bail!("--case {wanted}: no case has that in its name; there are{}", lines.collect::<String>());
        }
    }
    if args.list {
        let mut list = list::List { stems: &args.stems, golden: &args.golden, lines: Vec::new() };
        visit_all(&mut list);
        // A reader that has seen enough closes the pipe, which is no fault.
        let _ = writeln!(std::io::stdout(), "{}\n{}", list::COLUMNS, list.lines.join("\n"));
        return Ok(ExitCode::SUCCESS);
    }
    #[cfg(feature = "devices")]
    if args.ptx {
        if args.mutant.as_deref().is_some_and(|name| name != REFUSED) {
            bail!("--ptx --mutant: the one mutant of this check is `{REFUSED}`, a kernel that is no CUDA C++");
        }
        return Ok(compile(args));
    }
    #[cfg(feature = "devices")]
    if args.exercise {
        return exercise(args);
    }
    #[cfg(feature = "devices")]
    if let Some(tool) = &args.sanitize {
        return sanitize(args, tool, &stems.0);
    }
    #[cfg(feature = "devices")]
    let settings = Settings::of(args)?;
    #[cfg(not(feature = "devices"))]
    if args.ptx || args.receipts.is_some() || !args.arm.is_empty() || args.sanitize.is_some() || args.exercise {
        bail!("--ptx, --receipts, --sanitize and --arm are for kernels, and this build has none");
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
        production: false,
        golden: args.golden.clone(),
        stop_at_first: false,
        again: String::new(),
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
    walk.devices(&settings);
    if !walk.planted {
        bail!("no mutant `{}`; list them with --mutants", args.mutant.as_deref().unwrap_or_default());
    }
    let reports = walk.reports;
    if let (Some(mutant), true) = (&args.mutant, reports.is_empty()) {
        bail!("--mutant {mutant}: none of the chosen backends, arms and gates can have it; --mutants says where it is");
    }
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

/// What devices are to run, from the command line.
#[cfg(feature = "devices")]
struct Settings {
    arms: Vec<dormouse_cuda::Arm>,
    precisions: Vec<dormouse_reference::Precision>,
}

#[cfg(feature = "devices")]
impl Settings {
    fn of(args: &Args) -> Result<Self> {
        use dormouse_cuda::Arm;
        use dormouse_cuda::receipts::word;

        let mut arms = Vec::new();
        for name in &args.arm {
            let arm = Arm::ALL.into_iter().find(|arm| arm.word() == name);
            arms.push(arm.with_context(|| format!("--arm {name}: there are plain and fused"))?);
        }
        if arms.is_empty() {
            arms = Arm::ALL.to_vec();
        }
        let mut precisions = Vec::new();
        for name in &args.precision {
            let precision = devices::PRECISIONS.into_iter().find(|&precision| word(precision) == name);
            precisions.push(precision.with_context(|| format!("--precision {name}: there are f32, tf32 and bf16"))?);
        }
        if let Some(folder) = &args.receipts {
            let only_cuda = args.backend.iter().all(|word| word == "cuda");
            if !args.backend.is_empty() && !only_cuda && dormouse_gate::receipts::is_golden(folder) {
                bail!(
                    "--receipts {}: only --backend cuda writes there; give receipts of {} another folder",
                    folder.display(),
                    args.backend.join(", ")
                );
            }
        }
        Ok(Self { arms, precisions })
    }
}

/// Compiles every kernel without a device; a machine without NVRTC is NOTRUN, and red only where `--require ptx` says so.
#[cfg(feature = "devices")]
fn compile(args: &Args) -> ExitCode {
    match devices::compile(&args.stems, args.mutant.is_some(), &mut |line| println!("{line}")) {
        Ok(Ok(variants)) => {
            println!("PASS {variants} variants of kernels compile for sm_90");
            ExitCode::SUCCESS
        }
        Ok(Err(faults)) => {
            println!("FAIL {faults} faults");
            ExitCode::FAILURE
        }
        Err(why) => {
            println!("NOTRUN ptx: {why}");
            if args.require.iter().any(|word| word == "ptx") { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
    }
}

/// The body of a run under the sanitizer.
#[cfg(feature = "devices")]
fn exercise(args: &Args) -> Result<ExitCode> {
    let mut cases = 0;
    for stem in &args.stems {
        cases += devices::exercise_on_cuda(stem).map_err(anyhow::Error::msg)?;
    }
    println!("{} {cases}", dormouse_gate::sanitize::DONE);
    Ok(ExitCode::SUCCESS)
}

/// Runs every chosen stem under a tool of the sanitizer and prints a line for each.
#[cfg(feature = "devices")]
fn sanitize(args: &Args, tool: &str, all: &[&str]) -> Result<ExitCode> {
    use dormouse_gate::sanitize::{Verdict, find, run};

    let not_run = |why: &str| {
        println!("NOTRUN {tool}: {why}");
        if args.require.iter().any(|word| word == "cuda") { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    };
    if let Err(why) = devices::cuda() {
        return Ok(not_run(&why));
    }
    let Some(sanitizer) = find() else {
        return Ok(not_run("no compute-sanitizer in PATH or /usr/local/cuda/bin"));
    };
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let (mut passed, mut failed) = (0, 0);
    let with_kernels = devices::with_kernels();
    for stem in all.iter().filter(|stem| args.stems.is_empty() || args.stems.iter().any(|s| s == *stem)) {
        if !with_kernels.contains(stem) {
            println!("{stem:<16} {tool:<9} {:>6} {:>8}  NOTRUN: there are no kernels of it", 0, "");
            continue;
        }
        let start = std::time::Instant::now();
        let verdict = run(&sanitizer, tool, &program, stem)?;
        let seconds = start.elapsed().as_secs_f64();
        let (status, cases, words) = match verdict {
            Verdict::Pass(cases) => ("PASS", cases, String::new()),
            Verdict::Fail(words) => ("FAIL", 0, words),
            // What refuses one stem refuses all.
            Verdict::NotRun(why) => return Ok(not_run(&why)),
        };
        if status == "PASS" {
            passed += 1
        } else {
            failed += 1
        }
        println!("{stem:<16} {tool:<9} {cases:>6} {seconds:>8.2}  {status}");
        words.lines().for_each(|line| println!("  {line}"));
    }
    println!("PASS {passed} FAIL {failed}");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the closing lines; 1 if a gate is red or one that is required did not run.
fn summary(args: &Args, context: &Context, reports: &[Report]) -> ExitCode {
    let count = |status: Status| reports.iter().filter(|r| r.outcome.status == status).count();
    let not_run: Vec<&Report> = reports.iter().filter(|r| r.outcome.status == Status::NotRun).collect();
    // Not every operation has golden values of other people; a missing file is not a missing device.
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
    let survived = if args.mutant.is_some() { survivors(reports) } else { Vec::new() };
    for backend in &survived {
        println!("the mutant survives on {backend}: every gate that ran is green");
    }
    if (count(Status::Fail) > 0 && survived.is_empty()) || required_missing {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// The backends on which a planted fault turned nothing red.
fn survivors(reports: &[Report]) -> Vec<&str> {
    let words = |status: Status| {
        let of = reports.iter().filter(move |report| report.outcome.status == status);
        of.map(backend_word).collect::<BTreeSet<&str>>()
    };
    words(Status::Pass).difference(&words(Status::Fail)).copied().collect()
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

/// Collects the names of the chosen operations' cases.
struct Cases<'a> {
    stems: &'a [String],
    names: Vec<(&'static str, Vec<String>)>,
}

impl Visitor for Cases<'_> {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        if self.stems.is_empty() || self.stems.iter().any(|stem| stem == O::STEM) {
            self.names.push((O::STEM, O::cases().into_iter().map(|case| case.name).collect()));
        }
    }
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
                println!("{}\t{}\t{}\tcpu", O::STEM, plant.name(), caught_by(&plant).word());
            }
            #[cfg(feature = "oracle")]
            if O::STEM == oracle::Misread::STEM {
                println!("{}\t{}\t{}\tcpu", O::STEM, oracle::MISREAD, Gate::Oracle.word());
            }
            #[cfg(feature = "devices")]
            for mutant in devices::mutants(O::STEM) {
                let gate = if mutant.is_null() { "none" } else { mutant.gate };
                println!("{}\t{}\t{gate}\t{} {}", O::STEM, mutant.name, devices::WORDS.join(","), mutant.arm);
            }
            return;
        }
        let runner = OnBackend::new(Reference::<f64>::new);
        let oracle = oracle_of::<O>();
        if let Some(name) = &self.args.mutant {
            #[cfg(feature = "devices")]
            if devices::mutants(O::STEM).iter().any(|mutant| mutant.name == name) {
                self.planted = true;
            }
            #[cfg(feature = "oracle")]
            if name == oracle::MISREAD && O::STEM == oracle::Misread::STEM {
                self.planted = true;
                self.misread();
                return;
            }
            let Some(plant) = plants::<O>().into_iter().find(|p| p.name() == *name) else { return };
            self.planted = true;
            if !wants(self.args, "cpu") {
                return;
            }
            for &gate in self.gates.iter().filter(|g| !matches!(g, Gate::Bite | Gate::Poison)) {
                let start = std::time::Instant::now();
                let outcome = with_mutant::<O>(&plant, gate, &runner, oracle.as_deref(), self.context);
                self.note(Report {
                    stem: O::STEM,
                    gate,
                    backend: format!("cpu mutant {name}"),
                    outcome,
                    time: start.elapsed(),
                });
            }
            return;
        }
        let first = self.reports.len();
        for &gate in self.gates.iter().filter(|g| **g != Gate::Poison) {
            for report in ladder::<O>(&runner, oracle.as_deref(), "reference", &[gate], self.context) {
                self.note(report);
            }
        }
        if self.matrix && !self.args.tsv {
            self.row(first);
        }
    }
}

/// The oracle of an operation, where this build has one.
fn oracle_of<O: Operation>() -> Option<Box<dyn Runner<O>>> {
    #[cfg(feature = "oracle")]
    return oracle::of::<O>();
    #[cfg(not(feature = "oracle"))]
    None
}

impl Walk<'_> {
    /// The ladder of the formula that somebody misread everywhere alike; gate `bite` has nothing to plant in it.
    #[cfg(feature = "oracle")]
    fn misread(&mut self) {
        let runner = OnBackend::new(Reference::<f64>::new);
        let backend = format!("cpu mutant {}", oracle::MISREAD);
        for &gate in self.gates.iter().filter(|g| !matches!(g, Gate::Bite | Gate::Poison)) {
            let reports = ladder::<oracle::Misread>(&runner, Some(&oracle::Right), &backend, &[gate], self.context);
            reports.into_iter().for_each(|report| self.note(report));
        }
    }

    /// The table's head: operations by gates, or the gates of one operation.
    fn head(&self) {
        if !self.matrix {
            println!(
                "{:<16} {:<7} {:<20} {:>6} {:>10} {:>8}  status",
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
        let backend = reports.first().map_or("cpu", backend_word);
        // Every row has a cell for every gate of its table, so that columns stay columns.
        let gates: &[Gate] = if backend == "cpu" { &Gate::ALL } else { &Gate::DEVICE };
        let of = |gate: &Gate| reports.iter().find(|report| report.gate == *gate).map_or_else(|| "-".to_owned(), cell);
        let chosen = gates.iter().filter(|gate| self.gates.contains(gate));
        let cells: String = chosen.map(|gate| format!(" {:>8}", of(gate))).collect();
        let cases: usize = reports.iter().filter(|r| r.gate != Gate::Bite).map(|r| r.outcome.cases).sum();
        let seconds: f64 = reports.iter().map(|r| r.time.as_secs_f64()).sum();
        let on = reports.first().map_or("", |report| report.backend.as_str());
        let (name, width) = if backend == "cpu" { (stem.to_owned(), 16) } else { (format!("{stem} {on}"), 32) };
        println!("{name:<width$}{cells} {cases:>8} {seconds:>8.2}");
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

    /// The gates of the kernels: in a matrix, a second table with a line for each arm and precision.
    #[cfg(feature = "devices")]
    fn devices(&mut self, settings: &Settings) {
        let chosen: Vec<_> = devices::RUNTIMES.into_iter().filter(|runtime| wants(self.args, runtime.word())).collect();
        let gates: Vec<Gate> = Gate::DEVICE.into_iter().filter(|gate| self.gates.contains(gate)).collect();
        if chosen.is_empty() || gates.is_empty() {
            return;
        }
        let table = self.matrix && !self.args.tsv;
        if table {
            let words: String = gates.iter().map(|gate| format!(" {:>8}", gate.word())).collect();
            println!("{:<32}{words} {:>8} {:>8}", "kernels", "cases", "seconds");
        }
        let (args, context) = (self.args, self.context);
        let plan = devices::Plan {
            stems: &args.stems,
            gates: &gates,
            arms: &settings.arms,
            precisions: &settings.precisions,
            mutant: args.mutant.as_deref(),
            receipts: args.receipts.as_deref(),
            context,
        };
        let mut first = self.reports.len();
        for runtime in chosen {
            devices::run(runtime, &plan, &mut |event| match event {
                devices::Event::Report(report) => self.note(report),
                devices::Event::Row => {
                    if table {
                        self.row(first);
                    }
                    first = self.reports.len();
                }
                // Beside tab-separated lines there is no room for sentences.
                devices::Event::Note(line) if args.tsv => eprintln!("{line}"),
                devices::Event::Note(line) => println!("{line}"),
            });
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
                "{stem:<16} {gate:<7} {backend:<20} {cases:>6} {worst:>10} {seconds:>8.2}  {}{reason}",
                status.word()
            );
        }
        // A reader of a pipe sees each line when its gate ends; a closed pipe ends nothing.
        let _ = std::io::stdout().flush();
        self.reports.push(report);
    }
}
