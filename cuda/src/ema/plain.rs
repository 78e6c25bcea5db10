//! Arm `plain`: one launch a range, one unit an element.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::ema::{Config, Inputs};

use super::{OP, take};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Moves one element.
#[cube(launch_unchecked)]
fn update_kernel(online: &Floats, apply: &Floats, teacher: &mut Floats, first: u32, len: u32, take: f32) {
    if ABSOLUTE_POS < len as usize && apply.at(0) == 1.0f32 {
        let i = first as usize + ABSOLUTE_POS;
        let t = teacher.at(i);
        teacher.set(i, t + take * (online.at(i) - t));
    }
}

/// Moves every range.
pub(super) fn update<R: Engine>(b: &Device<R>, config: &Config, inputs: &Inputs<&Tensor>) -> Result<()> {
    let &Inputs { teacher, online, apply } = inputs;
    let uses = [online, apply, teacher];
    for range in &config.ranges {
        let bytes = 3 * 4 * range.len() as u64;
        b.launch(OP, Grid::units(range.len()), bytes, &uses, |client, count, dim| {
            let [online, apply, teacher] = uses.map(|t| b.floats(t));
            let (first, len) = (range.start as u32, range.len() as u32);
            // SAFETY: the range was checked to lie inside the buffers; units past it do nothing.
            unsafe {
                update_kernel::launch_unchecked::<R>(
                    client,
                    count,
                    dim,
                    online,
                    apply,
                    teacher,
                    first,
                    len,
                    take(config),
                )
            }
        })?;
    }
    Ok(())
}
