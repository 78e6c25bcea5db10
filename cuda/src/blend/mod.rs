//! `blend`: the equations are in `dormouse_reference::blend`.
//!
//! Saved: the inputs.

mod fused;
mod plain;

use dormouse_reference::blend::{Blend, Config, Grads, Inputs, Outputs, bind, check_config};
use dormouse_reference::{Dims, Result, controller};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "blend";

/// Gates of a row before the experts' shares.
const FIXED_GATES: usize = controller::FIXED_GATES;

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("lam-max-dropped"),
    Mutant::fused("dense-whole"),
    Mutant::fused("last-expert-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("dlam-without-dense"),
    Mutant::fused("dw-ffn-without-shares"),
    Mutant::fused("dexperts-without-w-ffn"),
];

/// What `forward` hands to `backward`.
pub struct Saved {
    inputs: Inputs<Tensor>,
    arm: Arm,
}

/// The lengths of a call's axes.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    width: usize,
    experts: usize,
}

impl Sizes {
    fn of(dims: &Dims) -> Self {
        Self { rows: dims.get("N"), width: dims.get("D"), experts: dims.get("E") }
    }

    /// The lengths as arguments of a kernel.
    fn words(self) -> [u32; 3] {
        [self.rows, self.width, self.experts].map(|n| n as u32)
    }
}

/// Bytes of all inputs.
fn bytes(inputs: &Inputs<&Tensor>) -> u64 {
    inputs.clone().named().into_iter().map(|(_, x)| x.bytes()).sum()
}

/// What backward returns, allocated.
struct Gradients<'a> {
    gates: &'a Tensor,
    attn: &'a Tensor,
    dense: &'a Tensor,
    experts: &'a Tensor,
    memory: Option<&'a Tensor>,
}

impl<R: Engine> Blend for Device<R> {
    type Saved = Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "blend::forward";
        check_config(OP, config)?;
        let sizes = Sizes::of(&bind(OP, inputs.clone().map(|_, x| x.shape()))?);
        self.check_floats(OP, &inputs.clone().named())?;
        let y = self.float_scratch(inputs.attn.shape())?;
        let lam_max = config.lam_max as f32;
        let arm = self.forward_arm(STEM);
        match arm {
            Arm::Plain => plain::forward(self, &inputs, sizes, lam_max, &y)?,
            Arm::Fused => fused::forward(self, &inputs, sizes, lam_max, &y)?,
        }
        Ok((Outputs { y }, Saved { inputs: inputs.map(|_, x| x.clone()), arm }))
    }

    fn backward(&self, config: &Config, saved: &Saved, upstream: Outputs<&Tensor>) -> Result<Grads<Tensor>> {
        const OP: &str = "blend::backward";
        check_config(OP, config)?;
        let (inputs, dy) = (saved.inputs.as_ref(), upstream.y);
        let mut dims = bind(OP, inputs.clone().map(|_, x| x.shape()))?;
        dims.bind_rows("y", dy.shape(), "N", &["D"])?;
        let sizes = Sizes::of(&dims);
        self.check_floats(OP, &inputs.clone().named())?;
        self.check_floats(OP, &[("y", dy)])?;
        let dgates = self.float_scratch(inputs.gates.shape())?;
        let dattn = self.float_scratch(inputs.attn.shape())?;
        let ddense = self.float_scratch(inputs.dense.shape())?;
        let dexperts = self.float_scratch(inputs.experts.shape())?;
        let dmemory = inputs.memory.map(|memory| self.float_scratch(memory.shape())).transpose()?;
        let into =
            Gradients { gates: &dgates, attn: &dattn, dense: &ddense, experts: &dexperts, memory: dmemory.as_ref() };
        let lam_max = config.lam_max as f32;
        self.note_backward(STEM, saved.arm);
        match saved.arm {
            Arm::Plain => plain::backward(self, &inputs, sizes, lam_max, dy, &into)?,
            Arm::Fused => fused::backward(self, &inputs, sizes, lam_max, dy, &into)?,
        }
        Ok(Grads { dgates, dattn, ddense, dexperts, dmemory })
    }
}
