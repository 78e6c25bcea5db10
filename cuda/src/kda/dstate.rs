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
use cubecl::server::Handle;
use dormouse_reference::kda::{Inputs, Outputs};

use super::forward::Plan;
use super::tile::{self, clear, multiply_add};
use super::{CHUNK, SPAN, Sizes, Unsupported, array, load_or_zero, optional, shared_memory, token_at};

/// What the kernel writes.
#[derive(Clone, Copy, Debug)]
pub struct Written<T> {
    /// `[B, T, H, V]`, the gradient of v.
    pub dv: T,
    /// `[B, T, H, V]`, the gradient of what each token writes.
    pub z: T,
    /// `[B, H, spans, K, V]`, the gradient of the state that leaves each span.
    pub dstates: T,
    /// `[B, H, K, V]`, the gradient of the initial state, if wanted.
    pub dinitial_state: Option<T>,
}

/// Runs every chain in reverse from the gradient of its final state, or zeros.
///
/// # Errors
/// [`Unsupported`] if not even narrow blocks fit the device's shared memory.
pub fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    sizes: &Sizes,
    scale: f32,
    inputs: Inputs<&Handle>,
    (p, t): (&Handle, &Handle),
    upstream: Outputs<&Handle>,
    written: Written<&Handle>,
) -> Result<(), Unsupported> {
    let plan = Plan::new(sizes, shared_memory(client))?;
    let cubes = sizes.chains() * sizes.value.div_ceil(plan.columns);
    if cubes == 0 {
        return Ok(());
    }
    // SAFETY: offsets stay inside the lengths given here, see `Sizes`.
    unsafe {
        dstate_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(plan.product().units as u32),
            array(inputs.q, sizes.keys()),
            array(inputs.k, sizes.keys()),
            array(inputs.g, sizes.keys()),
            array(inputs.beta, sizes.tokens()),
            array(p, sizes.pairs()),
            array(t, sizes.pairs()),
            array(upstream.o, sizes.values()),
            optional(upstream.final_state, sizes.state()),
            array(written.dv, sizes.values()),
            array(written.z, sizes.values()),
            array(written.dstates, sizes.span_states()),
            optional(written.dinitial_state, sizes.state()),
            scale,
            sizes.time,
            sizes.heads,
            sizes.key,
            sizes.value,
            plan,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn dstate_kernel(
    q: &Array<f32>,
    k: &Array<f32>,
    g: &Array<f32>,
    beta: &Array<f32>,
    p: &Array<f32>,
    t: &Array<f32>,
    d_o: &Array<f32>,
    d_final: ComptimeOption<Array<f32>>,
    dv: &mut Array<f32>,
    z: &mut Array<f32>,
    dstates: &mut Array<f32>,
    d_initial: &mut ComptimeOption<Array<f32>>,
    scale: f32,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
    #[comptime] plan: Plan,
) {
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
    let chain = CUBE_POS_X as usize / column_blocks;
    let first = CUBE_POS_X as usize % column_blocks * width;
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
                z[at] = sum[e];
                dv[at] = strength[i] * sum[e];
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
                multiply_add(&mut sum, &keys, c, channels_t, &right, 0usize, by_columns, live, product);
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
