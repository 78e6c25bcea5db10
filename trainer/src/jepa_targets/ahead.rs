//! The records of the next steps are read and checked while the current step runs.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use anyhow::{Context, ensure};

use super::{Header, Reader, Record, Result, check_length};

/// Records waiting at most. With the one that the worker has in hand two steps are read ahead: as many as a device may be
/// behind the host.
const DEPTH: usize = 1;

/// A [`Reader`] in a thread of its own, for steps that follow each other. Any other step starts the thread again there.
#[derive(Debug)]
pub struct Ahead {
    path: PathBuf,
    header: Header,
    /// The reader, while no worker has it.
    reader: Option<Reader>,
    worker: Option<Worker>,
    /// The latents of the last step that was read: 0 but in the rows of its masked positions.
    latents: Vec<f32>,
    /// Those positions.
    filled: Vec<bool>,
}

#[derive(Debug)]
struct Worker {
    /// The step whose record comes next.
    next: u64,
    records: Receiver<Result<Record>>,
    thread: JoinHandle<Reader>,
}

impl Worker {
    /// Reads records from `first` to the last of the file, or to the first that is not as it was written.
    fn start(mut reader: Reader, first: u64) -> std::io::Result<Worker> {
        let (sender, records) = sync_channel(DEPTH);
        let steps = first..reader.header.first_step.saturating_add(reader.header.steps);
        let work = move || {
            for step in steps {
                let record = reader.record(step);
                let failed = record.is_err();
                // A send fails only when the run has stopped asking.
                if sender.send(record).is_err() || failed {
                    break;
                }
            }
            reader
        };
        let thread = std::thread::Builder::new().name("targets".to_owned()).spawn(work)?;
        Ok(Worker { next: first, records, thread })
    }

    /// Ends the thread, unless it has panicked, with its reader.
    fn stop(self) -> Option<Reader> {
        // Without its receiver the thread's next send fails, so the join waits for one record at most: the first one with
        // all that lies before it in the file.
        drop(self.records);
        self.thread.join().ok()
    }
}

impl Ahead {
    /// Reads ahead of the first step that is asked for.
    pub fn new(reader: Reader) -> Ahead {
        let (path, header) = (reader.path.clone(), reader.header.clone());
        let (positions, width) = (header.positions(), header.width as usize);
        let (latents, filled) = (vec![0.0; positions * width], vec![false; positions]);
        Ahead { path, header, reader: Some(reader), worker: None, latents, filled }
    }

    /// What the file is for.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The latents of step `step` (`rows * len * width`): the masked positions' as written, 0 elsewhere.
    ///
    /// # Errors
    /// As [`Reader::read`], at the step that an error belongs to.
    pub fn read(&mut self, step: u64, mask: &[bool]) -> anyhow::Result<&[f32]> {
        check_length("mask", mask.len(), self.filled.len())?;
        self.header.require_step(step, &self.path)?;
        let record = self.record(step)?;
        record.check(mask, &self.path)?;
        let width = self.header.width as usize;
        // Most rows are 0 in every step, and clearing them all would take longer than the rest.
        let rows = self.latents.chunks_mut(width.max(1)).zip(&self.filled);
        rows.filter(|(_, filled)| **filled).for_each(|(row, _)| row.fill(0.0));
        record.spread(mask, width, &mut self.latents);
        self.filled.copy_from_slice(mask);
        Ok(&self.latents)
    }

    fn record(&mut self, step: u64) -> anyhow::Result<Record> {
        let mut worker = match self.worker.take() {
            Some(worker) if worker.next == step => worker,
            other => self.started(other, step)?,
        };
        match worker.records.recv() {
            Ok(Ok(record)) => {
                worker.next += 1;
                self.worker = Some(worker);
                Ok(record)
            }
            Ok(Err(error)) => {
                self.reader = worker.stop();
                Err(error.into())
            }
            Err(_) => anyhow::bail!("jepa-targets: the worker that reads ended early; this is a defect, report it"),
        }
    }

    /// A worker at `step`, with the reader of the last one.
    fn started(&mut self, last: Option<Worker>, step: u64) -> anyhow::Result<Worker> {
        let reader = match last.map_or_else(|| self.reader.take(), Worker::stop) {
            Some(reader) => reader,
            None => Reader::open(&self.path)?,
        };
        ensure!(reader.header == self.header, "jepa-targets: `{}` was replaced while it was read", self.path.display());
        Worker::start(reader, step).context("jepa-targets: cannot start the worker that reads")
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.worker.take().map(Worker::stop);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::jepa_targets::{TargetsError, Writer};

    const STEPS: u64 = 9;

    fn mask(step: u64) -> Vec<bool> {
        (0..8).map(|n| (n + step).is_multiple_of(3)).collect()
    }

    fn latents(step: u64) -> Vec<f32> {
        (0..24).map(|i| (100 * step + i) as f32).collect()
    }

    fn ahead(path: &Path) -> Ahead {
        let header = Header {
            teacher_step: 0,
            seed: 0,
            first_step: 5,
            steps: STEPS,
            rows: 2,
            len: 4,
            width: 3,
            data: [0; 32],
            source: [1; 32],
        };
        let mut writer = Writer::create(path, header).unwrap();
        for step in 5..5 + STEPS {
            writer.add(&mask(step), &latents(step)).unwrap();
        }
        writer.finish().unwrap();
        Ahead::new(Reader::open(path).unwrap())
    }

    fn check(ahead: &mut Ahead, step: u64) {
        let want: Vec<f32> =
            latents(step).iter().enumerate().map(|(i, &x)| if mask(step)[i / 3] { x } else { 0.0 }).collect();
        assert_eq!(ahead.read(step, &mask(step)).unwrap(), want, "step {step}");
    }

    fn error(ahead: &mut Ahead, step: u64, mask: &[bool]) -> TargetsError {
        ahead.read(step, mask).unwrap_err().downcast().unwrap()
    }

    #[test]
    fn steps_come_in_order_and_from_any_place_and_twice() {
        let folder = tempfile::tempdir().unwrap();
        let mut ahead = ahead(&folder.path().join("targets"));
        // A run, a step again, a run from further on to the end, the start again.
        for step in [5, 6, 7, 7, 10, 11, 12, 13, 5, 6, 13, 13] {
            check(&mut ahead, step);
        }
        assert!(matches!(error(&mut ahead, 14, &mask(14)), TargetsError::NoStep { step: 14, .. }));
        assert!(matches!(error(&mut ahead, 4, &mask(4)), TargetsError::NoStep { step: 4, .. }));
        check(&mut ahead, 8);
    }

    #[test]
    fn an_error_comes_at_its_step_and_not_when_it_is_met() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("targets");
        let mut ahead = ahead(&path);
        let mut bytes = std::fs::read(&path).unwrap();
        // The last byte is one of step 13; the length stays.
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        for step in 10..13 {
            check(&mut ahead, step);
        }
        for _ in 0..2 {
            let error = error(&mut ahead, 13, &mask(13));
            assert!(matches!(&error, TargetsError::Damaged { place, .. } if place == "step 13"), "{error}");
        }
        // Steps before it are still there, and a step of another mask is refused without harm.
        check(&mut ahead, 6);
        assert!(matches!(error(&mut ahead, 7, &mask(8)), TargetsError::Mask { step: 7, .. }));
        assert!(matches!(error(&mut ahead, 7, &mask(7)[1..]), TargetsError::Length { argument: "mask", .. }));
        check(&mut ahead, 7);
        check(&mut ahead, 8);
    }

    #[test]
    fn no_more_than_two_records_are_read_ahead_and_a_drop_does_not_wait_for_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("targets");
        let mut ahead = ahead(&path);
        check(&mut ahead, 5);
        // The worker is full: it has read steps 6 and 7 and gives its reader back there.
        let worker = ahead.worker.take().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(worker.stop().unwrap().next, 8);
        // The reader is gone with it, and the file is opened again.
        check(&mut ahead, 9);
        drop(ahead);
        // One that was never asked has no thread to end.
        drop(Ahead::new(Reader::open(&path).unwrap()));
    }
}
