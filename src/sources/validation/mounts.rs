//! Validates volume mounts and volume devices of a container. Pure.

use std::collections::BTreeSet;

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::{descending_path, has_backsteps},
};
use berth_types::api;

/// Checks the volume mounts of a container against the pod's volumes.
pub fn mounts(container: &api::Container, volumes: &BTreeSet<&str>, at: &Path, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    let devices = container.volume_devices.as_deref().unwrap_or_default();
    for (i, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let at = at.index(i);
        match mount.name.as_str() {
            "" => errors.required(&at.child("name"), ""),
            name if !volumes.contains(name) => errors.not_found(&at.child("name"), name),
            name if devices.iter().any(|device| device.name == name) => {
                errors.invalid(&at.child("name"), name, "must not already exist in volumeDevices");
            }
            _ => {}
        }
        let path = mount.mount_path.as_str();
        if path.is_empty() {
            errors.required(&at.child("mountPath"), "");
        }
        if !seen.insert(path) {
            errors.invalid(&at.child("mountPath"), path, "must be unique");
        }
        if devices.iter().any(|device| device.device_path == path) {
            errors.invalid(&at.child("mountPath"), path, "must not already exist as a path in volumeDevices");
        }
        sub_paths(mount, &at, errors);
        propagation(mount, container, &at, errors);
        recursive_read_only(mount, &at, errors);
    }
}

fn sub_paths(mount: &api::VolumeMount, at: &Path, errors: &mut FieldErrors) {
    let plain = mount.sub_path.as_deref().unwrap_or_default();
    descending_path(plain, &at.child("subPath"), errors);
    let expression = mount.sub_path_expr.as_deref().unwrap_or_default();
    let at = at.child("subPathExpr");
    descending_path(expression, &at, errors);
    if !(plain.is_empty() || expression.is_empty()) {
        errors.invalid(&at, expression, "subPathExpr and subPath are mutually exclusive");
    }
}

fn propagation(mount: &api::VolumeMount, container: &api::Container, at: &Path, errors: &mut FieldErrors) {
    let Some(mode) = mount.mount_propagation.as_deref() else { return };
    let at = at.child("mountPropagation");
    errors.supported(&at, mode, &["Bidirectional", "HostToContainer", "None"]);
    let privileged = container.security_context.as_ref().and_then(|s| s.privileged) == Some(true);
    if mode == "Bidirectional" && !privileged {
        errors.forbidden(&at, "Bidirectional mount propagation is available only to privileged containers");
    }
}

fn recursive_read_only(mount: &api::VolumeMount, at: &Path, errors: &mut FieldErrors) {
    let at = at.child("recursiveReadOnly");
    match mount.recursive_read_only.as_deref() {
        None | Some("Disabled") => {}
        Some("Enabled" | "IfPossible") => {
            if mount.read_only != Some(true) {
                errors.forbidden(&at, "may only be specified when readOnly is true");
            }
            if !matches!(mount.mount_propagation.as_deref(), None | Some("None")) {
                errors.forbidden(&at, "may only be specified when mountPropagation is None or not specified");
            }
        }
        Some(other) => errors.unsupported(&at, other, &["Disabled", "Enabled", "IfPossible"]),
    }
}

/// Checks the volume devices of a container against the pod's volumes.
pub fn devices(container: &api::Container, volumes: &[api::Volume], at: &Path, errors: &mut FieldErrors) {
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    let mounts = container.volume_mounts.as_deref().unwrap_or_default();
    for (i, device) in container.volume_devices.iter().flatten().enumerate() {
        let at = at.index(i);
        let at_name = at.child("name");
        match device.name.as_str() {
            "" => errors.required(&at_name, ""),
            name if !names.insert(name) => errors.invalid(&at_name, name, "must be unique"),
            name => match volumes.iter().find(|volume| volume.name == name) {
                None => errors.not_found(&at_name, name),
                Some(volume) if volume.persistent_volume_claim.is_none() && volume.ephemeral.is_none() => {
                    let text = "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                    errors.invalid(&at_name, name, text);
                }
                Some(_) => {}
            },
        }
        if mounts.iter().any(|mount| mount.name == device.name) {
            errors.invalid(&at_name, &device.name, "must not already exist in volumeMounts");
        }
        let at_path = at.child("devicePath");
        match device.device_path.as_str() {
            "" => errors.required(&at_path, ""),
            path if has_backsteps(path) => errors.invalid(&at_path, path, "can not contain backsteps ('..')"),
            path if !paths.insert(path) => errors.invalid(&at_path, path, "must be unique"),
            _ => {}
        }
        if mounts.iter().any(|mount| mount.mount_path == device.device_path) {
            errors.invalid(&at_path, &device.device_path, "must not already exist as a path in volumeMounts");
        }
    }
}
