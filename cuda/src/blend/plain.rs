//! Arm `plain`: one unit does one element; the gradient of a gate is summed over its row by one unit.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::blend::Inputs;

use super::{FIXED_GATES, Gradients, Sizes};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// y. One unit, one element.
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
) {
    let i = ABSOLUTE_POS;
    let (len, count) = (rows as usize * width as usize, count as usize);
    if i < len {
        let gate = i / width as usize * (comptime!(FIXED_GATES) + count);
        let lam = lam_max * gates.at(gate + 1);
        let mut value = gates.at(gate) * attn.at(i) + (1.0f32 - lam) * dense.at(i);
        if has_memory {
            value += lam * memory.at(i);
        }
        for e in 0..count {
            value += gates.at(gate + 2) * gates.at(gate + comptime!(FIXED_GATES) + e) * experts.at(e * len + i);
        }
        y.set(i, value);
    }
}

/// The gradients of the branches. One unit, one element of dy.
#[cube(launch_unchecked)]
fn branches_kernel(
    gates: &Floats,
    dy: &Floats,
    dattn: &mut Floats,
    ddense: &mut Floats,
    dexperts: &mut Floats,
    dmemory: &mut Floats,
    rows: u32,
    width: u32,
    count: u32,
    lam_max: f32,
    #[comptime] has_memory: bool,
) {
    let i = ABSOLUTE_POS;
    let (len, count) = (rows as usize * width as usize, count as usize);
    if i < len {
        let gate = i / width as usize * (comptime!(FIXED_GATES) + count);
        let lam = lam_max * gates.at(gate + 1);
        dattn.set(i, gates.at(gate) * dy.at(i));
        ddense.set(i, (1.0f32 - lam) * dy.at(i));
        if has_memory {
            dmemory.set(i, lam * dy.at(i));
        }
        for e in 0..count {
            let weight = gates.at(gate + 2) * gates.at(gate + comptime!(FIXED_GATES) + e);
            dexperts.set(e * len + i, weight * dy.at(i));
        }
    }
}

/// The sum of products of a row of dy and a row of `x` that begins at `from`.
#[cube]
fn along(dy: &Floats, x: &Floats, row: usize, from: usize, width: usize) -> f32 {
    let mut sum = 0.0f32;
    for d in 0..width {
        sum += dy.at(row + d) * x.at(from + d);
    }
    sum
}

/// dgates. One unit, one gate of a row.
#[cube(launch_unchecked)]
fn gates_kernel(
    gates: &Floats,
    attn: &Floats,
    dense: &Floats,
    experts: &Floats,
    memory: &Floats,
    dy: &Floats,
    dgates: &mut Floats,
    rows: u32,
    width: u32,
    count: u32,
    lam_max: f32,
    #[comptime] has_memory: bool,
) {
    let i = ABSOLUTE_POS;
    let (width, count) = (width as usize, count as usize);
    let (len, all) = (rows as usize * width, comptime!(FIXED_GATES) + count);
    if i < rows as usize * all {
        let (gate, k) = (i / all * all, i % all);
        let row = i / all * width;
        let mut value = 0.0f32;
        if k == 0 {
            value = along(dy, attn, row, row, width);
        } else if k == 1 {
            value = -along(dy, dense, row, row, width);
            if has_memory {
                value += along(dy, memory, row, row, width);
            }
            value *= lam_max;
        } else if k == 2 {
            for e in 0..count {
                let share = gates.at(gate + comptime!(FIXED_GATES) + e);
                value += share * along(dy, experts, row, e * len + row, width);
            }
        } else {
            let e = k - comptime!(FIXED_GATES);
            value = gates.at(gate + 2) * along(dy, experts, row, e * len + row, width);
        }
        dgates.set(i, value);
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
    // A kernel has all its arguments in every variant; without memory nothing reads it.
    let uses = [gates, attn, dense, experts, memory.unwrap_or(attn), y];
    let bytes = super::bytes(inputs) + y.bytes();
    b.launch("blend::forward", Grid::units(y.len()), bytes, &uses, |client, count, dim| {
        let [gates, attn, dense, experts, memory_, y] = uses.map(|t| b.floats(t));
        let [n, d, e] = sizes.words();
        let has = memory.is_some();
        // SAFETY: shapes were checked by the caller; units past the elements do nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client, count, dim, gates, attn, dense, experts, memory_, y, n, d, e, lam_max, has,
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
    let [n, d, e] = sizes.words();
    let has = memory.is_some();
    let uses = [gates, dy, into.attn, into.dense, into.experts, into.memory.unwrap_or(into.attn)];
    let written = [into.attn, into.dense, into.experts].map(Tensor::bytes).iter().sum::<u64>();
    let bytes = gates.bytes() + dy.bytes() + written + into.memory.map_or(0, Tensor::bytes);
    b.launch("blend::branches", Grid::units(dy.len()), bytes, &uses, |client, count, dim| {
        let [gates, dy, dattn, ddense, dexperts, dmemory] = uses.map(|t| b.floats(t));
        // SAFETY: every gradient has the shape of its input; units past the elements do nothing.
        unsafe {
            branches_kernel::launch_unchecked::<R>(
                client, count, dim, gates, dy, dattn, ddense, dexperts, dmemory, n, d, e, lam_max, has,
            )
        }
    })?;
    let uses = [gates, attn, dense, experts, memory.unwrap_or(attn), dy, into.gates];
    let bytes = super::bytes(inputs) + dy.bytes() + into.gates.bytes();
    b.launch("blend::gates", Grid::units(into.gates.len()), bytes, &uses, |client, count, dim| {
        let [gates, attn, dense, experts, memory, dy, dgates] = uses.map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller; units past the gates do nothing.
        unsafe {
            gates_kernel::launch_unchecked::<R>(
                client, count, dim, gates, attn, dense, experts, memory, dy, dgates, n, d, e, lam_max, has,
            )
        }
    })
}
