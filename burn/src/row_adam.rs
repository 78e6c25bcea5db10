//! `row_adam`: for every row that is named, once: n <- n + 1, m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2)
//! g^2, row <- row - lr m^ / (v^^(1/2) + eps), with m^ and v^ corrected for their start at zero by the row's own n.

use std::collections::BTreeSet;

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::row_adam::{Config, RowAdam, Scalars, State, Touched};
use dormouse_reference::{DType, Error, Result, Tensors};

use crate::engram::{check_order, rows_of};
use crate::handle::{Burn, Handle};
use crate::maths::square;
use crate::shapes::{apart, check, config as option, number, small};

const OP: &str = "row_adam::update";

impl<B: Backend> RowAdam for Burn<B> {
    #[inline(never)]
    fn update(
        &self,
        config: &Config,
        state: State<&Handle<B>>,
        touched: Touched<&Handle<B>>,
        scalars: Scalars<&Handle<B>>,
    ) -> Result<()> {
        for (field, beta) in [("beta1", config.beta1), ("beta2", config.beta2)] {
            option(OP, field, (0.0..1.0).contains(&beta), "at least 0 and less than 1", beta)?;
        }
        small(OP, "eps", config.eps)?;
        let args = [state.clone().named(), touched.clone().named()].concat();
        let dims = check(OP, &args, |name| match name {
            "counts" => &["R"],
            "rows" => &[".."],
            "order" => &["N"],
            _ => &["R", "W"],
        })?;
        apart(OP, &state.clone().named())?;
        let rows = rows_of(self, OP, touched.rows, dims.get("R"))?;
        check_order(self, OP, &rows, touched.order)?;
        for (name, scalar) in scalars.clone().named() {
            number(OP, name, scalar)?;
            self.read(OP, name, scalar)?;
        }
        let Scalars { lr, scale, apply } = scalars.try_map(|name, x| self.peek_one(OP, name, x))?;
        for (name, buffer) in state.clone().named() {
            if name == "counts" {
                let dtype = self.dtype(buffer);
                if dtype != DType::U32 {
                    return Err(Error::Storage { op: OP, arg: name, expected: "u32".to_owned(), got: dtype });
                }
            } else {
                self.read(OP, name, buffer)?;
            }
            if name != "grads" && !self.is_persistent(buffer) {
                return Err(Error::NotPersistent { op: OP, arg: name });
            }
        }
        let once: BTreeSet<i64> = rows.into_iter().filter(|_| apply == 1.0).collect();
        for row in once {
            self.move_row(config, &state, row as usize, dims.get("W"), (lr, scale))?;
        }
        Ok(())
    }
}

impl<B: Backend> Burn<B> {
    fn move_row(
        &self,
        config: &Config,
        state: &State<&Handle<B>>,
        row: usize,
        width: usize,
        (lr, scale): (f64, f64),
    ) -> Result<()> {
        let State { table, grads, m, v, counts } = state.clone().try_map(|name, x| {
            let width = if name == "counts" { 1 } else { width };
            self.view(x, row * width, &[width])
        })?;
        let count = (self.peek_integers(OP, "counts", &counts)?[0] + 1).min(i64::from(u32::MAX));
        self.write_integers(OP, "counts", &counts, vec![count])?;
        if width == 0 {
            return Ok(());
        }
        let g = self.read(OP, "grads", &grads)?.mul_scalar(scale);
        let first = self.read(OP, "m", &m)?.mul_scalar(config.beta1) + g.clone().mul_scalar(1.0 - config.beta1);
        let second = self.read(OP, "v", &v)?.mul_scalar(config.beta2) + square(g).mul_scalar(1.0 - config.beta2);
        let corrected = |x: &Tensor<B, 1>, beta: f64| x.clone().div_scalar(1.0 - beta.powf(count as f64));
        let step = corrected(&first, config.beta1) / corrected(&second, config.beta2).sqrt().add_scalar(config.eps);
        self.write(OP, "table", &table, self.read(OP, "table", &table)? - step.mul_scalar(lr))?;
        self.write(OP, "m", &m, first)?;
        self.write(OP, "v", &v, second)
    }
}
