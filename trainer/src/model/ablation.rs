//! [`Ablation`]: faults that can be planted in a model, to show that each would be noticed.

use dormouse_reference::linear::{self, Linear};
use dormouse_reference::residual::{self, Residual};
use dormouse_reference::{Backend, Precision, Result};

/// What is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ablation {
    /// Nothing.
    #[default]
    None,
    /// No gradient flows back through the recurrence, as if its output had come back untracked.
    DetachRecurrence,
    /// The recurrence's gradient of the log decay is 1 % too large.
    DecayGradientScaled,
    /// The decay bias gets no gradient.
    DecayBiasDropped,
    /// The first head's write strength gets no gradient.
    FirstHeadBetaDropped,
    /// No gradient flows back into the n-gram memory.
    DetachMemory,
    /// The first loss of a step is NaN.
    NanLoss,
    /// The first element of the gradient is NaN.
    NanGradient,
    /// The first activation is NaN.
    NanActivation,
    /// The teacher reads the masked bytes.
    TeacherSeesMask,
    /// The distance to the teacher sends a gradient back through the teacher, as if it were the model.
    TeacherGradient,
    /// The cross-entropy of masked bytes counts their positions, too.
    MaskedCrossEntropy,
}

/// `factor * x`.
pub(super) fn scaled<B: Backend>(b: &B, x: &B::Tensor, factor: f64) -> Result<B::Tensor> {
    let zero = b.scratch(b.shape(x), b.float())?;
    b.fill(&zero, 0.0)?;
    let rho = b.scratch(&[1], b.float())?;
    b.fill(&rho, factor)?;
    let inputs = residual::Inputs { c: &zero, y: x };
    Ok(Residual::forward(b, &residual::Config {}, inputs, residual::Params { rho: &rho })?.0.h)
}

/// `x` (`[.., H]`) with zeros at head 0: its product with a diagonal matrix.
pub(super) fn without_first_head<B: Backend>(b: &B, x: &B::Tensor) -> Result<B::Tensor> {
    let heads = b.shape(x).last().copied().unwrap_or(0);
    let keep = b.scratch(&[heads, heads], b.float())?;
    b.fill(&keep, 0.0)?;
    for head in 1..heads {
        b.fill(&b.view(&keep, head * heads + head, &[1])?, 1.0)?;
    }
    let config = linear::Config { precision: Precision::Full };
    Ok(Linear::forward(b, &config, linear::Inputs { x }, linear::Params { weight: &keep, bias: None })?.0.y)
}
