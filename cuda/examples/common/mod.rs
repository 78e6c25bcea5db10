//! What the examples share: values that look random, comparing results, timing steps.

// Every example uses its own part of this.
#![allow(dead_code)]

pub mod kda;

use std::time::Instant;

use dormouse_cuda::{Device, Engine, Tensor};
use dormouse_reference::{DType, Result, StepKey, Tensors};
use ndarray::{ArrayD, IxDyn};

/// What an operation returns, by name.
pub type Results = Vec<(&'static str, Tensor)>;

/// The same on the host.
pub type Values = Vec<(&'static str, ArrayD<f64>)>;

/// Makes persistent tensors whose values look random and are the same on every run.
pub struct Draw<'a, R: Engine> {
    pub b: &'a Device<R>,
    seed: u64,
}

impl<'a, R: Engine> Draw<'a, R> {
    pub fn new(b: &'a Device<R>) -> Self {
        Self { b, seed: 1 }
    }

    /// Floats that `map` makes of numbers uniform in -1..1.
    pub fn map(&mut self, shape: &[usize], map: impl Fn(f64) -> f64) -> Result<Tensor> {
        let values = self.values(shape, map);
        self.send(&values, DType::F32)
    }

    /// Floats of mean 0 and variance 1.
    pub fn noise(&mut self, shape: &[usize]) -> Result<Tensor> {
        self.map(shape, |x| x * 3f64.sqrt())
    }

    /// Floats whose last axis has length one.
    pub fn unit_rows(&mut self, shape: &[usize]) -> Result<Tensor> {
        let mut values = self.values(shape, |x| x);
        for mut row in values.rows_mut() {
            let length = row.dot(&row).sqrt();
            row.mapv_inplace(|x| x / length);
        }
        self.send(&values, DType::F32)
    }

    /// Whole numbers from 0 up to, but not including, `below`.
    pub fn ids(&mut self, shape: &[usize], below: usize) -> Result<Tensor> {
        let values = self.values(shape, |x| ((x + 1.0) / 2.0 * below as f64).floor());
        self.send(&values, DType::U32)
    }

    /// A tensor of these values.
    pub fn send(&self, values: &ArrayD<f64>, dtype: DType) -> Result<Tensor> {
        let tensor = self.b.persistent(values.shape(), dtype)?;
        self.b.upload(values.view(), &tensor)?;
        Ok(tensor)
    }

    fn values(&mut self, shape: &[usize], map: impl Fn(f64) -> f64) -> ArrayD<f64> {
        ArrayD::from_shape_simple_fn(IxDyn(shape), || map(uniform(&mut self.seed)))
    }
}

/// Uniform in -1..1.
fn uniform(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Copies results to the host.
pub fn download<R: Engine>(b: &Device<R>, results: Results) -> Result<Values> {
    results.into_iter().map(|(name, tensor)| Ok((name, b.download(&tensor)?))).collect()
}

/// |got - expected| / |expected| in the root mean square; 0 where both are the same, zeros included. NaN if an element
/// is: a test against a limit has to fail then.
pub fn relative_error(got: &ArrayD<f64>, expected: &ArrayD<f64>) -> f64 {
    assert_eq!(got.shape(), expected.shape(), "results of two arms have one shape");
    let (mut wrong, mut size) = (0.0, 0.0);
    for (got, expected) in got.iter().zip(expected) {
        wrong += (got - expected) * (got - expected);
        size += expected * expected;
    }
    if wrong == 0.0 { 0.0 } else { (wrong / size).sqrt() }
}

/// Seconds that one run of a step took, over groups of runs.
pub struct Times {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

/// Times `groups` groups of `runs` runs of a step, each group from an idle device to an idle device. Four runs come
/// first, which compile, lay out and capture.
pub fn time_step<R: Engine>(
    b: &Device<R>,
    key: &StepKey,
    groups: usize,
    runs: usize,
    body: &dyn Fn(&Device<R>) -> Result<()>,
) -> Result<Times> {
    let step = || b.step(key, &mut |b| body(b));
    for _ in 0..4 {
        step()?;
    }
    b.sync()?;
    let mut times = Vec::new();
    for _ in 0..groups {
        let start = Instant::now();
        for _ in 0..runs {
            step()?;
        }
        b.sync()?;
        times.push(start.elapsed().as_secs_f64() / runs as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(Times { median: times[groups / 2], least: times[0], most: times[groups - 1] })
}
