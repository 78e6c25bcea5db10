//! `expert`: the equations are in `dormouse_reference::expert`, how each arm orders those of a map in
//! [`factors`](crate::factors).
//!
//! Arm `fused` has two ways. [`chained`] never writes the hidden rows `[E, N, F]`; it rounds between the maps, so it is
//! for tf32 and bf16, and it is for silu, ranks up to 64 and devices with shared memory enough: `chained::Plans` says
//! when. Everything else goes product by product, [`fused`].
//!
//! With a format other than f32, both ways begin with one launch that rounds all factors, [`factors::format`].
//!
//! Saved: the inputs, the rounded factors and the short rows a of every map; with `chained` the packed factors; without it h and g and the
//! activation, and in arm `fused` the scaled factors. The derivatives of the activation are computed again in backward,
//! which is cheaper than to write and read them.

mod activation;
mod chain;
mod chained;
mod fused;
mod pack;
mod plain;
mod words;

use dormouse_reference::expert::{Config, Expert, Ffn, Grads, Inputs, Outputs, Params, bind_params, check_gate};
use dormouse_reference::{Dims, FactorFormat, Precision, Result, stacked};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::factors::{self, Factors, format};
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "expert";

/// Numbered from 1: the first seven in the kernels of [`factors`], then those here; 15 in [`factors::format`]. The last two
/// leave out the last token or the last part of the tokens.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("forward-without-s"),
    Mutant::fused("dx-without-s"),
    Mutant::fused("du-without-s"),
    Mutant::fused("dv-without-s"),
    Mutant::fused("ds-times-s"),
    Mutant::fused("ds-misses-last-row"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("sigmoid-for-silu"),
    Mutant::fused("gate-without-silu"),
    Mutant::fused("slope-without-second-term"),
    Mutant::fused("dh-without-gate"),
    Mutant::fused("dg-without-h"),
    Mutant::fused("du-misses-last-expert"),
    Mutant::fused("ternary-share-dropped"),
    Mutant::fused("backward-with-masters"),
    Mutant::fused("du-misses-tokens"),
    Mutant::fused("dv-misses-tokens"),
];

/// The fault of [`factors::format`] that a mutant is; `spectral` plants the others.
fn fault(mutant: u32) -> u32 {
    if mutant == 15 { 4 } else { 0 }
}

/// What `forward` hands to `backward`.
pub struct Saved {
    u: Tensor,
    /// The masters.
    params: Params<Tensor>,
    /// The same with every U and V as their format has them.
    used: Params<Tensor>,
    way: Way,
}

/// How forward went, with what it kept. There is one a call, so its size does not matter.
#[allow(clippy::large_enum_variant)]
enum Way {
    Plain(Hidden, plain::Maps),
    Fused(Hidden, fused::Saved),
    Chained(chained::Saved),
}

/// The hidden rows.
struct Hidden {
    /// `[E, N, F]`
    h: Tensor,
    /// `[E, N, F]`, with a gate.
    g: Option<Tensor>,
    /// `[E, N, F]`
    act: Tensor,
}

impl Hidden {
    fn new<R: Engine>(b: &Device<R>, sizes: &Sizes, ffn: Ffn) -> Result<Self> {
        let rows = || b.float_scratch(&sizes.hidden_shape());
        let g = match ffn {
            Ffn::Silu => None,
            Ffn::Swiglu => Some(rows()?),
        };
        Ok(Self { h: rows()?, g, act: rows()? })
    }
}

/// One call, checked.
struct Call<'a> {
    u: &'a Tensor,
    params: &'a Params<Tensor>,
    sizes: Sizes,
}

#[derive(Clone, Copy)]
struct Sizes {
    experts: usize,
    rows: usize,
    /// D.
    width: usize,
    /// F.
    hidden: usize,
    rank: usize,
    precision: Precision,
}

impl Sizes {
    /// Those of the maps up and gate.
    fn up(&self) -> factors::Sizes {
        factors::Sizes { experts: self.experts, inner: self.width, outer: self.hidden, rank: self.rank }
    }

    /// Those of the map down.
    fn down(&self) -> factors::Sizes {
        factors::Sizes { experts: self.experts, inner: self.hidden, outer: self.width, rank: self.rank }
    }

    fn hidden_shape(&self) -> [usize; 3] {
        [self.experts, self.rows, self.hidden]
    }
}

/// One backward call, checked.
struct Backward<'a> {
    call: Call<'a>,
    dy: &'a Tensor,
    plus: Option<&'a Tensor>,
    into: Params<&'a Tensor>,
    du: &'a Tensor,
}

impl<R: Engine> Expert for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "expert::forward";
        check_gate(OP, config.ffn, &params)?;
        let u = inputs.u;
        let mut dims = Dims::new(OP);
        dims.bind_rows("u", u.shape(), "N", &["D"])?;
        bind_params(&mut dims, params.clone().map(|_, p| p.shape()))?;
        dims.positive(&["D", "E", "R", "F"])?;
        self.check_floats(OP, &[("u", u)])?;
        self.check_floats(OP, &params.clone().named())?;
        let sizes = sizes(&dims, config);
        let arm = self.forward_arm(STEM);
        let used = rounded(self, arm, config.format, &params)?;
        let y = self.float_scratch(&[&[sizes.experts], u.shape()].concat())?;
        let call = Call { u, params: &used, sizes };
        let hidden = || Hidden::new(self, &sizes, config.ffn);
        let plans = chained::Plans::new(self, &sizes).filter(|_| config.ffn == Ffn::Silu);
        let way = match (arm, plans) {
            (Arm::Plain, _) => {
                let into = hidden()?;
                let maps = plain::forward(self, &call, &into, &y)?;
                Way::Plain(into, maps)
            }
            (Arm::Fused, Some(plans)) => Way::Chained(chained::forward(self, plans, &call, &y)?),
            (Arm::Fused, None) => {
                let into = hidden()?;
                let maps = fused::forward(self, &call, &into, &y)?;
                Way::Fused(into, maps)
            }
        };
        Ok((Outputs { y }, Saved { u: u.clone(), params: params.map(|_, p| p.clone()), used, way }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Option<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "expert::backward";
        let Saved { u, params, used, way } = saved;
        let dy = upstream.y;
        check_gate(OP, config.ffn, params)?;
        check_gate(OP, config.ffn, &into)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("u", u.shape(), "N", &["D"])?;
        bind_params(&mut dims, params.as_ref().map(|_, p| p.shape()))?;
        bind_params(&mut dims, into.clone().map(|_, p| p.shape()))?;
        dims.bind("y", &stacked(dy.shape()), &["E", "N", "D"])?;
        let mut reads = vec![("u", u), ("y", dy)];
        if let Way::Plain(Hidden { h, g, act }, _) | Way::Fused(Hidden { h, g, act }, _) = way {
            reads.extend([("h", h), ("act", act)]);
            reads.extend(g.as_ref().map(|g| ("g", g)));
        }
        if let Way::Chained(kept) = way {
            // What one call leaves is as old as this.
            reads.push(("saved", kept.first()));
        }
        reads.extend(params.as_ref().named());
        reads.extend(used.as_ref().named());
        if let Some(plus) = plus {
            dims.bind_rows("plus", plus.shape(), "N", &["D"])?;
            reads.push(("plus", plus));
        }
        self.check_floats(OP, &reads)?;
        for (arg, tensor) in into.clone().named() {
            self.check_into(OP, arg, tensor, &reads)?;
        }
        let sizes = sizes(&dims, config);
        let du = self.float_scratch(u.shape())?;
        let arm = if matches!(way, Way::Plain(..)) { Arm::Plain } else { Arm::Fused };
        let used = if self.mutant_of(STEM, arm) == 16 { params } else { used };
        let call = Backward { call: Call { u, params: used, sizes }, dy, plus, into, du: &du };
        self.note_backward(STEM, arm);
        // No rows add nothing.
        if sizes.rows > 0 {
            match way {
                Way::Plain(hidden, maps) => plain::backward(self, &call, hidden, maps)?,
                Way::Fused(hidden, maps) => fused::backward(self, &call, hidden, maps)?,
                Way::Chained(kept) => chained::backward(self, &call, kept)?,
            }
        }
        Ok(Grads { du })
    }
}

/// The parameters with every U and V as their format has them.
fn rounded<R: Engine>(
    device: &Device<R>,
    arm: Arm,
    format: FactorFormat,
    params: &Params<&Tensor>,
) -> Result<Params<Tensor>> {
    let is_factor = |name: &str| !name.ends_with("_s");
    let masters: Vec<&Tensor> =
        params.clone().named().into_iter().filter(|(name, _)| is_factor(name)).map(|(_, p)| p).collect();
    let fault = fault(device.mutant_of(STEM, arm));
    let mut rounded = format::rounded(device, arm, "expert::round", format, &masters, fault)?.into_iter();
    // `map` goes through the fields in the order of `named`.
    let params = params.clone();
    Ok(params.map(|name, p| if is_factor(name) { rounded.next().expect("one for each") } else { p.clone() }))
}

/// The factors of the map up.
fn up<'a>(params: &Params<&'a Tensor>) -> Factors<'a> {
    Factors { u: params.up_u, s: params.up_s, v: params.up_v }
}

/// The factors of the map down.
fn down<'a>(params: &Params<&'a Tensor>) -> Factors<'a> {
    Factors { u: params.down_u, s: params.down_s, v: params.down_v }
}

/// The factors of the map gate, if there is one.
fn gate<'a>(params: &Params<&'a Tensor>) -> Option<Factors<'a>> {
    Some(Factors { u: params.gate_u?, s: params.gate_s?, v: params.gate_v? })
}

fn sizes(dims: &Dims, config: &Config) -> Sizes {
    Sizes {
        experts: dims.get("E"),
        rows: dims.get("N"),
        width: dims.get("D"),
        hidden: dims.get("F"),
        rank: dims.get("R"),
        precision: config.precision,
    }
}
