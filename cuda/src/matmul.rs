//! Matrix products in f32 on any runtime: one tiled kernel, each element summed in one order.

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Rows and columns of a tile; a cube computes one tile of the product with one unit an element.
const TILE: u32 = 16;

/// What is added to the product.
#[derive(Clone, Copy)]
pub(crate) enum Plus<'a> {
    /// Nothing.
    Nothing,
    /// One row, to every row.
    Row(&'a Tensor),
    /// A matrix of the product's shape.
    Matrix(&'a Tensor),
    /// What the destination holds: the product accumulates.
    Destination,
}

/// A factor, stored as it is or transposed.
#[derive(Clone, Copy)]
pub(crate) struct Factor<'a> {
    pub tensor: &'a Tensor,
    pub transposed: bool,
}

/// A factor as it is stored.
pub(crate) fn plain(tensor: &Tensor) -> Factor<'_> {
    Factor { tensor, transposed: false }
}

/// The transpose of what is stored.
pub(crate) fn transposed(tensor: &Tensor) -> Factor<'_> {
    Factor { tensor, transposed: true }
}

/// `out = a b (+ plus)`, with a of `[m, k]` and b of `[k, n]`. One cube computes one tile: its units bring a tile of
/// each factor into shared memory, wait for each other, and each adds the products of one row and one column, over k
/// from first to last.
#[cube(launch_unchecked)]
fn product_kernel(
    a: &Floats,
    b: &Floats,
    plus: &Floats,
    out: &mut Floats,
    m: u32,
    k: u32,
    n: u32,
    #[comptime] a_transposed: bool,
    #[comptime] b_transposed: bool,
    #[comptime] plus_kind: u32,
) {
    let (m, k, n) = (m as usize, k as usize, n as usize);
    let tile = comptime!(TILE as usize);
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let row = CUBE_POS_X as usize * tile + y;
    let column = CUBE_POS_Y as usize * tile + x;
    let mut a_tile = SharedMemory::<f32>::new(comptime!((TILE * TILE) as usize));
    let mut b_tile = SharedMemory::<f32>::new(comptime!((TILE * TILE) as usize));
    let mut sum = 0.0f32;
    for step in 0..k.div_ceil(tile) {
        let a_column = step * tile + x;
        let b_row = step * tile + y;
        let mut a_value = 0.0f32;
        if row < m && a_column < k {
            if a_transposed {
                a_value = a.at(a_column * m + row);
            } else {
                a_value = a.at(row * k + a_column);
            }
        }
        let mut b_value = 0.0f32;
        if b_row < k && column < n {
            if b_transposed {
                b_value = b.at(column * k + b_row);
            } else {
                b_value = b.at(b_row * n + column);
            }
        }
        a_tile[y * tile + x] = a_value;
        b_tile[y * tile + x] = b_value;
        sync_cube();
        for i in 0..tile {
            sum += a_tile[y * tile + i] * b_tile[i * tile + x];
        }
        sync_cube();
    }
    if row < m && column < n {
        let at = row * n + column;
        if comptime!(plus_kind == 1) {
            sum += plus.at(column);
        }
        if comptime!(plus_kind == 2) {
            sum += plus.at(at);
        }
        if comptime!(plus_kind == 3) {
            sum += out.at(at);
        }
        out.set(at, sum);
    }
}

/// Computes a product of `m` by `k` and `k` by `n` into `out`; `name` is what the ledger calls it.
pub(crate) fn product<R: Engine>(
    device: &Device<R>,
    name: &'static str,
    (m, k, n): (usize, usize, usize),
    a: Factor<'_>,
    b: Factor<'_>,
    plus: Plus<'_>,
    out: &Tensor,
) -> Result<()> {
    // A kernel has all its arguments in every variant; where nothing is read, `a` stands in.
    let (kind, added) = match plus {
        Plus::Nothing => (0, a.tensor),
        Plus::Row(row) => (1, row),
        Plus::Matrix(matrix) => (2, matrix),
        Plus::Destination => (3, a.tensor),
    };
    let read = match plus {
        Plus::Nothing => 0,
        Plus::Row(t) | Plus::Matrix(t) => t.bytes(),
        Plus::Destination => out.bytes(),
    };
    let bytes = a.tensor.bytes() + b.tensor.bytes() + read + out.bytes();
    let uses = [a.tensor, b.tensor, added, out];
    device.launch(name, Grid::tiles(m, n, TILE), bytes, &uses, |client, count, dim| {
        let [left, right, added, out] = uses.map(|t| device.floats(t));
        // SAFETY: every access is guarded by the row, column and depth it needs; the caller checked the shapes.
        unsafe {
            product_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                left,
                right,
                added,
                out,
                m as u32,
                k as u32,
                n as u32,
                a.transposed,
                b.transposed,
                kind,
            )
        }
    })
}
