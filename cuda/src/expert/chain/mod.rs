//! Two products in a row with an activation between them, without the wide matrix between them ever in memory.
//!
//! ```text
//! p = X1 Y1^T     act = silu(p)                X [rows, R],  Y [columns, R],  p and d [rows, columns]
//! d = X2 Y2^T     dh  = d * silu'(p)
//! O1 = dh Y1      O2  = act Y2                 O [rows, R]
//! ```
//!
//! The two passes of `expert` are three such chains, one a kernel in [`super::chained`]:
//!
//! | kernel | rows | columns | X1, X2 | Y1, Y2 | result |
//! |---|---|---|---|---|---|
//! | forward | tokens | F | a s of up | V of up, U of down | O2 = a of down |
//! | tokens | tokens | F | a s of up, b s of down | V of up, U of down | O1 = b of up |
//! | hidden | F | tokens | V of up, U of down | a s of up, b s of down | O1 = dV of up, O2 = dU of down |
//!
//! A cube has some groups of 16 rows. 32 units hold 16 rows of X in registers from first to last, as the matrix units of
//! an NVIDIA GPU want a left factor (PTX `mma.m16n8k16` in bf16, `m16n8k8` in tf32), and their rows of O as these leave
//! a result. The columns pass by in chunks through shared memory. What the first product leaves in a unit's registers is
//! what the second wants there as its left factor: in bf16 by the definition of the fragments, in tf32 if the columns of
//! each eight are taken in the order 0 2 4 6 1 3 5 7 in both factors. So neither p nor act leaves the registers.
//!
//! Factors come packed, see [`super::pack`]: rounded, the rank filled up with zeros to a multiple of 16, two bf16 a word.
//! The first product wants neighbours along the rank in one word, the second neighbours along the columns; tf32 has one
//! element a word and needs no second form. Rows in shared memory are padded so that the 32 units of a product read 32
//! banks: along the rank unit (g, t) reads word `g stride + t` with a stride of four times an odd number, along the
//! columns `t stride + g` with eight times an odd number.
//!
//! Groups of 32 units may share 16 rows: each takes its part of every chunk, and in the end the first adds up the parts
//! in order.
//!
//! Elsewhere than on CUDA each unit computes the same elements from the same words, with act and dh passed through
//! shared memory.

use cubecl::prelude::*;
use dormouse_reference::Precision;

use self::products::{emulated_second, first_product, second_product, send};
use super::words::word;
use crate::kda::tile::Math;
use crate::tensor::{Floats, Words};

mod products;

/// Units that hold 16 rows together.
const LANES: usize = 32;

/// Rows of a group, and columns of a fragment of a result with its elements a unit.
pub(super) const ROWS: usize = 16;
const COLUMNS: usize = 8;
const HELD: usize = 4;

/// Words along the rank that one instruction takes, in either precision, and the registers of a left factor.
const STEP: usize = 8;
const LEFT: usize = 4;

/// Which chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Forward,
    Tokens,
    Hidden,
}

/// What a chain is compiled for. Rows and columns are no part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub kind: Kind,
    /// R, filled up to a multiple of 16.
    pub rank: usize,
    /// Groups of 16 rows.
    pub groups: usize,
    /// Groups of 32 units that share 16 rows.
    pub splits: usize,
    /// Columns in shared memory at a time: some spans for every split.
    pub columns: usize,
    /// Columns that 32 units take at a time, a multiple of 16.
    pub span: usize,
    pub math: Math,
}

/// Rows of words in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Region {
    rows: usize,
    width: usize,
    stride: usize,
}

impl Region {
    const fn len(self) -> usize {
        self.rows * self.stride
    }

    /// Words of a unit, rounded up.
    const fn each(self, units: usize) -> usize {
        (self.rows * self.width).div_ceil(units)
    }
}

impl Plan {
    const fn short(self) -> bool {
        matches!(self.math.precision, Precision::Bf16)
    }

    /// Rows of a cube.
    pub const fn rows(self) -> usize {
        ROWS * self.groups
    }

    /// Units of a cube.
    pub const fn units(self) -> usize {
        LANES * self.groups * self.splits
    }

    /// Words of a row along the rank.
    pub const fn wide(self) -> usize {
        if self.short() { self.rank / 2 } else { self.rank }
    }

    /// Whether d, and with it dh and O1, is wanted.
    const fn slopes(self) -> bool {
        !matches!(self.kind, Kind::Forward)
    }

    /// Whether O2 is wanted.
    const fn acts(self) -> bool {
        !matches!(self.kind, Kind::Tokens)
    }

    /// A chunk with neighbours along the rank in a word.
    const fn by_rank(self) -> Region {
        Region { rows: self.columns, width: self.wide(), stride: self.wide() + 4 }
    }

    /// A chunk with neighbouring columns in a word: in tf32 the same as the other.
    const fn by_column(self) -> Region {
        if self.short() {
            Region { rows: self.columns / 2, width: self.rank, stride: self.rank + 8 }
        } else {
            self.by_rank()
        }
    }

    /// Where the chunks lie in shared memory: Y1 and Y2 by rank, Y1 and Y2 by column, and the end of them.
    const fn places(self) -> [usize; 5] {
        let (rank, column) = (self.by_rank().len(), self.by_column().len());
        match (self.kind, self.short()) {
            (Kind::Forward, _) => [0, 0, 0, rank, rank + column],
            (Kind::Tokens, true) => [0, rank, 2 * rank, 0, 2 * rank + column],
            (Kind::Hidden, true) => [0, rank, 2 * rank, 2 * rank + column, 2 * rank + 2 * column],
            (_, false) => [0, rank, 0, rank, 2 * rank],
        }
    }

    /// Words of shared memory for the chunks and, when they are done with, the rows of a result where units pass them on.
    pub const fn words(self) -> usize {
        let (chunks, result) = (self.places()[4], self.rows() * self.rank);
        let passes = self.splits > 1 || matches!(self.kind, Kind::Tokens);
        if passes && chunks < result { result } else { chunks }
    }

    /// Which forms of Y1 and Y2 are read: by rank, then by column where that is another form.
    const fn reads(self) -> [bool; 4] {
        let by_column = self.short();
        [true, self.slopes(), self.slopes() && by_column, self.acts() && (by_column || !self.slopes())]
    }

    /// Words of the rows of X in shared memory, where nothing else holds them.
    const fn held_words(self) -> usize {
        if self.math.cuda { 1 } else { 2 * self.rows() * self.wide() }
    }

    /// Elements of act and dh in shared memory, where they pass through it.
    const fn passed(self) -> usize {
        if self.math.cuda { 1 } else { 2 * self.rows() * self.splits * self.span }
    }

    /// Bytes of shared memory of a cube.
    pub const fn bytes(self) -> usize {
        4 * (self.words() + self.held_words() + self.passed())
    }

    /// Elements of p that a unit holds.
    const fn elements(self) -> usize {
        self.span / COLUMNS * HELD
    }

    /// Elements of a result that a unit holds.
    pub const fn result(self) -> usize {
        self.rank / COLUMNS * HELD
    }

    /// Registers of one X.
    pub const fn left(self) -> usize {
        self.wide() / STEP * LEFT
    }
}

/// What a cube works with.
#[derive(CubeType)]
pub(super) struct Work {
    /// X1 and X2 as left factors.
    left: Array<u32>,
    /// The chunks, and when they are done with, rows of a result.
    pub words: SharedMemory<u32>,
    /// Where there are no matrix units: X, and act and dh.
    held: SharedMemory<u32>,
    passed: SharedMemory<f32>,
    /// O1 and O2.
    pub first: Array<f32>,
    pub second: Array<f32>,
}

/// The memory of a cube, O zero.
#[cube]
pub(super) fn begin(#[comptime] plan: Plan) -> Work {
    let mut first = Array::<f32>::new(comptime!(plan.result()));
    let mut second = Array::<f32>::new(comptime!(plan.result()));
    #[unroll]
    for i in 0..comptime!(plan.result()) {
        first[i] = 0.0f32;
        second[i] = 0.0f32;
    }
    Work {
        left: Array::<u32>::new(comptime!(2 * plan.left())),
        words: SharedMemory::<u32>::new(comptime!(plan.words())),
        held: SharedMemory::<u32>::new(comptime!(plan.held_words())),
        passed: SharedMemory::<f32>::new(comptime!(plan.passed())),
        first,
        second,
    }
}

/// This unit's place in its 32: the row of a fragment's first elements, and the pair of columns.
#[cube]
fn place() -> (usize, usize) {
    let lane = UNIT_POS as usize % comptime!(LANES);
    (lane / 4, lane % 4)
}

/// Which of the groups that share rows this unit is in, and the first of these rows within the cube.
#[cube]
pub(super) fn part_and_row(#[comptime] plan: Plan) -> (usize, usize) {
    let warp = UNIT_POS as usize / comptime!(LANES);
    (warp % comptime!(plan.splits), warp / comptime!(plan.splits) * comptime!(ROWS))
}

/// The row within the cube of element `e` of a result.
#[cube]
pub(super) fn row(#[comptime] e: usize, #[comptime] plan: Plan) -> usize {
    let (_, row) = part_and_row(plan);
    row + place().0 + comptime!(e % HELD / 2 * 8)
}

/// The column of element `e` of a result.
#[cube]
pub(super) fn column(#[comptime] e: usize) -> usize {
    place().1 * 2 + comptime!(e / HELD * COLUMNS + e % 2)
}

/// Takes rows of a packed X as the `which`-th left factor: `first` is the cube's first row, `at` where its matrix starts.
#[cube]
pub(super) fn hold(
    work: &mut Work,
    x: &Words,
    at: usize,
    first: usize,
    rows: usize,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let wide = comptime!(plan.wide());
    if comptime!(plan.math.cuda) {
        let (_, row) = part_and_row(plan);
        let (g, t) = place();
        #[unroll]
        for i in 0..comptime!(plan.left()) {
            let row = first + row + g + comptime!(i % 2 * 8);
            let mut word = 0u32;
            if row < rows {
                word = x.at(at + row * wide + t + comptime!(i / LEFT * STEP + i % LEFT / 2 * 4));
            }
            work.left[comptime!(which * plan.left() + i)] = word;
        }
    } else {
        let units = comptime!(plan.units());
        let all = comptime!(plan.rows() * plan.wide());
        for step in 0..comptime!(all.div_ceil(units)) {
            let i = step * units + UNIT_POS as usize;
            if i < all {
                let mut word = 0u32;
                if first + i / wide < rows {
                    word = x.at(at + first * wide + i);
                }
                work.held[comptime!(which * all) + i] = word;
            }
        }
    }
}

/// Takes x s as the first left factor, x in f32 with rows of `rank`.
#[cube]
pub(super) fn hold_scaled(
    work: &mut Work,
    x: &Floats,
    s: &Floats,
    e: usize,
    first: usize,
    rows: usize,
    rank: usize,
    #[comptime] plan: Plan,
) {
    let wide = comptime!(plan.wide());
    if comptime!(plan.math.cuda) {
        let (_, row) = part_and_row(plan);
        let (g, t) = place();
        #[unroll]
        for i in 0..comptime!(plan.left()) {
            let row = first + row + g + comptime!(i % 2 * 8);
            let n = t + comptime!(i / LEFT * STEP + i % LEFT / 2 * 4);
            work.left[i] = scaled(x, s, (e * rows + row) * rank, e * rank, n, row < rows, rank, plan);
        }
    } else {
        let units = comptime!(plan.units());
        let all = comptime!(plan.rows() * plan.wide());
        for step in 0..comptime!(all.div_ceil(units)) {
            let i = step * units + UNIT_POS as usize;
            if i < all {
                let row = first + i / wide;
                work.held[i] = scaled(x, s, (e * rows + row) * rank, e * rank, i % wide, row < rows, rank, plan);
            }
        }
    }
}

/// Word `n` of a row of x s.
#[cube]
fn scaled(
    x: &Floats,
    s: &Floats,
    at: usize,
    s_at: usize,
    n: usize,
    there: bool,
    rank: usize,
    #[comptime] plan: Plan,
) -> u32 {
    let r = n * comptime!(if plan.short() { 2usize } else { 1usize });
    let mut one = 0.0f32;
    let mut next = 0.0f32;
    if there && r < rank {
        one = x.at(at + r) * s.at(s_at + r);
    }
    if comptime!(plan.short()) {
        if there && r + 1 < rank {
            next = x.at(at + r + 1) * s.at(s_at + r + 1);
        }
    }
    word(one, next, comptime!(plan.short()))
}

/// Reads rows of words from `first` on into registers, zeros from row `rows` on; [`put`] takes them on to shared memory.
/// All reads are on their way before the first is waited for.
#[cube]
fn fetch(
    y: &Words,
    ahead: &mut Array<u32>,
    at: usize,
    first: usize,
    rows: usize,
    #[comptime] region: Region,
    #[comptime] units: usize,
) {
    let width = region.width;
    let all = comptime!(region.rows * region.width);
    #[unroll]
    for n in 0..comptime!(region.each(units)) {
        let i = comptime!(n * units) + UNIT_POS as usize;
        let mut word = 0u32;
        if (comptime!(all.is_multiple_of(units)) || i < all) && first + i / width < rows {
            word = y.at(at + first * width + i);
        }
        ahead[n] = word;
    }
}

/// Writes what was fetched to shared memory.
#[cube]
fn put(
    ahead: &Array<u32>,
    into: &mut SharedMemory<u32>,
    into_at: usize,
    #[comptime] region: Region,
    #[comptime] units: usize,
) {
    let width = region.width;
    let all = comptime!(region.rows * region.width);
    #[unroll]
    for n in 0..comptime!(region.each(units)) {
        let i = comptime!(n * units) + UNIT_POS as usize;
        if comptime!(all.is_multiple_of(units)) || i < all {
            into[into_at + i / width * comptime!(region.stride) + i % width] = ahead[n];
        }
    }
}

/// Takes the chunks `from..to` of the columns, of which expert `e` has `columns`. In tf32 and where a form is not wanted,
/// its argument is not read.
#[cube]
pub(super) fn pass(
    work: &mut Work,
    y1_by_rank: &Words,
    y2_by_rank: &Words,
    y1_by_column: &Words,
    y2_by_column: &Words,
    e: usize,
    columns: usize,
    from: usize,
    to: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let places = comptime!(plan.places());
    let by_rank = comptime!(plan.by_rank());
    let by_column = comptime!(plan.by_column());
    let units = comptime!(plan.units());
    let short = comptime!(plan.short());
    let rank_at = e * columns * comptime!(plan.wide());
    let column_rows = if comptime!(short) { columns.div_ceil(2) } else { columns };
    let column_at = e * column_rows * comptime!(by_column.width);
    let reads = comptime!(plan.reads());
    let mut p = Array::<f32>::new(comptime!(plan.elements()));
    let mut d = Array::<f32>::new(comptime!(plan.elements()));
    let mut ahead_0 = Array::<u32>::new(comptime!(by_rank.each(units)));
    let mut ahead_1 = Array::<u32>::new(comptime!(by_rank.each(units)));
    let mut ahead_2 = Array::<u32>::new(comptime!(by_column.each(units)));
    let mut ahead_3 = Array::<u32>::new(comptime!(by_column.each(units)));
    // The turn before the first only reads ahead.
    for turn in from..to + 1 {
        if turn > from {
            // The chunk before may be in use.
            sync_cube();
            put(&ahead_0, &mut work.words, comptime!(places[0]).runtime(), by_rank, units);
            if comptime!(reads[1]) {
                put(&ahead_1, &mut work.words, comptime!(places[1]).runtime(), by_rank, units);
            }
            if comptime!(reads[2]) {
                put(&ahead_2, &mut work.words, comptime!(places[2]).runtime(), by_column, units);
            }
            if comptime!(reads[3]) {
                put(&ahead_3, &mut work.words, comptime!(places[3]).runtime(), by_column, units);
            }
            sync_cube();
        }
        if turn < to {
            let first = turn * comptime!(plan.columns);
            let first_by_column = turn * comptime!(by_column.rows);
            fetch(y1_by_rank, &mut ahead_0, rank_at, first, columns, by_rank, units);
            if comptime!(reads[1]) {
                fetch(y2_by_rank, &mut ahead_1, rank_at, first, columns, by_rank, units);
            }
            if comptime!(reads[2]) {
                fetch(y1_by_column, &mut ahead_2, column_at, first_by_column, column_rows, by_column, units);
            }
            if comptime!(reads[3]) {
                fetch(y2_by_column, &mut ahead_3, column_at, first_by_column, column_rows, by_column, units);
            }
        }
        if turn > from {
            take(work, &mut p, &mut d, plan, mutant);
        }
    }
}

/// Takes the chunk in shared memory.
#[cube]
fn take(work: &mut Work, p: &mut Array<f32>, d: &mut Array<f32>, #[comptime] plan: Plan, #[comptime] mutant: u32) {
    let places = comptime!(plan.places());
    let short = comptime!(plan.short());
    let by_rank = comptime!(plan.by_rank());
    let by_column = comptime!(plan.by_column());
    let (part, _) = part_and_row(plan);
    for sub in 0..comptime!(plan.columns / plan.span / plan.splits) {
        let base = (sub * comptime!(plan.splits) + part) * comptime!(plan.span);
        let rank_base = base * comptime!(by_rank.stride);
        first_product(work, p, rank_base + comptime!(places[0]), 0usize, plan);
        if comptime!(plan.slopes()) {
            first_product(work, d, rank_base + comptime!(places[1]), 1usize, plan);
        }
        activate(p, d, plan, mutant);
        let column_base = base / comptime!(if short { 2usize } else { 1usize }) * comptime!(by_column.stride);
        if comptime!(plan.math.cuda) {
            if comptime!(plan.slopes()) {
                second_product(&work.words, &mut work.first, d, column_base + comptime!(places[2]), plan);
            }
            if comptime!(plan.acts()) {
                second_product(&work.words, &mut work.second, p, column_base + comptime!(places[3]), plan);
            }
        } else {
            send(work, p, d, plan);
            if comptime!(plan.slopes()) {
                let at = column_base + comptime!(places[2]);
                emulated_second(&work.words, &work.passed, &mut work.first, at, 1usize, plan);
            }
            if comptime!(plan.acts()) {
                let at = column_base + comptime!(places[3]);
                emulated_second(&work.words, &work.passed, &mut work.second, at, 0usize, plan);
            }
        }
    }
}

/// p becomes silu(p) and d becomes d silu'(p).
///
/// Mutants: 9 takes sigma for silu, 11 drops the second term of the slope.
#[cube]
fn activate(p: &mut Array<f32>, d: &mut Array<f32>, #[comptime] plan: Plan, #[comptime] mutant: u32) {
    #[unroll]
    for i in 0..comptime!(plan.elements()) {
        let x = p[i];
        let sigma = quick_sigmoid(x);
        let act = x * sigma;
        if comptime!(mutant == 9) {
            p[i] = sigma;
        } else {
            p[i] = act;
        }
        if comptime!(plan.slopes()) {
            let mut slope = sigma + act * (1.0f32 - sigma);
            if comptime!(mutant == 11) {
                slope = sigma;
            }
            d[i] *= slope;
        }
    }
}

/// sigma(x) by the GPU's own exponential and reciprocal: the error of some 2^-21 is far below the 2^-11 of the rounding
/// that the activation meets next. Where e^-x is infinite its reciprocal is zero, as it should be.
#[cube(fast_math = FastMath::all())]
fn quick_sigmoid(x: f32) -> f32 {
    1.0f32 / (1.0f32 + (-x).exp())
}

/// Adds up a result over the groups that share rows, in order; the first one has it then.
#[cube]
pub(super) fn combine(words: &mut SharedMemory<u32>, sum: &mut Array<f32>, #[comptime] plan: Plan) {
    if comptime!(plan.splits > 1) {
        let (part, _) = part_and_row(plan);
        for other in 1..comptime!(plan.splits) {
            sync_cube();
            if part == other {
                store(words, sum, plan);
            }
            sync_cube();
            if part == 0 {
                #[unroll]
                for i in 0..comptime!(plan.result()) {
                    sum[i] += f32::reinterpret(words[row(i, plan) * comptime!(plan.rank) + column(i)]);
                }
            }
        }
    }
}

/// Writes a result to shared memory, `[rows, rank]`.
#[cube]
pub(super) fn store(words: &mut SharedMemory<u32>, sum: &Array<f32>, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime!(plan.result()) {
        words[row(i, plan) * comptime!(plan.rank) + column(i)] = u32::reinterpret(sum[i]);
    }
}
