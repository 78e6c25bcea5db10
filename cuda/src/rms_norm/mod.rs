//! `rms_norm`: the equations are in `dormouse_reference::rms_norm`.
//!
//! Saved: the shifted rows c, and rho, one number a row.

mod fused;
mod plain;

use dormouse_reference::rms_norm::{Config, Grads, Inputs, Outputs, Params, RmsNorm, check_config};
use dormouse_reference::{Dims, Error, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "rms_norm";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("eps-dropped"),
    Mutant::fused("sum-for-mean"),
    Mutant::fused("last-column-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("mean-dropped"),
    Mutant::fused("dc-dropped"),
    Mutant::fused("last-row-missed"),
];

/// What `forward` hands to `backward`: the shifted rows and one number a row.
pub struct Saved {
    c: Tensor,
    gain: Tensor,
    rho: Tensor,
    has_shift: bool,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    x: &'a Tensor,
    gain: &'a Tensor,
    shift: Option<&'a Tensor>,
    rows: usize,
    width: usize,
    eps: f32,
}

/// One backward call, checked.
struct Backward<'a> {
    dy: &'a Tensor,
    dc: Option<&'a Tensor>,
    dgain: &'a Tensor,
    dshift: Option<&'a Tensor>,
    rows: usize,
    width: usize,
}

impl<R: Engine> RmsNorm for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "rms_norm::forward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        let x = inputs.x;
        dims.bind_rows("x", x.shape(), "N", &["D"])?;
        dims.bind("gain", params.gain.shape(), &["D"])?;
        dims.positive(&["D"])?;
        self.check_floats(OP, &[("x", x), ("gain", params.gain)])?;
        if let Some(shift) = params.shift {
            dims.bind("shift", shift.shape(), &["D"])?;
            self.check_floats(OP, &[("shift", shift)])?;
        }
        let (rows, width) = (dims.get("N"), dims.get("D"));
        let call = Forward { x, gain: params.gain, shift: params.shift, rows, width, eps: config.eps as f32 };
        let (y, saved) = match self.forward_arm(STEM) {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        };
        let c = saved.has_shift.then(|| saved.c.clone());
        Ok((Outputs { y, c }, saved))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "rms_norm::backward";
        check_config(OP, config)?;
        let Saved { c, gain, rho, has_shift, .. } = saved;
        let dy = upstream.y;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", c.shape(), "N", &["D"])?;
        dims.bind_rows("y", dy.shape(), "N", &["D"])?;
        dims.bind("gain", into.gain.shape(), &["D"])?;
        let reads = [("c", c), ("gain", gain), ("rho", rho), ("y", dy)];
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "gain", into.gain, &reads)?;
        if let Some(dc) = upstream.c {
            if !has_shift {
                return Err(presence(OP, "c", "absent because there is no `shift`", "present"));
            }
            dims.bind_rows("c", dc.shape(), "N", &["D"])?;
            self.check_floats(OP, &[("c", dc)])?;
        }
        match (into.shift, has_shift) {
            (Some(shift), true) => {
                dims.bind("shift", shift.shape(), &["D"])?;
                self.check_into(OP, "shift", shift, &reads)?;
            }
            (None, false) => {}
            (Some(_), false) => return Err(presence(OP, "shift", "absent because forward had none", "present")),
            (None, true) => return Err(presence(OP, "shift", "present because forward had one", "absent")),
        }
        let (rows, width) = (dims.get("N"), dims.get("D"));
        let call = Backward { dy, dc: upstream.c, dgain: into.gain, dshift: into.shift, rows, width };
        self.note_backward(STEM, saved.arm);
        let dx = match saved.arm {
            Arm::Plain => plain::backward(self, saved, &call)?,
            Arm::Fused => fused::backward(self, saved, &call)?,
        };
        Ok(Grads { dx })
    }
}

fn presence(op: &'static str, arg: &'static str, expected: &'static str, got: &'static str) -> Error {
    Error::Presence { op, arg, expected, got }
}
