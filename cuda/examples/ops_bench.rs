//! What one call of every operation costs on this machine's GPU, both arms side by side, against what the bytes or the
//! products of the call must cost at least.
//!
//! ```text
//! cargo run --release -p dormouse-cuda --example ops_bench [-- --tsv]
//! ```
//!
//! Shapes are those of the preset `small`: batch 8, 512 tokens, d 768, 12 heads of 64, f 2048, rank 64, three experts,
//! 256 classes, flat buffers of 9.0 M parameters, an n-gram table of three times 32768 rows of 32. A call is forward
//! and backward, or the update of an operation that has no backward, captured as one step. Before an arm is timed, all
//! that it returns and writes is compared with arm `plain` in f32; what is wrong gets a line with WRONG and no row, and
//! the exit code is 1. It is 2 if there is no device.
//!
//! | column | |
//! |---|---|
//! | launches | of a call that the host launches one by one |
//! | nodes | of a replay |
//! | us | a call: the median of 25 groups of 10 replays, with the least and the most |
//! | MB | what this arm's launches of a call must read and write, as the ledger has it |
//! | floor | MB over 4.25 TB/s, or the call's products over the rate of a large product measured here, whichever is longer |
//! | us/floor | how many times the floor the call takes |
//! | replays | groups x replays; fewer where all of them would take more than a second |
//! | error | the largest relative RMS difference to `plain` in f32 |
//!
//! Each group is timed from an idle device to an idle one, so a tenth of a launch and a wait is in every figure. An arm
//! whose call takes more than a second is not timed. A replay finds in the GPU's cache what the one before has left
//! there, so a small call can be faster than the floor of its bytes. With DORMOUSE_COMMIT set, the first line says so.
//! `ops_bench lavapipe` runs tiny shapes on Mesa's software Vulkan driver, whose times mean nothing.

mod common;
#[path = "common/operations.rs"]
mod operations;

use std::process::ExitCode;
use std::time::Instant;

use common::{Draw, Times, Values, download, kda, relative_error, time_step};
use dormouse_cuda::matmul::{Plus, Product, matrix};
use dormouse_cuda::receipts::word;
use dormouse_cuda::{Arm, Cuda, Device, Engine, Lavapipe, Ledger};
use dormouse_reference::{Error, Precision, Result, StepKey, Tensors};
use operations::{Operation, Sizes};

/// Groups of replays that are timed, and replays of a group.
const GROUPS: usize = 25;
const RUNS: usize = 10;

/// Seconds that a row may take to time, and seconds of a call that is not timed any more.
const ROW: f64 = 1.0;
const TOO_LONG: f64 = 1.0;

/// Bytes a second that the H200's memory gives to a kernel that only reads and writes.
const BANDWIDTH: f64 = 4.25e12;

const PURPOSE: &str = "ops_bench";

const HEADER: [&str; 14] = [
    "operation",
    "arm",
    "precision",
    "launches",
    "nodes",
    "us",
    "us_least",
    "us_most",
    "MB",
    "floor_us",
    "floor_of",
    "us/floor",
    "replays",
    "error",
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    if let Some(unknown) = words.iter().find(|word| !["--tsv", Lavapipe::WORD].contains(&word.as_str())) {
        println!("{unknown}: expected nothing, `--tsv` or `{}`", Lavapipe::WORD);
        return ExitCode::from(2);
    }
    match has(Lavapipe::WORD) {
        true => run::<Lavapipe>(&Sizes::TINY, 128, has("--tsv")),
        false => run::<Cuda>(&Sizes::SMALL, 4096, has("--tsv")),
    }
}

fn run<R: Engine>(sizes: &Sizes, edge: usize, tsv: bool) -> ExitCode {
    let b = match Device::<R>::open() {
        Ok(b) => b,
        Err(why) => {
            println!("{}: {why}", R::WORD);
            return ExitCode::from(2);
        }
    };
    let mut bench = Bench {
        b: &b,
        edge,
        comment: if tsv { "# " } else { "" },
        rates: Vec::new(),
        rows: Vec::new(),
        wrong: 0,
        steps: 0,
    };
    let ran = bench.all(sizes);
    if let Err(why) = ran {
        // What was measured before is worth printing.
        println!("{}FAIL {why}", bench.comment);
        bench.wrong += 1;
    }
    bench.print(tsv);
    if bench.wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What has been measured.
struct Bench<'a, R: Engine> {
    b: &'a Device<R>,
    /// Rows and columns of the product whose rate counts.
    edge: usize,
    /// Before every line that is no row.
    comment: &'static str,
    /// Products of two numbers and their sums a second, times two.
    rates: Vec<(Precision, f64)>,
    rows: Vec<[String; HEADER.len()]>,
    wrong: usize,
    /// Steps so far: each has its own number.
    steps: u64,
}

impl<R: Engine> Bench<'_, R> {
    fn all(&mut self, sizes: &Sizes) -> Result<()> {
        let start = Instant::now();
        let (b, comment, edge) = (self.b, self.comment, self.edge);
        let commit = std::env::var("DORMOUSE_COMMIT").unwrap_or_else(|_| "not given".to_owned());
        println!("{comment}{}, commit {commit}", b.describe());
        for precision in [Precision::Full, Precision::Bf16] {
            let rate = self.rate(precision)?;
            println!(
                "{comment}{}: {:.1} TFLOP/s in a product of {edge} by {edge} by {edge}",
                word(precision),
                rate / 1e12
            );
            self.rates.push((precision, rate));
        }
        for (stem, prepare) in operations::all::<R>() {
            let operation = prepare(&mut Draw::new(b), sizes)?;
            println!("{comment}{stem}: {}", operation.shape);
            self.operation(stem, &operation)?;
        }
        println!("{comment}{:.0} s in all", start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Checks and times every arm of an operation at every precision.
    fn operation(&mut self, stem: &'static str, operation: &Operation<R>) -> Result<()> {
        self.b.set_arm(stem, Arm::Plain)?;
        let expected = self.results(operation, Precision::Full)?;
        for &precision in operation.precisions {
            for arm in Arm::ALL {
                self.b.set_arm(stem, arm)?;
                let got = match self.results(operation, precision) {
                    Err(Error::Config { field: "precision", .. }) => {
                        println!("{}{stem} {arm} does not compute in {}", self.comment, word(precision));
                        continue;
                    }
                    got => got?,
                };
                let error =
                    self.compare(&format!("{stem} {arm} {}", word(precision)), limit(stem, precision), &got, &expected);
                if let Some(error) = error {
                    self.time(stem, arm, precision, operation, error)?;
                }
            }
        }
        Ok(())
    }

    /// What a call returns and what it writes, from the state that the operation starts in.
    fn results(&self, operation: &Operation<R>, precision: Precision) -> Result<Values> {
        for (_, tensor, start) in &operation.state {
            self.b.upload(start.view(), tensor)?;
        }
        let mut results = (operation.call)(self.b, precision)?;
        results.extend(operation.state.iter().map(|(name, tensor, _)| (*name, tensor.clone())));
        download(self.b, results)
    }

    /// The largest error, or nothing if it is too large.
    fn compare(&mut self, what: &str, limit: f64, got: &Values, expected: &Values) -> Option<f64> {
        let mut largest = 0.0f64;
        let mut right = got.len() == expected.len();
        for ((name, got), (_, expected)) in got.iter().zip(expected) {
            let error = relative_error(got, expected);
            // Written so that NaN is wrong.
            if error <= limit {
                largest = largest.max(error);
            } else {
                println!("{}WRONG {what}: {name} is off by {error:.1e}, at most {limit:.0e}", self.comment);
                right = false;
            }
        }
        self.wrong += usize::from(!right);
        right.then_some(largest)
    }

    /// Adds the row of an arm whose results are right.
    fn time(&mut self, stem: &str, arm: Arm, precision: Precision, operation: &Operation<R>, error: f64) -> Result<()> {
        let b = self.b;
        self.steps += 1;
        let key = StepKey { purpose: PURPOSE, variant: self.steps };
        let call = |b: &Device<R>| (operation.call)(b, precision).map(|_| ());
        let step = || b.step(&key, &mut |b| call(b));
        let counted = |step: &dyn Fn() -> Result<()>| {
            let before = b.ledgers().remove(PURPOSE).unwrap_or_default();
            step()?;
            let after = b.ledgers().remove(PURPOSE).unwrap_or_default();
            Ok::<_, Error>([
                after.count() - before.count(),
                after.bytes() - before.bytes(),
                nodes(&after) - nodes(&before),
            ])
        };
        let [launches, bytes, _] = counted(&step)?;
        b.sync()?;
        let start = Instant::now();
        step()?;
        b.sync()?;
        let seconds = start.elapsed().as_secs_f64();
        if seconds > TOO_LONG {
            let precision = word(precision);
            println!("{}{stem} {arm} {precision} takes {seconds:.1} s a call and is not timed", self.comment);
            return Ok(());
        }
        let (groups, runs) = if R::GRAPHS { replays(seconds) } else { (3, 1) };
        let times = time_step(b, &key, groups, runs, &call)?;
        let [_, _, nodes] = counted(&step)?;
        let Times { median, least, most } = times;
        let by_bytes = bytes as f64 / BANDWIDTH;
        let by_products = operation.flops / self.rate_of(precision);
        let (floor, floor_of) = if by_products > by_bytes { (by_products, "products") } else { (by_bytes, "bytes") };
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        self.rows.push([
            stem.to_owned(),
            arm.to_string(),
            word(precision).to_owned(),
            launches.to_string(),
            if R::GRAPHS { nodes.to_string() } else { "-".to_owned() },
            us(median),
            us(least),
            us(most),
            format!("{:.3}", bytes as f64 / 1e6),
            format!("{:.3}", 1e6 * floor),
            floor_of.to_owned(),
            format!("{:.1}", median / floor),
            format!("{groups}x{runs}"),
            format!("{error:.1e}"),
        ]);
        Ok(())
    }

    fn rate_of(&self, precision: Precision) -> f64 {
        let found = self.rates.iter().find(|(of, _)| *of == precision);
        found.expect("rates are measured for every precision of an operation").1
    }

    /// The rate of a large product in arm `fused`, its median.
    fn rate(&mut self, precision: Precision) -> Result<f64> {
        let (b, edge) = (self.b, self.edge);
        self.steps += 1;
        let key = StepKey { purpose: PURPOSE, variant: self.steps };
        let mut draw = Draw::new(b);
        let (left, right, out) = (draw.noise(&[edge, edge])?, draw.noise(&[edge, edge])?, draw.noise(&[edge, edge])?);
        let product = Product {
            name: "ops_bench::product",
            batch: 1,
            m: edge,
            k: edge,
            n: edge,
            a: matrix(&left, edge).plain(),
            b: matrix(&right, edge).plain(),
            plus: Plus::Nothing,
            out: matrix(&out, edge),
            precision,
        };
        let times = time_step(b, &key, 5, if R::GRAPHS { RUNS } else { 1 }, &|b| b.product(Arm::Fused, &product))?;
        Ok(2.0 * (edge as f64).powi(3) / times.median)
    }

    fn print(&self, tsv: bool) {
        let header = HEADER.map(str::to_owned);
        let lines: Vec<_> = std::iter::once(&header).chain(&self.rows).collect();
        if tsv {
            lines.iter().for_each(|line| println!("{}", line.join("\t")));
            return;
        }
        let widths: [usize; HEADER.len()] =
            std::array::from_fn(|i| lines.iter().map(|line| line[i].len()).max().unwrap_or_default());
        for line in lines {
            // The first three columns are words.
            let cells = line.iter().zip(widths).enumerate().map(|(i, (cell, width))| match i {
                0..3 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            println!("{}", cells.collect::<Vec<_>>().join("  "));
        }
    }
}

/// Kernels that ran as nodes of graphs.
fn nodes(ledger: &Ledger) -> u64 {
    ledger.sites.values().map(|site| site.nodes).sum()
}

/// Groups and replays of a group for a call that takes so long.
fn replays(seconds: f64) -> (usize, usize) {
    let affordable = (ROW / seconds) as usize;
    if affordable >= GROUPS { (GROUPS, RUNS.min(affordable / GROUPS)) } else { (affordable.max(3), 1) }
}

/// The relative RMS error that is accepted. In f32 only sums are taken in another order. A factor in bf16 is rounded to
/// 2^-9 of itself, which is 2e-3 in a product of two; an expert chains eight products. The gate of `engram` enlarges an
/// error of its score, a sum over the width that the two arms take in different orders, up to 50 times (docs/adr/0014).
fn limit(stem: &str, precision: Precision) -> f64 {
    match (stem, precision) {
        ("kda", _) => kda::LIMITS.iter().find(|(of, _)| *of == precision).expect("all have a limit").1,
        ("engram", Precision::Full) => 5e-5,
        (_, Precision::Full) => 1e-5,
        ("expert", _) => 3e-2,
        _ => 1e-2,
    }
}
