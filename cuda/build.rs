//! Gives the crate the fingerprints of its own sources, and the receipts that are in the repository.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use dormouse_receipts::Sources;
use dormouse_receipts::fingerprint::INPUTS;

fn main() -> Result<(), Box<dyn Error>> {
    let crate_root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let root = crate_root.parent().ok_or("the crate lies in a folder of the workspace")?;
    println!("cargo::rerun-if-changed=build.rs");
    let mut text = String::from("/// Stems with the fingerprints of their sources.\n");
    text += "const FINGERPRINTS: &[(&str, &str)] = &[\n";
    if INPUTS.iter().all(|input| root.join(input).exists()) {
        for input in INPUTS {
            println!("cargo::rerun-if-changed={}", root.join(input).display());
        }
        let sources = Sources::of(root);
        for stem in sources.stems()? {
            writeln!(text, "    ({stem:?}, {:?}),", sources.fingerprint(&stem)?)?;
        }
    } else {
        // Built without the workspace around it: no receipt can then be held against its sources, so none is valid.
        println!("cargo::warning=the workspace is not around dormouse-cuda, so no fused kernel has a valid receipt");
    }
    text += "];\n\n/// Receipts by file name.\nconst RECEIPTS: &[(&str, &str)] = &[\n";
    let folder = root.join("golden/receipts");
    if folder.is_dir() {
        println!("cargo::rerun-if-changed={}", folder.display());
        for path in receipts(&folder)? {
            let name = path.file_name().and_then(|n| n.to_str()).ok_or("a receipt's name is not UTF-8")?;
            writeln!(text, "    ({name:?}, {:?}),", std::fs::read_to_string(&path)?)?;
        }
    }
    text += "];\n";
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("receipts.rs"), text)?;
    Ok(())
}

/// The receipts of a folder in alphabetical order.
fn receipts(folder: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "toml") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
