//! How long `kda` takes on this machine's GPU, forward and backward together, and whether what it computes is right.
//!
//! ```text
//! cargo run --release -p dormouse-cuda --example kda_bench
//! ```
//!
//! The shape is B = 8, T = 512, H = 12, K = V = 64. For every precision it prints the relative RMS error of each result
//! against the token by token kernels in f32, then the median, least and most time of a pass run eagerly and replayed as
//! one graph, and the time of each kernel. Kernels are timed by the wall clock with a wait before and after each launch,
//! less what the same costs for a kernel that does nothing, so a figure is good to some microseconds.
//!
//! `kda_bench lavapipe` runs the same at a tiny shape on Mesa's software Vulkan driver, whose times mean nothing. The
//! exit code is 1 if an error is too large, 2 if there is no device.

use std::process::ExitCode;
use std::time::Instant;

use dormouse_cuda::{Arm, Cuda, Device, Engine, Lavapipe, Tensor};
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{DType, Precision, Result, StepKey, Tensors};
use ndarray::{ArrayD, IxDyn};

/// Groups of runs that are timed, and runs of a group.
const GROUPS: usize = 25;
const RUNS: usize = 10;

/// Relative RMS errors that are accepted: rounding of the operands times the square root of some twenty products that
/// follow each other, and in f32 the order of sums.
const LIMITS: [(Precision, f64); 3] = [(Precision::Full, 1e-5), (Precision::Tf32, 4e-3), (Precision::Bf16, 3e-2)];

fn main() -> ExitCode {
    let lavapipe = std::env::args().nth(1).is_some_and(|word| word == Lavapipe::WORD);
    let ran =
        if lavapipe { bench::<Lavapipe>([2, 40, 2, 16, 16], 2) } else { bench::<Cuda>([8, 512, 12, 64, 64], RUNS) };
    match ran {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            println!("{error}");
            ExitCode::from(2)
        }
    }
}

/// A problem on a device.
struct Problem {
    inputs: Inputs<Tensor>,
    upstream: Outputs<Tensor>,
}

/// What a pass returns, by name.
type Results = Vec<(&'static str, Tensor)>;

fn bench<R: Engine>([batch, time, heads, key, value]: [usize; 5], runs: usize) -> Result<bool> {
    let b = Device::<R>::open()?;
    println!("{}", b.describe());
    println!("B {batch} T {time} H {heads} K {key} V {value}");
    let seed = &mut 1u64;
    let mut tensor = |shape: &[usize], map: fn(f64) -> f64, unit: bool| {
        let mut x = ArrayD::from_shape_simple_fn(IxDyn(shape), || map(uniform(seed)));
        if unit {
            for mut row in x.rows_mut() {
                let length = row.dot(&row).sqrt();
                row.mapv_inplace(|x| x / length);
            }
        }
        let tensor = b.persistent(shape, DType::F32)?;
        b.upload(x.view(), &tensor)?;
        Ok::<_, dormouse_reference::Error>(tensor)
    };
    let (wide, narrow, one) = ([batch, time, heads, key], [batch, time, heads, value], [batch, time, heads]);
    let inputs = Inputs {
        q: tensor(&wide, |x| x, true)?,
        k: tensor(&wide, |x| x, true)?,
        v: tensor(&narrow, |x| 1.7 * x, false)?,
        g: tensor(&wide, |x| -5.0 / (1.0 + (3.0 - 2.0 * x).exp()), false)?,
        beta: tensor(&one, |x| 0.5 + 0.4 * x, false)?,
        b: None,
        w: None,
        cu_seqlens: None,
        initial_state: None,
    };
    let upstream = Outputs { o: tensor(&narrow, |x| 1.7 * x, false)?, final_state: None };
    let problem = Problem { inputs, upstream };

    b.set_arm("kda", Arm::Plain)?;
    let expected = download(&b, pass(&b, Precision::Full, &problem)?)?;
    b.set_arm("kda", Arm::Fused)?;
    let mut right = true;
    for (variant, (precision, limit)) in LIMITS.into_iter().enumerate() {
        let got = download(&b, pass(&b, precision, &problem)?)?;
        print!("{precision:?}: relative RMS error");
        for ((name, got), (_, expected)) in got.iter().zip(&expected) {
            let error = rms(&(got - expected)) / rms(expected);
            // Written so that NaN is wrong.
            let fine = error <= limit;
            right &= fine;
            print!(" {name} {error:.1e}{}", if fine { "" } else { " WRONG" });
        }
        println!(" (at most {limit:.0e})");

        let variant = 2 * variant as u64;
        b.set_graphs(false);
        timed(&b, "eager", StepKey { purpose: "kda_bench", variant }, precision, &problem, runs)?;
        b.set_graphs(true);
        let word = if R::GRAPHS { "graph" } else { "graph (there are none here: eager)" };
        timed(&b, word, StepKey { purpose: "kda_bench", variant: variant + 1 }, precision, &problem, runs)?;
        kernels(&b, precision, &problem)?;
    }
    Ok(right)
}

fn config(precision: Precision) -> Config {
    Config { scale: None, form: Form::Recurrent, checkpoint_every: 64, memory: Memory::Save, precision }
}

/// Forward and backward.
fn pass<R: Engine>(b: &Device<R>, precision: Precision, problem: &Problem) -> Result<Results> {
    let config = config(precision);
    let (outputs, saved) = Kda::forward(b, &config, problem.inputs.as_ref())?;
    let grads: Grads<Tensor> = Kda::backward(b, &config, &saved, problem.upstream.as_ref())?;
    Ok(outputs.named().into_iter().chain(grads.named()).collect())
}

/// Prints how long a pass takes as a step: the median over groups of runs, and the least and the most.
fn timed<R: Engine>(
    b: &Device<R>,
    word: &str,
    key: StepKey,
    precision: Precision,
    problem: &Problem,
    runs: usize,
) -> Result<()> {
    let step = || b.step(&key, &mut |b| pass(b, precision, problem).map(|_| ()));
    // Compiles, lays out, captures.
    for _ in 0..4 {
        step()?;
    }
    b.sync()?;
    let mut times = Vec::new();
    for _ in 0..GROUPS {
        let start = Instant::now();
        for _ in 0..runs {
            step()?;
        }
        b.sync()?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / runs as f64);
    }
    times.sort_by(f64::total_cmp);
    let (least, median, most) = (times[0], times[GROUPS / 2], times[GROUPS - 1]);
    println!("{precision:?} {word}: {median:.3} ms ({least:.3} to {most:.3}, {GROUPS} groups of {runs})");
    Ok(())
}

/// Prints how long each kernel takes on the device, on average.
fn kernels<R: Engine>(b: &Device<R>, precision: Precision, problem: &Problem) -> Result<()> {
    let before = b.ledger();
    b.set_timers(true);
    for _ in 0..GROUPS {
        pass(b, precision, problem)?;
    }
    b.set_timers(false);
    for (&(stage, kernel), site) in &b.ledger().sites {
        let earlier = before.sites.get(&(stage, kernel)).copied().unwrap_or_default();
        let (launches, time) = (site.launches - earlier.launches, site.device_ns - earlier.device_ns);
        if launches > 0 {
            println!("{precision:?} {kernel}: {:.1} us", time as f64 / launches as f64 / 1e3);
        }
    }
    Ok(())
}

fn download<R: Engine>(b: &Device<R>, results: Results) -> Result<Vec<(&'static str, ArrayD<f64>)>> {
    results.into_iter().map(|(name, tensor)| Ok((name, b.download(&tensor)?))).collect()
}

fn rms(x: &ArrayD<f64>) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt()
}

/// Uniform in -1..1.
fn uniform(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}
