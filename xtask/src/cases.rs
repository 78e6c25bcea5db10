//! `docs/cases.md`: what broke for other people, and which test or gate holds it here.
//!
//! `cargo xtask tidy` fails where a test that the page names is not in the sources, and where a test that is named
//! after a case is not on the page, so a renamed test and a forgotten row are both seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

/// The page.
const PAGE: &str = "docs/cases.md";

/// What stands in a row instead of a test.
const NOT_RUN: &str = "not run on a CPU: ";

/// The gates that a row may name.
const GATES: [&str; 10] = ["fd", "adj", "form", "oracle", "diff", "meta", "poison", "det", "golden", "bite"];

/// What is wrong with the page; `sources` are the Rust files of the repository, relative to `root`.
pub fn faults(root: &Path, sources: &[&Path]) -> Result<Vec<String>> {
    let page = std::fs::read_to_string(root.join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    let mut texts = BTreeMap::new();
    for source in sources {
        let text = std::fs::read_to_string(root.join(source)).with_context(|| source.display().to_string())?;
        texts.insert(source.display().to_string(), text);
    }
    Ok(check(&page, &texts))
}

/// One row: the case, and what holds it.
struct Row<'a> {
    line: usize,
    case: &'a str,
    held: &'a str,
}

/// The rows of the page's tables, by the shape of their first cell: a letter and a digit.
fn rows(page: &str) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for (number, line) in page.lines().enumerate() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, case, .., held, _] = cells[..] else { continue };
        if is_case(case) {
            rows.push(Row { line: number + 1, case, held });
        }
    }
    rows
}

fn is_case(word: &str) -> bool {
    matches!(word.as_bytes(), [letter, digit] if letter.is_ascii_uppercase() && digit.is_ascii_digit())
}

fn check(page: &str, sources: &BTreeMap<String, String>) -> Vec<String> {
    let mut faults = Vec::new();
    let rows = rows(page);
    let (mut cases, mut named) = (BTreeSet::new(), BTreeSet::new());
    for row in &rows {
        let mut fault = |what: String| faults.push(format!("{PAGE}:{}: {}: {what}", row.line, row.case));
        if !cases.insert(row.case) {
            fault("is there twice".to_owned());
        }
        let holders: Vec<&str> = row.held.split('`').skip(1).step_by(2).collect();
        let reason = row.held.split_once(NOT_RUN).map(|(_, reason)| reason.trim());
        if holders.is_empty() && reason.is_none_or(str::is_empty) {
            fault(format!("names no test and no gate, and does not say `{NOT_RUN}` with a reason"));
        }
        for holder in holders {
            match (holder.strip_prefix("gate "), holder.split_once("::")) {
                (Some(gate), _) => {
                    if !is_gate(gate, sources) {
                        fault(format!("`{holder}` is no gate of a described operation, expected `gate STEM/GATE`"));
                    }
                }
                (None, Some((file, name))) => {
                    named.insert(name);
                    match sources.get(file) {
                        None => fault(format!("there is no file `{file}`")),
                        Some(text) if !is_test(text, name) && !is_law(file, text, name) => {
                            fault(format!(
                                "`{file}` has no test and no law `{name}`; name the one that holds the case"
                            ));
                        }
                        Some(_) => {}
                    }
                }
                (None, None) => fault(format!("`{holder}` is neither `FILE::TEST` nor `gate STEM/GATE`")),
            }
        }
    }
    if rows.is_empty() {
        faults.push(format!("{PAGE}: no row was found, so nothing is checked"));
    }
    for (file, text) in sources {
        for name in tests(text).filter(|name| is_named_after_a_case(name) && !named.contains(name)) {
            faults.push(format!("{file}: test `{name}` is named after a case and is not in {PAGE}"));
        }
    }
    faults
}

/// `kda/meta`: a described operation and a gate.
fn is_gate(gate: &str, sources: &BTreeMap<String, String>) -> bool {
    let Some((stem, gate)) = gate.split_once('/') else { return false };
    let places = [format!("harness/src/ops/{stem}.rs"), format!("harness/src/ops/{stem}/mod.rs")];
    GATES.contains(&gate) && places.iter().any(|place| sources.contains_key(place))
}

/// The names of a file's tests.
fn tests(text: &str) -> impl Iterator<Item = &str> {
    let mut is_next = false;
    text.lines().filter_map(move |line| {
        let line = line.trim();
        if line == "#[test]" {
            is_next = true;
            return None;
        }
        // Other attributes may stand between.
        if line.starts_with('#') || line.starts_with("//") {
            return None;
        }
        let name = line.strip_prefix("fn ").and_then(|rest| rest.split('(').next()).filter(|_| is_next);
        is_next = false;
        name
    })
}

fn is_test(text: &str, name: &str) -> bool {
    tests(text).any(|test| test == name)
}

/// A law of gate `meta`: a function that a description lists.
fn is_law(file: &str, text: &str, name: &str) -> bool {
    let listed = [format!("check: {name} "), format!("check: {name},"), format!("\", {name})")];
    let defined = text.contains(&format!("fn {name}("));
    file.starts_with("harness/src/ops/") && defined && listed.iter().any(|words| text.contains(words))
}

/// `a1_...`: a letter of the page's sections, a digit. The operation `l2_norm` is no case.
fn is_named_after_a_case(name: &str) -> bool {
    !name.starts_with("l2_norm_") && matches!(name.as_bytes(), [b'a'..=b'l', b'1'..=b'9', b'_', ..])
}

/// What the cases ask of sources alone.
#[cfg(test)]
mod of_sources {
    use std::path::PathBuf;

    /// Lines of kernels, with their numbers: from `#[cube` to the brace that closes the function.
    fn kernels(text: &str) -> Vec<(usize, &str)> {
        let mut found = Vec::new();
        let mut indent = None;
        for (number, line) in text.lines().enumerate() {
            let depth = line.len() - line.trim_start().len();
            if line.trim_start().starts_with("#[cube") {
                indent = Some(depth);
            }
            if indent.is_some() {
                found.push((number + 1, line));
            }
            if indent == Some(depth) && line.trim_end().ends_with('}') {
                indent = None;
            }
        }
        found
    }

    fn code(line: &str) -> &str {
        line.split("//").next().unwrap_or_default()
    }

    /// Numbers of the lines of kernels that spell an infinity or a NaN of a float.
    fn infinite_literals(text: &str) -> Vec<usize> {
        let words = ["f32::INFINITY", "f32::NEG_INFINITY", "f32::NAN", "F::INFINITY", "F::NAN"];
        kernels(text).into_iter().filter(|(_, l)| words.iter().any(|w| code(l).contains(w))).map(|(n, _)| n).collect()
    }

    fn of_kernels() -> Vec<(PathBuf, String)> {
        let root = crate::root();
        let files = crate::tidy::tracked(&root).unwrap().into_iter();
        let kernels = files.filter(|f| f.starts_with("cuda/src") && f.extension().is_some_and(|e| e == "rs"));
        kernels.map(|file| (file.clone(), std::fs::read_to_string(root.join(file)).unwrap())).collect()
    }

    #[test]
    fn g3_the_runtime_that_leaks_shared_memory_between_cubes_is_not_among_the_dependencies() {
        let lock = std::fs::read_to_string(crate::root().join("Cargo.lock")).unwrap();
        assert!(lock.contains("name = \"cubecl-core\""), "the lock file has no cubecl: nothing is checked");
        assert!(!lock.contains("name = \"cubecl-cpu\""));
    }

    #[test]
    fn h3_no_kernel_spells_an_infinity_or_a_nan() {
        let planted =
            "#[cube(launch)]\nfn k(x: f32) {\n    let y = f32::NEG_INFINITY; // a limit\n}\nconst A: f32 = f32::NAN;\n";
        assert_eq!(infinite_literals(planted), [3]);
        let files = of_kernels();
        assert!(files.iter().map(|(_, text)| kernels(text).len()).sum::<usize>() > 1000, "no kernels were found");
        for (path, text) in files {
            assert_eq!(infinite_literals(&text), Vec::<usize>::new(), "{}", path.display());
        }
    }

    #[test]
    fn h7_no_kernel_adds_with_an_atomic() {
        let words = ["Atomic<", "atomic_add", "fetch_add"];
        let uses =
            |text: &str| kernels(text).iter().any(|(_, line)| words.iter().any(|word| code(line).contains(word)));
        assert!(uses("#[cube(launch)]\nfn k(x: &mut Tensor<Atomic<f32>>) {\n}\n"));
        for (path, text) in of_kernels() {
            assert!(!uses(&text), "{}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::check;

    const PAGE: &str = "\
| case | what | held by |
|---|---|---|
| A1 | a gate | `x/tests.rs::a1_first`, `gate kda/meta` |
| B2 | a law | `harness/src/ops/kda/mod.rs::head_by_head` |
| C3 | large | not run on a CPU: it needs 9 GB of a device |
";

    fn sources() -> BTreeMap<String, String> {
        let of = |file: &str, text: &str| (file.to_owned(), text.to_owned());
        BTreeMap::from([
            of("x/tests.rs", "#[test]\n// why\n#[cfg(unix)]\nfn a1_first() {}\nfn helper() {}\n"),
            of(
                "harness/src/ops/kda/mod.rs",
                "Law::Exact { name: \"n\", check: head_by_head },\nfn head_by_head() {}\n",
            ),
        ])
    }

    #[test]
    fn a_page_that_names_what_there_is_has_no_fault() {
        assert_eq!(check(PAGE, &sources()), Vec::<String>::new());
    }

    #[test]
    fn every_way_to_be_wrong_is_named() {
        let said = |page: &str| check(page, &sources()).join("\n");
        for (from, to, words) in [
            ("a1_first", "a1_second", "docs/cases.md:3: A1: `x/tests.rs` has no test and no law `a1_second`"),
            ("a1_first", "helper", "no test and no law `helper`"),
            ("x/tests.rs", "y/tests.rs", "there is no file `y/tests.rs`"),
            ("kda/meta", "kda/mate", "`gate kda/mate` is no gate"),
            ("kda/meta", "kdb/meta", "`gate kdb/meta` is no gate"),
            ("gate kda/meta", "kda", "neither `FILE::TEST` nor `gate STEM/GATE`"),
            ("head_by_head", "heads", "no test and no law `heads`"),
            ("head_by_head", "unlisted", "no test and no law `unlisted`"),
            ("it needs 9 GB of a device", "", "names no test and no gate"),
            ("not run on a CPU: it", "it", "names no test and no gate"),
            ("| B2 |", "| A1 |", "docs/cases.md:4: A1: is there twice"),
        ] {
            let said = said(&PAGE.replacen(from, to, 1));
            assert!(said.contains(words), "{from} -> {to}: {said}");
        }
        assert!(said("no table").contains("no row was found"));
    }

    #[test]
    fn a_renamed_test_is_red_on_both_sides() {
        let mut renamed = sources();
        let text = renamed.get_mut("x/tests.rs").unwrap();
        *text = text.replace("a1_first", "a1_other");
        let said = check(PAGE, &renamed).join("\n");
        assert!(said.contains("has no test and no law `a1_first`"), "{said}");
        assert!(
            said.contains("x/tests.rs: test `a1_other` is named after a case and is not in docs/cases.md"),
            "{said}"
        );
    }

    #[test]
    fn the_page_of_this_repository_is_whole() {
        let page = std::fs::read_to_string(crate::root().join(super::PAGE)).unwrap();
        let cases: Vec<&str> = super::rows(&page).iter().map(|row| row.case).collect();
        assert_eq!(cases.len(), 48, "{cases:?}");
        assert!(cases.is_sorted(), "{cases:?}");
    }
}
