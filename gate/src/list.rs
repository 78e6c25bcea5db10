//! `--list`: which gate is asked of which operation, and how many faults it must catch. Runs nothing.
//!
//! `cargo xtask docs` makes the table of docs/verification.md from these lines, so what is counted here is what the
//! gates would do: the cases of the table, and every mutant under the gate that [`caught_by`] sends it to.

use std::path::Path;

use dormouse_harness::description::{Gate, OperationOn};
use dormouse_harness::gates::Status;
use dormouse_harness::gates::bite::caught_by;
use dormouse_harness::ops::Visitor;
use dormouse_harness::runner::{Fault, Plant, plants};
use dormouse_reference::{Dual, Reference};

/// The head of the tab-separated lines.
pub const COLUMNS: &str = "stem\tgate\tbackend\tcases\tmutants\tstatus\treason";

/// Gathers the lines.
pub struct List<'a> {
    /// Stems of operations; none means all.
    pub stems: &'a [String],
    /// The folder of golden files.
    pub golden: &'a Path,
    /// The lines, without the head.
    pub lines: Vec<String>,
}

/// A gate that would run: `PASS` and `FAIL` are for those that have.
const RUNS: &str = "RUNS";

impl List<'_> {
    fn line(&mut self, stem: &str, gate: Gate, on: &str, counts: (usize, usize), why_not: Option<(Status, String)>) {
        let (cases, mutants) = counts;
        let (status, reason) = why_not.map_or((RUNS, String::new()), |(status, reason)| (status.word(), reason));
        self.lines.push(format!("{stem}\t{}\t{on}\t{cases}\t{mutants}\t{status}\t{reason}", gate.word()));
    }

    fn of_reference<O: OperationOn<Reference<f64>>>(&mut self, has_oracle: bool) {
        let (plants, cases) = (plants::<O>(), O::cases().len());
        let golden = self.golden.join(format!("{}.safetensors", O::STEM));
        for gate in Gate::ALL {
            let mutants = match gate {
                Gate::Bite => plants.len(),
                // It has no faults of its own name: it must see whatever is one percent off.
                Gate::Oracle => {
                    let slight =
                        |p: &&Plant| matches!(p, Plant::Output(_, Fault::Scaled) | Plant::Grad(_, Fault::Scaled));
                    plants.iter().filter(slight).count()
                }
                _ => plants.iter().filter(|plant| caught_by(plant) == gate).count(),
            };
            let why_not = match gate {
                Gate::Fd | Gate::Adj => O::NO_GRADIENT.map(|why| (Status::NotApplicable, why.to_owned())),
                Gate::Meta if O::laws().is_empty() => Some((Status::NotApplicable, "it states no law".to_owned())),
                Gate::Oracle if !has_oracle => Some((Status::NotRun, "this build has no oracle".to_owned())),
                Gate::Golden if !golden.exists() => {
                    Some((Status::NotRun, format!("golden/{}.safetensors does not exist", O::STEM)))
                }
                _ => None,
            };
            self.line(O::STEM, gate, "cpu", (cases, mutants), why_not);
        }
    }

    #[cfg(feature = "devices")]
    fn of_devices<O: OperationOn<Reference<f64>>>(&mut self) {
        let mutants = crate::devices::mutants(O::STEM);
        let none = (!crate::devices::with_kernels().contains(&O::STEM))
            .then(|| (Status::NotRun, "there are no kernels of it".to_owned()));
        let cases = if none.is_some() { 0 } else { O::cases().iter().filter(|case| O::on_devices(case)).count() };
        for gate in Gate::DEVICE {
            let faults = mutants.iter().filter(|mutant| !mutant.is_null());
            let count = faults.filter(|mutant| gate == Gate::Bite || mutant.gate == gate.word()).count();
            self.line(O::STEM, gate, "device", (cases, count), none.clone());
        }
    }
}

impl Visitor for List<'_> {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        if !self.stems.is_empty() && !self.stems.iter().any(|stem| stem == O::STEM) {
            return;
        }
        self.of_reference::<O>(crate::oracle_of::<O>().is_some());
        #[cfg(feature = "devices")]
        self.of_devices::<O>();
    }
}
