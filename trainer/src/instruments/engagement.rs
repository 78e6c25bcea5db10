//! Engagement: every operation that was asked for ran, on one arm, and where a gradient was wanted its adjoint ran too.
//!
//! A system this one replaces trained for weeks while a custom node came back untracked: its forward pass ran 3126
//! times and its backward pass never, and the loss fell all the same. So what the model asks for is written down beside
//! the model ([`Model::asks`](crate::model::Model::asks)), what the device ran is in its ledger, and the two are held
//! against each other at every evaluation. Steps that train are counted apart from steps that only score. A call that took
//! the plain kernels because no receipt vouches for the fused ones is `declined`, with the reason; a forward pass beyond
//! those asked for is `recomputed`, which no healthy step has (docs/adr/0027).

use std::collections::{BTreeMap, BTreeSet};

use dormouse_cuda::{Arm, Ledger, Pass};
use dormouse_reference::StepKey;
use serde_json::{Value, json};

/// Calls of one operation that something asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The operation.
    pub stem: &'static str,
    /// Forward passes, or calls of an operation without a backward pass.
    pub forward: u64,
    /// Backward passes; 0 where no gradient is wanted.
    pub backward: u64,
}

/// Everything that was asked for so far.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    calls: BTreeMap<(&'static str, &'static str), Ask>,
    grad: BTreeSet<&'static str>,
    variants: Vec<StepKey>,
}

impl Asked {
    /// Notes one step.
    pub fn note(&mut self, key: &StepKey, asks: &[Ask]) {
        if !self.variants.contains(key) {
            self.variants.push(key.clone());
        }
        for ask in asks {
            if ask.backward > 0 {
                self.grad.insert(key.purpose);
            }
            let total = self.calls.entry((key.purpose, ask.stem));
            let total = total.or_insert(Ask { stem: ask.stem, forward: 0, backward: 0 });
            total.forward += ask.forward;
            total.backward += ask.backward;
        }
    }
}

/// Calls of one operation, in steps that want a gradient or in steps that do not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The operation.
    pub stem: &'static str,
    /// Whether the steps want a gradient.
    pub grad: bool,
    /// What the model asked for.
    pub asked: Ask,
    /// Forward passes that ran, by arm (plain, fused).
    pub forward: [u64; 2],
    /// Backward passes that ran, by arm.
    pub backward: [u64; 2],
    /// Why its calls took arm plain though nobody asked for that; absent where the arm is what was asked for or vouched
    /// for.
    pub declined: Option<String>,
}

impl Row {
    /// Forward passes beyond those that were asked for.
    pub fn recomputed(&self) -> u64 {
        (self.forward[0] + self.forward[1]).saturating_sub(self.asked.forward)
    }

    /// Calls that took arm plain for want of a receipt.
    pub fn declined(&self) -> u64 {
        if self.declined.is_some() { self.forward[0] } else { 0 }
    }
}

/// The account of a run so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engagement {
    /// One row an operation and kind of step, in alphabetical order.
    pub rows: Vec<Row>,
    /// Graphs captured.
    pub captures: u64,
    /// Different steps that were run; each may be captured once.
    pub variants: u64,
    /// The JEPA objective, where the run has it.
    pub jepa: Option<Objective>,
}

/// Whose latents the steps of a run with the JEPA objective had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Objective {
    /// Steps whose student was given masked bytes.
    pub student: u64,
    /// Steps in which a teacher ran.
    pub teacher: u64,
    /// Steps for which latents were read from a file.
    pub targets: u64,
}

impl Engagement {
    /// Holds what ran against what was asked for.
    pub fn new(asked: &Asked, ledgers: &BTreeMap<&'static str, Ledger>, captures: u64) -> Self {
        let mut rows: BTreeMap<(&'static str, bool), Row> = BTreeMap::new();
        for ((purpose, stem), ask) in &asked.calls {
            let row = entry(&mut rows, stem, asked.grad.contains(purpose));
            row.asked.forward += ask.forward;
            row.asked.backward += ask.backward;
        }
        let purposes: BTreeSet<&str> = asked.variants.iter().map(|key| key.purpose).collect();
        for (purpose, ledger) in ledgers.iter().filter(|(purpose, _)| purposes.contains(*purpose)) {
            for (&(stem, pass, arm), count) in &ledger.calls {
                let row = entry(&mut rows, stem, asked.grad.contains(purpose));
                let by_arm = match pass {
                    Pass::Forward => &mut row.forward,
                    Pass::Backward => &mut row.backward,
                };
                by_arm[usize::from(arm == Arm::Fused)] += count;
            }
        }
        let variants = asked.variants.len() as u64;
        Self { rows: rows.into_values().collect(), captures, variants, jepa: None }
    }

    /// The account of a run with the JEPA objective.
    #[must_use]
    pub fn with_jepa(self, jepa: Option<Objective>) -> Self {
        Self { jepa, ..self }
    }

    /// The account with the reasons why operations do not run their fused kernels, by operation.
    #[must_use]
    pub fn with_declined(mut self, reasons: &BTreeMap<String, String>) -> Self {
        for row in &mut self.rows {
            row.declined = reasons.get(row.stem).cloned();
        }
        self
    }

    /// What is wrong, one sentence each; empty where all is well.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for Row { stem, grad, asked, forward, backward, .. } in &self.rows {
            let steps = if *grad { "training" } else { "scoring" };
            let ran = forward[0] + forward[1];
            if ran != asked.forward {
                let asked = asked.forward;
                problems.push(format!("{stem}: asked {asked} times in {steps}, and its forward pass ran {ran} times"));
            }
            let back = backward[0] + backward[1];
            if back != asked.backward {
                problems.push(format!(
                    "{stem}: {} backward passes belong to the {} calls in {steps}, and {back} ran: what lies before it \
                     does not learn",
                    asked.backward, asked.forward
                ));
            }
            if forward[0] > 0 && forward[1] > 0 {
                problems.push(format!("{stem}: {} calls took arm plain and {} fused", forward[0], forward[1]));
            }
            for arm in 0..2 {
                if backward[arm] > 0 && forward[arm] == 0 {
                    let word = Arm::ALL[arm];
                    problems.push(format!("{stem}: backward took arm {word}, which forward never took"));
                }
            }
        }
        if let Some(Objective { student, teacher, targets }) = self.jepa
            && student != teacher + targets
        {
            problems.push(format!(
                "jepa: {student} steps had a student, {teacher} a teacher and {targets} targets from a file: each \
                 student needs one of the two"
            ));
        }
        if self.captures > self.variants {
            problems.push(format!(
                "{} graphs were captured for {} different steps: a step's key does not say all that it depends on",
                self.captures, self.variants
            ));
        }
        problems
    }

    /// The account in one line.
    pub fn line(&self) -> String {
        let arm_of = |stem| {
            let rows = self.rows.iter().filter(|row| row.stem == stem);
            if rows.map(|row| row.forward[1]).sum::<u64>() > 0 { Arm::Fused } else { Arm::Plain }
        };
        let stems: BTreeSet<&str> = self.rows.iter().map(|row| row.stem).collect();
        let fused = stems.iter().filter(|stem| arm_of(**stem) == Arm::Fused).count();
        let total = |grad: bool, of: fn(&Row) -> u64| self.rows.iter().filter(|r| r.grad == grad).map(of).sum::<u64>();
        let both = |of: fn(&Row) -> u64| total(true, of) + total(false, of);
        let reason = self.rows.iter().find(|row| row.declined() > 0).and_then(|row| row.declined.as_ref());
        format!(
            "{} operations, {fused} fused; grad asked {} forward {} backward {}; nograd asked {} forward {}; recomputed {}; \
             declined {}{}; kda={} jepa={} retract={}/{} captures={} of {} variants",
            stems.len(),
            total(true, |row| row.asked.forward),
            total(true, |row| row.forward[0] + row.forward[1]),
            total(true, |row| row.backward[0] + row.backward[1]),
            total(false, |row| row.asked.forward),
            total(false, |row| row.forward[0] + row.forward[1]),
            both(Row::recomputed),
            both(Row::declined),
            reason.map(|reason| format!(" ({reason})")).unwrap_or_default(),
            arm_of("kda"),
            self.jepa.map_or("off".to_owned(), |Objective { student, teacher, targets }| {
                format!("{student}/{teacher}/{targets}")
            }),
            if stems.contains("retract_all") { "batched" } else { "single" },
            arm_of(if stems.contains("retract_all") { "retract_all" } else { "retract" }),
            self.captures,
            self.variants,
        )
    }

    /// The account as JSON, for metrics.jsonl.
    pub fn json(&self) -> Value {
        let arms = |counts: &[u64; 2]| json!({"plain": counts[0], "fused": counts[1]});
        let rows = self.rows.iter().map(|row| {
            json!({
                "stem": row.stem,
                "steps": if row.grad { "grad" } else { "nograd" },
                "asked": row.asked.forward,
                "asked_backward": row.asked.backward,
                "forward": arms(&row.forward),
                "backward": arms(&row.backward),
                "recomputed": row.recomputed(),
                "declined": row.declined(),
                "declined_because": row.declined.as_ref().filter(|_| row.declined() > 0),
            })
        });
        let jepa = self.jepa.map(|Objective { student, teacher, targets }| {
            json!({"student": student, "teacher": teacher, "targets": targets})
        });
        let operations: Vec<Value> = rows.collect();
        json!({"operations": operations, "captures": self.captures, "variants": self.variants, "jepa": jepa})
    }
}

fn entry<'a>(rows: &'a mut BTreeMap<(&'static str, bool), Row>, stem: &'static str, grad: bool) -> &'a mut Row {
    let asked = Ask { stem, forward: 0, backward: 0 };
    let row = Row { stem, grad, asked, forward: [0; 2], backward: [0; 2], declined: None };
    rows.entry((stem, grad)).or_insert(row)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use dormouse_cuda::{Arm, Ledger, Pass};
    use dormouse_reference::StepKey;

    use super::{Ask, Asked, Engagement, Objective};

    const TRAIN: StepKey = StepKey { purpose: "train", variant: 1 };
    const EVAL: StepKey = StepKey { purpose: "eval", variant: 2 };
    const KDA: [Ask; 1] = [Ask { stem: "kda", forward: 2, backward: 2 }];

    type Calls = [(Pass, Arm, u64)];

    /// Ten training steps and three evaluations asked, against these counts.
    fn account(train: &Calls, eval: &Calls, captures: u64) -> Engagement {
        let mut asked = Asked::default();
        for _ in 0..10 {
            asked.note(&TRAIN, &KDA);
        }
        for _ in 0..3 {
            asked.note(&EVAL, &[Ask { stem: "kda", forward: 2, backward: 0 }]);
        }
        let ledger = |calls: &Calls| {
            let mut ledger = Ledger::default();
            for &(pass, arm, count) in calls {
                ledger.calls.insert(("kda", pass, arm), count);
            }
            ledger
        };
        let ledgers = BTreeMap::from([("train", ledger(train)), ("eval", ledger(eval)), ("other", ledger(train))]);
        Engagement::new(&asked, &ledgers, captures)
    }

    const HEALTHY: [(Pass, Arm, u64); 2] = [(Pass::Forward, Arm::Fused, 20), (Pass::Backward, Arm::Fused, 20)];
    const SCORED: [(Pass, Arm, u64); 1] = [(Pass::Forward, Arm::Fused, 6)];

    #[test]
    fn a_healthy_run_has_no_problem_and_one_line() {
        let account = account(&HEALTHY, &SCORED, 2);
        assert_eq!(account.problems(), Vec::<String>::new());
        let line = account.line();
        assert!(line.contains("1 operations, 1 fused; grad asked 20 forward 20 backward 20"), "{line}");
        let words = "nograd asked 6 forward 6; recomputed 0; declined 0; kda=fused";
        assert!(line.contains(words) && line.contains("captures=2 of 2"), "{line}");
        assert_eq!(account.json()["operations"][1]["forward"]["fused"], 20);
    }

    #[test]
    fn a_call_without_a_receipt_is_declined_with_the_reason_and_a_second_forward_pass_is_recomputed() {
        use Arm::{Fused, Plain};
        use Pass::{Backward, Forward};
        let reasons = BTreeMap::from([("kda".to_owned(), "there is no receipt".to_owned())]);
        let plain = account(&[(Forward, Plain, 20), (Backward, Plain, 20)], &[(Forward, Plain, 6)], 2);
        // Plain because it was asked for is what was asked for.
        assert!(plain.line().contains("declined 0; kda=plain"), "{}", plain.line());
        let plain = plain.with_declined(&reasons);
        assert_eq!(plain.problems(), Vec::<String>::new());
        assert!(
            plain.line().contains("recomputed 0; declined 26 (there is no receipt); kda=plain"),
            "{}",
            plain.line()
        );
        let json = plain.json();
        let [nograd, grad] = [&json["operations"][0], &json["operations"][1]];
        assert_eq!((&nograd["declined"], &grad["declined"]), (&6.into(), &20.into()));
        assert_eq!((&grad["declined_because"], &grad["recomputed"]), (&"there is no receipt".into(), &0.into()));
        // What ran fused was not declined, whatever is known of its receipt.
        let fused = account(&HEALTHY, &SCORED, 2).with_declined(&reasons);
        assert!(
            fused.line().contains("declined 0; kda=fused")
                && fused.json()["operations"][0]["declined_because"].is_null()
        );
        // A forward pass that runs again for its backward pass.
        let twice = account(&[(Forward, Fused, 40), (Backward, Fused, 20)], &SCORED, 2);
        assert!(twice.line().contains("recomputed 20; declined 0"), "{}", twice.line());
        assert_eq!(twice.json()["operations"][1]["recomputed"], 20);
        assert!(twice.problems()[0].contains("asked 20 times in training, and its forward pass ran 40 times"));
    }

    #[test]
    fn a_student_without_a_teacher_and_without_targets_is_ill() {
        let healthy = account(&HEALTHY, &SCORED, 2);
        assert!(healthy.line().contains(" jepa=off "), "{}", healthy.line());
        let with = |student, teacher, targets| {
            account(&HEALTHY, &SCORED, 2).with_jepa(Some(Objective { student, teacher, targets }))
        };
        let account = with(10, 7, 3);
        assert_eq!(account.problems(), Vec::<String>::new());
        assert!(account.line().contains(" jepa=10/7/3 "), "{}", account.line());
        assert_eq!(account.json()["jepa"]["teacher"], 7);
        let problems = with(10, 9, 0).problems();
        assert!(problems[0].starts_with("jepa: 10 steps had a student, 9 a teacher and 0 targets"), "{problems:?}");
    }

    /// A run that asks for the retraction of all factors at once and gets it factor by factor is ill.
    #[test]
    fn a_run_without_batched_retraction_is_ill_where_it_was_asked_for() {
        let of = |ran: &'static str, calls: u64| {
            let mut asked = Asked::default();
            for _ in 0..10 {
                // Steps with a gradient are training.
                asked.note(&TRAIN, &[KDA[0], Ask { stem: "retract_all", forward: 1, backward: 0 }]);
            }
            let mut ledger = Ledger::default();
            for (pass, arm, count) in HEALTHY {
                ledger.calls.insert(("kda", pass, arm), count);
            }
            ledger.calls.insert((ran, Pass::Forward, Arm::Fused), calls);
            Engagement::new(&asked, &BTreeMap::from([("train", ledger)]), 0)
        };
        let healthy = of("retract_all", 10);
        assert_eq!(healthy.problems(), Vec::<String>::new());
        assert!(healthy.line().contains("retract=batched/fused"), "{}", healthy.line());
        let problems = of("retract", 80).problems();
        let expected = [
            "retract: asked 0 times in training, and its forward pass ran 80 times",
            "retract_all: asked 10 times in training, and its forward pass ran 0 times",
        ];
        assert_eq!(problems, expected);
    }

    #[test]
    fn every_way_to_be_ill_is_named() {
        use Arm::{Fused, Plain};
        use Pass::{Backward, Forward};
        let cases: [(&Calls, &Calls, u64, &str); 7] = [
            (&[(Forward, Fused, 20)], &SCORED, 2, "20 backward passes belong to the 20 calls in training, and 0 ran"),
            (&[(Forward, Fused, 20), (Backward, Fused, 19)], &SCORED, 2, "and 19 ran"),
            (&[(Forward, Fused, 21), (Backward, Fused, 20)], &SCORED, 2, "asked 20 times in training"),
            (&HEALTHY, &[(Forward, Fused, 5)], 2, "asked 6 times in scoring, and its forward pass ran 5 times"),
            (
                &[(Forward, Fused, 10), (Forward, Plain, 10), (Backward, Fused, 20)],
                &SCORED,
                2,
                "10 calls took arm plain",
            ),
            (
                &[(Forward, Fused, 20), (Backward, Plain, 20)],
                &SCORED,
                2,
                "backward took arm plain, which forward never",
            ),
            (&HEALTHY, &SCORED, 3, "3 graphs were captured for 2 different steps"),
        ];
        for (train, eval, captures, expected) in cases {
            let problems = account(train, eval, captures).problems();
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{expected}: {problems:?}");
        }
    }
}
