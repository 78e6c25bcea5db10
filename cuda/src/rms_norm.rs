//! `rms_norm`: the equations are in `dormouse_reference::rms_norm`.
//!
//! Arm `plain`: one unit walks one row, forward and backward. The gradients of `gain` are summed over blocks of rows,
//! one unit a block and column, and then over blocks; `rho` is saved, one number a row.

use cubecl::prelude::*;
use dormouse_reference::rms_norm::{Config, Grads, Inputs, Outputs, Params, RmsNorm};
use dormouse_reference::{Dims, Error, Result};

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// What `forward` hands to `backward`: the shifted rows and one number a row.
pub struct Saved {
    c: Tensor,
    gain: Tensor,
    rho: Tensor,
    has_shift: bool,
}

/// c = x + shift. One unit, one element.
#[cube(launch_unchecked)]
fn shift_kernel(x: &Floats, shift: &Floats, c: &mut Floats, len: u32, width: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        c.set(i, x.at(i) + shift.at(i % width as usize));
    }
}

/// rho and y of one row. One unit, one row.
#[cube(launch_unchecked)]
fn forward_kernel(c: &Floats, gain: &Floats, y: &mut Floats, rho: &mut Floats, rows: u32, width: u32, eps: f32) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let mut square = 0.0f32;
        for d in 0..width as usize {
            square += c.at(row + d) * c.at(row + d);
        }
        let scale = 1.0f32 / (square / f32::cast_from(width) + eps).sqrt();
        rho.set(n, scale);
        for d in 0..width as usize {
            y.set(row + d, scale * c.at(row + d) * gain.at(d));
        }
    }
}

/// dx of one row, without what arrives at c from elsewhere. One unit, one row.
#[cube(launch_unchecked)]
fn backward_kernel(c: &Floats, gain: &Floats, rho: &Floats, dy: &Floats, dx: &mut Floats, rows: u32, width: u32) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let scale = rho.at(n);
        let mut mean = 0.0f32;
        for d in 0..width as usize {
            mean += scale * c.at(row + d) * dy.at(row + d) * gain.at(d);
        }
        mean /= f32::cast_from(width);
        for d in 0..width as usize {
            dx.set(row + d, scale * (dy.at(row + d) * gain.at(d) - scale * c.at(row + d) * mean));
        }
    }
}

/// The sum of dy rho c over a block of rows in one column. One unit, one block and column.
#[cube(launch_unchecked)]
fn gain_kernel(c: &Floats, rho: &Floats, dy: &Floats, out: &mut Floats, rows: u32, width: u32) {
    let i = ABSOLUTE_POS;
    let (rows, width) = (rows as usize, width as usize);
    if i < rows.div_ceil(sum::BLOCK) * width {
        let first = i / width * sum::BLOCK;
        let mut last = first + sum::BLOCK;
        if last > rows {
            last = rows;
        }
        let mut total = 0.0f32;
        for n in first..last {
            let at = n * width + i % width;
            total += dy.at(at) * rho.at(n) * c.at(at);
        }
        out.set(i, total);
    }
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
        let (rows, width) = (dims.get("N"), dims.get("D"));
        let c = match params.shift {
            Some(shift) => {
                dims.bind("shift", shift.shape(), &["D"])?;
                self.check_floats(OP, &[("shift", shift)])?;
                let c = self.float_scratch(x.shape())?;
                let bytes = 2 * x.bytes() + shift.bytes();
                self.launch("rms_norm::shift", Grid::units(x.len()), bytes, &[x, shift, &c], |client, count, dim| {
                    let (x, shift, out) = (self.floats(x), self.floats(shift), self.floats(&c));
                    // SAFETY: `x` and `c` have `len` elements, `shift` has `width`.
                    unsafe {
                        shift_kernel::launch_unchecked::<R>(
                            client,
                            count,
                            dim,
                            x,
                            shift,
                            out,
                            c.len() as u32,
                            width as u32,
                        )
                    }
                })?;
                c
            }
            None => x.clone(),
        };
        let y = self.float_scratch(x.shape())?;
        let rho = self.float_scratch(&[rows])?;
        let uses = [&c, params.gain, &y, &rho];
        let bytes = uses.iter().map(|t| t.bytes()).sum();
        self.launch(OP, Grid::units(rows), bytes, &uses, |client, count, dim| {
            let [c, gain, y, rho] = uses.map(|t| self.floats(t));
            let (n, d, eps) = (rows as u32, width as u32, config.eps as f32);
            // SAFETY: shapes were checked above; units past the rows do nothing.
            unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, c, gain, y, rho, n, d, eps) }
        })?;
        let has_shift = params.shift.is_some();
        let outputs = Outputs { y, c: has_shift.then(|| c.clone()) };
        Ok((outputs, Saved { c, gain: params.gain.clone(), rho, has_shift }))
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
        let Saved { c, gain, rho, has_shift } = saved;
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
        let (n, d) = (rows as u32, width as u32);

        let dx = self.float_scratch(c.shape())?;
        let uses = [c, gain, rho, dy, &dx];
        let bytes = uses.iter().map(|t| t.bytes()).sum();
        self.launch(OP, Grid::units(rows), bytes, &uses, |client, count, dim| {
            let [c, gain, rho, dy, dx] = uses.map(|t| self.floats(t));
            // SAFETY: shapes were checked above; units past the rows do nothing.
            unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, c, gain, rho, dy, dx, n, d) }
        })?;
        if let Some(dc) = upstream.c {
            sum::add(self, dc, &dx)?;
        }

        let blocks = rows.div_ceil(sum::BLOCK);
        let partial = self.float_scratch(&[blocks, width])?;
        let uses = [c, rho, dy, &partial];
        let bytes = uses.iter().map(|t| t.bytes()).sum();
        self.launch("rms_norm::gain", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
            let [c, rho, dy, out] = uses.map(|t| self.floats(t));
            // SAFETY: `out` has one row a block; units past it do nothing.
            unsafe { gain_kernel::launch_unchecked::<R>(client, count, dim, c, rho, dy, out, n, d) }
        })?;
        sum::add_rows(self, &partial, blocks, width, into.gain)?;
        if let Some(shift) = into.shift {
            sum::add_rows(self, &dx, rows, width, shift)?;
        }
        Ok(Grads { dx })
    }
}

fn presence(op: &'static str, arg: &'static str, expected: &'static str, got: &'static str) -> Error {
    Error::Presence { op, arg, expected, got }
}

fn check_config(op: &'static str, config: &Config) -> Result<()> {
    if config.eps > 0.0 && config.eps.is_finite() {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "eps",
        expected: "greater than zero, since a zero row would divide by zero".to_owned(),
        got: config.eps.to_string(),
    })
}
