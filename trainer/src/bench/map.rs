//! The map: what each lever of the step's speed is worth, measured one at a time on the same machine.
//!
//! The levers are those that were drawn up on the system which this one replaces. Each has a switch, so the step is timed
//! with it and without; those that have become a property of the design have a counter that would show it if they came
//! back. A lever whose processes fail is NOTRUN with the reason, never left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::{Measured, Share, Stages, alone, one_process, process};
use crate::host;
use crate::progress::say;

/// A lever with a switch.
struct Lever {
    name: &'static str,
    /// What turns it off, or on where `turns_on`.
    switch: &'static [&'static str],
    turns_on: bool,
    /// Whether the step has what the lever moves; a switch that changes nothing measures nothing.
    applies: fn(&Measured) -> bool,
    /// What shows that both sides compute the same, or that they need not.
    gate: &'static str,
}

/// Launches of a step of the same model in the system that this one replaces, counted there.
const REPLACED_LAUNCHES: u32 = 21_427;

const JEPA_OFF: [&str; 2] = ["--set", "jepa.mode=off"];

const LEVERS: [Lever; 6] = [
    Lever {
        name: "fused KDA adjoint",
        switch: &["--arm", "kda=plain"],
        turns_on: false,
        applies: |_| true,
        gate: "kda: diff, poison, det, bite",
    },
    Lever {
        name: "batched retraction",
        switch: &["--arm", "retract_all=plain"],
        turns_on: false,
        applies: |_| true,
        gate: "retract_all: diff, poison, det, bite",
    },
    Lever {
        name: "head-wise Newton-Schulz in one batch",
        switch: &["--arm", "muon=plain"],
        turns_on: false,
        applies: |base| base.ns.is_some(),
        gate: "muon: diff, poison, det, bite",
    },
    Lever {
        name: "Newton-Schulz 8 to 5 iterations",
        switch: &["--set", "optimizer.muon_iterations=5"],
        turns_on: true,
        applies: |base| base.ns.is_some(),
        gate: "another update: `dormouse compare` decides",
    },
    Lever {
        name: "fused RMSNorm",
        switch: &["--arm", "rms_norm=plain"],
        turns_on: false,
        applies: |_| true,
        gate: "rms_norm: diff, poison, det, bite",
    },
    Lever {
        name: "no objective of latents, so no teacher's forward pass",
        switch: &JEPA_OFF,
        turns_on: true,
        applies: |base| base.jepa.is_some(),
        gate: "another objective: `dormouse compare` decides",
    },
];

/// What a lever does: the step without it and with it.
struct Effect<'a> {
    lever: &'a Lever,
    before: std::result::Result<&'a Measured, String>,
    after: std::result::Result<&'a Measured, String>,
}

/// Measures and writes the map of processes of so many steps; `has_teacher` says whether a step has one, so that its price
/// can be asked.
pub(super) fn write(path: &Path, steps: u64, has_teacher: bool) -> Result<()> {
    alone()?;
    let base = one_process(&[], None)?;
    say(&format!("{}: {:.3} ms a step", base.facts.line(), base.ms_median));
    let (cold, warm) = in_a_cache_of_their_own(|folder| one_process(&[], Some(folder)))?;
    // Run to run nothing smaller than this can be told from nothing.
    let medians = || [&base, &cold, &warm].into_iter().map(|measured| measured.ms_median);
    let spread = medians().fold(0.0, f64::max) - medians().fold(f64::INFINITY, f64::min);
    let others: Vec<Result<Measured>> = LEVERS
        .iter()
        .map(|lever| {
            let measured = match (lever.applies)(&base) {
                true => one_process(lever.switch, None),
                false => Err(anyhow::anyhow!("the step has nothing that this changes")),
            };
            let ms = measured.as_ref().map_or("NOTRUN".to_owned(), |measured| format!("{:.3} ms", measured.ms_median));
            say(&format!("{}: {ms}", lever.switch.join(" ")));
            measured
        })
        .collect();
    let effects: Vec<Effect<'_>> = LEVERS
        .iter()
        .zip(&others)
        .map(|(lever, other)| {
            let other = other.as_ref().map_err(|error| format!("{error:#}"));
            let (before, after) = if lever.turns_on { (Ok(&base), other) } else { (other, Ok(&base)) };
            Effect { lever, before, after }
        })
        .collect();
    let mut text = page(&base, spread, [cold.first_ms, warm.first_ms], &effects);
    let parts = parts_of(&base, &[]);
    text.push_str(&atlas(&parts));
    if has_teacher {
        let off = effects.iter().find(|effect| effect.lever.switch == JEPA_OFF).map(|effect| effect.after.clone());
        let off = off.context("the map has a lever for it")?;
        let (targets, parts_of_targets) = from_targets(steps);
        let of_off = off.as_ref().map_or(Stages::new(), |off| parts_of(off, &JEPA_OFF));
        let runs = [
            ("a teacher that follows the model", Ok(&base), &parts),
            ("targets from a file", targets.as_ref().map_err(Clone::clone), &parts_of_targets),
            ("without it", off, &of_off),
        ];
        text.push_str(&objective(&runs));
    }
    std::fs::write(path, text).with_context(|| cannot_write(path))
}

/// A process with an empty cache of kernels, and one that finds what the first has left there and nothing else: the
/// user's own cache may hold more or less than that.
fn in_a_cache_of_their_own(process: impl Fn(&Path) -> Result<Measured>) -> Result<(Measured, Measured)> {
    let folder = std::env::temp_dir().join(format!("dormouse-map-{}", std::process::id()));
    // Of an earlier process of this number.
    let _ = std::fs::remove_dir_all(&folder);
    let measured = process(&folder).and_then(|cold| Ok((cold, process(&folder)?)));
    // A folder that stays behind costs some megabytes and nothing else.
    let _ = std::fs::remove_dir_all(&folder);
    measured
}

pub(super) fn cannot_write(path: &Path) -> String {
    format!("bench: cannot write `{}`; give --map a file in a folder that exists and can be written", path.display())
}

/// The parts of a step by stage and operation, of a process without graphs, in which parts have times; none if it fails.
fn parts_of(measured: &Measured, switch: &[&str]) -> Stages {
    match measured.graph {
        true => one_process(&[switch, &["--no-graph"]].concat(), None).map_or(Stages::new(), |eager| eager.stages),
        false => measured.stages.clone(),
    }
}

/// The parts of a stage together.
fn sum(parts: &BTreeMap<String, Share>) -> Share {
    parts.values().fold(Share::default(), |sum, part| Share {
        launches: sum.launches + part.launches,
        device_ms: sum.device_ms + part.device_ms,
    })
}

/// The step by stage and operation.
fn atlas(stages: &Stages) -> String {
    let mut text = String::from(
        "\nThe step by stage and operation, launched kernel by kernel: launches, and milliseconds on the ",
    );
    let _ = writeln!(text, "device. The system that this one replaces launched {REPLACED_LAUNCHES} kernels a step.\n");
    text.push_str("| stage | operation | launches | ms |\n|---|---|---|---|\n");
    let mut all = Share::default();
    for (stage, parts) in stages {
        for (operation, part) in parts {
            let _ = writeln!(text, "| {stage} | {operation} | {:.0} | {:.3} |", part.launches, part.device_ms);
        }
        let stage = sum(parts);
        all = Share { launches: all.launches + stage.launches, device_ms: all.device_ms + stage.device_ms };
    }
    let _ = writeln!(text, "| all | | {:.0} | {:.3} |", all.launches, all.device_ms);
    text
}

/// The step with targets from a file, which is made first and holds so many steps, and its parts.
fn from_targets(steps: u64) -> (std::result::Result<Measured, String>, Stages) {
    let file = std::env::temp_dir().join(format!("dormouse-map-{}.targets", std::process::id()));
    let name = file.display().to_string();
    // A run needs the targets of all its steps.
    let (total, read) = (format!("train.total_steps={steps}"), format!("jepa.targets={name}"));
    let made = process(&["--set", &total, "--targets", &name], None);
    let switch = ["--set", &total, "--set", &read];
    let measured = made.and_then(|_| one_process(&switch, None));
    let ms = measured.as_ref().map_or("NOTRUN".to_owned(), |measured| format!("{:.3} ms", measured.ms_median));
    say(&format!("jepa.targets: {ms}"));
    let parts = measured.as_ref().map_or(Stages::new(), |measured| parts_of(measured, &switch));
    // As for the cache.
    let _ = std::fs::remove_file(&file);
    (measured.map_err(|error| format!("{error:#}")), parts)
}

/// A step with or without the objective of latents: what it is, what was measured, its parts.
type Priced<'a> = (&'static str, std::result::Result<&'a Measured, String>, &'a Stages);

/// What the objective of latents costs: the step with a teacher that follows, with targets from a file, without it.
fn objective(runs: &[Priced<'_>; 3]) -> String {
    let mut text = String::from("\nWhat the objective of latents (JEPA) costs:\n\n");
    text.push_str("| the step | nodes | MB | ms | ms more than without |\n|---|---|---|---|---|\n");
    let without = runs[2].1.as_ref().ok().map(|off| off.ms_median);
    for (name, run, _) in runs {
        let line = match run {
            Ok(run) => format!(
                "{} | {} | {:.3} | {}",
                run.nodes.map_or("-".to_owned(), |nodes| format!("{nodes:.0}")),
                run.bytes.map_or("-".to_owned(), |bytes| format!("{:.0}", bytes * 1e-6)),
                run.ms_median,
                without.map_or("-".to_owned(), |without| format!("{:.3}", run.ms_median - without))
            ),
            Err(why) => format!("- | - | - | NOTRUN {}", why.lines().next().unwrap_or_default().replace('|', "/")),
        };
        let _ = writeln!(text, "| {name} | {line} |");
    }
    text.push_str(
        "\nBy stage, launched kernel by kernel: launches, and milliseconds on the device (the step itself overlaps branches):\n\n\
         | stage | teacher | targets | without | teacher - without | targets - without |\n|---|---|---|---|---|---|\n",
    );
    let stages: BTreeSet<&String> = runs.iter().flat_map(|(_, _, parts)| parts.keys()).collect();
    let pair = |share: Option<Share>| {
        share.map_or("-".to_owned(), |share| format!("{:.0}, {:.3}", share.launches, share.device_ms))
    };
    let minus = |a: Option<Share>, b: Option<Share>| {
        let (a, b) = a.zip(b)?;
        Some(Share { launches: a.launches - b.launches, device_ms: a.device_ms - b.device_ms })
    };
    for stage in stages {
        // A process without any parts has not run.
        let of =
            |(_, _, parts): &Priced<'_>| (!parts.is_empty()).then(|| parts.get(stage).map(sum).unwrap_or_default());
        let [teacher, targets, off] = runs.each_ref().map(of);
        let cells = [teacher, targets, off, minus(teacher, off), minus(targets, off)].map(pair);
        let _ = writeln!(text, "| {stage} | {} |", cells.join(" | "));
    }
    text
}

fn page(base: &Measured, spread: f64, first_ms: [f64; 2], effects: &[Effect<'_>]) -> String {
    let provenance = host::provenance(&[], 0);
    let commit = provenance["commit"].as_str().unwrap_or("-");
    let price = base.graph_us.unwrap_or(0.0);
    let mut text = String::from("# What each lever is worth\n\n");
    text.push_str(
        "Written by `cargo xtask bench map`; do not edit. One process for each line, the others as in the first.\n\n",
    );
    let _ = writeln!(
        text,
        "- {}, preset {}, {} x {}, commit {commit}",
        base.facts.line(),
        base.preset,
        base.batch,
        base.seq
    );
    let nodes = base.nodes.unwrap_or(0.0);
    let _ = writeln!(
        text,
        "- the step: {:.3} ms (median of steps {} to {} by {}, interquartile range {:.3}), {nodes:.0} nodes at \
         {price:.2} us; processes of the same step differ by up to {spread:.3} ms, and less than that is no effect",
        base.ms_median,
        super::COLD_STEPS + 1,
        base.step_to,
        super::BLOCK_STEPS,
        base.ms_iqr
    );
    text.push_str("\n| lever | switch | nodes, without and with | MB, without and with | nodes removed x price | ms, without and with | gate | verdict |\n");
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    for effect in effects {
        let _ = writeln!(text, "{}", line(effect, price, spread));
    }
    text.push_str("\nLevers that are no longer a choice, and the counter that would show them:\n\n");
    text.push_str("| lever | counter | now | verdict |\n|---|---|---|---|\n");
    let row = |text: &mut String, lever: &str, counter: &str, now: Option<(String, bool)>| {
        let (now, verdict) = match now {
            Some((now, true)) => (now, "GONE"),
            Some((now, false)) => (now, "BACK"),
            None => ("-".to_owned(), "NOTRUN the backend counts nothing"),
        };
        let _ = writeln!(text, "| {lever} | {counter} | {now} | {verdict} |");
    };
    let unused = base.problems.as_ref().map(|problems| match &problems[..] {
        [] => ("all used".to_owned(), true),
        problems => (problems.join("; "), false),
    });
    let counter = "passes asked for, run and used (`dormouse train` prints them)";
    row(&mut text, "a forward pass whose result nobody uses", counter, unused);
    let allocations = base.allocations.map(|allocations| (allocations.to_string(), allocations == 0));
    row(&mut text, "allocator traffic", "allocations in the timed steps", allocations);
    let _ = writeln!(
        text,
        "| copies that fold a KDA tensor | launches that only copy, cast or move one (`cuda/tests/kda.rs`) | 0, held by the test | GONE |"
    );
    let [cold, warm] = first_ms;
    let _ = writeln!(
        text,
        "| first-step cost | the first step with an empty cache of kernels, and with what that process left there | \
         {cold:.0} ms, {warm:.0} ms | MEASURED |"
    );
    text
}

/// A row of the table.
fn line(effect: &Effect<'_>, price: f64, spread: f64) -> String {
    let lever = effect.lever;
    let switch =
        format!("`{}`{}", lever.switch.join(" "), if lever.turns_on { " turns it on" } else { " turns it off" });
    let (before, after) = match (&effect.before, &effect.after) {
        (Ok(before), Ok(after)) => (before, after),
        (Err(why), _) | (_, Err(why)) => {
            let why = why.lines().next().unwrap_or_default().replace('|', "/");
            return format!("| {} | {switch} | - | - | - | - | {} | NOTRUN {why} |", lever.name, lever.gate);
        }
    };
    let number = |x: Option<f64>, scale: f64| x.map_or("-".to_owned(), |x| format!("{:.0}", x * scale));
    let removed = before.nodes.unwrap_or(0.0) - after.nodes.unwrap_or(0.0);
    let won = before.ms_median - after.ms_median;
    let verdict = if won > spread {
        "WON"
    } else if won < -spread {
        "LOST"
    } else {
        "NO EFFECT"
    };
    format!(
        "| {} | {switch} | {}, {} | {}, {} | {removed:.0} x {price:.2} us = {:.3} ms | {:.3}, {:.3} | {} | {verdict} {won:.3} ms |",
        lever.name,
        number(before.nodes, 1.0),
        number(after.nodes, 1.0),
        number(before.bytes, 1e-6),
        number(after.bytes, 1e-6),
        removed * price * 1e-3,
        before.ms_median,
        after.ms_median,
        lever.gate
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::measured;
    use std::path::Path;

    use super::{Effect, LEVERS, Share, Stages, atlas, in_a_cache_of_their_own, line, objective, page};

    #[test]
    fn a_lever_is_won_only_beyond_the_spread_and_what_failed_is_not_run() {
        let slow = super::Measured { ms_median: 3.0, nodes: Some(500.0), ..measured() };
        let fast = super::Measured { ms_median: 2.0, nodes: Some(400.0), ..measured() };
        let effect = |before, after| Effect { lever: &LEVERS[0], before, after };
        let won = line(&effect(Ok(&slow), Ok(&fast)), 0.65, 0.1);
        assert!(won.contains("100 x 0.65 us = 0.065 ms") && won.ends_with("WON 1.000 ms |"), "{won}");
        assert!(line(&effect(Ok(&slow), Ok(&fast)), 0.65, 1.5).contains("NO EFFECT"));
        assert!(line(&effect(Ok(&fast), Ok(&slow)), 0.65, 0.1).contains("LOST"));
        let failed = line(&effect(Err("no arm|here\nmore".into()), Ok(&fast)), 0.65, 0.1);
        assert!(failed.ends_with("NOTRUN no arm/here |"), "{failed}");
    }

    #[test]
    fn what_comes_back_is_said_to_be_back() {
        let healthy = super::Measured { allocations: Some(0), problems: Some(vec![]), ..measured() };
        let ill = super::Measured { allocations: Some(7), problems: Some(vec!["kda: 2 unused".into()]), ..measured() };
        assert!(!page(&healthy, 0.1, [1.0, 1.0], &[]).contains("BACK"));
        // The reference counts neither, which is no proof of anything.
        let silent = super::Measured { allocations: None, problems: None, ..measured() };
        assert_eq!(page(&silent, 0.1, [1.0, 1.0], &[]).matches("NOTRUN the backend").count(), 2);
        let text = page(&ill, 0.1, [9000.0, 10.0], &[]);
        assert_eq!(text.matches("BACK").count(), 2, "{text}");
        assert!(text.contains("kda: 2 unused") && text.contains("| 9000 ms, 10 ms |"), "{text}");
    }

    #[test]
    fn the_second_process_finds_the_cache_of_the_first_and_the_first_finds_none() {
        let process = |folder: &Path| {
            let found = folder.join("kernel").exists();
            std::fs::create_dir_all(folder)?;
            std::fs::write(folder.join("kernel"), "")?;
            Ok(super::Measured { first_ms: if found { 1.0 } else { 2.0 }, ..measured() })
        };
        for _ in 0..2 {
            let (cold, warm) = in_a_cache_of_their_own(process).unwrap();
            assert_eq!((cold.first_ms, warm.first_ms), (2.0, 1.0));
        }
        assert!(in_a_cache_of_their_own(|_| anyhow::bail!("no GPU")).is_err());
    }

    #[test]
    fn the_price_of_the_objective_is_that_of_three_runs() {
        let of = |ms_median: f64| super::Measured { ms_median, ..measured() };
        let parts = |launches: f64, device_ms: f64| -> Stages {
            [("teacher".to_owned(), [("kda".to_owned(), Share { launches, device_ms })].into())].into()
        };
        let (base, targets, off) = (of(3.0), of(2.5), of(2.0));
        let of_runs = [parts(20.0, 0.3), parts(5.0, 0.25), parts(0.0, 0.2)];
        let runs = |targets, parts: &'_ Stages| {
            objective(&[("a", Ok(&base), &of_runs[0]), ("b", targets, parts), ("c", Ok(&off), &of_runs[2])])
        };
        let text = runs(Ok(&targets), &of_runs[1]);
        assert!(text.contains("| 3.000 | 1.000 |") && text.contains("| 2.500 | 0.500 |"), "{text}");
        assert!(text.contains("| teacher | 20, 0.300 | 5, 0.250 | 0, 0.200 | 20, 0.100 | 5, 0.050 |"), "{text}");
        let step = atlas(&of_runs[0]);
        assert!(step.contains("| teacher | kda | 20 | 0.300 |\n| all | | 20 | 0.300 |"), "{step}");
        let text = runs(Err("no disk|here\nmore".into()), &Stages::new());
        assert!(text.contains("NOTRUN no disk/here |") && text.contains("| - | 0, 0.200 | 20, 0.100 | - |"), "{text}");
    }
}
