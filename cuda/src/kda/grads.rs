//! dq, dk, dg and dbeta, span by span and in no order.
//!
//! For a span of n tokens with S on entry, dS' the gradient of the state on exit, r_i = beta_i k_i:
//!
//! ```text
//! dP_ij = scale dO_i . U_j  (j <= i)      dL_ij = -Z_i . U_j  (j < i)
//! dq_i  = scale (S dO_i) e^{G_i}    + sum_{j<=i} dP_ij k_j e^{G_i - G_j}
//! dr_i  = -(S Z_i) e^{G_i}          + sum_{j<i}  dL_ij k_j e^{G_i - G_j}
//! dkw_j = (dS' U_j) e^{G_n - G_j}   + sum_{i>=j} dP_ij q_i e^{G_i - G_j} + sum_{i>j} dL_ij r_i e^{G_i - G_j}
//! dk = dkw + beta dr                  dbeta = k . dr + v . Z
//! dg_t  = e^{G_n} * rowsum(dS' * S) + sum_{i>=t} A_i + sum_{j<t} B_j + E_t
//! ```
//!
//! A_i = q_i * dq_i + r_i * dr_i and B_j = k_j * dkw_j with the first terms of those only; E_t collects the pairs that
//! straddle t, see `docs/kda.md` section 8. Nothing in dg is a difference of sums.
//!
//! A cube is a span of a chain. It first computes all dP and dL, which share one square of shared memory: dP_ij lies at
//! (i, j), and dL_ij at (j, i), above the diagonal. Then it takes the channels `CHANNELS` at a time; a unit is one
//! channel of four neighbouring tokens and holds their sums.
//!
//! The pairs of a block of channels are visited by level, blocks of 1, 2, 4, .. 32 tokens (`docs/kda.md` section 7). At
//! one level each token lies in one block, as a row if its bit of the level is set, as a column otherwise. The units write
//! their tokens times the factors towards the block's anchor to shared memory, then each sums over its partners.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::Grads;

use super::dstate::Passed;
use super::prep::from_anchor;
use super::tile::{self, Part, Strides, Tile, clear, multiply_add};
use super::{Call, Fused, SPAN, bytes, load_or_zero, token_at};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Channels of a block, and value columns of a block.
const CHANNELS: usize = 16;

/// Units of a cube.
const UNITS: usize = 256;

/// Levels of a span: blocks of 1, 2, .., SPAN / 2 tokens.
const LEVELS: usize = SPAN.trailing_zeros() as usize;

/// From one token to the next in the square of pairs.
const SQUARE: usize = SPAN + 1;

/// A `[SPAN, CHANNELS]` tile.
const TOKENS: Part = Part { rows: SPAN, columns: CHANNELS, stride: CHANNELS + 1, units: UNITS };

/// A `[CHANNELS, CHANNELS]` tile of a state.
const STATE: Part = Part { rows: CHANNELS, columns: CHANNELS, stride: CHANNELS + 1, units: UNITS };

/// The `[SPAN, CHANNELS]` sums of a block of channels.
const SUMS: Tile = Tile { rows: SPAN, columns: CHANNELS, units: UNITS };

/// The square of pairs.
const PAIRS: Tile = Tile { rows: SPAN, columns: SPAN, units: UNITS };

/// Where tiles lie in the work area: three of tokens, two of states.
const SECOND: usize = TOKENS.len();
const THIRD: usize = 2 * TOKENS.len();
const ENTRY: usize = 3 * TOKENS.len();
const EXIT: usize = ENTRY + STATE.len();
const WORK: usize = EXIT + STATE.len();

/// Writes dq, dk, dg and dbeta; [`super::dstate`] has written dv and the gradient of the initial state.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    fused: &Fused,
    passed: &Passed,
    d_o: &Tensor,
    grads: Grads<&Tensor>,
) -> Result<()> {
    let Call { inputs, sizes, scale } = call;
    let cubes = sizes.chains() * sizes.spans();
    let uses = [
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
    let mutant = super::mutant(b, 7..=10);
    b.launch("kda::grads", Grid::cubes(cubes, UNITS as u32), bytes(uses), &uses, |client, count, dim| {
        let [q, k, v, g, beta, u, z, d_o, states, dstates, dq, dk, dg, dbeta] = uses.map(|t| b.floats(t));
        let (cubes, scale, time, heads) = (cubes as u32, *scale, sizes.time, sizes.heads);
        let (key, value) = (sizes.key, sizes.value);
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            grads_kernel::launch_unchecked::<R>(
                client, count, dim, q, k, v, g, beta, u, z, d_o, states, dstates, dq, dk, dg, dbeta, scale, cubes,
                time, heads, key, value, mutant,
            )
        }
    })
}

/// Mutants: 7 drops the decay of the whole span in dg, 8 drops beta in dk, 9 has a sign of dL wrong, 10 drops the pairs
/// that straddle a token in dg.
#[cube(launch_unchecked)]
fn grads_kernel(
    q: &Floats,
    k: &Floats,
    v: &Floats,
    g: &Floats,
    beta: &Floats,
    u: &Floats,
    z: &Floats,
    d_o: &Floats,
    states: &Floats,
    dstates: &Floats,
    dq: &mut Floats,
    dk: &mut Floats,
    dg: &mut Floats,
    dbeta: &mut Floats,
    scale: f32,
    cubes: u32,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
    #[comptime] mutant: u32,
) {
    let cube = CUBE_POS;
    if cube >= cubes as usize {
        terminate!();
    }
    let span = comptime!(SPAN);
    let square = comptime!(SQUARE);
    let width = comptime!(CHANNELS);
    let stride = comptime!(TOKENS.stride);
    let second = comptime!(SECOND);
    let third = comptime!(THIRD);
    let entry = comptime!(ENTRY);
    let exit = comptime!(EXIT);
    let rows = comptime!(SUMS.elements());
    let unit = UNIT_POS as usize;
    let spans = time.div_ceil(span);
    let chain = cube / spans;
    let start = cube % spans * span;
    let state_at = cube * key * value;

    let mut pairs = SharedMemory::<f32>::new(comptime!(SPAN * SQUARE));
    let mut work = SharedMemory::<f32>::new(comptime!(WORK));
    let mut strength = SharedMemory::<f32>::new(span);
    let mut through = SharedMemory::<f32>::new(width);

    // The first units each look after one token's beta.
    let keeper = unit < span && start + unit < time;
    let keeper_at = token_at(chain, start + unit, time, heads, 1usize);
    let mut dbeta_sum = 0.0f32;
    if unit < span {
        strength[unit] = load_or_zero(beta, keeper_at, keeper);
    }

    // dP on and below the diagonal, dL above it.
    let mut products = Array::<f32>::new(comptime!(PAIRS.elements()));
    clear(&mut products, PAIRS);
    let y = tile::column(PAIRS);
    let x0 = tile::row(0usize, PAIRS);
    for block in 0..value.div_ceil(width) {
        let first = block * width;
        let live = (value - first).min(width);
        sync_cube();
        tile::load(d_o, &mut work, 0usize, chain, start, first, time, heads, value, TOKENS);
        tile::load(z, &mut work, second, chain, start, first, time, heads, value, TOKENS);
        tile::load(u, &mut work, third, chain, start, first, time, heads, value, TOKENS);
        sync_cube();
        for n in 0..live {
            let later = work[third + y * stride + n];
            let mut earlier = -work[second + y * stride + n];
            if comptime!(mutant == 9) {
                earlier = work[second + y * stride + n];
            }
            #[unroll]
            for e in 0..comptime!(PAIRS.elements()) {
                // dO_x . U_y, or -Z_y . U_x.
                let below = x0 + e >= y;
                let at = select(below, 0usize, third) + (x0 + e) * stride + n;
                products[e] += work[at] * select(below, later, earlier);
            }
        }
        if keeper {
            let v_at = token_at(chain, start + unit, time, heads, value) + first;
            for n in 0..live {
                dbeta_sum += v.at(v_at + n) * work[second + unit * stride + n];
            }
        }
    }
    #[unroll]
    for e in 0..comptime!(PAIRS.elements()) {
        let factor = select(x0 + e >= y, scale, 1.0f32);
        pairs[(x0 + e) * square + y] = factor * products[e];
    }

    let c = tile::column(SUMS);
    let i0 = tile::row(0usize, SUMS);
    let mut dq_sum = Array::<f32>::new(rows);
    let mut dr_sum = Array::<f32>::new(rows);
    let mut dk_sum = Array::<f32>::new(rows);
    let mut dg_sum = Array::<f32>::new(rows);
    let mut part = Array::<f32>::new(rows);
    let mut query = Array::<f32>::new(rows);
    let mut keys = Array::<f32>::new(rows);
    let mut factor = Array::<f32>::new(rows);
    for block in 0..key.div_ceil(width) {
        let channel = block * width;

        // What crosses the span's borders.
        clear(&mut dq_sum, SUMS);
        clear(&mut dr_sum, SUMS);
        clear(&mut dk_sum, SUMS);
        let mut through_sum = 0.0f32;
        for block in 0..value.div_ceil(width) {
            let first = block * width;
            let live = (value - first).min(width);
            sync_cube();
            tile::load(d_o, &mut work, 0usize, chain, start, first, time, heads, value, TOKENS);
            tile::load(z, &mut work, second, chain, start, first, time, heads, value, TOKENS);
            tile::load(u, &mut work, third, chain, start, first, time, heads, value, TOKENS);
            tile::load_state(states, &mut work, entry, state_at, channel, first, key, value, STATE);
            tile::load_state(dstates, &mut work, exit, state_at, channel, first, key, value, STATE);
            sync_cube();
            let tokens = comptime!(Strides { first: TOKENS.stride, second: 1 });
            let state_t = comptime!(Strides { first: 1, second: STATE.stride });
            multiply_add(&mut dq_sum, &work, 0usize, tokens, &work, entry, state_t, live, SUMS);
            multiply_add(&mut dr_sum, &work, second, tokens, &work, entry, state_t, live, SUMS);
            multiply_add(&mut dk_sum, &work, third, tokens, &work, exit, state_t, live, SUMS);
            if unit < width {
                for n in 0..live {
                    through_sum += work[entry + unit * stride + n] * work[exit + unit * stride + n];
                }
            }
        }
        sync_cube();
        tile::load(g, &mut work, 0usize, chain, start, channel, time, heads, key, TOKENS);
        #[unroll]
        for e in 0..rows {
            let there = start + i0 + e < time && channel + c < key;
            let at = token_at(chain, start + i0 + e, time, heads, key) + channel + c;
            query[e] = load_or_zero(q, at, there);
            keys[e] = load_or_zero(k, at, there);
        }
        sync_cube();
        if unit < width {
            if comptime!(mutant == 7) {
                through_sum = 0.0f32;
            }
            through[unit] = through_sum * tile::decay(&work, 0usize, span, unit, stride);
        }
        #[unroll]
        for e in 0..rows {
            let i = i0 + e;
            let from_entry = tile::decay(&work, 0usize, i + 1, c, stride);
            dq_sum[e] *= scale * from_entry;
            dr_sum[e] *= -from_entry;
            dk_sum[e] *= tile::decay(&work, i + 1, span, c, stride);
            work[second + i * stride + c] = query[e] * dq_sum[e] + strength[i] * keys[e] * dr_sum[e];
            work[third + i * stride + c] = keys[e] * dk_sum[e];
        }
        sync_cube();
        #[unroll]
        for e in 0..rows {
            let i = i0 + e;
            dg_sum[e] = through[c] + column_sum(&work, second, i, span, c) + column_sum(&work, third, 0usize, i, c);
            // A token paired with itself has decay 1, whatever g.
            dq_sum[e] += pairs[i * square + i] * keys[e];
            dk_sum[e] += pairs[i * square + i] * query[e];
        }

        let mut size = 1usize;
        for _level in 0..comptime!(LEVELS) {
            sync_cube();
            #[unroll]
            for e in 0..rows {
                let i = i0 + e;
                factor[e] = from_anchor(&work, c, i, size, stride).exp();
                let is_row = (i / size) % 2 == 1;
                work[second + i * stride + c] = select(is_row, strength[i], 1.0f32) * keys[e] * factor[e];
                work[third + i * stride + c] = query[e] * factor[e];
            }
            sync_cube();
            #[unroll]
            for e in 0..rows {
                let i = i0 + e;
                let first = i / size * size;
                let mut sum = 0.0f32;
                if (i / size) % 2 == 1 {
                    // A row: its partners are the block's columns.
                    let mut dr_part = 0.0f32;
                    for j in first - size..first {
                        let key_j = work[second + j * stride + c];
                        sum += pairs[i * square + j] * key_j;
                        dr_part += pairs[j * square + i] * key_j;
                    }
                    sum *= factor[e];
                    dr_part *= factor[e];
                    dq_sum[e] += sum;
                    dr_sum[e] += dr_part;
                    part[e] = query[e] * sum + strength[i] * keys[e] * dr_part;
                } else {
                    for n in first + size..first + 2 * size {
                        sum += pairs[n * square + i] * work[third + n * stride + c];
                        sum += pairs[i * square + n] * work[second + n * stride + c];
                    }
                    sum *= factor[e];
                    dk_sum[e] += sum;
                    part[e] = keys[e] * sum;
                }
            }
            sync_cube();
            #[unroll]
            for e in 0..rows {
                work[second + (i0 + e) * stride + c] = part[e];
            }
            sync_cube();
            #[unroll]
            for e in 0..rows {
                // Rows from t on for a row, columns before t for a column.
                let i = i0 + e;
                let first = i / size * size;
                let is_row = (i / size) % 2 == 1;
                let from = select(is_row, i, first);
                let to = select(is_row, first + size, i);
                if comptime!(mutant != 10) {
                    dg_sum[e] += column_sum(&work, second, from, to, c);
                }
            }
            size *= 2;
        }

        sync_cube();
        #[unroll]
        for e in 0..rows {
            let i = i0 + e;
            work[second + i * stride + c] = keys[e] * dr_sum[e];
            if start + i < time && channel + c < key {
                let at = token_at(chain, start + i, time, heads, key) + channel + c;
                dq.set(at, dq_sum[e]);
                let mut erase = strength[i];
                if comptime!(mutant == 8) {
                    erase = 1.0f32;
                }
                dk.set(at, dk_sum[e] + erase * dr_sum[e]);
                dg.set(at, dg_sum[e]);
            }
        }
        sync_cube();
        if unit < span {
            for n in 0..(key - channel).min(width) {
                dbeta_sum += work[second + unit * stride + n];
            }
        }
    }
    if keeper {
        dbeta.set(keeper_at, dbeta_sum);
    }
}

/// The sum of rows `from..to` of one channel of the tile at `at`.
#[cube]
fn column_sum(work: &SharedMemory<f32>, at: usize, from: usize, to: usize, channel: usize) -> f32 {
    let mut sum = 0.0f32;
    for i in from..to {
        sum += work[at + i * comptime!(TOKENS.stride) + channel];
    }
    sum
}
