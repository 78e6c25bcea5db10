//! Exit codes, and which error ends a process with which.

use std::process::ExitCode;

use crate::config::ConfigError;
use crate::data::DataError;
use crate::jepa_targets::TargetsError;

/// How a process ends. The numbers are part of the command line's contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// The command did what was asked, or stopped cleanly after the first signal.
    Done = 0,
    /// The run failed: a device, a disk, a defect.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// Too many steps had a loss or a gradient that is not finite.
    NonFinite = 3,
    /// The data is missing, too small, changed or unreadable.
    Data = 4,
    /// A second signal came before the run could save.
    Interrupted = 130,
}

impl Exit {
    /// The exit of an error: the first known type in its chain decides; any other is [`Exit::Failed`].
    pub fn of(error: &anyhow::Error) -> Exit {
        for cause in error.chain() {
            if cause.is::<DataError>() || cause.downcast_ref().is_some_and(TargetsError::is_of_data) {
                return Exit::Data;
            }
            if cause.is::<ConfigError>() {
                return Exit::Usage;
            }
            if cause.is::<NonFiniteStop>() || cause.is::<NonFiniteResult>() || cause.is::<NonFiniteControl>() {
                return Exit::NonFinite;
            }
        }
        Exit::Failed
    }

    /// The number the process returns.
    pub fn number(self) -> i32 {
        i32::from(self as u8)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// The run stopped itself because its numbers are no longer finite.
#[derive(Debug, thiserror::Error)]
#[error(
    "train: {skipped} steps in one window of 64 steps had a loss or gradient that is not finite, the last of them step {step}; \
     the weights were not touched by them; {fix}"
)]
pub struct NonFiniteStop {
    /// Steps skipped in the log window that latched.
    pub skipped: u64,
    /// The last skipped step, counted from 1.
    pub step: u64,
    /// Where the evidence is, and what helps.
    pub fix: String,
}

/// What a run would save or report is not finite, although its gradients were: an update overflowed.
#[derive(Debug, thiserror::Error)]
#[error("{what} after step {step} is not finite; {fix}")]
pub struct NonFiniteResult {
    /// A tensor of the state, or the score.
    pub what: String,
    /// Steps done.
    pub step: u64,
    /// What helps.
    pub fix: String,
}

/// The control of a comparison was not finite, so there is nothing to hold a candidate against.
#[derive(Debug, thiserror::Error)]
#[error("compare: the control was not finite with seed {seed}, so nothing can be held against it: {why}")]
pub struct NonFiniteControl {
    /// Of its run.
    pub seed: u64,
    /// What the run said.
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::{Exit, NonFiniteControl, NonFiniteResult, NonFiniteStop};
    use crate::config::ConfigError;
    use crate::data::DataError;
    use crate::jepa_targets::TargetsError;

    #[test]
    fn an_error_keeps_its_exit_under_added_context() {
        let data = anyhow::Error::from(DataError::Missing { path: "x".into() }).context("while starting");
        assert_eq!(Exit::of(&data), Exit::Data);
        let targets = anyhow::Error::from(TargetsError::Foreign { path: "x".into() }).context("while starting");
        assert_eq!(Exit::of(&targets), Exit::Data);
        // What cannot be written is a fault of the disk, as it is for every other file.
        let cause = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let full = TargetsError::Unwritten { operation: "write", path: "x".into(), cause };
        assert_eq!(Exit::of(&anyhow::Error::from(full).context("c")), Exit::Failed);
        let usage =
            anyhow::Error::from(ConfigError::Invalid { key: "a.b".into(), problem: "is 0".into(), fix: "1".into() });
        assert_eq!(Exit::of(&usage), Exit::Usage);
        let stop = NonFiniteStop { skipped: 9, step: 12, fix: "f".into() };
        assert_eq!(Exit::of(&anyhow::Error::from(stop).context("c")), Exit::NonFinite);
        let result = NonFiniteResult { what: "`head.u`".into(), step: 2, fix: "f".into() };
        assert_eq!(Exit::of(&anyhow::Error::from(result).context("c")), Exit::NonFinite);
        let control = NonFiniteControl { seed: 1, why: "w".into() };
        assert_eq!(Exit::of(&anyhow::Error::from(control).context("c")), Exit::NonFinite);
        assert_eq!(Exit::of(&anyhow::anyhow!("other")), Exit::Failed);
    }

    #[test]
    fn numbers_are_the_documented_ones() {
        let all = [Exit::Done, Exit::Failed, Exit::Usage, Exit::NonFinite, Exit::Data, Exit::Interrupted];
        assert_eq!(all.map(Exit::number), [0, 1, 2, 3, 4, 130]);
    }
}
