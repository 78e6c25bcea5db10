//! The next batches are read, hashed and sorted while the current step runs.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use super::{Batch, Corpus, DataError, KeyPlan, TrainWindows, read_batch};

/// Worker threads. A batch is a pure function of its step, so they take turns; one alone is slower than a fast GPU when
/// the batch has n-gram keys.
const WORKERS: usize = 3;

/// Batches waiting at most for each worker; a second would hide nothing that the other workers do not hide.
const DEPTH: usize = 1;

/// Threads that read the batches of `steps` in order.
pub struct Prefetch {
    /// The worker of every turn: what it sends, and the thread.
    workers: Vec<(Option<Receiver<Result<Batch, DataError>>>, Option<JoinHandle<()>>)>,
    turn: usize,
}

impl Prefetch {
    /// Starts the workers. With `one_batch` every step gets the bytes of step 0; with `keys` they hash and sort them.
    pub fn start(
        corpus: Arc<Corpus>,
        train: TrainWindows,
        rows: usize,
        steps: std::ops::Range<u64>,
        one_batch: bool,
        keys: Option<KeyPlan>,
    ) -> std::io::Result<Prefetch> {
        let mut workers = Vec::with_capacity(WORKERS);
        for turn in 0..WORKERS {
            let (sender, receiver) = sync_channel(DEPTH);
            let (corpus, train) = (corpus.clone(), train.clone());
            let steps = steps.clone().skip(turn).step_by(WORKERS);
            let work = move || {
                for step in steps {
                    let source = if one_batch { 0 } else { step };
                    let batch = read_batch(&corpus, &train, source, rows);
                    let batch = batch.map(|batch| Batch { step, ..batch }.with_keys(keys));
                    let failed = batch.is_err();
                    // A send fails only when the run has stopped asking.
                    if sender.send(batch).is_err() || failed {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name(format!("batches {turn}")).spawn(work)?;
            workers.push((Some(receiver), Some(thread)));
        }
        Ok(Prefetch { workers, turn: 0 })
    }

    /// The next batch.
    ///
    /// # Errors
    /// What the worker met while reading, or that it has no batch left to give.
    pub fn next_batch(&mut self) -> anyhow::Result<Batch> {
        let receiver = self.workers[self.turn].0.as_ref().expect("receivers live until drop");
        self.turn = (self.turn + 1) % WORKERS;
        match receiver.recv() {
            Ok(batch) => Ok(batch?),
            Err(_) => anyhow::bail!("data: the batch worker ended early; this is a defect, report it"),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // Without its receiver a worker's next send fails, so no join can wait for ever.
        for (receiver, _) in &mut self.workers {
            drop(receiver.take());
        }
        for (_, thread) in &mut self.workers {
            if let Some(thread) = thread.take() {
                // A panic in the worker was reported by the worker; there is nothing to add while dropping.
                let _ = thread.join();
            }
        }
    }
}
