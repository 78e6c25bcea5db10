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

mod common;

use std::process::ExitCode;

use common::kda::{LIMITS, Problem, pass};
use common::{Draw, download, relative_error, time_step};
use dormouse_cuda::{Arm, Cuda, Device, Engine, Lavapipe};
use dormouse_reference::{Precision, Result, StepKey};

/// Groups of runs that are timed, and runs of a group.
const GROUPS: usize = 25;
const RUNS: usize = 10;

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

fn bench<R: Engine>([batch, time, heads, key, value]: [usize; 5], runs: usize) -> Result<bool> {
    let b = Device::<R>::open()?;
    println!("{}", b.describe());
    println!("B {batch} T {time} H {heads} K {key} V {value}");
    let problem = Problem::new(&mut Draw::new(&b), [batch, time, heads, key, value], false)?;

    b.set_arm("kda", Arm::Plain)?;
    let expected = download(&b, pass(&b, Precision::Full, &problem)?)?;
    b.set_arm("kda", Arm::Fused)?;
    let mut right = true;
    for (variant, (precision, limit)) in LIMITS.into_iter().enumerate() {
        let got = download(&b, pass(&b, precision, &problem)?)?;
        print!("{precision:?}: relative RMS error");
        for ((name, got), (_, expected)) in got.iter().zip(&expected) {
            let error = relative_error(got, expected);
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

/// Prints how long a pass takes as a step: the median over groups of runs, and the least and the most.
fn timed<R: Engine>(
    b: &Device<R>,
    word: &str,
    key: StepKey,
    precision: Precision,
    problem: &Problem,
    runs: usize,
) -> Result<()> {
    let times = time_step(b, &key, GROUPS, runs, &|b| pass(b, precision, problem).map(|_| ()))?;
    let [least, median, most] = [times.least, times.median, times.most].map(|seconds| 1e3 * seconds);
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
