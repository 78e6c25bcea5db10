//! One description per operation, under its stem.

use dormouse_reference::{Dual, Reference};

use crate::description::OperationOn;

pub mod blend;
pub mod controller;
pub mod expert;
pub mod residual;
pub mod rms_norm;
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
    visitor.visit::<blend::BlendOp>();
    visitor.visit::<controller::ControllerOp>();
    visitor.visit::<expert::ExpertOp>();
    visitor.visit::<residual::ResidualOp>();
    visitor.visit::<rms_norm::RmsNormOp>();
    visitor.visit::<spectral::SpectralOp>();
}
