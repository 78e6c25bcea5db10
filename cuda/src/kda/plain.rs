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
//! A cube is a chain. It takes one block of columns after the other, so that sums over the value axis are finished by the
//! unit that began them. A span of [`SPAN`] tokens is first run forward again from its checkpoint, which leaves Sh_t and
//! the error v_t - Sh_t^T k_t of each token in `scratch`. Then, per token, a unit is first one column (M and z), then one
//! row of the state (the sums over columns).

use cubecl::prelude::*;
use cubecl::server::Handle;
use dormouse_reference::kda::{Grads, Inputs, Outputs};

use super::{SPAN, Sizes, Unsupported, array, load_or_zero, optional, shared_memory, token_at, widest};

/// Units of a cube of the backward pass.
const UNITS: usize = 64;

/// The widest block of columns.
const WIDEST_BLOCK: usize = 32;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    key: usize,
    value: usize,
    /// Columns of the state that a cube holds at a time.
    columns: usize,
}

impl Plan {
    /// Blocks of columns, the last maybe partly dead.
    fn blocks(&self) -> usize {
        self.value.div_ceil(self.columns)
    }

    fn new(sizes: &Sizes, available: usize) -> Result<Self, Unsupported> {
        let (key, value) = (sizes.key, sizes.value);
        // The state with a padded row, three vectors of K and five of the block.
        let bytes = |columns: usize| 4 * (key * (columns + 1) + 3 * key + 5 * columns);
        Ok(Self { key, value, columns: widest(&[WIDEST_BLOCK, 16, 8], available, bytes)? })
    }
}

/// Elements of a chain's share of the backward pass's scratch, whatever the block turns out to be.
pub(crate) fn scratch_per_chain(key: usize, _value: usize) -> usize {
    SPAN * (key + 1) * WIDEST_BLOCK
}

/// Elements of the scratch buffer that [`backward`] needs.
#[must_use]
pub fn scratch(sizes: &Sizes) -> usize {
    sizes.chains() * scratch_per_chain(sizes.key, sizes.value)
}

/// Runs every chain from its initial state, or zeros. `states` receives the state on entry to each span,
/// `[B, H, spans, K, V]`.
///
/// # Errors
/// [`Unsupported`] if not even a narrow block fits the device's shared memory.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    sizes: &Sizes,
    scale: f32,
    inputs: Inputs<&Handle>,
    outputs: Outputs<&Handle>,
    states: Option<&Handle>,
) -> Result<(), Unsupported> {
    let plan = Plan::new(sizes, shared_memory(client))?;
    let cubes = sizes.chains() * plan.blocks();
    if cubes == 0 {
        return Ok(());
    }
    // SAFETY: offsets stay inside the lengths given here, see `Sizes`.
    unsafe {
        forward_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(plan.columns as u32),
            array(inputs.q, sizes.keys()),
            array(inputs.k, sizes.keys()),
            array(inputs.v, sizes.values()),
            array(inputs.g, sizes.keys()),
            array(inputs.beta, sizes.tokens()),
            optional(inputs.initial_state, sizes.state()),
            array(outputs.o, sizes.values()),
            optional(outputs.final_state, sizes.state()),
            optional(states, sizes.span_states()),
            scale,
            sizes.time,
            sizes.heads,
            plan,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn forward_kernel(
    q: &Array<f32>,
    k: &Array<f32>,
    v: &Array<f32>,
    g: &Array<f32>,
    beta: &Array<f32>,
    initial_state: ComptimeOption<Array<f32>>,
    o: &mut Array<f32>,
    final_state: &mut ComptimeOption<Array<f32>>,
    states: &mut ComptimeOption<Array<f32>>,
    scale: f32,
    time: usize,
    heads: usize,
    #[comptime] plan: Plan,
) {
    let key = plan.key;
    let value = plan.value;
    let columns = plan.columns;
    let blocks = comptime!(plan.blocks());
    let unit = UNIT_POS as usize;
    let chain = CUBE_POS_X as usize / blocks;
    let j = CUBE_POS_X as usize % blocks * columns + unit;
    let alive = j < value;
    let spans = time.div_ceil(comptime!(SPAN));

    let mut state = SharedMemory::<f32>::new(comptime!(key * columns));
    let mut query = SharedMemory::<f32>::new(key);
    let mut keys = SharedMemory::<f32>::new(key);
    let mut decay = SharedMemory::<f32>::new(key);
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
        #[comptime]
        match states {
            ComptimeOption::Some(states) => {
                if t % comptime!(SPAN) == 0 && alive {
                    let entry = (chain * spans + t / comptime!(SPAN)) * key;
                    for c in 0..key {
                        states[(entry + c) * value + j] = state[c * columns + unit];
                    }
                }
            }
            ComptimeOption::None => {}
        }
        let at = token_at(chain, t, time, heads, key);
        sync_cube();
        for n in 0..comptime!(key.div_ceil(columns)) {
            let c = n * columns + unit;
            if c < key {
                query[c] = scale * q[at + c];
                keys[c] = k[at + c];
                decay[c] = g[at + c].exp();
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
        let u = beta[token_at(chain, t, time, heads, 1usize)] * (load_or_zero(v, at, alive) - recalled);
        let mut read = 0.0f32;
        for c in 0..key {
            let written = state[c * columns + unit] + keys[c] * u;
            state[c * columns + unit] = written;
            read += written * query[c];
        }
        if alive {
            o[at] = read;
        }
    }
    #[comptime]
    match final_state {
        ComptimeOption::Some(last) => {
            if alive {
                for c in 0..key {
                    last[(chain * key + c) * value + j] = state[c * columns + unit];
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Writes every gradient. `states` are those of [`forward`], `scratch` has [`scratch`] elements of any content.
///
/// # Errors
/// [`Unsupported`] if not even a narrow block fits the device's shared memory.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    sizes: &Sizes,
    scale: f32,
    inputs: Inputs<&Handle>,
    states: &Handle,
    upstream: Outputs<&Handle>,
    scratch_buffer: &Handle,
    grads: Grads<&Handle>,
) -> Result<(), Unsupported> {
    let plan = Plan::new(sizes, shared_memory(client))?;
    if sizes.chains() == 0 {
        return Ok(());
    }
    // SAFETY: offsets stay inside the lengths given here, see `Sizes`.
    unsafe {
        backward_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(sizes.chains() as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(inputs.q, sizes.keys()),
            array(inputs.k, sizes.keys()),
            array(inputs.v, sizes.values()),
            array(inputs.g, sizes.keys()),
            array(inputs.beta, sizes.tokens()),
            array(states, sizes.span_states()),
            array(upstream.o, sizes.values()),
            optional(upstream.final_state, sizes.state()),
            array(scratch_buffer, scratch(sizes)),
            array(grads.dq, sizes.keys()),
            array(grads.dk, sizes.keys()),
            array(grads.dv, sizes.values()),
            array(grads.dg, sizes.keys()),
            array(grads.dbeta, sizes.tokens()),
            optional(grads.dinitial_state, sizes.state()),
            scale,
            sizes.time,
            sizes.heads,
            plan,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn backward_kernel(
    q: &Array<f32>,
    k: &Array<f32>,
    v: &Array<f32>,
    g: &Array<f32>,
    beta: &Array<f32>,
    states: &Array<f32>,
    d_o: &Array<f32>,
    d_final: ComptimeOption<Array<f32>>,
    scratch: &mut Array<f32>,
    dq: &mut Array<f32>,
    dk: &mut Array<f32>,
    dv: &mut Array<f32>,
    dg: &mut Array<f32>,
    dbeta: &mut Array<f32>,
    d_initial: &mut ComptimeOption<Array<f32>>,
    scale: f32,
    time: usize,
    heads: usize,
    #[comptime] plan: Plan,
) {
    let key = plan.key;
    let value = plan.value;
    let columns = plan.columns;
    let stride = comptime!(columns + 1);
    let span = comptime!(SPAN);
    let units = comptime!(UNITS);
    let unit = UNIT_POS as usize;
    let chain = CUBE_POS_X as usize;
    let spans = time.div_ceil(span);
    // Per token of a span K rows of Sh and one of the error.
    let per_token = comptime!((key + 1) * columns);
    let base = chain * comptime!(scratch_per_chain(key, value));

    let mut d = SharedMemory::<f32>::new(comptime!(key * stride));
    let mut query = SharedMemory::<f32>::new(key);
    let mut keys = SharedMemory::<f32>::new(key);
    let mut decay = SharedMemory::<f32>::new(key);
    let mut upstream = SharedMemory::<f32>::new(columns);
    let mut u = SharedMemory::<f32>::new(columns);
    let mut z = SharedMemory::<f32>::new(columns);
    let mut products = SharedMemory::<f32>::new(columns);

    for block in 0..comptime!(plan.blocks()) {
        // As a column, this unit is number j of the value axis; the units behind the block only help as rows.
        let j = block * columns + unit;
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
                        d[c * stride + unit] = last[(chain * key + c) * value + j];
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
                for m in 0..comptime!(key.div_ceil(units)) {
                    let c = m * units + unit;
                    if c < key {
                        // What the token before wrote is added here, so its key is needed as well.
                        query[c] = keys[c];
                        keys[c] = k[at + c];
                        decay[c] = g[at + c].exp();
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
                            scratch[here - per_token + c * columns] + query[c] * u[unit]
                        };
                        let faded = decay[c] * entry;
                        scratch[here + c * columns] = faded;
                        recalled += faded * keys[c];
                    }
                    let error = load_or_zero(v, token_at(chain, start + i, time, heads, value) + j, alive) - recalled;
                    scratch[here + key * columns] = error;
                    u[unit] = beta[token_at(chain, start + i, time, heads, 1usize)] * error;
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
                let b = beta[at_token];
                sync_cube();
                for m in 0..comptime!(key.div_ceil(units)) {
                    let c = m * units + unit;
                    if c < key {
                        query[c] = scale * q[at + c];
                        keys[c] = k[at + c];
                        decay[c] = g[at + c].exp();
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
                    let error = scratch[here + key * columns + unit];
                    upstream[unit] = arriving;
                    z[unit] = dot;
                    u[unit] = b * error;
                    products[unit] = dot * error;
                    if alive {
                        dv[at_value] = b * dot;
                    }
                }
                sync_cube();
                for m in 0..comptime!(key.div_ceil(units)) {
                    let c = m * units + unit;
                    if c < key {
                        let mut faded_do = 0.0f32;
                        let mut faded_z = 0.0f32;
                        let mut u_do = 0.0f32;
                        let mut m_u = 0.0f32;
                        let mut dh_faded = 0.0f32;
                        for n in 0..columns {
                            let faded = scratch[here + c * columns + n];
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
                        if block > 0 {
                            dq_sum += dq[at + c];
                            dk_sum += dk[at + c];
                            dg_sum += dg[at + c];
                        }
                        dq[at + c] = dq_sum;
                        dk[at + c] = dk_sum;
                        dg[at + c] = dg_sum;
                    }
                }
                if unit == 0 {
                    let mut sum = 0.0f32;
                    for n in 0..columns {
                        sum += products[n];
                    }
                    if block > 0 {
                        sum += dbeta[at_token];
                    }
                    dbeta[at_token] = sum;
                }
            }
        }
        sync_cube();
        #[comptime]
        match &mut *d_initial {
            ComptimeOption::Some(first) => {
                if alive {
                    for c in 0..key {
                        first[(chain * key + c) * value + j] = d[c * stride + unit];
                    }
                }
            }
            ComptimeOption::None => {}
        }
    }
}
