//! `decay_gate`: the equations are in `dormouse_reference::decay_gate`.
//!
//! Saved: handles of what went in. Both sigmoids are cheaper to compute again than to read.

mod fused;
mod plain;

use dormouse_reference::decay_gate::{Config, DecayGate, Grads, Inputs, Kind, Outputs, Params, check_config};
use dormouse_reference::{Dims, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "decay_gate";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("bias-dropped"),
    Mutant::fused("a-not-exponentiated"),
    Mutant::fused("beta-scale-dropped"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("dz-of-one-tail"),
    Mutant::fused("da-log-misses-the-last-key"),
    Mutant::fused("ddt-bias-misses-the-last-row"),
    Mutant::fused("dy-without-scale"),
];

/// What `forward` hands to `backward`: what went in.
pub struct Saved {
    z: Tensor,
    y: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    arm: Arm,
}

/// Lengths and numbers of a call.
#[derive(Clone, Copy)]
struct Sizes {
    /// B times T.
    rows: usize,
    heads: usize,
    keys: usize,
    /// Whether g is `lower_bound * sigma(a x)`, otherwise it is `-a * softplus(x)`.
    bounded: bool,
    lower_bound: f32,
    beta_scale: f32,
}

/// One backward call, checked.
struct Backward<'a> {
    dg: &'a Tensor,
    dbeta: &'a Tensor,
    da_log: &'a Tensor,
    ddt_bias: &'a Tensor,
    sizes: Sizes,
}

impl<R: Engine> DecayGate for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "decay_gate::forward";
        check_config(OP, config)?;
        let Inputs { z, y } = inputs;
        let Params { a_log, dt_bias } = params;
        let mut dims = Dims::new(OP);
        dims.bind("z", z.shape(), &["B", "T", "H", "K"])?;
        dims.bind("y", y.shape(), &["B", "T", "H"])?;
        dims.bind("a_log", a_log.shape(), &["H"])?;
        dims.bind("dt_bias", dt_bias.shape(), &["H", "K"])?;
        dims.positive(&["H", "K"])?;
        self.check_floats(OP, &[("z", z), ("y", y), ("a_log", a_log), ("dt_bias", dt_bias)])?;
        let arm = self.forward_arm(STEM);
        let saved = Saved { z: z.clone(), y: y.clone(), a_log: a_log.clone(), dt_bias: dt_bias.clone(), arm };
        let sizes = sizes(config, &dims);
        let outputs = match arm {
            Arm::Plain => plain::forward(self, &saved, sizes)?,
            Arm::Fused => fused::forward(self, &saved, sizes)?,
        };
        Ok((outputs, saved))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "decay_gate::backward";
        check_config(OP, config)?;
        let Saved { z, y, a_log, dt_bias, arm } = saved;
        let Outputs { g: dg, beta: dbeta } = upstream;
        let mut dims = Dims::new(OP);
        dims.bind("z", z.shape(), &["B", "T", "H", "K"])?;
        dims.bind("g", dg.shape(), &["B", "T", "H", "K"])?;
        dims.bind("beta", dbeta.shape(), &["B", "T", "H"])?;
        dims.bind("a_log", into.a_log.shape(), &["H"])?;
        dims.bind("dt_bias", into.dt_bias.shape(), &["H", "K"])?;
        let reads = [("z", z), ("y", y), ("a_log", a_log), ("dt_bias", dt_bias), ("g", dg), ("beta", dbeta)];
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "a_log", into.a_log, &reads)?;
        self.check_into(OP, "dt_bias", into.dt_bias, &reads)?;
        let sizes = sizes(config, &dims);
        let call = Backward { dg, dbeta, da_log: into.a_log, ddt_bias: into.dt_bias, sizes };
        self.note_backward(STEM, *arm);
        match arm {
            Arm::Plain => plain::backward(self, saved, &call),
            Arm::Fused => fused::backward(self, saved, &call),
        }
    }
}

fn sizes(config: &Config, dims: &Dims) -> Sizes {
    let (bounded, lower_bound) = match config.kind {
        Kind::Bounded { lower_bound } => (true, lower_bound as f32),
        Kind::Softplus => (false, 0.0),
    };
    let [batch, time, heads, keys] = ["B", "T", "H", "K"].map(|axis| dims.get(axis));
    Sizes { rows: batch * time, heads, keys, bounded, lower_bound, beta_scale: config.beta_scale as f32 }
}
