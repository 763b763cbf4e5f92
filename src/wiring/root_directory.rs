//! Root directory (`--root-dir`): creates it, and makes its mount propagation shared.
//!
//! Blocking; runs before everything else. Spec 01 §17.1, 07 §1.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use tracing::{info, warn};

use super::composition_root::BuildError;
use berth_sys::mount;

const MODE: u32 = 0o750;

/// Creates the directory if missing, and shares its mount: mounts of pods below it propagate to containers that request
/// it.
///
/// # Errors
/// The directory cannot be created or shared.
pub(super) fn make(root: &Path) -> Result<(), BuildError> {
    let made = DirBuilder::new().recursive(true).mode(MODE).create(root);
    made.map_err(|error| BuildError(format!("cannot create directory {}: {error}", root.display())))?;
    match fs::canonicalize(root).and_then(|root| mount::share(&root)) {
        Ok(true) => info!(path = %root.display(), "Bind-mounted with shared mount propagation"),
        Ok(false) => {}
        // Without permission to mount, nothing is mounted for pods either.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            warn!(path = %root.display(), err = %error, "Failed to share the root directory: mounts made in containers will not propagate to the host");
        }
        Err(error) => return Err(BuildError(format!("error configuring root directory: {error}"))),
    }
    Ok(())
}
