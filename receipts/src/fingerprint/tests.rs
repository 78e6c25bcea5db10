//! What changes a fingerprint and what does not, on a copy of the workspace's own sources.

use super::*;

/// The sources that fingerprints depend on, copied to where they can be changed.
struct Copy(tempfile::TempDir);

impl Copy {
    fn new() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace");
        let folder = tempfile::tempdir().unwrap();
        for input in INPUTS {
            copy(&root.join(input), &folder.path().join(input));
        }
        Self(folder)
    }

    fn fingerprint(&self, stem: &str) -> String {
        Sources::of(self.0.path()).fingerprint(stem).unwrap()
    }

    /// Replaces the first `old` of a file.
    fn change(&self, file: &str, old: &str, new: &str) {
        let path = self.0.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(old), "{file} has no `{old}`");
        std::fs::write(&path, text.replacen(old, new, 1)).unwrap();
    }

    /// Adds a function to a module.
    fn extend(&self, module: &str) {
        let path = self.0.path().join(self.source(module));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text + "\npub fn one_more() {}\n").unwrap();
    }

    /// Where a crate keeps a module: a file or a folder.
    fn source(&self, module: &str) -> String {
        let file = format!("{module}.rs");
        if self.0.path().join(&file).is_file() { file } else { format!("{module}/mod.rs") }
    }
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

fn hash(text: &str) -> Vec<u8> {
    let mut tokens = Tokens::default();
    tokens.add(text.parse().unwrap(), true);
    tokens.bytes
}

#[test]
fn every_operation_has_a_fingerprint_of_its_own() {
    let sources = Copy::new();
    let stems = Sources::of(sources.0.path()).stems().unwrap();
    assert!(["linear", "rms_norm"].iter().all(|stem| stems.iter().any(|s| s == stem)), "{stems:?}");
    let mut all: Vec<String> = stems.iter().map(|stem| sources.fingerprint(stem)).collect();
    assert!(all.iter().all(|f| f.len() == 64));
    all.sort();
    all.dedup();
    assert_eq!(all.len(), stems.len());
    assert!(Sources::of(sources.0.path()).fingerprint("rows").is_err(), "no operation");
}

#[test]
fn words_for_people_and_tests_change_nothing() {
    let sources = Copy::new();
    let before = sources.fingerprint("rms_norm");
    sources.change("cuda/src/rms_norm/fused.rs", "let scale =", "// A comment.\n /* Another. */ let scale =");
    sources.change("cuda/src/rms_norm/fused.rs", "/// dx, with", "/// More words. dx, with");
    sources.change("cuda/src/rows.rs", "//! ", "//! More words. ");
    sources.change("harness/src/tolerance.rs", "\npub const FD", "\n#[doc = \"words\"]\npub const FD");
    sources.change("harness/src/compare.rs", "fn bits_tell_zeros_apart", "fn another_name");
    sources.change(
        "cuda/src/rows.rs",
        "use cubecl::prelude::*;",
        "use cubecl::prelude::*;\n#[cfg(test)]\nuse a::{b, c};",
    );
    assert_eq!(sources.fingerprint("rms_norm"), before);
}

#[test]
fn other_operations_change_nothing() {
    let sources = Copy::new();
    let before = sources.fingerprint("rms_norm");
    sources.extend("cuda/src/linear");
    sources.change("cuda/src/arm.rs", "stem: \"linear\"", "stem: \"linear2\"");
    sources.change("cuda/src/lib.rs", "mod linear;", "mod linear; mod more;");
    assert_eq!(sources.fingerprint("rms_norm"), before);
    assert_ne!(sources.fingerprint("linear"), Copy::new().fingerprint("linear"));
}

#[test]
fn every_part_that_a_receipt_rests_on_changes_it() {
    let sources = Copy::new();
    let reference = sources.source("reference/src/rms_norm");
    let changes: [(&str, &str, &str); 22] = [
        ("cuda/src/rms_norm/fused.rs", "const BLOCK: usize = 32", "const BLOCK: usize = 33"),
        ("cuda/src/rms_norm/fused.rs", "1.0f32 / (mean + guard)", "1.01f32 / (mean + guard)"),
        ("cuda/src/rms_norm/plain.rs", "+=", "-="),
        ("cuda/src/rows.rs", "LANES: u32 = 32", "LANES: u32 = 16"),
        ("cuda/src/runtime/compile.rs", "\"-lineinfo\"", "\"-use_fast_math\""),
        ("cuda/src/runtime/gpu.rs", "fast_math: true", "fast_math: false"),
        ("harness/src/ops/rms_norm.rs", "case(2, 5, 8, 1e-3", "case(2, 5, 9, 1e-3"),
        ("harness/src/tolerance.rs", "Tolerance::new(2e-6", "Tolerance::new(3e-6"),
        ("harness/src/compare.rs", "10.0 * tolerance.tol", "11.0 * tolerance.tol"),
        ("harness/src/draw.rs", "pub fn normal(", "pub fn normal_("),
        ("harness/src/gates/diff.rs", "O::tolerances(case)", "O::tolerances(&case)"),
        ("harness/src/gates/poison.rs", "equal_bits(&dirty, &clean)?;", ""),
        (&reference, "(mean_square + eps)", "(mean_square - eps)"),
        ("reference/src/factor_format.rs", "448.0", "240.0"),
        ("reference/src/matmul.rs", "pub fn", "pub unsafe fn"),
        ("reference/src/dims.rs", "expected != len", "expected > len"),
        ("harness/src/description.rs", "        1.0\n", "        100.0\n"),
        ("harness/src/ops/mod.rs", "pub mod linear;", "mod linear;"),
        ("harness/src/svd.rs", "fn", "unsafe fn"),
        ("cuda/src/gemm_table.tsv", "\n", "\n\n"),
        ("Cargo.lock", "name = \"cudarc\"\nversion = \"0.19", "name = \"cudarc\"\nversion = \"0.18"),
        ("Cargo.lock", "name = \"cubecl-cpp\"\nversion = \"0.10.0\"", "name = \"cubecl-cpp\"\nversion = \"0.10.1\""),
    ];
    let mut seen = vec![sources.fingerprint("rms_norm")];
    for (file, old, new) in changes {
        sources.change(file, old, new);
        let now = sources.fingerprint("rms_norm");
        assert!(!seen.contains(&now), "{file}: {old} -> {new}");
        seen.push(now);
    }
}

#[test]
fn what_an_operation_uses_of_another_belongs_to_it() {
    let sources = Copy::new();
    let before = sources.fingerprint("rms_norm");
    sources.change("cuda/src/rms_norm/fused.rs", "use crate::rows;", "use crate::{rows, linear::Saved as Other};");
    let uses = sources.fingerprint("rms_norm");
    assert_ne!(uses, before);
    sources.extend("cuda/src/linear");
    assert_ne!(sources.fingerprint("rms_norm"), uses);
}

#[test]
fn only_what_tests_see_is_left_out() {
    let plain = hash("fn a() {} fn b() {}");
    for stripped in [
        "fn a() {} #[cfg(test)] mod tests { fn c() {} } fn b() {}",
        "fn a() {} #[cfg(test)] mod tests; fn b() {}",
        "fn a() {} #[cfg(test)] #[allow(x)] pub(crate) const X: S = S { a: 1 }; fn b() {}",
        "fn a() {} #[cfg(test)] const fn c() -> u32 { 1 } fn b() {}",
        "fn a() {} #[cfg(test)] use a::{b, c}; fn b() {}",
        "#![doc = \"x\"] //! y\n fn a() {} /** z */ #[cfg(test)] impl X { fn c(); } fn b() {}",
    ] {
        assert_eq!(hash(stripped), plain, "{stripped}");
    }
    for kept in [
        "fn a() {} #[cfg(not(test))] fn b() {}",
        "fn a() {} #[cfg(feature = \"test\")] fn b() {}",
        "fn a() {} #[cfg(any(test, x))] fn b() {}",
        "fn a() {} fn b() { }; ",
        "fn a() {} fn b(_: u32) {}",
        "fn a() {} mod c { } fn b() {}",
    ] {
        assert_ne!(hash(kept), plain, "{kept}");
    }
    // Neither strings nor the shape of groups can be made to look like each other.
    assert_ne!(hash("a(b)c"), hash("a(b c)"));
    assert_ne!(hash("\"a\" \"b\""), hash("\"a b\""));
    assert_ne!(hash("a b"), hash("ab"));
}

#[test]
fn a_comma_before_a_closing_bracket_is_the_formatter_s() {
    let plain = hash("fn a(x: u32, y: u32) { b([1, 2], c { d: x, e: (x, y) }) }");
    assert_eq!(hash("fn a(\n x: u32,\n y: u32,\n) { b(\n [1, 2,],\n c { d: x, e: (x, y,), },\n) }"), plain);
    for without in ["f(a: Vec<u32>)", "f(a?)", "f(a..)", "[a, &b]"] {
        let with = format!("{},{}", &without[..without.len() - 1], &without[without.len() - 1..]);
        assert_eq!(hash(&with), hash(without), "{with}");
    }
    // A comma between, another one, one that is alone and one at the end of all are no formatter's.
    for (with, without) in
        [("f(a, b)", "f(a b)"), ("f(a,, )", "f(a)"), ("m!(,)", "m!()"), ("a,", "a"), ("f(a, b)", "f(b, a)")]
    {
        assert_ne!(hash(with), hash(without), "{with}");
    }
    // In a workspace's own kernel.
    let sources = Copy::new();
    let before = sources.fingerprint("rms_norm");
    sources.change("cuda/src/rows.rs", "use cubecl::prelude::*;", "use cubecl::prelude::*; use cubecl::{a, b};");
    let changed = sources.fingerprint("rms_norm");
    sources.change("cuda/src/rows.rs", "use cubecl::{a, b};", "use cubecl::{\n    a,\n    b,\n};");
    assert_eq!(sources.fingerprint("rms_norm"), changed);
    assert_ne!(changed, before);
}

#[test]
fn a_module_in_another_file_is_left_out_where_only_tests_see_it() {
    let sources = Copy::new();
    let before = sources.fingerprint("rms_norm");
    let module = "cuda/src/rms_norm/mod.rs";
    sources.change(module, "mod plain;", "mod plain;\n#[cfg(test)]\nmod checks;");
    std::fs::write(sources.0.path().join("cuda/src/rms_norm/checks.rs"), "fn a() {}").unwrap();
    assert_eq!(sources.fingerprint("rms_norm"), before);
    sources.change(module, "#[cfg(test)]\nmod checks;", "mod checks;");
    assert_ne!(sources.fingerprint("rms_norm"), before);
}
