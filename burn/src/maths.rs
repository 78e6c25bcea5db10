//! What several operations need of Burn's tensors.
//!
//! Burn's own sigmoid goes through `f32` on some backends, so it is spelled out here; its derivative is Burn's
//! business. An equation multiplies by the reciprocal of a number and does not divide by it: the derivative of Burn's
//! `div_scalar` rounds the reciprocal to `f32`.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;

/// A flat tensor as an array of rank `D`. (In Burn a zero in a shape stands for the old length, so an empty tensor is made
/// anew; nothing flows through it.)
pub fn shaped<A: Backend, const D: usize>(flat: Tensor<A, 1>, dims: [usize; D]) -> Tensor<A, D> {
    if dims.contains(&0) { Tensor::empty(dims, (&flat.device(), flat.dtype())) } else { flat.reshape(dims) }
}

/// All axes as one.
pub fn flat<A: Backend, const D: usize>(x: Tensor<A, D>) -> Tensor<A, 1> {
    let len = x.dims().iter().product::<usize>();
    if len == 0 { Tensor::empty([0], (&x.device(), x.dtype())) } else { x.reshape([len]) }
}

/// sigma(x) = 1 / (1 + e^(-x)).
pub fn sigmoid<A: Backend, const D: usize>(x: Tensor<A, D>) -> Tensor<A, D> {
    x.neg().exp().add_scalar(1.0).recip()
}

/// x sigma(x).
pub fn silu<A: Backend, const D: usize>(x: Tensor<A, D>) -> Tensor<A, D> {
    x.clone() * sigmoid(x)
}

/// x x.
pub fn square<A: Backend, const D: usize>(x: Tensor<A, D>) -> Tensor<A, D> {
    x.clone() * x
}

/// The one number of a tensor, on the host.
pub fn number<B: Backend, const D: usize>(x: Tensor<B, D>) -> f64 {
    x.into_data().iter::<f64>().next().expect("a sum or a maximum is one number")
}

/// The square root of the sum of squares.
pub fn norm<B: Backend, const D: usize>(x: Tensor<B, D>) -> f64 {
    number(square(x).sum()).sqrt()
}
