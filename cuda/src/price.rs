//! The price of a launch: what an empty kernel costs, one by one and as a node of a graph. Measured, never assumed.

use std::time::Instant;

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::Words;

/// Launches in one measurement.
const LAUNCHES: u32 = 256;

/// Measurements, of which the fastest counts: everything else a machine does only makes one slower.
const ROUNDS: usize = 5;

/// What one launch of an empty kernel costs, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    /// Launched by the host, one after the other.
    pub eager_us: f64,
    /// As a node of a replayed graph; absent where there are no graphs.
    pub graph_us: Option<f64>,
}

/// Does nothing: no unit has so high a number.
#[cube(launch_unchecked)]
fn empty_kernel(out: &mut Words) {
    if ABSOLUTE_POS > 1000000 {
        out.set(0, 0u32);
    }
}

impl<R: Engine> Device<R> {
    /// Measures the price of a launch; no ledger sees these launches.
    ///
    /// # Errors
    /// Whatever the device says of a launch.
    pub fn launch_price(&self) -> Result<Price> {
        let word = self.persistent(&[1], DType::U32)?;
        let grid = Grid::units(1);
        let launch = || {
            for _ in 0..LAUNCHES {
                let (count, dim) = (grid.count(), grid.cube_dim());
                // SAFETY: the kernel touches nothing.
                unsafe { empty_kernel::launch_unchecked::<R>(self.client(), count, dim, self.words(&word)) };
            }
            Ok(R::settle(self.client())?)
        };
        // The first launch compiles.
        launch()?;
        let eager_us = self.fastest(launch)?;
        let graph_us = if R::GRAPHS {
            R::begin_capture(self.client())?;
            let recorded = launch();
            let graph = R::end_capture(self.client());
            recorded?;
            let graph = graph?;
            R::replay(self.client(), &graph)?;
            Some(self.fastest(|| Ok(R::replay(self.client(), &graph)?))?)
        } else {
            None
        };
        Ok(Price { eager_us, graph_us })
    }

    /// Microseconds a launch in the fastest of some rounds, from an idle device to an idle device.
    fn fastest(&self, round: impl Fn() -> Result<()>) -> Result<f64> {
        let mut fastest = f64::INFINITY;
        for _ in 0..ROUNDS {
            self.sync()?;
            let start = Instant::now();
            round()?;
            self.sync()?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        Ok(1e6 * fastest / f64::from(LAUNCHES))
    }
}
