//! What a run computes on: backend, arithmetic, arms.

use std::fmt;

use clap::ValueEnum;
use dormouse_reference::Precision;
use serde::{Deserialize, Serialize};

use super::{ConfigError, invalid};
use crate::arms;

/// A backend by its word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// `cuda` where a GPU answers, else `cpu`. A stored configuration has the answer instead.
    Auto,
    /// The reference, in f32.
    #[default]
    Cpu,
    /// The GPU.
    Cuda,
    /// The GPU's kernels on Mesa's software Vulkan driver: slow, for tests on machines without a GPU.
    #[value(hide = true)]
    Lavapipe,
}

impl Backend {
    /// The word in files and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Cpu => "cpu",
            Backend::Cuda => "cuda",
            Backend::Lavapipe => "lavapipe",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The arithmetic of matrix products; storage is f32 whatever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Math {
    /// f32 throughout.
    #[default]
    F32,
    /// Operands rounded to tf32, sums in f32.
    Tf32,
    /// Operands rounded to bf16, sums in f32.
    Bf16,
}

impl Math {
    /// All of them, the most exact first.
    pub const ALL: [Math; 3] = [Math::F32, Math::Tf32, Math::Bf16];

    /// The word in files and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Math::F32 => "f32",
            Math::Tf32 => "tf32",
            Math::Bf16 => "bf16",
        }
    }

    /// The same for an operation's config.
    pub fn precision(self) -> Precision {
        match self {
            Math::F32 => Precision::Full,
            Math::Tf32 => Precision::Tf32,
            Math::Bf16 => Precision::Bf16,
        }
    }
}

impl fmt::Display for Math {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// What a run computes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The backend.
    pub backend: Backend,
    /// Arithmetic of matrix products.
    pub precision: Math,
    /// Arms that were asked for, each `STEM=plain` or `STEM=fused`; of two for one stem the later counts. The stem
    /// `all` stands for every operation.
    pub arms: Vec<String>,
    /// Whether fused kernels may run that no receipt vouches for.
    pub unverified: bool,
    /// Whether steps are captured once and replayed, where the backend can. The bits are those of an eager step.
    pub graph: bool,
}

impl Default for RunConfig {
    /// What every run had before there was a choice.
    fn default() -> Self {
        Self { backend: Backend::Cpu, precision: Math::F32, arms: Vec::new(), unverified: false, graph: true }
    }
}

impl RunConfig {
    /// Checks what can be checked without a device.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        for asked in &self.arms {
            arms::parse(asked).map_err(|problem| {
                let fix = "give STEM=plain or STEM=fused; `dormouse arms` lists the stems";
                invalid("run.arms", problem, fix)
            })?;
        }
        if self.backend != Backend::Cpu {
            return Ok(());
        }
        if self.precision != Math::F32 {
            let problem = format!("is {}, and the reference never rounds operands", self.precision);
            return Err(invalid("run.precision", problem, "give f32, or another --backend"));
        }
        if !self.arms.is_empty() {
            return Err(invalid("run.arms", "is not empty, and the reference has one arm".into(), "leave --arm out"));
        }
        if self.unverified {
            let fix = "leave --unverified out, or give --set run.unverified=false";
            return Err(invalid("run.unverified", "is true, and the reference has no fused kernels".into(), fix));
        }
        if !self.graph {
            let fix = "leave --no-graph out, or give --set run.graph=true";
            return Err(invalid("run.graph", "is false, and the reference captures no graphs".into(), fix));
        }
        Ok(())
    }
}
