//! From bytes on a disk to the batch of a step.
//!
//! A corpus is one stream of bytes: a file, the files of a folder in sorted order, or the text compiled into the binary.
//! [`split`] holds some of its blocks out, `windows` says which bytes make row `r` of step `s`, and `prefetch` reads the
//! next batch while a step runs. A batch is a pure function of (corpus, configuration, seed, step).

mod corpus;
mod keys;
mod prefetch;
mod spans;
mod split;
mod windows;

pub use corpus::{Corpus, Manifest, ManifestFile, SHIPPED_TEXT_NAME};
pub use keys::{BatchKeys, KeyPlan, Keys, rows_of};
pub use prefetch::Prefetch;
pub use spans::{FIRST_START, MASKED_SHARE, SPAN_BYTES, span_mask, start_probability, step_mask};
pub use split::{Segment, block_len, held_out_blocks, split};
pub use windows::{EvalWindows, TrainWindows, Window, permute};

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use ndarray::{Array2, ArrayView2};

use crate::config::{Config, JepaMode, TrainConfig};

/// What is wrong with the data. Every one of these ends the process with exit code 4.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DataError {
    #[error("data: `{path}` does not exist; give --data, or --eval, a file or a folder of bytes")]
    Missing { path: PathBuf },
    #[error(
        "data: `{link}` is a link to `{target}`, which does not exist; put the file back, or remove the link or make it anew"
    )]
    Dangling { link: PathBuf, target: PathBuf },
    #[error("data: `{path}` has {bytes} bytes, expected at least {needed} ({why}); give more data or {fix}")]
    TooSmall { path: String, bytes: u64, needed: u64, why: String, fix: String },
    #[error("data: folder `{path}` holds no file with a byte in it; give a file or folder with data")]
    EmptyFolder { path: PathBuf },
    #[error("data: cannot read `{path}`: {cause}; make it readable for this user, or give other data")]
    Unreadable { path: PathBuf, cause: std::io::Error },
    #[error("data: `{path}` is neither a file nor a folder; give a file or a folder of bytes")]
    NotAFile { path: PathBuf },
    #[error(
        "data: `{path}` changed since the run began: expected {expected}, got {got}; restore it, or start a new run on the new data"
    )]
    Changed { path: String, expected: String, got: String },
    #[error(
        "data: `{path}` is in the training data (as `{train}`) and in the held-out data; give --eval a path that is not in --data"
    )]
    Overlap { path: String, train: String },
}

/// The rows of one step: each is `len + 1` consecutive bytes of the training split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Index of the step, counted from 0.
    pub step: u64,
    /// Rows, `b`.
    pub rows: usize,
    /// Predicted positions a row, `t`.
    pub len: usize,
    /// `[b, t+1]`, row after row.
    pub bytes: Vec<u8>,
    /// The n-gram keys of the bytes, where the data worker made them; whoever needs them and finds none makes them.
    pub keys: Option<BatchKeys>,
    /// `[b, t]`, true where the student does not see the byte; absent where the run has no student and teacher.
    /// The student's n-gram keys have symbol 256 there, the teacher's keys the bytes.
    pub mask: Option<Vec<bool>>,
}

impl Batch {
    fn grid(&self) -> ArrayView2<'_, u8> {
        ArrayView2::from_shape((self.rows, self.len + 1), &self.bytes).expect("a batch holds rows x (len + 1) bytes")
    }

    /// What the model reads: `[b, t]`, byte `p` of each row at position `p`.
    pub fn ids(&self) -> Array2<u8> {
        self.grid().slice(ndarray::s![.., ..self.len]).to_owned()
    }

    /// What the model predicts: `[b, t]`, byte `p + 1` of the same row at position `p`. There is no wrap.
    pub fn targets(&self) -> Array2<u8> {
        self.grid().slice(ndarray::s![.., 1..]).to_owned()
    }

    /// The batch with the keys of a plan. Keys that cannot be made are left to whoever needs them, who says why.
    #[must_use]
    pub fn with_keys(mut self, plan: Option<KeyPlan>) -> Batch {
        self.keys = plan.and_then(|plan| self.keys_of(plan).ok());
        self
    }

    /// The keys of the batch's bytes.
    ///
    /// # Errors
    /// The plan is for an objective, and the batch has no mask of its positions.
    pub fn keys_of(&self, plan: KeyPlan) -> anyhow::Result<BatchKeys> {
        let mask = match (plan.jepa, &self.mask) {
            (JepaMode::Off, _) => None,
            (_, Some(mask)) => Some(ArrayView2::from_shape((self.rows, self.len), mask)?),
            (mode, None) => {
                anyhow::bail!("step {}: the batch has no mask, and jepa.mode is {}", self.step, mode.word())
            }
        };
        Ok(plan.keys(self.ids().view(), mask))
    }
}

/// The corpus of a run, its two splits, and the windows drawn from them.
pub struct Data {
    /// The training bytes (and, unless `--eval` was given, the held-out ones).
    pub corpus: Arc<Corpus>,
    /// The held-out bytes of `--eval`.
    pub eval_corpus: Option<Arc<Corpus>>,
    /// What the run trains on.
    pub train: TrainWindows,
    /// What it is scored on.
    pub eval: EvalWindows,
    /// Identity of all the bytes above; stored with the run.
    pub manifest: Manifest,
}

impl Data {
    /// Opens the corpus (and the held-out corpus) a configuration names, hashes it and lays out its windows.
    ///
    /// # Errors
    /// [`DataError`] if a path is missing, unreadable, too small for one window in each split, or in both splits.
    pub fn open(config: &Config) -> Result<Data, DataError> {
        let corpus = match &config.data.path {
            Some(path) => Corpus::open(path)?,
            None => Corpus::shipped(),
        };
        let eval_corpus = config.data.eval_path.as_deref().map(Corpus::open).transpose()?;
        Data::new(config, corpus, eval_corpus)
    }

    /// [`Data::open`] over corpora that are open already.
    pub fn new(config: &Config, corpus: Corpus, eval_corpus: Option<Corpus>) -> Result<Data, DataError> {
        let manifest = Manifest::of(&corpus, eval_corpus.as_ref())?;
        manifest.check_overlap()?;
        let (train_segments, eval_segments) = match &eval_corpus {
            Some(eval) => (vec![Segment { start: 0, end: corpus.len() }], vec![Segment { start: 0, end: eval.len() }]),
            None => split(corpus.len()),
        };
        let train =
            TrainWindows::new(train_segments, config.data.seq_bytes as u64, config.seed).with_masks(config.jepa.on());
        if train.windows_per_epoch() == 0 {
            return Err(DataError::TooSmall {
                path: corpus.name(),
                bytes: corpus.len(),
                needed: enough(config, corpus.len(), eval_corpus.is_some(), config.data.seq_bytes),
                why: format!("one training window of {} + 1 bytes outside the held-out blocks", config.data.seq_bytes),
                fix: "a smaller data.seq_bytes".into(),
            });
        }
        let eval = EvalWindows::new(&eval_segments, config.data.eval_bytes as u64, config.data.eval_windows);
        if eval.windows().is_empty() {
            let source = eval_corpus.as_ref().unwrap_or(&corpus);
            return Err(DataError::TooSmall {
                path: source.name(),
                bytes: source.len(),
                needed: enough(config, source.len(), eval_corpus.is_some(), config.data.eval_bytes),
                why: format!("one held-out window of {} + 1 bytes inside one held-out block", config.data.eval_bytes),
                fix: "a smaller data.eval_bytes".into(),
            });
        }
        Ok(Data { corpus: Arc::new(corpus), eval_corpus: eval_corpus.map(Arc::new), train, eval, manifest })
    }

    /// The batch of step `step`: a pure function of the corpus, the seed and the step.
    pub fn batch(&self, step: u64, rows: usize) -> Result<Batch, DataError> {
        read_batch(&self.corpus, &self.train, step, rows)
    }

    /// Starts the workers that read a run's batches of `steps`.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn prefetch(&self, config: &Config, steps: Range<u64>) -> anyhow::Result<Prefetch> {
        let (corpus, train) = (self.corpus.clone(), self.train.clone());
        let (rows, one_batch) = (config.train.batch_rows, config.train.overfit_one_batch);
        let started = Prefetch::start(corpus, train, rows, steps, one_batch, KeyPlan::of(config));
        started.context("data: cannot start the batch workers")
    }

    /// The batch that a run trains on in step `step`: with `train.overfit_one_batch` the bytes of the first.
    pub fn training_batch(&self, train: &TrainConfig, step: u64) -> Result<Batch, DataError> {
        let source = if train.overfit_one_batch { 0 } else { step };
        Ok(Batch { step, ..self.batch(source, train.batch_rows)? })
    }

    /// Checks that no file was written to or replaced since the data was opened; no byte is read.
    ///
    /// # Errors
    /// As for [`Corpus::check_unchanged`].
    pub fn check_unchanged(&self) -> Result<(), DataError> {
        self.corpora().try_for_each(Corpus::check_unchanged)
    }

    /// The line about entries of folders that are not read, if there are any.
    pub fn left_out(&self) -> Option<String> {
        let entries: Vec<&PathBuf> = self.corpora().flat_map(Corpus::left_out).collect();
        let first = entries.first()?.display();
        let count = entries.len();
        Some(format!(
            "data: {count} entries are no files, or links to folders, and are left out; the first is `{first}`"
        ))
    }

    fn corpora(&self) -> impl Iterator<Item = &Corpus> {
        std::iter::once(&*self.corpus).chain(self.eval_corpus.as_deref())
    }

    /// The held-out windows, each `eval_bytes + 1` bytes, in the order they are always scored in.
    pub fn eval_windows(&self) -> Result<Vec<Vec<u8>>, DataError> {
        let corpus = self.eval_corpus.as_ref().unwrap_or(&self.corpus);
        self.eval.windows().iter().map(|window| corpus.read(window.start, window.len)).collect()
    }

    /// The bytes of the training split, segment by segment, at most `limit` of them; for the n-gram anchors.
    pub fn train_bytes(&self, limit: u64) -> Result<Vec<Vec<u8>>, DataError> {
        let mut left = limit;
        let mut segments = Vec::new();
        for segment in self.train.segments() {
            let take = segment.len().min(left);
            if take == 0 {
                break;
            }
            segments.push(self.corpus.read(segment.start, take as usize)?);
            left -= take;
        }
        Ok(segments)
    }
}

/// Bytes that would do where `len` were too few for a window of `window` predictions.
fn enough(config: &Config, len: u64, has_eval_corpus: bool, window: usize) -> u64 {
    if has_eval_corpus {
        return window as u64 + 1;
    }
    // Which blocks are held out depends on their number, so the answer is searched for and not computed.
    let fits = |len: &u64| {
        let (train, eval) = split(*len);
        let longest = |segments: &[Segment]| segments.iter().map(Segment::len).max().unwrap_or(0);
        longest(&train) > config.data.seq_bytes as u64 && longest(&eval) > config.data.eval_bytes as u64
    };
    let longest = config.data.seq_bytes.max(config.data.eval_bytes) as u64 + 1;
    let most = 64 * longest.next_multiple_of(4096);
    // Each length is a sixteenth above the one before: some seventy of them reach `most`, whatever the windows are.
    let lengths = std::iter::successors(Some(longest.max(len + 1)), |len| Some(len + len / 16 + 1));
    lengths.take_while(|len| *len < most).find(fits).unwrap_or(most)
}

/// Reads the rows of one step.
pub(crate) fn read_batch(corpus: &Corpus, train: &TrainWindows, step: u64, rows: usize) -> Result<Batch, DataError> {
    let len = train.len_bytes() as usize;
    let mut bytes = Vec::with_capacity(rows * (len + 1));
    for row in 0..rows as u64 {
        let window = train.row(step, row, rows as u64);
        bytes.extend(corpus.read(window.start, window.len)?);
    }
    Ok(Batch { step, rows, len, bytes, keys: None, mask: train.mask(step, rows) })
}

#[cfg(test)]
mod tests;
