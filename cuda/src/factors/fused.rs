//! The kernels of arm `fused` beside its products: one scales U and V before the products of forward, one turns the
//! products of backward into gradients.

use cubecl::prelude::*;
use dormouse_reference::{Result, Tensors};

use super::{Factors, Names, Side, Sizes};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Units of a cube of [`finish_kernel`], and the columns of ds that one cube sums: a sector of memory wide.
const UNITS: u32 = 256;
const COLUMNS: u32 = 8;

/// us = U * s, with rows `us_row` apart and experts `us_next`, and vs = V * s as V lies. One unit, one element.
///
/// Mutants: 1 leaves V as it is, 2 leaves U as it is.
#[cube(launch_unchecked)]
fn scale_kernel(
    u: &Floats,
    s: &Floats,
    v: &Floats,
    us: &mut Floats,
    vs: &mut Floats,
    experts: u32,
    inner: u32,
    outer: u32,
    rank: u32,
    us_row: u32,
    us_next: u32,
    #[comptime] mutant: u32,
) {
    let (experts, inner, outer, rank) = (experts as usize, inner as usize, outer as usize, rank as usize);
    let of_u = experts * inner * rank;
    let i = ABSOLUTE_POS;
    if i < of_u {
        let (r, row, e) = (i % rank, i / rank % inner, i / (rank * inner));
        let mut value = u.at(i) * s.at(e * rank + r);
        if comptime!(mutant == 2) {
            value = u.at(i);
        }
        us.set(e * us_next as usize + row * us_row as usize + r, value);
    } else if i < of_u + experts * outer * rank {
        let i = i - of_u;
        let (r, e) = (i % rank, i / (rank * outer));
        let mut value = v.at(i) * s.at(e * rank + r);
        if comptime!(mutant == 1) {
            value = v.at(i);
        }
        vs.set(i, value);
    }
}

/// dU += P * s, dV += Q * s and ds += sum_rows U * P, with P = x^T b (rows `p_row` apart, experts `p_next`) and
/// Q = dy^T a. The first cubes sum 8 columns of ds each: every lane each 32nd row, then the first lane adds up the lanes.
/// The units of the others take one element of dU or dV.
///
/// Mutants: 3 drops the s of dU, 4 that of dV, 5 multiplies ds with s, 6 misses the last row in ds, 7 is null (a renamed
/// local).
#[cube(launch_unchecked)]
fn finish_kernel(
    p: &Floats,
    q: &Floats,
    u: &Floats,
    s: &Floats,
    du: &mut Floats,
    ds: &mut Floats,
    dv: &mut Floats,
    experts: u32,
    inner: u32,
    outer: u32,
    rank: u32,
    p_row: u32,
    p_next: u32,
    #[comptime] mutant: u32,
) {
    let (experts, inner, outer, rank) = (experts as usize, inner as usize, outer as usize, rank as usize);
    let (p_row, p_next) = (p_row as usize, p_next as usize);
    let columns = comptime!(COLUMNS as usize);
    let lanes = comptime!((UNITS / COLUMNS) as usize);
    let unit = UNIT_POS as usize;
    let blocks = rank.div_ceil(columns);
    let (block, lane, e) = (CUBE_POS % blocks, unit / columns, CUBE_POS / blocks);
    let r = block * columns + unit % columns;
    let sums = e < experts;
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut total = 0.0f32;
    let mut rows = inner;
    if comptime!(mutant == 6) {
        rows = inner - 1;
    }
    if sums && r < rank {
        for step in 0..rows.div_ceil(lanes) {
            let row = step * lanes + lane;
            if row < rows {
                total += u.at((e * inner + row) * rank + r) * p.at(e * p_next + row * p_row + r);
            }
        }
    }
    shared[unit] = total;
    sync_cube();
    if sums {
        if lane == 0 && r < rank {
            let mut all = 0.0f32;
            for other in 0..lanes {
                all += shared[other * columns + unit];
            }
            let at = e * rank + r;
            if comptime!(mutant == 5) {
                all *= s.at(at);
            }
            ds.set(at, ds.at(at) + all);
        }
    } else {
        let of_u = experts * inner * rank;
        let i = (CUBE_POS - experts * blocks) * comptime!(UNITS as usize) + unit;
        if i < of_u {
            let (r, row, e) = (i % rank, i / rank % inner, i / (rank * inner));
            let mut scale = s.at(e * rank + r);
            if comptime!(mutant == 3) {
                scale = 1.0f32;
            }
            du.set(i, du.at(i) + p.at(e * p_next + row * p_row + r) * scale);
        } else if i < of_u + experts * outer * rank {
            let i = i - of_u;
            let (r, e) = (i % rank, i / (rank * outer));
            let mut scale = s.at(e * rank + r);
            if comptime!(mutant == 4) {
                scale = 1.0f32;
            }
            if comptime!(mutant == 7) {
                let renamed = s.at(e * rank + r);
                scale = renamed;
            }
            dv.set(i, dv.at(i) + q.at(i) * scale);
        }
    }
}

impl Side {
    /// Elements from a row to the next.
    pub fn row(self, sizes: &Sizes) -> usize {
        self.maps * sizes.experts * sizes.rank
    }

    /// The part of `whole` that starts with this map's first element.
    fn part<R: Engine>(self, device: &Device<R>, whole: &Tensor, sizes: &Sizes) -> Result<Tensor> {
        let at = self.map * sizes.experts * sizes.rank;
        device.view(whole, at, &[whole.len() - at])
    }
}

/// Where the matrices of a map lie: side by side with others, or one after the other.
fn distances(sizes: &Sizes, side: Option<Side>) -> (usize, usize) {
    match side {
        Some(side) => (side.row(sizes), sizes.rank),
        None => (sizes.rank, sizes.inner * sizes.rank),
    }
}

/// Writes U * s into `us` and returns V * s, `[E, O, R]`. `us` is `[I, maps, E, R]` with a side, `[E, I, R]` without.
pub(crate) fn scale<R: Engine>(
    device: &Device<R>,
    names: &Names,
    factors: &Factors<'_>,
    sizes: &Sizes,
    side: Option<Side>,
    us: &Tensor,
) -> Result<Tensor> {
    let vs = device.float_scratch(factors.v.shape())?;
    let part = side.map_or(Ok(us.clone()), |side| side.part(device, us, sizes))?;
    let (row, next) = distances(sizes, side);
    let uses = [factors.u, factors.s, factors.v, &part, &vs];
    let bytes = 2 * (factors.u.bytes() + factors.v.bytes()) + factors.s.bytes();
    let grid = Grid::units(factors.u.len() + factors.v.len());
    let mutant = device.mutant(names.stem);
    device.launch(names.scale, grid, bytes, &uses, |client, count, dim| {
        let [u, s, v, us, vs] = uses.map(|t| device.floats(t));
        let [experts, inner, outer, rank] = sizes.words();
        let (row, next) = (row as u32, next as u32);
        // SAFETY: the factors have the sizes that go along; units past them do nothing.
        unsafe {
            scale_kernel::launch_unchecked::<R>(
                client, count, dim, u, s, v, us, vs, experts, inner, outer, rank, row, next, mutant,
            )
        }
    })?;
    Ok(vs)
}

/// Adds the gradients of the factors to `into`. `p` lies as `us` does in [`scale`]; `q` is `[E, O, R]`.
pub(crate) fn finish<R: Engine>(
    device: &Device<R>,
    names: &Names,
    factors: &Factors<'_>,
    sizes: &Sizes,
    side: Option<Side>,
    (p, q): (&Tensor, &Tensor),
    into: &Factors<'_>,
) -> Result<()> {
    let part = side.map_or(Ok(p.clone()), |side| side.part(device, p, sizes))?;
    let (row, next) = distances(sizes, side);
    let uses = [&part, q, factors.u, factors.s, into.u, into.s, into.v];
    let bytes = 4 * factors.u.bytes() + 3 * factors.v.bytes() + 3 * factors.s.bytes();
    let sums = sizes.experts * sizes.rank.div_ceil(COLUMNS as usize);
    let elements = (factors.u.len() + factors.v.len()).div_ceil(UNITS as usize);
    let mutant = device.mutant(names.stem);
    device.launch(names.finish, Grid::cubes(sums + elements, UNITS), bytes, &uses, |client, count, dim| {
        let [p, q, u, s, du, ds, dv] = uses.map(|t| device.floats(t));
        let [experts, inner, outer, rank] = sizes.words();
        let (row, next) = (row as u32, next as u32);
        // SAFETY: the factors and their gradients have the sizes that go along; units past them do nothing.
        unsafe {
            finish_kernel::launch_unchecked::<R>(
                client, count, dim, p, q, u, s, du, ds, dv, experts, inner, outer, rank, row, next, mutant,
            )
        }
    })
}

impl Sizes {
    /// As arguments of a kernel.
    fn words(&self) -> [u32; 4] {
        [self.experts, self.inner, self.outer, self.rank].map(|n| n as u32)
    }
}
