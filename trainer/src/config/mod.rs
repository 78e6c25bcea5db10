//! The configuration of a run.
//!
//! Values are resolved in one order: preset, then file, then `--set key=value`, then typed flags. The result is complete,
//! is printed and stored with the run, and is what a resumed run is compared with. Unknown keys are errors.

mod diff;
mod jepa;
mod options;
mod presets;
mod resolve;
mod run;

pub use diff::{Change, changes, check_changes, flatten};
pub use jepa::{JepaConfig, JepaMode};
pub use options::{Engram, Format, Gate};
pub use presets::{PRESETS, preset};
pub use resolve::{Sources, resolve};
pub use run::{Backend, Math, RunConfig};

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::data::FIRST_START;
use crate::schedule::Schedule;

/// What is wrong with a configuration or a command line. Every one of these ends the process with exit code 2.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("config: cannot read `{path}`: {cause}; give --config a TOML file that is there and can be read")]
    Unreadable { path: PathBuf, cause: std::io::Error },
    #[error("config: `{origin}` is not TOML:\n{problem}")]
    Syntax { origin: String, problem: String },
    #[error(
        "config: `{origin}` is no configuration of this version of dormouse; mend it, or use the version that wrote it:\n{problem}"
    )]
    Foreign { origin: String, problem: String },
    #[error("config: {place}: unknown key `{key}`{nearest}; `dormouse inspect` prints every key")]
    UnknownKey { place: String, key: String, nearest: String },
    #[error("config: {place}: `{key}` expected {expected}, got {got}")]
    WrongType { place: String, key: String, expected: String, got: String },
    #[error("config: unknown preset `{name}`, expected one of {known}")]
    UnknownPreset { name: String, known: String },
    #[error("config: `{key}` {problem}; {fix}")]
    Invalid { key: String, problem: String, fix: String },
    #[error("config: --set expected key=value, got `{argument}`; for example --set optimizer.lr=1e-3")]
    BadSet { argument: String },
    #[error("config: the resumed run would compute something else:\n{table}{advice}")]
    Changed { table: String, advice: String },
    #[error("{0}")]
    Usage(String),
}

/// Everything a run is, resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the preset the values started from.
    pub preset: String,
    /// Seed of every random number of the run.
    pub seed: u64,
    /// What it computes on; runs from before this section existed ran on the reference.
    #[serde(default)]
    pub run: RunConfig,
    /// The model.
    pub model: ModelConfig,
    /// The bytes.
    pub data: DataConfig,
    /// The steps.
    pub train: TrainConfig,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// The JEPA objective; runs from before this section existed had none.
    #[serde(default)]
    pub jepa: JepaConfig,
    /// What is reported, and when.
    pub log: LogConfig,
    /// What is saved, and when.
    pub checkpoint: CheckpointConfig,
}

/// Shape of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Width `d` of the residual stream.
    pub width: usize,
    /// Attention heads `H`.
    pub heads: usize,
    /// Width `K = V` of a head.
    pub head_width: usize,
    /// Hidden width `f` of an expert.
    pub ffn_width: usize,
    /// Iterations `N` of the shared block.
    pub iterations: usize,
    /// Rank `r` of the spectral factors.
    pub rank: usize,
    /// Experts `E`.
    pub experts: usize,
    /// Where the table of the n-gram memory lies; runs from before there was one have none.
    #[serde(default)]
    pub engram: Engram,
    /// Rows of the table for each order of n-gram, `R`.
    #[serde(default = "options::engram_rows")]
    pub engram_rows: usize,
    /// Width `W` of the table.
    #[serde(default = "options::engram_width")]
    pub engram_width: usize,
    /// What spectral factors are rounded to.
    #[serde(default)]
    pub format: Format,
    /// How the log decay is made of its logit.
    #[serde(default)]
    pub gate: Gate,
    /// 1 or 2: the largest write strength beta.
    #[serde(default = "options::beta_scale")]
    pub beta_scale: u64,
}

/// The bytes a run reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// File or folder to train on; absent: the text that ships with the binary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// File or folder to score on; absent: blocks of the training corpus are held out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_path: Option<PathBuf>,
    /// Predicted bytes a row, `t`.
    pub seq_bytes: usize,
    /// Held-out windows, at most.
    pub eval_windows: usize,
    /// Predicted bytes a held-out window.
    pub eval_bytes: usize,
}

/// The steps of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Optimiser updates in the whole run; the learning rate's schedule follows from it.
    pub total_steps: u64,
    /// Rows in a step.
    pub batch_rows: usize,
    /// Parts a step's rows are computed in, one after the other; 1 computes them together.
    pub accumulate: usize,
    /// Every step trains on the rows of the first: the loss must go to zero.
    pub overfit_one_batch: bool,
}

/// What moves the matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// AdamW moves every parameter.
    #[default]
    Adamw,
    /// Muon+ moves the matrices that [`group_of`](crate::model::group_of) names, AdamW the rest.
    Muon,
}

/// The update rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// What moves the matrices; runs from before there was a choice had AdamW.
    #[serde(default)]
    pub rule: Rule,
    /// Learning rate of the constant part of the schedule.
    pub lr: f64,
    /// Share of the run spent warming up.
    pub warmup_percent: f64,
    /// Warm-up steps at least.
    pub warmup_min_steps: u64,
    /// Share of the run, at its end, in which the rate falls.
    pub decay_percent: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the mean square.
    pub eps: f64,
    /// Decoupled weight decay, on matrices only.
    pub weight_decay: f64,
    /// Norm that a larger gradient is scaled down to.
    pub clip_norm: f64,
    /// Steps between retractions of the spectral factors.
    pub retract_every_steps: u64,
    /// Polar iterations a retraction.
    pub retract_iterations: usize,
    /// Muon's learning rate in the constant part of the schedule.
    #[serde(default = "muon_lr")]
    pub muon_lr: f64,
    /// How much of Muon's momentum stays.
    #[serde(default = "muon_momentum")]
    pub muon_momentum: f64,
    /// Muon's Newton-Schulz iterations.
    #[serde(default = "muon_iterations")]
    pub muon_iterations: usize,
    /// Steps whose row gradients are summed before a table on the host moves; 1 moves it in every step.
    #[serde(default = "host_adam_every_steps")]
    pub host_adam_every_steps: u64,
}

/// What Muon has in every preset, and in a configuration from before it was there.
const fn muon_lr() -> f64 {
    0.02
}

const fn muon_momentum() -> f64 {
    0.95
}

const fn muon_iterations() -> usize {
    8
}

/// As it was before there was a choice.
const fn host_adam_every_steps() -> u64 {
    1
}

/// Most of these steps: the norms and flags of so many are still on the device when the host asks for them.
const HOST_ADAM_EVERY_MOST: u64 = 64;

/// What is reported, and when. Nothing here changes a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// Steps between lines on the terminal; every step is in metrics.jsonl.
    pub every_steps: u64,
    /// Steps between evaluations; the last step is always evaluated.
    pub eval_every_steps: u64,
    /// Steps between checks of the spectral factors' orthonormality.
    pub drift_every_steps: u64,
    /// Bytes sampled after each prompt at each evaluation; 0 samples nothing.
    pub sample_bytes: usize,
    /// Temperature of the second sample of each prompt; the first is always greedy.
    pub sample_temperature: f64,
    /// Prompts of the samples; none: the first 48 bytes of the first held-out window.
    pub prompts: Vec<String>,
}

/// What is saved, and when. Nothing here changes a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; the last step is always saved.
    pub every_steps: u64,
    /// Newest checkpoints that stay.
    pub keep_last: usize,
    /// Checkpoints at multiples of this step stay for ever; 0: none.
    pub keep_every_steps: u64,
}

impl OptimizerConfig {
    /// The keys of the learning rates that move something under the rule.
    pub fn rates(&self) -> &'static str {
        match self.rule {
            Rule::Adamw => "optimizer.lr",
            Rule::Muon => "optimizer.muon_lr (Muon's matrices) or optimizer.lr (all else)",
        }
    }
}

impl Config {
    /// The learning rate's schedule.
    pub fn schedule(&self) -> Schedule {
        Schedule {
            lr: self.optimizer.lr,
            warmup_percent: self.optimizer.warmup_percent,
            warmup_min_steps: self.optimizer.warmup_min_steps,
            decay_percent: self.optimizer.decay_percent,
        }
    }

    /// Bytes predicted in one step.
    pub fn bytes_per_step(&self) -> u64 {
        self.train.batch_rows as u64 * self.data.seq_bytes as u64
    }

    /// The configuration as TOML, every key present.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration has only tables, numbers, strings and lists")
    }

    /// Reads a stored configuration (complete, no preset applied).
    pub fn from_toml(text: &str, origin: &Path) -> Result<Config, ConfigError> {
        toml::from_str(text).map_err(|error| {
            let (origin, problem) = (origin.display().to_string(), error.to_string());
            match toml::from_str::<toml::Table>(text) {
                Ok(_) => ConfigError::Foreign { origin, problem },
                Err(_) => ConfigError::Syntax { origin, problem },
            }
        })
    }

    /// BLAKE3 of [`Config::to_toml`], hexadecimal.
    pub fn hash(&self) -> String {
        blake3::hash(self.to_toml().as_bytes()).to_hex().to_string()
    }

    /// Checks every value that can be wrong on its own or against another.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let nonzero = [
            ("model.width", self.model.width as u64),
            ("model.heads", self.model.heads as u64),
            ("model.head_width", self.model.head_width as u64),
            ("model.ffn_width", self.model.ffn_width as u64),
            ("model.iterations", self.model.iterations as u64),
            ("model.rank", self.model.rank as u64),
            ("model.experts", self.model.experts as u64),
            ("data.seq_bytes", self.data.seq_bytes as u64),
            ("data.eval_windows", self.data.eval_windows as u64),
            ("data.eval_bytes", self.data.eval_bytes as u64),
            ("train.total_steps", self.train.total_steps),
            ("train.batch_rows", self.train.batch_rows as u64),
            ("train.accumulate", self.train.accumulate as u64),
            ("optimizer.retract_every_steps", self.optimizer.retract_every_steps),
            ("optimizer.retract_iterations", self.optimizer.retract_iterations as u64),
            ("optimizer.muon_iterations", self.optimizer.muon_iterations as u64),
            ("optimizer.host_adam_every_steps", self.optimizer.host_adam_every_steps),
            ("log.every_steps", self.log.every_steps),
            ("log.eval_every_steps", self.log.eval_every_steps),
            ("log.drift_every_steps", self.log.drift_every_steps),
            ("checkpoint.every_steps", self.checkpoint.every_steps),
            ("checkpoint.keep_last", self.checkpoint.keep_last as u64),
        ];
        for (key, value) in nonzero {
            if value == 0 {
                return Err(invalid(key, "is 0".into(), "give 1 or more"));
            }
        }
        // Far above what fits a machine, and low enough that no product of these overflows.
        let largest = [
            ("model.width", self.model.width, 1 << 16),
            ("model.heads", self.model.heads, 1 << 16),
            ("model.head_width", self.model.head_width, 1 << 16),
            ("model.ffn_width", self.model.ffn_width, 1 << 16),
            ("model.iterations", self.model.iterations, 1 << 10),
            ("model.rank", self.model.rank, 1 << 16),
            ("model.experts", self.model.experts, 1 << 10),
            ("data.seq_bytes", self.data.seq_bytes, 1 << 24),
            ("data.eval_bytes", self.data.eval_bytes, 1 << 24),
            ("log.sample_bytes", self.log.sample_bytes, 1 << 20),
            ("train.batch_rows", self.train.batch_rows, 1 << 20),
            ("optimizer.retract_iterations", self.optimizer.retract_iterations, 100),
            ("optimizer.muon_iterations", self.optimizer.muon_iterations, 100),
        ];
        for (key, value, most) in largest {
            if value > most {
                return Err(invalid(key, format!("is {value}"), &format!("give {most} or less")));
            }
        }
        if self.train.total_steps > u64::from(u32::MAX) {
            let steps = self.train.total_steps;
            return Err(invalid("train.total_steps", format!("is {steps}"), "give a number that 32 bits hold"));
        }
        let o = &self.optimizer;
        // The update computes in f32, where a larger number is infinite and a smaller one is zero.
        let single = [
            ("optimizer.lr", o.lr),
            ("optimizer.muon_lr", o.muon_lr),
            ("optimizer.eps", o.eps),
            ("optimizer.weight_decay", o.weight_decay),
            ("optimizer.clip_norm", o.clip_norm),
            ("log.sample_temperature", self.log.sample_temperature),
        ];
        for (key, value) in single {
            let rounded = value as f32;
            if value.is_finite() && (rounded.is_infinite() || (rounded == 0.0 && value != 0.0)) {
                return Err(invalid(key, format!("is {value:e}, outside the range of f32"), "give a usual number"));
            }
        }
        let ranges = [
            ("optimizer.lr", o.lr, o.lr > 0.0 && o.lr.is_finite(), "above 0"),
            ("optimizer.muon_lr", o.muon_lr, o.muon_lr > 0.0 && o.muon_lr.is_finite(), "above 0"),
            (
                "optimizer.muon_momentum",
                o.muon_momentum,
                (0.0..1.0).contains(&o.muon_momentum),
                "from 0 up to but not including 1",
            ),
            ("optimizer.eps", o.eps, o.eps > 0.0 && o.eps.is_finite(), "above 0"),
            ("optimizer.clip_norm", o.clip_norm, o.clip_norm > 0.0 && o.clip_norm.is_finite(), "above 0"),
            ("optimizer.beta1", o.beta1, (0.0..1.0).contains(&o.beta1), "from 0 up to but not including 1"),
            ("optimizer.beta2", o.beta2, (0.0..1.0).contains(&o.beta2), "from 0 up to but not including 1"),
            (
                "optimizer.weight_decay",
                o.weight_decay,
                o.weight_decay >= 0.0 && o.weight_decay.is_finite(),
                "0 or more",
            ),
            ("optimizer.warmup_percent", o.warmup_percent, (0.0..=100.0).contains(&o.warmup_percent), "from 0 to 100"),
            ("optimizer.decay_percent", o.decay_percent, (0.0..=100.0).contains(&o.decay_percent), "from 0 to 100"),
            (
                "log.sample_temperature",
                self.log.sample_temperature,
                self.log.sample_temperature > 0.0 && self.log.sample_temperature.is_finite(),
                "above 0",
            ),
        ];
        for (key, value, good, range) in ranges {
            if !good {
                return Err(invalid(key, format!("is {value}"), &format!("give a number {range}")));
            }
        }
        if !self.train.batch_rows.is_multiple_of(self.train.accumulate) {
            let (rows, parts) = (self.train.batch_rows, self.train.accumulate);
            return Err(invalid(
                "train.accumulate",
                format!("is {parts}, which does not divide train.batch_rows = {rows}"),
                "give a divisor of the batch, so that every part has the same rows",
            ));
        }
        let every = o.host_adam_every_steps;
        if every > HOST_ADAM_EVERY_MOST {
            let fix = format!("give {HOST_ADAM_EVERY_MOST} or less");
            return Err(invalid("optimizer.host_adam_every_steps", format!("is {every}"), &fix));
        }
        if every > 1 && self.model.engram != Engram::Host {
            let problem = format!("is {every}, and model.engram is {}", self.model.engram.word());
            let fix = "give --set model.engram=host, or 1: only a table on the host can wait";
            return Err(invalid("optimizer.host_adam_every_steps", problem, fix));
        }
        self.run.validate()?;
        options::validate(&self.model)?;
        self.jepa.validate()?;
        if self.jepa.on() && self.data.seq_bytes <= FIRST_START {
            return Err(invalid(
                "data.seq_bytes",
                format!("is {}, and jepa.mode masks no byte before position {FIRST_START}", self.data.seq_bytes),
                &format!("give {} or more, or jepa.mode = \"off\"", FIRST_START + 1),
            ));
        }
        if self.log.prompts.iter().any(String::is_empty) {
            return Err(invalid("log.prompts", "holds an empty prompt".into(), "give each prompt a byte or more"));
        }
        if self.model.rank > self.model.width {
            let (rank, width) = (self.model.rank, self.model.width);
            return Err(invalid(
                "model.rank",
                format!("is {rank}, above model.width = {width}"),
                "give a rank that a factor of that width can have",
            ));
        }
        Ok(())
    }
}

fn invalid(key: &str, problem: String, fix: &str) -> ConfigError {
    ConfigError::Invalid { key: key.to_owned(), problem, fix: fix.to_owned() }
}

#[cfg(test)]
mod tests;
