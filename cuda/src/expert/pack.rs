//! Factors of a chain as words: rounded once, where every cube would round them again.
//!
//! The rank is filled up with zeros to a multiple of 16. In bf16 a word has two neighbours: along the rank in
//! `[E, rows, rank / 2]`, the lower half first, or along the rows in `[E, ceil(rows / 2), rank]`. In tf32 a word is one
//! rounded element, `[E, rows, rank]`, and both forms are that.

use cubecl::prelude::*;
use dormouse_reference::{DType, Precision, Result, Tensors};

use super::words::word;
use crate::device::Device;
use crate::factors::Factors;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// A matrix `[E, rows, R]` as words.
pub(super) struct Packed {
    /// Neighbours along the rank in a word.
    pub by_rank: Tensor,
    /// Neighbours along the rows in a word; the same tensor in tf32.
    pub by_row: Tensor,
}

/// What [`pack_kernel`] is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    /// Whether two elements share a word.
    short: bool,
    /// R, filled up.
    rank: usize,
    /// Whether the matrices are scaled.
    scaled: bool,
    /// Whether a third matrix is laid out anew.
    side: bool,
}

/// A third matrix, `[E, rows, R]`, that becomes `[rows, E, R]` unrounded: so the sum over experts is one product.
pub(super) struct Turned<'a> {
    pub from: &'a Tensor,
    pub to: &'a Tensor,
    pub rows: usize,
}

/// Packs two matrices, x times s if there is an s, and lays out a third. One unit takes two by two elements of each, or
/// one element of the third.
///
/// Reads the matrices once and writes them once a form: at the sizes of preset `small` some 8 MB, all in L2 soon after.
///
/// Mutants: 3 leaves s out of the second matrix, 4 out of the first.
#[cube(launch_unchecked)]
fn pack_kernel(
    x1: &Floats,
    s1: &Floats,
    x2: &Floats,
    s2: &Floats,
    x3: &Floats,
    by_rank_1: &mut Words,
    by_row_1: &mut Words,
    by_rank_2: &mut Words,
    by_row_2: &mut Words,
    turned: &mut Floats,
    experts: u32,
    rows: u32,
    rank: u32,
    third_rows: u32,
    #[comptime] form: Form,
    #[comptime] mutant: u32,
) {
    let (experts, rows, rank, third_rows) = (experts as usize, rows as usize, rank as usize, third_rows as usize);
    let pairs = comptime!(form.rank / 2);
    let blocks = experts * rows.div_ceil(2) * pairs;
    let i = ABSOLUTE_POS;
    if i < blocks {
        pack_block(x1, s1, by_rank_1, by_row_1, i, rows, rank, form, comptime!(form.scaled && mutant != 4));
    } else if i < 2 * blocks {
        pack_block(x2, s2, by_rank_2, by_row_2, i - blocks, rows, rank, form, comptime!(form.scaled && mutant != 3));
    } else if comptime!(form.side) {
        let i = i - 2 * blocks;
        if i < experts * third_rows * rank {
            let (r, row, e) = (i % rank, i / rank % third_rows, i / (rank * third_rows));
            turned.set((row * experts + e) * rank + r, x3.at(i));
        }
    }
}

/// Two by two elements.
#[cube]
fn pack_block(
    x: &Floats,
    s: &Floats,
    by_rank: &mut Words,
    by_row: &mut Words,
    i: usize,
    rows: usize,
    rank: usize,
    #[comptime] form: Form,
    #[comptime] scaled: bool,
) {
    let pairs = comptime!(form.rank / 2);
    let wide = form.rank;
    let row_pairs = rows.div_ceil(2);
    let (pair, row_pair, e) = (i % pairs, i / pairs % row_pairs, i / (pairs * row_pairs));
    let mut block = Array::<f32>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        let row = row_pair * 2 + comptime!(n / 2);
        let r = pair * 2 + comptime!(n % 2);
        let mut value = 0.0f32;
        if row < rows && r < rank {
            value = x.at((e * rows + row) * rank + r);
            if comptime!(scaled) {
                value *= s.at(e * rank + r);
            }
        }
        block[n] = value;
    }
    if comptime!(form.short) {
        #[unroll]
        for n in 0..2usize {
            let row = row_pair * 2 + n;
            if row < rows {
                by_rank.set((e * rows + row) * pairs + pair, word(block[2 * n], block[2 * n + 1], true));
            }
            by_row.set((e * row_pairs + row_pair) * wide + pair * 2 + n, word(block[n], block[n + 2], true));
        }
    } else {
        #[unroll]
        for n in 0..4usize {
            let row = row_pair * 2 + comptime!(n / 2);
            if row < rows {
                by_rank.set((e * rows + row) * wide + pair * 2 + comptime!(n % 2), word(block[n], 0.0f32, false));
            }
        }
    }
}

/// Packs two `[E, rows, R]`, each times its `[E, R]` if `scales` are given, and turns a third matrix if one is given.
pub(super) fn pack<R: Engine>(
    b: &Device<R>,
    name: &'static str,
    x: [&Tensor; 2],
    scales: Option<[&Tensor; 2]>,
    third: Option<&Turned<'_>>,
    padded: usize,
    precision: Precision,
) -> Result<[Packed; 2]> {
    let &[experts, rows, rank] = x[0].shape() else { unreachable!("factors have three axes") };
    let short = precision == Precision::Bf16;
    let form = Form { short, rank: padded, scaled: scales.is_some(), side: third.is_some() };
    let packed = || -> Result<Packed> {
        let wide = if short { padded / 2 } else { padded };
        let by_rank = b.scratch(&[experts, rows, wide], DType::U32)?;
        let by_row = match short {
            true => b.scratch(&[experts, rows.div_ceil(2), padded], DType::U32)?,
            false => by_rank.clone(),
        };
        Ok(Packed { by_rank, by_row })
    };
    let out = [packed()?, packed()?];
    // A kernel has all its arguments in every variant; where nothing is read or written, others stand in. Nothing may be
    // read and written, so the place of the second form in tf32 is one of its own.
    let nothing = [b.scratch(&[1], DType::U32)?, b.scratch(&[1], DType::U32)?];
    let by_row = [0, 1].map(|i| if short { &out[i].by_row } else { &nothing[i] });
    let no_float = b.float_scratch(&[1])?;
    let [s1, s2] = scales.unwrap_or(x);
    let (x3, turned, third_rows) = third.map_or((x[0], &no_float, 0), |third| (third.from, third.to, third.rows));
    let blocks = experts * rows.div_ceil(2) * (padded / 2);
    let units = 2 * blocks + experts * third_rows * rank;
    let written: u64 =
        out.iter().map(|p| if short { p.by_rank.bytes() + p.by_row.bytes() } else { p.by_rank.bytes() }).sum();
    let bytes = x[0].bytes() + x[1].bytes() + written + third.map_or(0, |third| 2 * third.from.bytes());
    let mutant = b.mutant(super::STEM);
    let uses = [x[0], s1, x[1], s2, x3, &out[0].by_rank, by_row[0], &out[1].by_rank, by_row[1], turned];
    b.launch(name, Grid::units(units), bytes, &uses, |client, count, dim| {
        let [x1, s1, x2, s2, x3] = [x[0], s1, x[1], s2, x3].map(|t| b.floats(t));
        let [rank_1, row_1, rank_2, row_2] =
            [&out[0].by_rank, by_row[0], &out[1].by_rank, by_row[1]].map(|t| b.words(t));
        let turned = b.floats(turned);
        let [experts, rows, rank, third_rows] = [experts, rows, rank, third_rows].map(|n| n as u32);
        // SAFETY: both matrices have the sizes that go along, their words room for them; units past them do nothing.
        unsafe {
            pack_kernel::launch_unchecked::<R>(
                client, count, dim, x1, s1, x2, s2, x3, rank_1, row_1, rank_2, row_2, turned, experts, rows, rank,
                third_rows, form, mutant,
            )
        }
    })?;
    Ok(out)
}

/// The gradients of both maps += the parts of their sums. One unit, one element.
///
/// Mutants: 7 is null (a renamed local), 17 leaves out the last part of dU of up, 18 that of dV of down.
#[cube(launch_unchecked)]
fn finish_kernel(
    dv_parts: &Floats,
    du_parts: &Floats,
    p_parts: &Floats,
    q_parts: &Floats,
    ds_parts: &Floats,
    up_dv: &mut Floats,
    down_du: &mut Floats,
    up_du: &mut Floats,
    down_dv: &mut Floats,
    up_ds: &mut Floats,
    down_ds: &mut Floats,
    hidden: u32,
    outer: u32,
    experts: u32,
    rank: u32,
    parts: u32,
    outer_parts: u32,
    tiles: u32,
    #[comptime] mutant: u32,
) {
    let (hidden, outer, rank) = (hidden as usize, outer as usize, rank as usize);
    let columns = experts as usize * rank;
    let i = ABSOLUTE_POS;
    let mut sum = 0.0f32;
    if i < hidden {
        for part in 0..parts as usize {
            sum += dv_parts.at(part * hidden + i);
        }
        if comptime!(mutant == 7) {
            let renamed = sum;
            sum = renamed;
        }
        up_dv.set(i, up_dv.at(i) + sum);
    } else if i < 2 * hidden {
        let i = i - hidden;
        for part in 0..parts as usize {
            sum += du_parts.at(part * hidden + i);
        }
        down_du.set(i, down_du.at(i) + sum);
    } else if i < 2 * hidden + outer {
        let i = i - 2 * hidden;
        // From [D, E, R] to [E, D, R].
        let of_expert = outer / experts as usize;
        let (e, row, r) = (i / of_expert, i % of_expert / rank, i % rank);
        let from = row * columns + e * rank + r;
        let mut last = outer_parts as usize;
        if comptime!(mutant == 17) {
            last -= 1;
        }
        for part in 0..last {
            sum += p_parts.at(part * outer + from);
        }
        up_du.set(i, up_du.at(i) + sum);
    } else if i < 2 * hidden + 2 * outer {
        let i = i - 2 * hidden - outer;
        let of_expert = outer / experts as usize;
        let from = i / of_expert * outer_parts as usize * of_expert + i % of_expert;
        let mut last = outer_parts as usize;
        if comptime!(mutant == 18) {
            last -= 1;
        }
        for part in 0..last {
            sum += q_parts.at(from + part * of_expert);
        }
        down_dv.set(i, down_dv.at(i) + sum);
    } else if i < 2 * hidden + 2 * outer + 2 * columns {
        let i = i - 2 * hidden - 2 * outer;
        for tile in 0..tiles as usize {
            sum += ds_parts.at(tile * 2 * columns + i);
        }
        if i < columns {
            up_ds.set(i, up_ds.at(i) + sum);
        } else {
            let i = i - columns;
            down_ds.set(i, down_ds.at(i) + sum);
        }
    }
}

/// Parts of sums over tokens.
pub(super) struct Parts<'a> {
    /// `[parts, E, F, R]`, of V of up and of U of down.
    pub dv: &'a Tensor,
    pub du: &'a Tensor,
    /// `[parts, D, E, R]`, of U of up, turned.
    pub p: &'a Tensor,
    /// `[E, parts, D, R]`, of V of down.
    pub q: &'a Tensor,
    /// `[tiles, 2, E, R]`, of s of up and of down.
    pub ds: &'a Tensor,
}

/// Adds the parts to the gradients of up and down.
pub(super) fn finish<R: Engine>(b: &Device<R>, of: &Parts<'_>, [up, down]: [&Factors<'_>; 2]) -> Result<()> {
    let read = [of.dv, of.du, of.p, of.q, of.ds];
    let into = [up.v, down.u, up.u, down.v, up.s, down.s];
    let uses = [&read[..], &into[..]].concat();
    let bytes = read.iter().map(|t| t.bytes()).sum::<u64>() + 2 * into.iter().map(|t| t.bytes()).sum::<u64>();
    let mutant = b.mutant(super::STEM);
    let [experts, rank] = [up.s.shape()[0], up.s.shape()[1]];
    let (hidden, outer, columns) = (up.v.len(), up.u.len(), up.s.len());
    let grid = Grid::units(2 * hidden + 2 * outer + 2 * columns);
    b.launch("expert::dparams", grid, bytes, &uses, |client, count, dim| {
        let [dv, du, p, q, ds] = read.map(|t| b.floats(t));
        let [up_dv, down_du, up_du, down_dv, up_ds, down_ds] = into.map(|t| b.floats(t));
        let counts = [of.dv.len() / hidden, of.q.len() / outer, of.ds.len() / (2 * columns)];
        let [parts, outer_parts, tiles] = counts.map(|n| n as u32);
        let [hidden, outer, experts, rank] = [hidden, outer, experts, rank].map(|n| n as u32);
        // SAFETY: the parts are whole multiples of the gradients, which have the lengths that go along.
        unsafe {
            finish_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                dv,
                du,
                p,
                q,
                ds,
                up_dv,
                down_du,
                up_du,
                down_dv,
                up_ds,
                down_ds,
                hidden,
                outer,
                experts,
                rank,
                parts,
                outer_parts,
                tiles,
                mutant,
            )
        }
    })
}
