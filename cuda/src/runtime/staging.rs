//! Pinned host memory that uploads go through.
//!
//! A copy from pageable memory makes the caller wait until the stream has come to it, and so until the step before has
//! run. Bytes that lie in pinned memory are fetched when the stream comes to them; the host goes on at once. The memory
//! is a ring: a part is written again after the event behind its last copy.

use std::collections::VecDeque;
use std::ops::Range;

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result as cu, sys};

/// Bytes of the ring for small uploads: dozens of steps of a small model.
const SIZE: usize = 8 << 20;

/// The largest upload that goes through that ring.
pub const SMALL: usize = SIZE / 2;

/// Uploads of one size that the ring for large ones holds. When the host brings what step n + 1 reads, step n - 2 has
/// ended ([`super::shared`] lets it be two replays ahead), so the copies for n - 2 and before have. That for n - 1 starts
/// then and may be under way, and that for n waits for step n - 1: two places are taken, and the third is free.
const PLACES: usize = 3;

/// The largest upload that memory is pinned for: pages that nobody else can have.
const LARGEST: usize = 256 << 20;

/// Events without a time that let the host sleep.
pub const FLAGS: sys::CUevent_flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC;

/// A ring. Used on the device thread.
pub struct Staging {
    base: *mut u8,
    size: usize,
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
    /// The ring for uploads of up to [`SMALL`] bytes; the GPU's context is current.
    pub fn small() -> Result<Self, DriverError> {
        Self::of(SIZE)
    }

    fn of(size: usize) -> Result<Self, DriverError> {
        // SAFETY: a plain allocation; it is freed by `free` alone, and otherwise kept for the life of the process.
        let base = unsafe { cu::malloc_host(size, 0) }?;
        Ok(Self { base: base.cast(), size, head: 0, busy: VecDeque::new() })
    }

    /// Gives the memory back after the last copy from it.
    fn free(mut self) -> Result<(), DriverError> {
        for (_, copied) in self.busy.drain(..) {
            copied.synchronize()?;
        }
        // SAFETY: it is of `malloc_host`, no copy reads it any more, and the ring ends here.
        unsafe { cu::free_host(self.base.cast()) }
    }

    /// Asks for a copy of `bytes` to the device address `to`; true if an older copy had to be waited for.
    ///
    /// # Safety
    /// As many bytes at `to` belong to the caller until the stream has come so far.
    pub unsafe fn write(&mut self, to: u64, bytes: &[u8], stream: &CudaStream) -> Result<bool, DriverError> {
        assert!(bytes.len() <= self.size, "the ring has {} bytes, and the upload {}", self.size, bytes.len());
        let part = next_part(self.head, bytes.len(), self.size);
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

/// The ring for large uploads, which is made when there is one, for [`PLACES`] of the largest so far.
#[derive(Default)]
pub struct Large {
    ring: Option<Staging>,
    /// Bytes of the smallest upload that there was no memory to pin for.
    refused: Option<usize>,
}

impl Large {
    /// [`Staging::write`]; nothing is done and nothing given where no memory can be pinned for so many bytes.
    ///
    /// # Safety
    /// As [`Staging::write`].
    pub unsafe fn write(&mut self, to: u64, bytes: &[u8], stream: &CudaStream) -> Result<Option<bool>, DriverError> {
        let len = bytes.len();
        if len > LARGEST || self.refused.is_some_and(|refused| len >= refused) {
            return Ok(None);
        }
        if let Some(small) = self.ring.take_if(|ring| ring.size < PLACES * len) {
            small.free()?;
        }
        let ring = match &mut self.ring {
            Some(ring) => ring,
            none => match Staging::of(PLACES * len) {
                Ok(ring) => none.insert(ring),
                // Asked once: a refusal takes its time as well. A worse fault shows in the copy that is waited for.
                Err(_) => {
                    self.refused = Some(len);
                    return Ok(None);
                }
            },
        };
        // SAFETY: as the caller's.
        unsafe { ring.write(to, bytes, stream) }.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::{PLACES, next_part};

    /// The reason for the number of places: neither of the two copies that may not have ended is in the way.
    #[test]
    fn a_large_upload_has_another_place_than_the_two_before_it() {
        let len = 12_582_912;
        let mut head = 0;
        let mut parts = Vec::new();
        for _ in 0..3 * PLACES {
            let part = next_part(head, len, PLACES * len);
            head = part.end;
            parts.push(part);
        }
        for (n, part) in parts.iter().enumerate() {
            let overlaps = |at: &&std::ops::Range<usize>| at.start < part.end && part.start < at.end;
            let before = &parts[n.saturating_sub(2)..n];
            assert_eq!(before.iter().find(overlaps), None, "upload {n}");
            // And no place is left unused.
            assert!(n < PLACES || parts[n - PLACES] == *part, "upload {n}");
        }
    }

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
