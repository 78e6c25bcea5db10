//! The gates of the GPU kernels: on CUDA, and on Mesa's software Vulkan driver, where they run without a GPU.

use std::time::Instant;

use dormouse_cuda::{Arm, Client, Cuda, Device, Engine, Lavapipe, catalogue};
use dormouse_harness::description::{Gate, Operation, OperationOn, Run};
use dormouse_harness::gates::{Context, Outcome, Report, Status, det, diff, poison};
use dormouse_harness::named::{Named, Values};
use dormouse_harness::ops::adamw::AdamwOp;
use dormouse_harness::ops::blend::BlendOp;
use dormouse_harness::ops::controller::ControllerOp;
use dormouse_harness::ops::cross_entropy::CrossEntropyOp;
use dormouse_harness::ops::decay_gate::DecayGateOp;
use dormouse_harness::ops::embedding::EmbeddingOp;
use dormouse_harness::ops::expert::ExpertOp;
use dormouse_harness::ops::gated_rms_norm::GatedRmsNormOp;
use dormouse_harness::ops::kda::KdaOp;
use dormouse_harness::ops::l2_norm::L2NormOp;
use dormouse_harness::ops::linear::LinearOp;
use dormouse_harness::ops::record::RecordOp;
use dormouse_harness::ops::residual::ResidualOp;
use dormouse_harness::ops::retract::RetractOp;
use dormouse_harness::ops::rms_norm::RmsNormOp;
use dormouse_harness::ops::sanitise::SanitiseOp;
use dormouse_harness::ops::short_conv::ShortConvOp;
use dormouse_harness::ops::spectral::SpectralOp;
use dormouse_harness::runner::{OnBackend, Runner, upload};
use dormouse_reference::{DType, Error, Reference, Tensors};
use ndarray::ArrayD;

/// The words of the backends, in the order they run.
pub const WORDS: [&str; 2] = [Lavapipe::WORD, Cuda::WORD];

/// Words of NaN before and after an input. Odd, so that the input starts where no alignment helps it.
const MARGIN: usize = 3;

/// Runs an operation on a device: every run on a fresh [`Device`], so that nothing is left of the run before.
struct OnDevice<R: Engine> {
    client: Client<R>,
    arm: Arm,
    poisoned: bool,
    /// A fault to compile the kernels with.
    mutant: Option<&'static str>,
}

impl<R: Engine, O: OperationOn<Device<R>>> Runner<O> for OnDevice<R> {
    fn run(&self, config: &O::Config, inputs: &Values, upstream: Option<&Values>) -> Result<Run<ArrayD<f64>>, Error> {
        let b = Device::<R>::on(self.client.clone());
        b.set_arms(self.arm);
        b.set_poison(self.poisoned);
        if let Some(mutant) = self.mutant {
            b.plant(O::STEM, mutant)?;
        }
        let send = |values: &Values, integers: &[&str]| {
            if self.poisoned { upload_in_nan(&b, values, integers) } else { upload(&b, values, integers) }
        };
        let inputs = send(inputs, O::integers())?;
        let upstream = upstream.map(|u| send(u, &[])).transpose()?;
        let run = O::run(&b, config, &inputs, upstream.as_ref())?;
        Ok(Run { outputs: run.outputs.try_map(|_, t| b.download(t))?, grads: run.grads.try_map(|_, t| b.download(t))? })
    }
}

/// Uploads values into the middle of buffers of NaN; integers get the largest number around them.
fn upload_in_nan<B: Tensors>(b: &B, values: &Values, integers: &[&str]) -> Result<Named<B::Tensor>, Error> {
    values.try_map(|name, array| {
        let (dtype, poison) =
            if integers.contains(&name) { (DType::U32, f64::from(u32::MAX)) } else { (b.float(), f64::NAN) };
        let around = b.persistent(&[array.len() + 2 * MARGIN], dtype)?;
        b.fill(&around, poison)?;
        let tensor = b.view(&around, MARGIN, array.shape())?;
        b.upload(array.view(), &tensor)?;
        Ok(tensor)
    })
}

/// Runs the chosen gates on one backend: the reports of each operation that has kernels, as they come.
pub fn run<'a>(
    word: &str,
    stems: &'a [String],
    gates: &'a [Gate],
    context: &'a Context,
) -> Box<dyn Iterator<Item = Vec<Report>> + 'a> {
    if word == Cuda::WORD { on::<Cuda>(stems, gates, context) } else { on::<Lavapipe>(stems, gates, context) }
}

/// The gates of one operation on an opened runtime, or on one that could not be opened.
type Ladder<R> = fn(&[Gate], &Result<Client<R>, String>, &Context) -> Vec<Report>;

fn on<'a, R: Engine>(
    stems: &'a [String],
    gates: &'a [Gate],
    context: &'a Context,
) -> Box<dyn Iterator<Item = Vec<Report>> + 'a> {
    let operations: [(&str, Ladder<R>); 18] = [
        (AdamwOp::STEM, ladder::<R, AdamwOp>),
        (BlendOp::STEM, ladder::<R, BlendOp>),
        (ControllerOp::STEM, ladder::<R, ControllerOp>),
        (CrossEntropyOp::STEM, ladder::<R, CrossEntropyOp>),
        (DecayGateOp::STEM, ladder::<R, DecayGateOp>),
        (EmbeddingOp::STEM, ladder::<R, EmbeddingOp>),
        (ExpertOp::STEM, ladder::<R, ExpertOp>),
        (GatedRmsNormOp::STEM, ladder::<R, GatedRmsNormOp>),
        (KdaOp::STEM, ladder::<R, KdaOp>),
        (L2NormOp::STEM, ladder::<R, L2NormOp>),
        (LinearOp::STEM, ladder::<R, LinearOp>),
        (RecordOp::STEM, ladder::<R, RecordOp>),
        (ResidualOp::STEM, ladder::<R, ResidualOp>),
        (RetractOp::STEM, ladder::<R, RetractOp>),
        (RmsNormOp::STEM, ladder::<R, RmsNormOp>),
        (SanitiseOp::STEM, ladder::<R, SanitiseOp>),
        (ShortConvOp::STEM, ladder::<R, ShortConvOp>),
        (SpectralOp::STEM, ladder::<R, SpectralOp>),
    ];
    let client = R::open().map_err(|why| why.to_string());
    let chosen = operations.into_iter().filter(|(stem, _)| stems.is_empty() || stems.iter().any(|s| s == stem));
    Box::new(chosen.map(move |(_, ladder)| ladder(gates, &client, context)))
}

fn ladder<R, O>(gates: &[Gate], client: &Result<Client<R>, String>, context: &Context) -> Vec<Report>
where
    R: Engine,
    O: OperationOn<Device<R>> + OperationOn<Reference<f64>>,
{
    let arms = Arm::ALL.into_iter().flat_map(|arm| gates.iter().map(move |&gate| (arm, gate)));
    // Mutants name their own arm, so all of them bite in one line.
    arms.filter(|&(arm, gate)| gate != Gate::Bite || arm == Arm::Fused)
        .map(|(arm, gate)| {
            let start = Instant::now();
            let outcome = match client {
                Err(why) => Outcome::not_run(why),
                Ok(client) if gate == Gate::Bite => bite::<R, O>(client, context),
                Ok(client) => one::<R, O>(gate, client, arm, None, context),
            };
            Report { stem: O::STEM, gate, backend: format!("{} {arm}", R::WORD), outcome, time: start.elapsed() }
        })
        .collect()
}

fn one<R, O>(gate: Gate, client: &Client<R>, arm: Arm, mutant: Option<&'static str>, context: &Context) -> Outcome
where
    R: Engine,
    O: OperationOn<Device<R>> + OperationOn<Reference<f64>>,
{
    let [plain, poisoned] = [false, true].map(|poisoned| OnDevice { client: client.clone(), arm, poisoned, mutant });
    let (plain, poisoned): (&dyn Runner<O>, &dyn Runner<O>) = (&plain, &poisoned);
    match gate {
        Gate::Diff => {
            let reference = OnBackend::new(Reference::<f64>::new);
            diff::gate::<O>(plain, &reference, context, |x| f64::from(x as f32), |t| t.diff_f32)
        }
        Gate::Poison => poison::gate::<O>(plain, poisoned, context),
        Gate::Det => det::gate_device::<O>(plain, context),
        other => Outcome::not_applicable(format!("{} is a gate of the reference", other.word())),
    }
}

/// Every fault that can be planted in the operation's kernels turns the gate red that it names; null ones keep it green.
fn bite<R, O>(client: &Client<R>, context: &Context) -> Outcome
where
    R: Engine,
    O: OperationOn<Device<R>> + OperationOn<Reference<f64>>,
{
    let context = Context { stop_at_first: true, random_cases: 0, ..context.clone() };
    let mutants = catalogue().iter().find(|k| k.stem == O::STEM).map_or(&[][..], |k| k.mutants);
    if mutants.is_empty() {
        return Outcome::not_applicable("no mutants in these kernels");
    }
    let mut wrong = Vec::new();
    for mutant in mutants {
        let gate = Gate::DEVICE.into_iter().find(|gate| gate.word() == mutant.gate).expect("a gate of devices");
        let outcome = one::<R, O>(gate, client, mutant.arm, Some(mutant.name), &context);
        let expected = if mutant.is_null() { Status::Pass } else { Status::Fail };
        if outcome.status != expected {
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
