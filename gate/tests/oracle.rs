//! Gate `oracle` as `cargo xtask gate` runs it.
#![cfg(feature = "oracle")]

use std::process::Command;

fn lines(arguments: &[&str]) -> (Option<i32>, Vec<Vec<String>>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse-gate"));
    command.args(["--backend", "cpu", "--tsv", "--seed", "5"]).args(arguments);
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    (out.status.code(), text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect())
}

#[test]
fn every_operation_has_an_oracle_and_agrees_with_it() {
    let (code, lines) = lines(&["--only", "oracle", "--random", "2"]);
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(lines.len() > 20 && lines.iter().all(|line| line[5] == "PASS"), "{lines:?}");
}

#[test]
fn a_formula_misread_everywhere_alike_is_seen_by_the_oracle_alone() {
    let (code, lines) = lines(&["rms_norm", "--mutant", "misread", "--random", "4"]);
    assert_eq!(code, Some(1), "{lines:?}");
    let red: Vec<&str> = lines.iter().filter(|line| line[5] == "FAIL").map(|line| line[1].as_str()).collect();
    let green = lines.iter().filter(|line| line[5] == "PASS").count();
    // Golden values, which are other people's too, would see it as well, where there are any.
    assert!(red == ["oracle"] && green >= 6, "{lines:?}");
}
