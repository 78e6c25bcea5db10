//! Products of tiles in shared memory, with the result spread over the units of a cube.
//!
//! All matrix products of the fused kernels go through [`multiply_add`], and all knowledge of which unit holds which
//! element through [`row`] and [`column`]. [`Math`] decides how they work:
//!
//! - `Full`: a unit holds four neighbouring rows of one or more columns and multiplies in f32, so that what it reads of
//!   one factor serves several products.
//! - `Tf32` and `Bf16`: operands are rounded, sums stay f32. Results lie as the matrix units of an NVIDIA GPU want them
//!   (PTX `mma.m16n8k8` and `m16n8k16`): 32 units share 16 rows of 8 columns, each holds two neighbouring columns of two
//!   rows. On CUDA the matrix units multiply. Elsewhere each unit computes the same elements from operands that it has
//!   rounded in the same way, so what the rounding does to results can be tested without such a GPU.

use cubecl::prelude::*;
use dormouse_reference::Precision;
use half::bf16;

use super::chain::Chain;
use super::load_or_zero;
use crate::tensor::Floats;

/// How products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Math {
    pub precision: Precision,
    /// Whether this is CUDA: matrix units multiply, and loops over whole tiles have lengths that the compiler knows. The
    /// software driver unrolls such loops and then takes half a minute a kernel.
    pub cuda: bool,
}

impl Math {
    /// Whether results lie as matrix units want them.
    pub const fn fragments(self) -> bool {
        !matches!(self.precision, Precision::Full)
    }

    /// What a tile's rows are padded by, so that units which read one column together meet in few banks of the memory:
    /// those of a matrix product read eight neighbouring rows of four columns.
    pub const fn padding(self) -> usize {
        if self.fragments() && self.cuda { 4 } else { 1 }
    }
}

/// Units that hold one fragment together.
const LANES: usize = 32;

/// Rows and columns of a fragment, and its elements a unit: in full precision the rows of a unit.
const ROWS: usize = 16;
const COLUMNS: usize = 8;
const HELD: usize = ROWS * COLUMNS / LANES;

/// A result of `rows` by `columns`, `rows * columns / units` elements a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub rows: usize,
    pub columns: usize,
    pub units: usize,
    pub math: Math,
}

impl Tile {
    /// Elements that a unit holds. The units must divide the tile evenly: in full precision blocks of four rows by some
    /// columns, otherwise the fragments of a row of fragments.
    pub const fn elements(self) -> usize {
        let elements = self.rows * self.columns / self.units;
        if self.math.fragments() {
            assert!(self.units.is_multiple_of(LANES) && elements.is_multiple_of(HELD));
            assert!((self.columns / COLUMNS).is_multiple_of(elements / HELD));
        } else {
            assert!(elements.is_multiple_of(HELD) && self.columns.is_multiple_of(elements / HELD));
            assert!(self.units.is_multiple_of(self.columns / (elements / HELD)));
        }
        elements
    }

    /// In full precision, from one column of a unit to the next.
    const fn apart(self) -> usize {
        self.columns / (self.elements() / HELD)
    }

    /// Fragments of 32 units.
    const fn fragments(self) -> usize {
        self.elements() / HELD
    }

    /// Groups of 32 units that share a row of fragments.
    const fn groups(self) -> usize {
        self.columns / COLUMNS / self.fragments()
    }
}

/// The first row of this unit's fragments. Neighbouring units in groups of 32 have the same.
#[cube]
pub(crate) fn fragment_row(#[comptime] tile: Tile) -> usize {
    UNIT_POS as usize / comptime!(LANES * tile.groups()) * comptime!(ROWS)
}

/// The first column of this unit's fragments.
#[cube]
fn fragment_column(#[comptime] tile: Tile) -> usize {
    UNIT_POS as usize / comptime!(LANES) % comptime!(tile.groups()) * comptime!(tile.fragments() * COLUMNS)
}

/// The row of element `e` of this unit.
#[cube]
pub(crate) fn row(#[comptime] e: usize, #[comptime] tile: Tile) -> usize {
    if comptime!(tile.math.fragments()) {
        fragment_row(tile) + UNIT_POS as usize % comptime!(LANES) / 4 + comptime!(e % HELD / 2 * 8)
    } else {
        UNIT_POS as usize / comptime!(tile.apart()) * comptime!(HELD) + comptime!(e % HELD)
    }
}

/// The column of element `e` of this unit.
#[cube]
pub(crate) fn column(#[comptime] e: usize, #[comptime] tile: Tile) -> usize {
    if comptime!(tile.math.fragments()) {
        fragment_column(tile) + UNIT_POS as usize % 4 * 2 + comptime!(e / HELD * COLUMNS + e % 2)
    } else {
        UNIT_POS as usize % comptime!(tile.apart()) + comptime!(e / HELD * tile.apart())
    }
}

/// Sets this unit's elements to zero.
#[cube]
pub(crate) fn clear(sum: &mut Array<f32>, #[comptime] tile: Tile) {
    #[unroll]
    for e in 0..comptime!(tile.elements()) {
        sum[e] = 0.0f32;
    }
}

/// How a matrix lies in shared memory: element (x, y) at `x * first + y * second`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Strides {
    pub first: usize,
    pub second: usize,
}

/// Both factors of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Factors {
    pub a: Strides,
    pub b: Strides,
    /// Columns of A and rows of B, a multiple of 16.
    pub inner: usize,
}

/// sum += A B, A `[rows, inner]` from `a_at` on, B `[inner, columns]` from `b_at` on.
///
/// `live` is how much of `inner` is in use; what lies behind is zeros.
#[cube]
pub(crate) fn multiply_add(
    sum: &mut Array<f32>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    live: usize,
    #[comptime] factors: Factors,
    #[comptime] tile: Tile,
) {
    if comptime!(tile.math.fragments()) {
        if comptime!(!tile.math.cuda) {
            emulated(sum, a, a_at, b, b_at, live, factors, tile);
        } else if comptime!(matches!(tile.math.precision, Precision::Bf16)) {
            by_bf16(sum, a, a_at, b, b_at, factors, tile);
        } else {
            by_tf32(sum, a, a_at, b, b_at, factors, tile);
        }
    } else {
        let a_at = a_at + row(0usize, tile) * comptime!(factors.a.first);
        let b_at = b_at + column(0usize, tile) * comptime!(factors.b.second);
        if comptime!(tile.math.cuda) {
            for n in 0..comptime!(factors.inner) {
                by_f32(sum, a, a_at, b, b_at, n, factors, tile);
            }
        } else {
            for n in 0..live {
                by_f32(sum, a, a_at, b, b_at, n, factors, tile);
            }
        }
    }
}

/// Column `n` of A times row `n` of B.
#[cube]
fn by_f32(
    sum: &mut Array<f32>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    n: usize,
    #[comptime] factors: Factors,
    #[comptime] tile: Tile,
) {
    let mut x = Array::<f32>::new(comptime!(HELD));
    #[unroll]
    for e in 0..comptime!(HELD) {
        x[e] = a[a_at + comptime!(e * factors.a.first) + n * comptime!(factors.a.second)];
    }
    #[unroll]
    for f in 0..comptime!(tile.elements() / HELD) {
        let y = b[b_at + comptime!(f * tile.apart() * factors.b.second) + n * comptime!(factors.b.first)];
        #[unroll]
        for e in 0..comptime!(HELD) {
            sum[comptime!(f * HELD + e)] += x[e] * y;
        }
    }
}

/// The product of rounded operands without matrix units.
#[cube]
fn emulated(
    sum: &mut Array<f32>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    live: usize,
    #[comptime] factors: Factors,
    #[comptime] tile: Tile,
) {
    for n in 0..live {
        #[unroll]
        for e in 0..comptime!(tile.elements()) {
            let x = a[a_at + row(e, tile) * comptime!(factors.a.first) + n * comptime!(factors.a.second)];
            let y = b[b_at + n * comptime!(factors.b.first) + column(e, tile) * comptime!(factors.b.second)];
            sum[e] += rounded(x, comptime!(tile.math.precision)) * rounded(y, comptime!(tile.math.precision));
        }
    }
}

/// `x` rounded as an operand: bf16 to the nearest, ties to even; tf32 to the nearest, ties away from zero. NaN and the
/// infinities stay.
#[cube]
fn rounded(x: f32, #[comptime] precision: Precision) -> f32 {
    let bits = u32::reinterpret(x);
    let mut result = x;
    if bits & 0x7f80_0000u32 != 0x7f80_0000u32 {
        if comptime!(matches!(precision, Precision::Bf16)) {
            result = f32::reinterpret((bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) & 0xffff_0000u32);
        } else {
            result = f32::reinterpret((bits + 0x1000u32) & 0xffff_e000u32);
        }
    }
    result
}

/// `x` as an operand of matrix units.
#[cube]
pub(crate) fn operand<E: Float>(x: f32) -> E {
    E::cast_from(x)
}

/// The product by matrix units, operands in bf16: 16 by 16 times 16 by 8 an instruction.
#[cube]
fn by_bf16(
    sum: &mut Array<f32>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] factors: Factors,
    #[comptime] tile: Tile,
) {
    let definition = cmma::MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let lane = UNIT_POS as usize % comptime!(LANES);
    let (group, inner) = (lane / 4, lane % 4 * 2);
    let a_at = a_at + (fragment_row(tile) + group) * comptime!(factors.a.first) + inner * comptime!(factors.a.second);
    let b_at =
        b_at + (fragment_column(tile) + group) * comptime!(factors.b.second) + inner * comptime!(factors.b.first);
    let mut left = Array::<Vector<bf16, NA>>::new(4usize);
    let mut right = Array::<Vector<bf16, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(factors.inner / 16) {
        #[unroll]
        for i in 0..4usize {
            // Registers in the order of rows 0 and 8, then of inner 0 and 8.
            let at = a_at + comptime!(i % 2 * 8 * factors.a.first + (step * 16 + i / 2 * 8) * factors.a.second);
            let mut pair = Vector::<bf16, NA>::empty();
            pair[0] = operand::<bf16>(a[at]);
            pair[1] = operand::<bf16>(a[at + comptime!(factors.a.second)]);
            left[i] = pair;
        }
        #[unroll]
        for f in 0..comptime!(tile.fragments()) {
            #[unroll]
            for i in 0..2usize {
                let at = b_at + comptime!(f * COLUMNS * factors.b.second + (step * 16 + i * 8) * factors.b.first);
                let mut pair = Vector::<bf16, NB>::empty();
                pair[0] = operand::<bf16>(b[at]);
                pair[1] = operand::<bf16>(b[at + comptime!(factors.b.first)]);
                right[i] = pair;
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = sum[comptime!(f * HELD + i * 2)];
                pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
                held[i] = pair;
            }
            let result = definition.execute(&left, &right, &held);
            #[unroll]
            for i in 0..2usize {
                let pair = result[i];
                sum[comptime!(f * HELD + i * 2)] = pair[0];
                sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
            }
        }
    }
}

/// The product by matrix units, operands in tf32: 16 by 8 times 8 by 8 an instruction.
#[cube]
fn by_tf32(
    sum: &mut Array<f32>,
    a: &SharedMemory<f32>,
    a_at: usize,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] factors: Factors,
    #[comptime] tile: Tile,
) {
    let definition = cmma::MmaDefinition::<tf32, tf32, f32>::new(16usize, 8usize, 8usize);
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let lane = UNIT_POS as usize % comptime!(LANES);
    let (group, inner) = (lane / 4, lane % 4);
    let a_at = a_at + (fragment_row(tile) + group) * comptime!(factors.a.first) + inner * comptime!(factors.a.second);
    let b_at =
        b_at + (fragment_column(tile) + group) * comptime!(factors.b.second) + inner * comptime!(factors.b.first);
    let mut left = Array::<Vector<tf32, NA>>::new(4usize);
    let mut right = Array::<Vector<tf32, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(factors.inner / 8) {
        #[unroll]
        for i in 0..4usize {
            // Registers in the order of rows 0 and 8, then of inner 0 and 4.
            let at = a_at + comptime!(i % 2 * 8 * factors.a.first + (step * 8 + i / 2 * 4) * factors.a.second);
            let mut one = Vector::<tf32, NA>::empty();
            one[0] = operand::<tf32>(a[at]);
            left[i] = one;
        }
        #[unroll]
        for f in 0..comptime!(tile.fragments()) {
            #[unroll]
            for i in 0..2usize {
                let at = b_at + comptime!(f * COLUMNS * factors.b.second + (step * 8 + i * 4) * factors.b.first);
                let mut one = Vector::<tf32, NB>::empty();
                one[0] = operand::<tf32>(b[at]);
                right[i] = one;
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = sum[comptime!(f * HELD + i * 2)];
                pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
                held[i] = pair;
            }
            let result = definition.execute(&left, &right, &held);
            #[unroll]
            for i in 0..2usize {
                let pair = result[i];
                sum[comptime!(f * HELD + i * 2)] = pair[0];
                sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
            }
        }
    }
}

/// Copies tokens `start..start + rows` and channels `first..first + columns` of a `[B, T, HV, width]` tensor into
/// shared memory from `into_at` on, with zeros for tokens and channels that do not exist.
#[cube]
pub(crate) fn load(
    x: &Floats,
    into: &mut SharedMemory<f32>,
    into_at: usize,
    chain: &Chain,
    start: usize,
    first: usize,
    width: usize,
    #[comptime] part: Part,
) {
    // All loads are on their way before the first is waited for.
    let mut loaded = Array::<f32>::new(comptime!(part.per_unit()));
    let apart = comptime!(part.rows_apart());
    if comptime!(apart > 0) {
        let i = start + part_row(0usize, part);
        let c = first + part_column(0usize, part);
        let step = chain.step(width) * apart;
        let mut at = chain.at(i, width) + c;
        clear_part(&mut loaded, part);
        if c < width {
            if start + comptime!(part.rows) <= chain.length {
                #[unroll]
                for n in 0..comptime!(part.per_unit()) {
                    loaded[n] = x.at(at);
                    at += step;
                }
            } else {
                #[unroll]
                for n in 0..comptime!(part.per_unit()) {
                    loaded[n] = load_or_zero(x, at, i + comptime!(n * part.rows_apart()) < chain.length);
                    at += step;
                }
            }
        }
    } else {
        #[unroll]
        for n in 0..comptime!(part.per_unit()) {
            let i = part_row(n, part);
            let c = part_column(n, part);
            let there = i < comptime!(part.rows) && start + i < chain.length && first + c < width;
            let at = chain.at(start + i, width) + first + c;
            loaded[n] = load_or_zero(x, at, there);
        }
    }
    put(&loaded, into, into_at, part);
}

/// Sets this unit's elements of a tile to zero.
#[cube]
fn clear_part(values: &mut Array<f32>, #[comptime] part: Part) {
    #[unroll]
    for n in 0..comptime!(part.per_unit()) {
        values[n] = 0.0f32;
    }
}

/// A tile in shared memory, dealt out to the units element by element for work that is no product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    pub rows: usize,
    pub columns: usize,
    /// From one row to the next; more than `columns` where a column is read by neighbouring units.
    pub stride: usize,
    pub units: usize,
}

impl Part {
    /// Elements of a unit, rounded up: rows past the last are to be skipped.
    pub const fn per_unit(self) -> usize {
        (self.rows * self.columns).div_ceil(self.units)
    }

    /// Whether every unit has as many elements.
    pub const fn even(self) -> bool {
        (self.rows * self.columns).is_multiple_of(self.units)
    }

    /// Elements that the tile takes.
    pub const fn len(self) -> usize {
        self.rows * self.stride
    }

    /// Rows from one element of a unit to its next where all of them are in one column and inside the tile, else 0. Then
    /// one test of the column serves all, and from one address to the next it is one addition: with one group of 32 units
    /// on each of a multiprocessor's schedulers, what is computed for every element is what a chunk takes.
    const fn rows_apart(self) -> usize {
        if self.even() && self.units.is_multiple_of(self.columns) { self.units / self.columns } else { 0 }
    }
}

/// The row of this unit's element `n`; may be past the last one.
#[cube]
pub(crate) fn part_row(n: usize, #[comptime] part: Part) -> usize {
    (n * comptime!(part.units) + UNIT_POS as usize) / comptime!(part.columns)
}

/// The column of this unit's element `n`.
#[cube]
pub(crate) fn part_column(n: usize, #[comptime] part: Part) -> usize {
    (n * comptime!(part.units) + UNIT_POS as usize) % comptime!(part.columns)
}

/// e^(g_from + .. + g_(to-1)) of one channel: 1 where there is nothing to add up.
#[cube]
pub(crate) fn decay(
    gate: &SharedMemory<f32>,
    from: usize,
    to: usize,
    channel: usize,
    #[comptime] stride: usize,
) -> f32 {
    let mut sum = 0.0f32;
    for i in from..to {
        sum += gate[i * stride + channel];
    }
    sum.exp()
}

/// Reads the rows of a matrix that starts at `at` and has rows of `width` into this unit's registers, with zeros for
/// columns that do not exist; [`put`] takes them on to shared memory. What is read a chunk ahead is there when it is used.
#[cube]
pub(crate) fn fetch(x: &Floats, ahead: &mut Array<f32>, at: usize, width: usize, #[comptime] part: Part) {
    let apart = comptime!(part.rows_apart());
    if comptime!(apart > 0) {
        let c = part_column(0usize, part);
        let step = width * apart;
        let mut at = at + part_row(0usize, part) * width + c;
        clear_part(ahead, part);
        if c < width {
            #[unroll]
            for n in 0..comptime!(part.per_unit()) {
                ahead[n] = x.at(at);
                at += step;
            }
        }
    } else {
        #[unroll]
        for n in 0..comptime!(part.per_unit()) {
            let i = part_row(n, part);
            let c = part_column(n, part);
            ahead[n] = load_or_zero(x, at + i * width + c, i < comptime!(part.rows) && c < width);
        }
    }
}

/// [`fetch`] for this unit's elements of a product: tokens from `start` and columns from `first` on of a
/// `[B, T, HV, width]` tensor, with zeros for those that do not exist. Nothing is computed with what is read before it is
/// used: that would wait for it.
#[cube]
pub(crate) fn fetch_product(
    x: &Floats,
    ahead: &mut Array<f32>,
    chain: &Chain,
    start: usize,
    first: usize,
    width: usize,
    #[comptime] tile: Tile,
) {
    let whole = start + comptime!(tile.rows) <= chain.length && first + comptime!(tile.columns) <= width;
    #[unroll]
    for e in 0..comptime!(tile.elements()) {
        ahead[e] = 0.0f32;
    }
    if whole {
        #[unroll]
        for e in 0..comptime!(tile.elements()) {
            ahead[e] = x.at(chain.at(start + row(e, tile), width) + first + column(e, tile));
        }
    } else {
        #[unroll]
        for e in 0..comptime!(tile.elements()) {
            let (i, j) = (start + row(e, tile), first + column(e, tile));
            ahead[e] = load_or_zero(x, chain.at(i, width) + j, i < chain.length && j < width);
        }
    }
}

/// How strongly this unit's elements of a product are written: by the gate of their column where there is one, else by
/// beta of their token.
#[cube]
pub(crate) fn fetch_strength(
    gate: &ComptimeOption<Floats>,
    beta: &Floats,
    ahead: &mut Array<f32>,
    chain: &Chain,
    start: usize,
    first: usize,
    width: usize,
    #[comptime] tile: Tile,
) {
    #[comptime]
    match gate {
        ComptimeOption::Some(gate) => fetch_product(gate, ahead, chain, start, first, width, tile),
        ComptimeOption::None =>
        {
            #[unroll]
            for e in 0..comptime!(tile.elements()) {
                let i = start + row(e, tile);
                ahead[e] = load_or_zero(beta, chain.at(i, 1usize), i < chain.length);
            }
        }
    }
}

/// Writes what a unit has read of a tile to shared memory, from `into_at` on.
#[cube]
pub(crate) fn put(ahead: &Array<f32>, into: &mut SharedMemory<f32>, into_at: usize, #[comptime] part: Part) {
    if comptime!(part.rows_apart() > 0) {
        let at = into_at + part_row(0usize, part) * comptime!(part.stride) + part_column(0usize, part);
        #[unroll]
        for n in 0..comptime!(part.per_unit()) {
            into[at + comptime!(n * part.rows_apart() * part.stride)] = ahead[n];
        }
    } else {
        #[unroll]
        for n in 0..comptime!(part.per_unit()) {
            let i = part_row(n, part);
            if comptime!(part.even()) || i < comptime!(part.rows) {
                into[into_at + i * comptime!(part.stride) + part_column(n, part)] = ahead[n];
            }
        }
    }
}

/// Copies rows and columns of the state that starts at `at`, from `first_row` and `first_column` on, into shared memory
/// from `into_at` on, with zeros past the state's edges.
#[cube]
pub(crate) fn load_state(
    x: &Floats,
    into: &mut SharedMemory<f32>,
    into_at: usize,
    at: usize,
    first_row: usize,
    first_column: usize,
    key: usize,
    value: usize,
    #[comptime] part: Part,
) {
    let mut loaded = Array::<f32>::new(comptime!(part.per_unit()));
    let apart = comptime!(part.rows_apart());
    if comptime!(apart > 0) {
        let c = first_row + part_row(0usize, part);
        let j = first_column + part_column(0usize, part);
        let step = value * apart;
        let mut at = at + c * value + j;
        clear_part(&mut loaded, part);
        if j < value {
            if first_row + comptime!(part.rows) <= key {
                #[unroll]
                for n in 0..comptime!(part.per_unit()) {
                    loaded[n] = x.at(at);
                    at += step;
                }
            } else {
                #[unroll]
                for n in 0..comptime!(part.per_unit()) {
                    loaded[n] = load_or_zero(x, at, c + comptime!(n * part.rows_apart()) < key);
                    at += step;
                }
            }
        }
    } else {
        #[unroll]
        for n in 0..comptime!(part.per_unit()) {
            let r = part_row(n, part);
            let c = first_row + r;
            let j = first_column + part_column(n, part);
            loaded[n] = load_or_zero(x, at + c * value + j, r < comptime!(part.rows) && c < key && j < value);
        }
    }
    put(&loaded, into, into_at, part);
}

/// Sets a state to zero.
#[cube]
pub(crate) fn clear_state(into: &mut SharedMemory<f32>, #[comptime] part: Part) {
    for n in 0..comptime!(part.per_unit()) {
        into[part_row(n, part) * comptime!(part.stride) + part_column(n, part)] = 0.0f32;
    }
}

/// The reverse of [`load_state`], for all rows.
#[cube]
pub(crate) fn store_state(
    from: &SharedMemory<f32>,
    x: &mut Floats,
    at: usize,
    first: usize,
    key: usize,
    value: usize,
    #[comptime] part: Part,
) {
    for n in 0..comptime!(part.per_unit()) {
        let c = part_row(n, part);
        let j = first + part_column(n, part);
        if c < key && j < value {
            x.set(at + c * value + j, from[c * comptime!(part.stride) + part_column(n, part)]);
        }
    }
}
