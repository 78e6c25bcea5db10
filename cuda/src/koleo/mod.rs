//! `koleo`: the equations are in `dormouse_reference::koleo`.
//!
//! How many positions are masked only the device knows, so tensors over the chosen rows have room for as many as there can
//! be, L = min(limit, N), and every kernel asks `count` how many there are. What lies behind them is never read.
//!
//! Saved: which rows were chosen and where, their p and q, everyone's neighbour with its squared distance, and 1 / M. The
//! host looks at none of it.

mod fused;
mod plain;

use std::sync::Arc;

use cubecl::prelude::*;
use dormouse_reference::koleo::{Config, Grads, Inputs, Koleo, Outputs, check_backward, check_forward};
use dormouse_reference::{DType, Result, Tensors};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

const STEM: &str = "koleo";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("itself-is-a-neighbour"),
    Mutant { name: "highest-of-equals", arm: Arm::Fused, gate: "meta" },
    Mutant::fused("last-tile-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("without-half"),
    Mutant::fused("neighbour-stands-still"),
    Mutant::fused("length-is-constant"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("first-rows-instead-of-a-stride"),
    Mutant::fused("every-row-is-masked"),
];

/// What `forward` hands to `backward`.
pub struct Saved {
    /// That of z.
    shape: Arc<[usize]>,
    rows: Rows,
    /// `[1]`, one over the number of chosen rows, or 0 below two of them.
    share: Tensor,
    arm: Arm,
}

/// The chosen rows; L is how many there can be.
struct Rows {
    /// `[1]`, how many there are.
    count: Tensor,
    /// `[L]`, where each lies in z.
    chosen: Tensor,
    /// `[N]`, one more than the number of the row among the chosen, or 0.
    place: Tensor,
    /// `[L, D]`
    p: Tensor,
    /// `[L]`
    q: Tensor,
    /// `[L]`, the number of the neighbour among the chosen.
    nearest: Tensor,
    /// `[L]`, the squared distance to it.
    square: Tensor,
}

/// One forward call, checked; there are rows.
struct Forward<'a> {
    z: &'a Tensor,
    mask: &'a Tensor,
    rows: &'a Rows,
    /// Outputs, `[1]`.
    loss: &'a Tensor,
    share: &'a Tensor,
    n: usize,
    width: usize,
    /// L.
    room: usize,
    norm_eps: f32,
    eps: f32,
}

/// One backward call, checked.
struct Backward<'a> {
    dloss: &'a Tensor,
    plus: Option<&'a Tensor>,
    dz: &'a Tensor,
    n: usize,
    width: usize,
    eps: f32,
}

/// w_k at column `d` for `size` = dloss / M: what row `k`, whose neighbour is `j`, is pushed by.
#[cube]
fn push(p: &Floats, square: &Floats, k: usize, j: usize, d: usize, width: usize, size: f32, eps: f32) -> f32 {
    let factor = -size / (square.at(k) + eps);
    factor * (p.at(k * width + d) - p.at(j * width + d))
}

impl<R: Engine> Koleo for Device<R> {
    type Saved = Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "koleo::forward";
        let dims = check_forward(config, inputs.clone().map(|_, t| t.shape()))?;
        let Inputs { z, mask } = inputs;
        self.check_life(OP, "mask", mask)?;
        self.check_floats(OP, &[("z", z)])?;
        let (n, width) = (dims.get("N"), dims.get("D"));
        let room = config.limit.min(n);
        let whole = |len: usize| self.scratch(&[len], DType::U32);
        let rows = Rows {
            count: whole(1)?,
            chosen: whole(room)?,
            place: whole(n)?,
            p: self.float_scratch(&[room, width])?,
            q: self.float_scratch(&[room])?,
            nearest: whole(room)?,
            square: self.float_scratch(&[room])?,
        };
        let [loss, share] = [self.float_scratch(&[1])?, self.float_scratch(&[1])?];
        let (norm_eps, eps) = (config.norm_eps as f32, config.eps as f32);
        let arm = self.forward_arm(STEM);
        let call = Forward { z, mask, rows: &rows, loss: &loss, share: &share, n, width, room, norm_eps, eps };
        match arm {
            // A kernel cannot be given tensors without elements.
            _ if n == 0 => self.fill(&loss, 0.0)?,
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        Ok((Outputs { loss }, Saved { shape: z.shape.clone(), rows, share, arm }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Option<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "koleo::backward";
        let Saved { shape, rows, share, arm } = saved;
        let dloss = upstream.loss;
        let dims = check_backward(config, shape, dloss.shape(), plus.map(|plus| plus.shape()))?;
        for (arg, tensor) in [("count", &rows.count), ("place", &rows.place), ("nearest", &rows.nearest)] {
            self.check_life(OP, arg, tensor)?;
        }
        self.check_floats(OP, &[("p", &rows.p), ("q", &rows.q), ("square", &rows.square), ("share", share)])?;
        self.check_floats(OP, &[("loss", dloss)])?;
        if let Some(plus) = plus {
            self.check_floats(OP, &[("plus", plus)])?;
        }
        let dz = self.float_scratch(shape)?;
        let call = Backward { dloss, plus, dz: &dz, n: dims.get("N"), width: dims.get("D"), eps: config.eps as f32 };
        self.note_backward(STEM, *arm);
        match arm {
            _ if call.n == 0 => {}
            Arm::Plain => plain::backward(self, saved, &call)?,
            Arm::Fused => fused::backward(self, saved, &call)?,
        }
        Ok(Grads { dz })
    }
}
