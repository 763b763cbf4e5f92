//! Validates environment variables and the sources of their values. Pure.

use super::{
    container,
    field::{FieldErrors, Path},
    names_and_numbers::{config_map_key, name_prefix, no_backsteps},
};
use berth_types::{api, names, quantity::Amount};

/// Pod fields available to environment variables.
const FIELDS_OF_ENV: [&str; 9] = [
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
/// Pod fields available to volumes.
const FIELDS_OF_VOLUME: [&str; 5] =
    ["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];
/// Pod fields that are known, but available to neither.
const OTHER_FIELDS: [&str; 3] = ["spec.restartPolicy", "spec.schedulerName", "status.phase"];
/// Available requests and limits; those of huge pages are available too.
const RESOURCES: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];
/// Divisors for byte quantities.
const BYTE_DIVISORS: [&str; 13] = ["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];

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
        field_ref(field, FieldReader::Environment, &at.child("fieldRef"), errors);
    }
    if let Some(resource) = source.resource_field_ref.as_ref() {
        sources += 1;
        resource_ref(resource, FieldReader::Environment, &at.child("resourceFieldRef"), errors);
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
        file_key(file, &at.child("fileKeyRef"), errors);
    }
    let all = "`fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`";
    match (sources, has_value) {
        (0, _) => errors.invalid(at, "", &format!("must specify one of: {all}")),
        (_, true) => errors.invalid(at, "", "may not be specified when `value` is not empty"),
        (2.., false) => errors.invalid(at, "", "may not have more than one field specified at a time"),
        _ => {}
    }
}

fn object_key(name: &str, key: &str, at: &Path, errors: &mut FieldErrors) {
    errors.complaints(&at.child("name"), name, names::dns_subdomain(name));
    match key {
        "" => errors.required(&at.child("key"), ""),
        key => errors.complaints(&at.child("key"), key, config_map_key(key)),
    }
}

fn file_key(file: &api::FileKeySelector, at: &Path, errors: &mut FieldErrors) {
    match file.key.as_str() {
        "" => errors.required(&at.child("key"), ""),
        key => errors.complaints(&at.child("key"), key, names::env_name(key)),
    }
    match file.volume_name.as_str() {
        "" => errors.required(&at.child("volumeName"), ""),
        name => errors.complaints(&at.child("volumeName"), name, names::dns_label(name)),
    }
    match file.path.as_str() {
        "" => errors.required(&at.child("path"), ""),
        path => no_backsteps(path, &at.child("path"), errors),
    }
}

/// Checks that variables from files refer to `emptyDir` volumes of the pod.
pub fn file_volumes(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    for (at, one) in container::with_paths(spec, at) {
        for (i, variable) in one.env.iter().flatten().enumerate() {
            let Some(file) = variable.value_from.as_ref().and_then(|from| from.file_key_ref.as_ref()) else { continue };
            let at = at.child("env").index(i).child("valueFrom").child("fileKeyRef").child("volumeName");
            let name = file.volume_name.as_str();
            match spec.volumes.iter().flatten().find(|volume| volume.name == name) {
                None => errors.not_found(&at, name),
                Some(volume) if volume.empty_dir.is_none() => {
                    errors.invalid(&at, name, "referenced volume must be of type emptyDir");
                }
                Some(_) => {}
            }
        }
    }
}

/// Consumer of a pod field or resource: each may use different ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FieldReader {
    /// An environment variable.
    Environment,
    /// A downward API volume.
    Volume,
}

/// Checks a reference to a pod field.
pub fn field_ref(field: &api::ObjectFieldSelector, reader: FieldReader, at: &Path, errors: &mut FieldErrors) {
    let version = field.api_version.as_deref().unwrap_or_default();
    let path = field.field_path.as_str();
    if version.is_empty() {
        return errors.required(&at.child("apiVersion"), "");
    }
    let at_path = at.child("fieldPath");
    if path.is_empty() {
        return errors.required(&at_path, "");
    }
    let subscript = path.strip_suffix("']").and_then(|path| path.split_once("['")).filter(|(map, _)| !map.is_empty());
    // Deprecated name of the field.
    let name = if path == "spec.host" { "spec.nodeName" } else { path };
    let is_known = [&FIELDS_OF_ENV[..], &FIELDS_OF_VOLUME[..], &OTHER_FIELDS[..]].concat().contains(&name);
    let reason = match subscript {
        _ if version != "v1" => format!("unsupported pod version: {version}"),
        Some(("metadata.annotations" | "metadata.labels", _)) => String::new(),
        Some(_) => format!("field label does not support subscript: {path}"),
        None if !is_known => format!("field label not supported: {path}"),
        None => String::new(),
    };
    if !reason.is_empty() {
        return errors.invalid(&at_path, path, &format!("error converting fieldPath: {reason}"));
    }
    match (subscript, reader) {
        (Some((map, key)), _) => {
            let key = if map == "metadata.annotations" { key.to_lowercase() } else { key.to_owned() };
            errors.complaints(at, &key, names::qualified_name(&key));
        }
        (None, FieldReader::Environment) => errors.supported(&at_path, name, &FIELDS_OF_ENV),
        (None, FieldReader::Volume) => errors.supported(&at_path, name, &FIELDS_OF_VOLUME),
    }
}

/// Checks a reference to a request or limit; in a volume it must name its container.
pub fn resource_ref(field: &api::ResourceFieldSelector, reader: FieldReader, at: &Path, errors: &mut FieldErrors) {
    let resource = field.resource.as_str();
    let has_container = field.container_name.as_ref().is_some_and(|name| !name.is_empty());
    let is_huge_pages = ["limits.hugepages-", "requests.hugepages-"].iter().any(|start| resource.starts_with(start));
    if reader == FieldReader::Volume && !has_container {
        errors.required(&at.child("containerName"), "");
    } else if resource.is_empty() {
        errors.required(&at.child("resource"), "");
    } else if !is_huge_pages {
        errors.supported(&at.child("resource"), resource, &RESOURCES);
    }
    if let Some(divisor) = field.divisor.as_ref().and_then(|text| Amount::try_from(text).ok()) {
        check_divisor(resource, divisor, &at.child("divisor"), errors);
    }
}

fn check_divisor(resource: &str, divisor: Amount, at: &Path, errors: &mut FieldErrors) {
    if divisor.is_zero() {
        return;
    }
    let text = divisor.canonical();
    let kind = match resource.split_once('.').map_or("", |(_, name)| name) {
        "cpu" if matches!(text.as_str(), "1" | "1m") => return,
        "cpu" => {
            let text = "only divisor's values 1m and 1 are supported with the cpu resource";
            return errors.invalid(at, resource, text);
        }
        _ if BYTE_DIVISORS.contains(&text.as_str()) => return,
        "memory" => "memory",
        "ephemeral-storage" => "local ephemeral storage",
        name if name.starts_with("hugepages-") => "hugepages",
        _ => return,
    };
    let units = BYTE_DIVISORS.join(", ");
    errors.invalid(at, resource, &format!("only divisor's values {units} are supported with the {kind} resource"));
}

/// Checks the `envFrom` sources of a container.
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
        for (name, member) in named.iter().flatten() {
            let at = at.child(member).child("name");
            match *name {
                "" => errors.required(&at, ""),
                name => errors.complaints(&at, name, name_prefix(name)),
            }
        }
        match named.iter().flatten().count() {
            0 => errors.invalid(&at, "", "must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => errors.invalid(&at, "", "may not have more than one field specified at a time"),
        }
    }
}
