//! The `dormouse` program.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use dormouse::cli::AnchorsArgs;
use dormouse::commands::{anchors, finish};

#[derive(Parser)]
#[command(name = "dormouse", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Score n-gram models on the windows a model would be scored on.
    Anchors(AnchorsArgs),
}

fn main() -> ExitCode {
    let Command::Anchors(arguments) = Cli::parse().command;
    finish(anchors(&arguments))
}
