//! Handles to device memory, and how they become arguments of kernels.

use std::fmt;
use std::sync::{Arc, OnceLock};

use cubecl::prelude::*;
use cubecl::server::Handle;
use dormouse_reference::DType;

use crate::runtime::gemm::Start;

/// One allocation.
pub(crate) struct Buffer {
    pub handle: Handle,
    /// Its address, where a library has asked for it.
    pub address: OnceLock<u64>,
}

impl Buffer {
    /// An allocation.
    pub fn new(handle: Handle) -> Self {
        Self { handle, address: OnceLock::new() }
    }

    /// The part of the buffer from byte `start` on.
    pub fn part(&self, start: u64, bytes: u64) -> Handle {
        // The handle's own end may lie before that of its memory, which is rounded up; both ends add up.
        let end = self.handle.size_in_used() - start - bytes;
        self.handle.clone().offset_start(start).offset_end(end)
    }
}

/// The life of a tensor's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Life {
    Persistent,
    Scratch { generation: u64 },
}

/// A handle to memory of a [`Device`](crate::Device). Every element is a word of four bytes.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) buffer: Arc<Buffer>,
    /// Words from the start of the buffer.
    pub(crate) start: u64,
    pub(crate) shape: Arc<[usize]>,
    pub(crate) dtype: DType,
    pub(crate) life: Life,
}

/// Bytes of an element on the device, whatever its type.
pub(crate) const WORD: u64 = 4;

/// The largest number of elements of a tensor: kernels index with 32 bits and add a start to it.
pub(crate) const MAX_ELEMENTS: u64 = (i32::MAX - 4096) as u64;

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?} {} {:?}", self.shape, self.dtype, self.life)
    }
}

impl Tensor {
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

    /// Bytes on the device.
    pub(crate) fn bytes(&self) -> u64 {
        self.len() as u64 * WORD
    }

    /// Whether both are handles to one allocation, even to different parts of it.
    pub(crate) fn shares_allocation(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// Whether an element belongs to both.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |t: &Self| t.start + t.len() as u64;
        self.shares_allocation(other) && self.start < end(other) && other.start < end(self)
    }

    /// The buffer from the last multiple of `alignment` bytes before the tensor's start, the words between the two, and
    /// the length in words of both together.
    fn aligned(&self, alignment: u64) -> (Handle, u32, usize) {
        let at = self.start * WORD;
        let base = at - at % alignment;
        let skip = (at - base) / WORD;
        let words = skip + self.len() as u64;
        (self.buffer.part(base, words * WORD), skip as u32, words as usize)
    }

    /// Where the tensor starts, for a library.
    pub(crate) fn place(&self) -> Start<'_> {
        Start { buffer: &self.buffer.handle, address: &self.buffer.address, offset: self.start * WORD }
    }

    /// The tensor as an argument of a kernel that reads or writes floats.
    pub(crate) fn floats<R: Runtime>(&self, alignment: u64) -> FloatsLaunch<R> {
        let (handle, start, len) = self.aligned(alignment);
        // SAFETY: the handle covers `len` words.
        FloatsLaunch::new(unsafe { ArrayArg::from_raw_parts(handle, len) }, start)
    }

    /// The tensor as an argument of a kernel that moves words.
    pub(crate) fn words<R: Runtime>(&self, alignment: u64) -> WordsLaunch<R> {
        let (handle, start, len) = self.aligned(alignment);
        // SAFETY: the handle covers `len` words.
        WordsLaunch::new(unsafe { ArrayArg::from_raw_parts(handle, len) }, start)
    }
}

/// Floats inside a kernel. A tensor may start anywhere in its buffer, and Vulkan binds buffers at coarse offsets only,
/// so every access adds `start`; on CUDA it is zero.
#[derive(CubeType, CubeLaunch)]
pub struct Floats {
    data: Array<f32>,
    start: u32,
}

#[cube]
impl Floats {
    /// Element `i`.
    pub fn at(&self, i: usize) -> f32 {
        self.data[self.start as usize + i]
    }

    /// Sets element `i`.
    pub fn set(&mut self, i: usize, value: f32) {
        self.data[self.start as usize + i] = value;
    }
}

/// Words inside a kernel: any element type by its bits.
#[derive(CubeType, CubeLaunch)]
pub struct Words {
    data: Array<u32>,
    start: u32,
}

#[cube]
impl Words {
    /// Word `i`.
    pub fn at(&self, i: usize) -> u32 {
        self.data[self.start as usize + i]
    }

    /// Sets word `i`.
    pub fn set(&mut self, i: usize, value: u32) {
        self.data[self.start as usize + i] = value;
    }
}
