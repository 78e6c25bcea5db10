//! `record`: the definition is in `dormouse_reference::record`.
//!
//! Numbers move as words, so that NaN keeps its bits; only integers are converted. Arm `plain` launches once a value, arm
//! `fused` once for every [`VALUES`] of them. The row is found on the device, since `step` is known to the device only.

use cubecl::prelude::*;
use dormouse_reference::record::Record;
use dormouse_reference::{DType, Dims, Error, Result, Tensors, check_one};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};
use crate::words;

const STEM: &str = "record";

const OP: &str = "record::update";

/// Numbered from 1 in the kernel.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("steps-count-from-one"),
    Mutant::fused("always-the-last-row"),
    Mutant::fused("first-element-for-all"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("integers-by-their-bits"),
];

/// Values of one launch of arm `fused`: more than a step records, and few enough buffers for every runtime.
const VALUES: usize = 8;

/// Writes one value into its columns. One unit, one element.
#[cube(launch_unchecked)]
fn value_kernel(
    value: &Words,
    step: &Words,
    ring: &mut Words,
    rows: u32,
    width: u32,
    column: u32,
    len: u32,
    #[comptime] integer: bool,
) {
    if ABSOLUTE_POS < len as usize {
        let row = (step.at(0) % rows) as usize;
        let mut word = value.at(ABSOLUTE_POS);
        if integer {
            word = u32::reinterpret(f32::cast_from(word));
        }
        ring.set(row * width as usize + column as usize + ABSOLUTE_POS, word);
    }
}

/// Writes some values into their columns, which begin at `column`; `ends` says where in them each value ends, and bit p
/// of `integers` that value p holds integers. One unit, one element.
///
/// Mutants: 1 counts steps from one, 2 takes the last row always, 3 takes a value's first element for all, 4 is null (a
/// renamed local), 5 does not convert integers.
#[cube(launch_unchecked)]
fn values_kernel(
    values: Sequence<Words>,
    ends: Sequence<u32>,
    step: &Words,
    ring: &mut Words,
    rows: u32,
    width: u32,
    column: u32,
    len: u32,
    #[comptime] integers: u32,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let mut row = step.at(0) % rows;
        if comptime!(mutant == 1) {
            row = (step.at(0) + 1u32) % rows;
        }
        if comptime!(mutant == 2) {
            row = rows - 1u32;
        }
        if comptime!(mutant == 4) {
            let renamed = step.at(0) % rows;
            row = renamed;
        }
        let mut word = 0u32;
        let mut start = 0usize;
        #[unroll]
        for p in 0..values.len() {
            let end = ends[p] as usize;
            if i >= start && i < end {
                let mut at = i - start;
                if comptime!(mutant == 3) {
                    at = 0usize;
                }
                word = values[p].at(at);
                if comptime!(integers >> p & 1 == 1 && mutant != 5) {
                    word = u32::reinterpret(f32::cast_from(word));
                }
            }
            start = end;
        }
        ring.set(row as usize * width as usize + column as usize + i, word);
    }
}

impl<R: Engine> Record for Device<R> {
    fn update(&self, values: &[&Tensor], step: &Tensor, ring: &Tensor) -> Result<()> {
        let mut dims = Dims::new(OP);
        dims.bind("ring", ring.shape(), &["R", "width"])?;
        dims.positive(&["R"])?;
        let (rows, width) = (dims.get("R"), dims.get("width"));
        for value in values {
            Dims::new(OP).bind("values", value.shape(), &["n"])?;
            self.check_life(OP, "values", value)?;
        }
        let lens: Vec<usize> = values.iter().map(|value| value.len()).collect();
        if lens.iter().sum::<usize>() != width {
            let expected = format!("lengths that add up to width = {width} (width from `ring`)");
            return Err(Error::Shape { op: OP, arg: "values", expected, got: lens });
        }
        self.check_life(OP, "step", step)?;
        if step.dtype == DType::F32 {
            return Err(Error::Storage { op: OP, arg: "step", expected: "u8 or u32".to_owned(), got: step.dtype });
        }
        check_one(OP, "step", step.shape())?;
        self.check_into(OP, "ring", ring, &[])?;
        let values: Vec<Tensor> = values.iter().filter(|value| !value.is_empty()).map(|v| (*v).clone()).collect();
        let values = values.into_iter().map(|value| self.apart(value, ring)).collect::<Result<Vec<_>>>()?;
        let row = Row { step, ring, rows: rows as u32, width: width as u32 };
        match self.forward_arm(STEM) {
            Arm::Plain => plain(self, &values, &row),
            Arm::Fused => fused(self, &values, &row),
        }
    }
}

/// Where values go.
struct Row<'a> {
    step: &'a Tensor,
    ring: &'a Tensor,
    rows: u32,
    width: u32,
}

impl<R: Engine> Device<R> {
    /// The value, or a copy if it is a part of the ring: a kernel must not read what it writes.
    fn apart(&self, value: Tensor, ring: &Tensor) -> Result<Tensor> {
        if !value.overlaps(ring) {
            return Ok(value);
        }
        let aside = self.scratch(value.shape(), value.dtype)?;
        words::copy(self, &value, &aside)?;
        Ok(aside)
    }
}

fn is_integer(value: &Tensor) -> bool {
    value.dtype != DType::F32
}

fn plain<R: Engine>(b: &Device<R>, values: &[Tensor], row: &Row<'_>) -> Result<()> {
    let &Row { step, ring, rows, width } = row;
    let mut column = 0;
    for value in values {
        let uses = [value, step, ring];
        b.launch("record::value", Grid::units(value.len()), 2 * value.bytes(), &uses, |client, count, dim| {
            let ([x, step, ring], len) = (uses.map(|t| b.words(t)), value.len() as u32);
            let integer = is_integer(value);
            // SAFETY: the lengths add up to the ring's width; units past the value do nothing.
            unsafe {
                value_kernel::launch_unchecked::<R>(
                    client, count, dim, x, step, ring, rows, width, column, len, integer,
                )
            }
        })?;
        column += value.len() as u32;
    }
    Ok(())
}

fn fused<R: Engine>(b: &Device<R>, values: &[Tensor], row: &Row<'_>) -> Result<()> {
    let &Row { step, ring, rows, width } = row;
    let mutant = b.mutant(STEM);
    let mut column = 0;
    for part in values.chunks(VALUES) {
        let ends = part.iter().scan(0, |end, value| {
            *end += value.len() as u32;
            Some(*end)
        });
        let len = part.iter().map(Tensor::len).sum::<usize>();
        let uses: Vec<&Tensor> = part.iter().chain([step, ring]).collect();
        b.launch(OP, Grid::units(len), 8 * len as u64, &uses, |client, count, dim| {
            let (values, ends) = (part.iter().map(|value| b.words(value)).collect(), ends.collect());
            let integers = part.iter().rev().fold(0, |bits, value| bits << 1 | u32::from(is_integer(value)));
            let (step, ring, len) = (b.words(step), b.words(ring), len as u32);
            // SAFETY: the lengths add up to the ring's width; units past the values do nothing.
            unsafe {
                values_kernel::launch_unchecked::<R>(
                    client, count, dim, values, ends, step, ring, rows, width, column, len, integers, mutant,
                )
            }
        })?;
        column += len as u32;
    }
    Ok(())
}
