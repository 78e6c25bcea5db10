//! What goes wrong around a run: its folder, its files, its data, its output.

mod process;

use std::path::{Path, PathBuf};

use process::{Done, Place, train, wait_for};

fn metrics(run: &Path) -> String {
    std::fs::read_to_string(run.join("metrics.jsonl")).unwrap()
}

#[test]
fn a_damaged_line_of_the_log_takes_no_other_with_it() {
    let place = Place::new();
    place.run(&train("a", "10", &["--stop-at-step", "5"])).expect(0, &[]);
    let run = place.path("runs/a");
    let damaged: Vec<String> = metrics(&run)
        .lines()
        .enumerate()
        .map(|(index, line)| if index == 1 { "{\"kind\":".to_owned() } else { line.to_owned() })
        .collect();
    std::fs::write(run.join("metrics.jsonl"), damaged.join("\n") + "\n").unwrap();
    place.run(&["train", "--resume", "runs/a"]).expect(0, &["metrics.jsonl` line 2 is no JSON and stays as it is"]);
    let after = metrics(&run);
    assert!(after.starts_with(&damaged.join("\n")), "{after}");
    // Nine of ten steps are whole, and the evaluation at the end.
    let kinds = |kind: &str| after.lines().filter(|line| line.contains(&format!("\"kind\":\"{kind}\""))).count();
    assert_eq!((kinds("step"), kinds("eval")), (9, 1), "{after}");
}

#[test]
fn a_batch_that_no_machine_holds_is_exit_2_with_the_keys_to_lower() {
    let place = Place::new();
    let words = ["`train.batch_rows` is 1048576 with data.seq_bytes = 65536", "this machine has ", "train.accumulate"];
    place.run(&train("a", "5", &["--batch", "1048576", "--seq", "65536"])).expect(2, &words);
    assert!(!place.path("runs").exists());
    place.run(&train("a", "5", &[])).expect(0, &[]);
    let sets = ["--set", "train.batch_rows=1048576", "--set", "data.seq_bytes=65536"];
    place.run(&[&["jepa-targets", "runs/a", "--out", "t"][..], &sets].concat()).expect(2, &words);
    // Windows of any length are refused, and not searched for until the end of days.
    for window in ["data.seq_bytes=16777216", "data.eval_bytes=16777216"] {
        place.run(&["anchors", "--set", window]).expect(4, &["expected at least", window.split_once('=').unwrap().0]);
    }
}

#[test]
fn data_that_is_overwritten_during_a_run_is_exit_4_and_what_is_done_is_saved() {
    let place = Place::new();
    let text = b"a line of text that is as good as any other. ".repeat(1000);
    let file = place.file("text", &text);
    let child = place.spawn(&train("a", "100000", &["--data", "text"]));
    wait_for(&place.path("runs/a/checkpoints/step_000005"));
    std::fs::write(&file, text.iter().rev().copied().collect::<Vec<u8>>()).unwrap();
    let done = Done::of(child.wait_with_output().unwrap());
    done.expect(4, &["text` changed since the run began: expected 45000 bytes written at "]);
    assert!(done.out.contains("saved") && done.out.contains("train --resume"), "{}", done.out);
    place.run(&["train", "--resume", "runs/a"]).expect(4, &["changed since the run began"]);
    std::fs::write(&file, &text).unwrap();
    place.run(&["train", "--resume", "runs/a", "--stop-at-step", "6"]).expect(0, &[]);
}

#[test]
fn a_run_folder_that_is_taken_away_is_made_again_with_its_lock_and_its_log() {
    let place = Place::new();
    let mut child = place.spawn(&train("a", "100000", &[]));
    wait_for(&place.path("runs/a/checkpoints/step_000005"));
    std::fs::rename(place.path("runs/a"), place.path("gone")).unwrap();
    let steps = |run: &Path| metrics(run).lines().filter(|line| line.contains("\"kind\":\"step\"")).count();
    let run = place.path("runs/a");
    let lines = || run.join("metrics.jsonl").exists() && steps(&run) >= 5;
    process::wait_until("lines in the folder that was made again", lines);
    place.run(&["train", "--resume", "runs/a"]).expect(2, &["another process trains in `runs/a`"]);
    let before = steps(&place.path("gone"));
    process::wait_until("more lines", || steps(&run) >= 15);
    assert_eq!(steps(&place.path("gone")), before);
    child.kill().unwrap();
    let done = Done::of(child.wait_with_output().unwrap());
    assert!(done.err.contains("was removed and is made again"), "{}", done.err);
}

#[test]
fn a_full_output_ends_no_training_and_is_said_once() {
    let place = Place::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let done = Done::of(place.command(&train("a", "10", &[])).stdout(full()).output().unwrap());
    done.expect(0, &["cannot write the lines of the run"]);
    assert_eq!(done.err.matches("cannot write the lines").count(), 1, "{}", done.err);
    assert!(place.path("runs/a/checkpoints/step_000010").exists());
    let score = place.command(&["eval", "runs/a"]).stdout(full()).output().unwrap();
    Done::of(score).expect(1, &["cannot write standard output"]);
}

#[test]
fn auto_passes_over_a_run_that_was_killed_in_its_first_save_and_says_so() {
    let place = Place::new();
    place.run(&train("a", "10", &["--stop-at-step", "5"])).expect(0, &[]);
    place.run(&train("b", "10", &["--stop-at-step", "5"])).expect(0, &[]);
    let folder = place.path("runs/b/checkpoints");
    std::fs::rename(folder.join("step_000005"), folder.join("step_000005.tmp")).unwrap();
    let done = place.run(&["train", "--resume", "auto"]);
    done.expect(0, &["1 newer runs have no checkpoint and are passed over; the newest is `runs/b`"]);
    assert!(place.path("runs/a/checkpoints/step_000010").exists());
    // Its name is taken, and it cannot be resumed.
    let taken = place.run(&train("b", "10", &[]));
    taken.expect(2, &["exists and is not overwritten", "no checkpoint to go on from"]);
    assert!(!taken.err.contains("--resume"), "{}", taken.err);
}

#[test]
fn a_start_that_fails_leaves_the_name_free() {
    let place = Place::new();
    place.run_limited(&train("a", "5", &[]), 100).expect(1, &["cannot write", "--runs"]);
    assert!(!place.path("runs/a").exists());
    place.run(&train("a", "5", &[])).expect(0, &[]);
}

#[test]
fn provenance_that_is_damaged_is_kept_and_said() {
    let place = Place::new();
    place.run(&train("a", "10", &["--stop-at-step", "5"])).expect(0, &[]);
    std::fs::write(place.path("runs/a/run.json"), b"[{\"comm").unwrap();
    place.run(&["train", "--resume", "runs/a"]).expect(0, &["run.json` is no list of starts", "run.json.bad"]);
    assert_eq!(std::fs::read(place.path("runs/a/run.json.bad")).unwrap(), b"[{\"comm");
}

#[test]
fn a_finished_run_is_read_and_scored_as_it_is_asked_for() {
    let place = Place::new();
    place.run(&train("a", "10", &[])).expect(0, &[]);
    place.run(&["train", "--resume", "runs/a"]).expect(0, &[]);
    let lines = |name: &str| std::fs::read_to_string(place.path("runs/a").join(name)).unwrap();
    assert_eq!(lines("metrics.jsonl").matches("\"kind\":\"eval\"").count(), 1);
    let samples: Vec<serde_json::Value> =
        lines("samples.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(samples.len(), 2);
    // The prompt is the first bytes of the first held-out window as they are.
    assert!(samples.iter().all(|sample| !sample["prompt"].as_str().unwrap().contains('\\')), "{samples:?}");
    let fewer = ["train", "--resume", "runs/a", "--steps", "5", "--allow-change", "train.total_steps"];
    place.run(&fewer).expect(2, &["--steps (train.total_steps) is 5, and the run has done 10 steps"]);
    // Other bytes by key as by flag.
    place.file("other", &b"and now something quite different. ".repeat(100));
    let by = |words: &[&str]| {
        let done = place.run(&[&["eval", "runs/a"][..], words].concat());
        done.expect(0, &[]);
        done.out
    };
    assert_eq!(by(&["--set", "data.eval_path=other"]), by(&["--eval", "other"]));
    // A file that is there and is no file to read is not a damaged one.
    let weights: PathBuf = place.path("runs/a/checkpoints/step_000010/weights.safetensors");
    std::fs::remove_file(&weights).unwrap();
    std::fs::create_dir(&weights).unwrap();
    let done = place.run(&["generate", "runs/a", "--bytes", "2"]);
    done.expect(0, &["cannot read", "weights.safetensors"]);
    assert!(!done.err.contains("damaged"), "{}", done.err);
    std::fs::write(place.path("runs/a/data.json"), b"").unwrap();
    place.run(&["inspect", "--run", "runs/a"]).expect(1, &["data.json` is not a data manifest"]);
}
