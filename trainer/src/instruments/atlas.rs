//! The atlas: what every training step launched, stage by stage and kernel by kernel.
//!
//! A file starts with the run's configuration and arms, one `# key = value` a line, then has one row for each kernel of
//! each step:
//!
//! ```text
//! step stage op kernel launches nodes alloc_bytes syncs device_us
//! ```
//!
//! Stages are marked where the work is issued. A kernel of a replayed graph counts as a node, as often as the capture
//! launched it. `alloc_bytes` is the scratch that was laid out for a launch; under replay the same bytes are used again
//! and nothing is allocated. Uploads, downloads and waits are rows of their own with a count of `syncs`. `device_us` is
//! the time under `--timers`, and 0 without them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::Sites;
use crate::config::ConfigError;

/// The header of the rows.
const COLUMNS: &str = "step\tstage\top\tkernel\tlaunches\tnodes\talloc_bytes\tsyncs\tdevice_us";

/// The first steps of a process compile, lay out memory and capture; summaries leave them out.
pub const WARM_UP: u64 = 4;

/// The stages in which the host waits, by design: it brings a step's batch before the step and reads its records after. A
/// table in host memory takes the gradients of its rows in [`HOST_TABLE`], every `optimizer.host_adam_every_steps` steps.
const WAITS: [&str; 3] = ["data", "reads", HOST_TABLE];

/// The stage in which a table in host memory is moved.
pub const HOST_TABLE: &str = "host table";

/// An atlas that is being written.
pub struct Writer {
    path: PathBuf,
    out: BufWriter<File>,
    last: Sites,
}

impl Writer {
    /// Starts the file with what identifies the run.
    pub fn create(path: &Path, keys: &BTreeMap<String, String>, now: Sites) -> Result<Self> {
        let file = File::create_new(path).with_context(|| format!("atlas: cannot write `{}`", path.display()))?;
        let mut writer = Self { path: path.to_owned(), out: BufWriter::new(file), last: now };
        let mut text = String::new();
        for (key, value) in keys {
            text.push_str(&format!("# {key} = {}\n", value.replace(['\n', '\t'], " ")));
        }
        text.push_str(COLUMNS);
        text.push('\n');
        writer.write(&text)?;
        Ok(writer)
    }

    /// Forgets what happened since the last call: it belongs to no step.
    pub fn skip(&mut self, now: Sites) {
        self.last = now;
    }

    /// Writes the rows of a step: what was counted since the last call.
    ///
    /// # Errors
    /// The file cannot be written, which is a [`std::io::Error`]; the host waited in a stage where no wait belongs, which
    /// a step must not need.
    pub fn step(&mut self, step: u64, now: Sites) -> Result<()> {
        let mut text = String::new();
        for (&(stage, kernel), site) in &now {
            let before = self.last.get(&(stage, kernel)).copied().unwrap_or_default();
            let counts = [
                site.launches - before.launches,
                site.nodes - before.nodes,
                site.alloc_bytes - before.alloc_bytes,
                site.syncs - before.syncs,
            ];
            let device_us = (site.device_ns - before.device_ns) as f64 / 1e3;
            if counts.iter().any(|&count| count > 0) || device_us > 0.0 {
                let [launches, nodes, alloc_bytes, syncs] = counts;
                let op = operation(kernel);
                ensure!(
                    syncs == 0 || WAITS.contains(&stage),
                    "atlas: step {step}: the host waited {syncs} times for `{kernel}` in stage `{stage}`; waits belong \
                     to {}",
                    WAITS.join(" and ")
                );
                let stage = if stage.is_empty() { "none" } else { stage };
                text.push_str(&format!(
                    "{step}\t{stage}\t{op}\t{kernel}\t{launches}\t{nodes}\t{alloc_bytes}\t{syncs}\t{device_us:.1}\n"
                ));
            }
        }
        self.last = now;
        self.write(&text)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        written.with_context(|| format!("atlas: cannot write `{}`", self.path.display()))
    }
}

/// The operation that a kernel belongs to, by the kernel's name.
pub fn operation(kernel: &str) -> &str {
    kernel.split("::").next().unwrap_or(kernel)
}

/// Counts of one kernel in one stage, a step on the average.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    /// Launches one by one.
    pub launches: f64,
    /// Nodes of graphs.
    pub nodes: f64,
    /// Bytes of scratch.
    pub alloc_bytes: f64,
    /// Waits of the host.
    pub syncs: f64,
    /// Microseconds on the device.
    pub device_us: f64,
}

impl Mean {
    fn values(&self) -> [f64; 5] {
        [self.launches, self.nodes, self.alloc_bytes, self.syncs, self.device_us]
    }

    fn of(v: [f64; 5]) -> Self {
        Self { launches: v[0], nodes: v[1], alloc_bytes: v[2], syncs: v[3], device_us: v[4] }
    }

    fn minus(&self, other: &Self) -> Self {
        let (a, b) = (self.values(), other.values());
        Self::of(std::array::from_fn(|i| a[i] - b[i]))
    }

    fn plus(&self, other: &Self) -> Self {
        let (a, b) = (self.values(), other.values());
        Self::of(std::array::from_fn(|i| a[i] + b[i]))
    }

    /// Kernels run, one by one or as nodes.
    pub fn runs(&self) -> f64 {
        self.launches + self.nodes
    }
}

/// An atlas that was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Atlas {
    /// What identifies the run.
    pub keys: BTreeMap<String, String>,
    /// Warm steps that the means are over.
    pub steps: u64,
    /// Those of them that ran under timers, which the means of device times are over.
    pub timed: u64,
    /// By stage and kernel.
    pub means: BTreeMap<(String, String), Mean>,
}

impl Atlas {
    /// Reads a file; every line must be one that [`Writer`] writes.
    pub fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let problem =
                    format!("atlas: `{}` does not exist; give a file that `train --atlas` wrote", path.display());
                bail!(ConfigError::Usage(problem));
            }
            text => text.with_context(|| format!("atlas: cannot read `{}`", path.display()))?,
        };
        Self::parse(&text).with_context(|| format!("atlas: `{}`", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut atlas = Self::default();
        let mut rows: Vec<(u64, String, String, [f64; 5])> = Vec::new();
        let mut in_rows = false;
        for (number, line) in text.lines().enumerate() {
            let bad = |what: &str| format!("line {}: {what}: `{line}`", number + 1);
            if let Some(rest) = line.strip_prefix("# ").filter(|_| !in_rows) {
                let (key, value) = rest.split_once(" = ").with_context(|| bad("expected `# key = value`"))?;
                atlas.keys.insert(key.to_owned(), value.to_owned());
            } else if !in_rows {
                ensure!(line == COLUMNS, bad("expected the header of the columns"));
                in_rows = true;
            } else {
                let fields: Vec<&str> = line.split('\t').collect();
                ensure!(fields.len() == 9, bad("expected 9 columns"));
                let step = fields[0].parse().with_context(|| bad("the step is no number"))?;
                ensure!(fields[2] == operation(fields[3]), bad("the kernel is not of this operation"));
                let mut values = [0.0; 5];
                for (value, field) in values.iter_mut().zip(&fields[4..]) {
                    *value = field.parse().with_context(|| bad("a count is no number"))?;
                }
                rows.push((step, fields[1].to_owned(), fields[3].to_owned(), values));
            }
        }
        ensure!(in_rows, "it has no header");
        let steps: BTreeSet<u64> = rows.iter().map(|row| row.0).collect();
        let warm: BTreeSet<u64> = steps.into_iter().skip(WARM_UP as usize).collect();
        if warm.is_empty() {
            bail!("it has no warm step; the first {WARM_UP} are left out");
        }
        atlas.steps = warm.len() as u64;
        let timed = rows.iter().filter(|(step, .., values)| warm.contains(step) && values[4] > 0.0);
        atlas.timed = timed.map(|row| row.0).collect::<BTreeSet<u64>>().len() as u64;
        let (steps, timed) = (atlas.steps as f64, atlas.timed.max(1) as f64);
        for (_, stage, kernel, values) in rows.into_iter().filter(|row| warm.contains(&row.0)) {
            let mean = atlas.means.entry((stage, kernel)).or_default();
            let [launches, nodes, alloc_bytes, syncs, device_us] = values;
            let [launches, nodes, alloc_bytes, syncs] =
                [launches, nodes, alloc_bytes, syncs].map(|count| count / steps);
            *mean = mean.plus(&Mean { launches, nodes, alloc_bytes, syncs, device_us: device_us / timed });
        }
        Ok(atlas)
    }

    /// Everything together.
    pub fn total(&self) -> Mean {
        self.means.values().fold(Mean::default(), |sum, mean| sum.plus(mean))
    }

    /// The `n` kernels with the most device time, then the most runs; and the sum of all.
    pub fn top(&self, n: usize) -> String {
        let rows = self.means.iter().map(|(key, mean)| (key.clone(), *mean)).collect();
        let mut text = render(rows, n);
        let total = self.total();
        text.push_str(&line("all", "", "", &total));
        text.push_str(&format!("means over {} warm steps; device_us over {} under timers\n", self.steps, self.timed));
        text
    }

    /// This run minus another, kernel by kernel.
    ///
    /// # Errors
    /// The runs differ in a key that is not among `declared`; one of those is a key of neither.
    pub fn diff(&self, other: &Self, declared: &[String], n: usize) -> Result<String> {
        let keys: BTreeSet<&String> = self.keys.keys().chain(other.keys.keys()).collect();
        if let Some(unknown) = declared.iter().find(|key| !keys.contains(key)) {
            let problem = format!("atlas: --key {unknown}: neither file has such a key; the lines with `#` have all");
            bail!(ConfigError::Usage(problem));
        }
        let differing = keys.into_iter().filter(|key| self.keys.get(*key) != other.keys.get(*key));
        let undeclared: Vec<String> =
            differing.filter(|key| !declared.contains(key)).map(|key| format!("--key {key}")).collect();
        ensure!(
            undeclared.is_empty(),
            "atlas: the runs differ in more than was declared, so a difference has no one cause; if that is meant, add {}",
            undeclared.join(" ")
        );
        let mut rows = Vec::new();
        let both: BTreeSet<_> = self.means.keys().chain(other.means.keys()).collect();
        for key in both {
            let zero = Mean::default();
            let mean = self.means.get(key).unwrap_or(&zero).minus(other.means.get(key).unwrap_or(&zero));
            if mean != zero {
                rows.push((key.clone(), mean));
            }
        }
        let mut text = render(rows, n);
        text.push_str(&line("all", "", "", &self.total().minus(&other.total())));
        text.push_str(&format!("means over {} and {} warm steps\n", self.steps, other.steps));
        Ok(text)
    }
}

fn render(mut rows: Vec<((String, String), Mean)>, n: usize) -> String {
    // Largest first; the key breaks ties, since the rows came in its order and the sort is stable.
    rows.sort_by(|(_, a), (_, b)| {
        let by_time = b.device_us.abs().total_cmp(&a.device_us.abs());
        by_time.then(b.runs().abs().total_cmp(&a.runs().abs())).then(b.syncs.abs().total_cmp(&a.syncs.abs()))
    });
    let mut text = format!(
        "{:<18} {:<16} {:<32} {:>9} {:>9} {:>14} {:>7} {:>12}\n",
        "stage", "op", "kernel", "launches", "nodes", "alloc_bytes", "syncs", "device_us"
    );
    for ((stage, kernel), mean) in rows.iter().take(n) {
        text.push_str(&line(stage, operation(kernel), kernel, mean));
    }
    text
}

fn line(stage: &str, op: &str, kernel: &str, mean: &Mean) -> String {
    let [launches, nodes, alloc_bytes, syncs, device_us] = mean.values();
    format!(
        "{stage:<18} {op:<16} {kernel:<32} {launches:>9.1} {nodes:>9.1} {alloc_bytes:>14.0} {syncs:>7.1} {device_us:>12.1}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use dormouse_cuda::Site;

    use super::{Atlas, Sites, WARM_UP, Writer};
    use crate::exit::Exit;

    fn sites(launches: u64, nodes: u64) -> Sites {
        let kernel = Site { launches, nodes, alloc_bytes: 512 * (launches + nodes), ..Site::default() };
        BTreeMap::from([
            (("backward", "kda::grads"), kernel),
            (("data", "upload"), Site { syncs: launches + nodes, ..Site::default() }),
        ])
    }

    fn written(arm: &str, each: u64) -> Atlas {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tsv");
        let keys = BTreeMap::from([("arm.kda".to_owned(), arm.to_owned()), ("seed".to_owned(), "0".to_owned())]);
        let mut writer = Writer::create(&path, &keys, sites(3, 0)).unwrap();
        for step in 1..=WARM_UP + 2 {
            // What an evaluation did belongs to no step.
            writer.skip(sites(3 + 100 * step, each * (step - 1)));
            writer.step(step, sites(3 + 100 * step, each * step)).unwrap();
        }
        Atlas::read(&path).unwrap()
    }

    /// Timers run at log cadence: a step without them has no time, and does not make the others look faster.
    #[test]
    fn device_time_is_averaged_over_the_steps_that_were_timed() {
        let row = |step: u64, us: f64| format!("{step}\tbackward\tkda\tkda::grads\t2\t0\t0\t0\t{us:.1}\n");
        let rows: String = (1..=WARM_UP + 4).map(|step| row(step, if step % 2 == 0 { 30.0 } else { 0.0 })).collect();
        let atlas = Atlas::parse(&format!("{}\n{rows}", super::COLUMNS)).unwrap();
        assert_eq!((atlas.steps, atlas.timed), (4, 2));
        assert_eq!((atlas.total().device_us, atlas.total().launches), (30.0, 2.0));
    }

    #[test]
    fn a_step_has_what_was_counted_since_the_last_one() {
        let atlas = written("fused", 7);
        assert_eq!(atlas.steps, 2);
        let mean = atlas.means[&("backward".to_owned(), "kda::grads".to_owned())];
        assert_eq!((mean.launches, mean.nodes, mean.alloc_bytes, mean.syncs), (0.0, 7.0, 3584.0, 0.0));
        assert_eq!(atlas.total().syncs, 7.0);
        let top = atlas.top(1);
        assert_eq!(top.lines().count(), 4, "{top}");
        assert!(top.lines().nth(1).unwrap().contains("kda::grads"), "{top}");
    }

    #[test]
    fn a_wait_in_the_middle_of_a_step_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let wait = |stage| BTreeMap::from([((stage, "download"), Site { syncs: 1, ..Site::default() })]);
        let write = |stage| {
            let path = folder.path().join(stage);
            Writer::create(&path, &BTreeMap::new(), Sites::new()).unwrap().step(7, wait(stage))
        };
        write("data").unwrap();
        write("reads").unwrap();
        write(super::HOST_TABLE).unwrap();
        let error = write("backward").unwrap_err().to_string();
        assert!(error.contains("step 7") && error.contains("stage `backward`"), "{error}");
    }

    /// A run goes on without an atlas whose disk is full, and not with a step that waits: the two must be told apart.
    #[test]
    fn an_error_of_the_disk_is_one_and_a_wait_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tsv");
        let mut writer = Writer::create(&path, &BTreeMap::new(), Sites::new()).unwrap();
        let wait = BTreeMap::from([(("backward", "download"), Site { syncs: 1, ..Site::default() })]);
        assert!(!writer.step(1, wait).unwrap_err().is::<std::io::Error>());
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        writer.out = std::io::BufWriter::new(full);
        assert!(writer.step(2, sites(1, 0)).unwrap_err().is::<std::io::Error>());
        // One that is there is never written over.
        assert!(Writer::create(&path, &BTreeMap::new(), Sites::new()).is_err());
    }

    #[test]
    fn a_file_that_is_not_there_is_a_wrong_command_line() {
        let error = Atlas::read("none.tsv".as_ref()).unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage, "{error}");
    }

    #[test]
    fn a_difference_needs_its_cause_declared() {
        let (a, b) = (written("fused", 7), written("plain", 9));
        let error = a.diff(&b, &["seed".to_owned()], 10).unwrap_err().to_string();
        assert!(error.contains("--key arm.kda"), "{error}");
        let error = a.diff(&b, &["arm.kda".to_owned(), "arm.kdaa".to_owned()], 10).unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage, "{error}");
        assert!(error.to_string().contains("--key arm.kdaa"), "{error}");
        let table = a.diff(&b, &["arm.kda".to_owned()], 10).unwrap();
        assert!(table.lines().nth(1).unwrap().contains("-2.0"), "{table}");
        let same = a.diff(&a, &[], 10).unwrap();
        assert_eq!(same.lines().count(), 3, "{same}");
    }

    #[test]
    fn a_file_that_is_no_atlas_is_refused_with_its_line() {
        for (text, expected) in [
            ("", "no header"),
            ("# no\n", "line 1"),
            ("step\n", "line 1"),
            (&format!("{}\n1\tx\n", super::COLUMNS), "line 2: expected 9 columns"),
            (&format!("{}\n1\ta\tkda\tlinear::x\t1\t0\t0\t0\t0\n", super::COLUMNS), "not of this operation"),
            (&format!("{}\n1\ta\tkda\tkda::x\t1\t0\t0\t0\t0\n", super::COLUMNS), "no warm step"),
        ] {
            let error = format!("{:#}", Atlas::parse(text).unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
