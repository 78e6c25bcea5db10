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
pub(super) fn second_product(
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
