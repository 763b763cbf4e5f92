//! Encodes a pod from JSON to the protobuf form of the Kubernetes API. Pure.
//!
//! A table of `proto/core-v1-pod.proto`, parsed once, provides names, numbers, and types. The two forms differ in
//! structs that Go embeds (a separate field in protobuf, inlined in JSON) and in a few types that are strings or
//! numbers in JSON. Fields that the table does not contain are omitted.

use std::{collections::HashMap, sync::LazyLock};

use jiff::Timestamp;
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint},
};
use prost_types::{
    FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};
use serde_json::{Map, Value};

use berth_proto::POD_DESCRIPTORS;

/// Message fields whose content is inlined in JSON.
const EMBEDDED: &[(&str, &str)] = &[
    ("ConfigMapEnvSource", "localObjectReference"),
    ("ConfigMapKeySelector", "localObjectReference"),
    ("ConfigMapProjection", "localObjectReference"),
    ("ConfigMapVolumeSource", "localObjectReference"),
    ("EphemeralContainer", "ephemeralContainerCommon"),
    ("Probe", "handler"),
    ("SecretEnvSource", "localObjectReference"),
    ("SecretKeySelector", "localObjectReference"),
    ("SecretProjection", "localObjectReference"),
    ("Volume", "volumeSource"),
];

/// Encodes a `core/v1` pod given as JSON; returns an empty message where it is not an object.
pub fn encode(pod: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    if let (Value::Object(pod), Some(table)) = (pod, TABLE.as_ref()) {
        table.message("Pod", pod, &mut out);
    }
    out
}

static TABLE: LazyLock<Option<MessageFields>> = LazyLock::new(|| MessageFields::read(POD_DESCRIPTORS));

/// Fields of the messages by message name.
struct MessageFields(HashMap<String, Vec<Field>>);

struct Field {
    name: String,
    number: u32,
    shape: Shape,
    kind: FieldKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    One,
    Many,
    Map,
    Embedded,
}

#[derive(Clone, PartialEq, Eq)]
enum FieldKind {
    Text,
    Number,
    Bool,
    Bytes,
    Message(String),
}

impl MessageFields {
    fn read(descriptors: &[u8]) -> Option<Self> {
        let set = FileDescriptorSet::decode(descriptors).ok()?;
        let mut messages = HashMap::new();
        for message in set.file.iter().flat_map(|file| &file.message_type) {
            let entries: HashMap<&str, FieldKind> = message
                .nested_type
                .iter()
                .filter_map(|entry| Some((entry.name(), kind(entry.field.iter().find(|f| f.number() == 2)?)?)))
                .collect();
            let field = |field: &prost_types::FieldDescriptorProto| {
                let mut of = kind(field)?;
                let mut shape = if field.label() == Label::Repeated { Shape::Many } else { Shape::One };
                if let FieldKind::Message(name) = &of
                    && let Some(value) = entries.get(name.as_str())
                {
                    (shape, of) = (Shape::Map, value.clone());
                }
                if EMBEDDED.contains(&(message.name(), field.name())) {
                    shape = Shape::Embedded;
                }
                let number = u32::try_from(field.number()).ok()?;
                Some(Field { name: field.name().to_owned(), number, shape, kind: of })
            };
            let mut fields: Vec<Field> = message.field.iter().filter_map(field).collect();
            fields.sort_by_key(|field| field.number);
            messages.insert(message.name().to_owned(), fields);
        }
        Some(Self(messages))
    }

    fn message(&self, name: &str, json: &Map<String, Value>, out: &mut Vec<u8>) {
        for field in self.0.get(name).into_iter().flatten() {
            let value = json.get(&field.name);
            match (field.shape, value) {
                (Shape::Embedded, _) => {
                    if let FieldKind::Message(of) = &field.kind {
                        let mut inner = Vec::new();
                        self.message(of, json, &mut inner);
                        put(field.number, &inner, out);
                    }
                }
                (Shape::One, Some(value)) => self.value(field.number, &field.kind, value, out),
                (Shape::Many, Some(Value::Array(values))) => {
                    values.iter().for_each(|value| self.value(field.number, &field.kind, value, out));
                }
                (Shape::Map, Some(Value::Object(entries))) => {
                    let mut keys: Vec<&String> = entries.keys().collect();
                    keys.sort();
                    for key in keys {
                        let mut entry = Vec::new();
                        put(1, key.as_bytes(), &mut entry);
                        self.value(2, &field.kind, &entries[key], &mut entry);
                        put(field.number, &entry, out);
                    }
                }
                _ => {}
            }
        }
    }

    fn value(&self, number: u32, kind: &FieldKind, value: &Value, out: &mut Vec<u8>) {
        match (kind, value) {
            (_, Value::Null) => {}
            (FieldKind::Text, Value::String(text)) => put(number, text.as_bytes(), out),
            (FieldKind::Number, value) => {
                if let Some(value) = value.as_i64() {
                    put_number(number, value, out);
                }
            }
            (FieldKind::Bool, Value::Bool(value)) => put_number(number, i64::from(*value), out),
            (FieldKind::Message(name), value) => {
                if let Some(inner) = special(name, value) {
                    put(number, &inner, out);
                } else if let Value::Object(fields) = value {
                    let mut inner = Vec::new();
                    self.message(name, fields, &mut inner);
                    put(number, &inner, out);
                }
            }
            _ => {}
        }
    }
}

fn kind(field: &prost_types::FieldDescriptorProto) -> Option<FieldKind> {
    match field.r#type() {
        Type::String => Some(FieldKind::Text),
        Type::Int32 | Type::Int64 => Some(FieldKind::Number),
        Type::Bool => Some(FieldKind::Bool),
        Type::Bytes => Some(FieldKind::Bytes),
        Type::Message => Some(FieldKind::Message(field.type_name().rsplit('.').next()?.to_owned())),
        _ => None,
    }
}

/// Encodes types that are not objects in JSON.
fn special(name: &str, value: &Value) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match (name, value) {
        ("Time" | "MicroTime", Value::String(text)) => {
            let time: Timestamp = text.parse().ok()?;
            put_number(1, time.as_second(), &mut out);
            put_number(2, i64::from(time.subsec_nanosecond()), &mut out);
        }
        ("Quantity", Value::String(text)) => put(1, text.as_bytes(), &mut out),
        ("IntOrString", Value::Number(number)) => {
            put_number(1, 0, &mut out);
            put_number(2, number.as_i64()?, &mut out);
        }
        ("IntOrString", Value::String(text)) => {
            put_number(1, 1, &mut out);
            put(3, text.as_bytes(), &mut out);
        }
        ("FieldsV1", value) => put(1, value.to_string().as_bytes(), &mut out),
        _ => return None,
    }
    Some(out)
}

fn put(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn put_number(number: u32, value: i64, out: &mut Vec<u8>) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value.cast_unsigned(), out);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_is_written_with_the_apis_field_numbers() {
        // Each line was encoded by hand from the published field numbers: metadata 1, spec 2, status 3.
        for (pod, expected) in [
            (json!({}), ""),
            (json!({"metadata": {"name": "a", "namespace": "b", "uid": "c"}}), "0a090a01611a01622a0163"),
            (json!({"status": {"phase": "Running"}}), "1a090a0752756e6e696e67"),
            (json!({"spec": {"containers": [{"name": "m", "image": "i"}]}}), "12081206 0a016d120169"),
            (json!({"spec": {"terminationGracePeriodSeconds": 30, "hostNetwork": true}}), "1204201e5801"),
            (json!({"metadata": {"labels": {"b": "2", "a": "1"}}}), "0a105a060a016112 01315a060a016212 0132"),
            (json!({"metadata": {"creationTimestamp": "1970-01-01T00:00:05Z"}}), "0a064204 08051000"),
            (json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}), "12090a070a01761202 1200"),
            (json!({"other": 1, "spec": {"other": {"a": null}, "nodeName": null}}), "1200"),
        ] {
            let expected: String = expected.chars().filter(|c| *c != ' ').collect();
            assert_eq!(hex::encode(encode(&pod)), expected, "{pod}");
        }
    }

    #[test]
    fn what_go_embeds_and_what_is_text_in_json() {
        let table = TABLE.as_ref().expect("it can be read");
        let of = |name: &str, json: Value| {
            let mut out = Vec::new();
            table.message(name, json.as_object().expect("an object"), &mut out);
            hex::encode(&out)
        };
        assert_eq!(of("ConfigMapKeySelector", json!({"name": "a", "key": "k"})), "0a030a016112016b");
        assert_eq!(of("Probe", json!({"tcpSocket": {"port": 80}, "periodSeconds": 5})), "0a081a060a04080010502005");
        assert_eq!(of("Probe", json!({"tcpSocket": {"port": "x"}})), "0a091a070a0508011a0178");
        assert_eq!(of("ResourceRequirements", json!({"limits": {"cpu": "1"}})), "0a0a0a0363707512030a0131");
    }

    #[test]
    fn every_message_that_is_named_is_there() {
        let table = TABLE.as_ref().expect("it can be read");
        for (name, field) in EMBEDDED {
            let fields = table.0.get(*name).expect(name);
            assert!(fields.iter().any(|f| f.name == *field && f.shape == Shape::Embedded), "{name}.{field}");
        }
        for field in table.0.values().flatten() {
            if let FieldKind::Message(name) = &field.kind {
                assert!(table.0.contains_key(name), "{name}");
            }
        }
    }
}
