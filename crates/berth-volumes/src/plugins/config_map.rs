//! configMap volumes: keys of a ConfigMap as files. Implements spec 07 §7.3.

use super::{
    SetUp, SetUpError,
    files::{self, ObjectOf, ObjectProjection},
};
use crate::layout::CONFIG_MAP;
use berth_ports::MountedVolume;

/// Writes or refreshes the files.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let source = request.volume.config_map.clone().unwrap_or_default();
    let mode = files::default_mode(source.default_mode)?;
    let reference = ObjectProjection {
        of: ObjectOf::ConfigMap,
        name: &source.name,
        items: source.items.as_deref().unwrap_or_default(),
        optional: source.optional == Some(true),
    };
    files::publish(request, CONFIG_MAP, &files::of_object(request, &reference, mode)?)
}
