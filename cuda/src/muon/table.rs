//! Where the matrices of a launch lie: what its cubes look up by their numbers.
//!
//! A launch takes the matrices of up to [`ENTRIES`] entries of the configuration, whatever their shapes. Every matrix is
//! cut into blocks of rows, one cube each, and how depends on its shape alone. The table travels as scalars, since nothing
//! is uploaded inside a step.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::UNITS;
use super::{Class, ENTRIES, Entry, STEM};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::Tensor;

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

/// An entry with the shape of its matrices in scratch, `[n, k]`, and what comes before it in the launch.
struct Placed {
    entry: Entry,
    n: usize,
    k: usize,
    /// Whether a matrix is stored in the short orientation, and so is not as it lies in scratch.
    turned: bool,
    blocks: Blocks,
    /// Its first cube, its first cube in the launch of polynomials, its first matrix, the first element of X and the first
    /// row.
    cube: usize,
    tile: usize,
    matrix: usize,
    x: usize,
    row: usize,
}

/// The matrices of a launch in scratch.
pub(super) struct Stack {
    placed: Vec<Placed>,
    /// Cubes with one for every block, cubes of the polynomials, matrices.
    pub cubes: usize,
    pub tiles: usize,
    pub matrices: usize,
    /// The largest k.
    pub widest: usize,
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
    /// Lays out the matrices of at most [`ENTRIES`] entries; `blocks` cuts the rows of a matrix `[n, k]`, and the polynomial
    /// is computed in tiles of `side` rows and columns.
    pub fn new<R: Engine>(
        b: &Device<R>,
        classes: &[Class],
        blocks: impl Fn(usize, usize) -> Blocks,
        side: usize,
    ) -> Result<Self> {
        let mut placed: Vec<Placed> = Vec::new();
        let (mut cube, mut tile, mut matrix, mut x, mut row, mut widest) = (0, 0, 0, 0, 0, 0);
        for class in classes {
            let (k, n) = class.sides();
            let blocks = blocks(n, k);
            widest = widest.max(k);
            for &entry in &class.entries {
                placed.push(Placed {
                    entry,
                    n,
                    k,
                    turned: class.rows <= class.width,
                    blocks,
                    cube,
                    tile,
                    matrix,
                    x,
                    row,
                });
                cube += entry.count * blocks.count;
                tile += entry.count * k.div_ceil(side).pow(2);
                matrix += entry.count;
                x += entry.count * n * k;
                row += entry.count * n;
            }
        }
        debug_assert!(placed.len() <= ENTRIES);
        let of_cubes = || b.float_scratch(&[cube]);
        Ok(Self {
            placed,
            cubes: cube,
            tiles: tile,
            matrices: matrix,
            widest,
            x: b.float_scratch(&[x])?,
            scales: of_cubes()?,
            squares: of_cubes()?,
            moved: of_cubes()?,
            norms: b.float_scratch(&[row])?,
            mutant: b.mutant(STEM),
        })
    }

    /// Cubes with one for every block.
    pub fn grid(&self) -> Grid {
        Grid::cubes(self.cubes, UNITS)
    }

    /// The fault that one kernel has of those it knows; others leave it as it is, so that it is compiled once for them.
    pub fn mutant(&self, known: &[u32]) -> u32 {
        if known.contains(&self.mutant) { self.mutant } else { 0 }
    }

    /// The scalars `f` of every entry; places that are left over get `rest`.
    fn words<R: Runtime>(&self, rest: u32, f: impl Fn(&Placed) -> usize) -> SequenceArg<R, u32> {
        (0..ENTRIES).map(|p| self.placed.get(p).map_or(rest, |placed| f(placed) as u32)).collect()
    }

    /// The table as the argument of a kernel. Places that are left over begin behind every cube.
    pub fn table<R: Runtime>(&self) -> TableLaunch<R> {
        TableLaunch::new(
            self.words(u32::MAX, |p| p.cube),
            self.words(u32::MAX, |p| p.tile),
            self.words(0, |p| p.matrix),
            self.words(0, |p| p.x),
            self.words(0, |p| p.row),
            self.words(1, |p| p.n),
            self.words(1, |p| p.k),
            self.words(1, |p| p.blocks.count),
            self.words(1, |p| p.blocks.rows),
            self.cubes as u32,
            self.tiles as u32,
            self.widest as u32,
        )
    }

    /// Where the matrices lie in the flat buffers.
    pub fn places<R: Runtime>(&self) -> PlacesLaunch<R> {
        PlacesLaunch::new(
            self.words(0, |p| p.entry.start),
            self.words(1, |p| p.entry.columns),
            self.words(1, |p| p.entry.heads),
            self.words(0, |p| usize::from(p.turned)),
        )
    }

    /// A number of every entry.
    pub fn floats<R: Runtime>(&self, f: impl Fn(&Entry) -> f32) -> SequenceArg<R, f32> {
        (0..ENTRIES).map(|p| self.placed.get(p).map_or(0.0, |placed| f(&placed.entry))).collect()
    }
}

/// What cubes look up: for every entry its first cube, tile and matrix, its first element of X and first row, and of its
/// matrices the sizes, the blocks and the rows of a block.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Table {
    pub cubes: Sequence<u32>,
    tiles: Sequence<u32>,
    matrices: Sequence<u32>,
    xs: Sequence<u32>,
    rows: Sequence<u32>,
    n: Sequence<u32>,
    k: Sequence<u32>,
    blocks: Sequence<u32>,
    block_rows: Sequence<u32>,
    all_cubes: u32,
    all_tiles: u32,
    widest: u32,
}

/// Where the matrices of every entry lie in the flat buffers.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Places {
    starts: Sequence<u32>,
    columns: Sequence<u32>,
    heads: Sequence<u32>,
    turned: Sequence<u32>,
}

/// The value of the last entry that begins at or before `at`.
#[cube]
pub(super) fn pick<T: CubePrimitive>(at: usize, begins: &Sequence<u32>, values: &Sequence<T>) -> T {
    let mut value = values[0];
    #[unroll]
    for p in 1..ENTRIES {
        if at >= begins[p] as usize {
            value = values[p];
        }
    }
    value
}

/// A cube's block of rows.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Block {
    /// Whether there is one: not for cubes behind the last block, which have no rows.
    pub here: bool,
    /// The number of the matrix's first cube.
    pub cubes: usize,
    /// Blocks of the matrix, and rows of a block but the last.
    pub blocks: usize,
    pub rows: usize,
    /// The number of the matrix, among those of its entry and of all.
    pub place: usize,
    pub matrix: usize,
    pub n: usize,
    pub k: usize,
    /// The rows of the block.
    pub first: usize,
    pub end: usize,
    /// Where the matrix begins among the elements of X and the norms.
    pub x: usize,
    pub norms: usize,
    /// The widest matrix's k.
    pub widest: usize,
}

/// The block of this cube.
#[cube]
pub(super) fn block_of(table: &Table) -> Block {
    let at = CUBE_POS;
    let begin = pick::<u32>(at, &table.cubes, &table.cubes) as usize;
    let blocks = pick::<u32>(at, &table.cubes, &table.blocks) as usize;
    let rows = pick::<u32>(at, &table.cubes, &table.block_rows) as usize;
    let n = pick::<u32>(at, &table.cubes, &table.n) as usize;
    let k = pick::<u32>(at, &table.cubes, &table.k) as usize;
    let place = (at - begin) / blocks;
    let first = (at - begin) % blocks * rows;
    let here = at < table.all_cubes as usize;
    let mut end = first + rows;
    if end > n {
        end = n;
    }
    if at >= table.all_cubes as usize {
        end = first;
    }
    Block {
        here,
        cubes: begin + place * blocks,
        blocks,
        rows,
        place,
        matrix: pick::<u32>(at, &table.cubes, &table.matrices) as usize + place,
        n,
        k,
        first,
        end,
        x: pick::<u32>(at, &table.cubes, &table.xs) as usize + place * n * k,
        norms: pick::<u32>(at, &table.cubes, &table.rows) as usize + place * n,
        widest: table.widest as usize,
    }
}

/// A cube's tile of the polynomial of a matrix.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tile {
    /// Whether there is one.
    pub here: bool,
    /// The number of the matrix's first cube, and its blocks.
    pub cubes: usize,
    pub blocks: usize,
    pub matrix: usize,
    pub k: usize,
    pub top: usize,
    pub left: usize,
    /// The widest matrix's k.
    pub widest: usize,
}

/// The tile of this cube.
#[cube]
pub(super) fn tile_of(table: &Table, #[comptime] side: usize) -> Tile {
    let at = CUBE_POS;
    let begin = pick::<u32>(at, &table.tiles, &table.tiles) as usize;
    let blocks = pick::<u32>(at, &table.tiles, &table.blocks) as usize;
    let k = pick::<u32>(at, &table.tiles, &table.k) as usize;
    let tiles = k.div_ceil(side);
    let place = (at - begin) / (tiles * tiles);
    Tile {
        here: at < table.all_tiles as usize,
        cubes: pick::<u32>(at, &table.tiles, &table.cubes) as usize + place * blocks,
        blocks,
        matrix: pick::<u32>(at, &table.tiles, &table.matrices) as usize + place,
        k,
        top: (at - begin) / tiles % tiles * side,
        left: (at - begin) % tiles * side,
        widest: table.widest as usize,
    }
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

/// The place in a block of its `i`-th element, so that neighbours read what is stored side by side: as row times k plus
/// column. `i` is below rows times k.
#[cube]
pub(super) fn in_block(i: usize, block: &Block, place: &Place) -> usize {
    let mut at = i;
    if place.turned {
        at = i % block.rows * block.k + i / block.rows;
    }
    at
}
