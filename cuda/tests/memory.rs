//! The operations of the n-gram memory where the gates' small cases do not go: many places, rows that most of them
//! name, wide rows, every size of table, and rows and orders that are out of range. Where no adapter answers, every
//! test says so and why.

mod common;

use common::device;
use dormouse_cuda::{Arm, Gpu, Tensor};
use dormouse_reference::engram::{self, Engram};
use dormouse_reference::engram_hash::{self, EngramHash};
use dormouse_reference::row_adam::{self, RowAdam};
use dormouse_reference::{DType, Error, Precision, Reference, StepKey, Tensors};
use ndarray::{Array, Array2, ArrayD, Axis, IxDyn, array};

const ENGRAM: engram::Config = engram::Config { eps: 1e-5, gate_eps: 1e-2, precision: Precision::Full };

const ADAM: row_adam::Config = row_adam::Config { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

fn upload<B: Tensors>(b: &B, values: ArrayD<f64>, dtype: DType) -> B::Tensor {
    let tensor = b.persistent(values.shape(), dtype).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}

fn floats(b: &Gpu, values: ArrayD<f64>) -> Tensor {
    upload(b, values, DType::F32)
}

fn ids<B: Tensors>(b: &B, values: &[u32], shape: &[usize]) -> B::Tensor {
    let values = values.iter().map(|&id| f64::from(id)).collect();
    upload(b, ArrayD::from_shape_vec(IxDyn(shape), values).unwrap(), DType::U32)
}

/// Numbers that look random, below `below`.
fn scattered(i: usize, below: usize) -> usize {
    (i.wrapping_mul(2_654_435_761) >> 7) % below
}

#[test]
fn every_size_of_table_gives_the_rows_of_the_host() {
    let Some(b) = device() else { return };
    let (batch, tokens) = (3, 700);
    let symbols: Vec<u32> = (0..batch * tokens).map(|i| scattered(i, 257) as u32).collect();
    let masked = |i: usize| i % 7 == 3;
    let marks = Array::from_iter((0..batch * tokens).map(|i| f64::from(u8::from(masked(i)))));
    let marks = marks.into_shape_with_order((batch, tokens)).unwrap().into_dyn();
    let words = ids(&b, &symbols, &[batch, tokens]);
    // A mask may be stored either way, and the negative zero masks nothing.
    let masks = [upload(&b, marks.clone(), DType::U8), floats(&b, marks.mapv(|x| if x == 0.0 { -0.0 } else { x }))];
    let largest = u32::MAX as usize / 3;
    // Sizes on both sides of every change of the digit, and the ends.
    for rows in [1, 2, 1000, 32_768, 65_536, 65_537, 1 << 24, (1 << 24) + 1, 1 << 28, (1 << 30) + 7, largest] {
        for mask in [None, Some(&masks[0]), Some(&masks[1])] {
            let symbol = |(i, &id): (usize, &u32)| if mask.is_some() && masked(i) { engram_hash::MASKED } else { id };
            let seen: Vec<u32> = symbols.iter().enumerate().map(symbol).collect();
            let want: Vec<u32> = seen.chunks(tokens).flat_map(|s| engram_hash::rows(s, rows)).flatten().collect();
            for arm in Arm::ALL {
                b.set_arms(arm);
                let inputs = engram_hash::Inputs { ids: &words, mask };
                let got = EngramHash::forward(&b, &engram_hash::Config { rows }, inputs).unwrap().rows;
                assert_eq!(got.shape(), [batch, tokens, 3]);
                let got: Vec<u32> = b.download(&got).unwrap().iter().map(|&row| row as u32).collect();
                assert!(got == want, "{arm}: {rows} rows, mask {}", mask.is_some());
            }
        }
    }
}

/// Which row each place names: `same` of five places name one row.
fn rows_of(places: usize, table: usize, same: usize) -> Vec<u32> {
    (0..places).map(|i| if i % 5 < same { table / 2 } else { scattered(i, table) } as u32).collect()
}

/// A memory whose score is zero everywhere, because every key is: the gate is half open, and what a place sends to its
/// row is half of dm times the weight of the value. With a weight of ones and whole numbers every order of summation is
/// exact.
fn table_gradient(b: &Gpu, rows: &[u32], table: usize, width: usize, dm: &Array2<f64>) -> ArrayD<f64> {
    let (n, d) = dm.dim();
    let orders = rows.len() / n;
    let params = engram::Params {
        table: floats(b, ArrayD::ones(IxDyn(&[table, width]))),
        key: floats(b, ArrayD::zeros(IxDyn(&[orders * width, d]))),
        value: floats(
            b,
            ArrayD::from_shape_fn(IxDyn(&[orders * width, d]), |at| f64::from(u8::from(at[0] % d == at[1]))),
        ),
    };
    let (words, order) = (ids(b, rows, &[n, orders]), ids(b, &engram_hash::order(rows), &[rows.len()]));
    let c = floats(b, ArrayD::ones(IxDyn(&[n, d])));
    let inputs = engram::Inputs { c: &c, rows: &words, order: Some(&order) };
    let (_, saved) = Engram::forward(b, &ENGRAM, inputs, params.as_ref()).unwrap();
    let into = params.as_ref().map(|_, p| floats(b, ArrayD::from_elem(IxDyn(p.shape()), 5.0)));
    let dm = floats(b, dm.clone().into_dyn());
    Engram::backward(b, &ENGRAM, &saved, engram::Outputs { m: &dm }, None, into.as_ref()).unwrap();
    b.download(&into.table).unwrap()
}

#[test]
fn a_tables_gradient_is_right_for_many_places_and_wide_rows() {
    let Some(b) = device() else { return };
    // Positions, rows of the table, columns of a row, and how many of five places name one and the same row. 40 columns
    // go round a chunk's units twice; the last case leaves a chunk of one place.
    for (n, table, width, same) in
        [(700, 5, 40, 5), (4000, 90, 3, 4), (900, 70_000, 33, 0), (683, 2, 1, 5), (11, 4, 2, 1)]
    {
        let (orders, d) = (3, 4);
        let rows = rows_of(n * orders, table, same);
        let dm = Array2::from_shape_fn((n, d), |(n, d)| 2.0 * (((n * 7 + d * 3) % 11) as f64 - 4.0));
        let mut want = Array2::from_elem((table, width), 5.0);
        for (place, &row) in rows.iter().enumerate() {
            for w in 0..width {
                want[[row as usize, w]] += 0.5 * dm[[place / orders, (place % orders * width + w) % d]];
            }
        }
        for arm in Arm::ALL {
            b.set_arms(arm);
            let got = table_gradient(&b, &rows, table, width, &dm);
            assert!(got == want.clone().into_dyn(), "{arm}: {n} positions, {table} rows of {width}, {same} of five");
        }
    }
}

/// What an iteration of a block looks up is what the one before has, until somebody writes the table; and what is computed
/// on a branch is not there on the one beside it.
#[test]
fn a_step_looks_rows_up_once() {
    let Some(b) = device() else { return };
    b.set_arms(Arm::Fused);
    let (n, table, width, d) = (9, 5, 4, 6);
    let rows = rows_of(n * 3, table, 2);
    let numbers = |shape: &[usize]| {
        let mut i = 0;
        ArrayD::from_shape_simple_fn(IxDyn(shape), || (i += 1, scattered(i, 17) as f64 / 8.0 - 1.0).1)
    };
    let memory = floats(&b, numbers(&[table, width]));
    let other = floats(&b, -2.0 * numbers(&[table, width]));
    let (key, value) = (floats(&b, numbers(&[3 * width, d])), floats(&b, 1.0 - numbers(&[3 * width, d])));
    let (c, words) = (floats(&b, numbers(&[n, d])), ids(&b, &rows, &[n, 3]));
    let kept: Vec<Tensor> = (0..5).map(|_| floats(&b, ArrayD::zeros(IxDyn(&[n, d])))).collect();
    let launches = std::cell::RefCell::new(Vec::new());
    let forward = |b: &Gpu, into: &Tensor| {
        let before = b.ledger().count();
        let params = engram::Params { table: &memory, key: &key, value: &value };
        let inputs = engram::Inputs { c: &c, rows: &words, order: None };
        let m = Engram::forward(b, &ENGRAM, inputs, params)?.0.m;
        launches.borrow_mut().push(b.ledger().count() - before);
        b.keep(&m, into)
    };
    b.step(&StepKey { purpose: "test", variant: 0 }, &mut |b| {
        b.beside(&mut |b| forward(b, &kept[0]), &mut |b| forward(b, &kept[1]))?;
        forward(b, &kept[2])?;
        b.keep(&other, &memory)?;
        forward(b, &kept[3])
    })
    .unwrap();
    b.step(&StepKey { purpose: "test", variant: 1 }, &mut |b| forward(b, &kept[4])).unwrap();
    assert_eq!(*launches.borrow(), [4, 4, 1, 4, 4]);
    let [a, beside, again, written, next] = [0, 1, 2, 3, 4].map(|i: usize| b.download(&kept[i]).unwrap());
    assert!(a == beside && a == again && written == next && a != written);
}

#[test]
fn a_row_outside_the_table_gives_nan_and_touches_nothing_else() {
    let Some(b) = device() else { return };
    for arm in Arm::ALL {
        b.set_arms(arm);
        let around = floats(&b, ArrayD::from_elem(IxDyn(&[12]), 100.0));
        let table = b.view(&around, 3, &[3, 2]).unwrap();
        b.upload(array![[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]].into_dyn().view(), &table).unwrap();
        let rows = [1, 3, u32::MAX, 0];
        let words = ids(&b, &rows, &[4, 1]);
        // The last place is none of the four.
        let order = ids(&b, &[3, 0, 1, 9], &[4]);
        let weight = || floats(&b, array![[1.0, 0.0], [0.0, 1.0]].into_dyn());
        let (key, value, c) = (weight(), weight(), floats(&b, ArrayD::ones(IxDyn(&[4, 2]))));
        let params = engram::Params { table: &table, key: &key, value: &value };
        let inputs = engram::Inputs { c: &c, rows: &words, order: Some(&order) };
        let (out, saved) = Engram::forward(&b, &ENGRAM, inputs, params).unwrap();
        let m = b.download(&out.m).unwrap();
        assert!((0..2).all(|d| m[[0, d]].is_finite() && m[[3, d]].is_finite()), "{arm}: {m}");
        assert!((0..2).all(|d| m[[1, d]].is_nan() && m[[2, d]].is_nan()), "{arm}: {m}");
        let (into_key, into_value) = (weight(), weight());
        b.fill(&table, 0.0).unwrap();
        let into = engram::Params { table: &table, key: &into_key, value: &into_value };
        Engram::backward(&b, &ENGRAM, &saved, engram::Outputs { m: &c }, None, into).unwrap();
        let got = b.download(&around).unwrap();
        assert!(got.iter().take(3).chain(got.iter().skip(9)).all(|&x| x == 100.0), "{arm}: {got}");
        assert!(got.iter().skip(3).take(4).all(|x| x.is_finite()), "{arm}: {got}");
    }
}

#[test]
fn without_an_order_there_is_no_way_back() {
    let Some(b) = device() else { return };
    let (c, table, weight) = (
        floats(&b, ArrayD::ones(IxDyn(&[2, 4]))),
        floats(&b, ArrayD::ones(IxDyn(&[5, 3]))),
        floats(&b, ArrayD::ones(IxDyn(&[3, 4]))),
    );
    let rows = ids(&b, &[4, 0], &[2, 1]);
    let params = engram::Params { table: &table, key: &weight, value: &weight };
    let (out, saved) =
        Engram::forward(&b, &ENGRAM, engram::Inputs { c: &c, rows: &rows, order: None }, params.clone()).unwrap();
    let refused = Engram::backward(&b, &ENGRAM, &saved, engram::Outputs { m: &out.m }, None, params);
    assert!(matches!(refused.err(), Some(Error::Presence { arg: "order", .. })));
}

/// A state in the middle of a run, of numbers that f32 holds.
fn state(table: usize, width: usize) -> row_adam::State<ArrayD<f64>> {
    let held = |x: f64| f64::from(x as f32);
    let value = |seed: usize| {
        let number = |i: usize| held((scattered(i + seed, 2001) as f64 - 1000.0) / 1000.0);
        ArrayD::from_shape_fn(IxDyn(&[table, width]), |at| number(at[0] * width + at[1]))
    };
    row_adam::State {
        table: value(1),
        grads: value(2),
        m: value(3),
        v: value(4).mapv(|x| held(x * x)),
        counts: ArrayD::from_shape_fn(IxDyn(&[table]), |at| scattered(at[0], 60_000) as f64),
    }
}

#[test]
fn many_rows_move_as_on_the_reference_and_the_others_stay() {
    let Some(b) = device() else { return };
    let reference = Reference::<f64>::new();
    let (table, width, places) = (5000, 40, 9000);
    let rows = rows_of(places, table, 2);
    let before = state(table, width);
    let scalars = [0.01, 0.5, 1.0];
    let send = |name: &str| if name == "counts" { DType::U32 } else { DType::F64 };
    let want = before.clone().map(|name, x| upload(&reference, x, send(name)));
    let [lr, scale, apply] = scalars.map(|x| upload(&reference, array![x].into_dyn(), DType::F64));
    let (words, order) = (ids(&reference, &rows, &[places]), ids(&reference, &engram_hash::order(&rows), &[places]));
    let touched = row_adam::Touched { rows: &words, order: &order };
    let one = row_adam::Scalars { lr: &lr, scale: &scale, apply: &apply };
    RowAdam::update(&reference, &ADAM, want.as_ref(), touched, one).unwrap();
    for arm in Arm::ALL {
        b.set_arms(arm);
        let send = |name: &str| if name == "counts" { DType::U32 } else { DType::F32 };
        let got = before.clone().map(|name, x| upload(&b, x, send(name)));
        let [lr, scale, apply] = scalars.map(|x| floats(&b, array![x].into_dyn()));
        let (words, order) = (ids(&b, &rows, &[places]), ids(&b, &engram_hash::order(&rows), &[places]));
        let touched = row_adam::Touched { rows: &words, order: &order };
        RowAdam::update(&b, &ADAM, got.as_ref(), touched, row_adam::Scalars { lr: &lr, scale: &scale, apply: &apply })
            .unwrap();
        for ((name, got), (_, want)) in got.as_ref().named().into_iter().zip(want.as_ref().named()) {
            let (got, want) = (b.download(got).unwrap(), reference.download(want).unwrap());
            let worst = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
            // Values of size 1 come from two products and a sum: at most three roundings of half an epsilon. A row
            // moves by less than 0.01 times the root of 1 / (1 - beta2), so the roundings of that are far below one of
            // the row.
            let limit = if name == "counts" { 0.0 } else { 2.0 * f64::from(f32::EPSILON) };
            assert!(worst <= limit, "{arm}: {name} is off by {worst:e}");
        }
        let named = |row: usize| rows.contains(&(row as u32));
        let after = b.download(&got.table).unwrap();
        for row in (0..table).filter(|&row| !named(row)) {
            assert_eq!(after.index_axis(Axis(0), row), before.table.index_axis(Axis(0), row), "{arm}: row {row}");
        }
    }
}

#[test]
fn what_names_no_row_moves_none_and_a_full_count_stays_full() {
    let Some(b) = device() else { return };
    for arm in Arm::ALL {
        b.set_arms(arm);
        let buffer = |x: f64| floats(&b, ArrayD::from_elem(IxDyn(&[3, 2]), x));
        let counts = ids(&b, &[u32::MAX, 7, 0], &[3]);
        let state = row_adam::State { table: buffer(1.0), grads: buffer(1.0), m: buffer(0.0), v: buffer(0.0), counts };
        // Row 3 is none of the table's, and place 9 is none of the batch's.
        let (rows, order) = (ids(&b, &[0, 3, u32::MAX, 2], &[4]), ids(&b, &[0, 9, 1, 2], &[4]));
        let one = |x: f64| floats(&b, array![x].into_dyn());
        let (lr, scale, apply) = (one(0.5), one(1.0), one(1.0));
        let scalars = row_adam::Scalars { lr: &lr, scale: &scale, apply: &apply };
        RowAdam::update(&b, &ADAM, state.as_ref(), row_adam::Touched { rows: &rows, order: &order }, scalars).unwrap();
        assert_eq!(b.download(&state.counts).unwrap(), array![f64::from(u32::MAX), 7.0, 0.0].into_dyn(), "{arm}");
        let table = b.download(&state.table).unwrap();
        assert!(table.iter().take(2).all(|&x| x < 1.0), "{arm}: {table}");
        assert!(table.iter().skip(2).all(|&x| x == 1.0), "{arm}: {table}");
    }
}

#[test]
fn rows_orders_and_counts_are_whole_numbers_and_buffers_their_own() {
    let Some(b) = device() else { return };
    let buffer = || floats(&b, ArrayD::zeros(IxDyn(&[3, 2])));
    let (table, grads, m, v) = (buffer(), buffer(), buffer(), buffer());
    let (counts, rows, order) = (ids(&b, &[0; 3], &[3]), ids(&b, &[1], &[1]), ids(&b, &[0], &[1]));
    let one = floats(&b, array![1.0].into_dyn());
    let update = |state: row_adam::State<&Tensor>, rows: &Tensor| {
        let scalars = row_adam::Scalars { lr: &one, scale: &one, apply: &one };
        RowAdam::update(&b, &ADAM, state, row_adam::Touched { rows, order: &order }, scalars).err()
    };
    let state = || row_adam::State { table: &table, grads: &grads, m: &m, v: &v, counts: &counts };
    assert!(update(state(), &rows).is_none());
    assert!(matches!(update(state(), &one), Some(Error::Storage { arg: "rows", got: DType::F32, .. })));
    let reals = floats(&b, ArrayD::zeros(IxDyn(&[3])));
    let of_reals = row_adam::State { counts: &reals, ..state() };
    assert!(matches!(update(of_reals, &rows), Some(Error::Storage { arg: "counts", got: DType::F32, .. })));
    let shared = row_adam::State { v: &m, ..state() };
    assert!(matches!(update(shared, &rows), Some(Error::Aliased { arg: "v", other: "m", .. })));
    let hash = EngramHash::forward(&b, &engram_hash::Config { rows: 5 }, engram_hash::Inputs { ids: &m, mask: None });
    assert!(matches!(hash.err(), Some(Error::Storage { arg: "ids", got: DType::F32, .. })));
    let none = EngramHash::forward(&b, &engram_hash::Config { rows: 0 }, engram_hash::Inputs { ids: &m, mask: None });
    assert!(matches!(none.err(), Some(Error::Config { field: "rows", .. })));
}
