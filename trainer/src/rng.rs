//! Randomness without state: every random number is a pure function of (seed, purpose, step, row).
//!
//! A run never saves a generator. The batch of step 700, an initial weight, a sampled byte can be drawn again from their
//! coordinates alone, so a resumed run draws what an unbroken one would have drawn.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// What a stream of random numbers is for. Two purposes never share a stream.
///
/// The numbers are part of what a seed means: a new purpose gets a new number, an old one keeps its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// Initial weights: `row` counts the parameter tensors.
    Init = 1,
    /// The order of training windows: `step` is the epoch.
    DataOrder = 2,
    /// Bytes sampled from the model: `step` counts the positions of a sample.
    Sample = 3,
    /// Draws of tests.
    Test = 4,
    /// Masked spans: `step` is the step, `row` the row of its batch.
    SpanMask = 5,
}

/// The generator of one coordinate.
///
/// The 256-bit ChaCha key is BLAKE3 of the four numbers, each as 8 little-endian bytes after a domain name.
pub fn stream(seed: u64, purpose: Purpose, step: u64, row: u64) -> ChaCha8Rng {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"dormouse random stream 1");
    for word in [seed, purpose as u64, step, row] {
        hasher.update(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::{Purpose, stream};
    use rand::Rng;

    #[test]
    fn equal_coordinates_draw_equal_numbers() {
        let mut a = stream(7, Purpose::Test, 3, 1);
        let mut b = stream(7, Purpose::Test, 3, 1);
        let first: Vec<u64> = (0..8).map(|_| a.next_u64()).collect();
        let second: Vec<u64> = (0..8).map(|_| b.next_u64()).collect();
        assert_eq!(first, second);
        assert_ne!(first[0], first[1]);
    }

    #[test]
    fn every_coordinate_matters() {
        let base = stream(7, Purpose::Test, 3, 1).next_u64();
        assert_ne!(base, stream(8, Purpose::Test, 3, 1).next_u64());
        assert_ne!(base, stream(7, Purpose::Init, 3, 1).next_u64());
        assert_ne!(base, stream(7, Purpose::Test, 4, 1).next_u64());
        assert_ne!(base, stream(7, Purpose::Test, 3, 2).next_u64());
        // Swapped coordinates are other coordinates.
        assert_ne!(base, stream(7, Purpose::Test, 1, 3).next_u64());
    }

    #[test]
    fn the_meaning_of_a_seed_is_frozen() {
        assert_eq!(stream(0, Purpose::Init, 0, 0).next_u64(), FROZEN);
    }

    /// First draw of the stream (0, Init, 0, 0). If it changes, every old run's seed means another run.
    const FROZEN: u64 = 3_828_987_370_613_324_618;
}
