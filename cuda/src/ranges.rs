//! A buffer cut where a number of its elements changes, such as their weight decay: how one launch serves many ranges.
//!
//! Ranges are constants of a step. They travel as scalars, [`PIECES`] a launch, because nothing is uploaded inside a
//! step. A longer list takes a launch for every [`PIECES`] of it, each over its own stretch of the buffer, so elements
//! are read once all the same.

use std::ops::Range;

use cubecl::prelude::*;

/// Pieces of one launch: the parameter tables in use have two.
pub(crate) const PIECES: usize = 8;

/// Neighbouring elements with one number.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub range: Range<usize>,
    pub value: f32,
}

/// `0..len` as pieces in order: `ranges`, which do not overlap, with their numbers, and `outside` between them.
pub(crate) fn pieces(len: usize, ranges: impl Iterator<Item = (Range<usize>, f32)>, outside: f32) -> Vec<Piece> {
    let mut sorted: Vec<_> = ranges.filter(|(range, _)| !range.is_empty()).collect();
    sorted.sort_by_key(|(range, _)| range.start);
    // An empty range behind the last one, for what lies between the two.
    sorted.push((len..len, outside));
    let mut pieces: Vec<Piece> = Vec::new();
    let mut end = 0;
    for (range, value) in sorted {
        for (range, value) in [(end..range.start, outside), (range.clone(), value)] {
            match pieces.last_mut() {
                _ if range.is_empty() => {}
                Some(last) if last.value == value => last.range.end = range.end,
                _ => pieces.push(Piece { range, value }),
            }
        }
        end = range.end;
    }
    pieces
}

/// The pieces of one launch as its scalars: where each starts and its number. Places that are left over start behind
/// every element.
pub(crate) fn scalars<R: Runtime>(pieces: &[Piece]) -> (SequenceArg<R, u32>, SequenceArg<R, f32>) {
    let place = |p: usize| pieces.get(p).map_or((u32::MAX, 0.0), |piece| (piece.range.start as u32, piece.value));
    ((0..PIECES).map(|p| place(p).0).collect(), (0..PIECES).map(|p| place(p).1).collect())
}

/// The number of element `i`, which is not before the first piece.
#[cube]
pub(crate) fn value_of(i: usize, starts: &Sequence<u32>, values: &Sequence<f32>) -> f32 {
    let mut value = values[0];
    #[unroll]
    for p in 1..PIECES {
        if i >= starts[p] as usize {
            value = values[p];
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_buffer_in_order() {
        let cut = |len, ranges: &[(Range<usize>, f32)]| -> Vec<(usize, usize, f32)> {
            let pieces = pieces(len, ranges.iter().cloned(), -1.0);
            pieces.into_iter().map(|piece| (piece.range.start, piece.range.end, piece.value)).collect()
        };
        assert_eq!(cut(9, &[(5..7, 0.0), (0..2, 0.5)]), [(0, 2, 0.5), (2, 5, -1.0), (5, 7, 0.0), (7, 9, -1.0)]);
        assert_eq!(cut(9, &[(4..9, 0.0), (0..4, 0.5)]), [(0, 4, 0.5), (4, 9, 0.0)]);
        // Neighbours with one number are one piece; empty ranges are none.
        assert_eq!(cut(9, &[(4..9, 0.5), (0..4, 0.5), (3..3, 7.0)]), [(0, 9, 0.5)]);
        assert_eq!(cut(3, &[]), [(0, 3, -1.0)]);
        assert_eq!(cut(0, &[(0..0, 1.0)]), []);
    }
}
