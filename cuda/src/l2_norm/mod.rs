//! `l2_norm`: the equations are in `dormouse_reference::l2_norm`.
//!
//! Saved: the normalised rows, and rho, one number a row.

mod fused;
mod plain;

use dormouse_reference::l2_norm::{Config, Grads, Inputs, L2Norm, Outputs, check_config};
use dormouse_reference::{Dims, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "l2_norm";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("eps-dropped"),
    Mutant::fused("mean-for-sum"),
    Mutant::fused("last-column-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("backward-without-projection"),
    Mutant::fused("projection-misses-the-last-column"),
    Mutant::fused("backward-without-rho"),
];

/// What `forward` hands to `backward`: the normalised rows and one number a row.
pub struct Saved {
    y: Tensor,
    rho: Tensor,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    x: &'a Tensor,
    rows: usize,
    width: usize,
    eps: f32,
}

/// One backward call, checked.
struct Backward<'a> {
    dy: &'a Tensor,
    rows: usize,
    width: usize,
}

impl<R: Engine> L2Norm for Device<R> {
    type Saved = Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "l2_norm::forward";
        check_config(OP, config)?;
        let x = inputs.x;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", x.shape(), "N", &["K"])?;
        dims.positive(&["K"])?;
        self.check_floats(OP, &[("x", x)])?;
        let call = Forward { x, rows: dims.get("N"), width: dims.get("K"), eps: config.eps as f32 };
        let arm = self.forward_arm(STEM);
        let (y, rho) = match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        };
        Ok((Outputs { y: y.clone() }, Saved { y, rho, arm }))
    }

    fn backward(&self, config: &Config, saved: &Saved, upstream: Outputs<&Tensor>) -> Result<Grads<Tensor>> {
        const OP: &str = "l2_norm::backward";
        check_config(OP, config)?;
        let Saved { y, rho, arm } = saved;
        let dy = upstream.y;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", y.shape(), "N", &["K"])?;
        dims.bind_rows("y", dy.shape(), "N", &["K"])?;
        self.check_floats(OP, &[("x", y), ("rho", rho), ("y", dy)])?;
        let call = Backward { dy, rows: dims.get("N"), width: dims.get("K") };
        self.note_backward(STEM, *arm);
        let dx = match arm {
            Arm::Plain => plain::backward(self, saved, &call)?,
            Arm::Fused => fused::backward(self, saved, &call)?,
        };
        Ok(Grads { dx })
    }
}
