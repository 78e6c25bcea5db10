//! Cases of docs/cases.md that the public interface of the reference answers, one test a case.

use dormouse_reference::kda::{self, Form, Inputs, Kda, Memory, Outputs};
use dormouse_reference::rms_norm::{self, RmsNorm};
use dormouse_reference::{Checked, DType, Precision, Reference, Scalar, Tensor, Tensors};
use ndarray::{Array2, ArrayD, ArrayView2, IxDyn, s};

/// Numbers between -1 and 1, another row of them for every seed: Knuth's MMIX generator, its high bits.
fn numbers(seed: u64, shape: &[usize]) -> ArrayD<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    ArrayD::from_shape_simple_fn(IxDyn(shape), || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    })
}

fn up<T: Scalar>(b: &Reference<T>, values: &ArrayD<f64>) -> Tensor<T> {
    let tensor = b.persistent(values.shape(), b.float()).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}

fn bits(values: &ArrayD<f64>) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn config(form: Form, checkpoint_every: usize, memory: Memory) -> kda::Config {
    kda::Config { scale: None, form, checkpoint_every, memory, precision: Precision::Full }
}

/// q, k, v, g, beta as host arrays `[1, T, 1, width]`, keys of length at most 1.
struct Host {
    q: ArrayD<f64>,
    k: ArrayD<f64>,
    v: ArrayD<f64>,
    g: ArrayD<f64>,
    beta: ArrayD<f64>,
}

impl Host {
    fn new(t: usize, k: usize, v: usize) -> Host {
        Host {
            q: numbers(1, &[1, t, 1, k]),
            k: numbers(2, &[1, t, 1, k]) / (k as f64).sqrt(),
            v: numbers(3, &[1, t, 1, v]),
            g: numbers(4, &[1, t, 1, k]).mapv(|x| -x.abs()),
            beta: numbers(5, &[1, t, 1]).mapv(f64::abs),
        }
    }

    fn inputs(&self, b: &Reference<f64>) -> Inputs<Tensor<f64>> {
        Inputs {
            q: up(b, &self.q),
            k: up(b, &self.k),
            v: up(b, &self.v),
            g: up(b, &self.g),
            beta: up(b, &self.beta),
            b: None,
            w: None,
            cu_seqlens: None,
            initial_state: None,
        }
    }
}

/// Outputs and gradients of a run, by name.
fn run(
    b: &Reference<f64>,
    config: &kda::Config,
    inputs: &Inputs<Tensor<f64>>,
    d_o: &ArrayD<f64>,
    dstate: Option<&ArrayD<f64>>,
) -> Vec<(&'static str, ArrayD<f64>)> {
    let (outputs, saved) = Kda::forward(b, config, inputs.as_ref()).unwrap();
    let (d_o, dstate) = (up(b, d_o), dstate.map(|x| up(b, x)));
    let upstream = Outputs { o: &d_o, final_state: dstate.as_ref() };
    let grads = Kda::backward(b, config, &saved, upstream).unwrap();
    let down = |x: &Tensor<f64>| b.download(x).unwrap();
    vec![
        ("o", down(&outputs.o)),
        ("final_state", down(&outputs.final_state.unwrap())),
        ("dq", down(&grads.dq)),
        ("dk", down(&grads.dk)),
        ("dv", down(&grads.dv)),
        ("dg", down(&grads.dg)),
        ("dbeta", down(&grads.dbeta)),
    ]
}

/// Keys that nobody normalised, in a storage that cannot hold what comes of them: storage of 16 bits does not exist on
/// the reference, and in f32 the checked interface names the token whose write would overshoot, before the state overflows.
#[test]
fn c2_keys_without_a_norm_in_short_storage_are_refused_by_name() {
    let b = Reference::<f32>::new();
    let error = b.persistent(&[1, 64, 1, 64], DType::Bf16).unwrap_err().to_string();
    assert!(error.contains("stored as bf16, expected f32"), "{error}");
    let wide = [1, 64, 1, 64];
    let inputs = Inputs {
        q: up(&b, &numbers(1, &wide)),
        k: up(&b, &(numbers(2, &wide) * 3f64.sqrt())),
        v: up(&b, &numbers(3, &wide)),
        g: up(&b, &ArrayD::zeros(IxDyn(&wide))),
        beta: up(&b, &ArrayD::ones(IxDyn(&wide[..3]))),
        b: None,
        w: None,
        cu_seqlens: None,
        initial_state: None,
    };
    let form = config(Form::Chunked { chunk: 64 }, 64, Memory::Save);
    // Without the check the numbers do leave the range, so that there is something to refuse.
    let (unchecked, _) = Kda::forward(&b, &form, inputs.as_ref()).unwrap();
    assert!(b.download(&unchecked.o).unwrap().iter().any(|x| !x.is_finite()));
    let error = Kda::forward(&Checked(b), &form, inputs.as_ref()).err().unwrap().to_string();
    assert!(error.contains("`beta`[0, 0, 0] is 1, expected 0 <= beta |k|^2 <= 2"), "{error}");
    assert!(error.contains("normalise k (l2_norm)"), "{error}");
}

/// There is no mask beside the offsets that could win over them; and nothing crosses a boundary.
#[test]
fn d7_nothing_crosses_a_boundary_of_packed_sequences() {
    let b = Reference::<f64>::new();
    let cuts = b.persistent(&[3], DType::U32).unwrap();
    b.upload(ndarray::arr1(&[0.0, 8.0, 16.0]).into_dyn().view(), &cuts).unwrap();
    let host = Host::new(16, 4, 3);
    let mut other = Host::new(16, 4, 3);
    for tensor in [&mut other.q, &mut other.k, &mut other.v, &mut other.g] {
        tensor.slice_mut(s![.., ..8, .., ..]).mapv_inplace(|x| 0.5 * x);
    }
    let mut d_o = numbers(6, &[1, 16, 1, 3]);
    d_o.slice_mut(s![.., ..8, .., ..]).fill(0.0);
    for form in [Form::Recurrent, Form::Chunked { chunk: 16 }] {
        let config = config(form, 16, Memory::Save);
        let of = |host: &Host, packed: bool| {
            let inputs = Inputs { cu_seqlens: packed.then(|| cuts.clone()), ..host.inputs(&b) };
            let all = run(&b, &config, &inputs, &d_o, None);
            // Of the states that of the second sequence, of the rest tokens 8 to 15.
            let late = |(name, x): &(&str, ArrayD<f64>)| match *name {
                "final_state" => bits(&x.slice(s![-1.., .., .., ..]).to_owned().into_dyn()),
                "dbeta" => bits(&x.slice(s![.., 8.., ..]).to_owned().into_dyn()),
                _ => bits(&x.slice(s![.., 8.., .., ..]).to_owned().into_dyn()),
            };
            all.iter().map(late).collect::<Vec<_>>()
        };
        assert_eq!(of(&host, true), of(&other, true), "{form:?}");
        assert_ne!(of(&host, false), of(&other, false), "{form:?}: one sequence does remember");
    }
}

/// Whatever strides a host array has, the operation sees what a contiguous copy holds: a transposed view, every second
/// column, a broadcast row, each as the input and as the upstream gradient.
#[test]
fn e5_any_strides_have_the_bits_of_the_contiguous_copy() {
    let b = Reference::<f64>::new();
    let (tall, wide, row) = (numbers(1, &[6, 4]), numbers(2, &[4, 12]), numbers(3, &[1, 6]));
    let tall: Array2<f64> = tall.into_dimensionality().unwrap();
    let wide: Array2<f64> = wide.into_dimensionality().unwrap();
    let row: Array2<f64> = row.into_dimensionality().unwrap();
    let views: [(&str, ArrayView2<'_, f64>); 3] = [
        ("transposed", tall.t()),
        ("every second column", wide.slice(s![.., ..;2])),
        ("broadcast", row.broadcast((4, 6)).unwrap()),
    ];
    let config = rms_norm::Config { eps: 1e-5 };
    let gain = up(&b, &numbers(4, &[6]));
    let both = |x: ArrayView2<'_, f64>, dy: ArrayView2<'_, f64>| {
        let put = |values: ArrayView2<'_, f64>| {
            let tensor = b.persistent(values.shape(), DType::F64).unwrap();
            b.upload(values.into_dyn(), &tensor).unwrap();
            tensor
        };
        let (x, dy, dgain) = (put(x), put(dy), b.persistent(&[6], DType::F64).unwrap());
        let params = rms_norm::Params { gain: &gain, shift: None };
        let (outputs, saved) = RmsNorm::forward(&b, &config, rms_norm::Inputs { x: &x }, params).unwrap();
        let upstream = rms_norm::Outputs { y: &dy, c: None };
        let into = rms_norm::Params { gain: &dgain, shift: None };
        let grads = RmsNorm::backward(&b, &config, &saved, upstream, into).unwrap();
        [&outputs.y, &grads.dx, &dgain].map(|tensor| bits(&b.download(tensor).unwrap()))
    };
    let plain = numbers(5, &[4, 6]).into_dimensionality().unwrap();
    for (name, view) in views {
        assert!(!view.is_standard_layout(), "{name} is contiguous, so it shows nothing");
        // Row by row, so that no strides are kept.
        let copy = Array2::from_shape_fn(view.raw_dim(), |at| view[at]);
        assert_eq!(both(view, plain.view()), both(copy.view(), plain.view()), "{name} input");
        assert_eq!(both(plain.view(), view), both(plain.view(), copy.view()), "{name} upstream gradient");
    }
}

/// Recomputing keeps every bit, whichever outputs have a gradient; gradients of two outputs add up; and one tensor may
/// be query and key at once, each with its own gradient.
#[test]
fn h5_recomputing_keeps_every_bit_whatever_is_asked_for() {
    let b = Reference::<f64>::new();
    let host = Host::new(11, 4, 3);
    let (d_o, dstate) = (numbers(6, &[1, 11, 1, 3]), numbers(7, &[1, 1, 4, 3]));
    let nothing = ArrayD::zeros(d_o.raw_dim());
    for form in [Form::Recurrent, Form::Chunked { chunk: 4 }] {
        let inputs = host.inputs(&b);
        let of = |every: usize, memory: Memory, d_o: &ArrayD<f64>, dstate: Option<&ArrayD<f64>>| {
            run(&b, &config(form, every, memory), &inputs, d_o, dstate)
        };
        for (what, d_o, dstate) in
            [("o", &d_o, None), ("final_state", &nothing, Some(&dstate)), ("both", &d_o, Some(&dstate))]
        {
            let saved = of(4, Memory::Save, d_o, dstate);
            for (every, memory) in [(4, Memory::Recompute), (8, Memory::Save), (64, Memory::Recompute)] {
                for ((name, got), (_, want)) in of(every, memory, d_o, dstate).iter().zip(&saved) {
                    assert_eq!(bits(got), bits(want), "{form:?} {name} of {what}, {memory:?} every {every}");
                }
            }
        }
        let [one, other, both] = [(&d_o, None), (&nothing, Some(&dstate)), (&d_o, Some(&dstate))]
            .map(|(d_o, dstate)| of(4, Memory::Save, d_o, dstate));
        for (((name, one), (_, other)), (_, both)) in one.iter().zip(&other).zip(&both).skip(2) {
            // Sums of at most 11 tokens of numbers of size 1.
            for ((a, b), c) in one.iter().zip(other).zip(both) {
                assert!((a + b - c).abs() < 1e-13, "{form:?} {name}: {a} + {b} is not {c}");
            }
        }
        // One handle for both, against two handles that hold the same numbers.
        let shared = Inputs { q: inputs.k.clone(), ..inputs.clone() };
        let apart = Inputs { q: up(&b, &host.k), ..inputs.clone() };
        let config = config(form, 4, Memory::Recompute);
        let twice = [&shared, &apart].map(|inputs| run(&b, &config, inputs, &d_o, Some(&dstate)));
        for ((name, got), (_, want)) in twice[0].iter().zip(&twice[1]) {
            assert_eq!(bits(got), bits(want), "{form:?} {name} of a shared tensor");
        }
    }
}
