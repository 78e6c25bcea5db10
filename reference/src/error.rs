//! The library's one error type: every message names the operation, the argument, what was expected and what came.

use std::sync::Arc;

use crate::tensor::DType;

/// What the library refuses.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A tensor has the wrong shape.
    #[error("{op}: `{arg}` is {got:?}, expected {expected}")]
    Shape {
        /// The operation and direction, such as `kda::forward`.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
        /// The expected shape in symbols and numbers.
        expected: String,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// A tensor has the wrong element type.
    #[error("{op}: `{arg}` is stored as {got}, expected {expected}")]
    Storage {
        /// The operation and direction.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
        /// The accepted element types.
        expected: String,
        /// The element type that came.
        got: DType,
    },
    /// A tensor holds a value outside the operation's domain. Raised by [`crate::Checked`] and by host-side checks.
    #[error("{op}: `{arg}`{index:?} is {got}, expected {expected}")]
    Value {
        /// The operation and direction.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
        /// What values are accepted.
        expected: String,
        /// The value that came.
        got: f64,
        /// Where it is.
        index: Vec<usize>,
    },
    /// A field of an operation's `Config` is out of its range.
    #[error("{op}: config `{field}` is {got}, expected {expected}")]
    Config {
        /// The operation and direction.
        op: &'static str,
        /// The field's name.
        field: &'static str,
        /// What is accepted, and what to do instead.
        expected: String,
        /// What came.
        got: String,
    },
    /// An optional argument is absent where the call needs it, or present where it has no meaning.
    #[error("{op}: `{arg}` is {got}, expected it {expected}")]
    Presence {
        /// The operation and direction.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
        /// `present because ...` or `absent because ...`.
        expected: &'static str,
        /// `present` or `absent`.
        got: &'static str,
    },
    /// Scratch memory was used after the step it belongs to.
    #[error("{op}: `{arg}` is scratch of an ended step; keep what must outlive a step with `Tensors::keep`")]
    StaleScratch {
        /// The operation that touched it.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
    },
    /// A place that needs persistent memory got scratch.
    #[error("{op}: `{arg}` is scratch, expected a persistent tensor, since it must outlive the step")]
    NotPersistent {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
    },
    /// An in-place operation got one allocation for two arguments.
    #[error("{op}: `{arg}` shares its allocation with `{other}`, expected an allocation of its own")]
    Aliased {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        arg: &'static str,
        /// The name of the argument it shares with.
        other: &'static str,
    },
    /// The host tried to read or write device memory inside a step, which a captured graph cannot do.
    #[error("{op}: host exchange inside step `{step}`; upload before it, download after it")]
    HostExchangeInStep {
        /// `upload`, `download` or `persistent`.
        op: &'static str,
        /// The purpose of the running step.
        step: &'static str,
    },
    /// A step was started inside a step.
    #[error("step `{inner}` started inside step `{outer}`; steps do not nest")]
    NestedStep {
        /// The step that was running.
        outer: &'static str,
        /// The step that was asked for.
        inner: &'static str,
    },
    /// A view reaches past the end of its tensor.
    #[error("view: elements {start}..{end} of a tensor with {len} elements")]
    View {
        /// First element of the view.
        start: usize,
        /// One past the last element of the view.
        end: usize,
        /// Elements the tensor has.
        len: usize,
    },
    /// A fault of a device behind a backend: out of memory, a kernel that did not compile, a lost device.
    #[error(transparent)]
    Device(Arc<dyn std::error::Error + Send + Sync>),
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
