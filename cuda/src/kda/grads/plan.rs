//! What the kernel of `grads` is compiled for, and how its shared memory is laid out.

use dormouse_reference::Result;

use super::super::tile::{Factors, Math, Part, Strides, Tile};
use super::super::{Call, SPAN, widest};
use super::{LEVELS, RUN, RUNS, UNITS};
use crate::device::Device;
use crate::runtime::Engine;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Value columns of a block.
    pub values: usize,
    /// Channels of a block.
    pub channels: usize,
    pub math: Math,
    /// Whether there is an erase gate.
    pub gated: bool,
}

impl Plan {
    /// Takes as many channels, then as many value columns, as there are and as fit.
    pub fn new<R: Engine>(b: &Device<R>, kernel: &'static str, call: &Call<'_>) -> Result<Self> {
        let Call { inputs, sizes, math, .. } = call;
        let (math, gated) = (*math, inputs.b.is_some());
        let upto = |widths: &[usize], size: usize| -> Vec<usize> {
            widths.iter().copied().filter(|&width| width == 16 || width / 2 < size).collect()
        };
        let plan = |channels, values| Self { values, channels, math, gated };
        let channels = widest(b, kernel, &upto(&[64, 32, 16], sizes.key), |channels| plan(channels, 16).bytes())?;
        let values = widest(b, kernel, &upto(&[32, 16], sizes.value), |values| plan(channels, values).bytes())?;
        Ok(plan(channels, values))
    }

    /// Bytes of shared memory of a cube.
    fn bytes(self) -> usize {
        4 * (SPAN * self.square() + self.work() + SPAN)
    }

    /// From one token to the next in the square of pairs.
    pub const fn square(self) -> usize {
        SPAN + self.math.padding()
    }

    /// A `[SPAN, values]` tile.
    pub const fn by_value(self) -> Part {
        Part { rows: SPAN, columns: self.values, stride: self.values + self.math.padding(), units: UNITS }
    }

    /// A `[SPAN, channels]` tile.
    pub const fn by_channel(self) -> Part {
        Part { rows: SPAN, columns: self.channels, stride: self.channels + self.math.padding(), units: UNITS }
    }

    /// A `[channels, values]` tile of a state.
    pub const fn of_state(self) -> Part {
        Part { rows: self.channels, columns: self.values, stride: self.values + self.math.padding(), units: UNITS }
    }

    /// Registers for the erase gate of a run; without one there is nothing to hold.
    pub const fn erasing(self) -> usize {
        if self.gated { RUN } else { 1 }
    }

    /// Sums of a run, one a channel.
    pub const fn of_runs(self) -> usize {
        RUNS * self.channels
    }

    /// Where the sums of runs begin in the work area: behind three tiles of channels and one number a unit.
    pub const fn gates(self) -> usize {
        3 * self.by_channel().len() + UNITS
    }

    /// The work area: three tiles of value columns and two of states; later three tiles of channels, one number a unit,
    /// and five sums of runs: of g, of A, of B, and of the pairs at each level.
    pub const fn work(self) -> usize {
        let values = 3 * self.by_value().len() + 2 * self.of_state().len();
        let channels = self.gates() + (3 + LEVELS) * self.of_runs();
        if values > channels { values } else { channels }
    }

    /// The `[SPAN, channels]` sums of a block of channels.
    pub const fn sums(self) -> Tile {
        Tile { rows: SPAN, columns: self.channels, units: UNITS, math: self.math }
    }

    /// The square of pairs.
    pub const fn pairs(self) -> Tile {
        Tile { rows: SPAN, columns: SPAN, units: UNITS, math: self.math }
    }

    /// Rows of tokens times rows of tokens: a product over the value columns.
    pub const fn over_values(self) -> Factors {
        let stride = self.by_value().stride;
        let (a, b) = (Strides { first: stride, second: 1 }, Strides { first: 1, second: stride });
        Factors { a, b, inner: self.values }
    }

    /// Rows of tokens times rows of a state.
    pub const fn with_state(self) -> Factors {
        let a = Strides { first: self.by_value().stride, second: 1 };
        let b = Strides { first: 1, second: self.of_state().stride };
        Factors { a, b, inner: self.values }
    }

    /// Rows of the square times rows of channels.
    pub const fn with_pairs(self) -> Factors {
        let a = Strides { first: self.square(), second: 1 };
        Factors { a, b: Strides { first: self.by_channel().stride, second: 1 }, inner: RUN }
    }

    /// Columns of the square times rows of channels.
    pub const fn with_pairs_turned(self) -> Factors {
        let a = Strides { first: 1, second: self.square() };
        Factors { a, b: Strides { first: self.by_channel().stride, second: 1 }, inner: RUN }
    }
}
