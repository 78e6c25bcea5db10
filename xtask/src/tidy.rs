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
    use super::acceptable;

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
