//! `koleo`: -1/2 mean_i ln(|p_i - p_j(i)|^2 + eps) over chosen masked rows of unit length, j(i) the nearest other one.

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor};
use dormouse_reference::Result;
use dormouse_reference::koleo::{Config, Grads, Inputs, Koleo, Outputs};

use crate::handle::{Burn, Handle};
use crate::maths::square;
use crate::shapes::{absent, check, config as option, number, small};
use crate::tape::Tape;

fn check_config(op: &'static str, config: &Config) -> Result<()> {
    option(op, "limit", config.limit >= 2, "at least 2, since one row has no neighbour", config.limit)?;
    small(op, "norm_eps", config.norm_eps)?;
    small(op, "eps", config.eps)
}

/// For every row of `[M, D]` the place of the nearest other one, the lowest of equals.
fn neighbours<A: Backend>(p: &Tensor<A, 2>) -> Tensor<A, 1, Int> {
    let [m, _] = p.dims();
    let nearest = (0..m).map(|i| {
        let squares = square(p.clone() - p.clone().narrow(0, i, 1)).sum_dim(1);
        // A row is not its own neighbour.
        squares.slice_fill(i..i + 1, f64::INFINITY).argmin(0).reshape([1])
    });
    Tensor::cat(nearest.collect(), 0)
}

impl<B: Backend> Koleo for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "koleo::forward";
        check_config(OP, config)?;
        let dims = check(OP, &inputs.clone().named(), |name| if name == "mask" { &[".."] } else { &["..", "D"] })?;
        dims.positive(&["D"])?;
        let (n, d, norm_eps, eps) = (dims.get("N"), dims.get("D"), config.norm_eps, config.eps);
        let masked = self.places(OP, inputs.mask)?;
        let stride =
            (1..).find(|stride| masked.len().div_ceil(*stride) <= config.limit).expect("one row is few enough");
        let chosen: Vec<i64> = masked.into_iter().step_by(stride).collect();
        let (rows, chosen) = (chosen.len(), self.integers_of(chosen));
        let zero = self.tensor_of(vec![0.0]);
        let (mut out, tape) =
            Tape::run(self, OP, vec![("z", inputs.z)], vec![], vec![("loss", vec![1])], move |leaves| {
                if rows < 2 {
                    return vec![Tensor::from_inner(zero.clone())];
                }
                let z = leaves.get("z", [n, d]).select(0, Tensor::from_inner(chosen.clone()));
                let p = z.clone() / square(z).sum_dim(1).add_scalar(norm_eps).sqrt();
                let nearest = Tensor::from_inner(neighbours(&p.clone().inner()));
                let apart = square(p.clone() - p.select(0, nearest)).sum_dim(1);
                vec![apart.add_scalar(eps).log().mean().mul_scalar(-0.5)]
            })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Tape<B>,
        upstream: Outputs<&Handle<B>>,
        plus: Option<&Handle<B>>,
    ) -> Result<Grads<Handle<B>>> {
        const OP: &str = "koleo::backward";
        check_config(OP, config)?;
        number(OP, "loss", upstream.loss)?;
        let plus = plus.into_iter().map(|plus| ("z", plus)).collect();
        let mut grads = saved.backward(self, OP, upstream.named(), plus, vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
