//! Shape checks by symbol: bind `[B, T, H, K]` once, and every later argument that mentions `K` must agree.

use std::fmt::Write;

use crate::error::{Error, Result};

/// The symbols an operation's shapes are written in, bound to lengths as arguments are checked.
///
/// ```
/// use dormouse_reference::Dims;
/// let mut dims = Dims::new("kda::forward");
/// dims.bind("q", &[2, 64, 4, 16], &["B", "T", "H", "K"]).unwrap();
/// let error = dims.bind("beta", &[2, 64, 3], &["B", "T", "H"]).unwrap_err();
/// assert_eq!(error.to_string(), "kda::forward: `beta` is [2, 64, 3], expected [B, T, H] = [2, 64, 4] (H from `q`)");
/// ```
pub struct Dims {
    op: &'static str,
    bound: Vec<(&'static str, usize, &'static str)>,
}

impl Dims {
    /// Starts a check for `op` (such as `kda::forward`).
    pub fn new(op: &'static str) -> Self {
        Self { op, bound: Vec::new() }
    }

    /// Binds a symbol to a length that comes from elsewhere, such as a field of the config.
    pub fn set(&mut self, symbol: &'static str, len: usize, source: &'static str) {
        self.bound.push((symbol, len, source));
    }

    /// Checks `shape` of `arg` against `symbols`, binding those seen for the first time.
    pub fn bind(&mut self, arg: &'static str, shape: &[usize], symbols: &[&'static str]) -> Result<()> {
        if shape.len() != symbols.len() {
            return Err(self.mismatch(arg, shape, symbols));
        }
        // A symbol that appears twice in one shape binds at its first place and is checked at its second.
        let known = self.bound.len();
        for (&len, &symbol) in shape.iter().zip(symbols) {
            match self.bound.iter().find(|(s, ..)| *s == symbol) {
                Some(&(_, expected, _)) if expected != len => {
                    self.bound.truncate(known);
                    return Err(self.mismatch(arg, shape, symbols));
                }
                Some(_) => {}
                None => self.bound.push((symbol, len, arg)),
            }
        }
        Ok(())
    }

    /// The length bound to `symbol`.
    ///
    /// # Panics
    /// If nothing bound the symbol: a mistake in the operation, not in its arguments.
    pub fn get(&self, symbol: &str) -> usize {
        self.bound.iter().find(|(s, ..)| *s == symbol).expect("the operation binds its symbols before it reads them").1
    }

    /// Refuses a zero length of the given symbols (an empty batch or sequence is fine, an empty head is not).
    pub fn positive(&self, symbols: &[&str]) -> Result<()> {
        for &(symbol, len, arg) in &self.bound {
            if len == 0 && symbols.contains(&symbol) {
                return Err(Error::Shape { op: self.op, arg, expected: format!("{symbol} >= 1"), got: vec![len] });
            }
        }
        Ok(())
    }

    /// Checks the last axes of `shape` against `symbols` and binds the product of the axes before them to `rows`.
    ///
    /// Used by operations that treat every leading axis alike (`[.., D]`). All arguments of one call must have the
    /// same number of rows.
    pub fn bind_rows(
        &mut self,
        arg: &'static str,
        shape: &[usize],
        rows: &'static str,
        symbols: &[&'static str],
    ) -> Result<()> {
        let mut all = vec![rows];
        all.extend(symbols);
        if shape.len() < symbols.len() {
            return Err(self.mismatch(arg, shape, &all));
        }
        let split = shape.len() - symbols.len();
        let mut flat = vec![shape[..split].iter().product()];
        flat.extend(&shape[split..]);
        self.bind(arg, &flat, &all)
    }

    fn mismatch(&self, arg: &'static str, shape: &[usize], symbols: &[&'static str]) -> Error {
        let mut expected = format!("[{}]", symbols.join(", "));
        let lens: Vec<String> = symbols
            .iter()
            .map(|s| self.bound.iter().find(|(b, ..)| b == s).map_or_else(|| "any".to_owned(), |b| b.1.to_string()))
            .collect();
        if lens.iter().any(|l| l != "any") {
            let _ = write!(expected, " = [{}]", lens.join(", "));
        }
        let disagreeing = symbols.iter().enumerate().filter_map(|(i, s)| {
            let &(symbol, len, source) = self.bound.iter().find(|(b, ..)| b == s)?;
            (shape.len() != symbols.len() || shape[i] != len).then(|| format!("{symbol} from `{source}`"))
        });
        let sources: Vec<String> = disagreeing.collect();
        if !sources.is_empty() {
            let _ = write!(expected, " ({})", sources.join(", "));
        }
        Error::Shape { op: self.op, arg, expected, got: shape.to_vec() }
    }
}

/// `[E, .., D]` as `[E, N, D]`: the shape of a stack of rows, one stack for each expert.
pub fn stacked(shape: &[usize]) -> Vec<usize> {
    match shape {
        [first, middle @ .., last] => vec![*first, middle.iter().product(), *last],
        _ => shape.to_vec(),
    }
}

/// Refuses a tensor that is not one number.
///
/// # Errors
/// `Shape`.
pub fn check_one(op: &'static str, arg: &'static str, shape: &[usize]) -> Result<()> {
    if shape == [1] {
        return Ok(());
    }
    Err(Error::Shape { op, arg, expected: "[1]".to_owned(), got: shape.to_vec() })
}

/// Refuses buffers of which two are one allocation, as `same` tells: then an update would read what it has written.
///
/// # Errors
/// `Aliased`, which names both.
pub fn check_apart<T>(op: &'static str, buffers: &[(&'static str, T)], same: impl Fn(&T, &T) -> bool) -> Result<()> {
    for (i, (arg, buffer)) in buffers.iter().enumerate() {
        if let Some((other, _)) = buffers[..i].iter().find(|(_, other)| same(buffer, other)) {
            return Err(Error::Aliased { op, arg, other });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_use_binds_and_later_use_checks() {
        let mut dims = Dims::new("op::forward");
        dims.bind("x", &[3, 5], &["N", "D"]).unwrap();
        dims.bind("gain", &[5], &["D"]).unwrap();
        assert_eq!(dims.get("N"), 3);
        assert!(dims.bind("gain", &[4], &["D"]).is_err());
        assert!(dims.bind("gain", &[5, 1], &["D"]).is_err());
    }

    #[test]
    fn a_zero_head_is_refused_and_an_empty_batch_is_not() {
        let mut dims = Dims::new("op::forward");
        dims.bind("q", &[0, 7, 2, 0], &["B", "T", "H", "K"]).unwrap();
        assert_eq!(dims.positive(&["H", "K"]).unwrap_err().to_string(), "op::forward: `q` is [0], expected K >= 1");
        assert!(dims.positive(&["H"]).is_ok());
    }
}
