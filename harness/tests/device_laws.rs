//! The laws of gate `meta` as a device is held to them, on a backend that computes in f32 as devices do.

use std::path::PathBuf;

use dormouse_harness::description::OperationOn;
use dormouse_harness::gates::{Context, Status, meta};
use dormouse_harness::ops::ema::EmaOp;
use dormouse_harness::ops::engram::EngramOp;
use dormouse_harness::ops::engram_hash::EngramHashOp;
use dormouse_harness::ops::jepa::JepaOp;
use dormouse_harness::ops::koleo::KoleoOp;
use dormouse_harness::ops::layer_norm::LayerNormOp;
use dormouse_harness::ops::mask_vector::MaskVectorOp;
use dormouse_harness::ops::muon::MuonOp;
use dormouse_harness::ops::retract_all::RetractAllOp;
use dormouse_harness::ops::rms_norm::RmsNormOp;
use dormouse_harness::ops::row_adam::RowAdamOp;
use dormouse_harness::runner::{Fault, Faulty, OnBackend, Plant};
use dormouse_reference::{Precision, Reference};

fn context() -> Context {
    Context {
        seed: 5,
        only: None,
        random_cases: 4,
        production: false,
        golden: PathBuf::new(),
        stop_at_first: true,
        again: String::new(),
    }
}

const DEVICES: [meta::Device; 2] = [
    meta::Device { precision: Precision::Full, other_shapes_same_bits: true },
    meta::Device { precision: Precision::Bf16, other_shapes_same_bits: false },
];

fn green<O: OperationOn<Reference<f32>>>() {
    let runner = OnBackend::new(Reference::<f32>::new);
    for device in DEVICES {
        let outcome = meta::gate_device::<O>(&runner, device, &context());
        assert_eq!(outcome.status, Status::Pass, "{} on {device:?}: {}", O::STEM, outcome.reason);
    }
}

/// The operations of memory, objective and update, which were here before their kernels; `rms_norm` stands for the others.
#[test]
fn operations_obey_them_in_f32() {
    green::<EmaOp>();
    green::<EngramOp>();
    green::<EngramHashOp>();
    green::<JepaOp>();
    green::<KoleoOp>();
    green::<LayerNormOp>();
    green::<MaskVectorOp>();
    green::<MuonOp>();
    green::<RetractAllOp>();
    green::<RmsNormOp>();
    green::<RowAdamOp>();
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
