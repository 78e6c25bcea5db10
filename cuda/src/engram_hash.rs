//! `engram_hash`: the equations are in `dormouse_reference::engram_hash`.
//!
//! The hash has 64 bits, and not every device has whole numbers of that size: here it is two words. Its product with
//! the prime 2^40 + 435 is put together from halves of the lower word, and its remainder is taken digit by digit, as on
//! paper, with digits so small that nothing exceeds a word. Everything is exact, so both arms have the rows of the
//! reference.
//!
//! Arm `plain` has one unit a key and takes the remainder bit by bit. Arm `fused` has one unit a position, which reads
//! its symbols once for its three keys, and takes as large digits as the number of rows allows: one launch that reads
//! `ids` and `mask` once and writes `rows` once.
//!
//! The host does not look at ids. One above 256 is hashed as it is, and has rows of the table like any other symbol.

use cubecl::prelude::*;
use dormouse_reference::engram_hash::{Config, EngramHash, Inputs, MASKED, ORDERS, Outputs, check};
use dormouse_reference::{DType, Result, Tensors};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::embedding::check_ids;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};

const STEM: &str = "engram_hash";

const OP: &str = "engram_hash::forward";

/// Numbered from 1 in the kernel.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("oldest-symbol-missed"),
    Mutant::fused("length-not-hashed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("not-folded"),
    Mutant::fused("mask-dropped"),
    Mutant::fused("reaches-into-the-sequence-before"),
    Mutant::fused("product-without-carry"),
];

/// Keys of a position.
const KEYS: usize = ORDERS.len();

/// The longest key.
const LONGEST: usize = ORDERS[KEYS - 1];

// The kernels take the length of key `j` as that of the first one plus `j`.
const _: () = assert!(ORDERS[1] == ORDERS[0] + 1 && LONGEST == ORDERS[0] + KEYS - 1);

/// The two words of the number that the hash starts with, 14695981039346656037.
const START: [u32; 2] = [0x8422_2325, 0xcbf2_9ce4];

/// The prime less 2^40.
const PRIME: u32 = 435;

/// How a mask is stored; a number to the kernels.
const NO_MASK: u32 = 0;
const WHOLE_MASK: u32 = 1;
const REAL_MASK: u32 = 2;

/// One call, checked.
struct Call<'a> {
    ids: &'a Tensor,
    /// `ids` where there is none.
    mask: &'a Tensor,
    /// [`NO_MASK`], [`WHOLE_MASK`] or [`REAL_MASK`].
    mask_kind: u32,
    out: &'a Tensor,
    positions: usize,
    tokens: usize,
    /// Rows of one order.
    rows: usize,
}

/// The symbol of position `n`: its id, or 256 where it is masked.
#[cube]
fn symbol(ids: &Words, mask: &Words, n: usize, #[comptime] kind: u32) -> u32 {
    let mut value = ids.at(n);
    if comptime!(kind != NO_MASK) {
        let mut word = mask.at(n);
        if comptime!(kind == REAL_MASK) {
            // Without its sign: neither zero masks.
            word = word % 0x8000_0000u32;
        }
        if word != 0u32 {
            value = comptime!(MASKED).runtime();
        }
    }
    value
}

/// One step of the hash, h <- (h xor x) (2^40 + 435) mod 2^64, for h as its lower and its upper word.
///
/// 435 has nine bits, so its product with half a word fits into one; 2^40 h moves the lower word eight bits up into the
/// upper one. `carries` is false in a mutant.
#[cube]
fn mix(low: u32, high: u32, x: u32, #[comptime] carries: bool) -> (u32, u32) {
    let mixed = low ^ x;
    let first = (mixed & 0xffffu32) * comptime!(PRIME);
    let second = (mixed >> 16u32) * comptime!(PRIME) + (first >> 16u32);
    let mut upper = high * comptime!(PRIME) + (mixed << 8u32);
    if comptime!(carries) {
        upper += second >> 16u32;
    }
    ((first & 0xffffu32) | (second << 16u32), upper)
}

/// The remainder of a number of two words: the upper word's, then `digit` bits of the lower word at a time. `rows`
/// times 2^`digit` is at most 2^32, so that a remainder and the next digit fit into a word.
#[cube]
fn remainder(low: u32, high: u32, rows: u32, #[comptime] digit: u32) -> u32 {
    let mut rest = high % rows;
    for step in 0..comptime!(32 / digit) {
        let next = (low >> (comptime!(32 - digit) - step * digit)) & comptime!((1u32 << digit) - 1);
        rest = ((rest << digit) | next) % rows;
    }
    rest
}

/// One key of one position. `i` counts keys.
#[cube(launch_unchecked)]
fn plain_kernel(ids: &Words, mask: &Words, out: &mut Words, len: u32, tokens: u32, rows: u32, #[comptime] kind: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let j = i % comptime!(KEYS);
        let n = i / comptime!(KEYS);
        let mut count = j + comptime!(ORDERS[0]);
        if count > n % tokens as usize + 1 {
            count = n % tokens as usize + 1;
        }
        let (mut low, mut high) = mix(comptime!(START[0]).runtime(), comptime!(START[1]).runtime(), count as u32, true);
        for k in 0..count {
            let (next_low, next_high) = mix(low, high, symbol(ids, mask, n + k + 1 - count, kind), true);
            low = next_low;
            high = next_high;
        }
        out.set(i, remainder(low ^ high, high, rows, 1u32) + j as u32 * rows);
    }
}

/// The keys of one position.
///
/// Mutants: 1 misses a key's oldest symbol, 2 does not hash the length, 3 is null (a renamed local), 4 does not fold, 5
/// drops the mask, 6 reaches into the sequence before, 7 drops the carry of the product.
#[cube(launch_unchecked)]
fn fused_kernel(
    ids: &Words,
    mask: &Words,
    out: &mut Words,
    positions: u32,
    tokens: u32,
    rows: u32,
    #[comptime] kind: u32,
    #[comptime] digit: u32,
    #[comptime] mutant: u32,
) {
    let n = ABSOLUTE_POS;
    if n < positions as usize {
        // Symbols that keys may reach, this position's included.
        let mut reach = n % tokens as usize + 1;
        if comptime!(mutant == 6) {
            reach = n + 1;
        }
        let mut symbols = Array::<u32>::new(LONGEST);
        #[unroll]
        for back in 0..LONGEST {
            let mut value = 0u32;
            if back < reach {
                value = symbol(ids, mask, n - back, comptime!(if mutant == 5 { NO_MASK } else { kind }));
            }
            symbols[back] = value;
        }
        #[unroll]
        for j in 0..KEYS {
            let order = comptime!(ORDERS[j]);
            let mut low = comptime!(START[0]).runtime();
            let mut high = comptime!(START[1]).runtime();
            if comptime!(mutant != 2) {
                let mut count = order.runtime();
                if count > reach {
                    count = reach;
                }
                let (next_low, next_high) = mix(low, high, count as u32, comptime!(mutant != 7));
                low = next_low;
                high = next_high;
            }
            #[unroll]
            for k in 0..order {
                let back = comptime!(order - 1 - k);
                let mut within = back < reach;
                if comptime!(mutant == 1 && k == 0) {
                    within = false;
                }
                if within {
                    let (next_low, next_high) = mix(low, high, symbols[back], comptime!(mutant != 7));
                    low = next_low;
                    high = next_high;
                }
            }
            let mut folded = low ^ high;
            if comptime!(mutant == 4) {
                folded = low;
            }
            if comptime!(mutant == 3) {
                let renamed = high ^ low;
                folded = renamed;
            }
            out.set(n * KEYS + j, remainder(folded, high, rows, digit) + comptime!(j as u32) * rows);
        }
    }
}

impl<R: Engine> EngramHash for Device<R> {
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<Outputs<Tensor>> {
        let [batch, tokens] = check(config, inputs.clone().map(|_, x| x.shape()))?;
        let Inputs { ids, mask } = inputs;
        check_ids(self, OP, "ids", ids)?;
        let mut mask_kind = NO_MASK;
        if let Some(mask) = mask {
            self.check_life(OP, "mask", mask)?;
            mask_kind = if mask.dtype.is_float() { REAL_MASK } else { WHOLE_MASK };
        }
        let out = self.scratch(&[batch, tokens, KEYS], DType::U32)?;
        let (positions, rows) = (batch * tokens, config.rows);
        let call = Call { ids, mask: mask.unwrap_or(ids), mask_kind, out: &out, positions, tokens, rows };
        match self.forward_arm(STEM) {
            Arm::Plain => self.hash_plain(&call)?,
            Arm::Fused => self.hash_fused(&call)?,
        }
        Ok(Outputs { rows: out })
    }
}

impl<R: Engine> Device<R> {
    fn hash_plain(&self, call: &Call<'_>) -> Result<()> {
        let Call { ids, mask, mask_kind, out, tokens, rows, .. } = *call;
        self.launch(OP, Grid::units(out.len()), call.bytes(), &[ids, mask, out], |client, count, dim| {
            let (len, t, r) = (out.len() as u32, tokens as u32, rows as u32);
            let [ids, mask, out] = [ids, mask, out].map(|x| self.words(x));
            // SAFETY: a key reaches no further back than its sequence; units past the keys do nothing.
            unsafe { plain_kernel::launch_unchecked::<R>(client, count, dim, ids, mask, out, len, t, r, mask_kind) }
        })
    }

    fn hash_fused(&self, call: &Call<'_>) -> Result<()> {
        let Call { ids, mask, mask_kind, out, positions, tokens, rows } = *call;
        let (digit, mutant) = (digit(rows), self.mutant(STEM));
        self.launch(OP, Grid::units(positions), call.bytes(), &[ids, mask, out], |client, count, dim| {
            let (n, t, r) = (positions as u32, tokens as u32, rows as u32);
            let [ids, mask, out] = [ids, mask, out].map(|x| self.words(x));
            // SAFETY: a key reaches no further back than its sequence; units past the positions do nothing.
            unsafe {
                fused_kernel::launch_unchecked::<R>(
                    client, count, dim, ids, mask, out, n, t, r, mask_kind, digit, mutant,
                )
            }
        })
    }
}

impl Call<'_> {
    fn bytes(&self) -> u64 {
        let mask = if self.mask_kind == NO_MASK { 0 } else { self.mask.bytes() };
        self.ids.bytes() + mask + self.out.bytes()
    }
}

/// The most bits, of those that divide a word's 32, for which `rows` times 2^bits is at most 2^32. At least one: `rows`
/// is at most 2^32 / 3.
fn digit(rows: usize) -> u32 {
    let fits = |bits: &u32| (rows as u64) << bits <= 1 << 32;
    [16, 8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remainder_and_the_next_digit_fit_into_a_word() {
        for (rows, want) in [
            (1, 16),
            (1 << 16, 16),
            ((1 << 16) + 1, 8),
            (1 << 24, 8),
            (1 << 28, 4),
            (1 << 30, 2),
            (u32::MAX as usize / 3, 1),
        ] {
            assert_eq!(digit(rows), want, "{rows}");
            // The largest that is ever formed: the largest remainder, and a digit of ones.
            assert!(((rows as u64 - 1) << want | ((1 << want) - 1)) <= u64::from(u32::MAX), "{rows}");
        }
    }
}
