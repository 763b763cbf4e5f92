//! Volumes and the sources a node can serve itself. Pure.

use std::collections::BTreeSet;

use super::{
    env,
    field::{FieldErrors, Path},
    names_and_numbers::{file_mode, no_backsteps, projected_path},
    resources,
};
use crate::pod::{api, names, volume};

/// Kinds of a host path.
const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

/// Checks all volumes of a pod.
pub fn check(volumes: &[api::Volume], at: &Path, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (i, one) in volumes.iter().enumerate() {
        let at = at.index(i);
        match one.name.as_str() {
            "" => errors.required(&at.child("name"), ""),
            name => errors.complaints(&at.child("name"), name, names::dns_label(name)),
        }
        if !seen.insert(one.name.as_str()) {
            errors.duplicate(&at.child("name"), &one.name);
        }
        let kinds = volume::kinds(one);
        if kinds.is_empty() {
            errors.required(&at, "must specify a volume type");
        }
        for more in kinds.iter().skip(1) {
            errors.forbidden(&at.child(more), "may not specify more than 1 volume type");
        }
        source(one, &at, errors);
    }
}

fn source(one: &api::Volume, at: &Path, errors: &mut FieldErrors) {
    if let Some(limit) = one.empty_dir.as_ref().and_then(|e| e.size_limit.as_ref()) {
        resources::not_negative(&limit.0, &at.child("emptyDir").child("sizeLimit"), errors);
    }
    if let Some(host) = one.host_path.as_ref() {
        host_path(host, &at.child("hostPath"), errors);
    }
    if let Some(downward) = one.downward_api.as_ref() {
        let at = at.child("downwardAPI");
        file_mode(downward.default_mode, &at.child("defaultMode"), errors);
        downward_items(downward.items.as_deref().unwrap_or_default(), &at.child("items"), errors);
    }
    for (member, name, mode, items) in [
        one.config_map.as_ref().map(|s| ("configMap", Some(s.name.as_str()), s.default_mode, s.items.as_deref())),
        one.secret.as_ref().map(|s| ("secret", s.secret_name.as_deref(), s.default_mode, s.items.as_deref())),
    ]
    .into_iter()
    .flatten()
    {
        let at = at.child(member);
        if name.unwrap_or_default().is_empty() {
            errors.required(&at.child(if member == "secret" { "secretName" } else { "name" }), "");
        }
        file_mode(mode, &at.child("defaultMode"), errors);
        key_items(items.unwrap_or_default(), &at.child("items"), errors);
    }
    if let Some(projected) = one.projected.as_ref() {
        projection(projected, &at.child("projected"), errors);
    }
    if let Some(image) = one.image.as_ref() {
        let at = at.child("image");
        // As the reference: an empty reference is refused in pods of the API only.
        errors.one_of(&at.child("pullPolicy"), image.pull_policy.as_deref(), &["Always", "IfNotPresent", "Never"]);
    }
    if let Some(nfs) = one.nfs.as_ref() {
        let at = at.child("nfs");
        if nfs.server.is_empty() {
            errors.required(&at.child("server"), "");
        }
        match nfs.path.as_str() {
            "" => errors.required(&at.child("path"), ""),
            path if !path.starts_with('/') => errors.invalid(&at.child("path"), path, "must be an absolute path"),
            _ => {}
        }
    }
}

fn host_path(host: &api::HostPathVolumeSource, at: &Path, errors: &mut FieldErrors) {
    if host.path.is_empty() {
        errors.required(&at.child("path"), "");
        return;
    }
    no_backsteps(&host.path, &at.child("path"), errors);
    let kind = host.type_.as_deref().unwrap_or_default();
    if !HOST_PATH_TYPES.contains(&kind) {
        errors.unsupported(&at.child("type"), kind, &HOST_PATH_TYPES);
    }
}

fn downward_items(items: &[api::DownwardAPIVolumeFile], at: &Path, errors: &mut FieldErrors) {
    for (i, item) in items.iter().enumerate() {
        // The reference does not number the items; a number is what one looks for.
        let at = at.index(i);
        projected_path(&item.path, &at.child("path"), errors);
        file_mode(item.mode, &at.child("mode"), errors);
        match (&item.field_ref, &item.resource_field_ref) {
            (Some(_), Some(_)) => {
                errors.invalid(&at, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously");
            }
            (Some(field), None) => env::field_ref(field, false, &at.child("fieldRef"), errors),
            (None, Some(resource)) => env::resource_ref(resource, true, &at.child("resourceFieldRef"), errors),
            (None, None) => errors.required(&at, "one of fieldRef and resourceFieldRef is required"),
        }
    }
}

fn key_items(items: &[api::KeyToPath], at: &Path, errors: &mut FieldErrors) {
    for (i, item) in items.iter().enumerate() {
        let at = at.index(i);
        if item.key.is_empty() {
            errors.required(&at.child("key"), "");
        }
        projected_path(&item.path, &at.child("path"), errors);
        file_mode(item.mode, &at.child("mode"), errors);
    }
}

fn projection(projected: &api::ProjectedVolumeSource, at: &Path, errors: &mut FieldErrors) {
    file_mode(projected.default_mode, &at.child("defaultMode"), errors);
    let mut paths = BTreeSet::new();
    for (i, part) in projected.sources.iter().flatten().enumerate() {
        for (value, path) in projected_paths(part) {
            if !path.is_empty() && !paths.insert(path) {
                errors.invalid(at, value, "conflicting duplicate paths");
            }
        }
        let at = at.child("sources").index(i);
        let kinds = match serde_json::to_value(part) {
            Ok(serde_json::Value::Object(members)) => members.into_iter().map(|(kind, _)| kind).collect(),
            _ => Vec::new(),
        };
        for more in kinds.iter().skip(1) {
            errors.forbidden(&at.child(more), "may not specify more than 1 volume type per source");
        }
        if let Some(downward) = part.downward_api.as_ref() {
            let at = at.child("downwardAPI").child("items");
            downward_items(downward.items.as_deref().unwrap_or_default(), &at, errors);
        }
    }
}

/// The paths of the files of one source, each with what an error about it shows.
fn projected_paths(part: &api::VolumeProjection) -> Vec<(&str, &str)> {
    let mut paths = Vec::new();
    for (name, items) in [
        part.secret.as_ref().map(|source| (source.name.as_str(), &source.items)),
        part.config_map.as_ref().map(|source| (source.name.as_str(), &source.items)),
    ]
    .into_iter()
    .flatten()
    {
        paths.extend(items.iter().flatten().map(|item| (name, item.path.as_str())));
    }
    if let Some(downward) = part.downward_api.as_ref() {
        paths.extend(downward.items.iter().flatten().map(|item| (item.path.as_str(), item.path.as_str())));
    }
    if let Some(token) = part.service_account_token.as_ref() {
        paths.push((token.path.as_str(), token.path.as_str()));
    }
    paths
}
