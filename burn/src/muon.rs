//! `muon`: Muon+, the momentum's singular values brought close to one another, then columns and rows to unit norm.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::muon::{COEFFICIENTS, Config, Matrix, Muon, NOISE, Scalars, State};
use dormouse_reference::{Result, Tensors};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, norm, number, square};
use crate::shapes::{apart, check, config as option, ranges};

const OP: &str = "muon::update";

impl<B: Backend> Muon for Burn<B> {
    #[inline(never)]
    fn update(&self, config: &Config, state: State<&Handle<B>>, scalars: Scalars<&Handle<B>>) -> Result<()> {
        let args = state.clone().named();
        let len = check(OP, &args, |_| &["P"])?.get("P");
        apart(OP, &args)?;
        option(OP, "momentum", (0.0..1.0).contains(&config.momentum), "in [0, 1)", config.momentum)?;
        option(OP, "iterations", config.iterations > 0, "at least 1", config.iterations)?;
        for matrix in &config.matrices {
            let Matrix { shape: [_, rows, columns], heads, scale, weight_decay, .. } = *matrix;
            option(OP, "matrices", rows > 0 && columns > 0, "rows and columns", format!("{:?}", matrix.shape))?;
            let whole = heads > 0 && columns.is_multiple_of(heads);
            option(OP, "heads", whole, "at least 1 and a divisor of the columns", heads)?;
            option(OP, "scale", scale > 0.0 && scale.is_finite(), "greater than zero", scale)?;
            option(
                OP,
                "weight_decay",
                weight_decay >= 0.0 && weight_decay.is_finite(),
                "zero or greater",
                weight_decay,
            )?;
        }
        let all: Vec<_> = config.matrices.iter().map(Matrix::range).collect();
        ranges(OP, "matrices", &all, len)?;
        let Scalars { lr, apply } = scalars.try_map(|name, x| self.peek_one(OP, name, x))?;
        for matrix in config.matrices.iter().filter(|_| apply == 1.0) {
            for entry in 0..matrix.shape[0] {
                self.entry(config, matrix, entry, &state, lr)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> Burn<B> {
    /// One `[rows, heads width]` of an entry of the table, head by head.
    fn entry(&self, config: &Config, matrix: &Matrix, entry: usize, state: &State<&Handle<B>>, lr: f64) -> Result<()> {
        let [_, rows, columns] = matrix.shape;
        let start = matrix.start + entry * rows * columns;
        let places = state.clone().try_map(|_, x| self.view(x, start, &[rows, columns]))?;
        let State { params, grads, m } = places
            .as_ref()
            .try_map(|name, x| Ok::<_, dormouse_reference::Error>(self.read(OP, name, x)?.reshape([rows, columns])))?;
        let width = columns / matrix.heads;
        let (mut moved, mut momenta) = (Vec::new(), Vec::new());
        for head in 0..matrix.heads {
            let slice = |x: &Tensor<B, 2>| x.clone().narrow(1, head * width, width);
            let (w, g, m) = (slice(&params), slice(&grads), slice(&m));
            if number(g.clone().abs().max()) == 0.0 {
                moved.push(w);
                momenta.push(m);
                continue;
            }
            let m = m.mul_scalar(config.momentum) + g.mul_scalar(1.0 - config.momentum);
            let x = direction(config, m.clone());
            let decay = w.clone().mul_scalar(lr * matrix.weight_decay);
            moved.push(w - decay - x.mul_scalar(lr * matrix.scale));
            momenta.push(m);
        }
        self.write(OP, "params", &places.params, flat(Tensor::cat(moved, 1)))?;
        self.write(OP, "m", &places.m, flat(Tensor::cat(momenta, 1)))
    }
}

/// The direction of an update: X = M / max|M| / |..|_F through the iteration and, if asked for, the plus.
fn direction<B: Backend>(config: &Config, m: Tensor<B, 2>) -> Tensor<B, 2> {
    let largest = number(m.clone().abs().max());
    if largest == 0.0 {
        return m;
    }
    let [rows, columns] = m.dims();
    let unit = m.div_scalar(largest);
    let size = norm(unit.clone());
    let mut x = unit.div_scalar(size);
    if rows > columns {
        x = x.transpose();
    }
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..config.iterations {
        let gram = x.clone().matmul(x.clone().transpose());
        let polynomial = gram.clone().mul_scalar(b) + gram.clone().matmul(gram).mul_scalar(c);
        x = x.clone().mul_scalar(a) + polynomial.matmul(x);
    }
    if config.plus {
        x = unit_lines(unit_lines(x, 0), 1);
    }
    if rows > columns { x.transpose() } else { x }
}

/// Every line along `dim` divided by its norm, but for those below [`NOISE`] of the mean norm.
fn unit_lines<B: Backend>(x: Tensor<B, 2>, dim: usize) -> Tensor<B, 2> {
    let norms = square(x.clone()).sum_dim(dim).sqrt();
    let noise = norms.clone().lower_elem(NOISE * number(norms.clone().mean()));
    x / norms.mask_fill(noise, 1.0)
}
