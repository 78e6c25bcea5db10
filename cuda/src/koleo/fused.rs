//! Arm `fused`.
//!
//! Forward is four launches: one cube chooses the rows; some units normalise a row, see [`rows`]; a cube takes the
//! distances of [`TILE`] rows to [`TILE`] others, with both in shared memory a few columns at a time, and leaves everyone's
//! nearest among them; one cube takes the nearest over the tiles and adds up the logarithms. It reads the mask and the
//! chosen rows of z once, and p, which stays in the cache, once for every tile.
//!
//! A squared distance is summed column by column, so rows that are equally far by their numbers are so by their bits, and
//! the distance from i to j is that from j to i.
//!
//! Backward is one launch in which a cube has a row of dz: it looks through the neighbours for those whose neighbour the
//! row is, in their order, and keeps its columns of dp in registers. It reads `plus` and writes dz.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{Backward, Forward, Rows, Saved, push};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::mask;
use crate::rows;
use crate::runtime::Engine;
use crate::tensor::{Floats, Words};

/// Rows of a tile of distances; a unit has one distance.
const TILE: u32 = 16;

/// Units of a cube of distances.
const PAIRS: u32 = TILE * TILE;

/// Columns of a tile that lie in shared memory at once.
const DEPTH: u32 = 32;

/// Elements from one row in shared memory to the next: one more than its columns, so that units of different rows do not
/// read the same bank.
const PITCH: u32 = DEPTH + 1;

/// Marks the absence of a row.
const NONE: u32 = u32::MAX;

/// The most columns of a unit for which loops are unrolled.
const UNROLLED: u32 = 8;

/// Which rows are chosen and how many. One cube; a unit has a run of positions.
///
/// Mutants: 9 takes the first rows instead of every k-th one, 10 takes every position for a masked one.
#[cube(launch_unchecked)]
fn choose_kernel(
    mask: &Words,
    chosen: &mut Words,
    place: &mut Words,
    count: &mut Words,
    rows: u32,
    limit: u32,
    #[comptime] kind: u32,
    #[comptime] mutant: u32,
) {
    let unit = UNIT_POS as usize;
    let units = comptime!(cube::UNITS as usize);
    let rows = rows as usize;
    let kind = comptime!(if mutant == 10 { mask::NONE } else { kind });
    let mut counts = SharedMemory::<u32>::new(units);
    let run = rows.div_ceil(units);
    let begin = unit * run;
    let mut end = begin + run;
    if end > rows {
        end = rows;
    }
    let mut masked = 0u32;
    for n in begin..end {
        if mask::is_set(mask, n, kind) {
            masked += 1u32;
        }
    }
    counts[unit] = masked;
    sync_cube();
    let mut rank = 0u32;
    let mut all = 0u32;
    for other in 0..units {
        if other < unit {
            rank += counts[other];
        }
        all += counts[other];
    }
    let mut stride = all.div_ceil(limit);
    if stride == 0u32 {
        stride = 1u32;
    }
    let mut taken = all.div_ceil(stride);
    if comptime!(mutant == 9) {
        stride = 1u32;
        taken = all;
        if taken > limit {
            taken = limit;
        }
    }
    for n in begin..end {
        let mut at = 0u32;
        if mask::is_set(mask, n, kind) {
            let k = rank / stride;
            if rank % stride == 0u32 && k < taken {
                chosen.set(k as usize, n as u32);
                at = k + 1u32;
            }
            rank += 1u32;
        }
        place.set(n, at);
    }
    if unit == 0 {
        count.set(0, taken);
    }
}

/// q and p of the chosen rows. Some units share a row.
#[cube(launch_unchecked)]
fn rows_kernel(z: &Floats, chosen: &Words, count: &Words, p: &mut Floats, q: &mut Floats, width: u32, norm_eps: f32) {
    let (i, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = i < count.at(0) as usize;
    let mut row = 0usize;
    let mut square = 0.0f32;
    if here {
        row = chosen.at(i) as usize * width;
        for step in 0..width.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < width {
                square += z.at(row + d) * z.at(row + d);
            }
        }
    }
    let scale = 1.0f32 / (rows::sum(square, &mut shared) + norm_eps).sqrt();
    if here {
        if lane == 0 {
            q.set(i, scale);
        }
        for step in 0..width.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < width {
                p.set(i * width + d, scale * z.at(row + d));
            }
        }
    }
}

/// For every row of a tile its nearest among the rows of another, with the squared distance; [`NONE`] where there is no
/// other row. Both outputs have `room` elements for every tile of others.
///
/// Mutants: 1 lets a row be its own neighbour, 2 takes the highest of equals.
#[cube(launch_unchecked)]
fn tiles_kernel(
    p: &Floats,
    count: &Words,
    candidate: &mut Words,
    distance: &mut Floats,
    width: u32,
    tiles: u32,
    room: u32,
    #[comptime] mutant: u32,
) {
    let unit = UNIT_POS as usize;
    let tile = comptime!(TILE as usize);
    let depth = comptime!(DEPTH as usize);
    let pitch = comptime!(PITCH as usize);
    let (width, tiles) = (width as usize, tiles as usize);
    let all = count.at(0) as usize;
    let (mine, others) = (CUBE_POS / tiles * tile, CUBE_POS % tiles * tile);
    let (r, c) = (unit / tile, unit % tile);
    let mut left = SharedMemory::<f32>::new(comptime!((TILE * PITCH) as usize));
    let mut right = SharedMemory::<f32>::new(comptime!((TILE * PITCH) as usize));
    let mut squares = SharedMemory::<f32>::new(comptime!(PAIRS as usize));
    let mut sum = 0.0f32;
    for step in 0..width.div_ceil(depth) {
        #[unroll]
        for part in 0..comptime!(TILE * DEPTH / PAIRS) {
            let at = part as usize * comptime!(PAIRS as usize) + unit;
            let (row, column) = (at / depth, at % depth);
            let d = step * depth + column;
            // Rows and columns that are not there differ by nothing.
            let mut one = 0.0f32;
            let mut two = 0.0f32;
            if d < width {
                if mine + row < all {
                    one = p.at((mine + row) * width + d);
                }
                if others + row < all {
                    two = p.at((others + row) * width + d);
                }
            }
            left[row * pitch + column] = one;
            right[row * pitch + column] = two;
        }
        sync_cube();
        for e in 0..depth {
            let difference = left[r * pitch + e] - right[c * pitch + e];
            sum += difference * difference;
        }
        sync_cube();
    }
    squares[unit] = sum;
    sync_cube();
    let i = mine + r;
    if c == 0 && i < all {
        let mut row = comptime!(NONE).runtime();
        let mut best = 0.0f32;
        for other in 0..tile {
            let j = others + other;
            let square = squares[r * tile + other];
            let mut is_other = j != i;
            if comptime!(mutant == 1) {
                is_other = true;
            }
            if is_other && j < all {
                let mut nearer = square < best;
                if comptime!(mutant == 2) {
                    nearer = square <= best;
                }
                if nearer || row == comptime!(NONE) {
                    row = j as u32;
                    best = square;
                }
            }
        }
        let at = CUBE_POS % tiles * room as usize + i;
        candidate.set(at, row);
        distance.set(at, best);
    }
}

/// Everyone's neighbour, loss and 1 / M. One cube; a unit has every [`cube::UNITS`]-th row.
///
/// Mutants: 3 misses the last tile, 4 is null (a renamed local), 5 drops the half.
#[cube(launch_unchecked)]
fn loss_kernel(
    candidate: &Words,
    distance: &Floats,
    count: &Words,
    nearest: &mut Words,
    square: &mut Floats,
    loss: &mut Floats,
    share: &mut Floats,
    room: u32,
    eps: f32,
    #[comptime] mutant: u32,
) {
    let unit = UNIT_POS as usize;
    let units = comptime!(cube::UNITS as usize);
    let all = count.at(0) as usize;
    let mut shared = SharedMemory::<f32>::new(units);
    let mut tiles = all.div_ceil(comptime!(TILE as usize));
    if comptime!(mutant == 3) {
        // Without rows there are none, and nobody asks.
        tiles -= 1;
    }
    let mut part = 0.0f32;
    for step in 0..all.div_ceil(units) {
        let i = step * units + unit;
        if i < all {
            let mut row = comptime!(NONE).runtime();
            let mut best = 0.0f32;
            for tile in 0..tiles {
                let at = tile * room as usize + i;
                let found = candidate.at(at);
                if found != comptime!(NONE) {
                    let there = distance.at(at);
                    if there < best || row == comptime!(NONE) {
                        row = found;
                        best = there;
                    }
                }
            }
            if row == comptime!(NONE) {
                // A row alone; nobody looks at its neighbour.
                row = 0u32;
            } else {
                part += (best + eps).ln();
            }
            nearest.set(i, row);
            square.set(i, best);
        }
    }
    let sum = cube::sum(part, &mut shared);
    if unit == 0 {
        let mut one = 0.0f32;
        if all > 1 {
            one = 1.0f32 / f32::cast_from(all as u32);
        }
        share.set(0, one);
        let mut value = -0.5f32 * one * sum;
        if comptime!(mutant == 4) {
            let renamed = -0.5f32 * one * sum;
            value = renamed;
        }
        if comptime!(mutant == 5) {
            value = -one * sum;
        }
        loss.set(0, value);
    }
}

/// dz. One cube, one row.
///
/// Mutants: 6 drops the pushes of those whose neighbour the row is, 7 drops the part along p, 8 drops `plus`.
#[cube(launch_unchecked)]
fn backward_kernel(
    p: &Floats,
    q: &Floats,
    place: &Words,
    nearest: &Words,
    square: &Floats,
    count: &Words,
    share: &Floats,
    dloss: &Floats,
    plus: &Floats,
    dz: &mut Floats,
    rows: u32,
    width: u32,
    eps: f32,
    #[comptime] steps: u32,
    #[comptime] has_plus: bool,
    #[comptime] mutant: u32,
) {
    let (n, unit) = (CUBE_POS, UNIT_POS as usize);
    let units = comptime!(cube::UNITS as usize);
    let unroll = comptime!(steps <= UNROLLED);
    let width = width as usize;
    let mut shared = SharedMemory::<f32>::new(units);
    let mut dp = Array::<f32>::new(comptime!(steps as usize));
    #[unroll(unroll)]
    for step in 0..comptime!(steps as usize) {
        dp[step] = 0.0f32;
    }
    let here = n < rows as usize;
    let all = count.at(0) as usize;
    let mut at = 0u32;
    if here {
        at = place.at(n);
    }
    let is_chosen = at > 0u32;
    let mut i = 0usize;
    let mut product = 0.0f32;
    let mut scale = 0.0f32;
    if is_chosen {
        i = (at - 1u32) as usize;
        scale = q.at(i);
        if all > 1 {
            let size = dloss.at(0) * share.at(0);
            let j = nearest.at(i) as usize;
            #[unroll(unroll)]
            for step in 0..comptime!(steps as usize) {
                let d = step * units + unit;
                if d < width {
                    dp[step] = push(p, square, i, j, d, width, size, eps);
                }
            }
            if comptime!(mutant != 6) {
                for k in 0..all {
                    if nearest.at(k) == i as u32 {
                        #[unroll(unroll)]
                        for step in 0..comptime!(steps as usize) {
                            let d = step * units + unit;
                            if d < width {
                                dp[step] = dp[step] - push(p, square, k, i, d, width, size, eps);
                            }
                        }
                    }
                }
            }
            #[unroll(unroll)]
            for step in 0..comptime!(steps as usize) {
                let d = step * units + unit;
                if d < width {
                    product += p.at(i * width + d) * dp[step];
                }
            }
        }
    }
    let mut along = cube::total(product, &mut shared);
    if comptime!(mutant == 7) {
        along = 0.0f32;
    }
    if here {
        #[unroll(unroll)]
        for step in 0..comptime!(steps as usize) {
            let d = step * units + unit;
            if d < width {
                let mut value = 0.0f32;
                if comptime!(has_plus && mutant != 8) {
                    value = plus.at(n * width + d);
                }
                if is_chosen {
                    value += scale * (dp[step] - p.at(i * width + d) * along);
                }
                dz.set(n * width + d, value);
            }
        }
    }
}

/// loss and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { z, mask, rows, loss, share, n, width, room, norm_eps, eps } = *call;
    let Rows { count: counter, chosen, place, p, q, nearest, square } = rows;
    let (d, room_) = (width as u32, room as u32);
    let mutant = b.mutant(super::STEM);
    let uses = [mask, chosen, place, counter];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("koleo::choose", Grid::cubes(1, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [words, chosen, place, counter] = uses.map(|t| b.words(t));
        let (n, kind) = (n as u32, mask::kind(mask));
        // SAFETY: `place` has one element a row; no more rows are chosen than there is room for.
        unsafe {
            choose_kernel::launch_unchecked::<R>(
                client, count, dim, words, chosen, place, counter, n, room_, kind, mutant,
            )
        }
    })?;
    let uses = [z, chosen, counter, p, q];
    let bytes = 2 * p.bytes() + chosen.bytes() + q.bytes();
    b.launch("koleo::rows", rows::cubes(room), bytes, &uses, |client, count, dim| {
        let ([z, p, q], [chosen, counter]) = ([z, p, q].map(|t| b.floats(t)), [chosen, counter].map(|t| b.words(t)));
        // SAFETY: chosen rows lie in z; units past their number and past the columns touch nothing.
        unsafe { rows_kernel::launch_unchecked::<R>(client, count, dim, z, chosen, counter, p, q, d, norm_eps) }
    })?;
    let tiles = room.div_ceil(TILE as usize);
    let candidate = b.scratch(&[tiles, room], DType::U32)?;
    let distance = b.float_scratch(&[tiles, room])?;
    let uses = [p, counter, &candidate, &distance];
    let bytes = p.bytes() + candidate.bytes() + distance.bytes();
    b.launch("koleo::tiles", Grid::cubes(tiles * tiles, PAIRS), bytes, &uses, |client, count, dim| {
        let ([p, distance], [counter, candidate]) =
            ([p, &distance].map(|t| b.floats(t)), [counter, &candidate].map(|t| b.words(t)));
        let tiles = tiles as u32;
        // SAFETY: no more than the chosen rows are read and written; both outputs have `room` elements a tile.
        unsafe {
            tiles_kernel::launch_unchecked::<R>(
                client, count, dim, p, counter, candidate, distance, d, tiles, room_, mutant,
            )
        }
    })?;
    let uses = [&candidate, &distance, counter, nearest, square, loss, share];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("koleo::loss", Grid::cubes(1, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [candidate, counter, nearest] = [&candidate, counter, nearest].map(|t| b.words(t));
        let [distance, square, loss, share] = [&distance, square, loss, share].map(|t| b.floats(t));
        // SAFETY: no more than the chosen rows and their tiles are read and written.
        unsafe {
            loss_kernel::launch_unchecked::<R>(
                client, count, dim, candidate, distance, counter, nearest, square, loss, share, room_, eps, mutant,
            )
        }
    })
}

/// dz.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<()> {
    let Rows { count: counter, place, p, q, nearest, square, .. } = &saved.rows;
    let Backward { dloss, plus, dz, n, width, eps } = *call;
    let share = &saved.share;
    // A kernel has all its arguments in every variant; without `plus` nothing reads it.
    let uses = [p, q, place, nearest, square, counter, share, dloss, plus.unwrap_or(p), dz];
    let of_plus = plus.map_or(0, |plus| plus.bytes());
    let bytes = p.bytes() + q.bytes() + place.bytes() + nearest.bytes() + square.bytes() + dz.bytes() + of_plus;
    let mutant = b.mutant(super::STEM);
    b.launch("koleo::backward", Grid::cubes(n, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [place, nearest, counter] = [place, nearest, counter].map(|t| b.words(t));
        let [p, q, square, share, dloss, plus_, dz] = [p, q, square, share, dloss, uses[8], dz].map(|t| b.floats(t));
        let (n, d, has, steps) = (n as u32, width as u32, plus.is_some(), width.div_ceil(cube::UNITS as usize) as u32);
        // SAFETY: `place` and `nearest` name chosen rows; cubes past the rows and units past the columns touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, p, q, place, nearest, square, counter, share, dloss, plus_, dz, n, d, eps, steps,
                has, mutant,
            )
        }
    })
}
