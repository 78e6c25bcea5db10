//! Arm `plain`: map after map as the equations say, and the gradient of u expert after expert.

use dormouse_reference::{Result, Tensors};

use super::{Backward, Call, Hidden, STEM, activation, down, gate, up};
use crate::arm::Arm;
use crate::device::Device;
use crate::factors::plain::{self, Saved};
use crate::matmul::{Plus, matrix, stack};
use crate::runtime::Engine;
use crate::tensor::Tensor;

/// What forward keeps of the maps.
pub(super) struct Maps {
    up: Saved,
    gate: Option<Saved>,
    down: Saved,
}

/// The hidden rows and y.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Call<'_>, into: &Hidden, y: &Tensor) -> Result<Maps> {
    let Call { u, params, sizes } = *call;
    let (h, g, act) = (&into.h, into.g.as_ref(), &into.act);
    let params = params.as_ref();
    let (rows, precision) = (sizes.rows, sizes.precision);
    let x = matrix(u, sizes.width);
    let kept_up = plain::forward(b, STEM, x, &up(&params), &sizes.up(), rows, precision, h)?;
    let kept_gate = match (gate(&params), g) {
        (Some(gate), Some(g)) => Some(plain::forward(b, STEM, x, &gate, &sizes.up(), rows, precision, g)?),
        _ => None,
    };
    activation::forward(b, Arm::Plain, h, g, act)?;
    let x = stack(act, rows, sizes.hidden);
    let kept_down = plain::forward(b, STEM, x, &down(&params), &sizes.down(), rows, precision, y)?;
    Ok(Maps { up: kept_up, gate: kept_gate, down: kept_down })
}

/// du; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>, saved: &Hidden, kept: &Maps) -> Result<()> {
    let Maps { up: kept_up, gate: kept_gate, down: kept_down } = kept;
    let Backward { call: Call { u, params, sizes }, dy, plus, ref into, du } = *call;
    let params = params.as_ref();
    let (rows, precision) = (sizes.rows, sizes.precision);
    let act = stack(&saved.act, rows, sizes.hidden);
    let (map, to) = (down(&params), down(into));
    let through = plain::backward(b, STEM, act, kept_down, &map, &sizes.down(), rows, precision, dy, &to)?;
    let dh = b.float_scratch(&sizes.hidden_shape())?;
    for e in 0..sizes.experts {
        let one = b.view(&dh, e * rows * sizes.hidden, &[rows, sizes.hidden])?;
        plain::into_x(b, STEM, &through, &map, &sizes.down(), rows, precision, e, Plus::Nothing, &one)?;
    }
    let dg = activation::backward(b, Arm::Plain, &saved.h, saved.g.as_ref(), &dh)?;
    let x = matrix(u, sizes.width);
    let map = up(&params);
    let through = plain::backward(b, STEM, x, kept_up, &map, &sizes.up(), rows, precision, &dh, &up(into))?;
    let mut sent = vec![(map, through)];
    if let (Some(map), Some(kept), Some(dg), Some(to)) = (gate(&params), kept_gate, &dg, gate(into)) {
        sent.push((map, plain::backward(b, STEM, x, kept, &map, &sizes.up(), rows, precision, dg, &to)?));
    }
    let mut plus = plus.map_or(Plus::Nothing, Plus::Matrix);
    for e in 0..sizes.experts {
        for (map, through) in &sent {
            plain::into_x(b, STEM, through, map, &sizes.up(), rows, precision, e, plus, du)?;
            plus = Plus::Destination;
        }
    }
    Ok(())
}
