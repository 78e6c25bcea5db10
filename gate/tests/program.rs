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
fn the_list_has_every_gate_and_as_many_mutants_as_the_other_list() {
    let (list, mutants) = (gate(&["--list", "--tsv"]), gate(&["--mutants"]));
    assert!(list.status.success() && mutants.status.success());
    let (list, mutants) = (text(&list.stdout), text(&mutants.stdout));
    let rows: Vec<Vec<&str>> = list.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(rows[0].join(" "), "stem gate backend cases mutants status reason");
    let number = |stem: &str, gate: &str, backend: &str| -> usize {
        let row = rows.iter().find(|row| row[..3] == [stem, gate, backend]).unwrap_or_else(|| panic!("{stem} {gate}"));
        row[4].parse().unwrap()
    };
    let planted = |stem: &str, gate: &str, backend: &str| {
        let of = mutants.lines().map(|line| line.split('\t').collect::<Vec<_>>());
        of.filter(|row| {
            row[..2] != [stem, "misread"] && row[0] == stem && row[2] == gate && row[3].starts_with(backend)
        })
        .count()
    };
    for stem in ["kda", "rms_norm", "adamw"] {
        for gate in ["fd", "adj", "form", "diff", "meta", "det"] {
            assert_eq!(number(stem, gate, "cpu"), planted(stem, gate, "cpu"), "{stem} {gate}");
        }
        for gate in ["diff", "meta", "poison", "det"] {
            assert_eq!(number(stem, gate, "device"), planted(stem, gate, "lavapipe"), "{stem} {gate} of kernels");
        }
    }
    let status = |stem: &str, gate: &str| rows.iter().find(|row| row[..2] == [stem, gate]).unwrap()[5];
    assert_eq!(
        (status("adamw", "fd"), status("kda", "fd"), status("engram_hash", "golden")),
        ("N/A", "RUNS", "NOTRUN")
    );
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

#[test]
fn a_case_that_is_none_names_those_there_are_and_some_cases_let_nothing_bite() {
    let of = |more: &[&str]| gate(&[&["rms_norm", "--backend", "cpu", "--random", "0"], more].concat());
    let out = of(&["--case", "nosuch"]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stdout));
    let (words, list) = (text(&out.stderr), text(&gate(&["rms_norm", "--list"]).stdout));
    assert!(words.contains("--case nosuch: no case has that in its name; there are\n  rms_norm: "), "{words}");
    let fd: Vec<&str> = list.lines().find(|line| line.starts_with("rms_norm\tfd\t")).unwrap().split('\t').collect();
    assert_eq!(words.matches(", ").count() + 1, fd[3].parse::<usize>().unwrap(), "{words}");
    // One of the names, as the message has it.
    let name = words.rsplit_once("rms_norm: ").unwrap().1.split(", ").next().unwrap();
    let out = of(&["--case", name]);
    let words = text(&out.stdout);
    assert!(out.status.success(), "{words}");
    let bite = words.lines().find(|line| line.starts_with("rms_norm") && line.contains(" bite ")).unwrap();
    assert!(bite.contains("NOTRUN") && bite.contains("leave --case out"), "{words}");
    let required = of(&["--case", name, "--require", "cpu"]);
    assert!(
        text(&required.stdout).contains("FAIL --require cpu: rms_norm bite did not run"),
        "{}",
        text(&required.stdout)
    );
}

/// Mesa's layer asks for a display server wherever adapters are listed, and complains where there is none.
#[test]
fn errors_come_without_lines_of_the_graphics_library() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse-gate"));
    command.args(["residual", "--backend", "lavapipe", "--only", "det", "--arm", "plain", "--random", "0"]);
    let out = command.env_remove("XDG_RUNTIME_DIR").env_remove("NODEVICE_SELECT").output().unwrap();
    assert_eq!(text(&out.stderr), "");
}

#[test]
fn a_mutant_of_another_backend_is_not_said_to_survive() {
    let out = gate(&["rms_norm", "--mutant", "dx-zero", "--backend", "cuda", "--random", "0"]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stdout));
    assert!(text(&out.stderr).contains("--mutant dx-zero: none of the chosen"), "{}", text(&out.stderr));
}
