//! `linear`: the equations are in `dormouse_reference::linear`.
//!
//! Arm `plain`: the three products run on one tiled kernel, in f32 whatever the hardware could do faster. `bias`,
//! `plus` and the gradient that a weight already has are added by the product that writes there.

use dormouse_reference::linear::{Config, Grads, Inputs, Linear, Outputs, Params};
use dormouse_reference::{Dims, Error, Precision, Result};

use crate::device::Device;
use crate::matmul::{Plus, plain, product, transposed};
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::Tensor;

/// What `forward` hands to `backward`: handles of what went in.
pub struct Saved {
    x: Tensor,
    weight: Tensor,
    has_bias: bool,
}

impl<R: Engine> Linear for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "linear::forward";
        check_precision(OP, config.precision)?;
        let (x, weight) = (inputs.x, params.weight);
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", x.shape(), "N", &["I"])?;
        dims.bind("weight", weight.shape(), &["I", "O"])?;
        dims.positive(&["I", "O"])?;
        self.check_floats(OP, &[("x", x), ("weight", weight)])?;
        let plus = match params.bias {
            Some(bias) => {
                dims.bind("bias", bias.shape(), &["O"])?;
                self.check_floats(OP, &[("bias", bias)])?;
                Plus::Row(bias)
            }
            None => Plus::Nothing,
        };
        let sizes = (dims.get("N"), dims.get("I"), dims.get("O"));
        let mut shape = x.shape().to_vec();
        *shape.last_mut().expect("bind_rows wants the axis I") = dims.get("O");
        let y = self.float_scratch(&shape)?;
        product(self, OP, sizes, plain(x), plain(weight), plus, &y)?;
        Ok((Outputs { y }, Saved { x: x.clone(), weight: weight.clone(), has_bias: params.bias.is_some() }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Option<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "linear::backward";
        check_precision(OP, config.precision)?;
        let Saved { x, weight, has_bias } = saved;
        let dy = upstream.y;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", x.shape(), "N", &["I"])?;
        dims.bind("weight", weight.shape(), &["I", "O"])?;
        dims.bind_rows("y", dy.shape(), "N", &["O"])?;
        dims.bind("weight", into.weight.shape(), &["I", "O"])?;
        let mut reads = vec![("x", x), ("weight", weight), ("y", dy)];
        if let Some(plus) = plus {
            dims.bind_rows("plus", plus.shape(), "N", &["I"])?;
            reads.push(("plus", plus));
        }
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "weight", into.weight, &reads)?;
        match (into.bias, has_bias) {
            (Some(bias), true) => {
                dims.bind("bias", bias.shape(), &["O"])?;
                self.check_into(OP, "bias", bias, &reads)?;
            }
            (None, false) => {}
            (Some(_), false) => return Err(presence(OP, "absent because forward had none", "present")),
            (None, true) => return Err(presence(OP, "present because forward had one", "absent")),
        }
        let (rows, inner, outer) = (dims.get("N"), dims.get("I"), dims.get("O"));
        let dx = self.float_scratch(x.shape())?;
        let added = plus.map_or(Plus::Nothing, Plus::Matrix);
        product(self, "linear::dx", (rows, outer, inner), plain(dy), transposed(weight), added, &dx)?;
        let sizes = (inner, rows, outer);
        product(self, "linear::dweight", sizes, transposed(x), plain(dy), Plus::Destination, into.weight)?;
        if let Some(bias) = into.bias {
            sum::add_rows(self, dy, rows, outer, bias)?;
        }
        Ok(Grads { dx })
    }
}

fn presence(op: &'static str, expected: &'static str, got: &'static str) -> Error {
    Error::Presence { op, arg: "bias", expected, got }
}

fn check_precision(op: &'static str, precision: Precision) -> Result<()> {
    match precision {
        Precision::Full => Ok(()),
        other => Err(Error::Config {
            op,
            field: "precision",
            expected: "Full, the only arithmetic of the plain kernels".to_owned(),
            got: format!("{other:?}"),
        }),
    }
}
