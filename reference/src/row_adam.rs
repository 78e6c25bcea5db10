//! `row_adam`: Adam on the rows that a batch has touched, in place.
//!
//! For every row i that occurs in `rows`, once, with g = scale * `grads[i]`:
//!
//! ```text
//! n_i   <- n_i + 1
//! m_i   <- beta1 m_i + (1 - beta1) g
//! v_i   <- beta2 v_i + (1 - beta2) g^2
//! row_i <- row_i - lr (m_i / (1 - beta1^n_i)) / ( (v_i / (1 - beta2^n_i))^(1/2) + eps )
//! ```
//!
//! A row of an n-gram table is touched once in a thousand steps. Its moments do not fade while it waits, and their bias is
//! corrected by the row's own count n_i, so a row's first update has full size whenever it comes. There is no weight decay:
//! it would erase rows for being rare. Rows outside `rows` keep every bit, whatever `grads` holds there; a row that is
//! named and has gradient 0 is touched. With `apply` = 0 nothing is written, the counts included.
//!
//! `order` (from `engram_hash::order`) lists the places of `rows` row by row, so that a row named a hundred times moves
//! once. An optimiser has no gradient, so there is no backward. In `f32`, |g| must stay below 1.8e19, where its square
//! overflows and freezes the element for good.
//!
//! Source: Kingma and Ba, *Adam*, arXiv 1412.6980; the lazy form as in sparse Adam of common libraries, here with a count
//! for each row.

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_apart};
use crate::engram::read_rows;
use crate::engram_hash::{check_order, segments};
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How much of the first moment stays, in [0, 1).
    pub beta1: f64,
    /// How much of the second moment stays, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment. Greater than zero.
    pub eps: f64,
}

fields! {
    /// The table and its mirrors, each an allocation of its own. All but `grads` change in place.
    pub struct State {
        /// `[R, W]`
        table,
        /// `[R, W]`
        grads,
        /// `[R, W]`, first moment; zero before a row's first update.
        m,
        /// `[R, W]`, second moment; zero before a row's first update.
        v,
        /// `[R]` of `u32`, the applied updates of each row.
        counts
    }
}

fields! {
    /// Which rows the batch has touched.
    pub struct Touched {
        /// `[..]` of `u32`, N rows of the table in any order, repetitions included.
        rows,
        /// `[N]` of `u32`, the places of `rows` sorted by row.
        order
    }
}

fields! {
    /// What changes from step to step, all `[1]`.
    pub struct Scalars {
        /// `[1]`, learning rate.
        lr,
        /// `[1]`, what gradients are multiplied by.
        scale,
        /// `[1]`, 1 if the update is to happen, 0 if not.
        apply
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the buffers are not all `[R, W]`, `counts` not `[R]`, `order` not as long as `rows` or a scalar not `[1]`;
/// `Storage` if `counts`, `rows` or `order` are not integers; `NotPersistent` if a buffer that changes is scratch;
/// `Aliased` if two buffers are one allocation; `Config` if a beta is outside [0, 1) or `eps` not greater than zero;
/// `Value` for a row that is not in the table or an `order` that does not sort `rows` (a device backend leaves both to
/// [`Checked`]).
pub trait RowAdam: Tensors {
    /// Moves every touched row once, or nothing if `apply` is 0.
    fn update(
        &self,
        config: &Config,
        state: State<&Self::Tensor>,
        touched: Touched<&Self::Tensor>,
        scalars: Scalars<&Self::Tensor>,
    ) -> Result<()>;
}

impl<T: Scalar> RowAdam for Reference<T> {
    #[inline(never)]
    fn update(
        &self,
        config: &Config,
        state: State<&Tensor<T>>,
        touched: Touched<&Tensor<T>>,
        scalars: Scalars<&Tensor<T>>,
    ) -> Result<()> {
        let dims = check(config, state.clone().map(|_, x| x.shape()), touched.clone().map(|_, x| x.shape()))?;
        let buffers = state.clone().named();
        check_apart(OP, &buffers, |a, b| a.shares_allocation(b))?;
        let rows = read_rows(self, OP, touched.rows, dims.get("R"))?;
        let order = self.read_ids(OP, "order", touched.order)?;
        check_order(OP, &rows, &order)?;
        let lr = self.read_one(OP, "lr", scalars.lr)?.to_f64();
        let scale = self.read_one(OP, "scale", scalars.scale)?;
        let apply = self.read_one(OP, "apply", scalars.apply)?.to_f64() == 1.0;
        let width = dims.get("W");
        let grads = self.read(OP, "grads", state.grads)?;
        self.update(OP, "table", state.table, |mut table| {
            self.update(OP, "m", state.m, |mut m| {
                self.update(OP, "v", state.v, |mut v| {
                    self.update_u32(OP, "counts", state.counts, |counts| {
                        if !apply {
                            return;
                        }
                        let contiguous = "a handle's memory is contiguous";
                        for (row, _) in segments(&rows, &order) {
                            counts[row] = counts[row].saturating_add(1);
                            let here = row * width..(row + 1) * width;
                            move_row(
                                &Coefficients::new(config, lr, scale, counts[row]),
                                &mut table.as_slice_mut().expect(contiguous)[here.clone()],
                                &grads.slice()[here.clone()],
                                &mut m.as_slice_mut().expect(contiguous)[here.clone()],
                                &mut v.as_slice_mut().expect(contiguous)[here],
                            );
                        }
                    })
                })
            })
        })???
    }
}

impl<B: RowAdam> RowAdam for Checked<B> {
    /// Gradients may hold anything while `apply` is 0, and anything finite besides.
    fn update(
        &self,
        config: &Config,
        state: State<&B::Tensor>,
        touched: Touched<&B::Tensor>,
        scalars: Scalars<&B::Tensor>,
    ) -> Result<()> {
        self.every(OP, "apply", scalars.apply, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        if let Some(&len) = self.shape(state.table).first() {
            self.every(OP, "rows", touched.rows, &format!("below {len}, the rows of `table`"), |row| row < len as f64)?;
        }
        let [rows, order] = [touched.rows, touched.order].map(|ids| self.download(ids));
        let [rows, order] = [rows?, order?].map(|ids| ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
        check_order(OP, &rows, &order)?;
        if self.download(scalars.apply)?.iter().all(|&x| x == 1.0) {
            self.finite(OP, state.clone().named())?;
            self.every(OP, "v", state.v, "at least 0", |x| x >= 0.0)?;
            self.every(OP, "lr", scalars.lr, "finite and at least 0", |x| x.is_finite() && x >= 0.0)?;
            self.every(OP, "scale", scalars.scale, "from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
        }
        self.0.update(config, state, touched, scalars)
    }
}

const OP: &str = "row_adam::update";

/// Refuses a config or shapes that do not fit; gives R, W and N. For backends of their own.
///
/// # Errors
/// `Config` if a beta is outside [0, 1) or `eps` not greater than zero; `Shape`, which names the argument.
pub fn check(config: &Config, state: State<&[usize]>, touched: Touched<&[usize]>) -> Result<Dims> {
    check_config(config)?;
    let mut dims = Dims::new(OP);
    for (name, shape) in [("table", state.table), ("grads", state.grads), ("m", state.m), ("v", state.v)] {
        dims.bind(name, shape, &["R", "W"])?;
    }
    dims.bind("counts", state.counts, &["R"])?;
    dims.bind_rows("rows", touched.rows, "N", &[])?;
    dims.bind("order", touched.order, &["N"])?;
    Ok(dims)
}

fn check_config(config: &Config) -> Result<()> {
    let refuse = |field, expected: &str, got: f64| {
        Err(Error::Config { op: OP, field, expected: expected.to_owned(), got: got.to_string() })
    };
    for (field, beta) in [("beta1", config.beta1), ("beta2", config.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return refuse(field, "at least 0 and less than 1", beta);
        }
    }
    if !(config.eps > 0.0 && config.eps.is_finite()) {
        return refuse("eps", "greater than zero, since a zero gradient would divide by zero", config.eps);
    }
    Ok(())
}

/// The factors of one row's update, rounded once from `f64`: 1 - beta^n in `f32` would lose digits near n = 1.
struct Coefficients<T> {
    scale: T,
    keep_m: T,
    take_m: T,
    keep_v: T,
    take_v: T,
    /// lr / (1 - beta1^n)
    step: T,
    /// (1 - beta2^n)^(-1/2)
    root_correction: T,
    eps: T,
}

impl<T: Scalar> Coefficients<T> {
    fn new(config: &Config, lr: f64, scale: T, count: u32) -> Self {
        let &Config { beta1, beta2, eps } = config;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(count));
        Self {
            scale,
            keep_m: T::from_f64(beta1),
            take_m: T::from_f64(1.0 - beta1),
            keep_v: T::from_f64(beta2),
            take_v: T::from_f64(1.0 - beta2),
            step: T::from_f64(lr / correction(beta1)),
            root_correction: T::from_f64(1.0 / correction(beta2).sqrt()),
            eps: T::from_f64(eps),
        }
    }
}

fn move_row<T: Scalar>(c: &Coefficients<T>, row: &mut [T], grads: &[T], m: &mut [T], v: &mut [T]) {
    for (((p, &grad), m), v) in row.iter_mut().zip(grads).zip(m).zip(v) {
        let g = c.scale * grad;
        *m = c.keep_m * *m + c.take_m * g;
        *v = c.keep_v * *v + c.take_v * g * g;
        *p -= c.step * *m / (v.sqrt() * c.root_correction + c.eps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array1, ArrayD, array};

    use crate::engram_hash::order;
    use crate::tensor::DType;

    /// beta1 = 1/2 and beta2 = 3/4 keep the hand values short.
    const CONFIG: Config = Config { beta1: 0.5, beta2: 0.75, eps: 1e-8 };

    struct Fixture {
        b: Reference<f64>,
        state: State<Tensor<f64>>,
        scalars: Scalars<Tensor<f64>>,
    }

    impl Fixture {
        fn new(table: ArrayD<f64>, grads: ArrayD<f64>, scalars: [f64; 3]) -> Self {
            let b = Reference::new();
            let zeros = || b.constant(ArrayD::zeros(table.raw_dim()));
            let (m, v) = (zeros(), zeros());
            let counts = b.persistent(&table.shape()[..1], DType::U32).unwrap();
            let state = State { table: b.constant(table), grads: b.constant(grads), m, v, counts };
            let [lr, scale, apply] = scalars.map(|x| b.constant(array![x].into_dyn()));
            Self { b, state, scalars: Scalars { lr, scale, apply } }
        }

        fn ids(&self, ids: &[u32]) -> Tensor<f64> {
            let tensor = self.b.persistent(&[ids.len()], DType::U32).unwrap();
            let values: Array1<f64> = ids.iter().map(|&x| f64::from(x)).collect();
            self.b.upload(values.into_dyn().view(), &tensor).unwrap();
            tensor
        }

        fn update(&self, rows: &[u32]) -> Result<()> {
            self.sorted(rows, &order(rows))
        }

        fn sorted(&self, rows: &[u32], order: &[u32]) -> Result<()> {
            let (rows, order) = (self.ids(rows), self.ids(order));
            let touched = Touched { rows: &rows, order: &order };
            RowAdam::update(&self.b, &CONFIG, self.state.as_ref(), touched, self.scalars.as_ref())
        }

        fn values(&self, tensor: &Tensor<f64>) -> Vec<f64> {
            self.b.download(tensor).unwrap().into_iter().collect()
        }
    }

    #[test]
    fn a_row_that_comes_late_starts_at_full_size() {
        let f = Fixture::new(
            array![[1.0], [1.0], [1.0]].into_dyn(),
            array![[8.0], [8.0], [8.0]].into_dyn(),
            [0.1, 0.5, 1.0],
        );
        f.update(&[2, 0, 2, 2]).unwrap();
        // g = 4: m = 2, v = 4, corrected 4 and 16: a step of 1, once for row 2 although it is named three times.
        assert_eq!(f.values(&f.state.counts), [1.0, 0.0, 1.0]);
        assert_eq!(f.values(&f.state.m), [2.0, 0.0, 2.0]);
        assert_eq!(f.values(&f.state.v), [4.0, 0.0, 4.0]);
        f.update(&[1, 0]).unwrap();
        let table = f.values(&f.state.table);
        assert_eq!(f.values(&f.state.counts), [2.0, 1.0, 1.0]);
        assert_relative_eq!(table[1], 0.9, max_relative = 1e-8);
        assert_relative_eq!(table[2], 0.9, max_relative = 1e-8);
        // The second update of row 0 with the same gradient: m = 3, v = 7, corrected 4 and 16 again.
        assert_relative_eq!(table[0], 0.8, max_relative = 1e-8);
    }

    #[test]
    fn a_skipped_update_keeps_every_bit_even_with_nan_gradients() {
        let f = Fixture::new(array![[1.0, -0.0]].into_dyn(), array![[f64::NAN; 2]].into_dyn(), [0.1, f64::NAN, 0.0]);
        f.update(&[0]).unwrap();
        let bits: Vec<u64> = f.values(&f.state.table).iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [1.0f64, -0.0].map(f64::to_bits));
        assert_eq!(f.values(&f.state.m), [0.0; 2]);
        assert_eq!(f.values(&f.state.counts), [0.0]);
    }

    #[test]
    fn refusals() {
        let f = Fixture::new(array![[1.0], [1.0]].into_dyn(), array![[1.0], [f64::NAN]].into_dyn(), [0.1, 1.0, 1.0]);
        assert_eq!(
            f.update(&[0, 2]).unwrap_err().to_string(),
            "row_adam::update: `rows`[1] is 2, expected below 2, the rows of `table`"
        );
        assert_eq!(
            f.sorted(&[1, 0], &[0, 1]).unwrap_err().to_string(),
            "row_adam::update: `order`[1] is 1, expected the places of `rows` sorted by row, and by place within a row"
        );
        assert_eq!(
            f.sorted(&[1, 0], &[1]).unwrap_err().to_string(),
            "row_adam::update: `order` is [1], expected [N] = [2] (N from `rows`)"
        );
        let (rows, order) = (f.ids(&[0]), f.ids(&[0]));
        let with = |config: &Config, state: State<&Tensor<f64>>| {
            let touched = Touched { rows: &rows, order: &order };
            RowAdam::update(&f.b, config, state, touched, f.scalars.as_ref()).unwrap_err().to_string()
        };
        let State { table, grads, m, v, counts } = f.state.as_ref();
        assert_eq!(
            with(&CONFIG, State { table, grads, m, v: m, counts }),
            "row_adam::update: `v` shares its allocation with `m`, expected an allocation of its own"
        );
        let short = f.ids(&[0]);
        assert_eq!(
            with(&CONFIG, State { table, grads, m, v, counts: &short }),
            "row_adam::update: `counts` is [1], expected [R] = [2] (R from `table`)"
        );
        assert_eq!(
            with(&Config { beta1: 1.0, ..CONFIG }, f.state.as_ref()),
            "row_adam::update: config `beta1` is 1, expected at least 0 and less than 1"
        );
        assert_eq!(
            with(&Config { eps: 0.0, ..CONFIG }, f.state.as_ref()),
            "row_adam::update: config `eps` is 0, expected greater than zero, since a zero gradient would divide by zero"
        );
        let scratch = f.b.scratch(&[2, 1], DType::F64).unwrap();
        assert_eq!(
            with(&CONFIG, State { table: &scratch, grads, m, v, counts }),
            "row_adam::update: `table` is scratch, expected a persistent tensor, since it must outlive the step"
        );
        let two = f.b.constant(array![1.0, 1.0].into_dyn());
        let scalars = Scalars { apply: &two, ..f.scalars.as_ref() };
        let touched = Touched { rows: &rows, order: &order };
        assert_eq!(
            RowAdam::update(&f.b, &CONFIG, f.state.as_ref(), touched, scalars).unwrap_err().to_string(),
            "row_adam::update: `apply` is [2], expected [1]"
        );
    }
}
