//! [`Reference`]: the backend made of ndarray, and its tensors.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use ndarray::{Array, ArrayD, ArrayView, ArrayView1, ArrayView2, ArrayViewD, ArrayViewMut1, Dimension, IxDyn};

use crate::error::{Error, Result};
use crate::scalar::Scalar;
use crate::tensor::{DType, Precision, StepKey, Tensors, check_kept};

/// The reference backend over one scalar type.
///
/// Not shared between threads; the operations themselves use every core through rayon.
pub struct Reference<T> {
    /// Counts step starts and ends; scratch carries the count at its birth.
    generation: Cell<u64>,
    running: Cell<Option<&'static str>>,
    scalar: PhantomData<T>,
}

impl<T: Scalar> Default for Reference<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// The life of a tensor's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Life {
    Persistent,
    Scratch { generation: u64 },
}

#[derive(Debug)]
enum Buffer<T> {
    Float(RwLock<Vec<T>>),
    U32(RwLock<Vec<u32>>),
    U8(RwLock<Vec<u8>>),
}

fn lock<V>(cell: &RwLock<V>) -> RwLockReadGuard<'_, V> {
    // A poisoned lock means that an operation panicked half-way; its data is as good as any other half-written buffer.
    cell.read().unwrap_or_else(|poison| poison.into_inner())
}

fn lock_mut<V>(cell: &RwLock<V>) -> RwLockWriteGuard<'_, V> {
    cell.write().unwrap_or_else(|poison| poison.into_inner())
}

/// Write access for an operation in place. A backend is used from one thread at a time, so a buffer that is locked
/// already is locked by the same call, and waiting for it would wait for ever.
fn lock_alone<'a, V>(op: &'static str, arg: &'static str, cell: &'a RwLock<V>) -> Result<RwLockWriteGuard<'a, V>> {
    match cell.try_write() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(poison)) => Ok(poison.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Error::Aliased { op, arg, other: "another argument of the call" }),
    }
}

/// A handle to memory of a [`Reference`].
#[derive(Clone)]
pub struct Tensor<T> {
    buffer: Arc<Buffer<T>>,
    start: usize,
    shape: Arc<[usize]>,
    life: Life,
}

impl<T> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?} {:?}", self.shape, self.life)
    }
}

impl<T> Tensor<T> {
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

    /// Whether both are handles to one allocation, even to different parts of it.
    pub fn shares_allocation(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
    }
}

/// Read access to a tensor of real numbers for as long as the guard lives.
pub struct Values<'a, T> {
    guard: RwLockReadGuard<'a, Vec<T>>,
    start: usize,
    shape: &'a [usize],
}

impl<T> Values<'_, T> {
    /// The elements in row-major order.
    pub fn slice(&self) -> &[T] {
        let len = self.shape.iter().product::<usize>();
        &self.guard[self.start..self.start + len]
    }

    /// The tensor as an array of its own rank.
    pub fn view(&self) -> ArrayViewD<'_, T> {
        ArrayView::from_shape(IxDyn(self.shape), self.slice()).expect("a handle's shape matches its memory")
    }

    /// The tensor as an array of rank `D`.
    ///
    /// # Panics
    /// If the rank differs: operations check shapes first.
    pub fn dims<D: Dimension>(&self) -> ArrayView<'_, T, D> {
        self.view().into_dimensionality::<D>().expect("the operation checked the rank")
    }

    /// All leading axes as rows: `[.., D]` becomes `[N, D]`.
    pub fn rows(&self) -> ArrayView2<'_, T> {
        let (rows, width) = rows_and_width(self.shape);
        ArrayView2::from_shape((rows, width), self.slice()).expect("a handle's shape matches its memory")
    }

    /// All axes as one.
    pub fn flat(&self) -> ArrayView1<'_, T> {
        ArrayView1::from(self.slice())
    }
}

/// `[.., D]` as (rows, D); a scalar is one row of one.
pub fn rows_and_width(shape: &[usize]) -> (usize, usize) {
    match shape.split_last() {
        Some((&width, leading)) => (leading.iter().product(), width),
        None => (1, 1),
    }
}

/// Refuses every [`Precision`] but `Full`: the reference says what the exact result is, so it never rounds operands.
pub(crate) fn full_precision(op: &'static str, precision: Precision) -> Result<()> {
    match precision {
        Precision::Full => Ok(()),
        other => Err(Error::Config {
            op,
            field: "precision",
            expected: "Full on the reference, which never rounds operands; use a device backend for the others"
                .to_owned(),
            got: format!("{other:?}"),
        }),
    }
}

impl<T: Scalar> Reference<T> {
    /// A fresh backend.
    pub fn new() -> Self {
        Self { generation: Cell::new(0), running: Cell::new(None), scalar: PhantomData }
    }

    /// Reads a tensor of real numbers; `op` and `arg` name it in errors.
    pub fn read<'a>(&self, op: &'static str, arg: &'static str, tensor: &'a Tensor<T>) -> Result<Values<'a, T>> {
        self.check_life(op, arg, tensor)?;
        match &*tensor.buffer {
            Buffer::Float(cell) => Ok(Values { guard: lock(cell), start: tensor.start, shape: &tensor.shape }),
            _ => Err(self.wrong_storage(op, arg, T::DTYPE.to_string(), tensor)),
        }
    }

    /// Reads the real number that a `[1]` tensor holds.
    pub fn read_one(&self, op: &'static str, arg: &'static str, tensor: &Tensor<T>) -> Result<T> {
        let values = self.read(op, arg, tensor)?;
        match (tensor.shape(), values.slice()) {
            ([1], &[x]) => Ok(x),
            (shape, _) => Err(Error::Shape { op, arg, expected: "[1]".to_owned(), got: shape.to_vec() }),
        }
    }

    /// Reads the whole number that a `[1]` tensor of `u32` or `u8` holds.
    pub fn read_one_id(&self, op: &'static str, arg: &'static str, tensor: &Tensor<T>) -> Result<u32> {
        let ids = self.read_ids(op, arg, tensor)?;
        match (tensor.shape(), &ids[..]) {
            ([1], &[id]) => Ok(id),
            (shape, _) => Err(Error::Shape { op, arg, expected: "[1]".to_owned(), got: shape.to_vec() }),
        }
    }

    /// Reads a tensor of ids (`u8` or `u32`).
    pub fn read_ids(&self, op: &'static str, arg: &'static str, tensor: &Tensor<T>) -> Result<Vec<u32>> {
        self.check_life(op, arg, tensor)?;
        let range = tensor.start..tensor.start + tensor.len();
        match &*tensor.buffer {
            Buffer::U32(cell) => Ok(lock(cell)[range].to_vec()),
            Buffer::U8(cell) => Ok(lock(cell)[range].iter().map(|&x| u32::from(x)).collect()),
            Buffer::Float(_) => Err(self.wrong_storage(op, arg, "u8 or u32".to_owned(), tensor)),
        }
    }

    /// Reads a mask: true where the element is not 0. Real numbers and ids are both accepted.
    pub fn read_mask(&self, op: &'static str, arg: &'static str, tensor: &Tensor<T>) -> Result<Vec<bool>> {
        if self.dtype(tensor).is_float() {
            Ok(self.read(op, arg, tensor)?.slice().iter().map(|x| x.to_f64() != 0.0).collect())
        } else {
            Ok(self.read_ids(op, arg, tensor)?.into_iter().map(|x| x != 0).collect())
        }
    }

    /// Changes a persistent tensor of real numbers in place. Its buffer must not be in use by the same call, as it is
    /// when a gradient is accumulated into the parameter itself: that is [`Error::Aliased`].
    pub fn update<R>(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &Tensor<T>,
        f: impl FnOnce(ArrayViewMut1<'_, T>) -> R,
    ) -> Result<R> {
        if tensor.life != Life::Persistent {
            return Err(Error::NotPersistent { op, arg });
        }
        match &*tensor.buffer {
            Buffer::Float(cell) => {
                let mut guard = lock_alone(op, arg, cell)?;
                let len = tensor.len();
                Ok(f(ArrayViewMut1::from(&mut guard[tensor.start..tensor.start + len])))
            }
            _ => Err(self.wrong_storage(op, arg, T::DTYPE.to_string(), tensor)),
        }
    }

    /// Changes a persistent tensor of `u32` in place.
    pub fn update_u32<R>(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &Tensor<T>,
        f: impl FnOnce(&mut [u32]) -> R,
    ) -> Result<R> {
        if tensor.life != Life::Persistent {
            return Err(Error::NotPersistent { op, arg });
        }
        match &*tensor.buffer {
            Buffer::U32(cell) => {
                let mut guard = lock_alone(op, arg, cell)?;
                Ok(f(&mut guard[tensor.start..tensor.start + tensor.len()]))
            }
            _ => Err(self.wrong_storage(op, arg, "u32".to_owned(), tensor)),
        }
    }

    /// Adds `values` to a persistent tensor: how a parameter's gradient accumulates.
    pub fn accumulate<D: Dimension>(
        &self,
        op: &'static str,
        arg: &'static str,
        into: &Tensor<T>,
        values: &Array<T, D>,
    ) -> Result<()> {
        if into.len() != values.len() {
            return Err(Error::Shape {
                op,
                arg,
                expected: format!("{:?}, as the parameter", values.shape()),
                got: into.shape().to_vec(),
            });
        }
        self.update(op, arg, into, |mut sum| {
            for (s, &v) in sum.iter_mut().zip(values.iter()) {
                *s += v;
            }
        })
    }

    /// Scratch that takes over an array, as `shape`.
    ///
    /// # Panics
    /// If the element counts differ: the operation computed the array, so it knows its shape.
    pub fn adopt<D: Dimension>(&self, values: Array<T, D>, shape: &[usize]) -> Tensor<T> {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "an adopted array fills its shape");
        let (data, offset) = if values.is_standard_layout() {
            let (data, offset) = values.into_raw_vec_and_offset();
            (data, offset.unwrap_or(0))
        } else {
            (values.iter().copied().collect(), 0)
        };
        Tensor {
            buffer: Arc::new(Buffer::Float(RwLock::new(data))),
            start: offset,
            shape: shape.into(),
            life: self.scratch_life(),
        }
    }

    /// Scratch of `u32` that takes over ids, as `shape`.
    ///
    /// # Panics
    /// If the element counts differ: the operation computed the ids, so it knows their shape.
    pub fn adopt_ids(&self, ids: Vec<u32>, shape: &[usize]) -> Tensor<T> {
        assert_eq!(ids.len(), shape.iter().product::<usize>(), "adopted ids fill their shape");
        let buffer = Arc::new(Buffer::U32(RwLock::new(ids)));
        Tensor { buffer, start: 0, shape: shape.into(), life: self.scratch_life() }
    }

    /// A persistent tensor with these values. For the harness and for tests.
    pub fn constant(&self, values: ArrayD<T>) -> Tensor<T> {
        let shape = values.shape().to_vec();
        Tensor { life: Life::Persistent, ..self.adopt(values, &shape) }
    }

    /// The values in the backend's own scalar type (a dual number keeps its derivative). Not inside a step.
    pub fn values(&self, tensor: &Tensor<T>) -> Result<ArrayD<T>> {
        self.check_outside("download")?;
        Ok(self.read("download", "tensor", tensor)?.view().to_owned())
    }

    fn scratch_life(&self) -> Life {
        Life::Scratch { generation: self.generation.get() }
    }

    fn check_life(&self, op: &'static str, arg: &'static str, tensor: &Tensor<T>) -> Result<()> {
        match tensor.life {
            Life::Scratch { generation } if generation != self.generation.get() => Err(Error::StaleScratch { op, arg }),
            _ => Ok(()),
        }
    }

    fn check_outside(&self, op: &'static str) -> Result<()> {
        match self.running.get() {
            Some(step) => Err(Error::HostExchangeInStep { op, step }),
            None => Ok(()),
        }
    }

    fn wrong_storage(&self, op: &'static str, arg: &'static str, expected: String, tensor: &Tensor<T>) -> Error {
        Error::Storage { op, arg, expected, got: self.dtype(tensor) }
    }

    fn allocate(&self, op: &'static str, shape: &[usize], dtype: DType, life: Life) -> Result<Tensor<T>> {
        let len = shape.iter().product();
        let buffer = match dtype {
            DType::U32 => Buffer::U32(RwLock::new(vec![0; len])),
            DType::U8 => Buffer::U8(RwLock::new(vec![0; len])),
            float if float == T::DTYPE => Buffer::Float(RwLock::new(vec![T::zero(); len])),
            other => {
                return Err(Error::Storage {
                    op,
                    arg: "dtype",
                    expected: format!("{}, u32 or u8 on {}", T::DTYPE, self.name()),
                    got: other,
                });
            }
        };
        Ok(Tensor { buffer: Arc::new(buffer), start: 0, shape: shape.into(), life })
    }
}

impl<T: Scalar> Tensors for Reference<T> {
    type Tensor = Tensor<T>;

    fn name(&self) -> String {
        format!("reference {}", T::DTYPE)
    }

    fn float(&self) -> DType {
        T::DTYPE
    }

    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<Tensor<T>> {
        self.check_outside("persistent")?;
        self.allocate("persistent", shape, dtype, Life::Persistent)
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor<T>> {
        self.allocate("scratch", shape, dtype, self.scratch_life())
    }

    fn view(&self, tensor: &Tensor<T>, start: usize, shape: &[usize]) -> Result<Tensor<T>> {
        let end = start + shape.iter().product::<usize>();
        if end > tensor.len() {
            return Err(Error::View { start, end, len: tensor.len() });
        }
        Ok(Tensor { start: tensor.start + start, shape: shape.into(), ..tensor.clone() })
    }

    fn shape<'a>(&self, tensor: &'a Tensor<T>) -> &'a [usize] {
        &tensor.shape
    }

    fn dtype(&self, tensor: &Tensor<T>) -> DType {
        match &*tensor.buffer {
            Buffer::Float(_) => T::DTYPE,
            Buffer::U32(_) => DType::U32,
            Buffer::U8(_) => DType::U8,
        }
    }

    fn is_persistent(&self, tensor: &Tensor<T>) -> bool {
        tensor.life == Life::Persistent
    }

    fn upload(&self, values: ArrayViewD<'_, f64>, into: &Tensor<T>) -> Result<()> {
        const OP: &str = "upload";
        self.check_outside(OP)?;
        self.check_life(OP, "into", into)?;
        if values.shape() != into.shape() {
            return Err(Error::Shape {
                op: OP,
                arg: "values",
                expected: format!("{:?}, as the tensor", into.shape()),
                got: values.shape().to_vec(),
            });
        }
        let range = into.start..into.start + into.len();
        match &*into.buffer {
            Buffer::Float(cell) => {
                for (x, &v) in lock_mut(cell)[range].iter_mut().zip(&values) {
                    *x = T::from_f64(v);
                }
            }
            Buffer::U32(cell) => {
                store_integers(&mut lock_mut(cell)[range], &values, f64::from(u32::MAX), |v| v as u32)?
            }
            Buffer::U8(cell) => store_integers(&mut lock_mut(cell)[range], &values, f64::from(u8::MAX), |v| v as u8)?,
        }
        Ok(())
    }

    fn download(&self, tensor: &Tensor<T>) -> Result<ArrayD<f64>> {
        self.check_outside("download")?;
        let values: Vec<f64> = match self.dtype(tensor) {
            DType::U32 | DType::U8 => self.read_ids("download", "tensor", tensor)?.into_iter().map(f64::from).collect(),
            _ => self.read("download", "tensor", tensor)?.slice().iter().map(|x| x.to_f64()).collect(),
        };
        Ok(ArrayD::from_shape_vec(IxDyn(&tensor.shape), values).expect("a handle's shape matches its memory"))
    }

    fn fill(&self, tensor: &Tensor<T>, value: f64) -> Result<()> {
        self.check_life("fill", "tensor", tensor)?;
        let range = tensor.start..tensor.start + tensor.len();
        match &*tensor.buffer {
            Buffer::Float(cell) => lock_mut(cell)[range].fill(T::from_f64(value)),
            Buffer::U32(cell) => lock_mut(cell)[range].fill(value as u32),
            Buffer::U8(cell) => lock_mut(cell)[range].fill(value as u8),
        }
        Ok(())
    }

    fn keep(&self, from: &Tensor<T>, into: &Tensor<T>) -> Result<()> {
        const OP: &str = "keep";
        check_kept(self, from, into)?;
        // The two may be views of one buffer, so the values are copied out before the buffer is locked for writing.
        let range = into.start..into.start + into.len();
        match &*into.buffer {
            Buffer::Float(cell) => {
                let values = self.read(OP, "from", from)?.slice().to_vec();
                lock_mut(cell)[range].copy_from_slice(&values);
            }
            Buffer::U32(cell) => {
                let values = self.read_ids(OP, "from", from)?;
                lock_mut(cell)[range].copy_from_slice(&values);
            }
            Buffer::U8(cell) => {
                let values = self.read_ids(OP, "from", from)?;
                for (x, v) in lock_mut(cell)[range].iter_mut().zip(values) {
                    *x = v as u8;
                }
            }
        }
        Ok(())
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

fn store_integers<I>(into: &mut [I], values: &ArrayViewD<'_, f64>, max: f64, convert: impl Fn(f64) -> I) -> Result<()> {
    for ((index, &v), x) in values.indexed_iter().zip(into) {
        if !(v >= 0.0 && v <= max && v.fract() == 0.0) {
            use ndarray::Dimension as _;
            return Err(Error::Value {
                op: "upload",
                arg: "values",
                expected: format!("a whole number from 0 to {max}"),
                got: v,
                index: index.as_array_view().to_vec(),
            });
        }
        *x = convert(v);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{array, s};

    const KEY: StepKey = StepKey { purpose: "test", variant: 0 };

    #[test]
    fn scratch_dies_with_its_step() {
        let b = Reference::<f64>::new();
        let mut leaked = None;
        b.step(&KEY, &mut |b| {
            leaked = Some(b.scratch(&[2], DType::F64)?);
            Ok(())
        })
        .unwrap();
        let error = b.download(&leaked.unwrap()).unwrap_err();
        assert!(matches!(error, Error::StaleScratch { .. }), "{error}");
    }

    #[test]
    fn results_leave_a_step_by_keep() {
        let b = Reference::<f32>::new();
        let out = b.persistent(&[2], DType::F32).unwrap();
        b.step(&KEY, &mut |b| {
            let x = b.adopt(array![1.0f32, 2.0], &[2]);
            b.keep(&x, &out)
        })
        .unwrap();
        assert_eq!(b.download(&out).unwrap(), array![1.0, 2.0].into_dyn());
    }

    #[test]
    fn the_host_is_shut_out_of_a_step_and_steps_do_not_nest() {
        let b = Reference::<f64>::new();
        let x = b.persistent(&[1], DType::F64).unwrap();
        b.step(&KEY, &mut |b| {
            assert!(matches!(b.download(&x), Err(Error::HostExchangeInStep { .. })));
            assert!(matches!(b.upload(array![1.0].into_dyn().view(), &x), Err(Error::HostExchangeInStep { .. })));
            assert!(matches!(b.persistent(&[1], DType::F64), Err(Error::HostExchangeInStep { .. })));
            assert!(matches!(b.step(&KEY, &mut |_| Ok(())), Err(Error::NestedStep { .. })));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn upload_takes_any_strides_and_refuses_what_does_not_fit() {
        let b = Reference::<f64>::new();
        let host = array![[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]];
        let transposed = b.persistent(&[3, 2], DType::F64).unwrap();
        b.upload(host.t().into_dyn(), &transposed).unwrap();
        assert_eq!(b.download(&transposed).unwrap(), host.t().to_owned().into_dyn());
        let strided = b.persistent(&[2, 2], DType::F64).unwrap();
        b.upload(host.slice(s![.., ..;2]).into_dyn(), &strided).unwrap();
        assert_eq!(b.download(&strided).unwrap(), array![[1.0, 3.0], [4.0, 6.0]].into_dyn());
        let broadcast = b.persistent(&[3, 2], DType::F64).unwrap();
        b.upload(array![7.0].broadcast((3, 2)).unwrap().into_dyn(), &broadcast).unwrap();
        assert_eq!(b.download(&broadcast).unwrap(), ArrayD::from_elem(IxDyn(&[3, 2]), 7.0));
        let ids = b.persistent(&[1], DType::U8).unwrap();
        for bad in [256.0, -1.0, 0.5, f64::NAN] {
            assert!(matches!(b.upload(array![bad].into_dyn().view(), &ids), Err(Error::Value { .. })));
        }
        assert!(matches!(b.upload(host.view().into_dyn(), &ids), Err(Error::Shape { .. })));
        // The same of f32, with what only f32 has: every number is one of f64.
        let single = b.persistent(&[2, 2], DType::F64).unwrap();
        let odd = array![[0.1f32, -0.0], [f32::MIN_POSITIVE / 2.0, f32::NEG_INFINITY]];
        b.upload_f32(odd.t().into_dyn(), &single).unwrap();
        let got = b.download(&single).unwrap();
        assert!(got.iter().zip(odd.t()).all(|(x, y)| x.to_bits() == f64::from(*y).to_bits()), "{got}");
        assert!(matches!(b.upload_f32(odd.view().into_dyn(), &ids), Err(Error::Shape { .. })));
    }

    #[test]
    fn views_share_memory_and_stay_inside() {
        let b = Reference::<f64>::new();
        let flat = b.persistent(&[6], DType::F64).unwrap();
        let tail = b.view(&flat, 2, &[2, 2]).unwrap();
        b.fill(&tail, 3.0).unwrap();
        assert_eq!(b.download(&flat).unwrap(), array![0.0, 0.0, 3.0, 3.0, 3.0, 3.0].into_dyn());
        assert!(matches!(b.view(&tail, 1, &[4]), Err(Error::View { .. })));
        let nested = b.view(&tail, 3, &[1]).unwrap();
        b.accumulate("test", "x", &nested, &array![1.0]).unwrap();
        assert_eq!(b.download(&flat).unwrap()[5], 4.0);
    }

    #[test]
    fn accumulating_into_what_is_being_read_is_an_error_and_not_a_hang() {
        let b = Reference::<f64>::new();
        let x = b.persistent(&[2], DType::F64).unwrap();
        let values = b.read("test", "x", &x).unwrap();
        let error = b.accumulate("op::backward", "weight", &x, &array![1.0, 1.0]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "op::backward: `weight` shares its allocation with `another argument of the call`, expected an allocation \
             of its own"
        );
        drop(values);
        b.accumulate("op::backward", "weight", &x, &array![1.0, 1.0]).unwrap();
    }

    #[test]
    fn storage_is_refused_where_it_does_not_exist() {
        let b = Reference::<f32>::new();
        let error = b.persistent(&[1], DType::Bf16).unwrap_err();
        assert_eq!(
            error.to_string(),
            "persistent: `dtype` is stored as bf16, expected f32, u32 or u8 on reference f32"
        );
    }
}
