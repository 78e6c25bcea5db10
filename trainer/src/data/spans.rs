//! Which bytes the student does not see.
//!
//! A span starts at a position with the same probability everywhere and covers eight positions; spans may overlap and are
//! cut off at the end of the row. The mask of a row is a pure function of (seed, step, row): one uniform number for each
//! possible start, in order.

use rand::RngExt;

use crate::rng::{Purpose, stream};

/// Positions that a span covers.
pub const SPAN_BYTES: usize = 8;

/// The first position at which a span may start: before it there is no context to predict from, and two rows that began
/// with a masked span would have the same latents.
pub const FIRST_START: usize = 8;

/// The share of positions that are masked, far from the row's start.
pub const MASKED_SHARE: f64 = 0.15;

/// The probability p of a start. A position stays visible if none of the eight spans that could cover it starts:
/// (1 - p)^8 = 1 - [`MASKED_SHARE`].
pub fn start_probability() -> f64 {
    1.0 - (1.0 - MASKED_SHARE).powf(1.0 / SPAN_BYTES as f64)
}

/// True where a position of row `row` of step `step` is masked; `len` positions.
pub fn span_mask(seed: u64, step: u64, row: u64, len: usize) -> Vec<bool> {
    let mut rng = stream(seed, Purpose::SpanMask, step, row);
    let probability = start_probability();
    let mut mask = vec![false; len];
    for start in FIRST_START..len {
        if rng.random::<f64>() < probability {
            mask[start..(start + SPAN_BYTES).min(len)].fill(true);
        }
    }
    mask
}

/// The masks of all rows of step `step`, row after row: `rows * len` positions.
pub fn step_mask(seed: u64, step: u64, rows: usize, len: usize) -> Vec<bool> {
    (0..rows as u64).flat_map(|row| span_mask(seed, step, row, len)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(mask: &[bool]) -> Vec<usize> {
        mask.iter().enumerate().filter(|(_, masked)| **masked).map(|(at, _)| at).collect()
    }

    #[test]
    fn equal_coordinates_mask_equal_positions_and_every_coordinate_matters() {
        let base = span_mask(7, 3, 1, 512);
        assert_eq!(base, span_mask(7, 3, 1, 512));
        for other in
            [span_mask(8, 3, 1, 512), span_mask(7, 4, 1, 512), span_mask(7, 3, 2, 512), span_mask(7, 1, 3, 512)]
        {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_shorter_row_has_the_beginning_of_a_longer_one() {
        let long = span_mask(1, 2, 3, 300);
        for len in [0, 1, 8, 9, 64, 299] {
            assert_eq!(span_mask(1, 2, 3, len), long[..len]);
        }
    }

    #[test]
    fn nothing_is_masked_before_position_8_and_15_per_cent_are_from_15_on() {
        let (mut masked, mut rows) = (vec![0usize; 64], 0);
        for step in 0..100 {
            for row in 0..100 {
                rows += 1;
                for at in places(&span_mask(0, step, row, 64)) {
                    masked[at] += 1;
                }
            }
        }
        assert_eq!(masked[..FIRST_START], [0; FIRST_START]);
        // Four standard errors of 10^4 draws; at position 8 only one span can cover, at 15 all eight.
        let within =
            |share: f64, want: f64| (share - want).abs() < 4.0 * (want * (1.0 - want) / f64::from(rows)).sqrt();
        for (at, masked) in masked.iter().enumerate().skip(FIRST_START) {
            let spans = (at - FIRST_START + 1).min(SPAN_BYTES) as i32;
            let want = 1.0 - (1.0 - start_probability()).powi(spans);
            let share = *masked as f64 / f64::from(rows);
            assert!(within(share, want), "position {at}: {share}, expected {want}");
        }
        assert!((1.0 - (1.0 - start_probability()).powi(8) - MASKED_SHARE).abs() < 1e-15);
    }

    #[test]
    fn spans_are_eight_long_or_more_unless_the_row_ends() {
        let mut seen = 0;
        for row in 0..50 {
            let mask = span_mask(5, 0, row, 200);
            for run in mask.chunk_by(|a, b| a == b).rev().skip(1).filter(|run| run[0]) {
                assert!(run.len() >= SPAN_BYTES, "a run of {}", run.len());
                seen += 1;
            }
        }
        assert!(seen > 100, "only {seen} runs were looked at");
    }

    #[test]
    fn the_meaning_of_a_seed_is_frozen() {
        // If this changes, every old run's seed means other masks, and files of targets no longer fit.
        let runs: Vec<usize> = (26..41).chain(59..67).chain(88..96).collect();
        assert_eq!(places(&span_mask(0, 0, 0, 96)), runs);
    }
}
