//! What this machine's GPU does with the runtime: versions, agreement with the reference, graph against eager, prices.
//!
//! ```text
//! LD_LIBRARY_PATH=/usr/local/cuda/lib64 CUDA_PATH=/usr/local/cuda cargo run -p dormouse-cuda --example probe
//! ```
//!
//! `probe lavapipe` runs the same on Mesa's software Vulkan driver, where there are no graphs. Prints one line a
//! question; the exit code is 1 if an answer is wrong, 2 if there is no device.

use std::process::ExitCode;
use std::time::Instant;

use dormouse_cuda::{Cuda, Device, Engine, Lavapipe, Tensor};
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::residual::{self, Residual};
use dormouse_reference::rms_norm::{self, RmsNorm};
use dormouse_reference::{DType, Precision, Reference, Result, StepKey, Tensors};
use ndarray::{Array, ArrayD, Dimension, IxDyn};

fn main() -> ExitCode {
    let lavapipe = std::env::args().nth(1).is_some_and(|word| word == Lavapipe::WORD);
    if lavapipe { probe::<Lavapipe>(&[3, 50, 32]) } else { probe::<Cuda>(&[8, 512, 256]) }
}

/// Prints answers and remembers whether one was wrong.
struct Table {
    wrong: usize,
}

impl Table {
    fn line(&self, question: &str, answer: impl std::fmt::Display) {
        println!("{question:<44} {answer}");
    }

    fn check(&mut self, question: &str, right: bool, answer: impl std::fmt::Display) {
        self.wrong += usize::from(!right);
        println!("{question:<44} {} {answer}", if right { "PASS" } else { "FAIL" });
    }
}

fn probe<R: Engine>(shape: &[usize; 3]) -> ExitCode {
    let mut table = Table { wrong: 0 };
    let start = Instant::now();
    let b = match Device::<R>::open() {
        Ok(b) => b,
        Err(why) => {
            println!("{}: {why}", R::WORD);
            return ExitCode::from(2);
        }
    };
    table.line("device", b.describe());
    table.line("opened in", format!("{:.2} s", start.elapsed().as_secs_f64()));
    let asked = [agreement(&b, shape, &mut table), graph(&b, shape, &mut table), prices(&b, &mut table)];
    for result in asked {
        if let Err(error) = result {
            table.check("a question that could not be asked", false, error);
        }
    }
    table.line("kernels compiled (others from the cache)", b.activity().compiled);
    table.line("launches by kernel", "");
    for (kernel, launches) in &b.ledger().kernels {
        table.line(&format!("  {kernel}"), format!("{} launches, {} B", launches.count, launches.bytes));
    }
    println!("{}", if table.wrong == 0 { "all right" } else { "NOT all right" });
    if table.wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A block of a model with fixed values: norm, product, residual.
struct Block<B: Tensors> {
    x: B::Tensor,
    gain: B::Tensor,
    shift: B::Tensor,
    weight: B::Tensor,
    bias: B::Tensor,
    rho: B::Tensor,
    /// dx, h, and the gradients of gain, shift, weight, bias and rho.
    results: Vec<(&'static str, B::Tensor)>,
}

fn values(shape: &[usize], seed: f64, scale: f64) -> ArrayD<f64> {
    // Rounded to f32, so that both backends compute with the same numbers.
    Array::from_shape_fn(IxDyn(shape), |i| {
        let mut at = 0.0;
        for (axis, &k) in i.as_array_view().iter().enumerate() {
            at += k as f64 * [1.0, 7.3, 91.7][axis.min(2)];
        }
        f64::from((scale * (at * 0.7311 + seed).sin()) as f32)
    })
}

impl<B: RmsNorm + Linear + Residual> Block<B> {
    fn new(b: &B, shape: &[usize; 3]) -> Result<Self> {
        let width = shape[2];
        let constant = |values: ArrayD<f64>| -> Result<B::Tensor> {
            let tensor = b.persistent(values.shape(), b.float())?;
            b.upload(values.view(), &tensor)?;
            Ok(tensor)
        };
        let result = |name: &'static str, shape: &[usize]| -> Result<(&'static str, B::Tensor)> {
            Ok((name, b.persistent(shape, b.float())?))
        };
        Ok(Self {
            x: constant(values(shape, 0.0, 1.0))?,
            gain: constant(values(&[width], 1.0, 0.3) + 1.0)?,
            shift: constant(values(&[width], 2.0, 0.5))?,
            weight: constant(values(&[width, width], 3.0, (1.0 / width as f64).sqrt()))?,
            bias: constant(values(&[width], 4.0, 0.1))?,
            rho: constant(ArrayD::from_elem(IxDyn(&[1]), 0.75))?,
            results: vec![
                result("h", shape)?,
                result("dx", shape)?,
                result("dgain", &[width])?,
                result("dshift", &[width])?,
                result("dweight", &[width, width])?,
                result("dbias", &[width])?,
                result("drho", &[1])?,
            ],
        })
    }

    fn result(&self, name: &str) -> &B::Tensor {
        &self.results.iter().find(|(n, _)| *n == name).expect("a result of the block").1
    }

    /// Forward and backward; the gradient of h is x itself.
    fn run(&self, b: &B) -> Result<()> {
        let norm = rms_norm::Config { eps: 1e-5 };
        let full = linear::Config { precision: Precision::Full };
        let stream = residual::Config {};
        for name in ["dgain", "dshift", "dweight", "dbias", "drho"] {
            b.fill(self.result(name), 0.0)?;
        }
        let params = rms_norm::Params { gain: &self.gain, shift: Some(&self.shift) };
        let (normed, norm_saved) = RmsNorm::forward(b, &norm, rms_norm::Inputs { x: &self.x }, params)?;
        let params = linear::Params { weight: &self.weight, bias: Some(&self.bias) };
        let (y, linear_saved) = Linear::forward(b, &full, linear::Inputs { x: &normed.y }, params)?;
        let c = normed.c.expect("there is a shift");
        let inputs = residual::Inputs { c: &c, y: &y.y };
        let (out, residual_saved) = Residual::forward(b, &stream, inputs, residual::Params { rho: &self.rho })?;

        let into = residual::Params { rho: self.result("drho") };
        let back = Residual::backward(b, &stream, &residual_saved, residual::Outputs { h: &self.x }, into)?;
        let into = linear::Params { weight: self.result("dweight"), bias: Some(self.result("dbias")) };
        let back_y = Linear::backward(b, &full, &linear_saved, linear::Outputs { y: &back.dy }, None, into)?;
        let upstream = rms_norm::Outputs { y: &back_y.dx, c: Some(&back.dc) };
        let into = rms_norm::Params { gain: self.result("dgain"), shift: Some(self.result("dshift")) };
        let back = RmsNorm::backward(b, &norm, &norm_saved, upstream, into)?;
        b.keep(&out.h, self.result("h"))?;
        b.keep(&back.dx, self.result("dx"))
    }

    fn download(&self, b: &B) -> Result<Vec<(&'static str, ArrayD<f64>)>> {
        self.results.iter().map(|(name, tensor)| Ok((*name, b.download(tensor)?))).collect()
    }
}

/// The block on the device against the f64 reference, by relative rms.
fn agreement<R: Engine>(b: &Device<R>, shape: &[usize; 3], table: &mut Table) -> Result<()> {
    let reference = Reference::<f64>::new();
    let exact = Block::new(&reference, shape)?;
    exact.run(&reference)?;
    let start = Instant::now();
    let block = Block::new(b, shape)?;
    b.set_poison(true);
    block.run(b)?;
    b.set_poison(false);
    let got = block.download(b)?;
    table.line("first run, kernels compiled in it", format!("{:.2} s", start.elapsed().as_secs_f64()));
    for ((name, got), (_, want)) in got.iter().zip(exact.download(&reference)?) {
        let square = |values: &ArrayD<f64>| values.iter().map(|x| x * x).sum::<f64>();
        let error = (square(&(got - &want)) / square(&want)).sqrt();
        // f32 rounding times the square root of the longest sum, which is over all rows, and a margin of ten.
        let bound = 6e-8 * ((shape[0] * shape[1]) as f64).sqrt() * 10.0;
        table.check(
            &format!("{name} against the f64 reference"),
            error <= bound,
            format!("{error:.2e} of {bound:.0e}"),
        );
    }
    Ok(())
}

/// A step eager and as a graph: bits, memory, time.
fn graph<R: Engine>(b: &Device<R>, shape: &[usize; 3], table: &mut Table) -> Result<()> {
    let block = Block::new(b, shape)?;
    let key = |variant| StepKey { purpose: "probe", variant };
    let step = |variant| b.step(&key(variant), &mut |b| block.run(b));
    b.set_graphs(false);
    step(0)?;
    let eager = block.download(b)?;
    step(0)?;
    table.check("eager twice, the same bits", same(&block.download(b)?, &eager), "");
    let before = b.activity();
    let arena = b.arena_bytes();
    let eager_time = time(b, 20, || step(0))?;
    table.line("step, eager", format!("{eager_time:.1} us"));
    b.set_graphs(true);
    for _ in 0..3 {
        step(1)?;
    }
    if R::GRAPHS {
        table.check("captured once", b.captures() == 1, b.captures());
    }
    for (name, tensor) in &block.results {
        // A replay that did nothing would leave this behind.
        b.fill(tensor, if *name == "h" { f64::NAN } else { 7.0 })?;
    }
    step(1)?;
    let what = if R::GRAPHS { "graph = eager, bit for bit" } else { "a fourth step, the same bits (no graphs)" };
    table.check(what, same(&block.download(b)?, &eager), "");
    let graph_time = time(b, 200, || step(1))?;
    table.line("step, replayed", format!("{graph_time:.1} us"));
    // A replay must read what was uploaded since, not what was there at capture.
    let other = values(shape, 5.0, 0.5);
    b.upload(other.view(), &block.x)?;
    step(1)?;
    let replayed = block.download(b)?;
    b.set_graphs(false);
    b.step(&key(2), &mut |b| block.run(b))?;
    table.check("new values are seen by a replay", same(&block.download(b)?, &replayed), "");
    table.check("and change the result", !same(&replayed, &eager), "");
    let after = b.activity();
    if R::GRAPHS {
        let allocations = after.allocations - before.allocations;
        table.check("allocations after the second step", allocations == 0, allocations);
    }
    table.check("the arena did not grow", b.arena_bytes() == arena, format!("{arena} B"));
    b.set_graphs(true);
    Ok(())
}

fn same(a: &[(&'static str, ArrayD<f64>)], b: &[(&'static str, ArrayD<f64>)]) -> bool {
    a.iter().zip(b).all(|((_, a), (_, b))| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()))
}

/// Microseconds a call, the device's work included.
fn time<R: Engine>(b: &Device<R>, calls: u32, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    b.sync()?;
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    b.sync()?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
}

/// What a launch costs: a kernel that writes one word, 200 of them in a step.
fn prices<R: Engine>(b: &Device<R>, table: &mut Table) -> Result<()> {
    const LAUNCHES: u32 = 200;
    let word: Tensor = b.persistent(&[1], DType::F32)?;
    let mut body = |b: &Device<R>| (0..LAUNCHES).try_for_each(|_| b.fill(&word, 1.0));
    let eager = time(b, 20, || body(b))? / f64::from(LAUNCHES);
    table.line("a launch, eager", format!("{eager:.2} us"));
    if R::GRAPHS {
        let key = StepKey { purpose: "price", variant: 0 };
        for _ in 0..3 {
            b.step(&key, &mut body)?;
        }
        let node = time(b, 100, || b.step(&key, &mut body))? / f64::from(LAUNCHES);
        table.line("a launch in a graph", format!("{node:.2} us"));
        let empty = StepKey { purpose: "nothing", variant: 0 };
        for _ in 0..3 {
            b.step(&empty, &mut |b| b.fill(&word, 2.0))?;
        }
        let replay = time(b, 200, || b.step(&empty, &mut |_| Ok(())))?;
        table.line("a replay of one launch", format!("{replay:.2} us"));
        table.check("it wrote its word", b.download(&word)?.iter().all(|x| *x == 2.0), "");
    }
    Ok(())
}
