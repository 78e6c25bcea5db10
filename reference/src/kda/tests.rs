//! Hand values, refusals and empty shapes. The gates of the harness do the rest.

use approx::assert_relative_eq;
use ndarray::{ArrayD, IxDyn};

use super::{Config, Form, Grads, Inputs, Kda, Memory, Outputs};
use crate::{Checked, DType, Precision, Reference, Tensor, Tensors};

const FORMS: [Form; 2] = [Form::Recurrent, Form::Chunked { chunk: 2 }];

fn config(form: Form) -> Config {
    Config { scale: Some(1.0), form, checkpoint_every: 2, memory: Memory::Save, precision: Precision::Full }
}

fn tensor(b: &Reference<f64>, shape: &[usize], values: &[f64]) -> Tensor<f64> {
    b.constant(ArrayD::from_shape_vec(IxDyn(shape), values.to_vec()).unwrap())
}

/// q, k, v, g, beta of one head with K = V = 1.
fn scalars(b: &Reference<f64>, q: &[f64], k: &[f64], v: &[f64], g: &[f64], beta: &[f64]) -> Inputs<Tensor<f64>> {
    let wide = [1, q.len(), 1, 1];
    Inputs {
        q: tensor(b, &wide, q),
        k: tensor(b, &wide, k),
        v: tensor(b, &wide, v),
        g: tensor(b, &wide, g),
        beta: tensor(b, &wide[..3], beta),
        b: None,
        w: None,
        cu_seqlens: None,
        initial_state: None,
    }
}

#[test]
fn two_tokens_by_hand() {
    let b = Reference::new();
    // Half is forgotten: S_1 = 1 * (1 * 4) = 4, Sh_2 = 2, u_2 = 0.5 (3 - 2 * 1) = 0.5, S_2 = 2.5.
    let inputs = scalars(&b, &[2.0, 3.0], &[1.0, 1.0], &[4.0, 3.0], &[-1.0, 0.5f64.ln()], &[1.0, 0.5]);
    let d_o = tensor(&b, &[1, 2, 1, 1], &[0.0, 1.0]);
    for form in FORMS {
        let (outputs, saved) = Kda::forward(&b, &config(form), inputs.as_ref()).unwrap();
        assert_relative_eq!(b.download(&outputs.o).unwrap().as_slice().unwrap(), &[8.0, 7.5][..], epsilon = 1e-15);
        assert_relative_eq!(b.download(&outputs.final_state.unwrap()).unwrap()[[0, 0, 0, 0]], 2.5, epsilon = 1e-15);
        // M = q_2 do_2 = 3, z = 3, dv_2 = 1.5, dbeta_2 = 3 (3 - 2) = 3, Dh = 3 - 0.5 * 3 = 1.5,
        // dg_2 = 1.5 * 2 = 3, dv_1 = 0.5 * 1.5 = 0.75, dk_2 = M u - 0.5 Sh z = 1.5 - 3 = -1.5, dq_2 = 2.5.
        let grads: Grads<Tensor<f64>> =
            b.backward(&config(form), &saved, Outputs { o: &d_o, final_state: None }).unwrap();
        let values = |t: &Tensor<f64>| b.download(t).unwrap().into_raw_vec_and_offset().0;
        assert_relative_eq!(&values(&grads.dq)[..], &[0.0, 2.5][..], epsilon = 1e-14);
        assert_relative_eq!(&values(&grads.dk)[1..], &[-1.5][..], epsilon = 1e-14);
        assert_relative_eq!(&values(&grads.dv)[..], &[0.75, 1.5][..], epsilon = 1e-14);
        assert_relative_eq!(&values(&grads.dg)[..], &[0.0, 3.0][..], epsilon = 1e-14);
        assert_relative_eq!(&values(&grads.dbeta)[1..], &[3.0][..], epsilon = 1e-14);
        assert!(grads.dinitial_state.is_none());
    }
}

#[test]
fn nothing_in_nothing_out_and_the_state_passes_through() {
    let b = Reference::new();
    for form in FORMS {
        let state = tensor(&b, &[2, 1, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
        let wide = |width| tensor(&b, &[2, 0, 1, width], &[]);
        let (k, v, beta) = (wide(1), wide(2), tensor(&b, &[2, 0, 1], &[]));
        let inputs = Inputs {
            q: &k,
            k: &k,
            v: &v,
            g: &k,
            beta: &beta,
            b: None,
            w: None,
            cu_seqlens: None,
            initial_state: Some(&state),
        };
        let (outputs, saved) = Kda::forward(&b, &config(form), inputs).unwrap();
        assert_eq!(outputs.o.shape(), [2, 0, 1, 2]);
        let last = outputs.final_state.unwrap();
        assert_eq!(b.download(&last).unwrap(), b.download(&state).unwrap());
        let grads = b.backward(&config(form), &saved, Outputs { o: &v, final_state: Some(&state) }).unwrap();
        assert_eq!(b.download(&grads.dinitial_state.unwrap()).unwrap(), b.download(&state).unwrap());

        let none = tensor(&b, &[0, 3, 1, 1], &[]);
        let beta = tensor(&b, &[0, 3, 1], &[]);
        let inputs = Inputs {
            q: &none,
            k: &none,
            v: &none,
            g: &none,
            beta: &beta,
            b: None,
            w: None,
            cu_seqlens: None,
            initial_state: None,
        };
        let (outputs, saved) = Kda::forward(&b, &config(form), inputs).unwrap();
        assert_eq!(outputs.final_state.unwrap().shape(), [0, 1, 1, 1]);
        let grads = b.backward(&config(form), &saved, Outputs { o: &none, final_state: None }).unwrap();
        assert_eq!(grads.dg.shape(), [0, 3, 1, 1]);
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    let b = Reference::new();
    let good = scalars(&b, &[1.0, 1.0], &[1.0, 1.0], &[1.0, 1.0], &[-1.0, -1.0], &[0.5, 0.5]);
    let forward = |config: &Config, inputs: Inputs<&Tensor<f64>>| match Kda::forward(&b, config, inputs) {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    };
    let recurrent = config(Form::Recurrent);
    let short = tensor(&b, &[1, 1, 1], &[0.5]);
    assert_eq!(
        forward(&recurrent, Inputs { beta: &short, ..good.as_ref() }),
        "kda::forward: `beta` is [1, 1, 1], expected [B, T, HV] = [1, 2, 1] (T from `q`)"
    );
    let empty = tensor(&b, &[1, 2, 1, 0], &[]);
    assert_eq!(forward(&recurrent, Inputs { v: &empty, ..good.as_ref() }), "kda::forward: `v` is [0], expected V >= 1");
    assert_eq!(
        forward(&config(Form::Chunked { chunk: 0 }), good.as_ref()),
        "kda::forward: config `chunk` is 0, expected at least 1"
    );
    assert_eq!(
        forward(&Config { checkpoint_every: 0, ..recurrent.clone() }, good.as_ref()),
        "kda::forward: config `checkpoint_every` is 0, expected at least 1"
    );
    assert_eq!(
        forward(&Config { scale: Some(f64::NAN), ..recurrent.clone() }, good.as_ref()),
        "kda::forward: config `scale` is NaN, expected finite, or none for K^(-1/2)"
    );
    let (_, saved) = Kda::forward(&b, &recurrent, good.as_ref()).unwrap();
    let wrong = tensor(&b, &[1, 2, 1, 2], &[0.0; 4]);
    let error = b.backward(&recurrent, &saved, Outputs { o: &wrong, final_state: None }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kda::backward: `o` is [1, 2, 1, 2], expected [B, T, HV, V] = [1, 2, 1, 1] (V from `v`)"
    );
}

/// A gate that grows instead of forgetting, or is no number, is refused where values are looked at.
#[test]
fn a3_a_positive_gate_is_refused_by_name() {
    for (bad, text) in [(5.0, "5"), (1e-3, "0.001"), (f64::NAN, "NaN")] {
        let b = Checked(Reference::new());
        let inputs = scalars(&b.0, &[1.0, 1.0], &[1.0, 1.0], &[1.0, 1.0], &[-1.0, bad], &[0.5, 0.5]);
        let error = Kda::forward(&b, &config(Form::Recurrent), inputs.as_ref()).err().unwrap();
        let expected = "expected at most 0, the logarithm of a decay (apply the gate first)";
        assert_eq!(error.to_string(), format!("kda::forward: `g`[0, 1, 0, 0] is {text}, {expected}"));
    }
    let b = Checked(Reference::new());
    let cut = scalars(&b.0, &[1.0], &[1.0], &[1.0], &[f64::NEG_INFINITY], &[2.0]);
    assert!(Kda::forward(&b, &config(Form::Recurrent), cut.as_ref()).is_ok());
}

#[test]
fn c1_keys_that_are_not_normalised_are_refused_by_name() {
    let b = Checked(Reference::new());
    let inputs = scalars(&b.0, &[1.0, 1.0], &[1.0, 8.0], &[1.0, 1.0], &[0.0, 0.0], &[1.0, 1.0]);
    let error = Kda::forward(&b, &config(Form::Recurrent), inputs.as_ref()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "kda::forward: `beta`[0, 1, 0] is 1, expected 0 <= beta |k|^2 <= 2 with this token's |k|^2 = 64; normalise k \
         (l2_norm)"
    );
}

/// Two value heads on one key head, a gate by channel in both places, and packed sequences of which one is empty.
#[test]
fn options_by_hand() {
    let b = Reference::new();
    let values = |t: &Tensor<f64>| b.download(t).unwrap().into_raw_vec_and_offset().0;
    let cuts = b.persistent(&[4], DType::U32).unwrap();
    b.upload(ArrayD::from_shape_vec(IxDyn(&[4]), vec![0.0, 1.0, 1.0, 2.0]).unwrap().view(), &cuts).unwrap();
    // K = 2, V = 1, two tokens, each a sequence of its own; the second value head has other gates.
    let inputs = Inputs {
        q: tensor(&b, &[1, 2, 1, 2], &[1.0, 0.0, 1.0, 1.0]),
        k: tensor(&b, &[1, 2, 1, 2], &[1.0, 2.0, 1.0, -1.0]),
        v: tensor(&b, &[1, 2, 2, 1], &[3.0, 5.0, 2.0, 4.0]),
        g: tensor(&b, &[1, 2, 2, 2], &[0.0; 8]),
        beta: tensor(&b, &[1, 2, 2], &[9.0; 4]),
        b: Some(tensor(&b, &[1, 2, 2, 2], &[0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0])),
        w: Some(tensor(&b, &[1, 2, 2, 1], &[1.0, 0.5, 0.5, 2.0])),
        cu_seqlens: Some(cuts),
        initial_state: Some(tensor(&b, &[3, 2, 2, 1], &[2.0, 4.0, 1.0, 1.0, 7.0, 8.0, 7.0, 8.0, 2.0, 6.0, 2.0, 6.0])),
    };
    let d_o = tensor(&b, &[1, 2, 2, 1], &[1.0, 0.0, 0.0, 1.0]);
    for form in FORMS {
        let (outputs, saved) = Kda::forward(&b, &config(form), inputs.as_ref()).unwrap();
        // Head 0: u = 3 - (2 * 0.5 + 4 * 0.5) = 0, so S stays (2, 4); then u = 1 - 2 = -1, S = (1, 7).
        // Head 1: u = 2.5, S = (3.5, 6); then r = (0, -1), u = 8 + 6 = 14, S = (16, -8).
        assert_eq!(values(&outputs.o), [2.0, 3.5, 8.0, 8.0]);
        let last = values(&outputs.final_state.unwrap());
        assert_eq!(last, [2.0, 4.0, 3.5, 6.0, 7.0, 8.0, 7.0, 8.0, 1.0, 7.0, 16.0, -8.0]);
        let grads = b.backward(&config(form), &saved, Outputs { o: &d_o, final_state: None }).unwrap();
        // Token 1 reaches head 0 alone: M = q, z = q . k = 1, dr = -(2, 4), dk = M u + b dr = (-1, -1).
        // Token 2 reaches head 1 alone: M = q, z = 0, so only dk = M u = (14, 14) and dq = S = (16, -8) are left.
        assert_eq!(values(&grads.dq), [2.0, 4.0, 16.0, -8.0]);
        assert_eq!(values(&grads.dk), [-1.0, -1.0, 14.0, 14.0]);
        assert_eq!(values(&grads.dv), [1.0, 0.0, 0.0, 0.0]);
        assert_eq!(values(&grads.db.unwrap()), [-2.0, -8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(values(&grads.dw.unwrap()), [3.0, 0.0, 0.0, 0.0]);
        assert_eq!(values(&grads.dbeta), [0.0; 4]);
        // Dh = M - r z^T; the empty sequence hands on nothing.
        let dinitial = values(&grads.dinitial_state.unwrap());
        assert_eq!(dinitial, [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
    }
}

#[test]
fn e7_head_counts_that_do_not_fit_are_refused() {
    let b = Reference::new();
    let zeros = |shape: &[usize]| tensor(&b, shape, &vec![0.0; shape.iter().product()]);
    let error = |value_heads: usize, gate_heads: usize| {
        let (q, v) = (zeros(&[1, 3, 2, 2]), zeros(&[1, 3, value_heads, 2]));
        let (g, beta) = (zeros(&[1, 3, gate_heads, 2]), zeros(&[1, 3, value_heads]));
        let inputs =
            Inputs { q: &q, k: &q, v: &v, g: &g, beta: &beta, b: None, w: None, cu_seqlens: None, initial_state: None };
        Kda::forward(&b, &config(Form::Recurrent), inputs).err().map(|e| e.to_string())
    };
    assert_eq!(error(4, 4), None);
    for heads in [1, 3] {
        let expected = "expected HV a multiple of H = 2 (H from `q`)";
        assert_eq!(error(heads, heads), Some(format!("kda::forward: `v` is [1, 3, {heads}, 2], {expected}")));
    }
    let expected = "expected [B, T, HV, K] = [1, 3, 4, 2] (HV from `v`)";
    assert_eq!(error(4, 2), Some(format!("kda::forward: `g` is [1, 3, 2, 2], {expected}")));
}

#[test]
fn d4_offsets_that_miss_a_token_are_refused() {
    let b = Reference::new();
    let error = |batch: usize, cuts: &[f64]| {
        let zeros = |shape: &[usize]| tensor(&b, shape, &vec![0.0; shape.iter().product()]);
        let (q, beta) = (zeros(&[batch, 24, 1, 2]), zeros(&[batch, 24, 1]));
        let offsets = b.persistent(&[cuts.len()], DType::U32).unwrap();
        b.upload(ArrayD::from_shape_vec(IxDyn(&[cuts.len()]), cuts.to_vec()).unwrap().view(), &offsets).unwrap();
        let inputs = Inputs {
            q: &q,
            k: &q,
            v: &q,
            g: &q,
            beta: &beta,
            b: None,
            w: None,
            cu_seqlens: Some(&offsets),
            initial_state: None,
        };
        Kda::forward(&b, &config(Form::Recurrent), inputs).err().unwrap().to_string()
    };
    for (cuts, text) in [
        (&[0.0, 20.0][..], "`cu_seqlens`[1] is 20, expected T = 24, so that every token is in a sequence"),
        (&[0.0, 25.0], "`cu_seqlens`[1] is 25, expected T = 24, so that every token is in a sequence"),
        (&[0.0], "`q` is [1, 24, 1, 2], expected T = 0, since `cu_seqlens` names no sequence"),
        (&[1.0, 24.0], "`cu_seqlens`[0] is 1, expected 0, where the first sequence starts"),
        (&[0.0, 9.0, 7.0, 24.0], "`cu_seqlens`[2] is 7, expected at least 9, where the sequence before it starts"),
        (&[], "`cu_seqlens` is [0], expected N + 1 >= 1"),
    ] {
        assert_eq!(error(1, cuts), format!("kda::forward: {text}"));
    }
    assert_eq!(
        error(2, &[0.0, 24.0]),
        "kda::forward: `q` is [2, 24, 1, 2], expected B = 1, since `cu_seqlens` cuts one row into sequences"
    );
}

#[test]
fn gates_out_of_range_are_refused_by_name() {
    let b = Checked(Reference::new());
    let error = |gates: &[f64]| {
        let plain = scalars(&b.0, &[1.0], &[1.0], &[1.0], &[0.0], &[5.0]);
        let wide = tensor(&b.0, &[1, 1, 1, 2], &[1.0, 0.5]);
        let inputs = Inputs {
            q: wide.clone(),
            k: wide.clone(),
            g: tensor(&b.0, &[1, 1, 1, 2], &[0.0, 0.0]),
            b: Some(tensor(&b.0, &[1, 1, 1, 2], gates)),
            ..plain
        };
        Kda::forward(&b, &config(Form::Recurrent), inputs.as_ref()).err().map(|e| e.to_string())
    };
    // Beta stands for w alone here, so it may be what it likes.
    assert_eq!(error(&[1.0, 4.0]), None);
    let expected = "expected b >= 0 and sum_c b_c k_c^2 <= 2 with this token's |k|^2 = 1.25; normalise k (l2_norm)";
    assert_eq!(error(&[2.0, 1.0]), Some(format!("kda::forward: `b`[0, 0, 0, 0] is 2, {expected}")));
    assert_eq!(error(&[1.0, -0.5]), Some(format!("kda::forward: `b`[0, 0, 0, 1] is -0.5, {expected}")));
}
