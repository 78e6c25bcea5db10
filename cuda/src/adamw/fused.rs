//! Arm `fused`: one launch over all groups, or one for every [`ranges::PIECES`] pieces of them. One unit of a cube
//! computes the bias corrections for all, and every unit moves [`ELEMENTS`] elements, neighbours side by side.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::adamw::{Config, Scalars, State};

use super::{Factors, OP, OUTSIDE, correction};
use crate::device::Device;
use crate::launch::Grid;
use crate::ranges;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// Units of a cube.
const UNITS: u32 = 256;

/// Elements of a unit: enough that the corrections, which the cube waits for, are small beside them.
const ELEMENTS: u32 = 8;

/// Moves the elements from `first` to `last` whose weight decay is not negative.
///
/// Mutants: 1 drops the scale, 2 counts one update less, 3 moves elements outside the groups, 4 is null (a renamed
/// local), 5 ignores the flag, 6 steps along the first moment before its update, 7 drops the decay.
#[cube(launch_unchecked)]
fn update_kernel(
    grads: &Floats,
    lr: &Floats,
    scale: &Floats,
    apply: &Floats,
    updates: &Words,
    params: &mut Floats,
    m: &mut Floats,
    v: &mut Floats,
    starts: Sequence<u32>,
    decays: Sequence<f32>,
    first: u32,
    last: u32,
    elements: u32,
    keep_m: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    eps: f32,
    #[comptime] mutant: u32,
) {
    let mut shared = SharedMemory::<f32>::new(2usize);
    if UNIT_POS == 0 {
        let mut count = updates.at(0);
        if comptime!(mutant == 2) {
            count -= 1;
        }
        shared[0] = lr.at(0) / correction(take_m, count);
        shared[1] = 1.0f32 / correction(take_v, count).sqrt();
    }
    sync_cube();
    let step = shared[0];
    let root_correction = shared[1];
    let units = comptime!(UNITS as usize);
    let mut flag = apply.at(0);
    if comptime!(mutant == 5) {
        flag = 1.0f32;
    }
    if flag == 1.0f32 {
        let begin = first as usize + CUBE_POS * units * elements as usize + UNIT_POS as usize;
        for element in 0..elements as usize {
            let i = begin + element * units;
            if i < last as usize {
                let mut decay = ranges::value_of(i, &starts, &decays);
                if comptime!(mutant == 3) {
                    decay = decay.abs();
                }
                if decay >= 0.0f32 {
                    if comptime!(mutant == 7) {
                        decay = 0.0f32;
                    }
                    let mut g = scale.at(0) * grads.at(i);
                    if comptime!(mutant == 1) {
                        g = grads.at(i);
                    }
                    if comptime!(mutant == 4) {
                        let renamed = scale.at(0) * grads.at(i);
                        g = renamed;
                    }
                    let old_m = m.at(i);
                    let new_m = keep_m * old_m + take_m * g;
                    let new_v = keep_v * v.at(i) + take_v * g * g;
                    let mut along = new_m;
                    if comptime!(mutant == 6) {
                        along = old_m;
                    }
                    let p = params.at(i);
                    m.set(i, new_m);
                    v.set(i, new_v);
                    let moved = step * along / (new_v.sqrt() * root_correction + eps);
                    params.set(i, p - moved - lr.at(0) * decay * p);
                }
            }
        }
    }
}

/// Moves every group.
pub(super) fn update<R: Engine>(
    b: &Device<R>,
    config: &Config,
    state: &State<&Tensor>,
    scalars: &Scalars<&Tensor>,
) -> Result<()> {
    let &State { params, grads, m, v } = state;
    let &Scalars { lr, scale, apply, updates } = scalars;
    let Factors { keep_m, take_m, keep_v, take_v, eps } = Factors::of(config);
    let groups = config.groups.iter().map(|group| (group.range.clone(), group.weight_decay as f32));
    let pieces = ranges::pieces(params.len(), groups, OUTSIDE);
    let moves = |piece: &ranges::Piece| piece.value != OUTSIDE;
    let (Some(from), Some(to)) = (pieces.iter().position(moves), pieces.iter().rposition(moves)) else {
        return Ok(());
    };
    let uses = [grads, lr, scale, apply, updates, params, m, v];
    let mutant = b.mutant(super::STEM);
    for part in pieces[from..=to].chunks(ranges::PIECES) {
        let (first, last) = (part[0].range.start, part[part.len() - 1].range.end);
        let moved: usize = part.iter().filter(|piece| moves(piece)).map(|piece| piece.range.len()).sum();
        let grid = Grid::cubes((last - first).div_ceil((UNITS * ELEMENTS) as usize), UNITS);
        b.launch(OP, grid, 7 * 4 * moved as u64, &uses, |client, count, dim| {
            let [grads, lr, scale, apply] = [grads, lr, scale, apply].map(|t| b.floats(t));
            let [params, m, v] = [params, m, v].map(|t| b.floats(t));
            let (starts, decays) = ranges::scalars(part);
            // SAFETY: pieces lie inside the buffers; units past the last element do nothing.
            unsafe {
                update_kernel::launch_unchecked::<R>(
                    client,
                    count,
                    dim,
                    grads,
                    lr,
                    scale,
                    apply,
                    b.words(updates),
                    params,
                    m,
                    v,
                    starts,
                    decays,
                    first as u32,
                    last as u32,
                    ELEMENTS,
                    keep_m,
                    take_m,
                    keep_v,
                    take_v,
                    eps,
                    mutant,
                )
            }
        })?;
    }
    Ok(())
}
