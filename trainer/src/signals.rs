//! The first SIGINT or SIGTERM asks the run to stop; the second ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::exit::Exit;

/// Makes a write beyond the file size limit return its error: the signal that it raises besides would kill the process in
/// the middle of a file.
pub fn ignore_file_size_signal() {
    // SAFETY: SIG_IGN installs no handler of ours, so no code runs in a signal's context.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Whether somebody asked the run to stop. Clones share the answer.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A request that only [`Stop::request`] makes.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// A request that the first SIGINT or SIGTERM makes. The second ends the process with exit code 130.
    pub fn on_signals() -> std::io::Result<Stop> {
        let stop = Stop::new();
        for signal in [SIGINT, SIGTERM] {
            // Order matters: the shutdown is checked first, and the flag it looks at is set only after it.
            signal_hook::flag::register_conditional_shutdown(signal, Exit::Interrupted.number(), stop.0.clone())?;
            signal_hook::flag::register(signal, stop.0.clone())?;
        }
        Ok(stop)
    }

    /// Asks the run to stop.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the run was asked to stop.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
