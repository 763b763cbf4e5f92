//! downwardAPI volumes: fields of the pod as files. Implements spec 07 §7.4.

use super::{SetUp, SetUpError, files};
use crate::{
    atomic_writer::{FileProjection, Payload},
    layout::DOWNWARD_API,
};
use berth_ports::MountedVolume;
use berth_types::{api, fieldpath};

/// Writes or refreshes the files.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let source = request.volume.downward_api.clone().unwrap_or_default();
    let mode = files::default_mode(source.default_mode)?;
    files::publish(request, DOWNWARD_API, &payload(request, source.items.as_deref().unwrap_or_default(), mode)?)
}

/// Returns the files of the items; reports all unreadable fields together.
pub fn payload(
    request: &SetUp<'_>,
    items: &[api::DownwardAPIVolumeFile],
    default_mode: u32,
) -> Result<Payload, SetUpError> {
    let (mut payload, mut errors) = (Payload::new(), Vec::new());
    for item in items {
        let mode = item.mode.map_or(default_mode, files::bits);
        let value = match (&item.field_ref, &item.resource_field_ref) {
            (Some(field), _) => fieldpath::volume_field(request.pod, &field.field_path),
            (None, Some(resource)) => fieldpath::resource_value(request.pod, resource, None, request.allocatable),
            (None, None) => Ok(String::new()),
        };
        match value {
            Ok(value) => {
                payload.insert(item.path.clone(), FileProjection { data: value.into_bytes(), mode, owner: None });
            }
            Err(e) => errors.push(e),
        }
    }
    if errors.is_empty() { Ok(payload) } else { Err(SetUpError::Fields(errors)) }
}
