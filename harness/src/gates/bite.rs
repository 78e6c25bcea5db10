//! Gate `bite`: does every planted fault turn its gate red?
//!
//! A gate that stays green on a fault it names is not a gate. The faults are those generated for every output and
//! gradient, and the operation's own broken terms. The null mutant, the plain form with nothing broken, must stay green
//! on every gate that a broken term is sent to: otherwise red would prove nothing.

use dormouse_reference::{Dual, Reference};

use super::{Context, Outcome, Status, run_gate};
use crate::description::{Gate, OperationOn};
use crate::runner::{Fault, Faulty, Naive, Plant, Runner, plants};

/// The gate that must catch a mutant.
pub fn caught_by(plant: &Plant) -> Gate {
    match plant {
        Plant::Grad(_, Fault::Overwritten) => Gate::Meta,
        Plant::Grad(..) => Gate::Fd,
        Plant::Output(..) => Gate::Form,
        Plant::Twist(mutant) => mutant.caught_by,
    }
}

/// Runs one gate of the ladder with a mutant planted.
pub fn with_mutant<O>(
    plant: &Plant,
    gate: Gate,
    runner: &dyn Runner<O>,
    oracle: Option<&dyn Runner<O>>,
    context: &Context,
) -> Outcome
where
    O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
{
    match plant {
        Plant::Twist(mutant) => run_gate::<O>(gate, &Naive { twist: Some(mutant.twist) }, oracle, context),
        fault => run_gate::<O>(gate, &Faulty::new(runner, fault.clone()), oracle, context),
    }
}

/// Runs the gate.
pub fn gate<O>(runner: &dyn Runner<O>, oracle: Option<&dyn Runner<O>>, context: &Context) -> Outcome
where
    O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
{
    let context = Context { stop_at_first: true, random_cases: 0, ..context.clone() };
    let plants = plants::<O>();
    let mut survivors = Vec::new();
    for plant in &plants {
        let gate = caught_by(plant);
        let outcome = with_mutant::<O>(plant, gate, runner, oracle, &context);
        if outcome.status != Status::Fail {
            survivors.push(format!("{} survives {}", plant.name(), gate.word()));
        }
    }
    // Gate `oracle` has no faults of its own name: every output and gradient that is one percent off must turn it red.
    let slight = |plant: &&Plant| matches!(plant, Plant::Output(_, Fault::Scaled) | Plant::Grad(_, Fault::Scaled));
    let mut seen_by_oracle = 0;
    for plant in plants.iter().filter(slight).filter(|_| oracle.is_some()) {
        seen_by_oracle += 1;
        let outcome = with_mutant::<O>(plant, Gate::Oracle, runner, oracle, &context);
        if outcome.status != Status::Fail {
            survivors.push(format!("{} survives {}", plant.name(), Gate::Oracle.word()));
        }
    }
    let planted = plants.len() + seen_by_oracle;
    let mut twist_gates: Vec<Gate> = O::mutants().iter().map(|m| m.caught_by).collect();
    twist_gates.dedup();
    for gate in twist_gates {
        let outcome = run_gate::<O>(gate, &Naive { twist: None }, oracle, &context);
        if outcome.status != Status::Pass {
            survivors.push(format!("the null mutant is red on {}: {}", gate.word(), outcome.reason));
        }
    }
    if survivors.is_empty() {
        return Outcome { status: Status::Pass, cases: planted, worst: 0.0, reason: String::new() };
    }
    let reason = format!("{} of {planted}: {}", survivors.len(), survivors.join("; "));
    Outcome { status: Status::Fail, cases: planted, worst: f64::INFINITY, reason }
}
