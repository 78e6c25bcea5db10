//! Writes receipts: only where every gate of the fused arm has run and is green.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use dormouse_cuda::receipts::word;
use dormouse_cuda::{Arm, Opened, Pass, Receipt, Runtime, fingerprint};
use dormouse_harness::description::{Gate, Operation};
use dormouse_harness::gates::diff::Figures;
use dormouse_harness::gates::{Context, Outcome, Status};
use dormouse_receipts::receipt::{Device, Tensor, VERSION};
use dormouse_reference::Precision;

/// The gates that a receipt rests on.
const NEEDED: [Gate; 4] = [Gate::Diff, Gate::Poison, Gate::Det, Gate::Bite];

/// What the gates of one operation's fused arm have found at one precision.
#[derive(Default)]
pub struct Evidence {
    /// Status and cases of the gates that were asked to run.
    gates: BTreeMap<&'static str, (Status, usize)>,
    /// Every tensor's worst figures in gate `diff`.
    pub figures: Vec<Figures>,
    /// The halves and arms that the device's ledger has seen.
    pub calls: BTreeSet<(Pass, Arm)>,
}

impl Evidence {
    /// Notes a gate's outcome.
    pub fn note(&mut self, gate: Gate, outcome: &Outcome) {
        self.gates.insert(gate.word(), (outcome.status, outcome.cases));
    }

    /// Why there is no receipt, if there is none.
    fn lacks(&self, has_gradient: bool, context: &Context) -> Option<String> {
        if let Some(only) = &context.only {
            return Some(format!("only the cases named `{only}` have run"));
        }
        for gate in NEEDED {
            let word = gate.word();
            match self.gates.get(word) {
                None => return Some(format!("gate {word} was not asked to run")),
                Some((Status::Pass, 1..)) => {}
                Some((status, _)) => return Some(format!("gate {word} is {}", status.word())),
            }
        }
        if let Some((word, (status, _))) = self.gates.iter().find(|(_, (s, _))| *s == Status::Fail) {
            return Some(format!("gate {word} is {}", status.word()));
        }
        let passes: &[Pass] = if has_gradient { &[Pass::Forward, Pass::Backward] } else { &[Pass::Forward] };
        let engaged = passes.iter().all(|&pass| self.calls.contains(&(pass, Arm::Fused)));
        if !engaged || self.calls.iter().any(|&(_, arm)| arm != Arm::Fused) {
            return Some("its fused kernels did not run in every call".to_owned());
        }
        None
    }
}

/// The folder that the crate of kernels embeds.
pub fn is_golden(folder: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = resolved(folder);
    folder == resolved(Path::new("golden/receipts")) || folder.ends_with("golden/receipts")
}

/// Writes an operation's receipts at the precisions that the evidence covers; gives a line for each, or why there are none.
pub fn write<O: Operation>(
    opened: &Opened,
    folder: &Path,
    precisions: &[Precision],
    evidence: &Evidence,
    context: &Context,
) -> Vec<String> {
    let names = precisions.iter().map(|&p| word(p)).collect::<Vec<_>>().join(", ");
    let runtime = opened.runtime();
    let none = |why: String| vec![format!("no receipt for {} {names} on {}: {why}", O::STEM, runtime.word())];
    if runtime != Runtime::Cuda && is_golden(folder) {
        return none(format!("{} is for GPUs", folder.display()));
    }
    if let Some(why) = evidence.lacks(O::NO_GRADIENT.is_none(), context) {
        return none(why);
    }
    let Some(fingerprint) = fingerprint(O::STEM) else {
        return none("this build does not know the fingerprint of its sources".to_owned());
    };
    let hardware = match opened.hardware() {
        Ok(hardware) => hardware,
        Err(error) => return none(error.to_string()),
    };
    let of = |figures: &Figures| Tensor {
        name: figures.name.clone(),
        worst: figures.worst,
        rms: figures.measures.rms,
        token: figures.measures.token,
        element: figures.measures.element,
        slope: figures.measures.slope,
        tolerance: figures.tolerance.tol,
        slope_tolerance: figures.tolerance.slope,
    };
    let arithmetic = |precision: Precision| match (O::PRODUCTS, precision) {
        (0, _) => "f32 at every precision: there are no matrix products".to_owned(),
        (_, Precision::Full) => "matrix products in f32".to_owned(),
        (_, other) => format!("matrix products of operands rounded to {}, sums in f32", word(other)),
    };
    let gates: BTreeMap<String, usize> = evidence
        .gates
        .iter()
        .filter(|(_, (status, _))| *status == Status::Pass)
        .map(|(gate, (_, cases))| ((*gate).to_owned(), *cases))
        .collect();
    let receipt = |&precision: &Precision| Receipt {
        version: VERSION,
        stem: O::STEM.to_owned(),
        precision: word(precision).to_owned(),
        target: hardware.target.clone(),
        arithmetic: arithmetic(precision),
        fingerprint: fingerprint.to_owned(),
        commit: commit(),
        command: format!(
            "cargo xtask gate {} --backend {} --arm fused --precision {} --seed {} --random {}",
            O::STEM,
            runtime.word(),
            word(precision),
            context.seed,
            context.random_cases
        ),
        seed: context.seed,
        random: context.random_cases,
        cases: gates["diff"],
        device: Device {
            name: hardware.name.clone(),
            driver: hardware.driver.clone(),
            nvrtc: hardware.nvrtc.clone(),
            cublaslt: hardware.cublaslt.clone(),
        },
        gates: gates.clone(),
        tensors: evidence.figures.iter().map(of).collect(),
    };
    let line = |precision: &Precision| match receipt(precision).write(folder) {
        Ok(path) => format!("receipt {}", path.display()),
        Err(error) => format!("no receipt for {} {}: {error}", O::STEM, word(*precision)),
    };
    precisions.iter().map(line).collect()
}

/// The commit that was built: DORMOUSE_COMMIT where the sources were copied without their history, else git's. Receipts
/// that this run writes do not count as changes.
fn commit() -> String {
    if let Some(commit) = std::env::var("DORMOUSE_COMMIT").ok().filter(|commit| !commit.is_empty()) {
        return commit;
    }
    let git = |arguments: &[&str]| {
        let out = Command::new("git").args(arguments).output().ok().filter(|out| out.status.success())?;
        Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let Some(head) = git(&["rev-parse", "HEAD"]) else { return "unknown".to_owned() };
    match git(&["status", "--porcelain", "--untracked-files=no", "--", ":(exclude)golden/receipts"]) {
        Some(changes) if changes.is_empty() => head,
        _ => format!("{head}-dirty"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn context() -> Context {
        Context {
            seed: 1,
            only: None,
            random_cases: 0,
            production: false,
            golden: PathBuf::new(),
            stop_at_first: false,
            again: String::new(),
        }
    }

    fn green() -> Evidence {
        let mut evidence = Evidence::default();
        for gate in NEEDED {
            evidence.gates.insert(gate.word(), (Status::Pass, 3));
        }
        evidence.calls = [(Pass::Forward, Arm::Fused), (Pass::Backward, Arm::Fused)].into();
        evidence
    }

    #[test]
    fn only_a_green_ladder_of_fused_kernels_gets_a_receipt() {
        assert_eq!(green().lacks(true, &context()), None);
        for gate in NEEDED {
            for status in [Status::Fail, Status::NotRun, Status::NotApplicable] {
                let mut evidence = green();
                evidence.gates.insert(gate.word(), (status, 3));
                assert!(evidence.lacks(true, &context()).is_some_and(|why| why.contains(gate.word())));
            }
            let mut evidence = green();
            evidence.gates.remove(gate.word());
            assert!(evidence.lacks(true, &context()).is_some());
        }
        let mut evidence = green();
        evidence.gates.insert(Gate::Meta.word(), (Status::Fail, 3));
        assert!(evidence.lacks(true, &context()).is_some());
        let some = Context { only: Some("b2".to_owned()), ..context() };
        assert!(green().lacks(true, &some).is_some());
    }

    #[test]
    fn kernels_that_did_not_run_get_none() {
        let with = |calls: &[(Pass, Arm)]| Evidence { calls: calls.iter().copied().collect(), ..green() };
        let forward = (Pass::Forward, Arm::Fused);
        assert!(with(&[]).lacks(true, &context()).is_some());
        assert!(with(&[forward]).lacks(true, &context()).is_some());
        assert_eq!(with(&[forward]).lacks(false, &context()), None);
        let mixed = [forward, (Pass::Backward, Arm::Fused), (Pass::Backward, Arm::Plain)];
        assert!(with(&mixed).lacks(true, &context()).is_some());
    }

    #[test]
    fn the_embedded_folder_is_recognised() {
        assert!(is_golden(Path::new("/somewhere/golden/receipts")));
        assert!(!is_golden(Path::new("/somewhere/receipts")));
    }
}
