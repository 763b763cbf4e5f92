//! Shared code of file-based volumes: configMap, secret, downwardAPI, and projected.
//!
//! All but configMap volumes are memory-backed. A failed refresh keeps the existing files. Implements spec 07 §7.3, §8,
//! §13.1.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use super::{SetUp, SetUpError, empty_dir};
use crate::{
    atomic_writer::{self, FileProjection, Payload},
    desired_volumes,
    layout::{DOWNWARD_API, PROJECTED, SECRET},
    memory,
    ownership::{self, GroupAccess},
};
use berth_ports::{MountedVolume, ObjectError};
use berth_types::api;

/// Mode of the volume's root: that of the `emptyDir` which backs it.
const MODE: u32 = 0o777;
/// Memory-backed volume types, as upstream.
const IN_MEMORY: [&str; 3] = [SECRET, PROJECTED, DOWNWARD_API];

/// Kind of a referenced object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectOf {
    /// ConfigMap.
    ConfigMap,
    /// Secret of the pod's namespace.
    Secret,
}

/// Reference to an object, and the mapping of its keys to files.
pub struct ObjectProjection<'a> {
    /// Kind of the object.
    pub of: ObjectOf,
    /// Name of the object.
    pub name: &'a str,
    /// Keys with their paths; all keys if empty.
    pub items: &'a [api::KeyToPath],
    /// Whether the object or any of its keys may be missing.
    pub optional: bool,
}

/// Publishes the files of a volume below the plugin directory `plugin`.
pub fn publish(request: &SetUp<'_>, plugin: &str, files: &Payload) -> Result<MountedVolume, SetUpError> {
    let name = &request.volume.name;
    let dir = request.layout.volume(plugin, name);
    let nested = desired_volumes::nested_mount_points(request.pod, name);
    let is_ready = || request.layout.marker(plugin, name).join("ready").exists();
    if request.verified.is_same(&dir, &(files, &nested)) && is_ready() {
        return Ok(mounted(&dir));
    }
    empty_dir::backing(&dir, &request.layout.marker(plugin, name), || Ok(()))?;
    // A volume published on disk stays there, because containers read it.
    if let Some(bytes) = request.memory.filter(|_| IN_MEMORY.contains(&plugin) && !atomic_writer::is_published(&dir)) {
        memory::ensure(&dir, bytes).map_err(SetUpError::io("mounting tmpfs at", &dir))?;
    }
    for nested in &nested {
        let path = dir.join(nested);
        // An existing entry, such as a symlink of the payload, serves as the mount point too.
        if fs::symlink_metadata(&path).is_err() {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(&path);
            made.map_err(SetUpError::io("creating", &path))?;
        }
    }
    let group = ownership::group_of(request.pod);
    let own = |dir: &Path| match group {
        Some(group) => ownership::apply(dir, group, GroupAccess::ReadOnly),
        None => Ok(()),
    };
    atomic_writer::write(&dir, files, own, request.now)?;
    request.verified.published(&dir, &(files, &nested));
    Ok(mounted(&dir))
}

/// Returns the volume as published before; `None` if it never was.
pub fn published(request: &SetUp<'_>, plugin: &str) -> Option<MountedVolume> {
    let dir = request.layout.volume(plugin, &request.volume.name);
    let marker = request.layout.marker(plugin, &request.volume.name).join("ready");
    (marker.exists() && atomic_writer::is_published(&dir)).then(|| mounted(&dir))
}

fn mounted(dir: &Path) -> MountedVolume {
    MountedVolume { host_path: Some(dir.to_owned()), read_only: true, relabel: true, sub_path_mode: MODE }
}

/// Returns the mode of files without their own.
pub fn default_mode(mode: Option<i32>) -> Result<u32, SetUpError> {
    mode.map(bits).ok_or(SetUpError::NoMode)
}

/// Converts an API file mode; only permission bits are accepted.
pub fn bits(mode: i32) -> u32 {
    u32::try_from(mode).unwrap_or(0) & 0o777
}

/// Returns the files of a referenced object.
pub fn of_object(request: &SetUp<'_>, reference: &ObjectProjection<'_>, mode: u32) -> Result<Payload, SetUpError> {
    let read = match reference.of {
        ObjectOf::ConfigMap => request.fetched.config_map(reference.name),
        ObjectOf::Secret => request.fetched.secret(reference.name),
    };
    let none = BTreeMap::new();
    let data = match &read {
        Ok(data) => &**data,
        Err(ObjectError::NotFound { .. }) if reference.optional => &none,
        Err(error) => return Err(SetUpError::Object(error.clone())),
    };
    let content = |data: &[u8], mode| FileProjection { data: data.to_owned(), mode, owner: None };
    if reference.items.is_empty() {
        return Ok(data.iter().map(|(key, value)| (key.clone(), content(value, mode))).collect());
    }
    let mut files = Payload::new();
    for item in reference.items {
        match data.get(&item.key) {
            Some(value) => {
                files.insert(item.path.clone(), content(value, item.mode.map_or(mode, bits)));
            }
            None if reference.optional => {}
            None => return Err(SetUpError::NoKey { of: reference.of, key: item.key.clone() }),
        }
    }
    Ok(files)
}
