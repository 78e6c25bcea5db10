//! `dormouse compare`: does a change make the model better than a seed does?
//!
//! Control and candidates run with the same seeds on the same bytes, each run in a folder of its own. [`verdict`] says
//! what the held-out bits per byte are worth; `plan` refuses what cannot be compared; `runs` makes the runs that are
//! not there yet, so that the same command after a stop goes on; `report` prints.

mod plan;
mod report;
mod runs;
pub mod verdict;

use std::path::Path;

use anyhow::{Context, Result};

use crate::cli::CompareArgs;
use crate::config::ConfigError;
use crate::exit::NonFiniteControl;
use crate::host;
use crate::model::check_batch;
use crate::progress::say;
use crate::run::try_write;
use crate::signals::Stop;
use crate::train::{Build, quoted};
use plan::Plan;
use report::Side;
use runs::Run;

/// `dormouse compare`; `command` is the command line itself.
///
/// # Errors
/// Whatever makes a comparison impossible, and whatever ends a run, but for a candidate that is not finite: that one
/// has lost.
pub fn command(arguments: &CompareArgs, build: Build, command: &[String]) -> Result<()> {
    // Before anything is written, so that a signal during the start is kept for the first run.
    let stop = Stop::on_signals().context("compare: cannot watch for signals")?;
    let plan = Plan::of(arguments)?;
    one_build(&plan, arguments)?;
    if let Some(path) = &arguments.tsv {
        // Found out now and not after hours of runs.
        try_write(path).with_context(|| cannot_write(path))?;
    }
    can_run(&plan, arguments, build)?;
    let head = report::head(&plan);
    say(head.trim_end());
    let mut sides: Vec<Side> = plan.contenders.iter().map(Side::new).collect();
    let all = plan.seeds.len() * sides.len();
    let mut number = 0;
    // Seed by seed, so that a machine that gets slower does so for every side alike.
    for &seed in &plan.seeds {
        for side in &mut sides {
            number += 1;
            let run = Run::new(&arguments.runs, side.contender, seed);
            let place = format!("[{number}/{all}] {}", run.label());
            if side.lost() {
                say(&format!("{place}: not needed, an earlier run of it was not finite"));
                continue;
            }
            let found = run.ended()?;
            let made = found.is_none();
            if made {
                if stop.requested() {
                    stopped(number - 1, all, command);
                    return Ok(());
                }
                say(&format!("{place}: run folder {}", run.path.display()));
            }
            let outcome = match found {
                Some(outcome) => outcome,
                None => match run.make(command, build, &stop)? {
                    Some(outcome) => outcome,
                    None => {
                        stopped(number - 1, all, command);
                        return Ok(());
                    }
                },
            };
            say(&format!("{place}: {}{}", report::outcome(&outcome), if made { "" } else { " (done before)" }));
            if let (Some(why), "control") = (&outcome.not_finite, side.contender.name.as_str()) {
                return Err(NonFiniteControl { seed, why: why.clone() }.into());
            }
            side.add(outcome, &run.path);
        }
    }
    say(report::table(&plan, &sides).trim_end());
    match &arguments.tsv {
        Some(path) => write_tsv(path, &report::tsv(&plan, &sides)),
        None => Ok(()),
    }
}

/// Builds every side's learner once before the first run, so that a candidate that cannot run is found out now and not
/// after the control's hours. A side whose runs are all done needs none.
fn can_run(plan: &Plan, arguments: &CompareArgs, build: Build) -> Result<()> {
    for contender in &plan.contenders {
        let runs = plan.seeds.iter().map(|&seed| Run::new(&arguments.runs, contender, seed).ended());
        let outcomes = runs.collect::<Result<Vec<_>>>()?;
        if outcomes.iter().any(Option::is_none) {
            check_batch(&contender.config, host::machine_memory_bytes())
                .with_context(|| format!("compare: `{}` cannot run", contender.name))?;
            build(&contender.config).with_context(|| format!("compare: `{}` cannot run", contender.name))?;
        }
    }
    Ok(())
}

/// Says how to go on. Everything done is on the disk.
fn stopped(done: usize, all: usize, command: &[String]) {
    let again: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    say(&format!("stopped: {done} of {all} runs are done, and the next goes on from its checkpoint"));
    say(&format!("resume    {}", again.join(" ")));
}

/// Refuses to hold one program's runs against another's: a difference might be the program's.
fn one_build(plan: &Plan, arguments: &CompareArgs) -> Result<()> {
    if arguments.any_build {
        return Ok(());
    }
    let this = host::provenance(&[], 0)["binary_blake3"].as_str().unwrap_or("unknown").to_owned();
    let mut known: Option<(String, String)> = None;
    for &seed in &plan.seeds {
        for contender in &plan.contenders {
            let run = Run::new(&arguments.runs, contender, seed);
            let mut builds = run.builds()?;
            if run.ended()?.is_none() {
                builds.push(this.clone());
            }
            for build in builds {
                let (first, whose) = known.get_or_insert_with(|| (build.clone(), run.label()));
                if *first != build {
                    let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_owned();
                    let (a, b) = (short(first), short(&build));
                    return Err(ConfigError::Usage(format!(
                        "compare: {whose} is of program {a}, and {} would be of {b}, so a difference might be the \
                         program's; give another --runs to make every run anew, or --any-build to count them",
                        run.label()
                    ))
                    .into());
                }
            }
        }
    }
    Ok(())
}

fn write_tsv(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| cannot_write(path))
}

fn cannot_write(path: &Path) -> String {
    let fix = "give --tsv a file in a folder that exists and can be written; runs that are done are not made again";
    format!("compare: cannot write `{}`; {fix}", path.display())
}
