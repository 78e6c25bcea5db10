//! `embedding`: one row of a table for every id.
//!
//! ```text
//! x_n = table[id_n]
//! ```
//!
//! Adjoint, with dx the gradient of x:
//!
//! ```text
//! dtable[i] = sum over n with id_n = i of dx_n
//! ```
//!
//! Ids have no gradient. The sum runs over n in order, so an id that comes up often has the same bits every time.

use ndarray::Array2;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes: nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {}

fields! {
    /// What is looked up.
    pub struct Inputs {
        /// `[..]`, stored as `u8` or `u32`; every id below `vocab`.
        ids
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[vocab, D]`
        table
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., D]`
        x
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `table` is not `[vocab, D]`, if vocab or D is 0 or an upstream gradient has another shape than its
/// output; `Storage` if `ids` are not integers; `Value` for an id that is not below vocab (a device backend leaves that
/// check to [`Checked`]).
pub trait Embedding: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Looks every id up.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Adds the gradient of the table into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<()>;
}

/// What the reference saves: the ids and the shape of the table.
pub struct Saved<T> {
    ids: Tensor<T>,
    table: Tensor<T>,
}

impl<T: Scalar> Embedding for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "embedding::forward";
        let mut dims = Dims::new(OP);
        dims.bind("table", params.table.shape(), &["vocab", "D"])?;
        dims.positive(&["vocab", "D"])?;
        let ids = read_ids(self, OP, inputs.ids, dims.get("vocab"))?;
        let table = self.read(OP, "table", params.table)?;
        let table = table.rows();
        let mut x = Array2::zeros((ids.len(), table.ncols()));
        for (mut x, &id) in x.rows_mut().into_iter().zip(&ids) {
            x.assign(&table.row(id));
        }
        let shape: Vec<usize> = inputs.ids.shape().iter().copied().chain([table.ncols()]).collect();
        let saved = Saved { ids: inputs.ids.clone(), table: params.table.clone() };
        Ok((Outputs { x: self.adopt(x, &shape) }, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        _config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<()> {
        const OP: &str = "embedding::backward";
        let mut dims = Dims::new(OP);
        dims.set("N", saved.ids.len(), "ids");
        dims.bind("table", saved.table.shape(), &["vocab", "D"])?;
        dims.bind_rows("x", upstream.x.shape(), "N", &["D"])?;
        dims.bind("table", into.table.shape(), &["vocab", "D"])?;
        let ids = read_ids(self, OP, &saved.ids, dims.get("vocab"))?;
        let dx = self.read(OP, "x", upstream.x)?;
        self.update(OP, "table", into.table, |sum| {
            let mut sum =
                sum.into_shape_with_order((dims.get("vocab"), dims.get("D"))).expect("its shape was checked above");
            for (dx, &id) in dx.rows().rows().into_iter().zip(&ids) {
                let mut row = sum.row_mut(id);
                row += &dx;
            }
        })
    }
}

impl<B: Embedding> Embedding for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "embedding::forward";
        self.finite(OP, params.clone().named())?;
        if let Some(&vocab) = self.0.shape(params.table).first() {
            self.every(OP, "ids", inputs.ids, &id_range(vocab), |id| id < vocab as f64)?;
        }
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        into: Params<&B::Tensor>,
    ) -> Result<()> {
        self.finite("embedding::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream, into)
    }
}

fn id_range(vocab: usize) -> String {
    format!("an id below {vocab}, the rows of `table`")
}

/// The ids as row numbers of a table of `vocab` rows.
fn read_ids<T: Scalar>(b: &Reference<T>, op: &'static str, tensor: &Tensor<T>, vocab: usize) -> Result<Vec<usize>> {
    let ids: Vec<usize> = b.read_ids(op, "ids", tensor)?.into_iter().map(|id| id as usize).collect();
    match ids.iter().position(|&id| id >= vocab) {
        None => Ok(ids),
        Some(at) => Err(Error::Value {
            op,
            arg: "ids",
            expected: id_range(vocab),
            got: ids[at] as f64,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use ndarray::array;

    fn ids(b: &Reference<f64>, values: &[f64], shape: &[usize], dtype: DType) -> Tensor<f64> {
        let tensor = b.persistent(shape, dtype).unwrap();
        b.upload(ndarray::ArrayView::from_shape(shape, values).unwrap(), &tensor).unwrap();
        tensor
    }

    #[test]
    fn rows_come_out_and_repeated_ids_add_up() {
        let b = Reference::<f64>::new();
        let table = b.constant(array![[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]].into_dyn());
        for dtype in [DType::U8, DType::U32] {
            let ids = ids(&b, &[2.0, 0.0, 2.0], &[1, 3], dtype);
            let (out, saved) = b.forward(&Config {}, Inputs { ids: &ids }, Params { table: &table }).unwrap();
            assert_eq!(b.download(&out.x).unwrap(), array![[[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]].into_dyn());
            let dx = b.constant(array![[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]].into_dyn());
            let dtable = b.constant(array![[0.0, 0.0], [7.0, 7.0], [100.0, 0.0]].into_dyn());
            b.backward(&Config {}, &saved, Outputs { x: &dx }, Params { table: &dtable }).unwrap();
            assert_eq!(b.download(&dtable).unwrap(), array![[2.0, 20.0], [7.0, 7.0], [105.0, 50.0]].into_dyn());
        }
    }

    #[test]
    fn no_ids_give_no_rows() {
        let b = Reference::<f64>::new();
        let table = b.persistent(&[3, 2], DType::F64).unwrap();
        let ids = ids(&b, &[], &[4, 0], DType::U8);
        let (out, saved) = b.forward(&Config {}, Inputs { ids: &ids }, Params { table: &table }).unwrap();
        assert_eq!(out.x.shape(), [4, 0, 2]);
        b.backward(&Config {}, &saved, Outputs { x: &out.x }, Params { table: &table }).unwrap();
        assert_eq!(b.download(&table).unwrap(), Array2::zeros((3, 2)).into_dyn());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let table = zeros(&[3, 2]);
        let good = ids(&b, &[0.0, 1.0, 2.0, 0.0], &[2, 2], DType::U8);
        let forward = |ids: &Tensor<f64>, table: &Tensor<f64>| {
            b.forward(&Config {}, Inputs { ids }, Params { table }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&ids(&b, &[0.0, 1.0, 2.0, 3.0], &[2, 2], DType::U8), &table),
            "embedding::forward: `ids`[1, 1] is 3, expected an id below 3, the rows of `table`"
        );
        assert_eq!(forward(&zeros(&[2]), &table), "embedding::forward: `ids` is stored as f64, expected u8 or u32");
        assert_eq!(forward(&good, &zeros(&[3])), "embedding::forward: `table` is [3], expected [vocab, D]");
        assert_eq!(forward(&good, &zeros(&[3, 0])), "embedding::forward: `table` is [0], expected D >= 1");
        assert_eq!(forward(&good, &zeros(&[0, 2])), "embedding::forward: `table` is [0], expected vocab >= 1");
        let (out, saved) = b.forward(&Config {}, Inputs { ids: &good }, Params { table: &table }).unwrap();
        let backward = |x: &Tensor<f64>, table: &Tensor<f64>| {
            b.backward(&Config {}, &saved, Outputs { x }, Params { table }).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[2, 3, 2]), &table),
            "embedding::backward: `x` is [6, 2], expected [N, D] = [4, 2] (N from `ids`)"
        );
        assert_eq!(
            backward(&out.x, &zeros(&[2, 2])),
            "embedding::backward: `table` is [2, 2], expected [vocab, D] = [3, 2] (vocab from `table`)"
        );
        // A batch that is overwritten between the two directions is read again, so it is checked again.
        b.fill(&good, 9.0).unwrap();
        assert_eq!(
            backward(&out.x, &table),
            "embedding::backward: `ids`[0, 0] is 9, expected an id below 3, the rows of `table`"
        );
    }

    #[test]
    fn checked_looks_at_ids_before_the_backend_does() {
        let b = Checked(Reference::<f64>::new());
        let table = b.persistent(&[3, 2], DType::F64).unwrap();
        let ids = ids(&b.0, &[7.0], &[1], DType::U32);
        let error = b.forward(&Config {}, Inputs { ids: &ids }, Params { table: &table }).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Value { arg: "ids", got: 7.0, .. }), "{error}");
    }
}
