//! The JEPA objective as a user has it: runs, their teachers, and files of targets.

mod process;

use dormouse::checkpoint::{State, newest_good};
use process::Place;
use serde_json::Value;

/// Arguments of a short run on the reference.
fn train<'a>(name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["train", "--backend", "cpu", "--preset", "tiny", "--name", name, "--steps", "8"];
    arguments.extend(["--batch", "2", "--seq", "48", "--save-every", "4", "--eval-every", "8", "--log-every", "4"]);
    for set in ["data.eval_windows=2", "data.eval_bytes=32", "log.sample_bytes=4", "checkpoint.keep_last=9"] {
        arguments.extend(["--set", set]);
    }
    arguments.extend(more);
    arguments
}

const SHARED: [&str; 2] = ["--set", "jepa.mode=shared"];

fn state(place: &Place, name: &str) -> State {
    newest_good(&place.path("runs").join(name).join("checkpoints")).unwrap().loaded.state
}

fn steps(place: &Place, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(place.path("runs").join(name).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "step").collect()
}

#[test]
fn a_run_with_a_teacher_saves_it_goes_on_to_the_bit_and_is_used_without_it() {
    let place = Place::new();
    let whole = place.run(&train("whole", &SHARED));
    whole.expect(0, &[]);
    for words in ["the teacher follows with momentum 0.999", " | jepa 0.", " koleo "] {
        assert!(whole.out.contains(words), "`{words}` is not in: {}", whole.out);
    }
    // Every step has the terms; one in which nothing is masked has them without a number.
    let whole = steps(&place, "whole");
    assert!(whole.iter().all(|line| line.get("jepa").is_some() && line["jepa"].is_null() == line["koleo"].is_null()));
    assert!(whole.iter().any(|line| line["jepa"].is_f64()));
    let teacher = state(&place, "whole").teacher;
    assert!(teacher.contains_key("kda.q") && teacher != state(&place, "whole").weights);
    place.run(&train("half", &[&SHARED[..], &["--stop-at-step", "4"]].concat())).expect(0, &[]);
    place.run(&["train", "--resume", "runs/half"]).expect(0, &[]);
    assert_eq!(state(&place, "half"), state(&place, "whole"));
    // The student alone scores and generates.
    place.run(&["eval", "runs/whole"]).expect(0, &[]);
    place.run(&["generate", "runs/whole", "--bytes", "3"]).expect(0, &[]);
    let inspected = place.run(&["inspect", "--run", "runs/whole"]);
    inspected.expect(0, &[]);
    assert!(inspected.out.contains("jepa.predictor") && inspected.out.contains(", teacher "), "{}", inspected.out);
    // A teacher's file that is damaged or gone is not passed over.
    let checkpoints = place.path("runs/half/checkpoints");
    for name in names(&checkpoints) {
        std::fs::remove_file(checkpoints.join(name).join("teacher.safetensors")).unwrap();
    }
    let gone = place.run(&["train", "--resume", "runs/half"]);
    gone.expect(1, &["no good checkpoint", "teacher.safetensors"]);
    place.run(&train("x", &["--set", "jepa.targets=y"])).expect(2, &["`jepa.targets` is `y`, and jepa.mode is off"]);
    place.run(&["train", "--resume", "runs/whole", "--set", "jepa.momentum=0.9"]).expect(2, &["jepa.momentum"]);
}

#[test]
fn the_objective_can_be_left_behind_and_not_be_taken_up_in_the_middle_of_a_run() {
    let place = Place::new();
    place.run(&train("a", &[&SHARED[..], &["--stop-at-step", "4"]].concat())).expect(0, &[]);
    let off = ["train", "--resume", "runs/a", "--set", "jepa.mode=off"];
    place.run(&off).expect(2, &["jepa.mode", "--allow-change jepa.mode"]);
    let done = place.run(&[&off[..], &["--allow-change", "jepa.mode"]].concat());
    done.expect(0, &[]);
    assert!(done.out.contains("the objective is left behind"), "{}", done.out);
    let after = state(&place, "a");
    let of_objective = |name: &&String| name.contains("jepa.");
    assert_eq!(after.weights.keys().chain(after.optimizer.keys()).find(of_objective), None);
    assert!(after.teacher.is_empty() && after.updates == 8);
    let lines = steps(&place, "a");
    assert_eq!(
        lines.iter().map(|line| line.get("jepa").is_some()).collect::<Vec<_>>(),
        [[true; 4], [false; 4]].concat()
    );
    // It is a run without the objective from then on, and such a run cannot take one up, whatever is allowed.
    place.run(&["train", "--resume", "runs/a"]).expect(0, &[]);
    let on = ["train", "--resume", "runs/a", "--set", "jepa.mode=shared", "--allow-change", "jepa.mode"];
    let refused = place.run(&on);
    refused.expect(
        2,
        &["`jepa.mode` needs tensor `jepa.predictor`, which the checkpoint does not have", "start a new run"],
    );
}

fn names(folder: &std::path::Path) -> Vec<String> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn targets_are_written_read_and_refused_where_they_do_not_fit() {
    let place = Place::new();
    place.run(&train("first", &SHARED)).expect(0, &[]);
    let made = place.run(&["jepa-targets", "runs/first", "--out", "a.targets"]);
    made.expect(0, &[]);
    for words in ["the teacher is the model's moving average after step 8", "step 8/8 | ", "wrote a.targets"] {
        assert!(made.out.contains(words), "`{words}` is not in: {}", made.out);
    }
    assert!(!place.path("a.targets.tmp").exists());
    place.run(&["jepa-targets", "runs/first", "--out", "a.targets"]).expect(2, &["exists and is not overwritten"]);
    // What cannot be written is exit 1 as everywhere, and a full disk keeps nothing of it.
    place.run(&["jepa-targets", "runs/first", "--out", "no/b"]).expect(1, &["cannot create `no/b.tmp`", "give --out"]);
    let full = place.run_limited(&["jepa-targets", "runs/first", "--out", "b"], 20_000);
    full.expect(1, &["cannot write `b.tmp`", "give --out"]);
    assert!(!place.path("b").exists() && !place.path("b.tmp").exists());
    for (more, words) in [
        (["--steps", "9"], "steps 0 to 8 are asked for, and the run has steps 0 to 7"),
        (["--steps", "0"], "--steps is 0, expected 1 or more"),
        (["--first-step", "8"], "--first-step is 8, expected 0 to 7"),
    ] {
        let line = [&["jepa-targets", "runs/first", "--out", "b"][..], &more].concat();
        place.run(&line).expect(2, &[words]);
    }
    // What contradicts the command is not ignored.
    for (set, words) in [
        ("jepa.mode=off", "`jepa.mode` is off, and targets are for a run whose mode is not"),
        ("jepa.mode=\"off\"", "leave --set jepa.mode out"),
        (
            "jepa.targets=a.targets",
            "`jepa.targets` names a file to read, and this command writes one; give its name with --out",
        ),
    ] {
        place.run(&["jepa-targets", "runs/first", "--out", "b", "--set", set]).expect(2, &[words]);
    }
    assert!(!place.path("b").exists());
    // A file without an end is not read to it.
    let endless = [&SHARED[..], &["--set", "jepa.targets=/dev/zero"]].concat();
    place.run(&train("refused", &endless)).expect(4, &["`/dev/zero` is not a file of JEPA targets"]);
    let shape = ["jepa-targets", "runs/first", "--out", "b", "--set", "model.width=64"];
    place.run(&shape).expect(2, &["`model.width` cannot be changed for targets"]);

    let reading = [&SHARED[..], &["--set", "jepa.targets=a.targets"]].concat();
    let done = place.run(&train("reading", &reading));
    done.expect(0, &[]);
    assert!(done.out.contains("the teacher is frozen: latents of step 8 of another run"), "{}", done.out);
    // A step in which nothing is masked has no such number.
    let lines = steps(&place, "reading");
    assert!(lines.iter().all(|line| line.get("jepa").is_some() && line["jepa"].is_null() == line["koleo"].is_null()));
    assert!(lines.iter().any(|line| line["jepa"].is_f64()));
    assert!(state(&place, "reading").teacher.is_empty());
    // Another seed, shape or length of run, and other data.
    place.file("other.txt", &b"Other words than those, again and again. ".repeat(4000));
    for (flag, value, words) in [
        ("--seed", "3", "was made for seed 0, this run has 3"),
        ("--batch", "4", "was made for rows 2, this run has 4"),
        ("--seq", "40", "was made for len 48, this run has 40"),
        ("--steps", "9", "step 8 is not in"),
        ("--data", "other.txt", "was made for data BLAKE3"),
    ] {
        let mut arguments = train("refused", &reading);
        match arguments.iter().position(|word| *word == flag) {
            Some(at) => arguments[at + 1] = value,
            None => arguments.extend([flag, value]),
        }
        place.run(&arguments).expect(4, &[words]);
        assert!(!place.path("runs/refused").exists());
    }
    // A file cut short, and one that is none.
    let bytes = std::fs::read(place.path("a.targets")).unwrap();
    for (name, bytes, words) in
        [("cut", &bytes[..bytes.len() - 7], "ends inside"), ("none", &b"text"[..], "not a file of")]
    {
        place.file(name, bytes);
        let targets = format!("jepa.targets={name}");
        place.run(&train("refused", &[&SHARED[..], &["--set", &targets]].concat())).expect(4, &[words]);
    }

    // A record that is damaged is met at its step; the steps before it are saved, and a whole file goes on with them.
    let mut torn = bytes.clone();
    *torn.last_mut().unwrap() ^= 1;
    place.file("torn.targets", &torn);
    let reads_torn = [&SHARED[..], &["--set", "jepa.targets=torn.targets"]].concat();
    let ended = place.run(&train("torn", &reads_torn));
    ended.expect(4, &["step 7 of `", "torn.targets` has CRC-32C", "copy it again"]);
    assert!(ended.out.contains("stopped after step 7 of 8, saved"), "{}", ended.out);
    assert_eq!(state(&place, "torn").updates, 7);
    place.file("torn.targets", &bytes);
    place.run(&["train", "--resume", "runs/torn"]).expect(0, &[]);
    assert_eq!(state(&place, "torn"), state(&place, "reading"));

    // A run goes on with the file it began with; another one under its name is refused.
    place.run(&train("half", &[&reading[..], &["--stop-at-step", "4"]].concat())).expect(0, &[]);
    let of_weights = ["jepa-targets", "runs/half", "--out", "b.targets", "--quiet"];
    place.run(&of_weights).expect(0, &[]);
    std::fs::rename(place.path("a.targets"), place.path("kept")).unwrap();
    place.run(&["train", "--resume", "runs/half"]).expect(4, &["cannot open"]);
    std::fs::rename(place.path("b.targets"), place.path("a.targets")).unwrap();
    place.run(&["train", "--resume", "runs/half"]).expect(2, &["--allow-change jepa.targets"]);
    // The file it began with may lie elsewhere; another one elsewhere is another one.
    let moved = |path: &str| place.run(&["train", "--resume", "runs/half", "--set", &format!("jepa.targets={path}")]);
    moved("a.targets").expect(2, &["--allow-change jepa.targets"]);
    moved("kept").expect(0, &[]);
    assert_eq!(state(&place, "half"), state(&place, "reading"));
    std::fs::rename(place.path("kept"), place.path("a.targets")).unwrap();
    // From a file to a teacher that follows, where the user says so.
    place.run(&train("over", &[&reading[..], &["--stop-at-step", "4"]].concat())).expect(0, &[]);
    let over = ["train", "--resume", "runs/over", "--set", "jepa.targets="];
    place.run(&over).expect(2, &["--allow-change jepa.targets"]);
    let over = place.run(&[&over[..], &["--allow-change", "jepa.targets"]].concat());
    over.expect(0, &[]);
    assert!(over.out.contains("one starts from its weights"), "{}", over.out);
    assert!(!state(&place, "over").teacher.is_empty());
}
