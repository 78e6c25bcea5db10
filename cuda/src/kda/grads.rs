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
use super::tile::{self, Factors, Math, Part, Strides, Tile, clear, fragment_row, multiply_add};
use super::{Call, Fused, SPAN, Sizes, bytes, load_or_zero, token_at, widest};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Channels of a block.
const CHANNELS: usize = 16;

/// Units of a cube.
const UNITS: usize = 256;

/// Levels of a span: blocks of 1, 2, .., SPAN / 2 tokens.
const LEVELS: usize = SPAN.trailing_zeros() as usize;

/// Tokens of the smallest blocks whose pairs are products for matrix units.
const BLOCK: usize = 16;

/// Tokens whose sum is formed once a channel, so that a sum over many tokens need not visit each of them.
const SEGMENT: usize = 16;

/// Sums of segments in a block of channels.
const SEGMENT_SUMS: usize = SPAN / SEGMENT * CHANNELS;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Value columns of a block.
    values: usize,
    math: Math,
}

impl Plan {
    /// Takes as many value columns as V has and as fit.
    fn new<R: Engine>(b: &Device<R>, kernel: &'static str, sizes: &Sizes, math: Math) -> Result<Self> {
        let widths: Vec<usize> = [32, 16].into_iter().filter(|&w| w == 16 || w / 2 < sizes.value).collect();
        let values = widest(b, kernel, &widths, |values| Self { values, math }.bytes())?;
        Ok(Self { values, math })
    }

    /// Bytes of shared memory of a cube.
    fn bytes(self) -> usize {
        4 * (SPAN * self.square() + self.work() + SPAN + CHANNELS + 2 * SEGMENT_SUMS)
    }

    /// From one token to the next in the square of pairs.
    const fn square(self) -> usize {
        SPAN + self.math.padding()
    }

    /// A `[SPAN, values]` tile.
    const fn by_value(self) -> Part {
        Part { rows: SPAN, columns: self.values, stride: self.values + self.math.padding(), units: UNITS }
    }

    /// A `[SPAN, CHANNELS]` tile.
    const fn by_channel(self) -> Part {
        Part { rows: SPAN, columns: CHANNELS, stride: CHANNELS + self.math.padding(), units: UNITS }
    }

    /// A `[CHANNELS, values]` tile of a state.
    const fn of_state(self) -> Part {
        Part { rows: CHANNELS, columns: self.values, stride: self.values + self.math.padding(), units: UNITS }
    }

    /// The work area: three tiles of value columns and two of states, later three tiles of channels.
    const fn work(self) -> usize {
        let values = 3 * self.by_value().len() + 2 * self.of_state().len();
        let channels = 3 * self.by_channel().len();
        if values > channels { values } else { channels }
    }

    /// The `[SPAN, CHANNELS]` sums of a block of channels.
    const fn sums(self) -> Tile {
        Tile { rows: SPAN, columns: CHANNELS, units: UNITS, math: self.math }
    }

    /// The square of pairs.
    const fn pairs(self) -> Tile {
        Tile { rows: SPAN, columns: SPAN, units: UNITS, math: self.math }
    }

    /// Rows of tokens times rows of tokens: a product over the value columns.
    const fn over_values(self) -> Factors {
        let stride = self.by_value().stride;
        let (a, b) = (Strides { first: stride, second: 1 }, Strides { first: 1, second: stride });
        Factors { a, b, inner: self.values }
    }

    /// Rows of tokens times rows of a state.
    const fn with_state(self) -> Factors {
        let a = Strides { first: self.by_value().stride, second: 1 };
        let b = Strides { first: 1, second: self.of_state().stride };
        Factors { a, b, inner: self.values }
    }

    /// Rows of the square times rows of channels.
    const fn with_pairs(self) -> Factors {
        let a = Strides { first: self.square(), second: 1 };
        Factors { a, b: Strides { first: self.by_channel().stride, second: 1 }, inner: BLOCK }
    }

    /// Columns of the square times rows of channels.
    const fn with_pairs_turned(self) -> Factors {
        let a = Strides { first: 1, second: self.square() };
        Factors { a, b: Strides { first: self.by_channel().stride, second: 1 }, inner: BLOCK }
    }
}

/// Writes dq, dk, dg and dbeta; [`super::dstate`] has written dv and the gradient of the initial state.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    fused: &Fused,
    passed: &Passed,
    d_o: &Tensor,
    grads: Grads<&Tensor>,
) -> Result<()> {
    const NAME: &str = "kda::grads";
    let Call { inputs, sizes, scale, math } = call;
    let plan = Plan::new(b, NAME, sizes, *math)?;
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
    b.launch(NAME, Grid::cubes(cubes, UNITS as u32), bytes(uses), &uses, |client, count, dim| {
        let [q, k, v, g, beta, u, z, d_o, states, dstates, dq, dk, dg, dbeta] = uses.map(|t| b.floats(t));
        let (cubes, scale, time, heads) = (cubes as u32, *scale, sizes.time, sizes.heads);
        let (key, value) = (sizes.key, sizes.value);
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            grads_kernel::launch_unchecked::<R>(
                client, count, dim, q, k, v, g, beta, u, z, d_o, states, dstates, dq, dk, dg, dbeta, scale, cubes,
                time, heads, key, value, plan, mutant,
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
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let cube = CUBE_POS;
    if cube >= cubes as usize {
        terminate!();
    }
    let span = comptime!(SPAN);
    let square = comptime!(plan.square());
    let width = comptime!(CHANNELS);
    let by_value = comptime!(plan.by_value());
    let by_channel = comptime!(plan.by_channel());
    let of_state = comptime!(plan.of_state());
    let sums = comptime!(plan.sums());
    let all_pairs = comptime!(plan.pairs());
    let values = plan.values;
    // Where tiles lie in the work area while it holds value columns: three of tokens, two of states.
    let stride = comptime!(by_value.stride);
    let second = comptime!(by_value.len());
    let third = comptime!(2 * by_value.len());
    let entry = comptime!(3 * by_value.len());
    let exit = comptime!(3 * by_value.len() + of_state.len());
    let state_stride = comptime!(of_state.stride);
    let rows = comptime!(sums.elements());
    let unit = UNIT_POS as usize;
    let spans = time.div_ceil(span);
    let chain = cube / spans;
    let start = cube % spans * span;
    let state_at = cube * key * value;

    let mut pairs = SharedMemory::<f32>::new(comptime!(SPAN * plan.square()));
    let mut work = SharedMemory::<f32>::new(comptime!(plan.work()));
    let mut strength = SharedMemory::<f32>::new(span);
    let mut through = SharedMemory::<f32>::new(width);
    // Of the gates, then of A; and of B.
    let mut segments = SharedMemory::<f32>::new(comptime!(SEGMENT_SUMS));
    let mut segments_of_b = SharedMemory::<f32>::new(comptime!(SEGMENT_SUMS));

    // The first units each look after one token's beta.
    let keeper = unit < span && start + unit < time;
    let keeper_at = token_at(chain, start + unit, time, heads, 1usize);
    let mut dbeta_sum = 0.0f32;
    if unit < span {
        strength[unit] = load_or_zero(beta, keeper_at, keeper);
    }

    // dP on and below the diagonal, dL above it.
    let mut products = Array::<f32>::new(comptime!(all_pairs.elements()));
    let mut others = Array::<f32>::new(comptime!(all_pairs.elements()));
    clear(&mut products, all_pairs);
    clear(&mut others, all_pairs);
    for block in 0..value.div_ceil(values) {
        let first = block * values;
        let live = (value - first).min(values);
        sync_cube();
        tile::load(d_o, &mut work, 0usize, chain, start, first, time, heads, value, by_value);
        tile::load(z, &mut work, second, chain, start, first, time, heads, value, by_value);
        tile::load(u, &mut work, third, chain, start, first, time, heads, value, by_value);
        sync_cube();
        if comptime!(plan.math.fragments()) {
            // dO_x . U_y and U_x . Z_y for all pairs: whole fragments, of which few hold both kinds.
            let over_values = comptime!(plan.over_values());
            multiply_add(&mut products, &work, 0usize, &work, third, live, over_values, all_pairs);
            multiply_add(&mut others, &work, third, &work, second, live, over_values, all_pairs);
        } else {
            let y = tile::column(0usize, all_pairs);
            let x0 = tile::row(0usize, all_pairs);
            for n in 0..live {
                let later = work[third + y * stride + n];
                let earlier = work[second + y * stride + n];
                #[unroll]
                for e in 0..comptime!(all_pairs.elements()) {
                    // dO_x . U_y, or U_x . Z_y.
                    let below = x0 + e >= y;
                    let at = select(below, 0usize, third) + (x0 + e) * stride + n;
                    products[e] += work[at] * select(below, later, earlier);
                }
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
    for e in 0..comptime!(all_pairs.elements()) {
        let x = tile::row(e, all_pairs);
        let y = tile::column(e, all_pairs);
        let mut pair = scale * products[e];
        if x < y {
            pair = -products[e];
            if comptime!(plan.math.fragments()) {
                pair = -others[e];
            }
            if comptime!(mutant == 9) {
                pair *= -1.0f32;
            }
        }
        pairs[x * square + y] = pair;
    }

    let mut dq_sum = Array::<f32>::new(rows);
    let mut dr_sum = Array::<f32>::new(rows);
    let mut dk_sum = Array::<f32>::new(rows);
    let mut dg_sum = Array::<f32>::new(rows);
    let mut part = Array::<f32>::new(rows);
    let mut turned = Array::<f32>::new(rows);
    let mut query = Array::<f32>::new(rows);
    let mut keys = Array::<f32>::new(rows);
    let mut factor = Array::<f32>::new(rows);
    for block in 0..key.div_ceil(width) {
        let channel = block * width;

        // What crosses the span's borders.
        clear(&mut dq_sum, sums);
        clear(&mut dr_sum, sums);
        clear(&mut dk_sum, sums);
        let mut through_sum = 0.0f32;
        for block in 0..value.div_ceil(values) {
            let first = block * values;
            let live = (value - first).min(values);
            sync_cube();
            tile::load(d_o, &mut work, 0usize, chain, start, first, time, heads, value, by_value);
            tile::load(z, &mut work, second, chain, start, first, time, heads, value, by_value);
            tile::load(u, &mut work, third, chain, start, first, time, heads, value, by_value);
            tile::load_state(states, &mut work, entry, state_at, channel, first, key, value, of_state);
            tile::load_state(dstates, &mut work, exit, state_at, channel, first, key, value, of_state);
            sync_cube();
            let with_state = comptime!(plan.with_state());
            multiply_add(&mut dq_sum, &work, 0usize, &work, entry, live, with_state, sums);
            multiply_add(&mut dr_sum, &work, second, &work, entry, live, with_state, sums);
            multiply_add(&mut dk_sum, &work, third, &work, exit, live, with_state, sums);
            if unit < width {
                for n in 0..live {
                    through_sum += work[entry + unit * state_stride + n] * work[exit + unit * state_stride + n];
                }
            }
        }
        sync_cube();
        // From here on the work area holds channels: the gates, then two tiles for what is being summed.
        let stride = comptime!(by_channel.stride);
        let second = comptime!(by_channel.len());
        let third = comptime!(2 * by_channel.len());
        tile::load(g, &mut work, 0usize, chain, start, channel, time, heads, key, by_channel);
        #[unroll]
        for e in 0..rows {
            let t = start + tile::row(e, sums);
            let c = channel + tile::column(e, sums);
            let there = t < time && c < key;
            let at = token_at(chain, t, time, heads, key) + c;
            query[e] = load_or_zero(q, at, there);
            keys[e] = load_or_zero(k, at, there);
        }
        sync_cube();
        if unit < comptime!(SEGMENT_SUMS) {
            segments[unit] = segment_sum(&work, 0usize, unit, stride);
        }
        sync_cube();
        if unit < width {
            if comptime!(mutant == 7) {
                through_sum = 0.0f32;
            }
            through[unit] = through_sum * sum_before(&work, 0usize, &segments, span, unit, stride).exp();
        }
        #[unroll]
        for e in 0..rows {
            let i = tile::row(e, sums);
            let c = tile::column(e, sums);
            let from_entry = sum_before(&work, 0usize, &segments, i + 1, c, stride).exp();
            dq_sum[e] *= scale * from_entry;
            dr_sum[e] *= -from_entry;
            dk_sum[e] *= sum_from(&work, 0usize, &segments, i + 1, c, stride).exp();
            work[second + i * stride + c] = query[e] * dq_sum[e] + strength[i] * keys[e] * dr_sum[e];
            work[third + i * stride + c] = keys[e] * dk_sum[e];
        }
        sync_cube();
        if unit < comptime!(SEGMENT_SUMS) {
            segments[unit] = segment_sum(&work, second, unit, stride);
        } else if unit < comptime!(2 * SEGMENT_SUMS) {
            let other = unit - comptime!(SEGMENT_SUMS);
            segments_of_b[other] = segment_sum(&work, third, other, stride);
        }
        sync_cube();
        #[unroll]
        for e in 0..rows {
            let i = tile::row(e, sums);
            let c = tile::column(e, sums);
            let later = sum_from(&work, second, &segments, i, c, stride);
            let earlier = sum_before(&work, third, &segments_of_b, i, c, stride);
            dg_sum[e] = through[c] + later + earlier;
            // A token paired with itself has decay 1, whatever g.
            dq_sum[e] += pairs[i * square + i] * keys[e];
            dk_sum[e] += pairs[i * square + i] * query[e];
        }

        let mut size = 1usize;
        for _level in 0..comptime!(LEVELS) {
            sync_cube();
            #[unroll]
            for e in 0..rows {
                let i = tile::row(e, sums);
                let c = tile::column(e, sums);
                factor[e] = from_anchor(&work, c, i, size, stride).exp();
                let is_row = (i / size) % 2 == 1;
                work[second + i * stride + c] = select(is_row, strength[i], 1.0f32) * keys[e] * factor[e];
                work[third + i * stride + c] = query[e] * factor[e];
            }
            sync_cube();
            // For a row: dP k and dL k over the block's columns. For a column: dL r and dP q over its rows.
            clear(&mut part, sums);
            clear(&mut turned, sums);
            if comptime!(plan.math.fragments()) {
                if size >= comptime!(BLOCK) {
                    // All rows of a fragment are on the same side of the same block.
                    let first = fragment_row(sums) / size * size;
                    let is_row = (first / size) % 2 == 1;
                    let from = select(is_row, first - size, first + size);
                    let other = select(is_row, second.runtime(), third.runtime());
                    for step in 0..size / comptime!(BLOCK) {
                        let n = from + step * comptime!(BLOCK);
                        let live = comptime!(BLOCK).runtime();
                        let straight = comptime!(plan.with_pairs());
                        multiply_add(&mut part, &pairs, n, &work, second + n * stride, live, straight, sums);
                        let across = comptime!(plan.with_pairs_turned());
                        multiply_add(&mut turned, &pairs, n * square, &work, other + n * stride, live, across, sums);
                    }
                } else {
                    near_pairs(&mut part, &mut turned, &pairs, &work, size, plan);
                }
            } else {
                near_pairs(&mut part, &mut turned, &pairs, &work, size, plan);
            }
            #[unroll]
            for e in 0..rows {
                let i = tile::row(e, sums);
                if (i / size) % 2 == 1 {
                    let sum = factor[e] * part[e];
                    let dr_part = factor[e] * turned[e];
                    dq_sum[e] += sum;
                    dr_sum[e] += dr_part;
                    part[e] = query[e] * sum + strength[i] * keys[e] * dr_part;
                } else {
                    let sum = factor[e] * (part[e] + turned[e]);
                    dk_sum[e] += sum;
                    part[e] = keys[e] * sum;
                }
            }
            sync_cube();
            #[unroll]
            for e in 0..rows {
                work[second + tile::row(e, sums) * stride + tile::column(e, sums)] = part[e];
            }
            sync_cube();
            #[unroll]
            for e in 0..rows {
                // Rows from t on for a row, columns before t for a column.
                let i = tile::row(e, sums);
                let first = i / size * size;
                let is_row = (i / size) % 2 == 1;
                let from = select(is_row, i, first);
                let to = select(is_row, first + size, i);
                if comptime!(mutant != 10) {
                    dg_sum[e] += column_sum(&work, second, from, to, tile::column(e, sums), stride);
                }
            }
            size *= 2;
        }

        sync_cube();
        #[unroll]
        for e in 0..rows {
            let i = tile::row(e, sums);
            let c = tile::column(e, sums);
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

/// One level's sums over the pairs of small blocks, in f32.
#[cube]
fn near_pairs(
    straight: &mut Array<f32>,
    turned: &mut Array<f32>,
    pairs: &SharedMemory<f32>,
    work: &SharedMemory<f32>,
    size: usize,
    #[comptime] plan: Plan,
) {
    let square = comptime!(plan.square());
    let stride = comptime!(plan.by_channel().stride);
    let second = comptime!(plan.by_channel().len());
    let third = comptime!(2 * plan.by_channel().len());
    let sums = comptime!(plan.sums());
    #[unroll]
    for e in 0..comptime!(sums.elements()) {
        let i = tile::row(e, sums);
        let c = tile::column(e, sums);
        let first = i / size * size;
        let is_row = (i / size) % 2 == 1;
        let from = select(is_row, first - size, first + size);
        let other = select(is_row, second.runtime(), third.runtime());
        let mut sum = 0.0f32;
        let mut across = 0.0f32;
        for n in from..from + size {
            sum += pairs[i * square + n] * work[second + n * stride + c];
            across += pairs[n * square + i] * work[other + n * stride + c];
        }
        straight[e] = sum;
        turned[e] = across;
    }
}

/// The sum of segment `number / CHANNELS` in channel `number % CHANNELS` of the tile at `at`.
#[cube]
fn segment_sum(work: &SharedMemory<f32>, at: usize, number: usize, #[comptime] stride: usize) -> f32 {
    let from = number / comptime!(CHANNELS) * comptime!(SEGMENT);
    column_sum(work, at, from, from + comptime!(SEGMENT), number % comptime!(CHANNELS), stride)
}

/// The sum of rows before `to` of one channel of the tile at `at`: whole segments, then rows.
#[cube]
fn sum_before(
    work: &SharedMemory<f32>,
    at: usize,
    segments: &SharedMemory<f32>,
    to: usize,
    channel: usize,
    #[comptime] stride: usize,
) -> f32 {
    let whole = to / comptime!(SEGMENT);
    let mut sum = 0.0f32;
    for n in 0..whole {
        sum += segments[n * comptime!(CHANNELS) + channel];
    }
    sum + column_sum(work, at, whole * comptime!(SEGMENT), to, channel, stride)
}

/// The sum of rows from `from` on: rows, then whole segments.
#[cube]
fn sum_from(
    work: &SharedMemory<f32>,
    at: usize,
    segments: &SharedMemory<f32>,
    from: usize,
    channel: usize,
    #[comptime] stride: usize,
) -> f32 {
    let next = from.div_ceil(comptime!(SEGMENT));
    let mut sum = column_sum(work, at, from, next * comptime!(SEGMENT), channel, stride);
    for n in next..comptime!(SPAN / SEGMENT) {
        sum += segments[n * comptime!(CHANNELS) + channel];
    }
    sum
}

/// The sum of rows `from..to` of one channel of the tile at `at`.
#[cube]
fn column_sum(
    work: &SharedMemory<f32>,
    at: usize,
    from: usize,
    to: usize,
    channel: usize,
    #[comptime] stride: usize,
) -> f32 {
    let mut sum = 0.0f32;
    for i in from..to {
        sum += work[at + i * stride + channel];
    }
    sum
}
