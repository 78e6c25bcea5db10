//! Held-out bits per byte.

use anyhow::ensure;

use super::Learner;
use crate::signals::Stop;

/// Windows in one call of the learner: small enough that a signal is noticed soon.
const CHUNK: usize = 8;

/// A held-out score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Mean over every predicted position.
    pub bpb: f64,
    /// Standard error of that mean, from the spread of the windows' means; windows are taken as independent, bytes are not.
    pub standard_error: f64,
    /// Windows scored.
    pub windows: usize,
}

/// Scores the windows; `None` if a stop was requested before the last.
pub fn score(learner: &mut dyn Learner, windows: &[Vec<u8>], stop: &Stop) -> anyhow::Result<Option<Score>> {
    let mut means = Vec::with_capacity(windows.len());
    for chunk in windows.chunks(CHUNK) {
        if stop.requested() {
            return Ok(None);
        }
        let nats = learner.evaluate(chunk)?;
        let len = chunk[0].len() - 1;
        ensure!(
            nats.len() == chunk.len() * len,
            "evaluate: expected {} x {len} values, got {}; this is a defect, report it",
            chunk.len(),
            nats.len()
        );
        means.extend(nats.chunks(len).map(|window| window.iter().sum::<f64>() / len as f64 / std::f64::consts::LN_2));
    }
    let n = means.len() as f64;
    let bpb = means.iter().sum::<f64>() / n;
    let variance = means.iter().map(|mean| (mean - bpb).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    Ok(Some(Score { bpb, standard_error: (variance / n).sqrt(), windows: means.len() }))
}
