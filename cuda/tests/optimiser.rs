//! `muon` and `retract_all` at sizes where their loops go round more than once: several blocks of rows, more entries than
//! a launch takes, sides beyond a tile. The gates' cases are smaller. Where no adapter answers, every test says so and why.

mod common;
#[path = "common/draw.rs"]
mod draw;

use dormouse_cuda::{Arm, Gpu};
use dormouse_reference::muon::{self, Batching, Matrix, Muon};
use dormouse_reference::retract::{self, Retract};
use dormouse_reference::retract_all::{self, Factor, RetractAll};
use dormouse_reference::{Reference, Tensors};
use draw::{put, values};
use ndarray::{ArrayD, IxDyn};

/// Entries one behind another with an element of nobody between them: shape, heads.
fn table(shapes: &[([usize; 3], usize)]) -> (Vec<Matrix>, usize) {
    let mut start = 1;
    let mut matrices = Vec::new();
    for (i, &(shape, heads)) in shapes.iter().enumerate() {
        let matrix = Matrix { start, shape, heads, scale: 1.0 + i as f64 / 4.0, weight_decay: i as f64 / 8.0 };
        start = matrix.range().end + 1;
        matrices.push(matrix);
    }
    (matrices, start)
}

/// Parameters and momentum after one update from the same beginnings.
fn moved<B: Muon>(b: &B, config: &muon::Config, len: usize) -> [ArrayD<f64>; 2] {
    let [params, grads, m] = [1, 2, 3].map(|seed| put(b, &values(&[len], seed)));
    let [lr, apply] = [0.25, 1.0].map(|x| put(b, &ArrayD::from_elem(IxDyn(&[1]), x)));
    let state = muon::State { params: &params, grads: &grads, m: &m };
    Muon::update(b, config, state, muon::Scalars { lr: &lr, apply: &apply }).unwrap();
    [&params, &m].map(|t| b.download(t).unwrap())
}

fn config(matrices: Vec<Matrix>, iterations: usize, batching: Batching) -> muon::Config {
    muon::Config { momentum: 0.75, iterations, plus: true, batching, matrices }
}

/// Heads and entries of one shape, tall and wide, in several blocks, of sides that the kernels treat each in a way of its own:
/// up to 64, up to 96 and beyond.
const SHAPES: [([usize; 3], usize); 7] = [
    ([2, 300, 64], 1),
    ([1, 300, 128], 2),
    ([1, 33, 400], 1),
    ([2, 70, 200], 1),
    ([1, 130, 258], 2),
    ([1, 90, 300], 1),
    ([1, 4500, 3], 1),
];

#[test]
fn muon_is_the_reference_in_several_blocks() {
    let (matrices, len) = table(&SHAPES);
    let config = config(matrices, 5, Batching::Batched);
    let want = moved(&Reference::<f64>::new(), &config, len);
    // What the gates allow: 2 a^iterations roundings, and ten times that for one element beside the largest.
    let tolerance = 10.0 * 2.0 * 3.4445f64.powi(5) * f64::from(f32::EPSILON) / 2.0;
    for arm in Arm::ALL {
        let Some(b) = common::device() else { return };
        b.set_arms(arm);
        b.set_poison(true);
        for (got, want) in moved(&b, &config, len).iter().zip(&want) {
            let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let error = (got - want).abs() / largest;
                assert!(error <= tolerance, "{arm} {i}: {got} is {error:e} from {want}");
            }
        }
    }
}

#[test]
fn muon_batched_has_the_bits_of_one_by_one() {
    let (matrices, len) = table(&SHAPES[..6]);
    for arm in Arm::ALL {
        let Some(b) = common::device() else { return };
        b.set_arms(arm);
        let [together, apart] = [Batching::Batched, Batching::Single].map(|batching| {
            let after = moved(&b, &config(matrices.clone(), 5, batching), len);
            after.map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        });
        assert!(together == apart, "{arm}");
    }
}

/// Launches of one call by kernel.
fn launches(b: &Gpu, call: impl FnOnce(&Gpu)) -> Vec<(&'static str, u64)> {
    let count = |b: &Gpu| b.ledger().kernels;
    let before = count(b);
    call(b);
    let after = count(b).into_iter();
    let more = after.map(|(name, k)| (name, k.count - before.get(name).map_or(0, |before| before.count)));
    more.filter(|(name, count)| *count > 0 && (name.starts_with("muon") || name.starts_with("retract"))).collect()
}

/// What the module's table says a call takes, whatever the number of its matrices and their shapes: up to a side of 64, and
/// up to one of 96.
#[test]
fn a_call_takes_as_few_launches_as_are_documented() {
    let Some(b) = common::device() else { return };
    b.set_arms(Arm::Fused);
    let (matrices, len) =
        table(&[([2, 20, 6], 1), ([1, 20, 24], 4), ([1, 20, 6], 1), ([1, 3, 70], 1), ([1, 70, 66], 1)]);
    let found = launches(&b, |b| drop(moved(b, &config(matrices, 8, Batching::Batched), len)));
    let want = [
        ("muon::columns", 2),
        ("muon::gather", 2),
        ("muon::last", 2),
        ("muon::polynomial", 8),
        ("muon::step", 6),
        ("muon::write", 2),
    ];
    assert_eq!(found, want);
    // Of one kind of width, half as many.
    let (matrices, len) = table(&[([2, 20, 6], 1), ([1, 20, 24], 4), ([1, 20, 6], 1)]);
    let found = launches(&b, |b| drop(moved(b, &config(matrices, 8, Batching::Batched), len)));
    assert_eq!(found, want.map(|(name, count)| (name, count / 2)));
    let (matrices, len) = table(&[([2, 100, 98], 1), ([1, 100, 196], 2)]);
    let found = launches(&b, |b| drop(moved(b, &config(matrices, 8, Batching::Batched), len)));
    assert_eq!(found.iter().map(|(_, count)| count).sum::<u64>(), 29, "{found:?}");
    let (factors, len) = factors(&[[2, 20, 6], [1, 20, 6], [3, 20, 6]]);
    let found = launches(&b, |b| drop(retracted(b, &factors, len)));
    assert_eq!(found, [("retract::gram", 1), ("retract::multiply", 1), ("retract::polar", 1)]);
}

/// The matrices of the preset `small`: three projections by head, the factors of three experts and of the output map, two
/// projections of the memory.
const SMALL: [([usize; 3], usize); 11] = [
    ([1, 768, 768], 12),
    ([1, 768, 768], 12),
    ([1, 768, 768], 12),
    ([3, 768, 64], 1),
    ([3, 2048, 64], 1),
    ([3, 2048, 64], 1),
    ([3, 768, 64], 1),
    ([1, 768, 64], 1),
    ([1, 768, 64], 1),
    ([1, 96, 768], 1),
    ([1, 96, 768], 1),
];

/// And its factors, the head's two besides.
const SMALL_FACTORS: [[usize; 3]; 8] =
    [[3, 768, 64], [3, 2048, 64], [3, 2048, 64], [3, 768, 64], [1, 768, 64], [1, 768, 64], [1, 768, 64], [1, 256, 64]];

/// The whole update of the benchmark model at its own sizes: right, and in fewer than the 120 nodes that it may take.
#[test]
fn the_update_of_the_benchmark_model_is_the_reference_in_its_share_of_nodes() {
    let Some(b) = common::device() else { return };
    b.set_arms(Arm::Fused);
    let (matrices, len) = table(&SMALL);
    let config = config(matrices, 8, Batching::Batched);
    let mut got = None;
    let of_muon = launches(&b, |b| got = Some(moved(b, &config, len)));
    let want = moved(&Reference::<f32>::new(), &config, len);
    let before = values(&[len], 1);
    let got = got.expect("it ran");
    // The weights move by the update and the decay; what gate `diff` allows, relative to the move.
    let square = |x: &ArrayD<f64>| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error = square(&(&got[0] - &want[0])) / square(&(&want[0] - &before));
    assert!(error <= 2.0 * 3.4445f64.powi(8) * f64::from(f32::EPSILON) / 2.0, "{error:e}");
    let (all, len) = factors(&SMALL_FACTORS);
    let of_retraction = launches(&b, |b| drop(retracted(b, &all, len)));
    let counts = [&of_muon, &of_retraction].map(|found| found.iter().map(|(_, count)| count).sum::<u64>());
    assert_eq!(counts, [22, 3], "{of_muon:?} {of_retraction:?}");
}

fn factors(shapes: &[[usize; 3]]) -> (Vec<Factor>, usize) {
    let mut start = 1;
    let mut factors = Vec::new();
    for &shape in shapes {
        let factor = Factor { start, shape };
        start = factor.range().end + 1;
        factors.push(factor);
    }
    (factors, start)
}

const RETRACTED: retract::Config = retract::Config { iterations: 4, power_iterations: 5 };

/// Parameters and spreads after one call.
fn retracted(b: &Gpu, factors: &[Factor], len: usize) -> [ArrayD<f64>; 2] {
    let (params, apply) = (put(b, &values(&[len], 7)), put(b, &ArrayD::ones(IxDyn(&[1]))));
    let retract::Config { iterations, power_iterations } = RETRACTED;
    let config = retract_all::Config { iterations, power_iterations, factors: factors.to_vec() };
    let spreads = RetractAll::update(b, &config, &params, &apply).unwrap().spreads;
    [&params, &spreads].map(|t| b.download(t).unwrap())
}

/// Several blocks of rows and tiles of columns, one factor of another shape between, more factors than two launches take.
#[test]
fn a_factor_has_the_bits_it_has_alone() {
    let shapes = [[2, 100, 40], [1, 9, 4], [1, 100, 40], [1, 2100, 3], [3, 100, 40]];
    let (all, len) = factors(&[&shapes[..], &[[1, 9, 4]; 30]].concat());
    for arm in Arm::ALL {
        let Some(b) = common::device() else { return };
        b.set_arms(arm);
        let [together, spreads] = retracted(&b, &all, len);
        let (params, apply) = (put(&b, &values(&[len], 7)), put(&b, &ArrayD::ones(IxDyn(&[1]))));
        for (f, Factor { start, shape }) in all.iter().enumerate() {
            let factor = b.view(&params, *start, shape).unwrap();
            let spread = Retract::update(&b, &RETRACTED, &factor, &apply).unwrap().spread;
            assert_eq!(b.download(&spread).unwrap()[[0]].to_bits(), spreads[[f]].to_bits(), "{arm} {f}");
        }
        let apart = b.download(&params).unwrap();
        assert!(apart.iter().zip(&together).all(|(x, y)| x.to_bits() == y.to_bits()), "{arm}");
        assert!(apart != values(&[len], 7), "{arm}");
    }
}
