//! `blend`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::blend::{self, Blend, Config, Inputs, Outputs};
use dormouse_reference::controller::FIXED_GATES;
use ndarray::{Array2, ArrayD, Axis};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::spectral::{rows, shaped};
use crate::compare::compare;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct BlendOp;

/// Value families: ordinary, heavy-tailed with large channels, and gates that are exactly 0 or 1.
const FAMILIES: [&str; 3] = ["normal", "activations", "shut"];

fn case(batch: usize, tokens: usize, width: usize, experts: usize, family: &'static str, memory: bool) -> Case<Config> {
    // The model's 0.5, and both ends.
    let lam_max = [0.5, 1.0, 0.5, 0.0][(tokens + experts) % 4];
    Case {
        name: format!(
            "b{batch}-t{tokens}-d{width}-e{experts}-lam{lam_max}-{family}{}",
            if memory { "-memory" } else { "" }
        ),
        config: Config { lam_max },
        dims: vec![("B", batch), ("T", tokens), ("D", width), ("E", experts), ("3+E", FIXED_GATES + experts)],
        family,
        present: if memory { vec!["memory"] } else { vec![] },
    }
}

impl Operation for BlendOp {
    type Config = Config;

    const STEM: &'static str = "blend";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("gates", &["B", "T", "3+E"]),
            TensorSpec::input("attn", &["B", "T", "D"]),
            TensorSpec::input("dense", &["B", "T", "D"]),
            TensorSpec::input("experts", &["E", "B", "T", "D"]),
            TensorSpec::input("memory", &["B", "T", "D"]),
            TensorSpec::output("y", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 6, 8, 2, "normal", true),
            case(2, 4, 8, 2, "normal", false),
            case(1, 1, 4, 1, "normal", true),
            case(2, 7, 33, 3, "activations", true),
            case(3, 5, 6, 3, "shut", true),
            case(1, 300, 5, 2, "normal", true),
            // lam_max 0: the memory gate has no gradient and the memory none either.
            case(2, 5, 6, 2, "normal", true),
            case(2, 3, 6, 2, "normal", true),
            case(0, 4, 6, 2, "normal", true),
            case(2, 0, 6, 3, "normal", false),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 768, 3, "normal", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 3..40usize, 1..5usize, 0..FAMILIES.len(), any::<bool>())
            .prop_map(|(b, t, d, e, family, memory)| case(b, t, d, e, FAMILIES[family], memory))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let mut gates = draw::uniform(rng, &case.shape(&Self::spec("gates")), 0.02, 0.98);
        if case.family == "shut" {
            gates.mapv_inplace(f64::round);
        }
        let mut branch = |name: &str| {
            let shape = case.shape(&Self::spec(name));
            match case.family {
                "activations" => draw::activation_like(rng, &shape),
                _ => draw::normal(rng, &shape),
            }
        };
        let mut values = Values::new().with("gates", gates);
        for name in ["attn", "dense", "experts"] {
            values.set(name, branch(name));
        }
        if case.has("memory") {
            values.set("memory", branch("memory"));
        }
        values
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let gates = rows(inputs.at("gates"));
        let (attn, dense) = (rows(inputs.at("attn")), rows(inputs.at("dense")));
        let memory = inputs.get("memory").map(rows);
        let experts: Vec<Array2<f64>> = inputs.at("experts").axis_iter(Axis(0)).map(|e| rows(&e.to_owned())).collect();
        let (count, width) = attn.dim();
        let lam_max = if is("lam-max-dropped") { 1.0 } else { config.lam_max };
        let share = |n: usize, e: usize| {
            let e = if is("shares-shifted-by-one-expert") { (e + 1) % experts.len() } else { e };
            gates[[n, FIXED_GATES + e]]
        };
        let lam = |n: usize| lam_max * gates[[n, 1]];
        let dense_share = |n: usize| match twist {
            Some("dense-with-share-of-memory") => lam(n),
            Some("dense-whole-without-memory") if memory.is_none() => 1.0,
            _ => 1.0 - lam(n),
        };
        let mut y = Array2::zeros((count, width));
        for n in 0..count {
            for d in 0..width {
                y[[n, d]] = gates[[n, 0]] * attn[[n, d]] + dense_share(n) * dense[[n, d]];
                if let Some(memory) = &memory {
                    let sign = if is("memory-sign") { -1.0 } else { 1.0 };
                    y[[n, d]] += sign * lam(n) * memory[[n, d]];
                }
                for (e, expert) in experts.iter().enumerate() {
                    let w_ffn = if is("feed-forward-gate-dropped") { 1.0 } else { gates[[n, 2]] };
                    y[[n, d]] += w_ffn * share(n, e) * expert[[n, d]];
                }
            }
        }
        let outputs = Values::new().with("y", shaped(y, inputs.at("attn").shape()));
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dy = rows(upstream.at("y"));
            let mut dgates = Array2::zeros(gates.raw_dim());
            let (mut dattn, mut ddense, mut dmemory) = (dy.clone(), dy.clone(), dy.clone());
            let mut dexperts = vec![dy.clone(); experts.len()];
            for n in 0..count {
                for d in 0..width {
                    let dy = dy[[n, d]];
                    dattn[[n, d]] = gates[[n, 0]] * dy;
                    ddense[[n, d]] = if is("ddense-whole") { dy } else { (1.0 - lam(n)) * dy };
                    dmemory[[n, d]] = lam(n) * dy;
                    dgates[[n, 0]] += attn[[n, d]] * dy;
                    let dlam_max = if is("dlam-without-lam-max") { 1.0 } else { lam_max };
                    if !is("dlam-without-dense") {
                        dgates[[n, 1]] -= dlam_max * dense[[n, d]] * dy;
                    }
                    if let Some(memory) = memory.as_ref().filter(|_| !is("dlam-without-memory")) {
                        dgates[[n, 1]] += dlam_max * memory[[n, d]] * dy;
                    }
                    for (e, expert) in experts.iter().enumerate() {
                        let w_ffn = gates[[n, 2]];
                        dexperts[e][[n, d]] = w_ffn * share(n, e) * dy;
                        dgates[[n, 2]] +=
                            if is("dw-ffn-without-shares") { 1.0 } else { share(n, e) } * expert[[n, d]] * dy;
                        dgates[[n, FIXED_GATES + e]] +=
                            if is("dshare-without-w-ffn") { 1.0 } else { w_ffn } * expert[[n, d]] * dy;
                    }
                }
            }
            if is("last-expert-without-gradient") {
                dexperts.last_mut().expect("there is an expert").fill(0.0);
            }
            let dexperts: Vec<f64> = dexperts.iter().flat_map(|e| e.iter().copied()).collect();
            grads = grads
                .with("gates", shaped(dgates, inputs.at("gates").shape()))
                .with("attn", shaped(dattn, inputs.at("attn").shape()))
                .with("dense", shaped(ddense, inputs.at("dense").shape()))
                .with(
                    "experts",
                    ArrayD::from_shape_vec(inputs.at("experts").raw_dim(), dexperts).expect("as many elements"),
                );
            if memory.is_some() {
                grads.set("memory", shaped(dmemory, inputs.at("attn").shape()));
            }
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Custom { name: "equal branches come out times the sum of their weights", check: equal_branches },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("lam-max-dropped", Gate::Form),
            ("dense-with-share-of-memory", Gate::Meta),
            ("dense-whole-without-memory", Gate::Meta),
            ("memory-sign", Gate::Meta),
            ("feed-forward-gate-dropped", Gate::Meta),
            ("shares-shifted-by-one-expert", Gate::Form),
            ("ddense-whole", Gate::Fd),
            ("dlam-without-lam-max", Gate::Adj),
            ("dlam-without-dense", Gate::Fd),
            ("dlam-without-memory", Gate::Fd),
            ("dw-ffn-without-shares", Gate::Fd),
            ("dshare-without-w-ffn", Gate::Adj),
            ("last-expert-without-gradient", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

/// With every branch equal to z, y is (w_attn + [lam +] 1 - lam + w_ffn sum_e p_e) z: with memory, lam cancels.
fn equal_branches(
    runner: &dyn Runner<BlendOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let mut inputs = BlendOp::draw(case, rng);
    let z = inputs.at("attn").clone();
    inputs.set("dense", z.clone());
    if case.has("memory") {
        inputs.set("memory", z.clone());
    }
    let mut experts = inputs.at("experts").clone();
    experts.outer_iter_mut().for_each(|mut expert| expert.assign(&z));
    inputs.set("experts", experts);
    let run = runner.run(&case.config, &inputs, None).map_err(|e| e.to_string())?;
    let mut want = rows(&z);
    for (mut row, gates) in want.outer_iter_mut().zip(rows(inputs.at("gates")).outer_iter()) {
        let lam = if case.has("memory") { 0.0 } else { case.config.lam_max * gates[1] };
        row *= gates[0] + 1.0 - lam + gates[2] * gates.iter().skip(FIXED_GATES).sum::<f64>();
    }
    let want = shaped(want, z.shape());
    let comparison = compare("y", run.outputs.at("y").view(), want.view(), &tolerance::FORM);
    passed(comparison)
}

impl<B: Blend> OperationOn<B> for BlendOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let read = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = Blend::forward(b, config, read)?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: blend::Grads<_> = Blend::backward(b, config, &saved, upstream)?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
