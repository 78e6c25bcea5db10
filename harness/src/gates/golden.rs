//! Gate `golden`: does the reference equal values that other people's implementations gave?
//!
//! A golden file is `golden/<stem>.safetensors`. Its tensors (f32 or f64) are named `<case>/<part>/<name>` with part
//! `in`, `up` (upstream gradient), `out` or `grad`. Its metadata says where it came from (`source`, `version`,
//! `generator`, `seed`), the tolerance with its reason (`tol`, `why`), and per case `config.<case>`, the name of the
//! case in the operation's table whose config it uses.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::{ArrayD, IxDyn};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::{Context, Outcome, Status, Tally, compare_named, text};
use crate::compare::Tolerance;
use crate::description::{Gate, Operation};
use crate::named::Values;
use crate::runner::Runner;

/// One case of a golden file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GoldenCase {
    /// The case of the operation's table whose config applies.
    pub config: String,
    /// Inputs and parameters.
    pub inputs: Values,
    /// Upstream gradients; empty for forward only.
    pub upstream: Values,
    /// Expected outputs.
    pub outputs: Values,
    /// Expected gradients by input name.
    pub grads: Values,
}

/// A golden file.
#[derive(Clone, Debug, PartialEq)]
pub struct GoldenFile {
    /// The implementation the values come from.
    pub source: String,
    /// Its version.
    pub version: String,
    /// The script that made the file.
    pub generator: String,
    /// The seed of its inputs.
    pub seed: String,
    /// Relative rms bound, from the source's precision.
    pub tol: f64,
    /// Where the bound comes from.
    pub why: String,
    /// Cases by name.
    pub cases: BTreeMap<String, GoldenCase>,
}

/// Runs the gate; without a file it did not run.
pub fn gate<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    let path = context.golden.join(format!("{}.safetensors", O::STEM));
    if !path.exists() {
        return Outcome::not_run(format!("golden/{}.safetensors does not exist", O::STEM));
    }
    let file = match read(&path, &names::<O>()) {
        Ok(file) => file,
        Err(reason) => return Outcome { status: Status::Fail, cases: 0, worst: f64::INFINITY, reason },
    };
    check::<O>(runner, &file, context)
}

/// Holds a runner against a golden file.
pub fn check<O: Operation>(runner: &dyn Runner<O>, file: &GoldenFile, context: &Context) -> Outcome {
    let tolerance = Tolerance::new(file.tol, "the golden file's own");
    let table = O::cases();
    let mut tally = Tally::new();
    for (name, golden) in &file.cases {
        let result = (|| {
            let case = table.iter().find(|c| c.name == golden.config);
            let case = case.ok_or_else(|| format!("config `{}` is not in the case table", golden.config))?;
            let upstream = (!golden.upstream.is_empty()).then_some(&golden.upstream);
            let run = runner.run(&case.config, &golden.inputs, upstream).map_err(text)?;
            // The source need not offer every output, but whatever it offers is compared.
            let offered = |got: &Values, want: &Values| -> Values {
                got.iter().filter(|(n, _)| want.get(n).is_some()).map(|(n, v)| (n, v.clone())).collect()
            };
            let outputs = compare_named(&offered(&run.outputs, &golden.outputs), &golden.outputs, "", |_| tolerance)?;
            let grads = compare_named(&offered(&run.grads, &golden.grads), &golden.grads, "d", |_| tolerance)?;
            Ok(outputs.max(grads))
        })();
        tally.note(name, result);
    }
    tally.outcome(O::STEM, Gate::Golden, context)
}

fn names<O: Operation>() -> Vec<&'static str> {
    O::tensors().iter().map(|s| s.name).collect()
}

/// Reads a golden file; tensor names that the operation does not know are errors, so that a misspelt tensor cannot go
/// unread.
pub fn read(path: &Path, names: &[&'static str]) -> Result<GoldenFile, String> {
    let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let bytes = std::fs::read(path).map_err(|e| at(&e))?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| at(&e))?;
    let metadata = metadata.metadata().clone().unwrap_or_default();
    let field = |key: &str| metadata.get(key).cloned().ok_or_else(|| at(&format!("metadata has no `{key}`")));
    let tol: f64 = field("tol")?.parse().map_err(|e| at(&format!("metadata `tol`: {e}")))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| at(&e))?;
    let mut cases: BTreeMap<String, GoldenCase> = BTreeMap::new();
    for (full, view) in tensors.iter() {
        let mut parts = full.splitn(3, '/');
        let (Some(case), Some(part), Some(name)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(at(&format!("tensor `{full}` is not named <case>/<part>/<name>")));
        };
        let name = names.iter().copied().find(|n| *n == name);
        let name = name.ok_or_else(|| at(&format!("tensor `{full}` is none of the operation's")))?;
        let entry = cases.entry(case.to_owned()).or_default();
        let values = decode(&view).map_err(|e| at(&format!("tensor `{full}`: {e}")))?;
        match part {
            "in" => entry.inputs.set(name, values),
            "up" => entry.upstream.set(name, values),
            "out" => entry.outputs.set(name, values),
            "grad" => entry.grads.set(name, values),
            other => return Err(at(&format!("tensor `{full}`: part `{other}` is none of in, up, out, grad"))),
        }
    }
    if cases.is_empty() {
        return Err(at(&"it holds no case"));
    }
    for (name, case) in &mut cases {
        // The file sorts its tensors by name; the operation's order is the one that readers know.
        for values in [&mut case.inputs, &mut case.upstream, &mut case.outputs, &mut case.grads] {
            *values = names.iter().filter_map(|name| Some((*name, values.remove(name)?))).collect();
        }
        case.config = field(&format!("config.{name}"))?;
        if case.outputs.is_empty() && case.grads.is_empty() {
            return Err(at(&format!("case `{name}` expects nothing")));
        }
    }
    Ok(GoldenFile {
        source: field("source")?,
        version: field("version")?,
        generator: field("generator")?,
        seed: field("seed")?,
        tol,
        why: field("why")?,
        cases,
    })
}

/// Writes a golden file.
pub fn write(path: &Path, file: &GoldenFile) -> Result<(), String> {
    let mut metadata: std::collections::HashMap<String, String> = [
        ("source", file.source.clone()),
        ("version", file.version.clone()),
        ("generator", file.generator.clone()),
        ("seed", file.seed.clone()),
        ("tol", format!("{:e}", file.tol)),
        ("why", file.why.clone()),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect();
    let mut data: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (case, golden) in &file.cases {
        metadata.insert(format!("config.{case}"), golden.config.clone());
        let parts =
            [("in", &golden.inputs), ("up", &golden.upstream), ("out", &golden.outputs), ("grad", &golden.grads)];
        for (part, values) in parts {
            for (name, array) in values.iter() {
                let bytes = array.iter().flat_map(|x| x.to_le_bytes()).collect();
                data.push((format!("{case}/{part}/{name}"), array.shape().to_vec(), bytes));
            }
        }
    }
    let views: Result<Vec<_>, _> = data
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(Dtype::F64, shape.clone(), bytes)?)))
        .collect();
    let views = views.map_err(|e: safetensors::SafeTensorError| e.to_string())?;
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|e| format!("{}: {e}", path.display()))
}

fn decode(view: &TensorView<'_>) -> Result<ArrayD<f64>, String> {
    let data = view.data();
    let values: Vec<f64> = match view.dtype() {
        Dtype::F64 => data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        other => return Err(format!("stored as {other:?}, expected F64 or F32")),
    };
    ArrayD::from_shape_vec(IxDyn(view.shape()), values).map_err(|e| e.to_string())
}
