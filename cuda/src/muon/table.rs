//! Where the matrices of a launch lie, in the flat buffers and in scratch.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Class, Entry, STEM};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tall::{self, Block, Blocks, ENTRIES, Layout, Table, UNITS, pick};
use crate::tensor::Tensor;

/// The matrices of a launch in scratch.
pub(super) struct Stack {
    /// In the order of `layout`, with whether a matrix is stored in the short orientation and so is not as it lies in
    /// scratch.
    entries: Vec<(Entry, bool)>,
    pub layout: Layout,
    /// The transposes of the short orientation, one behind another, `[n, k]` each.
    pub x: Tensor,
    /// `[cubes]`, a power of two each.
    pub scales: Tensor,
    /// `[cubes]`, the sum of squares over that scale.
    pub squares: Tensor,
    /// `[cubes]`, 1 where a block has a gradient.
    pub moved: Tensor,
    /// The norms of the rows of the iterate.
    pub norms: Tensor,
    mutant: u32,
}

impl Stack {
    /// Lays out the matrices of at most [`ENTRIES`] entries; `blocks` cuts the rows of a matrix `[n, k]`.
    pub fn new<R: Engine>(b: &Device<R>, classes: &[Class], blocks: impl Fn(usize, usize) -> Blocks) -> Result<Self> {
        let all = || classes.iter().flat_map(|class| class.entries.iter().map(move |entry| (class, *entry)));
        let tall = |(class, entry): (&Class, Entry)| {
            let (k, n) = class.sides();
            tall::Entry { count: entry.count, n, k, start: None }
        };
        let layout = Layout::new(all().map(tall), blocks);
        let of_cubes = || b.float_scratch(&[layout.cubes]);
        Ok(Self {
            entries: all().map(|(class, entry)| (entry, class.rows <= class.width)).collect(),
            x: b.float_scratch(&[layout.elements])?,
            scales: of_cubes()?,
            squares: of_cubes()?,
            moved: of_cubes()?,
            norms: b.float_scratch(&[layout.rows])?,
            mutant: b.mutant(STEM),
            layout,
        })
    }

    /// The fault that one kernel has of those it knows; others leave it as it is, so that it is compiled once for them.
    pub fn mutant(&self, known: &[u32]) -> u32 {
        if known.contains(&self.mutant) { self.mutant } else { 0 }
    }

    /// A number of every entry, 1 where there is none.
    fn words<R: Runtime>(&self, f: impl Fn(&(Entry, bool)) -> usize) -> SequenceArg<R, u32> {
        (0..ENTRIES).map(|p| self.entries.get(p).map_or(1, |entry| f(entry) as u32)).collect()
    }

    /// A number of every entry, 0 where there is none.
    pub fn floats<R: Runtime>(&self, f: impl Fn(&Entry) -> f32) -> SequenceArg<R, f32> {
        (0..ENTRIES).map(|p| self.entries.get(p).map_or(0.0, |(entry, _)| f(entry))).collect()
    }

    /// Where the matrices lie in the flat buffers.
    pub fn places<R: Runtime>(&self) -> PlacesLaunch<R> {
        PlacesLaunch::new(
            self.words(|(entry, _)| entry.start),
            self.words(|(entry, _)| entry.columns),
            self.words(|(entry, _)| entry.heads),
            self.words(|(_, turned)| usize::from(*turned)),
        )
    }
}

/// Where the matrices of every entry lie in the flat buffers.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Places {
    starts: Sequence<u32>,
    columns: Sequence<u32>,
    heads: Sequence<u32>,
    turned: Sequence<u32>,
}

/// Where a block's elements are in the flat buffers: element (row, column) of its matrix in scratch is at `origin + row *
/// row_step + column * column_step`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub origin: usize,
    pub row_step: usize,
    pub column_step: usize,
    pub turned: bool,
}

/// Where the matrix of a block starts in the flat buffers: head h of an entry's i-th matrix, number i * heads + h, at
/// `start + i * rows * columns + h * width`, with rows `columns` apart.
///
/// Mutants: 7 takes the first head.
#[cube]
pub(super) fn place_of(block: &Block, table: &Table, places: &Places, #[comptime] mutant: u32) -> Place {
    let columns = pick::<u32>(CUBE_POS, &table.cubes, &places.columns) as usize;
    let heads = pick::<u32>(CUBE_POS, &table.cubes, &places.heads) as usize;
    let start = pick::<u32>(CUBE_POS, &table.cubes, &places.starts) as usize;
    let turned = pick::<u32>(CUBE_POS, &table.cubes, &places.turned) == 1u32;
    let mut row_step = columns;
    let mut column_step = 1usize;
    let mut stored_rows = block.n;
    let mut width = block.k;
    if turned {
        row_step = 1usize;
        column_step = columns;
        stored_rows = block.k;
        width = block.n;
    }
    let mut head = block.place % heads;
    if comptime!(mutant == 7) {
        head = 0usize;
    }
    Place { origin: start + block.place / heads * stored_rows * columns + head * width, row_step, column_step, turned }
}

/// Elements that a unit reads before it writes the first.
pub(super) const AHEAD: usize = 8;

/// An element of a block, and where it lies in the flat buffers.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Element {
    pub here: bool,
    pub row: usize,
    pub column: usize,
    pub flat: usize,
}

/// This unit's element in a turn over the `elements` of a block: neighbours have what is stored side by side.
#[cube]
pub(super) fn element_of(turn: usize, elements: usize, block: &Block, place: &Place) -> Element {
    let i = turn * comptime!(UNITS as usize) + UNIT_POS as usize;
    let mut down = i / block.k;
    let mut column = i % block.k;
    if place.turned {
        down = i % block.rows;
        column = i / block.rows;
    }
    let row = block.first + down;
    Element {
        here: i < elements && row < block.end,
        row,
        column,
        flat: place.origin + row * place.row_step + column * place.column_step,
    }
}
