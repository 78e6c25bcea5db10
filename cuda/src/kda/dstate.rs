//! The gradients of the states, chunk after chunk from the last to the first; the mirror of `forward`.
//!
//! ```text
//! dU = scale P^T dO + Kb dS'                Z = T^T dU                dV = beta Z
//! dS = Diag(e^{G_n}) dS' + scale Qt^T dO - Rt^T Z
//! ```
//!
//! With a write gate dV = w * Z. A cube is a chain and a block of its value columns. It holds its columns of dS in shared memory and reads
//! ahead like `forward`. Neither S nor U is needed, so this kernel does not wait for a forward pass that computes them again.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::{Grads, Outputs};

use super::chain::{Cuts, cuts, whole_chain};
use super::forward::Plan;
use super::prep::Chunks;
use super::tile::{self, clear, multiply_add};
use super::{CHUNK, Call, SPAN, bytes, optional};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// What the gradients of a span need of the ones after it.
pub(super) struct Passed {
    /// `[B, T, HV, V]`, the gradient of what each token writes.
    pub z: Tensor,
    /// `[spans of all chains, K, V]`, the gradient of the state that leaves each span.
    pub dstates: Tensor,
}

/// Runs every chain in reverse from the gradient of its final state, or zeros. Writes dv and the gradient of the initial
/// state.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    chunks: &Chunks,
    upstream: Outputs<&Tensor>,
    grads: Grads<&Tensor>,
) -> Result<Passed> {
    const NAME: &str = "kda::dstate";
    let Call { inputs, sizes, scale, math } = call;
    let plan = Plan::new(b, NAME, sizes, *math)?;
    let passed = Passed { z: b.float_scratch(inputs.v.shape())?, dstates: b.float_scratch(&sizes.span_states())? };
    let cubes = sizes.chains() * sizes.value.div_ceil(plan.columns);
    let mut uses = vec![inputs.beta, upstream.o];
    uses.extend(chunks.tensors());
    uses.extend(upstream.final_state);
    uses.extend([grads.dv, &passed.z, &passed.dstates]);
    uses.extend(grads.dinitial_state);
    uses.extend(inputs.w);
    uses.extend(inputs.cu_seqlens);
    let mutant = super::mutant(b, &[5, 6, 16]);
    let grid = Grid::cubes(cubes, plan.units() as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        let [p, t, reads, erases, writes, through] = chunks.tensors().map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller; tokens, channels and columns that do not exist are not touched.
        unsafe {
            dstate_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                b.floats(inputs.beta),
                optional(b, inputs.w),
                cuts(b, call),
                p,
                t,
                reads,
                erases,
                writes,
                through,
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

/// Mutants: 5 drops the gradient of the final state, 6 drops what a token erases, 16 drops the write gate in dv.
#[cube(launch_unchecked)]
fn dstate_kernel(
    beta: &Floats,
    write_gate: &ComptimeOption<Floats>,
    cuts: &ComptimeOption<Cuts>,
    p: &Floats,
    t: &Floats,
    reads: &Floats,
    erases: &Floats,
    writes: &Floats,
    through: &Floats,
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
    let of_state = comptime!(plan.of_state());
    let by_channel = comptime!(plan.by_channel());
    let by_column = comptime!(plan.by_column());
    let by_pair = comptime!(plan.by_pair());
    let one_row = comptime!(plan.one_row());
    let product = comptime!(plan.product());
    let stride = comptime!(by_column.stride);
    let column_blocks = value.div_ceil(width);
    let gated = comptime!(write_gate.is_some());
    let chain = whole_chain(cube / column_blocks, time, heads, cuts);
    let length = chain.length;
    let first = cube % column_blocks * width;
    let chunks = length.div_ceil(size);

    let mut dstate = SharedMemory::<f32>::new(comptime!(of_state.len()));
    let mut query = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut erase = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut write = SharedMemory::<f32>::new(comptime!(by_channel.len()));
    let mut upstream = SharedMemory::<f32>::new(comptime!(by_column.len()));
    // dU, and -Z.
    let mut right = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut solved = SharedMemory::<f32>::new(comptime!(by_column.len()));
    let mut p_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut t_tile = SharedMemory::<f32>::new(comptime!(by_pair.len()));
    let mut decay = SharedMemory::<f32>::new(comptime!(one_row.len()));
    let mut next_query = Array::<f32>::new(comptime!(by_channel.per_unit()));
    let mut next_erase = Array::<f32>::new(comptime!(by_channel.per_unit()));
    let mut next_write = Array::<f32>::new(comptime!(by_channel.per_unit()));
    let mut next_p = Array::<f32>::new(comptime!(by_pair.per_unit()));
    let mut next_t = Array::<f32>::new(comptime!(by_pair.per_unit()));
    let mut next_decay = Array::<f32>::new(comptime!(one_row.per_unit()));
    let mut next_upstream = Array::<f32>::new(comptime!(product.elements()));
    let mut next_strength = Array::<f32>::new(comptime!(product.elements()));
    let mut strength = Array::<f32>::new(comptime!(product.elements()));
    let mut sum = Array::<f32>::new(comptime!(product.elements()));

    #[comptime]
    match d_final {
        ComptimeOption::Some(last) => {
            let at = chain.index * (key * value);
            tile::load_state(&last, &mut dstate, 0usize, at, 0usize, first, key, value, of_state);
        }
        ComptimeOption::None => {
            tile::clear_state(&mut dstate, of_state);
        }
    }
    if comptime!(mutant == 5) {
        tile::clear_state(&mut dstate, of_state);
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
                upstream[tile::row(e, product) * stride + tile::column(e, product)] = scale * next_upstream[e];
                strength[e] = next_strength[e];
            }
            let start = (chunks - turn) * size;
            if turn == 1 || (start + size) % span == 0 {
                let at = chain.span(start / span) * (key * value);
                tile::store_state(&dstate, dstates, at, first, key, value, of_state);
            }
            sync_cube();
        }
        if turn < chunks {
            let n = chunks - 1 - turn;
            let number = chain.chunk(n);
            tile::fetch(reads, &mut next_query, number * size * key, key, by_channel);
            tile::fetch(erases, &mut next_erase, number * size * key, key, by_channel);
            tile::fetch(writes, &mut next_write, number * size * key, key, by_channel);
            tile::fetch(p, &mut next_p, number * comptime!(CHUNK * CHUNK), size, by_pair);
            tile::fetch(t, &mut next_t, number * comptime!(CHUNK * CHUNK), size, by_pair);
            tile::fetch(through, &mut next_decay, number * key, key, one_row);
            let start = n * size;
            tile::fetch_strength(write_gate, beta, &mut next_strength, &chain, start, first, value, product);
            tile::fetch_product(d_o, &mut next_upstream, &chain, start, first, value, product);
        }
        if turn > 0 {
            let start = (chunks - turn) * size;
            let live = (length - start).min(size);
            // dU = scale P^T dO + Kb dS'
            let with_pairs_turned = comptime!(plan.with_pairs_turned());
            clear(&mut sum, product);
            multiply_add(&mut sum, &write, 0usize, &dstate, 0usize, key, comptime!(plan.with_state()), product);
            multiply_add(&mut sum, &p_tile, 0usize, &upstream, 0usize, live, with_pairs_turned, product);
            #[unroll]
            for e in 0..comptime!(product.elements()) {
                right[tile::row(e, product) * stride + tile::column(e, product)] = sum[e];
            }
            sync_cube();

            // Z = T^T dU
            clear(&mut sum, product);
            multiply_add(&mut sum, &t_tile, 0usize, &right, 0usize, live, with_pairs_turned, product);
            #[unroll]
            for e in 0..comptime!(product.elements()) {
                solved[tile::row(e, product) * stride + tile::column(e, product)] = -sum[e];
                let i = start + tile::row(e, product);
                let j = first + tile::column(e, product);
                if i < length && j < value {
                    let at = chain.at(i, value) + j;
                    z.set(at, sum[e]);
                    let mut dv_here = strength[e] * sum[e];
                    if comptime!(mutant == 16 && gated) {
                        dv_here = sum[e];
                    }
                    dv.set(at, dv_here);
                }
            }
            sync_cube();

            // dS = Diag(e^{G_n}) dS' + scale Qt^T dO - Rt^T Z
            if comptime!(plan.math.cuda) {
                // No group waits for what the one before reads.
                #[unroll]
                for group in 0..comptime!(plan.rows / CHUNK) {
                    let c = comptime!(group * CHUNK).runtime();
                    retreat(&mut dstate, &decay, &query, &upstream, &erase, &solved, c, live, plan, mutant);
                }
            } else {
                for group in 0..key.div_ceil(size) {
                    let c = group * size;
                    retreat(&mut dstate, &decay, &query, &upstream, &erase, &solved, c, live, plan, mutant);
                }
            }
        }
    }
    sync_cube();
    #[comptime]
    match d_initial {
        ComptimeOption::Some(initial) => {
            tile::store_state(&dstate, initial, chain.index * (key * value), first, key, value, of_state);
        }
        ComptimeOption::None => {}
    }
}

/// The channels of the state's gradient from `c` on, as many as a chunk has tokens, taken back across the chunk.
#[cube]
fn retreat(
    dstate: &mut SharedMemory<f32>,
    decay: &SharedMemory<f32>,
    query: &SharedMemory<f32>,
    upstream: &SharedMemory<f32>,
    erase: &SharedMemory<f32>,
    solved: &SharedMemory<f32>,
    c: usize,
    live: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    let product = comptime!(plan.product());
    let into_state = comptime!(plan.into_state());
    let stride = comptime!(plan.by_column().stride);
    let mut sum = Array::<f32>::new(comptime!(product.elements()));
    #[unroll]
    for e in 0..comptime!(product.elements()) {
        let channel = c + tile::row(e, product);
        sum[e] = decay[channel] * dstate[channel * stride + tile::column(e, product)];
    }
    multiply_add(&mut sum, query, c, upstream, 0usize, live, into_state, product);
    if comptime!(mutant != 6) {
        multiply_add(&mut sum, erase, c, solved, 0usize, live, into_state, product);
    }
    #[unroll]
    for e in 0..comptime!(product.elements()) {
        dstate[(c + tile::row(e, product)) * stride + tile::column(e, product)] = sum[e];
    }
}
