//! One call of every operation of the JEPA objective, with everything it is called with.

use dormouse_cuda::{Engine, Tensor};
use dormouse_reference::Result;
use dormouse_reference::ema::{self, Ema};
use dormouse_reference::jepa::{self, Jepa};
use dormouse_reference::koleo::{self, Koleo};
use dormouse_reference::layer_norm::{self, LayerNorm};
use dormouse_reference::mask_vector::{self, MaskVector};

use super::{Device, F32, Operation, Precision, Sizes, from_now, from_zero, zeros};
use crate::common::Draw;

/// A mask that is set at 15 in a hundred positions, as the objective's is.
fn masked<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Tensor> {
    draw.map(&[s.batch, s.time], |x| f64::from(u8::from(x < -0.7)))
}

pub(super) fn ema<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let inputs = ema::Inputs {
        teacher: draw.noise(&[s.params])?,
        online: draw.noise(&[s.params])?,
        apply: draw.map(&[1], |_| 1.0)?,
    };
    let config = ema::Config { momentum: 0.9, ranges: std::iter::once(0..s.params).collect() };
    Ok(Operation {
        shape: format!("P {}, 1 range", s.params),
        precisions: F32,
        flops: 0.0,
        state: from_now(draw.b, vec![("teacher", &inputs.teacher)])?,
        call: Box::new(move |b, _| {
            Ema::update(b, &config, inputs.as_ref())?;
            Ok(Vec::new())
        }),
    })
}

pub(super) fn jepa<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    // No prediction lies near its target, where rounding would decide the sign of its gradient.
    let prediction = draw.map(&rows, |x| 40.0 * x.signum() + x)?;
    let inputs = jepa::Inputs { prediction, teacher: draw.noise(&rows)?, mask: masked(draw, s)? };
    let upstream = jepa::Outputs { loss: draw.map(&[1], |_| 0.5)? };
    Ok(Operation {
        shape: format!("{rows:?}, 15 % masked"),
        precisions: F32,
        flops: 0.0,
        state: Vec::new(),
        call: call!(Jepa, |_| jepa::Config { eps: 1e-5 }, inputs, upstream),
    })
}

pub(super) fn koleo<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    let inputs = koleo::Inputs { z: draw.noise(&rows)?, mask: masked(draw, s)? };
    let (upstream, plus) = (koleo::Outputs { loss: draw.map(&[1], |_| 0.5)? }, draw.noise(&rows)?);
    let config = koleo::Config { limit: 256, norm_eps: 1e-6, eps: 1e-6 };
    Ok(Operation {
        shape: format!("{rows:?}, 15 % masked, limit {}", config.limit),
        precisions: F32,
        flops: 0.0,
        state: Vec::new(),
        call: Box::new(move |b, _| {
            let (outputs, saved) = Koleo::forward(b, &config, inputs.as_ref())?;
            let grads = Koleo::backward(b, &config, &saved, upstream.as_ref(), Some(&plus))?;
            Ok(outputs.named().into_iter().chain(grads.named()).collect())
        }),
    })
}

pub(super) fn layer_norm<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    let inputs = layer_norm::Inputs { x: draw.noise(&rows)? };
    let params = layer_norm::Params {
        gain: Some(draw.map(&[s.width], |x| 1.0 + 0.3 * x)?),
        bias: Some(draw.map(&[s.width], |x| 0.3 * x)?),
    };
    let (upstream, plus) = (layer_norm::Outputs { y: draw.noise(&rows)? }, draw.noise(&rows)?);
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?}, with gain and bias"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(LayerNorm, |_| layer_norm::Config { eps: 1e-5 }, inputs, upstream, params, into, Some(&plus)),
    })
}

pub(super) fn mask_vector<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    let inputs = mask_vector::Inputs { x: draw.noise(&rows)?, mask: masked(draw, s)? };
    let params = mask_vector::Params { vector: draw.noise(&[s.width])? };
    let upstream = mask_vector::Outputs { y: draw.noise(&rows)? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?}, 15 % masked"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(MaskVector, |_| mask_vector::Config {}, inputs, upstream, params, into),
    })
}
