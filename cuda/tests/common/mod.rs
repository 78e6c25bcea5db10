//! The device that every test of this folder runs on.

use dormouse_cuda::{Device, Engine, Lavapipe};

/// Mesa's software Vulkan driver, or none with a line that says why the test did not run.
pub fn device() -> Option<Device<Lavapipe>> {
    match Lavapipe::available() {
        Ok(()) => Some(Device::open().unwrap()),
        Err(why) => {
            eprintln!("NOTRUN {}: {why}", std::thread::current().name().unwrap_or("test"));
            None
        }
    }
}
