//! Parses the text of a configuration file into one JSON value. Pure.
//!
//! The text is one JSON or YAML document. Duplicate keys are not an error here: the last one wins and each is
//! reported, because the main file tolerates them and a drop-in does not (spec 01 §3.2, §3.3).

use std::{
    cell::RefCell,
    fmt::{self, Write},
};

use serde::de::{self, DeserializeSeed, Visitor};
use serde_json::{Map, Value};

use super::{
    text::excerpt,
    yaml::{self, MAX_VALUES},
};

/// Maximum number of strict errors reported for a document, as in the reference.
pub(super) const MAX_STRICT_ERRORS: usize = 100;

/// A parsed file.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedDocument {
    /// Content of the file.
    pub value: Value,
    /// One strict error per duplicate key, with the reference's text.
    pub duplicates: Vec<String>,
}

/// The text is neither JSON nor YAML; contains the error with its position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SyntaxError(String);

/// Parses a text.
///
/// # Errors
/// The syntax is malformed.
pub fn parse(text: &str) -> Result<ParsedDocument, SyntaxError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim_start().starts_with(['{', '['])
        && let Some(document) = parse_json(text)?
    {
        return Ok(document);
    }
    parse_yaml(text)
}

/// Parses JSON; `None` if the text is not JSON: a YAML flow mapping starts with the same characters.
fn parse_json(text: &str) -> Result<Option<ParsedDocument>, SyntaxError> {
    let notes = RefCell::new(Notes::default());
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Tree(&notes).deserialize(&mut reader);
    let Notes { duplicates, values, .. } = notes.into_inner();
    if values > MAX_VALUES {
        return Err(SyntaxError(format!("the document has more than {MAX_VALUES} values")));
    }
    Ok(value.ok().filter(|_| reader.end().is_ok()).map(|value| ParsedDocument { value, duplicates }))
}

fn parse_yaml(text: &str) -> Result<ParsedDocument, SyntaxError> {
    use serde_saphyr::options::DuplicateKeyPolicy;
    let read = |policy: DuplicateKeyPolicy| serde_saphyr::from_str_with_options::<Value>(text, yaml::options(policy));
    let (mut value, duplicates) = match read(DuplicateKeyPolicy::Error) {
        Ok(value) => (value, Vec::new()),
        Err(error) => match duplicate(&error) {
            Some(strict) => (read(DuplicateKeyPolicy::LastWins).map_err(|e| syntax(&e))?, vec![strict]),
            None => return Err(syntax(&error)),
        },
    };
    yaml::whole_floats_to_integers(&mut value);
    Ok(ParsedDocument { value: sorted(value), duplicates })
}

/// Returns the strict error of a duplicate key, if the error is one.
fn duplicate(error: &serde_saphyr::Error) -> Option<String> {
    match error.without_snippet() {
        serde_saphyr::Error::DuplicateMappingKey { key, location } => Some(format!(
            "yaml: unmarshal errors:\n  line {}: key {} already set in map",
            location.line(),
            super::text::quote(key.as_deref().unwrap_or("?"))
        )),
        _ => None,
    }
}

fn syntax(error: &serde_saphyr::Error) -> SyntaxError {
    let text = error.without_snippet().to_string();
    match error.location() {
        Some(at) => SyntaxError(format!("error converting YAML to JSON: yaml: line {}: {text}", at.line())),
        None => SyntaxError(format!("error converting YAML to JSON: yaml: {text}")),
    }
}

/// Sorts keys: the reference converts YAML to JSON with sorted keys before it decodes any field.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(entries) => {
            let mut entries: Vec<(String, Value)> = entries.into_iter().collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(entries.into_iter().map(|(key, value)| (key, sorted(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// State collected while a document is parsed.
#[derive(Default)]
struct Notes {
    /// Path of the current value; a single text, because each level may have a long name and many members.
    path: String,
    duplicates: Vec<String>,
    values: usize,
}

impl Notes {
    fn duplicate(&mut self) {
        let note = format!("duplicate field {}", super::text::quote(&excerpt(&self.path)));
        if self.duplicates.len() < MAX_STRICT_ERRORS && !self.duplicates.contains(&note) {
            self.duplicates.push(note);
        }
    }
}

/// Builds a [`Value`] and records duplicate keys.
#[derive(Clone, Copy)]
struct Tree<'a>(&'a RefCell<Notes>);

impl Tree<'_> {
    /// Runs `read` with the path extended by one step, and restores the path.
    fn below<R>(self, step: fmt::Arguments<'_>, read: impl FnOnce() -> R) -> R {
        let before = self.0.borrow().path.len();
        let _ = self.0.borrow_mut().path.write_fmt(step); // writing to a String cannot fail
        let done = read();
        self.0.borrow_mut().path.truncate(before);
        done
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.0.borrow_mut().values += 1;
        if self.0.borrow().values > MAX_VALUES {
            return Err(de::Error::custom("too many values"));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = self.below(format_args!("[{}]", list.len()), || items.next_element_seed(self))? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let dot = if self.0.borrow().path.is_empty() { "" } else { "." };
            self.below(format_args!("{dot}{key}"), || {
                let value = entries.next_value_seed(self)?;
                if map.insert(key.clone(), value).is_some() {
                    self.0.borrow_mut().duplicate();
                }
                Ok(())
            })?;
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_and_yaml_are_read_alike() {
        let expected = json!({"a": 1, "b": {"c": [true, "x"]}});
        for text in
            ["{\"a\": 1, \"b\": {\"c\": [true, \"x\"]}}", "b:\n  c: [true, x]\na: 1\n", "{a: 1, b: {c: [true, x]}}"]
        {
            assert_eq!(parse(text).map(|d| d.value), Ok(expected.clone()), "{text}");
        }
    }

    #[test]
    fn scalars_keep_their_yaml_type() {
        let document = parse("a: \"10\"\nb: 10\nc: no\nd: null\ne: 1.5\nf: 0.0.0.0\ng: ~\nh: 5m\ni: 0110\nj: 1e+06\n")
            .expect("yaml");
        assert_eq!(
            document.value,
            json!({"a": "10", "b": 10, "c": false, "d": null, "e": 1.5, "f": "0.0.0.0", "g": null, "h": "5m", "i": 72, "j": 1_000_000})
        );
    }

    #[test]
    fn the_last_duplicate_wins_and_is_reported() {
        let document = parse("port: 1\nport: 2\n").expect("yaml");
        assert_eq!(document.value, json!({"port": 2}));
        assert_eq!(document.duplicates, ["yaml: unmarshal errors:\n  line 2: key \"port\" already set in map"]);
        let document = parse("{\"a\": {\"b\": 1, \"b\": 2}}").expect("json");
        assert_eq!(document.value, json!({"a": {"b": 2}}));
        assert_eq!(document.duplicates, ["duplicate field \"a.b\""]);
    }

    #[test]
    fn broken_syntax_is_an_error_that_names_the_line() {
        for text in ["a: [1", "a: b: c", "a: 1\n---\nb: 2\n"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        assert!(parse("x: 1\na: [1").map_err(|e| e.to_string()).is_err_and(|e| e.contains("line ")));
    }
}
