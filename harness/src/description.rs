//! What an operation says about itself, once; every gate follows from it.
//!
//! [`Operation`] is the description, independent of any backend: its tensors, its case table, how to draw inputs, a
//! second plain implementation (`naive`) whose formula terms can be broken one at a time, its tolerances, the laws it
//! obeys and the mutants that must be caught. [`OperationOn`] is the glue to one backend trait: names to handles and
//! back.

use std::fmt::Debug;

use dormouse_reference::{Precision, Result, Tensors};
use ndarray::ArrayD;
use proptest::strategy::BoxedStrategy;
use rand_chacha::ChaCha8Rng;

use crate::compare::Tolerance;
use crate::named::{Named, Values};
use crate::runner::Runner;

/// What a tensor is to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An activation going in; its gradient is returned.
    Input,
    /// A learned parameter; its gradient accumulates.
    Param,
    /// Ids, masks, counters, scalars: goes in, has no gradient.
    Data,
    /// Comes out.
    Output,
}

/// One tensor of an operation.
#[derive(Clone, Copy, Debug)]
pub struct TensorSpec {
    /// The field's name in the operation's structs.
    pub name: &'static str,
    /// The axes, such as `["B", "T", "H", "K"]`. An axis of the same name has the same meaning in every tensor.
    pub axes: &'static [&'static str],
    /// What it is.
    pub role: Role,
}

impl TensorSpec {
    /// An activation going in.
    pub const fn input(name: &'static str, axes: &'static [&'static str]) -> Self {
        Self { name, axes, role: Role::Input }
    }
    /// A learned parameter.
    pub const fn param(name: &'static str, axes: &'static [&'static str]) -> Self {
        Self { name, axes, role: Role::Param }
    }
    /// An input without a gradient.
    pub const fn data(name: &'static str, axes: &'static [&'static str]) -> Self {
        Self { name, axes, role: Role::Data }
    }
    /// An output.
    pub const fn output(name: &'static str, axes: &'static [&'static str]) -> Self {
        Self { name, axes, role: Role::Output }
    }

    /// The position of an axis.
    pub fn axis(&self, axis: &str) -> Option<usize> {
        self.axes.iter().position(|a| *a == axis)
    }
}

/// One entry of the case table, or one draw of the strategy.
#[derive(Clone, Debug)]
pub struct Case<C> {
    /// Unique in the table; spells shape and family, such as `b2-t17-h3-k5-v3-strong-decay`.
    pub name: String,
    /// The operation's config.
    pub config: C,
    /// Lengths by axis name.
    pub dims: Vec<(&'static str, usize)>,
    /// Which kind of values to draw; the operation knows its families.
    pub family: &'static str,
    /// The optional inputs and upstream gradients that are present.
    pub present: Vec<&'static str>,
}

impl<C> Case<C> {
    /// The length of an axis.
    ///
    /// # Panics
    /// If the case does not define it: a mistake in the case table.
    pub fn dim(&self, axis: &str) -> usize {
        let found = self.dims.iter().find(|(name, _)| *name == axis);
        found.unwrap_or_else(|| panic!("case `{}` does not say how long {axis} is", self.name)).1
    }

    /// Whether an optional tensor is present.
    pub fn has(&self, name: &str) -> bool {
        self.present.contains(&name)
    }

    /// The shape of a tensor under this case.
    pub fn shape(&self, spec: &TensorSpec) -> Vec<usize> {
        spec.axes.iter().map(|axis| self.dim(axis)).collect()
    }
}

/// What one run gives: outputs, and gradients under the names of the inputs they belong to.
#[derive(Clone, Debug)]
pub struct Run<X> {
    /// Outputs by name.
    pub outputs: Named<X>,
    /// Gradients by input or parameter name; empty without an upstream gradient.
    pub grads: Named<X>,
}

/// The rungs of the ladder, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// Central differences in f64 equal the adjoint.
    Fd,
    /// <J v, w> = <v, J^T w> with exact dual numbers.
    Adj,
    /// The implementation equals a second, plain one.
    Form,
    /// The same operation at another precision or on a device equals the f64 reference.
    Diff,
    /// Laws that need no second implementation.
    Meta,
    /// NaN in unwritten scratch and around every input changes nothing; devices only.
    Poison,
    /// The same bits twice, and on any number of threads.
    Det,
    /// An implementation whose gradients another library's autodiff makes.
    Oracle,
    /// Values from other people's implementations.
    Golden,
    /// Every planted fault turns its gate red.
    Bite,
}

impl Gate {
    /// The gates of the reference, in ladder order.
    pub const ALL: [Gate; 9] =
        [Gate::Fd, Gate::Adj, Gate::Form, Gate::Oracle, Gate::Diff, Gate::Meta, Gate::Det, Gate::Golden, Gate::Bite];

    /// The gates of a device, in ladder order.
    pub const DEVICE: [Gate; 5] = [Gate::Diff, Gate::Meta, Gate::Poison, Gate::Det, Gate::Bite];

    /// The word in tables and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Gate::Fd => "fd",
            Gate::Adj => "adj",
            Gate::Form => "form",
            Gate::Diff => "diff",
            Gate::Meta => "meta",
            Gate::Poison => "poison",
            Gate::Det => "det",
            Gate::Oracle => "oracle",
            Gate::Golden => "golden",
            Gate::Bite => "bite",
        }
    }
}

/// A fault to plant by breaking one term of the operation's `naive` form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// The twist that `naive` understands, which is also the mutant's name.
    pub twist: &'static str,
    /// The gate that must turn red.
    pub caught_by: Gate,
}

/// How an operation's law is checked: gets a runner, a case and a random stream; gives worst error over tolerance, or
/// what is wrong.
pub type LawCheck<O> = fn(
    runner: &dyn Runner<O>,
    case: &Case<<O as Operation>::Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String>;

/// Something true of the operation whatever its inputs.
pub enum Law<O: Operation> {
    /// Slices along this axis do not see each other, bit for bit: outputs and gradients of slice i are those of a run
    /// on slice i alone.
    Independent(&'static str),
    /// What happens at and after a position of this axis changes no output and no gradient before it, bit for bit.
    Causal(&'static str),
    /// A law that holds bit for bit in the arithmetic of any precision, so that devices are held to it, too.
    Exact {
        /// Its name in messages.
        name: &'static str,
        /// The check; cases it does not apply to give `Ok(0.0)`.
        check: LawCheck<O>,
    },
    /// A law of this operation whose check counts on f64.
    Custom {
        /// Its name in messages.
        name: &'static str,
        /// The check; cases it does not apply to give `Ok(0.0)`.
        check: LawCheck<O>,
    },
}

/// The tolerances of one operation. The defaults fit well-conditioned operations; see [`crate::tolerance`].
#[derive(Clone, Debug)]
pub struct Tolerances {
    /// Directional derivative against central differences in f64, relative.
    pub fd: Tolerance,
    /// Directional derivative by dual numbers against the adjoint, relative.
    pub adj: Tolerance,
    /// Reference f64 against `naive`.
    pub form: Tolerance,
    /// Reference f32 against reference f64 on the same rounded inputs.
    pub diff_f32: Tolerance,
}

/// An operation's description.
pub trait Operation: Sized + Sync + 'static {
    /// The operation's config type.
    type Config: Clone + Debug + Send + Sync + 'static;

    /// The operation's stem.
    const STEM: &'static str;

    /// Why the operation has no gradient, for those in place on parameters; `None` for all others.
    const NO_GRADIENT: Option<&'static str> = None;

    /// How many matrix products lie behind one another on the longest way to an output or a gradient. 0 for an operation
    /// without any, whose arithmetic is that of f32 whatever precision is asked for.
    const PRODUCTS: u32 = 0;

    /// Sets the precision of the matrix products; nothing where there are none.
    fn set_precision(_config: &mut Self::Config, _precision: Precision) {}

    /// How much the operation enlarges the relative error of its products in a case: 1 unless it can say otherwise.
    fn amplification(_case: &Case<Self::Config>) -> f64 {
        1.0
    }

    /// Every tensor, inputs first.
    fn tensors() -> Vec<TensorSpec>;

    /// The case table: small shapes that reach every branch, every family at least once.
    fn cases() -> Vec<Case<Self::Config>>;

    /// Cases of the size of preset `small`, for a GPU: they reach the launch configurations that training has, and the
    /// reference takes seconds for some of them.
    fn production() -> Vec<Case<Self::Config>> {
        Vec::new()
    }

    /// Random cases: shapes, families and options in combinations nobody wrote down.
    fn strategy() -> BoxedStrategy<Case<Self::Config>>;

    /// Inputs and parameters of a case. Called with a stream that depends on seed, stem and case name only.
    fn draw(case: &Case<Self::Config>, rng: &mut ChaCha8Rng) -> Values;

    /// The operation in plain loops over `f64`, sharing no code with the reference. `upstream` absent: forward only.
    /// `twist` names one term to break; an unknown name is a mistake that the `bite` gate reports.
    fn naive(
        config: &Self::Config,
        inputs: &Values,
        upstream: Option<&Values>,
        twist: Option<&str>,
    ) -> Run<ArrayD<f64>>;

    /// Laws for gate `meta`.
    fn laws() -> Vec<Law<Self>>;

    /// Hand-written mutants of `naive`, one per formula term. Those of outputs and gradients are generated besides.
    fn mutants() -> Vec<Mutant>;

    /// Tolerances for a case; the family may matter.
    fn tolerances(case: &Case<Self::Config>) -> Tolerances;

    /// Outputs whose upstream gradient may be absent: present only in cases that list the name in `present`.
    fn optional_upstream() -> &'static [&'static str] {
        &[]
    }

    /// Outputs that take no upstream gradient at all (diagnostics, in-place results).
    fn no_upstream() -> &'static [&'static str] {
        &[]
    }

    /// Inputs that are whole numbers (ids, steps, counters) and travel as `u32`.
    fn integers() -> &'static [&'static str] {
        &[]
    }

    /// The axis whose places belong to those of `axis`, as several value heads to a key head: place i of `axis` owns an
    /// equal share of them, the i-th. Law [`Law::Independent`] takes both.
    fn owned_axis(_axis: &str) -> Option<&'static str> {
        None
    }

    /// The inputs whose gradient is not the derivative under this config but passes a rounding by. Gates `fd` and `adj`
    /// leave them to `form` and to the operation's laws.
    fn straight_through(_config: &Self::Config) -> &'static [&'static str] {
        &[]
    }

    /// Whether the gates of devices run this case. They leave out what a device refuses, or would compile too long for.
    fn on_devices(_case: &Case<Self::Config>) -> bool {
        true
    }

    /// The size of a finite-difference direction for one input.
    fn direction_scale(_name: &str, values: &ArrayD<f64>) -> f64 {
        crate::draw::typical_magnitude(values)
    }

    /// The tensor's spec.
    ///
    /// # Panics
    /// If the name is unknown: a mistake in the description.
    fn spec(name: &str) -> TensorSpec {
        Self::tensors()
            .into_iter()
            .find(|s| s.name == name)
            .unwrap_or_else(|| panic!("{} has no tensor `{name}`", Self::STEM))
    }
}

/// How a description runs on a backend.
pub trait OperationOn<B: Tensors>: Operation {
    /// Forward, and backward if there is an upstream gradient. All handles are persistent.
    fn run(
        b: &B,
        config: &Self::Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>>;
}

/// Helpers for writing [`OperationOn::run`].
pub mod glue {
    use std::cell::Cell;

    use dormouse_reference::{DType, Error, Result, Tensors};

    use crate::named::Named;

    /// A look-up for the `from_named` of `fields!` structs.
    pub fn find<'a, X>(named: &'a Named<X>) -> impl FnMut(&'static str) -> Option<&'a X> {
        |name| named.get(name)
    }

    /// Turns a missing required tensor into an error.
    pub fn required<V>(op: &'static str, found: std::result::Result<V, &'static str>) -> Result<V> {
        found.map_err(|arg| Error::Presence {
            op,
            arg,
            expected: "present because the operation needs it",
            got: "absent",
        })
    }

    thread_local! {
        static EARLIER: Cell<f64> = const { Cell::new(0.0) };
    }

    /// What the gradients of parameters hold before a run adds to them.
    pub fn earlier_gradient() -> f64 {
        EARLIER.get()
    }

    /// Runs `f` with the gradients of parameters holding `earlier` everywhere, as after an earlier part of a batch.
    /// Gate `meta` uses it to see that gradients are added and not overwritten.
    pub fn with_earlier_gradient<R>(earlier: f64, f: impl FnOnce() -> R) -> R {
        EARLIER.set(earlier);
        let result = f();
        EARLIER.set(0.0);
        result
    }

    /// A tensor to accumulate the gradient of `like` into: zero, or what [`with_earlier_gradient`] says.
    pub fn zeros_like<B: Tensors>(b: &B, like: &B::Tensor) -> Result<B::Tensor> {
        let dtype = if b.dtype(like).is_float() { b.dtype(like) } else { DType::F32 };
        let into = b.persistent(b.shape(like), dtype)?;
        b.fill(&into, earlier_gradient())?;
        Ok(into)
    }

    /// The name of the input that the gradient field `field` (`dq`, `d_o`) belongs to.
    pub fn input_of(field: &'static str) -> &'static str {
        let name = field.strip_prefix('d').expect("gradient fields start with d");
        name.strip_prefix('_').unwrap_or(name)
    }
}
