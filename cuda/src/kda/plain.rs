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
//! With gates by channel, r = b * k with beta where a gate is absent:
//!
//! ```text
//! u  = w * v - Sh^T r      Dh = M - r z^T      dr = -Sh z      dk = M u + b * dr
//! dv = w * z               dw = v * z          db = k * dr     dbeta = sum of the gates' that are absent
//! ```
//!
//! A cube is a chain and a launch is a block of columns: each adds to the sums over the value axis that the launch before
//! it left. A span of [`SPAN`] tokens is first run forward again from its checkpoint, which leaves Sh_t and
//! the error v_t - Sh_t^T k_t (with gates u_t) of each token in `scratch`. Then, per token, a unit is first one column (M and z), then one
//! row of the state (the sums over columns).

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::{Grads, Outputs};

use super::chain::{Cuts, Group, chain_of_keys, cuts, group, whole_chain};
use super::{Call, SPAN, bytes, gate_or, load_or_zero, optional, widest};
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
    /// Whether there is a gate by channel.
    gated: bool,
}

impl Plan {
    fn new<R: Engine>(b: &Device<R>, kernel: &'static str, call: &Call<'_>) -> Result<Self> {
        let rows = call.sizes.key.next_power_of_two().max(16);
        // The state with a padded row, five vectors of K and four of the block.
        let bytes = |columns: usize| 4 * (rows * (columns + 1) + 5 * rows + 4 * columns);
        let columns = widest(b, kernel, &[32, 16, 8], bytes)?;
        let gated = call.inputs.b.is_some() || call.inputs.w.is_some();
        Ok(Self { rows, columns, gated })
    }

    /// Elements of a vector of K that only gates by channel need.
    const fn gate_rows(self) -> usize {
        if self.gated { self.rows } else { 1 }
    }
}

/// Runs every chain from its initial state, or zeros. Returns the state on entry to each span, `[spans of all chains, K, V]`.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Call<'_>, outputs: Outputs<&Tensor>) -> Result<Tensor> {
    const NAME: &str = "kda::plain_forward";
    let Call { inputs, sizes, scale, .. } = call;
    let plan = Plan::new(b, NAME, call)?;
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
                optional(b, inputs.b),
                optional(b, inputs.w),
                group(call),
                cuts(b, call),
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
    erase: &ComptimeOption<Floats>,
    write: &ComptimeOption<Floats>,
    group: &ComptimeOption<Group>,
    cuts: &ComptimeOption<Cuts>,
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
    let chain = whole_chain(cube / blocks, time, heads, cuts);
    let of_keys = chain_of_keys(&chain, group);
    let j = cube % blocks * columns + unit;
    let alive = j < value;

    let mut state = SharedMemory::<f32>::new(comptime!(rows * columns));
    let mut query = SharedMemory::<f32>::new(rows);
    let mut keys = SharedMemory::<f32>::new(rows);
    let mut decay = SharedMemory::<f32>::new(rows);
    // r = b * k.
    let mut erased = SharedMemory::<f32>::new(comptime!(plan.gate_rows()));
    for c in 0..key {
        state[c * columns + unit] = 0.0f32;
    }
    #[comptime]
    match initial_state {
        ComptimeOption::Some(initial) => {
            for c in 0..key {
                state[c * columns + unit] = load_or_zero(&initial, (chain.index * key + c) * value + j, alive);
            }
        }
        ComptimeOption::None => {}
    }
    for t in 0..chain.length {
        if t % comptime!(SPAN) == 0 && alive {
            let entry = chain.span(t / comptime!(SPAN)) * key;
            for c in 0..key {
                states.set((entry + c) * value + j, state[c * columns + unit]);
            }
        }
        let at = chain.at(t, key);
        let keys_at = of_keys.at(t, key);
        let strength = beta.at(chain.at(t, 1usize));
        sync_cube();
        for n in 0..key.div_ceil(columns) {
            let c = n * columns + unit;
            if c < key {
                query[c] = scale * q.at(keys_at + c);
                keys[c] = k.at(keys_at + c);
                decay[c] = exp_of_nonpositive(g.at(at + c));
                if comptime!(plan.gated) {
                    erased[c] = gate_or(erase, at + c, strength, true) * keys[c];
                }
            }
        }
        sync_cube();
        let mut recalled = 0.0f32;
        for c in 0..key {
            let faded = decay[c] * state[c * columns + unit];
            state[c * columns + unit] = faded;
            if comptime!(plan.gated) {
                recalled += faded * erased[c];
            } else {
                recalled += faded * keys[c];
            }
        }
        let at = chain.at(t, value) + j;
        let mut u = load_or_zero(v, at, alive);
        if comptime!(plan.gated) {
            u = gate_or(write, at, strength, alive) * u - recalled;
        } else {
            u = strength * (u - recalled);
        }
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
                    last.set((chain.index * key + c) * value + j, state[c * columns + unit]);
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
    let plan = Plan::new(b, NAME, call)?;
    let scratch = b.float_scratch(&[sizes.chains(), SPAN, sizes.key + 1, plan.columns])?;
    let mut uses = vec![inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, states, upstream.o];
    uses.extend(upstream.final_state);
    uses.extend([grads.dq, grads.dk, grads.dv, grads.dg, grads.dbeta, &scratch]);
    uses.extend(
        [inputs.b, inputs.w, inputs.cu_seqlens, grads.db, grads.dw, grads.dinitial_state].into_iter().flatten(),
    );
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
                    optional(b, inputs.b),
                    optional(b, inputs.w),
                    group(call),
                    cuts(b, call),
                    b.floats(states),
                    b.floats(upstream.o),
                    optional(b, upstream.final_state),
                    b.floats(&scratch),
                    b.floats(grads.dq),
                    b.floats(grads.dk),
                    b.floats(grads.dv),
                    b.floats(grads.dg),
                    b.floats(grads.dbeta),
                    optional(b, grads.db),
                    optional(b, grads.dw),
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
    erase: &ComptimeOption<Floats>,
    write: &ComptimeOption<Floats>,
    group: &ComptimeOption<Group>,
    cuts: &ComptimeOption<Cuts>,
    states: &Floats,
    d_o: &Floats,
    d_final: ComptimeOption<Floats>,
    scratch: &mut Floats,
    dq: &mut Floats,
    dk: &mut Floats,
    dv: &mut Floats,
    dg: &mut Floats,
    dbeta: &mut Floats,
    db: &mut ComptimeOption<Floats>,
    dw: &mut ComptimeOption<Floats>,
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
    let index = CUBE_POS;
    if index >= cubes as usize {
        terminate!();
    }
    let chain = whole_chain(index, time, heads, cuts);
    let of_keys = chain_of_keys(&chain, group);
    let rows = plan.rows;
    let columns = plan.columns;
    let stride = comptime!(columns + 1);
    let span = comptime!(SPAN);
    let units = comptime!(UNITS as usize);
    let unit = UNIT_POS as usize;
    let spans = chain.length.div_ceil(span);
    // Per token of a span K rows of Sh and one of the error.
    let per_token = (key + 1) * columns;
    let base = index * span * per_token;

    let mut d = SharedMemory::<f32>::new(comptime!(rows * stride));
    let mut query = SharedMemory::<f32>::new(rows);
    let mut keys = SharedMemory::<f32>::new(rows);
    let mut decay = SharedMemory::<f32>::new(rows);
    let mut upstream = SharedMemory::<f32>::new(columns);
    let mut u = SharedMemory::<f32>::new(columns);
    let mut z = SharedMemory::<f32>::new(columns);
    let mut products = SharedMemory::<f32>::new(columns);
    // r = b * k, and db.
    let mut erased = SharedMemory::<f32>::new(comptime!(plan.gate_rows()));
    let mut erase_grads = SharedMemory::<f32>::new(comptime!(plan.gate_rows()));

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
                    d[c * stride + unit] = last.at((index * key + c) * value + j);
                }
            }
        }
        ComptimeOption::None => {}
    }
    for back in 0..spans {
        let n = spans - 1 - back;
        let start = n * span;
        let len = (chain.length - start).min(span);
        // Run the span forward again.
        for i in 0..len {
            let at = chain.at(start + i, key);
            let keys_at = of_keys.at(start + i, key);
            let strength = beta.at(chain.at(start + i, 1usize));
            sync_cube();
            for m in 0..key.div_ceil(units) {
                let c = m * units + unit;
                if c < key {
                    // What the token before wrote is added here, so its key is needed as well.
                    query[c] = keys[c];
                    keys[c] = k.at(keys_at + c);
                    decay[c] = exp_of_nonpositive(g.at(at + c));
                    if comptime!(plan.gated) {
                        erased[c] = gate_or(erase, at + c, strength, true) * keys[c];
                    }
                }
            }
            sync_cube();
            if unit < columns {
                let here = base + i * per_token + unit;
                let mut recalled = 0.0f32;
                for c in 0..key {
                    let entry = if i == 0 {
                        load_or_zero(states, (chain.span(n) * key + c) * value + j, alive)
                    } else {
                        scratch.at(here - per_token + c * columns) + query[c] * u[unit]
                    };
                    let faded = decay[c] * entry;
                    scratch.set(here + c * columns, faded);
                    if comptime!(plan.gated) {
                        recalled += faded * erased[c];
                    } else {
                        recalled += faded * keys[c];
                    }
                }
                let at_value = chain.at(start + i, value) + j;
                let target = load_or_zero(v, at_value, alive);
                if comptime!(plan.gated) {
                    let written = gate_or(write, at_value, strength, alive) * target - recalled;
                    scratch.set(here + key * columns, written);
                    u[unit] = written;
                } else {
                    let error = target - recalled;
                    scratch.set(here + key * columns, error);
                    u[unit] = strength * error;
                }
            }
        }
        sync_storage();
        for i_back in 0..len {
            let i = len - 1 - i_back;
            let t = start + i;
            let at = chain.at(t, key);
            let keys_at = of_keys.at(t, key);
            let at_value = chain.at(t, value) + j;
            let at_token = chain.at(t, 1usize);
            let here = base + i * per_token;
            let strength = beta.at(at_token);
            sync_cube();
            for m in 0..key.div_ceil(units) {
                let c = m * units + unit;
                if c < key {
                    query[c] = scale * q.at(keys_at + c);
                    keys[c] = k.at(keys_at + c);
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
                upstream[unit] = arriving;
                z[unit] = dot;
                let left = scratch.at(here + key * columns + unit);
                if comptime!(plan.gated) {
                    u[unit] = left;
                    let product = dot * load_or_zero(v, at_value, alive);
                    if alive {
                        dv.set(at_value, gate_or(write, at_value, strength, true) * dot);
                    }
                    products[unit] = product;
                    #[comptime]
                    match &mut *dw {
                        ComptimeOption::Some(dw) => {
                            products[unit] = 0.0f32;
                            if alive {
                                dw.set(at_value, product);
                            }
                        }
                        ComptimeOption::None => {}
                    }
                } else {
                    u[unit] = strength * left;
                    products[unit] = dot * left;
                    if alive {
                        dv.set(at_value, strength * dot);
                    }
                }
            }
            sync_cube();
            for m in 0..key.div_ceil(units) {
                let c = m * units + unit;
                if c < key {
                    let strength = gate_or(erase, at + c, strength, true);
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
                        let dh = grad - strength * keys[c] * z[n];
                        dh_faded += dh * faded;
                        d[c * stride + n] = decay[c] * dh;
                    }
                    let mut dq_sum = scale * (faded_do + keys[c] * u_do);
                    let mut dk_sum = m_u - strength * faded_z;
                    let mut dg_sum = dh_faded;
                    if block > 0u32 {
                        dq_sum += dq.at(at + c);
                        dk_sum += dk.at(at + c);
                        dg_sum += dg.at(at + c);
                    }
                    dq.set(at + c, dq_sum);
                    dk.set(at + c, dk_sum);
                    dg.set(at + c, dg_sum);
                    if comptime!(plan.gated) {
                        let mut db_sum = -(keys[c] * faded_z);
                        erase_grads[c] = db_sum;
                        #[comptime]
                        match &mut *db {
                            ComptimeOption::Some(db) => {
                                if block > 0u32 {
                                    db_sum += db.at(at + c);
                                }
                                db.set(at + c, db_sum);
                                erase_grads[c] = 0.0f32;
                            }
                            ComptimeOption::None => {}
                        }
                    }
                }
            }
            if comptime!(plan.gated) {
                sync_cube();
            }
            if unit == 0 {
                let mut sum = 0.0f32;
                for n in 0..columns {
                    sum += products[n];
                }
                if comptime!(plan.gated) {
                    for c in 0..key {
                        sum += erase_grads[c];
                    }
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
                    first.set((index * key + c) * value + j, d[c * stride + unit]);
                }
            }
        }
        ComptimeOption::None => {}
    }
}
