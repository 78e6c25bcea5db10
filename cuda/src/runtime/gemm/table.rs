//! The committed table of measured algorithms.
//!
//! An algorithm is the library's own opaque description of one, eight words that NVIDIA documents as valid for the same
//! version of the library. A line names the GPU and the version it was measured with, and is not looked at on others.

use std::collections::HashMap;
use std::fmt;

use dormouse_reference::Precision;

use super::Call;
use crate::runtime::Error;

/// The committed lines.
const TEXT: &str = include_str!("../../gemm_table.tsv");

/// The library's description of an algorithm.
pub type Words = [u64; 8];

/// What an algorithm was measured for, as the first columns of a line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key(String);

impl Key {
    /// The key of a product. Strides are no part of it: the library checks whether an algorithm fits them.
    pub fn of(sm: u32, version: usize, call: &Call) -> Self {
        let precision = match call.precision {
            Precision::Full => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 if call.narrow => "bf16 stored",
            Precision::Bf16 => "bf16",
        };
        let stored = |transposed: bool| if transposed { "transposed" } else { "plain" };
        let Call { batch, m, k, n, a, b, added, .. } = call;
        let (a, b, added) = (stored(a.transposed), stored(b.transposed), added.word());
        Self(format!("{sm}\t{version}\t{precision}\t{batch}\t{m}\t{k}\t{n}\t{a}\t{b}\t{added}"))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An algorithm in a line.
pub fn word(words: &Words) -> String {
    words.map(|word| format!("{word:016x}")).join("-")
}

/// The committed table.
pub fn read() -> Result<HashMap<Key, Words>, Error> {
    parse(TEXT)
}

fn parse(text: &str) -> Result<HashMap<Key, Words>, Error> {
    let mut table = HashMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty()) {
        let fault = |reason: &str| Error::GemmTable { line: i + 1, reason: reason.to_owned() };
        let (key, algorithm) = line.rsplit_once('\t').ok_or_else(|| fault("there are no columns"))?;
        if key.split('\t').count() != 10 {
            return Err(fault("there are not 11 columns"));
        }
        let words: Result<Vec<u64>, _> = algorithm.split('-').map(|word| u64::from_str_radix(word, 16)).collect();
        let words = words.map_err(|_| fault("the algorithm is no list of hexadecimal words"))?;
        let words = Words::try_from(words).map_err(|_| fault("the algorithm has not 8 words"))?;
        if table.insert(Key(key.to_owned()), words).is_some() {
            return Err(fault("the product has two algorithms"));
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::super::{Added, Stored};
    use super::*;

    const CALL: Call = Call {
        precision: Precision::Tf32,
        narrow: false,
        batch: 2,
        m: 4096,
        k: 768,
        n: 64,
        a: Stored { transposed: false, row: 768, next: 0 },
        b: Stored { transposed: true, row: 768, next: 49152 },
        added: Added::Destination,
        out: Stored { transposed: false, row: 64, next: 262144 },
    };

    #[test]
    fn the_committed_table_can_be_read() {
        read().unwrap();
    }

    #[test]
    fn a_line_that_was_written_is_found_for_its_product_only() {
        let words = [1, 2, 3, u64::MAX, 5, 6, 7, 0];
        let key = Key::of(90, 130002, &CALL);
        let table = parse(&format!("# sm ..\n\n{key}\t{}\n", word(&words))).unwrap();
        assert_eq!(table.get(&key), Some(&words));
        assert_eq!(table.get(&Key::of(90, 130003, &CALL)), None);
        assert_eq!(table.get(&Key::of(90, 130002, &Call { precision: Precision::Full, ..CALL })), None);
        assert_eq!(table.get(&Key::of(90, 130002, &Call { added: Added::Nothing, ..CALL })), None);
    }

    #[test]
    fn a_wrong_line_is_named() {
        let key = Key::of(90, 130002, &CALL);
        let good = format!("{key}\t{}", word(&[0; 8]));
        for (text, expected) in [
            (format!("{key}\t12-zz"), "hexadecimal"),
            (format!("{key}\t12-13"), "8 words"),
            ("90\t1\t2".to_owned(), "11 columns"),
            (format!("{good}\n{good}"), "two algorithms"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
