//! `cargo xtask docs`: the parts of the documentation that a program writes.
//!
//! Between `<!-- generated: gates -->` and `<!-- /generated: gates -->` in docs/verification.md lies the table of
//! operations, gates and mutants. It is made of what `dormouse-gate --list` says, which runs no gate.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// The file with the table.
const FILE: &str = "docs/verification.md";

/// What the part between the marks is called.
const PART: &str = "gates";

/// The head of the lines that the gate binary prints.
const COLUMNS: &str = "stem\tgate\tbackend\tcases\tmutants\tstatus\treason";

/// Writes the generated part anew, or with `check` fails if it is not what it would be.
pub fn run(root: &Path, check: bool, list: &str) -> Result<()> {
    let path = root.join(FILE);
    let old = std::fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
    let new = replaced(&old, PART, &tables(list)?)?;
    if old == new {
        println!("docs: {FILE} is what the descriptions say");
        return Ok(());
    }
    if check {
        let (at, line) = first_difference(&old, &new);
        bail!("{FILE}:{at}: the generated part is stale, expected `{line}`; run `cargo xtask docs` and commit it");
    }
    std::fs::write(&path, new).with_context(|| format!("cannot write {FILE}"))?;
    println!("docs: wrote {FILE}");
    Ok(())
}

/// The first line in which two texts differ, from 1, and what it should be.
fn first_difference<'a>(old: &str, new: &'a str) -> (usize, &'a str) {
    let mut old = old.lines();
    let found = new.lines().enumerate().find(|(_, line)| old.next() != Some(line));
    found.map_or((new.lines().count() + 1, ""), |(at, line)| (at + 1, line))
}

/// The text with another part between its two marks.
fn replaced(text: &str, part: &str, body: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- generated: {part} -->\n"), format!("<!-- /generated: {part} -->\n"));
    let one = |mark: &str| match text.matches(mark).count() {
        1 => Ok(text.find(mark).expect("it was counted")),
        n => bail!("{FILE}: the line `{}` is there {n} times, expected once", mark.trim_end()),
    };
    let (from, to) = (one(&begin)? + begin.len(), one(&end)?);
    if to < from {
        bail!("{FILE}: `{}` comes before `{}`", end.trim_end(), begin.trim_end());
    }
    Ok(format!("{}{body}{}", &text[..from], &text[to..]))
}

/// One operation's gates on one side: the reference or devices.
#[derive(Default)]
struct Row {
    cases: usize,
    /// By gate: mutants, status.
    gates: BTreeMap<String, (usize, String)>,
}

/// Both tables, from the lines of the gate binary.
fn tables(list: &str) -> Result<String> {
    let mut lines = list.lines();
    if lines.next() != Some(COLUMNS) {
        bail!("`dormouse-gate --list` did not print the head `{}`", COLUMNS.replace('\t', " "));
    }
    // By side and stem; and the gates of a side in the order in which they are listed.
    let mut sides: BTreeMap<&str, (Vec<&str>, BTreeMap<&str, Row>)> = BTreeMap::new();
    for line in lines {
        let fields: Vec<&str> = line.split('\t').collect();
        let [stem, gate, backend, cases, mutants, status, _] = fields[..] else {
            bail!("`dormouse-gate --list` printed `{line}`, expected 7 columns");
        };
        let number = |field: &str| field.parse::<usize>().with_context(|| format!("`{field}` in `{line}`"));
        let (gates, rows) = sides.entry(backend).or_default();
        if !gates.contains(&gate) {
            gates.push(gate);
        }
        let row = rows.entry(stem).or_default();
        row.cases = row.cases.max(number(cases)?);
        row.gates.insert(gate.to_owned(), (number(mutants)?, status.to_owned()));
    }
    let mut text = String::new();
    for (backend, title) in [("cpu", "The reference"), ("device", "Kernels, in each arm and precision")] {
        let (gates, rows) = sides.get(backend).with_context(|| format!("no line is about `{backend}`"))?;
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&format!("**{title}.**\n\n| operation | cases |"));
        gates.iter().for_each(|gate| text.push_str(&format!(" `{gate}` |")));
        text.push_str(&format!("\n|---|---:|{}\n", "---:|".repeat(gates.len())));
        let mut sums = vec![0; gates.len()];
        let mut cases = 0;
        let mut absent = Vec::new();
        for (stem, row) in rows {
            if row.gates.values().all(|(_, status)| status == "NOTRUN") {
                absent.push(format!("`{stem}`"));
                continue;
            }
            cases += row.cases;
            text.push_str(&format!("| `{stem}` | {} |", row.cases));
            for (gate, sum) in gates.iter().zip(&mut sums) {
                let (mutants, status) = row.gates.get(*gate).map_or((0, ""), |(n, status)| (*n, status.as_str()));
                let cell = match status {
                    // Its faults are planted in what the files hold, and counted when gate `bite` runs.
                    "RUNS" if *gate == "golden" => "file".to_owned(),
                    "RUNS" => {
                        *sum += mutants;
                        mutants.to_string()
                    }
                    "NOTRUN" => "?".to_owned(),
                    _ => "-".to_owned(),
                };
                text.push_str(&format!(" {cell} |"));
            }
            text.push('\n');
        }
        let sum = |(gate, sum): (&&str, &usize)| if *gate == "golden" { " |".to_owned() } else { format!(" {sum} |") };
        let sums: String = gates.iter().zip(&sums).map(sum).collect();
        text.push_str(&format!("| together | {cases} |{sums}\n"));
        if !absent.is_empty() {
            text.push_str(&format!("\nWithout kernels: {}.\n", absent.join(", ")));
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::{COLUMNS, first_difference, replaced, run, tables};

    fn list() -> String {
        let lines = [
            "kda\tfd\tcpu\t9\t12\tRUNS\t",
            "kda\tgolden\tcpu\t9\t0\tNOTRUN\tno file",
            "adamw\tfd\tcpu\t4\t0\tN/A\tno gradient",
            "adamw\tgolden\tcpu\t4\t3\tRUNS\t",
            "kda\tdiff\tdevice\t7\t5\tRUNS\t",
            "ema\tdiff\tdevice\t0\t0\tNOTRUN\tno kernels",
        ];
        format!("{COLUMNS}\n{}\n", lines.join("\n"))
    }

    #[test]
    fn a_table_has_a_cell_for_every_gate_and_a_row_of_sums() {
        let text = tables(&list()).unwrap();
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(
            rows,
            [
                "| operation | cases | `fd` | `golden` |",
                "|---|---:|---:|---:|",
                "| `adamw` | 4 | - | file |",
                "| `kda` | 9 | 12 | ? |",
                "| together | 13 | 12 | |",
                "| operation | cases | `diff` |",
                "|---|---:|---:|",
                "| `kda` | 7 | 5 |",
                "| together | 7 | 5 |",
            ]
        );
        assert!(text.contains("Without kernels: `ema`."), "{text}");
        assert!(tables("nonsense").is_err());
        assert!(tables(&format!("{COLUMNS}\nkda\tfd\n")).is_err());
    }

    #[test]
    fn only_what_lies_between_the_marks_is_replaced() {
        let text = "a\n<!-- generated: gates -->\nold\n<!-- /generated: gates -->\nb\n";
        let new = replaced(text, "gates", "new\n").unwrap();
        assert_eq!(new, text.replace("old", "new"));
        assert_eq!(first_difference(text, &new), (3, "new"));
        for broken in ["a\n", &text.replace("<!-- /generated: gates -->\n", ""), &format!("{text}{text}")] {
            assert!(replaced(broken, "gates", "new\n").is_err(), "{broken}");
        }
    }

    #[test]
    fn a_stale_table_is_red_until_it_is_written() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        std::fs::create_dir_all(folder.join("docs")).unwrap();
        let file = folder.join("docs/verification.md");
        std::fs::write(&file, "<!-- generated: gates -->\n<!-- /generated: gates -->\n").unwrap();
        let error = run(folder, true, &list()).unwrap_err().to_string();
        assert!(error.contains("stale") && error.contains("cargo xtask docs"), "{error}");
        run(folder, false, &list()).unwrap();
        run(folder, true, &list()).unwrap();
        // One mutant more, and the table is stale again.
        let error = run(folder, true, &list().replace("\t12\t", "\t13\t")).unwrap_err().to_string();
        assert!(error.contains("| `kda` | 9 | 13 | ? |"), "{error}");
    }
}
