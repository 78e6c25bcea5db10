//! `benches/history.tsv`: what a step cost, commit by commit, strict enough to be believed later.
//!
//! A time without the steps it was taken from, or with one of the first 50, is refused: those steps compile, lay out
//! memory, capture and warm up. So is a measured time from a single process: the difference between two processes is
//! what a later difference has to exceed.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::run::try_write;

/// The columns, in order.
pub const COLUMNS: [&str; 33] = [
    "date",
    "run",
    "commit",
    "dirty",
    "device",
    "driver",
    "preset",
    "batch",
    "seq",
    "precision",
    "formats",
    "arms",
    "jepa",
    "ns",
    "retract_every",
    "graph",
    "processes",
    "step_from",
    "step_to",
    "ms_step_median",
    "ms_step_iqr",
    "ms_run_spread",
    "launches",
    "nodes",
    "captures",
    "syncs",
    "launch_price_us",
    "busy",
    "tokens_s",
    "mem_peak_mib",
    "bpb",
    "source",
    "note",
];

/// Steps of a process that are never timed.
pub const COLD_STEPS: u64 = 50;

/// The word for what does not apply or is not known.
pub const NONE: &str = "-";

/// One row by its columns.
pub type Row = BTreeMap<&'static str, String>;

/// Reads a history; every line must be good.
///
/// # Errors
/// The first bad line, with its number and what is wrong.
pub fn parse(text: &str) -> Result<Vec<Row>> {
    let mut lines = text.lines().enumerate();
    let header = lines.next().map_or("", |(_, line)| line);
    ensure!(header == COLUMNS.join("\t"), "history: line 1 is not the header of the columns");
    lines.map(|(number, line)| row(line).with_context(|| format!("history: line {}", number + 1))).collect()
}

fn row(line: &str) -> Result<Row> {
    let fields: Vec<&str> = line.split('\t').collect();
    ensure!(fields.len() == COLUMNS.len(), "{} columns, expected {}", fields.len(), COLUMNS.len());
    let row: Row = COLUMNS.into_iter().zip(fields).map(|(column, field)| (column, field.to_owned())).collect();
    check(&row)?;
    Ok(row)
}

/// The rules of a row.
fn check(row: &Row) -> Result<()> {
    for (column, field) in row {
        ensure!(!field.trim().is_empty() && field.trim() == field, "`{column}` is empty or padded; `-` means none");
    }
    let date = &row["date"];
    let shape: String = date.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    ensure!(shape == "0000-00-00T00:00:00Z", "`date` is `{date}`, expected like 2026-11-29T23:04:54Z");
    check_commit(&row["commit"])?;
    let one_of = |column: &str, words: &[&str]| {
        let field = row[column].as_str();
        ensure!(words.contains(&field), "`{column}` is `{field}`, expected one of {}", words.join(", "));
        Ok(())
    };
    one_of("dirty", &["true", "false", NONE])?;
    one_of("graph", &["true", "false"])?;
    one_of("precision", &["f32", "tf32", "bf16"])?;
    one_of("source", &["measured", "counted", "derived"])?;
    let whole = ["batch", "seq", "retract_every", "processes", "step_from", "step_to", "captures"];
    let real = [
        "ms_step_median",
        "ms_step_iqr",
        "ms_run_spread",
        "launches",
        "nodes",
        "syncs",
        "launch_price_us",
        "busy",
        "tokens_s",
        "mem_peak_mib",
        "bpb",
    ];
    let mut numbers: BTreeMap<&str, f64> = BTreeMap::new();
    for column in whole.into_iter().chain(real) {
        let field = &row[column];
        if field == NONE {
            continue;
        }
        let number: f64 =
            field.parse().with_context(|| format!("`{column}` is `{field}`, expected a number or `-`"))?;
        ensure!(number.is_finite() && number >= 0.0, "`{column}` is `{field}`, expected 0 or more");
        ensure!(!whole.contains(&column) || number.fract() == 0.0, "`{column}` is `{field}`, expected a whole number");
        numbers.insert(column, number);
    }
    ensure!(numbers.get("busy").is_none_or(|busy| *busy <= 1.0), "`busy` is above 1");
    let times = ["ms_step_median", "ms_step_iqr", "ms_run_spread", "tokens_s"];
    if !times.iter().any(|column| numbers.contains_key(column)) {
        return Ok(());
    }
    let (Some(&from), Some(&to)) = (numbers.get("step_from"), numbers.get("step_to")) else {
        bail!("a time without the steps it was taken from; give step_from and step_to");
    };
    ensure!(
        from > COLD_STEPS as f64,
        "a time from step {from}: the first {COLD_STEPS} steps of a process are not timed"
    );
    ensure!(to > from, "step_to is {to}, not after step_from = {from}");
    if row["source"] == "measured" {
        ensure!(numbers.get("processes").is_some_and(|n| *n >= 2.0), "a measured time needs two processes or more");
        ensure!(numbers.contains_key("ms_run_spread"), "a measured time needs ms_run_spread");
    }
    Ok(())
}

/// The rule of column `commit`.
///
/// # Errors
/// It is no whole hash.
pub fn check_commit(commit: &str) -> Result<()> {
    let hex = commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit());
    ensure!(hex || commit == NONE, "`commit` is `{commit}`, expected 40 hexadecimal digits");
    Ok(())
}

/// Adds a row to a history, which is good before and after.
///
/// # Errors
/// A rule is broken; the file cannot be read or written.
pub fn append(path: &Path, row: &Row) -> Result<()> {
    let cannot = |what: &str| format!("history: cannot {what} `{}`", path.display());
    let mut text = stored(path)?;
    check(row)?;
    // Only what is new is written: a disk that is full must not cost the rows that are there.
    let there = if path.exists() { text.len() } else { 0 };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(&line(row));
    parse(&text).with_context(|| cannot("extend"))?;
    let write = || {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        let before = file.metadata()?.len();
        let written = file.write_all(&text.as_bytes()[there..]).and_then(|()| file.sync_all());
        if written.is_err() {
            // A part of a row would make the whole file one that breaks the rules.
            let _ = file.set_len(before);
        }
        written
    };
    write().with_context(|| cannot("write"))
}

/// Whether a row could be added to a history, before minutes are spent on it.
///
/// # Errors
/// The file breaks a rule, or cannot be read or written.
pub fn check_file(path: &Path) -> Result<()> {
    stored(path)?;
    let problem = || format!("history: cannot write `{}`; name a file in a folder that exists", path.display());
    try_write(path).with_context(problem)
}

/// The text of a history; of one that is not there, its header.
fn stored(path: &Path) -> Result<String> {
    let cannot = |what: &str| format!("history: cannot {what} `{}`", path.display());
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => COLUMNS.join("\t") + "\n",
        text => text.with_context(|| cannot("read"))?,
    };
    parse(&text).with_context(|| cannot("use"))?;
    Ok(text)
}

/// A row as a line of the file.
pub fn line(row: &Row) -> String {
    let fields: Vec<String> =
        COLUMNS.iter().map(|column| row.get(column).map_or(NONE, String::as_str).replace(['\t', '\n'], " ")).collect();
    fields.join("\t") + "\n"
}

#[cfg(test)]
mod tests {
    use super::{COLUMNS, NONE, Row, append, line, parse};

    fn good() -> Row {
        let mut row: Row = COLUMNS.into_iter().map(|column| (column, NONE.to_owned())).collect();
        for (column, field) in [
            ("date", "2026-11-29T23:04:54Z"),
            ("commit", "865d421aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
            ("dirty", "false"),
            ("graph", "true"),
            ("precision", "f32"),
            ("source", "measured"),
            ("processes", "2"),
            ("step_from", "51"),
            ("step_to", "250"),
            ("ms_step_median", "2.1"),
            ("ms_run_spread", "0.02"),
            ("busy", "0.97"),
        ] {
            row.insert(column, field.to_owned());
        }
        row
    }

    fn text(rows: &[Row]) -> String {
        COLUMNS.join("\t") + "\n" + &rows.iter().map(line).collect::<String>()
    }

    #[test]
    fn the_history_of_this_repository_is_good() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/history.tsv");
        parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    }

    #[test]
    fn a_good_row_is_read_as_it_was_written() {
        assert_eq!(parse(&text(&[good(), good()])).unwrap(), [good(), good()]);
        let mut counted = good();
        for column in ["step_from", "step_to", "ms_step_median", "ms_run_spread", "processes"] {
            counted.insert(column, NONE.to_owned());
        }
        counted.insert("source", "counted".to_owned());
        parse(&text(&[counted])).unwrap();
    }

    #[test]
    fn every_rule_bites_and_names_the_line() {
        let cases = [
            ("step_from", "-", "a time without the steps"),
            ("step_from", "50", "a time from step 50"),
            ("step_to", "51", "not after step_from"),
            ("processes", "1", "two processes"),
            ("ms_run_spread", "-", "needs ms_run_spread"),
            ("ms_step_median", "fast", "expected a number"),
            ("ms_step_median", "NaN", "expected 0 or more"),
            ("ms_step_median", "-1", "expected 0 or more"),
            ("batch", "2.5", "a whole number"),
            ("busy", "1.2", "above 1"),
            ("date", "29.11.2026", "`date`"),
            ("commit", "865d421", "40 hexadecimal"),
            ("dirty", "yes", "`dirty`"),
            ("graph", "-", "`graph`"),
            ("precision", "fp8", "`precision`"),
            ("source", "guessed", "`source`"),
            ("note", " padded", "`note`"),
            ("device", "", "`device`"),
        ];
        for (column, field, expected) in cases {
            let mut bad = good();
            bad.insert(column, field.to_owned());
            let error = format!("{:#}", parse(&text(&[good(), bad])).unwrap_err());
            assert!(error.contains(expected) && error.contains("line 3"), "{column}={field}: {error}");
        }
        assert!(format!("{:#}", parse("date\n").unwrap_err()).contains("line 1"));
        assert!(format!("{:#}", parse(&(text(&[]) + "x\n")).unwrap_err()).contains("1 columns"));
    }

    #[test]
    fn a_bad_row_leaves_the_file_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history.tsv");
        std::fs::write(&path, text(&[good()])).unwrap();
        let mut bad = good();
        bad.insert("step_from", "1".to_owned());
        assert!(append(&path, &bad).is_err());
        append(&path, &good()).unwrap();
        assert_eq!(parse(&std::fs::read_to_string(&path).unwrap()).unwrap().len(), 2);
        // A file that is not there gets its header, and one whose last line has no end gets it.
        let new = folder.path().join("new.tsv");
        append(&new, &good()).unwrap();
        let whole = std::fs::read_to_string(&new).unwrap();
        std::fs::write(&new, whole.trim_end()).unwrap();
        append(&new, &good()).unwrap();
        assert_eq!(std::fs::read_to_string(&new).unwrap(), whole + &line(&good()));
    }
}
