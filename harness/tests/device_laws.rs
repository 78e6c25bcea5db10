//! The laws of gate `meta` as a device is held to them, on a backend that computes in f32 as devices do.

use std::path::PathBuf;

use dormouse_harness::description::OperationOn;
use dormouse_harness::gates::{Context, Status, meta};
use dormouse_harness::ops::rms_norm::RmsNormOp;
use dormouse_harness::ops::{Visitor, visit_all};
use dormouse_harness::runner::{Fault, Faulty, OnBackend, Plant};
use dormouse_reference::{Dual, Precision, Reference};

fn context() -> Context {
    Context { seed: 5, only: None, random_cases: 4, golden: PathBuf::new(), stop_at_first: true, again: String::new() }
}

const DEVICES: [meta::Device; 2] = [
    meta::Device { precision: Precision::Full, other_shapes_same_bits: true },
    meta::Device { precision: Precision::Bf16, other_shapes_same_bits: false },
];

struct AllGreen(usize);

impl Visitor for AllGreen {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        let runner = OnBackend::new(Reference::<f32>::new);
        for device in DEVICES {
            let outcome = meta::gate_device::<O>(&runner, device, &context());
            assert_ne!(outcome.status, Status::Fail, "{} on {device:?}: {}", O::STEM, outcome.reason);
            self.0 += usize::from(outcome.status == Status::Pass);
        }
    }
}

#[test]
fn every_operation_obeys_them_in_f32() {
    let mut all = AllGreen(0);
    visit_all(&mut all);
    assert!(all.0 > 20, "{} ladders ran", all.0);
}

#[test]
fn a_device_that_breaks_one_is_red() {
    let backend = OnBackend::new(Reference::<f32>::new);
    for plant in [
        Plant::Grad("gain", Fault::Overwritten),
        Plant::Output("y", Fault::Stale),
        Plant::Grad("x", Fault::Nan),
        Plant::Output("y", Fault::Shifted),
    ] {
        for device in DEVICES {
            let outcome = meta::gate_device::<RmsNormOp>(&Faulty::new(&backend, plant.clone()), device, &context());
            assert_eq!(outcome.status, Status::Fail, "{} on {device:?}", plant.name());
        }
    }
}
