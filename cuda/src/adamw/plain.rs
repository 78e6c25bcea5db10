//! Arm `plain`: one launch a group, one unit an element.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::adamw::{Config, Group, Scalars, State};

use super::{Factors, OP, correction};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// Moves one element.
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
    first: u32,
    len: u32,
    weight_decay: f32,
    keep_m: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    eps: f32,
) {
    if ABSOLUTE_POS < len as usize && apply.at(0) == 1.0f32 {
        let i = first as usize + ABSOLUTE_POS;
        let g = scale.at(0) * grads.at(i);
        let new_m = keep_m * m.at(i) + take_m * g;
        let new_v = keep_v * v.at(i) + take_v * g * g;
        let first_moment = new_m / correction(take_m, updates.at(0));
        let second_moment = new_v / correction(take_v, updates.at(0));
        let p = params.at(i);
        m.set(i, new_m);
        v.set(i, new_v);
        params.set(i, p - lr.at(0) * (first_moment / (second_moment.sqrt() + eps) + weight_decay * p));
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
    let uses = [grads, lr, scale, apply, updates, params, m, v];
    for Group { range, weight_decay } in &config.groups {
        let bytes = 7 * 4 * range.len() as u64;
        b.launch(OP, Grid::units(range.len()), bytes, &uses, |client, count, dim| {
            let [grads, lr, scale, apply] = [grads, lr, scale, apply].map(|t| b.floats(t));
            let [params, m, v] = [params, m, v].map(|t| b.floats(t));
            let (first, len, decay) = (range.start as u32, range.len() as u32, *weight_decay as f32);
            // SAFETY: the range was checked to lie inside the buffers; units past it do nothing.
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
                    first,
                    len,
                    decay,
                    keep_m,
                    take_m,
                    keep_v,
                    take_v,
                    eps,
                )
            }
        })?;
    }
    Ok(())
}
