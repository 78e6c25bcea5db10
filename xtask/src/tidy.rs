//! `cargo xtask tidy`: what the compiler does not check.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Lines beyond which a reader loses the way.
const LONGEST_FILE: usize = 900;

/// Words that mean unfinished or switched-off work.
const BANNED: [&str; 6] = ["todo!(", "unimplemented!(", "#[ignore", "should_panic", "dbg!(", "FIXME"];

/// Licences that a dependency may have; each may appear in an `OR` or `AND` expression.
const LICENCES: [&str; 14] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "0BSD",
    "MPL-2.0",
];

/// Runs every check and prints what is wrong.
pub fn check(root: &Path) -> Result<()> {
    let mut faults = Vec::new();
    let files = tracked(root)?;
    let sources: Vec<&Path> =
        files.iter().map(PathBuf::as_path).filter(|f| f.extension().is_some_and(|e| e == "rs")).collect();
    for file in &sources {
        source(root, file, &mut faults)?;
    }
    faults.extend(crate::cases::faults(root, &sources)?);
    faults.extend(crate::golden::faults(root)?.into_iter().map(|fault| format!("golden: {fault}")));
    stems(root, &mut faults)?;
    faults.extend(decisions(root)?);
    licences(root, &mut faults)?;
    for fault in &faults {
        eprintln!("tidy: {fault}");
    }
    if faults.is_empty() { Ok(()) } else { bail!("{} faults", faults.len()) }
}

pub fn tracked(root: &Path) -> Result<Vec<PathBuf>> {
    let out = Command::new("git").current_dir(root).args(["ls-files", "-z"]).output().context("cannot run git")?;
    let names = String::from_utf8(out.stdout).context("a file name is not UTF-8")?;
    // A file deleted in the work tree is still in the index.
    Ok(names.split('\0').filter(|n| !n.is_empty()).map(PathBuf::from).filter(|f| root.join(f).exists()).collect())
}

fn source(root: &Path, file: &Path, faults: &mut Vec<String>) -> Result<()> {
    let text = std::fs::read_to_string(root.join(file)).with_context(|| file.display().to_string())?;
    let mut fault = |line: usize, what: String| faults.push(format!("{}:{line}: {what}", file.display()));
    if !text.starts_with("//!") && !text.starts_with("/*!") {
        fault(1, "a file starts with its module documentation".to_owned());
    }
    let lines = text.lines().count();
    if lines > LONGEST_FILE {
        fault(lines, format!("{lines} lines, expected at most {LONGEST_FILE}; split by what a reader looks for"));
    }
    // This file spells the banned words.
    let names_them = file.ends_with("xtask/src/tidy.rs");
    for (number, line) in text.lines().enumerate() {
        if line.ends_with(' ') || line.ends_with('\t') {
            fault(number + 1, "trailing space".to_owned());
        }
        for word in BANNED.iter().filter(|word| !names_them && line.contains(**word)) {
            fault(number + 1, format!("`{word}` is unfinished or switched-off work"));
        }
    }
    Ok(())
}

/// The stem rule: an operation of the reference is described in the harness, and a description has its operation.
fn stems(root: &Path, faults: &mut Vec<String>) -> Result<()> {
    let operations =
        stems_in(&root.join("reference/src"), |text| text.contains(": Tensors {") && text.contains("pub trait "))?;
    let described = stems_in(&root.join("harness/src/ops"), |text| text.contains("const STEM"))?;
    for stem in operations.difference(&described) {
        faults.push(format!("reference/src/{stem}: no description at harness/src/ops/{stem}.rs"));
    }
    for stem in described.difference(&operations) {
        faults.push(format!("harness/src/ops/{stem}: no operation at reference/src/{stem}.rs"));
    }
    if operations.is_empty() {
        faults.push("reference/src: no operation was found, so the stem rule checks nothing".to_owned());
    }
    Ok(())
}

/// The table of decisions has every record, and every record of the table is there.
fn decisions(root: &Path) -> Result<Vec<String>> {
    const FOLDER: &str = "docs/adr";
    let folder = root.join(FOLDER);
    let table = std::fs::read_to_string(folder.join("README.md")).with_context(|| format!("{FOLDER}/README.md"))?;
    let is_record = |name: &str| {
        let number = name.as_bytes().first_chunk::<4>().is_some_and(|start| start.iter().all(u8::is_ascii_digit));
        number && name[4..].starts_with('-') && name.ends_with(".md")
    };
    let mut records = BTreeSet::new();
    for entry in std::fs::read_dir(&folder).context(FOLDER)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        records.extend(is_record(&name).then_some(name));
    }
    let links =
        table.lines().filter(|line| line.starts_with('|')).filter_map(|line| line.split_once("](")?.1.split_once(')'));
    let listed: BTreeSet<String> = links.map(|(name, _)| name.to_owned()).collect();
    let mut faults = Vec::new();
    for name in records.difference(&listed) {
        faults.push(format!("{FOLDER}/README.md: {name} is not in the table"));
    }
    for name in listed.difference(&records) {
        faults.push(format!("{FOLDER}/README.md: there is no record {name}"));
    }
    if records.is_empty() {
        faults.push(format!("{FOLDER}: no record was found, so the table is held against nothing"));
    }
    Ok(faults)
}

/// The files of a folder that hold an operation, without their endings.
pub fn stems_in(folder: &Path, is_one: impl Fn(&str) -> bool) -> Result<BTreeSet<String>> {
    let mut stems = BTreeSet::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let file = if path.is_dir() { path.join("mod.rs") } else { path.clone() };
        let Some(stem) = path.file_stem().and_then(|s| s.to_str()) else { continue };
        let is_source = file.extension().is_some_and(|e| e == "rs") && file.exists();
        if is_source
            && !["lib", "mod", "checked", "backend", "tensor"].contains(&stem)
            && is_one(&std::fs::read_to_string(&file)?)
        {
            stems.insert(stem.to_owned());
        }
    }
    Ok(stems)
}

/// Every dependency in the lock file has a licence that this project can ship with.
fn licences(root: &Path, faults: &mut Vec<String>) -> Result<()> {
    let out = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(root)
        .args(["metadata", "--format-version", "1", "--locked"])
        .output()
        .context("cannot run cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).context("cargo metadata is not JSON")?;
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        let (name, licence) = (package["name"].as_str().unwrap_or("?"), package["license"].as_str().unwrap_or(""));
        if !acceptable(licence) {
            faults.push(format!("dependency {name}: licence `{licence}` is not among those that tidy knows"));
        }
    }
    Ok(())
}

/// Whether some choice in an SPDX expression of `OR`, `AND` and `/` is acceptable.
fn acceptable(expression: &str) -> bool {
    let plain = expression.replace(['(', ')'], " ").replace('/', " OR ");
    // Good enough without a parser: `A AND (B OR C)` becomes `A AND B` or `C`, and every name must be known somewhere.
    let all_known = |part: &str| part.split(" AND ").all(|name| LICENCES.contains(&name.trim()));
    plain.split(" OR ").any(all_known)
}

#[cfg(test)]
mod tests {
    use super::{acceptable, decisions};

    #[test]
    fn a_record_and_the_table_of_records_name_each_other() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("docs/adr");
        std::fs::create_dir_all(&folder).unwrap();
        let table = |rows: &str| std::fs::write(folder.join("README.md"), format!("# Decisions\n\n{rows}")).unwrap();
        table("");
        assert_eq!(decisions(place.path()).unwrap().len(), 1, "an empty folder shows nothing");
        // Neither is a record.
        for name in ["0001-a.md", "0002-b.md", "notes.md", "0003.txt"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        table("| [0001](0001-a.md) | a |\n| [0002](0002-b.md) | b |\n");
        assert_eq!(decisions(place.path()).unwrap(), [""; 0]);
        table("| [0001](0001-a.md) | a, not [0002](0002-b.md) |\n| [0004](0004-d.md) | d |\n");
        let faults = decisions(place.path()).unwrap();
        let prefix = "docs/adr/README.md: ";
        assert_eq!(
            faults,
            [format!("{prefix}0002-b.md is not in the table"), format!("{prefix}there is no record 0004-d.md")]
        );
    }

    #[test]
    fn licence_expressions() {
        assert!(acceptable("MIT OR Apache-2.0"));
        assert!(acceptable("MIT/Apache-2.0"));
        assert!(acceptable("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(acceptable("GPL-3.0 OR MIT"));
        assert!(!acceptable("GPL-3.0"));
        assert!(!acceptable("MIT AND GPL-3.0"));
        assert!(!acceptable(""));
    }
}
