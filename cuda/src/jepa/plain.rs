//! Arm `plain`: one unit does one row, one adds up the rows; in backward one unit does one element.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::jepa::Inputs;

use super::{Forward, Saved, slope};
use crate::device::Device;
use crate::launch::Grid;
use crate::layer_norm::{STATS, normalised};
use crate::mask;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// The statistics of the teacher's row and the sum of the distances in it. One unit, one row.
#[cube(launch_unchecked)]
fn rows_kernel(
    prediction: &Floats,
    teacher: &Floats,
    mask: &Words,
    stats: &mut Floats,
    sums: &mut Floats,
    rows: u32,
    width: u32,
    eps: f32,
    #[comptime] kind: u32,
) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let mut total = 0.0f32;
        if mask::is_set(mask, n, kind) {
            let first = teacher.at(row);
            let mut sum = 0.0f32;
            for d in 0..width as usize {
                sum += teacher.at(row + d) - first;
            }
            let shift = sum / f32::cast_from(width);
            let mut square = 0.0f32;
            for d in 0..width as usize {
                let centred = (teacher.at(row + d) - first) - shift;
                square += centred * centred;
            }
            let rho = 1.0f32 / (square / f32::cast_from(width) + eps).sqrt();
            stats.set(n * comptime!(STATS), shift);
            stats.set(n * comptime!(STATS) + 1, rho);
            for d in 0..width as usize {
                let target = rho * ((teacher.at(row + d) - first) - shift);
                total += (prediction.at(row + d) - target).abs();
            }
        }
        sums.set(n, total);
    }
}

/// loss, and one over the number of masked elements. One unit adds up the rows, first to last.
#[cube(launch_unchecked)]
fn loss_kernel(
    sums: &Floats,
    mask: &Words,
    loss: &mut Floats,
    share: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] kind: u32,
) {
    if ABSOLUTE_POS == 0 {
        let mut sum = 0.0f32;
        let mut count = 0u32;
        for n in 0..rows as usize {
            let masked = mask::is_set(mask, n, kind);
            count += u32::cast_from(masked);
            if masked {
                sum += sums.at(n);
            }
        }
        let mut one = 0.0f32;
        if count > 0 {
            one = 1.0f32 / (f32::cast_from(count) * f32::cast_from(width));
        }
        share.set(0, one);
        loss.set(0, sum * one);
    }
}

/// dprediction. One unit, one element.
#[cube(launch_unchecked)]
fn backward_kernel(
    prediction: &Floats,
    teacher: &Floats,
    mask: &Words,
    stats: &Floats,
    share: &Floats,
    dloss: &Floats,
    dprediction: &mut Floats,
    len: u32,
    width: u32,
    #[comptime] kind: u32,
) {
    let i = ABSOLUTE_POS;
    let width = width as usize;
    if i < len as usize {
        let n = i / width;
        let mut value = 0.0f32;
        if mask::is_set(mask, n, kind) {
            let target = normalised(teacher, stats, n, i % width, width);
            value = slope(prediction.at(i) - target, dloss.at(0) * share.at(0));
        }
        dprediction.set(i, value);
    }
}

/// loss and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { inputs: &Inputs { prediction, teacher, mask }, loss, stats, share, rows, width, eps } = *call;
    let (n, d, kind) = (rows as u32, width as u32, mask::kind(mask));
    let sums = b.float_scratch(&[rows])?;
    let uses = [prediction, teacher, mask, stats, &sums];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("jepa::forward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [prediction, teacher, stats, sums] = [prediction, teacher, stats, &sums].map(|t| b.floats(t));
        let mask = b.words(mask);
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe {
            rows_kernel::launch_unchecked::<R>(
                client, count, dim, prediction, teacher, mask, stats, sums, n, d, eps, kind,
            )
        }
    })?;
    let uses = [&sums, mask, loss, share];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("jepa::loss", Grid::units(1), bytes, &uses, |client, count, dim| {
        let ([sums, loss, share], mask) = ([&sums, loss, share].map(|t| b.floats(t)), b.words(mask));
        // SAFETY: `sums` and the mask have one element a row.
        unsafe { loss_kernel::launch_unchecked::<R>(client, count, dim, sums, mask, loss, share, n, d, kind) }
    })
}

/// dprediction.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, dloss: &Tensor, out: &Tensor) -> Result<()> {
    let Saved { prediction, teacher, mask, stats, share, .. } = saved;
    let uses = [prediction, teacher, mask, stats, share, dloss, out];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("jepa::backward", Grid::units(out.len()), bytes, &uses, |client, count, dim| {
        let (len, d) = (out.len() as u32, teacher.shape()[teacher.shape().len() - 1] as u32);
        let (words, kind) = (b.words(mask), mask::kind(mask));
        let [prediction, teacher, stats, share, dloss, out] =
            [prediction, teacher, stats, share, dloss, out].map(|t| b.floats(t));
        // SAFETY: prediction, teacher and `out` have `len` elements, the mask one a row; units past them do nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, prediction, teacher, words, stats, share, dloss, out, len, d, kind,
            )
        }
    })
}
