//! `kda`: the recurrence, token by token, whatever form the config asks for.
//!
//! Sh = Diag(e^g) S, u = w * v - Sh^T (b * k), S <- Sh + k u^T, o = scale S^T q, with b = w = beta where there are no
//! gates by channel. All chains of sequences that are equally long run at once, a chain being one sequence and value
//! head.

use std::ops::Range;

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Outputs};
use dormouse_reference::{Dims, Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, config as option, full};
use crate::tape::{Leaves, Tape, Tracked};

const TOKENS_BY_KEY: &[&str] = &["B", "T", "HV", "K"];
const TOKENS_BY_VALUE: &[&str] = &["B", "T", "HV", "V"];

fn state_symbols(packed: bool) -> &'static [&'static str] {
    if packed { &["N", "HV", "K", "V"] } else { &["B", "HV", "K", "V"] }
}

fn check_config(op: &'static str, config: &Config) -> Result<()> {
    full(op, config.precision)?;
    option(op, "chunk", config.form != Form::Chunked { chunk: 0 }, "at least 1", 0)?;
    option(op, "checkpoint_every", config.checkpoint_every > 0, "at least 1", 0)?;
    let scale = config.scale.unwrap_or(1.0);
    option(op, "scale", scale.is_finite(), "finite, or none for K^(-1/2)", scale)
}

/// The lengths of everything.
#[derive(Clone)]
struct Lengths {
    batch: usize,
    time: usize,
    key_heads: usize,
    heads: usize,
    k: usize,
    v: usize,
    /// Tokens of every sequence in one row, or none where every batch entry is a sequence.
    packed: Option<Vec<Range<usize>>>,
}

impl Lengths {
    fn sequences(&self) -> usize {
        self.packed.as_ref().map_or(self.batch, Vec::len)
    }

    fn o(&self) -> Vec<usize> {
        vec![self.batch, self.time, self.heads, self.v]
    }

    fn state(&self) -> Vec<usize> {
        vec![self.sequences(), self.heads, self.k, self.v]
    }
}

/// Checks every input; `cuts` is what `cu_seqlens` holds.
fn lengths<B: Backend>(op: &'static str, inputs: &Inputs<&Handle<B>>, cuts: Option<&[i64]>) -> Result<Lengths> {
    let mut dims = Dims::new(op);
    if let Some(cuts) = inputs.cu_seqlens {
        dims.bind("cu_seqlens", cuts.shape(), &["N + 1"])?;
        dims.positive(&["N + 1"])?;
        dims.set("N", cuts.len() - 1, "cu_seqlens");
    }
    for (name, tensor) in inputs.clone().named().into_iter().filter(|(name, _)| *name != "cu_seqlens") {
        let symbols = match name {
            "q" | "k" => &["B", "T", "H", "K"],
            "v" | "w" => TOKENS_BY_VALUE,
            "beta" => &["B", "T", "HV"],
            "initial_state" => state_symbols(cuts.is_some()),
            _ => TOKENS_BY_KEY,
        };
        dims.bind(name, tensor.shape(), symbols)?;
    }
    dims.positive(&["H", "HV", "K", "V"])?;
    let [batch, time, key_heads, heads, k, v] = ["B", "T", "H", "HV", "K", "V"].map(|symbol| dims.get(symbol));
    let refuse =
        |arg, expected: String, got: &Handle<B>| Err(Error::Shape { op, arg, expected, got: got.shape().to_vec() });
    if !heads.is_multiple_of(key_heads) {
        return refuse("v", format!("HV a multiple of H = {key_heads} (H from `q`)"), inputs.v);
    }
    if cuts.is_some() && batch != 1 {
        return refuse("q", "B = 1, since `cu_seqlens` cuts one row into sequences".to_owned(), inputs.q);
    }
    if let Some(cuts) = cuts {
        let last = cuts.len() - 1;
        let falls = cuts.windows(2).position(|pair| pair[1] < pair[0]).map(|before| before + 1);
        let short = (cuts[last] != time as i64).then_some(last);
        let at = (cuts[0] != 0).then_some(0).or(falls).or(short);
        if let Some(at) = at {
            let (expected, got) = (format!("a rise from 0 to T = {time}"), cuts[at] as f64);
            return Err(Error::Value { op, arg: "cu_seqlens", expected, got, index: vec![at] });
        }
    }
    let packed = cuts.map(|cuts| cuts.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect());
    Ok(Lengths { batch, time, key_heads, heads, k, v, packed })
}

/// Tokens and state of chains of one length, rows of tokens as `[chains, T, width]`.
struct Chains<A: Backend> {
    q: Tensor<A, 3>,
    k: Tensor<A, 3>,
    v: Tensor<A, 3>,
    decay: Tensor<A, 3>,
    erase: Tensor<A, 3>,
    write: Tensor<A, 3>,
    state: Tensor<A, 3>,
}

impl<A: Backend> Chains<A> {
    /// What the queries read, and the last state.
    fn run(self) -> (Tensor<A, 3>, Tensor<A, 3>) {
        let mut state = self.state;
        let mut read = Vec::new();
        for t in 0..self.q.dims()[1] {
            let at = |x: &Tensor<A, 3>| x.clone().narrow(1, t, 1);
            let key = at(&self.k);
            let forgotten = at(&self.decay).swap_dims(1, 2) * state;
            let recalled = (at(&self.erase) * key.clone()).matmul(forgotten.clone());
            let u = at(&self.write) * at(&self.v) - recalled;
            state = forgotten + key.swap_dims(1, 2).matmul(u);
            read.push(at(&self.q).matmul(state.clone()));
        }
        (Tensor::cat(read, 1), state)
    }
}

/// o and the final states, flat.
fn equation<B: Backend>(leaves: &Leaves<B>, l: &Lengths, scale: f64) -> Vec<Tensor<Tracked<B>, 1>> {
    let Lengths { batch, time, key_heads, heads, k, v, .. } = *l;
    let states = leaves.find("initial_state", [l.sequences(), heads, k, v]).unwrap_or_else(|| {
        let like = leaves.get("v", [batch * time * heads * v]);
        Tensor::zeros([l.sequences(), heads, k, v], (&like.device(), like.dtype()))
    });
    if time == 0 {
        return vec![leaves.get("v", [0]), flat(states)];
    }
    let by_value = |name, width| leaves.find(name, [batch, time, heads, width]);
    // Every value head reads the key head whose group it is in.
    let by_key = |name| {
        let x = leaves.get(name, [batch, time, key_heads, 1, k]).repeat_dim(3, heads / key_heads);
        x.reshape([batch, time, heads, k])
    };
    let (q, keys, decay) = (by_key("q"), by_key("k"), leaves.get("g", [batch, time, heads, k]).exp());
    let beta = leaves.get("beta", [batch, time, heads, 1]);
    let values = leaves.get("v", [batch, time, heads, v]);
    let erase = by_value("b", k).unwrap_or_else(|| beta.clone());
    let write = by_value("w", v).unwrap_or(beta);
    // Sequences of the batch entries `entries` that hold the tokens `tokens`, the first of them being number `first`.
    let run = |entries: usize, tokens: Range<usize>, first: usize| {
        let chains = entries * heads;
        let part = |x: &Tensor<Tracked<B>, 4>| {
            let width = x.dims()[3];
            let x = x.clone().narrow(1, tokens.start, tokens.len());
            x.swap_dims(1, 2).reshape([chains, tokens.len(), width])
        };
        let state = states.clone().narrow(0, first, entries).reshape([chains, k, v]);
        let (q, k, v, decay) = (part(&q), part(&keys), part(&values), part(&decay));
        Chains { q, k, v, decay, erase: part(&erase), write: part(&write), state }.run()
    };
    let rows = |o: Tensor<Tracked<B>, 3>, entries: usize| {
        let tokens = o.dims()[1];
        o.reshape([entries, heads, tokens, v]).swap_dims(1, 2)
    };
    let (read, last) = match &l.packed {
        None => {
            let (o, last) = run(batch, 0..time, 0);
            (rows(o, batch), last)
        }
        Some(sequences) => {
            let (mut read, mut last) = (Vec::new(), Vec::new());
            for (n, tokens) in sequences.iter().enumerate() {
                // A sequence without tokens leaves its state as it is.
                if tokens.is_empty() {
                    last.push(states.clone().narrow(0, n, 1).reshape([heads, k, v]));
                    continue;
                }
                let (o, state) = run(1, tokens.clone(), n);
                read.push(rows(o, 1));
                last.push(state);
            }
            (Tensor::cat(read, 1), Tensor::cat(last, 0))
        }
    };
    vec![flat(read.mul_scalar(scale)), flat(last)]
}

/// What forward keeps.
pub struct Saved<B: Backend> {
    tape: Tape<B>,
    lengths: Lengths,
}

impl<B: Backend> Kda for Burn<B> {
    type Saved = Saved<B>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Saved<B>)> {
        const OP: &str = "kda::forward";
        check_config(OP, config)?;
        let cuts = inputs.cu_seqlens.map(|cuts| self.peek_integers(OP, "cu_seqlens", cuts)).transpose()?;
        let lengths = lengths(OP, &inputs, cuts.as_deref())?;
        let scale = config.scale.unwrap_or_else(|| (lengths.k as f64).sqrt().recip());
        let real = Inputs { cu_seqlens: None, ..inputs }.named();
        let outputs = vec![("o", lengths.o()), ("final_state", lengths.state())];
        let of_equation = lengths.clone();
        let (mut out, tape) =
            Tape::run(self, OP, real, vec![], outputs, move |leaves| equation(leaves, &of_equation, scale))?;
        let outputs = Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?;
        Ok((outputs, Saved { tape, lengths }))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Saved<B>, upstream: Outputs<&Handle<B>>) -> Result<Grads<Handle<B>>> {
        const OP: &str = "kda::backward";
        check_config(OP, config)?;
        let refuse = |arg, expected: Vec<usize>, got: &Handle<B>| {
            let good = *got.shape() == *expected;
            let got = got.shape().to_vec();
            if good { Ok(()) } else { Err(Error::Shape { op: OP, arg, expected: format!("{expected:?}"), got }) }
        };
        refuse("o", saved.lengths.o(), upstream.o)?;
        if let Some(state) = upstream.final_state {
            refuse("final_state", saved.lengths.state(), state)?;
        }
        let mut grads = saved.tape.backward(self, OP, upstream.named(), vec![], vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
