//! `blend`: what attention, memory, dense layer and experts add to the stream, weighted by the controller's gates.
//!
//! ```text
//! (w_attn, m, w_ffn, p_0 .. p_{E-1}) = gates,   lam = lam_max m
//! y = w_attn attn + lam memory + (1 - lam) dense + w_ffn sum_e p_e experts_e
//! ```
//!
//! Adjoint, with dy the gradient of y and <a, b> the sum over the row:
//!
//! ```text
//! dattn = w_attn dy,   dmemory = lam dy,   ddense = (1 - lam) dy,   dexperts_e = w_ffn p_e dy
//! dgates = (<dy, attn>, lam_max (<dy, memory> - <dy, dense>), sum_e p_e <dy, experts_e>, w_ffn <dy, experts_e> ..)
//! ```
//!
//! Without memory its term is zero and the dense layer keeps its factor (1 - lam): an ablation of the memory changes
//! nothing else. Every leading axis counts as rows: `[.., D]`.

use ndarray::{Array2, Array3, ArrayView2, ArrayView3, Axis, Zip};

use crate::checked::Checked;
use crate::controller::FIXED_GATES;
use crate::cpu::{Reference, Tensor, Values};
use crate::dims::{Dims, stacked};
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The largest share of the memory, from 0 to 1.
    pub lam_max: f64,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., 3+E]`, from `controller`.
        gates,
        /// `[.., D]`
        attn,
        /// `[.., D]`
        dense,
        /// `[E, .., D]`
        experts;
        optional
        /// `[.., D]`
        memory
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., D]`, shaped as `attn`.
        y
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., 3+E]`
        dgates,
        /// `[.., D]`
        dattn,
        /// `[.., D]`
        ddense,
        /// `[E, .., D]`
        dexperts;
        optional
        /// `[.., D]`; present exactly when `memory` is.
        dmemory
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the inputs or the upstream gradient do not fit `attn` and each other, or if D or E is zero; `Config` if
/// `lam_max` is outside [0, 1].
pub trait Blend: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Mixes the branches.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of the inputs.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: handles only.
pub struct Saved<T> {
    inputs: Inputs<Tensor<T>>,
}

impl<T: Scalar> Blend for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "blend::forward";
        check_config(OP, config)?;
        bind(OP, inputs.clone().map(|_, x| x.shape()))?;
        let values = inputs.clone().try_map(|arg, x| self.read(OP, arg, x))?;
        let y = forward(&Rows::of(&values), T::from_f64(config.lam_max));
        let outputs = Outputs { y: self.adopt(y, inputs.attn.shape()) };
        Ok((outputs, Saved { inputs: inputs.map(|_, x| x.clone()) }))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Saved<T>, upstream: Outputs<&Tensor<T>>) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "blend::backward";
        check_config(OP, config)?;
        let inputs = saved.inputs.as_ref();
        let mut dims = bind(OP, inputs.clone().map(|_, x| x.shape()))?;
        dims.bind_rows("y", upstream.y.shape(), "N", &["D"])?;
        let values = inputs.clone().try_map(|arg, x| self.read(OP, arg, x))?;
        let dy = self.read(OP, "y", upstream.y)?;
        let grads = backward(&Rows::of(&values), T::from_f64(config.lam_max), dy.rows());
        Ok(Grads {
            dgates: self.adopt(grads.gates, inputs.gates.shape()),
            dattn: self.adopt(grads.attn, inputs.attn.shape()),
            ddense: self.adopt(grads.dense, inputs.dense.shape()),
            dexperts: self.adopt(grads.experts, inputs.experts.shape()),
            dmemory: inputs.memory.map(|memory| self.adopt(grads.memory, memory.shape())),
        })
    }
}

impl<B: Blend> Blend for Checked<B> {
    type Saved = B::Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        self.finite("blend::forward", inputs.clone().named())?;
        self.0.forward(config, inputs)
    }

    fn backward(&self, config: &Config, saved: &B::Saved, upstream: Outputs<&B::Tensor>) -> Result<Grads<B::Tensor>> {
        self.finite("blend::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream)
    }
}

/// Refuses a config that is out of range. For backends of their own too, as is [`bind`].
///
/// # Errors
/// `Config` if `lam_max` is not from 0 to 1.
pub fn check_config(op: &'static str, config: &Config) -> Result<()> {
    if (0.0..=1.0).contains(&config.lam_max) {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "lam_max",
        expected: "from 0 to 1, since memory and dense layer share one weight".to_owned(),
        got: config.lam_max.to_string(),
    })
}

/// Refuses shapes that do not fit; gives N, D, E and `3+E`.
///
/// # Errors
/// `Shape`, which names the argument.
pub fn bind(op: &'static str, inputs: Inputs<&[usize]>) -> Result<Dims> {
    let mut dims = Dims::new(op);
    dims.bind_rows("attn", inputs.attn, "N", &["D"])?;
    dims.bind_rows("dense", inputs.dense, "N", &["D"])?;
    if let Some(memory) = inputs.memory {
        dims.bind_rows("memory", memory, "N", &["D"])?;
    }
    dims.bind("experts", &stacked(inputs.experts), &["E", "N", "D"])?;
    dims.positive(&["D", "E"])?;
    dims.set("3+E", FIXED_GATES + dims.get("E"), "experts");
    dims.bind_rows("gates", inputs.gates, "N", &["3+E"])?;
    Ok(dims)
}

/// The inputs as rows: N rows of D, and `[E, N, D]`.
struct Rows<'a, T> {
    gates: ArrayView2<'a, T>,
    attn: ArrayView2<'a, T>,
    dense: ArrayView2<'a, T>,
    experts: ArrayView3<'a, T>,
    memory: Option<ArrayView2<'a, T>>,
}

impl<'a, T: Scalar> Rows<'a, T> {
    fn of(values: &'a Inputs<Values<'_, T>>) -> Self {
        let attn = values.attn.rows();
        let shape = stacked(values.experts.view().shape());
        let experts = ArrayView3::from_shape((shape[0], shape[1], shape[2]), values.experts.slice());
        Self {
            gates: values.gates.rows(),
            attn,
            dense: values.dense.rows(),
            experts: experts.expect("a handle's shape matches its memory"),
            memory: values.memory.as_ref().map(Values::rows),
        }
    }
}

fn forward<T: Scalar>(x: &Rows<'_, T>, lam_max: T) -> Array2<T> {
    let mut y = Array2::zeros(x.attn.raw_dim());
    Zip::indexed(y.rows_mut()).par_for_each(|n, mut y| {
        let gates = x.gates.row(n);
        let (w_attn, lam, w_ffn) = (gates[0], lam_max * gates[1], gates[2]);
        Zip::from(&mut y)
            .and(x.attn.row(n))
            .and(x.dense.row(n))
            .for_each(|y, &attn, &dense| *y = w_attn * attn + (T::one() - lam) * dense);
        if let Some(memory) = x.memory {
            y.scaled_add(lam, &memory.row(n));
        }
        for (e, expert) in x.experts.outer_iter().enumerate() {
            y.scaled_add(w_ffn * gates[FIXED_GATES + e], &expert.row(n));
        }
    });
    y
}

/// Gradients by input; `memory` has width 0 without one.
struct Gradients<T> {
    gates: Array2<T>,
    attn: Array2<T>,
    dense: Array2<T>,
    experts: Array3<T>,
    memory: Array2<T>,
}

fn backward<T: Scalar>(x: &Rows<'_, T>, lam_max: T, dy: ArrayView2<'_, T>) -> Gradients<T> {
    let (rows, width) = x.attn.dim();
    let mut grads = Gradients {
        gates: Array2::zeros(x.gates.raw_dim()),
        attn: Array2::zeros((rows, width)),
        dense: Array2::zeros((rows, width)),
        experts: Array3::zeros(x.experts.raw_dim()),
        memory: Array2::zeros((rows, if x.memory.is_some() { width } else { 0 })),
    };
    Zip::indexed(grads.gates.rows_mut())
        .and(grads.attn.rows_mut())
        .and(grads.dense.rows_mut())
        .and(grads.experts.axis_iter_mut(Axis(1)))
        .and(grads.memory.rows_mut())
        .par_for_each(|n, mut dgates, mut dattn, mut ddense, mut dexperts, mut dmemory| {
            let (dy, gates) = (dy.row(n), x.gates.row(n));
            let (w_attn, lam, w_ffn) = (gates[0], lam_max * gates[1], gates[2]);
            Zip::from(&mut dattn).and(&dy).for_each(|dattn, &dy| *dattn = w_attn * dy);
            Zip::from(&mut ddense).and(&dy).for_each(|ddense, &dy| *ddense = (T::one() - lam) * dy);
            dgates[0] = dy.dot(&x.attn.row(n));
            dgates[1] = -lam_max * dy.dot(&x.dense.row(n));
            if let Some(memory) = x.memory {
                Zip::from(&mut dmemory).and(&dy).for_each(|dmemory, &dy| *dmemory = lam * dy);
                dgates[1] += lam_max * dy.dot(&memory.row(n));
            }
            for (e, mut dexpert) in dexperts.outer_iter_mut().enumerate() {
                let share = gates[FIXED_GATES + e];
                let along = dy.dot(&x.experts.index_axis(Axis(0), e).row(n));
                dgates[2] += share * along;
                dgates[FIXED_GATES + e] = w_ffn * along;
                Zip::from(&mut dexpert).and(&dy).for_each(|dexpert, &dy| *dexpert = w_ffn * share * dy);
            }
        });
    grads
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArrayD, IxDyn, array};

    use crate::tensor::DType;

    const CONFIG: Config = Config { lam_max: 0.5 };

    /// Two experts, one row of two channels; every number is a short binary fraction.
    fn inputs(b: &Reference<f64>, with_memory: bool) -> Inputs<Tensor<f64>> {
        let row = |x: [f64; 2]| b.constant(array![x].into_dyn());
        Inputs {
            gates: b.constant(array![[0.5, 0.25, 2.0, 0.75, 0.25]].into_dyn()),
            attn: row([2.0, 4.0]),
            dense: row([8.0, 16.0]),
            experts: b.constant(array![[[1.0, 2.0]], [[-1.0, 6.0]]].into_dyn()),
            memory: with_memory.then(|| row([16.0, -8.0])),
        }
    }

    #[test]
    fn value_and_gradients_by_hand() {
        let b = Reference::<f64>::new();
        let inputs = inputs(&b, true);
        let (out, saved) = b.forward(&CONFIG, inputs.as_ref()).unwrap();
        // lam = 1/8: 1 + 2 + 7 + 2 (0.75 - 0.25), and 2 - 1 + 14 + 2 (1.5 + 1.5).
        assert_eq!(b.download(&out.y).unwrap(), array![[11.0, 21.0]].into_dyn());
        let dy = b.constant(array![[1.0, 2.0]].into_dyn());
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &dy }).unwrap();
        // <dy, .>: attn 10, memory 0, dense 40, experts 5 and 11.
        assert_eq!(b.download(&grads.dgates).unwrap(), array![[10.0, -20.0, 6.5, 10.0, 22.0]].into_dyn());
        assert_eq!(b.download(&grads.dattn).unwrap(), array![[0.5, 1.0]].into_dyn());
        assert_eq!(b.download(&grads.ddense).unwrap(), array![[0.875, 1.75]].into_dyn());
        assert_eq!(b.download(&grads.dexperts).unwrap(), array![[[1.5, 3.0]], [[0.5, 1.0]]].into_dyn());
        assert_eq!(b.download(&grads.dmemory.unwrap()).unwrap(), array![[0.125, 0.25]].into_dyn());
    }

    #[test]
    fn without_memory_the_dense_layer_keeps_its_factor() {
        let b = Reference::<f64>::new();
        let (out, saved) = b.forward(&CONFIG, inputs(&b, false).as_ref()).unwrap();
        assert_eq!(b.download(&out.y).unwrap(), array![[9.0, 22.0]].into_dyn());
        let dy = b.constant(array![[1.0, 2.0]].into_dyn());
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &dy }).unwrap();
        assert!(grads.dmemory.is_none());
        assert_eq!(b.download(&grads.dgates).unwrap()[[0, 1]], -20.0);
    }

    #[test]
    fn no_rows_give_no_rows() {
        let b = Reference::<f32>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F32).unwrap();
        let (row, gates, experts) = (zeros(&[2, 0, 3]), zeros(&[2, 0, 4]), zeros(&[1, 2, 0, 3]));
        let inputs = Inputs { gates: &gates, attn: &row, dense: &row, experts: &experts, memory: Some(&row) };
        let (out, saved) = b.forward(&CONFIG, inputs).unwrap();
        assert_eq!(out.y.shape(), [2, 0, 3]);
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &out.y }).unwrap();
        assert_eq!(grads.dexperts.shape(), [1, 2, 0, 3]);
    }

    #[test]
    fn shapes_and_config_are_checked() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.constant(ArrayD::zeros(IxDyn(shape)));
        let forward =
            |config: &Config, gates: &[usize], attn: &[usize], dense: &[usize], experts: &[usize], memory: &[usize]| {
                let [gates, attn, dense, experts, memory] = [gates, attn, dense, experts, memory].map(zeros);
                let inputs = Inputs { gates, attn, dense, experts, memory: Some(memory) };
                b.forward(config, inputs.as_ref()).map(|(_, saved)| saved).map_err(|error| error.to_string())
            };
        let refused = |gates: &[usize], attn: &[usize], dense: &[usize], experts: &[usize], memory: &[usize]| {
            forward(&CONFIG, gates, attn, dense, experts, memory).err().unwrap()
        };
        let row = [5, 4];
        assert_eq!(
            refused(&[5, 4], &row, &row, &[2, 5, 4], &row),
            "blend::forward: `gates` is [5, 4], expected [N, 3+E] = [5, 5] (3+E from `experts`)"
        );
        assert_eq!(
            refused(&[5, 5], &row, &[5, 1], &[2, 5, 4], &row),
            "blend::forward: `dense` is [5, 1], expected [N, D] = [5, 4] (D from `attn`)"
        );
        assert_eq!(
            refused(&[5, 5], &row, &row, &[2, 4, 4], &row),
            "blend::forward: `experts` is [2, 4, 4], expected [E, N, D] = [any, 5, 4] (N from `attn`)"
        );
        assert_eq!(
            refused(&[5, 5], &row, &row, &[2, 5, 4], &[4, 4]),
            "blend::forward: `memory` is [4, 4], expected [N, D] = [5, 4] (N from `attn`)"
        );
        assert_eq!(
            refused(&[5, 5], &[5, 0], &[5, 0], &[2, 5, 0], &[5, 0]),
            "blend::forward: `attn` is [0], expected D >= 1"
        );
        assert_eq!(refused(&[5, 3], &row, &row, &[0, 5, 4], &row), "blend::forward: `experts` is [0], expected E >= 1");
        for lam_max in [-0.1, 1.5, f64::NAN] {
            let error = forward(&Config { lam_max }, &[5, 5], &row, &row, &[2, 5, 4], &row).err().unwrap();
            assert_eq!(
                error,
                format!(
                    "blend::forward: config `lam_max` is {lam_max}, expected from 0 to 1, since memory and dense layer \
                     share one weight"
                )
            );
        }
        let saved = forward(&CONFIG, &[5, 5], &row, &row, &[2, 5, 4], &row).unwrap();
        let error = b.backward(&CONFIG, &saved, Outputs { y: &zeros(&[4, 5]) }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "blend::backward: `y` is [4, 5], expected [N, D] = [5, 4] (N from `attn`, D from `attn`)"
        );
    }
}
