//! `row_adam`: the equations are in `dormouse_reference::row_adam`.
//!
//! The order brings the places of a row side by side, and the first of them moves it; so a row that is named a hundred
//! times moves once, and nothing is atomic. With `apply` = 0 no kernel writes, the counts included. The bias
//! corrections are computed where they are used, because the count of a row is known to the device only.
//!
//! Arm `plain` has one unit an element of a place, and a second launch that advances the counts. Arm `fused` is one
//! launch in which 32 units share a place: the first of them advances the count and computes the corrections for all.
//! It reads rows and order, and reads and writes the touched rows of the table and its mirrors, nothing else.
//!
//! The host looks at neither rows nor order. A row outside the table does not move, and no memory outside the tensors
//! is touched; an order that is none moves rows twice or not at all.

use cubecl::prelude::*;
use dormouse_reference::row_adam::{Config, RowAdam, Scalars, State, Touched, check};
use dormouse_reference::{DType, Error, Result, check_apart, check_one};

use crate::adamw::correction;
use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::embedding::check_ids;
use crate::launch::Grid;
use crate::rows;
use crate::runtime::Engine;
use crate::tensor::{Floats, Life, Tensor, Words};

const STEM: &str = "row_adam";

const OP: &str = "row_adam::update";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("scale-dropped"),
    Mutant::fused("one-update-ahead"),
    Mutant::fused("count-stays"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("apply-ignored"),
    Mutant::fused("stale-first-moment"),
    Mutant::fused("last-column-missed"),
    Mutant::fused("row-behind-its-neighbour-missed"),
    Mutant::fused("one-count-for-a-cube"),
];

/// Marks a place that moves no row. Rows are far below it.
const NONE: u32 = u32::MAX;

/// One call, checked.
struct Call<'a> {
    state: State<&'a Tensor>,
    touched: Touched<&'a Tensor>,
    scalars: Scalars<&'a Tensor>,
    factors: Factors,
    /// R, W and N.
    len: usize,
    width: usize,
    places: usize,
}

/// The factors that do not change from step to step, each rounded once.
#[derive(Clone, Copy)]
struct Factors {
    keep_m: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    eps: f32,
}

/// The row at place `k` of the order, or [`NONE`] where the order names no place.
#[cube]
fn row_at(rows: &Words, order: &Words, k: usize, places: u32) -> u32 {
    let place = order.at(k);
    let mut row = comptime!(NONE).runtime();
    if place < places {
        row = rows.at(place as usize);
    }
    row
}

/// The row that place `k` of the order moves, or [`NONE`]: where the row is not of the table's `len`, and where the
/// place before has it already. In a mutant also where the place before has the row before it.
#[cube]
fn moved_at(rows: &Words, order: &Words, k: usize, places: u32, len: u32, #[comptime] neighbour: bool) -> u32 {
    let mut row = row_at(rows, order, k, places);
    if row >= len {
        row = comptime!(NONE).runtime();
    }
    if k > 0 {
        let before = row_at(rows, order, k - 1, places);
        let mut same = before == row;
        if comptime!(neighbour) {
            same = before == row || before + 1u32 == row;
        }
        if same {
            row = comptime!(NONE).runtime();
        }
    }
    row
}

/// One more, where there is one.
#[cube]
fn one_more(count: u32) -> u32 {
    let mut next = count;
    if count < u32::MAX {
        next = count + 1u32;
    }
    next
}

/// Moves one element of the row that a place moves.
#[cube(launch_unchecked)]
fn plain_kernel(
    rows: &Words,
    order: &Words,
    counts: &Words,
    grads: &Floats,
    lr: &Floats,
    scale: &Floats,
    apply: &Floats,
    table: &mut Floats,
    m: &mut Floats,
    v: &mut Floats,
    places: u32,
    len: u32,
    width: u32,
    keep_m: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    eps: f32,
) {
    let k = ABSOLUTE_POS / width as usize;
    if k < places as usize && apply.at(0) == 1.0f32 {
        let row = moved_at(rows, order, k, places, len, false);
        if row != comptime!(NONE) {
            let i = row as usize * width as usize + ABSOLUTE_POS % width as usize;
            let count = one_more(counts.at(row as usize));
            let g = scale.at(0) * grads.at(i);
            let new_m = keep_m * m.at(i) + take_m * g;
            let new_v = keep_v * v.at(i) + take_v * g * g;
            let first_moment = new_m / correction(take_m, count);
            let second_moment = new_v / correction(take_v, count);
            m.set(i, new_m);
            v.set(i, new_v);
            table.set(i, table.at(i) - lr.at(0) * first_moment / (second_moment.sqrt() + eps));
        }
    }
}

/// Advances the count of the row that a place moves.
#[cube(launch_unchecked)]
fn counts_kernel(rows: &Words, order: &Words, apply: &Floats, counts: &mut Words, places: u32, len: u32) {
    let k = ABSOLUTE_POS;
    if k < places as usize && apply.at(0) == 1.0f32 {
        let row = moved_at(rows, order, k, places, len, false);
        if row != comptime!(NONE) {
            let count = one_more(counts.at(row as usize));
            counts.set(row as usize, count);
        }
    }
}

/// Moves the row of a place. Some units share it.
///
/// Mutants: 1 drops the scale, 2 counts one update more in the corrections, 3 leaves the count as it is, 4 is null (a
/// renamed local), 5 ignores the flag, 6 steps along the first moment before its update, 7 misses the last column, 8
/// misses a row whose neighbour came before, 9 takes the corrections of the cube's first place for all its places.
#[cube(launch_unchecked)]
fn fused_kernel(
    rows: &Words,
    order: &Words,
    counts: &mut Words,
    grads: &Floats,
    lr: &Floats,
    scale: &Floats,
    apply: &Floats,
    table: &mut Floats,
    m: &mut Floats,
    v: &mut Floats,
    places: u32,
    len: u32,
    width: u32,
    keep_m: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    eps: f32,
    #[comptime] mutant: u32,
) {
    let (k, lane) = (rows::row(), rows::lane());
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * rows::ROWS as usize));
    let mut mine = 2 * (UNIT_POS as usize / lanes);
    let mut flag = apply.at(0);
    if comptime!(mutant == 5) {
        flag = 1.0f32;
    }
    let mut row = comptime!(NONE).runtime();
    if k < places as usize && flag == 1.0f32 {
        row = moved_at(rows, order, k, places, len, comptime!(mutant == 8));
    }
    let here = row != comptime!(NONE);
    if lane == 0 {
        let mut step = 0.0f32;
        let mut root_correction = 0.0f32;
        if here {
            let mut count = one_more(counts.at(row as usize));
            if comptime!(mutant != 3) {
                counts.set(row as usize, count);
            }
            if comptime!(mutant == 2) {
                count += 1u32;
            }
            step = lr.at(0) / correction(take_m, count);
            root_correction = 1.0f32 / correction(take_v, count).sqrt();
        }
        shared[mine] = step;
        shared[mine + 1] = root_correction;
    }
    sync_cube();
    if comptime!(mutant == 9) {
        mine = 0usize;
    }
    let step = shared[mine];
    let root_correction = shared[mine + 1];
    let mut width_moved = width as usize;
    if comptime!(mutant == 7) {
        width_moved -= 1;
    }
    if here {
        for turn in 0..width_moved.div_ceil(lanes) {
            let column = turn * lanes + lane;
            if column < width_moved {
                let i = row as usize * width as usize + column;
                let mut g = scale.at(0) * grads.at(i);
                if comptime!(mutant == 1) {
                    g = grads.at(i);
                }
                if comptime!(mutant == 4) {
                    let renamed = scale.at(0) * grads.at(i);
                    g = renamed;
                }
                let old_m = m.at(i);
                let new_m = keep_m * old_m + take_m * g;
                let new_v = keep_v * v.at(i) + take_v * g * g;
                let mut along = new_m;
                if comptime!(mutant == 6) {
                    along = old_m;
                }
                m.set(i, new_m);
                v.set(i, new_v);
                table.set(i, table.at(i) - step * along / (new_v.sqrt() * root_correction + eps));
            }
        }
    }
}

impl<R: Engine> RowAdam for Device<R> {
    fn update(
        &self,
        config: &Config,
        state: State<&Tensor>,
        touched: Touched<&Tensor>,
        scalars: Scalars<&Tensor>,
    ) -> Result<()> {
        let dims = check(config, state.clone().map(|_, x| x.shape()), touched.clone().map(|_, x| x.shape()))?;
        let buffers = state.clone().named();
        check_apart(OP, &buffers, |a, b| a.shares_allocation(b))?;
        for (arg, scalar) in scalars.clone().named() {
            check_one(OP, arg, scalar.shape())?;
        }
        self.check_floats(OP, &scalars.clone().named())?;
        for (arg, ids) in touched.clone().named() {
            check_ids(self, OP, arg, ids)?;
        }
        let State { table, grads, m, v, counts } = state;
        self.check_floats(OP, &[("grads", grads)])?;
        for (arg, buffer) in [("table", table), ("m", m), ("v", v)] {
            self.check_into(OP, arg, buffer, &[])?;
        }
        if counts.life != Life::Persistent {
            return Err(Error::NotPersistent { op: OP, arg: "counts" });
        }
        if counts.dtype != DType::U32 {
            return Err(Error::Storage { op: OP, arg: "counts", expected: "u32".to_owned(), got: counts.dtype });
        }
        let (len, width, places) = (dims.get("R"), dims.get("W"), dims.get("N"));
        let call = Call { state, touched, scalars, factors: Factors::of(config), len, width, places };
        match self.forward_arm(STEM) {
            Arm::Plain => self.rows_plain(&call),
            Arm::Fused => self.rows_fused(&call),
        }
    }
}

impl Factors {
    fn of(config: &Config) -> Self {
        let &Config { beta1, beta2, eps } = config;
        Self {
            keep_m: beta1 as f32,
            take_m: (1.0 - beta1) as f32,
            keep_v: beta2 as f32,
            take_v: (1.0 - beta2) as f32,
            eps: eps as f32,
        }
    }
}

impl Call<'_> {
    /// Every tensor, in the order of the kernels.
    fn uses(&self) -> [&Tensor; 10] {
        let State { table, grads, m, v, counts } = self.state;
        let Touched { rows, order } = self.touched;
        let Scalars { lr, scale, apply } = self.scalars;
        [rows, order, counts, grads, lr, scale, apply, table, m, v]
    }

    /// What is read and written where no row is named twice: how many are is known to the device only.
    fn bytes(&self) -> u64 {
        let rows = self.places.min(self.len);
        4 * (2 * self.places + rows * (7 * self.width + 2)) as u64
    }
}

impl<R: Engine> Device<R> {
    fn rows_plain(&self, call: &Call<'_>) -> Result<()> {
        let &Call { factors, len, width, places, .. } = call;
        let uses = call.uses();
        let [rows, order, counts, _, _, _, apply, ..] = uses;
        self.launch(OP, Grid::units(places * width), call.bytes(), &uses, |client, count, dim| {
            let (n, r, w) = (places as u32, len as u32, width as u32);
            let Factors { keep_m, take_m, keep_v, take_v, eps } = factors;
            let [rows, order, counts] = [rows, order, counts].map(|x| self.words(x));
            let [_, _, _, grads, lr, scale, apply, table, m, v] = uses.map(|x| self.floats(x));
            // SAFETY: a row that moves is one of the table's, of which the mirrors have as many; places were counted.
            unsafe {
                plain_kernel::launch_unchecked::<R>(
                    client, count, dim, rows, order, counts, grads, lr, scale, apply, table, m, v, n, r, w, keep_m,
                    take_m, keep_v, take_v, eps,
                )
            }
        })?;
        let bytes = rows.bytes() + order.bytes() + 8 * places.min(len) as u64;
        let uses = [rows, order, apply, counts];
        self.launch("row_adam::counts", Grid::units(places), bytes, &uses, |client, count, dim| {
            let [rows, order, counts] = [rows, order, counts].map(|x| self.words(x));
            let (n, r) = (places as u32, len as u32);
            // SAFETY: a row that moves is below the number of counts; places were counted.
            unsafe {
                counts_kernel::launch_unchecked::<R>(client, count, dim, rows, order, self.floats(apply), counts, n, r)
            }
        })
    }

    fn rows_fused(&self, call: &Call<'_>) -> Result<()> {
        let &Call { factors, len, width, places, .. } = call;
        let uses = call.uses();
        let mutant = self.mutant(STEM);
        self.launch(OP, rows::cubes(places), call.bytes(), &uses, |client, count, dim| {
            let (n, r, w) = (places as u32, len as u32, width as u32);
            let Factors { keep_m, take_m, keep_v, take_v, eps } = factors;
            let [rows, order, counts, ..] = uses.map(|x| self.words(x));
            let [_, _, _, grads, lr, scale, apply, table, m, v] = uses.map(|x| self.floats(x));
            // SAFETY: a row that moves is one of the table's, of which the mirrors have as many; places were counted.
            unsafe {
                fused_kernel::launch_unchecked::<R>(
                    client, count, dim, rows, order, counts, grads, lr, scale, apply, table, m, v, n, r, w, keep_m,
                    take_m, keep_v, take_v, eps, mutant,
                )
            }
        })
    }
}
