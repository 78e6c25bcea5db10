//! `engram_hash`: which rows of the n-gram table belong to every position.
//!
//! ```text
//! key_n(p) = the last min(n, p + 1) symbols up to position p of the sequence, n = 2, 3, 4
//! h        = FNV-1a over (length of the key, its symbols, oldest first), 64 bits:
//!            h <- 14695981039346656037; for each x: h <- (h xor x) * 1099511628211 mod 2^64
//! row_n(p) = (h xor (h >> 32)) mod rows + j rows, j = 0, 1, 2 the index of order n
//! ```
//!
//! A symbol is a byte, or 256 where the byte is masked: a masked byte must not be seen, and must not look like any byte.
//! FNV-1a mixes it in whole, so keys without masked symbols hash as their bytes do. A key at the start of a sequence is
//! shorter, and its length is hashed, so that it has rows of its own. Rows are whole numbers and exact on every backend;
//! there is no gradient.
//!
//! The host does the same with the pure functions [`rows`], [`order`] and [`compact`]: the data worker hashes the next
//! batch while a step runs. Sorting belongs to the host alone: [`order`] is what the adjoint of `engram` and the optimiser
//! `row_adam` read, so that each row is summed once, by one thread, in one order.
//!
//! Source: the hash by Fowler, Noll and Vo, draft-eastlake-fnv.

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// The lengths of the keys.
pub const ORDERS: [usize; 3] = [2, 3, 4];

/// How many symbols before a position its keys can reach: what a reader that goes on must carry.
pub const CONTEXT: usize = ORDERS[ORDERS.len() - 1] - 1;

/// The symbol of a masked byte.
pub const MASKED: u32 = 256;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of one order; the table has three times as many. From 1 to 2^32 / 3.
    pub rows: usize,
}

fields! {
    /// What is hashed.
    pub struct Inputs {
        /// `[B, T]`, stored as `u8` or `u32`: bytes, or 256.
        ids;
        optional
        /// `[B, T]`: 1 where the byte is masked, else 0.
        mask
    }
}

fields! {
    /// What comes out.
    pub struct Outputs {
        /// `[B, T, 3]` of `u32`: rows of the table.
        rows
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `ids` is not `[B, T]` or `mask` not shaped alike; `Storage` if `ids` are not integers; `Config` if `rows` is
/// out of range; `Value` for an id above 256 (a device backend leaves that check to [`Checked`]).
pub trait EngramHash: Tensors {
    /// The rows of every position.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<Outputs<Self::Tensor>>;
}

impl<T: Scalar> EngramHash for Reference<T> {
    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<Outputs<Tensor<T>>> {
        let [batch, tokens] = check(config, inputs.clone().map(|_, x| x.shape()))?;
        let mut symbols = self.read_ids(OP, "ids", inputs.ids)?;
        if let Some(at) = symbols.iter().position(|&id| id > MASKED) {
            let index = vec![at / tokens, at % tokens];
            return Err(Error::Value {
                op: OP,
                arg: "ids",
                expected: SYMBOLS.to_owned(),
                got: f64::from(symbols[at]),
                index,
            });
        }
        if let Some(mask) = inputs.mask {
            for (symbol, masked) in symbols.iter_mut().zip(self.read_mask(OP, "mask", mask)?) {
                *symbol = if masked { MASKED } else { *symbol };
            }
        }
        let all = if tokens == 0 {
            Vec::new()
        } else {
            symbols.chunks(tokens).flat_map(|sequence| rows(sequence, config.rows)).flatten().collect()
        };
        Ok(Outputs { rows: self.adopt_ids(all, &[batch, tokens, ORDERS.len()]) })
    }
}

impl<B: EngramHash> EngramHash for Checked<B> {
    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<Outputs<B::Tensor>> {
        self.every(OP, "ids", inputs.ids, SYMBOLS, |id| id <= f64::from(MASKED))?;
        if let Some(mask) = inputs.mask {
            self.every(OP, "mask", mask, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        }
        self.0.forward(config, inputs)
    }
}

const OP: &str = "engram_hash::forward";

const SYMBOLS: &str = "a byte, or 256 for a masked one";

/// Refuses a config or shapes that do not fit; gives B and T. For backends of their own.
///
/// # Errors
/// `Config` if `rows` is out of range; `Shape` if `ids` is not `[B, T]` or `mask` not shaped alike.
pub fn check(config: &Config, shapes: Inputs<&[usize]>) -> Result<[usize; 2]> {
    if config.rows == 0 || config.rows > u32::MAX as usize / ORDERS.len() {
        return Err(Error::Config {
            op: OP,
            field: "rows",
            expected: "from 1 to 2^32 / 3, since a row of the table is a u32".to_owned(),
            got: config.rows.to_string(),
        });
    }
    let mut dims = Dims::new(OP);
    dims.bind("ids", shapes.ids, &["B", "T"])?;
    if let Some(mask) = shapes.mask {
        dims.bind("mask", mask, &["B", "T"])?;
    }
    Ok([dims.get("B"), dims.get("T")])
}

/// The rows of every position of one sequence of symbols, for `rows` rows an order.
///
/// A reader that goes on in a sequence hashes the last [`CONTEXT`] symbols (or all, if it has read fewer) again before the
/// new ones, and drops the rows of the old.
pub fn rows(symbols: &[u32], rows: usize) -> Vec<[u32; ORDERS.len()]> {
    let rows = rows as u64;
    let row = |at: usize, index: usize| {
        let key = &symbols[(at + 1).saturating_sub(ORDERS[index])..=at];
        let h = fnv1a(std::iter::once(key.len() as u32).chain(key.iter().copied()));
        ((h ^ (h >> 32)) % rows + index as u64 * rows) as u32
    };
    (0..symbols.len()).map(|at| std::array::from_fn(|index| row(at, index))).collect()
}

fn fnv1a(symbols: impl Iterator<Item = u32>) -> u64 {
    symbols.fold(14_695_981_039_346_656_037, |h, x| (h ^ u64::from(x)).wrapping_mul(1_099_511_628_211))
}

/// The places of `rows` sorted by row, and by place within a row: equal rows lie side by side, first to last.
///
/// # Panics
/// From 2^32 rows on: a batch is far smaller.
pub fn order(rows: &[u32]) -> Vec<u32> {
    let len = u32::try_from(rows.len()).expect("a batch has fewer than 2^32 rows");
    // Row and place in one number: no ties, so an unstable sort has one result, and no look-up while sorting.
    let mut keys: Vec<u64> = rows.iter().zip(0..len).map(|(&row, at)| u64::from(row) << 32 | u64::from(at)).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| key as u32).collect()
}

/// The rows of a batch as a small table of its own: what travels when the table is elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compact {
    /// Every row of the batch once, ascending.
    pub unique: Vec<u32>,
    /// For every place of the batch, where its row is in `unique`.
    pub slots: Vec<u32>,
}

/// Names the rows by their rank. The ranks sort as the rows do, so `order` is the order of both, and every sum over the
/// small table has the bits of the sum over the large one.
pub fn compact(rows: &[u32], order: &[u32]) -> Compact {
    let mut compact = Compact { unique: Vec::new(), slots: vec![0; rows.len()] };
    for &at in order {
        let row = rows[at as usize];
        if compact.unique.last() != Some(&row) {
            compact.unique.push(row);
        }
        compact.slots[at as usize] = (compact.unique.len() - 1) as u32;
    }
    compact
}

/// Refuses an `order` that is not [`order`] of `rows`; operations call it before they sum by segments.
pub(crate) fn check_order(op: &'static str, rows: &[u32], order: &[u32]) -> Result<()> {
    let fault = |at: usize| Error::Value {
        op,
        arg: "order",
        expected: "the places of `rows` sorted by row, and by place within a row".to_owned(),
        got: f64::from(order[at]),
        index: vec![at],
    };
    let key = |at: usize| rows.get(order[at] as usize).map(|&row| (row, order[at]));
    for at in 0..order.len() {
        // As many places as rows, all inside and strictly ascending: so every place comes up exactly once.
        if key(at).is_none() || (at > 0 && key(at) <= key(at - 1)) {
            return Err(fault(at));
        }
    }
    Ok(())
}

/// The runs of equal rows of a checked `order`: each row with its places, first to last.
pub(crate) fn segments<'a>(rows: &'a [u32], order: &'a [u32]) -> impl Iterator<Item = (usize, &'a [u32])> {
    order
        .chunk_by(|&a, &b| rows[a as usize] == rows[b as usize])
        .map(|places| (rows[places[0] as usize] as usize, places))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use ndarray::{ArrayD, array};

    #[test]
    fn the_hash_is_fnv1a() {
        let of = |text: &str| fnv1a(text.bytes().map(u32::from));
        // From the tables of the hash's authors.
        assert_eq!(of(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(of("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(of("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_row_is_the_folded_hash_of_length_and_symbols() {
        let got = rows(&[97, 98, 256], 1000);
        let want = |key: &[u32], index: u64| {
            let h = fnv1a(std::iter::once(key.len() as u32).chain(key.iter().copied()));
            ((h ^ (h >> 32)) % 1000 + 1000 * index) as u32
        };
        assert_eq!(got[0], [want(&[97], 0), want(&[97], 1), want(&[97], 2)]);
        assert_eq!(got[1], [want(&[97, 98], 0), want(&[97, 98], 1), want(&[97, 98], 2)]);
        assert_eq!(got[2], [want(&[98, 256], 0), want(&[97, 98, 256], 1), want(&[97, 98, 256], 2)]);
        assert!(rows(&[], 5).is_empty());
        assert_eq!(rows(&[1, 2], 1), [[0, 1, 2]; 2]);
    }

    #[test]
    fn rows_spread_over_the_table_no_worse_than_random_numbers() {
        // 4096 random keys in 4096 rows would leave 1/e of the rows empty, with a standard error of 0.6 %.
        let mut hit = vec![false; 4096];
        for key in 0..4096u32 {
            hit[rows(&[key / 64, key % 64], 4096)[1][0] as usize] = true;
        }
        let empty = hit.iter().filter(|hit| !**hit).count() as f64 / 4096.0;
        assert!(empty < (-1f64).exp() + 0.02, "{empty}");
    }

    #[test]
    fn order_and_compact_name_every_row_once() {
        let rows = [7, 3, 7, 9, 3, 3];
        let order = order(&rows);
        assert_eq!(order, [1, 4, 5, 0, 2, 3]);
        let compact = compact(&rows, &order);
        assert_eq!(compact, Compact { unique: vec![3, 7, 9], slots: vec![1, 0, 1, 2, 0, 0] });
        assert_eq!(super::order(&compact.slots), order);
        let runs: Vec<_> = segments(&rows, &order).map(|(row, places)| (row, places.to_vec())).collect();
        assert_eq!(runs, [(3, vec![1, 4, 5]), (7, vec![0, 2]), (9, vec![3])]);
        check_order("op", &rows, &order).unwrap();
        for bad in [[1, 4, 5, 2, 0, 3], [1, 4, 4, 0, 2, 3], [1, 4, 5, 0, 2, 6], [0, 1, 2, 3, 4, 5]] {
            assert!(check_order("op", &rows, &bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn reading_on_gives_the_rows_of_the_whole() {
        let symbols: Vec<u32> = (0..40).map(|i| i * 37 % 257).collect();
        let whole = rows(&symbols, 32_768);
        for split in 0..symbols.len() {
            let from = split.saturating_sub(CONTEXT);
            assert_eq!(rows(&symbols[from..], 32_768)[split - from..], whole[split..], "{split}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f32>::new();
        let ids = |values: ArrayD<f64>| {
            let tensor = b.persistent(values.shape(), DType::U32).unwrap();
            b.upload(values.view(), &tensor).unwrap();
            tensor
        };
        let good = ids(array![[1.0, 2.0]].into_dyn());
        let forward = |rows: usize, ids: &Tensor<f32>, mask: Option<&Tensor<f32>>| {
            EngramHash::forward(&b, &Config { rows }, Inputs { ids, mask }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(5, &ids(array![[1.0, 2.0], [256.0, 257.0]].into_dyn()), None),
            "engram_hash::forward: `ids`[1, 1] is 257, expected a byte, or 256 for a masked one"
        );
        assert_eq!(
            forward(5, &ids(array![1.0].into_dyn()), None),
            "engram_hash::forward: `ids` is [1], expected [B, T]"
        );
        assert_eq!(
            forward(0, &good, None),
            "engram_hash::forward: config `rows` is 0, expected from 1 to 2^32 / 3, since a row of the table is a u32"
        );
        let mask = b.persistent(&[1, 3], DType::F32).unwrap();
        assert_eq!(
            forward(5, &good, Some(&mask)),
            "engram_hash::forward: `mask` is [1, 3], expected [B, T] = [1, 2] (T from `ids`)"
        );
        let floats = b.persistent(&[1, 2], DType::F32).unwrap();
        assert_eq!(forward(5, &floats, None), "engram_hash::forward: `ids` is stored as f32, expected u8 or u32");
        let empty = ids(ndarray::Array2::zeros((3, 0)).into_dyn());
        let out = EngramHash::forward(&b, &Config { rows: 5 }, Inputs { ids: &empty, mask: None }).unwrap();
        assert_eq!(out.rows.shape(), [3, 0, 3]);
    }
}
