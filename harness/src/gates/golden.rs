//! Gate `golden`: does the reference equal values that other people's implementations gave?
//!
//! A golden file is `golden/<stem>.safetensors`. Its tensors (f32 or f64) are named `<case>/<part>/<name>` with part
//! `in`, `up` (upstream gradient), `out` or `grad`. Its metadata says where it came from (`source`, `version`,
//! `generator`, `seed`), the tolerance with its reason (`tol`, `why`), and per case `config.<case>`, the name of the
//! case in the operation's table whose config it uses. `source.<case>`, `version.<case>`, `tol.<case>` and `why.<case>`
//! stand instead of the file's own where a case comes from elsewhere.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use ndarray::{ArrayD, IxDyn};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::{Context, Outcome, Status, Tally, compare_named, text};
use crate::compare::Tolerance;
use crate::description::{Gate, Operation};
use crate::named::Values;
use crate::runner::{Fault, Faulty, Naive, Plant, Runner};

/// Where values come from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origin {
    /// The implementation.
    pub source: String,
    /// Its version.
    pub version: String,
    /// Relative rms bound, from the source's precision.
    pub tol: f64,
    /// Where the bound comes from.
    pub why: String,
}

/// One case of a golden file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GoldenCase {
    /// The case of the operation's table whose config applies.
    pub config: String,
    /// Where its values come from: the file's origin, or its own.
    pub origin: Origin,
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
    /// Where the values of most cases come from.
    pub origin: Origin,
    /// The script that made the file.
    pub generator: String,
    /// The seed of its inputs.
    pub seed: String,
    /// Cases by name.
    pub cases: BTreeMap<String, GoldenCase>,
}

/// Runs the gate; without a file it did not run.
pub fn gate<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    match open::<O>(context) {
        None => Outcome::not_run(format!("golden/{}.safetensors does not exist", O::STEM)),
        Some(Ok(file)) => check::<O>(runner, &file, context),
        Some(Err(reason)) => Outcome { status: Status::Fail, cases: 0, worst: f64::INFINITY, reason },
    }
}

/// The operation's file, if there is one.
fn open<O: Operation>(context: &Context) -> Option<Result<GoldenFile, String>> {
    let path = context.golden.join(format!("{}.safetensors", O::STEM));
    path.exists().then(|| read(&path, &names::<O>()))
}

/// What the operation's file must not let pass: how many faults were planted, and what is wrong with those that survived.
///
/// A file is of use only if it sees. Every generated fault of every tensor that it holds must turn the gate red. So must
/// one at least of the operation's own broken terms, since what the gate is for is a formula that was misunderstood; and
/// the plain form with nothing broken must be green, or red would prove nothing. Without a file nothing is planted.
pub fn bite<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> (usize, Vec<String>) {
    let file = match open::<O>(context) {
        None => return (0, Vec::new()),
        Some(Err(reason)) => return (0, vec![reason]),
        Some(Ok(file)) => file,
    };
    let red = |runner: &dyn Runner<O>| check::<O>(runner, &file, context).status == Status::Fail;
    let (mut planted, mut survivors) = (0, Vec::new());
    let held =
        |values: fn(&GoldenCase) -> &Values, name: &str| file.cases.values().any(|c| values(c).get(name).is_some());
    for name in names::<O>() {
        let (out, grad) = (held(|c| &c.outputs, name), held(|c| &c.grads, name));
        for fault in Fault::ALL {
            let faults = [out.then_some(Plant::Output(name, fault)), grad.then_some(Plant::Grad(name, fault))];
            for plant in faults.into_iter().flatten() {
                planted += 1;
                if !red(&Faulty::new(runner, plant.clone())) {
                    survivors.push(format!("{} survives golden", plant.name()));
                }
            }
        }
    }
    let plain = check::<O>(&Naive { twist: None }, &file, context);
    if plain.status != Status::Pass {
        survivors.push(format!("the null mutant is red on golden: {}", plain.reason));
    }
    planted += 1;
    if !O::mutants().iter().any(|mutant| red(&Naive { twist: Some(mutant.twist) })) {
        survivors.push("every broken term survives golden".to_owned());
    }
    (planted, survivors)
}

/// Holds a runner against a golden file.
pub fn check<O: Operation>(runner: &dyn Runner<O>, file: &GoldenFile, context: &Context) -> Outcome {
    let table = O::cases();
    let mut tally = Tally::new();
    for (name, golden) in &file.cases {
        let tolerance = Tolerance::new(golden.origin.tol, "the golden file's own");
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
        tally.note(&format!("{name} ({})", golden.origin.source), result);
        if context.stop_at_first && tally.failures > 0 {
            break;
        }
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
    let origin = |source: String, version: String, tol: &str, why: String| {
        let tol = tol.parse().map_err(|e| at(&format!("metadata `tol`: `{tol}`: {e}")))?;
        Ok::<_, String>(Origin { source, version, tol, why })
    };
    let files = origin(field("source")?, field("version")?, &field("tol")?, field("why")?)?;
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
        case.origin = files.clone();
        if metadata.contains_key(&format!("source.{name}")) {
            let own = |key: &str| field(&format!("{key}.{name}"));
            case.origin = origin(own("source")?, own("version")?, &own("tol")?, own("why")?)?;
        }
        if case.outputs.is_empty() && case.grads.is_empty() {
            return Err(at(&format!("case `{name}` expects nothing")));
        }
    }
    Ok(GoldenFile { origin: files, generator: field("generator")?, seed: field("seed")?, cases })
}

/// Writes a golden file.
pub fn write(path: &Path, file: &GoldenFile) -> Result<(), String> {
    let mut metadata =
        HashMap::from([("generator".to_owned(), file.generator.clone()), ("seed".to_owned(), file.seed.clone())]);
    let mut set_origin = |origin: &Origin, suffix: &str| {
        let Origin { source, version, tol, why } = origin;
        for (key, value) in [("source", source), ("version", version), ("tol", &format!("{tol:e}")), ("why", why)] {
            metadata.insert(format!("{key}{suffix}"), value.clone());
        }
    };
    set_origin(&file.origin, "");
    for (name, case) in file.cases.iter().filter(|(_, case)| case.origin != file.origin) {
        set_origin(&case.origin, &format!(".{name}"));
    }
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
