//! Accessors for fields of raw JSON objects. Pure.

use jiff::Timestamp;
use serde_json::{Map, Value};

/// Value at a JSON pointer; keys that contain slashes are not supported. (`Value::pointer` allocates two strings per
/// key, which is too slow for a thousand pods per request.)
fn at<'a>(object: &'a Value, pointer: &str) -> Option<&'a Value> {
    pointer.split('/').skip(1).try_fold(object, |value, key| match value {
        Value::Array(items) => items.get(key.parse::<usize>().ok()?),
        value => value.get(key),
    })
}

/// Text at that pointer; empty if there is none.
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    at(object, pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Number at that pointer.
pub fn number(object: &Value, pointer: &str) -> Option<i64> {
    at(object, pointer).and_then(Value::as_i64)
}

/// Whether the value at that pointer is `true`.
pub fn is_true(object: &Value, pointer: &str) -> bool {
    at(object, pointer).and_then(Value::as_bool).unwrap_or_default()
}

/// List at that pointer; empty if there is none.
pub fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    at(object, pointer).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Fields of the object at that pointer; none if there is no object.
pub fn fields<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    at(object, pointer).and_then(Value::as_object).into_iter().flat_map(Map::iter)
}

/// Strings of the list at that pointer.
pub fn texts(object: &Value, pointer: &str) -> Vec<String> {
    list(object, pointer).iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Sets a field that is missing or null.
pub fn fill(object: &mut Value, key: &str, value: impl Into<Value>) {
    if object.get(key).is_none_or(Value::is_null) {
        set(object, key, value);
    }
}

/// Sets a field; a value that is not an object becomes one.
pub fn set(object: &mut Value, key: &str, value: impl Into<Value>) {
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    if let Some(fields) = object.as_object_mut() {
        fields.insert(key.to_owned(), value.into());
    }
}

/// Copies a field from another object, or removes it if the other object lacks it.
pub fn take_over(object: &mut Value, key: &str, from: &Value) {
    match from.get(key) {
        Some(value) => set(object, key, value.clone()),
        None => remove(object, key),
    }
}

/// Removes a field.
pub fn remove(object: &mut Value, key: &str) {
    if let Some(fields) = object.as_object_mut() {
        fields.shift_remove(key);
    }
}

/// Mutable list field of an object; empty if there is none.
pub fn list_mut<'a>(object: &'a mut Value, key: &str) -> &'a mut [Value] {
    object.get_mut(key).and_then(Value::as_array_mut).map(Vec::as_mut_slice).unwrap_or_default()
}

/// Time as `metav1.Time` prints it.
pub fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Time at that pointer.
pub fn time_at(object: &Value, pointer: &str) -> Option<Timestamp> {
    text(object, pointer).parse().ok()
}
