//! Gate `oracle` as `cargo xtask gate` runs it.
#![cfg(feature = "oracle")]

use std::process::Command;

fn lines(arguments: &[&str]) -> (Option<i32>, Vec<Vec<String>>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse-gate"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.args(["--backend", "cpu", "--tsv", "--seed", "5"]).args(arguments);
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    (out.status.code(), text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect())
}

/// Every stem; a new operation gets an oracle before it gets a line here.
const STEMS: [&str; 28] = [
    "adamw",
    "blend",
    "controller",
    "cross_entropy",
    "decay_gate",
    "ema",
    "embedding",
    "engram",
    "engram_hash",
    "expert",
    "gated_rms_norm",
    "jepa",
    "kda",
    "koleo",
    "l2_norm",
    "layer_norm",
    "linear",
    "mask_vector",
    "muon",
    "record",
    "residual",
    "retract",
    "retract_all",
    "rms_norm",
    "row_adam",
    "sanitise",
    "short_conv",
    "spectral",
];

#[test]
fn every_operation_has_an_oracle_and_agrees_with_it() {
    let (code, lines) = lines(&["--only", "oracle", "--random", "2", "--require", "cpu"]);
    assert_eq!(code, Some(0), "{lines:?}");
    let passed: Vec<[&str; 3]> = lines.iter().map(|line| [&line[0], &line[1], &line[5]].map(String::as_str)).collect();
    let mut passed: Vec<&str> =
        passed.into_iter().map(|line| if line[1..] == ["oracle", "PASS"] { line[0] } else { "" }).collect();
    passed.sort_unstable();
    assert_eq!(passed, STEMS, "{lines:?}");
}

/// The options that devices do not have are no cases of theirs, but they are of the oracle's.
#[test]
fn options_that_devices_refuse_are_compared_too() {
    for (stem, option) in
        [("kda", "-hv4"), ("kda", "-b-w"), ("kda", "-cu_seqlens"), ("spectral", "-ternary"), ("expert", "-fp8")]
    {
        let (code, lines) = lines(&[stem, "--only", "oracle", &format!("--case={option}")]);
        assert_eq!(code, Some(0), "{lines:?}");
        assert!(lines.len() == 1 && lines[0][5] == "PASS", "{stem} {option}: {lines:?}");
    }
}

#[test]
fn a_formula_misread_everywhere_alike_is_seen_only_by_what_other_people_wrote() {
    let (code, lines) = lines(&["rms_norm", "--mutant", "misread", "--random", "4"]);
    assert_eq!(code, Some(1), "{lines:?}");
    let red: Vec<&str> = lines.iter().filter(|line| line[5] == "FAIL").map(|line| line[1].as_str()).collect();
    let green: Vec<&str> = lines.iter().filter(|line| line[5] == "PASS").map(|line| line[1].as_str()).collect();
    assert_eq!(red, ["oracle", "golden"], "{lines:?}");
    assert_eq!(green, ["fd", "adj", "form", "diff", "meta", "det"], "{lines:?}");
}
