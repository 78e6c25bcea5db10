//! [`Backend`]: the sum of all operations that devices have; [`WholeBackend`]: of all operations.

use crate::adamw::Adamw;
use crate::blend::Blend;
use crate::controller::Controller;
use crate::cross_entropy::CrossEntropy;
use crate::decay_gate::DecayGate;
use crate::ema::Ema;
use crate::embedding::Embedding;
use crate::engram::Engram;
use crate::engram_hash::EngramHash;
use crate::expert::Expert;
use crate::gated_rms_norm::GatedRmsNorm;
use crate::jepa::Jepa;
use crate::kda::Kda;
use crate::koleo::Koleo;
use crate::l2_norm::L2Norm;
use crate::layer_norm::LayerNorm;
use crate::linear::Linear;
use crate::mask_vector::MaskVector;
use crate::muon::Muon;
use crate::record::Record;
use crate::residual::Residual;
use crate::retract::Retract;
use crate::retract_all::RetractAll;
use crate::rms_norm::RmsNorm;
use crate::row_adam::RowAdam;
use crate::sanitise::Sanitise;
use crate::short_conv::ShortConv;
use crate::spectral::Spectral;

macro_rules! backend {
    ($(#[$meta:meta])* $name:ident: $first:ident $($operation:ident)*) => {
        $(#[$meta])*
        pub trait $name: $first $(+ $operation)* {}

        impl<B: $first $(+ $operation)*> $name for B {}
    };
}

backend! {
    /// Every operation a model and its optimiser need. Whoever implements them all is a backend.
    Backend:
    Adamw Blend Controller CrossEntropy DecayGate Embedding Expert GatedRmsNorm Kda L2Norm Linear Record Residual
    Retract RmsNorm Sanitise ShortConv Spectral
}

backend! {
    /// What the whole model and its optimiser need: [`Backend`], and the operations that have no kernels on devices yet.
    /// Once they have, this becomes [`Backend`].
    WholeBackend:
    Backend
    Ema Engram EngramHash Jepa Koleo LayerNorm MaskVector Muon RetractAll RowAdam
}
