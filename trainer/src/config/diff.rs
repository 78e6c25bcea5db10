//! What a resumed run would do differently.

use toml::{Table, Value};

use super::{Backend, Config, ConfigError, Engram};
use crate::model;

/// One key that differs between the stored and the present configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Dotted key.
    pub key: String,
    /// Value in the checkpoint.
    pub then: String,
    /// Value now.
    pub now: String,
    /// Whether the run would compute other numbers.
    pub mathematics: bool,
}

/// Keys that only change what is reported or saved. Every other key changes the numbers a run computes.
fn is_harmless(key: &str) -> bool {
    // A replayed step has the bits of an eager one. Arms and backend decide bits; `run.unverified` only admits them.
    key.starts_with("log.") || key.starts_with("checkpoint.") || key == "run.graph" || key == "run.unverified"
}

/// Whether a change of this key keeps the numbers because of the two values it has.
fn is_same(key: &str, a: &Config, b: &Config) -> bool {
    match key {
        // The data's identity is its manifest, which is checked on its own: a moved file is the same file. So it is with
        // targets, whose teacher is known by its hash; and without the objective nobody reads them.
        "data.path" | "data.eval_path" | "preset" => true,
        "jepa.targets" => !b.jepa.on() || (a.jepa.targets.is_some() && b.jepa.targets.is_some()),
        // Where the table lies. That the bits are the same is shown on the reference, and on no device yet.
        "model.engram" => {
            let off = [a, b].iter().any(|config| config.model.engram == Engram::Off);
            !off && b.run.backend == Backend::Cpu
        }
        _ => is_harmless(key),
    }
}

/// The keys in which two configurations differ.
pub fn changes(a: &Config, b: &Config) -> Vec<Change> {
    let (then, now) = (flatten(a), flatten(b));
    let mut keys: Vec<&String> = then.keys().chain(now.keys()).collect();
    keys.sort();
    keys.dedup();
    let show = |table: &Table, key: &str| table.get(key).map_or("(none)".into(), Value::to_string);
    keys.into_iter()
        .map(|key| Change {
            key: key.clone(),
            then: show(&then, key),
            now: show(&now, key),
            mathematics: !is_same(key, a, b),
        })
        .filter(|change| change.then != change.now)
        .collect()
}

/// The table of changes, or an error if one alters the mathematics and is not in `allowed`, or if a key there is none.
pub fn check_changes(then: &Config, now: &Config, allowed: &[String]) -> Result<Option<String>, ConfigError> {
    let known = [then, now].map(flatten);
    if let Some(key) = allowed.iter().find(|key| !known.iter().any(|keys| keys.contains_key(*key))) {
        let problem = format!("--allow-change {key}: there is no such key; `dormouse inspect` prints all of them");
        return Err(ConfigError::Usage(problem));
    }
    let changes = changes(then, now);
    let table = render(&changes);
    if let Some(why) = unfit(then, now, &changes) {
        let advice = format!("{why}, and no --allow-change can help; leave the change out, or start a new run");
        return Err(ConfigError::Changed { table, advice: advice + " (without --resume)" });
    }
    let refused: Vec<&str> =
        changes.iter().filter(|change| change.mathematics).map(|change| change.key.as_str()).collect();
    let missing: Vec<&str> = refused.into_iter().filter(|key| !allowed.iter().any(|allow| allow == key)).collect();
    if !missing.is_empty() {
        let advice = format!(
            "leave the change out, or add{} to go on with it",
            missing.iter().map(|key| format!(" --allow-change {key}")).collect::<String>()
        );
        return Err(ConfigError::Changed { table, advice });
    }
    Ok((!changes.is_empty()).then_some(table))
}

/// Why the tensors of a checkpoint are not those of the model that is asked for, by the first key to blame. Parameters of
/// an objective that the run has no more are left behind.
fn unfit(then: &Config, now: &Config, changes: &[Change]) -> Option<String> {
    let tensors = |config: &Config| model::Table::of(config).params;
    let held = tensors(then);
    changes.iter().find_map(|change| {
        let wanted = tensors(&with_key(then, now, &change.key)?);
        let key = &change.key;
        let place = |name: &str, of: &[model::Param]| of.iter().position(|param| param.name == name);
        for param in &wanted {
            let (name, shape) = (param.name, &param.shape);
            match place(name, &held) {
                None => return Some(format!("`{key}` needs tensor `{name}`, which the checkpoint does not have")),
                Some(at) if held[at].shape != *shape => {
                    let got = &held[at].shape;
                    return Some(format!(
                        "`{key}` makes tensor `{name}` {shape:?}, which is {got:?} in the checkpoint"
                    ));
                }
                Some(_) => {}
            }
        }
        let lost =
            held.iter().find(|param| !param.name.starts_with("jepa.") && place(param.name, &wanted).is_none())?;
        Some(format!("`{key}` has no place for tensor `{}` of the checkpoint", lost.name))
    })
}

/// `then` with one key as `now` has it; nothing where the key alone makes no configuration.
fn with_key(then: &Config, now: &Config, key: &str) -> Option<Config> {
    let table = |config: &Config| Table::try_from(config).expect("a configuration has only tables and plain values");
    let (mut all, other) = (table(then), table(now));
    match key.split_once('.') {
        Some((section, name)) => {
            let value = other.get(section)?.get(name).cloned();
            let section = all.get_mut(section)?.as_table_mut()?;
            match value {
                Some(value) => section.insert(name.to_owned(), value),
                None => section.remove(name),
            };
        }
        None => _ = all.insert(key.to_owned(), other.get(key)?.clone()),
    }
    all.try_into().ok()
}

fn render(changes: &[Change]) -> String {
    let header = ["key".to_owned(), "checkpoint".to_owned(), "now".to_owned(), "effect".to_owned()];
    let rows = changes.iter().map(|change| {
        let effect = if change.mathematics { "other numbers" } else { "same numbers" };
        [change.key.clone(), change.then.clone(), change.now.clone(), effect.to_owned()]
    });
    let rows: Vec<[String; 4]> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2)];
    let mut table = String::new();
    for [key, then, now, effect] in &rows {
        let [a, b, c] = widths;
        table.push_str(&format!("  {key:a$}  {then:b$}  {now:c$}  {effect}\n"));
    }
    table
}

/// Every key of a configuration in dotted form, with its value.
pub fn flatten(config: &Config) -> Table {
    let mut flat = Table::new();
    for (section, value) in Table::try_from(config).expect("a configuration has only tables and plain values") {
        match value {
            Value::Table(inner) => {
                flat.extend(inner.into_iter().map(|(key, value)| (format!("{section}.{key}"), value)));
            }
            plain => {
                flat.insert(section, plain);
            }
        }
    }
    flat
}
