//! `engram_hash`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::engram_hash::{Config, EngramHash, Inputs};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct EngramHashOp;

/// Families of ids: bytes; one byte everywhere; some of them the symbol of a masked byte already.
const FAMILIES: [&str; 3] = ["bytes", "one-byte", "with-256"];

fn case(batch: usize, tokens: usize, rows: usize, family: &'static str, mask: bool) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-r{rows}-{family}{}", if mask { "-mask" } else { "" }),
        config: Config { rows },
        dims: vec![("B", batch), ("T", tokens), ("O", 3)],
        family,
        present: if mask { vec!["mask"] } else { vec![] },
    }
}

impl Operation for EngramHashOp {
    type Config = Config;

    const STEM: &'static str = "engram_hash";

    const NO_GRADIENT: Option<&'static str> = Some("rows are whole numbers, which have no derivative");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("ids", &["B", "T"]),
            TensorSpec::data("mask", &["B", "T"]),
            TensorSpec::output("rows", &["B", "T", "O"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(3, 17, 32_768, "bytes", false),
            case(2, 40, 4096, "bytes", true),
            case(2, 9, 1000, "with-256", false),
            case(2, 7, 37, "with-256", true),
            case(2, 6, 65_521, "one-byte", false),
            case(1, 1, 1, "bytes", false),
            case(2, 3, 1_000_000, "bytes", true),
            case(0, 4, 16, "bytes", false),
            case(2, 0, 16, "bytes", true),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 32_768, "bytes", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..20usize, 1..70_000usize, 0..FAMILIES.len(), any::<bool>())
            .prop_map(|(b, t, rows, family, mask)| case(b, t, rows, FAMILIES[family], mask))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("ids"));
        let ids = match case.family {
            "one-byte" => ArrayD::from_elem(IxDyn(&shape), f64::from(rng.random_range(0..256u32))),
            "with-256" => draw::ids(rng, &shape, 300).mapv(|id| id.min(256.0)),
            _ => draw::ids(rng, &shape, 256),
        };
        let mut values = Values::new().with("ids", ids);
        if case.has("mask") {
            values.set("mask", draw::uniform(rng, &shape, 0.0, 1.0).mapv(|x| f64::from(u8::from(x < 0.3))));
        }
        values
    }

    /// The key's symbols are gathered backwards and hashed in 128 bits, so that nothing wraps unseen.
    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let ids = inputs.at("ids");
        let (batch, tokens) = (ids.shape()[0], ids.shape()[1]);
        let mut rows = ArrayD::zeros(IxDyn(&[batch, tokens, 3]));
        let flat: Vec<f64> = ids.iter().copied().collect();
        for b in 0..batch {
            for t in 0..tokens {
                for (j, order) in [2usize, 3, 4].into_iter().enumerate() {
                    let mut key: Vec<u128> = Vec::new();
                    let start = if is("reaches-into-the-sequence-before") { b * tokens } else { 0 };
                    let longest = if is("one-symbol-short") { order - 1 } else { order };
                    for back in 0..longest.min(start + t + 1) {
                        let at = b * tokens + t - back;
                        let mask = inputs.get("mask").filter(|_| !is("mask-dropped"));
                        let masked = mask.is_some_and(|mask| mask.iter().nth(at) == Some(&1.0));
                        let symbol = if masked { if is("masked-is-zero") { 0 } else { 256 } } else { flat[at] as u128 };
                        key.push(if is("symbols-cut-to-bytes") { symbol % 256 } else { symbol });
                    }
                    if !is("newest-first") {
                        key.reverse();
                    }
                    if !is("length-not-hashed") {
                        key.insert(0, key.len() as u128);
                    }
                    let mut h: u128 = if is("starts-at-zero") { 0 } else { 0xcbf2_9ce4_8422_2325 };
                    for x in key {
                        if is("multiplies-first") {
                            h = (h * 0x0000_0100_0000_01b3 % (1 << 64)) ^ x;
                        } else {
                            h = (h ^ x) * 0x0000_0100_0000_01b3 % (1 << 64);
                        }
                    }
                    let folded = if is("not-folded") { h } else { h ^ (h >> 32) };
                    let offset = if is("one-table-for-all-orders") { 0 } else { j * config.rows };
                    rows[[b, t, j]] = (folded % config.rows as u128) as f64 + offset as f64;
                }
            }
        }
        Run { outputs: Values::new().with("rows", rows), grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Causal("T"),
            Law::Exact { name: "every order has rows of its own", check: orders_are_apart },
            Law::Exact { name: "a symbol reaches the rows of its own and the next three positions", check: reach },
            Law::Exact { name: "a masked byte is symbol 256", check: masked_is_256 },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("one-symbol-short", Gate::Form),
            ("newest-first", Gate::Form),
            ("length-not-hashed", Gate::Form),
            ("starts-at-zero", Gate::Form),
            ("multiplies-first", Gate::Form),
            ("not-folded", Gate::Form),
            ("symbols-cut-to-bytes", Gate::Form),
            ("masked-is-zero", Gate::Meta),
            ("mask-dropped", Gate::Meta),
            ("one-table-for-all-orders", Gate::Meta),
            ("reaches-into-the-sequence-before", Gate::Meta),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn integers() -> &'static [&'static str] {
        &["ids"]
    }
}

type LawResult = std::result::Result<f64, String>;

fn rows(
    runner: &dyn Runner<EngramHashOp>,
    config: &Config,
    inputs: &Values,
) -> std::result::Result<ArrayD<f64>, String> {
    Ok(runner.run(config, inputs, None).map_err(|e| e.to_string())?.outputs.at("rows").clone())
}

fn orders_are_apart(runner: &dyn Runner<EngramHashOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let rows = rows(runner, &case.config, &EngramHashOp::draw(case, rng))?;
    match rows.indexed_iter().find(|(at, row)| (**row / case.config.rows as f64).floor() != at[2] as f64) {
        Some((at, row)) => Err(format!("row {row} of order index {} is not one of its {}", at[2], case.config.rows)),
        None => Ok(0.0),
    }
}

/// Another symbol at a position leaves the rows from four positions later on, and one symbol never equals another.
fn reach(runner: &dyn Runner<EngramHashOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EngramHashOp::draw(case, rng);
    inputs.remove("mask");
    let (batch, tokens) = (case.dim("B"), case.dim("T"));
    if batch * tokens == 0 {
        return Ok(0.0);
    }
    // So many rows that two keys never share one by chance.
    let config = Config { rows: 1 << 30 };
    let before = rows(runner, &config, &inputs)?;
    let at = [rng.random_range(0..batch), rng.random_range(0..tokens)];
    let id = &mut inputs.get_mut("ids").expect("ids are drawn")[IxDyn(&at)];
    *id = (*id + 1.0 + f64::from(rng.random_range(0..255u32))) % 256.0;
    let after = rows(runner, &config, &inputs)?;
    for (index, after) in after.indexed_iter() {
        let order = index[2] + 2;
        let sees = index[0] == at[0] && index[1] >= at[1] && index[1] < at[1] + order;
        if sees == (*after == before[&index]) {
            let word = if sees { "the same as" } else { "another one than" };
            return Err(format!("rows{index:?} is {word} before, with a new symbol at {at:?}"));
        }
    }
    Ok(0.0)
}

fn masked_is_256(runner: &dyn Runner<EngramHashOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EngramHashOp::draw(case, rng);
    let masked = rows(runner, &case.config, &inputs)?;
    if let Some(mask) = inputs.remove("mask") {
        let ids = inputs.get_mut("ids").expect("ids are drawn");
        ids.zip_mut_with(&mask, |id, &masked| *id = if masked == 1.0 { 256.0 } else { *id });
    }
    let named = rows(runner, &case.config, &inputs)?;
    passed(same_bits("rows", masked.view(), named.view()))
}

impl<B: EngramHash> OperationOn<B> for EngramHashOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let inputs = glue::required(Self::STEM, Inputs::from_named(glue::find(inputs)))?;
        let outputs = EngramHash::forward(b, config, inputs)?;
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads: Named::new() })
    }
}
