//! `engram`: e = the rows of the table side by side, m = gate (e W_value), gate = sigma(s / ((|s| + gate_eps)^(1/2) +
//! gate_eps^(1/2))), s = <e W_key / rms, c / rms> / D^(1/2) with rms^2 = mean square + eps.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::engram::{Config, Engram, Grads, Inputs, Outputs, Params};
use dormouse_reference::{Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, sigmoid, square};
use crate::shapes::{absent, check, full, small};
use crate::tape::Tape;

/// What forward keeps.
pub struct Saved<B: Backend> {
    tape: Tape<B>,
    rows: Vec<i64>,
    order: Option<Handle<B>>,
}

fn check_config(op: &'static str, config: &Config) -> Result<()> {
    full(op, config.precision)?;
    small(op, "eps", config.eps)?;
    small(op, "gate_eps", config.gate_eps)
}

/// Rows of `[N, D]` divided by the root of their mean square.
fn by_rms<A: Backend>(x: Tensor<A, 2>, eps: f64) -> Tensor<A, 2> {
    x.clone() / square(x).mean_dim(1).add_scalar(eps).sqrt()
}

/// Refuses rows that a table of `len` rows does not have; gives the others.
pub(crate) fn rows_of<B: Backend>(b: &Burn<B>, op: &'static str, tensor: &Handle<B>, len: usize) -> Result<Vec<i64>> {
    let rows = b.peek_integers(op, "rows", tensor)?;
    let Some(at) = rows.iter().position(|&row| row >= len as i64) else { return Ok(rows) };
    // Row-major: the last axis counts fastest.
    let mut rest = at;
    let mut index: Vec<usize> = tensor.shape().iter().rev().map(|&n| (rest % n, rest /= n).0).collect();
    index.reverse();
    let expected = format!("below {len}, the rows of `table`");
    Err(Error::Value { op, arg: "rows", expected, got: rows[at] as f64, index })
}

/// Refuses an `order` that is not the places of `rows` sorted by row, and by place within a row.
pub(crate) fn check_order<B: Backend>(b: &Burn<B>, op: &'static str, rows: &[i64], order: &Handle<B>) -> Result<()> {
    let given = b.peek_integers(op, "order", order)?;
    let mut sorted: Vec<i64> = (0..rows.len() as i64).collect();
    // A stable sort leaves the places of one row as they were: ascending.
    sorted.sort_by_key(|&place| rows[place as usize]);
    let Some(at) = (0..sorted.len()).find(|&at| given[at] != sorted[at]) else { return Ok(()) };
    let expected = "the places of `rows` sorted by row, and by place within a row".to_owned();
    Err(Error::Value { op, arg: "order", expected, got: given[at] as f64, index: vec![at] })
}

impl<B: Backend> Engram for Burn<B> {
    type Saved = Saved<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Saved<B>)> {
        const OP: &str = "engram::forward";
        check_config(OP, config)?;
        let args = [("c", inputs.c), ("rows", inputs.rows), ("table", params.table)];
        let mut dims = check(OP, &args, |name| match name {
            "c" => &["..", "D"],
            "rows" => &["..", "O"],
            _ => &["R", "W"],
        })?;
        let (n, d, o, w) = (dims.get("N"), dims.get("D"), dims.get("O"), dims.get("W"));
        dims.set("O W", o * w, "rows and table");
        dims.set("N O", n * o, "rows");
        for (name, param) in params.clone().named() {
            dims.bind(name, param.shape(), if name == "table" { &["R", "W"] } else { &["O W", "D"] })?;
        }
        if let Some(order) = inputs.order {
            dims.bind("order", order.shape(), &["N O"])?;
        }
        dims.positive(&["D", "O", "R", "W"])?;
        let table_rows = dims.get("R");
        let rows = rows_of(self, OP, inputs.rows, table_rows)?;
        let (places, eps, gate_eps) = (self.integers_of(rows.clone()), config.eps, config.gate_eps);
        let outputs = vec![("m", inputs.c.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, vec![("c", inputs.c)], params.named(), outputs, move |leaves| {
            let places = Tensor::from_inner(places.clone());
            let e = leaves.get("table", [table_rows, w]).select(0, places).reshape([n, o * w]);
            let key = by_rms(e.clone().matmul(leaves.get("key", [o * w, d])), eps);
            let value = e.matmul(leaves.get("value", [o * w, d]));
            let query = by_rms(leaves.get("c", [n, d]), eps);
            let s = (key * query).sum_dim(1).mul_scalar((d as f64).sqrt().recip());
            let root = s.clone().abs().add_scalar(gate_eps).sqrt();
            vec![flat(sigmoid(s / root.add_scalar(gate_eps.sqrt())) * value)]
        })?;
        let outputs = Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?;
        Ok((outputs, Saved { tape, rows, order: inputs.order.cloned() }))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<B>,
        upstream: Outputs<&Handle<B>>,
        plus: Option<&Handle<B>>,
        into: Params<&Handle<B>>,
    ) -> Result<Grads<Handle<B>>> {
        const OP: &str = "engram::backward";
        check_config(OP, config)?;
        let Some(order) = &saved.order else {
            let expected = "present because the table's gradient is summed in its order";
            return Err(Error::Presence { op: OP, arg: "order", expected, got: "absent" });
        };
        // Autodiff sums in its own order; a wrong one is refused as elsewhere.
        check_order(self, OP, &saved.rows, order)?;
        let plus = plus.into_iter().map(|plus| ("c", plus)).collect();
        let mut grads = saved.tape.backward(self, OP, upstream.named(), plus, into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
