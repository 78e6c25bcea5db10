//! [`Burn`]: memory and steps over any Burn backend.
//!
//! Burn's tensors are values, and the [`Tensors`] of dormouse are handles to memory that several views share. A buffer is
//! therefore a cell with a flat Burn tensor in it, a handle a range of it, and writing replaces the tensor in the cell.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use burn_tensor::backend::Backend;
use burn_tensor::{Element, Int, Tensor, TensorData};
use dormouse_reference::{DType, Error, Result, StepKey, Tensors};
use ndarray::{ArrayD, ArrayViewD, Dimension, IxDyn};

/// A backend of dormouse over a backend of Burn. Not shared between threads.
pub struct Burn<B: Backend> {
    device: B::Device,
    /// Counts step starts and ends; scratch carries the count at its birth.
    generation: Cell<u64>,
    running: Cell<Option<&'static str>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Life {
    Persistent,
    Scratch { generation: u64 },
}

enum Buffer<B: Backend> {
    Float(RefCell<Tensor<B, 1>>),
    /// Whole numbers, kept as Burn's integers; the type says how large they may be.
    Integer(RefCell<Tensor<B, 1, Int>>, DType),
}

/// A handle to memory of a [`Burn`].
#[derive(Clone)]
pub struct Handle<B: Backend> {
    buffer: Rc<Buffer<B>>,
    start: usize,
    shape: Rc<[usize]>,
    life: Life,
}

impl<B: Backend> fmt::Debug for Handle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle{:?} {:?}", self.shape, self.life)
    }
}

impl<B: Backend> Handle<B> {
    /// Lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether both are handles to one allocation.
    pub fn shares_allocation(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.buffer, &other.buffer)
    }
}

impl<B: Backend> Default for Burn<B> {
    fn default() -> Self {
        Self::new()
    }
}

/// Everything of a flat tensor from `start` on, `len` elements.
fn part<B: Backend>(all: &Tensor<B, 1>, start: usize, len: usize) -> Tensor<B, 1> {
    if start == 0 && len == all.dims()[0] { all.clone() } else { all.clone().slice(start..start + len) }
}

impl<B: Backend> Burn<B> {
    /// A fresh backend on Burn's default device.
    pub fn new() -> Self {
        Self { device: B::Device::default(), generation: Cell::new(0), running: Cell::new(None) }
    }

    /// Real numbers of the host as a flat tensor in the backend's own type, whatever default type the device has.
    pub(crate) fn tensor_of(&self, values: Vec<f64>) -> Tensor<B, 1> {
        let len = values.len();
        Tensor::from_data(TensorData::new(values, [len]), (&self.device, B::FloatElem::dtype()))
    }

    /// Whole numbers of the host as a flat tensor.
    pub(crate) fn integers_of(&self, values: Vec<i64>) -> Tensor<B, 1, Int> {
        let len = values.len();
        Tensor::from_data(TensorData::new(values, [len]), (&self.device, B::IntElem::dtype()))
    }

    /// Reads a tensor of real numbers, flat.
    pub(crate) fn read(&self, op: &'static str, arg: &'static str, tensor: &Handle<B>) -> Result<Tensor<B, 1>> {
        self.check_life(op, arg, tensor)?;
        match &*tensor.buffer {
            Buffer::Float(cell) => Ok(part(&cell.borrow(), tensor.start, tensor.len())),
            Buffer::Integer(..) => Err(self.wrong_storage(op, arg, self.float().to_string(), tensor)),
        }
    }

    /// Reads a tensor of whole numbers, flat.
    pub(crate) fn read_integers(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &Handle<B>,
    ) -> Result<Tensor<B, 1, Int>> {
        self.check_life(op, arg, tensor)?;
        match &*tensor.buffer {
            Buffer::Integer(cell, _) => Ok(cell.borrow().clone().slice(tensor.start..tensor.start + tensor.len())),
            Buffer::Float(_) => Err(self.wrong_storage(op, arg, "u8 or u32".to_owned(), tensor)),
        }
    }

    /// The values of any tensor on the host. Unlike [`Tensors::download`] this is part of an operation: what an
    /// eager backend may do inside a step and a captured one may not.
    pub(crate) fn peek(&self, op: &'static str, arg: &'static str, tensor: &Handle<B>) -> Result<Vec<f64>> {
        match &*tensor.buffer {
            Buffer::Float(_) => Ok(self.read(op, arg, tensor)?.into_data().iter::<f64>().collect()),
            // Integers have a type of their own in Burn, in which every u32 is exact.
            Buffer::Integer(..) => {
                Ok(self.read_integers(op, arg, tensor)?.into_data().iter::<i64>().map(|x| x as f64).collect())
            }
        }
    }

    /// The values of a tensor of whole numbers on the host; see [`Burn::peek`].
    pub(crate) fn peek_integers(&self, op: &'static str, arg: &'static str, tensor: &Handle<B>) -> Result<Vec<i64>> {
        Ok(self.read_integers(op, arg, tensor)?.into_data().iter::<i64>().collect())
    }

    /// The places where a mask, of real or whole numbers, is not 0.
    pub(crate) fn places(&self, op: &'static str, mask: &Handle<B>) -> Result<Vec<i64>> {
        let mask = self.peek(op, "mask", mask)?.into_iter().enumerate();
        Ok(mask.filter(|(_, x)| *x != 0.0).map(|(place, _)| place as i64).collect())
    }

    /// The number that a `[1]` tensor holds.
    pub(crate) fn peek_one(&self, op: &'static str, arg: &'static str, tensor: &Handle<B>) -> Result<f64> {
        match self.peek(op, arg, tensor)?[..] {
            [x] if tensor.shape.len() == 1 => Ok(x),
            _ => Err(Error::Shape { op, arg, expected: "[1]".to_owned(), got: tensor.shape.to_vec() }),
        }
    }

    /// Replaces the values of a persistent tensor of real numbers.
    pub(crate) fn write(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &Handle<B>,
        values: Tensor<B, 1>,
    ) -> Result<()> {
        if tensor.life != Life::Persistent {
            return Err(Error::NotPersistent { op, arg });
        }
        match &*tensor.buffer {
            Buffer::Float(cell) => {
                let all = cell.borrow().clone();
                cell.replace(all.slice_assign(tensor.start..tensor.start + tensor.len(), values));
                Ok(())
            }
            Buffer::Integer(..) => Err(self.wrong_storage(op, arg, self.float().to_string(), tensor)),
        }
    }

    /// Replaces the values of a persistent tensor of whole numbers.
    pub(crate) fn write_integers(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &Handle<B>,
        values: Vec<i64>,
    ) -> Result<()> {
        if tensor.life != Life::Persistent {
            return Err(Error::NotPersistent { op, arg });
        }
        match &*tensor.buffer {
            Buffer::Integer(cell, _) => {
                let all = cell.borrow().clone();
                let values = self.integers_of(values);
                cell.replace(all.slice_assign(tensor.start..tensor.start + tensor.len(), values));
                Ok(())
            }
            Buffer::Float(_) => Err(self.wrong_storage(op, arg, "u32".to_owned(), tensor)),
        }
    }

    /// Scratch that holds the values of a flat tensor, as `shape`.
    pub(crate) fn scratch_of(&self, values: Tensor<B, 1>, shape: &[usize]) -> Handle<B> {
        assert_eq!(values.dims()[0], shape.iter().product::<usize>(), "a result fills its shape");
        Handle {
            buffer: Rc::new(Buffer::Float(RefCell::new(values))),
            start: 0,
            shape: shape.into(),
            life: self.scratch_life(),
        }
    }

    /// The same for whole numbers, stored as `u32`.
    pub(crate) fn scratch_of_integers(&self, values: Vec<i64>, shape: &[usize]) -> Handle<B> {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "a result fills its shape");
        let buffer = Rc::new(Buffer::Integer(RefCell::new(self.integers_of(values)), DType::U32));
        Handle { buffer, start: 0, shape: shape.into(), life: self.scratch_life() }
    }

    fn scratch_life(&self) -> Life {
        Life::Scratch { generation: self.generation.get() }
    }

    fn check_life(&self, op: &'static str, arg: &'static str, tensor: &Handle<B>) -> Result<()> {
        match tensor.life {
            Life::Scratch { generation } if generation != self.generation.get() => Err(Error::StaleScratch { op, arg }),
            _ => Ok(()),
        }
    }

    fn check_outside(&self, op: &'static str) -> Result<()> {
        self.running.get().map_or(Ok(()), |step| Err(Error::HostExchangeInStep { op, step }))
    }

    fn wrong_storage(&self, op: &'static str, arg: &'static str, expected: String, tensor: &Handle<B>) -> Error {
        Error::Storage { op, arg, expected, got: self.dtype(tensor) }
    }

    fn allocate(&self, op: &'static str, shape: &[usize], dtype: DType, life: Life) -> Result<Handle<B>> {
        let len = shape.iter().product();
        let buffer = match dtype {
            DType::U32 | DType::U8 => Buffer::Integer(RefCell::new(self.integers_of(vec![0; len])), dtype),
            float if float == self.float() => Buffer::Float(RefCell::new(self.tensor_of(vec![0.0; len]))),
            got => {
                let expected = format!("{}, u32 or u8 on {}", self.float(), self.name());
                return Err(Error::Storage { op, arg: "dtype", expected, got });
            }
        };
        Ok(Handle { buffer: Rc::new(buffer), start: 0, shape: shape.into(), life })
    }
}

impl<B: Backend> Tensors for Burn<B> {
    type Tensor = Handle<B>;

    fn name(&self) -> String {
        format!("burn {}", B::name(&self.device))
    }

    fn float(&self) -> DType {
        if B::FloatElem::dtype() == f64::dtype() { DType::F64 } else { DType::F32 }
    }

    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<Handle<B>> {
        self.check_outside("persistent")?;
        self.allocate("persistent", shape, dtype, Life::Persistent)
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Handle<B>> {
        self.allocate("scratch", shape, dtype, self.scratch_life())
    }

    fn view(&self, tensor: &Handle<B>, start: usize, shape: &[usize]) -> Result<Handle<B>> {
        let end = start + shape.iter().product::<usize>();
        if end > tensor.len() {
            return Err(Error::View { start, end, len: tensor.len() });
        }
        Ok(Handle { start: tensor.start + start, shape: shape.into(), ..tensor.clone() })
    }

    fn shape<'a>(&self, tensor: &'a Handle<B>) -> &'a [usize] {
        &tensor.shape
    }

    fn dtype(&self, tensor: &Handle<B>) -> DType {
        match &*tensor.buffer {
            Buffer::Float(_) => self.float(),
            Buffer::Integer(_, dtype) => *dtype,
        }
    }

    fn is_persistent(&self, tensor: &Handle<B>) -> bool {
        tensor.life == Life::Persistent
    }

    fn upload(&self, values: ArrayViewD<'_, f64>, into: &Handle<B>) -> Result<()> {
        const OP: &str = "upload";
        self.check_outside(OP)?;
        self.check_life(OP, "into", into)?;
        if values.shape() != into.shape() {
            let (expected, got) = (format!("{:?}, as the tensor", into.shape()), values.shape().to_vec());
            return Err(Error::Shape { op: OP, arg: "values", expected, got });
        }
        let range = into.start..into.start + into.len();
        match &*into.buffer {
            Buffer::Float(cell) => {
                let all = cell.borrow().clone();
                cell.replace(all.slice_assign(range, self.tensor_of(values.iter().copied().collect())));
            }
            Buffer::Integer(cell, dtype) => {
                let max = if *dtype == DType::U8 { f64::from(u8::MAX) } else { f64::from(u32::MAX) };
                let wrong = values.indexed_iter().find(|(_, v)| !(**v >= 0.0 && **v <= max && v.fract() == 0.0));
                if let Some((index, &got)) = wrong {
                    let (expected, index) = (format!("a whole number from 0 to {max}"), index.as_array_view().to_vec());
                    return Err(Error::Value { op: OP, arg: "values", expected, got, index });
                }
                let all = cell.borrow().clone();
                let whole = values.iter().map(|&v| v as i64).collect();
                cell.replace(all.slice_assign(range, self.integers_of(whole)));
            }
        }
        Ok(())
    }

    fn download(&self, tensor: &Handle<B>) -> Result<ArrayD<f64>> {
        self.check_outside("download")?;
        let values = self.peek("download", "tensor", tensor)?;
        Ok(ArrayD::from_shape_vec(IxDyn(&tensor.shape), values).expect("a handle's shape matches its memory"))
    }

    fn fill(&self, tensor: &Handle<B>, value: f64) -> Result<()> {
        self.check_life("fill", "tensor", tensor)?;
        let range = tensor.start..tensor.start + tensor.len();
        match &*tensor.buffer {
            Buffer::Float(cell) => {
                let all = cell.borrow().clone();
                cell.replace(all.slice_assign(range, self.tensor_of(vec![value; tensor.len()])));
            }
            Buffer::Integer(cell, _) => {
                let all = cell.borrow().clone();
                cell.replace(all.slice_assign(range, self.integers_of(vec![value as i64; tensor.len()])));
            }
        }
        Ok(())
    }

    fn keep(&self, from: &Handle<B>, into: &Handle<B>) -> Result<()> {
        const OP: &str = "keep";
        if from.shape != into.shape {
            let (expected, got) = (format!("{:?}, as `into`", into.shape()), from.shape().to_vec());
            return Err(Error::Shape { op: OP, arg: "from", expected, got });
        }
        match &*from.buffer {
            Buffer::Float(_) => self.write(OP, "into", into, self.read(OP, "from", from)?),
            Buffer::Integer(..) => {
                if self.dtype(from) != self.dtype(into) {
                    return Err(self.wrong_storage(OP, "from", format!("{}, as `into`", self.dtype(into)), from));
                }
                let values = self.read_integers(OP, "from", from)?.into_data().iter::<i64>().collect();
                self.write_integers(OP, "into", into, values)
            }
        }
    }

    fn step(&self, key: &StepKey, body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        if let Some(outer) = self.running.get() {
            return Err(Error::NestedStep { outer, inner: key.purpose });
        }
        self.generation.set(self.generation.get() + 1);
        self.running.set(Some(key.purpose));
        let result = body(self);
        self.running.set(None);
        self.generation.set(self.generation.get() + 1);
        result
    }
}
