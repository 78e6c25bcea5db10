//! The two products of a chain: by matrix units on CUDA, and from the same words without them elsewhere.

use cubecl::prelude::*;
use half::bf16;

use super::super::words::{bits, number};
use super::{COLUMNS, HELD, LEFT, Plan, STEP, Work, column, part_and_row, place, row};
use crate::kda::tile::operand;

/// sum = X Y^T for `span` columns whose words start at `y_at`.
#[cube]
pub(super) fn first_product(
    work: &Work,
    sum: &mut Array<f32>,
    y_at: usize,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..comptime!(plan.elements()) {
        sum[i] = 0.0f32;
    }
    if comptime!(!plan.math.cuda) {
        emulated_first(work, sum, y_at, which, plan);
    } else if comptime!(plan.short()) {
        first_by_units::<bf16>(&work.left, &work.words, sum, y_at, which, plan);
    } else {
        first_by_units::<tf32>(&work.left, &work.words, sum, y_at, which, plan);
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
pub(super) fn send(work: &mut Work, p: &Array<f32>, d: &Array<f32>, #[comptime] plan: Plan) {
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
pub(super) fn emulated_second(
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

/// What one instruction takes of the inner index: two elements a register in bf16, one in tf32.
const fn depth(plan: Plan) -> usize {
    if plan.short() { 16 } else { 8 }
}

/// A register of a factor from its word.
#[cube]
fn register<E: Float, N: Size>(word: u32, #[comptime] short: bool) -> Vector<E, N> {
    if comptime!(short) {
        Vector::<E, N>::reinterpret(word)
    } else {
        let mut one = Vector::<E, N>::empty();
        one[0] = operand::<E>(f32::reinterpret(word));
        one
    }
}

/// Fragment `f` of a result as an instruction takes it, from rows 0 and 8.
#[cube]
fn give<N: Size>(sum: &Array<f32>, held: &mut Array<Vector<f32, N>>, #[comptime] f: usize) {
    #[unroll]
    for i in 0..2usize {
        let mut pair = Vector::<f32, N>::empty();
        pair[0] = sum[comptime!(f * HELD + i * 2)];
        pair[1] = sum[comptime!(f * HELD + i * 2 + 1)];
        held[i] = pair;
    }
}

/// The reverse of [`give`].
#[cube]
fn take_back<N: Size>(sum: &mut Array<f32>, result: &Array<Vector<f32, N>>, #[comptime] f: usize) {
    #[unroll]
    for i in 0..2usize {
        let pair = result[i];
        sum[comptime!(f * HELD + i * 2)] = pair[0];
        sum[comptime!(f * HELD + i * 2 + 1)] = pair[1];
    }
}

/// The first product by matrix units, eight words along the rank an instruction.
#[cube]
fn first_by_units<E: Float>(
    left: &Array<u32>,
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    y_at: usize,
    #[comptime] which: usize,
    #[comptime] plan: Plan,
) {
    let definition = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, comptime!(depth(plan)));
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let short = comptime!(plan.short());
    let (g, t) = place();
    let y_at = y_at + g * comptime!(plan.by_rank().stride) + t;
    let mut a = Array::<Vector<E, NA>>::new(4usize);
    let mut b = Array::<Vector<E, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(plan.wide() / STEP) {
        #[unroll]
        for i in 0..4usize {
            a[i] = register::<E, NA>(left[comptime!(which * plan.left() + step * LEFT + i)], short);
        }
        #[unroll]
        for f in 0..comptime!(plan.span / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let at = y_at + comptime!(f * COLUMNS * plan.by_rank().stride + step * STEP + i * 4);
                b[i] = register::<E, NB>(words[at], short);
            }
            give::<NC>(sum, &mut held, f);
            let result = definition.execute(&a, &b, &held);
            take_back::<NC>(sum, &result, f);
        }
    }
}

/// sum += x Y for `span` columns whose words start at `y_at`, x the result of the first product.
#[cube]
pub(super) fn second_product(
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    x: &Array<f32>,
    y_at: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.short()) {
        second_by_units::<bf16>(words, sum, x, y_at, plan);
    } else {
        second_by_units::<tf32>(words, sum, x, y_at, plan);
    }
}

/// The second product by matrix units: 16 columns an instruction in bf16; in tf32 eight, where inner indices t and t + 4
/// are columns 2 t and 2 t + 1.
#[cube]
fn second_by_units<E: Float>(
    words: &SharedMemory<u32>,
    sum: &mut Array<f32>,
    x: &Array<f32>,
    y_at: usize,
    #[comptime] plan: Plan,
) {
    let definition = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, comptime!(depth(plan)));
    let size!(NA) = definition.vector_size(cmma::MatrixIdent::A);
    let size!(NB) = definition.vector_size(cmma::MatrixIdent::B);
    let size!(NC) = definition.vector_size(cmma::MatrixIdent::Accumulator);
    let short = comptime!(plan.short());
    let stride = comptime!(plan.by_column().stride);
    // Rows of words from this unit's first to its second, and to the next unit's.
    let (second, next) = comptime!(if plan.short() { (4usize, 1usize) } else { (1usize, 2usize) });
    let (g, t) = place();
    let y_at = y_at + t * comptime!(next * stride) + g;
    let mut a = Array::<Vector<E, NA>>::new(4usize);
    let mut b = Array::<Vector<E, NB>>::new(2usize);
    let mut held = Array::<Vector<f32, NC>>::new(2usize);
    #[unroll]
    for step in 0..comptime!(plan.span / depth(plan)) {
        #[unroll]
        for i in 0..4usize {
            let mut some = Vector::<E, NA>::empty();
            if comptime!(short) {
                some[0] = operand::<E>(x[comptime!(step * 2 * HELD + i * 2)]);
                some[1] = operand::<E>(x[comptime!(step * 2 * HELD + i * 2 + 1)]);
            } else {
                // Registers in the order of rows 0 and 8, then of inner t and t + 4.
                some[0] = operand::<E>(x[comptime!(step * HELD + i % 2 * 2 + i / 2)]);
            }
            a[i] = some;
        }
        #[unroll]
        for f in 0..comptime!(plan.rank / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let at = y_at + comptime!((step * 8 + i * second) * stride + f * COLUMNS);
                b[i] = register::<E, NB>(words[at], short);
            }
            give::<NC>(sum, &mut held, f);
            let result = definition.execute(&a, &b, &held);
            take_back::<NC>(sum, &result, f);
        }
    }
}
