//! The gradients of the states, chunk after chunk from the last to the first; the mirror of `forward`.
//!
//! ```text
//! dU = scale P^T dO + Kb dS'                Z = T^T dU                dV = beta Z
//! dS = Diag(e^{G_n}) dS' + scale Qt^T dO - Rt^T Z
//! ```
//!
//! A cube is a chain and a block of its value columns. It holds its columns of dS in shared memory. Neither S nor U is
//! needed, so this kernel does not wait for a forward pass that computes them again.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::{Grads, Outputs};

use super::forward::Plan;
use super::prep::Pairs;
use super::tile::{self, clear, multiply_add};
use super::{CHUNK, Call, SPAN, bytes, load_or_zero, optional, token_at};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// What the gradients of a span need of the ones after it.
pub(super) struct Passed {
    /// `[B, T, H, V]`, the gradient of what each token writes.
    pub z: Tensor,
    /// `[B, H, spans, K, V]`, the gradient of the state that leaves each span.
    pub dstates: Tensor,
}

/// Runs every chain in reverse from the gradient of its final state, or zeros. Writes dv and the gradient of the initial
/// state.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    pairs: &Pairs,
    upstream: Outputs<&Tensor>,
    grads: Grads<&Tensor>,
) -> Result<Passed> {
    const NAME: &str = "kda::dstate";
    let Call { inputs, sizes, scale } = call;
    let plan = Plan::new(b, NAME, sizes)?;
    let passed = Passed { z: b.float_scratch(inputs.v.shape())?, dstates: b.float_scratch(&sizes.span_states())? };
    let cubes = sizes.chains() * sizes.value.div_ceil(plan.columns);
    let mut uses = vec![inputs.q, inputs.k, inputs.g, inputs.beta, &pairs.p, &pairs.t, upstream.o];
    uses.extend(upstream.final_state);
    uses.extend([grads.dv, &passed.z, &passed.dstates]);
    uses.extend(grads.dinitial_state);
    let mutant = super::mutant(b, 5..=6);
    let grid = Grid::cubes(cubes, plan.product().units as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            dstate_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                b.floats(inputs.q),
                b.floats(inputs.k),
                b.floats(inputs.g),
                b.floats(inputs.beta),
                b.floats(&pairs.p),
                b.floats(&pairs.t),
                b.floats(upstream.o),
                optional(b, upstream.final_state),
                b.floats(grads.dv),
                b.floats(&passed.z),
                b.floats(&passed.dstates),
                optional(b, grads.dinitial_state),
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
    Ok(passed)
}

/// Mutants: 5 drops the gradient of the final state, 6 drops what a token erases.
#[cube(launch_unchecked)]
fn dstate_kernel(
    q: &Floats,
    k: &Floats,
    g: &Floats,
    beta: &Floats,
    p: &Floats,
    t: &Floats,
    d_o: &Floats,
    d_final: ComptimeOption<Floats>,
    dv: &mut Floats,
    z: &mut Floats,
    dstates: &mut Floats,
    d_initial: &mut ComptimeOption<Floats>,
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

    let mut dstate = SharedMemory::<f32>::new(comptime!(of_state.len()));
    let mut query = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut keys = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut gate = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut upstream = SharedMemory::<f32>::new(comptime!(by_column.len()));
    // dU, then Z.
    let mut right = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut p_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut t_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut through = SharedMemory::<f32>::new(channels);
    let mut strength = SharedMemory::<f32>::new(size);
    let mut sum = Array::<f32>::new(comptime!(product.elements()));

    #[comptime]
    match d_final {
        ComptimeOption::Some(last) => {
            let at = chain * (key * value);
            tile::load_state(&last, &mut dstate, 0usize, at, 0usize, first, key, value, of_state);
        }
        ComptimeOption::None => {
            for n in 0..comptime!(of_state.per_unit()) {
                dstate[n * comptime!(of_state.units) + unit] = 0.0f32;
            }
        }
    }
    if comptime!(mutant == 5) {
        for n in 0..comptime!(of_state.per_unit()) {
            dstate[n * comptime!(of_state.units) + unit] = 0.0f32;
        }
    }
    for back in 0..chunks {
        let n = chunks - 1 - back;
        let start = n * size;
        let live = (time - start).min(size);
        sync_cube();
        if back == 0 || (start + size) % span == 0 {
            let at = (chain * spans + start / span) * (key * value);
            tile::store_state(&dstate, dstates, at, first, key, value, of_state);
        }
        tile::load_pairs(p, &mut p_tile, chain * chunks + n, by_pair);
        tile::load_pairs(t, &mut t_tile, chain * chunks + n, by_pair);
        if unit < size {
            strength[unit] =
                load_or_zero(beta, token_at(chain, start + unit, time, heads, 1usize), start + unit < time);
        }
        #[unroll]
        for e in 0..comptime!(product.elements()) {
            let i = tile::row(e, product);
            let there = start + i < time && first + j < value;
            let at = token_at(chain, start + i, time, heads, value) + first + j;
            upstream[i * width + j] = scale * load_or_zero(d_o, at, there);
        }

        // dU = scale P^T dO + Kb dS'
        let by_columns = comptime!(Plan::rows_of(by_column));
        let by_pairs_t = comptime!(Plan::columns_of(by_pair));
        clear(&mut sum, product);
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
            sync_cube();
            let rows = comptime!(Plan::rows_of(by_channel));
            let exit = comptime!(Plan::rows_of(of_state));
            multiply_add(&mut sum, &keys, 0usize, rows, &dstate, channel * width, exit, live_channels, product);
        }
        multiply_add(&mut sum, &p_tile, 0usize, by_pairs_t, &upstream, 0usize, by_columns, live, product);
        #[unroll]
        for e in 0..comptime!(product.elements()) {
            right[tile::row(e, product) * width + j] = sum[e];
        }
        sync_cube();

        // Z = T^T dU
        clear(&mut sum, product);
        multiply_add(&mut sum, &t_tile, 0usize, by_pairs_t, &right, 0usize, by_columns, live, product);
        sync_cube();
        #[unroll]
        for e in 0..comptime!(product.elements()) {
            let i = tile::row(e, product);
            right[i * width + j] = sum[e];
            if start + i < time && first + j < value {
                let at = token_at(chain, start + i, time, heads, value) + first + j;
                z.set(at, sum[e]);
                dv.set(at, strength[i] * sum[e]);
            }
        }

        // dS = Diag(e^{G_n}) dS' + scale Qt^T dO - Rt^T Z
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
                keys[i * comptime!(by_channel.stride) + c] *= -strength[i] * from_entry;
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
                    sum[e] = through[row] * dstate[(channel + row) * width + j];
                }
                let channels_t = comptime!(Plan::columns_of(by_channel));
                multiply_add(&mut sum, &query, c, channels_t, &upstream, 0usize, by_columns, live, product);
                if comptime!(mutant != 6) {
                    multiply_add(&mut sum, &keys, c, channels_t, &right, 0usize, by_columns, live, product);
                }
                #[unroll]
                for e in 0..comptime!(product.elements()) {
                    dstate[(channel + c + tile::row(e, product)) * width + j] = sum[e];
                }
            }
        }
    }
    sync_cube();
    #[comptime]
    match d_initial {
        ComptimeOption::Some(initial) => {
            tile::store_state(&dstate, initial, chain * (key * value), first, key, value, of_state);
        }
        ComptimeOption::None => {}
    }
}
