//! The part of a chunk that needs no state, for both passes: P, T = (I + L)^-1, and the rows that meet the state.
//!
//! ```text
//! P_ij = sum_c q_ic k_jc e^{G_ic - G_jc}  (j <= i)      L_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc}  (j < i)
//! Qt_i = q_i e^{G_i}               Rt_i = beta_i k_i e^{G_i}               Kb_j = k_j e^{G_n - G_j}
//! ```
//!
//! With an erase gate b_i * k_i stands where beta_i k_i does, in L inside the sum.
//!
//! A cube is a chunk of a chain. Channels are taken a block at a time, and twice: first a unit is one channel of half the
//! chunk and keeps its gates in registers, then a unit is one or more pairs (x, y) of tokens. For y <= x a pair stands for
//! P_xy, otherwise for L_yx, so that all of them have work.
//!
//! e^{G_i - G_j} is the product of a factor of i and one of j. Two positions belong to the level of the highest bit they
//! differ in; there i lies in the second half of a block and j in the first, and with the anchor at the last position of
//! the first half the factors are e^{sum of g from the second half on up to i} and e^{sum of g behind j up to the first
//! half's end}, both at most 1. See `docs/kda.md` section 7. The rows are multiplied by their factors once a level,
//! before the pairs are summed.
//!
//! T is found column by column with forward substitution, x_i = [i = j] - sum_{m<i} L_im x_m, by one unit a column.
//!
//! All of this is f32 at every precision: the blocks are too small for matrix units, and T amplifies what went into L.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::chain::{Cuts, Group, chain_of_keys, cuts, group, piece_of_chain};
use super::{CHUNK, Call, bytes, load_or_zero, optional, widest};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Tokens that a unit looks after in its channel.
const HALF: usize = CHUNK / 2;

/// Levels of a chunk: 1, 2, 4, 8.
const LEVELS: usize = CHUNK.trailing_zeros() as usize;

/// Units of a cube: two a channel of the widest block.
const UNITS: usize = 128;

/// From one row to the next in a square of pairs.
const SQUARE: usize = CHUNK + 1;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Channels of a block.
    channels: usize,
    /// Whether loops over a chunk's tokens are unrolled, so that their arrays are registers. The software driver takes
    /// half a minute to compile them.
    unroll: bool,
    /// Whether there is an erase gate.
    gated: bool,
}

impl Plan {
    fn new<R: Engine>(b: &Device<R>, kernel: &'static str, call: &Call<'_>) -> Result<Self> {
        let (key, gated) = (call.sizes.key, call.inputs.b.is_some());
        let plan = |channels| Self { channels, unroll: b.matrix_units(), gated };
        let widths: Vec<usize> = [64, 32, 16].into_iter().filter(|&width| width == 16 || width / 2 < key).collect();
        widest(b, kernel, &widths, |channels| plan(channels).bytes()).map(plan)
    }

    /// Bytes of shared memory of a cube: queries and keys, L, and beta.
    fn bytes(self) -> usize {
        4 * (2 * self.keys() + CHUNK * SQUARE + CHUNK)
    }

    /// From one token to the next; odd, so that the rows of pairs meet in few banks.
    const fn stride(self) -> usize {
        self.channels + 1
    }

    /// A block of channels of all tokens.
    const fn slice(self) -> usize {
        CHUNK * self.stride()
    }

    /// Where keys lie behind queries: a slice for every level, and one without factors.
    const fn keys(self) -> usize {
        (LEVELS + 1) * self.slice()
    }
}

/// What a chunk brings to the state. In a short last chunk the rows without a token are those of a token that is all
/// zeros.
pub(super) struct Chunks {
    /// `[chunks of all chains, CHUNK, CHUNK]` with zeros above the diagonal.
    pub p: Tensor,
    /// The same.
    pub t: Tensor,
    /// Qt, `[chunks of all chains, CHUNK, K]`.
    pub reads: Tensor,
    /// Rt, the same.
    pub erases: Tensor,
    /// Kb, the same.
    pub writes: Tensor,
    /// e^{G_n}, `[chunks of all chains, K]`.
    pub through: Tensor,
}

impl Chunks {
    pub fn tensors(&self) -> [&Tensor; 6] {
        [&self.p, &self.t, &self.reads, &self.erases, &self.writes, &self.through]
    }
}

/// Computes them.
pub(super) fn launch<R: Engine>(b: &Device<R>, call: &Call<'_>) -> Result<Chunks> {
    const NAME: &str = "kda::prep";
    let Call { inputs, sizes, .. } = call;
    let cubes = sizes.pieces(CHUNK);
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
    uses.extend(inputs.b);
    uses.extend(inputs.cu_seqlens);
    let plan = Plan::new(b, NAME, call)?;
    let mutant = super::mutant(b, &[1, 11, 12]);
    let grid = Grid::cubes(cubes, UNITS as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        let [p, t, reads, erases, writes, through] = chunks.tensors().map(|t| b.floats(t));
        let (q, k, g, beta) = (b.floats(inputs.q), b.floats(inputs.k), b.floats(inputs.g), b.floats(inputs.beta));
        let (erase, group, cuts) = (optional(b, inputs.b), group(call), cuts(b, call));
        let (cubes, time, heads, key) = (cubes as u32, sizes.time, sizes.heads, sizes.key);
        // SAFETY: shapes were checked by the caller; tokens and channels that do not exist are not touched.
        unsafe {
            prep_kernel::launch_unchecked::<R>(
                client, count, dim, q, k, g, beta, erase, group, cuts, p, t, reads, erases, writes, through, cubes,
                time, heads, key, plan, mutant,
            )
        }
    })?;
    Ok(chunks)
}

/// Mutants: 1 drops beta in L, 11 reads the first key head for every value head, 12 has beta in L where
/// there is an erase gate.
#[cube(launch_unchecked)]
fn prep_kernel(
    q: &Floats,
    k: &Floats,
    g: &Floats,
    beta: &Floats,
    erase: &ComptimeOption<Floats>,
    group: &ComptimeOption<Group>,
    cuts: &ComptimeOption<Cuts>,
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
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let cube = CUBE_POS;
    if cube >= cubes as usize {
        terminate!();
    }
    let size = comptime!(CHUNK);
    let half = comptime!(HALF);
    let square = comptime!(SQUARE);
    let stride = comptime!(plan.stride());
    let slice = comptime!(plan.slice());
    let channels = plan.channels;
    let unit = UNIT_POS as usize;
    let packed = comptime!(cuts.is_some());
    let piece = piece_of_chain(cube, time, heads, cuts, size);
    let (chain, start) = (piece.chain, piece.start);
    let length = chain.length;
    let grouped = comptime!(group.is_some());
    let of_keys = chain_of_keys(&chain, group);
    if comptime!(packed) {
        if start >= length {
            terminate!();
        }
    }

    // Queries, then keys.
    let mut scaled = SharedMemory::<f32>::new(comptime!(2 * plan.keys()));
    let mut strength = SharedMemory::<f32>::new(size);
    let mut lower = SharedMemory::<f32>::new(comptime!(CHUNK * SQUARE));
    if unit < size {
        strength[unit] = load_or_zero(beta, chain.at(start + unit, 1usize), start + unit < length);
    }

    let pairs = comptime!(CHUNK * CHUNK / UNITS);
    let y = unit % size;
    let mut sums = Array::<f32>::new(pairs);
    let mut sink_at = Array::<usize>::new(pairs);
    let mut source_at = Array::<usize>::new(pairs);
    #[unroll]
    for n in 0..pairs {
        let x = unit / size + comptime!(n * UNITS / CHUNK);
        // The level of the highest bit that x and y differ in; a token paired with itself has decay 1, whatever g.
        let mut level = comptime!(LEVELS).runtime();
        #[unroll]
        for bit in 0..comptime!(LEVELS) {
            if x / comptime!(1usize << bit) != y / comptime!(1usize << bit) {
                level = comptime!(bit).runtime();
            }
        }
        let kind = select(y <= x, 0usize, comptime!(plan.keys()).runtime());
        sink_at[n] = kind + level * slice + x.max(y) * stride;
        source_at[n] = comptime!(plan.keys()) + level * slice + x.min(y) * stride;
        sums[n] = 0.0f32;
    }

    let mut queries = Array::<f32>::new(half);
    let mut keys = Array::<f32>::new(half);
    let mut gates = Array::<f32>::new(half);
    let mut others = Array::<f32>::new(half);
    let mut erasing = Array::<f32>::new(half);
    let upper = unit / channels == 1;
    let first = unit / channels * half;
    let tile_at = first * stride + unit % channels;
    let step = chain.step(key);
    let keys_step = of_keys.step(key);
    for block in 0..key.div_ceil(channels) {
        let channel = block * channels + unit % channels;
        sync_cube();
        if first < size {
            let mut live = ((length - start).max(first) - first).min(half);
            let other = half - first;
            let mut other_live = ((length - start).max(other) - other).min(half);
            if channel >= key {
                live = 0usize;
                other_live = 0usize;
            }
            let chunk_at = chain.at(start, key) + channel;
            let at = chunk_at + first * step;
            let mut keys_at = of_keys.at(start, key) + channel + first * keys_step;
            if comptime!(mutant == 11 && grouped) {
                keys_at -= of_keys.head * key;
            }
            #[unroll(plan.unroll)]
            for i in 0..half {
                queries[i] = load_or_zero(q, keys_at + i * keys_step, i < live);
                keys[i] = load_or_zero(k, keys_at + i * keys_step, i < live);
                gates[i] = load_or_zero(g, at + i * step, i < live);
                others[i] = load_or_zero(g, chunk_at + (other + i) * step, i < other_live);
            }
            #[comptime]
            match erase {
                ComptimeOption::Some(erase) =>
                {
                    #[unroll(plan.unroll)]
                    for i in 0..half {
                        erasing[i] = load_or_zero(erase, at + i * step, i < live);
                    }
                }
                ComptimeOption::None => {}
            }
            let mut other_gates = 0.0f32;
            #[unroll(plan.unroll)]
            for i in 0..half {
                other_gates += others[i];
            }
            let out = (cube * size + first) * key + channel;
            let mut from_entry = select(upper, other_gates, 0.0f32);
            #[unroll(plan.unroll)]
            for i in 0..half {
                from_entry += gates[i];
                let mut to_end = 0.0f32;
                #[unroll(plan.unroll)]
                for n in 0..half {
                    if n > i {
                        to_end += gates[n];
                    }
                }
                if !upper {
                    to_end += other_gates;
                }
                let here = tile_at + i * stride;
                #[unroll]
                for level in 0..comptime!(LEVELS) {
                    let factor = from_border(&gates, i, upper, level, plan).exp();
                    scaled[level * slice + here] = queries[i] * factor;
                    let mut own = keys[i];
                    if comptime!(plan.gated) {
                        // A level's rows meet keys in L alone, and beta would come afterwards.
                        let mut erased = erasing[i] * keys[i];
                        if comptime!(mutant == 12) {
                            erased = strength[first + i] * keys[i];
                        }
                        own = select(is_row(i, upper, level), erased, keys[i]);
                    }
                    scaled[comptime!(plan.keys()) + level * slice + here] = own * factor;
                }
                scaled[comptime!(LEVELS * plan.slice()) + here] = queries[i];
                scaled[comptime!(plan.keys() + LEVELS * plan.slice()) + here] = keys[i];
                if channel < key {
                    let decay = from_entry.exp();
                    reads.set(out + i * key, queries[i] * decay);
                    let mut erased = strength[first + i] * keys[i];
                    if comptime!(plan.gated) {
                        erased = erasing[i] * keys[i];
                    }
                    erases.set(out + i * key, erased * decay);
                    writes.set(out + i * key, keys[i] * to_end.exp());
                }
            }
            if upper && channel < key {
                through.set(cube * key + channel, from_entry.exp());
            }
        }
        sync_cube();
        let many = (key - block * channels).min(channels);
        #[unroll]
        for n in 0..pairs {
            let mut sum = sums[n];
            for c in 0..many {
                sum += scaled[sink_at[n] + c] * scaled[source_at[n] + c];
            }
            sums[n] = sum;
        }
    }
    let out = cube * comptime!(CHUNK * CHUNK);
    #[unroll]
    for n in 0..pairs {
        let x = unit / size + comptime!(n * UNITS / CHUNK);
        if y <= x {
            p.set(out + x * size + y, sums[n]);
        } else {
            let mut entry = strength[y] * sums[n];
            if comptime!(plan.gated || mutant == 1) {
                entry = sums[n];
            }
            lower[y * square + x] = entry;
            p.set(out + x * size + y, 0.0f32);
        }
    }
    sync_cube();
    if unit < size {
        let mut column = Array::<f32>::new(size);
        #[unroll(plan.unroll)]
        for i in 0..size {
            let mut solved = select(i == unit, 1.0f32, 0.0f32);
            #[unroll(plan.unroll)]
            for m in 0..size {
                if m < i {
                    solved -= lower[i * square + m] * column[m];
                }
            }
            // Above the diagonal there is nothing, whatever L is.
            column[i] = select(i < unit, 0.0f32, solved);
            t.set(out + i * size + unit, column[i]);
        }
    }
}

/// The sum of g between token `i` of this unit's half and the border in the middle of its block at a level.
///
/// The block's second half are rows, whose sum begins behind the border; the first half are columns, whose sum begins
/// behind their token.
#[cube]
fn from_border(gates: &Array<f32>, i: usize, upper: bool, #[comptime] level: usize, #[comptime] plan: Plan) -> f32 {
    let size = comptime!(1usize << level);
    let first = i / size * size;
    let mut row = 0.0f32;
    let mut column = 0.0f32;
    #[unroll(plan.unroll)]
    for n in 0..comptime!(HALF) {
        if n >= first && n <= i {
            row += gates[n];
        }
        if n > i && n < first + size {
            column += gates[n];
        }
    }
    select(is_row(i, upper, level), row, column)
}

/// Whether token `i` of this unit's half is in the second half of its block at a level, whose tokens are rows there.
#[cube]
fn is_row(i: usize, upper: bool, #[comptime] level: usize) -> bool {
    let size = comptime!(1usize << level);
    let mut second = i / size % 2 == 1;
    if comptime!(size == HALF) {
        second = upper;
    }
    second
}
