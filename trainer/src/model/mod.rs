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
//!   h     = c + rho * blend(gates, a, u W_dense, experts(u))
//!   ce_n  = CE( Spectral_head( RMSNorm_final( Spectral_out(h) ) ), target )
//! loss = mean_n ce_n
//! ```
//!
//! The readout of the last iteration scores and generates: training and scoring share one function. `forward` keeps what
//! each operation saved, in the order of the text above; `backward` walks it in reverse. A gradient that arrives at a
//! tensor from several readers travels along them as the `plus` of each, so no launch only adds.

mod attention;
mod backward;
mod forward;
mod params;

pub use attention::Carry;
pub use backward::Ablation;
pub use forward::{Batch, Forward};
pub use params::{CONV_WIDTH, DECAY_RANK, Group, Init, Param, Table, VOCABULARY};

use dormouse_reference::{Backend, Result};

use crate::config::ModelConfig;

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
    /// What is cut on purpose.
    pub ablation: Ablation,
}

/// Named views into one flat buffer.
struct Views<'a, B: Backend> {
    b: &'a B,
    table: &'a Table,
    flat: &'a B::Tensor,
}

impl<B: Backend> Views<'_, B> {
    fn get(&self, name: &str) -> Result<B::Tensor> {
        let param = self.table.get(name);
        self.b.view(self.flat, param.start, &param.shape)
    }

    /// Row `n` of the iteration embedding.
    fn iteration(&self, n: usize, width: usize) -> Result<B::Tensor> {
        self.b.view(self.flat, self.table.get("iteration").start + n * width, &[width])
    }
}

impl<B: Backend> Model<B> {
    /// A model with zeroed parameters and gradients; load or initialise them before use.
    pub fn new(b: &B, config: &ModelConfig) -> Result<Self> {
        let table = Table::new(config);
        let flat = || b.persistent(&[table.len()], b.float());
        Ok(Self {
            params: flat()?,
            grads: flat()?,
            config: config.clone(),
            table: table.clone(),
            ablation: Ablation::None,
        })
    }

    /// A view of one parameter.
    pub fn param(&self, b: &B, name: &str) -> Result<B::Tensor> {
        Views { b, table: &self.table, flat: &self.params }.get(name)
    }
}
