//! The presets: complete configurations to start from.

use super::options::{beta_scale, engram_rows, engram_width};
use super::{
    Backend, CheckpointConfig, Config, ConfigError, DataConfig, Engram, Format, Gate, JepaConfig, JepaMode, LogConfig,
    ModelConfig, OptimizerConfig, Rule, RunConfig, TrainConfig, host_adam_every_steps, muon_iterations, muon_lr,
    muon_momentum,
};

/// Names of the presets, the default first.
pub const PRESETS: [&str; 4] = ["nano", "tiny", "small", "base"];

/// The configuration a preset stands for.
pub fn preset(name: &str) -> Result<Config, ConfigError> {
    match name {
        "nano" => Ok(nano()),
        "tiny" => Ok(tiny()),
        "small" => Ok(small()),
        "base" => Ok(base()),
        _ => Err(ConfigError::UnknownPreset { name: name.to_owned(), known: PRESETS.join(", ") }),
    }
}

/// The run of the README: a few minutes on two cores. It knows its memory's rows and leaves the memory off, because a GPU
/// would refuse it until it has the kernels (docs/adr/0019).
fn nano() -> Config {
    Config {
        preset: "nano".into(),
        seed: 0,
        run: RunConfig { backend: Backend::Auto, ..RunConfig::default() },
        model: ModelConfig {
            width: 256,
            heads: 4,
            head_width: 64,
            ffn_width: 768,
            iterations: 2,
            rank: 64,
            experts: 2,
            engram: Engram::Off,
            engram_rows: 8192,
            engram_width: engram_width(),
            format: Format::F32,
            gate: Gate::Bounded,
            beta_scale: beta_scale(),
        },
        data: DataConfig { path: None, eval_path: None, seq_bytes: 256, eval_windows: 64, eval_bytes: 512 },
        train: TrainConfig { total_steps: 900, batch_rows: 8, accumulate: 1, overfit_one_batch: false },
        optimizer: OptimizerConfig {
            rule: Rule::Adamw,
            lr: 2e-3,
            warmup_percent: 2.0,
            warmup_min_steps: 20,
            decay_percent: 20.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            clip_norm: 1.0,
            retract_every_steps: 1,
            retract_iterations: 4,
            muon_lr: muon_lr(),
            muon_momentum: muon_momentum(),
            muon_iterations: muon_iterations(),
            host_adam_every_steps: host_adam_every_steps(),
        },
        // Off until devices have kernels of it (docs/adr/0021).
        jepa: JepaConfig::default(),
        log: LogConfig {
            every_steps: 10,
            eval_every_steps: 150,
            drift_every_steps: 500,
            sample_bytes: 160,
            sample_temperature: 0.8,
            prompts: Vec::new(),
        },
        checkpoint: CheckpointConfig { every_steps: 150, keep_last: 3, keep_every_steps: 0 },
    }
}

/// Seconds a run: tests and CI. Its memory is off as that of `nano` is.
fn tiny() -> Config {
    let nano = nano();
    Config {
        preset: "tiny".into(),
        model: ModelConfig {
            width: 128,
            heads: 2,
            head_width: 64,
            ffn_width: 256,
            iterations: 2,
            rank: 32,
            experts: 2,
            engram_rows: 4096,
            ..nano.model
        },
        data: DataConfig { seq_bytes: 64, ..nano.data },
        train: TrainConfig { total_steps: 300, batch_rows: 4, ..nano.train },
        optimizer: OptimizerConfig { lr: 1e-3, ..nano.optimizer },
        log: LogConfig { eval_every_steps: 100, sample_bytes: 64, ..nano.log },
        checkpoint: CheckpointConfig { every_steps: 100, ..nano.checkpoint },
        ..nano
    }
}

/// The benchmark model.
fn small() -> Config {
    let nano = nano();
    Config {
        preset: "small".into(),
        model: ModelConfig {
            width: 768,
            heads: 12,
            head_width: 64,
            ffn_width: 2048,
            iterations: 2,
            rank: 64,
            experts: 3,
            engram: Engram::Device,
            engram_rows: engram_rows(),
            ..nano.model
        },
        data: DataConfig { seq_bytes: 512, ..nano.data },
        train: TrainConfig { total_steps: 20_000, batch_rows: 8, ..nano.train },
        optimizer: OptimizerConfig { rule: Rule::Muon, lr: 1e-3, ..nano.optimizer },
        jepa: JepaConfig { mode: JepaMode::Shared, ..nano.jepa },
        log: LogConfig { eval_every_steps: 500, ..nano.log },
        checkpoint: CheckpointConfig { every_steps: 500, ..nano.checkpoint },
        ..nano
    }
}

/// Larger in every direction.
fn base() -> Config {
    let small = small();
    Config {
        preset: "base".into(),
        model: ModelConfig {
            width: 1024,
            heads: 16,
            ffn_width: 2816,
            iterations: 4,
            rank: 128,
            experts: 4,
            ..small.model
        },
        data: DataConfig { seq_bytes: 1024, ..small.data },
        ..small
    }
}
