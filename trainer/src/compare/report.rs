//! What a comparison prints: its head, a line a run, the table, and the same table as tab-separated values.

use std::path::Path;

use super::plan::{Contender, Plan};
use super::runs::{Outcome, median};
use super::verdict::{Judgement, Scores, Verdict, judge};

/// The word for what does not apply or is not known.
const NONE: &str = "-";

/// Below this many seeds one WIN in fifty or more comes of no difference at all (ADR 0024).
const FEW_SEEDS: usize = 5;

/// Columns of the tab-separated table: one row a configuration, the control first.
pub const COLUMNS: [&str; 17] = [
    "config",
    "verdict",
    "bpb_mean",
    "bpb_low",
    "bpb_high",
    "bpb_spread",
    "bpb_by_seed",
    "seeds",
    "steps",
    "bytes",
    "ms_step",
    "launches",
    "nodes",
    "backend",
    "unverified",
    "changes",
    "runs",
];

/// A contender and what its runs gave, in the order of the seeds.
pub struct Side<'a> {
    /// Who.
    pub contender: &'a Contender,
    outcomes: Vec<Outcome>,
    runs: Vec<String>,
}

impl<'a> Side<'a> {
    /// Nothing yet.
    pub fn new(contender: &'a Contender) -> Side<'a> {
        Side { contender, outcomes: Vec::new(), runs: Vec::new() }
    }

    /// Adds a run.
    pub fn add(&mut self, outcome: Outcome, run: &Path) {
        self.outcomes.push(outcome);
        self.runs.push(run.display().to_string());
    }

    /// Whether a run of it was not finite.
    pub fn lost(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.bpb.is_none())
    }

    fn scores(&self) -> Option<Scores> {
        let scores: Vec<f64> = self.outcomes.iter().map(|outcome| outcome.bpb.unwrap_or(f64::NAN)).collect();
        Scores::of(&scores)
    }

    /// The median over the runs that have the number.
    fn median(&self, of: impl Fn(&Outcome) -> Option<f64>) -> Option<f64> {
        median(self.outcomes.iter().filter_map(of))
    }

    fn unverified(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.unverified)
    }
}

/// What is about to be compared.
pub fn head(plan: &Plan) -> String {
    let config = &plan.control().config;
    let (steps, bytes) = (config.train.total_steps, config.bytes_per_step());
    let mut text = format!(
        "{} seeds ({} to {}), {steps} steps of {bytes} bytes a run, scored on {} windows of {} bytes\n",
        plan.seeds.len(),
        plan.seeds[0],
        plan.seeds[plan.seeds.len() - 1],
        plan.windows,
        config.data.eval_bytes
    );
    for contender in &plan.contenders {
        let (preset, backend) = (&contender.config.preset, contender.config.run.backend);
        text.push_str(&format!("{}: from preset {preset}, backend {backend}\n", contender.name));
        for change in &contender.changes {
            text.push_str(&format!("  {} = {}, control {}\n", change.key, change.now, change.then));
        }
    }
    text
}

/// One run's line.
pub fn outcome(outcome: &Outcome) -> String {
    let mut parts = match (outcome.bpb, outcome.standard_error, &outcome.not_finite) {
        (Some(bpb), Some(error), _) => vec![format!("held-out bpb {bpb:.4} +- {error:.4}")],
        (_, _, Some(why)) => vec![format!("not finite: {why}")],
        _ => vec!["no score".to_owned()],
    };
    parts.extend(outcome.ms_step.map(|ms| format!("{ms:.1} ms a step")));
    parts.extend(outcome.launches.map(|launches| format!("{launches:.0} launches a step")));
    parts.join(", ")
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| NONE.to_owned(), |value| format!("{value:.digits$}"))
}

fn judgement(sides: &[Side], index: usize) -> Option<Judgement> {
    let control = sides.first().and_then(Side::scores)?;
    (index > 0).then(|| judge(&control, sides[index].scores().as_ref()))
}

/// The table and the reasons.
pub fn table(plan: &Plan, sides: &[Side]) -> String {
    let mut rows = vec![
        ["held-out bpb", "mean", "low", "high", "spread", "ms/step", "launches", "nodes", "verdict"].map(str::to_owned),
    ];
    let mut reasons = String::new();
    let time = |side: &Side| side.median(|outcome| outcome.ms_step);
    for (index, side) in sides.iter().enumerate() {
        let (scores, judged) = (side.scores(), judgement(sides, index));
        rows.push([
            side.contender.name.clone(),
            number(scores.map(|s| s.mean), 4),
            number(scores.map(|s| s.low), 4),
            number(scores.map(|s| s.high), 4),
            number(scores.map(|s| s.spread()), 4),
            number(time(side), 2),
            number(side.median(|outcome| outcome.launches), 0),
            number(side.median(|outcome| outcome.nodes), 0),
            judged.as_ref().map_or(NONE, |judged| judged.verdict.word()).to_owned(),
        ]);
        if let Some(Judgement { verdict, reason }) = judged {
            reasons.push_str(&format!("{}: {verdict}: {reason}", side.contender.name));
            if let (Some(own), Some(control)) = (time(side), time(&sides[0])) {
                reasons.push_str(&format!("; {:.2} of the control's time a step", own / control));
            }
            reasons.push('\n');
        }
        if side.unverified() {
            reasons.push_str(&format!(
                "{}: UNVERIFIED: fused kernels ran that no receipt vouches for\n",
                side.contender.name
            ));
        }
    }
    let won = (1..sides.len()).any(|index| judgement(sides, index).is_some_and(|j| j.verdict == Verdict::Win));
    if won && plan.seeds.len() < FEW_SEEDS {
        reasons.push_str(&format!(
            "with fewer than {FEW_SEEDS} seeds a WIN may be chance (ADR 0024); confirm it with more --seeds\n"
        ));
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let first = width(0);
    let mut text = String::new();
    for row in &rows {
        let cells: String =
            row.iter().enumerate().skip(1).map(|(column, cell)| format!("  {cell:>0$}", width(column))).collect();
        text.push_str(&format!("{:first$}{cells}\n", row[0]));
    }
    text + &reasons
}

/// The table as tab-separated values under [`COLUMNS`].
pub fn tsv(plan: &Plan, sides: &[Side]) -> String {
    let mut text = COLUMNS.join("\t") + "\n";
    for (index, side) in sides.iter().enumerate() {
        let (scores, judged) = (side.scores(), judgement(sides, index));
        let config = &side.contender.config;
        let join = |words: Vec<String>| if words.is_empty() { NONE.to_owned() } else { words.join(",") };
        let changes = side.contender.changes.iter().map(|change| format!("{}={}", change.key, change.now));
        let exact = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), |value| value.to_string());
        let fields = [
            side.contender.name.clone(),
            judged.map_or(NONE, |judged| judged.verdict.word()).to_owned(),
            exact(scores.map(|s| s.mean)),
            exact(scores.map(|s| s.low)),
            exact(scores.map(|s| s.high)),
            exact(scores.map(|s| s.spread())),
            join(side.outcomes.iter().map(|outcome| exact(outcome.bpb)).collect()),
            join(plan.seeds.iter().map(u64::to_string).collect()),
            config.train.total_steps.to_string(),
            (config.train.total_steps * config.bytes_per_step()).to_string(),
            number(side.median(|outcome| outcome.ms_step), 4),
            number(side.median(|outcome| outcome.launches), 1),
            number(side.median(|outcome| outcome.nodes), 1),
            side.outcomes.first().map_or_else(|| NONE.to_owned(), |outcome| outcome.backend.clone()),
            side.unverified().to_string(),
            join(changes.collect()),
            join(side.runs.clone()),
        ];
        let line: Vec<String> = fields.iter().map(|field| field.replace(['\t', '\n'], " ")).collect();
        text.push_str(&(line.join("\t") + "\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{COLUMNS, Side, outcome, table, tsv};
    use crate::compare::plan::{Contender, Plan};
    use crate::compare::runs::Outcome;
    use crate::config::{changes, preset};

    fn plan() -> Plan {
        let control = preset("tiny").unwrap();
        let mut faster = control.clone();
        faster.optimizer.lr = 2e-3;
        let told = changes(&control, &faster);
        let contender =
            |name: &str, config, changes| Contender { name: name.into(), config, identity: name.into(), changes };
        let contenders = vec![contender("control", control, Vec::new()), contender("faster", faster, told)];
        Plan { contenders, seeds: vec![0, 1, 2], windows: 64 }
    }

    fn of(seed: u64, bpb: Option<f64>, ms: f64, launches: Option<f64>) -> Outcome {
        Outcome {
            identity: String::new(),
            seed,
            bpb,
            standard_error: bpb.map(|_| 0.03125),
            not_finite: bpb.is_none().then(|| "nine steps were skipped".to_owned()),
            ms_step: Some(ms),
            launches,
            nodes: launches.map(|launches| 200.0 * launches),
            backend: "cuda".into(),
            unverified: false,
        }
    }

    fn sides<'a>(plan: &'a Plan, faster: [Option<f64>; 3]) -> Vec<Side<'a>> {
        let mut sides: Vec<Side> = plan.contenders.iter().map(Side::new).collect();
        for seed in 0..3 {
            let name = format!("runs/{seed}");
            sides[0].add(of(seed, Some(2.25 + 0.25 * seed as f64), 8.0 + seed as f64, Some(1.0)), name.as_ref());
            sides[1].add(of(seed, faster[seed as usize], 4.5, Some(3.0)), name.as_ref());
        }
        sides
    }

    #[test]
    fn the_table_has_scores_times_launches_and_the_reason() {
        let plan = plan();
        let text = table(&plan, &sides(&plan, [Some(1.75), Some(2.0), Some(2.125)]));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["control", "2.5000", "2.2500", "2.7500", "0.5000", "9.00", "1", "200", "-"]);
        assert_eq!(lines[2], ["faster", "1.9583", "1.7500", "2.1250", "0.3750", "4.50", "3", "600", "WIN"]);
        assert!(text.contains("faster: WIN: mean 1.9583 is below the control's lowest 2.2500"), "{text}");
        assert!(text.contains("0.50 of the control's time a step"), "{text}");
        assert!(text.contains("with fewer than 5 seeds a WIN may be chance"), "{text}");
    }

    #[test]
    fn a_side_that_was_not_finite_has_lost_and_shows_no_mean() {
        let plan = plan();
        let sides = sides(&plan, [Some(1.0), None, Some(1.0)]);
        assert!(sides[1].lost() && !sides[0].lost());
        let text = table(&plan, &sides);
        assert!(text.contains("faster: LOSS: a run of it was not finite"), "{text}");
        assert!(!text.contains("may be chance"), "{text}");
        assert_eq!(outcome(&of(0, None, 1.0, None)), "not finite: nine steps were skipped, 1.0 ms a step");
        assert_eq!(
            outcome(&of(0, Some(2.0), 1.0, Some(3.0))),
            "held-out bpb 2.0000 +- 0.0312, 1.0 ms a step, 3 launches a step"
        );
    }

    #[test]
    fn tab_separated_rows_have_every_column() {
        let plan = plan();
        let text = tsv(&plan, &sides(&plan, [Some(1.75), Some(2.0), None]));
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split('\t').collect()).collect();
        assert_eq!(rows[0], COLUMNS);
        assert!(rows.len() == 3 && rows.iter().all(|row| row.len() == COLUMNS.len()), "{text}");
        let at = |row: usize, column: &str| rows[row][COLUMNS.iter().position(|name| *name == column).unwrap()];
        assert_eq!((at(1, "verdict"), at(2, "verdict")), ("-", "LOSS"));
        assert_eq!((at(1, "bpb_by_seed"), at(2, "bpb_by_seed")), ("2.25,2.5,2.75", "1.75,2,-"));
        assert_eq!((at(1, "changes"), at(2, "changes")), ("-", "optimizer.lr=0.002"));
        assert_eq!((at(1, "seeds"), at(1, "steps"), at(1, "bytes")), ("0,1,2", "300", "76800"));
        assert_eq!((at(2, "bpb_mean"), at(2, "ms_step"), at(2, "runs")), ("-", "4.5000", "runs/0,runs/1,runs/2"));
    }
}
