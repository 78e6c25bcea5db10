//! `engram_hash`: row_n(p) = (h xor (h >> 32)) mod rows + j rows, h = FNV-1a of the length and the symbols of the last
//! n.
//!
//! Burn's whole numbers have 64 bits with a sign, and an overflow of theirs is a mistake, so h travels in two halves of
//! 32.

use burn_tensor::backend::Backend;
use burn_tensor::{Bool, Int, Tensor};
use dormouse_reference::engram_hash::{Config, EngramHash, Inputs, Outputs};
use dormouse_reference::{Error, Result};

use crate::handle::{Burn, Handle};
use crate::shapes::{check, config as option};

/// FNV's offset basis, its upper and its lower half.
const OFFSET: [i64; 2] = [0xcbf2_9ce4, 0x8422_2325];

/// FNV's prime is 2^40 + 435.
const PRIME_LOW: i64 = 435;

const HALF: i64 = 1 << 32;

/// A number of 64 bits without a sign for every position.
#[derive(Clone)]
struct Wide<B: Backend> {
    high: Tensor<B, 2, Int>,
    low: Tensor<B, 2, Int>,
}

impl<B: Backend> Wide<B> {
    /// (h xor x) * (2^40 + 435) mod 2^64 for x below 2^32.
    fn hashed(self, x: Tensor<B, 2, Int>) -> Self {
        let low = self.low.bitwise_xor(x);
        let product = low.clone().mul_scalar(PRIME_LOW);
        // 2^40 low is 2^8 low in the upper half; of the upper half's own 2^40 nothing is left.
        let high = self.high.mul_scalar(PRIME_LOW) + product.clone().div_scalar(HALF) + low.mul_scalar(256);
        Self { high: high.remainder_scalar(HALF), low: product.remainder_scalar(HALF) }
    }

    /// This where `keep` says so, else `other`.
    fn or(self, keep: &Tensor<B, 2, Bool>, other: Self) -> Self {
        Self { high: other.high.mask_where(keep.clone(), self.high), low: other.low.mask_where(keep.clone(), self.low) }
    }

    /// (h xor (h >> 32)) mod rows.
    fn folded(self, rows: i64) -> Tensor<B, 2, Int> {
        let low = self.low.bitwise_xor(self.high.clone());
        // rows < 2^32, so neither product nor sum leaves 63 bits.
        (self.high.remainder_scalar(rows).mul_scalar(HALF % rows) + low).remainder_scalar(rows)
    }
}

impl<B: Backend> EngramHash for Burn<B> {
    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<Outputs<Handle<B>>> {
        const OP: &str = "engram_hash::forward";
        let rows = config.rows;
        let most = u32::MAX as usize / 3;
        option(OP, "rows", (1..=most).contains(&rows), "from 1 to 2^32 / 3, since a row of the table is a u32", rows)?;
        let dims = check(OP, &inputs.clone().named(), |_| &["B", "T"])?;
        let (batch, time, rows) = (dims.get("B"), dims.get("T"), rows as i64);
        let mut symbols = self.peek_integers(OP, "ids", inputs.ids)?;
        if let Some(at) = symbols.iter().position(|&id| id > 256) {
            let (expected, got) = ("a byte, or 256 for a masked one".to_owned(), symbols[at] as f64);
            return Err(Error::Value { op: OP, arg: "ids", expected, got, index: vec![at / time, at % time] });
        }
        if let Some(mask) = inputs.mask {
            for (symbol, masked) in symbols.iter_mut().zip(self.peek(OP, "mask", mask)?) {
                *symbol = if masked == 0.0 { *symbol } else { 256 };
            }
        }
        let shape = [batch, time, 3];
        if symbols.is_empty() {
            return Ok(Outputs { rows: self.scratch_of_integers(Vec::new(), &shape) });
        }
        let symbols = self.integers_of(symbols).reshape([batch, time]);
        let place = self.integers_of((0..time as i64).collect()).reshape([1, time]).expand([batch, time]);
        let mut all = Vec::new();
        for (j, order) in [2i64, 3, 4].into_iter().enumerate() {
            let length = place.clone().add_scalar(1).clamp_max(order);
            let start = |half: usize| symbols.zeros_like().add_scalar(OFFSET[half]);
            let mut h = Wide { high: start(0), low: start(1) }.hashed(length);
            for back in (0..order).rev() {
                // The symbol `back` places before each position; where there is none the hash stays as it is.
                let before = symbols.clone().roll_dim(-back, 1);
                let there = place.clone().greater_equal_elem(back);
                h = h.clone().hashed(before).or(&there, h);
            }
            all.push(h.folded(rows).add_scalar(j as i64 * rows).reshape([batch, time, 1]));
        }
        let rows = Tensor::cat(all, 2).into_data().iter::<i64>().collect();
        Ok(Outputs { rows: self.scratch_of_integers(rows, &shape) })
    }
}
