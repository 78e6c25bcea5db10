//! The states and the output, chunk after chunk.
//!
//! ```text
//! U  = T (beta V - Rt S)                  O = scale (Qt S + P U)                  S <- Diag(e^{G_n}) S + Kb^T U
//! ```
//!
//! A cube is a chain and a block of its value columns, which do not see each other. It holds its columns of S in shared
//! memory and walks the chunks in order. Everything that needs no state comes from [`super::prep`]; a chunk's share of it
//! is read into registers while the chunk before is worked on, since nothing else hides how long that takes. A unit holds
//! some elements of each `[CHUNK, columns]` result, see `tile`.
//!
//! With a write gate w * V stands where beta V does. A last chunk without all its tokens works on zeros: nothing is written, and g = 0 forgets nothing.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::Outputs;

use super::chain::{Cuts, cuts, whole_chain};
use super::prep::Chunks;
use super::tile::{self, Factors, Math, Part, Strides, Tile, clear, multiply_add};
use super::{CHUNK, Call, Fused, SPAN, Sizes, bytes, optional, widest};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// What `forward` and `dstate` are compiled for. K and V are not part of it, so that few variants serve all shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Rows of the state in shared memory: K or more.
    pub rows: usize,
    /// Columns of the state that a cube holds.
    pub columns: usize,
    pub math: Math,
}

impl Plan {
    /// Takes as many columns as fit.
    pub fn new<R: Engine>(b: &Device<R>, kernel: &'static str, sizes: &Sizes, math: Math) -> Result<Self> {
        let rows = sizes.key.next_power_of_two().max(16);
        let plan = |columns| Self { rows, columns, math };
        widest(b, kernel, &[32, 16, 8], |columns| plan(columns).bytes()).map(plan)
    }

    /// Bytes of shared memory of a cube: the state, three tiles of channels, three of columns, P, T and one row.
    fn bytes(self) -> usize {
        let tiles = 3 * self.by_channel().len() + 3 * self.by_column().len() + 2 * self.by_pair().len();
        4 * (self.of_state().len() + tiles + self.rows)
    }

    /// Units of a cube: each holds four elements of a product.
    pub const fn units(self) -> usize {
        4 * self.columns
    }

    /// From one row of columns to the next.
    const fn stride(self) -> usize {
        if self.math.fragments() { self.columns + self.math.padding() } else { self.columns }
    }

    /// The state, `[rows, columns]`.
    pub const fn of_state(self) -> Part {
        Part { rows: self.rows, columns: self.columns, stride: self.stride(), units: self.units() }
    }

    /// `[CHUNK, K]`.
    pub const fn by_channel(self) -> Part {
        let stride = self.rows + self.math.padding();
        Part { rows: CHUNK, columns: self.rows, stride, units: self.units() }
    }

    /// `[CHUNK, columns]`.
    pub const fn by_column(self) -> Part {
        Part { rows: CHUNK, columns: self.columns, stride: self.stride(), units: self.units() }
    }

    /// `[CHUNK, CHUNK]`.
    pub const fn by_pair(self) -> Part {
        Part { rows: CHUNK, columns: CHUNK, stride: CHUNK + self.math.padding(), units: self.units() }
    }

    /// One number a channel.
    pub const fn one_row(self) -> Part {
        Part { rows: 1, columns: self.rows, stride: self.rows, units: self.units() }
    }

    /// The shape of every product: `[16, columns]`, of tokens or of channels.
    pub const fn product(self) -> Tile {
        Tile { rows: CHUNK, columns: self.columns, units: self.units(), math: self.math }
    }

    /// Rows of channels times the state.
    pub const fn with_state(self) -> Factors {
        Factors { a: rows_of(self.by_channel()), b: rows_of(self.of_state()), inner: self.rows }
    }

    /// P or T times rows of columns.
    pub const fn with_pairs(self) -> Factors {
        Factors { a: rows_of(self.by_pair()), b: rows_of(self.by_column()), inner: CHUNK }
    }

    /// The transpose of P or T times rows of columns.
    pub const fn with_pairs_turned(self) -> Factors {
        Factors { a: columns_of(self.by_pair()), b: rows_of(self.by_column()), inner: CHUNK }
    }

    /// The transpose of rows of channels times rows of columns.
    pub const fn into_state(self) -> Factors {
        Factors { a: columns_of(self.by_channel()), b: rows_of(self.by_column()), inner: CHUNK }
    }
}

/// A tile as it lies.
const fn rows_of(part: Part) -> Strides {
    Strides { first: part.stride, second: 1 }
}

/// A tile's transpose.
const fn columns_of(part: Part) -> Strides {
    Strides { first: 1, second: part.stride }
}

/// Runs every chain from its initial state, or zeros.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    chunks: Chunks,
    outputs: Outputs<&Tensor>,
) -> Result<Fused> {
    const NAME: &str = "kda::forward";
    let Call { inputs, sizes, scale, math } = call;
    let plan = Plan::new(b, NAME, sizes, *math)?;
    let states = b.float_scratch(&sizes.span_states())?;
    let u = b.float_scratch(inputs.v.shape())?;
    let cubes = sizes.chains() * sizes.value.div_ceil(plan.columns);
    let mut uses = vec![inputs.v, inputs.beta, outputs.o, &states, &u];
    uses.extend(chunks.tensors());
    uses.extend(inputs.initial_state);
    uses.extend(outputs.final_state);
    uses.extend(inputs.w);
    uses.extend(inputs.cu_seqlens);
    let mutant = super::mutant(b, &[2, 3, 4, 13, 14]);
    let grid = Grid::cubes(cubes, plan.units() as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        let [p, t, reads, erases, writes, through] = chunks.tensors().map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                b.floats(inputs.v),
                b.floats(inputs.beta),
                optional(b, inputs.w),
                cuts(b, call),
                optional(b, inputs.initial_state),
                p,
                t,
                reads,
                erases,
                writes,
                through,
                b.floats(outputs.o),
                optional(b, outputs.final_state),
                b.floats(&states),
                b.floats(&u),
                *scale,
                cubes as u32,
                sizes.time,
                sizes.heads,
                sizes.key,
                sizes.value,
                plan,
                mutant,
            )
        }
    })?;
    Ok(Fused { states, u, chunks })
}

/// Mutants: 2 does not decay the state across a chunk, 3 writes nothing to the state, 4 is null (a renamed local), 13 starts
/// a sequence with the state of the one before, 14 reads the slot before a sequence's first chunk.
#[cube(launch_unchecked)]
fn forward_kernel(
    v: &Floats,
    beta: &Floats,
    write_gate: &ComptimeOption<Floats>,
    cuts: &ComptimeOption<Cuts>,
    initial_state: ComptimeOption<Floats>,
    p: &Floats,
    t: &Floats,
    reads: &Floats,
    erases: &Floats,
    writes: &Floats,
    through: &Floats,
    o: &mut Floats,
    final_state: &mut ComptimeOption<Floats>,
    states: &mut Floats,
    saved_u: &mut Floats,
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
    let size = comptime!(CHUNK);
    let span = comptime!(SPAN);
    let width = plan.columns;
    let stride = comptime!(plan.stride());
    let of_state = comptime!(plan.of_state());
    let by_channel = comptime!(plan.by_channel());
    let by_column = comptime!(plan.by_column());
    let by_pair = comptime!(plan.by_pair());
    let one_row = comptime!(plan.one_row());
    let product = comptime!(plan.product());
    let column_blocks = value.div_ceil(width);
    let packed = comptime!(cuts.is_some());
    let chain = whole_chain(cube / column_blocks, time, heads, cuts);
    let length = chain.length;
    let first = cube % column_blocks * width;
    let chunks = length.div_ceil(size);

    let mut state = SharedMemory::<f32>::new(comptime!(of_state.len()));
    let mut query = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut erase = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut write = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut right = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut u = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut p_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut t_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut decay = SharedMemory::<f32>::new(comptime!(one_row.len()));
    let mut next_query = Array::<f32>::new(comptime!(by_channel.per_unit()));
    let mut next_erase = Array::<f32>::new(comptime!(by_channel.per_unit()));
    let mut next_write = Array::<f32>::new(comptime!(by_channel.per_unit()));
    let mut next_p = Array::<f32>::new(comptime!(by_pair.per_unit()));
    let mut next_t = Array::<f32>::new(comptime!(by_pair.per_unit()));
    let mut next_decay = Array::<f32>::new(comptime!(one_row.per_unit()));
    let mut next_value = Array::<f32>::new(comptime!(product.elements()));
    let mut next_strength = Array::<f32>::new(comptime!(product.elements()));
    let mut target = Array::<f32>::new(comptime!(product.elements()));
    let mut sum = Array::<f32>::new(comptime!(product.elements()));
    let mut read = Array::<f32>::new(comptime!(product.elements()));

    #[comptime]
    match initial_state {
        ComptimeOption::Some(initial) => {
            let mut at = chain.index * (key * value);
            if comptime!(mutant == 13 && packed) {
                at = (chain.index.max(heads) - heads) * (key * value);
            }
            tile::load_state(&initial, &mut state, 0usize, at, 0usize, first, key, value, of_state);
        }
        ComptimeOption::None => {
            tile::clear_state(&mut state, of_state);
        }
    }
    // The turn before the first only reads ahead.
    for turn in 0..chunks + 1 {
        if turn > 0 {
            sync_cube();
            tile::put(&next_query, &mut query, 0usize, by_channel);
            tile::put(&next_erase, &mut erase, 0usize, by_channel);
            tile::put(&next_write, &mut write, 0usize, by_channel);
            tile::put(&next_p, &mut p_tile, 0usize, by_pair);
            tile::put(&next_t, &mut t_tile, 0usize, by_pair);
            tile::put(&next_decay, &mut decay, 0usize, one_row);
            #[unroll]
            for e in 0..comptime!(product.elements()) {
                target[e] = next_strength[e] * next_value[e];
            }
            let start = (turn - 1) * size;
            if start % span == 0 {
                let at = chain.span(start / span) * (key * value);
                tile::store_state(&state, states, at, first, key, value, of_state);
            }
            sync_cube();
        }
        if turn < chunks {
            let mut number = chain.chunk(turn);
            if comptime!(mutant == 14 && packed) {
                number -= (chain.index / heads).min(1usize);
            }
            tile::fetch(reads, &mut next_query, number * size * key, key, by_channel);
            tile::fetch(erases, &mut next_erase, number * size * key, key, by_channel);
            tile::fetch(writes, &mut next_write, number * size * key, key, by_channel);
            tile::fetch(p, &mut next_p, number * comptime!(CHUNK * CHUNK), size, by_pair);
            tile::fetch(t, &mut next_t, number * comptime!(CHUNK * CHUNK), size, by_pair);
            tile::fetch(through, &mut next_decay, number * key, key, one_row);
            let start = turn * size;
            tile::fetch_product(v, &mut next_value, &chain, start, first, value, product);
            tile::fetch_strength(write_gate, beta, &mut next_strength, &chain, start, first, value, product);
        }
        if turn > 0 {
            let start = (turn - 1) * size;
            let live = (length - start).min(size);
            // Rt S, and Qt S.
            clear(&mut sum, product);
            clear(&mut read, product);
            let with_state = comptime!(plan.with_state());
            multiply_add(&mut sum, &erase, 0usize, &state, 0usize, key, with_state, product);
            multiply_add(&mut read, &query, 0usize, &state, 0usize, key, with_state, product);

            // U = T (beta V - Rt S)
            #[unroll]
            for e in 0..comptime!(product.elements()) {
                right[tile::row(e, product) * stride + tile::column(e, product)] = target[e] - sum[e];
            }
            sync_cube();
            let with_pairs = comptime!(plan.with_pairs());
            clear(&mut sum, product);
            multiply_add(&mut sum, &t_tile, 0usize, &right, 0usize, live, with_pairs, product);
            #[unroll]
            for e in 0..comptime!(product.elements()) {
                u[tile::row(e, product) * stride + tile::column(e, product)] = sum[e];
            }
            sync_cube();

            // O = scale (Qt S + P U)
            multiply_add(&mut read, &p_tile, 0usize, &u, 0usize, live, with_pairs, product);
            #[unroll]
            for e in 0..comptime!(product.elements()) {
                let i = start + tile::row(e, product);
                let j = first + tile::column(e, product);
                if i < length && j < value {
                    let at = chain.at(i, value) + j;
                    o.set(at, scale * read[e]);
                    saved_u.set(at, sum[e]);
                }
            }

            // S <- Diag(e^{G_n}) S + Kb^T U
            if comptime!(plan.math.cuda) {
                // No group waits for what the one before reads.
                #[unroll]
                for group in 0..comptime!(plan.rows / CHUNK) {
                    advance(&mut state, &decay, &write, &u, comptime!(group * CHUNK).runtime(), live, plan, mutant);
                }
            } else {
                for group in 0..key.div_ceil(size) {
                    advance(&mut state, &decay, &write, &u, group * size, live, plan, mutant);
                }
            }
        }
    }
    sync_cube();
    #[comptime]
    match final_state {
        ComptimeOption::Some(last) => {
            tile::store_state(&state, last, chain.index * (key * value), first, key, value, of_state);
        }
        ComptimeOption::None => {}
    }
}

/// The channels of the state from `c` on, as many as a chunk has tokens, taken across the chunk.
#[cube]
fn advance(
    state: &mut SharedMemory<f32>,
    decay: &SharedMemory<f32>,
    write: &SharedMemory<f32>,
    u: &SharedMemory<f32>,
    c: usize,
    live: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let product = comptime!(plan.product());
    let stride = comptime!(plan.stride());
    let mut sum = Array::<f32>::new(comptime!(product.elements()));
    #[unroll]
    for e in 0..comptime!(product.elements()) {
        let channel = c + tile::row(e, product);
        let held = state[channel * stride + tile::column(e, product)];
        sum[e] = decay[channel] * held;
        if comptime!(mutant == 2) {
            sum[e] = held;
        }
        if comptime!(mutant == 4) {
            let renamed = decay[channel] * held;
            sum[e] = renamed;
        }
    }
    if comptime!(mutant != 3) {
        multiply_add(&mut sum, write, c, u, 0usize, live, comptime!(plan.into_state()), product);
    }
    #[unroll]
    for e in 0..comptime!(product.elements()) {
        state[(c + tile::row(e, product)) * stride + tile::column(e, product)] = sum[e];
    }
}
