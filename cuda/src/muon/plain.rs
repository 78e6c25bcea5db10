//! Arm `plain`: the equations as they stand. The matrices of a class lie in scratch in the short orientation, `[C, k, n]`
//! with k <= n, and every product is computed for all of them at once.

use cubecl::prelude::*;
use dormouse_reference::{Precision, Result};

use super::{CUBIC, Call, Class, Entry, LINEAR, QUINTIC, divisor_of, is_something};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::matmul::{Factor, Plus, Product, product, stack};
use crate::runtime::Engine;
use crate::tensor::{Floats, FloatsLaunch, Tensor};

/// Where element `i` of the matrices of an entry, in the short orientation, is in the flat buffers.
#[cube]
fn flat_index(
    i: usize,
    k: usize,
    n: usize,
    start: usize,
    columns: usize,
    heads: usize,
    #[comptime] tall: bool,
) -> usize {
    let (matrix, row, column) = (i / (k * n), i / n % k, i % n);
    if comptime!(tall) {
        // Stored are n rows of k numbers.
        start + matrix / heads * n * columns + matrix % heads * k + column * columns + row
    } else {
        start + matrix / heads * k * columns + matrix % heads * n + row * columns + column
    }
}

/// X = mu M + (1 - mu) G in the short orientation, and beside it 1 where G is not zero; one unit, one element of an entry.
#[cube(launch_unchecked)]
fn gather_kernel(
    grads: &Floats,
    m: &Floats,
    x: &mut Floats,
    g: &mut Floats,
    start: u32,
    columns: u32,
    heads: u32,
    first: u32,
    count: u32,
    k: u32,
    n: u32,
    keep: f32,
    take: f32,
    #[comptime] tall: bool,
) {
    let i = ABSOLUTE_POS;
    let (k, n) = (k as usize, n as usize);
    if i < count as usize * k * n {
        let at = flat_index(i, k, n, start as usize, columns as usize, heads as usize, tall);
        let into = first as usize * k * n + i;
        x.set(into, keep * m.at(at) + take * grads.at(at));
        let mut some = 0.0f32;
        if is_something(grads.at(at)) {
            some = 1.0f32;
        }
        g.set(into, some);
    }
}

/// M and W of an entry, unless nothing of a matrix has a gradient; one unit, one element.
#[cube(launch_unchecked)]
fn write_kernel(
    grads: &Floats,
    x: &Floats,
    moved: &Floats,
    lr: &Floats,
    apply: &Floats,
    m: &mut Floats,
    params: &mut Floats,
    start: u32,
    columns: u32,
    heads: u32,
    first: u32,
    count: u32,
    k: u32,
    n: u32,
    keep: f32,
    take: f32,
    scale: f32,
    weight_decay: f32,
    #[comptime] tall: bool,
) {
    let i = ABSOLUTE_POS;
    let (k, n) = (k as usize, n as usize);
    if i < count as usize * k * n && apply.at(0) == 1.0f32 {
        let from = first as usize * k * n + i;
        if moved.at(from / (k * n)) > 0.0f32 {
            let at = flat_index(i, k, n, start as usize, columns as usize, heads as usize, tall);
            m.set(at, keep * m.at(at) + take * grads.at(at));
            let w = params.at(at);
            params.set(at, w - lr.at(0) * weight_decay * w - lr.at(0) * scale * x.at(from));
        }
    }
}

/// The largest magnitude of every `len` elements; one unit, one of `count`.
#[cube(launch_unchecked)]
fn largest_kernel(x: &Floats, out: &mut Floats, count: u32, len: u32) {
    if ABSOLUTE_POS < count as usize {
        let mut largest = 0.0f32;
        for i in 0..len as usize {
            let size = x.at(ABSOLUTE_POS * len as usize + i).abs();
            if size > largest {
                largest = size;
            }
        }
        out.set(ABSOLUTE_POS, largest);
    }
}

/// The root of the sum of squares of `len` elements that lie `inner` apart; one unit, one of `count`.
#[cube(launch_unchecked)]
fn norm_kernel(x: &Floats, out: &mut Floats, count: u32, len: u32, inner: u32) {
    let i = ABSOLUTE_POS;
    if i < count as usize {
        let (len, inner) = (len as usize, inner as usize);
        let first = i / inner * inner * len + i % inner;
        let mut square = 0.0f32;
        for d in 0..len {
            let value = x.at(first + d * inner);
            square += value * value;
        }
        out.set(i, square.sqrt());
    }
}

/// What the norms of a matrix divide by, in their place; one unit, one matrix.
#[cube(launch_unchecked)]
fn divisors_kernel(norms: &mut Floats, count: u32, len: u32) {
    if ABSOLUTE_POS < count as usize {
        let len = len as usize;
        let first = ABSOLUTE_POS * len;
        let mut sum = 0.0f32;
        for i in 0..len {
            sum += norms.at(first + i);
        }
        let mean = sum / f32::cast_from(len as u32);
        for i in 0..len {
            let divisor = divisor_of(norms.at(first + i), mean, 0u32);
            norms.set(first + i, divisor);
        }
    }
}

/// `len` elements over their divisors: element i has number i / (inner * group) * inner + i % inner. A divisor of zero
/// leaves an element as it is. One unit, one element.
#[cube(launch_unchecked)]
fn divide_kernel(x: &mut Floats, divisors: &Floats, len: u32, inner: u32, group: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let (inner, group) = (inner as usize, group as usize);
        let divisor = divisors.at(i / (inner * group) * inner + i % inner);
        if divisor != 0.0f32 {
            x.set(i, x.at(i) / divisor);
        }
    }
}

/// x <- alpha x + beta y; one unit, one element.
#[cube(launch_unchecked)]
fn mix_kernel(x: &mut Floats, y: &Floats, alpha: f32, beta: f32, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        x.set(i, alpha * x.at(i) + beta * y.at(i));
    }
}

/// The launches that the algorithm is written in.
struct On<'a, R: Engine>(&'a Device<R>);

impl<R: Engine> On<'_, R> {
    /// Launches `count` units on tensors of floats.
    fn run<const N: usize>(
        &self,
        name: &'static str,
        count: usize,
        uses: &[&Tensor; N],
        issue: impl FnOnce(&cubecl::client::ComputeClient<R>, CubeCount, CubeDim, [FloatsLaunch<R>; N]),
    ) -> Result<()> {
        let bytes = uses.iter().map(|t| t.bytes().min(4 * count as u64)).sum();
        self.0.launch(name, Grid::units(count), bytes, uses, |client, cubes, dim| {
            issue(client, cubes, dim, uses.map(|t| self.0.floats(t)));
        })
    }

    /// The largest magnitude of each of `count` matrices of k rows.
    fn largest(&self, x: &Tensor, count: usize, k: usize) -> Result<Tensor> {
        let mut of = x.clone();
        for parts in [count * k, count] {
            let out = self.0.float_scratch(&[parts])?;
            let len = of.len() / parts;
            self.run("muon::largest", parts, &[&of, &out], |client, cubes, dim, [x, out]| {
                // SAFETY: `x` has `len` elements for each of `parts`.
                unsafe { largest_kernel::launch_unchecked::<R>(client, cubes, dim, x, out, parts as u32, len as u32) }
            })?;
            of = out;
        }
        Ok(of)
    }

    /// The norms of `count` vectors whose elements lie `inner` apart.
    fn norms(&self, x: &Tensor, count: usize, inner: usize) -> Result<Tensor> {
        let out = self.0.float_scratch(&[count])?;
        let len = x.len() / count;
        self.run("muon::norm", count, &[x, &out], |client, cubes, dim, [x, out]| {
            // SAFETY: `x` has `len` elements for each of `count`.
            unsafe {
                norm_kernel::launch_unchecked::<R>(client, cubes, dim, x, out, count as u32, len as u32, inner as u32)
            }
        })?;
        Ok(out)
    }

    /// Norms, of as many vectors a matrix as there are for each of `count`, made into what they divide by.
    fn divisors(&self, norms: &Tensor, count: usize) -> Result<()> {
        let len = norms.len() / count;
        self.run("muon::divisors", count, &[norms], |client, cubes, dim, [norms]| {
            // SAFETY: there are `len` norms a matrix.
            unsafe { divisors_kernel::launch_unchecked::<R>(client, cubes, dim, norms, count as u32, len as u32) }
        })
    }

    /// Elements over divisors, each for `x.len() / divisors.len()` elements that lie `inner` apart.
    fn divide(&self, x: &Tensor, divisors: &Tensor, inner: usize) -> Result<()> {
        let (len, group) = (x.len(), x.len() / divisors.len());
        self.run("muon::divide", len, &[x, divisors], |client, cubes, dim, [x, divisors]| {
            let (len, inner, group) = (len as u32, inner as u32, group as u32);
            // SAFETY: there is a divisor for every `group` of the `len` elements.
            unsafe { divide_kernel::launch_unchecked::<R>(client, cubes, dim, x, divisors, len, inner, group) }
        })
    }

    /// x <- alpha x + beta y.
    fn mix(&self, x: &Tensor, y: &Tensor, alpha: f32, beta: f32) -> Result<()> {
        let len = x.len() as u32;
        self.run("muon::mix", x.len(), &[x, y], |client, cubes, dim, [x, y]| {
            // SAFETY: both have `len` elements.
            unsafe { mix_kernel::launch_unchecked::<R>(client, cubes, dim, x, y, alpha, beta, len) }
        })
    }

    /// The product of two stacks, `[m, k]` times `[k, n]`.
    fn product(&self, a: Factor<'_>, b: Factor<'_>, batch: usize, [m, k, n]: [usize; 3]) -> Result<Tensor> {
        let out = self.0.float_scratch(&[batch, m, n])?;
        let (name, plus, precision) = ("muon::product", Plus::Nothing, Precision::Full);
        product(self.0, Arm::Plain, &Product { name, batch, m, k, n, a, b, plus, out: stack(&out, m, n), precision })?;
        Ok(out)
    }
}

/// Moves the matrices of a class.
pub(super) fn update<R: Engine>(b: &Device<R>, call: &Call<'_>, class: &Class) -> Result<()> {
    let on = On(b);
    let (count, (k, n)) = (class.count(), class.sides());
    let tall = class.rows > class.width;
    let (x, g) = (b.float_scratch(&[count, k, n])?, b.float_scratch(&[count, k, n])?);
    for (first, &Entry { start, columns, heads, count, .. }) in class.numbered() {
        let uses = [call.grads, call.m, &x, &g];
        on.run("muon::gather", count * k * n, &uses, |client, cubes, dim, [grads, m, x, g]| {
            let [start, columns, heads, first, count] = [start, columns, heads, first, count].map(|n| n as u32);
            let (k, n) = (k as u32, n as u32);
            // SAFETY: the entry lies inside the buffers, and its matrices inside the stack.
            unsafe {
                gather_kernel::launch_unchecked::<R>(
                    client, cubes, dim, grads, m, x, g, start, columns, heads, first, count, k, n, call.keep,
                    call.take, tall,
                )
            }
        })?;
    }
    let moved = on.largest(&g, count, k)?;
    on.divide(&x, &on.largest(&x, count, k)?, 1)?;
    on.divide(&x, &on.norms(&on.norms(&x, count * k, 1)?, count, 1)?, 1)?;
    for _ in 0..call.iterations {
        let short = stack(&x, k, n);
        let gram = on.product(short.plain(), short.transposed(), count, [k, n, k])?;
        let polynomial = on.product(stack(&gram, k, k).plain(), stack(&gram, k, k).plain(), count, [k, k, k])?;
        on.mix(&polynomial, &gram, QUINTIC, CUBIC)?;
        let product = on.product(stack(&polynomial, k, k).plain(), short.plain(), count, [k, k, n])?;
        on.mix(&x, &product, LINEAR, 1.0)?;
    }
    if call.plus {
        for (vectors, inner) in [(n, n), (k, 1)] {
            let norms = on.norms(&x, count * vectors, inner)?;
            on.divisors(&norms, count)?;
            on.divide(&x, &norms, inner)?;
        }
    }
    for (first, entry) in class.numbered() {
        let &Entry { start, columns, heads, count, scale, weight_decay } = entry;
        let uses = [call.grads, &x, &moved, call.lr, call.apply, call.m, call.params];
        on.run("muon::write", count * k * n, &uses, |client, cubes, dim, [grads, x, moved, lr, apply, m, params]| {
            let [start, columns, heads, first, count] = [start, columns, heads, first, count].map(|n| n as u32);
            let (k, n) = (k as u32, n as u32);
            // SAFETY: the entry lies inside the buffers, and its matrices inside the stack.
            unsafe {
                write_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    dim,
                    grads,
                    x,
                    moved,
                    lr,
                    apply,
                    m,
                    params,
                    start,
                    columns,
                    heads,
                    first,
                    count,
                    k,
                    n,
                    call.keep,
                    call.take,
                    scale,
                    weight_decay,
                    tall,
                )
            }
        })?;
    }
    Ok(())
}
