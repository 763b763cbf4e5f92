//! image: the content of an image, mounted by the runtime. Behaviour: spec 07 §7.9.
//!
//! Nothing is done here: the image is pulled where the container's own is, and a failure is told of each container
//! that mounts it.

use super::{SetUp, SetUpError};
use berth_ports::MountedVolume;

/// Says that it is there.
pub fn set_up(_request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    Ok(MountedVolume { host_path: None, read_only: true, relabel: false, sub_path_mode: 0 })
}
