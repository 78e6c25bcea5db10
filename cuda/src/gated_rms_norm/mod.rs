//! `gated_rms_norm`: the equations are in `dormouse_reference::gated_rms_norm`.
//!
//! Saved: handles of what went in, and rho, one number a row. The gate is cheaper to compute again than to read.

mod fused;
mod plain;

use dormouse_reference::gated_rms_norm::{Config, GatedRmsNorm, Grads, Inputs, Outputs, Params, check_config};
use dormouse_reference::{Dims, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "gated_rms_norm";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("eps-dropped"),
    Mutant::fused("sum-for-mean"),
    Mutant::fused("forward-without-gain"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("backward-without-mean"),
    Mutant::fused("slope-of-an-exponential"),
    Mutant::fused("dgain-misses-a-lane"),
];

/// What `forward` hands to `backward`: what went in and one number a row.
pub struct Saved {
    o: Tensor,
    zeta: Tensor,
    gain: Tensor,
    rho: Tensor,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    o: &'a Tensor,
    zeta: &'a Tensor,
    gain: &'a Tensor,
    rows: usize,
    width: usize,
    eps: f32,
}

/// One backward call, checked.
struct Backward<'a> {
    dy: &'a Tensor,
    dgain: &'a Tensor,
    rows: usize,
    width: usize,
}

impl<R: Engine> GatedRmsNorm for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "gated_rms_norm::forward";
        check_config(OP, config)?;
        let Inputs { o, zeta } = inputs;
        let gain = params.gain;
        let mut dims = Dims::new(OP);
        dims.bind_rows("o", o.shape(), "N", &["V"])?;
        dims.bind_rows("zeta", zeta.shape(), "N", &["V"])?;
        dims.bind("gain", gain.shape(), &["V"])?;
        dims.positive(&["V"])?;
        self.check_floats(OP, &[("o", o), ("zeta", zeta), ("gain", gain)])?;
        let call = Forward { o, zeta, gain, rows: dims.get("N"), width: dims.get("V"), eps: config.eps as f32 };
        let arm = self.forward_arm(STEM);
        let (y, rho) = match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        };
        Ok((Outputs { y }, Saved { o: o.clone(), zeta: zeta.clone(), gain: gain.clone(), rho, arm }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "gated_rms_norm::backward";
        check_config(OP, config)?;
        let Saved { o, zeta, gain, rho, arm } = saved;
        let dy = upstream.y;
        let mut dims = Dims::new(OP);
        dims.bind_rows("o", o.shape(), "N", &["V"])?;
        dims.bind_rows("y", dy.shape(), "N", &["V"])?;
        dims.bind("gain", into.gain.shape(), &["V"])?;
        let reads = [("o", o), ("zeta", zeta), ("gain", gain), ("rho", rho), ("y", dy)];
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "gain", into.gain, &reads)?;
        let call = Backward { dy, dgain: into.gain, rows: dims.get("N"), width: dims.get("V") };
        self.note_backward(STEM, *arm);
        match arm {
            Arm::Plain => plain::backward(self, saved, &call),
            Arm::Fused => fused::backward(self, saved, &call),
        }
    }
}
