//! The `dormouse` program.

use std::process::ExitCode;

use clap::Parser;
use dormouse::cli::Cli;
use dormouse::{commands, learner};

fn main() -> ExitCode {
    commands::run(Cli::parse().command, learner::build)
}
