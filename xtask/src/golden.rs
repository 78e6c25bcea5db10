//! `cargo xtask golden`: the files of other people's values, and the list that says they are the ones that were reviewed.
//!
//! `golden/B3SUMS` has a BLAKE3 hash for every file, as `b3sum` writes and checks it. A value that somebody changed, a
//! file that nobody listed and one that is too large are faults; `cargo xtask tidy` looks for them, too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Subcommand;

/// The folder of golden files.
const FOLDER: &str = "golden";

/// The list of their hashes.
const LIST: &str = "B3SUMS";

/// What makes them.
const GENERATOR: &str = "golden/generate.py";

/// Bytes of a golden file; larger cases belong into the generator, not into the repository.
const LARGEST: usize = 256 * 1024;

/// What the generator ends with where a package is missing.
const PACKAGES_MISSING: i32 = 3;

/// Operations without a file, and why.
const WITHOUT: [(&str, &str); 1] = [("engram_hash", "the hash is this project's own")];

/// What to do with golden files.
#[derive(Subcommand)]
pub enum Task {
    /// Hold the files against their list, then the reference against the files.
    Check,
    /// Make the files anew with golden/generate.py and rewrite the list.
    Bless {
        /// The interpreter that has the packages of golden/requirements.txt.
        #[arg(long, default_value = "python3")]
        python: PathBuf,
        /// Operations; all that are described, without one.
        stems: Vec<String>,
    },
}

/// Runs a task; `gate` runs the gate binary with some arguments and gives what it prints.
pub fn run(root: &Path, task: &Task, gate: impl Fn(&[&str]) -> Result<String>) -> Result<()> {
    match task {
        Task::Check => check(root, gate),
        Task::Bless { python, stems } => bless(root, python, stems),
    }
}

fn check(root: &Path, gate: impl Fn(&[&str]) -> Result<String>) -> Result<()> {
    let found = faults(root)?;
    found.iter().for_each(|fault| eprintln!("golden: {fault}"));
    if !found.is_empty() {
        bail!("{} faults", found.len());
    }
    // A stem is green only if its gate says so: a file that no gate opened has shown nothing.
    let lines = gate(&["--only", "golden", "--backend", "cpu", "--tsv"])?;
    let stems = stems_with_file(root)?;
    let red = not_green(&stems, &lines);
    for stem in &red {
        println!("FAIL {stem}: {}", lines.lines().find(|line| of(line, stem)).unwrap_or("the gate did not run"));
    }
    if !red.is_empty() {
        bail!("{} operations are not equal to their golden files", red.len());
    }
    println!("golden: {} files as listed, and the reference equals them", stems.len());
    Ok(())
}

/// Whether a line of the gate's table is about an operation.
fn of(line: &str, stem: &str) -> bool {
    line.split('\t').next() == Some(stem)
}

/// The stems whose golden gate has no line that says PASS.
fn not_green<'a>(stems: &'a BTreeSet<String>, lines: &str) -> Vec<&'a str> {
    let green = |stem: &str| lines.lines().any(|line| of(line, stem) && line.split('\t').nth(5) == Some("PASS"));
    stems.iter().map(String::as_str).filter(|stem| !green(stem)).collect()
}

fn bless(root: &Path, python: &Path, stems: &[String]) -> Result<()> {
    let described = described(root)?;
    if let Some(unknown) = stems.iter().find(|stem| !described.contains(*stem)) {
        bail!("there is no operation `{unknown}`; there are {}", join(&described));
    }
    let chosen = if stems.is_empty() { described.iter().cloned().collect() } else { stems.to_vec() };
    let chosen: Vec<String> = chosen.into_iter().filter(|stem| reason_without(stem).is_none()).collect();
    let mut command = Command::new(python);
    command.current_dir(root).args([GENERATOR, FOLDER]).args(&chosen);
    let advice = "\n  python3 -m venv /tmp/golden && /tmp/golden/bin/pip install -r golden/requirements.txt\n  \
                  cargo xtask golden bless --python /tmp/golden/bin/python";
    let status = match command.status() {
        Ok(status) => status,
        Err(error) => {
            println!("NOTRUN golden bless: cannot run {}: {error}{advice}", python.display());
            bail!("nothing was written");
        }
    };
    if status.code() == Some(PACKAGES_MISSING) {
        println!("NOTRUN golden bless: {} has not all packages{advice}", python.display());
        bail!("nothing was written");
    }
    if !status.success() {
        bail!("{GENERATOR} ended with {status}");
    }
    let files = files(&root.join(FOLDER))?;
    let list: String = files.iter().map(|(name, bytes)| format!("{}  {name}\n", blake3::hash(bytes))).collect();
    std::fs::write(root.join(FOLDER).join(LIST), list)?;
    println!("golden: {FOLDER}/{LIST} lists {} files; look at what changed with git diff --stat", files.len());
    Ok(())
}

/// What is wrong with the files and their list.
pub fn faults(root: &Path) -> Result<Vec<String>> {
    let folder = root.join(FOLDER);
    let files = files(&folder)?;
    let path = folder.join(LIST);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut faults = against_list(&files, &text);
    for (name, bytes) in &files {
        faults.extend(file_faults(name, bytes));
    }
    let with = stems_with_file(root)?;
    let described = described(root)?;
    for stem in &described {
        match (with.contains(stem), reason_without(stem)) {
            (false, None) => faults.push(format!(
                "{stem} has no golden file: add it to {GENERATOR} and run `cargo xtask golden bless`, or say in \
                 xtask/src/golden.rs why it has none"
            )),
            (true, Some(reason)) => faults.push(format!("{stem} has a golden file, and a reason for none: {reason}")),
            _ => {}
        }
    }
    faults.extend(with.difference(&described).map(|stem| format!("{stem}.safetensors belongs to no operation")));
    Ok(faults)
}

fn reason_without(stem: &str) -> Option<&'static str> {
    WITHOUT.iter().find(|(name, _)| *name == stem).map(|(_, reason)| *reason)
}

/// Files that are not listed, or differ from what is, and lines without a file.
fn against_list(files: &BTreeMap<String, Vec<u8>>, text: &str) -> Vec<String> {
    let mut listed: BTreeMap<&str, &str> = BTreeMap::new();
    let mut faults = Vec::new();
    for line in text.lines() {
        match line.split_once("  ") {
            Some((hash, name)) => {
                listed.insert(name, hash);
            }
            None => faults.push(format!("{LIST}: `{line}` is not a hash and a name")),
        }
    }
    for (name, bytes) in files {
        match listed.remove(name.as_str()) {
            None => faults.push(format!("{name} is not listed in {LIST}")),
            Some(hash) if hash != blake3::hash(bytes).to_string() => {
                faults.push(format!("{name} is not the file that {LIST} lists"));
            }
            Some(_) => {}
        }
    }
    faults.extend(listed.keys().map(|name| format!("{LIST} lists {name}, which does not exist")));
    faults
}

/// What is wrong with one file: its size, and metadata that would leave a reader without an origin.
fn file_faults(name: &str, bytes: &[u8]) -> Vec<String> {
    let mut faults = Vec::new();
    if bytes.len() > LARGEST {
        faults.push(format!("{name}: {} bytes, a golden file may have {LARGEST}", bytes.len()));
    }
    let Some(header) = header(bytes) else {
        faults.push(format!("{name}: not a safetensors file"));
        return faults;
    };
    let metadata = &header["__metadata__"];
    let field = |key: &str| metadata[key].as_str().unwrap_or_default();
    for key in ["source", "version", "generator", "seed", "tol", "why"] {
        if field(key).is_empty() {
            faults.push(format!("{name}: metadata has no `{key}`"));
        }
    }
    if field("generator") != GENERATOR {
        faults.push(format!("{name}: made by `{}`, expected {GENERATOR}", field("generator")));
    }
    let tensors = header.as_object().into_iter().flat_map(serde_json::Map::keys).filter(|key| *key != "__metadata__");
    for case in tensors.filter_map(|tensor| tensor.split('/').next()).collect::<BTreeSet<_>>() {
        if field(&format!("config.{case}")).is_empty() {
            faults.push(format!("{name}: metadata has no `config.{case}`"));
        }
    }
    faults
}

/// The header of a safetensors file: eight bytes of length, then as many of JSON.
fn header(bytes: &[u8]) -> Option<serde_json::Value> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    serde_json::from_slice(rest.get(..length)?).ok()
}

/// The golden files by name.
fn files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let name = path.file_name().and_then(|n| n.to_str()).context("a golden file's name is not UTF-8")?;
            files.insert(name.to_owned(), std::fs::read(&path)?);
        }
    }
    Ok(files)
}

fn stems_with_file(root: &Path) -> Result<BTreeSet<String>> {
    Ok(files(&root.join(FOLDER))?.keys().map(|name| name.trim_end_matches(".safetensors").to_owned()).collect())
}

fn described(root: &Path) -> Result<BTreeSet<String>> {
    crate::tidy::stems_in(&root.join("harness/src/ops"), |text| text.contains("const STEM"))
}

fn join(stems: &BTreeSet<String>) -> String {
    stems.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(change: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
        let mut header = serde_json::json!({
            "__metadata__": {
                "source": "s", "version": "1", "generator": GENERATOR, "seed": "1", "tol": "1e-12", "why": "w",
                "config.plain": "b1-t1",
            },
            "plain/out/y": { "dtype": "F64", "shape": [1], "data_offsets": [0, 8] },
        });
        change(&mut header);
        let text = header.to_string();
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &1f64.to_le_bytes()].concat()
    }

    #[test]
    fn the_repository_s_files_are_those_of_the_list() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(faults(root).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_changed_an_unlisted_and_a_missing_file_are_faults() {
        let files = BTreeMap::from([("a.safetensors".to_owned(), file(|_| {}))]);
        let hash = blake3::hash(&files["a.safetensors"]);
        assert!(against_list(&files, &format!("{hash}  a.safetensors\n")).is_empty());
        let other = blake3::hash(b"other");
        assert_eq!(
            against_list(&files, &format!("{other}  a.safetensors\n")),
            ["a.safetensors is not the file that B3SUMS lists"]
        );
        assert_eq!(against_list(&files, ""), ["a.safetensors is not listed in B3SUMS"]);
        let missing = format!("{hash}  a.safetensors\n{other}  b.safetensors\n");
        assert_eq!(against_list(&files, &missing), ["B3SUMS lists b.safetensors, which does not exist"]);
        assert_eq!(against_list(&BTreeMap::new(), "nonsense"), ["B3SUMS: `nonsense` is not a hash and a name"]);
    }

    #[test]
    fn files_without_an_origin_and_files_that_are_too_large_are_faults() {
        assert!(file_faults("a", &file(|_| {})).is_empty());
        let without =
            |key: &str| file_faults("a", &file(|h| drop(h["__metadata__"].as_object_mut().unwrap().remove(key))));
        assert_eq!(without("why"), ["a: metadata has no `why`"]);
        assert_eq!(without("config.plain"), ["a: metadata has no `config.plain`"]);
        assert_eq!(file_faults("a", &file(|h| h["__metadata__"]["generator"] = "by hand".into())).len(), 1);
        assert_eq!(file_faults("a", b"short"), ["a: not a safetensors file"]);
        let mut large = file(|_| {});
        large.resize(LARGEST + 1, 0);
        assert_eq!(file_faults("a", &large), [format!("a: {} bytes, a golden file may have {LARGEST}", LARGEST + 1)]);
    }

    #[test]
    fn a_gate_that_did_not_pass_is_not_green() {
        let stems = ["a", "b", "c"].map(str::to_owned).into();
        let lines = "a\tgolden\treference\t2\t1e-3\tPASS\t\nb\tgolden\treference\t0\t0\tNOTRUN\tno file\n";
        assert_eq!(not_green(&stems, lines), ["b", "c"]);
    }
}
