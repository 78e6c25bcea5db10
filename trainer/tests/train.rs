//! Training as a process: kills, signals, full disks, damaged checkpoints.

mod process;

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use dormouse::checkpoint::{State, newest_good};
use process::{Done, Place, signal, train, wait_for, wait_until};

fn state(place: &Place, name: &str) -> State {
    newest_good(&place.path("runs").join(name).join("checkpoints")).unwrap().loaded.state
}

fn checkpoints(place: &Place, name: &str) -> PathBuf {
    place.path("runs").join(name).join("checkpoints")
}

/// The names in a folder, or none if there is no folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn an_update_that_overflows_is_exit_3_and_is_never_saved() {
    let place = Place::new();
    // Every gradient is finite, and the weights after the one update are not.
    let done = place.run(&train("a", "1", &["--set", "optimizer.lr=3e38", "--set", "optimizer.warmup_min_steps=0"]));
    done.expect(3, &["error: train: ", "is not finite", "lower optimizer.lr", "there is no checkpoint to go on from"]);
    assert!(!done.out.contains("final held-out"), "{}", done.out);
    assert!(names(&checkpoints(&place, "a")).is_empty(), "{:?}", names(&checkpoints(&place, "a")));
    // With Muon the matrices have a rate of their own, and it is the one at fault here.
    let muon = ["optimizer.rule=muon", "optimizer.muon_lr=3e38", "optimizer.warmup_min_steps=0"];
    let muon = muon.map(|set| ["--set", set]).concat();
    place.run(&train("b", "1", &muon)).expect(3, &["is not finite", "lower optimizer.muon_lr", "or optimizer.lr"]);
}

#[test]
fn a_second_process_in_one_run_folder_is_refused() {
    let place = Place::new();
    let mut first = place.spawn(&train("a", "100000", &[]));
    wait_for(&checkpoints(&place, "a").join("step_000005"));
    place.run(&["train", "--resume", "runs/a"]).expect(2, &["another process trains in `runs/a`"]);
    // Reading is no training.
    place.run(&["generate", "runs/a", "--prompt", "And ", "--bytes", "2"]).expect(0, &[]);
    first.kill().unwrap();
    first.wait().unwrap();
    let resumed = train("b", "100000", &["--stop-at-step", "6"]);
    let resumed: Vec<&str> = resumed.into_iter().filter(|word| !["--name", "b"].contains(word)).collect();
    place.run(&[&resumed[..], &["--resume", "runs/a"]].concat()).expect(0, &[]);
}

#[test]
fn the_whole_round_of_commands() {
    let place = Place::new();
    let done = place.run(&train("a", "10", &[]));
    done.expect(0, &[]);
    let last: Vec<&str> = done.out.lines().rev().take(5).collect();
    let words: Vec<&str> = last[4].split(' ').collect();
    assert_eq!(words[..3], ["final", "held-out", "bpb"], "{}", done.out);
    let keys: Vec<&str> = words[3..].iter().map(|word| word.split('=').next().unwrap()).collect();
    assert_eq!(keys, ["model", "kn1", "kn2", "kn3", "kn4", "kn5", "kn6", "windows"]);
    assert!(words[3..].iter().all(|word| word.split('=').nth(1).unwrap().parse::<f64>().is_ok()));
    assert!(done.out.contains("no --data given"), "{}", done.out);
    // The printed commands work as printed.
    for (label, more) in [("generate", vec!["--bytes", "12"]), ("resume", vec![])] {
        let line = done.out.lines().rfind(|line| line.starts_with(label)).unwrap();
        let command = line[label.len()..].trim().to_owned() + " " + &more.join(" ");
        let output = std::process::Command::new("sh").args(["-c", &command]).current_dir(place.path("")).output();
        Done::of(output.unwrap()).expect(0, &[]);
    }
    let generated = place.run(&["generate", "runs/a", "--prompt", "And ", "--bytes", "20", "--temperature", "0"]);
    generated.expect(0, &[]);
    assert!(generated.out.starts_with("And "), "{}", generated.out);
    let scored = place.run(&["eval", "runs/a"]);
    scored.expect(0, &[]);
    assert!(scored.out.contains("held-out bpb model="), "{}", scored.out);
    let inspected = place.run(&["inspect", "--run", "runs/a"]);
    inspected.expect(0, &[]);
    assert!(inspected.out.contains("step_000010: good"), "{}", inspected.out);
    place.run(&train("a", "10", &[])).expect(2, &["exists and is not overwritten", "--resume"]);
    place.run(&["eval", "runs"]).expect(2, &["not a run folder"]);
    place.run(&["generate", "runs/a", "--prompt", ""]).expect(2, &["prompt is empty"]);
    // A full disk is an error; a reader that has seen enough is none.
    for (redirect, code, words) in [("> /dev/full", 1, &["cannot write standard output"][..]), ("| head -c 2", 0, &[])]
    {
        let line = done.out.lines().rfind(|line| line.starts_with("generate")).unwrap();
        let command = format!("{} --bytes 12 {redirect}", line["generate".len()..].trim());
        let output = std::process::Command::new("sh").args(["-c", &command]).current_dir(place.path("")).output();
        Done::of(output.unwrap()).expect(code, words);
    }
}

/// A run with a memory on the host as a user has it: trained, stopped, resumed, scored, used; the same as on the device.
#[test]
fn a_run_with_a_memory_on_the_host_goes_on_to_the_bit() {
    let place = Place::new();
    let more = |engram: &'static str| ["--set", engram, "--set", "model.engram_rows=512", "--accumulate", "2"];
    place.run(&train("device", "8", &more("model.engram=device"))).expect(0, &[]);
    place.run(&train("whole", "8", &more("model.engram=host"))).expect(0, &[]);
    let stopped = [&more("model.engram=host")[..], &["--stop-at-step", "5"]].concat();
    place.run(&train("half", "8", &stopped)).expect(0, &[]);
    let other = ["train", "--resume", "runs/half", "--set", "model.engram_rows=64"];
    let words = "`model.engram_rows` makes tensor `engram.table` [192, 32], which is [1536, 32] in the checkpoint";
    place.run(&other).expect(2, &[words, "start a new run"]);
    place.run(&["train", "--resume", "runs/half"]).expect(0, &[]);
    assert_eq!(state(&place, "half"), state(&place, "whole"));
    // The table may move from one place to the other and back: no flag, and no other bit.
    for (name, from, to, end) in [
        ("out", "model.engram=host", "model.engram=device", "device"),
        ("home", "model.engram=device", "model.engram=host", "whole"),
    ] {
        place.run(&train(name, "8", &[&more(from)[..], &["--stop-at-step", "5"]].concat())).expect(0, &[]);
        let moved = place.run(&["train", "--resume", &format!("runs/{name}"), "--set", to]);
        moved.expect(0, &[]);
        assert!(moved.out.contains("same numbers"), "{}", moved.out);
        assert_eq!(state(&place, name), state(&place, end));
    }
    let [device, whole] = ["device", "whole"].map(|name| state(&place, name));
    assert_eq!(device.weights["kda.q"], whole.weights["kda.q"]);
    let table = whole.table.expect("a table on the host");
    assert_eq!(device.weights["engram.table"].as_f32(), Some(table.values()));
    for command in ["eval", "generate"] {
        let on = |name: &str| {
            let done = place.run(&[command, &format!("runs/{name}")]);
            done.expect(0, &[]);
            done.out
        };
        assert_eq!(on("device"), on("whole"));
    }
}

#[test]
fn two_processes_with_one_seed_are_equal() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&train(name, "8", &[])).expect(0, &[]);
    }
    place.run(&train("c", "8", &["--seed", "1"])).expect(0, &[]);
    assert_eq!(state(&place, "a"), state(&place, "b"));
    assert_ne!(state(&place, "a"), state(&place, "c"));
}

#[test]
fn a_signal_saves_and_exits_0_and_the_resumed_run_is_the_whole_one() {
    let place = Place::new();
    place.run(&train("whole", "60", &[])).expect(0, &[]);
    for (name, number) in [("int", libc::SIGINT), ("term", libc::SIGTERM)] {
        let child = place.spawn(&train(name, "60", &[]));
        wait_for(&checkpoints(&place, name).join("step_000005"));
        signal(&child, number);
        let done = Done::of(child.wait_with_output().unwrap());
        done.expect(0, &[]);
        assert!(done.out.contains("stopped after step") && done.out.contains("train --resume runs/"), "{}", done.out);
        assert_ne!(state(&place, name).updates, 60, "the run was over before the signal came");
        place.run(&["train", "--resume", &format!("runs/{name}")]).expect(0, &[]);
        assert_eq!(state(&place, name), state(&place, "whole"));
    }
}

#[test]
fn a_killed_run_goes_on_from_its_last_good_checkpoint() {
    let place = Place::new();
    place.run(&train("whole", "40", &[])).expect(0, &[]);
    // During a step, and as soon as the unfinished folder of a save shows itself.
    for name in ["step", "save"] {
        let child = place.spawn(&train(name, "40", &[]));
        let folder = checkpoints(&place, name);
        wait_for(&folder.join("step_000010"));
        if name == "save" {
            wait_until("a save", || names(&folder).iter().any(|entry| entry.ends_with(".tmp")));
        }
        signal(&child, libc::SIGKILL);
        let done = Done::of(child.wait_with_output().unwrap());
        assert_eq!(done.code, None, "killed");
        place.run(&["train", "--resume", "auto"]).expect(0, &[]);
        assert_eq!(state(&place, name), state(&place, "whole"));
        assert!(names(&folder).iter().all(|entry| !entry.ends_with(".tmp")), "{:?}", names(&folder));
    }
}

#[test]
fn a_truncated_checkpoint_is_passed_over_and_named() {
    let place = Place::new();
    place.run(&train("whole", "20", &[])).expect(0, &[]);
    place.run(&train("a", "20", &["--stop-at-step", "12"])).expect(0, &[]);
    let weights = checkpoints(&place, "a").join("step_000012/weights.safetensors");
    let len = std::fs::metadata(&weights).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(len - 1).unwrap();
    let done = place.run(&["train", "--resume", "runs/a"]);
    done.expect(0, &["step_000012", "is damaged", "weights.safetensors"]);
    assert!(done.out.contains("step_000010` after step 10"), "{}", done.out);
    assert_eq!(state(&place, "a"), state(&place, "whole"));
    for (name, entry) in names(&checkpoints(&place, "a")).iter().map(|name| (name, checkpoints(&place, "a").join(name)))
    {
        std::fs::remove_file(entry.join("manifest.json")).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    place.run(&["train", "--resume", "runs/a"]).expect(1, &["no good checkpoint", "step_000012", "start a new run"]);
}

#[test]
fn an_edited_manifest_is_damage_and_the_one_before_is_used() {
    let place = Place::new();
    place.run(&train("whole", "20", &[])).expect(0, &[]);
    place.run(&train("a", "20", &["--stop-at-step", "12"])).expect(0, &[]);
    let manifest = checkpoints(&place, "a").join("step_000012/manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let facts: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (updates, rows) = (facts["updates"].as_u64().unwrap(), facts["rows_consumed"].as_u64().unwrap());
    let edited = text.replace(&format!("\"rows_consumed\": {rows}"), &format!("\"rows_consumed\": {}", rows + 1));
    let edited = edited.replace(&format!("\"updates\": {updates}"), &format!("\"updates\": {}", updates - 1));
    assert_ne!(edited, text);
    std::fs::write(&manifest, edited).unwrap();
    // Of two runs the newest is gone on with.
    std::fs::rename(place.path("runs/whole"), place.path("whole")).unwrap();
    let done = place.run(&["train", "--resume", "auto"]);
    done.expect(0, &["step_000012", "is damaged", "manifest.json was changed: it has CRC-32C "]);
    assert!(done.out.contains("step_000010` after step 10"), "{}", done.out);
    std::fs::rename(place.path("whole"), place.path("runs/whole")).unwrap();
    assert_eq!(state(&place, "a"), state(&place, "whole"));
}

#[test]
fn a_disk_that_is_full_warns_and_at_the_end_fails() {
    let place = Place::new();
    let done = place.run_limited(&train("a", "12", &[]), 100_000);
    done.expect(1, &["step 5:", "cannot write", "training goes on, the next try is at step 10", "last checkpoint"]);
    assert!(!done.err.contains("panicked"), "{}", done.err);
    let metrics = std::fs::read_to_string(place.path("runs/a/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().filter(|line| line.contains("\"kind\":\"step\"")).count(), 12);
    assert_eq!(names(&checkpoints(&place, "a")), Vec::<String>::new(), "no unfinished folder stays");
}

#[test]
fn a_folder_that_cannot_be_written_is_exit_1_with_a_fix() {
    let place = Place::new();
    // Permissions do not bind root, so the program runs as another user, from a copy it may execute.
    let binary = place.path("dormouse");
    std::fs::copy(env!("CARGO_BIN_EXE_dormouse"), &binary).unwrap();
    std::fs::create_dir(place.path("runs")).unwrap();
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    mode(&place.path(""), 0o755);
    mode(&binary, 0o755);
    mode(&place.path("runs"), 0o555);
    let mut command = std::process::Command::new(&binary);
    command.args(train("a", "5", &[])).current_dir(place.path(""));
    // SAFETY: geteuid reads a number of this process and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        command.uid(65_534).gid(65_534);
    }
    Done::of(command.output().unwrap()).expect(1, &["cannot write", "runs/a", "--runs"]);
}

#[test]
fn unusable_requests_leave_no_folder() {
    let place = Place::new();
    place.file("empty", b"");
    place.run(&train("a", "5", &["--data", "missing"])).expect(4, &["does not exist"]);
    place.run(&train("a", "5", &["--data", "empty"])).expect(4, &["has 0 bytes"]);
    place.file("byte", b"a");
    place.run(&train("a", "5", &["--data", "byte"])).expect(4, &["has 1 byte"]);
    place.run(&train("a", "5", &["--set", "train.stpes=1"])).expect(2, &["unknown key"]);
    place.run(&train("a", "5", &["--accumulate", "3"])).expect(2, &["does not divide"]);
    place.run(&train("a", "5", &["--lr", "0"])).expect(2, &["`optimizer.lr` is 0"]);
    place.run(&["train", "--resume", "runs/none"]).expect(2, &["not a run folder"]);
    place.run(&["train", "--max-minutes=-1"]).expect(2, &["--max-minutes"]);
    // Memory that no machine has; asking for it would end the process with a signal.
    for engram in ["model.engram=device", "model.engram=host"] {
        let table = ["--set", engram, "--set", "model.engram_rows=1400000000", "--set", "model.engram_width=256"];
        let words =
            ["`model.engram_rows` is 1400000000, and the run needs ", "this machine has ", "model.engram_width"];
        place.run(&train("a", "5", &table)).expect(2, &words);
    }
    let sizes = ["model.width=65536", "model.ffn_width=65536", "model.rank=65536", "model.experts=1024"];
    let wide = sizes.map(|size| ["--set", size]).concat();
    place.run(&train("a", "5", &wide)).expect(2, &["`model.width` is 65536, and the run needs ", "model.ffn_width"]);
    assert!(!place.path("runs").exists());
}

/// The machine has the memory, and the process may not have it: an allocation that fails ends a process with a signal.
#[test]
fn a_new_table_that_gets_no_memory_is_exit_2_with_a_fix() {
    let place = Place::new();
    let table = ["model.engram=host", "model.engram_rows=250000", "model.engram_width=256"];
    let table = table.map(|set| ["--set", set]).concat();
    let words = ["`model.engram_rows` is 250000", "its table needs 2.1 GiB of memory", "can have ", "ulimit -v"];
    place.run_in_memory(&train("a", "5", &table), 2 << 30).expect(2, &words);
    assert!(!place.path("runs").exists());
}

#[test]
fn changed_data_at_resume_is_exit_4_and_names_the_file() {
    let place = Place::new();
    let text = b"a line of text that is as good as any other. ".repeat(1000);
    let file = place.file("text", &text);
    place.run(&train("a", "10", &["--data", "text", "--stop-at-step", "5"])).expect(0, &[]);
    let mut changed = text.clone();
    changed[17] ^= 1;
    std::fs::write(&file, &changed).unwrap();
    place.run(&["train", "--resume", "runs/a"]).expect(4, &["text` changed since the run began"]);
    std::fs::write(&file, &text).unwrap();
    place.run(&["train", "--resume", "runs/a", "--lr", "0.5"]).expect(2, &["--allow-change optimizer.lr"]);
    place.run(&["train", "--resume", "runs/a"]).expect(0, &[]);
}

#[test]
fn no_control_codes_and_every_step_once_when_not_on_a_terminal() {
    let place = Place::new();
    let done = place.run(&train("a", "10", &[]));
    done.expect(0, &[]);
    assert!(!(done.out + &done.err).contains('\u{1b}'));
    let metrics = std::fs::read_to_string(place.path("runs/a/metrics.jsonl")).unwrap();
    let mut steps = BTreeMap::new();
    for line in metrics.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        if line["kind"] == "step" {
            *steps.entry(line["step"].as_u64().unwrap()).or_insert(0) += 1;
        }
    }
    assert_eq!(steps, (1..=10).map(|step| (step, 1)).collect());
    let quiet = place.run(&train("b", "5", &["--quiet"]));
    quiet.expect(0, &[]);
    assert_eq!(quiet.out.lines().count(), 5, "{}", quiet.out);
}
