//! The `dormouse` program.

use std::process::ExitCode;

use clap::Parser;
use dormouse::{backend, cli::Cli, commands, host};

fn main() -> ExitCode {
    host::keep_freed_memory();
    // SAFETY: no other thread exists yet.
    unsafe { dormouse_cuda::keep_display_out() };
    commands::run(Cli::parse().command, backend::build)
}
