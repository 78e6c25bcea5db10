//! The oracle of gate `oracle`, Burn on the CPU in `f64`, and the fault that only what other people wrote can see.

use std::any::Any;

use dormouse_burn::Cpu64;
use dormouse_harness::description::{Case, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances};
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
use dormouse_harness::runner::{OnBackend, Runner};
use dormouse_reference::rms_norm::{Config, RmsNorm};
use dormouse_reference::{Error, Result};
use ndarray::ArrayD;
use proptest::strategy::{BoxedStrategy, Strategy};
use rand_chacha::ChaCha8Rng;

/// An operation's oracle. Every operation has one; without it gate `oracle` would not run.
///
/// Whoever walks all operations knows of each only that the reference runs it, so the oracle is looked up by type.
pub fn of<O: Operation>() -> Option<Box<dyn Runner<O>>> {
    macro_rules! oracles {
        ($($operation:ident)*) => {
            [$(Box::new(runner::<$operation>()) as Box<dyn Any>),*]
        };
    }
    let all = oracles!(
        AdamwOp BlendOp ControllerOp CrossEntropyOp DecayGateOp EmaOp EmbeddingOp EngramHashOp EngramOp ExpertOp
        GatedRmsNormOp JepaOp KdaOp KoleoOp L2NormOp LayerNormOp LinearOp MaskVectorOp MuonOp RecordOp ResidualOp
        RetractAllOp RetractOp RmsNormOp RowAdamOp SanitiseOp ShortConvOp SpectralOp
    );
    all.into_iter().find_map(|oracle| oracle.downcast::<Box<dyn Runner<O>>>().ok()).map(|oracle| *oracle)
}

fn runner<O: OperationOn<Cpu64>>() -> Box<dyn Runner<O>> {
    Box::new(OnBackend::new(Cpu64::new))
}

/// The name of the fault on the command line.
pub const MISREAD: &str = "misread";

/// `rms_norm` as somebody has it who read `eps` as part of the sum of squares and not of their mean, and wrote forward pass,
/// adjoint and second form from that reading. It is a smooth function with the right derivative, so finite differences,
/// dual numbers, the second form, f32 and every law agree with it.
pub struct Misread;

fn misread(config: &Config, width: usize) -> Config {
    Config { eps: config.eps / width as f64 }
}

impl Operation for Misread {
    type Config = Config;

    const STEM: &'static str = RmsNormOp::STEM;

    fn tensors() -> Vec<TensorSpec> {
        RmsNormOp::tensors()
    }

    fn cases() -> Vec<Case<Config>> {
        RmsNormOp::cases()
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        RmsNormOp::strategy().boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        RmsNormOp::draw(case, rng)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let width = inputs.at("gain").len();
        RmsNormOp::naive(&misread(config, width), inputs, upstream, twist)
    }

    fn laws() -> Vec<Law<Self>> {
        vec![Law::Independent("B"), Law::Independent("T"), Law::Causal("T")]
    }

    fn mutants() -> Vec<Mutant> {
        Vec::new()
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        RmsNormOp::tolerances(case)
    }

    fn optional_upstream() -> &'static [&'static str] {
        RmsNormOp::optional_upstream()
    }
}

impl<B: RmsNorm> OperationOn<B> for Misread {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let width = inputs.get("gain").map_or(1, |gain| b.shape(gain).iter().product());
        RmsNormOp::run(b, &misread(config, width), inputs, upstream)
    }
}

/// What `rms_norm` is, for a ladder of [`Misread`].
pub struct Right;

impl Runner<Misread> for Right {
    fn run(
        &self,
        config: &Config,
        inputs: &Values,
        upstream: Option<&Values>,
    ) -> std::result::Result<Run<ArrayD<f64>>, Error> {
        runner::<RmsNormOp>().run(config, inputs, upstream)
    }
}
