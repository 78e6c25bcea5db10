//! The run folder: everything one run leaves behind.
//!
//! `config.toml` (resolved), `run.json` (provenance, one entry a start), `data.json` (which bytes), `metrics.jsonl` (one line a
//! step, evaluation and drift check), `samples.jsonl`, `anchors.json`, `checkpoints/`; of a run that stopped being finite
//! `nonfinite_STEP/`; of one that a comparison made `log.txt` and `result.json`. README has the same table.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::config::{Config, ConfigError};
use crate::data::Manifest;
use crate::host;

/// A run folder that exists.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Locked while this process trains in the folder; the system unlocks it however the process ends.
    lock: Option<Arc<File>>,
}

impl RunFolder {
    /// Creates the folder of a new run, with its configuration, provenance and data manifest.
    ///
    /// # Errors
    /// A usage error if the folder exists: runs are never overwritten.
    pub fn create(
        runs: &Path,
        name: Option<&str>,
        config: &Config,
        data: &Manifest,
        provenance: &Value,
    ) -> anyhow::Result<RunFolder> {
        let default = || format!("{}-{}-{}", config.preset, host::now_compact(), &config.hash()[..6]);
        let name = name.map_or_else(default, str::to_owned);
        if name.is_empty() || name.contains('/') || name.starts_with('.') || name.contains(char::is_control) {
            bail!(ConfigError::Usage(format!(
                "train: --name `{name}` is no name for a folder; give one without `/` that does not begin with a dot"
            )));
        }
        let path = runs.join(name);
        if path.exists() {
            bail!(ConfigError::Usage(format!(
                "train: `{0}` exists and is not overwritten; give another --name, or continue it with --resume {0}",
                path.display()
            )));
        }
        std::fs::create_dir_all(&path).with_context(|| cannot_write(&path))?;
        let run = RunFolder { path, lock: None }.locked()?;
        run.describe(config, data, provenance)?;
        Ok(run)
    }

    /// Writes what makes a folder a run folder: configuration, data manifest and provenance.
    fn describe(&self, config: &Config, data: &Manifest, provenance: &Value) -> anyhow::Result<()> {
        self.write("config.toml", &config.to_toml())?;
        self.write("data.json", &pretty(data))?;
        self.write("run.json", &pretty(&vec![provenance]))
    }

    /// Makes the folder again if it went away while the run trains: a checkpoint outside a run folder cannot be resumed.
    /// Whether it had to.
    pub fn restore(&self, config: &Config, data: &Manifest, provenance: &Value) -> anyhow::Result<bool> {
        if self.path.join("config.toml").is_file() && self.path.join("data.json").is_file() {
            return Ok(false);
        }
        std::fs::create_dir_all(&self.path).with_context(|| cannot_write(&self.path))?;
        self.describe(config, data, provenance)?;
        Ok(true)
    }

    /// Opens the folder of a run.
    ///
    /// # Errors
    /// A usage error if it is not one.
    pub fn open(path: &Path) -> anyhow::Result<RunFolder> {
        if !path.join("config.toml").is_file() || !path.join("data.json").is_file() {
            bail!(ConfigError::Usage(format!(
                "`{}` is not a run folder: it has no config.toml and data.json; give the folder that train printed",
                path.display()
            )));
        }
        Ok(RunFolder { path: path.to_owned(), lock: None })
    }

    /// The folder, locked against another process that would train in it.
    ///
    /// # Errors
    /// A usage error if one does. A file system without locks is no error.
    pub fn locked(mut self) -> anyhow::Result<RunFolder> {
        let folder = File::open(&self.path).with_context(|| format!("run: cannot open `{}`", self.path.display()))?;
        if let Err(TryLockError::WouldBlock) = folder.try_lock() {
            bail!(ConfigError::Usage(format!(
                "train: another process trains in `{}`; stop it first, or start another run",
                self.path.display()
            )));
        }
        self.lock = Some(Arc::new(folder));
        Ok(self)
    }

    /// The run under `runs` that started last and has a checkpoint folder.
    pub fn newest(runs: &Path) -> Option<RunFolder> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(runs).ok()?.flatten() {
            let Ok(run) = RunFolder::open(&entry.path()) else { continue };
            let Ok(modified) = std::fs::metadata(run.checkpoints()).and_then(|metadata| metadata.modified()) else {
                continue;
            };
            // A copy or a restored backup has new file times, so what the run itself noted decides.
            found.push((run.last_start(), modified, entry.path()));
        }
        found.sort();
        found.pop().map(|(_, _, path)| RunFolder { path, lock: None })
    }

    /// When training last started here, as it was noted; empty if the note is gone.
    fn last_start(&self) -> String {
        self.starts().last().and_then(|start| start["started"].as_str()).unwrap_or_default().to_owned()
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of its checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The resolved configuration.
    pub fn config(&self) -> anyhow::Result<Config> {
        let path = self.path.join("config.toml");
        let text = std::fs::read_to_string(&path).with_context(|| format!("run: cannot read `{}`", path.display()))?;
        Ok(Config::from_toml(&text, &path)?)
    }

    /// Which bytes the run trains on.
    pub fn data_manifest(&self) -> anyhow::Result<Manifest> {
        let path = self.path.join("data.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("run: cannot read `{}`", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("run: `{}` is not a data manifest", path.display()))
    }

    /// Notes one more start of the run, and the configuration it goes on with.
    pub fn record_resume(&self, config: &Config, provenance: &Value) -> anyhow::Result<()> {
        let mut starts = self.starts();
        starts.push(provenance.clone());
        self.write("run.json", &pretty(&starts))?;
        self.write("config.toml", &config.to_toml())
    }

    /// Adds to the last start what computes it: the device, the arms, the algorithms of products.
    pub fn record_facts(&self, facts: &impl serde::Serialize) -> anyhow::Result<()> {
        let mut starts = self.starts();
        let facts = serde_json::to_value(facts).context("run: what computes a run is no JSON")?;
        match starts.last_mut() {
            Some(last) if last["run"] != facts => last["run"] = facts,
            _ => return Ok(()),
        }
        self.write("run.json", &pretty(&starts))
    }

    /// What run.json holds: an entry for every start.
    fn starts(&self) -> Vec<Value> {
        let stored = std::fs::read_to_string(self.path.join("run.json")).ok();
        stored.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// Writes a file of the run whole: a reader sees the old text or the new, never a part.
    pub fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path.join(name);
        let unfinished = self.path.join(format!("{name}.tmp"));
        let write = || {
            let mut file = File::create(&unfinished)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&unfinished, &path)
        };
        write().with_context(|| cannot_write(&path))
    }
}

/// Finds out whether a file can be written at the end of a long work, before it begins. Leaves no file that was not there.
///
/// # Errors
/// What opening it for writing says.
pub fn try_write(path: &Path) -> std::io::Result<()> {
    // A link to nothing is the user's, too.
    let existed = path.symlink_metadata().is_ok();
    OpenOptions::new().create(true).append(true).open(path)?;
    if existed { Ok(()) } else { std::fs::remove_file(path) }
}

fn cannot_write(path: &Path) -> String {
    format!(
        "run: cannot write `{}`; free some space, make the folder writable, or use another with --runs",
        path.display()
    )
}

fn pretty(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).expect("the value has string keys only")
}

/// A file of JSON lines that survives a full disk: a line is in it whole or not at all.
pub struct JsonLines {
    path: PathBuf,
    file: File,
    good_len: u64,
    lost: u64,
}

impl JsonLines {
    /// Opens the file for appending after its last line with `step` up to `done`: a resumed run writes the later ones again.
    pub fn open(path: &Path, done: u64) -> anyhow::Result<JsonLines> {
        let open = || -> std::io::Result<JsonLines> {
            let kept = std::fs::read(path).map_or(0, |bytes| kept_len(&bytes, done));
            let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
            file.set_len(kept)?;
            file.seek(SeekFrom::End(0))?;
            Ok(JsonLines { path: path.to_owned(), file, good_len: kept, lost: 0 })
        };
        open().with_context(|| cannot_write(path))
    }

    /// Appends a line. The first of a series of failures is returned as a warning; training goes on without the line.
    pub fn push(&mut self, value: &Value) -> Option<String> {
        let line = format!("{value}\n");
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => {
                self.good_len += line.len() as u64;
                let lost = std::mem::take(&mut self.lost);
                (lost > 0)
                    .then(|| format!("run: `{}` can be written again; {lost} lines are missing", self.path.display()))
            }
            Err(error) => {
                // What was written of the line goes again. If even that fails, so will the next line, and it tries again.
                let _ = self.file.set_len(self.good_len).and_then(|()| self.file.seek(SeekFrom::Start(self.good_len)));
                self.lost += 1;
                (self.lost == 1).then(|| {
                    format!("run: cannot write `{}`: {error}; training goes on without its lines", self.path.display())
                })
            }
        }
    }
}

/// Bytes of the leading lines that are whole and belong to step `done` or before.
fn kept_len(bytes: &[u8], done: u64) -> u64 {
    let mut kept = 0;
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let step = serde_json::from_slice::<Value>(line).ok().and_then(|value| value["step"].as_u64());
        match step {
            Some(step) if step <= done && line.ends_with(b"\n") => kept += line.len() as u64,
            _ => break,
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{JsonLines, RunFolder, try_write};
    use crate::config::preset;
    use crate::data::{Corpus, Manifest};
    use crate::exit::Exit;

    #[test]
    fn the_newest_run_is_the_one_that_started_last_whatever_its_file_times() {
        let folder = tempfile::tempdir().unwrap();
        let config = preset("tiny").unwrap();
        let manifest = Manifest::of(&Corpus::shipped(), None).unwrap();
        for (name, started) in [("late", "2026-11-29T10:00:00Z"), ("early", "2026-11-28T10:00:00Z")] {
            let provenance = json!({"started": started});
            let run = RunFolder::create(folder.path(), Some(name), &config, &manifest, &provenance).unwrap();
            std::fs::create_dir(run.checkpoints()).unwrap();
        }
        assert!(RunFolder::newest(folder.path()).unwrap().path().ends_with("late"));
        // A start of the other one, noted on resuming.
        let early = RunFolder::open(&folder.path().join("early")).unwrap();
        early.record_resume(&config, &json!({"started": "2026-11-30T10:00:00Z"})).unwrap();
        assert!(RunFolder::newest(folder.path()).unwrap().path().ends_with("early"));
    }

    #[test]
    fn a_run_is_never_overwritten_and_can_be_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let config = preset("tiny").unwrap();
        let manifest = Manifest::of(&Corpus::shipped(), None).unwrap();
        let create =
            |name: Option<&str>| RunFolder::create(folder.path(), name, &config, &manifest, &json!({"seed": 0}));
        let run = create(Some("a")).unwrap();
        assert_eq!(run.config().unwrap(), config);
        assert_eq!(run.data_manifest().unwrap().hash(), manifest.hash());
        let error = create(Some("a")).unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("--resume"), "{error}");
        for name in ["", "a/b", "..", ".hidden"] {
            assert_eq!(Exit::of(&create(Some(name)).unwrap_err()), Exit::Usage, "{name:?}");
        }
        // `run` holds the folder; another process, or another handle in this one, may read it and not train in it.
        let error = RunFolder::open(run.path()).unwrap().locked().unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("another process trains in"), "{error}");
        let unnamed = create(None).unwrap();
        assert!(unnamed.path().file_name().unwrap().to_str().unwrap().starts_with("tiny-20"));
        assert!(RunFolder::newest(folder.path()).is_none());
        std::fs::create_dir(run.checkpoints()).unwrap();
        assert_eq!(RunFolder::newest(folder.path()).unwrap().path(), run.path());
        assert_eq!(Exit::of(&RunFolder::open(folder.path()).unwrap_err()), Exit::Usage);
        assert!(!run.restore(&config, &manifest, &json!({"seed": 0})).unwrap());
        std::fs::remove_dir_all(run.path()).unwrap();
        assert!(run.restore(&config, &manifest, &json!({"seed": 0})).unwrap());
        assert_eq!(RunFolder::open(run.path()).unwrap().config().unwrap(), config);
        run.record_resume(&config, &json!({"seed": 1})).unwrap();
        let starts: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(run.path().join("run.json")).unwrap()).unwrap();
        assert_eq!(starts.len(), 2);
        // What computes a start is known a little later, and belongs to the last one.
        run.record_facts(&json!({"products": ["a"]})).unwrap();
        run.record_facts(&json!({"products": ["a", "b"]})).unwrap();
        let starts = run.starts();
        assert_eq!((starts.len(), &starts[0]["run"]), (2, &serde_json::Value::Null));
        assert_eq!(starts[1], json!({"seed": 1, "run": {"products": ["a", "b"]}}));
    }

    #[test]
    fn reopened_lines_end_at_the_checkpoint_and_a_torn_line_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, 0).unwrap();
        for step in 1..=5 {
            assert_eq!(lines.push(&json!({"step": step})), None);
        }
        let read = || std::fs::read_to_string(&path).unwrap();
        let mut lines = JsonLines::open(&path, 3).unwrap();
        assert_eq!(read(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        lines.push(&json!({"step": 4}));
        std::fs::write(&path, read() + "{\"step\":5").unwrap();
        JsonLines::open(&path, 9).unwrap().push(&json!({"step": 6}));
        assert_eq!(read(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n{\"step\":6}\n");
    }

    #[test]
    fn trying_to_write_leaves_everything_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        try_write(&path).unwrap();
        assert!(!path.exists());
        std::fs::write(&path, "words").unwrap();
        try_write(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"words");
        assert!(try_write(&folder.path().join("none/file")).is_err() && try_write(folder.path()).is_err());
    }

    #[test]
    fn lines_that_cannot_be_written_warn_once() {
        let mut lines = JsonLines {
            path: "/dev/full".into(),
            file: std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap(),
            good_len: 0,
            lost: 0,
        };
        assert!(lines.push(&json!({"step": 1})).unwrap().contains("/dev/full"));
        assert_eq!(lines.push(&json!({"step": 2})), None);
        assert_eq!(lines.lost, 2);
    }
}
