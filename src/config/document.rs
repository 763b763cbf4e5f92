//! From the text of a configuration file to one JSON value. Pure.
//!
//! JSON or YAML, one document. Duplicate keys are not an error here: the last one wins and each is
//! reported, because the main file forgives them and a drop-in does not (spec 01 §3.2, §3.3).

use std::{cell::RefCell, fmt};

use serde::de::{self, DeserializeSeed, Visitor};
use serde_json::{Map, Value};

/// A parsed file.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// Its content.
    pub value: Value,
    /// One strict error per duplicate key, in the reference's words.
    pub duplicates: Vec<String>,
}

/// The text is neither JSON nor YAML; the text says where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SyntaxError(String);

/// Reads a text.
///
/// # Errors
/// Where the syntax is wrong.
pub fn parse(text: &str) -> Result<Document, SyntaxError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim_start().starts_with(['{', '['])
        && let Some(document) = parse_json(text)
    {
        return Ok(document);
    }
    parse_yaml(text)
}

/// JSON, or nothing if it is not: a YAML flow mapping begins alike.
fn parse_json(text: &str) -> Option<Document> {
    let duplicates = RefCell::new(Vec::new());
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Tree { path: String::new(), duplicates: &duplicates }.deserialize(&mut reader).ok()?;
    reader.end().ok()?;
    Some(Document { value, duplicates: duplicates.into_inner() })
}

fn parse_yaml(text: &str) -> Result<Document, SyntaxError> {
    use serde_saphyr::options::DuplicateKeyPolicy;
    let read = |policy: DuplicateKeyPolicy| {
        let options = serde_saphyr::options! { duplicate_keys: policy, with_snippet: false };
        serde_saphyr::from_str_with_options::<Value>(text, options)
    };
    let (value, duplicates) = match read(DuplicateKeyPolicy::Error) {
        Ok(value) => (value, Vec::new()),
        Err(error) => match duplicate(&error) {
            Some(strict) => (read(DuplicateKeyPolicy::LastWins).map_err(|e| syntax(&e))?, vec![strict]),
            None => return Err(syntax(&error)),
        },
    };
    Ok(Document { value: sorted(value), duplicates })
}

/// The strict error of a duplicate key, if that is what the error is about.
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

/// The reference turns YAML into JSON with sorted keys before it looks at any field.
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

/// Builds a [`Value`] and notes keys that come twice.
struct Tree<'a> {
    path: String,
    duplicates: &'a RefCell<Vec<String>>,
}

impl Tree<'_> {
    fn below(&self, path: String) -> Tree<'_> {
        Tree { path, duplicates: self.duplicates }
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
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
        while let Some(item) = items.next_element_seed(self.below(format!("{}[{}]", self.path, list.len())))? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let path = if self.path.is_empty() { key.clone() } else { format!("{}.{key}", self.path) };
            let value = entries.next_value_seed(self.below(path.clone()))?;
            if map.insert(key, value).is_some() {
                self.duplicates.borrow_mut().push(format!("duplicate field {}", super::text::quote(&path)));
            }
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
        let document = parse("a: \"10\"\nb: 10\nc: no\nd: null\ne: 1.5\nf: 0.0.0.0\ng: ~\nh: 5m\n").expect("yaml");
        assert_eq!(
            document.value,
            json!({"a": "10", "b": 10, "c": false, "d": null, "e": 1.5, "f": "0.0.0.0", "g": null, "h": "5m"})
        );
    }

    #[test]
    fn the_last_duplicate_wins_and_is_told() {
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
