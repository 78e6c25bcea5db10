//! The operations of the n-gram memory.

use dormouse_cuda::{Device, Engine, Tensor};
use dormouse_reference::engram::{self, Engram};
use dormouse_reference::engram_hash::{self, EngramHash};
use dormouse_reference::row_adam::{self, RowAdam};
use dormouse_reference::{DType, Precision, Result, Tensors};
use ndarray::{ArrayD, IxDyn};

use super::{F32, Operation, PRODUCTS, Sizes, from_now, from_zero, zeros};
use crate::common::Draw;

/// Rows of the n-gram table that a position has.
const ORDERS: usize = engram_hash::ORDERS.len();

/// Rows of the n-gram table.
fn table(s: &Sizes) -> usize {
    ORDERS * s.table_rows
}

/// Rows of the n-gram table for every position, and their places by row.
fn keys<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<[Tensor; 2]> {
    let rows = draw.ids(&s.tokens(ORDERS), table(s))?;
    let held: Vec<u32> = draw.b.download(&rows)?.iter().map(|&row| row as u32).collect();
    let order: Vec<f64> = engram_hash::order(&held).into_iter().map(f64::from).collect();
    let order = ArrayD::from_shape_vec(IxDyn(&[order.len()]), order).expect("one place for every row");
    Ok([rows, draw.send(&order, DType::U32)?])
}

pub fn engram<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let inputs_of = ORDERS * s.row_width;
    let [rows, order] = keys(draw, s)?;
    let inputs = engram::Inputs { c: draw.noise(&s.tokens(s.width))?, rows, order: Some(order) };
    let mut weight = || draw.map(&[inputs_of, s.width], |x| x * (3.0 / inputs_of as f64).sqrt());
    let (key, value) = (weight()?, weight()?);
    let params = engram::Params { table: draw.noise(&[table(s), s.row_width])?, key, value };
    let upstream = engram::Outputs { m: draw.noise(&s.tokens(s.width))? };
    let plus = draw.noise(&s.tokens(s.width))?;
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{} rows of {} to {:?}", table(s), s.row_width, s.tokens(s.width)),
        precisions: PRODUCTS,
        // The two projections, twice as much on the way back.
        flops: 12.0 * (s.rows() * inputs_of * s.width) as f64,
        state: from_zero(into.as_ref().named()),
        call: call!(
            Engram,
            |precision| engram::Config { eps: 1e-5, gate_eps: 1e-2, precision },
            inputs,
            upstream,
            params,
            into,
            Some(&plus)
        ),
    })
}

pub fn engram_hash<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let ids = draw.ids(&[s.batch, s.time], 256)?;
    let config = engram_hash::Config { rows: s.table_rows };
    Ok(Operation {
        shape: format!("[{}, {}] to {ORDERS} rows each", s.batch, s.time),
        precisions: F32,
        flops: 0.0,
        state: Vec::new(),
        call: Box::new(move |b, _| {
            let outputs = EngramHash::forward(b, &config, engram_hash::Inputs { ids: &ids, mask: None })?;
            Ok(outputs.named())
        }),
    })
}

pub fn row_adam<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let shape = [table(s), s.row_width];
    let [rows, order] = keys(draw, s)?;
    // Rows as small as a step, so that a wrong step shows.
    let state = row_adam::State {
        table: draw.map(&shape, |x| 1e-3 * x)?,
        grads: draw.map(&shape, |x| 1e-2 * x)?,
        m: draw.map(&shape, |x| 1e-2 * x)?,
        v: draw.map(&shape, |x| 1e-4 * x * x)?,
        counts: draw.ids(&shape[..1], 100)?,
    };
    let scalars = row_adam::Scalars {
        lr: draw.map(&[1], |_| 1e-3)?,
        scale: draw.map(&[1], |_| 0.7)?,
        apply: draw.map(&[1], |_| 1.0)?,
    };
    let changed = vec![("table", &state.table), ("m", &state.m), ("v", &state.v), ("counts", &state.counts)];
    Ok(Operation {
        shape: format!("{} places in {shape:?}", ORDERS * s.rows()),
        precisions: F32,
        flops: 0.0,
        state: from_now(draw.b, changed)?,
        call: Box::new(move |b, _| {
            let config = row_adam::Config { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
            let touched = row_adam::Touched { rows: &rows, order: &order };
            RowAdam::update(b, &config, state.as_ref(), touched, scalars.as_ref())?;
            Ok(Vec::new())
        }),
    })
}
