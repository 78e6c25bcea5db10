//! The oracle in `f64`, compiled in this crate once, as `dormouse_reference::compiled` is.

use burn_ndarray::NdArray;
use dormouse_reference::{delegate_backend, to_field};

use crate::Cpu64;
use crate::handle::Handle;

pub struct OfF64(pub Cpu64);

delegate_backend!(OfF64, Handle<NdArray<f64>>, Cpu64, to_field, to_field);
