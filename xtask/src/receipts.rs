//! `cargo xtask receipts`: which fused kernels have a receipt for the sources as they are.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use dormouse_receipts::{PRECISIONS, Receipt, Sources, Verdict, judge};

/// The GPU generation that receipts are kept for.
const TARGET: &str = "sm_90";

/// The folder of receipts.
const FOLDER: &str = "golden/receipts";

/// What to do with receipts.
#[derive(Subcommand)]
pub enum Task {
    /// List the receipts that are missing or stale; the trainer then takes the plain kernels.
    Check {
        /// Fail if there is one, as before a release.
        #[arg(long)]
        strict: bool,
    },
}

/// Runs a task.
pub fn run(root: &Path, task: &Task) -> Result<()> {
    match task {
        Task::Check { strict } => check(root, *strict),
    }
}

fn check(root: &Path, strict: bool) -> Result<()> {
    let files = read(&root.join(FOLDER))?;
    let sources = Sources::of(root);
    let stems = sources.stems()?;
    foreign(&files, &stems)?;
    let (mut valid, mut rest) = (0, 0);
    for stem in &stems {
        let fingerprint = sources.fingerprint(stem)?;
        let texts = || files.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let verdicts = PRECISIONS.map(|precision| judge(texts(), stem, precision, TARGET, Some(&fingerprint)));
        let with = |wanted: fn(&Verdict) -> bool| {
            let chosen = PRECISIONS.iter().zip(&verdicts).filter(|(_, verdict)| wanted(verdict));
            chosen.map(|(precision, _)| *precision).collect::<Vec<_>>().join(", ")
        };
        valid += verdicts.iter().filter(|verdict| verdict.is_valid()).count();
        let invalid: Vec<&Verdict> = verdicts.iter().filter(|verdict| !verdict.is_valid()).collect();
        rest += invalid.len();
        let missing = with(|verdict| matches!(verdict, Verdict::Missing { .. }));
        if !missing.is_empty() {
            println!("missing  {stem} {missing} on {TARGET}");
        }
        for stale in invalid.iter().filter(|verdict| matches!(verdict, Verdict::Stale { .. })) {
            println!("stale    {stale}");
        }
        if !invalid.is_empty() {
            println!("         renew: {}", dormouse_receipts::renew(stem));
        }
    }
    println!("receipts for {TARGET}: {valid} valid, {rest} missing or stale");
    if rest > 0 && strict {
        bail!("{rest} receipts are missing or stale");
    }
    if rest > 0 {
        println!("where a receipt is missing or stale, the trainer takes the plain kernels by default");
    }
    Ok(())
}

/// The receipts of a folder by file name.
fn read(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "toml") {
            let name = path.file_name().and_then(|n| n.to_str()).context("a receipt's name is not UTF-8")?;
            files.push((name.to_owned(), std::fs::read_to_string(&path)?));
        }
    }
    files.sort();
    Ok(files)
}

/// Refuses files that are receipts of nothing: another backend's, or of an operation that has no kernels.
fn foreign(files: &[(String, String)], stems: &[String]) -> Result<()> {
    for (name, text) in files {
        let receipt = Receipt::parse(name, text)?;
        if !stems.contains(&receipt.stem) {
            bail!("{FOLDER}/{name}: there are no kernels of `{}`; delete the file", receipt.stem);
        }
        if !receipt.target.starts_with("sm_") {
            bail!("{FOLDER}/{name}: only a GPU's receipts belong here; delete the file");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sources that receipts rest on, copied, with a receipt of every operation for them as they are.
    fn copy_with_receipts() -> tempfile::TempDir {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = tempfile::tempdir().unwrap();
        for input in dormouse_receipts::fingerprint::INPUTS {
            copy(&root.join(input), &folder.path().join(input));
        }
        let into = folder.path().join(FOLDER);
        std::fs::create_dir_all(&into).unwrap();
        let files = read(&root.join(FOLDER)).unwrap();
        let (name, text) = files.first().expect("the repository holds a receipt");
        let some = Receipt::parse(name, text).unwrap();
        let sources = Sources::of(folder.path());
        for stem in sources.stems().unwrap() {
            let fingerprint = sources.fingerprint(&stem).unwrap();
            for precision in PRECISIONS {
                let (stem, fingerprint) = (stem.clone(), fingerprint.clone());
                let target = TARGET.to_owned();
                Receipt { stem, precision: precision.to_owned(), target, fingerprint, ..some.clone() }
                    .write(&into)
                    .unwrap();
            }
        }
        folder
    }

    fn copy(from: &Path, to: &Path) {
        if from.is_file() {
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(from, to).unwrap();
            return;
        }
        for entry in std::fs::read_dir(from).unwrap() {
            let name = entry.unwrap().file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    }

    #[test]
    fn strict_turns_red_after_any_change_to_what_a_receipt_rests_on() {
        let folder = copy_with_receipts();
        let root = folder.path();
        check(root, true).unwrap();
        let source = |module: &str| {
            let file = format!("{module}.rs");
            if root.join(&file).is_file() { file } else { format!("{module}/mod.rs") }
        };
        let reference = source("reference/src/rms_norm");
        let changed = |(file, old, new): (&str, &str, &str)| {
            let path = root.join(file);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(old), "{file} has no `{old}`");
            std::fs::write(&path, text.replacen(old, new, 1)).unwrap();
            let strict = check(root, true);
            // Without the word it is told and is no failure.
            check(root, false).unwrap();
            std::fs::write(&path, text).unwrap();
            strict.map_err(|error| error.to_string())
        };
        let all = 3 * Sources::of(root).stems().unwrap().len();
        for (change, least) in [
            (("cuda/src/rms_norm/fused.rs", "1.0f32 / (mean + guard)", "1.01f32 / (mean + guard)"), 3),
            (("harness/src/tolerance.rs", "Tolerance::new(2e-6", "Tolerance::new(3e-6"), all),
            (("harness/src/ops/rms_norm.rs", "case(2, 5, 8, 1e-3", "case(2, 5, 9, 1e-3"), 3),
            ((reference.as_str(), "(mean_square + eps)", "(mean_square - eps)"), 3),
        ] {
            let error = changed(change).expect_err(change.0);
            let (count, words) = error.split_once(' ').unwrap();
            assert_eq!(words, "receipts are missing or stale");
            assert!(count.parse::<usize>().unwrap() >= least, "{}: {error}", change.0);
        }
        changed(("cuda/src/rms_norm/fused.rs", "let scale =", "// A comment.\n let scale =")).unwrap();
        check(root, true).unwrap();
        std::fs::remove_file(root.join(FOLDER).join(dormouse_receipts::file_name("kda", "bf16", TARGET))).unwrap();
        assert_eq!(check(root, true).unwrap_err().to_string(), "1 receipts are missing or stale");
    }

    #[test]
    fn the_repository_holds_receipts_only_of_its_own_kernels() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        check(root, false).unwrap();
        let files = [("rms_norm.f32.lavapipe.toml".to_owned(), String::new())];
        assert!(foreign(&files, &["rms_norm".to_owned()]).is_err());
    }
}
