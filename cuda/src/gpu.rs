//! [`Gpu`]: a [`Device`] whose runtime is chosen when the program runs.
//!
//! Whoever is generic over the runtime compiles every kernel's launch once per runtime, in its own crate. Behind this enum
//! they are compiled once, here. It adds nothing and holds no kernel, so fingerprints leave it out.

use dormouse_reference::{DType, Result, StepKey, Tensors};
use dormouse_reference::{
    adamw, blend, controller, cross_entropy, decay_gate, ema, embedding, engram, engram_hash, expert, gated_rms_norm,
    jepa, kda, koleo, l2_norm, layer_norm, linear, mask_vector, muon, record, residual, retract, retract_all, rms_norm,
    row_adam, sanitise, short_conv, spectral,
};
use ndarray::{ArrayD, ArrayViewD};
use std::collections::BTreeMap;

use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Ledger;
use crate::matmul::Product;
use crate::price::Price;
use crate::runtime::{Activity, Cuda, Engine, Error, Hardware, Offline, gemm};
use crate::tensor::Tensor;
use crate::{Client, Lavapipe};

/// A runtime that kernels run on, or are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// NVIDIA's driver.
    Cuda,
    /// Mesa's software Vulkan driver.
    Lavapipe,
    /// Compiles for a GPU that is not there, and runs nothing.
    Offline,
}

/// An open runtime: all its devices share one stream and one set of compiled kernels.
#[derive(Clone)]
#[allow(missing_docs)]
pub enum Opened {
    Cuda(Client<Cuda>),
    Lavapipe(Client<Lavapipe>),
    Offline(Client<Offline>),
}

/// A backend on one of the runtimes.
#[allow(missing_docs)]
pub enum Gpu {
    Cuda(Device<Cuda>),
    Lavapipe(Device<Lavapipe>),
    Offline(Device<Offline>),
}

impl Runtime {
    /// The word in tables and on the command line.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Runtime::Cuda => Cuda::WORD,
            Runtime::Lavapipe => Lavapipe::WORD,
            Runtime::Offline => Offline::WORD,
        }
    }

    /// Whether steps can be captured and replayed.
    #[must_use]
    pub const fn graphs(self) -> bool {
        match self {
            Runtime::Cuda => Cuda::GRAPHS,
            Runtime::Lavapipe => Lavapipe::GRAPHS,
            Runtime::Offline => Offline::GRAPHS,
        }
    }

    /// Whether there is a device, or what is missing. Does not open it.
    ///
    /// # Errors
    /// What is missing and how to get it.
    pub fn available(self) -> std::result::Result<(), Error> {
        match self {
            Runtime::Cuda => Cuda::available(),
            Runtime::Lavapipe => Lavapipe::available(),
            Runtime::Offline => Offline::available(),
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// As for [`Runtime::available`].
    pub fn open(self) -> std::result::Result<Opened, Error> {
        Ok(match self {
            Runtime::Cuda => Opened::Cuda(Cuda::open()?),
            Runtime::Lavapipe => Opened::Lavapipe(Lavapipe::open()?),
            Runtime::Offline => Opened::Offline(Offline::open()?),
        })
    }
}

/// One expression for each runtime, with `$d` for what it wraps.
macro_rules! each {
    ($kind:ident, $on:expr, $d:ident => $body:expr) => {
        match $on {
            $kind::Cuda($d) => $body,
            $kind::Lavapipe($d) => $body,
            $kind::Offline($d) => $body,
        }
    };
}

impl Opened {
    /// Which runtime this is.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        match self {
            Opened::Cuda(_) => Runtime::Cuda,
            Opened::Lavapipe(_) => Runtime::Lavapipe,
            Opened::Offline(_) => Runtime::Offline,
        }
    }

    /// A fresh backend.
    #[must_use]
    pub fn device(&self) -> Gpu {
        match self {
            Opened::Cuda(client) => Gpu::Cuda(Device::on(client.clone())),
            Opened::Lavapipe(client) => Gpu::Lavapipe(Device::on(client.clone())),
            Opened::Offline(client) => Gpu::Offline(Device::on(client.clone())),
        }
    }

    /// The hardware and its versions, for receipts.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn hardware(&self) -> std::result::Result<Hardware, Error> {
        match self {
            Opened::Cuda(client) => Cuda::hardware(client),
            Opened::Lavapipe(client) => Lavapipe::hardware(client),
            Opened::Offline(client) => Offline::hardware(client),
        }
    }
}

/// Methods of [`Device`], by the same names.
impl Gpu {
    /// Opens a device.
    ///
    /// # Errors
    /// As for [`Runtime::available`].
    pub fn open(runtime: Runtime) -> Result<Self> {
        Ok(runtime.open()?.device())
    }

    /// The hardware's generation, such as `sm_90`; the runtime's word where it has none.
    #[must_use]
    pub fn generation(&self) -> String {
        match self {
            Gpu::Cuda(d) => target(d),
            Gpu::Lavapipe(d) => target(d),
            Gpu::Offline(d) => target(d),
        }
    }

    /// [`Device::set_graphs`]
    pub fn set_graphs(&self, on: bool) {
        each!(Gpu, self, d => d.set_graphs(on));
    }

    /// [`Device::set_poison`]
    pub fn set_poison(&self, on: bool) {
        each!(Gpu, self, d => d.set_poison(on));
    }

    /// [`Device::set_arms`]
    pub fn set_arms(&self, arm: Arm) {
        each!(Gpu, self, d => d.set_arms(arm));
    }

    /// [`Device::set_arm`]
    ///
    /// # Errors
    /// A stem without kernels.
    pub fn set_arm(&self, stem: &str, arm: Arm) -> Result<()> {
        each!(Gpu, self, d => d.set_arm(stem, arm))
    }

    /// [`Device::plant`]
    ///
    /// # Errors
    /// A stem without kernels, or none of its mutants.
    pub fn plant(&self, stem: &str, mutant: &str) -> Result<()> {
        each!(Gpu, self, d => d.plant(stem, mutant))
    }

    /// The arm that an operation's next call takes.
    #[must_use]
    pub fn arm(&self, stem: &str) -> Arm {
        each!(Gpu, self, d => d.arm(stem))
    }

    /// [`Device::captures`]
    #[must_use]
    pub fn captures(&self) -> u64 {
        each!(Gpu, self, d => d.captures())
    }

    /// [`Device::arena_bytes`]
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        each!(Gpu, self, d => d.arena_bytes())
    }

    /// [`Device::activity`]
    #[must_use]
    pub fn activity(&self) -> Activity {
        each!(Gpu, self, d => d.activity())
    }

    /// [`Device::describe`]
    #[must_use]
    pub fn describe(&self) -> String {
        each!(Gpu, self, d => d.describe())
    }

    /// [`Device::sync`]
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn sync(&self) -> Result<()> {
        each!(Gpu, self, d => d.sync())
    }

    /// [`Device::gemm_choices`]
    #[must_use]
    pub fn gemm_choices(&self) -> Vec<gemm::Choice> {
        each!(Gpu, self, d => d.gemm_choices())
    }

    /// [`Device::product`]
    ///
    /// # Errors
    /// A matrix reaches beyond its tensor, is no floats, or shares memory with the result; the library fails.
    pub fn product(&self, arm: Arm, call: &Product<'_>) -> Result<()> {
        each!(Gpu, self, d => d.product(arm, call))
    }

    /// What has run outside steps and in them, together.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        each!(Gpu, self, d => d.ledger())
    }

    /// What has run, by the purpose of the step.
    #[must_use]
    pub fn ledgers(&self) -> BTreeMap<&'static str, Ledger> {
        each!(Gpu, self, d => d.ledgers())
    }

    /// [`Device::launch_price`]
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn launch_price(&self) -> Result<Price> {
        each!(Gpu, self, d => d.launch_price())
    }

    /// Whether launches are timed on the device.
    pub fn set_timers(&self, on: bool) {
        each!(Gpu, self, d => d.set_timers(on));
    }
}

fn target<R: Engine>(device: &Device<R>) -> String {
    R::hardware(device.client()).map_or_else(|_| R::WORD.to_owned(), |hardware| hardware.target)
}

impl Tensors for Gpu {
    type Tensor = Tensor;

    fn name(&self) -> String {
        each!(Gpu, self, d => d.name())
    }

    fn float(&self) -> DType {
        each!(Gpu, self, d => d.float())
    }

    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        each!(Gpu, self, d => d.persistent(shape, dtype))
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        each!(Gpu, self, d => d.scratch(shape, dtype))
    }

    fn view(&self, tensor: &Tensor, start: usize, shape: &[usize]) -> Result<Tensor> {
        each!(Gpu, self, d => d.view(tensor, start, shape))
    }

    fn shape<'a>(&self, tensor: &'a Tensor) -> &'a [usize] {
        each!(Gpu, self, d => d.shape(tensor))
    }

    fn dtype(&self, tensor: &Tensor) -> DType {
        each!(Gpu, self, d => d.dtype(tensor))
    }

    fn is_persistent(&self, tensor: &Tensor) -> bool {
        each!(Gpu, self, d => d.is_persistent(tensor))
    }

    fn upload(&self, values: ArrayViewD<'_, f64>, into: &Tensor) -> Result<()> {
        each!(Gpu, self, d => d.upload(values, into))
    }

    fn download(&self, tensor: &Tensor) -> Result<ArrayD<f64>> {
        each!(Gpu, self, d => d.download(tensor))
    }

    fn fill(&self, tensor: &Tensor, value: f64) -> Result<()> {
        each!(Gpu, self, d => d.fill(tensor, value))
    }

    fn keep(&self, from: &Tensor, into: &Tensor) -> Result<()> {
        each!(Gpu, self, d => d.keep(from, into))
    }

    fn step(&self, key: &StepKey, body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        // The device that a step hands to its body is the one it was called on.
        each!(Gpu, self, d => d.step(key, &mut |_| body(self)))
    }

    fn stage(&self, stage: &'static str) {
        each!(Gpu, self, d => d.stage(stage));
    }

    fn reshape(&self, tensor: &Tensor, shape: &[usize]) -> Result<Tensor> {
        each!(Gpu, self, d => d.reshape(tensor, shape))
    }
}

/// Operations with an adjoint: the arguments of forward after the config, those of backward after what was saved, and what
/// backward returns.
macro_rules! differentiable {
    ($($module:ident $operation:ident ($($a:ident: $A:ty),*) ($($b:ident: $B:ty),*) -> $grads:ty;)*) => {$(
        impl $module::$operation for Gpu {
            // The same on every runtime: handles know none.
            type Saved = <Device<Lavapipe> as $module::$operation>::Saved;

            fn forward(
                &self,
                config: &$module::Config,
                $($a: $A),*
            ) -> Result<($module::Outputs<Tensor>, Self::Saved)> {
                each!(Gpu, self, d => $module::$operation::forward(d, config, $($a),*))
            }

            fn backward(
                &self,
                config: &$module::Config,
                saved: &Self::Saved,
                upstream: $module::Outputs<&Tensor>,
                $($b: $B),*
            ) -> Result<$grads> {
                each!(Gpu, self, d => $module::$operation::backward(d, config, saved, upstream, $($b),*))
            }
        }
    )*};
}

differentiable! {
    blend Blend (i: blend::Inputs<&Tensor>) () -> blend::Grads<Tensor>;
    controller Controller (i: controller::Inputs<&Tensor>, p: controller::Params<&Tensor>)
        (plus: controller::Inputs<Option<&Tensor>>, into: controller::Params<&Tensor>) -> controller::Grads<Tensor>;
    cross_entropy CrossEntropy (i: cross_entropy::Inputs<&Tensor>) () -> cross_entropy::Grads<Tensor>;
    decay_gate DecayGate (i: decay_gate::Inputs<&Tensor>, p: decay_gate::Params<&Tensor>)
        (into: decay_gate::Params<&Tensor>) -> decay_gate::Grads<Tensor>;
    embedding Embedding (i: embedding::Inputs<&Tensor>, p: embedding::Params<&Tensor>)
        (into: embedding::Params<&Tensor>) -> ();
    engram Engram (i: engram::Inputs<&Tensor>, p: engram::Params<&Tensor>)
        (plus: Option<&Tensor>, into: engram::Params<&Tensor>) -> engram::Grads<Tensor>;
    expert Expert (i: expert::Inputs<&Tensor>, p: expert::Params<&Tensor>)
        (plus: Option<&Tensor>, into: expert::Params<&Tensor>) -> expert::Grads<Tensor>;
    gated_rms_norm GatedRmsNorm (i: gated_rms_norm::Inputs<&Tensor>, p: gated_rms_norm::Params<&Tensor>)
        (into: gated_rms_norm::Params<&Tensor>) -> gated_rms_norm::Grads<Tensor>;
    jepa Jepa (i: jepa::Inputs<&Tensor>) () -> jepa::Grads<Tensor>;
    kda Kda (i: kda::Inputs<&Tensor>) () -> kda::Grads<Tensor>;
    koleo Koleo (i: koleo::Inputs<&Tensor>) (plus: Option<&Tensor>) -> koleo::Grads<Tensor>;
    l2_norm L2Norm (i: l2_norm::Inputs<&Tensor>) () -> l2_norm::Grads<Tensor>;
    layer_norm LayerNorm (i: layer_norm::Inputs<&Tensor>, p: layer_norm::Params<&Tensor>)
        (plus: Option<&Tensor>, into: layer_norm::Params<&Tensor>) -> layer_norm::Grads<Tensor>;
    linear Linear (i: linear::Inputs<&Tensor>, p: linear::Params<&Tensor>)
        (plus: Option<&Tensor>, into: linear::Params<&Tensor>) -> linear::Grads<Tensor>;
    mask_vector MaskVector (i: mask_vector::Inputs<&Tensor>, p: mask_vector::Params<&Tensor>)
        (into: mask_vector::Params<&Tensor>) -> mask_vector::Grads<Tensor>;
    residual Residual (i: residual::Inputs<&Tensor>, p: residual::Params<&Tensor>)
        (into: residual::Params<&Tensor>) -> residual::Grads<Tensor>;
    rms_norm RmsNorm (i: rms_norm::Inputs<&Tensor>, p: rms_norm::Params<&Tensor>)
        (into: rms_norm::Params<&Tensor>) -> rms_norm::Grads<Tensor>;
    short_conv ShortConv (i: short_conv::Inputs<&Tensor>, p: short_conv::Params<&Tensor>)
        (into: short_conv::Params<&Tensor>) -> short_conv::Grads<Tensor>;
    spectral Spectral (i: spectral::Inputs<&Tensor>, p: spectral::Params<&Tensor>)
        (plus: Option<&Tensor>, into: spectral::Params<&Tensor>) -> spectral::Grads<Tensor>;
}

/// Operations without an adjoint: their one method with its arguments.
macro_rules! direct {
    ($($module:ident $operation:ident $method:ident ($($a:ident: $A:ty),*) -> $result:ty;)*) => {$(
        impl $module::$operation for Gpu {
            fn $method(&self, $($a: $A),*) -> Result<$result> {
                each!(Gpu, self, d => $module::$operation::$method(d, $($a),*))
            }
        }
    )*};
}

direct! {
    adamw Adamw update (c: &adamw::Config, s: adamw::State<&Tensor>, x: adamw::Scalars<&Tensor>) -> ();
    ema Ema update (c: &ema::Config, i: ema::Inputs<&Tensor>) -> ();
    engram_hash EngramHash forward (c: &engram_hash::Config, i: engram_hash::Inputs<&Tensor>)
        -> engram_hash::Outputs<Tensor>;
    muon Muon update (c: &muon::Config, s: muon::State<&Tensor>, x: muon::Scalars<&Tensor>) -> ();
    record Record update (values: &[&Tensor], step: &Tensor, ring: &Tensor) -> ();
    retract Retract update (c: &retract::Config, factor: &Tensor, apply: &Tensor) -> retract::Outputs<Tensor>;
    retract_all RetractAll update (c: &retract_all::Config, params: &Tensor, apply: &Tensor)
        -> retract_all::Outputs<Tensor>;
    row_adam RowAdam update (
        c: &row_adam::Config, s: row_adam::State<&Tensor>, t: row_adam::Touched<&Tensor>, x: row_adam::Scalars<&Tensor>
    ) -> ();
    sanitise Sanitise update (c: &sanitise::Config, grads: &Tensor, losses: &Tensor, counters: &Tensor)
        -> sanitise::Outputs<Tensor>;
}
