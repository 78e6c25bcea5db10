//! `blend`: the equations are in `dormouse_reference::blend`.
//!
//! Saved: the inputs.

mod fused;
mod plain;

use dormouse_reference::blend::{Blend, Config, Grads, Inputs, Outputs};
use dormouse_reference::{Dims, Error, Result, controller};

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
        let (sizes, _) = bind(OP, &inputs)?;
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
        let (sizes, mut dims) = bind(OP, &inputs)?;
        dims.bind_rows("y", dy.shape(), "N", &["D"])?;
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

fn check_config(op: &'static str, config: &Config) -> Result<()> {
    if (0.0..=1.0).contains(&config.lam_max) {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "lam_max",
        expected: "from 0 to 1, since memory and dense layer share one weight".to_owned(),
        got: config.lam_max.to_string(),
    })
}

/// Checks the shapes of the inputs.
fn bind(op: &'static str, inputs: &Inputs<&Tensor>) -> Result<(Sizes, Dims)> {
    let mut dims = Dims::new(op);
    dims.bind_rows("attn", inputs.attn.shape(), "N", &["D"])?;
    dims.bind_rows("dense", inputs.dense.shape(), "N", &["D"])?;
    if let Some(memory) = inputs.memory {
        dims.bind_rows("memory", memory.shape(), "N", &["D"])?;
    }
    dims.bind("experts", &stacked(inputs.experts.shape()), &["E", "N", "D"])?;
    dims.positive(&["D", "E"])?;
    dims.set("3+E", FIXED_GATES + dims.get("E"), "experts");
    dims.bind_rows("gates", inputs.gates.shape(), "N", &["3+E"])?;
    let sizes = Sizes { rows: dims.get("N"), width: dims.get("D"), experts: dims.get("E") };
    Ok((sizes, dims))
}

/// `[E, .., D]` as `[E, N, D]`.
fn stacked(shape: &[usize]) -> Vec<usize> {
    match shape {
        [first, middle @ .., last] => vec![*first, middle.iter().product(), *last],
        _ => shape.to_vec(),
    }
}
