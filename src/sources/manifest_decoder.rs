//! Manifest decoder: YAML or JSON, one pod or a list of pods. Pure.
//!
//! YAML is parsed by the rules that existing manifests were written for (YAML 1.1: `0644` is octal,
//! `yes` is true, of duplicate keys the last one counts), within budgets that stop alias bombs and deep
//! nesting. Only the first document counts; unknown fields are ignored. Implements spec 02a §1.2 steps
//! 2 and 3.

use std::fmt::{self, Write};

use serde_json::{Map, Value};
use serde_saphyr::options::DuplicateKeyPolicy;

use berth_config::{
    text::excerpt,
    yaml::{self, MAX_VALUES},
};
use berth_types::{api, fieldpath::quoted, quantity::Amount};

/// A decoded manifest.
#[derive(Clone, Debug, PartialEq)]
pub enum Manifest {
    /// A `v1` `Pod`.
    Pod(Box<api::Pod>),
    /// A `v1` `PodList`.
    List(Vec<api::Pod>),
}

/// The bytes are neither a pod nor a list of pods.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Neither YAML nor JSON, or a budget was exceeded.
    #[error("error converting YAML to JSON: {0}")]
    Yaml(String),
    /// JSON with more values than the budget allows.
    #[error("manifest contains more than {MAX_VALUES} values")]
    TooManyValues,
    /// Starts like JSON, but is malformed.
    #[error("{0}")]
    Json(String),
    /// `kind` is missing or not a string.
    #[error("Object 'Kind' is missing in '{0}'")]
    NoKind(String),
    /// `apiVersion` is missing or not a string.
    #[error("Object 'apiVersion' is missing in '{0}'")]
    NoVersion(String),
    /// Neither a pod nor a list of pods.
    #[error("no kind {} is registered for version {}", quoted(.kind), quoted(.version))]
    OtherKind {
        /// `kind` of the manifest.
        kind: String,
        /// `apiVersion` of the manifest.
        version: String,
    },
    /// A list where a single pod is required.
    #[error("invalid pod: manifest contains a PodList, expected a Pod")]
    List,
    /// A field has the wrong type.
    #[error("{0}")]
    Field(String),
    /// A quantity is malformed.
    #[error("{path}: {reason}")]
    Quantity {
        /// Path of the field.
        path: String,
        /// Error text of the API.
        reason: String,
    },
}

/// Decodes a manifest.
///
/// # Errors
/// The reason why the bytes are not a valid manifest.
pub fn decode(bytes: &[u8]) -> Result<Manifest, DecodeError> {
    let mut value = if is_json(bytes) { from_json(bytes)? } else { from_yaml(bytes)? };
    // Quantities keep their original text: it is part of the input of the pod's UID.
    quantities_of_all(&mut value)?;
    if !is_json(bytes) {
        yaml::whole_floats_to_integers(&mut value);
    }
    let (version, kind) = (text(&value, "apiVersion"), text(&value, "kind"));
    let Some(kind) = kind else { return Err(DecodeError::NoKind(excerpt(&value.to_string()))) };
    let Some(version) = version else { return Err(DecodeError::NoVersion(excerpt(&value.to_string()))) };
    match (version.as_str(), kind.as_str()) {
        ("v1", "Pod") => Ok(Manifest::Pod(Box::new(pod(value)?))),
        ("v1", "PodList") => {
            let items = value.get_mut("items").map(Value::take).unwrap_or_default();
            let items = match items {
                Value::Array(items) => items,
                Value::Null => Vec::new(),
                _ => return Err(DecodeError::Field("PodList.items: expected a list".to_owned())),
            };
            items.into_iter().map(pod).collect::<Result<_, _>>().map(Manifest::List)
        }
        _ => Err(DecodeError::OtherKind { kind: excerpt(&kind), version: excerpt(&version) }),
    }
}

/// All documents of a manifest that may contain several, of any kind; empty ones are omitted.
///
/// # Errors
/// A document is neither YAML nor JSON.
pub fn documents(bytes: &[u8]) -> Result<Vec<Value>, DecodeError> {
    let json = is_json(bytes).then(|| from_json(bytes));
    if let Some(Ok(one)) = json {
        return Ok(vec![one]);
    }
    // JSON documents separated by `---` are YAML.
    let mut reader = bytes;
    let all: Result<Vec<Value>, _> = serde_saphyr::read_with_options(&mut reader, options()).collect();
    let mut all = match (all, json) {
        (Ok(all), _) => all,
        (Err(_), Some(Err(error))) => return Err(error),
        (Err(error), _) => return Err(DecodeError::Yaml(excerpt(&error.to_string()))),
    };
    all.iter_mut().for_each(yaml::whole_floats_to_integers);
    Ok(all.into_iter().filter(|document| !document.is_null()).collect())
}

/// Converts a value to that type.
///
/// # Errors
/// Names the field with another type.
pub fn typed<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| match error.path().to_string() {
        path if path == "." => error.inner().to_string(),
        path => format!("{path}: {}", error.inner()),
    })
}

fn options() -> serde_saphyr::Options {
    yaml::options(DuplicateKeyPolicy::LastWins)
}

fn is_json(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().starts_with(b"{")
}

fn from_json(bytes: &[u8]) -> Result<Value, DecodeError> {
    if json_values(bytes) > MAX_VALUES {
        return Err(DecodeError::TooManyValues);
    }
    serde_json::from_slice(bytes).map_err(|e| DecodeError::Json(e.to_string()))
}

fn from_yaml(bytes: &[u8]) -> Result<Value, DecodeError> {
    let mut reader = bytes;
    let first = serde_saphyr::read_with_options::<_, Value>(&mut reader, options()).next();
    first.unwrap_or(Ok(Value::Null)).map_err(|e| DecodeError::Yaml(excerpt(&e.to_string())))
}

/// Upper limit of the number of values in a JSON text, determined before anything is allocated.
fn json_values(bytes: &[u8]) -> usize {
    let (mut values, mut quoted, mut escaped) = (1, false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b',' | b'[' | b'{' if !quoted => values += 1,
            _ => {}
        }
    }
    values
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn pod(mut value: Value) -> Result<api::Pod, DecodeError> {
    // Items of a list may omit these fields; wrong values there are ignored.
    if let Some(members) = value.as_object_mut() {
        members.insert("apiVersion".to_owned(), "v1".into());
        members.insert("kind".to_owned(), "Pod".into());
    }
    typed(value).map_err(|e| DecodeError::Field(excerpt(&e)))
}

/// Path of the current value; one string, because each level may have a long name and many members.
struct FieldPath(String);

impl FieldPath {
    fn within<R>(&mut self, step: fmt::Arguments<'_>, visit: impl FnOnce(&mut Self) -> R) -> R {
        let before = self.0.len();
        let _ = self.0.write_fmt(step); // writing to a string cannot fail
        let found = visit(self);
        self.0.truncate(before);
        found
    }
}

/// Checks the quantities of a pod or of a list of pods.
fn quantities_of_all(value: &mut Value) -> Result<(), DecodeError> {
    let of_pod = |pod: &mut Value| match pod.get_mut("spec") {
        Some(spec) => quantities(spec, &mut FieldPath("spec".to_owned())),
        None => Ok(()),
    };
    match value.get_mut("items") {
        Some(Value::Array(items)) => items.iter_mut().try_for_each(of_pod),
        _ => of_pod(value),
    }
}

/// Converts quantities written as numbers (`cpu: 1`), which the typed API rejects; and rejects texts
/// that are not quantities, as upstream does when it decodes.
fn quantities(value: &mut Value, at: &mut FieldPath) -> Result<(), DecodeError> {
    match value {
        Value::Object(members) => members.iter_mut().try_for_each(|(key, member)| {
            at.within(format_args!(".{key}"), |at| match (key.as_str(), member) {
                ("requests" | "limits" | "overhead" | "capacity", Value::Object(list)) => quantity_list(list, at),
                ("sizeLimit" | "divisor", one) => quantity(one, at),
                (_, deeper) => quantities(deeper, at),
            })
        }),
        Value::Array(items) => items
            .iter_mut()
            .enumerate()
            .try_for_each(|(i, item)| at.within(format_args!("[{i}]"), |at| quantities(item, at))),
        _ => Ok(()),
    }
}

fn quantity_list(list: &mut Map<String, Value>, at: &mut FieldPath) -> Result<(), DecodeError> {
    list.iter_mut().try_for_each(|(name, value)| at.within(format_args!("[{name}]"), |at| quantity(value, at)))
}

fn quantity(value: &mut Value, at: &FieldPath) -> Result<(), DecodeError> {
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::Null => "0".to_owned(),
        _ => return Ok(()), // the typed decoder reports the error
    };
    Amount::parse(&text)
        .map_err(|e| DecodeError::Quantity { path: excerpt(&at.0), reason: excerpt(&e.to_string()) })?;
    *value = Value::String(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> api::Pod {
        match decode(text.as_bytes()) {
            Ok(Manifest::Pod(pod)) => *pod,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn refused(text: &str) -> String {
        decode(text.as_bytes()).expect_err(text).to_string()
    }

    #[test]
    fn yaml_is_read_as_people_wrote_it() {
        let pod = one("apiVersion: v1\nkind: Pod\nunknown: [1]\nmetadata: {name: a, name: web}\nspec:\n  \
                       hostNetwork: yes\n  terminationGracePeriodSeconds: 30\n  containers:\n  - name: c\n    \
                       resources: {requests: {cpu: 0.5, memory: 1024}}\n    env: [{name: A, value: \"y\"}]\n  volumes:\n  \
                       - {name: v, downwardAPI: {defaultMode: 0644}}\n---\nkind: [broken\n");
        let spec = pod.spec.expect("a spec");
        assert_eq!(pod.metadata.name.as_deref(), Some("web"));
        assert_eq!(spec.host_network, Some(true));
        let requests = spec.containers[0].resources.as_ref().and_then(|r| r.requests.as_ref()).expect("requests");
        assert_eq!((requests["cpu"].0.as_str(), requests["memory"].0.as_str()), ("0.5", "1024"));
        let mode = spec.volumes.expect("volumes")[0].downward_api.as_ref().and_then(|d| d.default_mode);
        assert_eq!(mode, Some(0o644));
    }

    #[test]
    fn whole_numbers_are_integers_however_they_are_written() {
        let pod = one("apiVersion: v1\nkind: Pod\nspec:\n  terminationGracePeriodSeconds: 1e0\n  containers:\n  - \
                       resources: {limits: {cpu: 1.0, memory: 1e9}}\n  volumes:\n  - {name: v, downwardAPI: \
                       {defaultMode: 256.0, items: [{path: a, mode: 0089}]}}\n");
        let spec = pod.spec.expect("a spec");
        assert_eq!(spec.termination_grace_period_seconds, Some(1));
        let volume = spec.volumes.expect("volumes").remove(0).downward_api.expect("of that kind");
        assert_eq!((volume.default_mode, volume.items.expect("items")[0].mode), (Some(0o400), Some(89)));
        let limits = spec.containers[0].resources.as_ref().and_then(|r| r.limits.as_ref()).expect("limits");
        assert_eq!((limits["cpu"].0.as_str(), limits["memory"].0.as_str()), ("1.0", "1000000000.0"));
    }

    #[test]
    fn json_documents_may_stand_between_lines_of_dashes() {
        let two = documents(b"{\"a\": 1}\n---\n{\"b\": 2.0}\n").expect("two documents");
        assert_eq!(two, [serde_json::json!({"a": 1}), serde_json::json!({"b": 2})]);
        assert!(documents(b"{\"a\": ").is_err());
    }

    #[test]
    fn json_and_lists_are_read_too() {
        assert_eq!(one(" {\"apiVersion\":\"v1\",\"kind\":\"Pod\"}").spec, None);
        let list = decode(b"apiVersion: v1\nkind: PodList\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n");
        assert!(matches!(list, Ok(Manifest::List(items)) if items.len() == 2));
        assert_eq!(decode(b"apiVersion: v1\nkind: PodList\n"), Ok(Manifest::List(Vec::new())));
    }

    #[test]
    fn invalid_documents_are_errors() {
        for (text, start) in [
            ("", "Object 'Kind' is missing in 'null'"),
            ("just words", "Object 'Kind' is missing in '\"just words\"'"),
            ("kind: Pod", "Object 'apiVersion' is missing in '{\"kind\":\"Pod\"}'"),
            ("kind: Deployment\napiVersion: apps/v1", "no kind \"Deployment\" is registered for version \"apps/v1\""),
            ("kind: List\napiVersion: v1", "no kind \"List\" is registered for version \"v1\""),
            ("kind: [", "error converting YAML to JSON: "),
            ("{\"kind\": ", "EOF while parsing"),
            ("kind: Pod\napiVersion: v1\nmetadata: {name: 5}", "metadata.name: invalid type: integer `5`"),
            (
                "kind: Pod\napiVersion: v1\nspec: {containers: [{env: [{name: A, value: b}, {name: PORT, value: 8080}]}]}",
                "spec.containers[0].env[1].value: invalid type: integer `8080`, expected a string",
            ),
            ("kind: PodList\napiVersion: v1\nitems: [{spec: {hostPID: 1}}]", "spec.hostPID: invalid type: "),
            (
                "kind: Pod\napiVersion: v1\nspec: {containers: [{resources: {limits: {cpu: lots}}}]}",
                "spec.containers[0].resources.limits[cpu]: unable to parse quantity's suffix",
            ),
            ("kind: PodList\napiVersion: v1\nitems: 3", "PodList.items: expected a list"),
            ("\u{0}\u{1}\u{2}", "error converting YAML to JSON: "),
        ] {
            let error = refused(text);
            assert!(error.starts_with(start), "{text:?}: {error}");
        }
        assert!(decode(&[0xff, 0xfe, 0x00]).is_err());
    }

    #[test]
    fn bombs_are_refused_by_budget() {
        let deep = format!("a: {}{}", "[".repeat(5000), "]".repeat(5000));
        assert!(decode(deep.as_bytes()).is_err());
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for i in 1..12 {
            let list = vec![format!("*a{}", i - 1); 10].join(", ");
            bomb.push_str(&format!("a{i}: &a{i} [{list}]\n"));
        }
        assert!(refused(&bomb).starts_with("error converting YAML to JSON: "));
        let json = format!("{}{}", "{\"a\":".repeat(5000), "}".repeat(5000));
        assert!(decode(json.as_bytes()).is_err());
    }
}
