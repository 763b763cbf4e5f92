//! JSON of state files, encoded and decoded as Go's `encoding/json` does. Pure. Spec 06 §4.
//!
//! Field names match without regard to case, and null is the zero value of every type. Errors name the fields that lead
//! to the wrong value.

use serde_json::{Map, Value};

/// A decoded value, or what is wrong with it.
pub type Decoded<T> = Result<T, String>;

static NULL: Value = Value::Null;

/// Compact text of a value. Escapes the characters that Go's encoder escapes in addition.
pub fn to_text(value: &Value) -> String {
    // In compact JSON these characters occur in strings only.
    value
        .to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// Parses a document.
///
/// # Errors
/// The content is not JSON in UTF-8, or is nested more than 127 levels deep.
pub fn parse(content: &[u8]) -> Decoded<Value> {
    serde_json::from_slice(content).map_err(|error| error.to_string())
}

/// Decodes a field of an object; a missing one is null. Of names that differ by case only, the last one counts.
pub fn decode_field<T>(parent: &Value, name: &str, decode: impl FnOnce(&Value) -> Decoded<T>) -> Decoded<T> {
    let mut members = as_object(parent)?.into_iter().flatten();
    let value = members.rfind(|(key, _)| key.eq_ignore_ascii_case(name)).map_or(&NULL, |(_, value)| value);
    decode(value).map_err(|error| format!("{name}: {error}"))
}

/// Returns the members of an object; `None` for null.
pub fn as_object(value: &Value) -> Decoded<Option<&Map<String, Value>>> {
    match value {
        Value::Null => Ok(None),
        Value::Object(members) => Ok(Some(members)),
        _ => Err("expected an object".to_owned()),
    }
}

/// Decodes the members of an object by name and value; null has none.
pub fn decode_members<T>(value: &Value, member: impl Fn(&str, &Value) -> Decoded<T>) -> Decoded<Vec<T>> {
    as_object(value)?.into_iter().flatten().map(|(name, value)| member(name, value)).collect()
}

/// Decodes the elements of an array; null has none.
pub fn decode_list<T>(value: &Value, element: impl Fn(&Value) -> Decoded<T>) -> Decoded<Vec<T>> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(elements) => elements.iter().map(element).collect(),
        _ => Err("expected an array".to_owned()),
    }
}

/// Decodes a string; null is empty.
pub fn decode_string(value: &Value) -> Decoded<String> {
    decode_optional_string(value).map(Option::unwrap_or_default)
}

/// Decodes a string or null.
pub fn decode_optional_string(value: &Value) -> Decoded<Option<String>> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => Err("expected a string".to_owned()),
    }
}

/// Decodes an unsigned integer; null is 0.
pub fn decode_unsigned(value: &Value) -> Decoded<u64> {
    match value {
        Value::Null => Ok(0),
        _ => value.as_u64().ok_or_else(|| "expected an unsigned integer".to_owned()),
    }
}

/// Decodes an integer; null is 0.
pub fn decode_integer(value: &Value) -> Decoded<i64> {
    match value {
        Value::Null => Ok(0),
        _ => value.as_i64().ok_or_else(|| "expected an integer".to_owned()),
    }
}
