//! [`Checked`]: a backend that also looks at values.
//!
//! Shapes are checked by every backend on every call. Values (a positive decay, a NaN, an id outside the table) cannot
//! be checked inside a captured step without reading the device, so the checks live in this wrapper. The harness and
//! public calls use it; the trainer's step does not, and counts non-finite values on the device instead.

use ndarray::{ArrayD, ArrayViewD, Dimension};

use crate::error::{Error, Result};
use crate::tensor::{DType, StepKey, Tensors};

/// Wraps a backend: every operation first checks the values of its inputs, then runs on `B`.
pub struct Checked<B>(pub B);

impl<B: Tensors> Checked<B> {
    /// Refuses NaN and infinity in any of the named tensors.
    pub fn finite<'a>(
        &self,
        op: &'static str,
        tensors: impl IntoIterator<Item = (&'static str, &'a B::Tensor)>,
    ) -> Result<()>
    where
        B::Tensor: 'a,
    {
        for (arg, tensor) in tensors {
            self.every(op, arg, tensor, "finite", f64::is_finite)?;
        }
        Ok(())
    }

    /// Refuses a tensor with an element that `accept` does not accept.
    pub fn every(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &B::Tensor,
        expected: &str,
        accept: impl Fn(f64) -> bool,
    ) -> Result<()> {
        let values = self.0.download(tensor)?;
        match values.indexed_iter().find(|(_, v)| !accept(**v)) {
            Some((index, &got)) => {
                Err(Error::Value { op, arg, expected: expected.to_owned(), got, index: index.as_array_view().to_vec() })
            }
            None => Ok(()),
        }
    }
}

impl<B: Tensors> Tensors for Checked<B> {
    type Tensor = B::Tensor;

    fn name(&self) -> String {
        self.0.name()
    }
    fn float(&self) -> DType {
        self.0.float()
    }
    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<Self::Tensor> {
        self.0.persistent(shape, dtype)
    }
    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Self::Tensor> {
        self.0.scratch(shape, dtype)
    }
    fn view(&self, tensor: &Self::Tensor, start: usize, shape: &[usize]) -> Result<Self::Tensor> {
        self.0.view(tensor, start, shape)
    }
    fn shape<'a>(&self, tensor: &'a Self::Tensor) -> &'a [usize] {
        self.0.shape(tensor)
    }
    fn dtype(&self, tensor: &Self::Tensor) -> DType {
        self.0.dtype(tensor)
    }
    fn is_persistent(&self, tensor: &Self::Tensor) -> bool {
        self.0.is_persistent(tensor)
    }
    fn upload(&self, values: ArrayViewD<'_, f64>, into: &Self::Tensor) -> Result<()> {
        self.0.upload(values, into)
    }
    fn upload_f32(&self, values: ArrayViewD<'_, f32>, into: &Self::Tensor) -> Result<()> {
        self.0.upload_f32(values, into)
    }
    fn download(&self, tensor: &Self::Tensor) -> Result<ArrayD<f64>> {
        self.0.download(tensor)
    }
    fn fill(&self, tensor: &Self::Tensor, value: f64) -> Result<()> {
        self.0.fill(tensor, value)
    }
    fn keep(&self, from: &Self::Tensor, into: &Self::Tensor) -> Result<()> {
        self.0.keep(from, into)
    }
    fn stage(&self, stage: &'static str) {
        self.0.stage(stage);
    }
    fn step(&self, key: &StepKey, _body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        Err(Error::HostExchangeInStep { op: "Checked", step: key.purpose })
    }
}
