//! Decoding of objects into API types: drops unknown fields and refuses wrong types. Pure.
//!
//! The types come from upstream's own API description. Empty lists and maps are not printed.

use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequest, coordination::v1::Lease, core::v1 as core, node::v1::RuntimeClass,
    resource::v1 as resource, storage::v1 as storage,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::quantities::canonical;

/// Maps that are omitted if empty; an empty `emptyDir` has a meaning.
const MAPS: &[&str] = &[
    "labels",
    "annotations",
    "nodeSelector",
    "requests",
    "limits",
    "overhead",
    "capacity",
    "allocatable",
    "data",
    "binaryData",
    "allocatedResources",
    "allocatedResourceStatuses",
    "matchLabels",
];

/// Converts the object to its API type and back.
///
/// # Errors
/// The decoding error. Kinds without a type here always fit.
pub fn shape(kind: &str, object: &Value) -> Result<Value, String> {
    // In a CSINode, `allocatable` is a number of volumes, not a quantity.
    let object = &if kind == "CSINode" { object.clone() } else { one_text(object.clone()) };
    let typed = match kind {
        "Pod" => through::<core::Pod>(object),
        "Node" => through::<core::Node>(object),
        "Event" => through::<core::Event>(object),
        "ConfigMap" => through::<core::ConfigMap>(object),
        "Secret" => through::<core::Secret>(object),
        "Service" => through::<core::Service>(object),
        "ServiceAccount" => through::<core::ServiceAccount>(object),
        "Namespace" => through::<core::Namespace>(object),
        "PersistentVolumeClaim" => through::<core::PersistentVolumeClaim>(object),
        "PersistentVolume" => through::<core::PersistentVolume>(object),
        "Lease" => through::<Lease>(object),
        "CSINode" => through::<storage::CSINode>(object),
        "CSIDriver" => through::<storage::CSIDriver>(object),
        "VolumeAttachment" => through::<storage::VolumeAttachment>(object),
        "RuntimeClass" => through::<RuntimeClass>(object),
        "CertificateSigningRequest" => through::<CertificateSigningRequest>(object),
        "ResourceClaim" => through::<resource::ResourceClaim>(object),
        "ResourceSlice" => through::<resource::ResourceSlice>(object),
        _ => Ok(object.clone()),
    };
    let mut typed = typed?;
    drop_empty(&mut typed);
    Ok(typed)
}

/// Maps of quantities.
const AMOUNTS: &[&str] =
    &["requests", "limits", "overhead", "capacity", "allocatable", "allocatedResources", "hard", "podFixed"];

/// Converts each quantity to its canonical form; it may be given as a number.
fn one_text(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            for (key, value) in fields.iter_mut() {
                match value {
                    Value::Object(amounts) if AMOUNTS.contains(&key.as_str()) => {
                        for amount in amounts.values_mut() {
                            if let Some(text) = canonical(amount) {
                                *amount = text.into();
                            }
                        }
                    }
                    other => *other = one_text(other.take()),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = one_text(item.take())),
        _ => {}
    }
    value
}

/// Paths, such as `status.foo`, of the fields that the object's type does not know.
pub fn unknown_fields(kind: &str, object: &Value) -> Vec<String> {
    let mut unknown = Vec::new();
    if let Ok(known) = shape(kind, object) {
        missing(object, &known, "", &mut unknown);
    }
    unknown
}

fn through<T: Serialize + DeserializeOwned>(object: &Value) -> Result<Value, String> {
    let typed = T::deserialize(object).map_err(|err| err.to_string())?;
    serde_json::to_value(typed).map_err(|err| err.to_string())
}

fn drop_empty(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(drop_empty);
            fields.retain(|key, value| match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(inner) => !(inner.is_empty() && MAPS.contains(&key.as_str())),
                _ => true,
            });
        }
        Value::Array(items) => items.iter_mut().for_each(drop_empty),
        _ => {}
    }
}

fn missing(object: &Value, known: &Value, at: &str, unknown: &mut Vec<String>) {
    match (object, known) {
        (Value::Object(fields), Value::Object(others)) => {
            for (key, value) in fields {
                let below = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                match others.get(key) {
                    Some(other) => missing(value, other, &below, unknown),
                    None if is_nothing(value) => {}
                    None => unknown.push(below),
                }
            }
        }
        (Value::Array(items), Value::Array(others)) => {
            for (index, (item, other)) in items.iter().zip(others).enumerate() {
                missing(item, other, &format!("{at}[{index}]"), unknown);
            }
        }
        _ => {}
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_fields_are_dropped_and_reported() {
        let pod = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p", "labels": {}, "creationTimestamp": null},
            "spec": {"containers": [{"name": "c", "resources": {}, "what": 1}], "volumes": [{"name": "v", "emptyDir": {}}], "tolerations": []},
            "status": {"foo": "x", "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": null}]}});
        let shaped = shape("Pod", &pod).expect("fits");
        let expected = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "resources": {}}], "volumes": [{"name": "v", "emptyDir": {}}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        assert_eq!(shaped, expected);
        assert_eq!(unknown_fields("Pod", &pod), ["spec.containers[0].what", "status.foo"]);
        assert_eq!(shape("Other", &json!({"any": []})), Ok(json!({})));
    }

    #[test]
    fn amounts_have_one_text() {
        let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": {}, "status": {"capacity": {"cpu": 2, "memory": "1024Ki"}}});
        assert_eq!(shape("Node", &node).expect("fits")["status"]["capacity"], json!({"cpu": "2", "memory": "1Mi"}));
    }

    #[test]
    fn a_value_of_the_wrong_type_is_an_error() {
        let pod = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {}, "spec": {"containers": "x"}});
        assert!(shape("Pod", &pod).is_err());
    }
}
