//! Matrix products in a library of the runtime: cuBLASLt on CUDA, none elsewhere.
//!
//! A product is planned once for its [`Call`] and the alignment of its addresses; the second time, a call only launches.
//! It allocates nothing, waits for nothing and so can be captured. The algorithm comes from a committed table of
//! measured ones, else it is the library's first suggestion that sums in a fixed order: either way the same in every
//! process with the same library and GPU. [`Choice`] says which. A matrix that does not start at a multiple of 16 bytes
//! gets an algorithm of its own, and so other bits in the last places than one that does.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use cubecl::client::ComputeClient;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;
use cubecl::wgpu::WgpuRuntime;
use dormouse_reference::Precision;

use super::{Cuda, Error, Offline};

mod cublaslt;
mod table;

pub use cublaslt::Library;

/// A factor of a product as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stored {
    /// Whether the factor is the transpose of what is stored.
    pub transposed: bool,
    /// Elements from a row of what is stored to the next.
    pub row: usize,
    /// Elements from a matrix of a batch to the next; 0 takes the same one every time.
    pub next: usize,
}

/// What is added to a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Added {
    /// Nothing.
    Nothing,
    /// A row, to every row.
    Row,
    /// A matrix that lies as the result does.
    Matrix,
    /// What the destination holds.
    Destination,
}

impl Added {
    /// The word in tables.
    fn word(self) -> &'static str {
        match self {
            Added::Nothing => "nothing",
            Added::Row => "row",
            Added::Matrix => "matrix",
            Added::Destination => "destination",
        }
    }
}

/// A batch of row-major products `out = a b (+ added)`, a `[m, k]`, b `[k, n]`, all sizes at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// What the factors are rounded to.
    pub precision: Precision,
    /// Whether the factors are stored as bf16; else as f32.
    pub narrow: bool,
    /// Products.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Terms of a sum.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
    /// The left factor.
    pub a: Stored,
    /// The right factor.
    pub b: Stored,
    /// What is added.
    pub added: Added,
    /// The result, never transposed.
    pub out: Stored,
}

/// Where a matrix starts.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    /// The allocation.
    pub buffer: &'a Handle,
    /// The allocation's address once it has been asked for; it lasts as long as the allocation.
    pub address: &'a OnceLock<u64>,
    /// Bytes from there.
    pub offset: u64,
}

/// Where a product's matrices start; `added` is `out` where nothing else is added.
#[derive(Clone, Copy)]
pub struct Starts<'a> {
    /// The left factor.
    pub a: Start<'a>,
    /// The right factor.
    pub b: Start<'a>,
    /// What is added.
    pub added: Start<'a>,
    /// The result.
    pub out: Start<'a>,
}

/// Device addresses of the same.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    a: u64,
    b: u64,
    added: u64,
    out: u64,
}

/// Where an algorithm came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The committed table.
    Table,
    /// The library's first suggestion that sums in a fixed order.
    Heuristic,
    /// The library has none: the tiled kernel computes the product.
    Kernel,
    /// A suggestion that a measurement asked for by its number.
    Asked(usize),
}

/// The algorithm of one planned product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Compute capability, as 10 major + minor.
    pub sm: u32,
    /// The library's version.
    pub version: usize,
    /// The product.
    pub call: Call,
    /// Bytes that the addresses of a, b, what is added and the result are multiples of: 16, or 4.
    pub alignments: [u32; 4],
    /// The library's own form of the algorithm; empty if the library has none.
    pub algorithm: String,
    /// The same for people.
    pub details: String,
    /// Where it came from.
    pub source: Source,
    /// How many suggestions the library had that sum in a fixed order.
    pub suggestions: usize,
}

impl fmt::Display for Choice {
    /// A line of the table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\t{}", table::Key::of(self.sm, self.version, &self.call), self.algorithm)
    }
}

/// Products that may run at the same time: as many as there are workspaces.
pub const BRANCHES: usize = 8;

/// A runtime with or without a library for products.
pub trait Gemm: cubecl::Runtime {
    /// Whether its library takes factors in bf16.
    const NARROW: bool;

    /// Launches or records a product; false if there is no library or it has no algorithm. The matrices reach no further
    /// than their buffers. `branch`, below [`BRANCHES`], is another number for products that may run at the same time.
    fn gemm(client: &ComputeClient<Self>, call: &Call, at: &Starts<'_>, branch: usize) -> Result<bool, Error>;

    /// What was chosen for every product so far.
    fn choices(client: &ComputeClient<Self>) -> Vec<Choice>;

    /// Forgets all plans and takes the library's suggestion of this number from here on, or the usual choice: for
    /// measuring algorithms.
    fn ask(client: &ComputeClient<Self>, suggestion: Option<usize>);
}

/// The device address of a place.
pub(super) fn address(client: &ComputeClient<Cuda>, start: &Start<'_>) -> Result<u64, Error> {
    if let Some(at) = start.address.get() {
        return Ok(at + start.offset);
    }
    let resource = client
        .get_resource(start.buffer.clone())
        .map_err(|e| Error::Launch { kernel: "memory".to_owned(), reason: e.to_string() })?;
    Ok(start.address.get_or_init(|| resource.resource().at) + start.offset)
}

impl Gemm for Cuda {
    const NARROW: bool = true;

    fn gemm(client: &ComputeClient<Self>, call: &Call, at: &Starts<'_>, branch: usize) -> Result<bool, Error> {
        let address = |start: &Start<'_>| address(client, start);
        let at =
            Addresses { a: address(&at.a)?, b: address(&at.b)?, added: address(&at.added)?, out: address(&at.out)? };
        let by = StreamId::current();
        Self::on_device(client, move |shared| {
            shared.check_capture("gemm", by)?;
            let gpu = shared.gpu.as_ref().map_err(Error::clone)?;
            let mut slot = shared.products();
            if slot.is_none() {
                let sm = (10 * gpu.capability.0 + gpu.capability.1) as u32;
                let library = Library::open(sm, |need| shared.out_of_memory(need))?;
                for workspace in library.workspaces() {
                    shared.hold(workspace, cublaslt::WORKSPACE as u64);
                }
                *slot = Some(library);
            }
            let library = slot.as_mut().expect("it was opened when it was not");
            let launched = library.launch(call, &at, shared.stream()?, branch)?;
            shared.launches.fetch_add(u64::from(launched), Ordering::Relaxed);
            Ok(launched)
        })
    }

    fn choices(client: &ComputeClient<Self>) -> Vec<Choice> {
        client.info().products().as_ref().map(Library::choices).unwrap_or_default()
    }

    fn ask(client: &ComputeClient<Self>, suggestion: Option<usize>) {
        if let Some(library) = client.info().products().as_mut() {
            library.ask(suggestion);
        }
    }
}

/// The kernels of its own products stand in for the library's, which nobody compiles.
impl Gemm for Offline {
    /// So that the kernel that makes such factors is compiled.
    const NARROW: bool = true;

    fn gemm(_: &ComputeClient<Self>, _: &Call, _: &Starts<'_>, _: usize) -> Result<bool, Error> {
        Ok(false)
    }

    fn choices(_: &ComputeClient<Self>) -> Vec<Choice> {
        Vec::new()
    }

    fn ask(_: &ComputeClient<Self>, _: Option<usize>) {}
}

impl Gemm for WgpuRuntime {
    const NARROW: bool = false;

    fn gemm(_: &ComputeClient<Self>, _: &Call, _: &Starts<'_>, _: usize) -> Result<bool, Error> {
        Ok(false)
    }

    fn choices(_: &ComputeClient<Self>) -> Vec<Choice> {
        Vec::new()
    }

    fn ask(_: &ComputeClient<Self>, _: Option<usize>) {}
}
