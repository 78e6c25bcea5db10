//! Which bytes are held out.

/// A run of bytes `start..end` of a corpus that belong to one split. Windows never leave their segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position of the first byte.
    pub start: u64,
    /// Position after the last byte.
    pub end: u64,
}

impl Segment {
    /// Bytes in the segment.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// Bytes in a block of a corpus of `len` bytes: `len / 64`, at least 4 KiB, at most 64 KiB.
pub fn block_len(len: u64) -> u64 {
    (len / 64).clamp(4 << 10, 64 << 10)
}

/// The held-out blocks of `n`: the `ceil(n / 16)` whose index has the smallest BLAKE3, in rising order.
///
/// The hash is of the index as 8 little-endian bytes, so which blocks are held out depends on nothing but the corpus length.
pub fn held_out_blocks(n: u64) -> Vec<u64> {
    let mut order: Vec<([u8; 32], u64)> = (0..n).map(|i| (*blake3::hash(&i.to_le_bytes()).as_bytes(), i)).collect();
    order.sort_unstable();
    let mut held: Vec<u64> = order.iter().take(n.div_ceil(16) as usize).map(|&(_, i)| i).collect();
    held.sort_unstable();
    held
}

/// Splits a corpus of `len` bytes into (training segments, held-out segments). Neighbouring blocks of one split are one segment.
pub fn split(len: u64) -> (Vec<Segment>, Vec<Segment>) {
    let block = block_len(len);
    let n = len.div_ceil(block);
    let held = held_out_blocks(n);
    let (mut train, mut eval) = (Vec::new(), Vec::new());
    for index in 0..n {
        let segment = Segment { start: index * block, end: ((index + 1) * block).min(len) };
        let side = if held.binary_search(&index).is_ok() { &mut eval } else { &mut train };
        push_joined(side, segment);
    }
    (train, eval)
}

fn push_joined(segments: &mut Vec<Segment>, next: Segment) {
    match segments.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => segments.push(next),
    }
}
