//! Arm `plain`: one unit chooses the rows; one unit normalises a row, one looks for a row's neighbour, one adds up the
//! logarithms. In backward one unit does an element of dp, and one a row of dz.

use cubecl::prelude::*;
use dormouse_reference::{Result, Tensors};

use super::{Backward, Forward, Rows, Saved, push};
use crate::device::Device;
use crate::launch::Grid;
use crate::mask;
use crate::runtime::Engine;
use crate::tensor::{Floats, Words};

/// Which rows are chosen and how many. One unit.
#[cube(launch_unchecked)]
fn choose_kernel(
    mask: &Words,
    chosen: &mut Words,
    place: &mut Words,
    count: &mut Words,
    rows: u32,
    limit: u32,
    #[comptime] kind: u32,
) {
    if ABSOLUTE_POS == 0 {
        let mut masked = 0u32;
        for n in 0..rows as usize {
            if mask::is_set(mask, n, kind) {
                masked += 1;
            }
        }
        let mut stride = masked.div_ceil(limit);
        if stride == 0 {
            stride = 1u32;
        }
        let mut rank = 0u32;
        let mut taken = 0u32;
        for n in 0..rows as usize {
            let mut at = 0u32;
            if mask::is_set(mask, n, kind) {
                if rank % stride == 0 {
                    chosen.set(taken as usize, n as u32);
                    taken += 1;
                    at = taken;
                }
                rank += 1;
            }
            place.set(n, at);
        }
        count.set(0, taken);
    }
}

/// q and p of one chosen row. One unit, one row.
#[cube(launch_unchecked)]
fn rows_kernel(z: &Floats, chosen: &Words, count: &Words, p: &mut Floats, q: &mut Floats, width: u32, norm_eps: f32) {
    let i = ABSOLUTE_POS;
    if i < count.at(0) as usize {
        let width = width as usize;
        let row = chosen.at(i) as usize * width;
        let mut square = 0.0f32;
        for d in 0..width {
            square += z.at(row + d) * z.at(row + d);
        }
        let scale = 1.0f32 / (square + norm_eps).sqrt();
        q.set(i, scale);
        for d in 0..width {
            p.set(i * width + d, scale * z.at(row + d));
        }
    }
}

/// The neighbour of one chosen row: of equally far ones the lowest. One unit, one row.
#[cube(launch_unchecked)]
fn nearest_kernel(p: &Floats, count: &Words, nearest: &mut Words, square: &mut Floats, width: u32) {
    let i = ABSOLUTE_POS;
    let all = count.at(0) as usize;
    if i < all {
        let width = width as usize;
        let mut found = false;
        let mut best = 0.0f32;
        let mut row = 0u32;
        for j in 0..all {
            if j != i {
                let mut sum = 0.0f32;
                for d in 0..width {
                    let difference = p.at(i * width + d) - p.at(j * width + d);
                    sum += difference * difference;
                }
                if !found || sum < best {
                    found = true;
                    best = sum;
                    row = j as u32;
                }
            }
        }
        nearest.set(i, row);
        square.set(i, best);
    }
}

/// loss and 1 / M. One unit adds up the rows, first to last.
#[cube(launch_unchecked)]
fn loss_kernel(square: &Floats, count: &Words, loss: &mut Floats, share: &mut Floats, eps: f32) {
    if ABSOLUTE_POS == 0 {
        let all = count.at(0) as usize;
        let mut sum = 0.0f32;
        let mut one = 0.0f32;
        if all > 1 {
            one = 1.0f32 / f32::cast_from(all as u32);
            for i in 0..all {
                sum += (square.at(i) + eps).ln();
            }
        }
        share.set(0, one);
        loss.set(0, -0.5f32 * one * sum);
    }
}

/// dp. One unit, one element.
#[cube(launch_unchecked)]
fn dp_kernel(
    p: &Floats,
    nearest: &Words,
    square: &Floats,
    count: &Words,
    share: &Floats,
    dloss: &Floats,
    dp: &mut Floats,
    width: u32,
    eps: f32,
) {
    let width = width as usize;
    let (i, d) = (ABSOLUTE_POS / width, ABSOLUTE_POS % width);
    let all = count.at(0) as usize;
    if i < all {
        let size = dloss.at(0) * share.at(0);
        let mut value = 0.0f32;
        if all > 1 {
            value = push(p, square, i, nearest.at(i) as usize, d, width, size, eps);
            for k in 0..all {
                if nearest.at(k) == i as u32 {
                    value -= push(p, square, k, i, d, width, size, eps);
                }
            }
        }
        dp.set(i * width + d, value);
    }
}

/// dz of one row. One unit, one row.
#[cube(launch_unchecked)]
fn dz_kernel(
    p: &Floats,
    q: &Floats,
    place: &Words,
    dp: &Floats,
    plus: &Floats,
    dz: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] has_plus: bool,
) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let width = width as usize;
        for d in 0..width {
            let mut value = 0.0f32;
            if has_plus {
                value = plus.at(n * width + d);
            }
            dz.set(n * width + d, value);
        }
        let at = place.at(n);
        if at > 0 {
            let i = (at - 1) as usize;
            let mut along = 0.0f32;
            for d in 0..width {
                along += p.at(i * width + d) * dp.at(i * width + d);
            }
            for d in 0..width {
                let through = dp.at(i * width + d) - p.at(i * width + d) * along;
                dz.set(n * width + d, dz.at(n * width + d) + q.at(i) * through);
            }
        }
    }
}

/// loss and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { z, mask, rows, loss, share, n, width, room, norm_eps, eps } = *call;
    let Rows { count: counter, chosen, place, p, q, nearest, square } = rows;
    let d = width as u32;
    let uses = [mask, chosen, place, counter];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("koleo::choose", Grid::units(1), bytes, &uses, |client, count, dim| {
        let [words, chosen, place, counter] = uses.map(|t| b.words(t));
        let (n, limit, kind) = (n as u32, room as u32, mask::kind(mask));
        // SAFETY: `place` has one element a row; no more than `limit` rows are chosen.
        unsafe {
            choose_kernel::launch_unchecked::<R>(client, count, dim, words, chosen, place, counter, n, limit, kind)
        }
    })?;
    let uses = [z, chosen, counter, p, q];
    let bytes = 2 * p.bytes() + chosen.bytes() + q.bytes();
    b.launch("koleo::rows", Grid::units(room), bytes, &uses, |client, count, dim| {
        let ([z, p, q], [chosen, counter]) = ([z, p, q].map(|t| b.floats(t)), [chosen, counter].map(|t| b.words(t)));
        // SAFETY: chosen rows lie in z; units past their number do nothing.
        unsafe { rows_kernel::launch_unchecked::<R>(client, count, dim, z, chosen, counter, p, q, d, norm_eps) }
    })?;
    let bytes = p.bytes() + nearest.bytes() + square.bytes();
    b.launch("koleo::nearest", Grid::units(room), bytes, &[p, counter, nearest, square], |client, count, dim| {
        let ([p, square], [counter, nearest]) =
            ([p, square].map(|t| b.floats(t)), [counter, nearest].map(|t| b.words(t)));
        // SAFETY: units past the number of chosen rows do nothing.
        unsafe { nearest_kernel::launch_unchecked::<R>(client, count, dim, p, counter, nearest, square, d) }
    })?;
    let uses = [square, counter, loss, share];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("koleo::loss", Grid::units(1), bytes, &uses, |client, count, dim| {
        let ([square, loss, share], counter) = ([square, loss, share].map(|t| b.floats(t)), b.words(counter));
        // SAFETY: no more than the chosen rows are read.
        unsafe { loss_kernel::launch_unchecked::<R>(client, count, dim, square, counter, loss, share, eps) }
    })
}

/// dz.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<()> {
    let Rows { count: counter, place, p, q, nearest, square, .. } = &saved.rows;
    let Backward { dloss, plus, dz, n, width, eps } = *call;
    let share = &saved.share;
    let dp = b.float_scratch(b.shape(p))?;
    let uses = [p, nearest, square, counter, share, dloss, &dp];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("koleo::dp", Grid::units(dp.len()), bytes, &uses, |client, count, dim| {
        let [nearest, counter] = [nearest, counter].map(|t| b.words(t));
        let [p, square, share, dloss, dp] = [p, square, share, dloss, &dp].map(|t| b.floats(t));
        // SAFETY: units past the chosen rows do nothing; neighbours are chosen rows.
        unsafe {
            dp_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                p,
                nearest,
                square,
                counter,
                share,
                dloss,
                dp,
                width as u32,
                eps,
            )
        }
    })?;
    // A kernel has all its arguments in every variant; without `plus` nothing reads it.
    let uses = [p, q, place, &dp, plus.unwrap_or(&dp), dz];
    let bytes = 2 * p.bytes() + place.bytes() + dz.bytes() + plus.map_or(0, |plus| plus.bytes());
    b.launch("koleo::dz", Grid::units(n), bytes, &uses, |client, count, dim| {
        let [p, q, dp, plus_, dz] = [p, q, &dp, uses[4], dz].map(|t| b.floats(t));
        let (place, n, d, has) = (b.words(place), n as u32, width as u32, plus.is_some());
        // SAFETY: `place` names chosen rows; units past the rows do nothing.
        unsafe { dz_kernel::launch_unchecked::<R>(client, count, dim, p, q, place, dp, plus_, dz, n, d, has) }
    })
}
