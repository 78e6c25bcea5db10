//! Values that tests of sizes are made of.

use dormouse_reference::Tensors;
use ndarray::{Array, ArrayD, IxDyn};

/// Values without a pattern between -1 and 1, which f32 holds exactly.
pub fn values(shape: &[usize], seed: u64) -> ArrayD<f64> {
    let mut state = seed;
    Array::from_shape_simple_fn(IxDyn(shape), || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 44) as f64 / f64::from(1 << 19) - 1.0
    })
}

/// A tensor that outlives a step and holds `values`.
pub fn put<B: Tensors>(b: &B, values: &ArrayD<f64>) -> B::Tensor {
    let tensor = b.persistent(values.shape(), b.float()).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}
