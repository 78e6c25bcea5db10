//! The golden gate on files made here: the format, and that a wrong value, a misspelt tensor and an empty file are seen.
//! The files of the repository are for the program that runs the gates, which plants faults in them, too.

use std::collections::BTreeMap;
use std::path::Path;

use dormouse_harness::description::Operation;
use dormouse_harness::draw;
use dormouse_harness::gates::golden::{GoldenCase, GoldenFile, Origin, bite, check, gate, read, write};
use dormouse_harness::gates::{Context, Status};
use dormouse_harness::named::Values;
use dormouse_harness::ops::rms_norm::RmsNormOp;
use dormouse_harness::runner::OnBackend;
use dormouse_reference::Reference;

type Device = OnBackend<Reference<f64>>;

fn runner() -> Device {
    OnBackend::new(Reference::<f64>::new)
}

fn context(golden: &Path) -> Context {
    Context {
        seed: 1,
        only: None,
        random_cases: 0,
        production: false,
        golden: golden.to_owned(),
        stop_at_first: false,
        again: String::new(),
    }
}

/// A file whose values come from the operation's plain form, which shares no code with the reference.
fn sample() -> GoldenFile {
    let case = &RmsNormOp::cases()[0];
    let mut rng = draw::stream(7, &["golden"]);
    let inputs = RmsNormOp::draw(case, &mut rng);
    let shape = inputs.at("x").shape().to_vec();
    let upstream = Values::new().with("y", draw::normal(&mut rng, &shape)).with("c", draw::normal(&mut rng, &shape));
    let run = RmsNormOp::naive(&case.config, &inputs, Some(&upstream), None);
    let origin =
        Origin { source: "the plain form".into(), version: "1".into(), tol: 1e-12, why: "f64 in two orders".into() };
    let golden = GoldenCase {
        config: case.name.clone(),
        origin: origin.clone(),
        inputs,
        upstream,
        outputs: run.outputs,
        grads: run.grads,
    };
    GoldenFile {
        origin,
        generator: "harness/tests/golden.rs".into(),
        seed: "7".into(),
        cases: BTreeMap::from([("first".to_owned(), golden)]),
    }
}

fn names() -> Vec<&'static str> {
    RmsNormOp::tensors().iter().map(|spec| spec.name).collect()
}

#[test]
fn a_file_comes_back_as_it_was_written_and_passes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rms_norm.safetensors");
    let file = sample();
    write(&path, &file).unwrap();
    assert_eq!(read(&path, &names()).unwrap(), file);
    let outcome = gate::<RmsNormOp>(&runner(), &context(folder.path()));
    assert_eq!((outcome.status, outcome.cases), (Status::Pass, 1), "{}", outcome.reason);
}

#[test]
fn no_file_is_not_run_and_an_unreadable_one_fails() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(gate::<RmsNormOp>(&runner(), &context(folder.path())).status, Status::NotRun);
    std::fs::write(folder.path().join("rms_norm.safetensors"), b"not a golden file").unwrap();
    assert_eq!(gate::<RmsNormOp>(&runner(), &context(folder.path())).status, Status::Fail);
}

#[test]
fn a_wrong_value_anywhere_is_red() {
    let folder = tempfile::tempdir().unwrap();
    let red = |change: &dyn Fn(&mut GoldenCase)| {
        let mut file = sample();
        change(file.cases.get_mut("first").unwrap());
        let outcome = check::<RmsNormOp>(&runner(), &file, &context(folder.path()));
        assert_eq!(outcome.status, Status::Fail);
        outcome.reason
    };
    red(&|case| case.outputs.get_mut("y").unwrap()[[0, 0, 0]] += 1e-9);
    red(&|case| *case.outputs.get_mut("c").unwrap() *= 1.0 + 1e-9);
    red(&|case| case.grads.get_mut("shift").unwrap()[[1]] = f64::NAN);
    red(&|case| *case.grads.get_mut("gain").unwrap() *= -1.0);
    let reason = red(&|case| case.config = "no-such-case".into());
    assert!(reason.contains("config `no-such-case` is not in the case table"), "{reason}");
}

#[test]
fn what_cannot_be_judged_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rms_norm.safetensors");
    let refuse = |change: &dyn Fn(&mut GoldenFile)| {
        let mut file = sample();
        change(&mut file);
        write(&path, &file).unwrap();
        read(&path, &names()).unwrap_err()
    };
    assert!(refuse(&|file| file.cases.clear()).contains("it holds no case"));
    let silent = refuse(&|file| {
        let case = file.cases.get_mut("first").unwrap();
        case.outputs = Values::new();
        case.grads = Values::new();
    });
    assert!(silent.contains("case `first` expects nothing"), "{silent}");
    let misspelt = refuse(&|file| {
        let case = file.cases.get_mut("first").unwrap();
        let y = case.outputs.at("y").clone();
        case.outputs.set("yy", y);
    });
    assert!(misspelt.contains("tensor `first/out/yy` is none of the operation's"), "{misspelt}");
}

#[test]
fn a_case_may_have_an_origin_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rms_norm.safetensors");
    let mut file = sample();
    let mut case = file.cases["first"].clone();
    *case.outputs.get_mut("y").unwrap() *= 1.0 + 1e-7;
    case.origin = Origin { source: "f32".into(), version: "2".into(), tol: 2e-6, why: "rounding of f32".into() };
    file.cases.insert("second".to_owned(), case);
    write(&path, &file).unwrap();
    assert_eq!(read(&path, &names()).unwrap(), file);
    assert_eq!(check::<RmsNormOp>(&runner(), &file, &context(folder.path())).status, Status::Pass);
    // At the bound of the file it would not pass.
    file.cases.get_mut("second").unwrap().origin = file.origin.clone();
    let outcome = check::<RmsNormOp>(&runner(), &file, &context(folder.path()));
    assert!(outcome.reason.contains("case second (the plain form)"), "{}", outcome.reason);
}

#[test]
fn a_file_that_sees_too_little_does_not_bite() {
    let folder = tempfile::tempdir().unwrap();
    let bites = |change: &dyn Fn(&mut GoldenFile)| {
        let mut file = sample();
        change(&mut file);
        write(&folder.path().join("rms_norm.safetensors"), &file).unwrap();
        bite::<RmsNormOp>(&runner(), &context(folder.path()))
    };
    // Six faults in two outputs and three gradients, and the broken terms.
    assert_eq!(bites(&|_| {}), (31, vec![]));
    let (_, survivors) = bites(&|file| {
        let case = file.cases.get_mut("first").unwrap();
        case.outputs.get_mut("y").unwrap().fill(0.0);
    });
    assert!(survivors.contains(&"y-zero survives golden".to_owned()), "{survivors:?}");
    let (_, survivors) = bites(&|file| file.cases.get_mut("first").unwrap().origin.tol = 0.04);
    assert!(survivors.contains(&"y-times-0.99 survives golden".to_owned()), "{survivors:?}");
    // Without a shift, c is x, and no term of the formula is left to break.
    let (_, survivors) = bites(&|file| {
        let case = file.cases.get_mut("first").unwrap();
        case.inputs.get_mut("shift").unwrap().fill(0.0);
        case.outputs = Values::new().with("c", case.inputs.at("x").clone());
        (case.grads, case.upstream) = (Values::new(), Values::new());
    });
    assert_eq!(survivors, ["every broken term survives golden"]);
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(bite::<RmsNormOp>(&runner(), &context(empty.path())), (0, vec![]));
}
