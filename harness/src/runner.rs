//! [`Runner`]: whatever answers a case. Gates test runners, so a fault is planted by wrapping one.

use std::sync::Mutex;

use dormouse_reference::{DType, Error, Tensors};
use ndarray::{ArrayD, Axis, Slice};

use crate::description::{Mutant, Operation, OperationOn, Role, Run, glue};
use crate::named::{Named, Values};

/// Something that can run an operation on host values.
pub trait Runner<O: Operation>: Sync {
    /// Forward, and backward if there is an upstream gradient.
    fn run(&self, config: &O::Config, inputs: &Values, upstream: Option<&Values>) -> Result<Run<ArrayD<f64>>, Error>;
}

/// Runs an operation on a backend that is made anew for every run.
pub struct OnBackend<B> {
    make: fn() -> B,
}

impl<B> OnBackend<B> {
    /// A runner over the backends that `make` gives.
    pub fn new(make: fn() -> B) -> Self {
        Self { make }
    }
}

/// Uploads values; tensors of role `Data` whose name the operation declares as ids travel as integers.
pub fn upload<B: Tensors>(b: &B, values: &Values, integers: &[&str]) -> Result<Named<B::Tensor>, Error> {
    values.try_map(|name, array| {
        let dtype = if integers.contains(&name) { DType::U32 } else { b.float() };
        let tensor = b.persistent(array.shape(), dtype)?;
        b.upload(array.view(), &tensor)?;
        Ok(tensor)
    })
}

impl<B: Tensors, O: OperationOn<B>> Runner<O> for OnBackend<B> {
    #[inline(never)]
    fn run(&self, config: &O::Config, inputs: &Values, upstream: Option<&Values>) -> Result<Run<ArrayD<f64>>, Error> {
        let b = (self.make)();
        let inputs = upload(&b, inputs, O::integers())?;
        let upstream = upstream.map(|u| upload(&b, u, &[])).transpose()?;
        let run = O::run(&b, config, &inputs, upstream.as_ref())?;
        Ok(Run { outputs: run.outputs.try_map(|_, t| b.download(t))?, grads: run.grads.try_map(|_, t| b.download(t))? })
    }
}

/// The operation's plain second form, with at most one term broken.
pub struct Naive {
    /// The term to break.
    pub twist: Option<&'static str>,
}

impl<O: Operation> Runner<O> for Naive {
    fn run(&self, config: &O::Config, inputs: &Values, upstream: Option<&Values>) -> Result<Run<ArrayD<f64>>, Error> {
        let mut run = O::naive(config, inputs, upstream, self.twist);
        for (name, gradient) in run.grads.iter_mut() {
            if O::spec(name).role == Role::Param {
                *gradient += glue::earlier_gradient();
            }
        }
        Ok(run)
    }
}

/// What a generated mutant does to one tensor of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All zero.
    Zero,
    /// Times 0.99.
    Scaled,
    /// Shifted by one along its token axis (its first axis if it has no `T`).
    Shifted,
    /// What the previous call wrote; zero at the first call.
    Stale,
    /// One NaN in the middle.
    Nan,
    /// The last row was never written.
    UnwrittenTail,
    /// A parameter's gradient replaced what earlier parts of the batch had added.
    Overwritten,
}

impl Fault {
    /// The faults planted in every output and every gradient; `Overwritten` is for gradients of parameters.
    pub const ALL: [Fault; 6] =
        [Fault::Zero, Fault::Scaled, Fault::Shifted, Fault::Stale, Fault::Nan, Fault::UnwrittenTail];

    /// The word in mutant names.
    pub fn word(self) -> &'static str {
        match self {
            Fault::Zero => "zero",
            Fault::Scaled => "times-0.99",
            Fault::Shifted => "shifted",
            Fault::Stale => "stale",
            Fault::Nan => "nan",
            Fault::UnwrittenTail => "unwritten-tail",
            Fault::Overwritten => "overwritten",
        }
    }
}

/// A mutant: where it sits and which gate must see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plant {
    /// A fault in one output.
    Output(&'static str, Fault),
    /// A fault in one gradient.
    Grad(&'static str, Fault),
    /// A broken term of the naive form.
    Twist(Mutant),
}

impl Plant {
    /// The mutant's name on the command line.
    pub fn name(&self) -> String {
        match self {
            Plant::Output(tensor, fault) => format!("{tensor}-{}", fault.word()),
            Plant::Grad(tensor, fault) => format!("d{tensor}-{}", fault.word()),
            Plant::Twist(mutant) => mutant.twist.to_owned(),
        }
    }
}

/// A runner with a fault in one tensor of its result.
pub struct Faulty<'a, O: Operation> {
    inner: &'a dyn Runner<O>,
    plant: Plant,
    previous: Mutex<Option<ArrayD<f64>>>,
}

impl<'a, O: Operation> Faulty<'a, O> {
    /// Plants a generated fault.
    pub fn new(inner: &'a dyn Runner<O>, plant: Plant) -> Self {
        Self { inner, plant, previous: Mutex::new(None) }
    }

    fn break_tensor(&self, tensor: &mut ArrayD<f64>, fault: Fault, token_axis: usize) {
        match fault {
            Fault::Zero => tensor.fill(0.0),
            Fault::Overwritten => *tensor -= glue::earlier_gradient(),
            Fault::Scaled => *tensor *= 0.99,
            Fault::Shifted => *tensor = shifted(tensor, token_axis),
            Fault::Nan => {
                let middle = tensor.len() / 2;
                if let Some(x) = tensor.iter_mut().nth(middle) {
                    *x = f64::NAN;
                }
            }
            Fault::UnwrittenTail => {
                if let Some(last) = tensor.shape().get(token_axis).and_then(|n| n.checked_sub(1)) {
                    tensor.index_axis_mut(Axis(token_axis), last).fill(0.0);
                } else {
                    tensor.fill(0.0);
                }
            }
            Fault::Stale => {
                let mut previous = self.previous.lock().unwrap_or_else(|poison| poison.into_inner());
                let now = tensor.clone();
                match previous.as_ref() {
                    Some(old) if old.shape() == now.shape() => tensor.assign(old),
                    _ => tensor.fill(0.0),
                }
                *previous = Some(now);
            }
        }
    }
}

/// Moves everything one place along `axis`; the first place repeats. A single place is scaled instead, so that the fault
/// stays a fault.
fn shifted(tensor: &ArrayD<f64>, axis: usize) -> ArrayD<f64> {
    let mut out = tensor.clone();
    match tensor.shape().get(axis) {
        Some(&n) if n > 1 => {
            let mut later = out.slice_axis_mut(Axis(axis), Slice::from(1..));
            later.assign(&tensor.slice_axis(Axis(axis), Slice::from(..n - 1)));
        }
        _ => out *= 2.0,
    }
    out
}

impl<O: Operation> Runner<O> for Faulty<'_, O> {
    fn run(&self, config: &O::Config, inputs: &Values, upstream: Option<&Values>) -> Result<Run<ArrayD<f64>>, Error> {
        let mut run = self.inner.run(config, inputs, upstream)?;
        let (tensor, fault, name) = match self.plant {
            Plant::Output(name, fault) => (run.outputs.get_mut(name), fault, name),
            Plant::Grad(name, fault) => (run.grads.get_mut(name), fault, name),
            Plant::Twist(_) => (None, Fault::Zero, ""),
        };
        if let Some(tensor) = tensor {
            let axis = O::spec(name).axis("T").unwrap_or(0);
            self.break_tensor(tensor, fault, axis);
        }
        Ok(run)
    }
}

/// All mutants of an operation: six faults for every output and every gradient, one more for every parameter's gradient,
/// and the hand-written ones.
pub fn plants<O: Operation>() -> Vec<Plant> {
    let mut all = Vec::new();
    for spec in O::tensors() {
        for fault in Fault::ALL {
            match spec.role {
                Role::Output => all.push(Plant::Output(spec.name, fault)),
                Role::Input | Role::Param if O::NO_GRADIENT.is_none() => all.push(Plant::Grad(spec.name, fault)),
                _ => {}
            }
        }
    }
    for spec in O::tensors().into_iter().filter(|s| s.role == Role::Param && O::NO_GRADIENT.is_none()) {
        all.push(Plant::Grad(spec.name, Fault::Overwritten));
    }
    all.extend(O::mutants().into_iter().map(Plant::Twist));
    all
}
