//! What is compared: configurations that see the same bytes, and the seeds they share.

use std::path::Path;

use anyhow::Result;
use toml::Value;

use crate::backend::settle;
use crate::cli::CompareArgs;
use crate::config::{Change, Config, ConfigError, Engram, PRESETS, Rule, Sources, changes, flatten, resolve};
use crate::data::Data;

/// Fewest seeds that say anything about what a seed does.
const FEWEST_SEEDS: u32 = 3;

/// Most seeds: far more than anybody waits for.
const MOST_SEEDS: u32 = 1000;

/// Keys that a control and its candidates must share: they decide which bytes a run learns from and is scored on.
const SHARED: [&str; 7] = [
    "seed",
    "data.seq_bytes",
    "data.eval_windows",
    "data.eval_bytes",
    "train.total_steps",
    "train.batch_rows",
    "train.overfit_one_batch",
];

/// One side of a comparison.
pub struct Contender {
    /// `control`, or the candidate's name.
    pub name: String,
    /// Its configuration, with the first seed and with the backend that answers.
    pub config: Config,
    /// What tells it from every other configuration on every other data, whatever the seed: 16 hexadecimal digits.
    pub identity: String,
    /// In which keys it differs from the control, by what counts for its numbers or its time.
    pub changes: Vec<Change>,
}

/// A comparison.
pub struct Plan {
    /// The control, then the candidates.
    pub contenders: Vec<Contender>,
    /// The seeds of every one of them.
    pub seeds: Vec<u64>,
    /// Held-out windows that every run is scored on.
    pub windows: usize,
}

impl Plan {
    /// Resolves what a command line asks for.
    ///
    /// # Errors
    /// A usage error: too few seeds, no candidate, one that sees other bytes than the control, one that does not
    /// differ; whatever is wrong with a configuration or the data.
    pub fn of(arguments: &CompareArgs) -> Result<Plan> {
        if arguments.seeds < FEWEST_SEEDS {
            let problem = format!("--seeds is {}, expected {FEWEST_SEEDS} or more", arguments.seeds);
            return Err(usage(format!("{problem}: fewer do not show what a seed alone changes")).into());
        }
        if arguments.seeds > MOST_SEEDS {
            return Err(usage(format!("--seeds is {}, expected {MOST_SEEDS} or fewer", arguments.seeds)).into());
        }
        if arguments.candidate.is_empty() && arguments.set.is_empty() {
            let fix = "give --candidate FILE, --set KEY=VALUE (of the candidate), or both";
            return Err(usage(format!("there is no candidate; {fix}")).into());
        }
        let mut control = contender("control".to_owned(), control(arguments)?)?;
        let opened = Data::open(&control.config)?;
        let (windows, data) = (opened.eval.windows().len(), opened.manifest.hash());
        control.identity = identity(&control.config, &data);
        let mut contenders = vec![control];
        for (name, config) in candidates(arguments, &contenders[0].config)? {
            let mut candidate = contender(name, config)?;
            let control = &contenders[0];
            // A large corpus is hashed once, not once for everyone who names it.
            let (own, theirs) = (&candidate.config.data, &control.config.data);
            let same_data = (&own.path, &own.eval_path) == (&theirs.path, &theirs.eval_path)
                || data == Data::open(&candidate.config)?.manifest.hash();
            same_bytes(control, &candidate, same_data)?;
            candidate.identity = identity(&candidate.config, &data);
            candidate.changes = telling(&control.config, &candidate.config);
            if let Some(twin) = contenders.iter().find(|other| other.identity == candidate.identity) {
                let (a, b) = (&candidate.name, &twin.name);
                let fix = "leave one out, or change a key that alters what a run computes";
                return Err(
                    usage(format!("`{a}` and `{b}` are one configuration and would give one result; {fix}")).into()
                );
            }
            contenders.push(candidate);
        }
        let first = contenders[0].config.seed;
        let last = first.checked_add(u64::from(arguments.seeds) - 1).filter(|last| i64::try_from(*last).is_ok());
        let Some(last) = last else {
            let problem = format!("seed is {first}, and {} seeds from there do not fit", arguments.seeds);
            return Err(usage(format!("{problem}; give a smaller --seed")).into());
        };
        Ok(Plan { contenders, seeds: (first..=last).collect(), windows })
    }

    /// The control.
    pub fn control(&self) -> &Contender {
        &self.contenders[0]
    }
}

pub(super) fn usage(problem: String) -> ConfigError {
    ConfigError::Usage(format!("compare: {problem}"))
}

/// What control and candidates have from the command line alike.
fn common(arguments: &CompareArgs, sources: Sources) -> Sources {
    let mut sources = arguments.run.over(Sources { set: arguments.both.clone(), ..sources });
    sources.flags.extend(arguments.flags());
    sources
}

fn control(arguments: &CompareArgs) -> Result<Config, ConfigError> {
    let word = arguments.control.as_str();
    let named = PRESETS.contains(&word);
    if !named && !Path::new(word).exists() {
        let known = PRESETS.join(", ");
        return Err(usage(format!(
            "--control `{word}` is neither a file nor one of the presets {known}; give one of them"
        )));
    }
    let (preset, file) = if named { (Some(word.to_owned()), None) } else { (None, Some(word.into())) };
    resolve(&common(arguments, Sources { preset, file, ..Sources::default() }))
}

/// The candidates' names and configurations.
fn candidates(arguments: &CompareArgs, control: &Config) -> Result<Vec<(String, Config)>, ConfigError> {
    let mut files: Vec<Option<&Path>> = arguments.candidate.iter().map(|path| Some(path.as_path())).collect();
    if files.is_empty() {
        files.push(None);
    }
    let mut all: Vec<(String, Config)> = Vec::new();
    for file in files {
        let base = Some(control.clone());
        let of_file =
            resolve(&common(arguments, Sources { base, file: file.map(Path::to_owned), ..Sources::default() }))?;
        let config = resolve(&Sources { base: Some(of_file), set: arguments.set.clone(), ..Sources::default() })?;
        let stem = file.and_then(Path::file_stem).map_or_else(|| "candidate".into(), |stem| stem.to_string_lossy());
        let plain = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        let stem: String = stem.chars().map(plain).collect();
        let taken = |name: &str| name == "control" || all.iter().any(|(other, _)| other == name);
        let name = (1..).map(|n| if n == 1 { stem.clone() } else { format!("{stem}-{n}") }).find(|name| !taken(name));
        all.push((name.expect("one of endless names is free"), config));
    }
    Ok(all)
}

fn contender(name: String, mut config: Config) -> Result<Contender> {
    settle(&mut config.run)?;
    if let Some(path) = config.jepa.targets() {
        let problem = format!("jepa.targets of `{name}` is `{}`, a file for one seed", path.display());
        return Err(usage(format!("{problem}, and several are compared; leave it out, so that teachers run")).into());
    }
    Ok(Contender { name, config, identity: String::new(), changes: Vec::new() })
}

/// Whether a key counts for a run's numbers or its time, apart from the seed and the data, whose bytes are compared.
fn tells(key: &str) -> bool {
    let reported = key.starts_with("log.") || key.starts_with("checkpoint.");
    !reported && !["preset", "seed", "data.path", "data.eval_path"].contains(&key)
}

/// Whether a key belongs to a part that the configuration has not, so that it moves no number.
fn inert(config: &Config, key: &str) -> bool {
    let of_rule = key.starts_with("optimizer.muon_") && config.optimizer.rule != Rule::Muon;
    let of_memory = key.starts_with("model.engram_") && config.model.engram == Engram::Off;
    let of_objective = key.starts_with("jepa.") && key != "jepa.mode" && !config.jepa.on();
    of_rule || of_memory || of_objective
}

fn telling(control: &Config, candidate: &Config) -> Vec<Change> {
    changes(control, candidate).into_iter().filter(|change| tells(&change.key)).collect()
}

fn identity(config: &Config, data: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(data.as_bytes());
    for (key, value) in flatten(config).iter().filter(|(key, _)| tells(key) && !inert(config, key)) {
        hasher.update(format!("\n{key}={value}").as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Refuses a candidate that would learn from other bytes, or be scored on others.
fn same_bytes(control: &Contender, candidate: &Contender, same_data: bool) -> Result<(), ConfigError> {
    let (own, other) = (flatten(&control.config), flatten(&candidate.config));
    let mut problems = Vec::new();
    for key in SHARED.into_iter().filter(|key| own.get(*key) != other.get(*key)) {
        let show = |table: &toml::Table| table.get(key).map_or_else(|| "(none)".to_owned(), Value::to_string);
        problems.push(format!("  `{key}` is {}, expected the control's {}", show(&other), show(&own)));
    }
    if !same_data {
        let show =
            |path: &Option<std::path::PathBuf>| path.as_ref().map_or("(none)".into(), |p| p.display().to_string());
        let of = |config: &Config| format!("{} and {}", show(&config.data.path), show(&config.data.eval_path));
        let (got, expected) = (of(&candidate.config), of(&control.config));
        problems.push(format!("  data.path and data.eval_path are {got}, other bytes than the control's {expected}"));
    }
    if problems.is_empty() {
        return Ok(());
    }
    let fix = "give both the same, with a flag such as --steps or with --both KEY=VALUE";
    let name = &candidate.name;
    Err(usage(format!("`{name}` would not see the bytes that the control sees:\n{}\n{fix}", problems.join("\n"))))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Plan;
    use crate::cli::{Cli, Command, CompareArgs};
    use crate::config::Backend;
    use crate::exit::Exit;

    fn arguments(line: &str) -> CompareArgs {
        let words = format!("dormouse compare --backend cpu {line}");
        let Command::Compare(arguments) = Cli::try_parse_from(words.split_whitespace()).unwrap().command else {
            panic!("not compare");
        };
        *arguments
    }

    fn plan(line: &str) -> anyhow::Result<Plan> {
        Plan::of(&arguments(line))
    }

    #[track_caller]
    fn refused(line: &str, words: &[&str]) {
        let error = plan(line).err().unwrap_or_else(|| panic!("`{line}` was not refused"));
        assert_eq!(Exit::of(&error), Exit::Usage, "{error:#}");
        let text = format!("{error:#}");
        for word in words {
            assert!(text.contains(word), "`{word}` is not in: {text}");
        }
    }

    #[test]
    fn sets_are_the_candidate_s_and_flags_are_both_s() {
        let both = "--both model.rank=16 --steps 7 --batch 2 --seq 32 --seed 4 --seeds 4";
        let plan = plan(&format!("--control tiny --set optimizer.lr=5e-4 {both}")).unwrap();
        assert_eq!(plan.seeds, [4, 5, 6, 7]);
        let [control, candidate] = &plan.contenders[..] else { panic!("two") };
        assert_eq!((control.name.as_str(), candidate.name.as_str()), ("control", "candidate"));
        for config in [&control.config, &candidate.config] {
            assert_eq!((config.model.rank, config.train.total_steps, config.train.batch_rows), (16, 7, 2));
            assert_eq!((config.data.seq_bytes, config.run.backend), (32, Backend::Cpu));
        }
        assert_eq!((control.config.optimizer.lr, candidate.config.optimizer.lr), (1e-3, 5e-4));
        let changes: Vec<&str> = candidate.changes.iter().map(|change| change.key.as_str()).collect();
        assert_eq!(changes, ["optimizer.lr"]);
        assert!(control.changes.is_empty());
    }

    #[test]
    fn a_candidate_file_lies_over_the_control_unless_it_names_a_preset() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let control = file("base.toml", "preset = \"tiny\"\n[model]\nrank = 16\n");
        let over = file("over.toml", "[optimizer]\nlr = 2e-3\n");
        let whole = file("whole.toml", "preset = \"tiny\"\n[model]\nrank = 8\n");
        let line = format!("--control {control} --candidate {over} --candidate {whole} --set optimizer.beta1=0.8");
        let plan = plan(&line).unwrap();
        let all: Vec<(&str, usize, f64, f64)> = plan
            .contenders
            .iter()
            .map(|c| (c.name.as_str(), c.config.model.rank, c.config.optimizer.lr, c.config.optimizer.beta1))
            .collect();
        assert_eq!(all, [("control", 16, 1e-3, 0.9), ("over", 16, 2e-3, 0.8), ("whole", 8, 1e-3, 0.8)]);
        // A name that is taken is made another one.
        std::fs::create_dir(folder.path().join("b")).unwrap();
        let twin = file("b/over.toml", "[optimizer]\nlr = 3e-3\n");
        let plan =
            super::Plan::of(&arguments(&format!("--control tiny --candidate {over} --candidate {twin}"))).unwrap();
        assert_eq!(plan.contenders[2].name, "over-2");
    }

    #[test]
    fn unequal_bytes_are_refused_key_by_key() {
        for (set, words) in [
            ("train.batch_rows=8", ["`train.batch_rows` is 8", "expected the control's 4"]),
            ("data.seq_bytes=32", ["`data.seq_bytes` is 32", "control's 64"]),
            ("train.total_steps=299", ["`train.total_steps` is 299", "control's 300"]),
            ("data.eval_windows=8", ["`data.eval_windows` is 8", "control's 64"]),
            ("data.eval_bytes=64", ["`data.eval_bytes` is 64", "control's 512"]),
            ("train.overfit_one_batch=true", ["`train.overfit_one_batch` is true", "control's false"]),
            ("seed=1", ["`seed` is 1", "control's 0"]),
        ] {
            refused(&format!("--control tiny --set {set}"), &[&words[..], &["--both KEY=VALUE"]].concat());
        }
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, b"another text of no great length. ".repeat(3000)).unwrap();
        refused(&format!("--control tiny --set data.path={}", text.display()), &["other bytes", "(none) and (none)"]);
        // The same bytes in another place are the same bytes.
        let copy = folder.path().join("copy");
        std::fs::copy(&text, &copy).unwrap();
        let both = format!("--control tiny --data {}", text.display());
        refused(&format!("{both} --set data.path={}", copy.display()), &["are one configuration"]);
        plan(&format!("{both} --set data.path={} --set optimizer.lr=2e-3", copy.display())).unwrap();
    }

    #[test]
    fn a_corpus_that_everyone_names_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, b"another text of no great length. ".repeat(30_000)).unwrap();
        let size = std::fs::metadata(&text).unwrap().len();
        // Bytes that this thread has read from files.
        let read = || -> u64 {
            let facts = std::fs::read_to_string("/proc/thread-self/io").unwrap();
            facts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
        };
        let before = read();
        plan(&format!("--control tiny --data {} --set optimizer.lr=2e-3", text.display())).unwrap();
        let read = read() - before;
        assert!((size..2 * size).contains(&read), "{read} bytes were read of {size}");
    }

    #[test]
    fn a_comparison_without_a_question_is_refused() {
        refused("--control tiny", &["there is no candidate", "--candidate FILE"]);
        refused(
            "--control tiny --both jepa.mode=shared --set jepa.targets=some",
            &["jepa.targets of `candidate` is `some`, a file for one seed"],
        );
        refused("--control tiny --seeds 2 --set optimizer.lr=2e-3", &["--seeds is 2, expected 3 or more"]);
        refused(
            "--control huge --set optimizer.lr=2e-3",
            &["`huge` is neither a file nor one of the presets nano, tiny"],
        );
        // What is only reported otherwise is no other configuration.
        refused("--control tiny --set log.every_steps=7", &["`candidate` and `control` are one configuration"]);
        // Nor is what belongs to a part that neither has.
        for key in ["optimizer.muon_lr=0.5", "model.engram_rows=64", "jepa.weight=0.5"] {
            refused(&format!("--control tiny --set {key}"), &["`candidate` and `control` are one configuration"]);
        }
        plan("--control tiny --both optimizer.rule=muon --set optimizer.muon_lr=0.5").unwrap();
        refused(
            "--control tiny --seeds 4294967295 --set optimizer.lr=2e-3",
            &["--seeds is 4294967295", "1000 or fewer"],
        );
        refused("--control tiny --set optimizer.lrr=1", &["unknown key"]);
        refused("--control tiny --set optimizer.lr=2e-3 --seed 9223372036854775807", &["do not fit", "--seed"]);
    }

    #[test]
    fn an_identity_is_the_configuration_s_and_the_data_s_and_not_the_seed_s() {
        let of = |line: &str| plan(line).unwrap().contenders.iter().map(|c| c.identity.clone()).collect::<Vec<_>>();
        let base = of("--control tiny --set optimizer.lr=2e-3");
        assert_ne!(base[0], base[1]);
        assert_eq!(of("--control tiny --set optimizer.lr=2e-3 --seed 5"), base);
        assert_eq!(of("--control tiny --set optimizer.lr=2e-3 --both log.every_steps=3"), base);
        assert_ne!(of("--control tiny --set optimizer.lr=2e-3 --steps 299")[0], base[0]);
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, b"another text of no great length. ".repeat(3000)).unwrap();
        assert_ne!(of(&format!("--control tiny --set optimizer.lr=2e-3 --data {}", text.display()))[0], base[0]);
    }
}
