//! The gates: each asks one question of a runner and gives an [`Outcome`].

use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_reference::{Dual, Error, Reference};
use ndarray::ArrayD;
use proptest::test_runner::{Config as ProptestConfig, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Comparison, Tolerance, compare, same_bits};
use crate::description::{Case, Gate, Operation, OperationOn, Role, Run};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance::FEW_ELEMENTS;

pub mod adj;
pub mod bite;
pub mod det;
pub mod diff;
pub mod fd;
pub mod form;
pub mod golden;
pub mod meta;
pub mod oracle;
pub mod poison;

/// Everything a gate needs besides the runner.
#[derive(Clone, Debug)]
pub struct Context {
    /// Seeds inputs, directions and random cases; printed with every table.
    pub seed: u64,
    /// Run only the cases whose name contains this.
    pub only: Option<String>,
    /// How many random cases to draw besides the table.
    pub random_cases: u32,
    /// Whether the cases of production size run, too.
    pub production: bool,
    /// Where golden files are.
    pub golden: PathBuf,
    /// Leave a gate at its first failing case: what `bite` wants, since red is the answer it looks for.
    pub stop_at_first: bool,
    /// What the command that runs a case again has to say besides operation, gate and seed, such as ` --arm fused`.
    pub again: String,
}

/// The state of a gate after it ran, or did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Every case is inside its tolerance.
    Pass,
    /// A case is not, or could not run.
    Fail,
    /// The gate did not run; the reason says why. Never counted as passed.
    NotRun,
    /// The gate has no meaning for this operation; the reason says why.
    NotApplicable,
}

impl Status {
    /// The word in tables.
    pub fn word(self) -> &'static str {
        match self {
            Status::Pass => "PASS",
            Status::Fail => "FAIL",
            Status::NotRun => "NOTRUN",
            Status::NotApplicable => "N/A",
        }
    }
}

/// What a gate found.
#[derive(Clone, Debug)]
#[must_use = "an outcome that nobody reads cannot fail"]
pub struct Outcome {
    /// Pass, fail, not run or not applicable.
    pub status: Status,
    /// Cases compared.
    pub cases: usize,
    /// Worst error over tolerance; 1 is the edge.
    pub worst: f64,
    /// For a failure: what is wrong and how to run it again. For a gate that did not run: why.
    pub reason: String,
}

/// One line of the ladder.
#[derive(Clone, Debug)]
pub struct Report {
    /// The operation.
    pub stem: &'static str,
    /// The gate.
    pub gate: Gate,
    /// The backend the runner is on.
    pub backend: String,
    /// What the gate found.
    pub outcome: Outcome,
    /// How long it took.
    pub time: Duration,
}

impl Outcome {
    /// The gate did not run.
    pub fn not_run(reason: impl Into<String>) -> Self {
        Self { status: Status::NotRun, cases: 0, worst: 0.0, reason: reason.into() }
    }

    /// The gate has no meaning here.
    pub fn not_applicable(reason: impl Into<String>) -> Self {
        Self { status: Status::NotApplicable, cases: 0, worst: 0.0, reason: reason.into() }
    }
}

/// Gathers cases into an outcome.
struct Tally {
    cases: usize,
    worst: f64,
    failures: usize,
    first_failure: String,
}

impl Tally {
    fn new() -> Self {
        Self { cases: 0, worst: 0.0, failures: 0, first_failure: String::new() }
    }

    /// Notes one case: its worst error over tolerance, or why it failed.
    fn note(&mut self, name: &str, result: Result<f64, String>) {
        self.cases += 1;
        let failure = match result {
            Ok(worst) if worst <= 1.0 => {
                self.worst = self.worst.max(worst);
                return;
            }
            Ok(worst) => {
                self.worst = if worst.is_nan() { f64::INFINITY } else { self.worst.max(worst) };
                format!("{worst:.3e} of tolerance")
            }
            Err(message) => {
                self.worst = f64::INFINITY;
                message
            }
        };
        self.failures += 1;
        if self.failures == 1 {
            self.first_failure = format!("case {name}: {failure}");
        }
    }

    fn outcome(self, stem: &str, gate: Gate, context: &Context) -> Outcome {
        if self.cases == 0 {
            return Outcome::not_run("no case matches");
        }
        if self.failures == 0 {
            return Outcome { status: Status::Pass, cases: self.cases, worst: self.worst, reason: String::new() };
        }
        let reason = format!(
            "{} of {} cases; {}; again: cargo xtask gate {stem} --only {} --seed {}{}",
            self.failures,
            self.cases,
            self.first_failure,
            gate.word(),
            context.seed,
            context.again
        );
        Outcome { status: Status::Fail, cases: self.cases, worst: self.worst, reason }
    }
}

/// A gate's question about one case: its worst error over tolerance, or what is wrong.
type Check<'a, O> = &'a dyn Fn(&Case<<O as Operation>::Config>, &mut ChaCha8Rng) -> Result<f64, String>;

/// Runs `check` on the case table and on random cases, which shrink on failure.
fn over_cases<O: Operation>(
    gate: Gate,
    context: &Context,
    check: impl Fn(&Case<O::Config>, &mut ChaCha8Rng) -> Result<f64, String>,
) -> Tally {
    over_some_cases::<O>(gate, context, &|_| true, &check)
}

/// [`over_cases`] without those that a device refuses.
fn over_device_cases<O: Operation>(
    gate: Gate,
    context: &Context,
    check: impl Fn(&Case<O::Config>, &mut ChaCha8Rng) -> Result<f64, String>,
) -> Tally {
    over_some_cases::<O>(gate, context, &O::on_devices, &check)
}

fn over_some_cases<O: Operation>(
    gate: Gate,
    context: &Context,
    wanted: &dyn Fn(&Case<O::Config>) -> bool,
    check: Check<'_, O>,
) -> Tally {
    let mut tally = Tally::new();
    let large = if context.production { O::production() } else { Vec::new() };
    for case in O::cases().into_iter().chain(large).filter(|case| wanted(case)) {
        if context.only.as_ref().is_some_and(|only| !case.name.contains(only.as_str())) {
            continue;
        }
        let mut rng = draw::stream(context.seed, &[O::STEM, gate.word(), &case.name]);
        tally.note(&case.name, check(&case, &mut rng));
        if context.stop_at_first && tally.failures > 0 {
            return tally;
        }
    }
    if context.only.is_some() || context.random_cases == 0 {
        return tally;
    }
    let mut seed = [0u8; 32];
    draw::stream(context.seed, &[O::STEM, gate.word(), "random cases"]).fill_bytes(&mut seed);
    let config = ProptestConfig {
        cases: context.random_cases,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Default::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let passed = std::cell::RefCell::new((0usize, 0.0f64));
    let result = runner.run(&O::strategy(), |case| {
        if !wanted(&case) {
            return Ok(());
        }
        let mut rng = draw::stream(context.seed, &[O::STEM, gate.word(), &case.name]);
        match check(&case, &mut rng) {
            Ok(worst) if worst <= 1.0 => {
                let mut passed = passed.borrow_mut();
                *passed = (passed.0 + 1, passed.1.max(worst));
                Ok(())
            }
            Ok(worst) => Err(TestCaseError::fail(format!("{worst:.3e} of tolerance"))),
            Err(message) => Err(TestCaseError::fail(message)),
        }
    });
    let (cases, worst) = passed.into_inner();
    tally.cases += cases;
    tally.worst = tally.worst.max(worst);
    if let Err(error) = result {
        let (name, message) = match error {
            TestError::Fail(reason, case) => (format!("{case:?} (random, shrunk)"), reason.message().to_owned()),
            TestError::Abort(reason) => ("random".to_owned(), reason.message().to_owned()),
        };
        tally.note(&name, Err(message));
    }
    tally
}

/// Upstream gradients of a case: normal for every output that takes one, absent where the case says so.
fn draw_upstream<O: Operation>(case: &Case<O::Config>, outputs: &Values, rng: &mut ChaCha8Rng) -> Values {
    let mut upstream = Values::new();
    for (name, value) in outputs.iter() {
        let optional = O::optional_upstream().contains(&name);
        if O::no_upstream().contains(&name) || (optional && !case.has(name)) {
            continue;
        }
        upstream.set(name, draw::normal(rng, value.shape()));
    }
    upstream
}

/// Inputs, upstream gradients and the run of a case.
fn full_run<O: Operation>(
    runner: &dyn Runner<O>,
    case: &Case<O::Config>,
    rng: &mut ChaCha8Rng,
) -> Result<(Values, Option<Values>, Run<ArrayD<f64>>), String> {
    let inputs = O::draw(case, rng);
    let forward = runner.run(&case.config, &inputs, None).map_err(|e| e.to_string())?;
    if O::NO_GRADIENT.is_some() {
        return Ok((inputs, None, forward));
    }
    let upstream = draw_upstream::<O>(case, &forward.outputs, rng);
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    // A backward pass changes nothing about the outputs, and the second of two equal calls reads nothing of the first.
    for (name, first) in forward.outputs.iter() {
        let second = run.outputs.get(name).ok_or_else(|| format!("`{name}` is absent when a gradient is asked for"))?;
        passed(same_bits(name, second.view(), first.view())).map_err(|e| format!("forward alone differs: {e}"))?;
    }
    Ok((inputs, Some(upstream), run))
}

/// The inputs that are present and have a gradient that is the derivative.
fn differentiable<O: Operation>(config: &O::Config, inputs: &Values) -> Vec<&'static str> {
    let specs = O::tensors();
    let passed_by = O::straight_through(config);
    let has_gradient = |s: &&crate::description::TensorSpec| {
        matches!(s.role, Role::Input | Role::Param) && !passed_by.contains(&s.name)
    };
    specs.iter().filter(has_gradient).map(|s| s.name).filter(|name| inputs.get(name).is_some()).collect()
}

/// The sum of <w, output> over all outputs that have an upstream gradient, and the sum of absolute terms.
fn inner_product(upstream: &Values, outputs: &Values) -> (f64, f64) {
    let mut sum = 0.0;
    let mut magnitude = 0.0;
    for (name, w) in upstream.iter() {
        if let Some(out) = outputs.get(name) {
            for (&w, &o) in w.iter().zip(out) {
                sum += w * o;
                magnitude += (w * o).abs();
            }
        }
    }
    (sum, magnitude)
}

/// Fresh upstream gradients to see how large a short gradient usually is.
const SIZE_DRAWS: usize = 8;

/// The rms that each short gradient usually has with this case's inputs.
///
/// A parameter's gradient is a sum over all rows, and for some upstream gradients its terms cancel. A sum a hundred
/// times smaller than usual has a relative rounding error a hundred times larger than usual, which is no fault.
/// `trusted` is the side that the result is held against, so a fault cannot widen its own bound.
fn usual_sizes<O: Operation>(
    case: &Case<O::Config>,
    want: &Run<ArrayD<f64>>,
    rng: &mut ChaCha8Rng,
    trusted: impl Fn(&Values) -> Result<Run<ArrayD<f64>>, String>,
) -> Result<Named<f64>, String> {
    rms_of_draws(&want.grads, || Ok(trusted(&draw_upstream::<O>(case, &want.outputs, rng))?.grads))
}

/// The rms that the short tensors among `like` have over some draws.
///
/// A tensor with more than [`FEW_ELEMENTS`] elements, zeros not counted, is never small as a whole by chance.
fn rms_of_draws(like: &Values, mut draw: impl FnMut() -> Result<Values, String>) -> Result<Named<f64>, String> {
    let few = |x: &ArrayD<f64>| (1..=FEW_ELEMENTS).contains(&x.iter().filter(|x| **x != 0.0).count());
    let mut squares: Named<f64> = like.iter().filter(|(_, x)| few(x)).map(|(name, _)| (name, 0.0)).collect();
    if squares.names().next().is_none() {
        return Ok(squares);
    }
    for _ in 0..SIZE_DRAWS {
        let drawn = draw()?;
        for (name, square) in squares.iter_mut() {
            let tensor = drawn.at(name);
            *square += tensor.iter().map(|x| x * x).sum::<f64>() / (SIZE_DRAWS * tensor.len()) as f64;
        }
    }
    Ok(squares.map(|_, square| square.sqrt()))
}

/// Compares every output and gradient of two runs; a tensor that only one side has is a failure.
fn compare_runs(
    got: &Run<ArrayD<f64>>,
    want: &Run<ArrayD<f64>>,
    usual: &Named<f64>,
    tolerance: &Tolerance,
) -> Result<f64, String> {
    let outputs = compare_named(&got.outputs, &want.outputs, "", |_| *tolerance)?;
    let grads = compare_named(&got.grads, &want.grads, "d", |name| {
        tolerance.usual(usual.get(name).copied().unwrap_or_default())
    })?;
    Ok(outputs.max(grads))
}

fn compare_named(
    got: &Values,
    want: &Values,
    prefix: &str,
    tolerance: impl Fn(&str) -> Tolerance,
) -> Result<f64, String> {
    let mut worst = 0.0f64;
    if let Some(extra) = got.names().find(|name| want.get(name).is_none()) {
        return Err(format!("`{prefix}{extra}` is there, expected it absent"));
    }
    for (name, want) in want.iter() {
        let Some(got) = got.get(name) else { return Err(format!("`{prefix}{name}` is absent")) };
        let comparison = compare(&format!("{prefix}{name}"), got.view(), want.view(), &tolerance(name));
        worst = worst.max(passed(comparison)?);
    }
    Ok(worst)
}

/// The measure of a comparison that passed, or its message.
pub(crate) fn passed(comparison: Comparison) -> Result<f64, String> {
    if comparison.passes() { Ok(comparison.worst) } else { Err(comparison.to_string()) }
}

/// Runs forward and backward of cases and compares nothing: for a device that only compiles, or that is watched.
#[inline(never)]
pub fn exercise<O: Operation>(runner: &dyn Runner<O>, cases: &[Case<O::Config>]) -> Result<usize, String> {
    for case in cases {
        let mut rng = draw::stream(0, &[O::STEM, "exercise", &case.name]);
        let inputs = O::draw(case, &mut rng);
        let run = |upstream: Option<&Values>| {
            runner.run(&case.config, &inputs, upstream).map_err(|e| format!("case {}: {e}", case.name))
        };
        let forward = run(None)?;
        if O::NO_GRADIENT.is_none() {
            run(Some(&draw_upstream::<O>(case, &forward.outputs, &mut rng)))?;
        }
    }
    Ok(cases.len())
}

/// Runs one gate on an operation.
fn run_gate<O>(gate: Gate, runner: &dyn Runner<O>, oracle: Option<&dyn Runner<O>>, context: &Context) -> Outcome
where
    O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
{
    match gate {
        Gate::Fd => fd::gate::<O>(runner, context),
        Gate::Adj => adj::gate::<O>(runner, context),
        Gate::Form => form::gate::<O>(runner, context),
        Gate::Diff => diff::gate_f32::<O>(runner, context),
        Gate::Meta => meta::gate::<O>(runner, context),
        Gate::Poison => Outcome::not_applicable("the reference owns its memory"),
        Gate::Det => det::gate::<O>(runner, context),
        Gate::Oracle => oracle::gate::<O>(oracle, runner, context),
        Gate::Golden => golden::gate::<O>(runner, context),
        Gate::Bite => bite::gate::<O>(runner, oracle, context),
    }
}

/// Runs the chosen gates of one operation in ladder order; without an oracle its gate does not run.
#[inline(never)]
pub fn ladder<O>(
    runner: &dyn Runner<O>,
    oracle: Option<&dyn Runner<O>>,
    backend: &str,
    gates: &[Gate],
    context: &Context,
) -> Vec<Report>
where
    O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
{
    gates
        .iter()
        .map(|&gate| {
            let start = Instant::now();
            let outcome = run_gate::<O>(gate, runner, oracle, context);
            Report { stem: O::STEM, gate, backend: backend.to_owned(), outcome, time: start.elapsed() }
        })
        .collect()
}

/// An error of an operation as a message.
fn text(error: Error) -> String {
    error.to_string()
}
