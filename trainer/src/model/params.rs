//! The parameter table: every tensor's name, shape, place in the flat buffer, group and initial values.
//!
//! Parameters live in one flat buffer; gradients and moments mirror it, so that clip, AdamW and the norm are one
//! operation each over ranges. The table is a function of the model's shape alone.
//!
//! The order of the buffer is not the order in which tensors are added. Every tensor whose size is a multiple of
//! [`ALIGNED`] starts at one: 16 bytes in a bf16 copy of the buffer. A library for matrix products has its fast kernels
//! for such addresses only, and one tensor of a single number, `rho`, moved all behind it off them (21 us instead of 8 us
//! a product of `small` on an H200). So the few tensors of another size lie behind the others, and the tables of rows
//! last, since their length is that of a batch where the table is on the host. A table of rows may start anywhere: it is
//! read row by row and enters no product, and padding would be elements that belong to no parameter.
//!
//! Nothing outside the process knows places: checkpoints have tensors by name, and initial values are drawn by
//! [`Param::stream`], the order in which tensors were added.

use std::ops::Range;

use nalgebra::DMatrix;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use crate::config::{Config, Engram, Gate, ModelConfig};
use crate::rng::{Purpose, stream};

/// Width of the bottleneck through which the decay logit is projected.
pub const DECAY_RANK: usize = 64;

/// Taps of the short convolutions.
pub const CONV_WIDTH: usize = 4;

/// Bytes are the vocabulary.
pub const VOCABULARY: usize = 256;

/// Elements between the places where tensors of a product may start.
pub const ALIGNED: usize = 8;

/// How a tensor starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element the same.
    Constant(f64),
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform in plus or minus this.
    Uniform(f64),
    /// Orthonormal columns: the Q of a Householder QR of a normal matrix, signs fixed so that R has a positive diagonal.
    Orthonormal,
    /// The decay bias -ln(5 tau - 1), tau log-uniform in [2, 500] tokens, so that the bounded gate at a zero logit decays
    /// with time constant tau.
    DecayBias,
    /// The same for the softplus gate: ln(exp(1 / tau) - 1).
    SoftplusDecayBias,
}

/// Which update rule a tensor follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// AdamW with weight decay.
    Matrix,
    /// AdamW without weight decay: norms, gates, scalars, taps, and the spectral factors, whose size retraction fixes.
    Vector,
    /// Muon+, each matrix as a whole.
    Muon,
    /// Muon+, each head's columns as a matrix.
    MuonByHead,
    /// Adam row by row, without weight decay: only rows with a gradient move.
    Rows,
}

impl Group {
    /// All of them.
    pub const ALL: [Group; 5] = [Group::Matrix, Group::Vector, Group::Muon, Group::MuonByHead, Group::Rows];

    /// The word in tables.
    pub fn word(self) -> &'static str {
        match self {
            Group::Matrix => "adamw",
            Group::Vector => "adamw, no decay",
            Group::Muon => "muon+",
            Group::MuonByHead => "muon+ by head",
            Group::Rows => "adam by row",
        }
    }
}

/// One parameter tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Its name in checkpoints and tables.
    pub name: &'static str,
    /// Its shape; `[E, rows, columns]` for experts.
    pub shape: Vec<usize>,
    /// First element in the flat buffer.
    pub start: usize,
    /// Which of the seed's streams its initial values are drawn from.
    pub stream: u64,
    /// How it starts.
    pub init: Init,
    /// Its update rule; as the table is made, that of a run whose only rule is AdamW.
    pub group: Group,
    /// Whether retraction keeps its columns orthonormal after every step.
    pub retracted: bool,
}

impl Param {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its initial values.
    pub fn initial(&self, seed: u64) -> Vec<f64> {
        self.initial_values(seed).collect()
    }

    /// [`Param::initial`] one by one, for a tensor that is too large to have twice.
    pub fn initial_values(&self, seed: u64) -> Box<dyn Iterator<Item = f64> + '_> {
        initial_values(self, stream(seed, Purpose::Init, 0, self.stream))
    }

    /// Its place in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len()
    }
}

/// All parameters of a model, in the order of the flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The tensors.
    pub params: Vec<Param>,
}

impl Table {
    /// The table of a model.
    pub fn new(m: &ModelConfig) -> Self {
        let (d, heads, k) = (m.width, m.heads, m.head_width);
        let (inner, experts, f) = (heads * k, m.experts, m.ffn_width);
        let rank = |a: usize, b: usize| m.rank.min(a).min(b);
        let (r_ffn, r_out, r_head) = (rank(d, f), rank(d, d), rank(d, VOCABULARY));
        let kda = Init::Normal(0.02);
        let by_width = |n: usize| Init::Uniform((n as f64).powf(-0.5));
        let mut table = Self { params: Vec::new() };
        let mut matrix = |name, shape: &[usize], init| table.add(name, shape, init, Group::Matrix, false);
        matrix("embedding", &[VOCABULARY, d], Init::Normal(1.0));
        matrix("controller", &[2 * d, 3 + experts], by_width(2 * d));
        for name in ["kda.q", "kda.k"] {
            matrix(name, &[d, inner], kda);
        }
        for name in ["kda.v", "kda.gate"] {
            matrix(name, &[d, inner], kda);
        }
        matrix("kda.decay_down", &[d, DECAY_RANK], kda);
        matrix("kda.decay_up", &[DECAY_RANK, inner], kda);
        matrix("kda.beta", &[d, heads], kda);
        matrix("kda.out", &[inner, d], kda);
        matrix("dense", &[d, d], by_width(d));
        let mut factor = |name, shape: &[usize]| table.add(name, shape, Init::Orthonormal, Group::Vector, true);
        factor("expert.up_u", &[experts, d, r_ffn]);
        factor("expert.up_v", &[experts, f, r_ffn]);
        factor("expert.down_u", &[experts, f, r_ffn]);
        factor("expert.down_v", &[experts, d, r_ffn]);
        factor("out.u", &[d, r_out]);
        factor("out.v", &[d, r_out]);
        factor("head.u", &[d, r_head]);
        factor("head.v", &[VOCABULARY, r_head]);
        let mut vector = |name, shape: &[usize], init| table.add(name, shape, init, Group::Vector, false);
        vector("iteration", &[m.iterations, d], Init::Constant(0.0));
        vector("loop_norm", &[d], Init::Constant(1.0));
        vector("final_norm", &[d], Init::Constant(1.0));
        for name in ["kda.conv_q", "kda.conv_k", "kda.conv_v"] {
            vector(name, &[CONV_WIDTH, inner], Init::Uniform(0.5));
        }
        vector("kda.a_log", &[heads], Init::Constant(0.0));
        let bias = match m.gate {
            Gate::Bounded => Init::DecayBias,
            Gate::Softplus => Init::SoftplusDecayBias,
        };
        vector("kda.dt_bias", &[heads, k], bias);
        vector("kda.norm", &[k], Init::Constant(1.0));
        vector("expert.up_s", &[experts, r_ffn], Init::Constant(1.0));
        vector("expert.down_s", &[experts, r_ffn], Init::Constant(1.0));
        vector("out.s", &[r_out], Init::Constant(1.0));
        vector("head.s", &[r_head], Init::Constant(1.0));
        vector("rho", &[1], Init::Constant(1.0));
        if m.engram != Engram::Off {
            table.add_memory(m);
        }
        table.placed()
    }

    /// The table of a run: with the parameters of its objective, each in the group of its rule.
    pub fn of(config: &Config) -> Self {
        let table = Self::new(&config.model);
        let table = if config.jepa.on() { table.with_jepa(config.model.width) } else { table };
        table.grouped(config.optimizer.rule)
    }

    /// The same table with the parameters of the JEPA objective behind the others of their kind.
    /// All others keep their initial values.
    #[must_use]
    pub fn with_jepa(mut self, width: usize) -> Self {
        let (root, before) = ((width as f64).powf(-0.5), self.params.len());
        self.add("jepa.mask", &[width], Init::Normal(root), Group::Vector, false);
        self.add("jepa.norm_gain", &[width], Init::Constant(1.0), Group::Vector, false);
        self.add("jepa.norm_bias", &[width], Init::Constant(0.0), Group::Vector, false);
        self.add("jepa.predictor", &[width, width], Init::Uniform(root), Group::Matrix, false);
        // The matrix first: then its vectors and those of odd size that follow are one range of the update.
        self.params[before..].rotate_right(1);
        self.placed()
    }

    /// Gives every tensor its place: sizes that are multiples of [`ALIGNED`], then the others, then tables of rows.
    /// Within each kind tensors stay in order.
    fn placed(mut self) -> Self {
        let kind = |param: &Param| match param.group {
            Group::Rows => 2,
            _ => usize::from(!param.len().is_multiple_of(ALIGNED)),
        };
        self.params.sort_by_key(kind);
        let mut start = 0;
        for param in &mut self.params {
            param.start = start;
            start += param.len();
        }
        self
    }

    /// Adds a tensor, which [`Table::placed`] gives its place.
    pub(super) fn add(&mut self, name: &'static str, shape: &[usize], init: Init, group: Group, retracted: bool) {
        let stream = self.params.len() as u64;
        self.params.push(Param { name, shape: shape.to_vec(), start: 0, stream, init, group, retracted });
    }

    /// Elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.params.last().map_or(0, |p| p.range().end)
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parameter of that name.
    ///
    /// # Panics
    /// If there is none: names are written in this crate only.
    pub fn get(&self, name: &str) -> &Param {
        self.params.iter().find(|p| p.name == name).unwrap_or_else(|| panic!("the table has no parameter `{name}`"))
    }

    /// All parameters but the tables of rows: what is clipped, and what a teacher follows.
    pub fn without_rows(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().filter(|param| param.group != Group::Rows)
    }

    /// The ranges of one group, neighbours joined.
    pub fn ranges(&self, group: Group) -> Vec<Range<usize>> {
        joined(self.params.iter().filter(|param| param.group == group))
    }

    /// The ranges of all but the tables of rows, neighbours joined.
    pub fn ranges_without_rows(&self) -> Vec<Range<usize>> {
        joined(self.without_rows())
    }
    /// Initial values of the flat buffer: a function of the seed and the table alone.
    pub fn initial(&self, seed: u64) -> Vec<f64> {
        let mut flat = Vec::with_capacity(self.len());
        for param in &self.params {
            flat.extend(param.initial(seed));
        }
        flat
    }
}

/// The ranges of some parameters, in the order of the table, neighbours joined.
fn joined<'a>(params: impl Iterator<Item = &'a Param>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for param in params {
        match ranges.last_mut() {
            Some(last) if last.end == param.start => last.end = param.range().end,
            _ => ranges.push(param.range()),
        }
    }
    ranges
}

fn initial_values(param: &Param, mut rng: ChaCha8Rng) -> Box<dyn Iterator<Item = f64> + '_> {
    let places = 0..param.len();
    match param.init {
        Init::Constant(value) => Box::new(places.map(move |_| value)),
        Init::Normal(deviation) => Box::new(places.map(move |_| deviation * rng.sample::<f64, _>(StandardNormal))),
        Init::Uniform(bound) => Box::new(places.map(move |_| rng.random_range(-bound..bound))),
        Init::DecayBias => Box::new(places.map(move |_| -(5.0 * time_constant(&mut rng) - 1.0).ln())),
        Init::SoftplusDecayBias => Box::new(places.map(move |_| (1.0 / time_constant(&mut rng)).exp_m1().ln())),
        Init::Orthonormal => {
            let (rows, columns) = (param.shape[param.shape.len() - 2], param.shape[param.shape.len() - 1]);
            let matrices = 0..param.len() / (rows * columns);
            Box::new(matrices.flat_map(move |_| orthonormal(rows, columns, &mut rng)))
        }
    }
}

/// Tokens, log-uniform in [2, 500].
fn time_constant(rng: &mut ChaCha8Rng) -> f64 {
    rng.random_range(2f64.ln()..500f64.ln()).exp()
}

/// A `[rows, columns]` matrix with orthonormal columns, row-major.
fn orthonormal(rows: usize, columns: usize, rng: &mut ChaCha8Rng) -> Vec<f64> {
    let normal = DMatrix::<f64>::from_fn(rows, columns, |_, _| rng.sample(StandardNormal));
    let qr = normal.qr();
    let (q, r) = (qr.q(), qr.r());
    let mut out = Vec::with_capacity(rows * columns);
    for i in 0..rows {
        for j in 0..columns {
            // QR is unique once the diagonal of R is positive, so the result does not depend on the library's signs.
            out.push(q[(i, j)] * if r[(j, j)] < 0.0 { -1.0 } else { 1.0 });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PRESETS, Rule, preset};

    fn small() -> ModelConfig {
        preset("small").expect("small is a preset").model
    }

    #[test]
    fn the_benchmark_model_has_the_documented_count() {
        assert_eq!(Table::of(&preset("small").expect("small is a preset")).len(), 8_996_429);
        // Less the predictor with its LayerNorm (591,360) and the mask vector (768).
        assert_eq!(Table::new(&small()).len(), 8_996_429 - 591_360 - 768);
        // The memory is its table (3,145,728) and its two projections (147,456).
        let without = ModelConfig { engram: Engram::Off, ..small() };
        assert_eq!(Table::new(&without).len(), 8_996_429 - 3_145_728 - 147_456 - 591_360 - 768);
    }

    /// Every preset without and with memory and objective.
    fn tables() -> Vec<(String, Table)> {
        let of = |name: &str, engram, jepa| {
            let model = ModelConfig { engram, ..preset(name).expect("it is a preset").model };
            let table = Table::new(&model);
            let table = if jepa { table.with_jepa(model.width) } else { table };
            (format!("{name} {engram:?} {jepa}"), table)
        };
        let ways = [(Engram::Off, false), (Engram::Off, true), (Engram::Device, false), (Engram::Device, true)];
        PRESETS.iter().flat_map(|name| ways.map(|(engram, jepa)| of(name, engram, jepa))).collect()
    }

    #[test]
    fn a_tensor_of_a_multiple_of_8_elements_starts_at_one_and_no_element_is_without_a_tensor() {
        for (name, table) in tables() {
            let mut end = 0;
            for param in &table.params {
                assert_eq!(param.start, end, "{name}: {}", param.name);
                end = param.range().end;
                let free = param.group == Group::Rows || !param.len().is_multiple_of(8);
                assert!(free || param.start.is_multiple_of(8), "{name}: {} starts at {}", param.name, param.start);
            }
            assert_eq!(table.len(), end, "{name}");
            let rows = table.params.iter().position(|param| param.group == Group::Rows);
            assert!(rows.is_none_or(|at| at + 1 == table.params.len()), "{name}");
            let mut streams: Vec<u64> = table.params.iter().map(|param| param.stream).collect();
            streams.sort_unstable();
            assert!(streams.into_iter().eq(0..table.params.len() as u64), "{name}");
        }
    }

    /// A ninth piece would be a second launch of an update (`ranges` of the device's kernels).
    #[test]
    fn the_update_of_a_table_with_everything_has_eight_pieces() {
        for rule in [Rule::Adamw, Rule::Muon] {
            for (name, table) in tables() {
                let table = table.grouped(rule);
                let moved = [Group::Matrix, Group::Vector].map(|group| table.ranges(group)).concat();
                let mut edges: Vec<usize> = moved.iter().flat_map(|range| [range.start, range.end]).collect();
                edges.sort_unstable();
                edges.dedup();
                assert!(edges.len() <= 8 + 1, "{name} {rule:?}: {edges:?}");
            }
        }
    }

    #[test]
    fn jepa_adds_its_documented_parameters_and_none_of_the_others_starts_otherwise() {
        let without = Table::new(&small());
        let with = without.clone().with_jepa(768);
        assert_eq!(with.len() - without.len(), 591_360 + 768);
        for param in &without.params {
            assert_eq!(with.get(param.name).initial(3), param.initial(3), "{}", param.name);
        }
        let is_new = |param: &&Param| without.params.iter().all(|old| old.name != param.name);
        let added: Vec<&Param> = with.params.iter().filter(is_new).collect();
        assert_eq!(added.len(), 4);
        assert_eq!(with.params.last().map(|param| param.group), Some(Group::Rows));
        let decayed: Vec<&str> = added.iter().filter(|p| p.group == Group::Matrix).map(|p| p.name).collect();
        assert_eq!(decayed, ["jepa.predictor"]);
        assert!(added.iter().all(|p| matches!(p.group, Group::Matrix | Group::Vector) && !p.retracted));
        let flat = with.initial(3);
        let mask = &flat[with.get("jepa.mask").range()];
        // The squared length of d draws of variance 1/d is 1, within four standard errors of sqrt(2/d).
        let square: f64 = mask.iter().map(|x| x * x).sum();
        assert!((square - 1.0).abs() < 4.0 * (2.0 / 768f64).sqrt(), "{square}");
        let bound = 768f64.powf(-0.5);
        let largest = flat[with.get("jepa.predictor").range()].iter().fold(0.0f64, |most, x| most.max(x.abs()));
        assert!(largest <= bound && largest > 0.999 * bound, "{largest}");
    }

    #[test]
    fn every_parameter_is_in_exactly_one_group() {
        let table = Table::new(&small()).with_jepa(768);
        let mut covered = vec![0; table.len()];
        for group in [Group::Matrix, Group::Vector, Group::Rows] {
            for range in table.ranges(group) {
                covered[range].iter_mut().for_each(|n| *n += 1);
            }
        }
        assert!(covered.iter().all(|&n| n == 1));
    }

    /// What the presets had before parameters were placed by their size: names, shapes, the order in which they are added
    /// and the bits of the initial values, without and with memory and objective.
    #[test]
    fn the_initial_values_are_those_of_before() {
        for (name, all, tensors, len, hash) in [
            ("tiny", false, 33, 221_059, "03865ee31174b620"),
            ("tiny", true, 40, 655_619, "93ecc6c9d64ef5c2"),
            ("nano", false, 33, 827_589, "af273171343631a8"),
            ("nano", true, 40, 1_729_477, "da3fa36b99885176"),
        ] {
            let mut model = preset(name).expect("it is a preset").model;
            model.engram = if all { Engram::Device } else { Engram::Off };
            let table = Table::new(&model);
            let mut table = if all { table.with_jepa(model.width) } else { table };
            table.params.sort_by_key(|param| param.stream);
            let (mut hasher, mut start) = (blake3::Hasher::new(), 0);
            for param in &table.params {
                hasher.update(format!("{} {:?} {start}\n", param.name, param.shape).as_bytes());
                start += param.len();
            }
            for x in table.initial(7) {
                hasher.update(&(x as f32).to_le_bytes());
            }
            assert_eq!((table.params.len(), start), (tensors, len), "{name}");
            assert_eq!(hasher.finalize().to_hex()[..16], *hash, "{name}");
        }
    }

    #[test]
    fn the_seed_reaches_the_initial_values() {
        let table = Table::new(&preset("tiny").expect("tiny is a preset").model);
        assert_eq!(table.initial(1), table.initial(1));
        assert_ne!(table.initial(1), table.initial(2));
    }

    #[test]
    fn factors_start_orthonormal() {
        let table = Table::new(&preset("tiny").expect("tiny is a preset").model);
        let flat = table.initial(3);
        for param in table.params.iter().filter(|p| p.retracted) {
            let (rows, columns) = (param.shape[param.shape.len() - 2], param.shape[param.shape.len() - 1]);
            for matrix in flat[param.range()].chunks(rows * columns) {
                let x = DMatrix::from_row_slice(rows, columns, matrix);
                let error = (x.transpose() * &x - DMatrix::identity(columns, columns)).norm();
                assert!(error < 1e-12, "{}: {error:e}", param.name);
            }
        }
    }

    #[test]
    fn the_decay_bias_gives_time_constants_from_2_to_500_tokens() {
        // The log of the decay per token is g = -5 sigma(bias) or -softplus(bias), and tau = -1 / g.
        let of: [(Gate, fn(f64) -> f64); 2] =
            [(Gate::Bounded, |bias| (1.0 + (-bias).exp()) / 5.0), (Gate::Softplus, |bias| 1.0 / bias.exp().ln_1p())];
        for (gate, tau) in of {
            let table = Table::new(&ModelConfig { gate, engram: Engram::Off, ..small() });
            let flat = table.initial(0);
            log_uniform(flat[table.get("kda.dt_bias").range()].iter().map(|&bias| tau(bias)).collect());
        }
    }

    fn log_uniform(taus: Vec<f64>) {
        assert!(taus.iter().all(|tau| (2.0..=500.0).contains(tau)));
        // Log-uniform: a third of the draws in each third of ln 250, within four standard errors of 768 draws.
        let third = 250f64.ln() / 3.0;
        for i in 0..3 {
            let inside = |tau: &&f64| ((*tau / 2.0).ln() / third).floor() as i32 == i;
            let share = taus.iter().filter(inside).count() as f64 / taus.len() as f64;
            assert!((share - 1.0 / 3.0).abs() < 4.0 * (2.0 / 9.0 / taus.len() as f64).sqrt(), "third {i}: {share}");
        }
    }
}
