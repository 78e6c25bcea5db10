//! The tokens of a batch in the order of their rows: what lets the gradient of a table be summed row by row, with no
//! atomics and in one order, whatever the ids are.
//!
//! A stable counting sort by [`DIGITS`] rows a pass, from the lowest digit up; 256 rows, a vocabulary of bytes, take one
//! pass. A pass is two launches: blocks of tokens count their digits, then each block finds where its tokens go, since
//! the ones of a lower digit, or of its digit in an earlier block, come before. The order depends on the ids only.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::row_of;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};

/// Values of a digit, units of a cube, and tokens of a tile: unit `i` has the tile's token `i`, and counts digit `i`.
const DIGITS: u32 = 256;

/// Bits of a digit.
const BITS: u32 = 8;

/// The largest number of blocks: every block adds up the counts of all of them.
const BLOCKS: usize = 128;

/// The token at place `i` of the order so far; the first pass finds them as they are.
#[cube]
fn token_at(order: &Words, i: usize, #[comptime] first: bool) -> u32 {
    if first { i as u32 } else { order.at(i) }
}

/// The tokens of a tile that begins at place `start`: a whole one, or what is left of the block.
#[cube]
fn tile_len(start: usize, stop: usize) -> usize {
    let mut len = 0usize;
    if start < stop {
        len = stop - start;
        if len > comptime!(DIGITS as usize) {
            len = comptime!(DIGITS as usize);
        }
    }
    len
}

/// How often each digit comes up in a block of tokens. A cube has one block; unit `i` counts digit `i`.
#[cube(launch_unchecked)]
fn count_kernel(
    ids: &Words,
    order: &Words,
    counts: &mut Words,
    tokens: u32,
    vocab: u32,
    tiles: u32,
    blocks: u32,
    shift: u32,
    #[comptime] first: bool,
) {
    let unit = UNIT_POS as usize;
    let size = comptime!(DIGITS as usize);
    let mut digits = SharedMemory::<u32>::new(comptime!(DIGITS as usize));
    let begin = CUBE_POS * tiles as usize * size;
    let mut stop = begin + tiles as usize * size;
    if stop > tokens as usize {
        stop = tokens as usize;
    }
    let mut count = 0u32;
    for tile in 0..tiles as usize {
        let start = begin + tile * size;
        let here = tile_len(start, stop);
        if unit < here {
            let n = token_at(order, start + unit, first);
            digits[unit] = (row_of(ids, n as usize, vocab) >> shift) % comptime!(DIGITS);
        }
        sync_cube();
        for other in 0..here {
            if digits[other] == UNIT_POS {
                count += 1;
            }
        }
        sync_cube();
    }
    if CUBE_POS < blocks as usize {
        counts.set(CUBE_POS * size + unit, count);
    }
}

/// Puts the tokens of a block where their digit belongs. A cube has one block; unit `i` keeps the place of the next
/// token with digit `i`.
#[cube(launch_unchecked)]
fn place_kernel(
    ids: &Words,
    order: &Words,
    counts: &Words,
    out: &mut Words,
    tokens: u32,
    vocab: u32,
    tiles: u32,
    blocks: u32,
    shift: u32,
    #[comptime] first: bool,
) {
    let unit = UNIT_POS as usize;
    let size = comptime!(DIGITS as usize);
    let mut digits = SharedMemory::<u32>::new(comptime!(DIGITS as usize));
    let mut places = SharedMemory::<u32>::new(comptime!(DIGITS as usize));
    let begin = CUBE_POS * tiles as usize * size;
    let mut stop = begin + tiles as usize * size;
    if stop > tokens as usize {
        stop = tokens as usize;
    }
    let mut before = 0u32;
    let mut total = 0u32;
    for block in 0..blocks as usize {
        let count = counts.at(block * size + unit);
        total += count;
        if block < CUBE_POS {
            before += count;
        }
    }
    // The sum of the totals of this digit and all lower ones.
    places[unit] = total;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let distance = comptime!(1usize << level as usize);
        let mut sum = places[unit];
        if unit >= distance {
            sum += places[unit - distance];
        }
        sync_cube();
        places[unit] = sum;
        sync_cube();
    }
    places[unit] = places[unit] - total + before;
    for tile in 0..tiles as usize {
        let start = begin + tile * size;
        let here = tile_len(start, stop);
        let mut n = 0u32;
        let mut mine = 0u32;
        if unit < here {
            n = token_at(order, start + unit, first);
            mine = (row_of(ids, n as usize, vocab) >> shift) % comptime!(DIGITS);
            digits[unit] = mine;
        }
        sync_cube();
        let mut count = 0u32;
        let mut earlier = 0u32;
        for other in 0..here {
            let digit = digits[other];
            if digit == UNIT_POS {
                count += 1;
            }
            if digit == mine && other < unit {
                earlier += 1;
            }
        }
        if unit < here {
            out.set((places[mine as usize] + earlier) as usize, n);
        }
        sync_cube();
        places[unit] = places[unit] + count;
    }
}

/// The numbers of the tokens, by row of the table and, in a row, as they come. There is at least one token.
pub(super) fn by_row<R: Engine>(b: &Device<R>, ids: &Tensor, vocab: usize) -> Result<Tensor> {
    let tokens = ids.len();
    let tiles = tokens.div_ceil(BLOCKS * DIGITS as usize);
    let blocks = tokens.div_ceil(tiles * DIGITS as usize);
    let grid = Grid::cubes(blocks, DIGITS);
    let mut order = ids.clone();
    for pass in 0..passes(vocab) {
        let counts = b.scratch(&[blocks, DIGITS as usize], DType::U32)?;
        let out = b.scratch(&[tokens], DType::U32)?;
        let first = pass == 0;
        let read = if first { ids.bytes() } else { ids.bytes() + order.bytes() };
        let [n, v, t, k, shift] = [tokens as u32, vocab as u32, tiles as u32, blocks as u32, pass * BITS];
        let uses = [ids, &order, &counts];
        b.launch("embedding::count", grid.clone(), read + counts.bytes(), &uses, |client, count, dim| {
            let [ids, order, counts] = uses.map(|x| b.words(x));
            // SAFETY: places are below the number of tokens, `counts` has one row a block.
            unsafe {
                count_kernel::launch_unchecked::<R>(client, count, dim, ids, order, counts, n, v, t, k, shift, first)
            }
        })?;
        let uses = [ids, &order, &counts, &out];
        let bytes = read + counts.bytes() + out.bytes();
        b.launch("embedding::place", grid.clone(), bytes, &uses, |client, count, dim| {
            let [ids, order, counts, out] = uses.map(|x| b.words(x));
            // SAFETY: the counts of all digits and blocks add up to the number of tokens, so every place is below it.
            unsafe {
                place_kernel::launch_unchecked::<R>(
                    client, count, dim, ids, order, counts, out, n, v, t, k, shift, first,
                )
            }
        })?;
        order = out;
    }
    Ok(order)
}

/// Digits of the last row's number, at least one.
fn passes(vocab: usize) -> u32 {
    (usize::BITS - (vocab - 1).leading_zeros()).div_ceil(BITS).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_for_every_digit_of_the_last_row() {
        for (vocab, want) in [(1, 1), (2, 1), (256, 1), (257, 2), (65536, 2), (65537, 3), (1 << 24, 3)] {
            assert_eq!(passes(vocab), want, "{vocab}");
        }
    }
}
