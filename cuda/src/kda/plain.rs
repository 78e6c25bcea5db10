//! The recurrence, token by token.
//!
//! ```text
//! Sh_t = Diag(e^{g_t}) S_{t-1}      u_t = beta_t (v_t - Sh_t^T k_t)      S_t = Sh_t + k_t u_t^T      o_t = scale S_t^T q_t
//! ```
//!
//! **Forward.** Value columns of the state do not see each other, so a cube is a block of columns of a chain, and a unit
//! is one column: it alone reads and writes column j of S, which lies in shared memory.
//!
//! **Backward**, t = T..1, with D the gradient of S_t:
//!
//! ```text
//! M  = D + scale q do^T             z = M^T k                            dv = beta z
//! dq = scale (Sh do + k (u . do))   dk = M u - beta Sh z                 dbeta = z . (v - Sh^T k)
//! Dh = M - beta k z^T               dg = rowsum(Dh * Sh)                 D <- Diag(e^g) Dh
//! ```
//!
//! A cube is a chain and a launch is a block of columns: each adds to the sums over the value axis that the launch before
//! it left. A span of [`SPAN`] tokens is first run forward again from its checkpoint, which leaves Sh_t and
//! the error v_t - Sh_t^T k_t of each token in `scratch`. Then, per token, a unit is first one column (M and z), then one
//! row of the state (the sums over columns).

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::{Grads, Outputs};

use super::{Call, SPAN, Sizes, bytes, load_or_zero, optional, token_at, widest};
use crate::device::Device;
use crate::exp::exp_of_nonpositive;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Units of a cube of the backward pass.
const UNITS: u32 = 64;

/// What a kernel is compiled for; K and V are not part of it, so that few variants serve all shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Rows of the state in shared memory: K or more.
    rows: usize,
    /// Columns of the state that a cube holds.
    columns: usize,
}

impl Plan {
    fn new<R: Engine>(b: &Device<R>, kernel: &'static str, sizes: &Sizes) -> Result<Self> {
        let rows = sizes.key.next_power_of_two().max(16);
        // The state with a padded row, three vectors of K and four of the block.
        let bytes = |columns: usize| 4 * (rows * (columns + 1) + 3 * rows + 4 * columns);
        Ok(Self { rows, columns: widest(b, kernel, &[32, 16, 8], bytes)? })
    }
}

/// Runs every chain from its initial state, or zeros. Returns the state on entry to each span, `[B, H, spans, K, V]`.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Call<'_>, outputs: Outputs<&Tensor>) -> Result<Tensor> {
    const NAME: &str = "kda::plain_forward";
    let Call { inputs, sizes, scale, .. } = call;
    let plan = Plan::new(b, NAME, sizes)?;
    let states = b.float_scratch(&sizes.span_states())?;
    let cubes = sizes.chains() * sizes.value.div_ceil(plan.columns);
    let mut uses: Vec<&Tensor> = inputs.clone().named().into_iter().map(|(_, x)| x).collect();
    uses.extend([outputs.o, &states]);
    uses.extend(outputs.final_state);
    let grid = Grid::cubes(cubes, plan.columns as u32);
    b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
        // SAFETY: shapes were checked by the caller; channels and columns that do not exist are not touched.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                b.floats(inputs.q),
                b.floats(inputs.k),
                b.floats(inputs.v),
                b.floats(inputs.g),
                b.floats(inputs.beta),
                optional(b, inputs.initial_state),
                b.floats(outputs.o),
                optional(b, outputs.final_state),
                b.floats(&states),
                *scale,
                cubes as u32,
                sizes.time,
                sizes.heads,
                sizes.key,
                sizes.value,
                plan,
            )
        }
    })?;
    Ok(states)
}

#[cube(launch_unchecked)]
fn forward_kernel(
    q: &Floats,
    k: &Floats,
    v: &Floats,
    g: &Floats,
    beta: &Floats,
    initial_state: ComptimeOption<Floats>,
    o: &mut Floats,
    final_state: &mut ComptimeOption<Floats>,
    states: &mut Floats,
    scale: f32,
    cubes: u32,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
    #[comptime] plan: Plan,
) {
    let cube = CUBE_POS;
    if cube >= cubes as usize {
        terminate!();
    }
    let columns = plan.columns;
    let rows = plan.rows;
    let blocks = value.div_ceil(columns);
    let unit = UNIT_POS as usize;
    let chain = cube / blocks;
    let j = cube % blocks * columns + unit;
    let alive = j < value;
    let spans = time.div_ceil(comptime!(SPAN));

    let mut state = SharedMemory::<f32>::new(comptime!(rows * columns));
    let mut query = SharedMemory::<f32>::new(rows);
    let mut keys = SharedMemory::<f32>::new(rows);
    let mut decay = SharedMemory::<f32>::new(rows);
    for c in 0..key {
        state[c * columns + unit] = 0.0f32;
    }
    #[comptime]
    match initial_state {
        ComptimeOption::Some(initial) => {
            for c in 0..key {
                state[c * columns + unit] = load_or_zero(&initial, (chain * key + c) * value + j, alive);
            }
        }
        ComptimeOption::None => {}
    }
    for t in 0..time {
        if t % comptime!(SPAN) == 0 && alive {
            let entry = (chain * spans + t / comptime!(SPAN)) * key;
            for c in 0..key {
                states.set((entry + c) * value + j, state[c * columns + unit]);
            }
        }
        let at = token_at(chain, t, time, heads, key);
        sync_cube();
        for n in 0..key.div_ceil(columns) {
            let c = n * columns + unit;
            if c < key {
                query[c] = scale * q.at(at + c);
                keys[c] = k.at(at + c);
                decay[c] = exp_of_nonpositive(g.at(at + c));
            }
        }
        sync_cube();
        let mut recalled = 0.0f32;
        for c in 0..key {
            let faded = decay[c] * state[c * columns + unit];
            state[c * columns + unit] = faded;
            recalled += faded * keys[c];
        }
        let at = token_at(chain, t, time, heads, value) + j;
        let u = beta.at(token_at(chain, t, time, heads, 1usize)) * (load_or_zero(v, at, alive) - recalled);
        let mut read = 0.0f32;
        for c in 0..key {
            let written = state[c * columns + unit] + keys[c] * u;
            state[c * columns + unit] = written;
            read += written * query[c];
        }
        if alive {
            o.set(at, read);
        }
    }
    #[comptime]
    match final_state {
        ComptimeOption::Some(last) => {
            if alive {
                for c in 0..key {
                    last.set((chain * key + c) * value + j, state[c * columns + unit]);
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Writes every gradient. `states` are those of [`forward`].
pub(super) fn backward<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    states: &Tensor,
    upstream: Outputs<&Tensor>,
    grads: Grads<&Tensor>,
) -> Result<()> {
    const NAME: &str = "kda::plain_backward";
    let Call { inputs, sizes, scale, .. } = call;
    let plan = Plan::new(b, NAME, sizes)?;
    let scratch = b.float_scratch(&[sizes.chains(), SPAN, sizes.key + 1, plan.columns])?;
    let mut uses = vec![inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, states, upstream.o];
    uses.extend(upstream.final_state);
    uses.extend([grads.dq, grads.dk, grads.dv, grads.dg, grads.dbeta, &scratch]);
    uses.extend(grads.dinitial_state);
    for block in 0..sizes.value.div_ceil(plan.columns) {
        let grid = Grid::cubes(sizes.chains(), UNITS);
        b.launch(NAME, grid, bytes(uses.iter().copied()), &uses, |client, count, dim| {
            // SAFETY: shapes were checked by the caller; channels and columns that do not exist are not touched.
            unsafe {
                backward_kernel::launch_unchecked::<R>(
                    client,
                    count,
                    dim,
                    b.floats(inputs.q),
                    b.floats(inputs.k),
                    b.floats(inputs.v),
                    b.floats(inputs.g),
                    b.floats(inputs.beta),
                    b.floats(states),
                    b.floats(upstream.o),
                    optional(b, upstream.final_state),
                    b.floats(&scratch),
                    b.floats(grads.dq),
                    b.floats(grads.dk),
                    b.floats(grads.dv),
                    b.floats(grads.dg),
                    b.floats(grads.dbeta),
                    optional(b, grads.dinitial_state),
                    *scale,
                    block as u32,
                    sizes.chains() as u32,
                    sizes.time,
                    sizes.heads,
                    sizes.key,
                    sizes.value,
                    plan,
                )
            }
        })?;
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn backward_kernel(
    q: &Floats,
    k: &Floats,
    v: &Floats,
    g: &Floats,
    beta: &Floats,
    states: &Floats,
    d_o: &Floats,
    d_final: ComptimeOption<Floats>,
    scratch: &mut Floats,
    dq: &mut Floats,
    dk: &mut Floats,
    dv: &mut Floats,
    dg: &mut Floats,
    dbeta: &mut Floats,
    d_initial: &mut ComptimeOption<Floats>,
    scale: f32,
    block: u32,
    cubes: u32,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
    #[comptime] plan: Plan,
) {
    let chain = CUBE_POS;
    if chain >= cubes as usize {
        terminate!();
    }
    let rows = plan.rows;
    let columns = plan.columns;
    let stride = comptime!(columns + 1);
    let span = comptime!(SPAN);
    let units = comptime!(UNITS as usize);
    let unit = UNIT_POS as usize;
    let spans = time.div_ceil(span);
    // Per token of a span K rows of Sh and one of the error.
    let per_token = (key + 1) * columns;
    let base = chain * span * per_token;

    let mut d = SharedMemory::<f32>::new(comptime!(rows * stride));
    let mut query = SharedMemory::<f32>::new(rows);
    let mut keys = SharedMemory::<f32>::new(rows);
    let mut decay = SharedMemory::<f32>::new(rows);
    let mut upstream = SharedMemory::<f32>::new(columns);
    let mut u = SharedMemory::<f32>::new(columns);
    let mut z = SharedMemory::<f32>::new(columns);
    let mut products = SharedMemory::<f32>::new(columns);

    // As a column, this unit is number j of the value axis; the units behind the block only help as rows.
    let j = block as usize * columns + unit;
    let alive = unit < columns && j < value;
    sync_cube();
    if unit < columns {
        for c in 0..key {
            d[c * stride + unit] = 0.0f32;
        }
    }
    #[comptime]
    match &d_final {
        ComptimeOption::Some(last) => {
            if alive {
                for c in 0..key {
                    d[c * stride + unit] = last.at((chain * key + c) * value + j);
                }
            }
        }
        ComptimeOption::None => {}
    }
    for back in 0..spans {
        let n = spans - 1 - back;
        let start = n * span;
        let len = (time - start).min(span);
        // Run the span forward again.
        for i in 0..len {
            let at = token_at(chain, start + i, time, heads, key);
            sync_cube();
            for m in 0..key.div_ceil(units) {
                let c = m * units + unit;
                if c < key {
                    // What the token before wrote is added here, so its key is needed as well.
                    query[c] = keys[c];
                    keys[c] = k.at(at + c);
                    decay[c] = exp_of_nonpositive(g.at(at + c));
                }
            }
            sync_cube();
            if unit < columns {
                let here = base + i * per_token + unit;
                let mut recalled = 0.0f32;
                for c in 0..key {
                    let entry = if i == 0 {
                        load_or_zero(states, ((chain * spans + n) * key + c) * value + j, alive)
                    } else {
                        scratch.at(here - per_token + c * columns) + query[c] * u[unit]
                    };
                    let faded = decay[c] * entry;
                    scratch.set(here + c * columns, faded);
                    recalled += faded * keys[c];
                }
                let error = load_or_zero(v, token_at(chain, start + i, time, heads, value) + j, alive) - recalled;
                scratch.set(here + key * columns, error);
                u[unit] = beta.at(token_at(chain, start + i, time, heads, 1usize)) * error;
            }
        }
        sync_storage();
        for i_back in 0..len {
            let i = len - 1 - i_back;
            let t = start + i;
            let at = token_at(chain, t, time, heads, key);
            let at_value = token_at(chain, t, time, heads, value) + j;
            let at_token = token_at(chain, t, time, heads, 1usize);
            let here = base + i * per_token;
            let b = beta.at(at_token);
            sync_cube();
            for m in 0..key.div_ceil(units) {
                let c = m * units + unit;
                if c < key {
                    query[c] = scale * q.at(at + c);
                    keys[c] = k.at(at + c);
                    decay[c] = exp_of_nonpositive(g.at(at + c));
                }
            }
            sync_cube();
            if unit < columns {
                let arriving = load_or_zero(d_o, at_value, alive);
                let mut dot = 0.0f32;
                for c in 0..key {
                    let m = d[c * stride + unit] + query[c] * arriving;
                    d[c * stride + unit] = m;
                    dot += m * keys[c];
                }
                let error = scratch.at(here + key * columns + unit);
                upstream[unit] = arriving;
                z[unit] = dot;
                u[unit] = b * error;
                products[unit] = dot * error;
                if alive {
                    dv.set(at_value, b * dot);
                }
            }
            sync_cube();
            for m in 0..key.div_ceil(units) {
                let c = m * units + unit;
                if c < key {
                    let mut faded_do = 0.0f32;
                    let mut faded_z = 0.0f32;
                    let mut u_do = 0.0f32;
                    let mut m_u = 0.0f32;
                    let mut dh_faded = 0.0f32;
                    for n in 0..columns {
                        let faded = scratch.at(here + c * columns + n);
                        let grad = d[c * stride + n];
                        faded_do += faded * upstream[n];
                        faded_z += faded * z[n];
                        u_do += u[n] * upstream[n];
                        m_u += grad * u[n];
                        let dh = grad - b * keys[c] * z[n];
                        dh_faded += dh * faded;
                        d[c * stride + n] = decay[c] * dh;
                    }
                    let mut dq_sum = scale * (faded_do + keys[c] * u_do);
                    let mut dk_sum = m_u - b * faded_z;
                    let mut dg_sum = dh_faded;
                    if block > 0u32 {
                        dq_sum += dq.at(at + c);
                        dk_sum += dk.at(at + c);
                        dg_sum += dg.at(at + c);
                    }
                    dq.set(at + c, dq_sum);
                    dk.set(at + c, dk_sum);
                    dg.set(at + c, dg_sum);
                }
            }
            if unit == 0 {
                let mut sum = 0.0f32;
                for n in 0..columns {
                    sum += products[n];
                }
                if block > 0u32 {
                    sum += dbeta.at(at_token);
                }
                dbeta.set(at_token, sum);
            }
        }
    }
    sync_cube();
    #[comptime]
    match &mut *d_initial {
        ComptimeOption::Some(first) => {
            if alive {
                for c in 0..key {
                    first.set((chain * key + c) * value + j, d[c * stride + unit]);
                }
            }
        }
        ComptimeOption::None => {}
    }
}
