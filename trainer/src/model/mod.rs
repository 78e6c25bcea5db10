//! The byte model: its forward and backward pass written out over a [`Backend`], without a tape.
//!
//! One block with shared weights runs N times:
//!
//! ```text
//! x0 = Emb[ids];  h = x0
//! for n = 0..N-1
//!   c     = h + e_n                      u = RMSNorm_loop(c)
//!   gates = controller([c ; x0])
//!   a     = KDA(u)                       the state starts at zero in every iteration
//!   m     = Engram(keys, c)              where the model has a memory
//!   h     = c + rho * blend(gates, a, m, u W_dense, experts(u))
//!   ce_n  = CE( Spectral_head( RMSNorm_final( Spectral_out(h) ) ), target )
//! loss = mean_n ce_n
//! ```
//!
//! The readout of the last iteration scores and generates: training and scoring share one function. `forward` keeps what
//! each operation saved, in the order of the text above; `backward` walks it in reverse. A gradient that arrives at a
//! tensor from several readers travels along them as the `plus` of each, so no launch only adds.
//!
//! A run with the JEPA objective has more than one pass over a batch: [`Pass`] says what each is for.

mod ablation;
mod attention;
mod backward;
mod cost;
mod forward;
mod groups;
mod jepa;
mod memory;
mod params;

pub use ablation::Ablation;
pub use attention::Carry;
pub use cost::{MemoryClasses, Products, check_batch, check_latents, check_memory};
pub use forward::{Batch, Forward};
pub use groups::group_of;
pub use jepa::{KOLEO_WEIGHT, Objective, Pass, STEMS as JEPA_STEMS, Upstream};
pub use memory::{Memory, TABLE as MEMORY_TABLE};
pub use params::{CONV_WIDTH, DECAY_RANK, Group, Init, Param, Table, VOCABULARY};

use dormouse_reference::{Backend, Precision, Result};

use crate::config::{Engram, ModelConfig};
use crate::instruments::Ask;

use forward::Configs;

/// A model on a backend: its shape, its parameter table and named views into the flat parameter buffer.
pub struct Model<B: Backend> {
    /// The shape.
    pub config: ModelConfig,
    /// The parameter table.
    pub table: Table,
    /// The flat parameter buffer.
    pub params: B::Tensor,
    /// The flat gradient buffer; mirrors `params`.
    pub grads: B::Tensor,
    /// The operations' configs that are no constants.
    configs: Configs,
    /// What is cut on purpose.
    pub ablation: Ablation,
}

/// Named views into one flat buffer.
struct Views<'a, B: Backend> {
    b: &'a B,
    table: &'a Table,
    flat: &'a B::Tensor,
    /// Where tables of rows lie: a teacher reads the model's own.
    rows: &'a B::Tensor,
}

impl<B: Backend> Views<'_, B> {
    fn get(&self, name: &str) -> Result<B::Tensor> {
        let param = self.table.get(name);
        let flat = if param.group == Group::Rows { self.rows } else { self.flat };
        self.b.view(flat, param.start, &param.shape)
    }

    /// Row `n` of the iteration embedding.
    fn iteration(&self, n: usize, width: usize) -> Result<B::Tensor> {
        self.b.view(self.flat, self.table.get("iteration").start + n * width, &[width])
    }
}

impl<B: Backend> Model<B> {
    /// A model with zeroed parameters and gradients; load or initialise them before use.
    ///
    /// `table` is [`Table::of`] the run, or what of it is resident; `precision` says which arithmetic an operation has.
    pub fn new(b: &B, config: &ModelConfig, table: Table, precision: impl Fn(&str) -> Precision) -> Result<Self> {
        let flat = || b.persistent(&[table.len()], b.float());
        Ok(Self {
            params: flat()?,
            grads: flat()?,
            config: config.clone(),
            configs: Configs::new(config, &precision),
            table,
            ablation: Ablation::None,
        })
    }

    /// How often one pass over a batch calls each operation: forward, and backward where it follows.
    ///
    /// Written down here and not counted, so that a counter has something to be wrong against.
    pub fn asks(&self, targets: bool, backward: bool) -> Vec<Ask> {
        let n = self.config.iterations as u64;
        let each = [
            ("rms_norm", 2 * n),
            ("controller", n),
            // q, k, v, decay down and up, beta, gate and out of the attention; the dense branch
            ("linear", 9 * n),
            ("short_conv", 3 * n),
            ("l2_norm", 2 * n),
            ("decay_gate", n),
            ("kda", n),
            ("gated_rms_norm", n),
            ("expert", n),
            ("engram", if self.config.engram == Engram::Off { 0 } else { n }),
            ("blend", n),
            ("residual", n),
            // out and head
            ("spectral", 2 * n),
            ("cross_entropy", if targets { n } else { 0 }),
        ];
        // x0 is read as the first h and by the controllers, so its gradient arrives twice.
        let embedding = Ask { stem: "embedding", forward: 1, backward: if backward { 2 } else { 0 } };
        let others = each.into_iter().filter(|(_, calls)| *calls > 0);
        let others =
            others.map(|(stem, calls)| Ask { stem, forward: calls, backward: if backward { calls } else { 0 } });
        std::iter::once(embedding).chain(others).collect()
    }

    /// A view of one parameter.
    pub fn param(&self, b: &B, name: &str) -> Result<B::Tensor> {
        self.views(b, &self.params).get(name)
    }

    /// The named parts of a flat buffer that mirrors the parameters. A buffer of gradients has its own tables of rows.
    fn views<'a>(&'a self, b: &'a B, flat: &'a B::Tensor) -> Views<'a, B> {
        Views { b, table: &self.table, flat, rows: flat }
    }
}
