//! `mask_vector`: the equations are in `dormouse_reference::mask_vector`.
//!
//! Saved: the mask, and the shape of x.

mod fused;
mod plain;

use std::sync::Arc;

use dormouse_reference::mask_vector::{
    Config, Grads, Inputs, MaskVector, Outputs, Params, check_backward, check_forward,
};
use dormouse_reference::{Dims, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "mask_vector";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("mask-inverted"),
    Mutant::fused("mask-of-the-next-row"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("masked-rows-keep-their-gradient"),
    Mutant::fused("vector-gets-every-row"),
    Mutant::fused("last-row-of-a-block-missed"),
    Mutant { name: "masked-rows-are-read", arm: Arm::Fused, gate: "meta" },
];

/// What `forward` hands to `backward`.
pub struct Saved {
    mask: Tensor,
    shape: Arc<[usize]>,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    x: &'a Tensor,
    mask: &'a Tensor,
    vector: &'a Tensor,
    y: &'a Tensor,
    rows: usize,
    width: usize,
}

/// One backward call, checked.
struct Backward<'a> {
    mask: &'a Tensor,
    dy: &'a Tensor,
    dx: &'a Tensor,
    dvector: &'a Tensor,
    rows: usize,
    width: usize,
}

impl<R: Engine> MaskVector for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "mask_vector::forward";
        let (Inputs { x, mask }, vector) = (inputs.clone(), params.vector);
        let dims = check_forward(inputs.map(|_, t| t.shape()), vector.shape())?;
        self.check_life(OP, "mask", mask)?;
        self.check_floats(OP, &[("x", x), ("vector", vector)])?;
        let (rows, width) = sizes(&dims);
        let y = self.float_scratch(x.shape())?;
        let call = Forward { x, mask, vector, y: &y, rows, width };
        let arm = self.forward_arm(STEM);
        match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        Ok((Outputs { y }, Saved { mask: mask.clone(), shape: x.shape.clone(), arm }))
    }

    fn backward(
        &self,
        _config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "mask_vector::backward";
        let (Saved { mask, shape, arm }, dy, dvector) = (saved, upstream.y, into.vector);
        let dims = check_backward(shape, dy.shape(), dvector.shape())?;
        self.check_life(OP, "mask", mask)?;
        self.check_floats(OP, &[("y", dy)])?;
        self.check_into(OP, "vector", dvector, &[("mask", mask), ("y", dy)])?;
        let (rows, width) = sizes(&dims);
        let dx = self.float_scratch(shape)?;
        let call = Backward { mask, dy, dx: &dx, dvector, rows, width };
        self.note_backward(STEM, *arm);
        match arm {
            Arm::Plain => plain::backward(self, &call)?,
            Arm::Fused => fused::backward(self, &call)?,
        }
        Ok(Grads { dx })
    }
}

/// N and D.
fn sizes(dims: &Dims) -> (usize, usize) {
    (dims.get("N"), dims.get("D"))
}
