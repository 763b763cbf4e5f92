//! secret volumes: keys of a Secret as files. Implements spec 07 §7.3.

use super::{
    SetUp, SetUpError,
    files::{self, ObjectOf, ObjectProjection},
};
use crate::layout::SECRET;
use berth_ports::MountedVolume;

/// Writes or refreshes the files.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let source = request.volume.secret.clone().unwrap_or_default();
    let mode = files::default_mode(source.default_mode)?;
    let reference = ObjectProjection {
        of: ObjectOf::Secret,
        name: source.secret_name.as_deref().unwrap_or_default(),
        items: source.items.as_deref().unwrap_or_default(),
        optional: source.optional == Some(true),
    };
    files::publish(request, SECRET, &files::of_object(request, &reference, mode)?)
}
