//! The operations that have no kernels yet. A device refuses them by name, so a model that uses one is never computed
//! in part, and code generic over `Backend` is the same on every backend.
//!
//! An operation leaves this file when its kernels arrive. Nothing here takes part in a fingerprint: a receipt is about
//! kernels.

use std::convert::Infallible;

use dormouse_reference::{Error, Result, ema, jepa, koleo, layer_norm, mask_vector};

use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

fn refuse<R: Engine, T>(op: &'static str) -> Result<T> {
    Err(Error::NoKernels { op, backend: R::WORD })
}

/// Operations with an adjoint: forward refuses, so there is never anything saved to go back from.
macro_rules! differentiable {
    ($($module:ident $operation:ident ($($argument:ty),*) ($($into:ty),*);)*) => {$(
        impl<R: Engine> $module::$operation for Device<R> {
            type Saved = Infallible;

            fn forward(&self, _: &$module::Config, $(_: $argument),*) -> Result<($module::Outputs<Tensor>, Infallible)> {
                refuse::<R, _>(concat!(stringify!($module), "::forward"))
            }

            fn backward(
                &self,
                _: &$module::Config,
                saved: &Infallible,
                _: $module::Outputs<&Tensor>,
                $(_: $into),*
            ) -> Result<$module::Grads<Tensor>> {
                match *saved {}
            }
        }
    )*};
}

differentiable! {
    jepa Jepa (jepa::Inputs<&Tensor>) ();
    koleo Koleo (koleo::Inputs<&Tensor>) (Option<&Tensor>);
    layer_norm LayerNorm (layer_norm::Inputs<&Tensor>, layer_norm::Params<&Tensor>)
        (Option<&Tensor>, layer_norm::Params<&Tensor>);
    mask_vector MaskVector (mask_vector::Inputs<&Tensor>, mask_vector::Params<&Tensor>)
        (mask_vector::Params<&Tensor>);
}

impl<R: Engine> ema::Ema for Device<R> {
    fn update(&self, _: &ema::Config, _: ema::Inputs<&Tensor>) -> Result<()> {
        refuse::<R, _>("ema::update")
    }
}
