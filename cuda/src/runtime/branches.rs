//! Branches of a captured step.
//!
//! A recording on one stream is a chain: every launch waits for the one before. The driver lets the recorder say what the
//! next launch waits for, so a branch begins by going back to an earlier point and ends by waiting for both ends. No
//! second stream and no event is needed, and none of this leaves a node in the graph.

use std::collections::BTreeSet;
use std::ptr;

use cudarc::driver::{DriverError, sys};

use super::error::Error;
use super::shared::Shared;

/// An edge without ports.
const PLAIN: sys::CUgraphEdgeData = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };

/// Launches of a recording that the next one waits for.
pub struct Dependencies {
    nodes: Vec<sys::CUgraphNode>,
    edges: Vec<sys::CUgraphEdgeData>,
}

// SAFETY: nodes are names of things that the driver owns; they are used on the device thread only.
unsafe impl Send for Dependencies {}

impl Dependencies {
    /// What the next launch waits for; nothing where no step is recorded.
    pub(super) fn of(shared: &Shared) -> Result<Self, Error> {
        let stream = shared.stream()?.cu_stream();
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph, mut count) = (0, ptr::null_mut(), 0);
        let (mut nodes, mut edges) = (ptr::null(), ptr::null());
        let fault = shared.call("cuStreamGetCaptureInfo");
        // SAFETY: every pointer is to a place of its own.
        let asked = unsafe {
            sys::cuStreamGetCaptureInfo_v3(stream, &mut status, &mut id, &mut graph, &mut nodes, &mut edges, &mut count)
        };
        asked.result().map_err(&fault)?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
            return Err(fault(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)));
        }
        if count == 0 {
            return Ok(Self { nodes: Vec::new(), edges: Vec::new() });
        }
        // SAFETY: the driver's lists have `count` entries until the next call about this stream.
        let nodes = unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec();
        let edges = if edges.is_null() {
            vec![PLAIN; count]
        } else {
            // SAFETY: as for the nodes.
            unsafe { std::slice::from_raw_parts(edges, count) }.to_vec()
        };
        Ok(Self { nodes, edges })
    }

    /// Lets the next launch wait for these, in place of or besides what it would have waited for.
    pub(super) fn set(mut self, shared: &Shared, besides: bool) -> Result<(), Error> {
        use sys::CUstreamUpdateCaptureDependencies_flags as Flags;
        let flags =
            if besides { Flags::CU_STREAM_ADD_CAPTURE_DEPENDENCIES } else { Flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES };
        if self.nodes.is_empty() && besides {
            return Ok(());
        }
        // SAFETY: both lists have as many entries as is said.
        let set = unsafe {
            sys::cuStreamUpdateCaptureDependencies_v2(
                shared.stream()?.cu_stream(),
                self.nodes.as_mut_ptr(),
                self.edges.as_ptr(),
                self.nodes.len(),
                flags as u32,
            )
        };
        set.result().map_err(shared.call("cuStreamUpdateCaptureDependencies"))
    }
}

impl Dependencies {
    /// Of a recording that has ended, whose last launches these are: the number of its nodes.
    ///
    /// # Errors
    /// A launch that nothing waits for, neither another one nor the end: then a replay could be over before it.
    pub(super) fn check_joined(&self, shared: &Shared, graph: sys::CUgraph) -> Result<usize, Error> {
        let mut count = 0;
        // SAFETY: the graph is alive; without a list the driver gives the number alone.
        let counted = unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count) };
        counted.result().map_err(shared.call("cuGraphGetNodes"))?;
        // The driver refuses to list nothing.
        if count == 0 {
            return Ok(0);
        }
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: the list has as many places as there are nodes.
        let listed = unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) };
        listed.result().map_err(shared.call("cuGraphGetNodes"))?;
        let mut edges = 0;
        let fault = shared.call("cuGraphGetEdges");
        // SAFETY: as for the nodes.
        let counted =
            unsafe { sys::cuGraphGetEdges_v2(graph, ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), &mut edges) };
        counted.result().map_err(&fault)?;
        let (mut from, mut to) = (vec![ptr::null_mut(); edges], vec![ptr::null_mut(); edges]);
        let mut data = vec![PLAIN; edges];
        if edges > 0 {
            // SAFETY: the three lists have as many places as there are edges.
            let listed = unsafe {
                sys::cuGraphGetEdges_v2(graph, from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &mut edges)
            };
            listed.result().map_err(&fault)?;
        }
        match unjoined(&nodes, &from, &self.nodes) {
            0 => Ok(count),
            some => Err(Error::Call {
                call: "capture",
                reason: format!("{some} of {count} launches are waited for by nothing; a branch was not joined"),
                last_kernel: "none".to_owned(),
            }),
        }
    }
}

/// How many nodes are neither waited for by others, which are those with an edge `from` them, nor among the `last`.
fn unjoined<N: Ord>(nodes: &[N], from: &[N], last: &[N]) -> usize {
    let waited_for: BTreeSet<&N> = from.iter().chain(last).collect();
    nodes.iter().filter(|node| !waited_for.contains(node)).count()
}

#[cfg(test)]
mod tests {
    use super::unjoined;

    #[test]
    fn a_branch_that_nothing_waits_for_is_seen() {
        // 0 forks into 1, 2 and 3, 4; both ends join in 5.
        assert_eq!(unjoined(&[0, 1, 2, 3, 4, 5], &[0, 1, 0, 3, 2, 4], &[5]), 0);
        // Without the edge from 2 to 5.
        assert_eq!(unjoined(&[0, 1, 2, 3, 4, 5], &[0, 1, 0, 3, 4], &[5]), 1);
        // A recording may end with both.
        assert_eq!(unjoined(&[0, 1, 2, 3, 4], &[0, 1, 0, 3], &[2, 4]), 0);
        assert_eq!(unjoined(&[0, 1, 2, 3, 4], &[0, 1, 0, 3], &[4]), 1);
    }
}
