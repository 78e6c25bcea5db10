//! The reference with a count of every operation's calls: holds what is asked against what runs where no device counts.

use std::cell::RefCell;
use std::collections::BTreeMap;

use dormouse_reference::{
    DType, Reference, Result, StepKey, Tensor, Tensors, adamw, blend, controller, cross_entropy, decay_gate, ema,
    embedding, engram, engram_hash, expert, gated_rms_norm, jepa, kda, koleo, l2_norm, layer_norm, linear, mask_vector,
    muon, record, residual, retract, retract_all, rms_norm, row_adam, sanitise, short_conv, spectral,
};
use ndarray::{ArrayD, ArrayViewD};

use crate::instruments::Witness;

type T = Tensor<f32>;

/// The reference in f32 that counts.
#[derive(Default)]
pub struct Counting {
    inner: Reference<f32>,
    /// Calls forward and backward, by operation.
    calls: RefCell<BTreeMap<&'static str, [u64; 2]>>,
}

impl Counting {
    /// The counts so far, which start again at zero.
    pub fn take(&self) -> BTreeMap<&'static str, [u64; 2]> {
        self.calls.take()
    }

    fn note(&self, stem: &'static str, direction: usize) -> &Reference<f32> {
        self.calls.borrow_mut().entry(stem).or_default()[direction] += 1;
        &self.inner
    }
}

impl Witness for Counting {
    fn describe(&self) -> String {
        self.inner.describe()
    }
}

impl Tensors for Counting {
    type Tensor = T;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn float(&self) -> DType {
        self.inner.float()
    }

    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<T> {
        self.inner.persistent(shape, dtype)
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<T> {
        self.inner.scratch(shape, dtype)
    }

    fn view(&self, tensor: &T, start: usize, shape: &[usize]) -> Result<T> {
        self.inner.view(tensor, start, shape)
    }

    fn shape<'a>(&self, tensor: &'a T) -> &'a [usize] {
        Tensors::shape(&self.inner, tensor)
    }

    fn dtype(&self, tensor: &T) -> DType {
        self.inner.dtype(tensor)
    }

    fn is_persistent(&self, tensor: &T) -> bool {
        self.inner.is_persistent(tensor)
    }

    fn upload(&self, values: ArrayViewD<'_, f64>, into: &T) -> Result<()> {
        self.inner.upload(values, into)
    }

    fn download(&self, tensor: &T) -> Result<ArrayD<f64>> {
        self.inner.download(tensor)
    }

    fn fill(&self, tensor: &T, value: f64) -> Result<()> {
        self.inner.fill(tensor, value)
    }

    fn keep(&self, from: &T, into: &T) -> Result<()> {
        self.inner.keep(from, into)
    }

    fn step(&self, key: &StepKey, body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        self.inner.step(key, &mut |_| body(self))
    }
}

/// Operations with an adjoint: what forward takes beside its config, and backward beside config, saved and upstream.
macro_rules! differentiable {
    ($($module:ident $operation:ident ($($a:ident: $argument:ty),*) ($($i:ident: $into:ty),*) -> $grads:ty;)*) => {$(
        impl $module::$operation for Counting {
            type Saved = <Reference<f32> as $module::$operation>::Saved;

            fn forward(
                &self,
                config: &$module::Config,
                $($a: $argument),*
            ) -> Result<($module::Outputs<T>, Self::Saved)> {
                $module::$operation::forward(self.note(stringify!($module), 0), config, $($a),*)
            }

            fn backward(
                &self,
                config: &$module::Config,
                saved: &Self::Saved,
                upstream: $module::Outputs<&T>,
                $($i: $into),*
            ) -> Result<$grads> {
                $module::$operation::backward(self.note(stringify!($module), 1), config, saved, upstream, $($i),*)
            }
        }
    )*};
}

differentiable! {
    blend Blend (x: blend::Inputs<&T>) () -> blend::Grads<T>;
    controller Controller (x: controller::Inputs<&T>, p: controller::Params<&T>)
        (plus: controller::Inputs<Option<&T>>, into: controller::Params<&T>) -> controller::Grads<T>;
    cross_entropy CrossEntropy (x: cross_entropy::Inputs<&T>) () -> cross_entropy::Grads<T>;
    decay_gate DecayGate (x: decay_gate::Inputs<&T>, p: decay_gate::Params<&T>) (into: decay_gate::Params<&T>)
        -> decay_gate::Grads<T>;
    embedding Embedding (x: embedding::Inputs<&T>, p: embedding::Params<&T>) (into: embedding::Params<&T>) -> ();
    engram Engram (x: engram::Inputs<&T>, p: engram::Params<&T>) (plus: Option<&T>, into: engram::Params<&T>)
        -> engram::Grads<T>;
    expert Expert (x: expert::Inputs<&T>, p: expert::Params<&T>) (plus: Option<&T>, into: expert::Params<&T>)
        -> expert::Grads<T>;
    gated_rms_norm GatedRmsNorm (x: gated_rms_norm::Inputs<&T>, p: gated_rms_norm::Params<&T>)
        (into: gated_rms_norm::Params<&T>) -> gated_rms_norm::Grads<T>;
    jepa Jepa (x: jepa::Inputs<&T>) () -> jepa::Grads<T>;
    kda Kda (x: kda::Inputs<&T>) () -> kda::Grads<T>;
    koleo Koleo (x: koleo::Inputs<&T>) (plus: Option<&T>) -> koleo::Grads<T>;
    l2_norm L2Norm (x: l2_norm::Inputs<&T>) () -> l2_norm::Grads<T>;
    layer_norm LayerNorm (x: layer_norm::Inputs<&T>, p: layer_norm::Params<&T>)
        (plus: Option<&T>, into: layer_norm::Params<&T>) -> layer_norm::Grads<T>;
    linear Linear (x: linear::Inputs<&T>, p: linear::Params<&T>) (plus: Option<&T>, into: linear::Params<&T>)
        -> linear::Grads<T>;
    mask_vector MaskVector (x: mask_vector::Inputs<&T>, p: mask_vector::Params<&T>) (into: mask_vector::Params<&T>)
        -> mask_vector::Grads<T>;
    residual Residual (x: residual::Inputs<&T>, p: residual::Params<&T>) (into: residual::Params<&T>)
        -> residual::Grads<T>;
    rms_norm RmsNorm (x: rms_norm::Inputs<&T>, p: rms_norm::Params<&T>) (into: rms_norm::Params<&T>)
        -> rms_norm::Grads<T>;
    short_conv ShortConv (x: short_conv::Inputs<&T>, p: short_conv::Params<&T>) (into: short_conv::Params<&T>)
        -> short_conv::Grads<T>;
    spectral Spectral (x: spectral::Inputs<&T>, p: spectral::Params<&T>) (plus: Option<&T>, into: spectral::Params<&T>)
        -> spectral::Grads<T>;
}

/// Operations in place, and the hash of keys.
macro_rules! without_adjoint {
    ($($module:ident $operation:ident $method:ident ($($a:ident: $argument:ty),*) -> $outputs:ty;)*) => {$(
        impl $module::$operation for Counting {
            fn $method(&self, $($a: $argument),*) -> Result<$outputs> {
                $module::$operation::$method(self.note(stringify!($module), 0), $($a),*)
            }
        }
    )*};
}

without_adjoint! {
    adamw Adamw update (c: &adamw::Config, s: adamw::State<&T>, x: adamw::Scalars<&T>) -> ();
    ema Ema update (c: &ema::Config, x: ema::Inputs<&T>) -> ();
    engram_hash EngramHash forward (c: &engram_hash::Config, x: engram_hash::Inputs<&T>) -> engram_hash::Outputs<T>;
    muon Muon update (c: &muon::Config, s: muon::State<&T>, x: muon::Scalars<&T>) -> ();
    record Record update (values: &[&T], step: &T, ring: &T) -> ();
    retract Retract update (c: &retract::Config, factor: &T, apply: &T) -> retract::Outputs<T>;
    retract_all RetractAll update (c: &retract_all::Config, params: &T, apply: &T) -> retract_all::Outputs<T>;
    row_adam RowAdam update (c: &row_adam::Config, s: row_adam::State<&T>, t: row_adam::Touched<&T>,
        x: row_adam::Scalars<&T>) -> ();
    sanitise Sanitise update (c: &sanitise::Config, grads: &T, losses: &T, counters: &T) -> sanitise::Outputs<T>;
}
