//! The root directory (`--root-dir`): there, and shared. Blocking, before anything else begins. Spec 01 §17.1, 07 §1.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use tracing::{info, warn};

use super::build::BuildError;
use berth_sys::mount;

const MODE: u32 = 0o750;

/// Makes it where it is missing, and sees to it that what pods mount below it reaches the containers that want it.
///
/// # Errors
/// What stands in the way.
pub(super) fn make(root: &Path) -> Result<(), BuildError> {
    let made = DirBuilder::new().recursive(true).mode(MODE).create(root);
    made.map_err(|error| BuildError(format!("cannot create directory {}: {error}", root.display())))?;
    match fs::canonicalize(root).and_then(|root| mount::share(&root)) {
        Ok(true) => info!(path = %root.display(), "Bind-mounted with shared mount propagation"),
        Ok(false) => {}
        // Whoever may not mount mounts nothing for pods either.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            warn!(path = %root.display(), err = %error, "The root directory cannot be shared: mounts of containers stay theirs");
        }
        Err(error) => return Err(BuildError(format!("error configuring root directory: {error}"))),
    }
    Ok(())
}
