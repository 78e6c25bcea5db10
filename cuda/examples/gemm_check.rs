//! Matrix products on this machine's GPU: right or not, the same in a graph or not, how fast, by which algorithm.
//!
//! ```text
//! LD_LIBRARY_PATH=/usr/local/cuda/lib64 CUDA_PATH=/usr/local/cuda cargo run --release -p dormouse-cuda --example gemm_check
//! ```
//!
//! With `lavapipe` the same checks run on Mesa's software Vulkan driver, where the fused arm is the tiled kernel; there
//! are no graphs and no times. With `measure`, every suggestion of the library is timed for the production shapes, and
//! the fastest are printed as lines of `cuda/src/gemm_table.tsv`. With `measure FILE` that is done for the products that
//! the lines of a file name, and nothing else: the list of `products` in a run's `run.json` is made of such lines. The exit
//! code is 1 if an answer is wrong, 2 if there is no device or no such file.

use std::fmt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dormouse_cuda::matmul::{Factor, Matrix, Plus, Product};
use dormouse_cuda::runtime::gemm::{Choice, Source};
use dormouse_cuda::{Arm, Cuda, Device, Engine, Lavapipe, Tensor};
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::{DType, Precision, Result, StepKey, Tensors};
use ndarray::{ArrayD, IxDyn};

const PRECISIONS: [Precision; 3] = [Precision::Full, Precision::Tf32, Precision::Bf16];

/// Elements of a large result that are compared.
const SAMPLES: usize = 4096;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    match &words[..] {
        [measure, file] if measure == "measure" => measure_listed(file),
        _ if has(Lavapipe::WORD) => run::<Lavapipe>(false),
        _ => run::<Cuda>(has("measure")),
    }
}

/// Measures the products that lines of a file name; prints the fastest algorithm of each.
fn measure_listed(file: &str) -> ExitCode {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => {
            println!("{file}: {error}");
            return ExitCode::from(2);
        }
    };
    let b = match Device::<Cuda>::open() {
        Ok(b) => b,
        Err(why) => {
            println!("{}: {why}", Cuda::WORD);
            return ExitCode::from(2);
        }
    };
    let listed: Vec<_> = text.lines().filter_map(listed).collect();
    println!("{}: {} products", b.describe(), listed.len());
    for &(case, precision) in &listed {
        let found = (|| {
            let operands = case.operands(&b)?;
            b.fill(&operands.out, 0.0)?;
            let Some(usual) = usual(&b, &case, &operands, precision)? else { return Ok(None) };
            let best = fastest(&b, &case, &operands, precision, &usual)?;
            Ok::<_, dormouse_reference::Error>(Some((usual.0, best)))
        })();
        match found {
            Ok(Some((usual, (best, line)))) => println!("# {usual:.1} us usually, {best:.1} us\n{line}"),
            Ok(None) => println!("# {case} {precision:?}: the library has no algorithm"),
            Err(error) => {
                println!("FAIL {case} {precision:?}: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// The product that a line of the table, or of a run's products, is about.
fn listed(line: &str) -> Option<(Case, Precision)> {
    // A run's list has blanks for tabs, and one kind of precision has a blank of its own.
    let line = line.replace("bf16 stored", "stored");
    let columns: Vec<&str> = line.split_whitespace().collect();
    let [_, _, precision, batch, m, k, n, a, b, added, ..] = columns[..] else { return None };
    let (precision, input) = match precision {
        "f32" => (Precision::Full, false),
        "tf32" => (Precision::Tf32, false),
        "bf16" => (Precision::Bf16, false),
        "stored" => (Precision::Bf16, true),
        _ => return None,
    };
    let added = match added {
        "row" => Added::Row,
        "matrix" => Added::Matrix,
        "destination" => Added::Destination,
        "nothing" => Added::Nothing,
        _ => return None,
    };
    let number = |word: &str| word.parse().ok();
    let (batch, m, k, n) = (number(batch)?, number(m)?, number(k)?, number(n)?);
    let transposed = |word| word == "transposed";
    Some((
        Case { batch, m, k, n, a_transposed: transposed(a), b_transposed: transposed(b), added, input, ..PLAIN },
        precision,
    ))
}

fn run<R: Engine>(measure: bool) -> ExitCode {
    let b = match Device::<R>::open() {
        Ok(b) => b,
        Err(why) => {
            println!("{}: {why}", R::WORD);
            return ExitCode::from(2);
        }
    };
    println!("{}", b.describe());
    let mut wrong = 0;
    let mut cases = cases();
    if R::GRAPHS {
        cases.extend(large());
    }
    let checked = (|| {
        for case in &cases {
            for precision in PRECISIONS {
                wrong += usize::from(!check(&b, case, precision)?);
            }
        }
        for (rows, width) in [(3, 5), (70, 130), (129, 64)] {
            wrong += usize::from(!identity(&b, rows, width)?);
        }
        wrong += usize::from(!graph(&b, &cases)?);
        wrong += usize::from(!written_weights(&b)?);
        smallest_steps(&b)?;
        for choice in b.gemm_choices() {
            // A product that the library refuses is computed all the same, but not as fast as this example promises.
            let word = if choice.source == Source::Kernel { "FAIL" } else { "    " };
            wrong += usize::from(choice.source == Source::Kernel);
            println!("{word} chose {:?} for {choice} ({})", choice.source, choice.details);
        }
        if R::GRAPHS {
            times(&b, measure)?;
        }
        Ok::<_, dormouse_reference::Error>(())
    })();
    if let Err(error) = checked {
        println!("FAIL {error}");
        wrong += 1;
    }
    println!("{}", if wrong == 0 { "all right".to_owned() } else { format!("{wrong} NOT right") });
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether a product reads the weights that are there now, where an earlier one of the step has read others in the same
/// buffer: on CUDA in bf16 both read copies.
fn written_weights<R: Engine>(b: &Device<R>) -> Result<bool> {
    const SIDE: usize = 256;
    let put = |value: f64, shape: &[usize]| -> Result<Tensor> {
        let tensor = b.persistent(shape, DType::F32)?;
        b.fill(&tensor, value)?;
        Ok(tensor)
    };
    let (x, both, new) = (put(1.0, &[SIDE, SIDE])?, put(1.0, &[2 * SIDE, SIDE])?, put(3.0, &[SIDE, SIDE])?);
    let [first, second] = [0, 1].map(|n| b.view(&both, n * SIDE * SIDE, &[SIDE, SIDE]));
    let (first, second) = (first?, second?);
    let results = put(0.0, &[4, SIDE, SIDE])?;
    let config = linear::Config { precision: Precision::Bf16 };
    let product = |b: &Device<R>, weight: &Tensor, n: usize| -> Result<()> {
        let y = Linear::forward(b, &config, linear::Inputs { x: &x }, linear::Params { weight, bias: None })?.0.y;
        b.keep(&y, &b.view(&results, n * SIDE * SIDE, &[SIDE, SIDE])?)
    };
    b.set_arms(Arm::Fused);
    for turn in 0..4 {
        b.fill(&both, 1.0)?;
        b.step(&StepKey { purpose: "written weights", variant: 0 }, &mut |b| {
            product(b, &first, 0)?;
            b.keep(&new, &first)?;
            product(b, &first, 1)?;
            // A copy of the whole buffer on one branch, and a write to another part of it beside.
            b.beside(&mut |b| product(b, &first, 2), &mut |b| b.keep(&new, &second))?;
            product(b, &second, 3)
        })?;
        let got = b.download(&results)?;
        for (n, want) in [1.0, 3.0, 3.0, 3.0].into_iter().enumerate() {
            let got = got[[n, SIDE - 1, SIDE - 1]] / SIDE as f64;
            if got != want {
                println!("FAIL weights written in a step, run {turn}: product {n} has {got}, expected {want}");
                return Ok(false);
            }
        }
    }
    println!("ok   weights written in a step are read by the next product");
    Ok(true)
}

/// Captures steps of no launch, of one, and of two that wait for nothing.
fn smallest_steps<R: Engine>(b: &Device<R>) -> Result<()> {
    let [x, y] = [b.persistent(&[8], DType::F32)?, b.persistent(&[8], DType::F32)?];
    for _ in 0..4 {
        b.step(&StepKey { purpose: "nothing", variant: 0 }, &mut |_| Ok(()))?;
        b.step(&StepKey { purpose: "one", variant: 0 }, &mut |b| b.fill(&x, 1.0))?;
        b.step(&StepKey { purpose: "two", variant: 0 }, &mut |b| {
            b.beside(&mut |b| b.fill(&x, 2.0), &mut |b| b.fill(&y, 3.0))
        })?;
    }
    println!("ok   steps of no launch, of one, and of two side by side");
    Ok(())
}

/// What is added to a product.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Added {
    Nothing,
    Row,
    Matrix,
    Destination,
}

/// A product by its sizes.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    m: usize,
    k: usize,
    n: usize,
    a_transposed: bool,
    b_transposed: bool,
    added: Added,
    /// Whether all members of the batch have one a.
    shared_a: bool,
    /// Whether the results of a batch lie side by side in common rows.
    side_by_side: bool,
    /// Elements before each tensor, so that it starts where no alignment helps it.
    margin: usize,
    /// Whether the factors are an operation's inputs, of which copies in bf16 may be made.
    input: bool,
}

const PLAIN: Case = Case {
    batch: 1,
    m: 1,
    k: 1,
    n: 1,
    a_transposed: false,
    b_transposed: false,
    added: Added::Nothing,
    shared_a: false,
    side_by_side: false,
    margin: 0,
    input: false,
};

/// Small and odd products: everything that the operations ask for.
fn cases() -> Vec<Case> {
    let sized = |m, k, n| Case { m, k, n, ..PLAIN };
    let mut cases = vec![
        sized(1, 1, 1),
        sized(1, 7, 1),
        sized(5, 1, 3),
        sized(17, 33, 65),
        sized(64, 64, 64),
        sized(65, 129, 63),
        Case { margin: 3, ..sized(33, 40, 48) },
        Case { added: Added::Row, ..sized(70, 31, 5) },
        Case { added: Added::Row, margin: 1, ..sized(70, 32, 8) },
        Case { added: Added::Matrix, b_transposed: true, ..sized(66, 19, 40) },
        Case { added: Added::Destination, a_transposed: true, ..sized(40, 100, 24) },
        Case { batch: 3, ..sized(20, 24, 28) },
        Case { batch: 3, a_transposed: true, ..sized(64, 96, 32) },
        Case { batch: 4, shared_a: true, side_by_side: true, ..sized(50, 36, 8) },
        Case { batch: 2, b_transposed: true, added: Added::Destination, ..sized(33, 17, 70) },
    ];
    for (a_transposed, b_transposed) in [(false, true), (true, false), (true, true)] {
        cases.push(Case { a_transposed, b_transposed, ..sized(37, 70, 90) });
    }
    cases
}

/// Products of a size that matters, for a GPU.
fn large() -> Vec<Case> {
    let sized = |m, k, n| Case { m, k, n, ..PLAIN };
    vec![
        sized(4096, 768, 3136),
        Case { b_transposed: true, added: Added::Matrix, ..sized(4096, 3136, 768) },
        Case { a_transposed: true, added: Added::Destination, ..sized(768, 4096, 3136) },
        Case { a_transposed: true, added: Added::Destination, ..sized(768, 4096, 192) },
        Case { batch: 4, shared_a: true, side_by_side: true, ..sized(4096, 768, 64) },
        Case { batch: 24, a_transposed: true, ..sized(64, 768, 64) },
        sized(4095, 767, 193),
    ]
}

/// The tensors of a case.
struct Operands {
    a: Tensor,
    b: Tensor,
    plus: Tensor,
    out: Tensor,
    values: [ArrayD<f64>; 3],
}

/// A number between -1 and 1 that f32 has, from its place: splitmix64.
fn number(seed: u64, at: usize) -> f64 {
    let mut x = (seed << 40 ^ at as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    f64::from(((x ^ (x >> 31)) >> 40) as i32 - (1 << 23)) / f64::from(1 << 23)
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { batch, m, k, n, .. } = self;
        let transposed = |yes: bool| if yes { "^T" } else { "" };
        let (a, b) = (transposed(self.a_transposed), transposed(self.b_transposed));
        write!(f, "{batch} x {m}x{k}{a} {k}x{n}{b}")?;
        for (word, yes) in [("one a", self.shared_a), ("side by side", self.side_by_side)] {
            if yes {
                write!(f, ", {word}")?;
            }
        }
        if self.margin > 0 {
            write!(f, ", {} off", self.margin)?;
        }
        match self.added {
            Added::Nothing => Ok(()),
            added => write!(f, " + {added:?}"),
        }
    }
}

impl Case {
    fn a_len(&self) -> usize {
        self.m * self.k * if self.shared_a { 1 } else { self.batch }
    }

    fn row(&self) -> usize {
        if self.side_by_side { self.batch * self.n } else { self.n }
    }

    fn next(&self) -> usize {
        if self.side_by_side { self.n } else { self.m * self.n }
    }

    fn operands<R: Engine>(&self, b: &Device<R>) -> Result<Operands> {
        let out_len = self.batch * self.m * self.n;
        let plus_len = match self.added {
            Added::Row => self.n,
            _ => out_len,
        };
        let fill = |seed: u64, len: usize| ArrayD::from_shape_fn(IxDyn(&[len]), |i| number(seed, i[0]));
        let values = [fill(1, self.a_len()), fill(2, self.batch * self.k * self.n), fill(3, plus_len)];
        let place = |len: usize| -> Result<Tensor> {
            let whole = b.persistent(&[len + 2 * self.margin], DType::F32)?;
            b.fill(&whole, f64::NAN)?;
            b.view(&whole, self.margin, &[len])
        };
        let send = |values: &ArrayD<f64>| -> Result<Tensor> {
            let tensor = place(values.len())?;
            b.upload(values.view(), &tensor)?;
            Ok(tensor)
        };
        let (a, right, plus) = (send(&values[0])?, send(&values[1])?, send(&values[2])?);
        Ok(Operands { a, b: right, plus, out: place(out_len)?, values })
    }

    /// What the destination holds before.
    fn prepare<R: Engine>(&self, b: &Device<R>, operands: &Operands) -> Result<()> {
        match self.added {
            Added::Destination => b.keep(&operands.plus, &operands.out),
            _ => b.fill(&operands.out, f64::NAN),
        }
    }

    fn factor<'a>(&self, matrix: Matrix<'a>, transposed: bool) -> Factor<'a> {
        let factor = if transposed { matrix.transposed() } else { matrix.plain() };
        if self.input { factor.of_input() } else { factor }
    }

    fn launch<R: Engine>(&self, b: &Device<R>, arm: Arm, operands: &Operands, precision: Precision) -> Result<()> {
        let Case { batch, m, k, n, .. } = *self;
        let a_row = if self.a_transposed { m } else { k };
        let b_row = if self.b_transposed { k } else { n };
        let left = Matrix { tensor: &operands.a, row: a_row, next: if self.shared_a { 0 } else { m * k } };
        let right = Matrix { tensor: &operands.b, row: b_row, next: k * n };
        let product = Product {
            name: "gemm_check",
            batch,
            m,
            k,
            n,
            a: self.factor(left, self.a_transposed),
            b: self.factor(right, self.b_transposed),
            plus: match self.added {
                Added::Nothing => Plus::Nothing,
                Added::Row => Plus::Row(&operands.plus),
                Added::Matrix => Plus::Matrix(&operands.plus),
                Added::Destination => Plus::Destination,
            },
            out: Matrix { tensor: &operands.out, row: self.row(), next: self.next() },
            precision,
        };
        b.product(arm, &product)
    }

    /// Where element (e, i, j) of the result lies.
    fn at(&self, e: usize, i: usize, j: usize) -> usize {
        e * self.next() + i * self.row() + j
    }

    /// An element in f64, with the factors rounded first.
    fn exact(&self, [a, b, plus]: &[ArrayD<f64>; 3], (e, i, j): (usize, usize, usize), round: fn(f64) -> f64) -> f64 {
        let Case { m, k, n, .. } = *self;
        let a_start = if self.shared_a { 0 } else { e * m * k };
        let term = |p: usize| {
            let left = if self.a_transposed { p * m + i } else { i * k + p };
            let right = if self.b_transposed { j * k + p } else { p * n + j };
            round(a[[a_start + left]]) * round(b[[e * k * n + right]])
        };
        let sum: f64 = (0..k).map(term).sum();
        sum + match self.added {
            Added::Nothing => 0.0,
            Added::Row => plus[[j]],
            Added::Matrix | Added::Destination => plus[[self.at(e, i, j)]],
        }
    }
}

/// To nearest and to even, with `dropped` of the digits of f32 gone.
fn rounded(value: f64, dropped: u32) -> f64 {
    let bits = (value as f32).to_bits();
    let odd = (bits >> dropped) & 1;
    f64::from(f32::from_bits((bits + (1 << (dropped - 1)) - 1 + odd) & !((1 << dropped) - 1)))
}

fn rounding(precision: Precision) -> fn(f64) -> f64 {
    match precision {
        Precision::Full => |x| x,
        Precision::Tf32 => |x| rounded(x, 13),
        Precision::Bf16 => |x| rounded(x, 16),
    }
}

/// Both arms against the host in f64, by relative rms.
fn check<R: Engine>(b: &Device<R>, case: &Case, precision: Precision) -> Result<bool> {
    let operands = case.operands(b)?;
    let total = case.batch * case.m * case.n;
    let step = total.div_ceil(SAMPLES);
    let places: Vec<_> = (0..total.div_ceil(step))
        .map(|s| s * step)
        .map(|at| (at / (case.m * case.n), at / case.n % case.m, at % case.n))
        .collect();
    let host = |round: fn(f64) -> f64| places.iter().map(|&p| case.exact(&operands.values, p, round)).collect();
    let (exact, of_rounded): (Vec<f64>, Vec<f64>) = (host(|x| x), host(rounding(precision)));
    let mut right = true;
    let mut line = String::new();
    for arm in Arm::ALL {
        case.prepare(b, &operands)?;
        case.launch(b, arm, &operands, precision)?;
        let got = b.download(&operands.out)?;
        let error = |want: &[f64]| {
            let square = |x: f64| x * x;
            let got = places.iter().map(|&(e, i, j)| got[[case.at(e, i, j)]]);
            let off: f64 = got.zip(want).map(|(got, want)| square(got - want)).sum();
            (off / want.iter().copied().map(square).sum::<f64>()).sqrt()
        };
        let (of_exact, of_rounded) = (error(&exact), error(&of_rounded));
        // A library rounds the factors in its own way; the tiled kernel rounds them as the host does.
        let library = arm == Arm::Fused && R::GRAPHS;
        let (error, bound) = match (precision, library) {
            (Precision::Tf32, true) => (of_exact, 1e-3),
            (Precision::Bf16, true) => (of_exact, 8e-3),
            _ => (of_rounded, 6e-8 * (case.k as f64).sqrt().max(4.0) * 4.0),
        };
        right &= error <= bound;
        line += &format!("  {arm} {error:.1e} of {bound:.0e} (unrounded {of_exact:.1e}, rounded {of_rounded:.1e})");
    }
    let word = if right { "PASS" } else { "FAIL" };
    println!("{word} {precision:?} {case}:{line}");
    Ok(right)
}

/// In f32, a matrix times the identity is the matrix, bit for bit.
fn identity<R: Engine>(b: &Device<R>, rows: usize, width: usize) -> Result<bool> {
    let case = Case { m: rows, k: width, n: width, ..PLAIN };
    let operands = case.operands(b)?;
    let one = ArrayD::from_shape_fn(IxDyn(&[width * width]), |i| f64::from(i[0] / width == i[0] % width));
    b.upload(one.view(), &operands.b)?;
    let mut right = true;
    for arm in Arm::ALL {
        case.prepare(b, &operands)?;
        case.launch(b, arm, &operands, Precision::Full)?;
        right &= same(&b.download(&operands.out)?, &operands.values[0]);
    }
    println!("{} {rows}x{width} times the identity, bit for bit", if right { "PASS" } else { "FAIL" });
    Ok(right)
}

fn same(a: &ArrayD<f64>, b: &ArrayD<f64>) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// All cases in one step: eager twice, captured and replayed where the runtime can, always the same bits.
fn graph<R: Engine>(b: &Device<R>, cases: &[Case]) -> Result<bool> {
    let all: Vec<_> = cases.iter().map(|case| Ok((case, case.operands(b)?))).collect::<Result<_>>()?;
    let mut right = true;
    for (variant, precision) in PRECISIONS.into_iter().enumerate() {
        let key = StepKey { purpose: "products", variant: variant as u64 };
        let mut first: Option<Vec<ArrayD<f64>>> = None;
        let allocations = b.activity().allocations;
        for run in 0..5 {
            for (case, operands) in &all {
                case.prepare(b, operands)?;
            }
            b.step(&key, &mut |b| {
                all.iter().try_for_each(|(case, operands)| case.launch(b, Arm::Fused, operands, precision))
            })?;
            let got: Vec<_> = all.iter().map(|(_, operands)| b.download(&operands.out)).collect::<Result<_>>()?;
            match &first {
                None => first = Some(got),
                Some(first) => {
                    let fine = first.iter().zip(&got).all(|(a, b)| same(a, b));
                    right &= fine;
                    if !fine {
                        println!("FAIL {precision:?}: run {run} of the step has other bits than the first");
                    }
                }
            }
        }
        let allocations = b.activity().allocations - allocations;
        right &= allocations == 0;
        println!("     {precision:?}: {allocations} allocations in 5 runs, {} captures so far", b.captures());
    }
    println!("{} a step of products, eager and replayed, bit for bit", if right { "PASS" } else { "FAIL" });
    Ok(right)
}

/// A forward product and its two backward products, in f32, tf32 and bf16.
fn times<R: Engine>(b: &Device<R>, measure: bool) -> Result<()> {
    let mut lines = Vec::new();
    for (rows, inner, outer) in [(4096, 768, 3136), (4096, 768, 768), (4096, 768, 192)] {
        let forward = Case { m: rows, k: inner, n: outer, ..PLAIN };
        let dx = Case { m: rows, k: outer, n: inner, b_transposed: true, ..PLAIN };
        let added = Added::Destination;
        let dweight = Case { m: inner, k: rows, n: outer, a_transposed: true, added, ..PLAIN };
        for (what, case) in [("forward", forward), ("dx", dx), ("dx + plus", Case { added: Added::Matrix, ..dx })]
            .into_iter()
            .chain([("dweight", dweight)])
        {
            let operands = case.operands(b)?;
            b.fill(&operands.out, 0.0)?;
            for precision in PRECISIONS {
                let Some(usual) = usual(b, &case, &operands, precision)? else { continue };
                let (us, choice) = &usual;
                let rate = 2.0 * (case.m * case.k * case.n) as f64 / us * 1e-6;
                println!(
                    "{rows}x{inner}x{outer} {what} {precision:?}: {us:.1} us, {rate:.0} TFLOP/s, {:?}, {}",
                    choice.source, choice.details
                );
                if measure {
                    let (best, line) = fastest(b, &case, &operands, precision, &usual)?;
                    println!("    best of {}: {best:.1} us", choice.suggestions);
                    lines.push(line);
                }
            }
        }
    }
    for line in lines {
        println!("{line}");
    }
    Ok(())
}

/// The microseconds of a product by the usual algorithm, and which that is; none where the library has none.
fn usual<R: Engine>(
    b: &Device<R>,
    case: &Case,
    operands: &Operands,
    precision: Precision,
) -> Result<Option<(f64, Choice)>> {
    b.ask_gemm(None);
    let time = time(b, case, operands, precision)?;
    Ok(b.gemm_choices().pop().filter(|choice| choice.source != Source::Kernel).map(|choice| (time, choice)))
}

/// The microseconds of a product by the fastest algorithm, and that as a line of the table.
fn fastest<R: Engine>(
    b: &Device<R>,
    case: &Case,
    operands: &Operands,
    precision: Precision,
    (usual, choice): &(f64, Choice),
) -> Result<(f64, String)> {
    let mut best = (*usual, choice.to_string());
    for suggestion in 0..choice.suggestions {
        b.ask_gemm(Some(suggestion));
        let time = time(b, case, operands, precision)?;
        if let Some(choice) = b.gemm_choices().pop().filter(|_| time < best.0) {
            best = (time, choice.to_string());
        }
    }
    b.ask_gemm(None);
    Ok(best)
}

/// The median microseconds of a product in a graph of twenty. Every call captures a graph of its own.
fn time<R: Engine>(b: &Device<R>, case: &Case, operands: &Operands, precision: Precision) -> Result<f64> {
    static GRAPHS: AtomicU64 = AtomicU64::new(0);
    let variant = GRAPHS.fetch_add(1, Ordering::Relaxed);
    const PRODUCTS: usize = 20;
    let key = StepKey { purpose: "times", variant };
    let mut body = |b: &Device<R>| (0..PRODUCTS).try_for_each(|_| case.launch(b, Arm::Fused, operands, precision));
    for _ in 0..4 {
        b.step(&key, &mut body)?;
    }
    b.sync()?;
    let mut times = Vec::new();
    for _ in 0..30 {
        let start = Instant::now();
        b.step(&key, &mut body)?;
        b.sync()?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / PRODUCTS as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
