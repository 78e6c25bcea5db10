//! `cargo xtask bench`: gates, then criterion's benches, then a table of medians and ratios.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Runs the gates of a stem (of all without one) and its benches, and prints what criterion has found.
pub fn run(root: &Path, name: Option<&str>) -> Result<()> {
    crate::step("gate before bench");
    crate::gate(root, &name.into_iter().collect::<Vec<_>>())?;
    crate::step("bench");
    let start = SystemTime::now();
    let mut command = crate::cargo(root);
    // By name: `--benches` would run the tests of every library as well.
    command.args([
        "bench",
        "--workspace",
        "--bench",
        "operations",
        "--bench",
        "kda",
        "--bench",
        "step",
        "--",
        "--quiet",
    ]);
    // A group is a stem, so the slash ends its name.
    command.args(name.map(|name| format!("^{name}/")));
    crate::must(&mut command)?;
    let found = collect(&crate::target(root).join("criterion"), start)?;
    ensure!(!found.is_empty(), "no bench `{}`", name.unwrap_or_default());
    print!("{}", table(&found));
    Ok(())
}

/// One bench.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    /// Its group, which is a stem.
    group: String,
    /// Its name inside the group.
    name: String,
    /// Nanoseconds.
    median: f64,
    /// Relative change of the median since the run before, where there was one.
    change: Option<f64>,
}

/// The benches that were written since `start`, by group and name.
fn collect(folder: &Path, start: SystemTime) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for file in files(folder, Path::new("new/estimates.json"))? {
        if file.metadata()?.modified()? < start {
            continue;
        }
        let bench = file.ancestors().nth(2).context("estimates lie two folders down")?;
        let number = |path: &Path| -> Result<f64> {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let value: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            value["median"]["point_estimate"].as_f64().with_context(|| format!("{}: no median", path.display()))
        };
        let path = bench.strip_prefix(folder).context("a bench lies in criterion's folder")?;
        let words: Vec<String> = path.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let (group, name) = words.split_first().context("a bench has a group")?;
        // Criterion leaves the change of an earlier run where this run had nothing to compare with.
        let change = Some(bench.join("change/estimates.json"));
        let change = change.filter(|path| path.metadata().and_then(|m| m.modified()).is_ok_and(|time| time >= start));
        let change = change.as_deref().map(number).transpose()?;
        found.push(Found { group: group.clone(), name: name.join("/"), median: number(&file)?, change });
    }
    found.sort_by(|a, b| (&a.group, &a.name).cmp(&(&b.group, &b.name)));
    Ok(found)
}

/// The files below a folder whose path ends so.
fn files(folder: &Path, end: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if folder.join(end).is_file() {
        found.push(folder.join(end));
    }
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, end)?);
        }
    }
    Ok(found)
}

/// Medians, and how they stand to the first of their group.
fn table(found: &[Found]) -> String {
    let mut text = format!("{:<36} {:>12} {:>8} {:>10}\n", "bench", "median", "ratio", "change");
    for bench in found {
        let first = found.iter().find(|other| other.group == bench.group).map_or(f64::NAN, |other| other.median);
        let change = bench.change.map_or("-".to_owned(), |change| format!("{:+.1} %", 100.0 * change));
        let name = format!("{}/{}", bench.group, bench.name);
        text += &format!("{name:<36} {:>9.3} ms {:>8.2} {change:>10}\n", bench.median / 1e6, bench.median / first);
    }
    text + "ratio: to the first of the group; change: since the run before\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_read_and_set_against_the_first_of_their_group() {
        let place = tempfile::tempdir().unwrap();
        let put = |path: &str, median: f64| {
            let path = place.path().join(path).join("estimates.json");
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{{\"median\":{{\"point_estimate\":{median}}}}}")).unwrap();
        };
        put("linear/forward/new", 2e6);
        put("linear/forward_backward/new", 5e6);
        put("linear/forward_backward/change", -0.1);
        put("kda/chunked64/forward/new", 1e6);
        put("kda/chunked64/forward/base", 9e6);
        let found = collect(place.path(), SystemTime::UNIX_EPOCH).unwrap();
        let text = table(&found);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["kda/chunked64/forward", "1.000", "ms", "1.00", "-"]);
        assert_eq!(rows[2], ["linear/forward", "2.000", "ms", "1.00", "-"]);
        assert_eq!(rows[3], ["linear/forward_backward", "5.000", "ms", "2.50", "-10.0", "%"]);
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        assert_eq!(collect(place.path(), later).unwrap(), []);
    }
}
