//! [`Lanes`]: a short vector of numbers that the compiler turns into the machine's own.
//!
//! A row of the state is a whole number of these, padded with zeros, so no loop over a row has a tail, and 64-byte
//! alignment keeps sixteen `f32` inside one cache line. Every function here is `inline(always)`: it is compiled into its
//! `multiversion`ed caller, for that caller's instruction set. The bits do not depend on the instruction set, since
//! each lane is computed alone, `mul_add` rounds once everywhere, and [`Lanes::sum`] adds in one order.

use crate::scalar::Scalar;

/// Numbers in a [`Lanes`]: sixteen `f32` fill the widest vector there is.
pub(super) const LANES: usize = 16;

/// Sixteen numbers.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Lanes<T>([T; LANES]);

impl<T: Scalar> Lanes<T> {
    /// Zero in every lane.
    #[inline(always)]
    pub fn zero() -> Self {
        Self([T::zero(); LANES])
    }

    /// The same number in every lane.
    #[inline(always)]
    pub fn all(x: T) -> Self {
        Self([x; LANES])
    }

    /// self * factor
    #[inline(always)]
    pub fn scale(mut self, factor: T) -> Self {
        for l in 0..LANES {
            self.0[l] *= factor;
        }
        self
    }

    /// self * x
    #[inline(always)]
    pub fn mul(mut self, x: Self) -> Self {
        for l in 0..LANES {
            self.0[l] *= x.0[l];
        }
        self
    }

    /// self + x * factor
    #[inline(always)]
    pub fn add_scaled(mut self, x: Self, factor: T) -> Self {
        for l in 0..LANES {
            self.0[l] = factor.mul_add(x.0[l], self.0[l]);
        }
        self
    }

    /// self + x * y
    #[inline(always)]
    pub fn add_product(mut self, x: Self, y: Self) -> Self {
        for l in 0..LANES {
            self.0[l] = x.0[l].mul_add(y.0[l], self.0[l]);
        }
        self
    }

    /// self + x
    #[inline(always)]
    pub fn add(mut self, x: Self) -> Self {
        for l in 0..LANES {
            self.0[l] += x.0[l];
        }
        self
    }

    /// self - x
    #[inline(always)]
    pub fn sub(mut self, x: Self) -> Self {
        for l in 0..LANES {
            self.0[l] -= x.0[l];
        }
        self
    }

    /// The lanes added up, in one order for every machine.
    #[inline(always)]
    pub fn sum(self) -> T {
        sum_four(quarter(self))
    }
}

/// Adds the upper three quarters of the lanes onto the first.
#[inline(always)]
fn quarter<T: Scalar>(Lanes(x): Lanes<T>) -> [T; 4] {
    let mut quarter = [T::zero(); 4];
    for l in 0..4 {
        quarter[l] = (x[l] + x[l + 4]) + (x[l + 8] + x[l + 12]);
    }
    quarter
}

#[inline(always)]
fn sum_four<T: Scalar>(x: [T; 4]) -> T {
    (x[0] + x[1]) + (x[2] + x[3])
}

/// [`Lanes::sum`] of each of four.
///
/// For speed alone, the compiler must see neither the caller's loop and the additions across lanes together, nor both
/// stages of those: it would shuffle all numbers into another order first, at several times the cost.
#[inline(never)]
pub(super) fn four_sums<T: Scalar>(lanes: &[Lanes<T>; 4]) -> [T; 4] {
    let [a, b, c, d] =
        std::hint::black_box([quarter(lanes[0]), quarter(lanes[1]), quarter(lanes[2]), quarter(lanes[3])]);
    [sum_four(a), sum_four(b), sum_four(c), sum_four(d)]
}

/// Lanes that hold `width` numbers.
pub(super) fn lanes_for(width: usize) -> usize {
    width.div_ceil(LANES)
}

/// Copies rows of `width` numbers into lanes, `[rows, width]` into `[lanes_for(width), rows]`: the lanes of one block
/// of columns lie together, first row to last, since most passes run down the columns.
#[inline(always)]
pub(super) fn load<T: Scalar>(values: &[T], width: usize, into: &mut [Lanes<T>]) {
    let rows = values.len() / width;
    for (n, row) in values.chunks_exact(width).enumerate() {
        for (j, x) in row.chunks(LANES).enumerate() {
            let lanes = &mut into[j * rows + n];
            match x.as_array::<LANES>() {
                Some(x) => lanes.0 = *x,
                None => {
                    *lanes = Lanes::zero();
                    lanes.0[..x.len()].copy_from_slice(x);
                }
            }
        }
    }
}

/// The inverse of [`load`].
#[inline(always)]
pub(super) fn store<T: Scalar>(lanes: &[Lanes<T>], width: usize, into: &mut [T]) {
    let rows = into.len() / width;
    for (n, row) in into.chunks_exact_mut(width).enumerate() {
        for (j, x) in row.chunks_mut(LANES).enumerate() {
            let lanes = &lanes[j * rows + n].0;
            match x.as_mut_array::<LANES>() {
                Some(x) => *x = *lanes,
                None => x.copy_from_slice(&lanes[..x.len()]),
            }
        }
    }
}
