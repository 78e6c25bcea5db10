//! Values from the host and back. Every element is a word of four bytes on the device.

use std::sync::Arc;

use cubecl::client::ComputeClient;
use dormouse_reference::{DType, Error, Result};
use ndarray::{ArrayD, ArrayViewD, IxDyn};

use super::Device;
use crate::runtime::{self, Engine, Written, gemm};
use crate::tensor::{Buffer, Life, Tensor, WORD};
use crate::words;

impl<R: Engine> Device<R> {
    /// [`Tensors::upload`](dormouse_reference::Tensors::upload).
    pub(super) fn send(&self, values: ArrayViewD<'_, f64>, into: &Tensor) -> Result<()> {
        self.check_upload(values.shape(), into)?;
        if into.is_empty() {
            return Ok(());
        }
        let words = to_words(values, into.dtype)?;
        self.send_bytes(bytemuck::cast_slice(&words), into, R::write)
    }

    /// [`Tensors::upload_f32`](dormouse_reference::Tensors::upload_f32).
    pub(super) fn send_f32(&self, values: ArrayViewD<'_, f32>, into: &Tensor) -> Result<()> {
        if into.dtype != DType::F32 {
            return self.send(values.mapv(f64::from).view(), into);
        }
        self.check_upload(values.shape(), into)?;
        if into.is_empty() {
            return Ok(());
        }
        // Borrowed where the values lie as the tensor does.
        let values = values.as_standard_layout();
        let values = values.as_slice().expect("the standard layout is contiguous");
        self.send_bytes(bytemuck::cast_slice(values), into, R::write_every_step)
    }

    fn check_upload(&self, shape: &[usize], into: &Tensor) -> Result<()> {
        const OP: &str = "upload";
        self.check_outside(OP)?;
        self.check_life(OP, "into", into)?;
        if shape == into.shape() {
            return Ok(());
        }
        let expected = format!("{:?}, as the tensor", into.shape());
        Err(Error::Shape { op: OP, arg: "values", expected, got: shape.to_vec() })
    }

    /// Brings the words of a whole tensor to the device by `write`, or where that is refused by a buffer of their own.
    fn send_bytes(
        &self,
        bytes: &[u8],
        into: &Tensor,
        write: impl Fn(&ComputeClient<R>, &gemm::Start<'_>, &[u8]) -> std::result::Result<Written, runtime::Error>,
    ) -> Result<()> {
        self.outdated(into);
        match write(&self.client, &into.place(), bytes)? {
            Written::Waited => {
                self.note_sync("upload");
                return Ok(());
            }
            Written::Queued => return Ok(()),
            Written::Refused => {}
        }
        let buffer = Arc::new(Buffer::new(self.client.create_from_slice(bytes)));
        let staged = Tensor { buffer, start: 0, life: Life::Persistent, ..into.clone() };
        words::copy(self, &staged, into)?;
        Ok(R::settle(&self.client)?)
    }

    /// [`Tensors::download`](dormouse_reference::Tensors::download).
    pub(super) fn fetch(&self, tensor: &Tensor) -> Result<ArrayD<f64>> {
        const OP: &str = "download";
        self.check_outside(OP)?;
        self.check_life(OP, "tensor", tensor)?;
        let values = if tensor.is_empty() {
            Vec::new()
        } else {
            self.note_sync("download");
            R::settle(&self.client)?;
            let read = self.client.read_one(tensor.buffer.part(tensor.start * WORD, tensor.bytes()));
            // The runtime's own error says more than cubecl's form of it.
            R::settle(&self.client)?;
            let bytes = read.map_err(|e| runtime::wgpu_error(OP, &e))?;
            from_words(&bytes, tensor.dtype)
        };
        Ok(ArrayD::from_shape_vec(IxDyn(&tensor.shape), values).expect("a handle's shape matches its memory"))
    }
}

/// Host values as the words of a tensor, rounded to its type.
fn to_words(values: ArrayViewD<'_, f64>, dtype: DType) -> Result<Vec<u32>> {
    let max = match dtype {
        DType::U32 => f64::from(u32::MAX),
        DType::U8 => f64::from(u8::MAX),
        _ => return Ok(values.iter().map(|&v| (v as f32).to_bits()).collect()),
    };
    let whole = |v: f64| v >= 0.0 && v <= max && v.fract() == 0.0;
    if values.iter().all(|&v| whole(v)) {
        return Ok(values.iter().map(|&v| v as u32).collect());
    }
    use ndarray::Dimension as _;
    let (index, &got) = values.indexed_iter().find(|(_, v)| !whole(**v)).expect("one of them is not whole");
    Err(Error::Value {
        op: "upload",
        arg: "values",
        expected: format!("a whole number from 0 to {max}"),
        got,
        index: index.as_array_view().to_vec(),
    })
}

/// The words of a tensor as host values.
fn from_words(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let words = bytes.chunks_exact(WORD as usize).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
    match dtype {
        DType::U32 | DType::U8 => words.map(f64::from).collect(),
        _ => words.map(|w| f64::from(f32::from_bits(w))).collect(),
    }
}
