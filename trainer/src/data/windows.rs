//! Which bytes make a row.

use rand::Rng;

use super::spans::step_mask;
use super::split::Segment;
use crate::rng::{Purpose, stream};

/// `len` bytes of a corpus from position `start`: one more than there are predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Position of the first byte.
    pub start: u64,
    /// Bytes.
    pub len: usize,
}

/// The training windows: `t + 1` bytes every `t` bytes of each segment, in another order every epoch.
///
/// Neighbouring windows share one byte, the last target of one and the first input of the next, so each byte of a segment but
/// its first is predicted once an epoch. Where a segment's length is no multiple of `t`, its last window is moved back to end
/// with the segment; only that window predicts bytes its neighbour predicts too, so no byte is left out.
#[derive(Clone, Debug)]
pub struct TrainWindows {
    segments: Vec<Segment>,
    /// `first[i]` windows lie in the segments before `i`; the last entry is the number of all windows.
    first: Vec<u64>,
    len: u64,
    seed: u64,
    masked: bool,
}

impl TrainWindows {
    /// Lays windows of `len` predictions over the segments. Segments of `len` bytes or fewer hold none.
    pub fn new(segments: Vec<Segment>, len: u64, seed: u64) -> TrainWindows {
        let mut first = vec![0];
        let mut total = 0;
        for segment in &segments {
            total += windows_in(segment, len);
            first.push(total);
        }
        TrainWindows { segments, first, len, seed, masked: false }
    }

    /// The same windows, with spans that a student does not see.
    #[must_use]
    pub fn with_masks(self, masked: bool) -> TrainWindows {
        TrainWindows { masked, ..self }
    }

    /// True where a position of step `step` is masked, `rows * t` of them; nothing where the windows have no masks.
    pub fn mask(&self, step: u64, rows: usize) -> Option<Vec<bool>> {
        self.masked.then(|| step_mask(self.seed, step, rows, self.len as usize))
    }

    /// Windows in an epoch.
    pub fn windows_per_epoch(&self) -> u64 {
        *self.first.last().expect("`first` always holds its leading zero")
    }

    /// Predictions a window, `t`.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// The segments of the training split.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Window `index` of the corpus, in corpus order.
    pub fn window(&self, index: u64) -> Window {
        let segment = self.first.partition_point(|&first| first <= index) - 1;
        let Segment { start, end } = self.segments[segment];
        let offset = (index - self.first[segment]) * self.len;
        Window { start: (start + offset).min(end - self.len - 1), len: self.len as usize + 1 }
    }

    /// Row `row` of step `step` when a step has `rows` rows: a pure function of the seed and its arguments.
    pub fn row(&self, step: u64, row: u64, rows: u64) -> Window {
        let n = self.windows_per_epoch();
        let position = step * rows + row;
        self.window(permute(self.seed, position / n, position % n, n))
    }

    /// Epochs completed when `step` steps of `rows` rows are done.
    pub fn epochs(&self, step: u64, rows: u64) -> f64 {
        (step * rows) as f64 / self.windows_per_epoch() as f64
    }
}

fn windows_in(segment: &Segment, len: u64) -> u64 {
    if segment.len() <= len { 0 } else { (segment.len() - 1).div_ceil(len) }
}

/// Where the permutation of `0..n` keyed by (seed, epoch) sends `index`, in constant time.
///
/// A Feistel network over the smallest even number of bits that holds `n`, walked until it lands below `n`: a network is a
/// permutation of its whole domain, so the walk from a value below `n` returns below `n`, and no two walks meet. The domain is
/// less than four times `n`, so a walk takes under four rounds of it on average.
pub fn permute(seed: u64, epoch: u64, index: u64, n: u64) -> u64 {
    assert!(index < n, "index {index} of a permutation of {n}");
    let half_bits = (64 - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    let mut rng = stream(seed, Purpose::DataOrder, epoch, 0);
    let keys: [u64; 6] = std::array::from_fn(|_| rng.next_u64());
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half_bits, value & mask);
        for key in keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        value = (left << half_bits) | right;
        if value < n {
            return value;
        }
    }
}

/// The finaliser of the splitmix64 generator: every input bit changes about half of the output bits.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The held-out windows: fixed for a corpus and a configuration, the same at every evaluation.
#[derive(Clone, Debug)]
pub struct EvalWindows {
    windows: Vec<Window>,
}

impl EvalWindows {
    /// At most `count` windows of `len` predictions, spread evenly over all that fit into the segments without overlap.
    pub fn new(segments: &[Segment], len: u64, count: usize) -> EvalWindows {
        let mut all = Vec::new();
        for segment in segments {
            for i in 0..segment.len().saturating_sub(1) / len {
                all.push(Window { start: segment.start + i * len, len: len as usize + 1 });
            }
        }
        let count = count.min(all.len());
        let windows = (0..count).map(|i| all[i * all.len() / count]).collect();
        EvalWindows { windows }
    }

    /// The windows, in the order they are scored in.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// Positions that are scored: every one of every window.
    pub fn positions(&self) -> usize {
        self.windows.iter().map(|window| window.len - 1).sum()
    }
}
