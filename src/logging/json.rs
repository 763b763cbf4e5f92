//! JSON format of a log record: one object per line.
//!
//! Implements spec 01 §6.2.

use serde_json::{Map, Number, Value as Json, json};

use super::record::{FieldValue, LogRecord, Severity};

/// Formats a record as a line with its newline.
pub(super) fn line(record: &LogRecord<'_>) -> String {
    let mut object = Map::new();
    let millis = record.at.as_nanosecond() as f64 / 1e6;
    object.insert("ts".to_owned(), Number::from_f64(millis).map_or(Json::Null, Json::Number));
    object.insert("caller".to_owned(), Json::String(format!("{}:{}", caller(record.file), record.line)));
    object.insert("msg".to_owned(), Json::String(record.fields.message.clone()));
    if record.severity != Severity::Error {
        object.insert("v".to_owned(), record.level.into());
    }
    if let Some(error) = &record.fields.error {
        object.insert("err".to_owned(), Json::String(error.clone()));
    }
    for (key, value) in &record.fields.values {
        object.insert((*key).to_owned(), field(key, value));
    }
    let mut line = Json::Object(object).to_string();
    line.push('\n');
    line
}

/// File name with its parent directory.
fn caller(file: &str) -> &str {
    let mut slashes = file.rmatch_indices('/').map(|(at, _)| at);
    slashes.nth(1).and_then(|at| file.get(at + 1..)).unwrap_or(file)
}

fn field(key: &str, value: &FieldValue) -> Json {
    match value {
        FieldValue::Text(text) if key == "pod" => reference(text),
        FieldValue::Text(text) => Json::String(text.clone()),
        FieldValue::Plain(plain) => serde_json::from_str(plain).unwrap_or_else(|_| Json::String(plain.clone())),
        FieldValue::List(items) if key == "pods" => items.iter().map(|item| reference(item)).collect(),
        FieldValue::List(items) => items.iter().cloned().collect(),
    }
}

/// Object reference from `namespace/name`.
fn reference(text: &str) -> Json {
    match text.split_once('/') {
        Some((namespace, name)) => json!({"name": name, "namespace": namespace}),
        None => json!({"name": text}),
    }
}
