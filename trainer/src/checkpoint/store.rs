//! Which checkpoint to go on from, and which to keep.

use std::path::{Path, PathBuf};

use super::{CheckpointError, Manifest, disk, load, read_manifest};

/// The checkpoint to go on from.
#[derive(Debug)]
pub struct Found {
    /// Its folder.
    pub path: PathBuf,
    /// Its contents.
    pub loaded: super::Loaded,
    /// Newer ones that are damaged, and how.
    pub skipped: Vec<String>,
}

/// The newest checkpoint under `parent` whose every checksum holds.
///
/// # Errors
/// [`CheckpointError::NoneGood`] if there is none; it lists the damaged ones.
pub fn newest_good(parent: &Path) -> Result<Found, CheckpointError> {
    let mut skipped = Vec::new();
    for (_, path) in folders(parent)?.into_iter().rev() {
        match load(&path) {
            Ok(loaded) => return Ok(Found { path, loaded, skipped }),
            Err(error) => skipped.push(error.to_string()),
        }
    }
    let skipped = skipped.iter().map(|problem| format!("\n  {problem}")).collect();
    Err(CheckpointError::NoneGood { path: parent.to_owned(), skipped })
}

/// The good checkpoint under `parent` with the fewest held-out bits per byte; the newest one if none was scored.
pub fn best_good(parent: &Path) -> Result<Found, CheckpointError> {
    let mut scored: Vec<(f64, PathBuf)> = folders(parent)?
        .into_iter()
        .filter_map(|(_, path)| read_manifest(&path).ok()?.eval_bpb.map(|bpb| (bpb, path)))
        .collect();
    scored.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut skipped = Vec::new();
    for (_, path) in scored {
        match load(&path) {
            Ok(loaded) => return Ok(Found { path, loaded, skipped }),
            Err(error) => skipped.push(error.to_string()),
        }
    }
    newest_good(parent)
}

/// Every finished checkpoint under `parent`, oldest first, verified.
pub fn list(parent: &Path) -> Result<Vec<(PathBuf, Result<Manifest, CheckpointError>)>, CheckpointError> {
    let all = folders(parent)?;
    Ok(all.into_iter().map(|(_, path)| (path.clone(), super::verify(&path))).collect())
}

/// The finished checkpoint folders under `parent` with their steps, oldest first.
pub(super) fn folders(parent: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(disk::io_error("list", parent, error)),
    };
    for entry in entries {
        let path = entry.map_err(|error| disk::io_error("list", parent, error))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(step) = name.strip_prefix("step_").and_then(|digits| digits.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether there is a finished checkpoint under `parent`, good or not.
pub fn any(parent: &Path) -> bool {
    folders(parent).is_ok_and(|all| !all.is_empty())
}

/// Removes what a killed save left behind.
pub(super) fn remove_unfinished(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("step_") && name.ends_with(".tmp") {
            // Whatever cannot be removed is no checkpoint by its name, and the next save tries again.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Removes old checkpoints after `verified` was saved and read back; returns what was removed.
///
/// Kept are `verified` itself, the `keep_last` newest, those at multiples of `keep_every` (0: none), and the one with the fewest
/// held-out bits per byte. One whose manifest cannot be read is left alone: it may be evidence, and it is not ours to judge.
pub fn retain(
    parent: &Path,
    verified: u64,
    keep_last: usize,
    keep_every: u64,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let known: Vec<(u64, PathBuf, Manifest)> = folders(parent)?
        .into_iter()
        .filter_map(|(step, path)| read_manifest(&path).ok().map(|manifest| (step, path, manifest)))
        .collect();
    let best = known
        .iter()
        .filter_map(|(step, _, manifest)| manifest.eval_bpb.filter(|bpb| bpb.is_finite()).map(|bpb| (bpb, *step)))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, step)| step);
    let mut removed = Vec::new();
    for (age, (step, path, _)) in known.iter().rev().enumerate() {
        let keep = *step == verified
            || age < keep_last
            || (keep_every > 0 && step.is_multiple_of(keep_every))
            || best == Some(*step);
        if !keep {
            // Renamed first: a removal cut short must not leave half a checkpoint under a finished name.
            let doomed = path.with_extension("tmp");
            disk::rename(path, &doomed)?;
            std::fs::remove_dir_all(&doomed).map_err(|error| disk::io_error("remove", &doomed, error))?;
            removed.push(path.clone());
        }
    }
    Ok(removed)
}
