//! `Checked<B>`: what it lets through it leaves as it is, bit for bit, and what it refuses it names.

use dormouse_harness::description::OperationOn;
use dormouse_harness::draw;
use dormouse_harness::gates::exercise;
use dormouse_harness::ops::cross_entropy::CrossEntropyOp;
use dormouse_harness::ops::decay_gate::DecayGateOp;
use dormouse_harness::ops::embedding::EmbeddingOp;
use dormouse_harness::ops::engram::EngramOp;
use dormouse_harness::ops::kda::KdaOp;
use dormouse_harness::runner::{OnBackend, Runner};
use dormouse_reference::{Checked, Error, Reference};

type Looking = Checked<Reference<f64>>;

/// Forward passes of the case table with and without looking: how many cases it let through and how many it refused.
fn compare<O: OperationOn<Looking> + OperationOn<Reference<f64>>>() -> (usize, usize) {
    let looking: &dyn Runner<O> = &OnBackend::new(|| Checked(Reference::<f64>::new()));
    let plain: &dyn Runner<O> = &OnBackend::new(Reference::<f64>::new);
    let (mut through, mut refused) = (0, 0);
    for case in O::cases() {
        let inputs = O::draw(&case, &mut draw::stream(3, &[O::STEM, "checked", &case.name]));
        match looking.run(&case.config, &inputs, None) {
            Ok(run) => {
                let want = plain.run(&case.config, &inputs, None).expect("what is checked and right runs unchecked");
                assert_eq!(run.outputs, want.outputs, "{} {}", O::STEM, case.name);
                through += 1;
            }
            Err(Error::Value { .. }) => refused += 1,
            Err(error) => panic!("{} {}: {error}", O::STEM, case.name),
        }
    }
    // Backward passes as well, of what goes through.
    let cases: Vec<_> = O::cases().into_iter().take(1).collect();
    exercise::<O>(looking, &cases).unwrap_or_else(|error| panic!("{}: {error}", O::STEM));
    (through, refused)
}

#[test]
fn what_goes_through_has_the_bits_of_the_backend_inside() {
    for (stem, (through, refused)) in [
        ("cross_entropy", compare::<CrossEntropyOp>()),
        ("decay_gate", compare::<DecayGateOp>()),
        ("embedding", compare::<EmbeddingOp>()),
        ("engram", compare::<EngramOp>()),
        ("kda", compare::<KdaOp>()),
    ] {
        // Only tables with families that are wrong on purpose, such as keys that overshoot, have refusals.
        assert!(through > 3 * refused, "{stem}: {through} cases went through, {refused} were refused");
    }
}
