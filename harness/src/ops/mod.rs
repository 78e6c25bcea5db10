//! One description per operation, under its stem.

use dormouse_reference::{Dual, Reference};

use crate::description::OperationOn;

pub mod cross_entropy;
pub mod embedding;
pub mod kda;
pub mod l2_norm;
pub mod linear;
pub mod rms_norm;

/// Something to do with every operation's description.
pub trait Visitor {
    /// Called once per operation, in alphabetical order of stems.
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>;
}

/// Walks all operations.
pub fn visit_all(visitor: &mut impl Visitor) {
    visitor.visit::<embedding::EmbeddingOp>();
    visitor.visit::<kda::KdaOp>();
    visitor.visit::<l2_norm::L2NormOp>();
    visitor.visit::<linear::LinearOp>();
    visitor.visit::<cross_entropy::CrossEntropyOp>();
    visitor.visit::<rms_norm::RmsNormOp>();
}
