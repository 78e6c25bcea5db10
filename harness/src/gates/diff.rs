//! Gate `diff`: does the same operation at another precision or on a device equal the f64 reference?
//!
//! Inputs are rounded to the device's storage type, f32, first and the reference gets the rounded values, so the
//! tolerance covers arithmetic only. On the CPU the other precision is f32, which is what the trainer runs. Matrix
//! products may be asked for in tf32 or bf16, which rounds their operands inside the operation; then the tolerance is
//! that of [`tolerance::at_precision`].

use std::cell::RefCell;

use dormouse_reference::{Precision, Reference};
use ndarray::ArrayD;
use rand_chacha::ChaCha8Rng;

use super::{Context, Outcome, draw_upstream, over_some_cases, passed, rms_of_draws, text, usual_sizes};
use crate::compare::{Measures, Tolerance, WIDEST, compare};
use crate::description::{Case, Gate, Operation, OperationOn, Run};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::{OnBackend, Runner};
use crate::tolerance::{self, operand_rounding};

/// One tensor's worst figures over all cases of a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// The tensor's name; gradients start with `d`.
    pub name: String,
    /// The worst measure over its bound.
    pub worst: f64,
    /// The worst of each measure.
    pub measures: Measures,
    /// The widest bound that a case had.
    pub tolerance: Tolerance,
}

/// Draws of a case until one can be compared at a low precision.
///
/// Where the derived bound of a tensor is wider than the comparator takes, the reference runs [`MOVES`] times more with
/// every operand moved by [`operand_rounding`], which is more than twice the rms of what rounding does in bf16. A draw
/// in which one of them moves such a tensor by more than half the widest tolerance is drawn again: there a right kernel
/// would now and then be outside. Only the reference decides, so no fault can choose its inputs (docs/adr/0032).
const MOST_DRAWS: usize = 8;

/// How often operands are moved: where few independent errors make a tensor's error, one is small by chance too often.
const MOVES: usize = 8;

/// Runs the gate with the reference in f32 as the device: its result against `want`, the f64 runner under test.
pub fn gate_f32<O>(want: &dyn Runner<O>, context: &Context) -> Outcome
where
    O: OperationOn<Reference<f32>>,
{
    let device = OnBackend::new(Reference::<f32>::new);
    run::<O>(&device, want, Precision::Full, context, &|_| true).0
}

/// Compares a device's runner, whose products have a precision, with the reference's; gives the figures besides.
#[inline(never)]
pub fn gate<O: Operation>(
    device: &dyn Runner<O>,
    reference: &dyn Runner<O>,
    precision: Precision,
    context: &Context,
) -> (Outcome, Vec<Figures>) {
    run(device, reference, precision, context, &O::on_devices)
}

fn run<O: Operation>(
    device: &dyn Runner<O>,
    reference: &dyn Runner<O>,
    precision: Precision,
    context: &Context,
    wanted: &dyn Fn(&Case<O::Config>) -> bool,
) -> (Outcome, Vec<Figures>) {
    let figures = RefCell::new(Vec::new());
    let outcome = over_some_cases::<O>(Gate::Diff, context, wanted, &|case, rng| {
        let (Drawn { inputs, upstream, want, usual_outputs, usual_grads }, _) =
            drawn(case, reference, precision, context.seed, rng)?;
        let got = device.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        let at = |len: usize, usual: Option<&f64>| {
            tolerance_of::<O>(case, precision, len).usual(usual.copied().unwrap_or_default())
        };
        let mut worst = 0.0f64;
        for (prefix, got, want, usual) in
            [("", &got.outputs, &want.outputs, &usual_outputs), ("d", &got.grads, &want.grads, &usual_grads)]
        {
            if let Some(extra) = got.names().find(|name| want.get(name).is_none()) {
                return Err(format!("`{prefix}{extra}` is there, expected it absent"));
            }
            for (name, want) in want.iter() {
                let Some(got) = got.get(name) else { return Err(format!("`{prefix}{name}` is absent")) };
                let (name_of, tolerance) = (format!("{prefix}{name}"), at(want.len(), usual.get(name)));
                let comparison = compare(&name_of, got.view(), want.view(), &tolerance);
                note(&mut figures.borrow_mut(), name_of, comparison.worst, comparison.measures, tolerance);
                worst = worst.max(passed(comparison)?);
            }
        }
        Ok(worst)
    })
    .outcome(O::STEM, Gate::Diff, context);
    (outcome, figures.into_inner())
}

/// Inputs of a case, upstream gradients, what the reference makes of them, and how large its tensors usually are.
struct Drawn {
    inputs: Values,
    upstream: Option<Values>,
    want: Run<ArrayD<f64>>,
    /// Empty where nothing rounds operands.
    usual_outputs: Named<f64>,
    usual_grads: Named<f64>,
}

/// Draws a case, at a low precision until it can be compared; how often comes with it.
fn drawn<O: Operation>(
    case: &Case<O::Config>,
    reference: &dyn Runner<O>,
    precision: Precision,
    seed: u64,
    rng: &mut ChaCha8Rng,
) -> Result<(Drawn, usize), String> {
    let low = precision != Precision::Full && O::PRODUCTS > 0;
    let run = |inputs: &Values, upstream: Option<&Values>| reference.run(&case.config, inputs, upstream).map_err(text);
    // Integers travel as integers, so nothing rounds them.
    let rounded = |values: &Values| {
        values.map(
            |name, v: &ArrayD<f64>| {
                if O::integers().contains(&name) { v.clone() } else { v.mapv(|x| f64::from(x as f32)) }
            },
        )
    };
    let mut moves = draw::stream(seed, &[O::STEM, "operands", &case.name]);
    // What a format makes of a master may jump; its numbers are operands that low precision has, or nearly.
    let fixed = [O::integers(), O::straight_through(&case.config)];
    let mut moved = |values: &Values| {
        values.map(|name, v: &ArrayD<f64>| match fixed.iter().any(|names| names.contains(&name)) {
            true => v.clone(),
            false => v * &(draw::normal(&mut moves, v.shape()) * operand_rounding(precision) + 1.0),
        })
    };
    let mut draws = 0;
    loop {
        let inputs = rounded(&O::draw(case, rng));
        let forward = run(&inputs, None)?;
        let upstream = O::NO_GRADIENT.is_none().then(|| rounded(&draw_upstream::<O>(case, &forward.outputs, rng)));
        let want = run(&inputs, upstream.as_ref())?;
        let usual_grads = usual_sizes::<O>(case, &want, rng, |upstream| run(&inputs, Some(upstream)))?;
        // A few sums of products may be small by chance, and rounded operands show it where f32 does not.
        let usual_outputs = match low {
            false => Named::new(),
            true => rms_of_draws(&want.outputs, || Ok(run(&rounded(&O::draw(case, rng)), None)?.outputs))?,
        };
        draws += 1;
        let mut farthest = 0.0f64;
        // The last draw is taken as it is.
        for _ in 0..if low && draws < MOST_DRAWS { MOVES } else { 0 } {
            let (inputs, upstream) = (moved(&inputs), upstream.as_ref().map(&mut moved));
            let moved = run(&inputs, upstream.as_ref())?;
            let outputs = distance::<O>(case, precision, &moved.outputs, &want.outputs, &usual_outputs);
            let grads = distance::<O>(case, precision, &moved.grads, &want.grads, &usual_grads);
            farthest = farthest.max(outputs).max(grads);
        }
        if farthest <= WIDEST / 2.0 {
            return Ok((Drawn { inputs, upstream, want, usual_outputs, usual_grads }, draws));
        }
    }
}

/// How far, as relative rms, moved operands move the tensors whose bound is the widest that the comparator takes.
///
/// There the derived bound is wider, so the bound that is used is none of rounding (docs/adr/0032): what keeps a right
/// result inside it is that the case enlarges rounding by less than its family may.
fn distance<O: Operation>(
    case: &Case<O::Config>,
    precision: Precision,
    moved: &Values,
    want: &Values,
    usual: &Named<f64>,
) -> f64 {
    let rms = want.iter().map(|(name, want)| {
        let usual = usual.get(name).copied().unwrap_or_default();
        let tolerance = tolerance_of::<O>(case, precision, want.len()).usual(usual);
        match moved.get(name) {
            Some(moved) if tolerance.tol >= WIDEST => compare(name, moved.view(), want.view(), &tolerance).measures.rms,
            _ => 0.0,
        }
    });
    rms.fold(0.0, f64::max)
}

/// The bound of a tensor of an operation at a precision.
pub fn tolerance_of<O: Operation>(case: &Case<O::Config>, precision: Precision, elements: usize) -> Tolerance {
    let f32 = O::tolerances(case).diff_f32;
    tolerance::at_precision(f32, precision, O::PRODUCTS, O::amplification(case), elements)
}

fn note(all: &mut Vec<Figures>, name: String, worst: f64, measures: Measures, tolerance: Tolerance) {
    match all.iter_mut().find(|figures| figures.name == name) {
        Some(figures) => {
            figures.worst = figures.worst.max(worst);
            figures.measures = figures.measures.max(measures);
            let (tol, slope) = (figures.tolerance.tol.max(tolerance.tol), figures.tolerance.slope.max(tolerance.slope));
            figures.tolerance = Tolerance { tol, slope, ..figures.tolerance };
        }
        None => all.push(Figures { name, worst, measures, tolerance }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    use crate::gates::Status;
    use crate::ops::expert::ExpertOp;
    use crate::ops::linear::LinearOp;

    /// A backend whose results are those of the f64 reference with every input and upstream gradient rounded: what products
    /// of rounded operands give where no result of one product goes into another.
    struct RoundedOperands {
        bits: u32,
    }

    impl<O: OperationOn<Reference<f64>>> Runner<O> for RoundedOperands {
        fn run(
            &self,
            config: &O::Config,
            inputs: &Values,
            upstream: Option<&Values>,
        ) -> dormouse_reference::Result<Run<ArrayD<f64>>> {
            // To nearest: adding and taking away a number that is 2^(53 - bits) times larger drops the bits behind.
            let factor = 2f64.powi(53 - self.bits as i32) + 1.0;
            let round = |x: f64| x * factor - (x * factor - x);
            let exact: &dyn Runner<O> = &OnBackend::new(Reference::<f64>::new);
            let of = |values: &Values| values.map(|_, v: &ArrayD<f64>| v.mapv(round));
            exact.run(config, &of(inputs), upstream.map(&of).as_ref())
        }
    }

    fn status(bits: u32, precision: Precision, seed: u64) -> Outcome {
        let context = Context {
            seed,
            only: None,
            random_cases: 40,
            production: false,
            golden: PathBuf::new(),
            stop_at_first: true,
            again: String::new(),
        };
        let reference = OnBackend::new(Reference::<f64>::new);
        gate::<LinearOp>(&RoundedOperands { bits }, &reference, precision, &context).0
    }

    #[test]
    fn rounded_operands_are_inside_their_tolerance_and_outside_that_of_the_next_better_precision() {
        for seed in 0..8 {
            for (bits, precision) in [(24, Precision::Full), (11, Precision::Tf32), (8, Precision::Bf16)] {
                let outcome = status(bits, precision, seed);
                assert_eq!(outcome.status, Status::Pass, "{precision:?}, seed {seed}: {}", outcome.reason);
            }
            assert_eq!(status(11, Precision::Full, seed).status, Status::Fail);
            assert_eq!(status(8, Precision::Tf32, seed).status, Status::Fail);
            assert_eq!(status(6, Precision::Bf16, seed).status, Status::Fail);
        }
    }

    /// In bf16 one draw in some hundreds has a result that is small by chance (docs/adr/0032).
    #[test]
    fn a_draw_that_enlarges_rounding_is_drawn_again() {
        let reference = OnBackend::new(Reference::<f64>::new);
        let again = |seed, precision| {
            ExpertOp::cases().iter().filter(|case| case.family == "activations").any(|case| {
                let mut rng = draw::stream(seed, &[&case.name]);
                drawn::<ExpertOp>(case, &reference, precision, seed, &mut rng).unwrap().1 > 1
            })
        };
        assert!(!(0..4).any(|seed| again(seed, Precision::Full)));
        assert!((0..400).any(|seed| again(seed, Precision::Bf16)));
    }
}
