//! Gate `bite`: does every planted fault turn its gate red?
//!
//! A gate that stays green on a fault it names is not a gate. The faults are those generated for every output and
//! gradient, and the operation's own broken terms. The null mutant, the plain form with nothing broken, must stay green
//! on every gate that a broken term is sent to: otherwise red would prove nothing. An operation with a golden file has
//! faults planted for that file besides ([`golden::bite`]).

use dormouse_reference::{Dual, Reference};

use super::{Context, Outcome, Status, golden, run_gate};
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
#[inline(never)]
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

/// Why the gate does not run on some of the cases: a fault that none of them shows would be said to survive.
pub fn filtered(context: &Context) -> Option<Outcome> {
    let only = context.only.as_ref()?;
    Some(Outcome::not_run(format!("a planted fault may need a case that --case {only} leaves out; leave --case out")))
}

/// Runs the gate.
pub fn gate<O>(runner: &dyn Runner<O>, oracle: Option<&dyn Runner<O>>, context: &Context) -> Outcome
where
    O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
{
    if let Some(refusal) = filtered(context) {
        return refusal;
    }
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
    let mutants = O::mutants();
    let nulls: Vec<Gate> = Gate::ALL.into_iter().filter(|g| mutants.iter().any(|m| m.caught_by == *g)).collect();
    for &gate in &nulls {
        let outcome = run_gate::<O>(gate, &Naive { twist: None }, oracle, &context);
        if outcome.status != Status::Pass {
            survivors.push(format!("the null mutant is red on {}: {}", gate.word(), outcome.reason));
        }
    }
    // Whatever other gates see, the golden file must see by itself.
    let (planted, missed) = golden::bite::<O>(runner, &context);
    survivors.extend(missed);
    let cases = plants.len() + seen_by_oracle + planted;
    if survivors.is_empty() {
        return Outcome { status: Status::Pass, cases, worst: 0.0, reason: String::new() };
    }
    // The null mutant is asked once a gate and is no fault of its own.
    let reason = format!("{} of {}: {}", survivors.len(), cases + nulls.len(), survivors.join("; "));
    Outcome { status: Status::Fail, cases, worst: f64::INFINITY, reason }
}
