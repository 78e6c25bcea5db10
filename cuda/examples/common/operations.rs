//! One call of every operation, with everything it is called with.

use dormouse_cuda::{Device, Engine, Tensor};
use dormouse_reference::adamw::{self, Adamw};
use dormouse_reference::blend::{self, Blend};
use dormouse_reference::controller::{self, Controller};
use dormouse_reference::cross_entropy::{self, CrossEntropy};
use dormouse_reference::decay_gate::{self, DecayGate};
use dormouse_reference::embedding::{self, Embedding};
use dormouse_reference::expert::{self, Expert};
use dormouse_reference::gated_rms_norm::{self, GatedRmsNorm};
use dormouse_reference::l2_norm::{self, L2Norm};
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::muon::{self, Muon};
use dormouse_reference::record::Record;
use dormouse_reference::residual::{self, Residual};
use dormouse_reference::retract::{self, Retract};
use dormouse_reference::retract_all::{self, RetractAll};
use dormouse_reference::rms_norm::{self, RmsNorm};
use dormouse_reference::sanitise::{self, Sanitise};
use dormouse_reference::short_conv::{self, ShortConv};
use dormouse_reference::spectral::{self, Spectral};
use dormouse_reference::{DType, FactorFormat, Precision, Result, Tensors};
use ndarray::{ArrayD, IxDyn};

use crate::common::{Draw, Results, kda};

/// The sizes of a model and its batch.
pub struct Sizes {
    pub batch: usize,
    pub time: usize,
    pub width: usize,
    pub heads: usize,
    /// K and V.
    pub head: usize,
    pub ffn: usize,
    pub rank: usize,
    pub experts: usize,
    pub vocab: usize,
    /// Rows of one order of the n-gram table, and their width.
    pub table_rows: usize,
    pub row_width: usize,
    /// Elements of the flat buffers.
    pub params: usize,
}

impl Sizes {
    /// The preset `small`.
    pub const SMALL: Self = Self {
        batch: 8,
        time: 512,
        width: 768,
        heads: 12,
        head: 64,
        ffn: 2048,
        rank: 64,
        experts: 3,
        vocab: 256,
        table_rows: 32_768,
        row_width: 32,
        params: 8_996_429,
    };

    /// What the software driver can do in a moment.
    pub const TINY: Self = Self {
        batch: 2,
        time: 20,
        width: 32,
        heads: 2,
        head: 16,
        ffn: 48,
        rank: 8,
        experts: 2,
        vocab: 16,
        table_rows: 40,
        row_width: 8,
        params: 10_001,
    };

    fn rows(&self) -> usize {
        self.batch * self.time
    }

    /// `[B, T, width]` for any width.
    fn tokens(&self, width: usize) -> [usize; 3] {
        [self.batch, self.time, width]
    }

    /// `[B, T, H, K]`
    fn by_head(&self) -> [usize; 4] {
        [self.batch, self.time, self.heads, self.head]
    }

    /// `[E, B, T, D]`
    fn by_expert(&self) -> [usize; 4] {
        [self.experts, self.batch, self.time, self.width]
    }
}

/// Runs an operation once and gives what it returns.
type Call<R> = Box<dyn Fn(&Device<R>, Precision) -> Result<Results>>;

/// One operation with everything it is called with.
pub struct Operation<R: Engine> {
    pub shape: String,
    pub precisions: &'static [Precision],
    /// Two for every product of two numbers in matrix products.
    pub flops: f64,
    /// What a call changes in place, and its values before the first call.
    pub state: Vec<(&'static str, Tensor, ArrayD<f64>)>,
    pub call: Call<R>,
}

/// Prepares an operation.
pub type Prepare<R> = fn(&mut Draw<'_, R>, &Sizes) -> Result<Operation<R>>;

/// Every operation by its stem, in alphabetical order.
pub fn all<R: Engine>() -> [(&'static str, Prepare<R>); 28] {
    [
        ("adamw", adamw),
        ("blend", blend),
        ("controller", controller),
        ("cross_entropy", cross_entropy),
        ("decay_gate", decay_gate),
        ("ema", objective::ema),
        ("embedding", embedding),
        ("engram", memory::engram),
        ("engram_hash", memory::engram_hash),
        ("expert", expert),
        ("gated_rms_norm", gated_rms_norm),
        ("jepa", objective::jepa),
        ("kda", kda),
        ("koleo", objective::koleo),
        ("l2_norm", l2_norm),
        ("layer_norm", objective::layer_norm),
        ("linear", linear),
        ("mask_vector", objective::mask_vector),
        ("muon", muon),
        ("record", record),
        ("residual", residual),
        ("retract", retract),
        ("retract_all", retract_all),
        ("rms_norm", rms_norm),
        ("row_adam", memory::row_adam),
        ("sanitise", sanitise),
        ("short_conv", short_conv),
        ("spectral", spectral),
    ]
}

const F32: &[Precision] = &[Precision::Full];

/// Tf32 lies between the two and is left out.
const PRODUCTS: &[Precision] = &[Precision::Full, Precision::Bf16];

/// A call of forward and backward; with parameters, their gradients go to `into`. `config` is a function of the
/// precision.
macro_rules! call {
    ($operation:ident, $config:expr, $inputs:ident, $upstream:ident) => {
        Box::new(move |b: &Device<R>, precision: Precision| {
            let config = $config(precision);
            let (outputs, saved) = $operation::forward(b, &config, $inputs.as_ref())?;
            let grads = $operation::backward(b, &config, &saved, $upstream.as_ref())?;
            Ok(outputs.named().into_iter().chain(grads.named()).collect())
        })
    };
    ($operation:ident, $config:expr, $inputs:ident, $upstream:ident, $params:ident, $into:ident $(, $plus:expr)?) => {
        Box::new(move |b: &Device<R>, precision: Precision| {
            let config = $config(precision);
            let (outputs, saved) = $operation::forward(b, &config, $inputs.as_ref(), $params.as_ref())?;
            let grads = $operation::backward(b, &config, &saved, $upstream.as_ref() $(, $plus)?, $into.as_ref())?;
            Ok(outputs.named().into_iter().chain(grads.named()).collect())
        })
    };
}

mod memory;
/// The operations of the JEPA objective; it uses the macro above.
mod objective;

/// A tensor of zeros that sums are added to, by name.
fn zeros<R: Engine>(b: &Device<R>, like: &Tensor) -> Result<Tensor> {
    b.persistent(like.shape(), DType::F32)
}

/// Tensors that start at zero as an operation's state.
fn from_zero(named: Vec<(&'static str, &Tensor)>) -> Vec<(&'static str, Tensor, ArrayD<f64>)> {
    named.into_iter().map(|(name, tensor)| (name, tensor.clone(), ArrayD::zeros(IxDyn(tensor.shape())))).collect()
}

/// The same with the values that they hold.
fn from_now<R: Engine>(
    b: &Device<R>,
    named: Vec<(&'static str, &Tensor)>,
) -> Result<Vec<(&'static str, Tensor, ArrayD<f64>)>> {
    named.into_iter().map(|(name, tensor)| Ok((name, tensor.clone(), b.download(tensor)?))).collect()
}

fn adamw<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    // Parameters as small as a step, so that a wrong step shows.
    let state = adamw::State {
        params: draw.map(&[s.params], |x| 1e-3 * x)?,
        grads: draw.map(&[s.params], |x| 1e-2 * x)?,
        m: draw.map(&[s.params], |x| 1e-2 * x)?,
        v: draw.map(&[s.params], |x| 1e-4 * x * x)?,
    };
    let scalars = adamw::Scalars {
        lr: draw.map(&[1], |_| 1e-3)?,
        scale: draw.map(&[1], |_| 0.7)?,
        apply: draw.map(&[1], |_| 1.0)?,
        updates: draw.send(&ArrayD::from_elem(IxDyn(&[1]), 3.0), DType::U32)?,
    };
    let cut = s.params * 9 / 10;
    let groups = [(0..cut, 0.1), (cut..s.params, 0.0)];
    let groups = groups.map(|(range, weight_decay)| adamw::Group { range, weight_decay }).to_vec();
    let config = adamw::Config { beta1: 0.9, beta2: 0.95, eps: 1e-8, groups };
    Ok(Operation {
        shape: format!("P {}, 2 groups", s.params),
        precisions: F32,
        flops: 0.0,
        state: from_now(draw.b, vec![("params", &state.params), ("m", &state.m), ("v", &state.v)])?,
        call: Box::new(move |b, _| {
            Adamw::update(b, &config, state.as_ref(), scalars.as_ref())?;
            Ok(Vec::new())
        }),
    })
}

fn blend<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    let inputs = blend::Inputs {
        gates: draw.map(&s.tokens(3 + s.experts), |x| 0.5 + 0.4 * x)?,
        attn: draw.noise(&rows)?,
        dense: draw.noise(&rows)?,
        experts: draw.noise(&s.by_expert())?,
        memory: Some(draw.noise(&rows)?),
    };
    let upstream = blend::Outputs { y: draw.noise(&rows)? };
    Ok(Operation {
        shape: format!("{rows:?}, E {}, with memory", s.experts),
        precisions: F32,
        flops: 0.0,
        state: Vec::new(),
        call: call!(Blend, |_| blend::Config { lam_max: 0.5 }, inputs, upstream),
    })
}

fn controller<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let (rows, experts) = (s.tokens(s.width), s.experts);
    let inputs = controller::Inputs { c: draw.noise(&rows)?, x0: draw.noise(&rows)? };
    let plus = controller::Inputs { c: draw.noise(&rows)?, x0: draw.noise(&rows)? };
    let scale = (2.0 * s.width as f64).powf(-0.5);
    let params = controller::Params { weight: draw.map(&[2 * s.width, 3 + experts], |x| scale * x)? };
    let upstream = controller::Outputs { gates: draw.noise(&s.tokens(3 + experts))? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    let config = move |precision| controller::Config { precision, experts };
    Ok(Operation {
        shape: format!("c, x0 {rows:?} to {}", 3 + experts),
        precisions: PRODUCTS,
        flops: 6.0 * (s.rows() * 2 * s.width * (3 + experts)) as f64,
        state: from_zero(into.as_ref().named()),
        call: call!(Controller, config, inputs, upstream, params, into, plus.as_ref().map(|_, x| Some(x))),
    })
}

fn cross_entropy<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let logits = s.tokens(s.vocab);
    let inputs = cross_entropy::Inputs {
        logits: draw.noise(&logits)?,
        targets: draw.ids(&[s.batch, s.time], s.vocab)?,
        mask: None,
    };
    let upstream = cross_entropy::Outputs { loss: draw.map(&[1], |_| 0.5)?, nll: None };
    let denominator = Some(s.rows());
    Ok(Operation {
        shape: format!("{logits:?}"),
        precisions: F32,
        flops: 0.0,
        state: Vec::new(),
        call: call!(CrossEntropy, |_| cross_entropy::Config { denominator }, inputs, upstream),
    })
}

fn decay_gate<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let (wide, one) = (s.by_head(), [s.batch, s.time, s.heads]);
    let inputs = decay_gate::Inputs { z: draw.noise(&wide)?, y: draw.noise(&one)? };
    let params = decay_gate::Params {
        a_log: draw.map(&[s.heads], |x| 0.3 * x)?,
        dt_bias: draw.map(&[s.heads, s.head], |x| x - 3.0)?,
    };
    let upstream = decay_gate::Outputs { g: draw.map(&wide, |x| 0.5 + x)?, beta: draw.noise(&one)? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    let kind = decay_gate::Kind::Bounded { lower_bound: -5.0 };
    Ok(Operation {
        shape: format!("{wide:?}"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(DecayGate, |_| decay_gate::Config { kind, beta_scale: 1.0 }, inputs, upstream, params, into),
    })
}

fn embedding<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    let inputs = embedding::Inputs { ids: draw.ids(&[s.batch, s.time], s.vocab)? };
    let params = embedding::Params { table: draw.noise(&[s.vocab, s.width])? };
    let upstream = embedding::Outputs { x: draw.noise(&rows)? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{} rows to {rows:?}", s.vocab),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: Box::new(move |b, _| {
            let config = embedding::Config {};
            let (outputs, saved) = Embedding::forward(b, &config, inputs.as_ref(), params.as_ref())?;
            Embedding::backward(b, &config, &saved, upstream.as_ref(), into.as_ref())?;
            Ok(outputs.named())
        }),
    })
}

fn expert<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let (rows, &Sizes { experts, width, ffn, rank, .. }) = (s.tokens(s.width), s);
    let mut factor = |n: usize| draw.map(&[experts, n, rank], |x| x * (3.0 / n as f64).sqrt());
    let (up_u, up_v, down_u, down_v) = (factor(width)?, factor(ffn)?, factor(ffn)?, factor(width)?);
    let mut singular = || draw.map(&[experts, rank], |x| 1.0 + 0.3 * x);
    let (up_s, down_s) = (singular()?, singular()?);
    let params = expert::Params { up_u, up_s, up_v, down_u, down_s, down_v, gate_u: None, gate_s: None, gate_v: None };
    let inputs = expert::Inputs { u: draw.map(&rows, |x| 4.0 * x)? };
    let upstream = expert::Outputs { y: draw.noise(&s.by_expert())? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("u {rows:?}, E {experts}, f {ffn}, rank {rank}"),
        precisions: PRODUCTS,
        flops: 6.0 * (s.rows() * experts * 2 * (width + ffn) * rank) as f64,
        state: from_zero(into.as_ref().named()),
        call: call!(
            Expert,
            |precision| expert::Config { precision, ffn: expert::Ffn::Silu, format: FactorFormat::F32 },
            inputs,
            upstream,
            params,
            into,
            None
        ),
    })
}

fn gated_rms_norm<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let wide = s.by_head();
    let inputs = gated_rms_norm::Inputs { o: draw.noise(&wide)?, zeta: draw.noise(&wide)? };
    let params = gated_rms_norm::Params { gain: draw.map(&[s.head], |x| 1.0 + 0.3 * x)? };
    let upstream = gated_rms_norm::Outputs { y: draw.noise(&wide)? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{wide:?}"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(GatedRmsNorm, |_| gated_rms_norm::Config { eps: 1e-8 }, inputs, upstream, params, into),
    })
}

fn kda<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let problem = kda::Problem::new(draw, [s.batch, s.time, s.heads, s.head, s.head], false)?;
    // The recurrence has three products with the state forward (what k reads, what is written, what q reads) and seven
    // backward; a chunked form has more, so it may be slower than the floor says and no faster.
    let flops = 20.0 * (s.rows() * s.heads * s.head * s.head) as f64;
    Ok(Operation {
        shape: format!("{:?}, V = K", s.by_head()),
        precisions: PRODUCTS,
        flops,
        state: Vec::new(),
        call: Box::new(move |b, precision| kda::pass(b, precision, &problem)),
    })
}

fn l2_norm<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let wide = s.by_head();
    let inputs = l2_norm::Inputs { x: draw.noise(&wide)? };
    let upstream = l2_norm::Outputs { y: draw.noise(&wide)? };
    Ok(Operation {
        shape: format!("{wide:?}"),
        precisions: F32,
        flops: 0.0,
        state: Vec::new(),
        call: call!(L2Norm, |_| l2_norm::Config { eps: 1e-6 }, inputs, upstream),
    })
}

fn linear<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let (rows, width) = (s.tokens(s.width), s.width);
    let inputs = linear::Inputs { x: draw.noise(&rows)? };
    let params = linear::Params { weight: draw.map(&[width, width], |x| x * (width as f64).powf(-0.5))?, bias: None };
    let (upstream, plus) = (linear::Outputs { y: draw.noise(&rows)? }, draw.noise(&rows)?);
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?} to {width}"),
        precisions: PRODUCTS,
        flops: 6.0 * (s.rows() * width * width) as f64,
        state: from_zero(into.as_ref().named()),
        call: call!(Linear, |precision| linear::Config { precision }, inputs, upstream, params, into, Some(&plus)),
    })
}

fn muon<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    // The projections of q, k and v by head, the factors of the experts and of the output map, two projections of the
    // memory: shape, heads.
    let &Sizes { width, heads, head, ffn, rank, experts, .. } = s;
    let mut shapes = vec![([1, width, width], heads); 3];
    shapes.extend([width, ffn, ffn, width].map(|n| ([experts, n, rank], 1)));
    shapes.extend([([1, width, rank], 1); 2]);
    shapes.extend([([1, head * 3 / 2, width], 1); 2]);
    let (iterations, mut start, mut flops) = (8, 0, 0.0);
    let mut matrices = Vec::new();
    for (shape @ [e, rows, columns], heads) in shapes {
        let (k, n) = (rows.min(columns / heads), rows.max(columns / heads));
        flops += (e * heads * iterations * (4 * k * k * n + 2 * k * k * k)) as f64;
        let matrix = muon::Matrix { start, shape, heads, scale: 1.0, weight_decay: 0.0 };
        start = matrix.range().end;
        matrices.push(matrix);
    }
    let state = muon::State {
        params: draw.map(&[s.params], |x| 1e-2 * x)?,
        grads: draw.map(&[s.params], |x| 1e-2 * x)?,
        m: draw.map(&[s.params], |x| 1e-2 * x)?,
    };
    let scalars = muon::Scalars { lr: draw.map(&[1], |_| 0.02)?, apply: draw.map(&[1], |_| 1.0)? };
    let batching = muon::Batching::Batched;
    let config = muon::Config { momentum: 0.95, iterations, plus: true, batching, matrices };
    Ok(Operation {
        shape: format!("{} entries, {start} elements, {iterations} iterations", config.matrices.len()),
        precisions: F32,
        flops,
        state: from_now(draw.b, vec![("params", &state.params), ("m", &state.m)])?,
        call: Box::new(move |b, _| {
            Muon::update(b, &config, state.as_ref(), scalars.as_ref())?;
            Ok(Vec::new())
        }),
    })
}

fn record<R: Engine>(draw: &mut Draw<'_, R>, _: &Sizes) -> Result<Operation<R>> {
    // Losses, norm, count of the non-finite, scale, flag, spreads: what a step records.
    let lengths = [2, 1, 1, 1, 1, 8];
    let values = lengths.iter().map(|&n| draw.noise(&[n])).collect::<Result<Vec<_>>>()?;
    let step = draw.send(&ArrayD::from_elem(IxDyn(&[1]), 1003.0), DType::U32)?;
    let ring = draw.b.persistent(&[256, lengths.iter().sum()], DType::F32)?;
    Ok(Operation {
        shape: format!("{lengths:?}"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(vec![("ring", &ring)]),
        call: Box::new(move |b, _| {
            Record::update(b, &values.iter().collect::<Vec<_>>(), &step, &ring)?;
            Ok(Vec::new())
        }),
    })
}

fn residual<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    // Branch and gradient have a mean, so that their sum of products is no difference of large numbers.
    let inputs = residual::Inputs { c: draw.noise(&rows)?, y: draw.map(&rows, |x| 0.5 + x)? };
    let params = residual::Params { rho: draw.map(&[1], |_| 0.9)? };
    let upstream = residual::Outputs { h: draw.map(&rows, |x| 0.5 + x)? };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?}"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(Residual, |_| residual::Config {}, inputs, upstream, params, into),
    })
}

fn retract<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    // Numbers without order are nearly orthonormal columns where there are many rows.
    let factor = draw.noise(&[s.experts, s.ffn, s.rank])?;
    let apply = draw.map(&[1], |_| 1.0)?;
    let config = retract::Config { iterations: 4, power_iterations: 5 };
    Ok(Operation {
        shape: format!("{:?}, 4 iterations", factor.shape()),
        precisions: F32,
        // The Gram matrix of the columns and one product of the columns with a small matrix.
        flops: 4.0 * (s.experts * s.ffn * s.rank * s.rank) as f64,
        state: from_now(draw.b, vec![("factor", &factor)])?,
        call: Box::new(move |b, _| Ok(Retract::update(b, &config, &factor, &apply)?.named())),
    })
}

fn retract_all<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    // The factors of the experts, of the output map and of the head.
    let &Sizes { width, ffn, rank, experts, vocab, .. } = s;
    let mut shapes: Vec<[usize; 3]> = [width, ffn, ffn, width].map(|n| [experts, n, rank]).to_vec();
    shapes.extend([width, width, width, vocab].map(|n| [1, n, rank]));
    let mut factors = Vec::new();
    let mut start = 0;
    for shape in shapes {
        let factor = retract_all::Factor { start, shape };
        start = factor.range().end;
        factors.push(factor);
    }
    let (params, apply) = (draw.noise(&[start])?, draw.map(&[1], |_| 1.0)?);
    let config = retract_all::Config { iterations: 4, power_iterations: 5, factors };
    Ok(Operation {
        shape: format!("{} factors, {start} elements, 4 iterations", config.factors.len()),
        precisions: F32,
        flops: 4.0 * (start * rank) as f64,
        state: from_now(draw.b, vec![("params", &params)])?,
        call: Box::new(move |b, _| Ok(RetractAll::update(b, &config, &params, &apply)?.named())),
    })
}

fn rms_norm<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let rows = s.tokens(s.width);
    let inputs = rms_norm::Inputs { x: draw.noise(&rows)? };
    let params = rms_norm::Params {
        gain: draw.map(&[s.width], |x| 1.0 + 0.3 * x)?,
        shift: Some(draw.map(&[s.width], |x| 0.3 * x)?),
    };
    let upstream = rms_norm::Outputs { y: draw.noise(&rows)?, c: Some(draw.noise(&rows)?) };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?}, with shift"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(RmsNorm, |_| rms_norm::Config { eps: 1e-3 }, inputs, upstream, params, into),
    })
}

fn sanitise<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let (grads, losses) = (draw.noise(&[s.params])?, draw.noise(&[2])?);
    let counters = draw.b.persistent(&[4], DType::U32)?;
    let clip = std::iter::once(0..s.params).collect();
    let config = sanitise::Config { max_norm: Some(1.0), clip, skips_allowed: 3 };
    Ok(Operation {
        shape: format!("P {}", s.params),
        precisions: F32,
        flops: 0.0,
        state: from_zero(vec![("counters", &counters)]),
        call: Box::new(move |b, _| Ok(Sanitise::update(b, &config, &grads, &losses, &counters)?.named())),
    })
}

fn short_conv<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let channels = s.heads * s.head;
    let rows = s.tokens(channels);
    let inputs = short_conv::Inputs { x: draw.noise(&rows)?, context: None };
    let params = short_conv::Params { weight: draw.map(&[short_conv::WIDTH, channels], |x| 0.5 * x)?, bias: None };
    let upstream = short_conv::Outputs { y: draw.noise(&rows)?, context: None };
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?}"),
        precisions: F32,
        flops: 0.0,
        state: from_zero(into.as_ref().named()),
        call: call!(ShortConv, |_| short_conv::Config {}, inputs, upstream, params, into),
    })
}

fn spectral<R: Engine>(draw: &mut Draw<'_, R>, s: &Sizes) -> Result<Operation<R>> {
    let (rows, &Sizes { width, rank, .. }) = (s.tokens(s.width), s);
    let mut factor = || draw.map(&[width, rank], |x| x * (3.0 / width as f64).sqrt());
    let (u, v) = (factor()?, factor()?);
    let params = spectral::Params { u, s: draw.map(&[rank], |x| 1.0 + 0.3 * x)?, v };
    let inputs = spectral::Inputs { x: draw.noise(&rows)? };
    let (upstream, plus) = (spectral::Outputs { y: draw.noise(&rows)? }, draw.noise(&rows)?);
    let into = params.as_ref().try_map(|_, p| zeros(draw.b, p))?;
    Ok(Operation {
        shape: format!("{rows:?} to {width}, rank {rank}"),
        precisions: PRODUCTS,
        flops: 6.0 * (s.rows() * 2 * width * rank) as f64,
        state: from_zero(into.as_ref().named()),
        call: call!(
            Spectral,
            |precision| spectral::Config { precision, format: FactorFormat::F32 },
            inputs,
            upstream,
            params,
            into,
            Some(&plus)
        ),
    })
}
