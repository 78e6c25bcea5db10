//! [`Gpu`]: a [`Device`] whose runtime is chosen when the program runs.
//!
//! Whoever is generic over the runtime compiles every kernel's launch once per runtime, in its own crate. Behind this enum
//! they are compiled once, here. It adds nothing and holds no kernel, so fingerprints leave it out.

use std::collections::BTreeMap;

use dormouse_reference::{FactorFormat, Result, delegate_backend};

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

/// Keeps Mesa's device-select layer out of this process. Whenever adapters are listed it asks a display server which one
/// to prefer, and complains on standard error about `XDG_RUNTIME_DIR` where there is none; here an adapter is chosen by its
/// kind. Whoever has set the variable is left alone.
///
/// # Safety
/// No other thread may read or write the environment meanwhile: call it first in `main`.
pub unsafe fn keep_display_out() {
    const LAYER_IS_OFF: &str = "NODEVICE_SELECT";
    if std::env::var_os(LAYER_IS_OFF).is_none() {
        // SAFETY: the caller vouches that nobody else is at the environment.
        unsafe { std::env::set_var(LAYER_IS_OFF, "1") };
    }
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
        each!(Gpu, self, d => target(d))
    }

    /// [`Device::set_graphs`]
    pub fn set_graphs(&self, on: bool) {
        each!(Gpu, self, d => d.set_graphs(on));
    }

    /// [`Device::set_poison`]
    pub fn set_poison(&self, on: bool) {
        each!(Gpu, self, d => d.set_poison(on));
    }

    /// [`Device::set_reversed`]
    pub fn set_reversed(&self, on: bool) {
        each!(Gpu, self, d => d.set_reversed(on));
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

    /// [`Device::rounded_factor`]
    ///
    /// # Errors
    /// It is no tensor of floats, or has other axes than a factor.
    pub fn rounded_factor(&self, arm: Arm, format: FactorFormat, factor: &Tensor) -> Result<Tensor> {
        each!(Gpu, self, d => d.rounded_factor(arm, format, factor))
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

/// One call for each runtime; every operation alike.
macro_rules! on_device {
    ($self:ident, $d:ident => $call:expr) => {
        each!(Gpu, $self, $d => $call)
    };
    ($self:ident, $stem:ident, $pass:ident, $d:ident => $call:expr) => {
        each!(Gpu, $self, $d => $call)
    };
}

// What operations save is the same on every runtime: handles know none.
delegate_backend!(Gpu, Tensor, Device<Lavapipe>, on_device, on_device);
