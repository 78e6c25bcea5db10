//! [`Backend`]: the sum of all operations.

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
    ($($operation:ident)*) => {
        /// Every operation a model and its optimiser need. Whoever implements them all is a backend.
        pub trait Backend: $($operation +)* {}

        impl<B: $($operation +)*> Backend for B {}
    };
}

backend! {
    Adamw Blend Controller CrossEntropy DecayGate Ema Embedding Engram EngramHash Expert GatedRmsNorm Jepa Kda Koleo
    L2Norm LayerNorm Linear MaskVector Muon Record Residual Retract RetractAll RmsNorm RowAdam Sanitise ShortConv Spectral
}
