//! [`Backend`]: the sum of all operations that devices have; [`WholeBackend`]: of all operations.

use crate::adamw::Adamw;
use crate::blend::Blend;
use crate::controller::Controller;
use crate::cross_entropy::CrossEntropy;
use crate::decay_gate::DecayGate;
use crate::ema::Ema;
use crate::embedding::Embedding;
use crate::expert::Expert;
use crate::gated_rms_norm::GatedRmsNorm;
use crate::kda::Kda;
use crate::l2_norm::L2Norm;
use crate::linear::Linear;
use crate::muon::Muon;
use crate::record::Record;
use crate::residual::Residual;
use crate::retract::Retract;
use crate::retract_all::RetractAll;
use crate::rms_norm::RmsNorm;
use crate::sanitise::Sanitise;
use crate::short_conv::ShortConv;
use crate::spectral::Spectral;

macro_rules! backend {
    ($($operation:ident)*) => {
        /// Every operation a model and its optimiser need. Whoever implements them all is a backend.
        pub trait Backend: $($operation +)* {}

        impl<B: $($operation +)*> Backend for B {}
    };
}

backend! {
    Adamw Blend Controller CrossEntropy DecayGate Embedding Expert GatedRmsNorm Kda L2Norm Linear Record Residual
    Retract RmsNorm Sanitise ShortConv Spectral
}

macro_rules! whole_backend {
    ($($operation:ident)*) => {
        /// What the whole model and its optimiser need: [`Backend`], and the operations that have no kernels on devices
        /// yet. Once they have, this becomes [`Backend`].
        pub trait WholeBackend: Backend $(+ $operation)* {}

        impl<B: Backend $(+ $operation)*> WholeBackend for B {}
    };
}

whole_backend! {
    Ema Muon RetractAll
}
