//! The run folder: everything one run leaves behind.
//!
//! `config.toml` (resolved), `run.json` (provenance, one entry a start), `data.json` (which bytes), `metrics.jsonl` (one line a
//! step, evaluation and drift check), `samples.jsonl`, `anchors.json`, `checkpoints/`; of a run that stopped being finite
//! `nonfinite_STEP/`; of one that a comparison made `log.txt` and `result.json`. README has the same table.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::checkpoint;
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
        let made = std::fs::create_dir_all(runs).and_then(|()| std::fs::create_dir(&path));
        match made {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.symlink_metadata().is_ok() => {
                let shown = path.display();
                // A folder without a checkpoint cannot be resumed.
                let fix = if checkpoint::any(&path.join("checkpoints")) {
                    format!("give another --name, or continue it with --resume {shown}")
                } else {
                    "it has no checkpoint to go on from; give another --name, or remove it".to_owned()
                };
                bail!(ConfigError::Usage(format!("train: `{shown}` exists and is not overwritten; {fix}")));
            }
            made => made.with_context(|| cannot_write(&path))?,
        }
        let folder = path.clone();
        let described = RunFolder { path, lock: None }.locked().and_then(|run| {
            run.describe(config, data, provenance)?;
            Ok(run)
        });
        if described.is_err() {
            // Made a moment ago by this very call: what is left of a start that failed would only block the name.
            let _ = std::fs::remove_dir_all(&folder);
        }
        described
    }

    /// Writes what makes a folder a run folder: configuration, data manifest and provenance.
    fn describe(&self, config: &Config, data: &Manifest, provenance: &Value) -> anyhow::Result<()> {
        self.write("config.toml", &config.to_toml())?;
        self.write("data.json", &pretty(data))?;
        self.write("run.json", &pretty(&vec![provenance]))
    }

    /// Makes the folder again if it went away while the run trains: a checkpoint outside a run folder cannot be resumed.
    /// Whether it had to; the folder is then locked anew, since the old lock is on the one that is gone.
    pub fn restore(&mut self, config: &Config, data: &Manifest, provenance: &Value) -> anyhow::Result<bool> {
        if self.path.join("config.toml").is_file() && self.path.join("data.json").is_file() {
            return Ok(false);
        }
        std::fs::create_dir_all(&self.path).with_context(|| cannot_write(&self.path))?;
        // Given back first: if the folder itself is still there, its lock is ours.
        if self.lock.take().is_some() {
            *self = self.clone().locked()?;
        }
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

    /// The run under `runs` that started last and has a finished checkpoint; and those without one that started later.
    pub fn newest(runs: &Path) -> (Option<RunFolder>, Vec<PathBuf>) {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(runs).into_iter().flatten().flatten() {
            let Ok(run) = RunFolder::open(&entry.path()) else { continue };
            let folder = if run.checkpoints().is_dir() { run.checkpoints() } else { entry.path() };
            let Ok(modified) = std::fs::metadata(folder).and_then(|metadata| metadata.modified()) else { continue };
            // A copy or a restored backup has new file times, so what the run itself noted decides.
            found.push((run.last_start(), modified, entry.path()));
        }
        found.sort();
        let mut passed = Vec::new();
        while let Some((_, _, path)) = found.pop() {
            let run = RunFolder { path, lock: None };
            if checkpoint::any(&run.checkpoints()) {
                return (Some(run), passed);
            }
            passed.push(run.path);
        }
        (None, passed)
    }

    /// When training last started here, as it was noted; empty if the note is gone.
    fn last_start(&self) -> String {
        let starts = self.starts().unwrap_or_default();
        starts.last().and_then(|start| start["started"].as_str()).unwrap_or_default().to_owned()
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
        let mut starts = self.starts_or_aside()?;
        starts.push(provenance.clone());
        self.write("run.json", &pretty(&starts))?;
        self.write("config.toml", &config.to_toml())
    }

    /// Adds to the last start what computes it: the device, the arms, the algorithms of products.
    pub fn record_facts(&self, facts: &impl serde::Serialize) -> anyhow::Result<()> {
        let mut starts = self.starts_or_aside()?;
        let facts = serde_json::to_value(facts).context("run: what computes a run is no JSON")?;
        match starts.last_mut() {
            Some(last) if last["run"] != facts => last["run"] = facts,
            _ => return Ok(()),
        }
        self.write("run.json", &pretty(&starts))
    }

    /// What run.json holds: an entry for every start.
    ///
    /// # Errors
    /// The file is there and cannot be read as that.
    pub fn starts(&self) -> anyhow::Result<Vec<Value>> {
        RunFolder::starts_in(&self.path)
    }

    /// The same of a folder that need not be whole, or there.
    ///
    /// # Errors
    /// As for [`RunFolder::starts`].
    pub fn starts_in(folder: &Path) -> anyhow::Result<Vec<Value>> {
        let path = folder.join("run.json");
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            text => text.with_context(|| format!("run: cannot read `{}`", path.display()))?,
        };
        serde_json::from_str(&text).with_context(|| format!("run: `{}` is no list of starts", path.display()))
    }

    /// The same before the file is written again: one that cannot be read keeps its bytes under another name.
    fn starts_or_aside(&self) -> anyhow::Result<Vec<Value>> {
        let problem = match self.starts() {
            Ok(starts) => return Ok(starts),
            Err(problem) => problem,
        };
        let path = self.path.join("run.json");
        let aside =
            (1..).map(|n| self.path.join(if n == 1 { "run.json.bad".into() } else { format!("run.json.bad{n}") }));
        let aside = aside.into_iter().find(|aside| !aside.exists()).expect("one of endless names is free");
        std::fs::rename(&path, &aside).with_context(|| cannot_write(&path))?;
        // Standard error may be closed; a warning that cannot be shown must not end the run.
        let shown = aside.display();
        let _ = writeln!(std::io::stderr(), "warning: {problem:#}; it is kept as `{shown}`, and the list begins anew");
        Ok(Vec::new())
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
    /// What is wrong with a line that stays, if anything is.
    pub damage: Option<String>,
}

/// Which lines of a run's files a resumed run keeps.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Lines up to this step: the later ones are written again.
    pub done: u64,
    /// Not those of that step's evaluation, which is made again.
    pub score_again: bool,
}

impl Keep {
    /// Whether a line is written again.
    fn drops(self, line: &Value) -> bool {
        // The lines of samples.jsonl have no kind.
        let scored = line["kind"] == "eval" || line["kind"].is_null();
        line["step"].as_u64().is_some_and(|step| step > self.done || (step == self.done && self.score_again && scored))
    }
}

impl JsonLines {
    /// Opens the file for appending after the lines that stay. A line in the middle that is no JSON stays as it is: it is
    /// not known to be ours to remove.
    ///
    /// # Errors
    /// The file is there and cannot be read, or it cannot be written.
    pub fn open(path: &Path, keep: Keep) -> anyhow::Result<JsonLines> {
        let (kept, damaged) = kept(&read_lines(path)?, keep);
        let open = || -> std::io::Result<File> {
            let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
            file.set_len(kept)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().with_context(|| cannot_write(path))?;
        let damage = damaged.map(|line| format!("run: `{}` line {line} is no JSON and stays as it is", path.display()));
        Ok(JsonLines { path: path.to_owned(), file, good_len: kept, lost: 0, damage })
    }

    /// How many whole lines of a file, which need not be there, are as `wanted` says.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn count(path: &Path, wanted: impl Fn(&Value) -> bool) -> anyhow::Result<usize> {
        let bytes = read_lines(path)?;
        let lines = bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).filter(wanted).count())
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

/// The bytes of a file of lines; none if it is not there.
fn read_lines(path: &Path) -> anyhow::Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        bytes => {
            bytes.with_context(|| format!("run: cannot read `{}`; make it readable for this user", path.display()))
        }
    }
}

/// Bytes of the leading lines that stay, and the first of them that is no JSON, from 1. A last line without its end is what
/// a kill leaves, and goes.
fn kept(bytes: &[u8], keep: Keep) -> (u64, Option<usize>) {
    let (mut kept, mut damaged) = (0, None);
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        match serde_json::from_slice::<Value>(line) {
            Ok(value) if keep.drops(&value) => break,
            Ok(_) => {}
            Err(_) => damaged = damaged.or(Some(index + 1)),
        }
        kept += line.len() as u64;
    }
    (kept, damaged)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{JsonLines, Keep, RunFolder, try_write};
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
            std::fs::create_dir_all(run.checkpoints().join("step_000005")).unwrap();
        }
        let newest = || RunFolder::newest(folder.path());
        assert!(newest().0.unwrap().path().ends_with("late"));
        // A start of the other one, noted on resuming.
        let early = RunFolder::open(&folder.path().join("early")).unwrap();
        early.record_resume(&config, &json!({"started": "2026-11-30T10:00:00Z"})).unwrap();
        assert!(newest().0.unwrap().path().ends_with("early"));
        // Killed in its first save: nothing to go on from, so the one before it is taken, and the reader is told.
        let provenance = json!({"started": "2026-12-01T10:00:00Z"});
        let killed = RunFolder::create(folder.path(), Some("killed"), &config, &manifest, &provenance).unwrap();
        std::fs::create_dir_all(killed.checkpoints().join("step_000005.tmp")).unwrap();
        let (run, passed) = newest();
        assert!(run.unwrap().path().ends_with("early"));
        assert_eq!(passed, [killed.path().to_owned()]);
    }

    #[test]
    fn a_start_that_fails_leaves_no_folder_and_a_folder_without_a_checkpoint_is_not_to_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let config = preset("tiny").unwrap();
        let manifest = Manifest::of(&Corpus::shipped(), None).unwrap();
        let create = || RunFolder::create(folder.path(), Some("a"), &config, &manifest, &json!({"seed": 0}));
        let run = create().unwrap();
        let advice = create().unwrap_err().to_string();
        assert!(advice.contains("no checkpoint") && !advice.contains("--resume"), "{advice}");
        std::fs::create_dir_all(run.checkpoints().join("step_000005")).unwrap();
        let advice = create().unwrap_err().to_string();
        assert!(advice.contains("--resume"), "{advice}");
    }

    #[test]
    fn provenance_that_cannot_be_read_is_kept_aside() {
        let folder = tempfile::tempdir().unwrap();
        let config = preset("tiny").unwrap();
        let manifest = Manifest::of(&Corpus::shipped(), None).unwrap();
        let run = RunFolder::create(folder.path(), Some("a"), &config, &manifest, &json!({"seed": 0})).unwrap();
        let at = |name: &str| run.path().join(name);
        for bad in ["run.json.bad", "run.json.bad2"] {
            std::fs::write(at("run.json"), bad).unwrap();
            assert!(run.starts().is_err());
            run.record_resume(&config, &json!({"seed": 1})).unwrap();
            assert_eq!(run.starts().unwrap(), [json!({"seed": 1})]);
            assert_eq!(std::fs::read_to_string(at(bad)).unwrap(), bad);
        }
        std::fs::remove_file(at("run.json")).unwrap();
        assert!(run.starts().unwrap().is_empty());
    }

    #[test]
    fn a_run_is_never_overwritten_and_can_be_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let config = preset("tiny").unwrap();
        let manifest = Manifest::of(&Corpus::shipped(), None).unwrap();
        let create =
            |name: Option<&str>| RunFolder::create(folder.path(), name, &config, &manifest, &json!({"seed": 0}));
        let mut run = create(Some("a")).unwrap();
        assert_eq!(run.config().unwrap(), config);
        assert_eq!(run.data_manifest().unwrap().hash(), manifest.hash());
        let error = create(Some("a")).unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("another --name"), "{error}");
        for name in ["", "a/b", "..", ".hidden"] {
            assert_eq!(Exit::of(&create(Some(name)).unwrap_err()), Exit::Usage, "{name:?}");
        }
        // `run` holds the folder; another process, or another handle in this one, may read it and not train in it.
        let error = RunFolder::open(run.path()).unwrap().locked().unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("another process trains in"), "{error}");
        let unnamed = create(None).unwrap();
        assert!(unnamed.path().file_name().unwrap().to_str().unwrap().starts_with("tiny-20"));
        assert!(RunFolder::newest(folder.path()).0.is_none());
        std::fs::create_dir_all(run.checkpoints().join("step_000005")).unwrap();
        assert_eq!(RunFolder::newest(folder.path()).0.unwrap().path(), run.path());
        assert_eq!(Exit::of(&RunFolder::open(folder.path()).unwrap_err()), Exit::Usage);
        assert!(!run.restore(&config, &manifest, &json!({"seed": 0})).unwrap());
        std::fs::remove_dir_all(run.path()).unwrap();
        assert!(run.restore(&config, &manifest, &json!({"seed": 0})).unwrap());
        assert_eq!(RunFolder::open(run.path()).unwrap().config().unwrap(), config);
        // The lock is on the folder that is there now.
        assert!(RunFolder::open(run.path()).unwrap().locked().is_err());
        run.record_resume(&config, &json!({"seed": 1})).unwrap();
        let starts: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(run.path().join("run.json")).unwrap()).unwrap();
        assert_eq!(starts.len(), 2);
        // What computes a start is known a little later, and belongs to the last one.
        run.record_facts(&json!({"products": ["a"]})).unwrap();
        run.record_facts(&json!({"products": ["a", "b"]})).unwrap();
        let starts = run.starts().unwrap();
        assert_eq!((starts.len(), &starts[0]["run"]), (2, &serde_json::Value::Null));
        assert_eq!(starts[1], json!({"seed": 1, "run": {"products": ["a", "b"]}}));
    }

    #[test]
    fn reopened_lines_end_at_the_checkpoint_and_a_torn_line_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let open = |done| JsonLines::open(&path, Keep { done, score_again: false }).unwrap();
        let mut lines = open(0);
        for step in 1..=5 {
            assert_eq!(lines.push(&json!({"step": step})), None);
        }
        let read = || std::fs::read_to_string(&path).unwrap();
        let mut lines = open(3);
        assert_eq!(read(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        lines.push(&json!({"step": 4}));
        std::fs::write(&path, read() + "{\"step\":5").unwrap();
        open(9).push(&json!({"step": 6}));
        assert_eq!(read(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n{\"step\":6}\n");
    }

    #[test]
    fn a_damaged_line_takes_no_other_line_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let text = "{\"step\":1}\n{\"st\u{0}\n{\"step\":2}\n{\"step\":3}\n";
        std::fs::write(&path, text).unwrap();
        let lines = JsonLines::open(&path, Keep { done: 2, score_again: false }).unwrap();
        assert!(lines.damage.unwrap().contains("line 2 is no JSON"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), &text[..text.len() - 11]);
        // What is there and cannot be read is an error, and not an empty file.
        let unreadable = folder.path().join("folder");
        std::fs::create_dir(&unreadable).unwrap();
        let error = JsonLines::open(&unreadable, Keep { done: 2, score_again: false }).err().unwrap();
        assert!(format!("{error:#}").contains("cannot read"), "{error:#}");
    }

    #[test]
    fn an_evaluation_that_is_made_again_is_in_the_file_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let kept = "{\"kind\":\"eval\",\"step\":2}\n{\"kind\":\"step\",\"step\":4}\n";
        std::fs::write(&path, format!("{kept}{{\"kind\":\"eval\",\"step\":4}}\n")).unwrap();
        assert_eq!(JsonLines::count(&path, |line| line["kind"] == "eval" && line["step"] == 4).unwrap(), 1);
        JsonLines::open(&path, Keep { done: 4, score_again: true }).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), kept);
        assert_eq!(JsonLines::count(&folder.path().join("none"), |_| true).unwrap(), 0);
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
            damage: None,
        };
        assert!(lines.push(&json!({"step": 1})).unwrap().contains("/dev/full"));
        assert_eq!(lines.push(&json!({"step": 2})), None);
        assert_eq!(lines.lost, 2);
    }
}
