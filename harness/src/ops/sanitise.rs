//! `sanitise`: description for the harness.

use std::ops::Range;

use dormouse_reference::Result;
use dormouse_reference::sanitise::{Config, Sanitise};
use ndarray::{ArrayD, IxDyn, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct SanitiseOp;

/// Value families: ordinary; a few NaN and infinities; a non-finite loss; the last skip before the latch closes, the
/// one that closes it, and one behind the closed latch; magnitudes whose squares leave the range of f32, then of f64.
const FAMILIES: [&str; 11] = [
    "normal",
    "broken",
    "loss",
    "last-loss",
    "eighth-skip",
    "ninth-skip",
    "latched",
    "large",
    "small",
    "vast",
    "minute",
];

fn case(len: usize, clip: &[(usize, usize)], max_norm: Option<f64>, family: &'static str) -> Case<Config> {
    let limit = max_norm.map_or("free".to_owned(), |max_norm| format!("max{max_norm:e}"));
    let ranges: Vec<String> = clip.iter().map(|(start, end)| format!("{start}to{end}")).collect();
    let clip = clip.iter().map(|&(start, end)| start..end).collect();
    Case {
        name: format!("p{len}-clip{}-{limit}-{family}", ranges.join("and")),
        config: Config { max_norm, clip, skips_allowed: 8 },
        dims: vec![("P", len), ("L", 3), ("one", 1), ("four", 4)],
        family,
        present: vec![],
    }
}

impl Operation for SanitiseOp {
    type Config = Config;

    const STEM: &'static str = "sanitise";

    const NO_GRADIENT: Option<&'static str> = Some("part of the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("grads", &["P"]),
            TensorSpec::data("loss", &["L"]),
            TensorSpec::data("counters", &["four"]),
            TensorSpec::output("norm", &["one"]),
            TensorSpec::output("nonfinite", &["one"]),
            TensorSpec::output("scale", &["one"]),
            TensorSpec::output("apply", &["one"]),
            TensorSpec::output("counters_after", &["four"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases: Vec<_> =
            FAMILIES.iter().map(|family| case(50, &[(30, 47), (3, 20)], Some(1.0), family)).collect();
        cases.extend([
            case(50, &[(0, 50)], Some(1e3), "normal"),
            case(50, &[(0, 50)], None, "normal"),
            case(50, &[], Some(1.0), "normal"),
            case(1, &[(0, 1)], Some(0.1), "normal"),
            case(0, &[], Some(0.1), "normal"),
            // Several blocks, with clip borders inside, on and beside their borders.
            case(70_001, &[(100, 32_768), (40_000, 65_537)], Some(10.0), "normal"),
            case(70_001, &[(0, 70_001)], Some(10.0), "broken"),
        ]);
        // More ranges than a device takes in two launches of 8.
        let many: Vec<_> = (0..20).map(|i| (11 * i, 11 * i + 8)).collect();
        cases.push(case(225, &many, Some(1.0), "normal"));
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(1_000_003, &[(0, 700_001)], Some(1.0), "normal")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let max_norm = prop_oneof![Just(None), (0.01..100.0).prop_map(Some)];
        (2..300usize, 0.0..1.0, 0.0..1.0, max_norm, 0..FAMILIES.len())
            .prop_map(|(len, a, b, max_norm, family): (usize, f64, f64, _, _)| {
                let at = |share: f64| (share * len as f64) as usize;
                let (low, high) = (at(a.min(b)), at(a.max(b)));
                case(len, &[(high, len), (low / 2, low)], max_norm, FAMILIES[family])
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let len = case.dim("P");
        let mut grads = draw::normal(rng, &[len]);
        grads *= match case.family {
            "large" => 1e30,
            "small" => 1e-30,
            "vast" => 1e250,
            "minute" => 1e-250,
            _ => 1.0,
        };
        let skips = ["broken", "eighth-skip", "ninth-skip"].contains(&case.family);
        for (at, bad) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().enumerate() {
            if skips && at < len {
                grads[[rng.random_range(0..len)]] = bad;
            }
        }
        let mut loss = arr1(&[2.5, 1.5, 3.5]).into_dyn();
        if case.family == "last-loss" {
            loss[[2]] = f64::NAN;
        }
        if case.family == "loss" {
            // Any one of them will do.
            loss[[rng.random_range(0..3)]] = f64::NAN;
        }
        let counters = match case.family {
            "eighth-skip" => [100.0, 30.0, 7.0, 0.0],
            "ninth-skip" => [100.0, 31.0, 8.0, 0.0],
            "latched" => [100.0, 32.0, 9.0, 1.0],
            _ => [12.0, 5.0, 3.0, 0.0],
        };
        let counters = arr1(&counters).into_dyn();
        Values::new().with("grads", grads).with("loss", loss).with("counters", counters)
    }

    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let grads = inputs.at("grads");
        let mut nonfinite = 0.0;
        let mut norm = 0.0f64;
        for (i, &g) in grads.iter().enumerate() {
            let end = |range: &Range<usize>| range.end - usize::from(is("range-ends-early") && range.end > range.start);
            let clipped = config.clip.iter().any(|range| range.start <= i && i < end(range));
            if !g.is_finite() {
                nonfinite += 1.0;
            }
            if (clipped || is("norm-of-everything")) && (g.is_finite() || is("broken-elements-in-norm")) {
                // hypot neither over- nor underflows.
                norm = if is("norm-of-magnitudes") { norm + g.abs() } else { norm.hypot(g) };
            }
            if is("only-clip-ranges-counted") && !clipped && !g.is_finite() {
                nonfinite -= 1.0;
            }
        }
        for (i, loss) in inputs.at("loss").iter().enumerate() {
            let lost = is("loss-not-counted") || (is("first-loss-only") && i > 0);
            if !loss.is_finite() && !lost {
                nonfinite += 1.0;
            }
        }
        let scale = match config.max_norm {
            None => 1.0,
            Some(_) if norm == 0.0 => 1.0,
            Some(max_norm) if is("scaled-up-too") => max_norm / norm,
            Some(max_norm) if is("scale-inverted") => (norm / max_norm).min(1.0),
            Some(max_norm) => (max_norm / norm).min(1.0),
        };
        let counters = inputs.at("counters");
        let [mut updates, mut total, mut window, mut latched] = [0, 1, 2, 3].map(|i| counters[[i]]);
        let apply = (nonfinite == 0.0 || is("applied-anyway")) && (latched == 0.0 || is("latch-ignored"));
        if apply || is("updates-always-count") {
            updates += 1.0;
        }
        if nonfinite > 0.0 {
            total += 1.0;
            window += if is("window-not-counted") { 0.0 } else { 1.0 };
            let allowed = f64::from(config.skips_allowed);
            if window > allowed || (is("latch-one-early") && window >= allowed) {
                latched = 1.0;
            }
        } else if is("latch-opens-by-itself") {
            latched = 0.0;
        }
        let one = |x: f64| ArrayD::from_elem(IxDyn(&[1]), x);
        let outputs = Values::new()
            .with("norm", one(norm))
            .with("nonfinite", one(nonfinite))
            .with("scale", one(scale))
            .with("apply", one(f64::from(u8::from(apply))))
            .with("counters_after", arr1(&[updates, total, window, latched]).into_dyn());
        Run { outputs, grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Custom { name: "one bad element anywhere stops the step", check: one_bad_element },
            Law::Custom { name: "doubling gradients and limit doubles the norm alone", check: scale_invariance },
            Law::Custom { name: "cutting the clip ranges in two changes nothing", check: cut_ranges },
            Law::Custom { name: "gradients outside the clip ranges do not move the norm", check: outside_is_unseen },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("norm-of-everything", Gate::Meta),
            ("norm-of-magnitudes", Gate::Form),
            ("range-ends-early", Gate::Form),
            ("broken-elements-in-norm", Gate::Form),
            ("only-clip-ranges-counted", Gate::Meta),
            ("loss-not-counted", Gate::Form),
            ("first-loss-only", Gate::Form),
            ("scaled-up-too", Gate::Form),
            ("scale-inverted", Gate::Meta),
            ("applied-anyway", Gate::Meta),
            ("latch-ignored", Gate::Form),
            ("updates-always-count", Gate::Form),
            ("window-not-counted", Gate::Form),
            ("latch-one-early", Gate::Form),
            ("latch-opens-by-itself", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn integers() -> &'static [&'static str] {
        &["counters"]
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<SanitiseOp>, config: &Config, inputs: &Values) -> std::result::Result<Values, String> {
    runner.run(config, inputs, None).map(|run| run.outputs).map_err(|e| e.to_string())
}

/// A NaN or an infinity at a random place of otherwise finite gradients is counted once and keeps the step from
/// happening.
fn one_bad_element(runner: &dyn Runner<SanitiseOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = SanitiseOp::draw(case, rng);
    inputs.set("loss", arr1(&[0.0]).into_dyn());
    let grads = inputs.get_mut("grads").expect("gradients are drawn");
    if grads.is_empty() {
        return Ok(0.0);
    }
    grads.mapv_inplace(|g| if g.is_finite() { g } else { 1.0 });
    let at = rng.random_range(0..grads.len());
    grads[[at]] = if rng.random_bool(0.5) { f64::NAN } else { f64::NEG_INFINITY };
    let outputs = run(runner, &case.config, &inputs)?;
    let (nonfinite, apply) = (outputs.at("nonfinite")[[0]], outputs.at("apply")[[0]]);
    let (before, after) = (inputs.at("counters"), outputs.at("counters_after"));
    let counted = [0.0, 1.0, 1.0].iter().enumerate().all(|(i, more)| after[[i]] == before[[i]] + more);
    if nonfinite == 1.0 && apply == 0.0 && counted {
        return Ok(0.0);
    }
    Err(format!("a bad element at {at}: nonfinite {nonfinite}, apply {apply}, counters {before} to {after}"))
}

/// Powers of two are exact, so all bits agree.
fn scale_invariance(runner: &dyn Runner<SanitiseOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = SanitiseOp::draw(case, rng);
    let once = run(runner, &case.config, &inputs)?;
    *inputs.get_mut("grads").expect("gradients are drawn") *= 2.0;
    let config = Config { max_norm: case.config.max_norm.map(|max_norm| 2.0 * max_norm), ..case.config.clone() };
    let twice = run(runner, &config, &inputs)?;
    passed(same_bits("norm", twice.at("norm").view(), (2.0 * once.at("norm")).view()))?;
    for name in ["nonfinite", "scale", "apply", "counters_after"] {
        passed(same_bits(name, twice.at(name).view(), once.at(name).view()))?;
    }
    // What the scale is for: scaled gradients keep the limit.
    let (norm, scale) = (once.at("norm")[[0]], once.at("scale")[[0]]);
    match case.config.max_norm {
        Some(max_norm) if norm * scale > max_norm * (1.0 + 1e-12) => {
            Err(format!("norm {norm:e} times scale {scale:e} is above {max_norm:e}"))
        }
        _ => Ok(0.0),
    }
}

fn cut_ranges(runner: &dyn Runner<SanitiseOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = SanitiseOp::draw(case, rng);
    let whole = run(runner, &case.config, &inputs)?;
    let clip = case.config.clip.iter().flat_map(|range| {
        let middle = rng.random_range(range.start..=range.end);
        [range.start..middle, middle..range.end]
    });
    let cut = run(runner, &Config { clip: clip.collect(), ..case.config.clone() }, &inputs)?;
    let norm = passed(compare("norm", cut.at("norm").view(), whole.at("norm").view(), &tolerance::FORM))?;
    Ok(norm.max(passed(compare("scale", cut.at("scale").view(), whole.at("scale").view(), &tolerance::FORM))?))
}

fn outside_is_unseen(runner: &dyn Runner<SanitiseOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = SanitiseOp::draw(case, rng);
    let before = run(runner, &case.config, &inputs)?;
    for (i, g) in inputs.get_mut("grads").expect("gradients are drawn").indexed_iter_mut() {
        if g.is_finite() && !case.config.clip.iter().any(|range| range.contains(&i[0])) {
            *g = 1e3 * *g - 7.0;
        }
    }
    let after = run(runner, &case.config, &inputs)?;
    for (name, before) in before.iter() {
        passed(same_bits(name, after.at(name).view(), before.view()))?;
    }
    Ok(0.0)
}

impl<B: Sanitise> OperationOn<B> for SanitiseOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let input = |name| glue::required(Self::STEM, inputs.get(name).ok_or(name));
        let counters = input("counters")?;
        let outputs = Sanitise::update(b, config, input("grads")?, input("loss")?, counters)?;
        let outputs: Named<B::Tensor> = outputs.named().into_iter().collect();
        Ok(Run { outputs: outputs.with("counters_after", counters.clone()), grads: Named::new() })
    }
}
