//! The JEPA objective of a run: whether there is one, how much it weighs, and where its targets come from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{ConfigError, invalid};

/// Which forward pass of the student the objective is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JepaMode {
    /// There is no objective, no teacher and no parameter of either.
    #[default]
    Off,
    /// One forward pass on masked bytes gives the latents and, at its unmasked positions, the cross-entropy.
    Shared,
    /// A forward pass on masked bytes gives the latents; one on all bytes gives the cross-entropy.
    Separate,
}

impl JepaMode {
    /// The word in files and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            JepaMode::Off => "off",
            JepaMode::Shared => "shared",
            JepaMode::Separate => "separate",
        }
    }
}

/// The objective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JepaConfig {
    /// Which forward pass it is about.
    pub mode: JepaMode,
    /// What the objective is multiplied by before it is added to the cross-entropy.
    pub weight: f64,
    /// How much of the teacher stays in a step.
    pub momentum: f64,
    /// File of a frozen teacher's latents; absent: the teacher runs, and follows the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<PathBuf>,
}

impl Default for JepaConfig {
    /// Off, as every run was before there was a choice; the other values are those that a mode starts with.
    fn default() -> Self {
        Self { mode: JepaMode::Off, weight: 0.05, momentum: 0.999, targets: None }
    }
}

impl JepaConfig {
    /// Whether there is an objective.
    pub fn on(&self) -> bool {
        self.mode != JepaMode::Off
    }

    /// Whether a teacher runs.
    pub fn has_teacher(&self) -> bool {
        self.on() && self.targets.is_none()
    }

    /// The file of targets, where the run has one.
    pub fn targets(&self) -> Option<&Path> {
        self.targets.as_deref()
    }

    /// Checks what can be checked without opening a file.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        // The step computes in f32, where a larger weight is infinite and a smaller one is zero.
        let single = self.weight as f32;
        if !(self.weight > 0.0 && single > 0.0 && single.is_finite()) {
            let fix = "give a number above 0 that f32 holds, or jepa.mode = \"off\"";
            return Err(invalid("jepa.weight", format!("is {}", self.weight), fix));
        }
        if !(0.0..=1.0).contains(&self.momentum) {
            return Err(invalid("jepa.momentum", format!("is {}", self.momentum), "give a number from 0 to 1"));
        }
        match &self.targets {
            Some(path) if !self.on() => Err(invalid(
                "jepa.targets",
                format!("is `{}`, and jepa.mode is off", path.display()),
                "give --set jepa.mode=shared or separate, or no targets (--set jepa.targets=)",
            )),
            _ => Ok(()),
        }
    }
}
