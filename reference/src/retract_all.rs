//! `retract_all`: brings every spectral factor of a flat buffer back to orthonormal columns, in place, in one call.
//!
//! What happens to a factor is what [`retract`] says, its bounds and what lies beyond them included.
//! This is arm `batched` of the retraction: the table says where the factors are, factors with matrices of one shape are
//! a class, and a device runs a class at once. Calling [`retract`] factor by factor is arm `single`. On
//! the reference both do the same work and give the same bits.
//!
//! With `apply` = 0 nothing is written, and neither is an element outside every factor.

use std::ops::Range;

use ndarray::Array1;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::retract::{self, Retract};
use crate::sanitise::check_ranges;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Applications of the polynomial, at least 1. 4 bring a spread of 4 to orthonormal.
    pub iterations: usize,
    /// Steps of the power method, at least 1. 5 are enough for `iterations` = 4.
    pub power_iterations: usize,
    /// Who moves. The ranges are disjoint and inside the buffer.
    pub factors: Vec<Factor>,
}

/// Matrices of one shape that lie one behind another in the flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factor {
    /// The first element.
    pub start: usize,
    /// `[E, n, k]`, k <= n, row-major.
    pub shape: [usize; 3],
}

impl Factor {
    /// Its place in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.iter().product::<usize>()
    }
}

fields! {
    /// What comes out.
    pub struct Outputs {
        /// `[F]`, for each of the F factors the largest sigma_max / sigma_min of its matrices before the call.
        spreads
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `params` is not `[P]` or `apply` not `[1]`; `NotPersistent` if `params` is scratch; `Config` if a count is
/// 0, a factor has k > n or n or k of 0, or a factor leaves the buffer or overlaps another.
pub trait RetractAll: Tensors {
    /// Retracts every factor of the table in `params`, or nothing if `apply` (`[1]`) is 0: then every bit stays.
    fn update(&self, config: &Config, params: &Self::Tensor, apply: &Self::Tensor) -> Result<Outputs<Self::Tensor>>;
}

const OP: &str = "retract_all::update";

impl<T: Scalar> RetractAll for Reference<T> {
    #[inline(never)]
    fn update(&self, config: &Config, params: &Tensor<T>, apply: &Tensor<T>) -> Result<Outputs<Tensor<T>>> {
        let mut dims = Dims::new(OP);
        dims.bind("params", params.shape(), &["P"])?;
        check_config(config, dims.get("P"))?;
        self.read_one(OP, "apply", apply)?;
        if !self.is_persistent(params) {
            return Err(Error::NotPersistent { op: OP, arg: "params" });
        }
        let each = retract::Config { iterations: config.iterations, power_iterations: config.power_iterations };
        let mut spreads = Array1::zeros(config.factors.len());
        for class in classes(&config.factors) {
            for f in class {
                let Factor { start, shape } = &config.factors[f];
                let factor = self.view(params, *start, shape)?;
                let spread = Retract::update(self, &each, &factor, apply)?.spread;
                spreads[f] = self.read_one(OP, "spread", &spread)?;
            }
        }
        let shape = [config.factors.len()];
        Ok(Outputs { spreads: self.adopt(spreads, &shape) })
    }
}

impl<B: RetractAll> RetractAll for Checked<B> {
    fn update(&self, config: &Config, params: &B::Tensor, apply: &B::Tensor) -> Result<Outputs<B::Tensor>> {
        self.every(OP, "apply", apply, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        self.finite(OP, [("params", params)])?;
        self.0.update(config, params, apply)
    }
}

/// Refuses counts of 0, factors that cannot be orthonormal, and factors that leave a buffer of `len` elements or overlap.
///
/// # Errors
/// `Config` with the field that is wrong.
pub fn check_config(config: &Config, len: usize) -> Result<()> {
    for (field, count) in [("iterations", config.iterations), ("power_iterations", config.power_iterations)] {
        if count == 0 {
            return Err(Error::Config { op: OP, field, expected: "at least 1".to_owned(), got: "0".to_owned() });
        }
    }
    for Factor { shape, .. } in &config.factors {
        if !(1..=shape[1]).contains(&shape[2]) {
            return Err(Error::Config {
                op: OP,
                field: "factors.shape",
                expected: "[E, n, k] with 1 <= k <= n, since k columns of length n < k cannot be orthonormal"
                    .to_owned(),
                got: format!("{shape:?}"),
            });
        }
    }
    let ranges: Vec<Range<usize>> = config.factors.iter().map(Factor::range).collect();
    check_ranges(OP, "factors", ranges.iter(), len)
}

/// The factors by the shape of their matrices, as indices into the table: what one kernel of a device runs.
pub fn classes(factors: &[Factor]) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for (f, factor) in factors.iter().enumerate() {
        match classes.iter_mut().find(|class| factors[class[0]].shape[1..] == factor.shape[1..]) {
            Some(class) => class.push(f),
            None => classes.push(vec![f]),
        }
    }
    classes
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    use crate::tensor::DType;

    fn table() -> Config {
        let factor = |start, shape| Factor { start, shape };
        let factors = vec![factor(1, [2, 6, 3]), factor(40, [1, 4, 4]), factor(56, [1, 6, 3])];
        Config { iterations: 4, power_iterations: 5, factors }
    }

    fn wave<T: Scalar>(b: &Reference<T>) -> Tensor<T> {
        b.constant(Array1::from_shape_fn(75, |i| T::from_f64(((i * i) as f64 * 0.37).sin())).into_dyn())
    }

    /// Arm batched = arm single.
    #[test]
    fn all_at_once_has_the_bits_of_factor_by_factor() {
        let b = Reference::<f32>::new();
        let one = b.constant(array![1.0].into_dyn());
        let (together, apart) = (wave(&b), wave(&b));
        let spreads = RetractAll::update(&b, &table(), &together, &one).unwrap().spreads;
        let each = retract::Config { iterations: 4, power_iterations: 5 };
        for (f, Factor { start, shape }) in table().factors.iter().enumerate() {
            let factor = b.view(&apart, *start, shape).unwrap();
            let spread = Retract::update(&b, &each, &factor, &one).unwrap().spread;
            assert_eq!(b.download(&spread).unwrap()[0], b.download(&spreads).unwrap()[f]);
        }
        assert_eq!(b.download(&together).unwrap(), b.download(&apart).unwrap());
        assert_ne!(b.download(&together).unwrap(), b.download(&wave(&b)).unwrap());
    }

    #[test]
    fn a_class_is_a_shape() {
        assert_eq!(classes(&table().factors), [vec![0, 2], vec![1]]);
        assert_eq!(classes(&[]), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn a_skipped_call_and_elements_of_nobody_keep_every_bit() {
        let b = Reference::<f64>::new();
        let [zero, one] = [0.0, 1.0].map(|x| b.constant(array![x].into_dyn()));
        let x = wave(&b);
        let before = b.download(&x).unwrap();
        let spreads = RetractAll::update(&b, &table(), &x, &zero).unwrap().spreads;
        assert_eq!(b.download(&x).unwrap(), before);
        assert_eq!(b.download(&spreads).unwrap(), array![0.0, 0.0, 0.0].into_dyn());
        RetractAll::update(&b, &table(), &x, &one).unwrap();
        let after = b.download(&x).unwrap();
        for i in [0, 37, 38, 39, 74] {
            assert_eq!(after[i], before[i]);
        }
    }

    #[test]
    fn refusals() {
        let b = Reference::<f32>::new();
        let one = b.constant(array![1.0].into_dyn());
        let x = wave(&b);
        let message =
            |config: &Config, x: &Tensor<f32>| RetractAll::update(&b, config, x, &one).unwrap_err().to_string();
        let with = |start, shape| Config { factors: vec![Factor { start, shape }], ..table() };
        assert_eq!(
            message(&with(0, [1, 2, 3]), &x),
            "retract_all::update: config `factors.shape` is [1, 2, 3], expected [E, n, k] with 1 <= k <= n, since k \
             columns of length n < k cannot be orthonormal"
        );
        assert_eq!(
            message(&with(70, [1, 3, 2]), &x),
            "retract_all::update: config `factors` is 70..76, expected ranges inside the buffer of 75 elements"
        );
        assert_eq!(
            message(&Config { power_iterations: 0, ..table() }, &x),
            "retract_all::update: config `power_iterations` is 0, expected at least 1"
        );
        assert_eq!(
            message(&table(), &b.view(&x, 0, &[3, 25]).unwrap()),
            "retract_all::update: `params` is [3, 25], expected [P]"
        );
        assert_eq!(
            message(&table(), &b.scratch(&[75], DType::F32).unwrap()),
            "retract_all::update: `params` is scratch, expected a persistent tensor, since it must outlive the step"
        );
        assert_eq!(
            RetractAll::update(&b, &table(), &x, &x).unwrap_err().to_string(),
            "retract_all::update: `apply` is [75], expected [1]"
        );
    }
}
