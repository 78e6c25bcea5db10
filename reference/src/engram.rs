//! `engram`: what a hashed n-gram memory says at every position, gated by how well it fits the stream.
//!
//! With `rows` `[.., O]` the table's rows of a position (one for each order, from `engram_hash`), W the table's width and
//! c the query:
//!
//! ```text
//! e     = table[rows_0] ++ table[rows_1] ++ ...        O W numbers
//! key   = e W_key,          value = e W_value          D numbers
//! ck    = rk key,   rk = (mean key^2 + eps)^(-1/2)
//! cq    = rq c,     rq = (mean c^2 + eps)^(-1/2)
//! s     = <ck, cq> / sqrt(D)
//! r     = (|s| + gate_eps)^(1/2)
//! gate  = sigma( s / (r + sqrt(gate_eps)) )            a signed square root that is smooth enough at 0
//! m     = gate value
//! ```
//!
//! Adjoint, with dm the gradient of m and `plus` what other readers of c have sent back:
//!
//! ```text
//! dvalue = gate dm,   dgate = <dm, value>
//! ds     = dgate gate (1 - gate) / (2 r)               the signed root's slope is 1 / (2 r)
//! dkey   = rk ds (cq / sqrt(D) - ck s / D)
//! dc     = rq ds (ck / sqrt(D) - cq s / D) + plus
//! dW_key = e^T dkey,  dW_value = e^T dvalue,  de = dkey W_key^T + dvalue W_value^T
//! dtable[i] = sum over the places of row i of de there, by place, first to last
//! ```
//!
//! `order` (from `engram_hash::order`) lists the places row by row, so every row of the table is summed by one thread in
//! one order and nothing is atomic. Rows that the batch does not name are neither read nor written: a table of the
//! batch's rows alone, with `rows` renamed by `engram_hash::compact`, gives the same bits.
//!
//! Source: Cheng et al., *Conditional Memory via Scalable Lookup*, arXiv 2601.07372, for the gate by a normalised key and
//! query with a signed root.

use ndarray::{Array1, Array2, ArrayView2, ArrayViewMut2, Zip, s};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, full_precision};
use crate::dims::Dims;
use crate::engram_hash::{check_order, segments};
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::{dot, matmul, matmul_into};
use crate::scalar::Scalar;
use crate::tensor::{Precision, Tensors};

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Added to the mean squares of key and query, inside the roots. Greater than zero.
    pub eps: f64,
    /// Where the gate's signed root turns from straight to a root. Greater than zero.
    pub gate_eps: f64,
    /// The arithmetic of the matrix products.
    pub precision: Precision,
}

fields! {
    /// What goes in.
    pub struct Inputs {
        /// `[.., D]`, the query.
        c,
        /// `[.., O]` of `u32`: a row of the table for every order. No gradient.
        rows;
        optional
        /// `[N O]` of `u32`, the places of `rows` sorted by row, for `backward`. No gradient.
        order
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[R, W]`
        table,
        /// `[O W, D]`
        key,
        /// `[O W, D]`
        value
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., D]`
        m
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., D]`
        dc
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if an argument does not fit `c`, `rows` and `table`, or if R, W, D or O is 0; `Config` if an eps is not greater
/// than zero or the precision is not the backend's; `Storage` if `rows` or `order` are not integers; `Value` for a row that
/// is not in the table or an `order` that does not sort `rows` (a device backend leaves both to [`Checked`]); `Presence` if
/// `backward` is asked for and `forward` had no `order`.
pub trait Engram: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Looks the rows up and weighs what they say.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `c`, with `plus` (`[.., D]`) added, and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        plus: Option<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the inputs, what was looked up and projected, and four numbers a row.
pub struct Saved<T> {
    inputs: Inputs<Tensor<T>>,
    params: Params<Tensor<T>>,
    e: Array2<T>,
    key: Array2<T>,
    value: Array2<T>,
    fit: Array1<Fit<T>>,
}

/// How well the key of a row fits its query.
#[derive(Clone, Copy)]
struct Fit<T> {
    /// rk
    key_scale: T,
    /// rq
    query_scale: T,
    /// s
    score: T,
    /// gate, and 1 - gate without cancellation.
    gate: T,
    shut: T,
}

impl<T: Scalar> Engram for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "engram::forward";
        full_precision(OP, config.precision)?;
        check_config(OP, config)?;
        let dims = bind(OP, inputs.clone().map(|_, x| x.shape()), params.clone().map(|_, x| x.shape()))?;
        let rows = read_rows(self, OP, inputs.rows, dims.get("R"))?;
        let table = self.read(OP, "table", params.table)?;
        let e = gather(table.dims(), &rows, dims.get("N"), dims.get("O"));
        let key = matmul(e.view(), self.read(OP, "key", params.key)?.dims());
        let value = matmul(e.view(), self.read(OP, "value", params.value)?.dims());
        let c = self.read(OP, "c", inputs.c)?;
        let (m, fit) = forward(config, c.rows(), key.view(), value.view());
        let outputs = Outputs { m: self.adopt(m, inputs.c.shape()) };
        let saved =
            Saved { inputs: inputs.map(|_, x| x.clone()), params: params.map(|_, x| x.clone()), e, key, value, fit };
        Ok((outputs, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        plus: Option<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "engram::backward";
        full_precision(OP, config.precision)?;
        check_config(OP, config)?;
        let Some(order) = &saved.inputs.order else {
            return Err(Error::Presence {
                op: OP,
                arg: "order",
                expected: "present because the table's gradient is summed in its order",
                got: "absent",
            });
        };
        let shapes = saved.inputs.as_ref().map(|_, x| x.shape());
        let mut dims = bind(OP, shapes, saved.params.as_ref().map(|_, x| x.shape()))?;
        dims.bind_rows("m", upstream.m.shape(), "N", &["D"])?;
        bind_params(&mut dims, into.clone().map(|_, x| x.shape()))?;
        let rows = read_rows(self, OP, &saved.inputs.rows, dims.get("R"))?;
        let order = self.read_ids(OP, "order", order)?;
        check_order(OP, &rows, &order)?;
        let c = self.read(OP, "c", &saved.inputs.c)?;
        let dm = self.read(OP, "m", upstream.m)?;
        let mut grads = backward(config, saved, c.rows(), dm.rows());
        if let Some(plus) = plus {
            dims.bind_rows("plus", plus.shape(), "N", &["D"])?;
            grads.c += &self.read(OP, "plus", plus)?.rows();
        }
        let mut de = Array2::zeros(saved.e.raw_dim());
        for (name, param, upstream) in
            [("key", &saved.params.key, &grads.key), ("value", &saved.params.value, &grads.value)]
        {
            let weight = self.read(OP, name, param)?;
            let weight = weight.dims::<ndarray::Ix2>();
            matmul_into(T::one(), upstream.view(), weight.reversed_axes(), T::one(), de.view_mut());
        }
        for (name, into, upstream) in [("key", into.key, &grads.key), ("value", into.value, &grads.value)] {
            self.update(OP, name, into, |sum| {
                let sum = sum.into_shape_with_order(grads.shape).expect("its shape was checked");
                matmul_into(T::one(), saved.e.t(), upstream.view(), T::one(), sum);
            })?;
        }
        self.update(OP, "table", into.table, |sum| {
            let sum = sum.into_shape_with_order((dims.get("R"), dims.get("W"))).expect("its shape was checked");
            add_segments(sum, &rows, &order, de.as_slice().expect("a fresh array is contiguous"));
        })?;
        Ok(Grads { dc: self.adopt(grads.c, saved.inputs.c.shape()) })
    }
}

impl<B: Engram> Engram for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "engram::forward";
        self.finite(OP, [("c", inputs.c)])?;
        self.finite(OP, params.clone().named())?;
        if let Some(&len) = self.shape(params.table).first() {
            self.every(OP, "rows", inputs.rows, &row_range(len), |row| row < len as f64)?;
        }
        if let Some(order) = inputs.order {
            let [rows, order] = [inputs.rows, order].map(|ids| self.download(ids));
            let [rows, order] = [rows?, order?].map(|ids| ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
            check_order(OP, &rows, &order)?;
        }
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        plus: Option<&B::Tensor>,
        into: Params<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        const OP: &str = "engram::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.map(|plus| ("plus", plus)))?;
        self.0.backward(config, saved, upstream, plus, into)
    }
}

/// Refuses a config that is out of range. For backends of their own, as is [`bind`].
///
/// # Errors
/// `Config` if an eps is not greater than zero.
pub fn check_config(op: &'static str, config: &Config) -> Result<()> {
    for (field, eps) in [("eps", config.eps), ("gate_eps", config.gate_eps)] {
        if !(eps > 0.0 && eps.is_finite()) {
            return Err(Error::Config {
                op,
                field,
                expected: "greater than zero, since a zero row would divide by zero".to_owned(),
                got: eps.to_string(),
            });
        }
    }
    Ok(())
}

/// Refuses shapes that do not fit; gives N, D, O, R, W and `O W`.
///
/// # Errors
/// `Shape`, which names the argument.
pub fn bind(op: &'static str, inputs: Inputs<&[usize]>, params: Params<&[usize]>) -> Result<Dims> {
    let mut dims = Dims::new(op);
    dims.bind_rows("c", inputs.c, "N", &["D"])?;
    dims.bind_rows("rows", inputs.rows, "N", &["O"])?;
    dims.bind("table", params.table, &["R", "W"])?;
    dims.set("O W", dims.get("O") * dims.get("W"), "rows and table");
    dims.set("N O", dims.get("N") * dims.get("O"), "rows");
    bind_params(&mut dims, params)?;
    if let Some(order) = inputs.order {
        dims.bind("order", order, &["N O"])?;
    }
    dims.positive(&["D", "O", "R", "W"])?;
    Ok(dims)
}

/// Refuses parameters, or destinations of their gradients, that do not fit what [`bind`] has seen.
///
/// # Errors
/// `Shape`, which names the argument.
pub fn bind_params(dims: &mut Dims, params: Params<&[usize]>) -> Result<()> {
    dims.bind("table", params.table, &["R", "W"])?;
    dims.bind("key", params.key, &["O W", "D"])?;
    dims.bind("value", params.value, &["O W", "D"])
}

fn row_range(len: usize) -> String {
    format!("below {len}, the rows of `table`")
}

/// The rows, each inside a table of `len` rows.
pub(crate) fn read_rows<T: Scalar>(
    b: &Reference<T>,
    op: &'static str,
    tensor: &Tensor<T>,
    len: usize,
) -> Result<Vec<u32>> {
    let rows = b.read_ids(op, "rows", tensor)?;
    match rows.iter().position(|&row| row as usize >= len) {
        None => Ok(rows),
        Some(at) => Err(Error::Value {
            op,
            arg: "rows",
            expected: row_range(len),
            got: f64::from(rows[at]),
            index: index_of(at, tensor.shape()),
        }),
    }
}

/// The index of element `at` in row-major order.
fn index_of(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &len) in index.iter_mut().zip(shape).rev() {
        *i = at % len;
        at /= len;
    }
    index
}

/// e: the rows of every position side by side, `[N, O W]`.
fn gather<T: Scalar>(table: ArrayView2<'_, T>, rows: &[u32], positions: usize, orders: usize) -> Array2<T> {
    let width = table.ncols();
    let mut e = Array2::zeros((positions, orders * width));
    for (mut e, rows) in e.rows_mut().into_iter().zip(rows.chunks(orders)) {
        for (j, &row) in rows.iter().enumerate() {
            e.slice_mut(s![j * width..(j + 1) * width]).assign(&table.row(row as usize));
        }
    }
    e
}

/// m and the fit of every row.
fn forward<T: Scalar>(
    config: &Config,
    c: ArrayView2<'_, T>,
    key: ArrayView2<'_, T>,
    value: ArrayView2<'_, T>,
) -> (Array2<T>, Array1<Fit<T>>) {
    let mut m = Array2::zeros(c.raw_dim());
    let zero = T::zero();
    let blank = Fit { key_scale: zero, query_scale: zero, score: zero, gate: zero, shut: zero };
    let mut fit = Array1::from_elem(c.nrows(), blank);
    Zip::from(m.rows_mut()).and(&mut fit).and(c.rows()).and(key.rows()).and(value.rows()).par_for_each(
        |mut m, fit, c, key, value| {
            let [c, key] = [&c, &key].map(|row| row.to_slice().expect("rows are contiguous"));
            *fit = Fit::new(config, key, c);
            Zip::from(&mut m).and(&value).for_each(|m, &value| *m = fit.gate * value);
        },
    );
    (m, fit)
}

impl<T: Scalar> Fit<T> {
    fn new(config: &Config, key: &[T], c: &[T]) -> Self {
        let width = T::from_f64(c.len() as f64);
        let (eps, gate_eps) = (T::from_f64(config.eps), T::from_f64(config.gate_eps));
        let scale = |row: &[T]| T::one() / (dot(row, row) / width + eps).sqrt();
        let (key_scale, query_scale) = (scale(key), scale(c));
        let score = key_scale * query_scale * dot(key, c) / width.sqrt();
        let root = (score.abs() + gate_eps).sqrt();
        let (gate, shut) = (score / (root + gate_eps.sqrt())).sigmoids();
        Self { key_scale, query_scale, score, gate, shut }
    }

    /// ds, from dgate.
    fn dscore(&self, config: &Config, dgate: T) -> T {
        let root = (self.score.abs() + T::from_f64(config.gate_eps)).sqrt();
        dgate * self.gate * self.shut / (root + root)
    }
}

/// Gradients of the query and of what was projected.
struct Inner<T> {
    c: Array2<T>,
    key: Array2<T>,
    value: Array2<T>,
    /// Of the projections' weights: (O W, D).
    shape: (usize, usize),
}

fn backward<T: Scalar>(config: &Config, saved: &Saved<T>, c: ArrayView2<'_, T>, dm: ArrayView2<'_, T>) -> Inner<T> {
    let width = T::from_f64(c.ncols() as f64);
    let root_width = width.sqrt();
    let mut dc = Array2::zeros(c.raw_dim());
    let mut dkey = Array2::zeros(c.raw_dim());
    let mut dvalue = Array2::zeros(c.raw_dim());
    Zip::indexed(dc.rows_mut()).and(dkey.rows_mut()).and(dvalue.rows_mut()).par_for_each(
        |n, mut dc, mut dkey, mut dvalue| {
            let (c, key, dm, fit) = (c.row(n), saved.key.row(n), dm.row(n), saved.fit[n]);
            let ds = fit.dscore(config, dm.dot(&saved.value.row(n)));
            // ds times the part along the other vector and the part along itself, which the norm takes out.
            let across = ds * fit.key_scale * fit.query_scale / root_width;
            let along_key = ds * fit.score * fit.key_scale * fit.key_scale / width;
            let along_query = ds * fit.score * fit.query_scale * fit.query_scale / width;
            Zip::from(&mut dvalue).and(&dm).for_each(|dvalue, &dm| *dvalue = fit.gate * dm);
            Zip::from(&mut dkey).and(&c).and(&key).for_each(|dkey, &c, &key| *dkey = across * c - along_key * key);
            Zip::from(&mut dc).and(&c).and(&key).for_each(|dc, &c, &key| *dc = across * key - along_query * c);
        },
    );
    Inner { c: dc, key: dkey, value: dvalue, shape: (saved.e.ncols(), c.ncols()) }
}

/// Adds to every row of `sum` the gradients at its places; `de` has one row of `sum`'s width for each place.
fn add_segments<T: Scalar>(mut sum: ArrayViewMut2<'_, T>, rows: &[u32], order: &[u32], de: &[T]) {
    let width = sum.ncols();
    for (row, places) in segments(rows, order) {
        let mut total = vec![T::zero(); width];
        for &at in places {
            let at = at as usize;
            for (total, &d) in total.iter_mut().zip(&de[at * width..(at + 1) * width]) {
                *total += d;
            }
        }
        for (sum, total) in sum.row_mut(row).iter_mut().zip(total) {
            *sum += total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engram_hash::order;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::{Array, array};

    const CONFIG: Config = Config { eps: 1e-5, gate_eps: 1e-2, precision: Precision::Full };

    fn ids(b: &Reference<f64>, values: &[u32], shape: &[usize]) -> Tensor<f64> {
        let tensor = b.persistent(shape, DType::U32).unwrap();
        let values: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
        b.upload(ndarray::ArrayView::from_shape(shape, &values).unwrap(), &tensor).unwrap();
        tensor
    }

    #[test]
    fn one_position_by_hand() {
        let b = Reference::<f64>::new();
        let c = b.constant(array![[3.0, 4.0]].into_dyn());
        let table = b.constant(array![[1.0], [9.0], [2.0]].into_dyn());
        let rows = ids(&b, &[2, 0], &[1, 2]);
        // e = [2, 1]: key = [2, 2], value = [4, -2].
        let key = b.constant(array![[1.0, 0.5], [0.0, 1.0]].into_dyn());
        let value = b.constant(array![[1.0, -1.0], [2.0, 0.0]].into_dyn());
        let config = Config { eps: 1e-12, ..CONFIG };
        let inputs = Inputs { c: &c, rows: &rows, order: None };
        let (out, _) = b.forward(&config, inputs, Params { table: &table, key: &key, value: &value }).unwrap();
        // key / 2 = [1, 1] and c / sqrt(12.5): s = 7 / sqrt(25) = 1.4.
        let s = 1.4f64;
        let gate = 1.0 / (1.0 + (-(s / ((s + 0.01).sqrt() + 0.1))).exp());
        let m = b.download(&out.m).unwrap();
        assert_relative_eq!(m[[0, 0]], 4.0 * gate, max_relative = 1e-11);
        assert_relative_eq!(m[[0, 1]], -2.0 * gate, max_relative = 1e-11);
    }

    #[test]
    fn the_gate_is_half_open_at_zero_with_slope_five_of_its_root() {
        let fit = |s: f64| Fit::new(&Config { eps: 1e-300, ..CONFIG }, &[1.0], &[s.signum()]).gate;
        // One channel: key and query are signs, so s is 1 or -1, and the gates are each other's rest.
        assert_relative_eq!(fit(1.0) + fit(-1.0), 1.0, max_relative = 1e-15);
        assert_eq!(Fit::new(&CONFIG, &[0.0, 0.0], &[1.0, 2.0]).gate, 0.5);
        let zero = Fit::new(&CONFIG, &[0.0, 0.0], &[1.0, 2.0]);
        assert_relative_eq!(zero.dscore(&CONFIG, 1.0), 0.25 * 5.0, max_relative = 1e-15);
    }

    #[test]
    fn places_of_a_row_add_up_and_other_rows_stay() {
        let rows = [4, 1, 4, 0];
        let de = array![[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [5.0, 50.0]];
        let mut sum = Array::from_elem((5, 2), 0.5);
        add_segments(sum.view_mut(), &rows, &order(&rows), de.as_slice().unwrap());
        assert_eq!(sum, array![[5.5, 50.5], [2.5, 20.5], [0.5, 0.5], [0.5, 0.5], [4.5, 40.5]]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (c, table, key, value) = (zeros(&[1, 2, 4]), zeros(&[5, 3]), zeros(&[6, 4]), zeros(&[6, 4]));
        let rows = ids(&b, &[1, 4, 1, 0], &[1, 2, 2]);
        let params = || Params { table: &table, key: &key, value: &value };
        let forward = |config: &Config, inputs: Inputs<&Tensor<f64>>, params: Params<&Tensor<f64>>| {
            b.forward(config, inputs, params).map(|_| ()).unwrap_err().to_string()
        };
        let inputs = |rows| Inputs { c: &c, rows, order: None };
        let (outside, short) = (ids(&b, &[1, 4, 5, 0], &[1, 2, 2]), ids(&b, &[1, 2], &[1, 2]));
        assert_eq!(
            forward(&CONFIG, inputs(&outside), params()),
            "engram::forward: `rows`[0, 1, 0] is 5, expected below 5, the rows of `table`"
        );
        assert_eq!(
            forward(&CONFIG, inputs(&short), params()),
            "engram::forward: `rows` is [1, 2], expected [N, O] = [2, any] (N from `c`)"
        );
        assert_eq!(
            forward(&CONFIG, inputs(&rows), Params { key: &table, ..params() }),
            "engram::forward: `key` is [5, 3], expected [O W, D] = [6, 4] (O W from `rows and table`, D from `c`)"
        );
        assert_eq!(
            forward(&Config { gate_eps: 0.0, ..CONFIG }, inputs(&rows), params()),
            "engram::forward: config `gate_eps` is 0, expected greater than zero, since a zero row would divide by zero"
        );
        let bf16 = Config { precision: Precision::Bf16, ..CONFIG };
        assert!(forward(&bf16, inputs(&rows), params()).contains("`precision` is Bf16"));
        let backward = |order: Option<&[u32]>, into: Params<&Tensor<f64>>, plus| {
            let order = order.map(|order| ids(&b, order, &[4]));
            let inputs = Inputs { c: &c, rows: &rows, order: order.as_ref() };
            let (out, saved) = b.forward(&CONFIG, inputs, params()).unwrap();
            let upstream = Outputs { m: &out.m };
            b.backward(&CONFIG, &saved, upstream, plus, into).map(|_| ()).unwrap_err().to_string()
        };
        let right = order(&[1, 4, 1, 0]);
        let into = params().map(|_, x| zeros(x.shape()));
        assert_eq!(
            backward(None, into.as_ref(), None),
            "engram::backward: `order` is absent, expected it present because the table's gradient is summed in its order"
        );
        assert_eq!(
            backward(Some(&[0, 1, 2, 3]), into.as_ref(), None),
            "engram::backward: `order`[2] is 2, expected the places of `rows` sorted by row, and by place within a row"
        );
        assert_eq!(
            backward(Some(&right), Params { table: &key, ..into.as_ref() }, None),
            "engram::backward: `table` is [6, 4], expected [R, W] = [5, 3] (R from `table`, W from `table`)"
        );
        assert_eq!(
            backward(Some(&right), into.as_ref(), Some(&table)),
            "engram::backward: `plus` is [5, 3], expected [N, D] = [2, 4] (N from `c`, D from `c`)"
        );
    }

    #[test]
    fn checked_looks_at_rows_and_their_order() {
        let b = Checked(Reference::<f64>::new());
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (c, table, weight) = (zeros(&[2, 4]), zeros(&[5, 3]), zeros(&[3, 4]));
        let attempt = |rows: &[u32], order: &[u32]| {
            let (rows, order) = (ids(&b.0, rows, &[2, 1]), ids(&b.0, order, &[2]));
            let inputs = Inputs { c: &c, rows: &rows, order: Some(&order) };
            let params = Params { table: &table, key: &weight, value: &weight };
            b.forward(&CONFIG, inputs, params).map(|_| ()).unwrap_err()
        };
        assert!(matches!(attempt(&[1, 5], &[0, 1]), Error::Value { arg: "rows", got: 5.0, .. }));
        assert!(matches!(attempt(&[3, 1], &[0, 1]), Error::Value { arg: "order", .. }));
    }
}
