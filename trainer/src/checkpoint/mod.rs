//! Checkpoints: a stop at any instant costs at most the steps since the last one.
//!
//! A checkpoint is a folder `step_000200` with `weights.safetensors`, `optimizer.safetensors`, `config.toml`,
//! `manifest.json`, where a teacher follows the model `teacher.safetensors`, and with a memory on the host `engram.table`,
//! which carries the step it belongs to. It is written as `step_000200.tmp`, the manifest last, every file and the folder
//! synced, then renamed, then the parent is synced; so a folder without `.tmp` is complete unless the disk lost bytes, and
//! sizes and checksums in the manifest, its own among them, say whether it did. [`newest_good`] believes nothing else.

mod disk;
mod state;
mod store;

pub use disk::free_bytes;
pub use state::{State, Tensor, TensorData};
pub use store::{Found, any, best_good, list, newest_good, retain};

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::backend;
use crate::host_table::{HostTable, HostTableError};

/// Version of the folder's layout. Manifests of format 1 had no checksum of their own.
pub const FORMAT: u32 = 2;

/// What a manifest's last line begins with; the CRC-32C of every byte before it follows.
const SEAL: &str = ",\n  \"crc32c\": ";

const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Only where there is a teacher; the manifest says so.
const TEACHER: &str = "teacher.safetensors";
const CONFIG: &str = "config.toml";
/// The n-gram table of a run that has it in host memory.
const TABLE: &str = "engram.table";
const MANIFEST: &str = "manifest.json";
/// The batch of a bundle, and what is known about it.
const BUNDLE: [&str; 2] = [BATCH, "nonfinite.json"];
/// The batch's file.
pub const BATCH: &str = "batch.bin";

/// What went wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckpointError {
    #[error("checkpoint: cannot {operation} `{path}`: {cause}; {fix}")]
    Io { operation: &'static str, path: PathBuf, cause: std::io::Error, fix: &'static str },
    #[error(
        "checkpoint: `{path}` needs {needed} bytes, {free} are free; free some space, or lower checkpoint.keep_last"
    )]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error("checkpoint: `{path}` is damaged: {problem}")]
    Damaged { path: PathBuf, problem: String },
    #[error("checkpoint: `{path}` has format {got}, expected {FORMAT}; use the version of dormouse that wrote it")]
    Format { path: PathBuf, got: u32 },
    #[error(transparent)]
    Table(HostTableError),
    #[error("checkpoint: no good checkpoint in `{path}`{skipped}; start a new run")]
    NoneGood { path: PathBuf, skipped: String },
}

/// What a checkpoint says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The first step that is not in the weights; equally, the number of steps done.
    pub next_step: u64,
    /// Steps whose update was applied.
    pub updates: u64,
    /// Rows of the training order that were consumed.
    pub rows_consumed: u64,
    /// Held-out bits per byte at this step, if it was evaluated.
    pub eval_bpb: Option<f64>,
    /// Hash of the configuration.
    pub config_hash: String,
    /// Hash of the data manifest.
    pub data_hash: String,
    /// Which program wrote it, and where.
    pub provenance: serde_json::Value,
    /// What computed it; absent in checkpoints from before there was a choice.
    #[serde(default)]
    pub run: Option<backend::Facts>,
    /// The other files of the folder.
    pub files: BTreeMap<String, FileEntry>,
}

/// Size and checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size.
    pub bytes: u64,
    /// CRC-32C of the contents; of a table, which ends in its own, that one.
    pub crc32c: u32,
}

/// What a checkpoint is made of, besides the state.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Steps done.
    pub next_step: u64,
    /// Rows of the training order that were consumed.
    pub rows_consumed: u64,
    /// Held-out bits per byte at this step.
    pub eval_bpb: Option<f64>,
    /// The resolved configuration, as TOML.
    pub config_toml: String,
    /// Hash of the configuration.
    pub config_hash: String,
    /// Hash of the data manifest.
    pub data_hash: String,
    /// Which program writes it, and where.
    pub provenance: serde_json::Value,
    /// What computed it.
    pub run: Option<backend::Facts>,
}

/// The name of the checkpoint after `step` steps.
pub fn folder_name(step: u64) -> String {
    format!("step_{step:06}")
}

/// Saves a checkpoint under `parent` and reads it back before saying so. Returns its folder.
///
/// Nothing that was there before is touched until the new folder is complete; a folder of the same step is then replaced.
///
/// # Errors
/// [`CheckpointError`] if space is short or a file cannot be written or read back; the unfinished folder is removed.
pub fn save(parent: &Path, state: &State, facts: &Facts) -> Result<PathBuf, CheckpointError> {
    disk::create_folder(parent)?;
    store::remove_unfinished(parent);
    let target = parent.join(folder_name(facts.next_step));
    let unfinished = parent.join(format!("{}.tmp", folder_name(facts.next_step)));
    let saved = write_folder(&unfinished, state, facts).and_then(|()| {
        let replaced = parent.join(format!("{}.old.tmp", folder_name(facts.next_step)));
        if target.exists() {
            disk::rename(&target, &replaced)?;
        }
        disk::rename(&unfinished, &target)?;
        disk::sync_folder(parent)?;
        // What is left of a failed removal is swept away by the next save.
        let _ = std::fs::remove_dir_all(&replaced);
        verify(&target).map(|_| target)
    });
    if saved.is_err() {
        let _ = std::fs::remove_dir_all(&unfinished);
    }
    saved
}

/// Writes the bundle of a run that stopped being finite: the files of a checkpoint, the batch, and what is known about it.
/// The folder has its name only when it is complete; one of an earlier try is replaced.
///
/// # Errors
/// As for [`save`].
pub fn write_bundle(
    folder: &Path,
    state: &State,
    facts: &Facts,
    batch: Vec<u8>,
    about: Vec<u8>,
) -> Result<(), CheckpointError> {
    let beside = |end: &str| {
        let mut name = folder.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let (unfinished, replaced) = (beside(".tmp"), beside(".old.tmp"));
    // What a killed try has left.
    let remove = |path: &Path| _ = std::fs::remove_dir_all(path);
    remove(&unfinished);
    remove(&replaced);
    let more = BUNDLE.into_iter().zip([batch, about]).collect();
    let written = write_files(&unfinished, state, facts, more).and_then(|()| {
        if folder.exists() {
            disk::rename(folder, &replaced)?;
        }
        disk::rename(&unfinished, folder)?;
        disk::sync_folder(folder.parent().unwrap_or(folder))
    });
    remove(if written.is_ok() { &replaced } else { &unfinished });
    written
}

/// Writes the files of a checkpoint into `folder`, the manifest last, all synced.
pub fn write_folder(folder: &Path, state: &State, facts: &Facts) -> Result<(), CheckpointError> {
    write_files(folder, state, facts, Vec::new())
}

fn write_files(
    folder: &Path,
    state: &State,
    facts: &Facts,
    more: Vec<(&'static str, Vec<u8>)>,
) -> Result<(), CheckpointError> {
    let mut files = vec![
        (WEIGHTS, state::to_safetensors(&state.weights)),
        (OPTIMIZER, state::to_safetensors(&state.optimizer)),
        (CONFIG, facts.config_toml.clone().into_bytes()),
    ];
    if !state.teacher.is_empty() {
        files.push((TEACHER, state::to_safetensors(&state.teacher)));
    }
    files.extend(more);
    let needed = files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    let needed = needed + state.table.as_ref().map_or(0, |table| table.file_bytes());
    disk::create_folder(folder)?;
    disk::check_space(folder, needed)?;
    let mut entries = BTreeMap::new();
    for (name, bytes) in files {
        disk::write_synced(&folder.join(name), &bytes)?;
        entries.insert(name.to_owned(), FileEntry { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(&bytes) });
    }
    if let Some(table) = &state.table {
        let path = folder.join(TABLE);
        table.save(&path, facts.next_step).map_err(table_error)?;
        entries.insert(TABLE.to_owned(), disk::sealed_entry(&path)?);
    }
    let manifest = Manifest {
        format: FORMAT,
        next_step: facts.next_step,
        updates: state.updates,
        rows_consumed: facts.rows_consumed,
        eval_bpb: facts.eval_bpb,
        config_hash: facts.config_hash.clone(),
        data_hash: facts.data_hash.clone(),
        provenance: facts.provenance.clone(),
        run: facts.run.clone(),
        files: entries,
    };
    disk::write_synced(&folder.join(MANIFEST), sealed(&manifest).as_bytes())?;
    disk::sync_folder(folder)
}

/// The text of a manifest, which ends in its own checksum: over bytes and not over fields, so that nothing in it can
/// change unseen.
pub(crate) fn sealed(manifest: &Manifest) -> String {
    let text = serde_json::to_string_pretty(manifest).expect("a manifest has string keys only");
    with_seal(text.strip_suffix("\n}").expect("an object on several lines"))
}

fn with_seal(body: &str) -> String {
    format!("{body}{SEAL}{}\n}}", crc32c::crc32c(body.as_bytes()))
}

/// What is wrong with the checksum of a manifest, if anything.
fn check_seal(text: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(text).map_err(|error| format!("{MANIFEST} is not UTF-8: {error}"))?;
    let Some((body, seal)) = text.rsplit_once(SEAL) else { return Err(format!("{MANIFEST} has no checksum")) };
    if with_seal(body) != text {
        let (got, expected) = (crc32c::crc32c(body.as_bytes()), seal.trim_end_matches(['\n', '}']));
        return Err(format!("{MANIFEST} was changed: it has CRC-32C {got}, expected {expected}"));
    }
    Ok(())
}

/// Reads and checks the manifest alone.
pub fn read_manifest(folder: &Path) -> Result<Manifest, CheckpointError> {
    let text = disk::read(&folder.join(MANIFEST))?;
    let damaged = |problem: String| CheckpointError::Damaged { path: folder.to_owned(), problem };
    let mut value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| damaged(format!("{MANIFEST} is not JSON: {error}")))?;
    // The version is read first, so that a newer layout is called newer and not damaged.
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => {
            return Err(CheckpointError::Format {
                path: folder.to_owned(),
                got: format.try_into().unwrap_or(u32::MAX),
            });
        }
        None => return Err(damaged(format!("{MANIFEST} has no format"))),
    }
    check_seal(&text).map_err(damaged)?;
    if let Some(fields) = value.as_object_mut() {
        fields.remove("crc32c");
    }
    serde_json::from_value(value).map_err(|error| damaged(format!("{MANIFEST}: {error}")))
}

/// What is wrong with a file that should be as the manifest says, if anything.
fn difference(name: &str, got: &FileEntry, expected: &FileEntry) -> Result<(), String> {
    if got.bytes != expected.bytes {
        return Err(format!("{name} has {} bytes, expected {}", got.bytes, expected.bytes));
    }
    if got.crc32c != expected.crc32c {
        return Err(format!("{name} has CRC-32C {:08x}, expected {:08x}", got.crc32c, expected.crc32c));
    }
    Ok(())
}

/// Checks sizes and checksums of every file but the table's against the manifest and returns it with the files' bytes.
fn read_checked(folder: &Path) -> Result<(Manifest, BTreeMap<String, Vec<u8>>), CheckpointError> {
    let damaged = |problem: String| CheckpointError::Damaged { path: folder.to_owned(), problem };
    let manifest = read_manifest(folder)?;
    let mut contents = BTreeMap::new();
    let has = |name: &&str| manifest.files.contains_key(*name);
    // A teacher is not in every checkpoint, and a batch is in bundles alone.
    let others = [TEACHER].into_iter().chain(BUNDLE).filter(has);
    for name in [WEIGHTS, OPTIMIZER, CONFIG].into_iter().chain(others) {
        let entry = manifest.files.get(name).ok_or_else(|| damaged(format!("{MANIFEST} does not list {name}")))?;
        let path = folder.join(name);
        let bytes = disk::read(&path).map_err(|error| lost(folder, error))?;
        let got = FileEntry { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(&bytes) };
        difference(name, &got, entry).map_err(damaged)?;
        contents.insert(name.to_owned(), bytes);
    }
    Ok((manifest, contents))
}

/// A file that is gone is damage to its checkpoint; one that this user cannot read is none.
fn lost(folder: &Path, error: CheckpointError) -> CheckpointError {
    let gone = matches!(&error, CheckpointError::Io { cause, .. } if cause.kind() == ErrorKind::NotFound);
    match gone {
        true => CheckpointError::Damaged { path: folder.to_owned(), problem: error.to_string() },
        false => error,
    }
}

/// An error of a table's file as one of the checkpoint's.
fn table_error(error: HostTableError) -> CheckpointError {
    match error {
        HostTableError::Io { operation, path, cause } => disk::io_error(operation, &path, cause),
        other => CheckpointError::Table(other),
    }
}

/// Checks a checkpoint without keeping its tensors.
pub fn verify(folder: &Path) -> Result<Manifest, CheckpointError> {
    let damaged = |problem: String| CheckpointError::Damaged { path: folder.to_owned(), problem };
    let (manifest, _) = read_checked(folder)?;
    if let Some(entry) = manifest.files.get(TABLE) {
        let got = disk::sealed_entry(&folder.join(TABLE)).map_err(|error| lost(folder, error))?;
        difference(TABLE, &got, entry).map_err(damaged)?;
    }
    Ok(manifest)
}

/// A checkpoint, read and verified.
#[derive(Debug)]
pub struct Loaded {
    /// What it says about itself.
    pub manifest: Manifest,
    /// The tensors.
    pub state: State,
    /// The resolved configuration, as TOML.
    pub config_toml: String,
}

/// Loads a checkpoint; nothing is interpreted before every checksum holds. The table may be larger than all the rest, so
/// it is read once, and nothing of it is kept before its checksums hold.
pub fn load(folder: &Path) -> Result<Loaded, CheckpointError> {
    let damaged = |problem: String| CheckpointError::Damaged { path: folder.to_owned(), problem };
    let (manifest, contents) = read_checked(folder)?;
    // A folder under another name than its own would skip batches or repeat them.
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name.starts_with("step_") && name != folder_name(manifest.next_step) {
        return Err(damaged(format!("manifest.json says step {}", manifest.next_step)));
    }
    let tensors = |name: &str| match contents.get(name) {
        Some(bytes) => state::from_safetensors(bytes).map_err(|error| damaged(format!("{name}: {error}"))),
        None => Ok(BTreeMap::new()),
    };
    let (weights, optimizer, teacher) = (tensors(WEIGHTS)?, tensors(OPTIMIZER)?, tensors(TEACHER)?);
    let table = match manifest.files.get(TABLE) {
        Some(entry) => {
            let (table, got) = HostTable::open(&folder.join(TABLE), manifest.next_step).map_err(table_error)?;
            difference(TABLE, &got, entry).map_err(damaged)?;
            Some(Arc::new(table))
        }
        None => None,
    };
    let state = State { weights, optimizer, teacher, table, updates: manifest.updates };
    let config_toml = String::from_utf8(contents[CONFIG].clone()).map_err(|e| damaged(format!("{CONFIG}: {e}")))?;
    Ok(Loaded { manifest, state, config_toml })
}

#[cfg(test)]
mod tests;
