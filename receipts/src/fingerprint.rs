//! The fingerprint of an operation: a BLAKE3 hash of the sources that its receipts rest on.
//!
//! A receipt says that kernels were equal to the reference when the gate ran. It says nothing about other kernels, nor
//! about other cases, tolerances or another reference, so all of these are hashed:
//!
//! | part | why |
//! |---|---|
//! | `cuda/src/<stem>`, file or folder | the kernels and their launches |
//! | everything in `cuda/src` that belongs to no operation | what all kernels share; `runtime/` has the compiler's options, a table the choices of products |
//! | `harness/src/ops/<stem>` | the cases, what is drawn for them, and tolerances |
//! | comparator, tolerances, draws, defaults of descriptions and the gates of a device in `harness/src` | what decides that two tensors are equal |
//! | `reference/src/<stem>`, and the arithmetic that belongs to no operation | what the kernels were equal to |
//! | the locked packages `cubecl*`, `cudarc` and `half` | the compiler from kernels to CUDA C++, and the way to the GPU |
//!
//! Where one of these files uses another operation's module (`crate::spectral`), that module is part of it.
//!
//! Sources enter as streams of tokens. Comments, documentation and `#[cfg(test)]` items are left out, so that explaining
//! a kernel or testing it costs no run on a GPU; so is a comma before a closing bracket, which a formatter sets or drops
//! with the length of a line. The one thing that such a comma means, a tuple of one, has another type without it, so no
//! program is both with and without. `cuda/src/lib.rs` and `cuda/src/arm.rs` are left out as well: they list
//! all operations, so every new one would make all receipts stale; so is `gpu.rs`, which picks a runtime. That an arm ran is what the gate asserts itself,
//! from the device's ledger.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use proc_macro2::{Delimiter, Punct, Spacing, TokenStream, TokenTree};

/// Files of the harness that decide whether a device's gate is green.
const JUDGES: [&str; 13] = [
    "compare.rs",
    "description.rs",
    "draw.rs",
    "gates/det.rs",
    "gates/diff.rs",
    "gates/meta.rs",
    "gates/mod.rs",
    "gates/poison.rs",
    "named.rs",
    "ops/mod.rs",
    "runner.rs",
    "svd.rs",
    "tolerance.rs",
];

/// Files of `cuda/src` that no kernel's result depends on: the lists of operations, and what embeds receipts.
const NO_KERNELS: [&str; 4] = ["lib.rs", "arm.rs", "gpu.rs", "receipts.rs"];

/// Files of `cuda/src` that are no Rust: they count byte for byte.
const TABLES: [&str; 1] = ["gemm_table.tsv"];

/// Modules of `reference/src` on which no result of an operation depends: the lists of operations, and what checks values
/// or words errors.
const NO_ARITHMETIC: [&str; 6] = ["lib", "backend", "delegate", "compiled", "checked", "error"];

/// Packages between kernels and the GPU, by their names or how their names begin.
const COMPILERS: [&str; 3] = ["cubecl", "cudarc", "half"];

/// Everything that the fingerprints of a workspace depend on, for a build script's `rerun-if-changed`.
pub const INPUTS: [&str; 4] = ["cuda/src", "harness/src", "reference/src", "Cargo.lock"];

/// Why there is no fingerprint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be read.
    #[error("{path}: {source}; fingerprints need the whole workspace")]
    Read {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A source is not Rust.
    #[error("{path}: not Rust: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// The lexer's words.
        reason: String,
    },
    /// There is no such operation.
    #[error("no kernels of an operation `{stem}` in {folder}")]
    UnknownStem {
        /// What was asked for.
        stem: String,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// The lock file names no cubecl.
    #[error("{path}: no package `cubecl` is locked")]
    NoCubecl {
        /// The lock file.
        path: PathBuf,
    },
}

/// The sources of a workspace; each file is read once.
pub struct Sources {
    root: PathBuf,
    read: RefCell<HashMap<PathBuf, Rc<Tokens>>>,
}

impl Sources {
    /// The workspace in `root`.
    #[must_use]
    pub fn of(root: &Path) -> Self {
        Self { root: root.to_owned(), read: RefCell::default() }
    }

    /// The operations that have kernels, in alphabetical order: modules of `cuda/src` with a description in the harness.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn stems(&self) -> Result<Vec<String>, Error> {
        let described = modules(&self.root.join("harness/src/ops"))?;
        Ok(modules(&self.root.join("cuda/src"))?.into_iter().filter(|name| described.contains(name)).collect())
    }

    /// The fingerprint of one operation, as 64 hexadecimal digits.
    ///
    /// # Errors
    /// An unknown stem, or a source that cannot be read or is not Rust.
    pub fn fingerprint(&self, stem: &str) -> Result<String, Error> {
        let kernels = self.root.join("cuda/src");
        let judges = self.root.join("harness/src");
        let operations = modules(&judges.join("ops"))?;
        if !self.stems()?.iter().any(|known| known == stem) {
            return Err(Error::UnknownStem { stem: stem.to_owned(), folder: kernels });
        }
        let mut hasher = blake3::Hasher::new();
        let mut add = |label: &str, tokens: &[u8]| {
            // Lengths come first, so that no two lists of parts give one stream of bytes.
            for part in [label.as_bytes(), tokens] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        };
        for (part, folder) in
            [("cuda", &kernels), ("harness", &judges.join("ops")), ("reference", &self.root.join("reference/src"))]
        {
            for (name, tokens) in self.with_uses(folder, stem, &operations)? {
                add(&format!("{part} {name}"), &tokens.bytes);
            }
        }
        for module in modules(&kernels)?.difference(&operations) {
            let shared = self.files(&kernels, module)?;
            for (name, tokens) in shared.iter().filter(|(name, _)| !NO_KERNELS.contains(&name.as_str())) {
                add(&format!("cuda {name}"), &tokens.bytes);
            }
        }
        for table in TABLES {
            let path = kernels.join(table);
            let bytes = std::fs::read(&path).map_err(|source| Error::Read { path, source })?;
            add(&format!("cuda {table}"), &bytes);
        }
        let reference = self.root.join("reference/src");
        for module in modules(&reference)?.difference(&operations).filter(|m| !NO_ARITHMETIC.contains(&m.as_str())) {
            for (name, tokens) in self.files(&reference, module)? {
                add(&format!("reference {name}"), &tokens.bytes);
            }
        }
        for name in JUDGES {
            add(name, &self.tokens(&judges.join(name))?.bytes);
        }
        add("Cargo.lock", locked(&self.root.join("Cargo.lock"))?.as_bytes());
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// An operation's files in one crate, and those of the operations they use, by file name.
    fn with_uses(
        &self,
        folder: &Path,
        stem: &str,
        operations: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Rc<Tokens>>, Error> {
        let mut found = BTreeMap::new();
        let (mut seen, mut open) = (BTreeSet::new(), vec![stem.to_owned()]);
        while let Some(module) = open.pop() {
            if !seen.insert(module.clone()) {
                continue;
            }
            for (name, tokens) in self.files(folder, &module)? {
                open.extend(tokens.uses.intersection(operations).cloned());
                found.insert(name, tokens);
            }
        }
        Ok(found)
    }

    /// The files of a module with their names from `folder` on: `<module>.rs` and everything in `<module>/`, but for
    /// modules that are declared under `#[cfg(test)]`.
    fn files(&self, folder: &Path, module: &str) -> Result<BTreeMap<String, Rc<Tokens>>, Error> {
        let mut found = BTreeMap::new();
        self.collect(&folder.join(module), module, &mut found)?;
        Ok(found)
    }

    fn collect(&self, module: &Path, name: &str, found: &mut BTreeMap<String, Rc<Tokens>>) -> Result<(), Error> {
        let mut for_tests = BTreeSet::new();
        let own =
            [(format!("{name}.rs"), module.with_extension("rs")), (format!("{name}/mod.rs"), module.join("mod.rs"))];
        for (name, file) in own.into_iter().filter(|(_, file)| file.is_file()) {
            let tokens = self.tokens(&file)?;
            for_tests.extend(tokens.test_modules.iter().cloned());
            found.insert(name, tokens);
        }
        if module.is_dir() {
            for inner in modules(module)?.difference(&for_tests) {
                self.collect(&module.join(inner), &format!("{name}/{inner}"), found)?;
            }
        }
        Ok(())
    }

    fn tokens(&self, file: &Path) -> Result<Rc<Tokens>, Error> {
        if let Some(tokens) = self.read.borrow().get(file) {
            return Ok(tokens.clone());
        }
        let text = std::fs::read_to_string(file).map_err(|source| Error::Read { path: file.to_owned(), source })?;
        let stream: TokenStream = text
            .parse()
            .map_err(|e: proc_macro2::LexError| Error::Parse { path: file.to_owned(), reason: e.to_string() })?;
        let mut tokens = Tokens::default();
        tokens.add(stream, true);
        let tokens = Rc::new(tokens);
        self.read.borrow_mut().insert(file.to_owned(), tokens.clone());
        Ok(tokens)
    }
}

/// The modules of a folder: files without their ending, and folders.
fn modules(folder: &Path) -> Result<BTreeSet<String>, Error> {
    let fault = |source| Error::Read { path: folder.to_owned(), source };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        let is_source = path.is_dir() || path.extension().is_some_and(|e| e == "rs");
        if let Some(name) = path.file_stem().and_then(|s| s.to_str()).filter(|_| is_source) {
            names.insert(name.to_owned());
        }
    }
    names.remove("mod");
    Ok(names)
}

/// A source as its fingerprint sees it.
#[derive(Default)]
struct Tokens {
    bytes: Vec<u8>,
    /// Names behind `crate` and `super` in paths.
    uses: BTreeSet<String>,
    /// Modules in other files that only tests see.
    test_modules: BTreeSet<String>,
}

impl Tokens {
    /// Adds what a file (`top`) or a pair of brackets holds.
    fn add(&mut self, stream: TokenStream, top: bool) {
        let mut trees: Vec<TokenTree> = stream.into_iter().collect();
        if !top {
            drop_trailing_comma(&mut trees);
        }
        let mut at = 0;
        while at < trees.len() {
            if let Some((body, after)) = attribute(&trees, at) {
                if is_doc(&body) {
                    at = after;
                    continue;
                }
                if let Some(end) = is_cfg_test(&body).then(|| end_of_item(&trees, after)).flatten() {
                    self.test_modules.extend(module_elsewhere(&trees[after..end]));
                    at = end;
                    continue;
                }
            }
            if matches!(&trees[at], TokenTree::Ident(word) if word == "crate" || word == "super") {
                path_names(&trees[at + 1..], &mut self.uses);
            }
            self.one(&trees[at]);
            at += 1;
        }
    }

    fn one(&mut self, tree: &TokenTree) {
        // A kind, then the text and a zero byte, which no token contains but inside an escape.
        let mut put = |kind: u8, text: &str| {
            self.bytes.push(kind);
            self.bytes.extend_from_slice(text.as_bytes());
            self.bytes.push(0);
        };
        match tree {
            TokenTree::Ident(word) => put(b'i', &word.to_string()),
            TokenTree::Literal(value) => put(b'l', &value.to_string()),
            TokenTree::Punct(sign) => {
                let joint = matches!(sign.spacing(), Spacing::Joint);
                put(if joint { b'j' } else { b'p' }, &sign.as_char().to_string());
            }
            TokenTree::Group(group) => {
                put(b'g', delimiter(group.delimiter()));
                self.add(group.stream(), false);
                self.bytes.push(b'e');
            }
        }
    }
}

/// Takes away the comma before a closing bracket, but for one that is all there is: that is somebody's word, as in a
/// macro's pattern. A sign before the comma then stands before the bracket, and is no longer joined to anything.
fn drop_trailing_comma(trees: &mut Vec<TokenTree>) {
    if trees.len() < 2 || !matches!(trees.last(), Some(TokenTree::Punct(sign)) if sign.as_char() == ',') {
        return;
    }
    trees.pop();
    if let Some(TokenTree::Punct(sign)) = trees.last_mut() {
        *sign = Punct::new(sign.as_char(), Spacing::Alone);
    }
}

fn delimiter(delimiter: Delimiter) -> &'static str {
    match delimiter {
        Delimiter::Parenthesis => "(",
        Delimiter::Brace => "{",
        Delimiter::Bracket => "[",
        Delimiter::None => "",
    }
}

/// The tokens inside an attribute that starts at `at`, and where it ends.
fn attribute(trees: &[TokenTree], at: usize) -> Option<(Vec<TokenTree>, usize)> {
    let punct = |at: usize, sign: char| matches!(trees.get(at), Some(TokenTree::Punct(p)) if p.as_char() == sign);
    if !punct(at, '#') {
        return None;
    }
    let open = if punct(at + 1, '!') { at + 2 } else { at + 1 };
    match trees.get(open) {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
            Some((group.stream().into_iter().collect(), open + 1))
        }
        _ => None,
    }
}

fn is_doc(body: &[TokenTree]) -> bool {
    matches!(body, [TokenTree::Ident(word), ..] if word == "doc")
}

fn is_cfg_test(body: &[TokenTree]) -> bool {
    match body {
        [TokenTree::Ident(word), TokenTree::Group(group)] if word == "cfg" => {
            let inside: Vec<TokenTree> = group.stream().into_iter().collect();
            matches!(&inside[..], [TokenTree::Ident(word)] if word == "test")
        }
        _ => false,
    }
}

/// Where the item that starts at `at` ends; `None` where it is nothing that this function knows, which then counts.
fn end_of_item(trees: &[TokenTree], at: usize) -> Option<usize> {
    let mut first = at;
    while let Some((_, after)) = attribute(trees, first) {
        first = after;
    }
    let word = |at: usize| match trees.get(at) {
        Some(TokenTree::Ident(word)) => word.to_string(),
        _ => String::new(),
    };
    if word(first) == "pub" {
        first += 1;
        if matches!(trees.get(first), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis) {
            first += 1;
        }
    }
    let is_function = ["fn", "unsafe", "async", "extern"].contains(&word(first + 1).as_str());
    let ends_with_brace = match word(first).as_str() {
        "mod" | "fn" | "impl" | "struct" | "enum" | "trait" | "unsafe" | "async" | "macro_rules" => true,
        "const" => is_function,
        "use" | "static" | "type" | "let" => false,
        _ => return None,
    };
    let ends = |tree: &TokenTree| match tree {
        TokenTree::Punct(sign) => sign.as_char() == ';',
        TokenTree::Group(group) => ends_with_brace && group.delimiter() == Delimiter::Brace,
        _ => false,
    };
    trees[first..].iter().position(ends).map(|end| first + end + 1)
}

/// The name in `mod name;`.
fn module_elsewhere(item: &[TokenTree]) -> Option<String> {
    match item {
        [.., TokenTree::Ident(word), TokenTree::Ident(name), TokenTree::Punct(end)]
            if word == "mod" && end.as_char() == ';' =>
        {
            Some(name.to_string())
        }
        _ => None,
    }
}

/// The names in the path behind `crate` or `super`, with all of a group such as `{linear, sum}`.
fn path_names(behind: &[TokenTree], names: &mut BTreeSet<String>) {
    for pair in behind.chunks(3) {
        let [TokenTree::Punct(a), TokenTree::Punct(b), next] = pair else { return };
        if a.as_char() != ':' || b.as_char() != ':' {
            return;
        }
        match next {
            TokenTree::Ident(word) => names.extend([word.to_string()]),
            TokenTree::Group(group) => return all_names(group.stream(), names),
            _ => return,
        }
    }
}

fn all_names(stream: TokenStream, names: &mut BTreeSet<String>) {
    for tree in stream {
        match tree {
            TokenTree::Ident(word) => names.extend([word.to_string()]),
            TokenTree::Group(group) => all_names(group.stream(), names),
            _ => {}
        }
    }
}

/// Name, version and checksum of every locked package of [`COMPILERS`], a line each.
fn locked(path: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let mut lines = String::new();
    for package in text.split("[[package]]").skip(1) {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            line.unwrap_or_default().trim_matches('"').to_owned()
        };
        let name = value("name");
        if COMPILERS.iter().any(|of| name.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('-')))
        {
            lines += &format!("{name} {} {}\n", value("version"), value("checksum"));
        }
    }
    if lines.is_empty() { Err(Error::NoCubecl { path: path.to_owned() }) } else { Ok(lines) }
}

#[cfg(test)]
mod tests;
