//! Pinned host memory that uploads go through.
//!
//! A copy from pageable memory makes the caller wait until the stream has come to it, and so until the step before has
//! run. Bytes that lie in pinned memory are fetched when the stream comes to them; the host goes on at once. The memory
//! is a ring: a part is written again after the event behind its last copy.

use std::collections::VecDeque;
use std::ops::Range;

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result as cu, sys};

/// Bytes of the ring: dozens of steps of a small model. What does not fit half of it is copied as before.
const SIZE: usize = 8 << 20;

/// Events without a time that let the host sleep.
pub const FLAGS: sys::CUevent_flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC;

/// The ring. Used on the device thread.
pub struct Staging {
    base: *mut u8,
    head: usize,
    /// Parts that a copy may still read, oldest first.
    busy: VecDeque<(Range<usize>, CudaEvent)>,
}

// SAFETY: the memory belongs to no thread; the mutex around the ring lets one use it at a time.
unsafe impl Send for Staging {}

/// Where the next part of `len` bytes lies in a ring of `size`.
fn next_part(head: usize, len: usize, size: usize) -> Range<usize> {
    let start = if head + len > size { 0 } else { head };
    start..start + len
}

impl Staging {
    /// Takes the ring's memory; the GPU's context is current.
    pub fn new() -> Result<Self, DriverError> {
        // SAFETY: a plain allocation, kept for the life of the process.
        let base = unsafe { cu::malloc_host(SIZE, 0) }?;
        Ok(Self { base: base.cast(), head: 0, busy: VecDeque::new() })
    }

    /// Whether so many bytes go through the ring.
    pub fn takes(len: usize) -> bool {
        len <= SIZE / 2
    }

    /// Asks for a copy of `bytes` to the device address `to`; true if an older copy had to be waited for.
    ///
    /// # Safety
    /// As many bytes at `to` belong to the caller until the stream has come so far.
    pub unsafe fn write(&mut self, to: u64, bytes: &[u8], stream: &CudaStream) -> Result<bool, DriverError> {
        assert!(Self::takes(bytes.len()), "large uploads do not go through the ring");
        let part = next_part(self.head, bytes.len(), SIZE);
        let mut waited = false;
        // Copies end in the order of the queue, so an older one that does not overlap costs nothing to wait for.
        while self.busy.iter().any(|(range, _)| range.start < part.end && part.start < range.end) {
            let (_, copied) = self.busy.pop_front().expect("one of them overlaps");
            waited |= !copied.is_complete();
            copied.synchronize()?;
        }
        // SAFETY: the part lies in the ring and no copy reads it any more; the device reads it before it is written again.
        unsafe {
            let slot = std::slice::from_raw_parts_mut(self.base.add(part.start), bytes.len());
            slot.copy_from_slice(bytes);
            cu::memcpy_htod_async(to, &*slot, stream.cu_stream())?;
        }
        self.head = part.end;
        self.busy.push_back((part, stream.record_event(Some(FLAGS))?));
        Ok(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::next_part;

    #[test]
    fn parts_follow_each_other_and_never_cross_the_end() {
        let mut head = 0;
        let mut starts = Vec::new();
        for len in [40, 30, 40, 60, 40] {
            let part = next_part(head, len, 100);
            assert!(part.end <= 100 && part.len() == len);
            starts.push(part.start);
            head = part.end;
        }
        assert_eq!(starts, [0, 40, 0, 40, 0]);
    }
}
