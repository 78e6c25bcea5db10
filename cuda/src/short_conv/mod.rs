//! `short_conv`: the equations are in `dormouse_reference::short_conv`.
//!
//! Saved: handles of what went in. The convolution is four products, cheaper to compute again than to read.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::short_conv::{CONTEXT, Config, Grads, Inputs, Outputs, Params, ShortConv, WIDTH};
use dormouse_reference::{Dims, Error, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

const STEM: &str = "short_conv";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("context-dropped"),
    Mutant::fused("bias-dropped"),
    Mutant::fused("sigmoid-for-silu"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("slope-without-bend"),
    Mutant::fused("dnext-dropped"),
    Mutant::fused("tokens-before-the-block-dropped"),
    Mutant::fused("params-miss-a-lane"),
];

/// What `forward` hands to `backward`: what went in.
pub struct Saved {
    x: Tensor,
    context: Option<Tensor>,
    weight: Tensor,
    bias: Option<Tensor>,
    arm: Arm,
}

/// Lengths of a call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    time: usize,
    channels: usize,
}

/// One backward call, checked.
struct Backward<'a> {
    dy: &'a Tensor,
    dnext: Option<&'a Tensor>,
    dweight: &'a Tensor,
    dbias: Option<&'a Tensor>,
    sizes: Sizes,
}

/// xx_i of sequence b in channel c, where xx = [context; x] along time and i is below T + 3. Zero where it lies in a
/// context that is absent.
#[cube]
fn joined(
    x: &Floats,
    context: &Floats,
    b: usize,
    i: usize,
    c: usize,
    time: usize,
    channels: usize,
    #[comptime] has_context: bool,
) -> f32 {
    let mut value = 0.0f32;
    if i >= comptime!(CONTEXT) {
        value = x.at((b * time + i - comptime!(CONTEXT)) * channels + c);
    } else {
        if has_context {
            value = context.at((b * comptime!(CONTEXT) + i) * channels + c);
        }
    }
    value
}

/// The tensor, or another where it has no elements: Vulkan binds no empty buffers. Nothing reads or writes it then.
fn or<'a>(tensor: &'a Tensor, other: &'a Tensor) -> &'a Tensor {
    if tensor.is_empty() { other } else { tensor }
}

impl<R: Engine> ShortConv for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "short_conv::forward";
        let Inputs { x, context } = inputs;
        let Params { weight, bias } = params;
        let mut dims = dims(OP);
        dims.bind("x", x.shape(), &["B", "T", "C"])?;
        dims.bind("weight", weight.shape(), &["4", "C"])?;
        dims.positive(&["C"])?;
        self.check_floats(OP, &[("x", x), ("weight", weight)])?;
        if let Some(context) = context {
            dims.bind("context", context.shape(), &["B", "3", "C"])?;
            self.check_floats(OP, &[("context", context)])?;
        }
        if let Some(bias) = bias {
            dims.bind("bias", bias.shape(), &["C"])?;
            self.check_floats(OP, &[("bias", bias)])?;
        }
        let sizes = sizes(&dims);
        let arm = self.forward_arm(STEM);
        let saved = Saved { x: x.clone(), context: context.cloned(), weight: weight.clone(), bias: bias.cloned(), arm };
        let y = self.float_scratch(x.shape())?;
        let next = self.float_scratch(&[sizes.batch, CONTEXT, sizes.channels])?;
        match arm {
            Arm::Plain => plain::forward(self, &saved, &y, &next, sizes)?,
            Arm::Fused => fused::forward(self, &saved, &y, &next, sizes)?,
        }
        Ok((Outputs { y, context: Some(next) }, saved))
    }

    fn backward(
        &self,
        _config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "short_conv::backward";
        let Outputs { y: dy, context: dnext } = upstream;
        let mut dims = dims(OP);
        dims.bind("x", saved.x.shape(), &["B", "T", "C"])?;
        dims.bind("y", dy.shape(), &["B", "T", "C"])?;
        if let Some(dnext) = dnext {
            dims.bind("context", dnext.shape(), &["B", "3", "C"])?;
        }
        dims.bind("weight", into.weight.shape(), &["4", "C"])?;
        let mut reads = vec![("x", &saved.x), ("weight", &saved.weight), ("y", dy)];
        let optional = [("context", saved.context.as_ref()), ("bias", saved.bias.as_ref()), ("context", dnext)];
        reads.extend(optional.into_iter().filter_map(|(arg, tensor)| Some((arg, tensor?))));
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "weight", into.weight, &reads)?;
        match (into.bias, &saved.bias) {
            (Some(bias), Some(_)) => {
                dims.bind("bias", bias.shape(), &["C"])?;
                self.check_into(OP, "bias", bias, &reads)?;
            }
            (None, None) => {}
            (Some(_), None) => return Err(presence(OP, "absent because forward had none", "present")),
            (None, Some(_)) => return Err(presence(OP, "present because forward had one", "absent")),
        }
        let call = Backward { dy, dnext, dweight: into.weight, dbias: into.bias, sizes: sizes(&dims) };
        let dx = self.float_scratch(saved.x.shape())?;
        let dcontext = saved.context.as_ref().map(|context| self.float_scratch(context.shape())).transpose()?;
        self.note_backward(STEM, saved.arm);
        match saved.arm {
            Arm::Plain => plain::backward(self, saved, &call, &dx, dcontext.as_ref())?,
            Arm::Fused => fused::backward(self, saved, &call, &dx, dcontext.as_ref())?,
        }
        Ok(Grads { dx, dcontext })
    }
}

/// A shape check that knows the two fixed lengths.
fn dims(op: &'static str) -> Dims {
    let mut dims = Dims::new(op);
    dims.set("4", WIDTH, "the width");
    dims.set("3", CONTEXT, "the width");
    dims
}

fn sizes(dims: &Dims) -> Sizes {
    Sizes { batch: dims.get("B"), time: dims.get("T"), channels: dims.get("C") }
}

fn presence(op: &'static str, expected: &'static str, got: &'static str) -> Error {
    Error::Presence { op, arg: "bias", expected, got }
}
