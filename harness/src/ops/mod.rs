//! One description per operation, under its stem.

use dormouse_reference::{Dual, Reference};

use crate::description::OperationOn;

pub mod adamw;
pub mod cross_entropy;
pub mod record;
pub mod retract;
pub mod rms_norm;
pub mod sanitise;

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
    visitor.visit::<cross_entropy::CrossEntropyOp>();
    visitor.visit::<record::RecordOp>();
    visitor.visit::<retract::RetractOp>();
    visitor.visit::<rms_norm::RmsNormOp>();
    visitor.visit::<sanitise::SanitiseOp>();
}
