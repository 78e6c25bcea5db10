//! Branches of a captured step.
//!
//! A recording on one stream is a chain: every launch waits for the one before. The driver lets the recorder say what the
//! next launch waits for, so a branch begins by going back to an earlier point and ends by waiting for both ends. No
//! second stream and no event is needed, and none of this leaves a node in the graph.

use std::ptr;

use cudarc::driver::{DriverError, sys};

use super::error::Error;
use super::shared::Shared;

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
        let plain = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
        let edges = if edges.is_null() {
            vec![plain; count]
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
