//! Arm `fused`: what comes before and after the iteration, which is in [`small`] and [`large`].
//!
//! The matrices lie in scratch as the transposes of their short orientation, `[n, k]` with k <= n, in blocks of rows. In
//! that form A = X^T X, the iteration multiplies X from the right, a row at a time, and of the plus the columns of the
//! short orientation are rows here.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | gather | G, M | X = mu M + (1 - mu) G; a block's power of two, its sum of squares, whether it has a gradient; its share of A |
//! | the iteration | see [`small`], 8 launches for 8 iterations, and [`large`], 26 | X, the norms of its rows |
//! | columns | X, the norms | sums of squares of the columns of a block, rows normalised |
//! | write | G, M, W, X, norms and sums | M, W |
//!
//! Matrices of every shape with k <= [`tall::NARROW`] go through together, and so do wider ones with k <=
//! [`tall::LARGEST_K`], up to [`ENTRIES`] entries of the table at a time: 11 launches for 8 iterations. Larger ones take 29 launches a shape. M is computed again in the end rather than
//! kept, because a matrix without a gradient must keep its own and that is known only when all of it has been seen.
//!
//! Instead of max|M|, a block is divided by the power of two at or below its largest element: exact, and the blocks' sums
//! of squares meet where they are used. Every sum has one order, which depends on the shape alone, so a matrix has the
//! same bits beside others and, but for products in a library, alone.
//!
//! Whether a matrix is small is a matter of its own shape, so groups of launches do not depend on each other and have
//! scratch of their own.

use cubecl::prelude::*;
use dormouse_reference::muon::Batching;
use dormouse_reference::{Result, Tensors};

use super::table::Stack;
use super::{Call, Class, gather, large, small, write};
use crate::cube::larger;
use crate::device::Device;
use crate::runtime::Engine;
use crate::tall::{self, ENTRIES};
use crate::tensor::{Floats, Tensor};

/// The largest of the scales of a matrix's blocks.
#[cube]
pub(super) fn scale_of(first: usize, blocks: usize, scales: &Floats) -> f32 {
    let mut scale = 0.0f32;
    for block in 0..blocks {
        scale = larger(scale, scales.at(first + block));
    }
    scale
}

/// The sum of squares of a matrix over its scale, of which `inverse` is one over; 1 for a matrix of zeros.
///
/// Mutants: 2 takes the first block for all.
#[cube]
pub(super) fn square_of(
    first: usize,
    blocks: usize,
    inverse: f32,
    scales: &Floats,
    squares: &Floats,
    #[comptime] mutant: u32,
) -> f32 {
    let mut square = 0.0f32;
    let mut count = blocks;
    if comptime!(mutant == 2) {
        count = 1usize;
    }
    for block in 0..count {
        let ratio = scales.at(first + block) * inverse;
        square += squares.at(first + block) * ratio * ratio;
    }
    if square == 0.0f32 {
        square = 1.0f32;
    }
    square
}

/// Moves the matrices of all classes.
pub(super) fn update<R: Engine>(b: &Device<R>, call: &Call<'_>, batching: Batching, classes: Vec<Class>) -> Result<()> {
    let (small, large): (Vec<_>, Vec<_>) = classes.into_iter().partition(|class| class.sides().0 <= tall::LARGEST_K);
    let small = groups(batching, small);
    // No group reads what another one writes.
    b.beside(
        &mut |b| {
            b.all_beside(&large, &|b, class| {
                let (k, n) = class.sides();
                let of = Stack::new(b, std::slice::from_ref(class), |n, _| large::blocks(n))?;
                gather::launch(b, call, &of, &b.float_scratch(&[1])?, false)?;
                let x = large::iterate(b, &of, [of.layout.matrices, n, k], call.iterations)?;
                finish(b, call, &of, &x)
            })
        },
        &mut |b| {
            b.all_beside(&small, &|b, group| {
                let of = Stack::new(b, group, tall::blocks)?;
                let shares = small::shares(b, &of)?;
                gather::launch(b, call, &of, &shares, true)?;
                small::iterate(b, &of, &shares, call.iterations)?;
                finish(b, call, &of, &of.x)
            })
        },
    )
}

/// From the iterate to the weights.
fn finish<R: Engine>(b: &Device<R>, call: &Call<'_>, of: &Stack, x: &Tensor) -> Result<()> {
    // Without the plus nobody reads the sums.
    let sums = if call.plus { write::columns(b, of, x)? } else { of.norms.clone() };
    write::launch(b, call, of, [x, &sums])
}

/// Classes that share their launches: as many as have [`ENTRIES`] entries together and one kind of width, or one by one
/// each alone. Those with the widest matrices come first, since their cubes take longest.
fn groups(batching: Batching, mut classes: Vec<Class>) -> Vec<Vec<Class>> {
    classes.sort_by_key(|class| std::cmp::Reverse(class.sides().0));
    let mut groups: Vec<Vec<Class>> = Vec::new();
    for class in classes {
        let entries = |group: &[Class]| group.iter().map(|class| class.entries.len()).sum::<usize>();
        let columns = |class: &Class| tall::columns(class.sides().0);
        let fits =
            |group: &[Class]| entries(group) + class.entries.len() <= ENTRIES && columns(&group[0]) == columns(&class);
        match groups.last_mut() {
            Some(group) if batching == Batching::Batched && fits(group) => group.push(class),
            _ => groups.push(vec![class]),
        }
    }
    groups
}
