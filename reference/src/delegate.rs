//! [`delegate_backend!`](crate::delegate_backend): a backend that hands every call on to another one.
//!
//! A backend that only chooses or watches another one has nothing to say about an operation but its signature, so the
//! signatures of all operations are written down here once.

/// Implements [`Tensors`](crate::Tensors) and every operation for `$wrapper` by calls of an inner backend.
///
/// `$inner` is a backend with the same tensors `$tensor`, and what its operations save is what the wrapper's save. Two
/// macros of the caller hand a call on: `$tensors!(self, d => call)` and, for operations,
/// `$operations!(self, stem, forward|backward|update, d => call)`. Each binds `d` to a reference to the inner backend and
/// evaluates the call.
#[macro_export]
macro_rules! delegate_backend {
    // Operations with an adjoint: what forward takes after the config, what backward takes after the upstream gradients.
    (
        @differentiable $wrapper:ty, $tensor:ty, $inner:ty, $operations:path;
        $($module:ident $operation:ident ($($a:ident: $A:ident),*) ($($b:ident: $B:ty),*) -> $grads:ty;)*
    ) => {$(
        impl $crate::$module::$operation for $wrapper {
            type Saved = <$inner as $crate::$module::$operation>::Saved;

            fn forward(
                &self,
                config: &$crate::$module::Config,
                $($a: $crate::$module::$A<&$tensor>),*
            ) -> $crate::Result<($crate::$module::Outputs<$tensor>, Self::Saved)> {
                $operations!(self, $module, forward, d =>
                    $crate::$module::$operation::forward(d, config, $($a),*))
            }

            fn backward(
                &self,
                config: &$crate::$module::Config,
                saved: &Self::Saved,
                upstream: $crate::$module::Outputs<&$tensor>,
                $($b: $B),*
            ) -> $crate::Result<$grads> {
                $operations!(self, $module, backward, d =>
                    $crate::$module::$operation::backward(d, config, saved, upstream, $($b),*))
            }
        }
    )*};

    // Operations without: their one method.
    (
        @direct $wrapper:ty, $operations:path;
        $($module:ident $operation:ident $method:ident ($($a:ident: $A:ty),*) -> $result:ty;)*
    ) => {$(
        impl $crate::$module::$operation for $wrapper {
            fn $method(&self, $($a: $A),*) -> $crate::Result<$result> {
                $operations!(self, $module, $method, d => $crate::$module::$operation::$method(d, $($a),*))
            }
        }
    )*};

    ($wrapper:ty, $tensor:ty, $inner:ty, $tensors:path, $operations:path) => {
        impl $crate::Tensors for $wrapper {
            type Tensor = $tensor;

            fn name(&self) -> String {
                $tensors!(self, d => $crate::Tensors::name(d))
            }

            fn float(&self) -> $crate::DType {
                $tensors!(self, d => $crate::Tensors::float(d))
            }

            fn persistent(&self, shape: &[usize], dtype: $crate::DType) -> $crate::Result<$tensor> {
                $tensors!(self, d => $crate::Tensors::persistent(d, shape, dtype))
            }

            fn scratch(&self, shape: &[usize], dtype: $crate::DType) -> $crate::Result<$tensor> {
                $tensors!(self, d => $crate::Tensors::scratch(d, shape, dtype))
            }

            fn view(&self, tensor: &$tensor, start: usize, shape: &[usize]) -> $crate::Result<$tensor> {
                $tensors!(self, d => $crate::Tensors::view(d, tensor, start, shape))
            }

            fn shape<'a>(&self, tensor: &'a $tensor) -> &'a [usize] {
                $tensors!(self, d => $crate::Tensors::shape(d, tensor))
            }

            fn dtype(&self, tensor: &$tensor) -> $crate::DType {
                $tensors!(self, d => $crate::Tensors::dtype(d, tensor))
            }

            fn is_persistent(&self, tensor: &$tensor) -> bool {
                $tensors!(self, d => $crate::Tensors::is_persistent(d, tensor))
            }

            fn upload(&self, values: $crate::ndarray::ArrayViewD<'_, f64>, into: &$tensor) -> $crate::Result<()> {
                $tensors!(self, d => $crate::Tensors::upload(d, values, into))
            }

            fn upload_f32(&self, values: $crate::ndarray::ArrayViewD<'_, f32>, into: &$tensor) -> $crate::Result<()> {
                $tensors!(self, d => $crate::Tensors::upload_f32(d, values, into))
            }

            fn download(&self, tensor: &$tensor) -> $crate::Result<$crate::ndarray::ArrayD<f64>> {
                $tensors!(self, d => $crate::Tensors::download(d, tensor))
            }

            fn fill(&self, tensor: &$tensor, value: f64) -> $crate::Result<()> {
                $tensors!(self, d => $crate::Tensors::fill(d, tensor, value))
            }

            fn keep(&self, from: &$tensor, into: &$tensor) -> $crate::Result<()> {
                $tensors!(self, d => $crate::Tensors::keep(d, from, into))
            }

            fn keep_all(&self, pairs: &[(&$tensor, &$tensor)]) -> $crate::Result<()> {
                $tensors!(self, d => $crate::Tensors::keep_all(d, pairs))
            }

            fn step(
                &self,
                key: &$crate::StepKey,
                body: &mut dyn FnMut(&Self) -> $crate::Result<()>,
            ) -> $crate::Result<()> {
                // The backend that a step hands to its body is the one it was called on.
                $tensors!(self, d => $crate::Tensors::step(d, key, &mut |_| body(self)))
            }

            fn beside(
                &self,
                first: &mut dyn FnMut(&Self) -> $crate::Result<()>,
                second: &mut dyn FnMut(&Self) -> $crate::Result<()>,
            ) -> $crate::Result<()> {
                $tensors!(self, d => $crate::Tensors::beside(d, &mut |_| first(self), &mut |_| second(self)))
            }

            fn stage(&self, stage: &'static str) {
                $tensors!(self, d => $crate::Tensors::stage(d, stage));
            }

            fn reshape(&self, tensor: &$tensor, shape: &[usize]) -> $crate::Result<$tensor> {
                $tensors!(self, d => $crate::Tensors::reshape(d, tensor, shape))
            }
        }

        $crate::delegate_backend! {
            @differentiable $wrapper, $tensor, $inner, $operations;
            blend Blend (inputs: Inputs) () -> $crate::blend::Grads<$tensor>;
            controller Controller (inputs: Inputs, params: Params)
                (plus: $crate::controller::Inputs<Option<&$tensor>>, into: $crate::controller::Params<&$tensor>) -> $crate::controller::Grads<$tensor>;
            cross_entropy CrossEntropy (inputs: Inputs) () -> $crate::cross_entropy::Grads<$tensor>;
            decay_gate DecayGate (inputs: Inputs, params: Params)
                (into: $crate::decay_gate::Params<&$tensor>) -> $crate::decay_gate::Grads<$tensor>;
            embedding Embedding (inputs: Inputs, params: Params) (into: $crate::embedding::Params<&$tensor>) -> ();
            engram Engram (inputs: Inputs, params: Params)
                (plus: Option<&$tensor>, into: $crate::engram::Params<&$tensor>) -> $crate::engram::Grads<$tensor>;
            expert Expert (inputs: Inputs, params: Params)
                (plus: Option<&$tensor>, into: $crate::expert::Params<&$tensor>) -> $crate::expert::Grads<$tensor>;
            gated_rms_norm GatedRmsNorm (inputs: Inputs, params: Params)
                (into: $crate::gated_rms_norm::Params<&$tensor>) -> $crate::gated_rms_norm::Grads<$tensor>;
            jepa Jepa (inputs: Inputs) () -> $crate::jepa::Grads<$tensor>;
            kda Kda (inputs: Inputs) () -> $crate::kda::Grads<$tensor>;
            koleo Koleo (inputs: Inputs) (plus: Option<&$tensor>) -> $crate::koleo::Grads<$tensor>;
            l2_norm L2Norm (inputs: Inputs) () -> $crate::l2_norm::Grads<$tensor>;
            layer_norm LayerNorm (inputs: Inputs, params: Params)
                (plus: Option<&$tensor>, into: $crate::layer_norm::Params<&$tensor>) -> $crate::layer_norm::Grads<$tensor>;
            linear Linear (inputs: Inputs, params: Params)
                (plus: Option<&$tensor>, into: $crate::linear::Params<&$tensor>) -> $crate::linear::Grads<$tensor>;
            mask_vector MaskVector (inputs: Inputs, params: Params)
                (into: $crate::mask_vector::Params<&$tensor>) -> $crate::mask_vector::Grads<$tensor>;
            residual Residual (inputs: Inputs, params: Params)
                (into: $crate::residual::Params<&$tensor>) -> $crate::residual::Grads<$tensor>;
            rms_norm RmsNorm (inputs: Inputs, params: Params)
                (into: $crate::rms_norm::Params<&$tensor>) -> $crate::rms_norm::Grads<$tensor>;
            short_conv ShortConv (inputs: Inputs, params: Params)
                (into: $crate::short_conv::Params<&$tensor>) -> $crate::short_conv::Grads<$tensor>;
            spectral Spectral (inputs: Inputs, params: Params)
                (plus: Option<&$tensor>, into: $crate::spectral::Params<&$tensor>) -> $crate::spectral::Grads<$tensor>;
        }

        $crate::delegate_backend! {
            @direct $wrapper, $operations;
            adamw Adamw update (
                config: &$crate::adamw::Config, state: $crate::adamw::State<&$tensor>,
                scalars: $crate::adamw::Scalars<&$tensor>
            ) -> ();
            ema Ema update (config: &$crate::ema::Config, inputs: $crate::ema::Inputs<&$tensor>) -> ();
            engram_hash EngramHash forward (
                config: &$crate::engram_hash::Config, inputs: $crate::engram_hash::Inputs<&$tensor>
            ) -> $crate::engram_hash::Outputs<$tensor>;
            muon Muon update (
                config: &$crate::muon::Config, state: $crate::muon::State<&$tensor>,
                scalars: $crate::muon::Scalars<&$tensor>
            ) -> ();
            record Record update (values: &[&$tensor], step: &$tensor, ring: &$tensor) -> ();
            retract Retract update (
                config: &$crate::retract::Config, factor: &$tensor, apply: &$tensor
            ) -> $crate::retract::Outputs<$tensor>;
            retract_all RetractAll update (
                config: &$crate::retract_all::Config, params: &$tensor, apply: &$tensor
            ) -> $crate::retract_all::Outputs<$tensor>;
            row_adam RowAdam update (
                config: &$crate::row_adam::Config, state: $crate::row_adam::State<&$tensor>,
                touched: $crate::row_adam::Touched<&$tensor>, scalars: $crate::row_adam::Scalars<&$tensor>
            ) -> ();
            sanitise Sanitise update (
                config: &$crate::sanitise::Config, grads: &$tensor, losses: &$tensor, counters: &$tensor
            ) -> $crate::sanitise::Outputs<$tensor>;
        }
    };
}

/// What [`delegate_backend!`](crate::delegate_backend) takes for a wrapper whose one field is the inner backend.
#[macro_export]
macro_rules! to_field {
    ($self:ident, $d:ident => $call:expr) => {{
        let $d = &$self.0;
        $call
    }};
    ($self:ident, $stem:ident, $method:ident, $d:ident => $call:expr) => {
        $crate::to_field!($self, $d => $call)
    };
}
