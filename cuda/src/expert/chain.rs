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
use half::bf16;

use crate::kda::tile::{Math, operand};
use crate::tensor::{Floats, Words};

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

    /// Words of shared memory for the chunks and, when they are done with, the rows of a result.
    pub const fn words(self) -> usize {
        let (chunks, result) = (self.places()[4], self.rows() * self.rank);
        if chunks > result { chunks } else { result }
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

/// The bits of `x` as a factor: in bf16 the upper half counts. NaN and the infinities stay.
#[cube]
fn bits(x: f32, #[comptime] short: bool) -> u32 {
    let dropped = comptime!(if short { 16u32 } else { 13u32 });
    let below_half = comptime!((1u32 << (dropped - 1)) - 1);
    let kept = comptime!(!((1u32 << dropped) - 1));
    let bits = u32::reinterpret(x);
    let mut rounded = bits;
    if bits & 0x7f80_0000u32 != 0x7f80_0000u32 {
        rounded = (bits + below_half + ((bits >> dropped) & 1u32)) & kept;
    }
    rounded
}

/// One word of two neighbours, or of the first alone in tf32.
#[cube]
pub(super) fn word(x: f32, next: f32, #[comptime] short: bool) -> u32 {
    let mut word = bits(x, short);
    if comptime!(short) {
        word = (word >> 16u32) | (bits(next, short) & 0xffff_0000u32);
    }
    word
}

/// One of the two numbers in a word, or the one in tf32.
#[cube]
fn number(word: u32, which: usize, #[comptime] short: bool) -> f32 {
    let mut bits = word;
    if comptime!(short) {
        bits = select(which == 0, word << 16u32, word & 0xffff_0000u32);
    }
    f32::reinterpret(bits)
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

/// Copies rows of words from `first` on into shared memory, zeros from row `rows` on.
#[cube]
fn load(
    y: &Words,
    into: &mut SharedMemory<u32>,
    into_at: usize,
    at: usize,
    first: usize,
    rows: usize,
    #[comptime] region: Region,
    #[comptime] units: usize,
) {
    let width = region.width;
    let all = comptime!(region.rows * region.width);
    let each = comptime!(all.div_ceil(units));
    // All reads are on their way before the first is waited for.
    let mut ahead = Array::<u32>::new(each);
    #[unroll]
    for n in 0..each {
        let i = comptime!(n * units) + UNIT_POS as usize;
        let mut word = 0u32;
        if (comptime!(all.is_multiple_of(units)) || i < all) && first + i / width < rows {
            word = y.at(at + first * width + i);
        }
        ahead[n] = word;
    }
    #[unroll]
    for n in 0..each {
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
    let (part, _) = part_and_row(plan);
    let mut p = Array::<f32>::new(comptime!(plan.elements()));
    let mut d = Array::<f32>::new(comptime!(plan.elements()));
    for chunk in from..to {
        let first = chunk * comptime!(plan.columns);
        let first_by_column = chunk * comptime!(by_column.rows);
        // The chunk before may be in use.
        sync_cube();
        load(y1_by_rank, &mut work.words, comptime!(places[0]).runtime(), rank_at, first, columns, by_rank, units);
        if comptime!(plan.slopes()) {
            load(y2_by_rank, &mut work.words, comptime!(places[1]).runtime(), rank_at, first, columns, by_rank, units);
        }
        if comptime!(plan.slopes() && short) {
            let at = comptime!(places[2]).runtime();
            load(y1_by_column, &mut work.words, at, column_at, first_by_column, column_rows, by_column, units);
        }
        if comptime!(matches!(plan.kind, Kind::Forward) || plan.acts() && short) {
            let at = comptime!(places[3]).runtime();
            load(y2_by_column, &mut work.words, at, column_at, first_by_column, column_rows, by_column, units);
        }
        sync_cube();
        for sub in 0..comptime!(plan.columns / plan.span / plan.splits) {
            let base = (sub * comptime!(plan.splits) + part) * comptime!(plan.span);
            let rank_base = base * comptime!(by_rank.stride);
            first_product(work, &mut p, rank_base + comptime!(places[0]), 0usize, plan);
            if comptime!(plan.slopes()) {
                first_product(work, &mut d, rank_base + comptime!(places[1]), 1usize, plan);
            }
            activate(&mut p, &mut d, plan, mutant);
            let column_base = base / comptime!(if short { 2usize } else { 1usize }) * comptime!(by_column.stride);
            if comptime!(plan.math.cuda) {
                if comptime!(plan.slopes()) {
                    second_product(&work.words, &mut work.first, &d, column_base + comptime!(places[2]), plan);
                }
                if comptime!(plan.acts()) {
                    second_product(&work.words, &mut work.second, &p, column_base + comptime!(places[3]), plan);
                }
            } else {
                send(work, &p, &d, plan);
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

/// sum = X Y^T for `span` columns whose words start at `y_at`.
#[cube]
fn first_product(work: &Work, sum: &mut Array<f32>, y_at: usize, #[comptime] which: usize, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime!(plan.elements()) {
        sum[i] = 0.0f32;
    }
    if comptime!(!plan.math.cuda) {
        emulated_first(work, sum, y_at, which, plan);
    } else if comptime!(plan.short()) {
        first_by_bf16(&work.left, &work.words, sum, y_at, which, plan);
    } else {
        first_by_tf32(&work.left, &work.words, sum, y_at, which, plan);
    }
}

/// The first product from words in shared memory.
#[cube]
fn emulated_first(work: &Work, sum: &mut Array<f32>, y_at: usize, #[comptime] which: usize, #[comptime] plan: Plan) {
    let each = comptime!(if plan.short() { 2usize } else { 1usize });
    let wide = comptime!(plan.wide());
    let x_at = comptime!(which * plan.rows() * plan.wide());
    for r in 0..comptime!(plan.rank) {
        #[unroll]
        for i in 0..comptime!(plan.elements()) {
            let x = work.held[x_at + row(i, plan) * wide + r / each];
            let y = work.words[y_at + column(i) * comptime!(plan.by_rank().stride) + r / each];
            sum[i] += number(x, r % each, comptime!(plan.short())) * number(y, r % each, comptime!(plan.short()));
        }
    }
}

/// Rounds act and dh and passes them to the other units.
#[cube]
fn send(work: &mut Work, p: &Array<f32>, d: &Array<f32>, #[comptime] plan: Plan) {
    let (part, _) = part_and_row(plan);
    let short = comptime!(plan.short());
    let mask = comptime!(if plan.short() { 0xffff_0000u32 } else { 0xffff_e000u32 });
    let all = comptime!(plan.rows() * plan.splits * plan.span);
    sync_cube();
    #[unroll]
    for i in 0..comptime!(plan.elements()) {
        let at = (row(i, plan) * comptime!(plan.splits) + part) * comptime!(plan.span) + column(i);
        work.passed[at] = f32::reinterpret(bits(p[i], short) & mask);
        if comptime!(plan.slopes()) {
            work.passed[at + all] = f32::reinterpret(bits(d[i], short) & mask);
        }
    }
    sync_cube();
}

/// The second product from what was sent.
#[cube]
fn emulated_second(
    words: &SharedMemory<u32>,
    passed: &SharedMemory<f32>,
    sum: &mut Array<f32>,
    y_at: usize,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let (part, _) = part_and_row(plan);
    let each = comptime!(if plan.short() { 2usize } else { 1usize });
    let stride = comptime!(plan.by_column().stride);
    let from = comptime!(which * plan.rows() * plan.splits * plan.span);
    for c in 0..comptime!(plan.span) {
        #[unroll]
        for i in 0..comptime!(plan.result()) {
            let x = passed[from + (row(i, plan) * comptime!(plan.splits) + part) * comptime!(plan.span) + c];
            let y = words[y_at + c / each * stride + column(i)];
            sum[i] += x * number(y, c % each, comptime!(plan.short()));
        }
    }
}

/// The first product by matrix units in bf16.
#[cube]
fn first_by_bf16(
    left: &Array<u32>,
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    y_at: usize,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let definition = cmma::MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let (g, t) = place();
    let y_at = y_at + g * comptime!(plan.by_rank().stride) + t;
    let mut a = Array::<Vector<bf16, NA>>::new(4usize);
    let mut b = Array::<Vector<bf16, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(plan.wide() / STEP) {
        #[unroll]
        for i in 0..4usize {
            a[i] = Vector::<bf16, NA>::reinterpret(left[comptime!(which * plan.left() + step * LEFT + i)]);
        }
        #[unroll]
        for f in 0..comptime!(plan.span / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let at = y_at + comptime!(f * COLUMNS * plan.by_rank().stride + step * STEP + i * 4);
                b[i] = Vector::<bf16, NB>::reinterpret(words[at]);
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = sum[comptime!(f * HELD + i * 2)];
                pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
                held[i] = pair;
            }
            let result = definition.execute(&a, &b, &held);
            #[unroll]
            for i in 0..2usize {
                let pair = result[i];
                sum[comptime!(f * HELD + i * 2)] = pair[0];
                sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
            }
        }
    }
}

/// The first product by matrix units in tf32.
#[cube]
fn first_by_tf32(
    left: &Array<u32>,
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    y_at: usize,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let definition = cmma::MmaDefinition::<tf32, tf32, f32>::new(16usize, 8usize, 8usize);
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let (g, t) = place();
    let y_at = y_at + g * comptime!(plan.by_rank().stride) + t;
    let mut a = Array::<Vector<tf32, NA>>::new(4usize);
    let mut b = Array::<Vector<tf32, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(plan.wide() / STEP) {
        #[unroll]
        for i in 0..4usize {
            let word = left[comptime!(which * plan.left() + step * LEFT + i)];
            let mut one = Vector::<tf32, NA>::empty();
            one[0] = operand::<tf32>(f32::reinterpret(word));
            a[i] = one;
        }
        #[unroll]
        for f in 0..comptime!(plan.span / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let at = y_at + comptime!(f * COLUMNS * plan.by_rank().stride + step * STEP + i * 4);
                let mut one = Vector::<tf32, NB>::empty();
                one[0] = operand::<tf32>(f32::reinterpret(words[at]));
                b[i] = one;
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = sum[comptime!(f * HELD + i * 2)];
                pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
                held[i] = pair;
            }
            let result = definition.execute(&a, &b, &held);
            #[unroll]
            for i in 0..2usize {
                let pair = result[i];
                sum[comptime!(f * HELD + i * 2)] = pair[0];
                sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
            }
        }
    }
}

/// sum += x Y for `span` columns whose words start at `y_at`, x the result of the first product.
#[cube]
fn second_product(
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    x: &Array<f32>,
    y_at: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.short()) {
        second_by_bf16(words, sum, x, y_at, plan);
    } else {
        second_by_tf32(words, sum, x, y_at, plan);
    }
}

/// The second product in bf16, 16 columns an instruction.
#[cube]
fn second_by_bf16(
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    x: &Array<f32>,
    y_at: usize,
    #[comptime] plan: Plan,
) {
    let definition = cmma::MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let (g, t) = place();
    let y_at = y_at + t * comptime!(plan.by_column().stride) + g;
    let mut a = Array::<Vector<bf16, NA>>::new(4usize);
    let mut b = Array::<Vector<bf16, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(plan.span / 16) {
        #[unroll]
        for i in 0..4usize {
            let mut pair = Vector::<bf16, NA>::empty();
            pair[0] = operand::<bf16>(x[comptime!(step * 2 * HELD + i * 2)]);
            pair[1] = operand::<bf16>(x[comptime!(step * 2 * HELD + i * 2 + 1)]);
            a[i] = pair;
        }
        #[unroll]
        for f in 0..comptime!(plan.rank / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let at = y_at + comptime!((step * 8 + i * 4) * plan.by_column().stride + f * COLUMNS);
                b[i] = Vector::<bf16, NB>::reinterpret(words[at]);
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = sum[comptime!(f * HELD + i * 2)];
                pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
                held[i] = pair;
            }
            let result = definition.execute(&a, &b, &held);
            #[unroll]
            for i in 0..2usize {
                let pair = result[i];
                sum[comptime!(f * HELD + i * 2)] = pair[0];
                sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
            }
        }
    }
}

/// The second product in tf32, 8 columns an instruction: inner indices t and t + 4 are columns 2 t and 2 t + 1.
#[cube]
fn second_by_tf32(
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    x: &Array<f32>,
    y_at: usize,
    #[comptime] plan: Plan,
) {
    let definition = cmma::MmaDefinition::<tf32, tf32, f32>::new(16usize, 8usize, 8usize);
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let (g, t) = place();
    let y_at = y_at + t * comptime!(2 * plan.by_column().stride) + g;
    let mut a = Array::<Vector<tf32, NA>>::new(4usize);
    let mut b = Array::<Vector<tf32, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(plan.span / COLUMNS) {
        #[unroll]
        for i in 0..4usize {
            // Registers in the order of rows 0 and 8, then of inner t and t + 4.
            let mut one = Vector::<tf32, NA>::empty();
            one[0] = operand::<tf32>(x[comptime!(step * HELD + i % 2 * 2 + i / 2)]);
            a[i] = one;
        }
        #[unroll]
        for f in 0..comptime!(plan.rank / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let at = y_at + comptime!((step * 8 + i) * plan.by_column().stride + f * COLUMNS);
                let mut one = Vector::<tf32, NB>::empty();
                one[0] = operand::<tf32>(f32::reinterpret(words[at]));
                b[i] = one;
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = sum[comptime!(f * HELD + i * 2)];
                pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
                held[i] = pair;
            }
            let result = definition.execute(&a, &b, &held);
            #[unroll]
            for i in 0..2usize {
                let pair = result[i];
                sum[comptime!(f * HELD + i * 2)] = pair[0];
                sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
            }
        }
    }
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
