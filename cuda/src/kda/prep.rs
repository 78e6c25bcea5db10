//! The part of a chunk that needs no state: P and T = (I + L)^-1.
//!
//! ```text
//! P_ij = sum_c q_ic k_jc e^{G_ic - G_jc}  (j <= i)      L_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc}  (j < i)
//! ```
//!
//! A cube is a chunk of a chain, a unit is a pair (x, y) of its tokens: for y <= x it computes P_xy, otherwise L_yx, so
//! that all of them have work. Channels are taken `BLOCK` at a time.
//!
//! e^{G_i - G_j} is the product of a factor of i and one of j. Two positions belong to the level of the highest bit they
//! differ in; there they lie on either side of an anchor m, a multiple of the level's size, and the factors are e^{G_i -
//! G_m} and e^{G_m - G_j}. Each is the exponential of a sum of g over the tokens between, so at most 1. See
//! `docs/kda.md` section 7.
//!
//! T is found column by column with forward substitution, x_i = [i = j] - sum_{m<i} L_im x_m, by one unit a column.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{CHUNK, Call, bytes, load_or_zero, token_at};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Channels that a cube looks at at a time.
const BLOCK: usize = 16;

/// Levels of a chunk: 1, 2, 4, 8.
const LEVELS: usize = CHUNK.trailing_zeros() as usize;

/// Units of a cube: one a pair.
const UNITS: usize = CHUNK * CHUNK;

/// P and T of every chunk, each `[B, H, chunks, CHUNK, CHUNK]` with zeros above the diagonal. In a short last chunk the
/// rows without a token are those of a token that is all zeros.
pub(super) struct Pairs {
    pub p: Tensor,
    pub t: Tensor,
}

/// Computes P and T.
pub(super) fn launch<R: Engine>(b: &Device<R>, call: &Call<'_>) -> Result<Pairs> {
    let Call { inputs, sizes, .. } = call;
    let shape = [sizes.batch, sizes.heads, sizes.chunks(), CHUNK, CHUNK];
    let pairs = Pairs { p: b.float_scratch(&shape)?, t: b.float_scratch(&shape)? };
    let cubes = sizes.chains() * sizes.chunks();
    let uses = [inputs.q, inputs.k, inputs.g, inputs.beta, &pairs.p, &pairs.t];
    let mutant = super::mutant(b, 1..=1);
    b.launch("kda::prep", Grid::cubes(cubes, UNITS as u32), bytes(uses), &uses, |client, count, dim| {
        let [q, k, g, beta, p, t] = uses.map(|t| b.floats(t));
        let (cubes, time, heads, key) = (cubes as u32, sizes.time, sizes.heads, sizes.key);
        // SAFETY: shapes were checked by the caller; tokens and channels that do not exist are not read.
        unsafe {
            prep_kernel::launch_unchecked::<R>(client, count, dim, q, k, g, beta, p, t, cubes, time, heads, key, mutant)
        }
    })?;
    Ok(pairs)
}

/// Mutants: 1 drops beta in L.
#[cube(launch_unchecked)]
fn prep_kernel(
    q: &Floats,
    k: &Floats,
    g: &Floats,
    beta: &Floats,
    p: &mut Floats,
    t: &mut Floats,
    cubes: u32,
    time: usize,
    heads: usize,
    key: usize,
    #[comptime] mutant: u32,
) {
    let cube = CUBE_POS;
    if cube >= cubes as usize {
        terminate!();
    }
    let size = comptime!(CHUNK);
    let width = comptime!(BLOCK);
    let stride = comptime!(BLOCK + 1);
    let square = comptime!(CHUNK + 1);
    let unit = UNIT_POS as usize;
    let chunks = time.div_ceil(size);
    let chain = cube / chunks;
    let start = cube % chunks * size;
    // As a loader this unit is token x and channel y of a block, as a worker the pair (x, y).
    let x = unit / size;
    let y = unit % size;
    let alive = start + x < time;
    let at = token_at(chain, start + x, time, heads, key);

    let mut query = SharedMemory::<f32>::new(comptime!(CHUNK * (BLOCK + 1)));
    let mut keys = SharedMemory::<f32>::new(comptime!(CHUNK * (BLOCK + 1)));
    let mut gate = SharedMemory::<f32>::new(comptime!(CHUNK * (BLOCK + 1)));
    let mut factor = SharedMemory::<f32>::new(comptime!(LEVELS * CHUNK * (BLOCK + 1)));
    let mut lower = SharedMemory::<f32>::new(comptime!(CHUNK * (CHUNK + 1)));
    let mut inverse = SharedMemory::<f32>::new(comptime!(CHUNK * (CHUNK + 1)));

    // The later and the earlier token of the pair, and the level of the highest bit they differ in.
    let later = x.max(y);
    let earlier = x.min(y);
    let mut level = 0usize;
    #[unroll]
    for n in 0..comptime!(LEVELS) {
        if x / comptime!(1usize << n) != y / comptime!(1 << n) {
            level = n;
        }
    }
    let later_factor = (level * size + later) * stride;
    let earlier_factor = (level * size + earlier) * stride;
    let mut sum = 0.0f32;
    for block in 0..key.div_ceil(width) {
        let c = block * width + y;
        let there = alive && c < key;
        sync_cube();
        query[x * stride + y] = load_or_zero(q, at + c, there);
        keys[x * stride + y] = load_or_zero(k, at + c, there);
        gate[x * stride + y] = load_or_zero(g, at + c, there);
        sync_cube();
        #[unroll]
        for n in 0..comptime!(LEVELS) {
            let exponent = from_anchor(&gate, y, x, comptime!(1usize << n).runtime(), stride);
            factor[(n * size + x) * stride + y] = exponent.exp();
        }
        sync_cube();
        for c in 0..width {
            let mut decay = factor[later_factor + c] * factor[earlier_factor + c];
            if x == y {
                // A token paired with itself has decay 1, whatever g.
                decay = 1.0f32;
            }
            let mut sink = keys[later * stride + c];
            if y <= x {
                sink = query[later * stride + c];
            }
            sum += sink * keys[earlier * stride + c] * decay;
        }
    }
    let out = cube * comptime!(CHUNK * CHUNK);
    if y <= x {
        p.set(out + x * size + y, sum);
    } else {
        let strength = load_or_zero(beta, token_at(chain, start + y, time, heads, 1usize), start + y < time);
        let mut entry = strength * sum;
        if comptime!(mutant == 1) {
            entry = sum;
        }
        lower[y * square + x] = entry;
        p.set(out + x * size + y, 0.0f32);
    }
    sync_cube();
    if unit < size {
        for i in 0..size {
            let mut solved = 0.0f32;
            if i == unit {
                solved = 1.0f32;
            }
            for m in unit..i {
                solved -= lower[i * square + m] * inverse[m * square + unit];
            }
            inverse[i * square + unit] = solved;
        }
    }
    sync_cube();
    let mut entry = 0.0f32;
    if y <= x {
        entry = inverse[x * square + y];
    }
    t.set(out + x * size + y, entry);
}

/// The sum of g between position `i` and the anchor of its block at the level of blocks of `size` tokens.
///
/// Where i is a row (its bit of the level is set) the anchor m is its block's first position and the sum is over m+1..=i.
/// Where it is a column the anchor is the first position of the next block and the sum is over i+1..=m.
#[cube]
pub(crate) fn from_anchor(
    gate: &SharedMemory<f32>,
    channel: usize,
    i: usize,
    size: usize,
    #[comptime] stride: usize,
) -> f32 {
    let first = i / size * size;
    let mut from = i + 1;
    let mut to = first + size + 1;
    if (i / size) % 2 == 1 {
        from = first + 1;
        to = i + 1;
    }
    let mut sum = 0.0f32;
    for n in from..to {
        sum += gate[n * stride + channel];
    }
    sum
}
