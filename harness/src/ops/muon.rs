//! `muon`: description for the harness.
//!
//! The second form takes the singular value decomposition of every matrix and sends its singular values through the
//! polynomial, so it has no Gram matrix and no batch; the plus is plain loops.

use dormouse_reference::Result;
use dormouse_reference::muon::{BAND, BAND_FROM_5, BAND_FROM_8, Batching, Config, Matrix, Muon, Scalars, State};
use nalgebra::DMatrix;
use ndarray::{ArrayD, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values, held};
use crate::runner::Runner;
use crate::svd::Svd;
use crate::tolerance;

/// The description.
pub struct MuonOp;

/// Value families: in the middle of a run; its first update; singular values over four decades; half of them zero; the
/// first matrix without a gradient; its gradient and momentum cancelling; a row and a column that are noise; everything
/// times 1e-20 and 1e20; a skipped update whose gradients are NaN.
const FAMILIES: [&str; 10] =
    ["middle", "first", "spread", "low-rank", "no-gradient", "cancels", "noise", "tiny", "huge", "skipped"];

/// An entry of a table: `[E, rows, columns]`, heads, scale, weight decay.
type Entry = ([usize; 3], usize, f64, f64);

/// Tall and wide, two entries whose matrices have one shape, heads that are taller and heads that are wider than they
/// are wide or tall.
const MIXED: [Entry; 5] = [
    ([2, 6, 4], 1, 1.0, 0.0),
    ([1, 4, 7], 1, 1.5, 0.1),
    ([1, 5, 12], 3, 1.0, 0.2),
    ([1, 3, 8], 2, 0.5, 0.0),
    ([1, 6, 4], 1, 2.0, 0.0),
];

fn case(entries: &[Entry], iterations: usize, plus: bool, batching: Batching, family: &'static str) -> Case<Config> {
    let mut matrices = Vec::new();
    // An element before, between and behind the entries belongs to nobody.
    let mut start = 1;
    for &(shape, heads, scale, weight_decay) in entries {
        let matrix = Matrix { start, shape, heads, scale, weight_decay };
        start = matrix.range().end + 1;
        matrices.push(matrix);
    }
    let names: Vec<String> = entries.iter().map(|([e, r, c], h, ..)| format!("{e}x{r}x{c}h{h}")).collect();
    let (form, word) = (if plus { "plus" } else { "iterate" }, format!("{batching:?}").to_lowercase());
    Case {
        name: format!("{}-ns{iterations}-{form}-{word}-{family}", names.join("-")),
        // Halves of opposite numbers cancel exactly.
        config: Config { momentum: if family == "cancels" { 0.5 } else { 0.95 }, iterations, plus, batching, matrices },
        dims: vec![("P", start), ("one", 1)],
        family,
        present: vec![],
    }
}

/// One matrix of a table: its shape, and where in the flat buffers its elements are.
struct Place {
    entry: usize,
    rows: usize,
    width: usize,
    start: usize,
    row_step: usize,
    column_step: usize,
}

impl Place {
    fn at(&self, i: usize, j: usize) -> usize {
        self.start + i * self.row_step + j * self.column_step
    }

    fn read(&self, flat: &ArrayD<f64>) -> DMatrix<f64> {
        DMatrix::from_fn(self.rows, self.width, |i, j| flat[[self.at(i, j)]])
    }

    fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.rows).flat_map(move |i| (0..self.width).map(move |j| self.at(i, j)))
    }
}

fn places(config: &Config, interleaved: bool) -> Vec<Place> {
    let mut places = Vec::new();
    for (entry, matrix) in config.matrices.iter().enumerate() {
        let [e, rows, columns] = matrix.shape;
        let width = columns / matrix.heads;
        for i in 0..e {
            for head in 0..matrix.heads {
                let (first, column_step) = if interleaved { (head, matrix.heads) } else { (head * width, 1) };
                let start = matrix.start + i * rows * columns + first;
                places.push(Place { entry, rows, width, start, row_step: columns, column_step });
            }
        }
    }
    places
}

/// The matrix with no more rows than columns, transposed: what the decomposition wants.
fn upright(x: &DMatrix<f64>) -> DMatrix<f64> {
    if x.nrows() >= x.ncols() { x.clone() } else { x.transpose() }
}

fn polynomial(s: f64) -> f64 {
    3.4445 * s - 4.7750 * s.powi(3) + 2.0315 * s.powi(5)
}

impl Operation for MuonOp {
    type Config = Config;

    const STEM: &'static str = "muon";

    const NO_GRADIENT: Option<&'static str> = Some("part of the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("params", &["P"]),
            TensorSpec::data("grads", &["P"]),
            TensorSpec::data("m", &["P"]),
            TensorSpec::data("lr", &["one"]),
            TensorSpec::data("apply", &["one"]),
            TensorSpec::output("params_after", &["P"]),
            TensorSpec::output("m_after", &["P"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        use Batching::{Batched, Single};
        let mut cases: Vec<_> = FAMILIES.iter().map(|family| case(&MIXED, 8, true, Batched, family)).collect();
        let one = |shape| [(shape, 1, 1.0, 0.1)];
        cases.extend([
            case(&MIXED, 5, true, Batched, "middle"),
            case(&MIXED, 5, false, Batched, "first"),
            case(&MIXED, 8, false, Batched, "spread"),
            case(&MIXED, 8, true, Single, "middle"),
            case(&one([2, 5, 5]), 5, true, Batched, "middle"),
            case(&one([2, 5, 5]), 5, false, Batched, "middle"),
            case(&one([1, 1, 1]), 8, true, Batched, "first"),
            case(&one([3, 1, 9]), 5, true, Batched, "middle"),
            case(&one([2, 9, 1]), 5, true, Batched, "middle"),
            case(&one([0, 4, 2]), 5, true, Batched, "middle"),
            case(&[([1, 90, 20], 1, 1.0, 0.0), ([1, 24, 96], 4, 1.0, 0.1)], 5, true, Batched, "first"),
            // Large enough that a product is cut into blocks.
            case(&one([2, 150, 32]), 8, true, Batched, "middle"),
            // Shorter sides above 64 and above 96, where a device's products are others; wide and tall, in several blocks of
            // rows.
            case(&[([1, 70, 96], 1, 1.0, 0.1), ([2, 80, 66], 1, 1.5, 0.0)], 5, true, Batched, "middle"),
            case(&[([1, 66, 140], 2, 1.0, 0.1), ([1, 98, 104], 1, 1.0, 0.1)], 8, true, Batched, "noise"),
            // More entries of one shape than a device takes in two launches of 16.
            case(&[([1, 3, 4], 2, 1.5, 0.1); 33], 5, true, Batched, "no-gradient"),
        ]);
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(
            &[([1, 768, 768], 12, 1.0, 0.1), ([3, 768, 64], 1, 1.0, 0.0), ([1, 96, 768], 1, 1.0, 0.1)],
            8,
            true,
            Batching::Batched,
            "middle",
        )]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let entry = (0..3usize, 1..9usize, 1..9usize, 1..4usize, 0.2..2.0, 0.0..0.5);
        let entry = entry.prop_map(|(e, rows, width, heads, scale, decay): (_, _, usize, usize, f64, f64)| {
            ([e, rows, width * heads], heads, scale, decay)
        });
        let batching = prop_oneof![Just(Batching::Batched), Just(Batching::Single)];
        let iterations = prop_oneof![Just(5usize), Just(8usize)];
        (prop::collection::vec(entry, 1..4), iterations, any::<bool>(), batching, 0..FAMILIES.len())
            .prop_map(|(entries, iterations, plus, batching, family)| {
                case(&entries, iterations, plus, batching, FAMILIES[family])
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = [case.dim("P")];
        let params = 0.5 * draw::normal(rng, &shape);
        let mut grads = draw::normal(rng, &shape);
        let mut m = 0.3 * draw::normal(rng, &shape);
        if !["middle", "no-gradient", "skipped"].contains(&case.family) {
            m.fill(0.0);
        }
        for (number, place) in places(&case.config, false).iter().enumerate() {
            let mut g = place.read(&grads);
            match case.family {
                "no-gradient" if number == 0 => g.fill(0.0),
                "noise" => {
                    g.row_mut(0).scale_mut(1e-12);
                    g.column_mut(place.width - 1).scale_mut(1e-12);
                }
                "spread" | "low-rank" => {
                    let Svd { p, s, q } = Svd::of(&upright(&g));
                    let k = s.len();
                    let sizes = s.map_with_location(|j, _, _| match case.family {
                        "low-rank" => f64::from(u8::from(2 * j < k)),
                        _ => 10f64.powf(-4.0 * j as f64 / k as f64),
                    });
                    let x = p * DMatrix::from_diagonal(&sizes) * q.transpose();
                    g = if x.shape() == g.shape() { x } else { x.transpose() };
                }
                "skipped" => g.fill(f64::NAN),
                _ => {}
            }
            for i in 0..place.rows {
                for j in 0..place.width {
                    grads[[place.at(i, j)]] = g[(i, j)];
                    if case.family == "cancels" && number == 0 {
                        m[[place.at(i, j)]] = -g[(i, j)];
                    }
                }
            }
        }
        match case.family {
            "tiny" => grads *= 1e-20,
            "huge" => grads *= 1e20,
            _ => {}
        }
        let one = |x: f64| arr1(&[x]).into_dyn();
        // A learning rate of the size of the parameters, so that a wrong update is as visible as a wrong parameter.
        Values::new()
            .with("params", params)
            .with("grads", grads)
            .with("m", m)
            .with("lr", one(rng.random_range(0.2..0.4)))
            .with("apply", one(if case.family == "skipped" { 0.0 } else { 1.0 }))
    }

    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let [mut params, mut m] = ["params", "m"].map(|name| inputs.at(name).clone());
        let grads = inputs.at("grads");
        let (lr, mu) = (inputs.at("lr")[[0]], config.momentum);
        let mut config = config.clone();
        if is("heads-ignored") {
            config.matrices.iter_mut().for_each(|matrix| matrix.heads = 1);
        }
        let mut moving: Vec<(Place, DMatrix<f64>)> = Vec::new();
        let idle = inputs.at("apply")[[0]] == 0.0 && !is("apply-ignored");
        for place in places(&config, is("heads-interleaved")).into_iter().filter(|_| !idle) {
            let g = place.read(grads);
            if g.iter().all(|g| *g == 0.0) && !is("zero-gradient-moves") {
                continue;
            }
            let mut x = place.read(&m) * mu + &g * (1.0 - mu);
            if is("momentum-undamped") {
                x = place.read(&m) * mu + &g;
            }
            for (at, x) in place.indices().zip(x.transpose().iter()) {
                m[[at]] = *x;
            }
            if is("momentum-dropped") {
                x = g;
            } else if is("nesterov") {
                x = &x * mu + g * (1.0 - mu);
            }
            let largest = x.amax();
            if largest > 0.0 && !is("largest-not-divided-out") {
                x /= largest;
            }
            moving.push((place, x));
        }
        let batched = config.batching == Batching::Batched;
        let alike = |a: &Place, b: &Place| (a.rows, a.width) == (b.rows, b.width);
        for (place, x) in &moving {
            let matrix = &config.matrices[if is("first-entry-for-all") { 0 } else { place.entry }];
            let class = || moving.iter().filter(|(other, _)| alike(place, other)).map(|(_, x)| x);
            let x = if batched && is("batch-takes-first") { class().next().expect("it is in its class") } else { x };
            let norm = if batched && is("norm-of-the-batch") {
                class().map(|x| x.norm_squared()).sum::<f64>().sqrt()
            } else if is("largest-for-norm") {
                x.amax()
            } else {
                upright(x).norm()
            };
            let x = if norm == 0.0 && !is("zero-divides") { x.clone() } else { x / norm };
            let svd = Svd::of(&upright(&x));
            let iterations = config.iterations - usize::from(is("one-iteration-less"));
            let iterate = svd.with(|s| {
                (0..iterations).fold(s, |s, _| {
                    let [linear, cubic, quintic] = if is("cubic") {
                        [1.5, -0.5, 0.0]
                    } else if is("linear-term-3.44") {
                        [3.44, -4.7750, 2.0315]
                    } else if is("cubic-term-4.78") {
                        [3.4445, -4.78, 2.0315]
                    } else if is("quintic-term-2.03") {
                        [3.4445, -4.7750, 2.03]
                    } else {
                        [3.4445, -4.7750, 2.0315]
                    };
                    linear * s + cubic * s.powi(3) + quintic * s.powi(5)
                })
            });
            let mut x = if iterate.shape() == x.shape() { iterate } else { iterate.transpose() };
            let turned = place.rows > place.width && !is("plus-in-stored-orientation");
            if turned {
                x = x.transpose();
            }
            if config.plus != is("plus-dropped") {
                plus(&mut x, &is);
            }
            if turned {
                x = x.transpose();
            }
            for i in 0..place.rows {
                for j in 0..place.width {
                    let w = &mut params[[place.at(i, j)]];
                    let scale = if is("scale-dropped") { 1.0 } else { matrix.scale };
                    let decay = if is("decay-dropped") { 0.0 } else { matrix.weight_decay };
                    let kept = *w * (1.0 - if is("decay-without-lr") { decay } else { lr * decay });
                    *w = kept - if is("ascends") { -1.0 } else { 1.0 } * lr * scale * x[(i, j)];
                }
            }
        }
        let outputs = Values::new().with("params_after", params).with("m_after", m);
        Run { outputs, grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Exact { name: "a skipped update keeps every bit", check: skipped_keeps_bits },
            Law::Exact { name: "elements outside every matrix keep every bit", check: outside_keeps_bits },
            Law::Exact { name: "a matrix without gradient keeps every bit", check: no_gradient_keeps_bits },
            Law::Custom { name: "batched equals one by one", check: batched_equals_single },
            Law::Custom { name: "entries do not see each other", check: entries_are_apart },
            Law::Custom { name: "headwise_batched_ns_matches_per_head", check: headwise_batched_ns_matches_per_head },
            Law::Custom { name: "the update of the transpose is the transpose of the update", check: transpose },
            Law::Custom { name: "singular values before the plus end in the band", check: singular_values },
            Law::Custom { name: "NS(cG) = NS(G)", check: scale_invariance },
            Law::Custom { name: "rows after the plus have norm 1 or are noise", check: row_norms },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("apply-ignored", Gate::Meta),
            ("zero-gradient-moves", Gate::Meta),
            ("momentum-undamped", Gate::Form),
            ("momentum-dropped", Gate::Form),
            ("nesterov", Gate::Form),
            ("largest-not-divided-out", Gate::Meta),
            ("largest-for-norm", Gate::Form),
            ("norm-of-the-batch", Gate::Meta),
            ("batch-takes-first", Gate::Meta),
            ("zero-divides", Gate::Form),
            ("heads-ignored", Gate::Meta),
            ("heads-interleaved", Gate::Meta),
            ("first-entry-for-all", Gate::Meta),
            ("one-iteration-less", Gate::Form),
            ("cubic", Gate::Meta),
            ("linear-term-3.44", Gate::Meta),
            ("cubic-term-4.78", Gate::Meta),
            ("quintic-term-2.03", Gate::Form),
            ("plus-dropped", Gate::Form),
            ("plus-in-stored-orientation", Gate::Meta),
            ("rows-before-columns", Gate::Meta),
            ("columns-not-normalised", Gate::Form),
            ("rows-not-normalised", Gate::Meta),
            ("noise-blown-up", Gate::Form),
            ("scale-dropped", Gate::Form),
            ("decay-dropped", Gate::Form),
            ("decay-without-lr", Gate::Form),
            ("ascends", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        // A rounding in a direction whose singular value vanishes grows like the value itself, by a = 3.4445 an
        // iteration; those of later iterations add a third of it, and the norms of the plus as much again.
        let growth = 2.0 * 3.4445f64.powi(case.config.iterations as i32);
        let of = |tolerance: Tolerance, rounding: f64| {
            Tolerance::new(tolerance.tol.max(growth * rounding), "2 a^iterations roundings")
        };
        Tolerances {
            form: of(tolerance::FORM, f64::EPSILON / 2.0),
            diff_f32: of(tolerance::DIFF_F32, f64::from(f32::EPSILON) / 2.0),
            ..tolerance::WELL_CONDITIONED
        }
    }
}

/// Columns to unit norm, then rows, in loops.
fn plus(x: &mut DMatrix<f64>, is: &impl Fn(&str) -> bool) {
    let noise = if is("noise-blown-up") { 0.0 } else { 1e-4 };
    let columns = |x: &mut DMatrix<f64>| {
        let norms: Vec<f64> = x.column_iter().map(|column| column.norm()).collect();
        let mean = norms.iter().sum::<f64>() / norms.len() as f64;
        for (j, norm) in norms.into_iter().enumerate() {
            if norm > 0.0 && norm >= noise * mean {
                x.column_mut(j).unscale_mut(norm);
            }
        }
    };
    let rows = |x: &mut DMatrix<f64>| {
        *x = x.transpose();
        columns(x);
        *x = x.transpose();
    };
    if is("rows-before-columns") {
        rows(x);
        columns(x);
        return;
    }
    if !is("columns-not-normalised") {
        columns(x);
    }
    if !is("rows-not-normalised") {
        rows(x);
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<MuonOp>, config: &Config, inputs: &Values) -> std::result::Result<Values, String> {
    runner.run(config, inputs, None).map(|run| run.outputs).map_err(|e| e.to_string())
}

/// The outputs under the names they have as inputs.
fn renamed(outputs: &Values) -> Values {
    [("params", "params_after"), ("m", "m_after")]
        .into_iter()
        .map(|(to, from)| (to, outputs.at(from).clone()))
        .collect()
}

/// Compares parameters and momentum, bit for bit, at the chosen places.
fn keep_bits(got: &Values, want: &Values, mut chosen: impl FnMut(usize) -> bool) -> LawResult {
    let at: Vec<usize> = (0..want.at("m").len()).filter(|i| chosen(*i)).collect();
    for name in ["params", "m"] {
        let pick = |values: &Values| arr1(&at.iter().map(|i| values.at(name)[[*i]]).collect::<Vec<_>>()).into_dyn();
        passed(same_bits(name, pick(got).view(), pick(want).view()))?;
    }
    Ok(0.0)
}

fn close(got: &Values, want: &Values, tolerance: &Tolerance) -> LawResult {
    let params = passed(compare("params", got.at("params").view(), want.at("params").view(), tolerance))?;
    Ok(params.max(passed(compare("m", got.at("m").view(), want.at("m").view(), tolerance))?))
}

fn skipped_keeps_bits(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = MuonOp::draw(case, rng);
    inputs.get_mut("apply").expect("the flag is drawn").fill(0.0);
    inputs.get_mut("lr").expect("the rate is drawn").fill(f64::NAN);
    inputs.get_mut("grads").expect("gradients are drawn").fill(f64::NAN);
    inputs.get_mut("params").expect("parameters are drawn")[[0]] = -0.0;
    let inputs = held(&inputs);
    keep_bits(&renamed(&run(runner, &case.config, &inputs)?), &inputs, |_| true)
}

fn outside_keeps_bits(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = MuonOp::draw(case, rng);
    inputs.get_mut("params").expect("parameters are drawn").mapv_inplace(|p| if p < 0.0 { -0.0 } else { p });
    let inputs = held(&inputs);
    let after = renamed(&run(runner, &case.config, &inputs)?);
    keep_bits(&after, &inputs, |i| !case.config.matrices.iter().any(|matrix| matrix.range().contains(&i)))
}

/// Whatever its momentum is, and whatever the others do.
fn no_gradient_keeps_bits(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = MuonOp::draw(case, rng);
    let places = places(&case.config, false);
    if places.is_empty() {
        return Ok(0.0);
    }
    let place = &places[rng.random_range(0..places.len())];
    let m = draw::normal(rng, &[case.dim("P")]);
    for i in place.indices() {
        inputs.get_mut("grads").expect("gradients are drawn")[[i]] = 0.0;
        inputs.get_mut("m").expect("momentum is drawn")[[i]] = m[[i]];
    }
    let inside: Vec<usize> = place.indices().collect();
    let inputs = held(&inputs);
    keep_bits(&renamed(&run(runner, &case.config, &inputs)?), &inputs, |i| inside.contains(&i))
}

fn batched_equals_single(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = MuonOp::draw(case, rng);
    let with = |batching| run(runner, &Config { batching, ..case.config.clone() }, &inputs);
    let (batched, single) = (renamed(&with(Batching::Batched)?), renamed(&with(Batching::Single)?));
    keep_bits(&batched, &single, |_| true)
}

/// One entry at a time, each on what the last one left, is the same as all at once.
fn entries_are_apart(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = MuonOp::draw(case, rng);
    let whole = renamed(&run(runner, &case.config, &inputs)?);
    let mut left = inputs.clone();
    for matrix in case.config.matrices.iter().rev() {
        let config = Config { matrices: vec![matrix.clone()], ..case.config.clone() };
        left.extend(renamed(&run(runner, &config, &left)?).iter().map(|(name, array)| (name, array.clone())));
    }
    keep_bits(&left, &whole, |_| true)
}

/// The buffers and the table rearranged: element `i` of the new buffers is element `from[i]` of the old.
fn rearranged(inputs: &Values, from: &[usize]) -> Values {
    inputs.map(|name, array| match name {
        "lr" | "apply" => array.clone(),
        _ => arr1(&from.iter().map(|i| array[[*i]]).collect::<Vec<_>>()).into_dyn(),
    })
}

/// Every head, copied out into a matrix of its own and updated alone, is what it is among the others.
fn headwise_batched_ns_matches_per_head(
    runner: &dyn Runner<MuonOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> LawResult {
    let inputs = MuonOp::draw(case, rng);
    let together = renamed(&run(runner, &case.config, &inputs)?);
    for place in places(&case.config, false).iter().filter(|place| case.config.matrices[place.entry].heads > 1) {
        let from: Vec<usize> = place.indices().collect();
        let shape = [1, place.rows, place.width];
        let matrix = Matrix { start: 0, shape, heads: 1, ..case.config.matrices[place.entry].clone() };
        let config = Config { matrices: vec![matrix], ..case.config.clone() };
        let alone = renamed(&run(runner, &config, &rearranged(&inputs, &from))?);
        keep_bits(&rearranged(&together, &from), &alone, |_| true)?;
    }
    Ok(0.0)
}

/// Bit for bit, since a tall matrix is transposed before anything is computed; of square ones to rounding, and only the
/// iterate.
fn transpose(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = MuonOp::draw(case, rng);
    let mut config = case.config.clone();
    config.matrices.iter_mut().for_each(|matrix| matrix.heads = 1);
    let square = |matrix: &Matrix| matrix.shape[1] == matrix.shape[2];
    if config.plus {
        config.matrices.retain(|matrix| !square(matrix));
    }
    let mut turned = config.clone();
    turned.matrices.iter_mut().for_each(|matrix| matrix.shape.swap(1, 2));
    let mut from: Vec<usize> = (0..case.dim("P")).collect();
    for (place, other) in places(&config, false).iter().zip(places(&turned, false)) {
        for i in 0..place.rows {
            for j in 0..place.width {
                from[other.at(j, i)] = place.at(i, j);
            }
        }
    }
    let want = rearranged(&renamed(&run(runner, &config, &inputs)?), &from);
    let got = renamed(&run(runner, &turned, &rearranged(&inputs, &from))?);
    if config.matrices.iter().any(square) {
        return close(&got, &want, &MuonOp::tolerances(case).form);
    }
    keep_bits(&got, &want, |_| true)
}

/// What the operation takes from parameters of zero at learning rate 1, scale 1 and no decay: its update.
fn updates(
    runner: &dyn Runner<MuonOp>,
    config: &Config,
    inputs: &mut Values,
) -> std::result::Result<Vec<(Place, DMatrix<f64>)>, String> {
    let mut config = config.clone();
    config.matrices.iter_mut().for_each(|matrix| (matrix.scale, matrix.weight_decay) = (1.0, 0.0));
    inputs.get_mut("params").expect("parameters are drawn").fill(0.0);
    inputs.get_mut("lr").expect("the rate is drawn").fill(1.0);
    let after = run(runner, &config, inputs)?;
    let moved = places(&config, false)
        .into_iter()
        .filter(|place| inputs.at("apply")[[0]] == 1.0 && place.indices().any(|i| inputs.at("grads")[[i]] != 0.0));
    Ok(moved.map(|place| (-place.read(after.at("params_after")), place)).map(|(x, place)| (place, x)).collect())
}

/// The singular values of the iterate are those of the momentum, sent through the polynomial; all that start above the
/// documented bound end in the band, and none ends above it.
fn singular_values(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = MuonOp::draw(case, rng);
    let config = Config { plus: false, ..case.config.clone() };
    let from = if config.iterations == 5 { BAND_FROM_5 } else { BAND_FROM_8 };
    let bound = MuonOp::tolerances(case).form.tol;
    let mut worst = 0.0f64;
    for (place, x) in updates(runner, &config, &mut inputs)? {
        let momentum =
            place.read(inputs.at("m")) * config.momentum + place.read(inputs.at("grads")) * (1.0 - config.momentum);
        if x.iter().any(|x| !x.is_finite()) {
            return Err(format!("the update of entry {} is not finite", place.entry));
        }
        if momentum.amax() == 0.0 {
            continue;
        }
        let (before, after) =
            (Svd::of(&upright(&(&momentum / momentum.amax()))).sorted(), Svd::of(&upright(&x)).sorted());
        let norm = before.iter().map(|s| s * s).sum::<f64>().sqrt();
        let inside = |s: &f64| (BAND[0] - bound..=BAND[1] + bound).contains(s);
        let (expected, found) =
            (before.iter().filter(|s| **s / norm >= from).count(), after.iter().filter(|s| inside(s)).count());
        if found < expected || after[0] > BAND[1] + bound {
            return Err(format!("{expected} singular values belong into {BAND:?}; they are {after:?}"));
        }
        let mut oracle: Vec<f64> =
            before.iter().map(|s| (0..config.iterations).fold(s / norm, |s, _| polynomial(s))).collect();
        oracle.sort_by(|a, b| b.total_cmp(a));
        for (got, want) in after.iter().zip(&oracle) {
            worst = worst.max((got - want).abs() / bound);
        }
    }
    Ok(worst)
}

/// For powers of two, which are exact, bit for bit; for 1e-20 and 1e20 as well as rounding of the gradient allows.
fn scale_invariance(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = MuonOp::draw(case, rng);
    if case.family == "skipped" {
        return Ok(0.0);
    }
    let once = renamed(&run(runner, &case.config, &inputs)?);
    let scaled = |factor: f64| {
        let mut inputs = inputs.clone();
        for name in ["grads", "m"] {
            *inputs.get_mut(name).expect("both are drawn") *= factor;
        }
        let mut after = renamed(&run(runner, &case.config, &inputs)?);
        *after.get_mut("m").expect("momentum is there") /= factor;
        Ok::<_, String>(after)
    };
    keep_bits(&scaled(2f64.powi(rng.random_range(-400..=400)))?, &once, |_| true)?;
    keep_bits(&scaled(2f64.powi(600))?, &once, |_| true)?;
    let tolerance = MuonOp::tolerances(case).form;
    let small = close(&scaled(1e-20)?, &once, &tolerance)?;
    Ok(small.max(close(&scaled(1e20)?, &once, &tolerance)?))
}

fn row_norms(runner: &dyn Runner<MuonOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = MuonOp::draw(case, rng);
    if !case.config.plus {
        return Ok(0.0);
    }
    let may_be_noise = ["noise", "low-rank", "cancels"].contains(&case.family);
    let mut worst = 0.0f64;
    for (place, x) in updates(runner, &case.config, &mut inputs)? {
        let x = if place.rows > place.width { x.transpose() } else { x };
        for row in x.row_iter() {
            let norm = row.norm();
            if !(may_be_noise && norm < 1e-3) {
                // A norm and a division, then a norm here.
                worst = worst.max((norm - 1.0).abs() / 1e-14);
            }
            if norm.is_nan() {
                return Err(format!("a row of entry {} is not a number", place.entry));
            }
        }
    }
    Ok(worst)
}

impl<B: Muon> OperationOn<B> for MuonOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let state = glue::required(op, State::from_named(glue::find(inputs)))?;
        let scalars = glue::required(op, Scalars::from_named(glue::find(inputs)))?;
        Muon::update(b, config, state.clone(), scalars)?;
        let outputs = [("params_after", state.params), ("m_after", state.m)];
        Ok(Run { outputs: outputs.into_iter().map(|(name, t)| (name, t.clone())).collect(), grads: Named::new() })
    }
}
