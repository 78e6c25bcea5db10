//! Arm `fused`: forward is one launch, in which the units of a row share its sums (see [`rows`]). Backward is four: the
//! gradient of raw, both gradients of the inputs, that of the weight over blocks of rows, and the sum of the blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, FIXED_GATES, Forward, Sizes, sigmoid};
use crate::device::Device;
use crate::launch::Grid;
use crate::rows;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// Gates whose sums a unit keeps at once. With up to five experts every row is read once.
const TOGETHER: usize = 8;

/// Rows whose gradients of the weight one unit sums.
const BLOCK: usize = 32;

/// Rows that a unit reads, or has a column of, at a time.
const ROWS: usize = 4;

/// raw and the gates. Some units share a row: each sums products of every 32nd column, the sums are added up, and the
/// first unit makes gates of them.
///
/// Mutants: 1 drops x0, 2 does not normalise the softmax, 3 leaves the third gate as it is, 9 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    c: &Floats,
    x0: &Floats,
    weight: &Floats,
    raw: &mut Floats,
    gates: &mut Floats,
    rows: u32,
    width: u32,
    total: u32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let (width, total) = (width as usize, total as usize);
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = n < rows as usize;
    let first = n * total;
    let mut sums = Array::<f32>::new(TOGETHER);
    for chunk in 0..total.div_ceil(comptime!(TOGETHER)) {
        let from = chunk * comptime!(TOGETHER);
        #[unroll]
        for i in 0..comptime!(TOGETHER) {
            sums[i] = 0.0f32;
        }
        if here {
            for step in 0..width.div_ceil(lanes) {
                let d = step * lanes + lane;
                if d < width {
                    let left = c.at(n * width + d);
                    let mut right = x0.at(n * width + d);
                    if comptime!(mutant == 1) {
                        right = 0.0f32;
                    }
                    let (top, bottom) = (d * total + from, (width + d) * total + from);
                    #[unroll]
                    for i in 0..comptime!(TOGETHER) {
                        if from + i < total {
                            sums[i] += left * weight.at(top + i) + right * weight.at(bottom + i);
                        }
                    }
                }
            }
        }
        #[unroll]
        for i in 0..comptime!(TOGETHER) {
            let sum = rows::sum(sums[i], &mut shared);
            if here && lane == 0 && from + i < total {
                raw.set(first + from + i, sum);
            }
        }
    }
    // The unit that wrote raw is the one that reads it.
    if here && lane == 0 {
        let fixed = comptime!(FIXED_GATES);
        for j in 0..fixed {
            gates.set(first + j, sigmoid(raw.at(first + j)));
        }
        if comptime!(mutant == 3) {
            gates.set(first + 2, raw.at(first + 2));
        }
        let mut largest = raw.at(first + fixed);
        for j in fixed..total {
            if raw.at(first + j) > largest {
                largest = raw.at(first + j);
            }
        }
        let mut sum = 0.0f32;
        for j in fixed..total {
            sum += (raw.at(first + j) - largest).exp();
        }
        if comptime!(mutant == 2) {
            sum = 1.0f32;
        }
        for j in fixed..total {
            let share = (raw.at(first + j) - largest).exp() / sum;
            if comptime!(mutant == 9) {
                let renamed = share;
                gates.set(first + j, renamed);
            } else {
                gates.set(first + j, share);
            }
        }
    }
}

/// The gradient of raw. One unit, one row and gate.
///
/// Mutants: 4 drops the slope of the sigmoids, 5 the mean of the softmax.
#[cube(launch_unchecked)]
fn draw_kernel(
    raw: &Floats,
    gates: &Floats,
    dgates: &Floats,
    draw: &mut Floats,
    rows: u32,
    total: u32,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    let total = total as usize;
    let fixed = comptime!(FIXED_GATES);
    if i < rows as usize * total {
        let first = i / total * total;
        let mut value = dgates.at(i) * gates.at(i);
        if i - first < fixed {
            if comptime!(mutant != 4) {
                value *= sigmoid(-raw.at(i));
            }
        } else if comptime!(mutant != 5) {
            let mut differences = 0.0f32;
            for f in fixed..total {
                differences += gates.at(first + f) * (dgates.at(i) - dgates.at(first + f));
            }
            value = gates.at(i) * differences;
        }
        draw.set(i, value);
    }
}

/// dc and dx0, with what arrives from other readers. One unit, a column of both in [`ROWS`] rows: it reads the weights of
/// its column once for all of them.
///
/// Mutants: 6 drops what arrives, 7 takes the weights of c for x0.
#[cube(launch_unchecked)]
fn inputs_kernel(
    draw: &Floats,
    weight: &Floats,
    plus_c: &Floats,
    plus_x0: &Floats,
    dc: &mut Floats,
    dx0: &mut Floats,
    rows: u32,
    width: u32,
    total: u32,
    #[comptime] has_c: bool,
    #[comptime] has_x0: bool,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    let (rows, width, total) = (rows as usize, width as usize, total as usize);
    let (first, d) = (i / width * comptime!(ROWS), i % width);
    let mut half = width;
    if comptime!(mutant == 7) {
        half = 0;
    }
    let mut for_c = Array::<f32>::new(ROWS);
    let mut for_x0 = Array::<f32>::new(ROWS);
    if first < rows {
        #[unroll]
        for r in 0..comptime!(ROWS) {
            let mut at = (first + r) * width + d;
            // A load that no branch guards is under way while the others are; what is read twice is not written.
            at = select(first + r < rows, at, first * width + d);
            for_c[r] = 0.0f32;
            for_x0[r] = 0.0f32;
            if comptime!(has_c && mutant != 6) {
                for_c[r] = plus_c.at(at);
            }
            if comptime!(has_x0 && mutant != 6) {
                for_x0[r] = plus_x0.at(at);
            }
        }
        for j in 0..total {
            let (of_c, of_x0) = (weight.at(d * total + j), weight.at((half + d) * total + j));
            #[unroll]
            for r in 0..comptime!(ROWS) {
                let n = select(first + r < rows, first + r, first);
                let gradient = draw.at(n * total + j);
                for_c[r] = for_c[r] + gradient * of_c;
                for_x0[r] = for_x0[r] + gradient * of_x0;
            }
        }
        #[unroll]
        for r in 0..comptime!(ROWS) {
            let n = first + r;
            if n < rows {
                dc.set(n * width + d, for_c[r]);
                dx0.set(n * width + d, for_x0[r]);
            }
        }
    }
}

/// The gradient of the weight over a block of rows. A unit has a column of c and of x0, which meet the same gradients.
///
/// Mutants: 8 misses the block's last row.
#[cube(launch_unchecked)]
fn weight_kernel(
    c: &Floats,
    x0: &Floats,
    draw: &Floats,
    partial: &mut Floats,
    rows: u32,
    width: u32,
    total: u32,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    let (rows, width, total) = (rows as usize, width as usize, total as usize);
    if i < rows.div_ceil(BLOCK) * width {
        let (block, d) = (i / width, i % width);
        let first = block * BLOCK;
        let mut last = first + BLOCK;
        if last > rows {
            last = rows;
        }
        if comptime!(mutant == 8) {
            last -= 1;
        }
        let mut for_c = Array::<f32>::new(TOGETHER);
        let mut for_x0 = Array::<f32>::new(TOGETHER);
        let mut cs = Array::<f32>::new(ROWS);
        let mut x0s = Array::<f32>::new(ROWS);
        for chunk in 0..total.div_ceil(comptime!(TOGETHER)) {
            let from = chunk * comptime!(TOGETHER);
            #[unroll]
            for j in 0..comptime!(TOGETHER) {
                for_c[j] = 0.0f32;
                for_x0[j] = 0.0f32;
            }
            for turn in 0..(last - first).div_ceil(comptime!(ROWS)) {
                let top = first + turn * comptime!(ROWS);
                #[unroll]
                for r in 0..comptime!(ROWS) {
                    // Not guarded by a branch, so that all of them are under way together.
                    let n = select(top + r < last, top + r, top);
                    let (left, right) = (c.at(n * width + d), x0.at(n * width + d));
                    cs[r] = select(top + r < last, left, 0.0f32);
                    x0s[r] = select(top + r < last, right, 0.0f32);
                }
                #[unroll]
                for r in 0..comptime!(ROWS) {
                    let n = select(top + r < last, top + r, top);
                    #[unroll]
                    for j in 0..comptime!(TOGETHER) {
                        if from + j < total {
                            let gradient = draw.at(n * total + from + j);
                            for_c[j] = for_c[j] + cs[r] * gradient;
                            for_x0[j] = for_x0[j] + x0s[r] * gradient;
                        }
                    }
                }
            }
            #[unroll]
            for j in 0..comptime!(TOGETHER) {
                if from + j < total {
                    partial.set((block * 2 * width + d) * total + from + j, for_c[j]);
                    partial.set((block * 2 * width + width + d) * total + from + j, for_x0[j]);
                }
            }
        }
    }
}

/// raw and the gates.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { c, x0, weight, raw, gates, sizes } = *call;
    let uses = [c, x0, weight, raw, gates];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let mutant = b.mutant(super::STEM);
    b.launch("controller::forward", rows::cubes(sizes.rows), bytes, &uses, |client, count, dim| {
        let [c, x0, weight, raw, gates] = uses.map(|t| b.floats(t));
        let [n, d, total] = sizes.words();
        // SAFETY: shapes were checked by the caller; units past the rows, columns and gates touch nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(client, count, dim, c, x0, weight, raw, gates, n, d, total, mutant)
        }
    })
}

/// dc and dx0; the gradient of the weight is added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>) -> Result<()> {
    let Backward { saved, dgates, ref plus, dweight, dc, dx0, sizes } = *call;
    let Sizes { rows, width, gates: total, .. } = sizes;
    let mutant = b.mutant(super::STEM);
    let draw = b.float_scratch(&[rows, total])?;
    let uses = [&saved.raw, &saved.gates, dgates, &draw];
    b.launch("controller::draw", Grid::units(draw.len()), 4 * draw.bytes(), &uses, |client, count, dim| {
        let [raw, gates, dgates, draw] = uses.map(|t| b.floats(t));
        let [n, _, total] = sizes.words();
        // SAFETY: all have `rows` by `total` elements; units past them do nothing.
        unsafe { draw_kernel::launch_unchecked::<R>(client, count, dim, raw, gates, dgates, draw, n, total, mutant) }
    })?;
    // A kernel has all its arguments in every variant; where nothing arrives, `draw` stands in and is not read.
    let uses = [&draw, &saved.weight, plus.c.unwrap_or(&draw), plus.x0.unwrap_or(&draw), dc, dx0];
    let arriving = [plus.c, plus.x0].into_iter().flatten().map(Tensor::bytes).sum::<u64>();
    let bytes = draw.bytes() + saved.weight.bytes() + arriving + dc.bytes() + dx0.bytes();
    let grid = Grid::units(rows.div_ceil(ROWS) * width);
    b.launch("controller::dinputs", grid, bytes, &uses, |client, count, dim| {
        let [draw, weight, plus_c, plus_x0, dc, dx0] = uses.map(|t| b.floats(t));
        let [n, d, total] = sizes.words();
        let (has_c, has_x0) = (plus.c.is_some(), plus.x0.is_some());
        // SAFETY: shapes were checked by the caller; units past dc touch nothing.
        unsafe {
            inputs_kernel::launch_unchecked::<R>(
                client, count, dim, draw, weight, plus_c, plus_x0, dc, dx0, n, d, total, has_c, has_x0, mutant,
            )
        }
    })?;
    let blocks = rows.div_ceil(BLOCK);
    let partial = b.float_scratch(&[blocks, 2 * width * total])?;
    let uses = [&saved.c, &saved.x0, &draw, &partial];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("controller::dweight", Grid::units(blocks * width), bytes, &uses, |client, count, dim| {
        let [c, x0, draw, partial] = uses.map(|t| b.floats(t));
        let [n, d, total] = sizes.words();
        // SAFETY: `partial` has one weight a block; units past them do nothing.
        unsafe { weight_kernel::launch_unchecked::<R>(client, count, dim, c, x0, draw, partial, n, d, total, mutant) }
    })?;
    sum::add_partials(b, &partial, blocks, 2 * width * total, dweight)
}

impl Sizes {
    /// As arguments of a kernel.
    fn words(&self) -> [u32; 3] {
        [self.rows, self.width, self.gates].map(|n| n as u32)
    }
}
