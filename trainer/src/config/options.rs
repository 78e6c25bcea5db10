//! Options of the model: the n-gram memory, the format of spectral factors, the gates of the attention.

use dormouse_reference::{FactorFormat, decay_gate, engram_hash};
use serde::{Deserialize, Serialize};

use super::{ConfigError, ModelConfig, invalid};

/// Where the table of the n-gram memory lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engram {
    /// There is no memory; its branch is the dense layer alone.
    #[default]
    Off,
    /// With the other parameters.
    Device,
    /// In host memory; only the rows of a batch travel. The numbers are those of [`Engram::Device`], bit for bit.
    Host,
}

impl Engram {
    /// The word in configurations and messages.
    pub fn word(self) -> &'static str {
        match self {
            Engram::Off => "off",
            Engram::Device => "device",
            Engram::Host => "host",
        }
    }
}

/// What the factors U and V of spectral maps are rounded to where the forward pass uses them; the masters stay f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Nothing.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// OCP e4m3 with one scale a column.
    Fp8,
    /// Minus one, zero or one, with one scale a column.
    Ternary,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 5] = [Format::F32, Format::Bf16, Format::F16, Format::Fp8, Format::Ternary];

    /// The same for an operation's config.
    pub fn factor(self) -> FactorFormat {
        match self {
            Format::F32 => FactorFormat::F32,
            Format::Bf16 => FactorFormat::Bf16,
            Format::F16 => FactorFormat::F16,
            Format::Fp8 => FactorFormat::Fp8,
            Format::Ternary => FactorFormat::Ternary,
        }
    }

    /// The word in configurations and messages.
    pub fn word(self) -> &'static str {
        self.factor().word()
    }
}

/// How the log decay is made of its logit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// -5 sigma(exp(A) (z + dt_bias)): never below -5.
    #[default]
    Bounded,
    /// -exp(A) softplus(z + dt_bias): without a bound below.
    Softplus,
}

impl Gate {
    /// The same for the operation's config.
    pub fn kind(self) -> decay_gate::Kind {
        match self {
            Gate::Bounded => decay_gate::Kind::Bounded { lower_bound: -5.0 },
            Gate::Softplus => decay_gate::Kind::Softplus,
        }
    }
}

/// Rows an order in the large presets, and in a configuration from before there was a memory.
pub(super) const fn engram_rows() -> usize {
    32_768
}

/// Width of the table in every preset.
pub(super) const fn engram_width() -> usize {
    32
}

/// The usual write strength: beta up to 1.
pub(super) const fn beta_scale() -> u64 {
    1
}

/// Most numbers a table may have: places in it stay far from any overflow.
const MOST_VALUES: usize = 1 << 40;

/// Checks the options on their own; rows and width count with the memory off, too, so that turning it on finds them good.
pub(super) fn validate(m: &ModelConfig) -> Result<(), ConfigError> {
    let most = u32::MAX as usize / engram_hash::ORDERS.len();
    for (key, value, most) in
        [("model.engram_rows", m.engram_rows, most), ("model.engram_width", m.engram_width, 1 << 12)]
    {
        if value == 0 {
            return Err(invalid(key, "is 0".into(), "give 1 or more; model.engram=off turns the memory off"));
        }
        if value > most {
            return Err(invalid(key, format!("is {value}"), &format!("give {most} or less")));
        }
    }
    if engram_hash::ORDERS.len() * m.engram_rows * m.engram_width > MOST_VALUES {
        let problem = format!("is {}, and the table would have more than 2^40 numbers", m.engram_rows);
        return Err(invalid("model.engram_rows", problem, "give fewer rows, or a smaller model.engram_width"));
    }
    if ![1, 2].contains(&m.beta_scale) {
        let fix = "give 1, or 2 for states with negative eigenvalues";
        return Err(invalid("model.beta_scale", format!("is {}", m.beta_scale), fix));
    }
    Ok(())
}
