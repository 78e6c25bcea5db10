//! What `grads` computes run by run, without products: a unit is one channel of [`RUN`] neighbouring tokens.
//!
//! The work area holds three tiles of channels, one number a unit, and sums of runs; see `Plan::work`.

use cubecl::prelude::*;

use super::super::load_or_zero;
use super::{LEVELS, Plan, RUN, RUNS, UNITS};
use crate::tensor::Floats;

/// A run of tokens in one channel, as a unit sees it outside products.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Run {
    /// Which of the span's.
    pub number: usize,
    /// Its first token within the span.
    pub first: usize,
    /// Its channel within the block.
    pub channel: usize,
    /// Its first element in tensors of channels, and the way from a token to the next.
    pub at: usize,
    pub step: usize,
    /// The same in those of key heads.
    pub keys_at: usize,
    pub keys_step: usize,
    /// How many tokens it has.
    pub live: usize,
}

/// A run's `live` tokens in a tensor of channels.
#[cube]
pub(super) fn load_run(x: &Floats, into: &mut Array<f32>, at: usize, step: usize, live: usize, #[comptime] plan: Plan) {
    #[unroll(plan.math.cuda)]
    for i in 0..comptime!(RUN) {
        into[i] = load_or_zero(x, at + i * step, i < live);
    }
}

/// What token `i` of a run erases by: its beta, or the gate of this unit's channel.
#[cube]
pub(super) fn erase_of(
    strength: &SharedMemory<f32>,
    erasing: &Array<f32>,
    i: usize,
    run: &Run,
    #[comptime] plan: Plan,
) -> f32 {
    if comptime!(plan.gated) { erasing[i] } else { strength[run.first + i] }
}

/// The sum of one kind's runs `from..to` in this unit's channel.
#[cube]
fn sum_of_runs(work: &SharedMemory<f32>, at: usize, from: usize, to: usize, run: &Run, #[comptime] plan: Plan) -> f32 {
    let mut sum = 0.0f32;
    for n in from..to {
        sum += work[at + n * plan.channels + run.channel];
    }
    sum
}

/// e^{G_n} * rowsum(dS' * S).
#[cube]
pub(super) fn through_span(work: &SharedMemory<f32>, run: &Run, #[comptime] plan: Plan) -> f32 {
    let ends = comptime!(3 * plan.by_channel().len());
    let mut product = 0.0f32;
    for n in 0..comptime!(UNITS / plan.channels) {
        product += work[ends + n * plan.channels + run.channel];
    }
    product * sum_of_runs(work, comptime!(plan.gates()), 0usize, comptime!(RUNS), run, plan).exp()
}

/// What came in from the entry state and from the exit, times its decays, begins the sums of a run: A_i and B_j in dg.
#[cube]
pub(super) fn across_borders(
    queries: &Array<f32>,
    keys: &Array<f32>,
    gate: &Array<f32>,
    strength: &SharedMemory<f32>,
    erasing: &Array<f32>,
    work: &mut SharedMemory<f32>,
    dq: &mut Array<f32>,
    dr: &mut Array<f32>,
    dk: &mut Array<f32>,
    dg: &mut Array<f32>,
    run: &Run,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let second = comptime!(plan.by_channel().len());
    let third = comptime!(2 * plan.by_channel().len());
    let gates = comptime!(plan.gates());
    let stride = comptime!(plan.by_channel().stride);
    let tile_at = run.first * stride + run.channel;

    let mut exponent = sum_of_runs(work, gates, 0usize, run.number, run, plan);
    #[unroll(plan.math.cuda)]
    for i in 0..comptime!(RUN) {
        exponent += gate[i];
        let decay = exponent.exp();
        let at = tile_at + i * stride;
        dq[i] = scale * decay * work[at];
        dr[i] = -decay * work[second + at];
        dg[i] = queries[i] * dq[i] + erase_of(strength, erasing, i, run, plan) * keys[i] * dr[i];
    }
    let mut exponent = sum_of_runs(work, gates, run.number + 1, comptime!(RUNS), run, plan);
    let mut later = 0.0f32;
    #[unroll(plan.math.cuda)]
    for back in 0..comptime!(RUN) {
        let i = comptime!(RUN - 1) - back;
        dk[i] = exponent.exp() * work[third + tile_at + i * stride];
        exponent += gate[i];
        later += dg[i];
        dg[i] = later;
    }
    let mut earlier = 0.0f32;
    #[unroll(plan.math.cuda)]
    for i in 0..comptime!(RUN) {
        dg[i] += earlier;
        earlier += keys[i] * dk[i];
    }
    let of_runs = comptime!(plan.of_runs());
    let own = run.number * plan.channels + run.channel;
    work[gates + of_runs + own] = later;
    work[gates + 2 * of_runs + own] = earlier;
}

/// Writes what the run brings to a level's products, times its factors: r and q of a row, k of a column.
#[cube]
pub(super) fn factors_at_level(
    queries: &Array<f32>,
    keys: &Array<f32>,
    gate: &Array<f32>,
    strength: &SharedMemory<f32>,
    erasing: &Array<f32>,
    work: &mut SharedMemory<f32>,
    factor: &mut Array<f32>,
    run: &Run,
    level: usize,
    #[comptime] plan: Plan,
) {
    let second = comptime!(plan.by_channel().len());
    let third = comptime!(2 * plan.by_channel().len());
    let gates = comptime!(plan.gates());
    let stride = comptime!(plan.by_channel().stride);
    let tile_at = run.first * stride + run.channel;
    let size = 1usize << level;
    let side = (run.number >> level) << level;
    if (run.number >> level) % 2 == 1 {
        let mut exponent = sum_of_runs(work, gates, side, run.number, run, plan);
        #[unroll(plan.math.cuda)]
        for i in 0..comptime!(RUN) {
            exponent += gate[i];
            factor[i] = exponent.exp();
            let at = tile_at + i * stride;
            work[second + at] = erase_of(strength, erasing, i, run, plan) * keys[i] * factor[i];
            work[third + at] = queries[i] * factor[i];
        }
    } else {
        let mut exponent = sum_of_runs(work, gates, run.number + 1, side + size, run, plan);
        #[unroll(plan.math.cuda)]
        for back in 0..comptime!(RUN) {
            let i = comptime!(RUN - 1) - back;
            factor[i] = exponent.exp();
            exponent += gate[i];
            work[second + tile_at + i * stride] = keys[i] * factor[i];
        }
    }
}

/// Adds a level's products to the sums of a run, and what of them straddles its tokens to dg.
#[cube]
pub(super) fn add_level(
    queries: &Array<f32>,
    keys: &Array<f32>,
    strength: &SharedMemory<f32>,
    erasing: &Array<f32>,
    work: &mut SharedMemory<f32>,
    factor: &Array<f32>,
    dq: &mut Array<f32>,
    dr: &mut Array<f32>,
    dk: &mut Array<f32>,
    dg: &mut Array<f32>,
    run: &Run,
    level: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let second = comptime!(plan.by_channel().len());
    let third = comptime!(2 * plan.by_channel().len());
    let stride = comptime!(plan.by_channel().stride);
    let tile_at = run.first * stride + run.channel;
    let mut straddling = 0.0f32;
    if (run.number >> level) % 2 == 1 {
        // Every column lies before the run: rows from t on.
        #[unroll(plan.math.cuda)]
        for back in 0..comptime!(RUN) {
            let i = comptime!(RUN - 1) - back;
            let read = factor[i] * work[second + tile_at + i * stride];
            let erased = factor[i] * work[third + tile_at + i * stride];
            dq[i] += read;
            dr[i] += erased;
            straddling += queries[i] * read + erase_of(strength, erasing, i, run, plan) * keys[i] * erased;
            if comptime!(mutant != 10) {
                dg[i] += straddling;
            }
        }
    } else {
        // Every row lies behind it: columns before t.
        #[unroll(plan.math.cuda)]
        for i in 0..comptime!(RUN) {
            if comptime!(mutant != 10) {
                dg[i] += straddling;
            }
            let at = tile_at + i * stride;
            let written = factor[i] * (work[second + at] + work[third + at]);
            dk[i] += written;
            straddling += keys[i] * written;
        }
    }
    let kind = comptime!(plan.gates() + 3 * plan.of_runs()) + level * comptime!(plan.of_runs());
    work[kind + run.number * plan.channels + run.channel] = straddling;
}

/// What other runs add to dg of every token of this one.
#[cube]
pub(super) fn from_other_runs(
    work: &SharedMemory<f32>,
    run: &Run,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) -> f32 {
    let of_runs = comptime!(plan.of_runs());
    let gates = comptime!(plan.gates());
    let mut sum = sum_of_runs(work, gates + of_runs, run.number + 1, comptime!(RUNS), run, plan);
    sum += sum_of_runs(work, gates + 2 * of_runs, 0usize, run.number, run, plan);
    if comptime!(mutant != 10) {
        for level in 0..comptime!(LEVELS) {
            let size = 1usize << level;
            let side = (run.number >> level) << level;
            let is_row = (run.number >> level) % 2 == 1;
            let from = select(is_row, run.number + 1, side);
            let to = select(is_row, side + size, run.number);
            sum += sum_of_runs(work, gates + (3 + level) * of_runs, from, to, run, plan);
        }
    }
    sum
}

/// The pairs within a run, one by one.
#[cube]
pub(super) fn within_run(
    queries: &Array<f32>,
    keys: &Array<f32>,
    gate: &Array<f32>,
    strength: &SharedMemory<f32>,
    erasing: &Array<f32>,
    pairs: &SharedMemory<f32>,
    dq: &mut Array<f32>,
    dr: &mut Array<f32>,
    dk: &mut Array<f32>,
    dg: &mut Array<f32>,
    run: &Run,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let square = comptime!(plan.square());
    let mut straddling = Array::<f32>::new(comptime!(RUN));
    #[unroll(plan.math.cuda)]
    for i in 0..comptime!(RUN) {
        let row = run.first + i;
        let query = queries[i];
        let erase = erase_of(strength, erasing, i, run, plan) * keys[i];
        // A token paired with itself has decay 1, whatever g.
        let itself = pairs[row * square + row];
        dk[i] += itself * query;
        let mut read = itself * keys[i];
        let mut erased = 0.0f32;
        let mut exponent = 0.0f32;
        #[unroll(plan.math.cuda)]
        for back in 1..comptime!(RUN) {
            let j = comptime!(RUN - 1) - back;
            if j < i {
                let column = run.first + j;
                exponent += gate[j + 1];
                let decay = exponent.exp();
                let d_p = pairs[row * square + column];
                let d_l = pairs[column * square + row];
                let key = decay * keys[j];
                let sink = d_p * query + d_l * erase;
                read += d_p * key;
                erased += d_l * key;
                dk[j] += decay * sink;
                straddling[j] = key * sink;
            }
        }
        dq[i] += read;
        dr[i] += erased;
        let mut earlier = 0.0f32;
        #[unroll(plan.math.cuda)]
        for j in 0..comptime!(RUN - 1) {
            if j < i {
                earlier += straddling[j];
                if comptime!(mutant != 10) {
                    dg[j + 1] += earlier;
                }
            }
        }
    }
}
