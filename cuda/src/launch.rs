//! How many units a kernel runs on, and the ledger of launches.

use std::collections::BTreeMap;

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::arm::Arm;
use crate::runtime::Error;

/// Units of a cube in kernels whose units do not share anything: small cubes spread little work over a device.
const UNITS: u32 = 64;

/// The same where there is work for all of a device: starting a cube takes as long as some hundred units have to do.
const UNITS_OF_MANY: u32 = 256;

/// Units from which on there is.
const MANY: usize = 1 << 18;

/// The largest number of cubes along one axis on every runtime.
const MAX_AXIS: u32 = 65535;

/// Cubes and units of a launch.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    pub cubes: (u32, u32),
    pub dim: (u32, u32),
}

impl Grid {
    /// At least `n` units in one row (`ABSOLUTE_POS`); units from `n` on have nothing to do. Vulkan stops at 65535
    /// cubes along an axis, so a longer row is folded.
    pub fn units(n: usize) -> Self {
        let units = if n < MANY { UNITS } else { UNITS_OF_MANY };
        Self::cubes(n.div_ceil(units as usize), units)
    }

    /// `cubes` cubes of `units` units each; the cube's number is `CUBE_POS`. Folded like [`units`](Self::units): cubes
    /// from `cubes` on have nothing to do, and no barrier may lie behind that test.
    pub fn cubes(cubes: usize, units: u32) -> Self {
        let y = (cubes as u64).div_ceil(u64::from(MAX_AXIS));
        let x = if y == 0 { 0 } else { (cubes as u64).div_ceil(y) };
        Self { cubes: (x as u32, y as u32), dim: (units, 1) }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.cubes.0 == 0 || self.cubes.1 == 0
    }

    /// Whether every runtime accepts it.
    pub fn fits(&self) -> bool {
        self.cubes.0 <= MAX_AXIS && self.cubes.1 <= MAX_AXIS
    }

    pub fn count(&self) -> CubeCount {
        CubeCount::Static(self.cubes.0, self.cubes.1, 1)
    }

    pub fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.dim.0, self.dim.1)
    }
}

/// What one kernel has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// How often it ran, in replays too.
    pub count: u64,
    /// Bytes that it has to read and write: the floor of its time.
    pub bytes: u64,
}

/// What one kernel has done in one stage of the caller's work, and what the host did there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// Launches one by one.
    pub launches: u64,
    /// Runs as a node of a replayed graph.
    pub nodes: u64,
    /// Bytes of scratch that were laid out for it.
    pub alloc_bytes: u64,
    /// Times the host waited for the device.
    pub syncs: u64,
    /// Time on the device in nanoseconds, where timers were on.
    pub device_ns: u64,
}

impl Site {
    fn add(&mut self, other: &Site) {
        self.launches += other.launches;
        self.nodes += other.nodes;
        self.alloc_bytes += other.alloc_bytes;
        self.syncs += other.syncs;
        self.device_ns += other.device_ns;
    }
}

/// The word that stands for a whole graph among the kernels of [`Ledger::sites`].
pub const GRAPH: &str = "graph";

/// The word for nodes of a graph that no launch was counted for.
pub const UNLISTED: &str = "unlisted";

/// Which half of an operation was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// Forward, or the whole of an operation that has no backward pass.
    Forward,
    /// Backward.
    Backward,
}

/// Launches by kernel and calls by operation, in alphabetical order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Kernels by name.
    pub kernels: BTreeMap<&'static str, Launches>,
    /// How often an operation was called, by stem, half and arm.
    pub calls: BTreeMap<(&'static str, Pass, Arm), u64>,
    /// Kernels, host waits and replays by the caller's stage and their name.
    pub sites: BTreeMap<(&'static str, &'static str), Site>,
}

impl Ledger {
    /// Notes one launch of a kernel, for which `alloc_bytes` of scratch were laid out.
    pub(crate) fn note(&mut self, stage: &'static str, kernel: &'static str, bytes: u64, alloc_bytes: u64) {
        let entry = self.kernels.entry(kernel).or_default();
        entry.count += 1;
        entry.bytes += bytes;
        let site = self.site(stage, kernel);
        site.launches += 1;
        site.alloc_bytes += alloc_bytes;
    }

    /// What is known of a kernel, a wait or a replay in a stage.
    pub(crate) fn site(&mut self, stage: &'static str, name: &'static str) -> &mut Site {
        self.sites.entry((stage, name)).or_default()
    }

    /// Notes one call of an operation.
    pub(crate) fn call(&mut self, stem: &'static str, pass: Pass, arm: Arm) {
        *self.calls.entry((stem, pass, arm)).or_default() += 1;
    }

    /// Holds the launches of a captured step against the nodes that its graph has. A library may launch more than the one
    /// kernel that was counted for a call; those are listed as [`UNLISTED`].
    pub(crate) fn expect_nodes(&mut self, nodes: u64) -> Result<()> {
        let counted = self.count();
        if nodes < counted {
            let reason = format!("{counted} launches were counted and the graph has {nodes} nodes");
            return Err(Error::Launch { kernel: GRAPH.to_owned(), reason }.into());
        }
        for _ in counted..nodes {
            self.note("step", UNLISTED, 0, 0);
        }
        Ok(())
    }

    /// Adds one replay of a captured step: its launches are nodes now.
    pub(crate) fn replay(&mut self, captured: &Ledger, stage: &'static str) {
        let as_nodes = |site: &Site| Site { launches: 0, nodes: site.launches, ..*site };
        let sites = captured.sites.iter().map(|(name, site)| (*name, as_nodes(site))).collect();
        self.add(&Ledger { sites, ..captured.clone() });
        self.site(stage, GRAPH).launches += 1;
    }

    /// Adds what another ledger counted.
    pub fn add(&mut self, other: &Ledger) {
        for (name, site) in &other.sites {
            self.sites.entry(*name).or_default().add(site);
        }
        for (call, count) in &other.calls {
            *self.calls.entry(*call).or_default() += count;
        }
        for (kernel, launches) in &other.kernels {
            let entry = self.kernels.entry(kernel).or_default();
            entry.count += launches.count;
            entry.bytes += launches.bytes;
        }
    }

    /// Launches of all kernels.
    pub fn count(&self) -> u64 {
        self.kernels.values().map(|k| k.count).sum()
    }

    /// Bytes of all kernels.
    pub fn bytes(&self) -> u64 {
        self.kernels.values().map(|k| k.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_nobody_counted_are_listed_and_launches_without_a_node_are_an_error() {
        let mut step = Ledger::default();
        step.note("forward", "gemm", 8, 0);
        step.note("backward", "fill", 4, 0);
        let mut more = step.clone();
        more.expect_nodes(3).unwrap();
        assert_eq!((more.kernels[UNLISTED].count, more.count()), (1, 3));
        step.expect_nodes(2).unwrap();
        assert!(!step.kernels.contains_key(UNLISTED));
        let error = step.expect_nodes(1).unwrap_err().to_string();
        assert!(error.contains("2 launches were counted and the graph has 1 nodes"), "{error}");
    }

    #[test]
    fn f3_a_row_of_units_is_covered_and_folded_where_it_is_long() {
        for n in [0, 1, 64, 65, MANY - 1, MANY, 256 * 65535, 256 * 65535 + 1, 3_000_000_000] {
            let grid = Grid::units(n);
            let (x, y, units) = (u64::from(grid.cubes.0), u64::from(grid.cubes.1), u64::from(grid.dim.0));
            assert!(x * y * units >= n as u64, "{n}: {grid:?}");
            assert!(x * y * units < n as u64 + units * (y + 1), "{n}: {grid:?}");
            assert!(grid.fits());
            assert_eq!(grid.is_empty(), n == 0);
        }
    }

    #[test]
    fn a_replay_adds_what_was_captured() {
        let mut step = Ledger::default();
        step.note("forward", "fill", 8, 512);
        step.note("backward", "fill", 4, 0);
        step.note("forward", "copy", 1, 0);
        let mut all = step.clone();
        all.call("kda", Pass::Backward, Arm::Fused);
        step.call("kda", Pass::Backward, Arm::Fused);
        all.replay(&step, "replay");
        assert_eq!(all.calls[&("kda", Pass::Backward, Arm::Fused)], 2);
        assert_eq!((all.count(), all.bytes()), (6, 26));
        assert_eq!(all.kernels["fill"], Launches { count: 4, bytes: 24 });
        let fill = Site { launches: 1, nodes: 1, alloc_bytes: 1024, ..Site::default() };
        assert_eq!(all.sites[&("forward", "fill")], fill);
        assert_eq!(all.sites[&("replay", GRAPH)].launches, 1);
    }
}
