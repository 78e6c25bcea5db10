//! What a model costs before it runs: memory by class, and the arithmetic of its matrix products.

use super::memory::TABLE;
use super::params::{Group, Param, Table};
use crate::config::{Backend, Config, ConfigError, Engram, JepaMode};
use crate::progress::gib;

/// Bytes of a run's parameters and of what mirrors them, the n-gram table apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryClasses {
    /// All parameters but the table.
    pub weights: u64,
    /// Their gradients.
    pub gradients: u64,
    /// Their first and second moments.
    pub moments: u64,
    /// The table with its gradient, moments and counts. On the host there is no full gradient.
    pub table: u64,
    /// What a JEPA teacher has of the weights; zero where none runs.
    pub teacher: u64,
    /// Room on the device for a batch's rows of a table on the host: values, gradients, and moments that stay unused; where
    /// the host waits for several steps, the gradients of each of them besides.
    pub room: u64,
}

/// Bytes of a number on the device.
const BYTES: u64 = 4;

impl MemoryClasses {
    /// Of a run, with its table as the flat buffer has it.
    pub fn of(config: &Config, resident: &Table) -> Self {
        let rest: u64 = resident.params.iter().filter(|p| p.name != TABLE).map(|p| p.len() as u64).sum();
        let full = Table::of(config);
        let [rows, values] =
            full.params.iter().find(|p| p.name == TABLE).map_or([0, 0], |p| [p.shape[0] as u64, p.len() as u64]);
        let held = resident.params.iter().find(|p| p.name == TABLE).map_or(0, |p| p.len() as u64);
        let host = config.model.engram == Engram::Host;
        let every = config.optimizer.host_adam_every_steps;
        let kept = if every > 1 { every } else { 0 };
        Self {
            weights: BYTES * rest,
            gradients: BYTES * rest,
            moments: 2 * BYTES * rest,
            teacher: if config.jepa.has_teacher() { BYTES * rest } else { 0 },
            table: BYTES * (if host { 3 } else { 4 } * values + rows),
            room: if host { (4 + kept) * BYTES * held } else { 0 },
        }
    }

    /// Bytes of this machine that a run needs at least: what it holds, unless a GPU does, and what a checkpoint holds
    /// besides, every tensor once as such and once as the bytes of its file. A table on the host is written as it lies.
    pub fn of_machine(&self, config: &Config) -> u64 {
        let host = config.model.engram == Engram::Host;
        // Values and both moments of the four buffers; the counts make it a little more.
        let (on_host, saved) = if host { (self.table, 0) } else { (0, self.table / 4 * 3) };
        let model = self.weights + self.gradients + self.moments + self.teacher + self.room + self.table - on_host;
        let held = if config.run.backend == Backend::Cuda { 0 } else { model };
        held + on_host + 2 * (self.weights + self.moments + self.teacher + saved)
    }
}

/// Refuses a run that this machine cannot hold: an allocation that fails would end the process without a word.
///
/// # Errors
/// [`ConfigError::Invalid`] with what is needed, what is there, and the keys to lower.
pub fn check_memory(config: &Config, resident: &Table, have: Option<u64>) -> Result<(), ConfigError> {
    let classes = MemoryClasses::of(config, resident);
    let need = classes.of_machine(config);
    let Some(have) = have.filter(|have| *have < need) else { return Ok(()) };
    let m = &config.model;
    let of_table = classes.table > classes.weights + classes.gradients + classes.moments;
    let (key, value, fix) = match of_table {
        true => ("model.engram_rows", m.engram_rows, "lower it or model.engram_width, or give model.engram=off"),
        false => ("model.width", m.width, "lower it, model.ffn_width, model.rank or model.experts"),
    };
    let problem = format!(
        "is {value}, and the run needs {:.1} GiB of memory with gradients, moments and a checkpoint on its way to the disk, \
         where this machine has {:.1} GiB",
        gib(need),
        gib(have)
    );
    Err(ConfigError::Invalid { key: key.into(), problem, fix: fix.into() })
}

/// Bytes of the activations that a training step on the reference surely keeps: of every position of a part of the batch
/// and of every iteration the rows of the norm and of the block, what the branches give, the inputs of the recurrence, and
/// the logits.
fn of_step(config: &Config) -> u64 {
    let m = &config.model;
    let each = 5 * m.width + 3 * m.heads * m.head_width + 256;
    let part = config.bytes_per_step() / config.train.accumulate as u64;
    [part, m.iterations as u64, each as u64].into_iter().fold(BYTES, u64::saturating_mul)
}

/// Refuses a batch whose step the machine cannot hold.
///
/// # Errors
/// [`ConfigError::Invalid`] with what is needed at least, what is there, and the keys to lower.
pub fn check_batch(config: &Config, have: Option<u64>) -> Result<(), ConfigError> {
    fits(config, of_step(config), have)
}

/// The same for a pass that only gives the latents of the batch: they lie on the device in `f32` and come to the host in
/// `f64`.
///
/// # Errors
/// As for [`check_batch`].
pub fn check_latents(config: &Config, have: Option<u64>) -> Result<(), ConfigError> {
    fits(config, (3 * BYTES * config.bytes_per_step()).saturating_mul(config.model.width as u64), have)
}

fn fits(config: &Config, need: u64, have: Option<u64>) -> Result<(), ConfigError> {
    // What does not fit a GPU is an error of its own.
    let reference = matches!(config.run.backend, Backend::Cpu | Backend::Auto);
    let Some(have) = have.filter(|have| reference && *have < need) else { return Ok(()) };
    let (len, parts) = (config.data.seq_bytes, config.train.accumulate);
    let problem = format!(
        "is {} with data.seq_bytes = {len} and train.accumulate = {parts}, and a step needs {:.1} GiB of memory or more, \
         where this machine has {:.1} GiB",
        config.train.batch_rows,
        gib(need),
        gib(have)
    );
    let fix = "lower it or data.seq_bytes, or raise train.accumulate".into();
    Err(ConfigError::Invalid { key: "train.batch_rows".into(), problem, fix })
}

/// Multiplications and additions of the matrix products of one step. The recurrence of the attention, convolutions and
/// norms are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Products {
    /// Of the model's forward passes: one, or two with `jepa.mode = "separate"`.
    pub forward: u64,
    /// Of a JEPA teacher's forward pass.
    pub teacher: u64,
    /// Of the backward pass: two products for each of the model's forward passes.
    pub backward: u64,
    /// Of Muon's iterations.
    pub muon: u64,
    /// Of the retraction, in a step that has one.
    pub retraction: u64,
}

impl Products {
    /// Of a run whose table is grouped by its rule.
    pub fn of(config: &Config, table: &Table) -> Self {
        let n = config.model.iterations as u64;
        let pass = |calls: &dyn Fn(&Param) -> u64| -> u64 {
            let each = table.params.iter().filter(|p| multiplies(p)).map(|p| calls(p) * p.len() as u64);
            2 * config.bytes_per_step() * each.sum::<u64>()
        };
        let is = |p: &Param, prefix: &str| p.name.starts_with(prefix);
        let read_out = pass(&|p| if is(p, "jepa.") { 0 } else { n });
        // A pass for its latents has one output map and no head.
        let latents = pass(&|p| match p {
            _ if is(p, "jepa.") || is(p, "head.") => 0,
            _ if is(p, "out.") => 1,
            _ => n,
        });
        let predictor = pass(&|p| u64::from(is(p, "jepa.")));
        let forward = match config.jepa.mode {
            JepaMode::Off | JepaMode::Shared => read_out + predictor,
            JepaMode::Separate => read_out + latents + predictor,
        };
        let teacher = if config.jepa.has_teacher() { latents } else { 0 };
        let o = &config.optimizer;
        let muon = table.muon(config.model.heads, o.weight_decay).into_iter().map(|matrix| {
            let [each, rows, columns] = matrix.shape.map(|len| len as u64);
            let heads = matrix.heads as u64;
            let (k, n) = order(rows, columns / heads);
            // A = X X^T, its square, and what multiplies X.
            each * heads * o.muon_iterations as u64 * (4 * k * k * n + 2 * k * k * k)
        });
        let retraction = table.factors().into_iter().map(|factor| {
            let [each, n, k] = factor.shape.map(|len| len as u64);
            // The Gram matrix of the scale, then in every iteration A, its square, and X times the polynomial.
            each * (2 * k * k * n + o.retract_iterations as u64 * (4 * k * k * n + 2 * k * k * k))
        });
        Self { forward, teacher, backward: 2 * forward, muon: muon.sum(), retraction: retraction.sum() }
    }

    /// All of them.
    pub fn sum(&self) -> u64 {
        self.forward + self.teacher + self.backward + self.muon + self.retraction
    }
}

/// Whether a tensor is a matrix that positions are multiplied with.
fn multiplies(param: &Param) -> bool {
    let matrix = matches!(param.group, Group::Matrix | Group::Muon | Group::MuonByHead);
    // The embedding is looked up.
    param.name != "embedding" && (matrix || param.retracted)
}

fn order(a: u64, b: u64) -> (u64, u64) {
    (a.min(b), a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Rule, preset};

    #[test]
    fn the_products_of_the_benchmark_model_are_those_of_its_shapes() {
        let config = preset("small").unwrap();
        let (d, f, r, e) = (768u64, 2048, 64, 3);
        // Controller; q, k, v, gate and out; the decay's bottleneck; beta; dense; experts; out; head; the memory.
        let weights = 2 * d * 6
            + 5 * d * d
            + 2 * 64 * d
            + 12 * d
            + d * d
            + e * (2 * d * r + 2 * f * r)
            + 2 * d * r
            + (d + 256) * r
            + 2 * 96 * d;
        let products = Products::of(&config, &Table::of(&config));
        // The predictor is asked once; the teacher has one output map and no head.
        let (out, head) = (2 * d * r, (d + 256) * r);
        assert_eq!(products.forward, 2 * 8 * 512 * (2 * weights + d * d));
        assert_eq!(products.teacher, 2 * 8 * 512 * (2 * (weights - out - head) + out));
        assert_eq!(products.backward, 2 * products.forward);
        // Three times twelve heads [768, 64]; factors [768, 64] and [2048, 64] of three experts, [768, 64] of out; two
        // projections [96, 768].
        let each = |k: u64, n: u64| 8 * (4 * k * k * n + 2 * k * k * k);
        let muon = (36 + 6 + 2) * each(64, 768) + 6 * each(64, 2048) + 2 * each(96, 768);
        assert_eq!(products.muon, muon);
        let each = |n: u64| 2 * r * r * n + 4 * (4 * r * r * n + 2 * r * r * r);
        assert_eq!(products.retraction, 6 * each(768) + 6 * each(2048) + 2 * each(768) + each(768) + each(256));
        // The rule moves no product of the passes.
        let mut adamw = config.clone();
        adamw.optimizer.rule = Rule::Adamw;
        let other = Products::of(&adamw, &Table::of(&adamw));
        assert_eq!((other.forward, other.muon), (products.forward, 0));
    }

    #[test]
    fn memory_classes_are_the_buffers_that_a_learner_has() {
        let mut config = preset("tiny").unwrap();
        let plain = MemoryClasses::of(&config, &Table::of(&config));
        let len = 4 * Table::of(&config).len() as u64;
        assert_eq!(
            plain,
            MemoryClasses { weights: len, gradients: len, moments: 2 * len, teacher: 0, table: 0, room: 0 }
        );
        config.model.engram = Engram::Device;
        let device = MemoryClasses::of(&config, &Table::of(&config));
        assert_eq!(device.table, 4 * (4 * 12_288 * 32 + 12_288));
        assert_eq!(device.weights, plain.weights + 4 * 2 * 96 * 128);
        config.model.engram = Engram::Host;
        let host = MemoryClasses::of(&config, &Table::of(&config).with_resident_rows(768));
        assert_eq!((host.weights, host.table), (device.weights, 4 * (3 * 12_288 * 32 + 12_288)));
        assert_eq!(host.room, 4 * 4 * 768 * 32);
        config.optimizer.host_adam_every_steps = 3;
        let room = MemoryClasses::of(&config, &Table::of(&config).with_resident_rows(768)).room;
        assert_eq!(room, 7 * 4 * 768 * 32);
        config.optimizer.host_adam_every_steps = 1;
    }

    #[test]
    fn a_batch_that_the_machine_cannot_hold_is_refused_with_the_keys_to_lower() {
        let mut config = preset("tiny").unwrap();
        // Four rows of 64 bytes: nothing that a machine has not.
        assert_eq!(check_batch(&config, Some(64 << 20)).err().map(|e| e.to_string()), None);
        config.train.batch_rows = 1 << 20;
        let need = of_step(&config);
        assert!(need > 1 << 37, "{need}");
        let text = check_batch(&config, Some(need - 1)).unwrap_err().to_string();
        for words in ["`train.batch_rows` is 1048576", "data.seq_bytes = 64", "raise train.accumulate"] {
            assert!(text.contains(words), "`{words}` is not in: {text}");
        }
        assert!(check_batch(&config, Some(need)).is_ok() && check_batch(&config, None).is_ok());
        // Parts are computed one after the other, latents of the whole batch are kept.
        config.train.accumulate = 1 << 10;
        assert!(check_batch(&config, Some(need >> 10)).is_ok());
        assert!(check_latents(&config, Some(1 << 36)).is_err());
        config.run.backend = Backend::Cuda;
        assert!(check_latents(&config, Some(1)).is_ok());
    }

    #[test]
    fn a_run_that_the_machine_cannot_hold_is_refused_with_the_keys_to_lower() {
        let mut config = preset("tiny").unwrap();
        let refused = |config: &Config, have: u64| {
            let full = Table::of(config);
            let held = if config.model.engram == Engram::Host { full.with_resident_rows(768) } else { full };
            check_memory(config, &held, Some(have)).err().map(|error| error.to_string())
        };
        // Parameters, gradients, two moments; then parameters and moments twice.
        let plain = 4 * Table::of(&config).len() as u64 * (4 + 2 * 3);
        assert_eq!(refused(&config, plain), None);
        let text = refused(&config, plain - 1).unwrap();
        assert!(text.starts_with("config: `model.width` is 128, and the run needs 0.0 GiB of memory"), "{text}");
        assert!(text.ends_with("lower it, model.ffn_width, model.rank or model.experts"), "{text}");
        config.model.engram_rows = 1 << 24;
        for engram in [Engram::Device, Engram::Host] {
            config.model.engram = engram;
            // 6 GiB of values: four times that and six times in a checkpoint, or three times that and nothing besides.
            let [low, high] = if engram == Engram::Device { [60, 61] } else { [18, 19] };
            assert_eq!(refused(&config, high << 30), None, "{engram:?}");
            let text = refused(&config, low << 30).unwrap();
            let words = format!("`model.engram_rows` is 16777216, and the run needs {low}.");
            assert!(text.contains(&words) && text.contains(&format!("this machine has {low}.0 GiB")), "{text}");
            assert!(text.ends_with("lower it or model.engram_width, or give model.engram=off"), "{text}");
            assert_eq!(check_memory(&config, &Table::of(&config).with_resident_rows(9), None).err().map(|_| ()), None);
        }
        // A GPU holds the model; a table on the host stays there.
        config.run.backend = Backend::Cuda;
        assert!(refused(&config, 18 << 30).is_some());
        config.model.engram = Engram::Device;
        assert_eq!(refused(&config, 37 << 30), None);
    }
}
