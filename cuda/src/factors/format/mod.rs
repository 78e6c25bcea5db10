//! The formats of factors, `dormouse_reference::factor_format`, on a device.
//!
//! The reference rounds in f64, which no kernel here has; so this rounds in integers, on the bits of f32. Nothing is left
//! to a compiler that adds in another order or a device that drops subnormal numbers, and a rounded factor has one value,
//! on every device and in both arms. It is the reference's to the bit, but for the two cases named below:
//!
//! - bf16, f16 and fp8 round a mantissa of 24 bits to nearest and even. The scale of an fp8 column is a power of two, so
//!   it only moves the exponent below which numbers are subnormal.
//! - ternary adds up a column in fixed point. With 2^k at most the column's largest magnitude and n rows, the unit is
//!   2^(k + b - 63), 2^b at least n: no sum of n magnitudes overflows 64 bits. Magnitudes of 2^(k + b - 40) and more are
//!   whole numbers of units, and so added exactly, in whatever order; smaller ones lose less than a unit each, together
//!   less than 2^(2 b - 63) of the sum: 2^-41 of it at 2048 rows, where the reference's sum in f64 may lose 2^-42.
//! - An element is kept where 10 n |w| > 7 sum, all integers. The reference rounds its sum, the mean and 0.7 times the
//!   mean to f64. So the two can part only where |w| is within these errors, some 2^-41 of it, of the threshold, which for
//!   numbers of f32 means that it is on the threshold: equal is dropped here, and in the reference unless its three
//!   roundings end below.
//! - The mean of what is kept is the sum, exact up to 2^19 rows, over the count, rounded once. The reference rounds it to
//!   f64 first, and then to f32: a mean so close to the middle between two numbers that this matters comes once in some
//!   2^29 columns.
//!
//! Rounded factors are written to memory, in f32, once a call of forward, and kept for backward: all factors of a call in
//! one launch of arm `fused`, which reads them once from memory and writes them once.

mod number;
mod units;

use cubecl::prelude::*;
use dormouse_reference::{DType, Error, FactorFormat, Result, Tensors};

use self::number::{INFINITE, NAN, SIGN, SIZE, nearest, parts};
use self::units::{carry, in_units, mean, threshold};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};

/// Columns of a cube of [`round_kernel`], a sector of memory wide, and the lanes that share each.
const COLUMNS: u32 = 8;
const LANES: u32 = 64;
const UNITS: u32 = COLUMNS * LANES;

/// Rounded factors start at multiples of so many elements: matrix libraries want 16 bytes.
const EDGE: usize = 64;

/// Rows whose tenfold is a divisor of [`units`].
const MOST_ROWS: usize = (1 << 31) / 10;

/// What a column has to know of itself before its elements are rounded.
#[derive(CubeType, Clone, Copy)]
struct Column {
    /// Bits of the largest magnitude; NaN is above all.
    largest: u32,
    /// Ternary: the threshold in units, and the bits of what is kept.
    above_high: u32,
    above_low: u32,
    magnitude: u32,
}

/// Whether the format looks at the whole column.
fn by_column(format: FactorFormat) -> bool {
    matches!(format, FactorFormat::Fp8 | FactorFormat::Ternary)
}

/// The bits of one element of a column.
///
/// Faults: 1 in [`number::shortened`]; 2 has twice the scale in fp8; 5 is null (a renamed local).
#[cube]
fn element(bits: u32, column: &Column, room: u32, #[comptime] format: FactorFormat, #[comptime] fault: u32) -> u32 {
    let mut rounded = bits;
    if comptime!(format == FactorFormat::Bf16) {
        rounded = nearest(bits, -126i32, 7u32, fault);
    } else if comptime!(format == FactorFormat::F16) {
        rounded = nearest(bits, -14i32, 10u32, fault);
        // 2^16 is what the numbers from 65520 on round to, one beyond the largest.
        if (rounded & SIZE) >= 0x4780_0000u32 && (rounded & SIZE) < INFINITE {
            rounded = (rounded & SIGN) | INFINITE;
        }
    } else if comptime!(format == FactorFormat::Fp8) {
        let (mantissa, exponent) = parts(column.largest);
        // 448 = 1.75 * 2^8.
        let mut scale = exponent - 8i32;
        if mantissa > 0x00e0_0000u32 {
            scale += 1i32;
        }
        if comptime!(fault == 2) {
            scale += 1i32;
        }
        rounded = nearest(bits, scale - 6i32, 3u32, fault);
    } else if comptime!(format == FactorFormat::Ternary) {
        let (high, low) = in_units(bits & SIZE, column.largest, room);
        rounded = 0u32;
        if high > column.above_high || (high == column.above_high && low > column.above_low) {
            rounded = column.magnitude | (bits & SIGN);
        }
    }
    if comptime!(fault == 5) {
        let renamed = rounded;
        rounded = renamed;
    }
    if comptime!(by_column(format)) {
        if column.largest >= INFINITE {
            rounded = NAN;
        }
    }
    rounded
}

/// Arm `plain`: one unit, one column, from its first row to its last, as often as the format asks for.
#[cube(launch_unchecked)]
fn plain_kernel(
    x: &Words,
    out: &mut Words,
    columns: u32,
    rows: u32,
    rank: u32,
    room: u32,
    #[comptime] format: FactorFormat,
) {
    let (count, rank) = (rows as usize, rank as usize);
    let i = ABSOLUTE_POS;
    if i < columns as usize {
        let first = i / rank * count * rank + i % rank;
        let mut largest = 0u32;
        if comptime!(by_column(format)) {
            for row in 0..count {
                let size = x.at(first + row * rank) & SIZE;
                if size > largest {
                    largest = size;
                }
            }
        }
        let mut above_high = 0u32;
        let mut above_low = 0u32;
        let mut magnitude = 0u32;
        if comptime!(format == FactorFormat::Ternary) {
            let mut high = 0u32;
            let mut low = 0u32;
            for row in 0..count {
                let (more_high, more_low) = in_units(x.at(first + row * rank) & SIZE, largest, room);
                low += more_low;
                high += more_high + carry(low, more_low);
            }
            let (upper, lower) = threshold(high, low, rows, 0u32);
            above_high = upper;
            above_low = lower;
            high = 0u32;
            low = 0u32;
            let mut kept = 0u32;
            for row in 0..count {
                let (more_high, more_low) = in_units(x.at(first + row * rank) & SIZE, largest, room);
                if more_high > above_high || (more_high == above_high && more_low > above_low) {
                    low += more_low;
                    high += more_high + carry(low, more_low);
                    kept += 1u32;
                }
            }
            magnitude = mean(high, low, kept, largest, room);
        }
        let column = Column { largest, above_high, above_low, magnitude };
        for row in 0..count {
            let at = first + row * rank;
            out.set(at, element(x.at(at), &column, room, format, 0u32));
        }
    }
}

/// The largest of `value` over the lanes of this unit's column, given to all of them. Every unit of the cube must call it.
#[cube]
fn largest_of_column(value: u32, shared: &mut SharedMemory<u32>) -> u32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(LANES.ilog2()) {
        let half = comptime!(UNITS as usize >> (level as usize + 1));
        if me < half {
            let other = shared[me + half];
            if other > shared[me] {
                shared[me] = other;
            }
        }
        sync_cube();
    }
    let largest = shared[me % comptime!(COLUMNS as usize)];
    // The next call writes the same memory.
    sync_cube();
    largest
}

/// The sums of a number of 64 bits and of one of 32 likewise; `shared` has three words a unit.
#[cube]
fn sums_of_column(high: u32, low: u32, count: u32, shared: &mut SharedMemory<u32>) -> (u32, u32, u32) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    shared[me] = high;
    shared[me + units] = low;
    shared[me + 2 * units] = count;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(LANES.ilog2()) {
        let half = comptime!(UNITS as usize >> (level as usize + 1));
        if me < half {
            let more = shared[me + half + units];
            let lower = shared[me + units] + more;
            shared[me + units] = lower;
            shared[me] = shared[me] + shared[me + half] + carry(lower, more);
            shared[me + 2 * units] = shared[me + 2 * units] + shared[me + half + 2 * units];
        }
        sync_cube();
    }
    let of = me % comptime!(COLUMNS as usize);
    let high = shared[of];
    let low = shared[of + units];
    let count = shared[of + 2 * units];
    sync_cube();
    (high, low, count)
}

/// Element `i` of one of the factors.
#[cube]
fn word_of(factors: &Sequence<Words>, which: u32, i: usize) -> u32 {
    let mut word = 0u32;
    #[unroll]
    for t in 0..factors.len() {
        if which == comptime!(t as u32) {
            word = factors[t].at(i);
        }
    }
    word
}

/// Arm `fused`: a cube has [`COLUMNS`] neighbouring columns of one matrix, and each of its lanes every [`LANES`]-th row.
/// Matrices of all factors of a call, whose cubes begin at `cubes` and whose elements at `starts` of `out`.
///
/// Faults: 1, 2, 4 and 5 in what both arms share; 3 leaves the last row out of the ternary mean.
#[cube(launch_unchecked)]
fn round_kernel(
    factors: Sequence<Words>,
    cubes: Sequence<u32>,
    starts: Sequence<u32>,
    rows: Sequence<u32>,
    rooms: Sequence<u32>,
    out: &mut Words,
    all: u32,
    rank: u32,
    #[comptime] format: FactorFormat,
    #[comptime] fault: u32,
) {
    let cube = CUBE_POS as u32;
    if cube >= all {
        terminate!();
    }
    let mut which = 0u32;
    let mut before = 0u32;
    let mut start = starts[0];
    let mut count = rows[0];
    let mut room = rooms[0];
    #[unroll]
    for t in 1..factors.len() {
        if cube >= cubes[t] {
            which = comptime!(t as u32);
            before = cubes[t];
            start = starts[t];
            count = rows[t];
            room = rooms[t];
        }
    }
    let (wide, lanes) = (comptime!(COLUMNS as usize), comptime!(LANES as usize));
    let (rank, tall) = (rank as usize, count as usize);
    let unit = UNIT_POS as usize;
    let blocks = rank.div_ceil(wide);
    let block = (cube - before) as usize;
    let (lane, r) = (unit / wide, block % blocks * wide + unit % wide);
    let first = block / blocks * tall * rank + r;
    let mut steps = 0usize;
    if r < rank && lane < tall {
        steps = (tall - lane).div_ceil(lanes);
    }
    let mut shared = SharedMemory::<u32>::new(comptime!(3 * UNITS as usize));
    let mut largest = 0u32;
    let mut above_high = 0u32;
    let mut above_low = 0u32;
    let mut magnitude = 0u32;
    if comptime!(by_column(format)) {
        for step in 0..steps {
            let size = word_of(&factors, which, first + (step * lanes + lane) * rank) & SIZE;
            if size > largest {
                largest = size;
            }
        }
        largest = largest_of_column(largest, &mut shared);
    }
    if comptime!(format == FactorFormat::Ternary) {
        let mut high = 0u32;
        let mut low = 0u32;
        let mut counted = tall;
        if comptime!(fault == 3) {
            counted = tall - 1;
        }
        for step in 0..steps {
            let row = step * lanes + lane;
            let (more_high, more_low) = in_units(word_of(&factors, which, first + row * rank) & SIZE, largest, room);
            if row < counted {
                low += more_low;
                high += more_high + carry(low, more_low);
            }
        }
        let (high, low, _) = sums_of_column(high, low, 0u32, &mut shared);
        let (upper, lower) = threshold(high, low, count, fault);
        above_high = upper;
        above_low = lower;
        let mut high = 0u32;
        let mut low = 0u32;
        let mut kept = 0u32;
        for step in 0..steps {
            let (more_high, more_low) =
                in_units(word_of(&factors, which, first + (step * lanes + lane) * rank) & SIZE, largest, room);
            if more_high > above_high || (more_high == above_high && more_low > above_low) {
                low += more_low;
                high += more_high + carry(low, more_low);
                kept += 1u32;
            }
        }
        let (high, low, kept) = sums_of_column(high, low, kept, &mut shared);
        magnitude = mean(high, low, kept, largest, room);
    }
    let column = Column { largest, above_high, above_low, magnitude };
    for step in 0..steps {
        let at = first + (step * lanes + lane) * rank;
        out.set(start as usize + at, element(word_of(&factors, which, at), &column, room, format, fault));
    }
}

/// The least b with 2^b >= rows.
fn room(rows: usize) -> u32 {
    usize::BITS - rows.saturating_sub(1).leading_zeros()
}

/// The sizes `[E, rows, R]` of a factor, or `[rows, R]` of the only one.
fn sizes(factor: &Tensor) -> [usize; 3] {
    match *factor.shape() {
        [experts, rows, rank] => [experts, rows, rank],
        [rows, rank] => [1, rows, rank],
        _ => unreachable!("factors have two or three axes"),
    }
}

/// Factors of one rank as their format has them; those in f32 are what they are. They stay as long as the step.
///
/// # Errors
/// `Config` for more rows than a ternary column can have.
pub(crate) fn rounded<R: Engine>(
    device: &Device<R>,
    arm: Arm,
    name: &'static str,
    format: FactorFormat,
    factors: &[&Tensor],
    fault: u32,
) -> Result<Vec<Tensor>> {
    if format == FactorFormat::F32 {
        return Ok(factors.iter().map(|&factor| factor.clone()).collect());
    }
    let tall = factors.iter().map(|factor| sizes(factor)[1]).find(|&rows| rows > MOST_ROWS);
    if let (FactorFormat::Ternary, Some(rows)) = (format, tall) {
        let expected = format!("another format for {rows} rows: a ternary column has at most {MOST_ROWS}");
        return Err(Error::Config { op: name, field: "format", expected, got: format.to_string() });
    }
    match arm {
        Arm::Plain => written(device, arm, name, format, factors, fault),
        // Every iteration of a block has the same ones.
        Arm::Fused => {
            let variant = FactorFormat::ALL.iter().position(|known| *known == format).expect("all are listed") as u32;
            device.once((name, variant), factors, || written(device, arm, name, format, factors, fault))
        }
    }
}

fn written<R: Engine>(
    device: &Device<R>,
    arm: Arm,
    name: &'static str,
    format: FactorFormat,
    factors: &[&Tensor],
    fault: u32,
) -> Result<Vec<Tensor>> {
    let (mut starts, mut len) = (Vec::new(), 0);
    for factor in factors {
        starts.push(len);
        len += factor.len().next_multiple_of(EDGE);
    }
    let whole = device.scratch(&[len], DType::F32)?;
    let parts: Vec<Tensor> = factors
        .iter()
        .zip(&starts)
        .map(|(factor, &start)| device.view(&whole, start, factor.shape()))
        .collect::<Result<_>>()?;
    match arm {
        Arm::Plain => {
            for (&factor, part) in factors.iter().zip(&parts) {
                plain(device, name, format, factor, part)?;
            }
        }
        Arm::Fused => fused(device, name, format, factors, &starts, &whole, fault)?,
    }
    Ok(parts)
}

fn plain<R: Engine>(
    device: &Device<R>,
    name: &'static str,
    format: FactorFormat,
    factor: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let [experts, rows, rank] = sizes(factor);
    let columns = experts * rank;
    let uses = [factor, out];
    device.launch(name, Grid::units(columns), factor.bytes() + out.bytes(), &uses, |client, count, dim| {
        let [x, out] = uses.map(|t| device.words(t));
        let (columns, tall, rank) = (columns as u32, rows as u32, rank as u32);
        // SAFETY: both have `rows` elements in each of the columns; units past them do nothing.
        unsafe {
            plain_kernel::launch_unchecked::<R>(client, count, dim, x, out, columns, tall, rank, room(rows), format)
        }
    })
}

fn fused<R: Engine>(
    device: &Device<R>,
    name: &'static str,
    format: FactorFormat,
    factors: &[&Tensor],
    starts: &[usize],
    whole: &Tensor,
    fault: u32,
) -> Result<()> {
    let rank = sizes(factors[0])[2];
    let (mut firsts, mut all) = (Vec::new(), 0);
    for factor in factors {
        firsts.push(all);
        all += sizes(factor)[0] * rank.div_ceil(COLUMNS as usize);
    }
    let rows: Vec<usize> = factors.iter().map(|factor| sizes(factor)[1]).collect();
    let bytes = 2 * factors.iter().map(|factor| factor.bytes()).sum::<u64>();
    let mut uses = factors.to_vec();
    uses.push(whole);
    device.launch(name, Grid::cubes(all, UNITS), bytes, &uses, |client, count, dim| {
        let words = |numbers: &[usize]| -> SequenceArg<R, u32> { numbers.iter().map(|&n| n as u32).collect() };
        let rooms = rows.iter().map(|&rows| room(rows)).collect();
        // SAFETY: every factor has its rows, `whole` room for all from their starts on; cubes past them do nothing.
        unsafe {
            round_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                factors.iter().map(|&factor| device.words(factor)).collect(),
                words(&firsts),
                words(starts),
                words(&rows),
                rooms,
                device.words(whole),
                all as u32,
                rank as u32,
                format,
                fault,
            )
        }
    })
}

impl<R: Engine> Device<R> {
    /// A factor `[rows, R]` or `[E, rows, R]` as a format has it, for tests, with the fault that is planted in `spectral`;
    /// operations round theirs themselves. It belongs to the step.
    ///
    /// # Errors
    /// `Storage` if it is no tensor of floats, `Shape` if it has another number of axes.
    pub fn rounded_factor(&self, arm: Arm, format: FactorFormat, factor: &Tensor) -> Result<Tensor> {
        const OP: &str = "rounded_factor";
        self.check_floats(OP, &[("factor", factor)])?;
        if !matches!(factor.shape().len(), 2 | 3) {
            let expected = "[rows, R] or [E, rows, R]".to_owned();
            return Err(Error::Shape { op: OP, arg: "factor", expected, got: factor.shape().to_vec() });
        }
        let fault = crate::spectral::fault(self.mutant_of(crate::spectral::STEM, arm));
        Ok(rounded(self, arm, OP, format, &[factor], fault)?.remove(0))
    }
}
