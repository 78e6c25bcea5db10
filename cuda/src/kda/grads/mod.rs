//! dq, dk, dg and dbeta, db and dw, span by span and in no order.
//!
//! For a span of n tokens with S on entry, dS' the gradient of the state on exit, r_i = beta_i k_i:
//!
//! ```text
//! dP_ij = scale dO_i . U_j  (j <= i)      dL_ij = -Z_i . U_j  (j < i)
//! dq_i  = scale (S dO_i) e^{G_i}    + sum_{j<=i} dP_ij k_j e^{G_i - G_j}
//! dr_i  = -(S Z_i) e^{G_i}          + sum_{j<i}  dL_ij k_j e^{G_i - G_j}
//! dkw_j = (dS' U_j) e^{G_n - G_j}   + sum_{i>=j} dP_ij q_i e^{G_i - G_j} + sum_{i>j} dL_ij r_i e^{G_i - G_j}
//! dk = dkw + beta dr                  dbeta = k . dr + v . Z
//! db = k * dr                         dw = v * Z
//! dg_t  = e^{G_n} * rowsum(dS' * S) + sum_{i>=t} A_i + sum_{j<t} B_j + E_t
//! ```
//!
//! With an erase gate r_i = b_i * k_i and dk = dkw + b * dr. dbeta has the terms of gates that are absent.
//!
//! A_i = q_i * dq_i + r_i * dr_i and B_j = k_j * dkw_j with the first terms of those only; E_t collects the pairs that
//! straddle t, see `docs/kda.md` section 8. Nothing in dg is a difference of sums.
//!
//! A cube is a span of a chain. It first computes all dP and dL, which share one square of shared memory: dP_ij lies at
//! (i, j), and dL_ij at (j, i), above the diagonal. Then it takes the channels a block at a time and changes between two
//! views of the `[SPAN, channels]` tiles:
//!
//! - In products over value columns or over tokens a unit holds what [`tile`] deals out to it.
//! - Elsewhere a unit is one channel of [`RUN`] neighbouring tokens, a *run*. Sums over tokens are then running sums in
//!   its registers, and those over whole runs come from its neighbours through shared memory.
//!
//! Pairs of tokens in one run are visited one by one. The others lie in blocks of a run by a run, then of two by two, as
//! in `docs/kda.md` section 7: at one level a run is on the side of the rows or of the columns, and the pairs' sums are
//! products. The anchor is the last column, so a row's factor is e^{sum of g from the block's first row on} and a
//! column's e^{sum of g behind it up to the last column}.

mod plan;
mod runs;

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::Grads;

use plan::Plan;
use runs::{
    Run, across_borders, add_level, erase_of, factors_at_level, from_other_runs, load_run, through_span, within_run,
};

use super::chain::{Chain, Cuts, Group, chain_of_keys, cuts, group, piece_of_chain};
use super::dstate::Passed;
use super::tile::{self, clear, multiply_add};
use super::{Call, Fused, SPAN, bytes, load_or_zero, optional};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Units of a cube.
const UNITS: usize = 256;

/// Tokens of a run: as many as a product of matrix units has rows.
const RUN: usize = 16;

/// Runs of a span.
const RUNS: usize = SPAN / RUN;

/// Levels of blocks of whole runs: one by one, two by two.
const LEVELS: usize = RUNS.trailing_zeros() as usize;

/// Units that share the sums of one token.
const SHARES: usize = UNITS / SPAN;

/// Writes dq and dk of every value head, dg, dbeta, db and dw; [`super::dstate`] has written dv and the gradient of the initial state.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    fused: &Fused,
    passed: &Passed,
    d_o: &Tensor,
    grads: Grads<&Tensor>,
) -> Result<()> {
    const NAME: &str = "kda::grads";
    let Call { inputs, sizes, scale, .. } = call;
    let plan = Plan::new(b, NAME, call)?;
    let cubes = sizes.pieces(SPAN);
    let always = [
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        &fused.u,
        &passed.z,
        d_o,
        &fused.states,
        &passed.dstates,
        grads.dq,
        grads.dk,
        grads.dg,
        grads.dbeta,
    ];
    let mut uses = always.to_vec();
    uses.extend([inputs.b, inputs.cu_seqlens, grads.db, grads.dw].into_iter().flatten());
    let mutant = super::mutant(b, &[7, 8, 9, 10, 17]);
    let grid = Grid::cubes(cubes, UNITS as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        let [q, k, v, g, beta, u, z, d_o, states, dstates, dq, dk, dg, dbeta] = always.map(|t| b.floats(t));
        let (erase, group, cuts) = (optional(b, inputs.b), group(call), cuts(b, call));
        let (db, dw) = (optional(b, grads.db), optional(b, grads.dw));
        let (cubes, scale, time, heads) = (cubes as u32, *scale, sizes.time, sizes.heads);
        let (key, value) = (sizes.key, sizes.value);
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            grads_kernel::launch_unchecked::<R>(
                client, count, dim, q, k, v, g, beta, erase, group, cuts, u, z, d_o, states, dstates, dq, dk, dg,
                dbeta, db, dw, scale, cubes, time, heads, key, value, plan, mutant,
            )
        }
    })
}

/// Mutants: 7 drops the decay of the whole span in dg, 8 drops beta in dk, 9 has a sign of dL wrong, 10 drops the pairs
/// that straddle a token in dg, 17 adds db to dbeta though there is an erase gate.
#[cube(launch_unchecked)]
fn grads_kernel(
    q: &Floats,
    k: &Floats,
    v: &Floats,
    g: &Floats,
    beta: &Floats,
    erase: &ComptimeOption<Floats>,
    group: &ComptimeOption<Group>,
    cuts: &ComptimeOption<Cuts>,
    u: &Floats,
    z: &Floats,
    d_o: &Floats,
    states: &Floats,
    dstates: &Floats,
    dq: &mut Floats,
    dk: &mut Floats,
    dg: &mut Floats,
    dbeta: &mut Floats,
    db: &mut ComptimeOption<Floats>,
    dw: &mut ComptimeOption<Floats>,
    scale: f32,
    cubes: u32,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let cube = CUBE_POS;
    if cube >= cubes as usize {
        terminate!();
    }
    let span = comptime!(SPAN);
    let shares = comptime!(SHARES);
    let channels = plan.channels;
    let values = plan.values;
    let by_value = comptime!(plan.by_value());
    let by_channel = comptime!(plan.by_channel());
    let of_state = comptime!(plan.of_state());
    let sums = comptime!(plan.sums());
    let unit = UNIT_POS as usize;
    let packed = comptime!(cuts.is_some());
    let piece = piece_of_chain(cube, time, heads, cuts, span);
    let (chain, start) = (piece.chain, piece.start);
    let length = chain.length;
    let of_keys = chain_of_keys(&chain, group);
    if comptime!(packed) {
        if start >= length {
            terminate!();
        }
    }
    let state_at = cube * key * value;

    let mut pairs = SharedMemory::<f32>::new(comptime!(SPAN * plan.square()));
    let mut work = SharedMemory::<f32>::new(comptime!(plan.work()));
    let mut strength = SharedMemory::<f32>::new(span);
    if unit < span {
        strength[unit] = load_or_zero(beta, chain.at(start + unit, 1usize), start + unit < length);
    }

    let mut dbeta_sum = span_pairs(v, u, z, d_o, dw, &mut pairs, &mut work, scale, &chain, start, value, plan, mutant);

    let mut dq_sum = Array::<f32>::new(comptime!(sums.elements()));
    let mut dr_sum = Array::<f32>::new(comptime!(sums.elements()));
    let mut dk_sum = Array::<f32>::new(comptime!(sums.elements()));
    let mut run_dq = Array::<f32>::new(comptime!(RUN));
    let mut run_dr = Array::<f32>::new(comptime!(RUN));
    let mut run_dk = Array::<f32>::new(comptime!(RUN));
    let mut run_dg = Array::<f32>::new(comptime!(RUN));
    let mut factor = Array::<f32>::new(comptime!(RUN));
    let mut queries = Array::<f32>::new(comptime!(RUN));
    let mut keys = Array::<f32>::new(comptime!(RUN));
    let mut gate = Array::<f32>::new(comptime!(RUN));
    let mut erasing = Array::<f32>::new(comptime!(plan.erasing()));
    let number = unit / channels;
    let first = number * comptime!(RUN);
    let working = number < comptime!(RUNS);
    for block in 0..key.div_ceil(channels) {
        let channel = block * channels + unit % channels;
        let mut live = ((length - start).max(first) - first).min(comptime!(RUN));
        if channel >= key {
            live = 0usize;
        }
        let run = Run {
            number,
            first,
            channel: unit % channels,
            at: chain.at(start + first, key) + channel,
            step: chain.step(key),
            keys_at: of_keys.at(start + first, key) + channel,
            keys_step: of_keys.step(key),
            live,
        };

        // What crosses the span's borders, still without decays.
        clear(&mut dq_sum, sums);
        clear(&mut dr_sum, sums);
        clear(&mut dk_sum, sums);
        let mut through = 0.0f32;
        {
            let second = comptime!(by_value.len());
            let third = comptime!(2 * by_value.len());
            let entry = comptime!(3 * by_value.len());
            let exit = comptime!(3 * by_value.len() + of_state.len());
            let stride = comptime!(of_state.stride);
            let with_state = comptime!(plan.with_state());
            // Units that share a channel's product of both states.
            let slice = comptime!(plan.values * plan.channels / UNITS);
            for block_of_values in 0..value.div_ceil(values) {
                let column = block_of_values * values;
                let live = (value - column).min(values);
                sync_cube();
                // Values that fit one block are there from the pairs.
                if value > values || block > 0 {
                    tile::load(d_o, &mut work, 0usize, &chain, start, column, value, by_value);
                    tile::load(z, &mut work, second, &chain, start, column, value, by_value);
                    tile::load(u, &mut work, third, &chain, start, column, value, by_value);
                }
                let row = block * channels;
                tile::load_state(states, &mut work, entry, state_at, row, column, key, value, of_state);
                tile::load_state(dstates, &mut work, exit, state_at, row, column, key, value, of_state);
                sync_cube();
                multiply_add(&mut dq_sum, &work, 0usize, &work, entry, live, with_state, sums);
                multiply_add(&mut dr_sum, &work, second, &work, entry, live, with_state, sums);
                multiply_add(&mut dk_sum, &work, third, &work, exit, live, with_state, sums);
                let at = unit % channels * stride + number * slice;
                for n in 0..slice {
                    through += work[entry + at + n] * work[exit + at + n];
                }
            }
        }
        sync_cube();
        // From here on the work area holds channels.
        let second = comptime!(by_channel.len());
        let third = comptime!(2 * by_channel.len());
        let ends = comptime!(3 * by_channel.len());
        let gates = comptime!(plan.gates());
        let stride = comptime!(by_channel.stride);
        #[unroll]
        for e in 0..comptime!(sums.elements()) {
            let at = tile::row(e, sums) * stride + tile::column(e, sums);
            work[at] = dq_sum[e];
            work[second + at] = dr_sum[e];
            work[third + at] = dk_sum[e];
        }
        work[ends + unit] = through;
        if working {
            load_run(q, &mut queries, run.keys_at, run.keys_step, run.live, plan);
            load_run(k, &mut keys, run.keys_at, run.keys_step, run.live, plan);
            load_run(g, &mut gate, run.at, run.step, run.live, plan);
            #[comptime]
            match erase {
                ComptimeOption::Some(erase) => {
                    load_run(erase, &mut erasing, run.at, run.step, run.live, plan);
                }
                ComptimeOption::None => {}
            }
            let mut sum = 0.0f32;
            #[unroll(plan.math.cuda)]
            for i in 0..comptime!(RUN) {
                sum += gate[i];
            }
            work[gates + unit] = sum;
        }
        sync_cube();
        let mut everywhere = 0.0f32;
        if working {
            if comptime!(mutant != 7) {
                everywhere = through_span(&work, &run, plan);
            }
            across_borders(
                &queries,
                &keys,
                &gate,
                &strength,
                &erasing,
                &mut work,
                &mut run_dq,
                &mut run_dr,
                &mut run_dk,
                &mut run_dg,
                &run,
                scale,
                plan,
            );
        }

        for level in 0..comptime!(LEVELS) {
            if working {
                factors_at_level(
                    &queries,
                    &keys,
                    &gate,
                    &strength,
                    &erasing,
                    &mut work,
                    &mut factor,
                    &run,
                    level,
                    plan,
                );
            }
            sync_cube();
            // For a row: dP k and dL k over the block's columns. For a column: dL r and dP q over its rows.
            let size = comptime!(RUN) << level;
            let row = tile::row(0usize, sums);
            let is_row = (row / size) % 2 == 1;
            let side = row / size * size;
            let from = select(is_row, side.max(size) - size, side + size);
            let other = select(is_row, second.runtime(), third.runtime());
            clear(&mut dq_sum, sums);
            clear(&mut dr_sum, sums);
            for step in 0..1usize << level {
                let n = from + step * comptime!(RUN);
                let live = comptime!(RUN).runtime();
                let straight = comptime!(plan.with_pairs());
                multiply_add(&mut dq_sum, &pairs, n, &work, second + n * stride, live, straight, sums);
                let across = comptime!(plan.with_pairs_turned());
                let square = comptime!(plan.square());
                multiply_add(&mut dr_sum, &pairs, n * square, &work, other + n * stride, live, across, sums);
            }
            sync_cube();
            #[unroll]
            for e in 0..comptime!(sums.elements()) {
                let at = tile::row(e, sums) * stride + tile::column(e, sums);
                work[second + at] = dq_sum[e];
                work[third + at] = dr_sum[e];
            }
            sync_cube();
            if working {
                add_level(
                    &queries,
                    &keys,
                    &strength,
                    &erasing,
                    &mut work,
                    &factor,
                    &mut run_dq,
                    &mut run_dr,
                    &mut run_dk,
                    &mut run_dg,
                    &run,
                    level,
                    plan,
                    mutant,
                );
            }
        }
        sync_cube();
        if working {
            everywhere += from_other_runs(&work, &run, plan, mutant);
            within_run(
                &queries,
                &keys,
                &gate,
                &strength,
                &erasing,
                &pairs,
                &mut run_dq,
                &mut run_dr,
                &mut run_dk,
                &mut run_dg,
                &run,
                plan,
                mutant,
            );
            #[unroll(plan.math.cuda)]
            for i in 0..comptime!(RUN) {
                let erased = run_dr[i];
                if comptime!(!plan.gated || mutant == 17) {
                    work[second + (run.first + i) * stride + run.channel] = keys[i] * erased;
                }
                if i < run.live {
                    let at = run.at + i * run.step;
                    dq.set(at, run_dq[i]);
                    let mut strength_here = erase_of(&strength, &erasing, i, &run, plan);
                    if comptime!(mutant == 8) {
                        strength_here = 1.0f32;
                    }
                    dk.set(at, run_dk[i] + strength_here * erased);
                    dg.set(at, everywhere + run_dg[i]);
                    #[comptime]
                    match &mut *db {
                        ComptimeOption::Some(db) => {
                            db.set(at, keys[i] * erased);
                        }
                        ComptimeOption::None => {}
                    }
                }
            }
        }
        sync_cube();
        if comptime!(!plan.gated || mutant == 17) {
            for n in 0..comptime!(plan.channels / SHARES) {
                dbeta_sum += work[second + unit / shares * stride + n * shares + unit % shares];
            }
        }
    }
    sync_cube();
    work[unit] = dbeta_sum;
    sync_cube();
    if unit < span && start + unit < length {
        let mut sum = 0.0f32;
        for n in 0..shares {
            sum += work[unit * shares + n];
        }
        dbeta.set(chain.at(start + unit, 1usize), sum);
    }
}

/// Writes dP on and below the diagonal of `pairs` and dL above it. The work area ends with the last block of values in it.
/// Writes dw if that is there; if not, returns this unit's share of v . Z, that of token `unit / SHARES`.
#[cube]
fn span_pairs(
    v: &Floats,
    u: &Floats,
    z: &Floats,
    d_o: &Floats,
    dw: &mut ComptimeOption<Floats>,
    pairs: &mut SharedMemory<f32>,
    work: &mut SharedMemory<f32>,
    scale: f32,
    chain: &Chain,
    start: usize,
    value: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) -> f32 {
    let by_value = comptime!(plan.by_value());
    let all_pairs = comptime!(plan.pairs());
    let values = plan.values;
    let stride = comptime!(by_value.stride);
    let second = comptime!(by_value.len());
    let third = comptime!(2 * by_value.len());
    let shares = comptime!(SHARES);
    let unit = UNIT_POS as usize;
    let token = unit / shares;
    let mut written = 0.0f32;
    let mut targets = Array::<f32>::new(comptime!(plan.values / SHARES));
    let mut products = Array::<f32>::new(comptime!(all_pairs.elements()));
    let mut others = Array::<f32>::new(comptime!(all_pairs.elements()));
    clear(&mut products, all_pairs);
    clear(&mut others, all_pairs);
    for block in 0..value.div_ceil(values) {
        let first = block * values;
        let live = (value - first).min(values);
        sync_cube();
        tile::load(d_o, work, 0usize, chain, start, first, value, by_value);
        tile::load(z, work, second, chain, start, first, value, by_value);
        tile::load(u, work, third, chain, start, first, value, by_value);
        let v_at = chain.at(start + token, value) + first;
        #[unroll]
        for n in 0..comptime!(plan.values / SHARES) {
            let column = n * shares + unit % shares;
            targets[n] = load_or_zero(v, v_at + column, start + token < chain.length && column < live);
        }
        sync_cube();
        // dO_x . U_y and U_x . Z_y for all pairs, of which each needs one.
        let over_values = comptime!(plan.over_values());
        multiply_add(&mut products, work, 0usize, work, third, live, over_values, all_pairs);
        multiply_add(&mut others, work, third, work, second, live, over_values, all_pairs);
        #[unroll]
        for n in 0..comptime!(plan.values / SHARES) {
            let column = n * shares + unit % shares;
            #[comptime]
            match &mut *dw {
                ComptimeOption::Some(dw) => {
                    if start + token < chain.length && column < live {
                        dw.set(v_at + column, targets[n] * work[second + token * stride + column]);
                    }
                }
                ComptimeOption::None => {
                    written += targets[n] * work[second + token * stride + column];
                }
            }
        }
    }
    #[unroll]
    for e in 0..comptime!(all_pairs.elements()) {
        let x = tile::row(e, all_pairs);
        let y = tile::column(e, all_pairs);
        let mut pair = scale * products[e];
        if x < y {
            pair = -others[e];
            if comptime!(mutant == 9) {
                pair *= -1.0f32;
            }
        }
        pairs[x * comptime!(plan.square()) + y] = pair;
    }
    written
}
