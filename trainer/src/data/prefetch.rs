//! The next batch is read while the current step runs.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use super::{Batch, Corpus, DataError, KeyPlan, TrainWindows, read_batch};

/// Batches waiting at most; one would do, a second hides a slow read.
const DEPTH: usize = 2;

/// A worker thread that reads the batches of `steps` in order.
pub struct Prefetch {
    receiver: Option<Receiver<Result<Batch, DataError>>>,
    worker: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Starts the worker. With `one_batch` every step gets the bytes of step 0; with `keys` it hashes and sorts them.
    pub fn start(
        corpus: Arc<Corpus>,
        train: TrainWindows,
        rows: usize,
        steps: std::ops::Range<u64>,
        one_batch: bool,
        keys: Option<KeyPlan>,
    ) -> std::io::Result<Prefetch> {
        let (sender, receiver) = sync_channel(DEPTH);
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
        let worker = std::thread::Builder::new().name("batches".into()).spawn(work)?;
        Ok(Prefetch { receiver: Some(receiver), worker: Some(worker) })
    }

    /// The next batch.
    ///
    /// # Errors
    /// What the worker met while reading, or that it has no batch left to give.
    pub fn next_batch(&mut self) -> anyhow::Result<Batch> {
        let receiver = self.receiver.as_ref().expect("the receiver lives until drop");
        match receiver.recv() {
            Ok(batch) => Ok(batch?),
            Err(_) => anyhow::bail!("data: the batch worker ended early; this is a defect, report it"),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // Without its receiver the worker's next send fails, so the join cannot wait for ever.
        drop(self.receiver.take());
        if let Some(worker) = self.worker.take() {
            // A panic in the worker was reported by the worker; there is nothing to add while dropping.
            let _ = worker.join();
        }
    }
}
