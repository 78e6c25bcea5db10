//! Arm `fused`: what comes before and after the iteration, which is in [`small`] and [`large`].
//!
//! The matrices of a class lie in scratch as the transposes of their short orientation, `[C, n, k]` with k <= n, in
//! blocks of rows. In that form A = X^T X, the iteration multiplies X from the right, a row at a time, and of the plus the
//! columns of the short orientation are rows here.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | gather | G, M | X = mu M + (1 - mu) G; a block's power of two, its sum of squares, whether it has a gradient |
//! | the iteration | see [`small`], 9 launches for 8 iterations, and [`large`], 26 | X, the norms of its rows |
//! | columns | X, the norms | sums of squares of the columns of a block, rows normalised |
//! | write | G, M, W, X, norms and sums | M, W |
//!
//! So a class takes 12 launches for 8 iterations and k <= [`small::LARGEST_K`], else 29. M is computed again in the end
//! rather than kept, because a matrix without a gradient must keep its own and that is known only when all of it has been
//! seen.
//!
//! Instead of max|M|, a block is divided by the power of two at or below its largest element: exact, and the blocks' sums
//! of squares meet where they are used. Every sum has one order, which depends on the shape alone, so a matrix has the
//! same bits beside others and, but for products in a library, alone.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Call, Class, ENTRIES, STEM, gather, large, small, write};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tensor::{Floats, Tensor};

/// Units of a cube.
pub(super) const UNITS: u32 = cube::UNITS;

/// How the rows of a matrix are cut.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub count: usize,
    pub rows: usize,
}

impl Blocks {
    /// Blocks of `rows` rows, a multiple of `step`, or of more where there would be more than `most`.
    pub fn of(n: usize, rows: usize, step: usize, most: usize) -> Self {
        let rows = rows.max(n.div_ceil(most).next_multiple_of(step));
        Self { count: n.div_ceil(rows), rows }
    }
}

/// A class in scratch.
pub(super) struct Stack {
    /// `[C, n, k]`
    pub x: Tensor,
    /// `[C, blocks]`, a power of two each.
    pub scales: Tensor,
    /// `[C, blocks]`, the sum of squares over that scale.
    pub squares: Tensor,
    /// `[C, n]`, the norms of the rows of the iterate.
    pub norms: Tensor,
    pub count: usize,
    pub n: usize,
    pub k: usize,
    pub blocks: Blocks,
    pub mutant: u32,
}

impl Stack {
    /// Cubes with one for every block.
    pub fn grid(&self) -> Grid {
        Grid::cubes(self.count * self.blocks.count, UNITS)
    }

    /// The sizes of the kernels: matrices, n, k, blocks of a matrix, rows of a block.
    pub fn words(&self) -> [u32; 5] {
        [self.count, self.n, self.k, self.blocks.count, self.blocks.rows].map(|n| n as u32)
    }

    /// The fault that one kernel has of those it knows; others leave it as it is, so that it is compiled once for them.
    pub fn mutant(&self, known: &[u32]) -> u32 {
        if known.contains(&self.mutant) { self.mutant } else { 0 }
    }
}

/// The larger of two numbers that are not NaN, written out because devices differ about NaN.
#[cube]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    let mut most = a;
    if b > a {
        most = b;
    }
    most
}

/// The largest of `value` over the units of the cube, given to all. Every unit must call it.
#[cube]
pub(super) fn cube_largest(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if me < half {
            shared[me] = larger(shared[me], shared[me + half]);
        }
        sync_cube();
    }
    let most = shared[0];
    // The next call writes the same memory.
    sync_cube();
    most
}

/// The sum of `value` over the units of the cube, given to all. Every unit must call it.
#[cube]
pub(super) fn cube_sum(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let mine = cube::sum(value, shared);
    if UNIT_POS == 0 {
        shared[0] = mine;
    }
    sync_cube();
    let total = shared[0];
    sync_cube();
    total
}

/// What the table says of a matrix: the number of its entry's place.
#[cube]
pub(super) fn of_entry(matrix: usize, firsts: &Sequence<u32>, values: &Sequence<u32>) -> usize {
    let mut value = values[0];
    #[unroll]
    for p in 1..ENTRIES {
        if matrix >= firsts[p] as usize {
            value = values[p];
        }
    }
    value as usize
}

/// Where a matrix starts in the flat buffers.
///
/// Mutants: 7 takes the first head.
#[cube]
pub(super) fn origin_of(
    matrix: usize,
    rows: usize,
    width: usize,
    firsts: &Sequence<u32>,
    starts: &Sequence<u32>,
    columns: &Sequence<u32>,
    heads: &Sequence<u32>,
    #[comptime] mutant: u32,
) -> usize {
    let heads_here = of_entry(matrix, firsts, heads);
    let place = matrix - of_entry(matrix, firsts, firsts);
    let mut head = place % heads_here;
    if comptime!(mutant == 7) {
        head = 0usize;
    }
    of_entry(matrix, firsts, starts) + place / heads_here * rows * of_entry(matrix, firsts, columns) + head * width
}

/// The place in a block of its `i`-th element, so that neighbours read what is stored side by side: as row times k plus
/// column. `i` is below rows times k.
#[cube]
pub(super) fn in_block(i: usize, rows: usize, k: usize, #[comptime] turned: bool) -> usize {
    if comptime!(turned) { i % rows * k + i / rows } else { i }
}

/// The largest of the blocks' scales.
#[cube]
pub(super) fn scale_of(matrix: usize, blocks: usize, scales: &Floats) -> f32 {
    let mut scale = 0.0f32;
    for block in 0..blocks {
        scale = larger(scale, scales.at(matrix * blocks + block));
    }
    scale
}

/// The norm of a matrix over that scale; 1 for a matrix of zeros.
///
/// Mutants: 2 takes the first block for all.
#[cube]
pub(super) fn norm_of(
    matrix: usize,
    blocks: usize,
    scale: f32,
    scales: &Floats,
    squares: &Floats,
    #[comptime] mutant: u32,
) -> f32 {
    let inverse = inverse_of(scale);
    let mut square = 0.0f32;
    let mut count = blocks;
    if comptime!(mutant == 2) {
        count = 1usize;
    }
    for block in 0..count {
        let ratio = scales.at(matrix * blocks + block) * inverse;
        square += squares.at(matrix * blocks + block) * ratio * ratio;
    }
    if square == 0.0f32 {
        square = 1.0f32;
    }
    square.sqrt()
}

/// What the table says of the entries of a class, as scalars of a launch. Places that are left over begin behind every
/// matrix.
pub(super) struct Table<'a>(&'a Class);

impl Table<'_> {
    /// Whether a matrix is stored in the short orientation, and so is not as it lies in scratch.
    pub fn turned(&self) -> bool {
        self.0.rows <= self.0.width
    }

    pub fn firsts<R: Runtime>(&self) -> SequenceArg<R, u32> {
        let mut firsts: Vec<u32> = self.0.numbered().map(|(first, _)| first as u32).collect();
        firsts.resize(ENTRIES, u32::MAX);
        firsts.into_iter().collect()
    }

    pub fn words<R: Runtime>(&self, f: impl Fn(&super::Entry) -> usize) -> SequenceArg<R, u32> {
        // One head where there is no entry, since heads divide.
        (0..ENTRIES).map(|p| self.0.entries.get(p).map_or(1, |entry| f(entry) as u32)).collect()
    }

    pub fn floats<R: Runtime>(&self, f: impl Fn(&super::Entry) -> f32) -> SequenceArg<R, f32> {
        (0..ENTRIES).map(|p| self.0.entries.get(p).map_or(0.0, &f)).collect()
    }
}

/// Moves the matrices of a class.
pub(super) fn update<R: Engine>(b: &Device<R>, call: &Call<'_>, class: &Class) -> Result<()> {
    let (count, (k, n)) = (class.count(), class.sides());
    let is_small = k <= small::LARGEST_K;
    let blocks = if is_small { small::blocks(n) } else { large::blocks(n) };
    let of_blocks = || b.float_scratch(&[count, blocks.count]);
    let stack = Stack {
        x: b.float_scratch(&[count, n, k])?,
        scales: of_blocks()?,
        squares: of_blocks()?,
        norms: b.float_scratch(&[count, n])?,
        count,
        n,
        k,
        blocks,
        mutant: b.mutant(STEM),
    };
    let table = Table(class);
    let moved = gather::launch(b, call, &stack, &table)?;
    let x = if is_small {
        small::iterate(b, &stack, call.iterations)?;
        stack.x.clone()
    } else {
        large::iterate(b, &stack, call.iterations)?
    };
    // Without the plus nobody reads the sums.
    let sums = if call.plus { write::columns(b, &stack, &x)? } else { stack.norms.clone() };
    write::launch(b, call, &stack, &table, [&x, &sums, &moved])
}
