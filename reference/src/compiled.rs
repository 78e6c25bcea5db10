//! The operations for each number type, compiled in this crate once.
//!
//! A generic function is compiled again in every crate that uses it, and these are most of the code of the gates, of the
//! trainer and of every test program. One that is `#[inline(never)]` is taken from the crate of its definition if that
//! crate has compiled it for the same type; the backends here make it do so, and have no other use. A release build is of
//! one program with one number type and does without.

use crate::cpu::{Reference, Tensor};
use crate::delegate_backend;
use crate::scalar::Dual;

macro_rules! compiled {
    ($($name:ident $scalar:ty;)*) => {$(
        pub struct $name(pub Reference<$scalar>);

        delegate_backend!($name, Tensor<$scalar>, Reference<$scalar>, crate::to_field, crate::to_field);
    )*};
}

compiled! {
    OfF32 f32;
    OfF64 f64;
    OfDual Dual;
}
