//! What a form works on: one sequence of one value head.

use std::ops::Range;

use super::Inputs;
use crate::scalar::Scalar;

/// Lengths of the axes.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// H
    pub key_heads: usize,
    /// HV
    pub heads: usize,
    /// K
    pub key: usize,
    /// V
    pub value: usize,
    /// Where each sequence starts among the B * T tokens, and where the last one ends.
    pub offsets: Vec<usize>,
}

impl Shape {
    pub fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The tokens of a sequence.
    pub fn tokens(&self, sequence: usize) -> Range<usize> {
        self.offsets[sequence]..self.offsets[sequence + 1]
    }

    pub fn chains(&self) -> usize {
        self.sequences() * self.heads
    }

    /// Numbers in a state.
    pub fn state(&self) -> usize {
        self.key * self.value
    }

    /// Value heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.key_heads
    }
}

/// One (sequence, value head): everything a form needs to run it, token by token.
pub(crate) struct Chain<'a, T> {
    inputs: &'a Inputs<&'a [T]>,
    shape: &'a Shape,
    /// sequence * HV + head.
    index: usize,
    head: usize,
    key_head: usize,
    tokens: Range<usize>,
    pub scale: T,
    /// Tokens in a segment, the stretch from one checkpoint to the next.
    pub segment: usize,
}

impl<'a, T: Scalar> Chain<'a, T> {
    /// Chain `index` = sequence * HV + head; `segment` gets the sequence's length.
    pub fn new(
        inputs: &'a Inputs<&'a [T]>,
        shape: &'a Shape,
        index: usize,
        scale: f64,
        segment: impl Fn(usize) -> usize,
    ) -> Self {
        let (sequence, head) = (index / shape.heads, index % shape.heads);
        let tokens = shape.tokens(sequence);
        let segment = segment(tokens.len());
        let key_head = head / shape.group();
        Self { inputs, shape, index, head, key_head, tokens, scale: T::from_f64(scale), segment }
    }

    /// Row `t` of a tensor that has one for every value head.
    #[inline(always)]
    pub fn row(&self, tensor: &'a [T], t: usize, width: usize) -> &'a [T] {
        let start = ((self.tokens.start + t) * self.shape.heads + self.head) * width;
        &tensor[start..start + width]
    }

    /// Row `t` of a tensor that has one for every key head.
    #[inline(always)]
    fn key_row(&self, tensor: &'a [T], t: usize) -> &'a [T] {
        let width = self.shape.key;
        let start = ((self.tokens.start + t) * self.shape.key_heads + self.key_head) * width;
        &tensor[start..start + width]
    }

    #[inline(always)]
    pub fn q(&self, t: usize) -> &'a [T] {
        self.key_row(self.inputs.q, t)
    }

    #[inline(always)]
    pub fn k(&self, t: usize) -> &'a [T] {
        self.key_row(self.inputs.k, t)
    }

    #[inline(always)]
    pub fn v(&self, t: usize) -> &'a [T] {
        self.row(self.inputs.v, t, self.shape.value)
    }

    #[inline(always)]
    pub fn g(&self, t: usize) -> &'a [T] {
        self.row(self.inputs.g, t, self.shape.key)
    }

    #[inline(always)]
    pub fn beta(&self, t: usize) -> T {
        self.row(self.inputs.beta, t, 1)[0]
    }

    /// b_t: K numbers, or beta alone where that is the strength in every channel.
    #[inline(always)]
    pub fn erase(&self, t: usize) -> &'a [T] {
        match self.inputs.b {
            Some(b) => self.row(b, t, self.shape.key),
            None => self.row(self.inputs.beta, t, 1),
        }
    }

    /// w_t: V numbers, or beta alone where that is the strength in every channel.
    #[inline(always)]
    pub fn write(&self, t: usize) -> &'a [T] {
        match self.inputs.w {
            Some(w) => self.row(w, t, self.shape.value),
            None => self.row(self.inputs.beta, t, 1),
        }
    }

    /// Whether a gate by channel stands in for beta.
    pub fn has_gates(&self) -> bool {
        self.inputs.b.is_some() || self.inputs.w.is_some()
    }

    /// Tokens, K, V.
    #[inline(always)]
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.tokens.len(), self.shape.key, self.shape.value)
    }

    /// The state before the first token.
    pub fn initial_state(&self) -> Vec<T> {
        let len = self.shape.state();
        match self.inputs.initial_state {
            Some(states) => states[self.index * len..][..len].to_vec(),
            None => vec![T::zero(); len],
        }
    }
}
