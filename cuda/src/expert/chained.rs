//! Arm `fused` with silu at tf32 and bf16: the hidden rows `[E, N, F]` are never in memory. Four launches forward, eight
//! backward.
//!
//! | launch | kernel | reads | writes |
//! |---|---|---|---|
//! | `expert::a` | product | u, U of up | a of up `[E, N, R]` |
//! | `expert::pack` | [`pack`](super::pack) | V of up, U of down, U of up | the same packed; U of up as `[D, E, R]` |
//! | `expert::forward` | [`chain`](super::chain) | a of up, V of up and U of down once a cube | a of down and a s of down |
//! | `expert::y` | product | a s and V of down | y `[E, N, D]` |
//! | `expert::b` | product | dy, V of down | b of down `[E, N, R]` |
//! | `expert::pack` | pack | a of up, b of down | a s and b s, packed |
//! | `expert::tokens` | chain | these and the packed V and U once a cube | b s of up `[N, E, R]`, parts of both ds |
//! | `expert::du` | product | b s of up, `[D, E, R]` of U of up, plus | du |
//! | `expert::p` | product | u, b s of up | parts of dU of up, `[parts, D, E, R]` |
//! | `expert::hidden` | chain | the packed V and U, a s and b s once a cube | parts of dV of up and dU of down |
//! | `expert::q` | product | dy, a s of down | parts of dV of down |
//! | `expert::dparams` | pack | these and the parts | the gradients of both maps, added |
//!
//! Instead of 2 N F elements an expert forward and 5 N F backward in f32 these pass some rows of R. A cube of tokens reads
//! all packed factors of its expert from L2, 0.5 MB forward at F 2048 and R 64 in bf16, and 0.75 MB backward; a cube of
//! hidden rows reads four forms of its part of the tokens. So a cube has as many rows as leave no multiprocessor idle. s multiplies a and b where they have one row a token and are read anyway, so no factor is ever scaled; and the
//! sum over tokens of a b is ds, in f32 and without a product of matrices.

use cubecl::prelude::*;
use dormouse_reference::{Precision, Result};

use super::chain::{self, Kind, Plan};
use super::fused::batch;
use super::pack::{Packed, Parts, Turned, finish, pack};
use super::{Backward, Call, STEM, Sizes, down, up};
use crate::arm::Arm;
use crate::device::Device;
use crate::kda::tile::Math;
use crate::launch::Grid;
use crate::matmul::{Plus, Product, matrix, product, stack};
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// The largest rank: with more, the rows of factors and results do not fit a unit's registers.
const WIDEST: usize = 64;

/// Parts that the tokens are cut into for the gradients of V and U, so that there are more cubes.
const PARTS: usize = 4;

/// Parts that the tokens are cut into for dU of up and dV of down, where they are so many times some: one sum over all
/// tokens for each of E D R / 64^2 tiles would leave most of a GPU idle. dU of up is one product for all experts.
const PARTS_OF_OUTER: usize = 8;

/// What forward keeps of the maps.
pub(super) struct Saved {
    plans: Plans,
    /// u U of up, `[E, N, R]`.
    up_a: Tensor,
    /// act U of down, `[E, N, R]`, and the same times s.
    down_a: Tensor,
    down_as: Tensor,
    /// V of up and U of down.
    factors: [Packed; 2],
    /// U of up, `[D, E, R]`.
    side: Tensor,
}

impl Saved {
    /// One of its tensors.
    pub fn first(&self) -> &Tensor {
        &self.up_a
    }
}

/// The three chains of a call.
#[derive(Clone, Copy)]
pub(super) struct Plans {
    forward: Plan,
    tokens: Plan,
    hidden: Plan,
}

impl Plans {
    /// None where the chains do not compute the call: in full precision, whose products must not round, above a rank of
    /// [`WIDEST`], and on a device whose shared memory is too small.
    pub fn new<R: Engine>(b: &Device<R>, sizes: &Sizes) -> Option<Self> {
        if sizes.precision == Precision::Full || sizes.rank > WIDEST {
            return None;
        }
        let math = Math { precision: sizes.precision, cuda: b.matrix_units() };
        let rank = sizes.rank.next_multiple_of(16);
        let fits = |plans: &[Plan]| plans.iter().copied().find(|plan| plan.bytes() <= b.shared_memory());
        let plan = |kind, groups, splits, columns, span| Plan { kind, rank, groups, splits, columns, span, math };
        if math.cuda {
            // Tokens: 96 rows a cube make 129 cubes of 4096 tokens and 3 experts, hidden rows: 192 make 132 with the
            // parts, and an H200 has 132 multiprocessors. So there is one cube on each, with as many units as have
            // registers: 85 of them for a unit at 768 units, 170 at 384.
            let forward = if sizes.precision == Precision::Bf16 { (4, 128) } else { (2, 64) };
            Some(Self {
                forward: fits(&[plan(Kind::Forward, 6, forward.0, forward.1, 32)])?,
                tokens: fits(&[plan(Kind::Tokens, 6, 2, 64, 32)])?,
                hidden: fits(&[plan(Kind::Hidden, 12, 1, 32, 16)])?,
            })
        } else {
            // The software driver has 32 KiB; as many groups, splits and spans as the tests should see.
            let small = |kind| fits(&[plan(kind, 2, 2, 64, 16), plan(kind, 1, 2, 32, 16), plan(kind, 1, 1, 16, 16)]);
            Some(Self { forward: small(Kind::Forward)?, tokens: small(Kind::Tokens)?, hidden: small(Kind::Hidden)? })
        }
    }
}

/// y.
pub(super) fn forward<R: Engine>(b: &Device<R>, plans: Plans, call: &Call<'_>, y: &Tensor) -> Result<Saved> {
    const NAME: &str = "expert::forward";
    let Call { u, params, sizes } = *call;
    let Sizes { experts, rows, width, hidden, rank, precision } = sizes;
    let short_rows = [experts, rows, rank];
    let [up_a, down_a, down_as] =
        [b.float_scratch(&short_rows)?, b.float_scratch(&short_rows)?, b.float_scratch(&short_rows)?];
    let up_u = stack(&params.up_u, width, rank).plain();
    let out = stack(&up_a, rows, rank);
    product(b, Arm::Fused, &batch("expert::a", &sizes, [rows, width, rank], matrix(u, width).plain(), up_u, out))?;

    let plan = plans.forward;
    let of = [&params.up_v, &params.down_u, &params.up_u];
    let variant = if precision == Precision::Bf16 { 1 } else { 0 };
    let packed = b.once(("expert::pack", variant), &of, || {
        let side = b.float_scratch(&[width, experts, rank])?;
        let turned = Turned { from: &params.up_u, to: &side, rows: width };
        let packed =
            pack(b, "expert::pack", [&params.up_v, &params.down_u], None, Some(&turned), plan.rank, precision)?;
        let [v, u] = packed;
        Ok(vec![v.by_rank, v.by_row, u.by_rank, u.by_row, side])
    })?;
    let [v_by_rank, v_by_row, u_by_rank, u_by_row, side] =
        <[Tensor; 5]>::try_from(packed).expect("two forms of two matrices, and a third");
    let factors = [Packed { by_rank: v_by_rank, by_row: v_by_row }, Packed { by_rank: u_by_rank, by_row: u_by_row }];
    let cubes = experts * rows.div_ceil(plan.rows());
    let words = [&factors[0].by_rank, &factors[1].by_row];
    let floats = [&up_a, &params.up_s, &params.down_s, &down_a, &down_as];
    launch(b, NAME, plan, cubes, &words, &floats, |client, count, dim, cubes, mutant| {
        let [v, u] = words.map(|t| b.words(t));
        let [up_a, up_s, down_s, down_a, down_as] = floats.map(|t| b.floats(t));
        // SAFETY: the tensors have the sizes that go along; rows, columns and ranks that do not exist are not touched.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client, count, dim, up_a, up_s, down_s, v, u, down_a, down_as, cubes, rows, hidden, rank, plan, mutant,
            )
        }
    })?;
    let short = stack(&down_as, rows, rank).plain();
    let down_v = stack(&params.down_v, width, rank).transposed();
    let out = stack(y, rows, width);
    product(b, Arm::Fused, &batch("expert::y", &sizes, [rows, rank, width], short, down_v, out))?;
    Ok(Saved { plans, up_a, down_a, down_as, factors, side })
}

/// du; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>, kept: &Saved) -> Result<()> {
    let plans = kept.plans;
    let Backward { call: Call { u, params, sizes }, dy, plus, ref into, du } = *call;
    let Sizes { experts, rows, width, rank, precision, .. } = sizes;
    let mutant = b.mutant(STEM);
    let (up_into, down_into) = (up(into), down(into));

    let down_b = b.float_scratch(&[experts, rows, rank])?;
    let grad = stack(dy, rows, width);
    let down_v = stack(&params.down_v, width, rank).plain();
    let out = stack(&down_b, rows, rank);
    product(b, Arm::Fused, &batch("expert::b", &sizes, [rows, width, rank], grad.plain(), down_v, out))?;
    let scales = Some([&params.up_s, &params.down_s]);
    let short_rows = pack(b, "expert::pack", [&kept.up_a, &down_b], scales, None, plans.tokens.rank, precision)?;

    let up_bs = b.float_scratch(&[rows, experts, rank])?;
    let ds_parts = through_tokens(b, call, kept, &short_rows, &down_b, &up_bs)?;
    let terms = experts * rank;
    let for_u = Product {
        name: "expert::du",
        batch: 1,
        m: rows,
        k: if mutant == 14 { terms - rank } else { terms },
        n: width,
        a: matrix(&up_bs, terms).plain(),
        b: matrix(&kept.side, terms).transposed(),
        plus: plus.filter(|_| mutant != 8).map_or(Plus::Nothing, Plus::Matrix),
        out: matrix(du, width),
        precision,
    };
    product(b, Arm::Fused, &for_u)?;
    let parts = if rows.is_multiple_of(PARTS_OF_OUTER) { PARTS_OF_OUTER } else { 1 };
    let each = rows / parts;
    let p_parts = b.float_scratch(&[parts, width, experts, rank])?;
    let (rows_of_u, short) = (stack(u, each, width).transposed(), stack(&up_bs, each, terms).plain());
    let for_p = Product {
        batch: parts,
        ..batch("expert::p", &sizes, [width, each, terms], rows_of_u, short, stack(&p_parts, width, terms))
    };
    product(b, Arm::Fused, &for_p)?;

    let [dv_parts, du_parts] = through_hidden(b, call, kept, &short_rows)?;
    let q_parts = b.float_scratch(&[experts, parts, width, rank])?;
    let (grad, short) = (stack(dy, each, width).transposed(), stack(&kept.down_as, each, rank).plain());
    let for_q = Product {
        batch: experts * parts,
        ..batch("expert::q", &sizes, [width, each, rank], grad, short, stack(&q_parts, width, rank))
    };
    product(b, Arm::Fused, &for_q)?;
    let sums = Parts { dv: &dv_parts, du: &du_parts, p: &p_parts, q: &q_parts, ds: &ds_parts };
    finish(b, &sums, [&up_into, &down_into])
}

/// Launches a chain on so many cubes, which read and write their tensors once as far as memory is concerned; `call` gets
/// the number of cubes and the mutant besides.
fn launch<R: Engine>(
    b: &Device<R>,
    name: &'static str,
    plan: Plan,
    cubes: usize,
    words: &[&Tensor],
    floats: &[&Tensor],
    call: impl FnOnce(&ComputeClient<R>, CubeCount, CubeDim, u32, u32),
) -> Result<()> {
    let uses = [words, floats].concat();
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let mutant = b.mutant(STEM);
    b.launch(name, Grid::cubes(cubes, plan.units() as u32), bytes, &uses, |client, count, dim| {
        call(client, count, dim, cubes as u32, mutant);
    })
}

/// Writes b s of up; returns parts of the ds of up and of down, `[tiles, 2, E, R]`.
fn through_tokens<R: Engine>(
    b: &Device<R>,
    call: &Backward<'_>,
    kept: &Saved,
    short_rows: &[Packed; 2],
    down_b: &Tensor,
    up_bs: &Tensor,
) -> Result<Tensor> {
    let plan = kept.plans.tokens;
    let Call { params, sizes, .. } = call.call;
    let Sizes { experts, rows, hidden, rank, .. } = sizes;
    let tiles = rows.div_ceil(plan.rows());
    let parts = b.float_scratch(&[tiles, 2, experts, rank])?;
    let [v, u] = &kept.factors;
    let words = [&short_rows[0].by_rank, &short_rows[1].by_rank, &v.by_rank, &u.by_rank, &v.by_row];
    let floats = [&kept.up_a, &params.up_s, down_b, &kept.down_a, up_bs, &parts];
    launch(b, "expert::tokens", plan, experts * tiles, &words, &floats, |client, count, dim, cubes, mutant| {
        let [up_as, down_bs, v, u, column] = words.map(|t| b.words(t));
        let [up_a, up_s, down_b, down_a, up_bs, parts] = floats.map(|t| b.floats(t));
        // SAFETY: the tensors have the sizes that go along; rows, columns and ranks that do not exist are not touched.
        unsafe {
            tokens_kernel::launch_unchecked::<R>(
                client, count, dim, up_as, down_bs, v, u, column, up_a, up_s, down_b, down_a, up_bs, parts, cubes,
                experts, rows, hidden, rank, plan, mutant,
            )
        }
    })?;
    Ok(parts)
}

/// Parts of dV of up and dU of down, `[parts, E, F, R]`.
fn through_hidden<R: Engine>(
    b: &Device<R>,
    call: &Backward<'_>,
    kept: &Saved,
    short_rows: &[Packed; 2],
) -> Result<[Tensor; 2]> {
    let plan = kept.plans.hidden;
    let Sizes { experts, rows, hidden, rank, .. } = call.call.sizes;
    let chunks = rows.div_ceil(plan.columns);
    let parts = PARTS.min(chunks);
    let shape = [parts, experts, hidden, rank];
    let out = [b.float_scratch(&shape)?, b.float_scratch(&shape)?];
    let [v, u] = &kept.factors;
    let [a, b_] = short_rows;
    let words = [&v.by_rank, &u.by_rank, &a.by_rank, &b_.by_rank, &a.by_row, &b_.by_row];
    let floats = [&out[0], &out[1]];
    let cubes = parts * experts * hidden.div_ceil(plan.rows());
    launch(b, "expert::hidden", plan, cubes, &words, &floats, |client, count, dim, cubes, mutant| {
        let [v, u, a_rank, b_rank, a_row, b_row] = words.map(|t| b.words(t));
        let [dv, du] = floats.map(|t| b.floats(t));
        let each = chunks.div_ceil(parts);
        // SAFETY: the tensors have the sizes that go along; rows, columns and ranks that do not exist are not touched.
        unsafe {
            hidden_kernel::launch_unchecked::<R>(
                client, count, dim, v, u, a_rank, b_rank, a_row, b_row, dv, du, cubes, experts, hidden, rows, rank,
                chunks, each, plan, mutant,
            )
        }
    })?;
    Ok(out)
}

/// Which of the matrices, of `rows` each, is this cube's, its place among the cubes of that matrix, and its first row.
#[cube]
fn share(rows: usize, #[comptime] plan: Plan) -> (usize, usize, usize) {
    let tiles = rows.div_ceil(comptime!(plan.rows()));
    let tile = CUBE_POS % tiles;
    (CUBE_POS / tiles, tile, tile * comptime!(plan.rows()))
}

/// a of down, and the same times s, `[E, N, R]`. A cube is some tokens of an expert; cubes of an expert lie together.
///
/// Mutant 1 leaves out s.
#[cube(launch_unchecked)]
fn forward_kernel(
    up_a: &Floats,
    up_s: &Floats,
    down_s: &Floats,
    v: &Words,
    u: &Words,
    down_a: &mut Floats,
    down_as: &mut Floats,
    cubes: u32,
    rows: usize,
    hidden: usize,
    rank: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    if CUBE_POS >= cubes as usize {
        terminate!();
    }
    let (e, _, first) = share(rows, plan);
    let mut work = chain::begin(plan);
    chain::hold_scaled(&mut work, up_a, up_s, e, first, rows, rank, plan);
    let chunks = hidden.div_ceil(comptime!(plan.columns));
    chain::pass(&mut work, v, v, u, u, e, hidden, 0usize, chunks, plan, mutant);
    chain::combine(&mut work.words, &mut work.second, plan);
    let (part, _) = chain::part_and_row(plan);
    if part == 0 {
        #[unroll]
        for i in 0..comptime!(plan.result()) {
            let row = first + chain::row(i, plan);
            let r = chain::column(i);
            if row < rows && r < rank {
                let at = (e * rows + row) * rank + r;
                let sum = work.second[i];
                let mut scale = down_s.at(e * rank + r);
                if comptime!(mutant == 1) {
                    scale = 1.0f32;
                }
                down_a.set(at, sum);
                down_as.set(at, sum * scale);
            }
        }
    }
}

/// b s of up, `[N, E, R]`, and the cube's tokens' part of a b of both maps, `[tiles, 2, E, R]`. Cubes as in forward.
///
/// Mutants: 2 leaves out s, 5 multiplies ds with s, 6 leaves the last token out of ds.
#[cube(launch_unchecked)]
fn tokens_kernel(
    up_as: &Words,
    down_bs: &Words,
    v: &Words,
    u: &Words,
    v_by_column: &Words,
    up_a: &Floats,
    up_s: &Floats,
    down_b: &Floats,
    down_a: &Floats,
    up_bs: &mut Floats,
    parts: &mut Floats,
    cubes: u32,
    experts: usize,
    rows: usize,
    hidden: usize,
    rank: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    if CUBE_POS >= cubes as usize {
        terminate!();
    }
    let (e, tile, first) = share(rows, plan);
    let at = e * rows * comptime!(plan.wide());
    let mut work = chain::begin(plan);
    chain::hold(&mut work, up_as, at, first, rows, 0usize, plan);
    chain::hold(&mut work, down_bs, at, first, rows, 1usize, plan);
    let chunks = hidden.div_ceil(comptime!(plan.columns));
    chain::pass(&mut work, v, u, v_by_column, v_by_column, e, hidden, 0usize, chunks, plan, mutant);
    chain::combine(&mut work.words, &mut work.first, plan);
    let mut counted = rows;
    if comptime!(mutant == 6) {
        counted = rows - 1;
    }
    let (part, _) = chain::part_and_row(plan);
    if part == 0 {
        #[unroll]
        for i in 0..comptime!(plan.result()) {
            let row = first + chain::row(i, plan);
            let r = chain::column(i);
            let sum = work.first[i];
            let mut product = 0.0f32;
            if row < rows && r < rank {
                let mut scale = up_s.at(e * rank + r);
                if comptime!(mutant == 2) {
                    scale = 1.0f32;
                }
                up_bs.set((row * experts + e) * rank + r, sum * scale);
                if row < counted {
                    product = sum * up_a.at((e * rows + row) * rank + r);
                }
                if comptime!(mutant == 5) {
                    product *= scale;
                }
            }
            work.first[i] = product;
        }
    }
    sum_rows(&mut work, parts, (tile * 2 * experts + e) * rank, rank, plan);
    if part == 0 {
        #[unroll]
        for i in 0..comptime!(plan.result()) {
            let row = first + chain::row(i, plan);
            let r = chain::column(i);
            let mut product = 0.0f32;
            if row < counted && r < rank {
                let at = (e * rows + row) * rank + r;
                product = down_b.at(at) * down_a.at(at);
            }
            work.first[i] = product;
        }
    }
    sum_rows(&mut work, parts, ((tile * 2 + 1) * experts + e) * rank, rank, plan);
}

/// Writes the sums over the rows of the first result, in order, to `to` from `at` on.
#[cube]
fn sum_rows(work: &mut chain::Work, to: &mut Floats, at: usize, rank: usize, #[comptime] plan: Plan) {
    // Others may still read what was in shared memory.
    sync_cube();
    let (part, _) = chain::part_and_row(plan);
    if part == 0 {
        chain::store(&mut work.words, &work.first, plan);
    }
    sync_cube();
    let units = comptime!(plan.units());
    for step in 0..comptime!(plan.rank.div_ceil(units)) {
        let r = step * units + UNIT_POS as usize;
        if r < rank {
            let mut sum = 0.0f32;
            for row in 0..comptime!(plan.rows()) {
                sum += f32::reinterpret(work.words[row * comptime!(plan.rank) + r]);
            }
            to.set(at + r, sum);
        }
    }
}

/// A part of dV of up and dU of down, `[parts, E, F, R]`. A cube is some of the F of an expert and `each` chunks of tokens.
#[cube(launch_unchecked)]
fn hidden_kernel(
    v: &Words,
    u: &Words,
    a_by_rank: &Words,
    b_by_rank: &Words,
    a_by_row: &Words,
    b_by_row: &Words,
    dv: &mut Floats,
    du: &mut Floats,
    cubes: u32,
    experts: usize,
    hidden: usize,
    tokens: usize,
    rank: usize,
    chunks: usize,
    each: usize,
    #[comptime] plan: Plan,
    #[comptime] mutant: u32,
) {
    if CUBE_POS >= cubes as usize {
        terminate!();
    }
    // Cubes of an expert and a part of the tokens lie together: they read the same.
    let (matrix, _, first) = share(hidden, plan);
    let (e, section) = (matrix % experts, matrix / experts);
    let at = e * hidden * comptime!(plan.wide());
    let mut work = chain::begin(plan);
    chain::hold(&mut work, v, at, first, hidden, 0usize, plan);
    chain::hold(&mut work, u, at, first, hidden, 1usize, plan);
    let from = (section * each).min(chunks);
    let to = (from + each).min(chunks);
    chain::pass(&mut work, a_by_rank, b_by_rank, a_by_row, b_by_row, e, tokens, from, to, plan, mutant);
    chain::combine(&mut work.words, &mut work.first, plan);
    chain::combine(&mut work.words, &mut work.second, plan);
    let (part, _) = chain::part_and_row(plan);
    if part == 0 {
        #[unroll]
        for i in 0..comptime!(plan.result()) {
            let row = first + chain::row(i, plan);
            let r = chain::column(i);
            if row < hidden && r < rank {
                let at = (matrix * hidden + row) * rank + r;
                dv.set(at, work.first[i]);
                du.set(at, work.second[i]);
            }
        }
    }
}
