//! `expert`: E feed-forward networks side by side, each between two spectral maps.
//!
//! For every expert e, with `Spectral(x; U, s, V) = ((x U) * s) V^T` and `silu(x) = x sigma(x)`:
//!
//! ```text
//! h   = Spectral(u; up)                                    [.., F]
//! act = silu(h)                                            with Ffn::Silu
//! act = silu(g) * h,   g = Spectral(u; gate)               with Ffn::Swiglu
//! y_e = Spectral(act; down)                                [.., D]
//! ```
//!
//! Adjoint, with dy_e the gradient of y_e and silu'(x) = sigma(x) (1 + x (1 - sigma(x))):
//!
//! ```text
//! dact = adjoint of down at dy_e
//! dh   = dact * silu'(h)                                   with Ffn::Silu
//! dh   = dact * silu(g),   dg = dact * h * silu'(g)        with Ffn::Swiglu
//! du   = sum_e (adjoint of up at dh + adjoint of gate at dg) + plus
//! ```
//!
//! The adjoint of the spectral map is in [`spectral`]. `plus` is the gradient of u that its other
//! readers gave; experts are added to it in order. Mixing the experts is the business of `blend`.
//!
//! Sources: Hendrycks and Gimpel, *Gaussian Error Linear Units*, arXiv 1606.08415 (silu); Shazeer, *GLU Variants Improve
//! Transformer*, arXiv 2002.05202 (swiglu).

use ndarray::{Array2, Array3, Axis, Ix2, Ix3, Zip};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, Values, full_precision};
use crate::dims::{Dims, stacked};
use crate::error::{Error, Result};
use crate::factor_format::FactorFormat;
use crate::fields;
use crate::scalar::Scalar;
use crate::spectral::{self, FactorGrads, Factors};
use crate::tensor::{Precision, Tensors};

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The arithmetic of the matrix products.
    pub precision: Precision,
    /// What happens between the two maps.
    pub ffn: Ffn,
    /// What the factors of every map are rounded to where the maths uses them, as in [`spectral`].
    pub format: FactorFormat,
}

/// The nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ffn {
    /// `silu(up)`: no gate parameters.
    Silu,
    /// `silu(gate) * up`: the gate parameters are required.
    Swiglu,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., D]`
        u
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[E, D, R]`
        up_u,
        /// `[E, R]`
        up_s,
        /// `[E, F, R]`
        up_v,
        /// `[E, F, R]`
        down_u,
        /// `[E, R]`
        down_s,
        /// `[E, D, R]`
        down_v;
        optional
        /// `[E, D, R]`; the three gate parameters are present exactly with [`Ffn::Swiglu`].
        gate_u,
        /// `[E, R]`
        gate_s,
        /// `[E, F, R]`
        gate_v
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[E, .., D]`
        y
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., D]`
        du
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the parameters do not fit `u` or each other, if E, D, F or R is zero, or if an upstream gradient, `plus` or
/// a tensor of `into` has another shape than what it is the gradient of; `Presence` if the gate parameters do not fit
/// the config; `Config` if the backend lacks the precision or the format.
pub trait Expert: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Runs every expert on every row.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `u`, with `plus` (`[.., D]`) added, and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        plus: Option<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the inputs and, for every expert, the activation with its derivatives.
pub struct Saved<T> {
    u: Tensor<T>,
    params: Params<Tensor<T>>,
    experts: Vec<SavedExpert<T>>,
}

/// One expert's intermediates; the derivatives are taken where sigma is at hand, so the backward pass has no exponential.
struct SavedExpert<T> {
    /// u U of up, `[N, R]`.
    up_a: Array2<T>,
    /// u U of gate, `[N, R]`.
    gate_a: Option<Array2<T>>,
    activation: Activation<T>,
    /// act U of down, `[N, R]`.
    down_a: Array2<T>,
}

/// The activation and its derivatives, all `[N, F]`.
struct Activation<T> {
    act: Array2<T>,
    /// d act / d h.
    by_up: Array2<T>,
    /// d act / d g, with a gate.
    by_gate: Option<Array2<T>>,
}

impl<T: Scalar> Expert for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "expert::forward";
        full_precision(OP, config.precision)?;
        check_gate(OP, config.ffn, &params)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("u", inputs.u.shape(), "N", &["D"])?;
        bind_params(&mut dims, params.clone().map(|_, p| p.shape()))?;
        dims.positive(&["D", "E", "R", "F"])?;
        let (rows, width, hidden) = (dims.get("N"), dims.get("D"), dims.get("F"));
        let u = self.read(OP, "u", inputs.u)?;
        let values = params.clone().try_map(|arg, p| self.read(OP, arg, p))?;
        let mut y = Array3::zeros((dims.get("E"), rows, width));
        let experts = y
            .outer_iter_mut()
            .enumerate()
            .map(|(e, y)| {
                let maps = Maps::of(config.format, &values, e);
                let mut h = Array2::zeros((rows, hidden));
                let up_a = spectral::forward(u.rows(), &maps.up, h.view_mut());
                let (gate_a, activation) = match &maps.gate {
                    None => (None, silu(h)),
                    Some(gate) => {
                        let mut g = Array2::zeros((rows, hidden));
                        let gate_a = spectral::forward(u.rows(), gate, g.view_mut());
                        (Some(gate_a), swiglu(h, g))
                    }
                };
                let down_a = spectral::forward(activation.act.view(), &maps.down, y);
                SavedExpert { up_a, gate_a, activation, down_a }
            })
            .collect();
        let shape = [&[dims.get("E")], inputs.u.shape()].concat();
        let outputs = Outputs { y: self.adopt(y, &shape) };
        Ok((outputs, Saved { u: inputs.u.clone(), params: params.map(|_, p| p.clone()), experts }))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        plus: Option<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "expert::backward";
        full_precision(OP, config.precision)?;
        check_gate(OP, config.ffn, &saved.params)?;
        check_gate(OP, config.ffn, &into)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("u", saved.u.shape(), "N", &["D"])?;
        bind_params(&mut dims, saved.params.as_ref().map(|_, p| p.shape()))?;
        bind_params(&mut dims, into.clone().map(|_, p| p.shape()))?;
        dims.bind("y", &stacked(upstream.y.shape()), &["E", "N", "D"])?;
        let mut du = match plus {
            Some(plus) => {
                dims.bind_rows("plus", plus.shape(), "N", &["D"])?;
                self.read(OP, "plus", plus)?.rows().to_owned()
            }
            None => Array2::zeros((dims.get("N"), dims.get("D"))),
        };
        let u = self.read(OP, "u", &saved.u)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let dy = dy.view().into_shape_with_order((dims.get("E"), dims.get("N"), dims.get("D")));
        let dy = dy.expect("the shape was bound");
        let values = saved.params.as_ref().try_map(|arg, p| self.read(OP, arg, p))?;
        for (e, expert) in saved.experts.iter().enumerate() {
            let maps = Maps::of(config.format, &values, e);
            let activation = &expert.activation;
            let mut dact = Array2::zeros(activation.act.raw_dim());
            let down = spectral::backward(
                activation.act.view(),
                expert.down_a.view(),
                &maps.down,
                dy.index_axis(Axis(0), e),
                dact.view_mut(),
            );
            self.accumulate_expert(
                OP,
                e,
                ["down_u", "down_s", "down_v"],
                [into.down_u, into.down_s, into.down_v],
                down,
            )?;

            let dg = activation.by_gate.as_ref().map(|by_gate| product(&dact, by_gate));
            let mut dh = dact;
            Zip::from(&mut dh).and(&activation.by_up).par_for_each(|dh, &by_up| *dh *= by_up);
            let up = spectral::backward(u.rows(), expert.up_a.view(), &maps.up, dh.view(), du.view_mut());
            self.accumulate_expert(OP, e, ["up_u", "up_s", "up_v"], [into.up_u, into.up_s, into.up_v], up)?;
            if let (Some(dg), Some(gate), Some(gate_a)) = (dg, &maps.gate, &expert.gate_a)
                && let (Some(into_u), Some(into_s), Some(into_v)) = (into.gate_u, into.gate_s, into.gate_v)
            {
                let gate = spectral::backward(u.rows(), gate_a.view(), gate, dg.view(), du.view_mut());
                self.accumulate_expert(OP, e, ["gate_u", "gate_s", "gate_v"], [into_u, into_s, into_v], gate)?;
            }
        }
        Ok(Grads { du: self.adopt(du, saved.u.shape()) })
    }
}

impl<T: Scalar> Reference<T> {
    /// Adds one map's gradients to expert `e` of the tensors `into` (u, s, v).
    fn accumulate_expert(
        &self,
        op: &'static str,
        e: usize,
        names: [&'static str; 3],
        into: [&Tensor<T>; 3],
        grads: FactorGrads<T>,
    ) -> Result<()> {
        let part = |into: &Tensor<T>, shape: &[usize]| self.view(into, e * shape.iter().product::<usize>(), shape);
        self.accumulate(op, names[0], &part(into[0], grads.u.shape())?, &grads.u)?;
        self.accumulate(op, names[1], &part(into[1], grads.s.shape())?, &grads.s)?;
        self.accumulate(op, names[2], &part(into[2], grads.v.shape())?, &grads.v)
    }
}

impl<B: Expert> Expert for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "expert::forward";
        self.finite(OP, inputs.clone().named())?;
        self.finite(OP, params.clone().named())?;
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        plus: Option<&B::Tensor>,
        into: Params<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        const OP: &str = "expert::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.map(|plus| ("plus", plus)))?;
        self.0.backward(config, saved, upstream, plus, into)
    }
}

/// The maps of one expert.
struct Maps<'a, T> {
    up: Factors<'a, T>,
    gate: Option<Factors<'a, T>>,
    down: Factors<'a, T>,
}

impl<'a, T: Scalar> Maps<'a, T> {
    fn of(format: FactorFormat, values: &'a Params<Values<'_, T>>, e: usize) -> Self {
        let factors = |u: &'a Values<'_, T>, s: &'a Values<'_, T>, v: &'a Values<'_, T>| {
            let [u, v] = [u, v].map(|x| x.dims::<Ix3>().index_axis_move(Axis(0), e));
            Factors::new(format, u, s.dims::<Ix2>().index_axis_move(Axis(0), e), v)
        };
        let gate = match (&values.gate_u, &values.gate_s, &values.gate_v) {
            (Some(u), Some(s), Some(v)) => Some(factors(u, s, v)),
            _ => None,
        };
        Self {
            up: factors(&values.up_u, &values.up_s, &values.up_v),
            gate,
            down: factors(&values.down_u, &values.down_s, &values.down_v),
        }
    }
}

/// Refuses a gate where the kind of map has none, and its absence where it has one. For backends of their own too, as is
/// [`bind_params`].
///
/// # Errors
/// `Presence`, which names the argument.
pub fn check_gate<X>(op: &'static str, ffn: Ffn, params: &Params<X>) -> Result<()> {
    let present =
        [("gate_u", params.gate_u.is_some()), ("gate_s", params.gate_s.is_some()), ("gate_v", params.gate_v.is_some())];
    for (arg, present) in present {
        if present != (ffn == Ffn::Swiglu) {
            let expected = match ffn {
                Ffn::Silu => "absent because `ffn` is Silu",
                Ffn::Swiglu => "present because `ffn` is Swiglu",
            };
            return Err(Error::Presence { op, arg, expected, got: if present { "present" } else { "absent" } });
        }
    }
    Ok(())
}

/// Refuses factors, or destinations of their gradients, that do not fit together.
///
/// # Errors
/// `Shape`, which names the argument.
pub fn bind_params(dims: &mut Dims, params: Params<&[usize]>) -> Result<()> {
    for (arg, shape) in params.named() {
        let symbols: &[&str] = match arg {
            "up_u" | "gate_u" | "down_v" => &["E", "D", "R"],
            "up_v" | "gate_v" | "down_u" => &["E", "F", "R"],
            _ => &["E", "R"],
        };
        dims.bind(arg, shape, symbols)?;
    }
    Ok(())
}

fn product<T: Scalar>(a: &Array2<T>, b: &Array2<T>) -> Array2<T> {
    let mut c = Array2::zeros(a.raw_dim());
    Zip::from(&mut c).and(a).and(b).par_for_each(|c, &a, &b| *c = a * b);
    c
}

/// silu(x) and its derivative.
fn silu_with_slope<T: Scalar>(x: T) -> (T, T) {
    let sigma = x.sigmoid();
    // 1 - sigma loses its tail for large x, where it is added to 1 and does not matter.
    (x * sigma, sigma * (T::one() + x * (T::one() - sigma)))
}

fn silu<T: Scalar>(h: Array2<T>) -> Activation<T> {
    let mut act = h;
    let mut by_up = Array2::zeros(act.raw_dim());
    Zip::from(&mut act).and(&mut by_up).par_for_each(|h, by_up| (*h, *by_up) = silu_with_slope(*h));
    Activation { act, by_up, by_gate: None }
}

fn swiglu<T: Scalar>(h: Array2<T>, g: Array2<T>) -> Activation<T> {
    let (mut act, mut by_up) = (h, g);
    let mut by_gate = Array2::zeros(act.raw_dim());
    Zip::from(&mut act).and(&mut by_up).and(&mut by_gate).par_for_each(|h, g, by_gate| {
        let (silu, slope) = silu_with_slope(*g);
        *by_gate = *h * slope;
        *h *= silu;
        *g = silu;
    });
    Activation { act, by_up, by_gate: Some(by_gate) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{ArrayD, IxDyn, array};

    const SILU: Config = Config { precision: Precision::Full, ffn: Ffn::Silu, format: FactorFormat::F32 };
    const SWIGLU: Config = Config { precision: Precision::Full, ffn: Ffn::Swiglu, format: FactorFormat::F32 };

    type B = Reference<f64>;

    /// Parameters of the given shapes, all 1 but for the s of up (2) and, in the second expert, of gate (3).
    fn params(b: &B, ffn: Ffn, [experts, width, hidden, rank]: [usize; 4]) -> Params<Tensor<f64>> {
        let ones = |shape: &[usize]| b.constant(ArrayD::ones(IxDyn(shape)));
        let (u, s, v) = ([experts, width, rank], [experts, rank], [experts, hidden, rank]);
        let gate = ffn == Ffn::Swiglu;
        Params {
            up_u: ones(&u),
            up_s: b.constant(ArrayD::from_elem(IxDyn(&s), 2.0)),
            up_v: ones(&v),
            down_u: ones(&v),
            down_s: ones(&s),
            down_v: ones(&u),
            gate_u: gate.then(|| ones(&u)),
            gate_s: gate.then(|| b.constant(ArrayD::from_shape_fn(IxDyn(&s), |i| if i[0] == 1 { 3.0 } else { 1.0 }))),
            gate_v: gate.then(|| ones(&v)),
        }
    }

    fn zeros_like(b: &B, params: &Params<Tensor<f64>>) -> Params<Tensor<f64>> {
        params.as_ref().map(|_, p| b.constant(ArrayD::zeros(IxDyn(p.shape()))))
    }

    /// silu and its derivative from their definitions.
    fn by_definition(x: f64) -> (f64, f64) {
        let sigma = 1.0 / (1.0 + (-x).exp());
        (x * sigma, sigma + x * sigma * (1.0 - sigma))
    }

    #[test]
    fn silu_experts_by_hand() {
        let b = B::new();
        let params = params(&b, Ffn::Silu, [2, 1, 1, 1]);
        let u = b.constant(array![[0.75]].into_dyn());
        let (out, saved) = b.forward(&SILU, Inputs { u: &u }, params.as_ref()).unwrap();
        assert_eq!(out.y.shape(), [2, 1, 1]);
        let (silu, slope) = by_definition(1.5);
        let y = b.download(&out.y).unwrap();
        assert_relative_eq!(y[[0, 0, 0]], silu, max_relative = 1e-15);
        assert_relative_eq!(y[[1, 0, 0]], silu, max_relative = 1e-15);

        let dy = b.constant(array![[[1.0]], [[10.0]]].into_dyn());
        let plus = b.constant(array![[1000.0]].into_dyn());
        let into = zeros_like(&b, &params);
        let grads = b.backward(&SILU, &saved, Outputs { y: &dy }, Some(&plus), into.as_ref()).unwrap();
        // h = 2 u, so each expert sends 2 silu'(h) dy.
        assert_relative_eq!(b.download(&grads.du).unwrap()[[0, 0]], 1000.0 + 22.0 * slope, max_relative = 1e-14);
        for (e, dy) in [1.0, 10.0].into_iter().enumerate() {
            let at = |t: &Tensor<f64>| b.download(t).unwrap().iter().copied().collect::<Vec<_>>()[e];
            assert_relative_eq!(at(&into.up_u), 1.5 * slope * dy, max_relative = 1e-14);
            assert_relative_eq!(at(&into.up_s), 0.75 * slope * dy, max_relative = 1e-14);
            assert_relative_eq!(at(&into.up_v), 1.5 * slope * dy, max_relative = 1e-14);
            for down in [&into.down_u, &into.down_s, &into.down_v] {
                assert_relative_eq!(at(down), silu * dy, max_relative = 1e-14);
            }
        }
    }

    #[test]
    fn swiglu_gates_the_up_map() {
        let b = B::new();
        let params = params(&b, Ffn::Swiglu, [2, 1, 1, 1]);
        let u = b.constant(array![[0.5]].into_dyn());
        let (out, saved) = b.forward(&SWIGLU, Inputs { u: &u }, params.as_ref()).unwrap();
        // h = 1 in both experts; g = 0.5 in the first, 1.5 in the second.
        let (silu, slope) = by_definition(1.5);
        assert_relative_eq!(b.download(&out.y).unwrap()[[1, 0, 0]], silu, max_relative = 1e-15);
        let dy = b.constant(array![[[0.0]], [[1.0]]].into_dyn());
        let into = zeros_like(&b, &params);
        let grads = b.backward(&SWIGLU, &saved, Outputs { y: &dy }, None, into.as_ref()).unwrap();
        assert_relative_eq!(b.download(&grads.du).unwrap()[[0, 0]], 2.0 * silu + 3.0 * slope, max_relative = 1e-14);
        assert_relative_eq!(b.download(&into.up_s).unwrap()[[1, 0]], 0.5 * silu, max_relative = 1e-14);
        let dgate_s = b.download(into.gate_s.as_ref().unwrap()).unwrap();
        assert_relative_eq!(dgate_s[[1, 0]], 0.5 * slope, max_relative = 1e-14);
        assert_eq!(dgate_s[[0, 0]], 0.0);
    }

    #[test]
    fn silu_is_finite_at_both_ends() {
        assert_eq!(silu_with_slope(1e30f32), (1e30, 1.0));
        assert_eq!(silu_with_slope(-1e30f32), (0.0, 0.0));
        assert_eq!(silu_with_slope(0.0f64), (0.0, 0.5));
    }

    #[test]
    fn no_rows_give_no_rows() {
        let b = B::new();
        let params = params(&b, Ffn::Swiglu, [2, 3, 4, 2]);
        let u = b.constant(ArrayD::zeros(IxDyn(&[2, 0, 3])));
        let (out, saved) = b.forward(&SWIGLU, Inputs { u: &u }, params.as_ref()).unwrap();
        assert_eq!(out.y.shape(), [2, 2, 0, 3]);
        let into = zeros_like(&b, &params);
        let grads = b.backward(&SWIGLU, &saved, Outputs { y: &out.y }, None, into.as_ref()).unwrap();
        assert_eq!(grads.du.shape(), [2, 0, 3]);
    }

    #[test]
    fn shapes_presence_and_precision_are_checked() {
        let b = B::new();
        let zeros = |shape: &[usize]| b.constant(ArrayD::zeros(IxDyn(shape)));
        let good = || params(&b, Ffn::Silu, [2, 3, 4, 1]);
        let forward = |config: &Config, u: &[usize], params: Params<Tensor<f64>>| {
            let result = b.forward(config, Inputs { u: &zeros(u) }, params.as_ref());
            result.map(|(_, saved)| saved).map_err(|error| error.to_string())
        };
        assert_eq!(
            forward(&SILU, &[5, 2], good()).err().unwrap(),
            "expert::forward: `up_u` is [2, 3, 1], expected [E, D, R] = [any, 2, any] (D from `u`)"
        );
        assert_eq!(
            forward(&SILU, &[5, 3], Params { down_u: zeros(&[2, 3, 1]), ..good() }).err().unwrap(),
            "expert::forward: `down_u` is [2, 3, 1], expected [E, F, R] = [2, 4, 1] (F from `up_v`)"
        );
        assert_eq!(
            forward(&SILU, &[5, 3], Params { down_s: zeros(&[1, 1]), ..good() }).err().unwrap(),
            "expert::forward: `down_s` is [1, 1], expected [E, R] = [2, 1] (E from `up_u`)"
        );
        for (sizes, expected) in [
            ([0, 3, 4, 1], "`up_u` is [0], expected E >= 1"),
            ([2, 0, 4, 1], "`u` is [0], expected D >= 1"),
            ([2, 3, 0, 1], "`up_v` is [0], expected F >= 1"),
            ([2, 3, 4, 0], "`up_u` is [0], expected R >= 1"),
        ] {
            let error = forward(&SILU, &[5, sizes[1]], params(&b, Ffn::Silu, sizes)).err().unwrap();
            assert_eq!(error, format!("expert::forward: {expected}"));
        }
        assert_eq!(
            forward(&SWIGLU, &[5, 3], good()).err().unwrap(),
            "expert::forward: `gate_u` is absent, expected it present because `ffn` is Swiglu"
        );
        assert_eq!(
            forward(&SILU, &[5, 3], Params { gate_s: Some(zeros(&[2, 1])), ..good() }).err().unwrap(),
            "expert::forward: `gate_s` is present, expected it absent because `ffn` is Silu"
        );
        let bf16 = Config { precision: Precision::Bf16, ..SILU };
        assert!(forward(&bf16, &[5, 3], good()).err().unwrap().contains("config `precision` is Bf16"));

        let saved = forward(&SILU, &[5, 3], good()).unwrap();
        let backward = |y: &[usize], plus: &[usize], into: Params<Tensor<f64>>| {
            let (y, plus) = (zeros(y), zeros(plus));
            b.backward(&SILU, &saved, Outputs { y: &y }, Some(&plus), into.as_ref()).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&[5, 2, 3], &[5, 3], good()),
            "expert::backward: `y` is [5, 2, 3], expected [E, N, D] = [2, 5, 3] (E from `up_u`, N from `u`)"
        );
        assert_eq!(
            backward(&[2, 5, 3], &[5, 2], good()),
            "expert::backward: `plus` is [5, 2], expected [N, D] = [5, 3] (D from `u`)"
        );
        assert_eq!(
            backward(&[2, 5, 3], &[5, 3], Params { down_v: zeros(&[2, 1, 3]), ..good() }),
            "expert::backward: `down_v` is [2, 1, 3], expected [E, D, R] = [2, 3, 1] (D from `u`, R from `up_u`)"
        );
    }
}
