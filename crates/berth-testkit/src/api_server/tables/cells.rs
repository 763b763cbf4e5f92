//! Table cells that many kinds share. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{super::rules::fields::text, ages};

/// Text at that pointer, or `other` if there is none.
pub fn text_or(object: &Value, pointer: &str, other: &str) -> Value {
    match text(object, pointer) {
        "" => json!(other),
        text => json!(text),
    }
}

/// Name of the object.
pub fn name(object: &Value) -> Value {
    json!(text(object, "/metadata/name"))
}

/// Age of the object.
pub fn age(object: &Value, now: Timestamp) -> Value {
    json!(ages::since(object, "/metadata/creationTimestamp", now))
}

/// Total number of fields of the objects at those pointers.
pub fn count(object: &Value, pointers: &[&str]) -> Value {
    let fields = |pointer: &&str| object.pointer(pointer).and_then(Value::as_object).map_or(0, serde_json::Map::len);
    json!(pointers.iter().map(fields).sum::<usize>())
}

/// Texts joined by commas; `<none>` if there are none.
pub fn joined(texts: &[String]) -> Value {
    if texts.is_empty() { json!("<none>") } else { json!(texts.join(",")) }
}
