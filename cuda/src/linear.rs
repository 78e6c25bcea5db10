//! `linear`: the equations are in `dormouse_reference::linear`.
//!
//! `bias`, `plus` and the gradient that a weight already has are added by the product that writes there, so forward is
//! one launch and backward two in both arms. The arms differ in the kernel of the products, and in the gradient of the
//! bias: `fused` sums blocks of rows, then the blocks, in two launches whatever the number of rows. Both take every precision; it is that of the products.

use cubecl::prelude::*;
use dormouse_reference::linear::{Config, Grads, Inputs, Linear, Outputs, Params};
use dormouse_reference::{Dims, Error, Result, Tensors};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::launch::Grid;
use crate::matmul::{Plus, Product, matrix, prepare, product};
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};
use crate::words;

const STEM: &str = "linear";

/// Numbered from 1. The products run in a library on some runtimes, so their faults are planted in how they are asked for.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("bias-dropped"),
    Mutant::fused("contraction-one-short"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("dx-one-output-short"),
    Mutant::fused("dweight-misses-last-row"),
    Mutant::fused("dbias-misses-last-row"),
    Mutant::fused("null-renamed-local"),
    Mutant { name: "dx-reads-what-dweight-writes", arm: Arm::Fused, gate: "det" },
];

/// What `forward` hands to `backward`: handles of what went in.
pub struct Saved {
    x: Tensor,
    weight: Tensor,
    has_bias: bool,
    arm: Arm,
}

/// The sum of dy over a block of rows in one column. One unit, one block and column.
///
/// Mutants: 6 misses the block's last row, 7 is null (a renamed local). 8 is planted on the host, as 1 to 5 are.
#[cube(launch_unchecked)]
fn bias_kernel(dy: &Floats, partial: &mut Floats, rows: u32, width: u32, #[comptime] mutant: u32) {
    let i = ABSOLUTE_POS;
    let (rows, width) = (rows as usize, width as usize);
    if i < rows.div_ceil(BLOCK) * width {
        let first = i / width * BLOCK;
        let mut last = first + BLOCK;
        if last > rows {
            last = rows;
        }
        if comptime!(mutant == 6) {
            last -= 1;
        }
        let mut sum = 0.0f32;
        for n in first..last {
            if comptime!(mutant == 7) {
                let renamed = dy.at(n * width + i % width);
                sum += renamed;
            } else {
                sum += dy.at(n * width + i % width);
            }
        }
        partial.set(i, sum);
    }
}

/// Rows that one unit of [`bias_kernel`] sums.
const BLOCK: usize = 32;

impl<R: Engine> Linear for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "linear::forward";
        let (x, weight) = (inputs.x, params.weight);
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", x.shape(), "N", &["I"])?;
        dims.bind("weight", weight.shape(), &["I", "O"])?;
        dims.positive(&["I", "O"])?;
        self.check_floats(OP, &[("x", x), ("weight", weight)])?;
        let mut plus = match params.bias {
            Some(bias) => {
                dims.bind("bias", bias.shape(), &["O"])?;
                self.check_floats(OP, &[("bias", bias)])?;
                Plus::Row(bias)
            }
            None => Plus::Nothing,
        };
        let (rows, inner, outer) = (dims.get("N"), dims.get("I"), dims.get("O"));
        let mut shape = x.shape().to_vec();
        *shape.last_mut().expect("bind_rows wants the axis I") = outer;
        let y = self.float_scratch(&shape)?;
        let arm = self.forward_arm(STEM);
        let mutant = self.mutant_of(STEM, arm);
        if mutant == 1 {
            plus = Plus::Nothing;
        }
        let forward = Product {
            name: OP,
            batch: 1,
            m: rows,
            k: if mutant == 2 { inner - 1 } else { inner },
            n: outer,
            a: matrix(x, inner).plain().of_input(),
            b: matrix(weight, outer).plain().of_input(),
            plus,
            out: matrix(&y, outer),
            precision: config.precision,
        };
        product(self, arm, &forward)?;
        Ok((Outputs { y }, Saved { x: x.clone(), weight: weight.clone(), has_bias: params.bias.is_some(), arm }))
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
        let Saved { x, weight, has_bias, arm } = saved;
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
        self.note_backward(STEM, *arm);
        let mutant = self.mutant_of(STEM, *arm);
        let dx = self.float_scratch(x.shape())?;
        // Mutant 8: one of the two products that may run at the same time needs the other.
        let passed = (mutant == 8).then(|| self.float_scratch(dy.shape())).transpose()?;
        let for_x = Product {
            name: "linear::dx",
            batch: 1,
            m: rows,
            k: if mutant == 4 { outer - 1 } else { outer },
            n: inner,
            a: matrix(passed.as_ref().unwrap_or(dy), outer).plain().of_input(),
            b: matrix(weight, outer).transposed().of_input(),
            plus: plus.filter(|_| mutant != 3).map_or(Plus::Nothing, Plus::Matrix),
            out: matrix(&dx, inner),
            precision: config.precision,
        };
        if rows == 0 {
            product(self, *arm, &for_x)?;
            return Ok(Grads { dx });
        }
        let for_weight = Product {
            name: "linear::dweight",
            m: inner,
            k: if mutant == 5 { rows - 1 } else { rows },
            n: outer,
            a: matrix(x, inner).transposed().of_input(),
            b: matrix(dy, outer).plain().of_input(),
            plus: Plus::Destination,
            out: matrix(into.weight, outer),
            ..for_x
        };
        prepare(self, *arm, &for_weight)?;
        prepare(self, *arm, &for_x)?;
        self.beside(
            &mut |d| {
                passed.iter().try_for_each(|into| words::copy(d, dy, into))?;
                product(d, *arm, &for_weight)
            },
            &mut |d| product(d, *arm, &for_x),
        )?;
        match (into.bias, arm) {
            (Some(bias), Arm::Plain) => sum::add_rows(self, dy, rows, outer, bias)?,
            (Some(bias), Arm::Fused) => self.add_bias(dy, rows, outer, bias)?,
            (None, _) => {}
        }
        Ok(Grads { dx })
    }
}

impl<R: Engine> Device<R> {
    /// Adds the rows of dy to `into`.
    fn add_bias(&self, dy: &Tensor, rows: usize, width: usize, into: &Tensor) -> Result<()> {
        let blocks = rows.div_ceil(BLOCK);
        let partial = self.float_scratch(&[blocks, width])?;
        let bytes = dy.bytes() + partial.bytes();
        let uses = [dy, &partial];
        let mutant = self.mutant(STEM);
        self.launch("linear::dbias", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
            let [dy, partial] = uses.map(|t| self.floats(t));
            let (n, d) = (rows as u32, width as u32);
            // SAFETY: `partial` has one row a block; units past it do nothing.
            unsafe { bias_kernel::launch_unchecked::<R>(client, count, dim, dy, partial, n, d, mutant) }
        })?;
        sum::add_partials(self, &partial, blocks, width, into)
    }
}

fn presence(op: &'static str, expected: &'static str, got: &'static str) -> Error {
    Error::Presence { op, arg: "bias", expected, got }
}
