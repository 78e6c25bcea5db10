//! [`Tape`]: an equation over Burn tensors, from which Burn's autodiff makes the backward pass.

use burn_autodiff::Autodiff;
use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::{Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::shaped;

/// Burn's backend with autodiff around it.
pub(crate) type Tracked<B> = Autodiff<B>;

/// Handles by the names of an operation's tensors.
pub(crate) type Arguments<'a, B> = Vec<(&'static str, &'a Handle<B>)>;

/// What goes into an equation.
pub(crate) struct Leaves<B: Backend>(Vec<(&'static str, Tensor<Tracked<B>, 1>)>);

impl<B: Backend> Leaves<B> {
    /// A tensor that may be absent, as an array of rank `D`.
    pub fn find<const D: usize>(&self, name: &str, dims: [usize; D]) -> Option<Tensor<Tracked<B>, D>> {
        let (_, tensor) = self.0.iter().find(|(n, _)| *n == name)?;
        Some(shaped(tensor.clone(), dims))
    }

    /// A tensor that is there.
    pub fn get<const D: usize>(&self, name: &str, dims: [usize; D]) -> Tensor<Tracked<B>, D> {
        self.find(name, dims).expect("the operation's required fields are leaves")
    }
}

/// Results by name.
pub(crate) struct Named<B: Backend>(Vec<(&'static str, Handle<B>)>);

impl<B: Backend> Named<B> {
    /// Takes a result out, by its name or, for a gradient, by the name of its field: `dx` for `x`, `d_o` for `o`.
    pub fn take(&mut self, field: &str) -> Option<Handle<B>> {
        let input = field.strip_prefix('d').map(|name| name.strip_prefix('_').unwrap_or(name));
        let at = self.0.iter().position(|(name, _)| *name == field || Some(*name) == input)?;
        Some(self.0.swap_remove(at).1)
    }
}

type Equation<B> = Box<dyn Fn(&Leaves<B>) -> Vec<Tensor<Tracked<B>, 1>>>;

/// What every operation saves: the values that went in and the equation.
///
/// Burn consumes a graph when it is differentiated, so it is built when a gradient is asked for, as often as one is.
pub struct Tape<B: Backend> {
    leaves: Vec<(&'static str, Tensor<B, 1>, Vec<usize>)>,
    /// How many of the leaves are inputs; parameters follow.
    inputs: usize,
    outputs: Vec<(&'static str, Vec<usize>)>,
    equation: Equation<B>,
}

impl<B: Backend> Tape<B> {
    /// Evaluates an equation without tracking and keeps it.
    ///
    /// `outputs` names the results in the order in which the equation returns them, flat. Where all of them are empty, the
    /// equation is not asked, since Burn's operations are not made for empty tensors.
    pub(crate) fn run(
        b: &Burn<B>,
        op: &'static str,
        inputs: Arguments<'_, B>,
        params: Arguments<'_, B>,
        outputs: Vec<(&'static str, Vec<usize>)>,
        equation: impl Fn(&Leaves<B>) -> Vec<Tensor<Tracked<B>, 1>> + 'static,
    ) -> Result<(Named<B>, Self)> {
        let count = inputs.len();
        let read =
            |(name, tensor): (&'static str, &Handle<B>)| Ok((name, b.read(op, name, tensor)?, tensor.shape().to_vec()));
        let leaves = inputs.into_iter().chain(params).map(read).collect::<Result<Vec<_>>>()?;
        let tape = Self { leaves, inputs: count, outputs, equation: Box::new(equation) };
        let untracked = tape.leaves.iter().map(|(name, x, _)| (*name, Tensor::from_inner(x.clone()))).collect();
        let results = if tape.is_empty() {
            tape.outputs.iter().map(|_| b.tensor_of(Vec::new())).collect()
        } else {
            (tape.equation)(&Leaves(untracked)).into_iter().map(Tensor::inner).collect::<Vec<_>>()
        };
        let named = tape.outputs.iter().zip(results).map(|((name, shape), x)| (*name, b.scratch_of(x, shape)));
        Ok((Named(named.collect()), tape))
    }

    fn is_empty(&self) -> bool {
        self.outputs.iter().all(|(_, shape)| shape.contains(&0))
    }

    /// The gradients of the inputs, each with its `plus` added; those of the parameters are added into `into`.
    pub(crate) fn backward(
        &self,
        b: &Burn<B>,
        op: &'static str,
        upstream: Arguments<'_, B>,
        plus: Arguments<'_, B>,
        into: Arguments<'_, B>,
    ) -> Result<Named<B>> {
        let mut weights = Vec::new();
        for (name, tensor) in upstream {
            let shape = self.outputs.iter().find(|(n, _)| *n == name).map(|(_, shape)| shape);
            let shape = shape.ok_or(Error::Presence {
                op,
                arg: name,
                expected: "absent because the output is",
                got: "present",
            })?;
            same_shape(op, name, tensor, shape)?;
            weights.push((name, b.read(op, name, tensor)?));
        }
        let params = &self.leaves[self.inputs..];
        if let Some((name, ..)) = params.iter().find(|(name, ..)| !into.iter().any(|(n, _)| n == name)) {
            let expected = "present because the parameter is";
            return Err(Error::Presence { op, arg: name, expected, got: "absent" });
        }
        if let Some((name, _)) = into.iter().find(|(name, _)| !params.iter().any(|(n, ..)| n == name)) {
            return Err(Error::Presence { op, arg: name, expected: "absent because the parameter is", got: "present" });
        }
        let mut results = Vec::new();
        for (n, ((name, ..), gradient)) in self.leaves.iter().zip(self.gradients(b, &weights)).enumerate() {
            let shape = &self.leaves[n].2;
            if n >= self.inputs {
                let (_, sum) =
                    into.iter().find(|(i, _)| i == name).expect("every parameter has a place, checked above");
                if sum.shape() != &shape[..] {
                    let (expected, got) = (format!("{shape:?}"), sum.shape().to_vec());
                    return Err(Error::Shape { op, arg: name, expected, got });
                }
                b.write(op, name, sum, b.read(op, name, sum)? + gradient)?;
                continue;
            }
            let gradient = match plus.iter().find(|(p, _)| p == name) {
                Some((_, plus)) => {
                    same_shape(op, "plus", plus, shape)?;
                    gradient + b.read(op, "plus", plus)?
                }
                None => gradient,
            };
            results.push((*name, b.scratch_of(gradient, shape)));
        }
        Ok(Named(results))
    }

    /// The derivative of sum <weight, output> with respect to every leaf.
    fn gradients(&self, b: &Burn<B>, weights: &[(&'static str, Tensor<B, 1>)]) -> Vec<Tensor<B, 1>> {
        let zeros = |len: usize| b.tensor_of(vec![0.0; len]);
        if self.is_empty() || weights.is_empty() {
            return self.leaves.iter().map(|(_, x, _)| zeros(x.dims()[0])).collect();
        }
        let track = |x: &Tensor<B, 1>| Tensor::from_inner(x.clone()).require_grad();
        let leaves = Leaves::<B>(self.leaves.iter().map(|(name, x, _)| (*name, track(x))).collect());
        let results = (self.equation)(&leaves);
        let terms = self.outputs.iter().zip(results).filter_map(|((name, _), output)| {
            let (_, weight) = weights.iter().find(|(w, _)| w == name)?;
            (weight.dims()[0] > 0).then(|| (output * Tensor::from_inner(weight.clone())).sum())
        });
        let Some(sum) = terms.reduce(|a, b| a + b) else {
            return self.leaves.iter().map(|(_, x, _)| zeros(x.dims()[0])).collect();
        };
        let gradients = sum.backward();
        leaves.0.iter().map(|(_, x)| x.grad(&gradients).unwrap_or_else(|| zeros(x.dims()[0]))).collect()
    }
}

/// Refuses a gradient with another shape than the activation it is the gradient of. Leading axes may be split
/// otherwise.
fn same_shape<B: Backend>(op: &'static str, arg: &'static str, tensor: &Handle<B>, shape: &[usize]) -> Result<()> {
    let len = shape.iter().product::<usize>();
    if tensor.len() == len && tensor.shape().last() == shape.last() {
        return Ok(());
    }
    Err(Error::Shape { op, arg, expected: format!("{shape:?}"), got: tensor.shape().to_vec() })
}
