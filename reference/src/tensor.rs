//! Tensors as handles: what every backend offers before any operation exists.
//!
//! A handle is cheap to clone and always describes contiguous row-major memory, so no operation ever meets a stride.
//! Memory has one of two lives. *Persistent* memory (parameters, gradients, moments, batches, counters) lives until its
//! last handle is dropped and keeps its address. *Scratch* memory holds a step's intermediates: it dies with the step,
//! and touching it afterwards is [`Error::StaleScratch`]. Outside a step, scratch lives
//! until the next step starts.
//!
//! A step ([`Tensors::step`]) is a closure that issues operations in a fixed order and touches the host nowhere, so a
//! device may run it once, capture it as a graph and replay it. ADR 0001 has the reasoning.

use std::fmt;

use ndarray::{ArrayD, ArrayViewD};

use crate::error::{Error, Result};

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// 32-bit unsigned integer: rows, steps, counters.
    U32,
    /// Byte: ids and targets.
    U8,
    /// The harness's dual number; exists on the host only.
    Dual,
}

impl DType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
            DType::U8 => 1,
            DType::Dual => 16,
        }
    }

    /// Whether the elements are real numbers.
    pub fn is_float(self) -> bool {
        !matches!(self, DType::U32 | DType::U8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::U32 => "u32",
            DType::U8 => "u8",
            DType::Dual => "dual",
        })
    }
}

/// The arithmetic an operation's matrix products use, a field of its `Config`.
///
/// Storage is the handle's [`DType`]; nothing becomes `Tf32` or `Bf16` unless the config says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The arithmetic of the storage type, at least `f32`.
    Full,
    /// Operands rounded to tf32, sums in f32.
    Tf32,
    /// Operands rounded to bf16, sums in f32.
    Bf16,
}

/// Names a step, so that a backend can recognise one that it has captured.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepKey {
    /// What the step is for: `train`, `eval`, `generate`.
    pub purpose: &'static str,
    /// A hash of everything that the closure depends on: shapes and configuration.
    pub variant: u64,
}

/// Memory and steps: the base of every operation's trait.
pub trait Tensors {
    /// A cheap handle to contiguous row-major memory.
    type Tensor: Clone + fmt::Debug;

    /// The backend's name in tables and messages, such as `reference f64`.
    fn name(&self) -> String;

    /// How this backend stores real numbers unless told otherwise.
    fn float(&self) -> DType;

    /// Zero-filled memory that lives until its last handle is dropped. Not inside a step.
    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<Self::Tensor>;

    /// Memory of the running step, contents unspecified.
    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Self::Tensor>;

    /// A handle to the elements from `start` on, as `shape`. Same memory, same life; no launch.
    fn view(&self, tensor: &Self::Tensor, start: usize, shape: &[usize]) -> Result<Self::Tensor>;

    /// Lengths of the axes.
    fn shape<'a>(&self, tensor: &'a Self::Tensor) -> &'a [usize];

    /// How the elements are stored.
    fn dtype(&self, tensor: &Self::Tensor) -> DType;

    /// Whether the memory outlives steps.
    fn is_persistent(&self, tensor: &Self::Tensor) -> bool;

    /// Copies host values, rounded to the tensor's type. Any strides on the host side. Not inside a step.
    fn upload(&self, values: ArrayViewD<'_, f64>, into: &Self::Tensor) -> Result<()>;

    /// [`upload`](Tensors::upload) of values that are f32 and new before every step: a device may keep memory of the host
    /// for them, so as to wait for no step that is under way. Not inside a step.
    fn upload_f32(&self, values: ArrayViewD<'_, f32>, into: &Self::Tensor) -> Result<()> {
        self.upload(values.mapv(f64::from).view(), into)
    }

    /// Copies the values to the host. Not inside a step.
    fn download(&self, tensor: &Self::Tensor) -> Result<ArrayD<f64>>;

    /// Sets every element.
    fn fill(&self, tensor: &Self::Tensor, value: f64) -> Result<()>;

    /// Copies `from` into the persistent tensor `into` of the same shape and type: how a result leaves a step.
    fn keep(&self, from: &Self::Tensor, into: &Self::Tensor) -> Result<()>;

    /// [`keep`](Tensors::keep) of several pairs, none of which writes what another reads: a backend may do them at once.
    fn keep_all(&self, pairs: &[(&Self::Tensor, &Self::Tensor)]) -> Result<()> {
        pairs.iter().try_for_each(|(from, into)| self.keep(from, into))
    }

    /// Runs `body` as one step.
    ///
    /// The closure must issue the same operations every time it runs under the same key, and must not read the device
    /// or branch on a value: a backend may replay what it recorded instead of calling it. Results leave by
    /// [`keep`](Tensors::keep) or by operations that write persistent memory.
    fn step(&self, key: &StepKey, body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()>;

    /// Says which part of its work the caller begins, such as `backward`. Backends that count attribute what follows to
    /// it; the others do nothing.
    fn stage(&self, _stage: &'static str) {}

    /// Runs two pieces of work of which neither reads or writes what the other writes. A backend may run them at the same
    /// time; the result is that of one after the other. [`beside`] does this for pieces that give something.
    fn beside(
        &self,
        first: &mut dyn FnMut(&Self) -> Result<()>,
        second: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<()> {
        first(self)?;
        second(self)
    }

    /// The same memory as another shape with as many elements.
    fn reshape(&self, tensor: &Self::Tensor, shape: &[usize]) -> Result<Self::Tensor> {
        self.view(tensor, 0, shape)
    }
}

/// Refuses what [`Tensors::keep`] cannot copy. For backends of their own.
///
/// # Errors
/// `NotPersistent` if `into` is scratch; `Shape` or `Storage` if the two differ.
pub fn check_kept<B: Tensors>(b: &B, from: &B::Tensor, into: &B::Tensor) -> Result<()> {
    const OP: &str = "keep";
    if !b.is_persistent(into) {
        return Err(Error::NotPersistent { op: OP, arg: "into" });
    }
    if b.shape(from) != b.shape(into) {
        let expected = format!("{:?}, as `into`", b.shape(into));
        return Err(Error::Shape { op: OP, arg: "from", expected, got: b.shape(from).to_vec() });
    }
    if b.dtype(from) != b.dtype(into) {
        let expected = format!("{}, as `into`", b.dtype(into));
        return Err(Error::Storage { op: OP, arg: "from", expected, got: b.dtype(from) });
    }
    Ok(())
}

/// What two pieces of work give of which neither reads or writes what the other writes; see [`Tensors::beside`].
///
/// # Errors
/// The first error of the two, in their order.
pub fn beside<B: Tensors, X, Y>(
    b: &B,
    first: impl FnOnce(&B) -> Result<X>,
    second: impl FnOnce(&B) -> Result<Y>,
) -> Result<(X, Y)> {
    let (mut first, mut second) = (Some(first), Some(second));
    let (mut x, mut y) = (None, None);
    b.beside(
        &mut |b| {
            x = Some(first.take().expect("a piece of work runs once")(b)?);
            Ok(())
        },
        &mut |b| {
            y = Some(second.take().expect("a piece of work runs once")(b)?);
            Ok(())
        },
    )?;
    Ok((x.expect("the first piece has run"), y.expect("the second piece has run")))
}
