//! Preset < file < `--set` < typed flags.

use std::io::Read;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::presets::{PRESETS, preset};
use super::{Config, ConfigError};

/// Where values come from, weakest first.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Complete configuration to start from instead of a preset: the stored one of a resumed run.
    pub base: Option<Config>,
    /// `--config FILE`.
    pub file: Option<PathBuf>,
    /// `--preset NAME`; wins over `preset = ` in the file.
    pub preset: Option<String>,
    /// `--set key=value`, in order.
    pub set: Vec<String>,
    /// Typed flags, as (key, value).
    pub flags: Vec<(String, Value)>,
}

/// Resolves and validates a configuration.
pub fn resolve(sources: &Sources) -> Result<Config, ConfigError> {
    let file = sources.file.as_deref().map(read_file).transpose()?;
    let file_preset = file.as_ref().and_then(|file| file.table.get("preset")).and_then(Value::as_str);
    let mut config = match (&sources.preset, file_preset, &sources.base) {
        (Some(name), _, _) => preset(name)?,
        (None, Some(name), _) => preset(name).map_err(|_| ConfigError::WrongType {
            place: file.as_ref().map_or_else(String::new, |file| file.place(&["preset".to_owned()])),
            key: "preset".into(),
            expected: format!("one of {}", PRESETS.join(", ")),
            got: format!("`{name}`"),
        })?,
        (None, None, Some(base)) => base.clone(),
        (None, None, None) => preset(PRESETS[0])?,
    };
    let name = config.preset.clone();
    let mut table = to_table(&config);
    if let Some(file) = &file {
        merge(&mut table, &file.table, &mut Vec::new(), &|path| file.place(path))?;
    }
    for argument in &sources.set {
        let (key, value) = parse_set(argument)?;
        if key == "preset" {
            let problem = format!("config: --set {argument}: `preset` names what the values start from");
            return Err(ConfigError::Usage(format!("{problem}, so it cannot be set over them; give --preset {value}")));
        }
        set_key(&mut table, &key, value, &format!("--set {argument}"))?;
    }
    for (key, value) in &sources.flags {
        set_key(&mut table, key, value.clone(), "command line")?;
    }
    config = table.try_into().map_err(|error: toml::de::Error| ConfigError::Syntax {
        origin: "the resolved configuration".into(),
        problem: error.to_string(),
    })?;
    // The preset's name stands for the values a run started from; only --preset and the file's own `preset` choose it.
    config.preset = name;
    for path in [&mut config.data.path, &mut config.data.eval_path, &mut config.jepa.targets] {
        // An empty path is how a file or --set says "none".
        *path = path.take().filter(|path| !path.as_os_str().is_empty());
    }
    config.validate()?;
    Ok(config)
}

/// Bytes that a configuration's file has at most.
const LARGEST_FILE: u64 = 1 << 20;

struct FileTable {
    path: PathBuf,
    text: String,
    table: Table,
}

impl FileTable {
    /// `nano.toml line 3`, as far as the line can be told.
    fn place(&self, path: &[String]) -> String {
        match line_of(&self.text, path) {
            Some(line) => format!("`{}` line {line}", self.path.display()),
            None => format!("`{}`", self.path.display()),
        }
    }
}

fn read_file(path: &Path) -> Result<FileTable, ConfigError> {
    let unreadable = |cause| ConfigError::Unreadable { path: path.to_owned(), cause };
    // A pipe is welcome, and a stream without an end is not.
    let (mut bytes, file) = (Vec::new(), std::fs::File::open(path).map_err(unreadable)?);
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > LARGEST_FILE {
        let problem =
            format!("it has more than {LARGEST_FILE} bytes, so it is no configuration; give another --config");
        return Err(ConfigError::Syntax { origin: path.display().to_string(), problem });
    }
    let not_text = |error| unreadable(std::io::Error::new(std::io::ErrorKind::InvalidData, error));
    let text = String::from_utf8(bytes).map_err(not_text)?;
    let table = toml::from_str(&text).map_err(|error: toml::de::Error| ConfigError::Syntax {
        origin: path.display().to_string(),
        problem: error.to_string(),
    })?;
    Ok(FileTable { path: path.to_owned(), text, table })
}

/// The line, from 1, of the last key of `path` in a TOML text.
fn line_of(text: &str, path: &[String]) -> Option<usize> {
    let root = toml::de::DeTable::parse(text).ok()?;
    let mut table = root.get_ref();
    for (depth, name) in path.iter().enumerate() {
        let (key, value) = table.iter().find(|(key, _)| key.get_ref() == name)?;
        if depth + 1 == path.len() {
            return Some(text[..key.span().start].matches('\n').count() + 1);
        }
        table = value.get_ref().as_table()?;
    }
    None
}

fn to_table(config: &Config) -> Table {
    Table::try_from(config).expect("a configuration has only tables, numbers, strings and lists")
}

/// Every key there is, with a value of its type; optional keys are present here.
fn schema() -> Table {
    let mut config = preset(PRESETS[0]).expect("the default preset exists");
    config.data.path = Some(PathBuf::from("path"));
    config.data.eval_path = Some(PathBuf::from("path"));
    config.jepa.targets = Some(PathBuf::from("path"));
    to_table(&config)
}

/// Every key, in dotted form.
fn all_keys() -> Vec<String> {
    let mut keys = Vec::new();
    for (name, value) in &schema() {
        match value {
            Value::Table(inner) => keys.extend(inner.keys().map(|key| format!("{name}.{key}"))),
            _ => keys.push(name.clone()),
        }
    }
    keys
}

/// Lays `over` on `table`, key by key; every key must exist and have its type.
fn merge(
    table: &mut Table,
    over: &Table,
    path: &mut Vec<String>,
    place: &dyn Fn(&[String]) -> String,
) -> Result<(), ConfigError> {
    for (name, value) in over {
        path.push(name.clone());
        let expected = lookup(&schema(), path).ok_or_else(|| unknown_key(place(path), &whole_key(path, value)))?;
        match (&expected, value) {
            (Value::Table(_), Value::Table(inner)) => {
                let target = table.get_mut(name).and_then(Value::as_table_mut);
                merge(target.expect("every section is present in a preset"), inner, path, place)?;
            }
            _ => {
                let value = typed(&expected, value.clone(), &path.join("."), || place(path))?;
                known_word(path, &value, place)?;
                table.insert(name.clone(), value);
            }
        }
        path.pop();
    }
    Ok(())
}

fn lookup(table: &Table, path: &[String]) -> Option<Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(first)?;
    if rest.is_empty() { Some(value.clone()) } else { lookup(value.as_table()?, rest) }
}

fn set_key(table: &mut Table, key: &str, value: Value, place: &str) -> Result<(), ConfigError> {
    let path: Vec<String> = key.split('.').map(str::to_owned).collect();
    let mut over = value;
    for name in path.iter().rev() {
        over = Value::Table(Table::from_iter([(name.clone(), over)]));
    }
    let over = over.as_table().expect("a path has one name or more, so the value was wrapped").clone();
    merge(table, &over, &mut Vec::new(), &|_| place.to_owned())
}

/// `key=value`; the value is TOML, or a bare string if it is not.
fn parse_set(argument: &str) -> Result<(String, Value), ConfigError> {
    let bad = || ConfigError::BadSet { argument: argument.to_owned() };
    let (key, value) = argument.split_once('=').ok_or_else(bad)?;
    let (key, value) = (key.trim(), value.trim());
    if key.is_empty() {
        return Err(bad());
    }
    let parsed = toml::from_str::<Table>(&format!("value = {value}")).ok().and_then(|mut table| table.remove("value"));
    Ok((key.to_owned(), parsed.unwrap_or_else(|| Value::String(value.to_owned()))))
}

/// `value` as the type of `expected`; a whole number may stand where a fraction is expected.
fn typed(expected: &Value, value: Value, key: &str, place: impl Fn() -> String) -> Result<Value, ConfigError> {
    let wrong = |got: String| ConfigError::WrongType {
        place: place(),
        key: key.to_owned(),
        expected: match expected {
            Value::Integer(_) => "a whole number, 0 or more".into(),
            Value::Float(_) => "a number".into(),
            Value::Boolean(_) => "true or false".into(),
            Value::Array(_) => "a list of strings".into(),
            Value::Table(_) => "a section".into(),
            _ => "a string".into(),
        },
        got,
    };
    match (expected, value) {
        (Value::Float(_), Value::Integer(whole)) => Ok(Value::Float(whole as f64)),
        // TOML has no whole number above 63 bits, so --set has taken one for a bare string.
        (Value::Float(_), Value::String(digits)) if too_large(&digits) => {
            digits.replace('_', "").parse().map(Value::Float).map_err(|_| wrong(format!("`{digits}`")))
        }
        (Value::Integer(_), Value::String(digits)) if too_large(&digits) => {
            let expected = format!("a whole number from 0 to {}", i64::MAX);
            let got = format!("`{digits}`, which is outside of that");
            Err(ConfigError::WrongType { place: place(), key: key.to_owned(), expected, got })
        }
        (Value::Integer(_), Value::Integer(negative)) if negative < 0 => Err(wrong(negative.to_string())),
        (Value::Array(_), Value::Array(items)) if !items.iter().all(Value::is_str) => {
            Err(wrong(Value::Array(items).to_string()))
        }
        (expected, value) if expected.same_type(&value) => Ok(value),
        (_, value) => Err(wrong(format!("{} `{value}`", value.type_str()))),
    }
}

/// Whether a word is a whole number that 63 bits do not hold.
fn too_large(word: &str) -> bool {
    let digits = word.strip_prefix(['+', '-']).unwrap_or(word);
    let whole =
        digits.starts_with(|c: char| c.is_ascii_digit()) && digits.chars().all(|c| c.is_ascii_digit() || c == '_');
    whole && word.replace('_', "").parse::<i64>().is_err()
}

/// Refuses a string that is none of the words of its key, while it is known where it came from.
fn known_word(path: &[String], value: &Value, place: &dyn Fn(&[String]) -> String) -> Result<(), ConfigError> {
    let Value::String(got) = value else { return Ok(()) };
    let mut probe = schema();
    let (name, sections) = path.split_last().expect("a key has a name");
    let section = sections.iter().fold(&mut probe, |table, name| {
        table.get_mut(name).and_then(Value::as_table_mut).expect("the path was looked up")
    });
    section.insert(name.clone(), value.clone());
    probe.try_into::<Config>().map(|_| ()).map_err(|error| {
        // "unknown variant `x`, expected one of `a`, `b`": the words are listed where they are declared, and nowhere else.
        let message = error.message();
        let expected = message.split_once(", expected ").map_or(message, |(_, words)| words).to_owned();
        ConfigError::WrongType { place: place(path), key: path.join("."), expected, got: format!("`{got}`") }
    })
}

/// The key that was written where its beginning is unknown: `modle.width` resembles another key than `modle` does.
fn whole_key(path: &[String], value: &Value) -> String {
    let (mut key, mut value) = (path.join("."), value);
    while let Some((name, inner)) = value.as_table().and_then(|table| table.iter().next()) {
        key = format!("{key}.{name}");
        value = inner;
    }
    key
}

fn unknown_key(place: String, key: &str) -> ConfigError {
    // Of a long section's name a key is no nearer.
    let most = 4.max(key.rsplit('.').next().unwrap_or(key).len() / 2);
    let nearest = all_keys()
        .into_iter()
        .map(|known| (key_distance(key, &known), known))
        .min()
        .filter(|(distance, _)| *distance <= most)
        .map(|(_, known)| format!(", nearest is `{known}`"))
        .unwrap_or_default();
    ConfigError::UnknownKey { place, key: key.to_owned(), nearest }
}

/// Distance of two dotted keys: a forgotten section costs little, so `lr` finds `optimizer.lr`.
fn key_distance(key: &str, known: &str) -> usize {
    let bare = known.rsplit('.').next().unwrap_or(known);
    let key_bare = key.rsplit('.').next().unwrap_or(key);
    edit_distance(key, known).min(edit_distance(key_bare, bare) + usize::from(key != bare))
}

/// Fewest insertions, deletions and replacements that turn `a` into `b` (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for i in 0..a.len() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for j in 0..b.len() {
            let replaced = diagonal + usize::from(a[i] != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
