//! Cells that many kinds have. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{super::rules::fields::text, ages};

/// The text at that pointer, or another where there is none.
pub fn text_or(object: &Value, pointer: &str, other: &str) -> Value {
    match text(object, pointer) {
        "" => json!(other),
        text => json!(text),
    }
}

/// How the object is called.
pub fn name(object: &Value) -> Value {
    json!(text(object, "/metadata/name"))
}

/// How old it is.
pub fn age(object: &Value, now: Timestamp) -> Value {
    json!(ages::since(object, "/metadata/creationTimestamp", now))
}

/// How many fields the objects at those pointers have.
pub fn count(object: &Value, pointers: &[&str]) -> Value {
    let fields = |pointer: &&str| object.pointer(pointer).and_then(Value::as_object).map_or(0, serde_json::Map::len);
    json!(pointers.iter().map(fields).sum::<usize>())
}

/// Texts with commas between them; `<none>` where there is none.
pub fn joined(texts: &[String]) -> Value {
    if texts.is_empty() { json!("<none>") } else { json!(texts.join(",")) }
}
