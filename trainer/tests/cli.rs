//! The command line without a model: messages and exit codes.

mod process;

use process::Place;

#[test]
fn anchors_of_the_shipped_text_need_nothing() {
    let place = Place::new();
    let done = place.run(&["anchors"]);
    done.expect(0, &[]);
    assert!(done.out.contains("uniform                8.0000"), "{}", done.out);
    assert!(done.out.contains("kneser-ney order 6"), "{}", done.out);
    let json = place.run(&["anchors", "--json"]);
    json.expect(0, &[]);
    let anchors: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(anchors["windows"], 64);
    let kn: Vec<f64> = anchors["kn"].as_array().unwrap().iter().map(|bits| bits.as_f64().unwrap()).collect();
    assert!(kn.len() == 6 && kn.windows(2).all(|pair| pair[1] < pair[0]), "{kn:?}");
}

#[test]
fn unusable_data_is_exit_4_with_a_fix() {
    let place = Place::new();
    place.run(&["anchors", "--data", "missing.txt"]).expect(4, &["missing.txt", "does not exist", "--data"]);
    place.file("empty", b"");
    place.run(&["anchors", "--data", "empty"]).expect(4, &["has 0 bytes, expected at least 2"]);
    place.file("one", b"x");
    place.run(&["anchors", "--data", "one"]).expect(4, &["has 1 bytes, expected at least 2"]);
    place.file("small", &[7; 1000]);
    place.run(&["anchors", "--data", "small"]).expect(4, &["has 1000 bytes, expected at least", "data.seq_bytes"]);
    std::fs::create_dir(place.path("folder")).unwrap();
    place.run(&["anchors", "--data", "folder"]).expect(4, &["no file with a byte"]);
    for endless in ["/dev/null", "/dev/zero"] {
        place.run(&["anchors", "--data", endless]).expect(4, &["neither a file nor a folder"]);
    }
    place.file("text", &[7; 100_000]);
    place.run(&["anchors", "--data", "text", "--eval", "/dev/zero"]).expect(4, &["neither a file nor a folder"]);
    place.file("both", &[7; 100_000]);
    place.run(&["anchors", "--data", "both", "--eval", "both"]).expect(4, &["training data", "held-out data"]);
}

#[test]
fn a_folder_and_its_own_held_out_file_work() {
    let place = Place::new();
    std::fs::create_dir(place.path("folder")).unwrap();
    place.file("folder/a", &b"the cat sat on the mat. ".repeat(300));
    place.file("folder/b", b"");
    place.file("test", &b"the rat sat on the cat. ".repeat(100));
    let done = place.run(&["anchors", "--data", "folder", "--eval", "test"]);
    done.expect(0, &[]);
    assert!(
        done.out.contains("fitted on 7200 training bytes, scored on 4 held-out windows of 512 bytes"),
        "{}",
        done.out
    );
}

#[test]
fn a_wrong_command_line_is_exit_2_and_names_the_right_one() {
    let place = Place::new();
    place
        .run(&["anchors", "--set", "train.total_stpes=3"])
        .expect(2, &["unknown key", "nearest is `train.total_steps`"]);
    place.run(&["anchors", "--set", "data.eval_windows=0"]).expect(2, &["`data.eval_windows` is 0"]);
    place.run(&["anchors", "--set", "nonsense"]).expect(2, &["expected key=value"]);
    place.run(&["anchors", "--preset", "huge"]).expect(2, &["unknown preset `huge`", "nano, tiny"]);
    let missing = place.run(&["anchors", "--config", "missing.toml"]);
    missing.expect(2, &["cannot read `missing.toml`", "; give --config a TOML file that is there and can be read"]);
    place.run(&["anchors", "--config", "/dev/zero"]).expect(2, &["`/dev/zero`", "so it is no configuration"]);
    let large = ["anchors", "--set", "train.total_steps=99999999999999999999"];
    place.run(&large).expect(2, &["expected a whole number from 0 to 9223372036854775807"]);
    place.file("bad.toml", b"seed = 1\n[data]\nseq_byte = 3\n");
    place.run(&["anchors", "--config", "bad.toml"]).expect(2, &["`bad.toml` line 3", "nearest is `data.seq_bytes`"]);
    place.file("broken.toml", b"seed = = 1\n");
    place.run(&["anchors", "--config", "broken.toml"]).expect(2, &["is not TOML", "line 1"]);
    place.run(&["anchors", "--dat", "x"]).expect(2, &["--data"]);
    place.run(&["anchor"]).expect(2, &["anchors"]);
    place.run(&[]).expect(2, &["Usage"]);
    place.run(&["anchors", "--seed=-1"]).expect(2, &["--seed"]);
    // A number is not taken for a flag.
    place.run(&["anchors", "--seed", "-1"]).expect(2, &["invalid value '-1' for '--seed"]);
    place.run(&["train", "--max-minutes", "-1"]).expect(2, &["--max-minutes is -1"]);
    place.run(&["train", "--allow-change", "seed"]).expect(2, &["--allow-change", "give --resume"]);
    place.run(&["train", "--max-minutes", "nan"]).expect(2, &["--max-minutes is NaN; give a number, 0 or more"]);
    place.run(&["generate", "runs/a", "--temperature", "-1"]).expect(2, &["--temperature is -1"]);
    // An empty variable of a script must not mean the text that ships with dormouse.
    for flag in ["--data", "--eval"] {
        place.run(&["anchors", flag, ""]).expect(2, &[flag, "it is empty", "leave the flag out"]);
    }
    place.run(&["anchors", "--set", "data.path="]).expect(0, &[]);
    place.run(&["replay", "."]).expect(2, &["`.` is not a bundle", "give the folder nonfinite_"]);
    place.run(&["inspect", "--run", "runs/a", "--preset", "small"]).expect(2, &["--preset", "cannot be used with"]);
}

#[test]
fn a_result_that_cannot_be_written_is_exit_1() {
    let place = Place::new();
    for arguments in [&["inspect", "tiny"][..], &["anchors", "--json"], &["arms", "--backend", "cpu"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let done = place.command(arguments).stdout(full).output().unwrap();
        process::Done::of(done).expect(1, &["cannot write standard output", "free some space"]);
    }
}

#[test]
fn a_history_on_a_full_disk_keeps_its_rows() {
    let place = Place::new();
    let text = dormouse::history::COLUMNS.join("\t") + "\n";
    place.file("history.tsv", text.as_bytes());
    let bench = ["bench", "--backend", "cpu", "--preset", "tiny", "--steps", "70", "--append", "history.tsv"];
    let small = ["--batch", "1", "--seq", "8", "--set", "model.iterations=1"];
    let done = place.run_limited(&[&bench[..], &small].concat(), text.len() as u64 + 10);
    done.expect(1, &["cannot write `history.tsv`"]);
    assert_eq!(std::fs::read_to_string(place.path("history.tsv")).unwrap(), text);
}

#[test]
fn a_path_that_is_no_text_is_exit_2() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let folder = place.path("").join(std::ffi::OsStr::from_bytes(b"bad\xff"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("text"), b"the cat sat on the mat. ".repeat(4000)).unwrap();
    let given = place.command(&["train", "--preset", "tiny", "--data"]).arg(&folder).output().unwrap();
    process::Done::of(given).expect(2, &["UTF-8"]);
    // Its own path is text, what it points to is not.
    std::os::unix::fs::symlink(&folder, place.path("link")).unwrap();
    place.run(&["train", "--preset", "tiny", "--data", "link"]).expect(2, &["is not UTF-8", "config.toml"]);
}

#[test]
fn help_and_version_are_exit_0() {
    let place = Place::new();
    for arguments in [vec!["--help"], vec!["anchors", "--help"], vec!["--version"]] {
        let done = place.run(&arguments);
        done.expect(0, &[]);
        assert!(done.out.contains("dormouse"), "{}", done.out);
    }
    assert!(place.run(&["anchors", "--help"]).out.contains("Examples:"));
}

#[test]
fn a_reader_that_goes_away_is_no_crash() {
    let place = Place::new();
    let mut child = place.spawn(&["anchors"]);
    drop(child.stdout.take());
    let done = process::Done::of(child.wait_with_output().unwrap());
    done.expect(0, &[]);
    assert!(!done.err.contains("panicked"), "{}", done.err);
}

#[test]
fn a_bench_whose_row_would_be_refused_does_not_start() {
    let place = Place::new();
    // Outside its tree the program goes by what it is told.
    let copy = place.path("dormouse");
    std::fs::copy(env!("CARGO_BIN_EXE_dormouse"), &copy).unwrap();
    let mut command = std::process::Command::new(copy);
    command.args(["bench", "--preset", "tiny", "--append", "history.tsv"]).env("DORMOUSE_COMMIT", "865d421");
    let done = process::Done::of(command.current_dir(place.path("")).output().unwrap());
    done.expect(2, &["`commit` is `865d421`, expected 40 hexadecimal digits", "DORMOUSE_COMMIT"]);
    assert!(done.out.is_empty(), "{}", done.out);
    // Nor one whose row would have no place.
    place.file("no-history.tsv", b"text\n");
    for (path, words) in [("none/history.tsv", "cannot write `none/history.tsv`"), ("no-history.tsv", "cannot use")] {
        let done = place.run(&["bench", "--preset", "tiny", "--append", path]);
        done.expect(1, &[words]);
        assert!(done.out.is_empty(), "{}", done.out);
    }
}
