//! The part of a chunk that needs no state, for both passes: P, T = (I + L)^-1, and the rows that meet the state.
//!
//! ```text
//! P_ij = sum_c q_ic k_jc e^{G_ic - G_jc}  (j <= i)      L_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc}  (j < i)
//! Qt_i = q_i e^{G_i}               Rt_i = beta_i k_i e^{G_i}               Kb_j = k_j e^{G_n - G_j}
//! ```
//!
//! A cube is a chunk of a chain, a unit is a pair (x, y) of its tokens: for y <= x it computes P_xy, otherwise L_yx, so
//! that all of them have work. Channels are taken `BLOCK` at a time.
//!
//! e^{G_i - G_j} is the product of a factor of i and one of j. Two positions belong to the level of the highest bit they
//! differ in; there they lie on either side of an anchor m, a multiple of the level's size, and the factors are e^{G_i -
//! G_m} and e^{G_m - G_j}. Each is the exponential of a sum of g over the tokens between, so at most 1. See
//! `docs/kda.md` section 7. The rows are multiplied by their factors once a level, before the pairs are summed.
//!
//! T is found column by column with forward substitution, x_i = [i = j] - sum_{m<i} L_im x_m, by one unit a column.
//!
//! All of this is f32 at every precision: the blocks are too small for matrix units, and T amplifies what went into L.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{CHUNK, Call, bytes, load_or_zero, tile, token_at};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Channels that a cube looks at at a time.
const BLOCK: usize = CHUNK;

/// From one token to the next in shared memory.
const STRIDE: usize = BLOCK + 1;

/// Levels of a chunk: 1, 2, 4, 8.
const LEVELS: usize = CHUNK.trailing_zeros() as usize;

/// One block of channels of all tokens.
const SLICE: usize = CHUNK * STRIDE;

/// Where keys lie behind queries: a slice for every level, and one without factors.
const KEYS: usize = (LEVELS + 1) * SLICE;

/// Units of a cube: one a pair.
const UNITS: usize = CHUNK * CHUNK;

/// What a chunk brings to the state. In a short last chunk the rows without a token are those of a token that is all
/// zeros.
pub(super) struct Chunks {
    /// `[B, H, chunks, CHUNK, CHUNK]` with zeros above the diagonal.
    pub p: Tensor,
    /// The same.
    pub t: Tensor,
    /// Qt, `[B, H, chunks, CHUNK, K]`.
    pub reads: Tensor,
    /// Rt, the same.
    pub erases: Tensor,
    /// Kb, the same.
    pub writes: Tensor,
    /// e^{G_n}, `[B, H, chunks, K]`.
    pub through: Tensor,
}

impl Chunks {
    pub fn tensors(&self) -> [&Tensor; 6] {
        [&self.p, &self.t, &self.reads, &self.erases, &self.writes, &self.through]
    }
}

/// Computes them.
pub(super) fn launch<R: Engine>(b: &Device<R>, call: &Call<'_>) -> Result<Chunks> {
    let Call { inputs, sizes, .. } = call;
    let cubes = sizes.chains() * sizes.chunks();
    let pairs = || b.float_scratch(&[cubes, CHUNK, CHUNK]);
    let rows = || b.float_scratch(&[cubes, CHUNK, sizes.key]);
    let chunks = Chunks {
        p: pairs()?,
        t: pairs()?,
        reads: rows()?,
        erases: rows()?,
        writes: rows()?,
        through: b.float_scratch(&[cubes, sizes.key])?,
    };
    let mut uses = vec![inputs.q, inputs.k, inputs.g, inputs.beta];
    uses.extend(chunks.tensors());
    let mutant = super::mutant(b, 1..=1);
    let grid = Grid::cubes(cubes, UNITS as u32);
    b.launch("kda::prep", grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        let [p, t, reads, erases, writes, through] = chunks.tensors().map(|t| b.floats(t));
        let (q, k, g, beta) = (b.floats(inputs.q), b.floats(inputs.k), b.floats(inputs.g), b.floats(inputs.beta));
        let (cubes, time, heads, key) = (cubes as u32, sizes.time, sizes.heads, sizes.key);
        // SAFETY: shapes were checked by the caller; tokens and channels that do not exist are not touched.
        unsafe {
            prep_kernel::launch_unchecked::<R>(
                client, count, dim, q, k, g, beta, p, t, reads, erases, writes, through, cubes, time, heads, key,
                mutant,
            )
        }
    })?;
    Ok(chunks)
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
    reads: &mut Floats,
    erases: &mut Floats,
    writes: &mut Floats,
    through: &mut Floats,
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
    let stride = comptime!(STRIDE);
    let slice = comptime!(SLICE);
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
    let out_row = (cube * size + x) * key;

    // Queries, then keys.
    let mut scaled = SharedMemory::<f32>::new(comptime!(2 * KEYS));
    let mut gate = SharedMemory::<f32>::new(comptime!(SLICE));
    let mut strength = SharedMemory::<f32>::new(size);
    let mut lower = SharedMemory::<f32>::new(comptime!(CHUNK * (CHUNK + 1)));
    let mut inverse = SharedMemory::<f32>::new(comptime!(CHUNK * (CHUNK + 1)));
    if unit < size {
        let there = start + unit < time;
        strength[unit] = load_or_zero(beta, token_at(chain, start + unit, time, heads, 1usize), there);
    }

    // The level of the highest bit that x and y differ in; a token paired with itself has decay 1, whatever g.
    let mut level = comptime!(LEVELS).runtime();
    #[unroll]
    for n in 0..comptime!(LEVELS) {
        if x / comptime!(1usize << n) != y / comptime!(1usize << n) {
            level = comptime!(n).runtime();
        }
    }
    let sink_of = select(y <= x, 0usize, comptime!(KEYS).runtime());
    let sink_at = sink_of + level * slice + x.max(y) * stride;
    let source_at = comptime!(KEYS) + level * slice + x.min(y) * stride;
    let mut sum = 0.0f32;
    for block in 0..key.div_ceil(width) {
        let c = block * width + y;
        let there = alive && c < key;
        let query = load_or_zero(q, at + c, there);
        let keys = load_or_zero(k, at + c, there);
        sync_cube();
        gate[x * stride + y] = load_or_zero(g, at + c, there);
        sync_cube();
        let here = x * stride + y;
        #[unroll]
        for n in 0..comptime!(LEVELS) {
            let factor = from_anchor(&gate, y, x, comptime!(1usize << n).runtime(), stride).exp();
            scaled[comptime!(n * SLICE) + here] = query * factor;
            scaled[comptime!(KEYS + n * SLICE) + here] = keys * factor;
        }
        scaled[comptime!(LEVELS * SLICE) + here] = query;
        scaled[comptime!(KEYS + LEVELS * SLICE) + here] = keys;
        if c < key {
            let from_entry = tile::decay(&gate, 0usize, x + 1, y, stride);
            let to_end = tile::decay(&gate, x + 1, size, y, stride);
            reads.set(out_row + c, query * from_entry);
            erases.set(out_row + c, strength[x] * keys * from_entry);
            writes.set(out_row + c, keys * to_end);
            if x == size - 1 {
                through.set(cube * key + c, from_entry);
            }
        }
        sync_cube();
        for c in 0..width {
            sum += scaled[sink_at + c] * scaled[source_at + c];
        }
    }
    let out = cube * comptime!(CHUNK * CHUNK);
    if y <= x {
        p.set(out + x * size + y, sum);
    } else {
        let mut entry = strength[y] * sum;
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
