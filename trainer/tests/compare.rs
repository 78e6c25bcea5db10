//! `dormouse compare` as a process: verdicts, files, stops, refusals.

mod process;

use std::path::PathBuf;

use dormouse::checkpoint::{State, newest_good};
use process::{Done, Place, signal, wait_until};

/// Arguments of a comparison of runs that take a second each and save every 5 steps.
fn compare<'a>(steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["compare", "--backend", "cpu", "--control", "tiny", "--data", "text", "--steps", steps];
    for both in [
        "model.width=32",
        "model.heads=1",
        "model.head_width=32",
        "model.rank=16",
        "model.ffn_width=32",
        "data.eval_windows=4",
        "data.eval_bytes=64",
        "log.sample_bytes=0",
        "log.every_steps=5",
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=100",
    ] {
        arguments.extend(["--both", both]);
    }
    arguments.extend(more);
    arguments
}

/// A place with a text of its own, small enough that its n-grams are counted at once.
fn place() -> Place {
    let place = Place::new();
    let words = ["the cat ", "sat on ", "a mat. ", "no rat ", "ran to ", "it and "];
    let mut state = 7u32;
    let mut text = String::new();
    while text.len() < 60_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text.push_str(words[(state >> 24) as usize % words.len()]);
    }
    place.file("text", text.as_bytes());
    place
}

/// The run folders of a place, sorted.
fn folders(place: &Place) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(place.path("runs/compare")).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    all.sort();
    all
}

fn states(place: &Place) -> Vec<(String, State)> {
    let of = |path: &PathBuf| {
        let state = newest_good(&path.join("checkpoints")).unwrap().loaded.state;
        (path.file_name().unwrap().to_string_lossy().into_owned(), state)
    };
    folders(place).iter().map(of).collect()
}

fn tsv(place: &Place, name: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(place.path(name)).unwrap();
    text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

/// How many processes have trained in each run folder.
fn starts(place: &Place) -> Vec<usize> {
    let count = |path: &PathBuf| {
        let text = std::fs::read_to_string(path.join("run.json")).unwrap();
        serde_json::from_str::<Vec<serde_json::Value>>(&text).unwrap().len()
    };
    folders(place).iter().map(count).collect()
}

#[test]
fn a_comparison_is_made_once_and_said_again() {
    let place = place();
    let line = compare("6", &["--set", "optimizer.lr=3e-3", "--tsv", "out.tsv"]);
    let done = place.run(&line);
    done.expect(0, &[]);
    for words in [
        "3 seeds (0 to 2), 6 steps of 256 bytes a run, scored on 4 windows of 64 bytes",
        "  optimizer.lr = 0.003, control 0.001",
        "[1/6] control seed 0: held-out bpb ",
        "candidate seed 2 | step 5/6 | loss ",
        "candidate: ",
    ] {
        assert!(done.out.contains(words), "`{words}` is not in: {}", done.out);
    }
    let table = done.out.lines().position(|line| line.starts_with("held-out bpb  ")).unwrap();
    let words: Vec<&str> = done.out.lines().nth(table).unwrap().split_whitespace().collect();
    let columns = ["held-out", "bpb", "mean", "low", "high", "spread", "ms/step", "launches", "nodes", "verdict"];
    assert_eq!(words, columns);
    assert!(!done.out.contains("generate  "), "a run's own lines belong into its log: {}", done.out);
    let rows = tsv(&place, "out.tsv");
    assert_eq!(rows.len(), 3);
    assert!(["WIN", "TIE", "LOSS"].contains(&rows[2][1].as_str()), "{rows:?}");
    assert_eq!((folders(&place).len(), starts(&place)), (6, vec![1; 6]));
    // README's table of the run folder has a row for everything in it.
    for entry in std::fs::read_dir(&folders(&place)[0]).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(include_str!("../../README.md").contains(&format!("| `{name}")), "{name}");
    }
    // Each run is a usual run folder with the lines of `train`.
    let log = std::fs::read_to_string(folders(&place)[0].join("log.txt")).unwrap();
    assert!(log.contains("step 6/6 | loss") && log.contains("final held-out bpb model="), "{log}");

    let again = place.run(&line);
    again.expect(0, &[]);
    assert_eq!(again.out.matches("(done before)").count(), 6, "{}", again.out);
    assert_eq!((tsv(&place, "out.tsv"), starts(&place)), (rows.clone(), vec![1; 6]));
    // Another candidate against the same control adds its own runs only.
    let other = place.run(&compare("6", &["--set", "optimizer.lr=5e-3"]));
    other.expect(0, &[]);
    assert_eq!((other.out.matches("(done before)").count(), folders(&place).len()), (3, 9), "{}", other.out);
}

#[test]
fn a_run_of_a_comparison_is_the_run_that_train_makes() {
    let place = place();
    place.run(&compare("6", &["--set", "optimizer.lr=3e-3"])).expect(0, &[]);
    let compared = states(&place);
    let mut train: Vec<&str> = compare("6", &["--name", "a", "--seed", "1", "--preset", "tiny", "--lr", "3e-3"]);
    train[0] = "train";
    let control = train.iter().position(|word| *word == "--control").unwrap();
    train.drain(control..control + 2);
    let train: Vec<&str> = train.into_iter().map(|word| if word == "--both" { "--set" } else { word }).collect();
    place.run(&train).expect(0, &[]);
    let alone = newest_good(&place.path("runs/a/checkpoints")).unwrap().loaded.state;
    let equal: Vec<&str> =
        compared.iter().filter(|(_, state)| *state == alone).map(|(name, _)| name.as_str()).collect();
    assert!(equal.len() == 1 && equal[0].ends_with("-seed1"), "{equal:?}");
}

#[test]
fn a_stop_loses_nothing_and_the_printed_command_goes_on() {
    let (whole, broken) = (place(), place());
    let line = compare("40", &["--set", "optimizer.lr=3e-3", "--tsv", "out.tsv"]);
    whole.run(&line).expect(0, &[]);
    let saved = |count: usize| {
        let at = move |path: &PathBuf| path.join("checkpoints/step_000010").exists();
        wait_until("a checkpoint", || folders(&broken).iter().filter(|path| at(path)).count() >= count);
    };
    // Killed before the first checkpoint, stopped in a run, killed in a run.
    let mut child = broken.spawn(&line);
    wait_until("a run folder", || !folders(&broken).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    let child = broken.spawn(&line);
    saved(2);
    signal(&child, libc::SIGINT);
    let done = Done::of(child.wait_with_output().unwrap());
    done.expect(0, &[]);
    let said = done.out.lines().find(|line| line.starts_with("stopped: ")).unwrap_or_else(|| panic!("{}", done.out));
    assert!(said.contains("of 6 runs are done, and the next goes on from its checkpoint"), "{said}");
    let mut child = broken.spawn(&line);
    saved(4);
    child.kill().unwrap();
    child.wait().unwrap();
    let command = done.out.lines().rfind(|line| line.starts_with("resume ")).unwrap()["resume".len()..].trim();
    let output = std::process::Command::new("sh").args(["-c", command]).current_dir(broken.path("")).output();
    let last = Done::of(output.unwrap());
    last.expect(0, &[]);
    assert!(last.out.contains("(done before)"), "{}", last.out);
    assert_eq!(tsv(&broken, "out.tsv"), tsv(&whole, "out.tsv"));
    assert_eq!(states(&broken), states(&whole));
}

#[test]
fn a_candidate_that_is_not_finite_has_lost_and_such_a_control_is_exit_3() {
    let place = place();
    let line = compare("2", &["--both", "optimizer.warmup_min_steps=0", "--set", "optimizer.lr=3e38"]);
    let done = place.run(&line);
    done.expect(0, &[]);
    assert!(done.out.contains("candidate: LOSS: a run of it was not finite"), "{}", done.out);
    assert!(done.out.contains("candidate seed 1: not needed"), "{}", done.out);
    let again = place.run(&line);
    again.expect(0, &[]);
    assert_eq!(again.out.matches("(done before)").count(), 4, "{}", again.out);
    let both =
        ["--both", "optimizer.warmup_min_steps=0", "--both", "optimizer.lr=3e38", "--set", "optimizer.beta1=0.8"];
    for _ in 0..2 {
        place.run(&compare("2", &both)).expect(3, &["the control was not finite with seed 0", "optimizer.lr"]);
    }
}

#[test]
fn what_cannot_be_compared_is_refused_before_anything_is_written() {
    let place = place();
    let refused = |more: &[&str], code: i32, words: &[&str]| {
        place.run(&compare("4", more)).expect(code, words);
        assert!(!place.path("runs").exists(), "{more:?}");
    };
    refused(&["--set", "train.batch_rows=8"], 2, &["would not see the bytes", "`train.batch_rows` is 8"]);
    refused(&["--set", "data.path="], 2, &["other bytes than the control's"]);
    refused(&["--set", "optimizer.lr=3e-3", "--seeds", "2"], 2, &["--seeds is 2, expected 3 or more"]);
    refused(&[], 2, &["there is no candidate"]);
    refused(&["--candidate", "missing.toml"], 2, &["missing.toml"]);
    place.file("a.toml", b"[optimizer]\nlrr = 1\n");
    refused(&["--candidate", "a.toml"], 2, &["`a.toml` line 2", "nearest is `optimizer.lr`"]);
    refused(&["--set", "optimizer.lr=3e-3", "--eval", "none"], 4, &["`none` does not exist"]);
}

#[test]
fn a_candidate_that_cannot_run_is_found_before_the_first_run() {
    let place = place();
    let table = ["model.engram=host", "model.engram_rows=1400000000", "model.engram_width=256"];
    let done = place.run(&compare("6", &table.map(|set| ["--set", set]).concat()));
    done.expect(2, &["compare: `candidate` cannot run", "`model.engram_rows` is 1400000000", "this machine has "]);
    assert!(done.out.is_empty() && folders(&place).is_empty(), "{}", done.out);
}

#[test]
fn runs_of_another_build_count_only_if_that_is_said() {
    let place = place();
    let set = ["--set", "optimizer.lr=3e-3"];
    place.run(&compare("2", &set)).expect(0, &[]);
    let provenance = folders(&place)[0].join("run.json");
    let text = std::fs::read_to_string(&provenance).unwrap();
    let at = text.find("\"binary_blake3\": \"").unwrap() + "\"binary_blake3\": \"".len();
    std::fs::write(&provenance, format!("{}{}{}", &text[..at], "f".repeat(64), &text[at + 64..])).unwrap();
    place.run(&compare("2", &set)).expect(2, &["ffffffffffff", "a difference might be the program's", "--any-build"]);
    place.run(&compare("2", &[&set[..], &["--any-build"]].concat())).expect(0, &[]);
}

#[test]
fn a_table_that_cannot_be_written_is_exit_1_before_the_first_run() {
    let place = place();
    let to = |path: &str| place.run(&compare("2", &["--set", "optimizer.lr=3e-3", "--tsv", path]));
    place.file("file", b"");
    for path in ["none/out.tsv", "file/out.tsv", "."] {
        let done = to(path);
        done.expect(1, &[&format!("cannot write `{path}`"), "give --tsv a file in a folder that exists"]);
        assert!(done.out.is_empty() && !place.path("runs").exists(), "{}", done.out);
    }
    // A disk that is full when the runs are done: the table was printed.
    let done = to("/dev/full");
    done.expect(1, &["cannot write `/dev/full`", "runs that are done are not made again"]);
    assert!(done.out.contains("verdict"), "{}", done.out);
}

#[test]
fn help_has_examples_and_the_rule() {
    let done = Place::new().run(&["compare", "--help"]);
    done.expect(0, &[]);
    for words in ["Examples:", "dormouse compare --set optimizer.lr=1e-3", "LOSS:", "WIN:", "TIE:", "--any-build"] {
        assert!(done.out.contains(words), "`{words}` is not in: {}", done.out);
    }
}
