//! The gates of the GPU kernels: on CUDA, and on Mesa's software Vulkan driver, where they run without a GPU.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use dormouse_cuda::receipts::word;
use dormouse_cuda::runtime::Variant;
use dormouse_cuda::{Arm, Engine as _, Gpu, Mutant, Offline, Opened, Pass, Runtime, catalogue};
use dormouse_gate::receipts::{self, Evidence};
use dormouse_harness::description::{Case, Gate, Operation, OperationOn, Run};
use dormouse_harness::gates::diff::Figures;
use dormouse_harness::gates::{Context, Outcome, Report, Status, det, diff, exercise, meta, poison};
use dormouse_harness::named::{Named, Values};
use dormouse_harness::ops::adamw::AdamwOp;
use dormouse_harness::ops::blend::BlendOp;
use dormouse_harness::ops::controller::ControllerOp;
use dormouse_harness::ops::cross_entropy::CrossEntropyOp;
use dormouse_harness::ops::decay_gate::DecayGateOp;
use dormouse_harness::ops::ema::EmaOp;
use dormouse_harness::ops::embedding::EmbeddingOp;
use dormouse_harness::ops::engram::EngramOp;
use dormouse_harness::ops::engram_hash::EngramHashOp;
use dormouse_harness::ops::expert::ExpertOp;
use dormouse_harness::ops::gated_rms_norm::GatedRmsNormOp;
use dormouse_harness::ops::jepa::JepaOp;
use dormouse_harness::ops::kda::KdaOp;
use dormouse_harness::ops::koleo::KoleoOp;
use dormouse_harness::ops::l2_norm::L2NormOp;
use dormouse_harness::ops::layer_norm::LayerNormOp;
use dormouse_harness::ops::linear::LinearOp;
use dormouse_harness::ops::mask_vector::MaskVectorOp;
use dormouse_harness::ops::muon::MuonOp;
use dormouse_harness::ops::record::RecordOp;
use dormouse_harness::ops::residual::ResidualOp;
use dormouse_harness::ops::retract::RetractOp;
use dormouse_harness::ops::retract_all::RetractAllOp;
use dormouse_harness::ops::rms_norm::RmsNormOp;
use dormouse_harness::ops::row_adam::RowAdamOp;
use dormouse_harness::ops::sanitise::SanitiseOp;
use dormouse_harness::ops::short_conv::ShortConvOp;
use dormouse_harness::ops::spectral::SpectralOp;
use dormouse_harness::runner::{OnBackend, Runner, upload};
use dormouse_reference::{DType, Error, Precision, Reference, Tensors};
use ndarray::ArrayD;

/// The backends, in the order they run.
pub const RUNTIMES: [Runtime; 2] = [Runtime::Lavapipe, Runtime::Cuda];

/// Their words.
pub const WORDS: [&str; 2] = [RUNTIMES[0].word(), RUNTIMES[1].word()];

/// Every precision, as `--precision` orders them.
pub const PRECISIONS: [Precision; 3] = [Precision::Full, Precision::Tf32, Precision::Bf16];

/// Words of NaN before and after inputs, in turn. Odd, so that an input starts where no alignment helps it.
const MARGINS: [usize; 2] = [3, 3];

/// The same where the runtime's matrix library may run: it has other algorithms, and so other bits, for factors that do
/// not start at a multiple of 16 bytes. Behind 8 words an operand's copy in bf16 is part of one of the whole buffer, as a
/// weight's in a model is; behind 4 it is a copy of its own.
const LIBRARY_MARGINS: [usize; 2] = [4, 8];

/// Runs an operation on a device: every run on a fresh [`Gpu`], so that nothing is left of the run before.
struct OnDevice<'a> {
    opened: &'a Opened,
    setting: &'a Setting,
    way: Way,
}

/// What a run on a device is to show.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The result.
    Clean,
    /// That it does not depend on memory around inputs, nor on what scratch held.
    Poisoned,
    /// That pieces of work which may run at the same time do not need each other, nor what scratch held.
    Reversed,
}

/// Which kernels run.
struct Setting {
    arm: Arm,
    precision: Precision,
    /// A fault to compile the kernels with.
    mutant: Option<&'static str>,
    /// What the devices' ledgers say of the operation's calls.
    calls: Mutex<BTreeSet<(Pass, Arm)>>,
    /// The first run that gave no result.
    refused: Mutex<Option<String>>,
}

impl Setting {
    fn new(arm: Arm, precision: Precision, mutant: Option<&'static str>) -> Self {
        Self { arm, precision, mutant, calls: Mutex::default(), refused: Mutex::default() }
    }

    fn calls(&self) -> BTreeSet<(Pass, Arm)> {
        self.calls.lock().unwrap_or_else(|poison| poison.into_inner()).clone()
    }

    fn refused(&self) -> Option<String> {
        self.refused.lock().unwrap_or_else(|poison| poison.into_inner()).clone()
    }
}

impl<O: OperationOn<Gpu>> Runner<O> for OnDevice<'_> {
    fn run(&self, config: &O::Config, inputs: &Values, upstream: Option<&Values>) -> Result<Run<ArrayD<f64>>, Error> {
        self.result::<O>(config, inputs, upstream).inspect_err(|error| {
            let mut refused = self.setting.refused.lock().unwrap_or_else(|poison| poison.into_inner());
            refused.get_or_insert_with(|| error.to_string());
        })
    }
}

impl OnDevice<'_> {
    fn result<O: OperationOn<Gpu>>(
        &self,
        config: &O::Config,
        inputs: &Values,
        upstream: Option<&Values>,
    ) -> Result<Run<ArrayD<f64>>, Error> {
        let b = self.opened.device();
        b.set_arms(self.setting.arm);
        b.set_poison(self.way != Way::Clean);
        b.set_reversed(self.way == Way::Reversed);
        if let Some(mutant) = self.setting.mutant {
            b.plant(O::STEM, mutant)?;
        }
        let library = O::PRODUCTS > 0 && self.setting.arm == Arm::Fused;
        let margins = if library { LIBRARY_MARGINS } else { MARGINS };
        let send = |values: &Values, integers: &[&str]| match self.way {
            Way::Poisoned => upload_in_nan(&b, values, integers, margins),
            _ => upload(&b, values, integers),
        };
        let inputs = send(inputs, O::integers())?;
        let upstream = upstream.map(|u| send(u, &[])).transpose()?;
        let mut config = config.clone();
        O::set_precision(&mut config, self.setting.precision);
        let run = O::run(&b, &config, &inputs, upstream.as_ref())?;
        let ledger = b.ledger();
        let own = ledger.calls.keys().filter(|(stem, ..)| *stem == O::STEM).map(|&(_, pass, arm)| (pass, arm));
        self.setting.calls.lock().unwrap_or_else(|poison| poison.into_inner()).extend(own);
        Ok(Run { outputs: run.outputs.try_map(|_, t| b.download(t))?, grads: run.grads.try_map(|_, t| b.download(t))? })
    }
}

/// Uploads values into the middle of buffers of NaN; integers get the largest number around them.
fn upload_in_nan<B: Tensors>(
    b: &B,
    values: &Values,
    integers: &[&str],
    margins: [usize; 2],
) -> Result<Named<B::Tensor>, Error> {
    let mut margins = margins.into_iter().cycle();
    values.try_map(|name, array| {
        let margin = margins.next().expect("it has no end");
        let (dtype, poison) =
            if integers.contains(&name) { (DType::U32, f64::from(u32::MAX)) } else { (b.float(), f64::NAN) };
        let around = b.persistent(&[array.len() + 2 * margin], dtype)?;
        b.fill(&around, poison)?;
        let tensor = b.view(&around, margin, array.shape())?;
        b.upload(array.view(), &tensor)?;
        Ok(tensor)
    })
}

/// What to run on a backend.
pub struct Plan<'a> {
    /// Operations; none means all.
    pub stems: &'a [String],
    pub gates: &'a [Gate],
    pub arms: &'a [Arm],
    pub precisions: &'a [Precision],
    /// Plant this fault instead of running the ladder.
    pub mutant: Option<&'a str>,
    /// Where receipts go.
    pub receipts: Option<&'a Path>,
    pub context: &'a Context,
}

impl Plan<'_> {
    fn wants(&self, stem: &str) -> bool {
        self.stems.is_empty() || self.stems.iter().any(|s| s == stem)
    }
}

/// What comes of a plan, as it comes.
pub enum Event {
    /// A gate has run.
    Report(Report),
    /// The reports since the last row belong together: one operation, one arm, one precision.
    Row,
    /// A line for people.
    Note(String),
}

/// Who is told.
type Sink<'a> = &'a mut dyn FnMut(Event);

/// The mutants of an operation's kernels; none where there are no kernels.
pub fn mutants(stem: &str) -> &'static [Mutant] {
    catalogue().iter().find(|kernels| kernels.stem == stem).map_or(&[], |kernels| kernels.mutants)
}

/// Stems with a function for each of them; the last line lists the operations that have kernels.
macro_rules! operations {
    ($task:ident, $signature:ty; $($operation:ident)*) => {
        [$(($operation::STEM, $task::<$operation> as $signature)),*]
    };
    ($task:ident, $signature:ty) => {
        operations!($task, $signature;
            AdamwOp BlendOp ControllerOp CrossEntropyOp DecayGateOp EmaOp EmbeddingOp EngramOp EngramHashOp ExpertOp
            GatedRmsNormOp JepaOp KdaOp KoleoOp L2NormOp LayerNormOp LinearOp MaskVectorOp MuonOp RecordOp ResidualOp
            RetractOp RetractAllOp RmsNormOp RowAdamOp
            SanitiseOp ShortConvOp SpectralOp)
    };
}

/// Runs a plan on one backend.
pub fn run(runtime: Runtime, plan: &Plan<'_>, sink: Sink<'_>) {
    let opened = runtime.open().map_err(|why| why.to_string());
    for (_, task) in operations!(ladder, Ladder).into_iter().filter(|(stem, _)| plan.wants(stem)) {
        task(runtime, &opened, plan, sink);
    }
}

/// What to do with one operation on an opened runtime, or on one that could not be opened.
type Ladder = fn(Runtime, &Result<Opened, String>, &Plan<'_>, Sink<'_>);

/// Something to run on an open runtime: gives how many cases there were.
type Exercise = fn(&Opened) -> Result<usize, String>;

/// The precisions that differ for an operation: without products they are all one arithmetic.
fn precisions<'a, O: Operation>(plan: &Plan<'a>) -> &'a [Precision] {
    if O::PRODUCTS == 0 { &[Precision::Full] } else { plan.precisions }
}

/// What the arithmetic is called behind the arm.
fn label(backend: &str, setting: &Setting) -> String {
    let precision = match setting.precision {
        Precision::Full => String::new(),
        other => format!(" {}", word(other)),
    };
    let mutant = setting.mutant.map(|name| format!(" mutant {name}")).unwrap_or_default();
    format!("{backend} {}{precision}{mutant}", setting.arm)
}

/// The gates of one operation in every setting of the plan, and its receipts.
fn ladder<O>(runtime: Runtime, opened: &Result<Opened, String>, plan: &Plan<'_>, sink: Sink<'_>)
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    let planted = plan.mutant.map(|name| mutants(O::STEM).iter().find(|mutant| mutant.name == name));
    if planted == Some(None) {
        return;
    }
    let planted = planted.flatten();
    for &precision in precisions::<O>(plan) {
        for &arm in plan.arms {
            if planted.is_some_and(|mutant| mutant.arm != arm) {
                continue;
            }
            let setting = Setting::new(arm, precision, planted.map(|mutant| mutant.name));
            let mut evidence = Evidence::default();
            for &gate in plan.gates {
                // Mutants name their own arm, so all of them bite in one line; a planted one has nothing to bite.
                if gate == Gate::Bite && (arm != Arm::Fused || planted.is_some()) {
                    continue;
                }
                let start = Instant::now();
                let outcome = match opened {
                    Err(why) => Outcome::not_run(why),
                    Ok(opened) => gate_in::<O>(gate, opened, &setting, plan.context, &mut evidence.figures),
                };
                evidence.note(gate, &outcome);
                let backend = label(runtime.word(), &setting);
                sink(Event::Report(Report { stem: O::STEM, gate, backend, outcome, time: start.elapsed() }));
            }
            sink(Event::Row);
            if let (Some(folder), Ok(opened), Arm::Fused, None) = (plan.receipts, opened, arm, planted) {
                evidence.calls = setting.calls();
                let chosen = if O::PRODUCTS == 0 { plan.precisions } else { &[precision][..] };
                receipts::write::<O>(opened, folder, chosen, &evidence, plan.context)
                    .into_iter()
                    .for_each(|line| sink(Event::Note(line)));
            }
        }
    }
}

/// One gate in one setting; a device that refuses the precision is no failure, and nothing is then shown about it.
fn gate_in<O>(gate: Gate, opened: &Opened, setting: &Setting, context: &Context, figures: &mut Vec<Figures>) -> Outcome
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    if let Some(refusal) = refuses::<O>(opened, setting) {
        return Outcome::not_applicable(refusal);
    }
    // A software driver would take hours for the sizes that a model trains with.
    let production = opened.runtime() == Runtime::Cuda && matches!(gate, Gate::Diff | Gate::Poison | Gate::Det);
    let context = Context { again: again(opened.runtime().word(), setting), production, ..context.clone() };
    if gate == Gate::Bite {
        return bite::<O>(opened, setting.precision, &context);
    }
    one::<O>(gate, opened, setting, &context, figures)
}

/// What the command line needs to run a case again.
fn again(backend: &str, setting: &Setting) -> String {
    let mutant = setting.mutant.map(|name| format!(" --mutant {name}")).unwrap_or_default();
    format!(" --backend {backend} --arm {} --precision {}{mutant}", setting.arm, word(setting.precision))
}

/// Why an arm does not compute at a precision, in its own words.
fn refuses<O>(opened: &Opened, setting: &Setting) -> Option<String>
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    if setting.precision == Precision::Full {
        return None;
    }
    let case = O::cases().into_iter().next()?;
    let mut rng = dormouse_harness::draw::stream(0, &[O::STEM, "precision"]);
    let runner: &dyn Runner<O> = &OnDevice { opened, setting, way: Way::Clean };
    match runner.run(&case.config, &O::draw(&case, &mut rng), None) {
        Err(error @ Error::Config { field: "precision", .. }) => Some(error.to_string()),
        _ => None,
    }
}

fn one<O>(gate: Gate, opened: &Opened, setting: &Setting, context: &Context, figures: &mut Vec<Figures>) -> Outcome
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    let [clean, poisoned, reversed] =
        [Way::Clean, Way::Poisoned, Way::Reversed].map(|way| OnDevice { opened, setting, way });
    let [clean, poisoned, reversed]: [&dyn Runner<O>; 3] = [&clean, &poisoned, &reversed];
    match gate {
        Gate::Diff => {
            let reference = OnBackend::new(Reference::<f64>::new);
            let (outcome, found) = diff::gate::<O>(clean, &reference, setting.precision, context);
            *figures = found;
            outcome
        }
        Gate::Meta => {
            // The plain kernels sum every element in one order; a library's products choose one by their shape.
            let other_shapes_same_bits = setting.arm == Arm::Plain;
            let device = meta::Device { precision: setting.precision, other_shapes_same_bits };
            meta::gate_device::<O>(clean, device, context)
        }
        Gate::Poison => poison::gate::<O>(clean, poisoned, context),
        Gate::Det => det::gate_device::<O>(clean, reversed, context),
        other => Outcome::not_applicable(format!("{} is a gate of the reference", other.word())),
    }
}

/// Every fault that can be planted in the operation's kernels turns the gate red that it names; null ones keep it green.
fn bite<O>(opened: &Opened, precision: Precision, context: &Context) -> Outcome
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    let mutants = mutants(O::STEM);
    if mutants.is_empty() {
        return Outcome::not_applicable("no mutants in these kernels");
    }
    if let Some(refusal) = dormouse_harness::gates::bite::filtered(context) {
        return refusal;
    }
    let context = Context { stop_at_first: true, random_cases: 0, ..context.clone() };
    let mut wrong = Vec::new();
    for mutant in mutants {
        let gate = Gate::DEVICE.into_iter().find(|gate| gate.word() == mutant.gate).expect("a gate of devices");
        let setting = Setting::new(mutant.arm, precision, Some(mutant.name));
        let outcome = one::<O>(gate, opened, &setting, &context, &mut Vec::new());
        let expected = if mutant.is_null() { Status::Pass } else { Status::Fail };
        if let Some(error) = setting.refused() {
            // A kernel that does not compile is no fault that a gate has seen.
            wrong.push(format!("{} gave no result: {error}", mutant.name));
        } else if outcome.status != expected {
            let (found, reason) = (outcome.status.word(), outcome.reason);
            wrong.push(format!("{} is {found} on {}, expected {} {reason}", mutant.name, mutant.gate, expected.word()));
        }
    }
    if wrong.is_empty() {
        return Outcome { status: Status::Pass, cases: mutants.len(), worst: 0.0, reason: String::new() };
    }
    let reason = format!("{} of {}: {}", wrong.len(), mutants.len(), wrong.join("; "));
    Outcome { status: Status::Fail, cases: mutants.len(), worst: f64::INFINITY, reason }
}

/// Compiles every kernel that the case tables launch, in both arms and at every precision, and runs none: gives the
/// number of variants, or of faults. The error says what is missing on this machine. A planted kernel that is no CUDA C++
/// comes with the first stem.
pub fn compile(stems: &[String], plant: bool, sink: &mut dyn FnMut(String)) -> Result<Result<usize, usize>, String> {
    let client = Offline::open().map_err(|why| why.to_string())?;
    sink(format!("compiling for {}", Offline::describe(&client)));
    if plant {
        Offline::plant(&client);
    }
    let opened = Opened::Offline(client.clone());
    let (mut good, mut bad) = (0, 0);
    let steps = operations!(exercise_all, Exercise);
    for (stem, step) in steps.into_iter().filter(|(stem, _)| stems.is_empty() || stems.iter().any(|s| s == stem)) {
        let start = Instant::now();
        let ran = step(&opened);
        let variants = Offline::take(&client).map_err(|why| why.to_string())?;
        let failures: Vec<&Variant> = variants.iter().filter(|variant| variant.bytes.is_err()).collect();
        let bytes: usize = variants.iter().filter_map(|variant| variant.bytes.as_ref().ok()).sum();
        let status = if failures.is_empty() && ran.is_ok() { "PASS" } else { "FAIL" };
        let (count, seconds) = (variants.len(), start.elapsed().as_secs_f64());
        sink(format!("{stem:<16} {count:>5} variants {bytes:>9} B of code {seconds:>7.2} s  {status}"));
        for variant in &failures {
            sink(format!("  {}", variant.bytes.as_ref().expect_err("it was chosen for that")));
        }
        if let Err(error) = &ran {
            sink(format!("  {error}"));
        }
        good += variants.len() - failures.len();
        bad += failures.len() + usize::from(ran.is_err());
    }
    Ok(if bad == 0 { Ok(good) } else { Err(bad) })
}

/// Whether CUDA answers here, or why it does not.
pub fn cuda() -> Result<(), String> {
    Runtime::Cuda.available().map_err(|why| why.to_string())
}

/// The operations that have kernels.
pub fn with_kernels() -> Vec<&'static str> {
    operations!(exercise_smaller, Exercise).map(|(stem, _)| stem).to_vec()
}

/// Runs the smaller cases of an operation once on CUDA and compares nothing: gives how many there were.
pub fn exercise_on_cuda(stem: &str) -> Result<usize, String> {
    let opened = Runtime::Cuda.open().map_err(|why| why.to_string())?;
    let tasks = operations!(exercise_smaller, Exercise);
    let task = tasks.into_iter().find(|(known, _)| *known == stem).map(|(_, task)| task);
    task.ok_or_else(|| format!("there are no kernels of `{stem}`"))?(&opened)
}

fn exercise_all<O>(opened: &Opened) -> Result<usize, String>
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    let cases: Vec<_> = O::cases().into_iter().filter(O::on_devices).collect();
    exercise_in_every_setting::<O>(opened, &cases)
}

fn exercise_smaller<O>(opened: &Opened) -> Result<usize, String>
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    exercise_in_every_setting::<O>(opened, &smaller_half::<O>())
}

/// The smaller half of the cases that launch anything.
fn smaller_half<O: Operation>() -> Vec<Case<O::Config>> {
    let mut cases = O::cases();
    cases.retain(|case| O::on_devices(case) && case.dims.iter().all(|(_, size)| *size > 0));
    let elements = |case: &Case<O::Config>| -> usize {
        O::tensors().iter().map(|spec| case.shape(spec).iter().product::<usize>()).sum()
    };
    cases.sort_by_key(elements);
    cases.truncate(cases.len().div_ceil(2));
    cases
}

/// Runs cases of an operation in every arm and precision that it has.
fn exercise_in_every_setting<O>(opened: &Opened, chosen: &[Case<O::Config>]) -> Result<usize, String>
where
    O: OperationOn<Gpu> + OperationOn<Reference<f64>>,
{
    let all: &[Precision] = if O::PRODUCTS == 0 { &PRECISIONS[..1] } else { &PRECISIONS };
    let mut cases = 0;
    for (&precision, arm) in all.iter().flat_map(|p| Arm::ALL.map(|arm| (p, arm))) {
        let setting = Setting::new(arm, precision, None);
        if refuses::<O>(opened, &setting).is_none() {
            cases += exercise::<O>(&OnDevice { opened, setting: &setting, way: Way::Poisoned }, chosen)?;
        }
    }
    Ok(cases)
}
