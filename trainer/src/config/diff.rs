//! What a resumed run would do differently.

use toml::{Table, Value};

use super::{Config, ConfigError};

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

/// The keys in which two configurations differ.
pub fn changes(then: &Config, now: &Config) -> Vec<Change> {
    let (then, now) = (flatten(then), flatten(now));
    let mut keys: Vec<&String> = then.keys().chain(now.keys()).collect();
    keys.sort();
    keys.dedup();
    let show = |table: &Table, key: &str| table.get(key).map_or("(none)".into(), Value::to_string);
    keys.into_iter()
        .map(|key| Change {
            key: key.clone(),
            then: show(&then, key),
            now: show(&now, key),
            // The data's identity is its manifest, which is checked on its own: a moved file is the same file.
            mathematics: !is_harmless(key) && key != "data.path" && key != "data.eval_path" && key != "preset",
        })
        .filter(|change| change.then != change.now)
        .collect()
}

/// The table of changes, or an error if one alters the mathematics and is not in `allowed`.
pub fn check_changes(then: &Config, now: &Config, allowed: &[String]) -> Result<Option<String>, ConfigError> {
    let changes = changes(then, now);
    let table = render(&changes);
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
