//! Tall matrices, `[n, k]` with k <= n, cut into blocks of rows: what kernels on many of them at once have in common.
//!
//! A launch takes the matrices of up to [`ENTRIES`] entries of a configuration, whatever their shapes. Every block of rows
//! is a cube, which looks up what it has by its number. How a matrix is cut depends on its shape alone, so its bits do not
//! depend on what runs beside it. The table travels as scalars, since nothing is uploaded inside a step.
//!
//! For k <= [`LARGEST_K`] there are the two products: a block's share of X^T X, and a block times a k by k matrix. A cube
//! holds a tile of rows in shared memory, and of the matrix as much as fits beside it into the 32 KiB that every runtime
//! has: all of it for k <= [`NARROW`], else a slab. A unit computes 4 by 4 elements (2 by 6 of a product and squares of 2
//! by 2 of a share beyond), whose factors are neighbours and so can be read four at a time.

use cubecl::prelude::*;

use crate::cube;
use crate::launch::Grid;
use crate::tensor::Floats;

/// Units of a cube.
pub(crate) const UNITS: u32 = cube::UNITS;

/// Entries that one launch takes: the model in use has eleven.
pub(crate) const ENTRIES: usize = 16;

/// The largest k: 6 columns of a product a unit, and what fits into shared memory.
pub(crate) const LARGEST_K: usize = 96;

/// The largest k for which a unit has 4 by 4 elements of X^T X.
pub(crate) const NARROW: usize = 64;

/// Elements in shared memory of a tile of rows, and of a k by k matrix or a slab of it.
pub(crate) const HELD: usize = 4096;

/// Rows of a block, where that makes [`MOST`] blocks or fewer: two tiles.
const ROWS: usize = 128;
const ROWS_OF_WIDE: usize = 64;

/// The most blocks of a matrix.
const MOST: usize = 32;

/// How the rows of a matrix are cut.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
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

/// The columns of a product that a unit has. It is compiled in: a kernel for both would take the registers of the wider.
pub(crate) const fn columns(k: usize) -> usize {
    if k <= NARROW { 4 } else { 6 }
}

/// How the rows of a matrix with k <= [`LARGEST_K`] are cut.
pub(crate) fn blocks(n: usize, k: usize) -> Blocks {
    let rows = if k <= NARROW { ROWS } else { ROWS_OF_WIDE };
    Blocks::of(n, rows, rows_of_tile(columns(k)), MOST)
}

/// Matrices of one shape that lie one behind another.
pub(crate) struct Entry {
    pub count: usize,
    pub n: usize,
    pub k: usize,
    /// Where they begin; none for behind those of the entry before.
    pub start: Option<usize>,
}

/// An entry with what comes before it in the launch: its first cube, its first matrix, the first element of X and the
/// first row.
struct Placed {
    entry: Entry,
    blocks: Blocks,
    cube: usize,
    matrix: usize,
    x: usize,
    row: usize,
}

/// The matrices of a launch.
pub(crate) struct Layout {
    placed: Vec<Placed>,
    /// Cubes with one for every block.
    pub cubes: usize,
    pub matrices: usize,
    pub rows: usize,
    /// Elements of all matrices.
    pub elements: usize,
    /// The largest k.
    pub widest: usize,
}

impl Layout {
    /// Of at most [`ENTRIES`] entries, each with a matrix at least; `blocks` cuts the rows of a matrix `[n, k]`.
    pub fn new(entries: impl Iterator<Item = Entry>, blocks: impl Fn(usize, usize) -> Blocks) -> Self {
        let nothing = Self { placed: vec![], cubes: 0, matrices: 0, rows: 0, elements: 0, widest: 0 };
        entries.fold(nothing, |mut of, entry| {
            let Entry { count, n, k, start } = entry;
            let blocks = blocks(n, k);
            of.placed.push(Placed {
                entry,
                blocks,
                cube: of.cubes,
                matrix: of.matrices,
                x: start.unwrap_or(of.elements),
                row: of.rows,
            });
            of.cubes += count * blocks.count;
            of.matrices += count;
            of.rows += count * n;
            of.elements += count * n * k;
            of.widest = of.widest.max(k);
            assert!(of.placed.len() <= ENTRIES, "a launch takes {ENTRIES} entries");
            of
        })
    }

    /// The columns of a product that a unit has in the kernels for these matrices, all of which have one kind of width.
    pub fn columns(&self) -> usize {
        columns(self.widest)
    }

    /// Cubes with one for every block.
    pub fn grid(&self) -> Grid {
        Grid::cubes(self.cubes, UNITS)
    }

    /// The scalars `f` of every entry; places that are left over get `rest`.
    fn words<R: Runtime>(&self, rest: u32, f: impl Fn(&Placed) -> usize) -> SequenceArg<R, u32> {
        (0..ENTRIES).map(|p| self.placed.get(p).map_or(rest, |placed| f(placed) as u32)).collect()
    }

    /// The table as the argument of a kernel. Places that are left over begin behind every cube and matrix.
    pub fn table<R: Runtime>(&self) -> TableLaunch<R> {
        TableLaunch::new(
            self.words(u32::MAX, |p| p.cube),
            self.words(u32::MAX, |p| p.matrix),
            self.words(0, |p| p.x),
            self.words(0, |p| p.row),
            self.words(1, |p| p.entry.n),
            self.words(1, |p| p.entry.k),
            self.words(1, |p| p.blocks.count),
            self.words(1, |p| p.blocks.rows),
            self.cubes as u32,
            self.matrices as u32,
            self.widest as u32,
        )
    }
}

/// What cubes look up: for every entry its first cube and matrix, its first element of X and first row, and of its
/// matrices the sizes, the blocks and the rows of a block.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Table {
    pub cubes: Sequence<u32>,
    pub matrices: Sequence<u32>,
    xs: Sequence<u32>,
    rows: Sequence<u32>,
    pub n: Sequence<u32>,
    pub k: Sequence<u32>,
    pub blocks: Sequence<u32>,
    block_rows: Sequence<u32>,
    all_cubes: u32,
    pub all_matrices: u32,
    pub widest: u32,
}

/// The value of the last entry that begins at or before `at`.
#[cube]
pub(crate) fn pick<T: CubePrimitive>(at: usize, begins: &Sequence<u32>, values: &Sequence<T>) -> T {
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
pub(crate) struct Block {
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

/// The faults that mutants of callers have here.
pub(crate) const NO_FAULT: u32 = 0;
pub(crate) const FIRST_MATRIX_OF_ENTRY: u32 = 1;
pub(crate) const LAST_ROW_MISSED: u32 = 2;

/// The block of this cube, with a fault.
#[cube]
pub(crate) fn block_of(table: &Table, #[comptime] fault: u32) -> Block {
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
    if comptime!(fault == LAST_ROW_MISSED) {
        end -= 1;
    }
    if at >= table.all_cubes as usize {
        end = first;
    }
    let mut place_of_x = place;
    if comptime!(fault == FIRST_MATRIX_OF_ENTRY) {
        place_of_x = 0usize;
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
        x: pick::<u32>(at, &table.cubes, &table.xs) as usize + place_of_x * n * k,
        norms: pick::<u32>(at, &table.cubes, &table.rows) as usize + place * n,
        widest: table.widest as usize,
    }
}

/// The matrix of a cube, where there is a cube for every matrix.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Whole {
    /// Whether there is one.
    pub here: bool,
    /// The number of the matrix's first cube where there is one for every block, and its blocks.
    pub cubes: usize,
    pub blocks: usize,
    pub matrix: usize,
    pub k: usize,
    /// The widest matrix's k.
    pub widest: usize,
}

/// The matrix of this cube.
#[cube]
pub(crate) fn whole_of(table: &Table) -> Whole {
    let at = CUBE_POS;
    let blocks = pick::<u32>(at, &table.matrices, &table.blocks) as usize;
    let place = at - pick::<u32>(at, &table.matrices, &table.matrices) as usize;
    Whole {
        here: at < table.all_matrices as usize,
        cubes: pick::<u32>(at, &table.matrices, &table.cubes) as usize + place * blocks,
        blocks,
        matrix: at,
        k: pick::<u32>(at, &table.matrices, &table.k) as usize,
        widest: table.widest as usize,
    }
}

/// Rows of a tile, by the columns of a unit: 64 of 64 columns, 32 of 96.
pub(crate) const fn rows_of_tile(columns: usize) -> usize {
    if columns == 4 { 64 } else { 32 }
}

/// Rows of P in shared memory at a time.
const fn depth_of(columns: usize) -> usize {
    if columns == 4 { 64 } else { 32 }
}

/// The tile of rows from `top` to `end` of the matrix at `from`, times `factor`; zeros around it. Waits until all is there.
#[cube]
pub(crate) fn load_rows(
    x: &Floats,
    tile: &mut SharedMemory<f32>,
    from: usize,
    top: usize,
    end: usize,
    k: usize,
    factor: f32,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let units = comptime!(UNITS as usize);
    let me = UNIT_POS as usize;
    // Some loads under way at a time, and nothing computed with the first before the last has begun: all of them would
    // take the registers of the units that hide their latency.
    let ahead = comptime!(if columns == 4 { 8 } else { 4 });
    let mut loaded = Array::<f32>::new(ahead);
    for part in 0..comptime!(rows_of_tile(columns) * side / ahead / UNITS as usize).runtime() {
        #[unroll]
        for n in 0..ahead {
            let at = (part * ahead + n) * units + me;
            let (r, c) = (at / side, at % side);
            loaded[n] = 0.0f32;
            if top + r < end && c < k {
                loaded[n] = x.at(from + (top + r) * k + c);
            }
        }
        #[unroll]
        for n in 0..ahead {
            tile[(part * ahead + n) * units + me] = loaded[n] * factor;
        }
    }
    sync_cube();
}

/// Writes the tile that [`load_rows`] has read.
#[cube]
pub(crate) fn store_rows(
    x: &mut Floats,
    tile: &SharedMemory<f32>,
    from: usize,
    top: usize,
    end: usize,
    k: usize,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let units = comptime!(UNITS as usize);
    let me = UNIT_POS as usize;
    for part in 0..comptime!(rows_of_tile(columns) * 16 * columns / UNITS as usize).runtime() {
        let at = part * units + me;
        let (r, c) = (at / side, at % side);
        if top + r < end && c < k {
            x.set(from + (top + r) * k + c, tile[at]);
        }
    }
}

/// Adds a tile's part to the block's share of X^T X: up to [`NARROW`] columns to the unit's sums, which [`write_share`]
/// writes in the end. More of them would cost the registers of half of the units that a device has room for, so then it
/// goes to memory at once; `first` is whether nothing is there yet.
#[cube]
pub(crate) fn add_share(
    tile: &SharedMemory<f32>,
    rows: usize,
    sums: &mut Array<f32>,
    shares: &mut Floats,
    block: &Block,
    first: bool,
    #[comptime] columns: usize,
) {
    if comptime!(columns == 4) {
        add_products(tile, rows, sums, columns);
    } else {
        let side = comptime!(16 * columns);
        let across = comptime!(16 * columns / 32);
        let me = UNIT_POS as usize;
        let k = block.k;
        let at = CUBE_POS * block.widest * block.widest;
        // No constant, which would be unrolled.
        for square in 0..comptime!(across * across).runtime() {
            let top = square / across * 32 + me / 16 * 2;
            let left = square % across * 32 + me % 16 * 2;
            let mut parts = Array::<f32>::new(4usize);
            #[unroll]
            for s in 0..4usize {
                parts[s] = 0.0f32;
            }
            for r in 0..rows {
                let (above, below) = (tile[r * side + top], tile[r * side + top + 1]);
                let (before, behind) = (tile[r * side + left], tile[r * side + left + 1]);
                parts[0] += above * before;
                parts[1] += above * behind;
                parts[2] += below * before;
                parts[3] += below * behind;
            }
            #[unroll]
            for s in 0..4usize {
                let (i, j) = (top + comptime!(s / 2), left + comptime!(s % 2));
                if block.here && i < k && j < k {
                    let mut part = parts[s];
                    if !first {
                        part += shares.at(at + i * k + j);
                    }
                    shares.set(at + i * k + j, part);
                }
            }
        }
    }
}

/// Adds the products of the columns of a tile, `columns` by `columns` of them a unit.
#[cube]
fn add_products(tile: &SharedMemory<f32>, rows: usize, sums: &mut Array<f32>, #[comptime] columns: usize) {
    let side = comptime!(16 * columns);
    let me = UNIT_POS as usize;
    let top = me / 16 * columns;
    let left = me % 16 * columns;
    for r in 0..rows {
        let mut lefts = Array::<f32>::new(columns);
        let mut rights = Array::<f32>::new(columns);
        #[unroll]
        for s in 0..columns {
            lefts[s] = tile[r * side + top + s];
            rights[s] = tile[r * side + left + s];
        }
        #[unroll]
        for s in 0..comptime!(columns * columns) {
            sums[s] += lefts[comptime!(s / columns)] * rights[comptime!(s % columns)];
        }
    }
}

/// Writes a block's share of X^T X, where [`add_share`] has left it in the sums.
#[cube]
pub(crate) fn write_share(shares: &mut Floats, block: &Block, sums: &Array<f32>, #[comptime] columns: usize) {
    let me = UNIT_POS as usize;
    let k = block.k;
    let at = CUBE_POS * block.widest * block.widest;
    if comptime!(columns == 4) {
        #[unroll]
        for s in 0..comptime!(columns * columns) {
            let i = me / 16 * columns + comptime!(s / columns);
            let j = me % 16 * columns + comptime!(s % columns);
            if block.here && i < k && j < k {
                shares.set(at + i * k + j, sums[s]);
            }
        }
    }
}

/// How many rows of a tile from `top` lie before `end`. No constant, which would be unrolled.
#[cube]
pub(crate) fn rows_in(top: usize, end: usize, #[comptime] most: usize) -> usize {
    let mut rows = 0usize;
    if top < end {
        rows = end - top;
    }
    if rows > most {
        rows = most.runtime();
    }
    rows
}

/// The share of X^T X that the cube's block has, times `factor` squared, by the columns of a unit.
#[cube]
pub(crate) fn gram(x: &Floats, shares: &mut Floats, block: &Block, factor: f32, #[comptime] columns: usize) {
    let mut tile = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let most = comptime!(rows_of_tile(columns));
    let mut sums = Array::<f32>::new(comptime!(columns * columns));
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        sums[s] = 0.0f32;
    }
    for step in 0..block.rows.div_ceil(most) {
        let top = block.first + step * most;
        load_rows(x, &mut tile, block.x, top, block.end, block.k, factor, columns);
        add_share(&tile, rows_in(top, block.end, most), &mut sums, shares, block, step == 0, columns);
        // The next rows come into the same memory.
        sync_cube();
    }
    write_share(shares, block, &sums, columns);
}

/// The rows of the matrix's k by k matrix in `squares` from row `from` on, as many as are held; zeros around it.
#[cube]
fn load_slab(squares: &Floats, slab: &mut SharedMemory<f32>, block: &Block, from: usize, #[comptime] columns: usize) {
    let side = comptime!(16 * columns);
    let units = comptime!(UNITS as usize);
    let me = UNIT_POS as usize;
    let at_matrix = block.matrix * block.widest * block.widest;
    for part in 0..comptime!(depth_of(columns) * 4 * columns / UNITS as usize).runtime() {
        #[unroll]
        for fourth in 0..4usize {
            let at = (part * 4 + fourth) * units + me;
            let (d, c) = (from + at / side, at % side);
            let mut value = 0.0f32;
            if block.here && d < block.k && c < block.k {
                value = squares.at(at_matrix + d * block.k + c);
            }
            slab[at] = value;
        }
    }
}

/// A tile of rows, the `number`-th of the block, times the matrix's k by k matrix in `squares`, in its place. Waits until all is there.
#[cube]
pub(crate) fn multiply(
    squares: &Floats,
    tile: &mut SharedMemory<f32>,
    slab: &mut SharedMemory<f32>,
    block: &Block,
    number: usize,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let depth = comptime!(depth_of(columns));
    let rows = comptime!(rows_of_tile(columns) / 16);
    let me = UNIT_POS as usize;
    let top = me / 16 * rows;
    let left = me % 16 * columns;
    let mut sums = Array::<f32>::new(comptime!(rows * columns));
    #[unroll]
    for s in 0..comptime!(rows * columns) {
        sums[s] = 0.0f32;
    }
    for step in 0..block.k.div_ceil(depth) {
        // A single slab stays for all tiles.
        if block.k > depth || number == 0 {
            load_slab(squares, slab, block, step * depth, columns);
        }
        sync_cube();
        let mut quads = (block.k - step * depth).div_ceil(4usize);
        if quads > depth / 4 {
            quads = (depth / 4).runtime();
        }
        for quad in 0..quads {
            let mut values = Array::<f32>::new(comptime!(4 * rows));
            #[unroll]
            for r in 0..rows {
                #[unroll]
                for d in 0..4usize {
                    values[r * 4 + d] = tile[(top + r) * side + step * depth + quad * 4 + d];
                }
            }
            #[unroll]
            for d in 0..4usize {
                let mut factors = Array::<f32>::new(columns);
                #[unroll]
                for c in 0..columns {
                    factors[c] = slab[(quad * 4 + d) * side + left + c];
                }
                #[unroll]
                for s in 0..comptime!(rows * columns) {
                    sums[s] += values[comptime!(s / columns * 4 + d)] * factors[comptime!(s % columns)];
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for s in 0..comptime!(rows * columns) {
        tile[(top + comptime!(s / columns)) * side + left + comptime!(s % columns)] = sums[s];
    }
    sync_cube();
}
