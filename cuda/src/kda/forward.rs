//! The states and the output, chunk after chunk.
//!
//! ```text
//! U  = T (beta V - Rt S)                  O = scale (Qt S + P U)                  S <- Diag(e^{G_n}) S + Kb^T U
//! Qt_i = q_i e^{G_i}      Rt_i = beta_i k_i e^{G_i}      Kb_j = k_j e^{G_n - G_j}      T = (I + L)^-1
//! ```
//!
//! A cube is a chain and a block of its value columns, which do not see each other. It holds its columns of S in shared
//! memory and walks the chunks in order. Channels of q, k and g are taken a block at a time, twice a chunk: once to read
//! the state and once to write it. A unit holds some elements of each `[CHUNK, columns]` result, see `tile`.
//!
//! A last chunk without all its tokens works on zeros: g = 0 forgets nothing and beta = 0 writes nothing.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::Outputs;

use super::prep::Pairs;
use super::tile::{self, Part, Strides, Tile, clear, multiply_add};
use super::{CHUNK, Call, Fused, SPAN, Sizes, bytes, load_or_zero, optional, token_at, widest};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Units of a cube.
const UNITS: usize = 128;

/// What `forward` and `dstate` are compiled for. K and V are not part of it, so that few variants serve all shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Rows of the state in shared memory: K or more.
    pub rows: usize,
    /// Columns of the state that a cube holds.
    pub columns: usize,
    /// Channels of a block; divides `rows`.
    pub channels: usize,
}

impl Plan {
    /// Takes as many columns as fit, then as many channels.
    pub fn new<R: Engine>(b: &Device<R>, kernel: &'static str, sizes: &Sizes) -> Result<Self> {
        let rows = sizes.key.next_power_of_two().max(16);
        let plan = |columns, channels| Self { rows, columns, channels };
        let columns = widest(b, kernel, &[32, 16, 8], |columns| plan(columns, 16).bytes())?;
        let widths: Vec<usize> = [64, 32, 16].into_iter().filter(|&width| width <= rows).collect();
        let channels = widest(b, kernel, &widths, |channels| plan(columns, channels).bytes())?;
        Ok(plan(columns, channels))
    }

    /// Bytes of shared memory of a cube: the state, three tiles of channels, two of columns, P, T, and small vectors.
    pub fn bytes(self) -> usize {
        let tiles = 3 * self.by_channel().len() + 2 * self.by_column().len() + 2 * self.by_pair().len();
        4 * (self.of_state().len() + tiles + CHUNK + self.channels)
    }

    /// The state, `[rows, columns]`.
    pub const fn of_state(self) -> Part {
        Part { rows: self.rows, columns: self.columns, stride: self.columns, units: UNITS }
    }

    /// `[CHUNK, channels]`.
    pub const fn by_channel(self) -> Part {
        Part { rows: CHUNK, columns: self.channels, stride: self.channels + 1, units: UNITS }
    }

    /// `[CHUNK, columns]`.
    pub const fn by_column(self) -> Part {
        Part { rows: CHUNK, columns: self.columns, stride: self.columns, units: UNITS }
    }

    /// `[CHUNK, CHUNK]`.
    pub const fn by_pair(self) -> Part {
        Part { rows: CHUNK, columns: CHUNK, stride: CHUNK + 1, units: UNITS }
    }

    /// The shape of every product: `[16, columns]`, of tokens or of channels.
    pub const fn product(self) -> Tile {
        Tile { rows: CHUNK, columns: self.columns, units: UNITS }
    }

    /// A tile as it lies.
    pub const fn rows_of(part: Part) -> Strides {
        Strides { first: part.stride, second: 1 }
    }

    /// A tile's transpose.
    pub const fn columns_of(part: Part) -> Strides {
        Strides { first: 1, second: part.stride }
    }
}

/// Runs every chain from its initial state, or zeros.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    pairs: Pairs,
    outputs: Outputs<&Tensor>,
) -> Result<Fused> {
    const NAME: &str = "kda::forward";
    let Call { inputs, sizes, scale } = call;
    let plan = Plan::new(b, NAME, sizes)?;
    let states = b.float_scratch(&sizes.span_states())?;
    let u = b.float_scratch(inputs.v.shape())?;
    let cubes = sizes.chains() * sizes.value.div_ceil(plan.columns);
    let mut uses: Vec<&Tensor> = inputs.clone().named().into_iter().map(|(_, x)| x).collect();
    uses.extend([&pairs.p, &pairs.t, outputs.o, &states, &u]);
    uses.extend(outputs.final_state);
    let mutant = super::mutant(b, 2..=4);
    let grid = Grid::cubes(cubes, UNITS as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                b.floats(inputs.q),
                b.floats(inputs.k),
                b.floats(inputs.v),
                b.floats(inputs.g),
                b.floats(inputs.beta),
                optional(b, inputs.initial_state),
                b.floats(&pairs.p),
                b.floats(&pairs.t),
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
    Ok(Fused { states, u, pairs })
}

/// Mutants: 2 does not decay the state across a chunk, 3 does not write a chunk's last token, 4 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    q: &Floats,
    k: &Floats,
    v: &Floats,
    g: &Floats,
    beta: &Floats,
    initial_state: ComptimeOption<Floats>,
    p: &Floats,
    t: &Floats,
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
    let channels = plan.channels;
    let of_state = comptime!(plan.of_state());
    let by_channel = comptime!(plan.by_channel());
    let by_column = comptime!(plan.by_column());
    let by_pair = comptime!(plan.by_pair());
    let product = comptime!(plan.product());
    let unit = UNIT_POS as usize;
    let column_blocks = value.div_ceil(width);
    let chain = cube / column_blocks;
    let first = cube % column_blocks * width;
    let chunks = time.div_ceil(size);
    let spans = time.div_ceil(span);
    let j = tile::column(product);

    let mut state = SharedMemory::<f32>::new(comptime!(of_state.len()));
    let mut query = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut keys = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut gate = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut right = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut u = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut p_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut t_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut through = SharedMemory::<f32>::new(channels);
    let mut recalled = Array::<f32>::new(comptime!(product.elements()));
    let mut read = Array::<f32>::new(comptime!(product.elements()));

    #[comptime]
    match initial_state {
        ComptimeOption::Some(initial) => {
            let at = chain * (key * value);
            tile::load_state(&initial, &mut state, 0usize, at, 0usize, first, key, value, of_state);
        }
        ComptimeOption::None => {
            for n in 0..comptime!(of_state.per_unit()) {
                state[n * comptime!(UNITS) + unit] = 0.0f32;
            }
        }
    }
    for n in 0..chunks {
        let start = n * size;
        let live = (time - start).min(size);
        sync_cube();
        if start % span == 0 {
            let at = (chain * spans + start / span) * (key * value);
            tile::store_state(&state, states, at, first, key, value, of_state);
        }
        tile::load_pairs(p, &mut p_tile, chain * chunks + n, by_pair);
        tile::load_pairs(t, &mut t_tile, chain * chunks + n, by_pair);

        // Rt S without beta, and Qt S.
        clear(&mut recalled, product);
        clear(&mut read, product);
        for block in 0..key.div_ceil(channels) {
            let channel = block * channels;
            let live_channels = (key - channel).min(channels);
            sync_cube();
            tile::load(q, &mut query, 0usize, chain, start, channel, time, heads, key, by_channel);
            tile::load(k, &mut keys, 0usize, chain, start, channel, time, heads, key, by_channel);
            tile::load(g, &mut gate, 0usize, chain, start, channel, time, heads, key, by_channel);
            sync_cube();
            for m in 0..comptime!(by_channel.per_unit()) {
                let i = tile::part_row(m, by_channel);
                let c = tile::part_column(m, by_channel);
                let from_entry = tile::decay(&gate, 0usize, i + 1, c, comptime!(by_channel.stride));
                query[i * comptime!(by_channel.stride) + c] *= from_entry;
                keys[i * comptime!(by_channel.stride) + c] *= from_entry;
            }
            sync_cube();
            let rows = comptime!(Plan::rows_of(by_channel));
            let entry = comptime!(Plan::rows_of(of_state));
            multiply_add(&mut recalled, &keys, 0usize, rows, &state, channel * width, entry, live_channels, product);
            multiply_add(&mut read, &query, 0usize, rows, &state, channel * width, entry, live_channels, product);
        }

        // U = T (beta V - Rt S)
        #[unroll]
        for e in 0..comptime!(product.elements()) {
            let i = tile::row(e, product);
            let token = start + i < time;
            let target =
                load_or_zero(v, token_at(chain, start + i, time, heads, value) + first + j, token && first + j < value);
            let strength = load_or_zero(beta, token_at(chain, start + i, time, heads, 1usize), token);
            right[i * width + j] = strength * (target - recalled[e]);
        }
        sync_cube();
        let by_columns = comptime!(Plan::rows_of(by_column));
        let by_pairs = comptime!(Plan::rows_of(by_pair));
        clear(&mut recalled, product);
        multiply_add(&mut recalled, &t_tile, 0usize, by_pairs, &right, 0usize, by_columns, live, product);
        #[unroll]
        for e in 0..comptime!(product.elements()) {
            u[tile::row(e, product) * width + j] = recalled[e];
        }
        sync_cube();

        // O = scale (Qt S + P U)
        multiply_add(&mut read, &p_tile, 0usize, by_pairs, &u, 0usize, by_columns, live, product);
        #[unroll]
        for e in 0..comptime!(product.elements()) {
            let i = tile::row(e, product);
            if start + i < time && first + j < value {
                let at = token_at(chain, start + i, time, heads, value) + first + j;
                o.set(at, scale * read[e]);
                saved_u.set(at, recalled[e]);
            }
        }

        // S <- Diag(e^{G_n}) S + Kb^T U
        for block in 0..key.div_ceil(channels) {
            let channel = block * channels;
            let live_channels = (key - channel).min(channels);
            sync_cube();
            tile::load(k, &mut keys, 0usize, chain, start, channel, time, heads, key, by_channel);
            tile::load(g, &mut gate, 0usize, chain, start, channel, time, heads, key, by_channel);
            sync_cube();
            for m in 0..comptime!(by_channel.per_unit()) {
                let i = tile::part_row(m, by_channel);
                let c = tile::part_column(m, by_channel);
                let to_end = tile::decay(&gate, i + 1, size, c, comptime!(by_channel.stride));
                keys[i * comptime!(by_channel.stride) + c] *= to_end;
            }
            if unit < channels {
                through[unit] = tile::decay(&gate, 0usize, size, unit, comptime!(by_channel.stride));
            }
            sync_cube();
            for group in 0..live_channels.div_ceil(size) {
                let c = group * size;
                #[unroll]
                for e in 0..comptime!(product.elements()) {
                    let row = c + tile::row(e, product);
                    let held = state[(channel + row) * width + j];
                    recalled[e] = through[row] * held;
                    if comptime!(mutant == 2) {
                        recalled[e] = held;
                    }
                    if comptime!(mutant == 4) {
                        let renamed = through[row] * held;
                        recalled[e] = renamed;
                    }
                }
                let mut written = live;
                if comptime!(mutant == 3) {
                    written = live - 1;
                }
                let keys_t = comptime!(Plan::columns_of(by_channel));
                multiply_add(&mut recalled, &keys, c, keys_t, &u, 0usize, by_columns, written, product);
                #[unroll]
                for e in 0..comptime!(product.elements()) {
                    state[(channel + c + tile::row(e, product)) * width + j] = recalled[e];
                }
            }
        }
    }
    sync_cube();
    #[comptime]
    match final_state {
        ComptimeOption::Some(last) => {
            tile::store_state(&state, last, chain * (key * value), first, key, value, of_state);
        }
        ComptimeOption::None => {}
    }
}
