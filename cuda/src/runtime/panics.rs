//! Panics on cubecl's device threads.
//!
//! cubecl runs a server on a thread of its own, catches panics there and goes on: a kernel that never ran then looks
//! like one that wrote zeros. A hook notes every panic on such a thread, and the next call that can fail returns it.

use std::any::Any;
use std::sync::{Mutex, Once};

use cubecl::device::DeviceId;

use super::error::Error;

static PANICS: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// The name that cubecl gives to the thread of a device.
fn thread_of(device: DeviceId) -> String {
    format!("DSD-{}-{}", device.type_id, device.index_id)
}

/// Installs the hook once, in front of the one that is there.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| match std::thread::current().name() {
            Some(name) if name.starts_with("DSD-") => {
                PANICS.lock().unwrap_or_else(|p| p.into_inner()).push((name.to_owned(), info.to_string()));
            }
            _ => next(info),
        }));
    });
}

/// The first panic on a device's thread since the last call.
pub fn take(device: DeviceId) -> Result<(), Error> {
    let mut panics = PANICS.lock().unwrap_or_else(|p| p.into_inner());
    if panics.is_empty() {
        return Ok(());
    }
    let name = thread_of(device);
    let first = panics.iter().find(|(thread, _)| *thread == name).map(|(_, message)| message.clone());
    panics.retain(|(thread, _)| *thread != name);
    first.map_or(Ok(()), |message| Err(Error::Panic { message }))
}

/// What a caught panic says.
pub fn text(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a message".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h2_a_panic_on_a_device_thread_is_an_error_of_the_next_call() {
        watch();
        let thread = std::thread::Builder::new().name("DSD-9-9".into()).spawn(|| panic!("kernel fell over")).unwrap();
        assert!(thread.join().is_err());
        let (this, other) = (DeviceId { type_id: 9, index_id: 9 }, DeviceId { type_id: 9, index_id: 8 });
        assert_eq!(take(other), Ok(()));
        let error = take(this).unwrap_err().to_string();
        assert!(error.contains("kernel fell over"), "{error}");
        assert_eq!(take(this), Ok(()));
    }
}
