//! `residual`: the equations are in `dormouse_reference::residual`.
//!
//! Saved: the branch and rho. rho is read on the device, never by the host.

mod fused;
mod plain;

use dormouse_reference::residual::{Config, Grads, Inputs, Outputs, Params, Residual};
use dormouse_reference::{Dims, Result, check_one};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "residual";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("forward-without-rho"),
    Mutant::fused("stream-dropped"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("dy-without-rho"),
    Mutant::fused("drho-times-rho"),
    Mutant::fused("last-block-missed"),
];

/// What `forward` hands to `backward`: handles only.
pub struct Saved {
    y: Tensor,
    rho: Tensor,
    arm: Arm,
}

impl<R: Engine> Residual for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "residual::forward";
        let (Inputs { c, y }, rho) = (inputs, params.rho);
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", c.shape(), "N", &["D"])?;
        dims.bind_rows("y", y.shape(), "N", &["D"])?;
        dims.positive(&["D"])?;
        check_one(OP, "rho", rho.shape())?;
        self.check_floats(OP, &[("c", c), ("y", y), ("rho", rho)])?;
        let h = self.float_scratch(c.shape())?;
        let arm = self.forward_arm(STEM);
        match arm {
            Arm::Plain => plain::forward(self, c, y, rho, &h)?,
            Arm::Fused => fused::forward(self, c, y, rho, &h)?,
        }
        Ok((Outputs { h }, Saved { y: y.clone(), rho: rho.clone(), arm }))
    }

    fn backward(
        &self,
        _config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "residual::backward";
        let (Saved { y, rho, arm }, dh) = (saved, upstream.h);
        let mut dims = Dims::new(OP);
        dims.bind_rows("y", y.shape(), "N", &["D"])?;
        dims.bind_rows("h", dh.shape(), "N", &["D"])?;
        check_one(OP, "rho", into.rho.shape())?;
        let reads = [("y", y), ("rho", rho), ("h", dh)];
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "rho", into.rho, &reads)?;
        let dy = self.float_scratch(y.shape())?;
        self.note_backward(STEM, *arm);
        match arm {
            Arm::Plain => plain::backward(self, saved, dh, &dy, into.rho)?,
            Arm::Fused => fused::backward(self, saved, dh, &dy, into.rho)?,
        }
        Ok(Grads { dc: dh.clone(), dy })
    }
}
