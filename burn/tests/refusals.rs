//! The twins accept what the reference accepts and refuse what it refuses, with the same kind of error about the same
//! argument. Gate `oracle` sees good calls only.

use std::cell::RefCell;

use dormouse_burn::Cpu64;
use dormouse_reference::engram::{self, Engram};
use dormouse_reference::engram_hash::{self, EngramHash};
use dormouse_reference::jepa::{self, Jepa};
use dormouse_reference::kda::{self, Form, Kda, Memory};
use dormouse_reference::koleo::{self, Koleo};
use dormouse_reference::layer_norm::{self, LayerNorm};
use dormouse_reference::mask_vector::{self, MaskVector};
use dormouse_reference::row_adam::{self, RowAdam};
use dormouse_reference::spectral::{self, Spectral};
use dormouse_reference::{Backend, DType, Error, FactorFormat, Precision, Reference, Result};
use ndarray::{ArrayD, IxDyn};

/// How a call ended, without its words: accepted, or the kind of error and what it is about.
fn end<X>(result: Result<X>) -> String {
    match result {
        Ok(_) => "accepted".to_owned(),
        Err(Error::Shape { op, arg, .. }) => format!("{op}: shape of {arg}"),
        Err(Error::Storage { op, arg, .. }) => format!("{op}: storage of {arg}"),
        Err(Error::Value { op, arg, .. }) => format!("{op}: value of {arg}"),
        Err(Error::Config { op, field, .. }) => format!("{op}: config {field}"),
        Err(Error::Presence { op, arg, got, .. }) => format!("{op}: {arg} is {got}"),
        Err(Error::NotPersistent { op, arg }) => format!("{op}: {arg} is scratch"),
        Err(Error::Aliased { op, arg, other }) => format!("{op}: {arg} is {other}"),
        Err(other) => format!("{other}"),
    }
}

/// Tensors of a backend, and what its calls came to.
struct Calls<B: Backend> {
    b: B,
    ends: RefCell<Vec<String>>,
}

impl<B: Backend> Calls<B> {
    fn real(&self, shape: &[usize]) -> B::Tensor {
        let tensor = self.b.persistent(shape, self.b.float()).expect("memory");
        self.b.fill(&tensor, 0.5).expect("a fill");
        tensor
    }

    fn whole(&self, shape: &[usize], values: &[u32]) -> B::Tensor {
        let tensor = self.b.persistent(shape, DType::U32).expect("memory");
        let values = values.iter().map(|&x| f64::from(x)).collect();
        let values = ArrayD::from_shape_vec(IxDyn(shape), values).expect("values fill their shape");
        self.b.upload(values.view(), &tensor).expect("an upload");
        tensor
    }

    fn note<X>(&self, result: Result<X>) {
        self.ends.borrow_mut().push(end(result));
    }

    fn layer_norm(&self) {
        let b = &self.b;
        let [x, wrong, width, other] = [&[2, 3][..], &[2, 4], &[3], &[4]].map(|shape| self.real(shape));
        let params = |gain, bias| layer_norm::Params { gain, bias };
        let empty = self.real(&[2, 0]);
        let (both, none) = (params(Some(&width), Some(&width)), params(None, None));
        let forward =
            |eps, x, params| LayerNorm::forward(b, &layer_norm::Config { eps }, layer_norm::Inputs { x }, params);
        for (eps, x, params) in [
            (1e-5, &x, both.clone()),
            (1e-5, &x, none.clone()),
            (0.0, &x, both.clone()),
            (f64::INFINITY, &x, both.clone()),
            (1e-5, &empty, none.clone()),
            (1e-5, &x, params(Some(&width), None)),
            (1e-5, &x, params(None, Some(&width))),
            (1e-5, &x, params(Some(&other), Some(&width))),
            (1e-5, &x, params(Some(&width), Some(&other))),
        ] {
            self.note(forward(eps, x, params));
        }
        let with = forward(1e-5, &x, both.clone()).expect("a good call").1;
        let without = forward(1e-5, &x, none.clone()).expect("a good call").1;
        let config = layer_norm::Config { eps: 1e-5 };
        let width = self.real(&[3]);
        let both = params(Some(&width), Some(&width));
        for (saved, y, plus, into) in [
            (&with, &x, Some(&x), both.clone()),
            (&with, &wrong, None, both.clone()),
            (&with, &x, Some(&wrong), both.clone()),
            (&with, &x, None, none.clone()),
            (&with, &x, None, params(Some(&width), None)),
            (&with, &x, None, params(Some(&other), Some(&width))),
            (&without, &x, None, both.clone()),
            (&without, &x, None, none),
        ] {
            self.note(LayerNorm::backward(b, &config, saved, layer_norm::Outputs { y }, plus, into));
        }
    }

    fn mask_vector(&self) {
        let b = &self.b;
        let [x, wrong, rows, width, other] = [&[2, 3][..], &[2, 4], &[2], &[3], &[4]].map(|shape| self.real(shape));
        let forward = |x, mask, vector| {
            let (inputs, params) = (mask_vector::Inputs { x, mask }, mask_vector::Params { vector });
            MaskVector::forward(b, &mask_vector::Config {}, inputs, params)
        };
        let (empty, nothing) = (self.real(&[2, 0]), self.real(&[0]));
        let ids = self.whole(&[2], &[0, 1]);
        for (x, mask, vector) in [
            (&x, &rows, &width),
            (&x, &ids, &width),
            (&x, &width, &width),
            (&x, &rows, &other),
            (&empty, &rows, &nothing),
        ] {
            self.note(forward(x, mask, vector));
        }
        let saved = forward(&x, &rows, &width).expect("a good call").1;
        let width = self.real(&[3]);
        for (y, vector) in [(&x, &width), (&wrong, &width), (&x, &other)] {
            let into = mask_vector::Params { vector };
            self.note(MaskVector::backward(b, &mask_vector::Config {}, &saved, mask_vector::Outputs { y }, into));
        }
    }

    fn jepa(&self) {
        let b = &self.b;
        let [x, wrong, rows, others] = [&[2, 3][..], &[2, 4], &[2], &[3]].map(|shape| self.real(shape));
        let forward = |eps, prediction, teacher, mask| {
            Jepa::forward(b, &jepa::Config { eps }, jepa::Inputs { prediction, teacher, mask })
        };
        let empty = self.real(&[2, 0]);
        for (eps, prediction, teacher, mask) in [
            (1e-5, &x, &x, &rows),
            (f64::NAN, &x, &x, &rows),
            (-1.0, &x, &x, &rows),
            (1e-5, &x, &wrong, &rows),
            (1e-5, &x, &x, &others),
            (1e-5, &empty, &empty, &rows),
        ] {
            self.note(forward(eps, prediction, teacher, mask));
        }
        let saved = forward(1e-5, &x, &x, &rows).expect("a good call").1;
        for shape in [&[1][..], &[2], &[1, 1]] {
            let loss = &self.real(shape);
            self.note(Jepa::backward(b, &jepa::Config { eps: 1e-5 }, &saved, jepa::Outputs { loss }));
        }
    }

    fn koleo(&self) {
        let b = &self.b;
        let [z, wrong, rows, others] = [&[2, 3][..], &[2, 4], &[2], &[3]].map(|shape| self.real(shape));
        let empty = self.real(&[2, 0]);
        let good = koleo::Config { limit: 2, norm_eps: 1e-6, eps: 1e-6 };
        let forward = |config: &koleo::Config, z, mask| Koleo::forward(b, config, koleo::Inputs { z, mask });
        for (config, z, mask) in [
            (good.clone(), &z, &rows),
            (koleo::Config { limit: 1, ..good.clone() }, &z, &rows),
            (koleo::Config { norm_eps: 0.0, ..good.clone() }, &z, &rows),
            (koleo::Config { eps: f64::INFINITY, ..good.clone() }, &z, &rows),
            (good.clone(), &z, &others),
            (good.clone(), &empty, &rows),
        ] {
            self.note(forward(&config, z, mask));
        }
        let saved = forward(&good, &z, &rows).expect("a good call").1;
        let [one, two] = [&[1], &[2]].map(|shape| self.real(shape));
        for (loss, plus) in [(&one, Some(&z)), (&two, None), (&one, Some(&wrong))] {
            self.note(Koleo::backward(b, &good, &saved, koleo::Outputs { loss }, plus));
        }
    }

    fn engram(&self) {
        let b = &self.b;
        let good = engram::Config { eps: 1e-5, gate_eps: 1e-2, precision: Precision::Full };
        let [c, table, weight, wrong] = [&[2, 4][..], &[5, 3], &[6, 4], &[4, 4]].map(|shape| self.real(shape));
        let rows = self.whole(&[2, 2], &[4, 0, 0, 1]);
        let (order, unsorted) = (self.whole(&[4], &[1, 2, 3, 0]), self.whole(&[4], &[2, 1, 3, 0]));
        let (no_rows, of_floats) = (self.real(&[0, 3]), self.real(&[2, 2]));
        let (beyond, fewer) = (self.whole(&[2, 2], &[0, 1, 5, 2]), self.whole(&[1, 2], &[0, 1]));
        let short = self.whole(&[3], &[1, 2, 3]);
        let params = |table, key, value| engram::Params { table, key, value };
        let all = params(&table, &weight, &weight);
        let forward = |config: &engram::Config, c, rows, order, params| {
            Engram::forward(b, config, engram::Inputs { c, rows, order }, params)
        };
        for (config, c, rows, order, params) in [
            (good.clone(), &c, &rows, Some(&order), all.clone()),
            (good.clone(), &c, &rows, None, all.clone()),
            (engram::Config { precision: Precision::Bf16, ..good.clone() }, &c, &rows, None, all.clone()),
            (engram::Config { eps: 0.0, ..good.clone() }, &c, &rows, None, all.clone()),
            (engram::Config { gate_eps: 0.0, ..good.clone() }, &c, &rows, None, all.clone()),
            (good.clone(), &c, &of_floats, None, all.clone()),
            (good.clone(), &c, &beyond, None, all.clone()),
            (good.clone(), &c, &fewer, None, all.clone()),
            (good.clone(), &c, &rows, Some(&short), all.clone()),
            (good.clone(), &c, &rows, None, params(&table, &wrong, &weight)),
            (good.clone(), &c, &rows, None, params(&table, &weight, &wrong)),
            (good.clone(), &c, &rows, None, params(&no_rows, &weight, &weight)),
        ] {
            self.note(forward(&config, c, rows, order, params));
        }
        let [m, other] = [&c, &self.real(&[2, 5])].map(Clone::clone);
        let saved = |order| forward(&good, &c, &rows, order, all.clone()).expect("a good call").1;
        let real = self.real(&[4]);
        let [table, weight, more] = [&[5, 3], &[6, 4], &[6, 4]].map(|shape| self.real(shape));
        let all = params(&table, &weight, &more);
        for (order, m, plus, into) in [
            (Some(&order), &m, Some(&c), all.clone()),
            (None, &m, None, all.clone()),
            (Some(&unsorted), &m, None, all.clone()),
            (Some(&real), &m, None, all.clone()),
            (Some(&order), &other, None, all.clone()),
            (Some(&order), &m, Some(&other), all.clone()),
            (Some(&order), &m, None, params(&wrong, &weight, &more)),
            (Some(&order), &m, None, params(&table, &weight, &wrong)),
        ] {
            self.note(Engram::backward(b, &good, &saved(order), engram::Outputs { m }, plus, into));
        }
    }

    fn engram_hash(&self) {
        let b = &self.b;
        let ids = self.whole(&[2, 2], &[0, 256, 7, 1]);
        let (few, many) = (self.real(&[2, 2]), self.real(&[2, 3]));
        for (rows, ids, mask) in [
            (16, &ids, None),
            (16, &ids, Some(&few)),
            (16, &ids, Some(&self.whole(&[2, 2], &[0, 1, 1, 0]))),
            (0, &ids, None),
            (u32::MAX as usize / 3 + 1, &ids, None),
            (16, &few, None),
            (16, &self.whole(&[2, 2], &[0, 1, 2, 257]), None),
            (16, &self.whole(&[2], &[0, 1]), None),
            (16, &ids, Some(&many)),
        ] {
            self.note(EngramHash::forward(b, &engram_hash::Config { rows }, engram_hash::Inputs { ids, mask }));
        }
    }

    fn row_adam(&self) {
        let b = &self.b;
        let good = row_adam::Config { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
        let [table, grads, m, v] = [(); 4].map(|()| self.real(&[3, 2]));
        let (counts, rows) = (self.whole(&[3], &[0, 1, 2]), self.whole(&[2], &[2, 0]));
        let (order, lr) = (self.whole(&[2], &[1, 0]), self.real(&[1]));
        let state = row_adam::State { table: &table, grads: &grads, m: &m, v: &v, counts: &counts };
        let touched = row_adam::Touched { rows: &rows, order: &order };
        let scalars = row_adam::Scalars { lr: &lr, scale: &lr, apply: &lr };
        let (square, real) = (self.real(&[2, 2]), self.real(&[3]));
        let scratch = b.scratch(&[3, 2], b.float()).expect("memory");
        let bytes = b.persistent(&[3], DType::U8).expect("memory");
        for config in [
            good.clone(),
            row_adam::Config { beta1: 1.0, ..good.clone() },
            row_adam::Config { beta2: -0.1, ..good.clone() },
            row_adam::Config { eps: 0.0, ..good.clone() },
        ] {
            self.note(RowAdam::update(b, &config, state.clone(), touched.clone(), scalars.clone()));
        }
        for state in [
            row_adam::State { m: &square, ..state.clone() },
            row_adam::State { v: &m, ..state.clone() },
            row_adam::State { table: &scratch, ..state.clone() },
            row_adam::State { grads: &scratch, ..state.clone() },
            row_adam::State { counts: &rows, ..state.clone() },
            row_adam::State { counts: &real, ..state.clone() },
            row_adam::State { counts: &bytes, ..state.clone() },
        ] {
            self.note(RowAdam::update(b, &good, state, touched.clone(), scalars.clone()));
        }
        for (rows, order) in [
            (&rows, &self.whole(&[1], &[0])),
            (&rows, &self.whole(&[2], &[0, 1])),
            (&self.whole(&[2], &[3, 0]), &order),
            (&lr, &order),
            (&rows, &self.real(&[2])),
        ] {
            self.note(RowAdam::update(b, &good, state.clone(), row_adam::Touched { rows, order }, scalars.clone()));
        }
        for scalars in [
            row_adam::Scalars { lr: &real, ..scalars.clone() },
            row_adam::Scalars { apply: &self.whole(&[1], &[1]), ..scalars.clone() },
        ] {
            self.note(RowAdam::update(b, &good, state.clone(), touched.clone(), scalars));
        }
    }

    fn kda(&self) {
        let b = &self.b;
        let good = kda::Config {
            scale: None,
            form: Form::Recurrent,
            checkpoint_every: 4,
            memory: Memory::Save,
            precision: Precision::Full,
        };
        // B, T, H, HV, K, V = 1, 5, 2, 4, 3, 2.
        let [q, v, g, beta] =
            [&[1, 5, 2, 3][..], &[1, 5, 4, 2], &[1, 5, 4, 3], &[1, 5, 4]].map(|shape| self.real(shape));
        let [state, states] = [&[1, 4, 3, 2], &[3, 4, 3, 2]].map(|shape| self.real(shape));
        let cuts = self.whole(&[4], &[0, 2, 2, 5]);
        let all = kda::Inputs {
            q: &q,
            k: &q,
            v: &v,
            g: &g,
            beta: &beta,
            b: Some(&g),
            w: Some(&v),
            cu_seqlens: Some(&cuts),
            initial_state: Some(&states),
        };
        let few = kda::Inputs { b: None, w: None, cu_seqlens: None, initial_state: Some(&state), ..all.clone() };
        for config in [
            good.clone(),
            kda::Config { form: Form::Chunked { chunk: 0 }, ..good.clone() },
            kda::Config { checkpoint_every: 0, ..good.clone() },
            kda::Config { scale: Some(f64::NAN), ..good.clone() },
            kda::Config { precision: Precision::Tf32, ..good.clone() },
        ] {
            self.note(Kda::forward(b, &config, all.clone()));
        }
        let [odd, two, three, narrow] =
            [&[1, 5, 3, 2][..], &[2, 5, 2, 3], &[1, 5, 3, 3], &[1, 5, 4, 1]].map(|shape| self.real(shape));
        let odd_beta = self.real(&[1, 5, 3]);
        let pair = [&[2, 5, 4, 2][..], &[2, 5, 4, 3], &[2, 5, 4]].map(|shape| self.real(shape));
        for inputs in [
            few.clone(),
            kda::Inputs { v: &odd, g: &three, beta: &odd_beta, initial_state: None, ..few.clone() },
            kda::Inputs { b: Some(&narrow), ..all.clone() },
            kda::Inputs { w: Some(&narrow), ..all.clone() },
            kda::Inputs { initial_state: Some(&state), ..all.clone() },
            kda::Inputs { initial_state: Some(&states), ..few.clone() },
            kda::Inputs { q: &two, k: &two, v: &pair[0], g: &pair[1], beta: &pair[2], b: None, w: None, ..all.clone() },
            kda::Inputs { cu_seqlens: Some(&self.real(&[4])), ..all.clone() },
            kda::Inputs { cu_seqlens: Some(&self.whole(&[0], &[])), ..all.clone() },
            kda::Inputs { cu_seqlens: Some(&self.whole(&[4], &[1, 2, 2, 5])), ..all.clone() },
            kda::Inputs { cu_seqlens: Some(&self.whole(&[4], &[0, 3, 2, 5])), ..all.clone() },
            kda::Inputs { cu_seqlens: Some(&self.whole(&[4], &[0, 2, 2, 4])), ..all.clone() },
            kda::Inputs { cu_seqlens: Some(&self.whole(&[4], &[0, 2, 2, 6])), ..all.clone() },
        ] {
            self.note(Kda::forward(b, &good, inputs));
        }
        let saved = Kda::forward(b, &good, all).expect("a good call").1;
        for (o, final_state) in [(&v, Some(&states)), (&v, None), (&g, None), (&v, Some(&state))] {
            self.note(Kda::backward(b, &good, &saved, kda::Outputs { o, final_state }));
        }
    }

    fn formats(&self) {
        let b = &self.b;
        let [x, u, s, v] = [&[2, 3][..], &[3, 2], &[2], &[4, 2]].map(|shape| self.real(shape));
        let params = spectral::Params { u: &u, s: &s, v: &v };
        for format in FactorFormat::ALL {
            for precision in [Precision::Full, Precision::Tf32] {
                let config = spectral::Config { precision, format };
                self.note(Spectral::forward(b, &config, spectral::Inputs { x: &x }, params.clone()));
            }
        }
    }
}

fn ends<B: Backend>(b: B, of: fn(&Calls<B>)) -> Vec<String> {
    let calls = Calls { b, ends: RefCell::default() };
    of(&calls);
    calls.ends.into_inner()
}

/// Runs the calls of one operation on both; this many of them must be accepted, the others must not.
macro_rules! agree {
    ($operation:ident, $accepted:literal) => {
        let (ours, theirs) = (ends(Cpu64::new(), Calls::$operation), ends(Reference::<f64>::new(), Calls::$operation));
        assert_eq!(ours, theirs, "{}", stringify!($operation));
        let accepted = theirs.iter().filter(|end| *end == "accepted").count();
        assert_eq!(accepted, $accepted, "{}: {theirs:?}", stringify!($operation));
    };
}

#[test]
fn what_the_reference_refuses_is_refused_alike() {
    agree!(layer_norm, 4);
    agree!(mask_vector, 3);
    agree!(jepa, 2);
    agree!(koleo, 2);
    agree!(engram, 3);
    agree!(engram_hash, 3);
    agree!(row_adam, 2);
    agree!(kda, 4);
    agree!(formats, 5);
}
