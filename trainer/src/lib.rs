//! The trainer: bytes in, a run folder out.
//!
//! [`config`] says what a run is, [`data`] gives the batch of a step, `train` runs the steps over a `train::Learner`,
//! `checkpoint` makes a stop harmless, and `anchors` says what the resulting number is worth.

pub mod anchors;
pub mod arms;
pub mod backend;
pub mod bench;
pub mod check;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod compare;
pub mod config;
pub mod data;
pub mod exit;
pub mod history;
pub mod host;
pub mod host_table;
pub mod inspect;
pub mod instruments;
pub mod jepa_targets;
pub mod learner;
pub mod model;
pub mod progress;
pub mod rng;
pub mod run;
pub mod schedule;
pub mod signals;
pub mod train;
