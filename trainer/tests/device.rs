//! The trainer on the kernels of the GPU, through Mesa's software Vulkan driver. Where no adapter answers, every test
//! says so and why.

mod process;

use dormouse::checkpoint::{State, newest_good};
use dormouse_cuda::{Cuda, Engine, Gpu, Lavapipe, Runtime};
use dormouse_reference::{DType, Error, Tensors};
use ndarray::Array2;
use process::Place;
use serde_json::Value;

/// Whether there is a device, with a line that says why not.
fn answers() -> bool {
    match Lavapipe::available() {
        Ok(()) => true,
        Err(why) => {
            eprintln!("NOTRUN {}: {why}", std::thread::current().name().unwrap_or("test"));
            false
        }
    }
}

/// Arguments of a short run on the software device.
fn train<'a>(name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    train_on("lavapipe", name, more)
}

/// The arguments with the values of some flags replaced.
fn with<'a>(mut arguments: Vec<&'a str>, values: &[(&str, &'a str)]) -> Vec<&'a str> {
    for (flag, value) in values {
        let at = arguments.iter().position(|word| word == flag).expect("it is given") + 1;
        arguments[at] = value;
    }
    arguments
}

/// Arguments of a short run: three steps before it is stopped and three after. A software device takes a second for one.
fn train_on<'a>(backend: &'a str, name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["train", "--preset", "tiny", "--name", name, "--steps", "6", "--backend", backend];
    arguments.extend(["--batch", "2", "--seq", "20", "--save-every", "3", "--eval-every", "6", "--log-every", "3"]);
    for set in ["data.eval_windows=2", "data.eval_bytes=32", "log.sample_bytes=4"] {
        arguments.extend(["--set", set]);
    }
    arguments.extend(more);
    arguments
}

fn state(place: &Place, name: &str) -> State {
    newest_good(&place.path("runs").join(name).join("checkpoints")).unwrap().loaded.state
}

/// A run's held-out score on the backend it was trained on is that on the reference.
fn scores_alike_on_the_cpu(place: &Place, run: &str) {
    let bits = |more: &[&str]| -> f64 {
        let done = place.run(&[&["eval", run], more].concat());
        done.expect(0, &[]);
        let words = done.out.split_whitespace().find_map(|word| word.strip_prefix("model=").map(str::to_owned));
        words.unwrap().parse().unwrap()
    };
    let (there, here) = (bits(&[]), bits(&["--backend", "cpu"]));
    assert!((there - here).abs() <= 2e-4, "{run}: {there} and {here}");
}

fn json(place: &Place, path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(place.path(path)).unwrap()).unwrap()
}

/// The rows of an atlas that only move or recast what the model's passes compute: kernels of `kda` beside its own four,
/// and copies under whatever name.
fn movers(atlas: &str) -> Vec<&str> {
    const KDA: [&str; 4] = ["kda::prep", "kda::forward", "kda::dstate", "kda::grads"];
    const WORDS: [&str; 6] = ["copy", "cast", "convert", "transpose", "permute", "relayout"];
    let passes = atlas.lines().filter(|line| line.starts_with("student forward") || line.starts_with("backward"));
    let moves = |line: &&str| {
        // Stages may have two words, the operation and its kernel follow.
        let mut words = line.split_whitespace().skip(if line.starts_with("backward") { 1 } else { 2 });
        let (op, kernel) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        (op == "kda" && !KDA.contains(&kernel)) || WORDS.iter().any(|word| kernel.contains(word))
    };
    passes.filter(moves).collect()
}

#[test]
fn a_kernel_that_only_moves_values_is_seen() {
    let row = |stage: &str, op: &str, kernel: &str| format!("{stage:<18} {op:<16} {kernel:<32} 1.0 0.0 0 0.0 0.0");
    let healthy =
        [row("backward", "kda", "kda::grads"), row("student forward", "fill", "fill"), row("loss", "copy", "copy")];
    assert_eq!(movers(&healthy.join("\n")), Vec::<&str>::new());
    for fault in [
        row("student forward", "kda", "kda::relayout"),
        row("backward", "kda", "kda::sum"),
        row("student forward", "copy", "copy"),
        row("backward", "cast_to_bf16", "cast_to_bf16"),
    ] {
        assert_eq!(movers(&fault), [fault.as_str()]);
    }
}

#[test]
fn on_a_gpu_two_processes_are_equal_and_a_killed_run_goes_on_to_the_bit() {
    if let Err(why) = Cuda::available() {
        // The software device shows the same without the kill: `a_run_counts_what_it_does_...` resumes in a new process.
        eprintln!("NOTRUN on_a_gpu_two_processes_are_equal_and_a_killed_run_goes_on_to_the_bit: {why}");
        return;
    }
    let place = Place::new();
    let more = [("--steps", "400"), ("--save-every", "20"), ("--eval-every", "8")];
    let long = |name| with(train_on("cuda", name, &["--unverified"]), &more);
    for name in ["first", "second"] {
        place.run(&long(name)).expect(0, &[]);
    }
    assert_eq!(state(&place, "first"), state(&place, "second"));
    let child = place.spawn(&long("killed"));
    process::wait_for(&place.path("runs/killed/checkpoints/step_000040"));
    process::signal(&child, libc::SIGKILL);
    assert_eq!(process::Done::of(child.wait_with_output().unwrap()).code, None, "killed");
    place.run(&["train", "--resume", "runs/killed"]).expect(0, &[]);
    assert_eq!(state(&place, "killed"), state(&place, "first"));
}

/// What has its own way to the device is there as what goes by f64, small and large, to the bit.
#[test]
fn an_upload_of_f32_is_that_of_the_same_numbers() {
    if !answers() {
        return;
    }
    let b = Gpu::open(Runtime::Lavapipe).unwrap();
    let upload = |values: &Array2<f32>, transposed: bool, dtype| {
        let values = if transposed { values.t() } else { values.view() };
        let [wide, single] = [(); 2].map(|()| b.persistent(values.shape(), dtype).unwrap());
        b.upload(values.mapv(f64::from).into_dyn().view(), &wide).unwrap();
        b.upload_f32(values.into_dyn(), &single).unwrap();
        let [wide, single] = [wide, single].map(|tensor| b.download(&tensor).unwrap());
        assert!(wide.iter().zip(&single).all(|(x, y)| x.to_bits() == y.to_bits()), "{:?}", wide.shape());
        assert!(wide.iter().any(|x| *x != 0.0));
    };
    let odd = ndarray::array![[0.1, -0.0, f32::INFINITY], [1e-40, f32::MIN_POSITIVE, -3.4e38]];
    // Above 4 MiB an upload takes another way.
    let large = Array2::from_shape_fn((3, 400_000), |(i, j)| (i * 400_000 + j) as f32 * 1e-3 - 7.0);
    for values in [&odd, &large] {
        upload(values, false, DType::F32);
        upload(values, true, DType::F32);
    }
    // Whole numbers keep their own check.
    upload(&ndarray::array![[1.0, 255.0]], true, DType::U8);
    let byte = b.persistent(&[2, 1], DType::U8).unwrap();
    assert!(b.upload_f32(ndarray::array![[0.5], [1.0]].into_dyn().view(), &byte).is_err());
    let error = b.upload_f32(odd.view().into_dyn(), &byte).unwrap_err();
    assert!(matches!(error, Error::Shape { op: "upload", .. }), "{error}");
}

#[test]
fn the_check_is_green_on_both_arms() {
    if !answers() {
        return;
    }
    // The plain kernels are slow here; what they share with the fused ones is checked once.
    for (arm, only, checks) in [("fused", "", 15), ("plain", "gradients tiny", 1)] {
        let done = Place::new().run(&["check", "--backend", "lavapipe", "--quick", "--arms", arm, "--only", only]);
        done.expect(0, &[]);
        let passed = done.out.lines().filter(|line| line.contains(" PASS ")).count();
        assert_eq!(passed, checks, "arm {arm}: {}", done.out);
    }
}

/// The figures of one step of a run.
fn figures(place: &Place, run: &str, step: u64) -> Value {
    let metrics = std::fs::read_to_string(place.path("runs").join(run).join("metrics.jsonl")).unwrap();
    let wanted = format!("\"step\":{step},");
    serde_json::from_str(metrics.lines().find(|line| line.contains(&wanted)).unwrap()).unwrap()
}

/// Compares figures of a step of two runs, each within its band.
fn agree(place: &Place, [there, here]: [&str; 2], step: u64, bands: &[(&str, f64)]) {
    let (there, here) = (figures(place, there, step), figures(place, here, step));
    for &(figure, band) in bands {
        let (there, here) = (there[figure].as_f64().unwrap(), here[figure].as_f64().unwrap());
        assert!(here != 0.0 && (there / here - 1.0).abs() <= band, "step {step}, {figure}: {there} and {here}");
    }
}

/// Three steps on kernels are those of the reference, in f32 within the bands of `dormouse check`: a rounded factor has the
/// reference's bits, and fp8 and ternary look at whole columns. What the third step reads, two updates have moved.
#[test]
fn formats_of_factors_train_on_kernels() {
    if !answers() {
        return;
    }
    let place = Place::new();
    for format in ["fp8", "ternary"] {
        let set = format!("model.format={format}");
        let names = ["lavapipe", "cpu"].map(|backend| format!("{format}-{backend}"));
        for (backend, name) in ["lavapipe", "cpu"].iter().zip(&names) {
            let unverified: &[&str] = if *backend == "cpu" { &[] } else { &["--unverified"] };
            let more = [unverified, &["--set", &set, "--stop-at-step", "3"]].concat();
            place.run(&with(train_on(backend, name, &more), &[("--log-every", "1")])).expect(0, &[]);
        }
        let names = [&*names[0], &*names[1]];
        agree(&place, names, 1, &[("loss", 1e-5), ("grad_norm", 1e-4)]);
        agree(&place, names, 3, &[("loss", 1e-5)]);
    }
    // The format is asked for: at the same weights the losses of the two are others.
    let first = |run| figures(&place, run, 1)["loss"].as_f64().unwrap();
    assert!((first("fp8-cpu") / first("ternary-cpu") - 1.0).abs() > 1e-4);
}

#[test]
fn options_of_the_gates_and_muon_train_on_kernels() {
    if !answers() {
        return;
    }
    let place = Place::new();
    let mut run = train("options", &["--stop-at-step", "1", "--unverified"]);
    for set in ["optimizer.rule=muon", "model.gate=softplus", "model.beta_scale=2"] {
        run.extend(["--set", set]);
    }
    place.run(&run).expect(0, &[]);
}

#[test]
fn the_objective_trains_on_kernels_and_goes_on_to_the_bit_with_its_teacher() {
    if !answers() {
        return;
    }
    let place = Place::new();
    let run = |name, backend, more| {
        // Rows must have room for a span.
        let mut arguments = with(train_on(backend, name, more), &[("--seq", "48")]);
        arguments.extend(["--set", "jepa.mode=shared"]);
        place.run(&arguments)
    };
    let whole = run("whole", "lavapipe", &["--unverified"]);
    whole.expect(0, &["UNVERIFIED"]);
    assert!(whole.out.contains("engagement: 23 operations, 23 fused"), "{}", whole.out);
    run("half", "lavapipe", &["--unverified", "--stop-at-step", "3"]).expect(0, &["UNVERIFIED"]);
    place.run(&["train", "--resume", "runs/half"]).expect(0, &["UNVERIFIED"]);
    let (half, whole) = (state(&place, "half"), state(&place, "whole"));
    assert!(whole.teacher.contains_key("kda.q") && whole.teacher != whole.weights);
    assert_eq!(half, whole);

    // The first step is the reference's, within the bands of `dormouse check` in f32.
    run("cpu", "cpu", &["--stop-at-step", "1"]).expect(0, &[]);
    let bands = [("loss", 1e-5), ("jepa", 1e-5), ("koleo", 1e-5), ("grad_norm", 1e-4)];
    agree(&place, ["whole", "cpu"], 1, &bands);
}

/// The updates of every row of the n-gram table, and its values, wherever the run has it.
fn table(state: &State) -> (Vec<u32>, Vec<f32>) {
    match &state.table {
        Some(table) => (table.counts().to_vec(), table.values().to_vec()),
        None => {
            let counts = state.optimizer["engram.counts"].as_u32().unwrap();
            (counts.to_vec(), state.weights["engram.table"].as_f32().unwrap().to_vec())
        }
    }
}

/// A run stopped in the middle, as it lies in its folder, under another name.
fn copied(place: &Place, from: &str, to: &str) {
    let done = std::process::Command::new("cp").arg("-r").arg(place.path(from)).arg(place.path(to)).status().unwrap();
    assert!(done.success(), "{from} cannot be copied to {to}");
}

/// What a run with its table on the device says of itself: log, metrics, checkpoint, record and atlas.
fn accounts_for_itself(place: &Place, run: &str, out: &str, atlas: &str) {
    for words in ["launch price: ", "| engagement: 20 operations, 20 fused; grad asked ", "a step: "] {
        assert!(out.contains(words), "`{words}` is not in: {out}");
    }
    let metrics = std::fs::read_to_string(place.path(&format!("{run}/metrics.jsonl"))).unwrap();
    let eval: Value = serde_json::from_str(metrics.lines().find(|line| line.contains("\"eval\"")).unwrap()).unwrap();
    assert_eq!(eval["unverified"], true);
    let kda = eval["engagement"]["operations"].as_array().unwrap().iter().filter(|row| row["stem"] == "kda");
    let kda: Vec<&Value> = kda.collect();
    // Two iterations in six steps; one evaluation of two windows.
    assert_eq!((&kda[1]["asked"], &kda[1]["backward"]["fused"]), (&12.into(), &12.into()), "{kda:?}");
    assert_eq!((&kda[0]["steps"], &kda[0]["asked"]), (&"nograd".into(), &kda[0]["forward"]["fused"]), "{kda:?}");
    let manifest = json(place, &format!("{run}/checkpoints/step_000006/manifest.json"));
    assert_eq!(manifest["run"]["backend"], "lavapipe");
    assert_eq!(manifest["run"]["arms"]["kda"], "fused");
    assert_eq!(manifest["run"]["unverified"], true);
    // The run's own record says the same of the process that computed it.
    assert_eq!(json(place, &format!("{run}/run.json"))[0]["run"], manifest["run"]);

    let top = place.run(&["atlas", "top", atlas, "-n", "500"]);
    top.expect(0, &[]);
    for stage in
        ["data", "student forward", "loss", "backward", "sanitise and norm", "optimiser", "retraction", "reads"]
    {
        assert!(top.out.lines().any(|line| line.starts_with(stage)), "no stage `{stage}` in: {}", top.out);
    }
    assert!(!top.out.contains("none "), "a launch belongs to no stage: {}", top.out);
    assert!(top.out.contains("kda::grads"), "{}", top.out);
    assert_eq!(movers(&top.out), Vec::<&str>::new());
}

/// One test and not several: every process loads all kernels anew, and a step is slow here.
#[test]
fn a_run_counts_what_it_does_marks_it_and_goes_on_to_the_bit_wherever_its_memory_lies() {
    if !answers() {
        return;
    }
    let place = Place::new();
    let device = ["--unverified", "--set", "model.engram=device"];
    let whole = place.run(&train("device", &[&device[..], &["--atlas", "atlas.tsv"]].concat()));
    whole.expect(0, &["UNVERIFIED"]);
    accounts_for_itself(&place, "runs/device", &whole.out, "atlas.tsv");
    let stop = ["--stop-at-step", "3"];
    place.run(&train("device-half", &[&device[..], &stop].concat())).expect(0, &["UNVERIFIED"]);
    copied(&place, "runs/device-half", "runs/changed");
    place
        .run(&["train", "--resume", "runs/device-half", "--set", "run.unverified=false"])
        .expect(2, &["run.arms", "kda: fused"]);
    let other = ["train", "--resume", "runs/changed", "--arm", "kda=plain", "--allow-change", "run.arms"];
    place.run(&[&other[..], &["--stop-at-step", "4"]].concat()).expect(0, &[]);

    // A table on the host is moved there, so that `row_adam` is none of the device's operations.
    let host = ["--unverified", "--set", "model.engram=host"];
    let run = place.run(&train("host", &host));
    run.expect(0, &["UNVERIFIED"]);
    let words = "| engagement: 19 operations, 19 fused; grad asked ";
    assert!(run.out.contains(words), "`{words}` is not in: {}", run.out);
    place.run(&train("host-half", &[&host[..], &stop].concat())).expect(0, &[]);
    for name in ["device", "host"] {
        let half = format!("{name}-half");
        place.run(&["train", "--resume", &format!("runs/{half}")]).expect(0, &["UNVERIFIED"]);
        assert_eq!(state(&place, &half), state(&place, name), "{name}");
    }

    // The first loss is read from the same rows by the same kernels. Later ones are not: a row on the host is moved by
    // the host's arithmetic, which rounds elsewhere. Which rows move, and how often, is the same to the end.
    let first_loss = |name: &str| {
        let metrics = std::fs::read_to_string(place.path(&format!("runs/{name}/metrics.jsonl"))).unwrap();
        let first: Value =
            serde_json::from_str(metrics.lines().find(|line| line.contains("\"step\"")).unwrap()).unwrap();
        first["loss"].as_f64().unwrap()
    };
    assert_eq!(first_loss("device"), first_loss("host"));
    let [(counts, values), (host_counts, host_values)] = ["device", "host"].map(|name| table(&state(&place, name)));
    assert_eq!(counts, host_counts);
    assert!(counts.iter().any(|&count| count > 1), "no row was touched twice");
    let named = counts.iter().filter(|&&count| count > 0).count();
    assert!(named < counts.len(), "a row that no batch names would show");
    let width = values.len() / counts.len();
    for (row, (a, b)) in values.chunks(width).zip(host_values.chunks(width)).enumerate() {
        assert!(counts[row] > 0 || a == b, "row {row} is named by no batch and moved");
    }

    // What a device has learnt can be used where it is not, from either place.
    for run in ["runs/device", "runs/host"] {
        scores_alike_on_the_cpu(&place, run);
    }
}

#[test]
fn what_a_backend_does_not_have_is_refused_with_a_fix() {
    let place = Place::new();
    let on_cpu = |more: &[&str]| place.run(&[&["train", "--backend", "cpu", "--steps", "1"], more].concat());
    on_cpu(&["--precision", "bf16"]).expect(2, &["`run.precision` is bf16", "--backend"]);
    on_cpu(&["--arm", "kda=fused"]).expect(2, &["run.arms", "leave --arm out"]);
    on_cpu(&["--unverified"]).expect(2, &["`run.unverified` is true", "leave --unverified out"]);
    on_cpu(&["--no-graph"]).expect(2, &["`run.graph` is false", "leave --no-graph out"]);
    on_cpu(&["--atlas", "atlas.tsv"]).expect(2, &["--atlas", "--backend cuda"]);
    place.run(&["train", "--backend", "gpu"]).expect(2, &["gpu", "cuda"]);
    place.run(&["train", "--set", "run.backend=gpu"]).expect(2, &["gpu", "cuda"]);
    place.run(&["arms", "--backend", "cuda", "--arm", "kdaa=plain"]).expect(2, &["kdaa", "dormouse arms"]);
    place.run(&["check", "--only", "nothing"]).expect(2, &["no check's name", "gradients tiny"]);
    let other = ["check", "--only", "gradients tiny", "--preset", "nano"];
    place.run(&other).expect(2, &["no check's name", "of `nano`", "gradients preset"]);
    let alone = ["check", "--backend", "cpu", "--precision", "tf32,bf16", "--only", "losses", "--quick"];
    place.run(&alone).expect(2, &["nothing to run on the reference"]);
    place.run(&["bench", "--steps", "50"]).expect(2, &["--steps is 50", "70"]);
    place.run(&["bench", "--steps", "18446744073709551615"]).expect(2, &["--steps is 18446744073709551615", "or less"]);
    place.run(&["bench", "--processes", "0"]).expect(2, &["--processes is 0"]);
    place.run(&["bench", "--map", "none/map.md"]).expect(1, &["cannot write `none/map.md`", "give --map a file"]);
    place.run(&["atlas", "top", "missing.tsv"]).expect(2, &["missing.tsv", "train --atlas"]);
    place.run(&["check", "--backend", "cpu", "--arms", "nosuch"]).expect(2, &["--arms has `nosuch`", "plain, fused"]);
    if answers() {
        let refused = place.run(&train("a", &["--arm", "rms_norm=fused"]));
        refused.expect(2, &["rms_norm=fused", "without a valid receipt", "--unverified"]);
    }
    if let Err(why) = Cuda::available() {
        let first = why.to_string();
        place.run(&["train", "--backend", "cuda"]).expect(1, &["run.backend is cuda", &first, "--backend cpu"]);
        let arms = place.run(&["arms"]);
        arms.expect(0, &[]);
        assert!(arms.out.contains("no GPU answers") && arms.out.contains("rms_norm"), "{}", arms.out);
        // What a GPU elsewhere would take is told for every choice.
        let plain = place.run(&["arms", "--unverified", "--arm", "rms_norm=plain"]);
        plain.expect(0, &[]);
        assert!(plain.out.contains("rms_norm         plain  asked for"), "{}", plain.out);
    }
}

/// There are no receipts of the software device, so every operation declines its fused kernels until the user insists.
#[test]
fn plain_kernels_for_want_of_a_receipt_are_counted_as_declined() {
    if !answers() {
        return;
    }
    let place = Place::new();
    let run = |name: &str, more: &[&str]| -> Value {
        let done = place.run(&with(train(name, more), &[("--steps", "1"), ("--eval-every", "1")]));
        done.expect(0, &[]);
        let place = place.path("runs").join(name).join("metrics.jsonl");
        let metrics = std::fs::read_to_string(place).unwrap();
        let line = metrics.lines().find(|line| line.contains("\"eval\"")).unwrap_or_else(|| panic!("{metrics}"));
        serde_json::from_str::<Value>(line).unwrap()["engagement"]["operations"].clone()
    };
    for row in run("declined", &[]).as_array().unwrap() {
        let reason = row["declined_because"].as_str().unwrap();
        assert!(reason.starts_with("there is no ") && reason.contains(".f32.lavapipe.toml"), "{row}");
        assert_eq!((&row["declined"], &row["recomputed"]), (&row["asked"], &0.into()), "{row}");
    }
    for row in run("asked", &["--arm", "all=plain"]).as_array().unwrap() {
        assert_eq!((&row["declined"], &row["forward"]["plain"]), (&0.into(), &row["asked"]), "{row}");
        assert!(row["declined_because"].is_null(), "{row}");
    }
}

/// The host takes row gradients every third step, in the stage of the atlas that is there for it, and a run that stops
/// between goes on to the bit.
#[test]
fn a_table_on_the_host_waits_for_steps_on_kernels_too() {
    if !answers() {
        return;
    }
    let place = Place::new();
    let more = ["--unverified", "--set", "model.engram=host", "--host-adam-every", "3"];
    place.run(&train("whole", &[&more[..], &["--atlas", "atlas.tsv"]].concat())).expect(0, &["UNVERIFIED"]);
    place.run(&train("half", &[&more[..], &["--stop-at-step", "4"]].concat())).expect(0, &["UNVERIFIED"]);
    assert!(state(&place, "half").optimizer.contains_key("engram.waiting"));
    place.run(&["train", "--resume", "runs/half"]).expect(0, &["UNVERIFIED"]);
    assert_eq!(state(&place, "half"), state(&place, "whole"));
    assert!(table(&state(&place, "whole")).0.contains(&2), "no row was moved at the end of both windows");
    let atlas = std::fs::read_to_string(place.path("atlas.tsv")).unwrap();
    let rows = atlas.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let waits: Vec<Vec<&str>> = rows.filter(|row| row.get(1) == Some(&"host table") && row[7] != "0").collect();
    let steps: std::collections::BTreeSet<&str> = waits.iter().map(|row| row[0]).collect();
    assert_eq!(steps.into_iter().collect::<Vec<_>>(), ["3", "6"], "{waits:?}");
    // One read of the gradients and one of the records.
    assert!(waits.iter().all(|row| (row[3], row[7]) == ("download", "2")), "{waits:?}");
}
