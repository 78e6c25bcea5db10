//! The program as `cargo xtask` runs it.
#![cfg(feature = "devices")]

use std::process::{Command, Output};

fn gate(arguments: &[&str]) -> Output {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    Command::new(env!("CARGO_BIN_EXE_dormouse-gate")).current_dir(root).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn mutants_of_the_reference_and_of_kernels_are_listed_with_the_gate_that_catches_them() {
    let out = gate(&["rms_norm", "--mutants"]);
    let text = text(&out.stdout);
    assert!(out.status.success(), "{text}");
    for line in ["rms_norm\tdx-zero\tfd\tcpu", "rms_norm\tmean-dropped\tdiff\tlavapipe,cuda fused"] {
        assert!(text.lines().any(|found| found == line), "`{line}` is not in: {text}");
    }
}

#[test]
fn a_wrong_command_line_ends_with_2_and_says_what_there_is() {
    for (arguments, words) in [
        (&["rms_nrom"][..], "no operation `rms_nrom`; there are adamw"),
        (&["--only", "dif"], "no gate `dif`; there are fd"),
        (&["--require", "gpu"], "--require gpu: this build knows cpu, lavapipe, cuda"),
        (&["rms_norm", "--mutant", "none"], "no mutant `none`; list them with --mutants"),
        (&["--mutant", "dx-zero"], "--mutant needs exactly one operation"),
    ] {
        let out = gate(&[arguments, &["--backend", "cpu", "--random", "0"]].concat());
        assert_eq!(out.status.code(), Some(2), "{arguments:?}");
        assert!(text(&out.stderr).contains(words), "{arguments:?}: {}", text(&out.stderr));
    }
}

#[test]
fn a_gate_that_cannot_run_is_counted_and_never_as_passed() {
    // No machine has an adapter that answers here: the loader of Vulkan is told of no driver.
    let program = env!("CARGO_BIN_EXE_dormouse-gate");
    let run = |more: &[&str]| {
        let mut command = Command::new(program);
        command.args(["residual", "--backend", "lavapipe", "--only", "det"]).args(more);
        command.env("VK_DRIVER_FILES", "/nonexistent.json").env("VK_ICD_FILENAMES", "/nonexistent.json");
        command.output().unwrap()
    };
    let (out, required) = (run(&[]), run(&["--require", "lavapipe"]));
    let (text, of_required) = (text(&out.stdout), text(&required.stdout));
    assert!(out.status.success() && text.contains("PASS 0 FAIL 0 NOTRUN 2"), "{text}");
    assert!(required.status.code() == Some(1) && of_required.contains("FAIL --require lavapipe"), "{of_required}");
}
