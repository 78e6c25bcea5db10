//! A device accepts what the reference accepts and refuses what it refuses, in the same words. The gates see good calls
//! only.

mod common;

use dormouse_cuda::Arm;
use dormouse_reference::ema::{self, Ema};
use dormouse_reference::jepa::{self, Jepa};
use dormouse_reference::koleo::{self, Koleo};
use dormouse_reference::layer_norm::{self, LayerNorm};
use dormouse_reference::mask_vector::{self, MaskVector};
use dormouse_reference::{DType, Error, Reference, Result, StepKey, Tensors};

/// What calls came to, in their order.
#[derive(Default)]
struct Ends(Vec<String>);

impl Ends {
    fn note<X>(&mut self, result: Result<X>) {
        self.0.push(match result {
            Ok(_) => "accepted".to_owned(),
            // What a backend stores is its own matter.
            Err(Error::Storage { op, arg, got, .. }) => format!("{op}: `{arg}` is stored as {got}"),
            Err(error) => error.to_string(),
        });
    }
}

fn real<B: Tensors>(b: &B, shape: &[usize]) -> B::Tensor {
    let tensor = b.persistent(shape, b.float()).unwrap();
    b.fill(&tensor, 0.5).unwrap();
    tensor
}

fn whole<B: Tensors>(b: &B, shape: &[usize]) -> B::Tensor {
    b.persistent(shape, DType::U32).unwrap()
}

fn layer_norm<B: LayerNorm>(b: &B) -> Vec<String> {
    let mut ends = Ends::default();
    let [x, wrong, gain, other, empty] = [&[2, 3][..], &[2, 4], &[3], &[4], &[2, 0]].map(|shape| real(b, shape));
    let ids = whole(b, &[2, 3]);
    let params = |gain, bias| layer_norm::Params { gain, bias };
    let (both, none) = (params(Some(&gain), Some(&gain)), params(None, None));
    let forward = |eps, x, params| b.forward(&layer_norm::Config { eps }, layer_norm::Inputs { x }, params);
    for (eps, x, params) in [
        (1e-5, &x, both.clone()),
        (0.0, &x, both.clone()),
        (1e-5, &empty, none.clone()),
        (1e-5, &ids, none.clone()),
        (1e-5, &x, params(Some(&gain), None)),
        (1e-5, &x, params(None, Some(&gain))),
        (1e-5, &x, params(Some(&gain), Some(&other))),
    ] {
        ends.note(forward(eps, x, params));
    }
    let with = forward(1e-5, &x, both).unwrap().1;
    let without = forward(1e-5, &x, none.clone()).unwrap().1;
    let [one, two] = [3, 3].map(|n| real(b, &[n]));
    let both = params(Some(&one), Some(&two));
    for (saved, y, plus, into) in [
        (&with, &x, Some(&x), both.clone()),
        (&with, &wrong, None, both.clone()),
        (&with, &x, Some(&wrong), both.clone()),
        (&with, &x, Some(&ids), both.clone()),
        (&with, &x, None, none.clone()),
        (&with, &x, None, params(Some(&other), Some(&two))),
        (&without, &x, None, both),
        (&without, &x, None, none),
    ] {
        ends.note(b.backward(&layer_norm::Config { eps: 1e-5 }, saved, layer_norm::Outputs { y }, plus, into));
    }
    ends.0
}

fn mask_vector<B: MaskVector>(b: &B) -> Vec<String> {
    let mut ends = Ends::default();
    let [x, wrong, mask, vector, other, empty] =
        [&[2, 3][..], &[2, 4], &[2], &[3], &[4], &[2, 0]].map(|shape| real(b, shape));
    let (words, ids, nothing, config) = (whole(b, &[2]), whole(b, &[2, 3]), real(b, &[0]), mask_vector::Config {});
    let forward = |x, mask, vector| b.forward(&config, mask_vector::Inputs { x, mask }, mask_vector::Params { vector });
    for (x, mask, vector) in [
        (&x, &mask, &vector),
        (&x, &words, &vector),
        (&ids, &mask, &vector),
        (&x, &vector, &vector),
        (&x, &mask, &other),
        (&empty, &mask, &nothing),
    ] {
        ends.note(forward(x, mask, vector));
    }
    let saved = forward(&x, &words, &vector).unwrap().1;
    for (y, vector) in [(&x, &vector), (&wrong, &vector), (&ids, &vector), (&x, &other)] {
        ends.note(b.backward(&config, &saved, mask_vector::Outputs { y }, mask_vector::Params { vector }));
    }
    ends.0
}

fn jepa<B: Jepa>(b: &B) -> Vec<String> {
    let mut ends = Ends::default();
    let [x, wrong, mask, others, empty] = [&[2, 3][..], &[2, 4], &[2], &[3], &[2, 0]].map(|shape| real(b, shape));
    let (words, ids) = (whole(b, &[2]), whole(b, &[2, 3]));
    let forward =
        |eps, prediction, teacher, mask| b.forward(&jepa::Config { eps }, jepa::Inputs { prediction, teacher, mask });
    for (eps, prediction, teacher, mask) in [
        (1e-5, &x, &x, &words),
        (-1.0, &x, &x, &mask),
        (1e-5, &x, &wrong, &mask),
        (1e-5, &x, &ids, &mask),
        (1e-5, &x, &x, &others),
        (1e-5, &empty, &empty, &mask),
    ] {
        ends.note(forward(eps, prediction, teacher, mask));
    }
    let saved = forward(1e-5, &x, &x, &mask).unwrap().1;
    for shape in [&[1][..], &[2], &[1, 1]] {
        ends.note(b.backward(&jepa::Config { eps: 1e-5 }, &saved, jepa::Outputs { loss: &real(b, shape) }));
    }
    ends.0
}

fn koleo<B: Koleo>(b: &B) -> Vec<String> {
    let mut ends = Ends::default();
    let [z, wrong, mask, others, empty] = [&[2, 3][..], &[2, 4], &[2], &[3], &[2, 0]].map(|shape| real(b, shape));
    let ids = whole(b, &[2, 3]);
    let good = koleo::Config { limit: 2, norm_eps: 1e-6, eps: 1e-6 };
    let forward = |config: &koleo::Config, z, mask| b.forward(config, koleo::Inputs { z, mask });
    for (config, z, mask) in [
        (good.clone(), &z, &mask),
        (koleo::Config { limit: usize::MAX, ..good.clone() }, &z, &mask),
        (koleo::Config { limit: 1, ..good.clone() }, &z, &mask),
        (koleo::Config { norm_eps: 0.0, ..good.clone() }, &z, &mask),
        (koleo::Config { eps: f64::INFINITY, ..good.clone() }, &z, &mask),
        (good.clone(), &ids, &mask),
        (good.clone(), &z, &others),
        (good.clone(), &empty, &mask),
    ] {
        ends.note(forward(&config, z, mask));
    }
    let saved = forward(&good, &z, &mask).unwrap().1;
    let [one, two] = [1, 2].map(|n| real(b, &[n]));
    for (loss, plus) in [(&one, Some(&z)), (&two, None), (&one, Some(&wrong)), (&one, Some(&ids))] {
        ends.note(b.backward(&good, &saved, koleo::Outputs { loss }, plus));
    }
    ends.0
}

fn ema<B: Ema>(b: &B) -> Vec<String> {
    let mut ends = Ends::default();
    let [teacher, online, short, one, two] = [4, 4, 3, 1, 2].map(|n| real(b, &[n]));
    let ids = whole(b, &[4]);
    let config = |momentum, range| ema::Config { momentum, ranges: vec![range] };
    for (config, teacher, online, apply) in [
        (config(0.5, 0..4), &teacher, &online, &one),
        (config(1.5, 0..4), &teacher, &online, &one),
        (config(f64::NAN, 0..4), &teacher, &online, &one),
        (config(0.5, 2..5), &teacher, &online, &one),
        (ema::Config { momentum: 0.5, ranges: vec![0..3, 2..4] }, &teacher, &online, &one),
        (config(0.5, 0..4), &teacher, &short, &one),
        (config(0.5, 0..4), &teacher, &online, &two),
        (config(0.5, 0..4), &teacher, &teacher, &one),
        (config(0.5, 0..4), &teacher, &ids, &one),
    ] {
        ends.note(b.update(&config, ema::Inputs { teacher, online, apply }));
    }
    b.step(&StepKey { purpose: "test", variant: 0 }, &mut |b| {
        let scratch = b.scratch(&[4], b.float())?;
        let inputs = ema::Inputs { teacher: &scratch, online: &online, apply: &one };
        ends.note(b.update(&config(0.5, 0..4), inputs));
        Ok(())
    })
    .unwrap();
    ends.0
}

/// Both arms against the reference.
macro_rules! same {
    ($($operation:ident)*) => {$(
        #[test]
        fn $operation() {
            let want = super::$operation(&Reference::<f32>::new());
            assert!(want.iter().any(|end| end == "accepted") && want.iter().any(|end| end != "accepted"));
            for arm in Arm::ALL {
                let Some(b) = common::device() else { return };
                b.set_arms(arm);
                assert_eq!(super::$operation(&b), want, "{arm}");
            }
        }
    )*};
}

mod refuses_what_the_reference_refuses {
    use super::{Arm, Reference, common};

    same!(layer_norm mask_vector jepa koleo ema);
}
