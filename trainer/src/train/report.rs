//! The lines of metrics.jsonl.

use serde_json::{Value, json};

use super::{Drift, Score, StepRecord};

/// What the loop knows of a step beside its record.
pub(super) struct StepFacts {
    pub lr: f64,
    pub step_ms: f64,
    pub bytes_per_step: u64,
}

/// One step. `step` counts steps done, so the first line says 1.
///
/// JSON has no NaN and no infinity: such a number is written as null, and named with its value in `nonfinite`.
pub(super) fn step_line(record: &StepRecord, facts: &StepFacts) -> Value {
    let readout = record.ce.last().copied().unwrap_or(record.loss);
    let mut nonfinite: Vec<String> = Vec::new();
    let aux = record.aux.map(|aux| [("jepa", aux.jepa), ("koleo", aux.koleo)]);
    let named = [("loss", record.loss), ("grad_norm", record.grad_norm)];
    let terms = aux.into_iter().flatten().filter_map(|(name, value)| value.map(|value| (name, value)));
    for (name, value) in named.into_iter().chain(terms) {
        if !value.is_finite() {
            nonfinite.push(format!("{name}={value}"));
        }
    }
    for (iteration, value) in record.ce.iter().enumerate() {
        if !value.is_finite() {
            nonfinite.push(format!("ce[{iteration}]={value}"));
        }
    }
    let mut line = json!({
        "kind": "step",
        "step": record.step + 1,
        "loss": record.loss,
        "bpb": readout / std::f64::consts::LN_2,
        "ce": record.ce,
        "grad_norm": record.grad_norm,
        "lr": facts.lr,
        "applied": record.applied,
        "nonfinite_gradient_elements": record.nonfinite,
        "nonfinite": nonfinite,
        "step_ms": facts.step_ms,
        "bytes_seen": (record.step + 1) * facts.bytes_per_step,
    });
    // A run without the objective has no such key; a step without a masked byte has none of its numbers.
    for (name, value) in aux.into_iter().flatten() {
        line[name] = json!(value);
    }
    line
}

/// What the loop knows of an evaluation beside its score.
pub(super) struct EvalFacts {
    pub bytes_per_step: u64,
    /// What ran against what was asked for, where it is counted.
    pub engagement: Option<Value>,
    /// Whether a fused arm runs that no receipt vouches for.
    pub unverified: bool,
}

pub(super) fn eval_line(done: u64, score: &Score, facts: &EvalFacts) -> Value {
    let nonfinite: Vec<String> = if score.bpb.is_finite() { vec![] } else { vec![format!("bpb={}", score.bpb)] };
    json!({
        "kind": "eval",
        "step": done,
        "bpb": score.bpb,
        "bpb_standard_error": score.standard_error,
        "windows": score.windows,
        "bytes_seen": done * facts.bytes_per_step,
        "nonfinite": nonfinite,
        "engagement": facts.engagement,
        "unverified": facts.unverified,
    })
}

pub(super) fn drift_line(done: u64, factors: &[Drift]) -> Value {
    let all: Vec<Value> = factors
        .iter()
        .map(|drift| json!({"name": drift.name, "orthonormality": drift.orthonormality, "spread": drift.spread}))
        .collect();
    json!({"kind": "drift", "step": done, "factors": all})
}

#[cfg(test)]
mod tests {
    use super::{StepFacts, step_line};
    use crate::train::{Aux, StepRecord};

    #[test]
    fn what_json_cannot_say_is_named() {
        let facts = StepFacts { lr: 1e-3, step_ms: 2.0, bytes_per_step: 64 };
        let good = StepRecord {
            step: 4,
            loss: 2.0,
            ce: vec![3.0, 1.0],
            aux: None,
            grad_norm: 0.5,
            nonfinite: 0,
            applied: true,
        };
        let line = step_line(&good, &facts);
        assert_eq!(line["step"], 5);
        assert_eq!(line["bytes_seen"], 320);
        assert_eq!(line["bpb"], 1.0 / std::f64::consts::LN_2);
        assert_eq!(line["nonfinite"].as_array().unwrap().len(), 0);
        let bad = StepRecord { loss: f64::NAN, ce: vec![3.0, f64::INFINITY], nonfinite: 7, applied: false, ..good };
        let line = step_line(&bad, &facts);
        assert!(line["loss"].is_null());
        assert_eq!(line["nonfinite"][0], "loss=NaN");
        assert_eq!(line["nonfinite"][1], "ce[1]=inf");
        assert_eq!(line["nonfinite_gradient_elements"], 7);
        assert_eq!(line["applied"], false);
        assert!(line.get("jepa").is_none() && line.get("koleo").is_none());
        let aux = Some(Aux { jepa: Some(f64::INFINITY), koleo: Some(0.25) });
        let line = step_line(&StepRecord { aux, loss: 2.0, ce: vec![2.0], ..bad.clone() }, &facts);
        assert!(line["jepa"].is_null());
        assert_eq!((line["koleo"].as_f64(), &line["nonfinite"][0]), (Some(0.25), &"jepa=inf".into()));
        // Nothing was masked: no number, and nothing that is not finite either.
        let aux = Some(Aux { jepa: None, koleo: None });
        let line = step_line(&StepRecord { aux, loss: 2.0, ce: vec![2.0], ..bad }, &facts);
        assert!(line.get("jepa").is_some_and(|v| v.is_null()) && line.get("koleo").is_some_and(|v| v.is_null()));
        assert_eq!(line["nonfinite"].as_array().unwrap().len(), 0);
    }
}
