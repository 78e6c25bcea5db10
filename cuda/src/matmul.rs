//! Matrix products on any runtime: one tiled kernel, each element summed in one order.
//!
//! ```text
//! out_e = a_e b_e (+ plus),   e < batch,   a_e [m, k],  b_e [k, n],  out_e [m, n]
//! ```
//!
//! Arm `plain` has a tile of 16 by 16 and one element a unit; arm `fused` one of 64 by 64 and sixteen, so that a value
//! in shared memory is read four times less often. With [`Precision::Tf32`] and [`Precision::Bf16`] both factors are
//! rounded, to nearest and to even, before they are multiplied; sums are f32 always.

use cubecl::prelude::*;
use dormouse_reference::{Error, Precision, Result};

use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::narrow::{EDGE, Narrow};
use crate::runtime::{Engine, gemm};
use crate::tensor::{Floats, Tensor, WORD};

/// Units of a cube: 16 by 16, whatever the tile.
const UNITS: u32 = 256;

/// Units along an edge of the cube, and the depth of a tile.
const SIDE: u32 = 16;

/// A matrix in a tensor, or several at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// What it lies in.
    pub tensor: &'a Tensor,
    /// Elements from a row's start to the next row's.
    pub row: usize,
    /// Elements from a matrix's start to the next one's in a batch; 0 takes the same matrix every time.
    pub next: usize,
}

/// A matrix of dense rows, the same for every member of a batch.
pub fn matrix(tensor: &Tensor, columns: usize) -> Matrix<'_> {
    Matrix { tensor, row: columns, next: 0 }
}

/// Dense matrices one after the other.
pub fn stack(tensor: &Tensor, rows: usize, columns: usize) -> Matrix<'_> {
    Matrix { tensor, row: columns, next: rows * columns }
}

/// A factor: a matrix as it is stored or its transpose.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    /// What is stored.
    pub matrix: Matrix<'a>,
    /// Whether the factor is its transpose.
    pub transposed: bool,
    /// Whether it is an operation's input, which nobody writes before the step ends (weights: before they are updated):
    /// then a copy in bf16 may stand in for it.
    pub input: bool,
}

impl Factor<'_> {
    /// The factor as an operation's input.
    #[must_use]
    pub fn of_input(self) -> Self {
        Self { input: true, ..self }
    }
}

impl<'a> Matrix<'a> {
    /// As a factor.
    #[must_use]
    pub fn plain(self) -> Factor<'a> {
        Factor { matrix: self, transposed: false, input: false }
    }

    /// Its transpose as a factor.
    #[must_use]
    pub fn transposed(self) -> Factor<'a> {
        Factor { matrix: self, transposed: true, input: false }
    }

    /// The number of elements from the tensor's start to the end of the last of `batch` matrices.
    fn reach(&self, batch: usize, rows: usize, columns: usize) -> usize {
        if batch == 0 || rows == 0 || columns == 0 {
            return 0;
        }
        (batch - 1) * self.next + (rows - 1) * self.row + columns
    }

    /// Elements of `batch` matrices, those that are the same counted once.
    fn elements(&self, batch: usize, rows: usize, columns: usize) -> usize {
        rows * columns * if self.next == 0 { batch.min(1) } else { batch }
    }
}

/// What is added to the product.
#[derive(Clone, Copy, Debug)]
pub enum Plus<'a> {
    /// Nothing.
    Nothing,
    /// One row, to every row.
    Row(&'a Tensor),
    /// Matrices that lie in their tensor as the product does in its own.
    Matrix(&'a Tensor),
    /// What the destination holds: the product accumulates.
    Destination,
}

/// A product, or a batch of them.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// What the ledger calls it.
    pub name: &'static str,
    /// Products.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Terms of a sum.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
    /// The left factor.
    pub a: Factor<'a>,
    /// The right factor.
    pub b: Factor<'a>,
    /// What is added.
    pub plus: Plus<'a>,
    /// Where the result goes; no memory of the factors or of `plus`.
    pub out: Matrix<'a>,
    /// What the factors are rounded to.
    pub precision: Precision,
}

impl Product<'_> {
    /// Refuses matrices that reach beyond their tensors.
    fn check(&self) -> Result<()> {
        let Product { name, batch, m, k, n, a, b, plus, out, .. } = *self;
        let sides = |factor: Factor<'_>, rows, columns| match factor.transposed {
            true => factor.matrix.reach(batch, columns, rows),
            false => factor.matrix.reach(batch, rows, columns),
        };
        let out_reach = out.reach(batch, m, n);
        let (added, added_reach) = match plus {
            Plus::Nothing | Plus::Destination => (out.tensor, 0),
            Plus::Row(row) => (row, n),
            Plus::Matrix(tensor) => (tensor, out_reach),
        };
        let parts = [
            ("a", a.matrix.tensor, sides(a, m, k)),
            ("b", b.matrix.tensor, sides(b, k, n)),
            ("plus", added, added_reach),
            ("out", out.tensor, out_reach),
        ];
        for (arg, tensor, reach) in parts {
            if reach > tensor.len() {
                let expected = format!("at least {reach} elements for batch {batch}, m {m}, k {k}, n {n}");
                return Err(Error::Shape { op: name, arg, expected, got: tensor.shape().to_vec() });
            }
        }
        Ok(())
    }

    /// What has to be read and written.
    fn bytes(&self) -> u64 {
        let Product { batch, m, k, n, a, b, plus, out, .. } = *self;
        let results = out.elements(batch, m, n);
        let read = match plus {
            Plus::Nothing => 0,
            Plus::Row(_) => n,
            Plus::Matrix(_) | Plus::Destination => results,
        };
        (a.matrix.elements(batch, m, k) + b.matrix.elements(batch, k, n) + read + results) as u64 * WORD
    }
}

/// `value` with the digits of tf32 (`rounding` 1) or bf16 (2), to nearest and to even; NaN and the infinities stay.
#[cube]
fn rounded(value: f32, #[comptime] rounding: u32) -> f32 {
    if comptime!(rounding == 0) {
        value
    } else {
        let dropped = comptime!(if rounding == 1 { 13u32 } else { 16u32 });
        let below_half = comptime!((1u32 << (dropped - 1)) - 1);
        let kept = comptime!(!((1u32 << dropped) - 1));
        let bits = u32::reinterpret(value);
        let exponent = bits & 0x7f80_0000u32;
        let mut result = value;
        if exponent != 0x7f80_0000u32 {
            let odd = (bits >> dropped) & 1u32;
            result = f32::reinterpret((bits + below_half + odd) & kept);
        }
        result
    }
}

/// One cube computes one tile. Its units bring a slice of each factor into shared memory, wait for each other, and each
/// adds products to its elements, over k from first to last. A unit has the rows y, y + 16, .. and the columns x, x + 16,
/// .. of the tile, so that neighbours read neighbouring words.
#[cube(launch_unchecked)]
fn product_kernel(
    a: &Floats,
    b: &Floats,
    plus: &Floats,
    out: &mut Floats,
    batch: u32,
    m: u32,
    k: u32,
    n: u32,
    a_row: u32,
    a_next: u32,
    b_row: u32,
    b_next: u32,
    out_row: u32,
    out_next: u32,
    #[comptime] a_transposed: bool,
    #[comptime] b_transposed: bool,
    #[comptime] plus_kind: u32,
    #[comptime] rounding: u32,
    #[comptime] per: usize,
) {
    let (m, k, n) = (m as usize, k as usize, n as usize);
    let side = comptime!(SIDE as usize);
    let edge = comptime!(SIDE as usize * per);
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % side, unit / side);
    let (row_tiles, column_tiles) = (m.div_ceil(edge), n.div_ceil(edge));
    let first_column = CUBE_POS % column_tiles * edge;
    let first_row = CUBE_POS / column_tiles % row_tiles * edge;
    let e = CUBE_POS / (row_tiles * column_tiles);
    let here = e < batch as usize;
    let (a_at, b_at, out_at) = (e * a_next as usize, e * b_next as usize, e * out_next as usize);
    let (a_row, b_row, out_row) = (a_row as usize, b_row as usize, out_row as usize);
    let mut a_tile = SharedMemory::<f32>::new(comptime!(SIDE as usize * SIDE as usize * per));
    let mut b_tile = SharedMemory::<f32>::new(comptime!(SIDE as usize * SIDE as usize * per));
    let mut sums = Array::<f32>::new(comptime!(per * per));
    let mut left = Array::<f32>::new(per);
    #[unroll]
    for i in 0..comptime!(per * per) {
        sums[i] = 0.0f32;
    }
    for step in 0..k.div_ceil(side) {
        let depth = step * side;
        #[unroll]
        for i in 0..per {
            let at = unit + comptime!(i * UNITS as usize);
            // Neighbouring units read neighbouring elements of what is stored, either way.
            let mut row = at / side;
            let mut inner = at % side;
            if comptime!(a_transposed) {
                row = at % edge;
                inner = at / edge;
            }
            let mut value = 0.0f32;
            if here && first_row + row < m && depth + inner < k {
                if comptime!(a_transposed) {
                    value = a.at(a_at + (depth + inner) * a_row + first_row + row);
                } else {
                    value = a.at(a_at + (first_row + row) * a_row + depth + inner);
                }
            }
            a_tile[inner * edge + row] = rounded(value, rounding);
            let mut column = at % edge;
            let mut inner = at / edge;
            if comptime!(b_transposed) {
                column = at / side;
                inner = at % side;
            }
            let mut value = 0.0f32;
            if here && first_column + column < n && depth + inner < k {
                if comptime!(b_transposed) {
                    value = b.at(b_at + (first_column + column) * b_row + depth + inner);
                } else {
                    value = b.at(b_at + (depth + inner) * b_row + first_column + column);
                }
            }
            b_tile[inner * edge + column] = rounded(value, rounding);
        }
        sync_cube();
        for inner in 0..side {
            #[unroll]
            for i in 0..per {
                left[i] = a_tile[inner * edge + y + comptime!(i * SIDE as usize)];
            }
            #[unroll]
            for j in 0..per {
                let right = b_tile[inner * edge + x + comptime!(j * SIDE as usize)];
                #[unroll]
                for i in 0..per {
                    sums[comptime!(i * per + j)] += left[i] * right;
                }
            }
        }
        sync_cube();
    }
    if here {
        #[unroll]
        for i in 0..per {
            let row = first_row + y + comptime!(i * SIDE as usize);
            #[unroll]
            for j in 0..per {
                let column = first_column + x + comptime!(j * SIDE as usize);
                if row < m && column < n {
                    let at = out_at + row * out_row + column;
                    let mut sum = sums[comptime!(i * per + j)];
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
        }
    }
}

impl<R: Engine> Device<R> {
    /// Computes a product for tests and measurements; operations have their own checks.
    ///
    /// # Errors
    /// `Shape` if a matrix reaches beyond its tensor, `Storage` for tensors that are no floats, `Aliased` if the result
    /// shares memory with what is read, `Device` if the runtime's library is missing or fails.
    pub fn product(&self, arm: Arm, call: &Product<'_>) -> Result<()> {
        let mut reads = vec![("a", call.a.matrix.tensor), ("b", call.b.matrix.tensor)];
        if let Plus::Row(tensor) | Plus::Matrix(tensor) = call.plus {
            reads.push(("plus", tensor));
        }
        self.check_floats(call.name, &reads)?;
        self.check_floats(call.name, &[("out", call.out.tensor)])?;
        if let Some(&(other, _)) = reads.iter().find(|(_, tensor)| call.out.tensor.overlaps(tensor)) {
            return Err(Error::Aliased { op: call.name, arg: "out", other });
        }
        product(self, arm, call)
    }
}

/// Computes a product: with arm `fused` in the library of the runtime where it has one.
///
/// # Errors
/// `Shape` if a matrix reaches beyond its tensor; `Device` if the library is missing or fails.
pub(crate) fn product<R: Engine>(device: &Device<R>, arm: Arm, product: &Product<'_>) -> Result<()> {
    product.check()?;
    match arm {
        Arm::Plain => tiled(device, 1, product),
        Arm::Fused if library(device, product)? => Ok(()),
        Arm::Fused => tiled(device, 4, product),
    }
}

/// Computes a product in the runtime's library; false if it did not.
fn library<R: Engine>(device: &Device<R>, product: &Product<'_>) -> Result<bool> {
    let Product { name, batch, m, k, n, a, b, plus, out, precision } = *product;
    if batch == 0 || m == 0 || k == 0 || n == 0 {
        // Libraries refuse sizes of zero; a sum of no terms is zero and the tiled kernel knows it.
        return Ok(false);
    }
    let (added, matrix) = match plus {
        Plus::Nothing => (gemm::Added::Nothing, out.tensor),
        Plus::Row(row) => (gemm::Added::Row, row),
        Plus::Matrix(matrix) => (gemm::Added::Matrix, matrix),
        Plus::Destination => (gemm::Added::Destination, out.tensor),
    };
    let stored = |factor: Factor<'_>| gemm::Stored {
        transposed: factor.transposed,
        row: factor.matrix.row,
        next: factor.matrix.next,
    };
    let narrow = narrowed(device, product)?;
    let (left, right, out_stored) = (stored(a), stored(b), stored(out.plain()));
    let call =
        gemm::Call { precision, narrow: narrow.is_some(), batch, m, k, n, a: left, b: right, added, out: out_stored };
    let (left, right) = (a.matrix.tensor, b.matrix.tensor);
    match &narrow {
        Some([a, b]) => {
            let uses = [&a.words, &b.words, matrix, out.tensor];
            let [mut left, mut right, added, out] = uses.map(Tensor::place);
            left.offset += a.offset;
            right.offset += b.offset;
            device.gemm(name, product.bytes(), &uses, &call, &gemm::Starts { a: left, b: right, added, out })
        }
        None => {
            let uses = [left, right, matrix, out.tensor];
            let [a, b, added, out] = uses.map(Tensor::place);
            device.gemm(name, product.bytes(), &uses, &call, &gemm::Starts { a, b, added, out })
        }
    }
}

/// Rows, terms and columns from which on a product in bf16 has its operands in bf16: with fewer, reading f32 costs less
/// than a copy does.
const NARROW_FROM: usize = 256;

/// Makes the copies that a product will read, so that branches beside each other share them.
pub(crate) fn prepare<R: Engine>(device: &Device<R>, arm: Arm, product: &Product<'_>) -> Result<()> {
    if arm == Arm::Fused {
        narrowed(device, product)?;
    }
    Ok(())
}

/// The operands in bf16, where that is asked for, both are inputs, and both can be read 16 bytes at a time.
fn narrowed<R: Engine>(device: &Device<R>, product: &Product<'_>) -> Result<Option<[Narrow; 2]>> {
    let Product { batch, m, k, n, a, b, plus, precision, .. } = *product;
    let even = |factor: Factor<'_>| {
        factor.input && [factor.matrix.row, factor.matrix.next].iter().all(|step| step.is_multiple_of(EDGE as usize))
    };
    let large = batch > 0 && [m, k, n].iter().all(|&side| side >= NARROW_FROM);
    // The library has no sum of a row for these types.
    let wanted = R::NARROW && precision == Precision::Bf16 && large && !matches!(plus, Plus::Row(_));
    if !(wanted && even(a) && even(b)) {
        return Ok(None);
    }
    Ok(Some([device.narrow(a.matrix.tensor)?, device.narrow(b.matrix.tensor)?]))
}

/// Computes a product with the tiled kernel, `per` by `per` elements a unit.
fn tiled<R: Engine>(device: &Device<R>, per: usize, product: &Product<'_>) -> Result<()> {
    let Product { name, batch, m, k, n, a, b, plus, out, precision } = *product;
    // A kernel has all its arguments in every variant; where nothing is read, `a` stands in.
    let (kind, added) = match plus {
        Plus::Nothing => (0, a.matrix.tensor),
        Plus::Row(row) => (1, row),
        Plus::Matrix(matrix) => (2, matrix),
        Plus::Destination => (3, a.matrix.tensor),
    };
    let rounding = match precision {
        Precision::Full => 0,
        Precision::Tf32 => 1,
        Precision::Bf16 => 2,
    };
    let edge = SIDE as usize * per;
    let grid = Grid::cubes(batch * m.div_ceil(edge) * n.div_ceil(edge), UNITS);
    let uses = [a.matrix.tensor, b.matrix.tensor, added, out.tensor];
    device.launch(name, grid, product.bytes(), &uses, |client, count, dim| {
        let [left, right, added, result] = uses.map(|t| device.floats(t));
        let word = |n: usize| n as u32;
        // SAFETY: every access is guarded by the row, column and depth it needs; `check` compared them with the tensors.
        unsafe {
            product_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                left,
                right,
                added,
                result,
                word(batch),
                word(m),
                word(k),
                word(n),
                word(a.matrix.row),
                word(a.matrix.next),
                word(b.matrix.row),
                word(b.matrix.next),
                word(out.row),
                word(out.next),
                a.transposed,
                b.transposed,
                kind,
                rounding,
                per,
            )
        }
    })
}
