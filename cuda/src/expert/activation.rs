//! The activation between the maps and its adjoint: one unit, one element, the same in both arms.

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::arm::Arm;
use crate::controller::sigmoid;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// act = silu(h), or silu(g) h with a gate.
///
/// Mutants: 9 takes sigma for silu, 10 leaves out the silu of a gate.
#[cube(launch_unchecked)]
fn act_kernel(h: &Floats, g: &Floats, act: &mut Floats, len: u32, #[comptime] has_gate: bool, #[comptime] mutant: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let up = h.at(i);
        if comptime!(has_gate) {
            let gate = g.at(i);
            let mut opened = gate * sigmoid(gate);
            if comptime!(mutant == 10) {
                opened = gate;
            }
            act.set(i, opened * up);
        } else if comptime!(mutant == 9) {
            act.set(i, sigmoid(up));
        } else {
            act.set(i, up * sigmoid(up));
        }
    }
}

/// The derivative of silu. 1 - sigma loses its tail for large x, where it is added to 1 and does not matter.
#[cube]
fn slope(x: f32, #[comptime] mutant: u32) -> f32 {
    let sigma = sigmoid(x);
    if comptime!(mutant == 11) { sigma } else { sigma * (1.0f32 + x * (1.0f32 - sigma)) }
}

/// dact becomes dh, and with a gate dg is written.
///
/// Mutants: 11 drops the second term of the slope, 12 leaves the gate out of dh, 13 leaves h out of dg.
#[cube(launch_unchecked)]
fn slope_kernel(
    h: &Floats,
    g: &Floats,
    d: &mut Floats,
    dg: &mut Floats,
    len: u32,
    #[comptime] has_gate: bool,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let dact = d.at(i);
        if comptime!(has_gate) {
            let gate = g.at(i);
            let mut up = h.at(i);
            if comptime!(mutant == 13) {
                up = 1.0f32;
            }
            dg.set(i, dact * up * slope(gate, mutant));
            if comptime!(mutant != 12) {
                d.set(i, dact * (gate * sigmoid(gate)));
            }
        } else {
            d.set(i, dact * slope(h.at(i), mutant));
        }
    }
}

/// Writes the activation.
pub(super) fn forward<R: Engine>(b: &Device<R>, arm: Arm, h: &Tensor, g: Option<&Tensor>, act: &Tensor) -> Result<()> {
    let uses = [h, g.unwrap_or(h), act];
    let bytes = h.bytes() + g.map_or(0, Tensor::bytes) + act.bytes();
    let mutant = b.mutant_of(super::STEM, arm);
    b.launch("expert::act", Grid::units(act.len()), bytes, &uses, |client, count, dim| {
        let [h, g_, out] = uses.map(|t| b.floats(t));
        // SAFETY: all have one length.
        unsafe {
            act_kernel::launch_unchecked::<R>(client, count, dim, h, g_, out, act.len() as u32, g.is_some(), mutant)
        }
    })
}

/// Turns `d`, the gradient of the activation, into that of h, and returns that of g.
pub(super) fn backward<R: Engine>(
    b: &Device<R>,
    arm: Arm,
    h: &Tensor,
    g: Option<&Tensor>,
    d: &Tensor,
) -> Result<Option<Tensor>> {
    // A kernel has all its arguments in every variant; without a gate nothing touches the last one.
    let dg = b.float_scratch(if g.is_some() { d.shape() } else { &[1] })?;
    let uses = [h, g.unwrap_or(h), d, &dg];
    let bytes = h.bytes() + 2 * d.bytes() + g.map_or(0, |g| 2 * g.bytes());
    let mutant = b.mutant_of(super::STEM, arm);
    b.launch("expert::dh", Grid::units(d.len()), bytes, &uses, |client, count, dim| {
        let [h, g_, d_, dg] = uses.map(|t| b.floats(t));
        // SAFETY: all that is touched has the length of `d`.
        unsafe {
            slope_kernel::launch_unchecked::<R>(client, count, dim, h, g_, d_, dg, d.len() as u32, g.is_some(), mutant)
        }
    })?;
    Ok(g.is_some().then_some(dg))
}
