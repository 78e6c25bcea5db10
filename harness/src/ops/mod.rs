//! One description per operation, under its stem.

use dormouse_reference::{Dual, Reference};

use crate::description::OperationOn;

pub mod adamw;
pub mod blend;
pub mod controller;
pub mod cross_entropy;
pub mod decay_gate;
pub mod ema;
pub mod embedding;
pub mod engram;
pub mod engram_hash;
pub mod expert;
pub mod gated_rms_norm;
pub mod jepa;
pub mod kda;
pub mod koleo;
pub mod l2_norm;
pub mod layer_norm;
pub mod linear;
pub mod mask_vector;
pub mod muon;
pub mod record;
pub mod residual;
pub mod retract;
pub mod retract_all;
pub mod rms_norm;
mod rounding;
pub mod row_adam;
pub mod sanitise;
pub mod short_conv;
pub mod spectral;

/// Something to do with every operation's description.
pub trait Visitor {
    /// Called once per operation, in alphabetical order of stems.
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>;
}

/// Walks all operations.
pub fn visit_all(visitor: &mut impl Visitor) {
    visitor.visit::<adamw::AdamwOp>();
    visitor.visit::<blend::BlendOp>();
    visitor.visit::<controller::ControllerOp>();
    visitor.visit::<cross_entropy::CrossEntropyOp>();
    visitor.visit::<decay_gate::DecayGateOp>();
    visitor.visit::<ema::EmaOp>();
    visitor.visit::<embedding::EmbeddingOp>();
    visitor.visit::<engram::EngramOp>();
    visitor.visit::<engram_hash::EngramHashOp>();
    visitor.visit::<expert::ExpertOp>();
    visitor.visit::<gated_rms_norm::GatedRmsNormOp>();
    visitor.visit::<jepa::JepaOp>();
    visitor.visit::<kda::KdaOp>();
    visitor.visit::<koleo::KoleoOp>();
    visitor.visit::<l2_norm::L2NormOp>();
    visitor.visit::<layer_norm::LayerNormOp>();
    visitor.visit::<linear::LinearOp>();
    visitor.visit::<mask_vector::MaskVectorOp>();
    visitor.visit::<muon::MuonOp>();
    visitor.visit::<record::RecordOp>();
    visitor.visit::<residual::ResidualOp>();
    visitor.visit::<retract::RetractOp>();
    visitor.visit::<retract_all::RetractAllOp>();
    visitor.visit::<rms_norm::RmsNormOp>();
    visitor.visit::<row_adam::RowAdamOp>();
    visitor.visit::<sanitise::SanitiseOp>();
    visitor.visit::<short_conv::ShortConvOp>();
    visitor.visit::<spectral::SpectralOp>();
}
