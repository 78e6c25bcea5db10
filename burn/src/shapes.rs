//! Checks of shapes and configs that every operation makes before Burn, which would panic, sees its arguments.

use std::ops::Range;

use burn_tensor::backend::Backend;
use dormouse_reference::{Dims, Error, Precision, Result};

use crate::handle::Handle;

/// The leading axes of an operation that treats them all as rows; their product is bound to `N`.
pub const ROWS: &str = "..";

/// Checks every argument against the symbols that `symbols` gives for its name.
pub fn check<B: Backend>(
    op: &'static str,
    args: &[(&'static str, &Handle<B>)],
    symbols: impl Fn(&str) -> &'static [&'static str],
) -> Result<Dims> {
    let mut dims = Dims::new(op);
    for (name, tensor) in args {
        match symbols(name) {
            [ROWS, rest @ ..] => dims.bind_rows(name, tensor.shape(), "N", rest)?,
            all => dims.bind(name, tensor.shape(), all)?,
        }
    }
    Ok(dims)
}

/// `like` with another last axis.
pub fn with_last(like: &[usize], last: usize) -> Vec<usize> {
    let mut shape = like.to_vec();
    if let Some(end) = shape.last_mut() {
        *end = last;
    }
    shape
}

/// Refuses a value of the config.
pub fn config(op: &'static str, field: &'static str, good: bool, expected: &str, got: impl ToString) -> Result<()> {
    if good {
        return Ok(());
    }
    Err(Error::Config { op, field, expected: expected.to_owned(), got: got.to_string() })
}

/// Refuses an eps that lets something divide by zero or leaves nothing of what it is added to.
pub fn small(op: &'static str, field: &'static str, eps: f64) -> Result<()> {
    config(op, field, eps > 0.0 && eps.is_finite(), "greater than zero", eps)
}

/// Refuses anything but `[1]`.
pub fn number<B: Backend>(op: &'static str, arg: &'static str, tensor: &Handle<B>) -> Result<()> {
    if *tensor.shape() == [1] {
        return Ok(());
    }
    Err(Error::Shape { op, arg, expected: "[1]".to_owned(), got: tensor.shape().to_vec() })
}

/// Refuses rounded operands: an oracle computes in full precision.
pub fn full(op: &'static str, precision: Precision) -> Result<()> {
    let good = precision == Precision::Full;
    config(op, "precision", good, "Full, since an oracle rounds no operands", format!("{precision:?}"))
}

/// Refuses ranges that leave a buffer of `len` elements or overlap.
pub fn ranges(op: &'static str, field: &'static str, ranges: &[Range<usize>], len: usize) -> Result<()> {
    let mut sorted: Vec<_> = ranges.iter().filter(|r| !r.is_empty()).map(|r| (r.start, r.end)).collect();
    sorted.sort_unstable();
    let inside = ranges.iter().all(|r| r.start <= r.end && r.end <= len);
    let apart = sorted.windows(2).all(|pair| pair[0].1 <= pair[1].0);
    let expected = format!("ranges inside the buffer of {len} elements that do not overlap");
    config(op, field, inside && apart, &expected, format!("{ranges:?}"))
}

/// Refuses two arguments of an operation in place that are one allocation.
pub fn apart<B: Backend>(op: &'static str, args: &[(&'static str, &Handle<B>)]) -> Result<()> {
    for (n, (arg, tensor)) in args.iter().enumerate() {
        if let Some((other, _)) = args[..n].iter().find(|(_, earlier)| earlier.shares_allocation(tensor)) {
            return Err(Error::Aliased { op, arg, other });
        }
    }
    Ok(())
}

/// An argument that an operation needs is absent.
pub fn absent(op: &'static str) -> impl Fn(&'static str) -> Error {
    move |arg| Error::Presence { op, arg, expected: "present because the operation needs it", got: "absent" }
}
