//! [`Shared`]: what the server's thread and its callers share.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cubecl::stream_id::StreamId;
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result as cu};

use super::Written;
use super::error::Error;
use super::gemm::Library;
use super::gpu::Gpu;
use super::library::{driver_error, ends_the_context};
use super::staging::{self, Large, Staging};

/// What the server's thread and its callers share.
pub struct Shared {
    /// The GPU, or why there is none.
    pub gpu: Result<Gpu, Error>,
    errors: Mutex<Vec<Error>>,
    capturing: Mutex<Option<StreamId>>,
    last_kernel: Mutex<&'static str>,
    /// The library for matrix products, from the first one on.
    products: Mutex<Option<Library>>,
    /// Kernels launched or recorded.
    pub launches: AtomicU64,
    /// Allocations of device memory.
    pub allocations: AtomicU64,
    /// Bytes allocated and not yet freed.
    pub allocated: AtomicU64,
    /// Sizes of the buffers that are held, by their addresses.
    held: Mutex<HashMap<u64, u64>>,
    /// Kernels that the compiler was run for.
    pub compiled: AtomicU64,
    /// Pinned memory for uploads, from the first one on.
    staging: Mutex<Option<Staging>>,
    /// The same for large uploads that come before every step.
    large: Mutex<Large>,
    /// What comes after the last steps that were replayed, oldest first.
    steps: Mutex<VecDeque<CudaEvent>>,
}

/// Replayed steps that the host may be ahead of the device. With one, uploads and launch of a step hide behind the step
/// before; a second bridges a slow moment of the host. More would only make an interrupt slower.
const AHEAD: usize = 2;

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves a list of errors behind, which is still a list of errors.
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

impl Shared {
    pub(super) fn new(gpu: Result<Gpu, Error>) -> Self {
        Self {
            gpu,
            errors: Mutex::new(Vec::new()),
            capturing: Mutex::new(None),
            last_kernel: Mutex::new("none"),
            products: Mutex::new(None),
            launches: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            held: Mutex::default(),
            compiled: AtomicU64::new(0),
            staging: Mutex::default(),
            large: Mutex::default(),
            steps: Mutex::default(),
        }
    }

    /// Notes an error for the next call that can return one.
    pub fn note(&self, error: Error) {
        lock(&self.errors).push(error);
    }

    /// The first error noted since the last call; the rest are its consequences.
    pub fn take_error(&self) -> Result<(), Error> {
        let errors = std::mem::take(&mut *lock(&self.errors));
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    /// The GPU's stream.
    pub fn stream(&self) -> Result<&Arc<CudaStream>, Error> {
        self.gpu.as_ref().map(|gpu| &gpu.stream).map_err(Error::clone)
    }

    /// Copies bytes to a device address in the order of the stream.
    ///
    /// # Safety
    /// As many bytes at `to` belong to the caller until the stream has come so far.
    pub unsafe fn write(&self, to: u64, bytes: &[u8]) -> Result<Written, Error> {
        let stream = self.stream()?;
        if bytes.len() > staging::SMALL {
            // SAFETY: as the caller's; the copy is waited for, so the host's bytes live long enough.
            unsafe { cu::memcpy_htod_async(to, bytes, stream.cu_stream()) }.map_err(self.call("cuMemcpyHtoDAsync"))?;
            stream.synchronize().map_err(self.call("cuStreamSynchronize"))?;
            return Ok(Written::Waited);
        }
        let mut staging = lock(&self.staging);
        let ring = match &mut *staging {
            Some(ring) => ring,
            none => none.insert(Staging::small().map_err(self.call("cuMemHostAlloc"))?),
        };
        // SAFETY: as the caller's.
        let waited = unsafe { ring.write(to, bytes, stream) }.map_err(self.call("cuMemcpyHtoDAsync"))?;
        Ok(if waited { Written::Waited } else { Written::Queued })
    }

    /// [`Shared::write`] of what is new before every step: large ones go through pinned memory as well, where there is any.
    ///
    /// # Safety
    /// As [`Shared::write`].
    pub unsafe fn write_every_step(&self, to: u64, bytes: &[u8]) -> Result<Written, Error> {
        if bytes.len() > staging::SMALL {
            // SAFETY: as the caller's.
            let written = unsafe { lock(&self.large).write(to, bytes, self.stream()?) };
            if let Some(waited) = written.map_err(self.call("cuMemcpyHtoDAsync"))? {
                return Ok(if waited { Written::Waited } else { Written::Queued });
            }
        }
        // SAFETY: as the caller's.
        unsafe { self.write(to, bytes) }
    }

    /// Waits until the device is at most `AHEAD` replayed steps behind.
    pub fn wait_for_steps_before(&self) -> Result<(), Error> {
        let mut steps = lock(&self.steps);
        while steps.len() >= AHEAD {
            let step = steps.pop_front().expect("it is not empty");
            step.synchronize().map_err(self.call("cuEventSynchronize"))?;
        }
        Ok(())
    }

    /// Notes that a step was replayed.
    pub fn note_step(&self) -> Result<(), Error> {
        let event = self.stream()?.record_event(Some(staging::FLAGS)).map_err(self.call("cuEventRecord"))?;
        lock(&self.steps).push_back(event);
        Ok(())
    }

    /// Says whose launches are being recorded.
    pub fn set_capturing(&self, by: Option<StreamId>) {
        *lock(&self.capturing) = by;
    }

    /// Refuses a launch from another thread than the one whose launches are being recorded.
    pub fn check_capture(&self, kernel: &str, by: StreamId) -> Result<(), Error> {
        match *lock(&self.capturing) {
            Some(recorded) if recorded != by => Err(Error::ForeignLaunch { kernel: kernel.to_owned() }),
            _ => Ok(()),
        }
    }

    /// The library for matrix products, if there was one to compute.
    pub fn products(&self) -> MutexGuard<'_, Option<Library>> {
        lock(&self.products)
    }

    /// A failed call of the driver as an error.
    pub fn call(&self, call: &'static str) -> impl Fn(DriverError) -> Error {
        move |error| {
            let (reason, last_kernel) = (driver_error(error), lock(&self.last_kernel).to_string());
            if ends_the_context(error) {
                return Error::DeviceLost { call, reason, last_kernel };
            }
            Error::Call { call, reason, last_kernel }
        }
    }

    /// Says which kernel was launched last.
    pub fn note_kernel(&self, name: &'static str) {
        *lock(&self.last_kernel) = name;
    }

    /// Forgets a buffer that is freed.
    pub fn release(&self, at: u64, size: u64) {
        self.allocated.fetch_sub(size, Ordering::Relaxed);
        lock(&self.held).remove(&at);
    }

    /// Notes a buffer that was allocated.
    pub fn hold(&self, at: u64, size: u64) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
        self.allocated.fetch_add(size, Ordering::Relaxed);
        lock(&self.held).insert(at, size);
    }

    /// That there is no memory for `need` more bytes.
    pub fn out_of_memory(&self, need: u64) -> Error {
        let (free, total) = cu::mem_get_info().unwrap_or((0, 0));
        Error::OutOfMemory {
            need,
            free: free as u64,
            total: total as u64,
            held: lock(&self.held).values().copied().collect(),
        }
    }

    pub(super) fn is_capturing(&self) -> bool {
        lock(&self.capturing).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_is_handed_out_once() {
        let shared = Shared::new(Err(Error::NoDriver));
        assert_eq!(shared.take_error(), Ok(()));
        let launch = |kernel: &str| Error::Launch { kernel: kernel.to_owned(), reason: "refused".to_owned() };
        shared.note(launch("first"));
        shared.note(launch("second"));
        assert_eq!(shared.take_error(), Err(launch("first")));
        assert_eq!(shared.take_error(), Ok(()));
        assert_eq!(shared.stream().err(), Some(Error::NoDriver));
    }
}
