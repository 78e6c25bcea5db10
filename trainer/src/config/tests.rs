//! Tests of `config`.

use std::io::Write;

use toml::Value;

use super::{
    Backend, Config, ConfigError, Engram, JepaConfig, JepaMode, PRESETS, Rule, Sources, changes, check_changes, preset,
    resolve,
};

fn with_file(text: &str, sources: Sources) -> Result<Config, ConfigError> {
    let mut file = tempfile::Builder::new().prefix("run").suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    resolve(&Sources { file: Some(file.path().to_owned()), ..sources })
}

fn with_set(argument: &str) -> Result<Config, ConfigError> {
    resolve(&Sources { set: vec![argument.to_owned()], ..Sources::default() })
}

#[test]
fn presets_are_valid_and_survive_toml() {
    for name in PRESETS {
        let config = preset(name).unwrap();
        config.validate().unwrap();
        assert_eq!(config.preset, name);
        assert_eq!(Config::from_toml(&config.to_toml(), "x".as_ref()).unwrap(), config);
    }
    assert_eq!(preset("nano").unwrap().model.width, 256);
    assert_eq!(preset("tiny").unwrap().data.seq_bytes, 64);
    assert!(preset("nanoo").unwrap_err().to_string().contains("expected one of nano, tiny"));
}

#[test]
fn later_sources_win() {
    let file = "seed = 1\n[optimizer]\nlr = 1e-4\nbeta1 = 0.5\n[train]\nbatch_rows = 16\n";
    let flags = vec![("seed".to_owned(), Value::Integer(3)), ("data.path".to_owned(), Value::String("some".into()))];
    let set = vec!["optimizer.lr=5e-4".to_owned(), "seed=2".to_owned()];
    let config = with_file(file, Sources { set, flags, ..Sources::default() }).unwrap();
    assert_eq!(config.optimizer.beta1, 0.5);
    assert_eq!(config.optimizer.lr, 5e-4);
    assert_eq!(config.seed, 3);
    assert_eq!(config.train.batch_rows, 16);
    assert_eq!(config.data.path.as_deref(), Some("some".as_ref()));
    assert_eq!(config.model, preset("nano").unwrap().model);
}

#[test]
fn the_preset_comes_from_the_flag_then_the_file() {
    let file = "preset = \"tiny\"\n";
    assert_eq!(with_file(file, Sources::default()).unwrap().model.width, 128);
    let flag = Sources { preset: Some("nano".into()), ..Sources::default() };
    let config = with_file(file, flag).unwrap();
    assert_eq!((config.model.width, config.preset.as_str()), (256, "nano"));
    assert_eq!(resolve(&Sources::default()).unwrap().preset, "nano");
}

#[test]
fn unknown_keys_name_the_place_and_the_nearest_key() {
    let error = with_file("seed = 1\n\n[train]\ntotal_stpes = 5\n", Sources::default()).unwrap_err().to_string();
    assert!(error.contains(".toml` line 4"), "{error}");
    assert!(error.contains("unknown key `train.total_stpes`, nearest is `train.total_steps`"), "{error}");
    let error = with_set("lr=3").unwrap_err().to_string();
    assert!(error.contains("--set lr=3") && error.contains("nearest is `optimizer.lr`"), "{error}");
    // A section that is unknown is a part of its keys, in a file as well.
    let error = with_set("modle.width=3").unwrap_err().to_string();
    assert!(error.contains("unknown key `modle.width`, nearest is `model.width`"), "{error}");
    let error = with_file("seed = 1\n\n[modle]\nwidth = 3\n", Sources::default()).unwrap_err().to_string();
    assert!(error.contains("line 3") && error.contains("nearest is `model.width`"), "{error}");
    let error = with_set("zzzzzzzzzzzzzz.qqqqqqqqqq=3").unwrap_err().to_string();
    assert!(!error.contains("nearest"), "{error}");
    assert!(matches!(with_set("seed.deeper=3"), Err(ConfigError::WrongType { .. })));
}

#[test]
fn wrong_types_are_named() {
    let error = with_file("[train]\nbatch_rows = \"many\"\n", Sources::default()).unwrap_err().to_string();
    assert!(error.contains("line 2: `train.batch_rows` expected a whole number"), "{error}");
    assert!(with_set("train.batch_rows=-1").unwrap_err().to_string().contains("0 or more, got -1"));
    assert!(with_set("train.overfit_one_batch=yes").unwrap_err().to_string().contains("true or false"));
    assert!(with_set("model=3").unwrap_err().to_string().contains("a section"));
    assert!(with_set("log.prompts=[1]").unwrap_err().to_string().contains("a list of strings"));
    assert_eq!(with_set("optimizer.lr=1").unwrap().optimizer.lr, 1.0);
    assert!(matches!(with_set("seed"), Err(ConfigError::BadSet { .. })));
    assert!(matches!(with_set("=3"), Err(ConfigError::BadSet { .. })));
    assert!(matches!(with_file("seed = = 2", Sources::default()), Err(ConfigError::Syntax { .. })));
}

#[test]
fn values_that_cannot_work_are_refused_with_their_key() {
    let cases = [
        ("model.width=0", "`model.width` is 0"),
        ("train.total_steps=0", "`train.total_steps` is 0"),
        ("optimizer.lr=0", "`optimizer.lr` is 0"),
        ("optimizer.lr=-1.0", "`optimizer.lr` is -1"),
        ("optimizer.lr=nan", "`optimizer.lr` is NaN"),
        ("optimizer.lr=inf", "`optimizer.lr` is inf"),
        ("optimizer.lr=1e300", "`optimizer.lr` is 1e300, outside the range of f32"),
        ("optimizer.eps=1e-300", "`optimizer.eps` is 1e-300, outside the range of f32"),
        ("optimizer.weight_decay=1e300", "outside the range of f32"),
        ("optimizer.retract_iterations=101", "give 100 or less"),
        ("model.width=9223372036854775807", "give 65536 or less"),
        ("data.seq_bytes=9223372036854775807", "give 16777216 or less"),
        ("train.batch_rows=9223372036854775807", "give 1048576 or less"),
        ("train.total_steps=9223372036854775807", "a number that 32 bits hold"),
        ("optimizer.beta2=1.0", "`optimizer.beta2` is 1"),
        ("optimizer.host_adam_every_steps=0", "`optimizer.host_adam_every_steps` is 0; give 1 or more"),
        ("optimizer.host_adam_every_steps=65", "`optimizer.host_adam_every_steps` is 65; give 64 or less"),
        (
            "optimizer.host_adam_every_steps=2",
            "`optimizer.host_adam_every_steps` is 2, and model.engram is off; give --set model.engram=host, or 1",
        ),
        ("train.accumulate=3", "does not divide train.batch_rows = 8"),
        ("log.prompts=[\"\"]", "empty prompt"),
        ("model.rank=1000", "above model.width = 256"),
        ("log.sample_temperature=0", "`log.sample_temperature` is 0"),
        ("optimizer.decay_percent=101", "from 0 to 100"),
        ("model.engram_rows=0", "`model.engram_rows` is 0; give 1 or more; model.engram=off turns the memory off"),
        ("model.engram_rows=1431655766", "`model.engram_rows` is 1431655766; give 1431655765 or less"),
        ("model.engram_width=0", "`model.engram_width` is 0"),
        ("model.engram_width=5000", "give 4096 or less"),
        ("model.beta_scale=3", "`model.beta_scale` is 3; give 1, or 2"),
        ("jepa.weight=0", "`jepa.weight` is 0"),
        ("jepa.weight=-0.1", "`jepa.weight` is -0.1"),
        ("jepa.weight=1e300", "`jepa.weight` is 1"),
        ("jepa.weight=nan", "`jepa.weight` is NaN"),
        ("jepa.momentum=1.5", "`jepa.momentum` is 1.5; give a number from 0 to 1"),
        ("jepa.momentum=nan", "`jepa.momentum` is NaN"),
        ("jepa.targets=some", "`jepa.targets` is `some`, and jepa.mode is off"),
        ("jepa.wieght=1", "nearest is `jepa.weight`"),
        ("preset=small", "cannot be set over them; give --preset \"small\""),
    ];
    for (argument, expected) in cases {
        let error = with_set(argument).unwrap_err().to_string();
        assert!(error.contains(expected), "{argument}: {error}");
    }
}

#[test]
fn a_word_that_a_key_does_not_have_is_refused_with_key_words_and_origin() {
    let cases = [
        ("model", "engram", "gpu", "one of `off`, `device`, `host`"),
        ("model", "format", "int8", "one of `f32`, `bf16`, `f16`, `fp8`, `ternary`"),
        ("model", "gate", "hard", "`bounded` or `softplus`"),
        ("jepa", "mode", "both", "one of `off`, `shared`, `separate`"),
        ("optimizer", "rule", "sgd", "`adamw` or `muon`"),
        ("run", "precision", "f64", "one of `f32`, `tf32`, `bf16`"),
        ("run", "backend", "tpu", "one of `auto`, `cpu`, `cuda`"),
    ];
    for (section, key, word, expected) in cases {
        let argument = format!("{section}.{key}={word}");
        let error = with_set(&argument).unwrap_err().to_string();
        let words = format!("config: --set {argument}: `{section}.{key}` expected {expected}");
        assert!(error.starts_with(&words) && error.ends_with(&format!(", got `{word}`")), "{error}");
        let text = format!("seed = 1\n[{section}]\n{key} = \"{word}\"\n");
        let error = with_file(&text, Sources::default()).unwrap_err().to_string();
        let words = format!("` line 3: `{section}.{key}` expected {expected}");
        assert!(error.contains(&words) && error.ends_with(&format!(", got `{word}`")), "{error}");
    }
    let error = with_file("seed = 1\npreset = \"huge\"\n", Sources::default()).unwrap_err().to_string();
    assert!(error.ends_with("` line 2: `preset` expected one of nano, tiny, small, base, got `huge`"), "{error}");
    // A stored configuration with a word of another version is TOML, and its file is named with the line.
    let text = preset("tiny").unwrap().to_toml().replace("engram = \"off\"", "engram = \"tape\"");
    let error = Config::from_toml(&text, "runs/a/config.toml".as_ref()).unwrap_err().to_string();
    assert!(error.contains("`runs/a/config.toml` is no configuration of this version"), "{error}");
    assert!(error.contains("TOML parse error at line") && error.contains("unknown variant `tape`"), "{error}");
    let error = Config::from_toml("seed = = 1", "x".as_ref()).unwrap_err().to_string();
    assert!(error.contains("`x` is not TOML"), "{error}");
}

#[test]
fn a_table_that_no_machine_holds_is_refused() {
    let set = ["model.engram_width=4096", "model.engram_rows=1400000000"].map(str::to_owned).to_vec();
    let error = resolve(&Sources { set, ..Sources::default() }).unwrap_err().to_string();
    assert!(error.contains("`model.engram_rows` is 1400000000, and the table would have more than 2^40"), "{error}");
}

#[test]
fn an_empty_path_means_none() {
    assert_eq!(with_set("data.path=").unwrap().data.path, None);
}

#[test]
fn a_resumed_run_shows_what_changed_and_refuses_other_mathematics() {
    let then = preset("nano").unwrap();
    assert_eq!(check_changes(&then, &then, &[]).unwrap(), None);
    let mut now = then.clone();
    now.log.every_steps = 1;
    let table = check_changes(&then, &now, &[]).unwrap().unwrap();
    assert!(table.contains("log.every_steps") && table.contains("same numbers"), "{table}");
    now.optimizer.lr = 1e-3;
    now.train.total_steps = 2000;
    assert_eq!(changes(&then, &now).iter().filter(|change| change.mathematics).count(), 2);
    let error = check_changes(&then, &now, &["optimizer.lr".into()]).unwrap_err().to_string();
    assert!(
        error.contains("--allow-change train.total_steps") && !error.contains("--allow-change optimizer.lr"),
        "{error}"
    );
    assert!(error.contains("0.002") && error.contains("0.001"), "{error}");
    let unknown = check_changes(&then, &now, &["optimizer.rate".into()]).unwrap_err().to_string();
    assert!(unknown.contains("optimizer.rate") && unknown.contains("no such key"), "{unknown}");
    let both = ["optimizer.lr".to_owned(), "train.total_steps".to_owned()];
    assert!(check_changes(&then, &now, &both).unwrap().is_some());
}

#[test]
fn the_presets_have_the_memory_and_the_objective_of_the_specification() {
    let memory = |name: &str| {
        let config = preset(name).unwrap();
        (config.model.engram, config.model.engram_rows, config.model.engram_width, config.optimizer.rule)
    };
    assert_eq!(memory("tiny"), (Engram::Off, 4096, 32, Rule::Adamw));
    assert_eq!(memory("nano"), (Engram::Off, 8192, 32, Rule::Adamw));
    assert_eq!(memory("small"), (Engram::Device, 32_768, 32, Rule::Muon));
    assert_eq!(memory("base"), (Engram::Device, 32_768, 32, Rule::Muon));
    let batch = |name: &str| preset(name).map(|c| (c.train.batch_rows, c.data.seq_bytes)).unwrap();
    assert_eq!((batch("small"), batch("base")), ((8, 512), (8, 1024)));
    let jepa = |name: &str| preset(name).map(|config| config.jepa.mode).unwrap();
    assert_eq!(["tiny", "nano", "small", "base"].map(jepa)[..2], [JepaMode::Off; 2]);
    assert_eq!(["small", "base"].map(jepa), [JepaMode::Shared; 2]);
}

/// A configuration from before there were options of the model had none of them.
#[test]
fn a_stored_configuration_without_the_options_has_the_model_it_had() {
    let now = preset("tiny").unwrap();
    let options = ["engram", "engram_rows", "engram_width", "format", "gate", "beta_scale"];
    let is_option = |line: &&str| options.iter().any(|key| line.starts_with(&format!("{key} = ")));
    let text = now.to_toml();
    assert_eq!(text.lines().filter(is_option).count(), options.len());
    let old: String = text.lines().filter(|line| !is_option(line)).map(|line| format!("{line}\n")).collect();
    let then = Config::from_toml(&old, "config.toml".as_ref()).unwrap();
    assert_eq!(then.model, super::ModelConfig { engram_rows: 32_768, ..now.model });
}

#[test]
fn options_of_the_model_are_set_by_their_keys_and_refused_at_resume() {
    let then = preset("tiny").unwrap();
    for (argument, key) in [
        // Nobody has rows while there is no memory.
        ("model.engram_rows=64", "model.engram_rows"),
        ("model.format=ternary", "model.format"),
        ("model.gate=softplus", "model.gate"),
        ("model.beta_scale=2", "model.beta_scale"),
    ] {
        let set = Sources { base: Some(then.clone()), set: vec![argument.to_owned()], ..Sources::default() };
        let now = resolve(&set).unwrap();
        let error = check_changes(&then, &now, &[]).unwrap_err().to_string();
        assert!(error.contains(&format!("--allow-change {key}")), "{argument}: {error}");
        assert!(check_changes(&then, &now, &[key.to_owned()]).unwrap().is_some());
    }
}

#[test]
fn presets_and_configurations_from_before_have_no_jepa_and_switching_it_on_is_other_mathematics() {
    let config = preset("tiny").unwrap();
    assert!(!config.jepa.on());
    let text = config.to_toml();
    let (start, rest) = text.split_once("[jepa]").unwrap();
    let end = &rest[rest.find("\n[").unwrap()..];
    let before = Config::from_toml(&format!("{start}{end}"), "x".as_ref()).unwrap();
    assert_eq!(before, config);
    let mut on = config.clone();
    on.jepa = JepaConfig { mode: JepaMode::Separate, targets: Some("file".into()), ..on.jepa };
    assert_eq!(Config::from_toml(&on.to_toml(), "x".as_ref()).unwrap(), on);
    assert_eq!((on.jepa.weight, on.jepa.momentum), (0.05, 0.999));
    let keys: Vec<String> = changes(&config, &on).into_iter().filter(|c| c.mathematics).map(|c| c.key).collect();
    assert_eq!(keys, ["jepa.mode", "jepa.targets"]);
    let back: Vec<String> = changes(&on, &config).into_iter().filter(|c| c.mathematics).map(|c| c.key).collect();
    assert_eq!(back, ["jepa.mode"]);
    // What only the objective has is left behind; what it needs cannot be made of a checkpoint without it.
    assert!(check_changes(&on, &config, &[]).unwrap_err().to_string().contains("--allow-change jepa.mode"));
    check_changes(&on, &config, &["jepa.mode".to_owned()]).unwrap();
    let set = ["jepa.mode=shared", "jepa.targets=file"].map(str::to_owned).to_vec();
    let set = resolve(&Sources { set, ..Sources::default() }).unwrap();
    assert_eq!(set.jepa.targets(), Some("file".as_ref()));
}

/// Nothing that is advised may fail afterwards, whatever is allowed.
#[test]
fn what_a_checkpoint_has_no_tensors_for_is_refused_without_a_flag_that_cannot_help() {
    let with = |set: &[&str]| {
        let set = set.iter().map(|argument| (*argument).to_owned()).collect();
        resolve(&Sources { preset: Some("tiny".into()), set, ..Sources::default() }).unwrap()
    };
    for (then, now, why) in [
        (
            &[][..],
            "model.engram=device",
            "`model.engram` needs tensor `engram.key`, which the checkpoint does not have",
        ),
        (&[], "jepa.mode=shared", "`jepa.mode` needs tensor `jepa.predictor`, which the checkpoint does not have"),
        (&["model.engram=host"], "model.engram=off", "`model.engram` has no place for tensor `engram.key` of the"),
        (
            &["model.engram=host", "model.engram_rows=512"],
            "model.engram_rows=64",
            "`model.engram_rows` makes tensor `engram.table` [192, 32], which is [1536, 32] in the checkpoint",
        ),
        (&[], "model.width=64", "`model.width` makes tensor `embedding` [256, 64], which is [256, 128] in the"),
        (&[], "model.iterations=3", "`model.iterations` makes tensor `iteration` [3, 128], which is [2, 128] in the"),
    ] {
        let key = now.split('=').next().unwrap();
        let all = [then, &[now, "optimizer.lr=2e-3"]].concat();
        let error = check_changes(&with(then), &with(&all), &[key.to_owned(), "optimizer.lr".to_owned()]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("start a new run"), "{error}");
        assert!(error.contains(key) && !error.contains("--allow-change model"), "{error}");
    }
    // What changes no tensor still goes by its flag.
    let gate = check_changes(&with(&[]), &with(&["model.gate=softplus"]), &["model.gate".to_owned()]);
    assert!(gate.unwrap().is_some());
}

/// Where a table lies and where a file of targets lies changes no bit.
#[test]
fn what_only_lies_elsewhere_needs_no_flag() {
    let with = |set: &[&str]| {
        let set = set.iter().map(|argument| (*argument).to_owned()).collect();
        resolve(&Sources { preset: Some("tiny".into()), set, ..Sources::default() }).unwrap()
    };
    let cpu = "run.backend=cpu";
    let (device, host) = (with(&[cpu, "model.engram=device"]), with(&[cpu, "model.engram=host"]));
    for (then, now) in [(&device, &host), (&host, &device)] {
        let table = check_changes(then, now, &[]).unwrap().unwrap();
        assert!(table.contains("model.engram") && table.contains("same numbers"), "{table}");
    }
    // On a GPU nobody has shown that the bits are the same.
    let on_gpu = |config: &Config| {
        let mut config = config.clone();
        config.run.backend = Backend::Cuda;
        config
    };
    let error = check_changes(&on_gpu(&device), &on_gpu(&host), &[]).unwrap_err().to_string();
    assert!(error.contains("--allow-change model.engram"), "{error}");
    let targets = |path: &str| with(&["jepa.mode=shared", &format!("jepa.targets={path}")]);
    let table = check_changes(&targets("a"), &targets("b"), &[]).unwrap().unwrap();
    assert!(table.contains("jepa.targets") && table.contains("same numbers"), "{table}");
    let error = check_changes(&targets("a"), &with(&["jepa.mode=shared"]), &[]).unwrap_err().to_string();
    assert!(error.contains("--allow-change jepa.targets"), "{error}");
}

#[test]
fn rows_too_short_for_a_span_are_refused_with_the_objective() {
    let set = |seq: usize, mode: &str| {
        let set = vec![format!("data.seq_bytes={seq}"), format!("jepa.mode={mode}")];
        resolve(&Sources { set, ..Sources::default() })
    };
    let error = set(8, "shared").unwrap_err().to_string();
    assert!(error.contains("`data.seq_bytes` is 8") && error.contains("give 9 or more"), "{error}");
    assert!(set(9, "shared").is_ok() && set(8, "off").is_ok());
}

#[test]
fn a_number_that_is_too_large_is_called_that_and_not_a_string() {
    for argument in ["train.total_steps=99999999999999999999", "seed=9223372036854775808", "seed=-9_223372036854775809"]
    {
        let error = with_set(argument).unwrap_err().to_string();
        assert!(error.contains("expected a whole number from 0 to 9223372036854775807, got `"), "{error}");
        assert!(error.ends_with("`, which is outside of that"), "{error}");
    }
    // Where a fraction may stand there is no such end, and a name may be of digits.
    assert_eq!(with_set("optimizer.eps=10000000000000000000").unwrap().optimizer.eps, 1e19);
    let path = with_set("data.path=99999999999999999999").unwrap().data.path;
    assert_eq!(path.as_deref(), Some("99999999999999999999".as_ref()));
    assert!(with_set("seed=many").unwrap_err().to_string().contains("got string"));
}
