//! Calls of `kda` and how exact they have to be.

use dormouse_cuda::{Device, Engine, Tensor};
use dormouse_reference::kda::{Config, Form, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{Precision, Result};

use super::{Draw, Results};

/// Relative RMS errors that are accepted: rounding of the operands times the square root of some twenty products that
/// follow each other, and in f32 the order of sums.
pub const LIMITS: [(Precision, f64); 3] = [(Precision::Full, 1e-5), (Precision::Tf32, 4e-3), (Precision::Bf16, 3e-2)];

/// What goes in, and the gradients of what comes out.
pub struct Problem {
    pub inputs: Inputs<Tensor>,
    pub upstream: Outputs<Tensor>,
}

impl Problem {
    /// A problem of shape (B, T, H, K, V), with an initial state and a gradient of the final one if `states`.
    pub fn new<R: Engine>(draw: &mut Draw<'_, R>, shape: [usize; 5], states: bool) -> Result<Self> {
        let [batch, time, heads, key, value] = shape;
        let (wide, narrow) = ([batch, time, heads, key], [batch, time, heads, value]);
        let mut state = |scale: f64| match states {
            true => draw.map(&[batch, heads, key, value], |x| scale * x).map(Some),
            false => Ok(None),
        };
        let (initial_state, final_state) = (state(0.5)?, state(1.7)?);
        let inputs = Inputs {
            q: draw.unit_rows(&wide)?,
            k: draw.unit_rows(&wide)?,
            v: draw.noise(&narrow)?,
            g: draw.map(&wide, |x| -5.0 / (1.0 + (3.0 - 2.0 * x).exp()))?,
            beta: draw.map(&[batch, time, heads], |x| 0.5 + 0.4 * x)?,
            b: None,
            w: None,
            cu_seqlens: None,
            initial_state,
        };
        Ok(Self { inputs, upstream: Outputs { o: draw.noise(&narrow)?, final_state } })
    }
}

/// The model's configuration.
pub fn config(precision: Precision) -> Config {
    Config { scale: None, form: Form::Recurrent, checkpoint_every: 64, memory: Memory::Save, precision }
}

/// Forward and backward.
pub fn pass<R: Engine>(b: &Device<R>, precision: Precision, problem: &Problem) -> Result<Results> {
    let config = config(precision);
    let (outputs, saved) = Kda::forward(b, &config, problem.inputs.as_ref())?;
    let grads = Kda::backward(b, &config, &saved, problem.upstream.as_ref())?;
    Ok(outputs.named().into_iter().chain(grads.named()).collect())
}
