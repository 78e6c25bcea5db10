//! Random inputs: streams that depend on names and a seed only, and the value families that have broken others.

use ndarray::{ArrayD, IxDyn};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// The random stream of one purpose: the same seed and words give the same numbers on every machine.
pub fn stream(seed: u64, words: &[&str]) -> ChaCha8Rng {
    // FNV-1a over the words, each closed by a byte that no word contains.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for word in words {
        for byte in word.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&hash.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Independent standard normal values.
pub fn normal(rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    ArrayD::from_shape_simple_fn(IxDyn(shape), || rng.sample(StandardNormal))
}

/// Uniform values in `[low, high)`.
pub fn uniform(rng: &mut ChaCha8Rng, shape: &[usize], low: f64, high: f64) -> ArrayD<f64> {
    ArrayD::from_shape_simple_fn(IxDyn(shape), || rng.random_range(low..high))
}

/// Whole numbers in `[0, below)`.
pub fn ids(rng: &mut ChaCha8Rng, shape: &[usize], below: usize) -> ArrayD<f64> {
    ArrayD::from_shape_simple_fn(IxDyn(shape), || rng.random_range(0..below) as f64)
}

/// Values as activations have them: mostly small, one channel in eight thirty times as large, and heavy tails.
pub fn activation_like(rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    let width = shape.last().copied().unwrap_or(1).max(1);
    let mut values = normal(rng, shape);
    for (i, x) in values.iter_mut().enumerate() {
        let scale = if (i % width).is_multiple_of(8) { 30.0 } else { 1.0 };
        *x *= scale * (0.1 + x.abs());
    }
    values
}

/// Makes one row (all but the last axis fixed) zero and another one tiny.
pub fn with_zero_and_tiny_rows(mut values: ArrayD<f64>) -> ArrayD<f64> {
    let Some(last) = values.ndim().checked_sub(1) else { return values };
    let rows = values.lanes(ndarray::Axis(last)).into_iter().count();
    for (i, mut row) in values.lanes_mut(ndarray::Axis(last)).into_iter().enumerate() {
        if i == rows / 2 {
            row.fill(0.0);
        } else if i == 0 {
            row *= 1e-6;
        }
    }
    values
}

/// The rms of the finite elements below 1000, between 0.01 and 1: the size of a direction that probes a tensor.
pub fn typical_magnitude(values: &ArrayD<f64>) -> f64 {
    let usual: Vec<f64> = values.iter().copied().filter(|x| x.abs() < 1e3).collect();
    let mean = usual.iter().map(|x| x * x).sum::<f64>() / usual.len().max(1) as f64;
    mean.sqrt().clamp(0.01, 1.0)
}

/// A direction for one input: normal, of the given size, zero where the value is infinite or beyond 1e6 (there a step
/// would not move the value).
pub fn direction(rng: &mut ChaCha8Rng, values: &ArrayD<f64>, scale: f64) -> ArrayD<f64> {
    let mut v = normal(rng, values.shape());
    for (d, &x) in v.iter_mut().zip(values) {
        *d = if x.abs() > 1e6 { 0.0 } else { *d * scale };
    }
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_depend_on_every_word_and_the_seed() {
        let first = |seed, words: &[&str]| normal(&mut stream(seed, words), &[1])[[0]];
        assert_eq!(first(1, &["kda", "a"]), first(1, &["kda", "a"]));
        assert_ne!(first(1, &["kda", "a"]), first(2, &["kda", "a"]));
        assert_ne!(first(1, &["kda", "a"]), first(1, &["kd", "aa"]));
    }

    #[test]
    fn directions_leave_infinite_elements_alone() {
        let values = ndarray::array![f64::NEG_INFINITY, 1.0].into_dyn();
        let v = direction(&mut stream(0, &[]), &values, typical_magnitude(&values));
        assert_eq!(v[[0]], 0.0);
        assert_ne!(v[[1]], 0.0);
    }
}
