//! Validates volumes of a pod, and the volume sources that the node provides itself. Pure.

use std::collections::BTreeSet;

use super::{
    env::{self, FieldReader},
    field::{FieldErrors, Path},
    names_and_numbers::{file_mode, no_backsteps, projected_path},
    projected_volumes, resources, volume_sources,
};
use berth_types::{api, names, volume};

/// Valid types of a host path.
const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

/// Volume types in the order in which the API server checks them: of several, the first counts.
const TYPES: [&str; 30] = [
    "emptyDir",
    "hostPath",
    "gitRepo",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "secret",
    "nfs",
    "iscsi",
    "glusterfs",
    "flocker",
    "persistentVolumeClaim",
    "rbd",
    "cinder",
    "cephfs",
    "quobyte",
    "downwardAPI",
    "fc",
    "flexVolume",
    "configMap",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "storageos",
    "projected",
    "scaleIO",
    "csi",
    "ephemeral",
    "image",
];

/// Checks all volumes of a pod; `has_account`: whether the pod has a service account.
pub fn check(volumes: &[api::Volume], has_account: bool, at: &Path, errors: &mut FieldErrors) {
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
        let mut types = volume::kinds(one);
        types.sort_by_key(|one| TYPES.iter().position(|known| known == one));
        if types.is_empty() {
            errors.required(&at, "must specify a volume type");
        }
        for more in types.iter().skip(1) {
            errors.forbidden(&at.child(more), "may not specify more than 1 volume type");
        }
        source(one, has_account, &at, errors);
        volume_sources::check(one, &at, errors);
    }
}

fn source(one: &api::Volume, has_account: bool, at: &Path, errors: &mut FieldErrors) {
    if one.empty_dir.as_ref().and_then(|e| e.size_limit.as_ref()).is_some_and(resources::is_negative) {
        let at = at.child("emptyDir").child("sizeLimit");
        errors.forbidden(&at, "SizeLimit field must be a valid resource quantity");
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
    if let Some(source) = one.projected.as_ref() {
        projected_volumes::check(source, has_account, &at.child("projected"), errors);
    }
    if let Some(image) = one.image.as_ref() {
        let at = at.child("image");
        // As kubelet v1.36: an empty reference is rejected only in pods of the API.
        errors.one_of(&at.child("pullPolicy"), image.pull_policy.as_deref(), &["Always", "IfNotPresent", "Never"]);
    }
}

fn host_path(host: &api::HostPathVolumeSource, at: &Path, errors: &mut FieldErrors) {
    if host.path.is_empty() {
        errors.required(&at.child("path"), "");
        return;
    }
    no_backsteps(&host.path, &at.child("path"), errors);
    errors.supported(&at.child("type"), host.type_.as_deref().unwrap_or_default(), &HOST_PATH_TYPES);
}

/// Checks the files of a downward API source, alone or in a projected volume.
pub fn downward_items(items: &[api::DownwardAPIVolumeFile], at: &Path, errors: &mut FieldErrors) {
    for (i, item) in items.iter().enumerate() {
        let at = at.index(i);
        projected_path(&item.path, &at.child("path"), errors);
        file_mode(item.mode, &at.child("mode"), errors);
        if let Some(field) = item.field_ref.as_ref() {
            env::field_ref(field, FieldReader::Volume, &at.child("fieldRef"), errors);
        }
        match (&item.field_ref, &item.resource_field_ref) {
            (Some(_), Some(_)) => {
                errors.invalid(&at, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously");
            }
            (None, Some(resource)) => {
                env::resource_ref(resource, FieldReader::Volume, &at.child("resourceFieldRef"), errors);
            }
            (Some(_), None) => {}
            (None, None) => errors.required(&at, "one of fieldRef and resourceFieldRef is required"),
        }
    }
}

/// Checks the files of a ConfigMap or Secret, alone or in a projected volume.
pub fn key_items(items: &[api::KeyToPath], at: &Path, errors: &mut FieldErrors) {
    for (i, item) in items.iter().enumerate() {
        let at = at.index(i);
        if item.key.is_empty() {
            errors.required(&at.child("key"), "");
        }
        projected_path(&item.path, &at.child("path"), errors);
        file_mode(item.mode, &at.child("mode"), errors);
    }
}
