//! Environment variables and where their values come from. Pure.

use super::field::{FieldErrors, Path};
use crate::pod::{api, names};

/// Checks the variables of a container.
pub fn variables(variables: &[api::EnvVar], at: &Path, errors: &mut FieldErrors) {
    for (i, variable) in variables.iter().enumerate() {
        let at = at.index(i);
        match variable.name.as_str() {
            "" => errors.required(&at.child("name"), ""),
            name => errors.complaints(&at.child("name"), name, names::env_name(name)),
        }
        if let Some(source) = variable.value_from.as_ref() {
            let has_value = variable.value.as_deref().is_some_and(|value| !value.is_empty());
            value_from(source, has_value, &at.child("valueFrom"), errors);
        }
    }
}

fn value_from(source: &api::EnvVarSource, has_value: bool, at: &Path, errors: &mut FieldErrors) {
    let mut sources = 0;
    if let Some(field) = source.field_ref.as_ref() {
        sources += 1;
        field_ref(field, true, &at.child("fieldRef"), errors);
    }
    if let Some(resource) = source.resource_field_ref.as_ref() {
        sources += 1;
        resource_ref(resource, false, &at.child("resourceFieldRef"), errors);
    }
    for (name, key, member) in [
        source.config_map_key_ref.as_ref().map(|r| (r.name.as_str(), r.key.as_str(), "configMapKeyRef")),
        source.secret_key_ref.as_ref().map(|r| (r.name.as_str(), r.key.as_str(), "secretKeyRef")),
    ]
    .into_iter()
    .flatten()
    {
        sources += 1;
        object_key(name, key, &at.child(member), errors);
    }
    if let Some(file) = source.file_key_ref.as_ref() {
        sources += 1;
        let at = at.child("fileKeyRef");
        for (member, value) in [("volumeName", &file.volume_name), ("path", &file.path), ("key", &file.key)] {
            if value.is_empty() {
                errors.required(&at.child(member), "");
            }
        }
    }
    let all = "`fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`";
    match (sources, has_value) {
        (0, false) => errors.invalid(at, "", &format!("must specify one of: {all}")),
        (1.., true) => errors.invalid(at, "", "may not be specified when `value` is not empty"),
        (2.., false) => errors.invalid(at, "", "may not have more than one field specified at a time"),
        _ => {}
    }
}

fn object_key(name: &str, key: &str, at: &Path, errors: &mut FieldErrors) {
    if name.is_empty() {
        errors.required(&at.child("name"), "");
    }
    if key.is_empty() {
        errors.required(&at.child("key"), "");
    }
}

/// Checks a reference to a field of the pod; environment variables may read more than volumes.
pub fn field_ref(field: &api::ObjectFieldSelector, of_env: bool, at: &Path, errors: &mut FieldErrors) {
    if field.field_path.is_empty() {
        errors.required(&at.child("fieldPath"), "");
        return;
    }
    let path = field.field_path.as_str();
    if let Some((map, key)) = path.strip_suffix("']").and_then(|path| path.split_once("['")) {
        let key = if map == "metadata.annotations" { key.to_lowercase() } else { key.to_owned() };
        match map {
            "metadata.annotations" | "metadata.labels" => errors.complaints(at, &key, names::qualified_name(&key)),
            _ => errors.invalid(at, path, "does not support subscript"),
        }
        return;
    }
    const OF_ENV: [&str; 9] = [
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.nodeName",
        "spec.serviceAccountName",
        "status.hostIP",
        "status.hostIPs",
        "status.podIP",
        "status.podIPs",
    ];
    const OF_VOLUME: [&str; 5] =
        ["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];
    let supported: &[&str] = if of_env { &OF_ENV } else { &OF_VOLUME };
    if !(supported.contains(&path) || of_env && path == "spec.host") {
        errors.unsupported(&at.child("fieldPath"), path, supported);
    }
}

/// Checks a reference to a request or limit; in a volume it names its container.
pub fn resource_ref(field: &api::ResourceFieldSelector, of_volume: bool, at: &Path, errors: &mut FieldErrors) {
    if of_volume && field.container_name.as_deref().unwrap_or_default().is_empty() {
        errors.required(&at.child("containerName"), "");
    }
    const SUPPORTED: [&str; 6] = [
        "limits.cpu",
        "limits.ephemeral-storage",
        "limits.memory",
        "requests.cpu",
        "requests.ephemeral-storage",
        "requests.memory",
    ];
    let resource = field.resource.as_str();
    let huge = |prefix: &str| resource.strip_prefix(prefix).is_some_and(|name| name.starts_with("hugepages-"));
    if resource.is_empty() {
        errors.required(&at.child("resource"), "");
    } else if !(SUPPORTED.contains(&resource) || huge("limits.") || huge("requests.")) {
        errors.unsupported(&at.child("resource"), resource, &SUPPORTED);
    }
}

/// Checks the sources of whole environments.
pub fn from(sources: &[api::EnvFromSource], at: &Path, errors: &mut FieldErrors) {
    for (i, source) in sources.iter().enumerate() {
        let at = at.index(i);
        if let Some(prefix) = source.prefix.as_deref().filter(|prefix| !prefix.is_empty()) {
            errors.complaints(&at.child("prefix"), prefix, names::env_name(prefix));
        }
        let named = [
            source.config_map_ref.as_ref().map(|r| (r.name.as_str(), "configMapRef")),
            source.secret_ref.as_ref().map(|r| (r.name.as_str(), "secretRef")),
        ];
        for (_, member) in named.iter().flatten().filter(|(name, _)| name.is_empty()) {
            errors.required(&at.child(member).child("name"), "");
        }
        match named.iter().flatten().count() {
            0 => errors.invalid(&at, "", "must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => errors.invalid(&at, "", "may not have more than one field specified at a time"),
        }
    }
}
