//! Whether `kda` is right at the edges of its sizes on this machine's GPU: very long, wide, narrow, many chains.
//!
//! ```text
//! cargo run --release -p dormouse-cuda --example kda_sizes
//! ```
//!
//! Every output and gradient of the fused kernels is compared with the token by token kernels in f32, at every
//! precision, without and with an initial state and a gradient of the final one. A line is one problem: the largest
//! relative RMS error, whose it is, and what is accepted. Heads that are too wide have to be refused. The exit code is 1
//! if anything is WRONG, 2 if there is no device.
//!
//! `kda_sizes lavapipe` runs on Mesa's software Vulkan driver what it can do (32 KiB of shared memory, some 65,500 turns
//! of a unit's loops, two cores instead of a GPU) and says what it leaves out. `kda_sizes reported` runs the two problems
//! that other people reported, and nothing else.

mod common;

use std::process::ExitCode;
use std::time::Instant;

use common::kda::{LIMITS, Problem, config, pass};
use common::{Draw, Values, download, relative_error};
use dormouse_cuda::{Arm, Cuda, Device, Engine, Lavapipe};
use dormouse_reference::kda::Kda;
use dormouse_reference::{Error, Precision, Result, StepKey, Tensors};

/// B, T, H, K, V
type Shape = [usize; 5];

const SHAPES: [Shape; 10] = [
    [1, 65536, 1, 16, 16],
    [1, 65536, 2, 64, 64],
    [1, 300, 2, 256, 256],
    [2, 130, 3, 1, 256],
    [2, 130, 3, 256, 1],
    [2, 50, 2, 17, 5],
    [1, 1, 1, 1, 1],
    [70000, 1, 1, 4, 4],
    [1, 1, 70000, 4, 4],
    [4096, 64, 8, 16, 16],
];

/// Case A4 of the list of other people's faults: gradients were NaN at this size, and right at a smaller one.
const WIDE_MODEL: Shape = [1, 4096, 96, 128, 128];

/// Case G1: equal calls gave other bits at this size, now and then.
const REPEATED: Shape = [2, 8192, 16, 128, 128];

/// The calls of that case.
const CALLS: usize = 30;

/// The widest K and V that there are.
const WIDEST: usize = 256;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(word) if word == Lavapipe::WORD => run::<Lavapipe>(on_software, &SHAPES),
        Some("reported") => run::<Cuda>(|_| true, &[]),
        _ => run::<Cuda>(|_| true, &SHAPES),
    }
}

/// What Mesa's driver can do: wide heads do not fit its shared memory, long sequences its loops, and what the token by
/// token kernels keep of many chains its largest buffer.
fn on_software([batch, time, heads, key, value]: Shape) -> bool {
    key <= 64 && time * key.max(value) <= 40_000 && batch * heads <= 1000
}

fn run<R: Engine>(can: fn(Shape) -> bool, shapes: &[Shape]) -> ExitCode {
    let b = match Device::<R>::open() {
        Ok(b) => b,
        Err(why) => {
            println!("{}: {why}", R::WORD);
            return ExitCode::from(2);
        }
    };
    println!("{}", b.describe());
    let mut wrong = 0;
    for &shape in shapes.iter().chain([&WIDE_MODEL]) {
        if !can(shape) {
            println!("NOT RUN {} (too large for this driver)", named(shape));
            continue;
        }
        for &states in if shape == WIDE_MODEL { &[false][..] } else { &[false, true] } {
            match check(&b, shape, states) {
                Ok(right) => wrong += usize::from(!right),
                Err(why) => {
                    println!("WRONG {}: {why}", named(shape));
                    wrong += 1;
                }
            }
        }
    }
    match if can(REPEATED) { repeated(&b) } else { Ok(None) } {
        Ok(None) => println!("NOT RUN {} {CALLS} times (too large for this driver)", named(REPEATED)),
        Ok(Some(0)) => println!("ok    {} {CALLS} times in bf16: one result", named(REPEATED)),
        Ok(Some(others)) => {
            println!("WRONG {}: {others} of {CALLS} calls in bf16 have other bits than the first", named(REPEATED));
            wrong += 1;
        }
        Err(why) => {
            println!("WRONG {}: {why}", named(REPEATED));
            wrong += 1;
        }
    }
    for (shape, axis) in [([1, 2, 1, WIDEST + 1, 4], "K"), ([1, 2, 1, 4, WIDEST + 1], "V")] {
        for arm in Arm::ALL {
            match refused(&b, shape, axis, arm) {
                Ok(why) => println!("ok    refused {axis} {} in arm {arm}: {why}", WIDEST + 1),
                Err(what) => {
                    println!("WRONG {} in arm {arm}: {what}", named(shape));
                    wrong += 1;
                }
            }
        }
    }
    println!("{}", if wrong == 0 { "all right".to_owned() } else { format!("{wrong} WRONG") });
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn named([batch, time, heads, key, value]: Shape) -> String {
    format!("B {batch} T {time} H {heads} K {key} V {value}")
}

/// Whether every result of the fused kernels is right at every precision.
fn check<R: Engine>(b: &Device<R>, shape: Shape, states: bool) -> Result<bool> {
    let start = Instant::now();
    let problem = Problem::new(&mut Draw::new(b), shape, states)?;
    b.set_arm("kda", Arm::Plain)?;
    let expected = fresh(b, Precision::Full, &problem)?;
    b.set_arm("kda", Arm::Fused)?;
    let mut right = true;
    for (precision, limit) in LIMITS {
        let got = fresh(b, precision, &problem)?;
        let (mut worst, mut whose) = (0.0f64, "all");
        for ((name, got), (_, expected)) in got.iter().zip(&expected) {
            let error = relative_error(got, expected);
            // NaN is the worst, and stays it.
            if error.is_nan() || error > worst {
                (worst, whose) = (error, name);
            }
        }
        let fine = worst <= limit && got.len() == expected.len();
        right &= fine;
        let with = if states { "with states" } else { "no states" };
        let verdict = if fine { "ok   " } else { "WRONG" };
        println!("{verdict} {} {with} {precision:?}: {whose} is off by {worst:.1e}, at most {limit:.0e}", named(shape));
    }
    println!("      {:.1} s", start.elapsed().as_secs_f64());
    Ok(right)
}

/// How many calls of the fused kernels have other bits than the first one, by the output and the gradient of the keys.
fn repeated<R: Engine>(b: &Device<R>) -> Result<Option<usize>> {
    let problem = Problem::new(&mut Draw::new(b), REPEATED, false)?;
    b.set_arm("kda", Arm::Fused)?;
    let call = || -> Result<Values> {
        b.set_graphs(false);
        b.step(&StepKey { purpose: "kda_sizes", variant: 0 }, &mut |_| Ok(()))?;
        let results = pass(b, Precision::Bf16, &problem)?;
        download(b, results.into_iter().filter(|(name, _)| ["o", "dk"].contains(name)).collect())
    };
    let first = call()?;
    let mut others = 0;
    for _ in 1..CALLS {
        others += usize::from(call()? != first);
    }
    Ok(Some(others))
}

/// The results of a pass, whose intermediates take the place of those of the pass before.
fn fresh<R: Engine>(b: &Device<R>, precision: Precision, problem: &Problem) -> Result<Values> {
    // Scratch outside steps lives until the next step starts, so an empty one frees what there is.
    b.set_graphs(false);
    b.step(&StepKey { purpose: "kda_sizes", variant: 0 }, &mut |_| Ok(()))?;
    download(b, pass(b, precision, problem)?)
}

/// The documented refusal of K or V beyond [`WIDEST`], or what came instead.
fn refused<R: Engine>(b: &Device<R>, shape: Shape, axis: &str, arm: Arm) -> std::result::Result<String, String> {
    let problem = Problem::new(&mut Draw::new(b), shape, false).map_err(|why| why.to_string())?;
    b.set_arm("kda", arm).map_err(|why| why.to_string())?;
    let documented = format!("{axis} of at most {WIDEST} on a device");
    match Kda::forward(b, &config(Precision::Full), problem.inputs.as_ref()) {
        Ok(_) => Err("not refused".to_owned()),
        Err(why @ Error::Shape { .. }) if why.to_string().contains(&documented) => Ok(why.to_string()),
        Err(why) => Err(format!("refused with `{why}`, which does not say `{documented}`")),
    }
}
