//! The `dormouse` program.

use std::process::ExitCode;

use clap::Parser;
use dormouse::{cli::Cli, commands, host, learner};

fn main() -> ExitCode {
    host::keep_freed_memory();
    commands::run(Cli::parse().command, learner::build)
}
