//! image volumes: content of an OCI image, mounted by the container runtime. Implements spec 07 §7.9.
//!
//! Nothing is mounted here: the image is pulled together with the container images, and a failure is reported on each
//! container that mounts it.

use super::{SetUp, SetUpError};
use berth_ports::MountedVolume;

/// Returns the volume without a host path, because the runtime mounts it.
pub fn set_up(_request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    Ok(MountedVolume { host_path: None, read_only: true, relabel: false, sub_path_mode: 0 })
}
