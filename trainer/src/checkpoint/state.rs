//! The tensors of a learner, by name, and their bytes on a disk.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use safetensors::{Dtype, SafeTensors, View};

use crate::host_table::HostTable;

/// Everything a learner needs to go on as if it had never stopped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// What the model computes with.
    pub weights: BTreeMap<String, Tensor>,
    /// What only the optimiser reads: moments, counters.
    pub optimizer: BTreeMap<String, Tensor>,
    /// The n-gram table of a run that has it in host memory, with its moments and counts.
    pub table: Option<Arc<HostTable>>,
    /// A teacher's parameters, where one follows the model.
    pub teacher: BTreeMap<String, Tensor>,
    /// Steps whose update was applied.
    pub updates: u64,
}

/// The names of a host table's buffers, as tensors of them would have.
const HOST_BUFFERS: [&str; 3] = ["engram.table", "m.engram.table", "v.engram.table"];

/// A dense tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// As many values as the extents' product.
    pub data: TensorData,
}

/// The values of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Weights, moments.
    F32(Vec<f32>),
    /// Counters.
    U32(Vec<u32>),
}

impl State {
    /// The state without what only the JEPA objective reads: its parameters, their moments and the teacher.
    #[must_use]
    pub fn without_objective(mut self) -> State {
        let of_objective = |name: &str| name.trim_start_matches("m.").trim_start_matches("v.").starts_with("jepa.");
        self.weights.retain(|name, _| !of_objective(name));
        self.optimizer.retain(|name, _| !of_objective(name));
        self.teacher.clear();
        self
    }

    /// The name of a tensor with a value that is not finite. One must not be saved: every later step would be skipped.
    pub fn first_nonfinite(&self) -> Option<&str> {
        let broken = |tensor: &Tensor| match &tensor.data {
            TensorData::F32(values) => values.iter().any(|value| !value.is_finite()),
            TensorData::U32(_) => false,
        };
        let tensors = self.weights.iter().chain(&self.optimizer).chain(&self.teacher);
        let found = tensors.into_iter().find(|(_, tensor)| broken(tensor)).map(|(name, _)| name.as_str());
        let table = || {
            let buffers = self.table.iter().flat_map(|table| table.buffers()).zip(HOST_BUFFERS);
            buffers.into_iter().find(|(values, _)| values.iter().any(|x| !x.is_finite())).map(|(_, name)| name)
        };
        found.or_else(table)
    }
}

impl Tensor {
    /// A tensor of weights or moments.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "values of a tensor of shape {shape:?}");
        Tensor { shape: shape.to_vec(), data: TensorData::F32(data) }
    }

    /// A tensor of counters.
    pub fn u32(shape: &[usize], data: Vec<u32>) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "values of a tensor of shape {shape:?}");
        Tensor { shape: shape.to_vec(), data: TensorData::U32(data) }
    }

    /// The values, if they are f32.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.data {
            TensorData::F32(values) => Some(values),
            TensorData::U32(_) => None,
        }
    }

    /// The values, if they are u32.
    pub fn as_u32(&self) -> Option<&[u32]> {
        match &self.data {
            TensorData::U32(values) => Some(values),
            TensorData::F32(_) => None,
        }
    }
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        match self.data {
            TensorData::F32(_) => Dtype::F32,
            TensorData::U32(_) => Dtype::U32,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(match &self.data {
            TensorData::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            TensorData::U32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        })
    }

    fn data_len(&self) -> usize {
        4 * self.shape.iter().product::<usize>()
    }
}

/// The tensors as the bytes of a safetensors file; equal tensors give equal bytes.
pub(super) fn to_safetensors(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    safetensors::serialize(tensors, None).expect("names are unique and shapes match their values")
}

/// The tensors of a safetensors file.
pub(super) fn from_safetensors(bytes: &[u8]) -> Result<BTreeMap<String, Tensor>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.iter() {
        let words = view.data().chunks_exact(4).map(|word| word.try_into().expect("a chunk of 4 bytes"));
        let data = match view.dtype() {
            Dtype::F32 => TensorData::F32(words.map(f32::from_le_bytes).collect()),
            Dtype::U32 => TensorData::U32(words.map(u32::from_le_bytes).collect()),
            other => return Err(format!("tensor `{name}` has type {other:?}, expected F32 or U32")),
        };
        tensors.insert(name.to_owned(), Tensor { shape: view.shape().to_vec(), data });
    }
    Ok(tensors)
}
