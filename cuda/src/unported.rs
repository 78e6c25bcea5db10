//! The operations that have no kernels yet. A device refuses them by name, so a model that uses one is never computed
//! in part, and code generic over `Backend` is the same on every backend.
//!
//! An operation leaves this file when its kernels arrive. Nothing here takes part in a fingerprint: a receipt is about
//! kernels.

use std::convert::Infallible;

use dormouse_reference::{Error, Result, engram, engram_hash, muon, retract_all, row_adam};

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
    engram Engram (engram::Inputs<&Tensor>, engram::Params<&Tensor>) (Option<&Tensor>, engram::Params<&Tensor>);
}

impl<R: Engine> engram_hash::EngramHash for Device<R> {
    fn forward(
        &self,
        _: &engram_hash::Config,
        _: engram_hash::Inputs<&Tensor>,
    ) -> Result<engram_hash::Outputs<Tensor>> {
        refuse::<R, _>("engram_hash::forward")
    }
}

impl<R: Engine> muon::Muon for Device<R> {
    fn update(&self, _: &muon::Config, _: muon::State<&Tensor>, _: muon::Scalars<&Tensor>) -> Result<()> {
        refuse::<R, _>("muon::update")
    }
}

impl<R: Engine> row_adam::RowAdam for Device<R> {
    fn update(
        &self,
        _: &row_adam::Config,
        _: row_adam::State<&Tensor>,
        _: row_adam::Touched<&Tensor>,
        _: row_adam::Scalars<&Tensor>,
    ) -> Result<()> {
        refuse::<R, _>("row_adam::update")
    }
}

impl<R: Engine> retract_all::RetractAll for Device<R> {
    fn update(&self, _: &retract_all::Config, _: &Tensor, _: &Tensor) -> Result<retract_all::Outputs<Tensor>> {
        refuse::<R, _>("retract_all::update")
    }
}
