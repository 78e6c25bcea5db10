//! Arm `fused`: 32 units share a row, see [`rows`]. Forward is one launch, backward is one launch.
//!
//! Backward goes over a row once for the fixed branches and once for every expert, so that the number of experts needs
//! no registers; the row of dy is read again for each and comes from the cache.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::blend::Inputs;

use super::{FIXED_GATES, Gradients, Sizes};
use crate::device::Device;
use crate::rows;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// y. Some units share a row.
///
/// Mutants: 1 drops lam_max, 2 gives the dense layer the factor 1, 3 misses the last expert, 4 is null (a renamed
/// local).
#[cube(launch_unchecked)]
fn forward_kernel(
    gates: &Floats,
    attn: &Floats,
    dense: &Floats,
    experts: &Floats,
    memory: &Floats,
    y: &mut Floats,
    rows: u32,
    width: u32,
    count: u32,
    lam_max: f32,
    #[comptime] has_memory: bool,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let (rows, width, count) = (rows as usize, width as usize, count as usize);
    if n < rows {
        let gate = n * (comptime!(FIXED_GATES) + count);
        let shares = gate + comptime!(FIXED_GATES);
        let (w_attn, w_ffn) = (gates.at(gate), gates.at(gate + 2));
        let mut lam = lam_max * gates.at(gate + 1);
        if comptime!(mutant == 1) {
            lam = gates.at(gate + 1);
        }
        if comptime!(mutant == 4) {
            let renamed = lam_max * gates.at(gate + 1);
            lam = renamed;
        }
        let mut w_dense = 1.0f32 - lam;
        if comptime!(mutant == 2) {
            w_dense = 1.0f32;
        }
        let mut end = count;
        if comptime!(mutant == 3) {
            end = count - 1;
        }
        let at = n * width;
        let mut values = Array::<f32>::new(comptime!(rows::AHEAD));
        let mut others = Array::<f32>::new(comptime!(rows::AHEAD));
        let mut from_memory = Array::<f32>::new(comptime!(rows::AHEAD));
        for step in 0..width.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(attn, &mut values, at, first, width);
            rows::load(dense, &mut others, at, first, width);
            if has_memory {
                rows::load(memory, &mut from_memory, at, first, width);
            }
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                let mut value = w_attn * values[i] + w_dense * others[i];
                if has_memory {
                    value += lam * from_memory[i];
                }
                values[i] = value;
            }
            for e in 0..end {
                let weight = w_ffn * gates.at(shares + e);
                rows::load(experts, &mut others, (e * rows + n) * width, first, width);
                #[unroll]
                for i in 0..comptime!(rows::AHEAD) {
                    values[i] = values[i] + weight * others[i];
                }
            }
            rows::store(y, &values, at, first, width);
        }
    }
}

/// The gradients of all inputs. Some units share a row.
///
/// Mutants: 5 drops the dense layer from that of lam, 6 the shares from that of w_ffn, 7 w_ffn from those of the
/// experts.
#[cube(launch_unchecked)]
fn backward_kernel(
    gates: &Floats,
    attn: &Floats,
    dense: &Floats,
    experts: &Floats,
    memory: &Floats,
    dy: &Floats,
    dgates: &mut Floats,
    dattn: &mut Floats,
    ddense: &mut Floats,
    dexperts: &mut Floats,
    dmemory: &mut Floats,
    rows: u32,
    width: u32,
    count: u32,
    lam_max: f32,
    #[comptime] has_memory: bool,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let (rows, width, count) = (rows as usize, width as usize, count as usize);
    let at = n * width;
    let mut ups = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut values = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut others = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut from_memory = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = n < rows;
    let gate = n * (comptime!(FIXED_GATES) + count);
    let shares = gate + comptime!(FIXED_GATES);
    let mut w_ffn = 0.0f32;
    let mut along_attn = 0.0f32;
    let mut along_lam = 0.0f32;
    if here {
        let w_attn = gates.at(gate);
        let lam = lam_max * gates.at(gate + 1);
        w_ffn = gates.at(gate + 2);
        for step in 0..width.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(dy, &mut ups, at, first, width);
            rows::load(attn, &mut values, at, first, width);
            rows::load(dense, &mut others, at, first, width);
            if has_memory {
                rows::load(memory, &mut from_memory, at, first, width);
            }
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                let up = ups[i];
                along_attn += up * values[i];
                if comptime!(mutant != 5) {
                    along_lam -= up * others[i];
                }
                if has_memory {
                    along_lam += up * from_memory[i];
                }
                values[i] = w_attn * up;
                others[i] = (1.0f32 - lam) * up;
                from_memory[i] = lam * up;
            }
            rows::store(dattn, &values, at, first, width);
            rows::store(ddense, &others, at, first, width);
            if has_memory {
                rows::store(dmemory, &from_memory, at, first, width);
            }
        }
    }
    let dw_attn = rows::sum(along_attn, &mut shared);
    let dlam = rows::sum(along_lam, &mut shared);
    let mut dw_ffn = 0.0f32;
    for e in 0..count {
        let mut share = 0.0f32;
        let mut along_expert = 0.0f32;
        if here {
            share = gates.at(shares + e);
            let mut weight = w_ffn * share;
            if comptime!(mutant == 7) {
                weight = share;
            }
            let of_expert = (e * rows + n) * width;
            for step in 0..width.div_ceil(comptime!(rows::TOGETHER)) {
                let first = step * comptime!(rows::TOGETHER) + lane;
                rows::load(dy, &mut ups, at, first, width);
                rows::load(experts, &mut values, of_expert, first, width);
                #[unroll]
                for i in 0..comptime!(rows::AHEAD) {
                    along_expert += ups[i] * values[i];
                    values[i] = weight * ups[i];
                }
                rows::store(dexperts, &values, of_expert, first, width);
            }
        }
        let along_expert = rows::sum(along_expert, &mut shared);
        if comptime!(mutant == 6) {
            dw_ffn += along_expert;
        } else {
            dw_ffn += share * along_expert;
        }
        if here && lane == 0 {
            dgates.set(shares + e, w_ffn * along_expert);
        }
    }
    if here && lane == 0 {
        dgates.set(gate, dw_attn);
        dgates.set(gate + 1, lam_max * dlam);
        dgates.set(gate + 2, dw_ffn);
    }
}

/// y.
pub(super) fn forward<R: Engine>(
    b: &Device<R>,
    inputs: &Inputs<&Tensor>,
    sizes: Sizes,
    lam_max: f32,
    y: &Tensor,
) -> Result<()> {
    let Inputs { gates, attn, dense, experts, memory } = *inputs;
    let mutant = b.mutant(super::STEM);
    // A kernel has all its arguments in every variant; without memory nothing reads it.
    let uses = [gates, attn, dense, experts, memory.unwrap_or(attn), y];
    let bytes = super::bytes(inputs) + y.bytes();
    b.launch("blend::forward", rows::cubes(sizes.rows), bytes, &uses, |client, count, dim| {
        let [gates, attn, dense, experts, memory_, y] = uses.map(|t| b.floats(t));
        let [n, d, e] = sizes.words();
        let has = memory.is_some();
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client, count, dim, gates, attn, dense, experts, memory_, y, n, d, e, lam_max, has, mutant,
            )
        }
    })
}

/// The gradients of all inputs.
pub(super) fn backward<R: Engine>(
    b: &Device<R>,
    inputs: &Inputs<&Tensor>,
    sizes: Sizes,
    lam_max: f32,
    dy: &Tensor,
    into: &Gradients<'_>,
) -> Result<()> {
    let Inputs { gates, attn, dense, experts, memory } = *inputs;
    let mutant = b.mutant(super::STEM);
    // Without memory nothing reads it and nothing writes its gradient.
    let reads = [gates, attn, dense, experts, memory.unwrap_or(attn), dy];
    let writes = [into.gates, into.attn, into.dense, into.experts, into.memory.unwrap_or(into.attn)];
    let uses: Vec<&Tensor> = reads.into_iter().chain(writes).collect();
    // Every input has a gradient of its size.
    let bytes = 2 * super::bytes(inputs) + dy.bytes();
    b.launch("blend::backward", rows::cubes(sizes.rows), bytes, &uses, |client, count, dim| {
        let [gates, attn, dense, experts, memory_, dy] = reads.map(|t| b.floats(t));
        let [dgates, dattn, ddense, dexperts, dmemory] = writes.map(|t| b.floats(t));
        let [n, d, e] = sizes.words();
        let has = memory.is_some();
        // SAFETY: shapes were checked by the caller, every gradient has the shape of its input; units past the rows and
        // columns touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, gates, attn, dense, experts, memory_, dy, dgates, dattn, ddense, dexperts, dmemory,
                n, d, e, lam_max, has, mutant,
            )
        }
    })
}
