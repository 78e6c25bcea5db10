//! The command line.

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use toml::Value;

use crate::config::{Backend, Math, Sources};
use crate::train::{Request, Resume, Watch};

/// dormouse trains byte-level language models with Kimi Delta Attention.
#[derive(Debug, Parser)]
#[command(
    name = "dormouse",
    version,
    about = "Trains byte-level language models with Kimi Delta Attention",
    after_help = "Examples:
  dormouse train                                     train `nano` on the text that ships with dormouse
  dormouse train --data my-texts/ --steps 5000       train on every file below a folder
  dormouse train --resume auto                       go on with the newest run
  dormouse generate runs/NAME --prompt 'In the '     let a trained model write
  dormouse anchors --data my-texts/                  what counting alone reaches on the same windows
  dormouse compare --set optimizer.lr=1e-3           is that better than what a seed alone changes?

Exit codes: 0 done, 1 run failure, 2 usage, 3 not finite, 4 data, 130 interrupted twice."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model, or go on training one.
    Train(Box<TrainArgs>),
    /// Score a trained model on held-out bytes.
    Eval(EvalArgs),
    /// Let a trained model continue a prompt.
    Generate(GenerateArgs),
    /// Print a configuration with its parameters, data and checkpoint sizes; trains nothing.
    Inspect(InspectArgs),
    /// Score n-gram models on the windows a model would be scored on.
    Anchors(AnchorsArgs),
    /// Print which arm of each operation runs, and why.
    Arms(ArmsArgs),
    /// Read what a run launched, step by step.
    #[command(subcommand)]
    Atlas(AtlasCommand),
    /// Check a backend on this machine: gradients, determinism, resumption, counters.
    Check(CheckArgs),
    /// Time the training step.
    Bench(BenchArgs),
    /// Compare configurations over several seeds: WIN, TIE or LOSS on held-out bits per byte.
    Compare(Box<CompareArgs>),
    /// Run the batch of a bundle that a run left when it stopped being finite.
    Replay(ReplayArgs),
    /// Write the latents of a trained model to a file that a JEPA run reads instead of running a teacher.
    JepaTargets(JepaTargetsArgs),
}

/// Where a configuration's values come from, weakest first: preset, file, --set, flags.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigArgs {
    /// Preset to start from: nano (the default), tiny, small or base.
    #[arg(long, help_heading = "Configuration")]
    pub preset: Option<String>,
    /// TOML file laid over the preset.
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// One value by its key, for example optimizer.lr=1e-3; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Configuration")]
    pub set: Vec<String>,
    /// Which bytes.
    #[command(flatten)]
    pub data: DataArgs,
    /// Seed of every random number.
    #[arg(long, value_name = "N", help_heading = "Configuration", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(..=i64::MAX as u64))]
    pub seed: Option<u64>,
}

/// Which bytes a run learns from and is scored on.
#[derive(Clone, Debug, Default, Args)]
pub struct DataArgs {
    /// File or folder of bytes to train on [default: the text that ships with dormouse].
    #[arg(long, value_name = "PATH", help_heading = "Data", value_parser = text_path)]
    pub data: Option<PathBuf>,
    /// File or folder of bytes to score on [default: blocks held out of the training bytes].
    #[arg(long, value_name = "PATH", help_heading = "Data", value_parser = text_path)]
    pub eval: Option<PathBuf>,
    /// Predicted bytes a row.
    #[arg(long, value_name = "BYTES", help_heading = "Data")]
    pub seq: Option<u32>,
}

impl DataArgs {
    /// These arguments and a seed, as (key, value).
    fn flags(&self, seed: Option<u64>) -> Vec<(String, Value)> {
        let mut flags = Vec::new();
        let mut push = |key: &str, value: Option<Value>| flags.extend(value.map(|value| (key.to_owned(), value)));
        push("data.path", self.data.as_ref().map(|path| path_value(path)));
        push("data.eval_path", self.eval.as_ref().map(|path| path_value(path)));
        push("data.seq_bytes", self.seq.map(|seq| Value::Integer(seq.into())));
        push("seed", seed.map(whole));
        flags
    }
}

impl ConfigArgs {
    /// The sources these arguments name.
    pub fn sources(&self) -> Sources {
        Sources {
            base: None,
            file: self.config.clone(),
            preset: self.preset.clone(),
            set: self.set.clone(),
            flags: self.data.flags(self.seed),
        }
    }
}

/// What a run computes on.
#[derive(Clone, Debug, Default, Args)]
pub struct RunArgs {
    /// What computes: cuda where a GPU answers, else cpu (auto); or one of them [default: auto].
    #[arg(long, value_name = "BACKEND", help_heading = "Device")]
    pub backend: Option<Backend>,
    /// Arithmetic of matrix products [default: f32].
    #[arg(long, value_name = "PRECISION", help_heading = "Device")]
    pub precision: Option<Math>,
    /// Arm of an operation, or of all of them; may be repeated [default: fused where a receipt vouches for it].
    #[arg(long, value_name = "STEM=plain|fused", help_heading = "Device")]
    pub arm: Vec<String>,
    /// Admit fused kernels that no receipt vouches for, and mark what comes of it.
    #[arg(long, help_heading = "Device")]
    pub unverified: bool,
    /// Launch every step kernel by kernel instead of replaying a graph; the bits are the same.
    #[arg(long, help_heading = "Device")]
    pub no_graph: bool,
}

impl RunArgs {
    fn flags(&self) -> Vec<(String, Value)> {
        let mut flags = Vec::new();
        let mut push = |key: &str, value: Option<Value>| flags.extend(value.map(|value| (key.to_owned(), value)));
        push("run.backend", self.backend.map(|backend| Value::String(backend.word().into())));
        push("run.precision", self.precision.map(|precision| Value::String(precision.word().into())));
        let arms = self.arm.iter().map(|arm| Value::String(arm.clone())).collect();
        push("run.arms", (!self.arm.is_empty()).then_some(Value::Array(arms)));
        push("run.unverified", self.unverified.then_some(Value::Boolean(true)));
        push("run.graph", self.no_graph.then_some(Value::Boolean(false)));
        flags
    }

    /// These arguments after those of a configuration.
    pub fn over(&self, mut sources: Sources) -> Sources {
        sources.flags.extend(self.flags());
        sources
    }
}

/// Arguments of `train`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse train                                      `nano` on the text that ships with dormouse
  dormouse train --data my-texts/ --steps 5000 --lr 1e-3 --name first
  dormouse train --config my.toml --set model.width=384 --set model.heads=6
  dormouse train --resume runs/first                  go on where it stopped, to the bit
  dormouse train --resume runs/first --steps 9000 --allow-change train.total_steps
  dormouse train --overfit-one-batch --steps 300      a sound model's loss goes to zero

The first Ctrl-C finishes the step, saves and prints the command that goes on; the second ends at once.")]
pub struct TrainArgs {
    /// Configuration and data.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// What computes.
    #[command(flatten)]
    pub run: RunArgs,
    /// Write what every step launched to this new file; `dormouse atlas` reads it.
    #[arg(long, value_name = "FILE", help_heading = "Device")]
    pub atlas: Option<PathBuf>,
    /// Time kernels on the device at log cadence; with --no-graph one by one, else a graph as a whole.
    #[arg(long, help_heading = "Device")]
    pub timers: bool,
    /// Optimiser updates in the whole run; the learning rate's schedule follows from it.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps: Option<u32>,
    /// Rows in a step.
    #[arg(long, value_name = "ROWS", help_heading = "Training")]
    pub batch: Option<u32>,
    /// Parts a step's rows are computed in.
    #[arg(long, value_name = "PARTS", help_heading = "Training")]
    pub accumulate: Option<u32>,
    /// Learning rate of the constant part of the schedule.
    #[arg(long, value_name = "RATE", help_heading = "Training", allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Train every step on the first step's rows.
    #[arg(long, help_heading = "Training")]
    pub overfit_one_batch: bool,
    /// Steps whose row gradients are summed before an n-gram table in host memory moves.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub host_adam_every: Option<u32>,
    /// Steps between evaluations.
    #[arg(long, value_name = "STEPS", help_heading = "Reports")]
    pub eval_every: Option<u32>,
    /// Steps between checkpoints.
    #[arg(long, value_name = "STEPS", help_heading = "Reports")]
    pub save_every: Option<u32>,
    /// Steps between lines on the terminal.
    #[arg(long, value_name = "STEPS", help_heading = "Reports")]
    pub log_every: Option<u32>,
    /// Print results and warnings only.
    #[arg(long, help_heading = "Reports")]
    pub quiet: bool,
    /// Folder of the run folders.
    #[arg(long, value_name = "FOLDER", default_value = "runs", help_heading = "Run")]
    pub runs: PathBuf,
    /// Name of the new run's folder [default: preset, date and a hash].
    #[arg(long, help_heading = "Run")]
    pub name: Option<String>,
    /// Go on with this run folder; `auto` takes the one in --runs that was started or resumed last and has a checkpoint, and
    /// starts a new run where there is none.
    #[arg(long, value_name = "RUN|auto", help_heading = "Run")]
    pub resume: Option<PathBuf>,
    /// Key whose change may alter what a resumed run computes; may be repeated.
    #[arg(long, value_name = "KEY", help_heading = "Run")]
    pub allow_change: Vec<String>,
    /// Stop, saved, when this many steps are done; the schedule stays that of the whole run.
    #[arg(long, value_name = "STEP", help_heading = "Run")]
    pub stop_at_step: Option<u64>,
    /// Stop, saved, after this many minutes; the schedule stays that of the whole run.
    #[arg(long, value_name = "MINUTES", help_heading = "Run", allow_negative_numbers = true)]
    pub max_minutes: Option<f64>,
}

impl TrainArgs {
    /// What these arguments ask for; `command` is the command line itself.
    pub fn request(&self, command: Vec<String>) -> Request {
        let mut sources = self.run.over(self.config.sources());
        let mut push =
            |key: &str, value: Option<Value>| sources.flags.extend(value.map(|value| (key.to_owned(), value)));
        let integer = |value: Option<u32>| value.map(|value| Value::Integer(value.into()));
        push("train.total_steps", integer(self.steps));
        push("train.batch_rows", integer(self.batch));
        push("train.accumulate", integer(self.accumulate));
        push("optimizer.lr", self.lr.map(Value::Float));
        push("train.overfit_one_batch", self.overfit_one_batch.then_some(Value::Boolean(true)));
        push("optimizer.host_adam_every_steps", integer(self.host_adam_every));
        push("log.eval_every_steps", integer(self.eval_every));
        push("checkpoint.every_steps", integer(self.save_every));
        push("log.every_steps", integer(self.log_every));
        let resume = self.resume.clone().map(|run| match run.to_str() {
            Some("auto") => Resume::Auto,
            _ => Resume::Run(run),
        });
        Request {
            sources,
            runs: self.runs.clone(),
            name: self.name.clone(),
            resume,
            allow_change: self.allow_change.clone(),
            command,
            quiet: self.quiet,
            watch: Watch { atlas: self.atlas.clone(), timers: self.timers },
        }
    }
}

/// Arguments of `eval`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse eval runs/first                            its own held-out windows
  dormouse eval runs/first --eval other.txt           every window of another file, at most 1000
      --set data.eval_windows=1000")]
pub struct EvalArgs {
    /// Run folder.
    pub run: PathBuf,
    /// Score the checkpoint with the fewest held-out bits per byte instead of the newest.
    #[arg(long)]
    pub best: bool,
    /// File or folder of bytes to score on instead.
    #[arg(long, value_name = "PATH", value_parser = text_path)]
    pub eval: Option<PathBuf>,
    /// One value by its key, for example data.eval_windows=1000; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// What computes [default: what trained it, or what answers where that does not].
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<Backend>,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse generate runs/first --prompt 'In the beginning '
  dormouse generate runs/first --temperature 0 --bytes 500
  cat letter.txt | dormouse generate runs/first --stdin")]
pub struct GenerateArgs {
    /// Run folder.
    pub run: PathBuf,
    /// What to continue.
    #[arg(long, default_value = "And ")]
    pub prompt: String,
    /// Read the prompt from standard input.
    #[arg(long, conflicts_with = "prompt")]
    pub stdin: bool,
    /// Bytes to draw.
    #[arg(long, default_value_t = 400)]
    pub bytes: usize,
    /// 0 takes the likeliest byte each time; 1 draws from the model's own distribution.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub seed: u64,
    /// Use the checkpoint with the fewest held-out bits per byte instead of the newest.
    #[arg(long)]
    pub best: bool,
    /// What computes [default: what trained it, or what answers where that does not].
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<Backend>,
}

/// Arguments of `jepa-targets`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse jepa-targets runs/first --out first.targets
  dormouse train --seed 0 --set jepa.mode=shared --set jepa.targets=first.targets
  dormouse jepa-targets runs/first --best --out other.targets --set seed=7 --set train.batch_rows=16
  dormouse jepa-targets runs/first --out late.targets --first-step 1000 --steps 500

The teacher is the moving average of a run that had one, else the model itself. A file fits one seed, one data set, one
number of rows and bytes a row, because they decide which bytes a step has and which of them are masked. A run that
reads it has a frozen teacher, which is another objective than one that follows.")]
pub struct JepaTargetsArgs {
    /// Run folder whose checkpoint is the teacher.
    pub run: PathBuf,
    /// File to write; it has its name only when it is finished.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Take the checkpoint with the fewest held-out bits per byte instead of the newest.
    #[arg(long)]
    pub best: bool,
    /// One value of the run that will read, by its key, where it differs from this run's; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// First step of the run that will read.
    #[arg(long, value_name = "STEP", default_value_t = 0)]
    pub first_step: u64,
    /// Steps [default: up to the last one].
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// What computes [default: what trained it, or what answers where that does not].
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<Backend>,
    /// Print the result only.
    #[arg(long)]
    pub quiet: bool,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse inspect                                    the default configuration, every key
  dormouse inspect small                              parameters, groups, memory and FLOPs of a preset
  dormouse inspect --preset tiny --data my-texts/
  dormouse inspect --run runs/first                   a run and its checkpoints")]
pub struct InspectArgs {
    /// Preset to inspect, as --preset.
    #[arg(value_name = "PRESET", conflicts_with_all = ["preset", "run"])]
    pub start: Option<String>,
    /// Configuration and data.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// What computes.
    #[command(flatten)]
    pub device: RunArgs,
    /// Inspect this run folder instead.
    #[arg(long, value_name = "RUN", conflicts_with = "preset")]
    pub run: Option<PathBuf>,
}

/// Arguments of `anchors`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse anchors                                    the text that ships with dormouse
  dormouse anchors --data my-texts/ --json
  dormouse anchors --data train.txt --eval test.txt")]
pub struct AnchorsArgs {
    /// Configuration and data.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `arms`.
#[derive(Debug, Args)]
pub struct ArmsArgs {
    /// Configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// What computes.
    #[command(flatten)]
    pub run: RunArgs,
}

/// What to read from an atlas.
#[derive(Debug, Subcommand)]
pub enum AtlasCommand {
    /// The kernels with the most device time and runs, a step on the average.
    Top {
        /// File that `train --atlas` wrote.
        file: PathBuf,
        /// Rows.
        #[arg(short, default_value_t = 100)]
        n: usize,
    },
    /// One run minus another, kernel by kernel.
    Diff {
        /// File of the one run.
        a: PathBuf,
        /// File of the other.
        b: PathBuf,
        /// Key that the runs may differ in, such as arm.kda; may be repeated.
        #[arg(long, value_name = "KEY")]
        key: Vec<String>,
        /// Rows.
        #[arg(short, default_value_t = 100)]
        n: usize,
    },
}

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse check                                      the GPU of this machine, or the reference
  dormouse check --backend cuda --precision f32,tf32,bf16
  dormouse check --backend cuda --precision bf16 --arms fused --preset small

Exit code 1 if a check is red. A check that this machine cannot run is NOTRUN and not red.")]
pub struct CheckArgs {
    /// What to check [default: auto].
    #[arg(long, value_name = "BACKEND", default_value = "auto", hide_default_value = true)]
    pub backend: Backend,
    /// Arithmetic of matrix products; several with commas.
    #[arg(long, value_name = "PRECISION", value_delimiter = ',', default_value = "f32")]
    pub precision: Vec<Math>,
    /// Arms to check, all operations on one arm at a time; several with commas.
    #[arg(long, value_name = "ARM", value_delimiter = ',', default_value = "plain,fused")]
    pub arms: Vec<String>,
    /// The model whose steps are checked; what is held against the reference step by step is of `tiny` alone.
    #[arg(long, value_name = "PRESET", default_value = "tiny")]
    pub preset: String,
    /// Only checks whose name contains this.
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// Small shapes and few steps: for slow devices.
    #[arg(long)]
    pub quick: bool,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse bench --steps 300                          the step of `nano` on what answers
  dormouse bench --backend cuda --append benches/history.tsv --note 'after the new gemm'
  dormouse bench --preset small --precision bf16 --steps 120 --map docs/map.md

The first 50 steps are never timed: they compile, lay out memory, capture and warm up.")]
pub struct BenchArgs {
    /// Configuration and data.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// What computes.
    #[command(flatten)]
    pub run: RunArgs,
    /// Rows in a step.
    #[arg(long, value_name = "ROWS")]
    pub batch: Option<u32>,
    /// Steps of each process; those from the 51st on are timed.
    #[arg(long, value_name = "N", default_value_t = 250)]
    pub steps: u64,
    /// Processes; the difference between their medians is the run-to-run spread.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub processes: u32,
    /// Append the row to this history.
    #[arg(long, value_name = "FILE")]
    pub append: Option<PathBuf>,
    /// Note at the end of the row.
    #[arg(long, value_name = "TEXT", default_value = "-")]
    pub note: String,
    /// Measure what each lever of the step's speed is worth, one process for each, and write the table to this file.
    #[arg(long, value_name = "FILE", conflicts_with = "append")]
    pub map: Option<PathBuf>,
    /// Measure in this process and print one JSON object.
    #[arg(long, hide = true)]
    pub one: bool,
    /// Write JEPA targets for the steps that would be measured to this file.
    #[arg(long, value_name = "FILE", hide = true)]
    pub targets: Option<PathBuf>,
}

impl BenchArgs {
    /// The sources of the configuration that is timed.
    pub fn sources(&self) -> Sources {
        let mut sources = self.run.over(self.config.sources());
        sources.flags.extend(self.batch.map(|rows| ("train.batch_rows".to_owned(), Value::Integer(rows.into()))));
        sources
    }
}

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  dormouse compare --set optimizer.lr=1e-3            `nano` against itself at another rate, 3 seeds
  dormouse compare --control tiny --set optimizer.muon_iterations=5 --both optimizer.rule=muon --seeds 5
  dormouse compare --control base.toml --candidate wide.toml --candidate deep.toml --tsv result.tsv
  dormouse compare --control tiny --steps 600 --data my-texts/ --set model.iterations=3

A candidate file is laid over the control's configuration; one that names a `preset` is a configuration of its own.
LOSS: the candidate's mean is above the control's highest score, or a run of it was not finite.
WIN: its mean is below the control's lowest score and its spread is not above the control's. TIE: everything else.
The verdict is no exit code. A run is made once: after Ctrl-C, which saves, the same command goes on.")]
pub struct CompareArgs {
    /// Preset or TOML file of the control.
    #[arg(long, value_name = "FILE|PRESET", default_value = "nano", help_heading = "Configuration")]
    pub control: String,
    /// TOML file of a candidate; may be repeated.
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub candidate: Vec<PathBuf>,
    /// One value of every candidate by its key, for example optimizer.lr=1e-3; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Configuration")]
    pub set: Vec<String>,
    /// One value of control and candidates alike; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Configuration")]
    pub both: Vec<String>,
    /// Seeds, counted up from the first; 3 to 1000.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Configuration")]
    pub seeds: u32,
    /// The first seed.
    #[arg(long, value_name = "N", help_heading = "Configuration", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(..=i64::MAX as u64))]
    pub seed: Option<u64>,
    /// Which bytes all of them have.
    #[command(flatten)]
    pub data: DataArgs,
    /// Optimiser updates in every run.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps: Option<u32>,
    /// Rows in a step of every run.
    #[arg(long, value_name = "ROWS", help_heading = "Training")]
    pub batch: Option<u32>,
    /// What computes all runs.
    #[command(flatten)]
    pub run: RunArgs,
    /// Folder of the run folders.
    #[arg(long, value_name = "FOLDER", default_value = "runs/compare", help_heading = "Run")]
    pub runs: PathBuf,
    /// Write the table to this file, tab-separated.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub tsv: Option<PathBuf>,
    /// Count runs that another build of dormouse made, too.
    #[arg(long, help_heading = "Run")]
    pub any_build: bool,
}

impl CompareArgs {
    /// What control and candidates have alike, as (key, value).
    pub fn flags(&self) -> Vec<(String, Value)> {
        let mut flags = self.data.flags(self.seed);
        let mut push = |key: &str, value: Option<u32>| {
            flags.extend(value.map(|value| (key.to_owned(), Value::Integer(value.into()))));
        };
        push("train.total_steps", self.steps);
        push("train.batch_rows", self.batch);
        flags
    }
}

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Folder `nonfinite_...` of a run.
    pub bundle: PathBuf,
}

/// A path that becomes a value of the configuration. A `&str` parser makes clap refuse one that is not UTF-8. In the
/// configuration an empty one means none, which a flag whose variable was not set must not.
fn text_path(path: &str) -> Result<PathBuf, &'static str> {
    match path {
        "" => Err("it is empty; name a file or a folder, or leave the flag out"),
        path => Ok(PathBuf::from(path)),
    }
}

fn path_value(path: &Path) -> Value {
    Value::String(path.display().to_string())
}

fn whole(value: u64) -> Value {
    Value::Integer(i64::try_from(value).expect("the parser admits no larger seed"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::{Cli, Command};
    use crate::config::{Backend, Math, resolve};

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_reach_the_configuration() {
        let line = "dormouse train --preset tiny --set optimizer.lr=5 --lr 0.25 --steps 7 --batch 6 --accumulate 3 --seq 12 \
                    --seed 9 --data d --eval e --overfit-one-batch --eval-every 4 --save-every 5 --log-every 6 \
                    --backend cuda --precision bf16 --arm rms_norm=plain --arm residual=fused --unverified --no-graph \
                    --set model.engram=host --host-adam-every 4";
        let Command::Train(arguments) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!("not train");
        };
        let config = resolve(&arguments.request(Vec::new()).sources).unwrap();
        assert_eq!(config.preset, "tiny");
        assert_eq!(config.optimizer.lr, 0.25);
        assert_eq!((config.train.total_steps, config.train.batch_rows, config.train.accumulate), (7, 6, 3));
        assert_eq!((config.data.seq_bytes, config.seed, config.train.overfit_one_batch), (12, 9, true));
        assert_eq!(config.optimizer.host_adam_every_steps, 4);
        assert_eq!(config.data.path.as_deref(), Some("d".as_ref()));
        assert_eq!(config.data.eval_path.as_deref(), Some("e".as_ref()));
        assert_eq!((config.run.backend, config.run.precision), (Backend::Cuda, Math::Bf16));
        assert_eq!(config.run.arms, ["rms_norm=plain", "residual=fused"]);
        assert_eq!((config.run.unverified, config.run.graph), (true, false));
        assert_eq!((config.log.eval_every_steps, config.checkpoint.every_steps, config.log.every_steps), (4, 5, 6));
    }
}
