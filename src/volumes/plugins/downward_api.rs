//! downwardAPI: fields of the pod as files. Behaviour: spec 07 §7.4, §8, §13.1.
//!
//! The reference keeps these files in memory; until the volumes issue brings tmpfs they lie on
//! disk, in the same place. A refresh that fails leaves the files as they are.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
};

use super::{SetUp, SetUpError, empty_dir};
use crate::{
    engine::ports::MountedVolume,
    pod::{api, fieldpath},
    volumes::{
        atomic_writer::{self, Content, Payload},
        desired,
        layout::DOWNWARD_API,
        ownership::{self, GroupAccess},
    },
};

/// Mode of the volume's root: that of the emptyDir it lies in.
const MODE: u32 = 0o777;

/// Writes the files, or refreshes them.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let name = &request.volume.name;
    let source = request.volume.downward_api.clone().unwrap_or_default();
    let files = payload(request, source.items.as_deref().unwrap_or_default(), source.default_mode)?;
    let dir = request.layout.volume(DOWNWARD_API, name);
    empty_dir::backing(&dir, &request.layout.marker(DOWNWARD_API, name), || {})?;
    for nested in desired::nested_mount_points(request.pod, name) {
        let path = dir.join(nested);
        // What the payload links there serves as well.
        if fs::symlink_metadata(&path).is_err() {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(&path);
            made.map_err(SetUpError::io("creating", &path))?;
        }
    }
    let group = ownership::group_of(request.pod);
    let own = |dir: &std::path::Path| match group {
        Some(group) => ownership::apply(dir, group, GroupAccess::ReadOnly),
        None => Ok(()),
    };
    atomic_writer::write(&dir, &files, own, request.now)?;
    Ok(MountedVolume { host_path: Some(dir), read_only: true, relabel: true, sub_path_mode: MODE })
}

/// The files of the items; all that cannot be read are told together.
fn payload(
    request: &SetUp<'_>,
    items: &[api::DownwardAPIVolumeFile],
    default_mode: Option<i32>,
) -> Result<Payload, SetUpError> {
    let default_mode = default_mode.ok_or(SetUpError::NoMode)?;
    let (mut files, mut errors) = (Payload::new(), Vec::new());
    for item in items {
        let mode = u32::try_from(item.mode.unwrap_or(default_mode)).unwrap_or(0) & 0o777;
        let value = match (&item.field_ref, &item.resource_field_ref) {
            (Some(field), _) => fieldpath::volume_field(request.pod, &field.field_path),
            (None, Some(resource)) => fieldpath::resource_value(request.pod, resource, None, request.allocatable),
            (None, None) => Ok(String::new()),
        };
        match value {
            Ok(value) => {
                files.insert(item.path.clone(), Content { data: value.into_bytes(), mode });
            }
            Err(e) => errors.push(e),
        }
    }
    if errors.is_empty() { Ok(files) } else { Err(SetUpError::Fields(errors)) }
}
