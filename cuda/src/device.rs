//! [`Device`]: tensors and steps on a GPU.
//!
//! A step runs eagerly the first time, which lays out its intermediates, and the second time, which checks that the
//! layout is the same. On a runtime with graphs the third run is captured and every later one is a replay of it, in
//! which the closure is not called. Persistent memory that a captured step uses is kept alive by it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use cubecl::client::ComputeClient;
use cubecl::prelude::*;
use dormouse_reference::{DType, Error, Result, StepKey, Tensors, check_kept};
use ndarray::{ArrayD, ArrayViewD};

use crate::arena::{self, Arena, Place};
use crate::arm::{Arm, Arms};
use crate::launch::{GRAPH, Grid, Ledger};
use crate::memo::Memo;
use crate::runtime::{self, Engine, gemm};
use crate::tensor::{Buffer, FloatsLaunch, Life, MAX_ELEMENTS, Tensor, WORD, WordsLaunch};
use crate::words;

mod branches;
mod count;
mod exchange;

use branches::Branches;

/// Bits that are NaN as a float and out of range as an id: what poisoned scratch holds.
const POISON: u32 = u32::MAX;

/// What is known of a step.
struct Recorded<G> {
    /// Eager runs so far.
    runs: u32,
    layout: Vec<Place>,
    captured: Option<Captured<G>>,
}

/// A step as one graph.
struct Captured<G> {
    graph: G,
    /// What one replay launches.
    ledger: Ledger,
    /// Memory that the graph's kernels use.
    _buffers: Vec<Arc<Buffer>>,
}

impl<G> Default for Recorded<G> {
    fn default() -> Self {
        Self { runs: 0, layout: Vec::new(), captured: None }
    }
}

/// A backend on the runtime `R`. Used from one thread; devices of one runtime share its stream and compiled kernels.
pub struct Device<R: Engine> {
    client: ComputeClient<R>,
    alignment: u64,
    /// Counts step starts and ends; scratch carries the count at its birth.
    generation: Cell<u64>,
    running: Cell<Option<&'static str>>,
    arena: RefCell<Arena>,
    chunks: RefCell<Vec<Arc<Buffer>>>,
    steps: RefCell<HashMap<StepKey, Recorded<R::Graph>>>,
    /// Buffers used by launches while a step is captured.
    capturing: RefCell<Option<Vec<Arc<Buffer>>>>,
    /// What has run under each purpose; the empty word stands for everything outside steps.
    ledgers: RefCell<BTreeMap<&'static str, Ledger>>,
    arms: RefCell<Arms>,
    graphs: Cell<bool>,
    poison: Cell<bool>,
    /// Whether the second of two pieces that may run at the same time comes first where they do not.
    reversed: Cell<bool>,
    captures: Cell<u64>,
    /// The part of its work that the caller is at.
    stage: Cell<&'static str>,
    branches: Branches,
    /// What the step has computed and may need again.
    memo: Memo,
    /// Bytes of scratch that no launch has been noted for yet.
    placed: Cell<u64>,
    timers: Cell<bool>,
    /// A device belongs to the thread that made it.
    _thread: std::marker::PhantomData<Rc<()>>,
}

impl<R: Engine> Device<R> {
    /// Opens the runtime's device.
    ///
    /// # Errors
    /// `Device` with what is missing and how to get it.
    pub fn open() -> Result<Self> {
        Ok(Self::on(R::open()?))
    }

    /// A fresh backend on an open client.
    pub fn on(client: ComputeClient<R>) -> Self {
        Self {
            alignment: R::binding_alignment(&client),
            client,
            generation: Cell::new(0),
            running: Cell::new(None),
            arena: RefCell::default(),
            chunks: RefCell::default(),
            steps: RefCell::default(),
            capturing: RefCell::default(),
            ledgers: RefCell::default(),
            arms: RefCell::default(),
            graphs: Cell::new(R::GRAPHS),
            poison: Cell::new(false),
            reversed: Cell::new(false),
            captures: Cell::new(0),
            stage: Cell::new(""),
            branches: Branches::default(),
            memo: Memo::default(),
            placed: Cell::new(0),
            timers: Cell::new(false),
            _thread: std::marker::PhantomData,
        }
    }

    /// Whether steps are captured from their third run on; on by default where the runtime can.
    pub fn set_graphs(&self, on: bool) {
        self.graphs.set(on && R::GRAPHS);
    }

    /// Whether scratch starts as NaN instead of unspecified: an operation that reads what it did not write then shows.
    pub fn set_poison(&self, on: bool) {
        self.poison.set(on);
    }

    /// Whether the second of two pieces that may run at the same time comes first where they do not: what one needs of the
    /// other then shows.
    pub fn set_reversed(&self, on: bool) {
        self.reversed.set(on);
    }

    /// What the step has computed and may need again.
    pub(crate) fn memo(&self) -> &Memo {
        &self.memo
    }

    /// The runtime's client, for measurements that no ledger should see.
    pub(crate) fn client(&self) -> &ComputeClient<R> {
        &self.client
    }

    /// Takes this arm for every operation.
    pub fn set_arms(&self, arm: Arm) {
        self.arms.borrow_mut().set_all(arm);
    }

    /// Takes this arm for one operation.
    ///
    /// # Errors
    /// `Config` for a stem that has no kernels.
    pub fn set_arm(&self, stem: &str, arm: Arm) -> Result<()> {
        self.arms.borrow_mut().set(stem, arm)
    }

    /// Compiles the operation's kernels with a fault from now on.
    ///
    /// # Errors
    /// `Config` for a stem without kernels or a name that is none of its mutants.
    pub fn plant(&self, stem: &str, mutant: &str) -> Result<()> {
        self.arms.borrow_mut().plant(stem, mutant)
    }

    /// The fault to compile an operation's kernels with; 0 is none.
    pub(crate) fn mutant(&self, stem: &str) -> u32 {
        self.arms.borrow().mutant(stem)
    }

    /// The same for faults that are planted on the host: those of the fused arm do not reach the plain one.
    pub(crate) fn mutant_of(&self, stem: &str, arm: Arm) -> u32 {
        if arm == Arm::Fused { self.mutant(stem) } else { 0 }
    }

    /// How many steps have been captured.
    pub fn captures(&self) -> u64 {
        self.captures.get()
    }

    /// Bytes of all chunks that the intermediates of steps lie in.
    pub fn arena_bytes(&self) -> u64 {
        self.arena.borrow().bytes()
    }

    /// What the runtime has done, for all its devices together.
    pub fn activity(&self) -> runtime::Activity {
        R::activity(&self.client)
    }

    /// The hardware and its versions, for people.
    pub fn describe(&self) -> String {
        R::describe(&self.client)
    }

    /// Waits until the device has done everything that was asked of it.
    pub fn sync(&self) -> Result<()> {
        self.note_sync("sync");
        R::settle(&self.client)?;
        let waited = cubecl::future::block_on(self.client.sync());
        R::settle(&self.client)?;
        waited.map_err(|e| runtime::wgpu_error("sync", &e).into())
    }

    /// The one place where an operation launches a kernel. `bytes` is what it has to read and write, `uses` every
    /// tensor it touches. An empty grid launches nothing.
    pub(crate) fn launch(
        &self,
        kernel: &'static str,
        grid: Grid,
        bytes: u64,
        uses: &[&Tensor],
        issue: impl FnOnce(&ComputeClient<R>, CubeCount, CubeDim),
    ) -> Result<()> {
        if grid.is_empty() {
            return Ok(());
        }
        if !grid.fits() {
            let reason = format!("{:?} cubes, at most 65535 along an axis", grid.cubes);
            return Err(runtime::Error::Launch { kernel: kernel.to_owned(), reason }.into());
        }
        self.keep(uses);
        self.timed(kernel, || {
            issue(&self.client, grid.count(), grid.cube_dim());
            Ok(())
        })?;
        self.note(kernel, bytes);
        Ok(())
    }

    /// The same for a matrix product in the runtime's library; false if nothing was launched, because the runtime has no
    /// library or the library no algorithm.
    pub(crate) fn gemm(
        &self,
        kernel: &'static str,
        bytes: u64,
        uses: &[&Tensor],
        call: &gemm::Call,
        at: &gemm::Starts<'_>,
    ) -> Result<bool> {
        let mut launched = false;
        self.timed(kernel, || {
            launched = R::gemm(&self.client, call, at, self.branches.here())?;
            Ok(())
        })?;
        if launched {
            self.keep(uses);
            self.note(kernel, bytes);
        }
        Ok(launched)
    }

    /// Keeps memory alive that a captured launch uses.
    fn keep(&self, uses: &[&Tensor]) {
        if let Some(buffers) = self.capturing.borrow_mut().as_mut() {
            for tensor in uses {
                if !buffers.iter().any(|b| Arc::ptr_eq(b, &tensor.buffer)) {
                    buffers.push(tensor.buffer.clone());
                }
            }
        }
    }

    /// The algorithm of every matrix product that the runtime's library has planned, for manifests: with the same
    /// algorithms, products are the same bit for bit. Empty where there is no library.
    pub fn gemm_choices(&self) -> Vec<gemm::Choice> {
        R::choices(&self.client)
    }

    /// Takes the library's suggestion of this number for every product from here on, `None` the usual choice, and
    /// forgets all choices: for measuring algorithms. Steps that are captured keep theirs.
    pub fn ask_gemm(&self, suggestion: Option<usize>) {
        R::ask(&self.client, suggestion);
    }

    /// Bytes of shared memory that a cube may have.
    pub(crate) fn shared_memory(&self) -> usize {
        self.client.properties().hardware.max_shared_memory_size
    }

    /// Whether kernels may use an NVIDIA GPU's matrix units.
    pub(crate) fn matrix_units(&self) -> bool {
        !self.client.properties().features.matmul.mma.is_empty()
    }

    /// A tensor of floats as a kernel's argument; [`check_floats`](Self::check_floats) came first.
    pub(crate) fn floats(&self, tensor: &Tensor) -> FloatsLaunch<R> {
        tensor.floats(self.alignment)
    }

    /// A tensor of any type as a kernel's argument.
    pub(crate) fn words(&self, tensor: &Tensor) -> WordsLaunch<R> {
        tensor.words(self.alignment)
    }

    /// Scratch for floats.
    pub(crate) fn float_scratch(&self, shape: &[usize]) -> Result<Tensor> {
        self.scratch(shape, DType::F32)
    }

    /// Refuses what cannot be copied into persistent memory; drops what was computed from what will be written.
    fn check_kept(&self, from: &Tensor, into: &Tensor) -> Result<()> {
        self.check_life("keep", "from", from)?;
        check_kept(self, from, into)?;
        self.outdated(into);
        Ok(())
    }

    /// Refuses tensors that are no floats or belong to an ended step.
    pub(crate) fn check_floats(&self, op: &'static str, tensors: &[(&'static str, &Tensor)]) -> Result<()> {
        for &(arg, tensor) in tensors {
            self.check_life(op, arg, tensor)?;
            if tensor.dtype != DType::F32 {
                return Err(Error::Storage { op, arg, expected: "f32".to_owned(), got: tensor.dtype });
            }
        }
        Ok(())
    }

    /// Refuses a gradient's destination that is no persistent tensor of floats, or shares memory with what the call
    /// reads or writes besides.
    pub(crate) fn check_into(
        &self,
        op: &'static str,
        arg: &'static str,
        into: &Tensor,
        others: &[(&'static str, &Tensor)],
    ) -> Result<()> {
        if into.life != Life::Persistent {
            return Err(Error::NotPersistent { op, arg });
        }
        self.check_floats(op, &[(arg, into)])?;
        self.outdated(into);
        match others.iter().find(|(_, other)| into.overlaps(other)) {
            Some(&(other, _)) => Err(Error::Aliased { op, arg, other }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_life(&self, op: &'static str, arg: &'static str, tensor: &Tensor) -> Result<()> {
        match tensor.life {
            Life::Scratch { generation } if generation != self.generation.get() => Err(Error::StaleScratch { op, arg }),
            _ => Ok(()),
        }
    }

    fn check_outside(&self, op: &'static str) -> Result<()> {
        match self.running.get() {
            Some(step) => Err(Error::HostExchangeInStep { op, step }),
            None => Ok(()),
        }
    }

    /// New device memory; a refusal comes from here and not from the kernel that would have used it.
    fn allocate(&self, bytes: u64) -> Result<Arc<Buffer>> {
        let handle = self.client.empty(bytes as usize);
        R::settle(&self.client)?;
        Ok(Arc::new(Buffer::new(handle)))
    }

    fn advance(&self) {
        self.generation.set(self.generation.get() + 1);
        self.arena.borrow_mut().restart();
        // It lies in the arena.
        self.memo.clear();
    }

    fn run(
        &self,
        key: &StepKey,
        recorded: &mut Recorded<R::Graph>,
        body: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<()> {
        if let Some(captured) = &recorded.captured {
            self.timed(GRAPH, || Ok(R::replay(&self.client, &captured.graph)?))?;
            self.book(|ledger| ledger.replay(&captured.ledger, self.stage.get()));
            return Ok(());
        }
        if recorded.runs >= 2 && self.graphs.get() {
            let captured = self.capture(body)?;
            arena::check_same(key.purpose, &recorded.layout, self.arena.borrow().layout())?;
            self.timed(GRAPH, || Ok(R::replay(&self.client, &captured.graph)?))?;
            self.book(|ledger| ledger.replay(&captured.ledger, self.stage.get()));
            self.captures.set(self.captures.get() + 1);
            recorded.captured = Some(captured);
            return Ok(());
        }
        body(self)?;
        R::settle(&self.client)?;
        let arena = self.arena.borrow();
        if recorded.runs == 0 {
            recorded.layout = arena.layout().to_vec();
        } else {
            arena::check_same(key.purpose, &recorded.layout, arena.layout())?;
        }
        recorded.runs += 1;
        Ok(())
    }

    fn capture(&self, body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<Captured<R::Graph>> {
        R::begin_capture(&self.client)?;
        self.branches.restart();
        let purpose = self.running.get().unwrap_or_default();
        let before = self.ledgers.borrow_mut().remove(purpose);
        *self.capturing.borrow_mut() = Some(Vec::new());
        let ran = body(self);
        // Whatever happened, the stream must leave its capturing state.
        let graph = R::end_capture(&self.client);
        let buffers = self.capturing.borrow_mut().take().unwrap_or_default();
        let ledger = {
            let mut ledgers = self.ledgers.borrow_mut();
            let captured = ledgers.remove(purpose).unwrap_or_default();
            ledgers.extend(before.map(|ledger| (purpose, ledger)));
            captured
        };
        ran?;
        let (graph, mut ledger) = (graph?, ledger);
        ledger.expect_nodes(R::nodes(&graph) as u64)?;
        Ok(Captured { graph, ledger, _buffers: buffers })
    }

    fn check_storage(&self, op: &'static str, shape: &[usize], dtype: DType) -> Result<u64> {
        if !matches!(dtype, DType::F32 | DType::U32 | DType::U8) {
            let expected = format!("f32, u32 or u8 on {}", self.name());
            return Err(Error::Storage { op, arg: "dtype", expected, got: dtype });
        }
        let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n as u64)).unwrap_or(u64::MAX);
        if elements > MAX_ELEMENTS {
            return Err(runtime::Error::TooManyElements { op, elements, max: MAX_ELEMENTS }.into());
        }
        Ok(elements * WORD)
    }
}

impl<R: Engine> Tensors for Device<R> {
    type Tensor = Tensor;

    fn name(&self) -> String {
        format!("{} f32", R::WORD)
    }

    fn float(&self) -> DType {
        DType::F32
    }

    fn persistent(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        const OP: &str = "persistent";
        self.check_outside(OP)?;
        let bytes = self.check_storage(OP, shape, dtype)?;
        let buffer = self.allocate(bytes.max(WORD))?;
        let tensor = Tensor { buffer, start: 0, shape: shape.into(), dtype, life: Life::Persistent };
        words::fill(self, &tensor, 0)?;
        Ok(tensor)
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let bytes = self.check_storage("scratch", shape, dtype)?;
        let place = self.arena.borrow_mut().place(bytes, |size| {
            let chunk = self.allocate(size)?;
            self.chunks.borrow_mut().push(chunk);
            Ok::<(), Error>(())
        })?;
        self.placed.set(self.placed.get() + bytes);
        let tensor = Tensor {
            buffer: self.chunks.borrow()[place.chunk].clone(),
            start: place.offset / WORD,
            shape: shape.into(),
            dtype,
            life: Life::Scratch { generation: self.generation.get() },
        };
        if self.poison.get() {
            words::fill(self, &tensor, POISON)?;
        }
        Ok(tensor)
    }

    fn view(&self, tensor: &Tensor, start: usize, shape: &[usize]) -> Result<Tensor> {
        let end =
            shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n)).and_then(|n| n.checked_add(start));
        match end {
            Some(end) if end <= tensor.len() => {
                Ok(Tensor { start: tensor.start + start as u64, shape: shape.into(), ..tensor.clone() })
            }
            end => Err(Error::View { start, end: end.unwrap_or(usize::MAX), len: tensor.len() }),
        }
    }

    fn shape<'a>(&self, tensor: &'a Tensor) -> &'a [usize] {
        &tensor.shape
    }

    fn dtype(&self, tensor: &Tensor) -> DType {
        tensor.dtype
    }

    fn is_persistent(&self, tensor: &Tensor) -> bool {
        tensor.life == Life::Persistent
    }

    fn upload(&self, values: ArrayViewD<'_, f64>, into: &Tensor) -> Result<()> {
        self.send(values, into)
    }

    fn upload_f32(&self, values: ArrayViewD<'_, f32>, into: &Tensor) -> Result<()> {
        self.send_f32(values, into)
    }

    fn download(&self, tensor: &Tensor) -> Result<ArrayD<f64>> {
        self.fetch(tensor)
    }

    fn fill(&self, tensor: &Tensor, value: f64) -> Result<()> {
        self.check_life("fill", "tensor", tensor)?;
        self.outdated(tensor);
        let bits = match tensor.dtype {
            DType::U32 => value as u32,
            DType::U8 => u32::from(value as u8),
            _ => (value as f32).to_bits(),
        };
        words::fill(self, tensor, bits)
    }

    fn keep_all(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
        for some in pairs.chunks(words::AT_ONCE) {
            let values = some.len() > 1 && some.iter().all(|(from, into)| from.len() == 1 && !from.overlaps(into));
            if values {
                some.iter().try_for_each(|(from, into)| self.check_kept(from, into))?;
                words::copy_values(self, some)?;
            } else {
                some.iter().try_for_each(|(from, into)| Tensors::keep(self, from, into))?;
            }
        }
        Ok(())
    }

    fn keep(&self, from: &Tensor, into: &Tensor) -> Result<()> {
        self.check_kept(from, into)?;
        if !from.overlaps(into) {
            return words::copy(self, from, into);
        }
        // Two views of one buffer: units would read what others have written already.
        let aside = self.scratch(from.shape(), from.dtype)?;
        words::copy(self, from, &aside)?;
        words::copy(self, &aside, into)
    }

    fn stage(&self, stage: &'static str) {
        self.stage.set(stage);
    }

    fn beside(
        &self,
        first: &mut dyn FnMut(&Self) -> Result<()>,
        second: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<()> {
        self.on_branches(first, second)
    }

    fn step(&self, key: &StepKey, body: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        if let Some(outer) = self.running.get() {
            return Err(Error::NestedStep { outer, inner: key.purpose });
        }
        self.advance();
        self.placed.set(0);
        self.running.set(Some(key.purpose));
        let mut recorded = self.steps.borrow_mut().remove(key).unwrap_or_default();
        let result = self.run(key, &mut recorded, body);
        self.steps.borrow_mut().insert(key.clone(), recorded);
        self.running.set(None);
        self.advance();
        result
    }
}
