//! The device that every test of this folder runs on.

use dormouse_cuda::{Gpu, Runtime};

/// Mesa's software Vulkan driver, or none with a line that says why the test did not run.
pub fn device() -> Option<Gpu> {
    match Runtime::Lavapipe.available() {
        Ok(()) => Some(Gpu::open(Runtime::Lavapipe).unwrap()),
        Err(why) => {
            eprintln!("NOTRUN {}: {why}", std::thread::current().name().unwrap_or("test"));
            None
        }
    }
}
