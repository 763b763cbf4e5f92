//! Directories and mount points of CSI volumes. Blocking. Implements spec 07 §17.
//!
//! Never accesses a mounted file system, which may hang.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use super::record::CsiVolumeRecord;
use crate::attachable::OpError;
use berth_sys::{
    failpoint,
    mount_table::{self, Mount},
};

/// Creates a directory and its parents. Does not `stat` an existing directory.
pub fn make(directory: &Path) -> io::Result<()> {
    if let Some(parent) = directory.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(parent)?;
    }
    match DirBuilder::new().mode(0o750).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Returns the topmost mount at exactly that path.
pub fn mounted(path: &Path) -> io::Result<Option<Mount>> {
    let mounts = mount_table::read()?;
    Ok(mounts.into_iter().rfind(|mount| mount.target == path))
}

/// Removes an empty directory; a missing one is no error.
pub fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Why a mount point and its records could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// The driver completed its call without unmounting.
    #[error("{0} is still mounted")]
    Mounted(String),
    /// A removal failed, such as of a directory with data.
    #[error("failed to remove {path}: {cause}")]
    Io {
        /// Path that could not be removed.
        path: String,
        /// Error of the system call.
        cause: io::Error,
    },
}

/// Makes a final error uncertain if the mount still exists and must be undone.
pub fn uncertain_if_mounted(left: &CleanupError, error: OpError) -> OpError {
    match left {
        CleanupError::Mounted(_) => OpError::uncertain(error.text).with_cause(error.trouble),
        CleanupError::Io { .. } => error,
    }
}

/// Removes a mount point, its record, and their directory; never a mount, and no data. The record is removed after the
/// mount point, so that an interrupted cleanup can be resumed.
pub fn clear(mount_point: &Path, steps: [&str; 3]) -> Result<(), CleanupError> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |cause| CleanupError::Io { path, cause }
    };
    if mounted(mount_point).map_err(failed(mount_point))?.is_some() {
        return Err(CleanupError::Mounted(mount_point.display().to_string()));
    }
    let [first, second, third] = steps;
    remove(mount_point).map_err(failed(mount_point))?;
    failpoint::reached(first);
    let Some(directory) = mount_point.parent() else { return Ok(()) };
    CsiVolumeRecord::remove(directory).map_err(failed(directory))?;
    failpoint::reached(second);
    remove(directory).map_err(failed(directory))?;
    failpoint::reached(third);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [&str; 3] = ["", "", ""];

    #[test]
    fn nothing_is_removed_that_may_be_data() {
        let root = tempfile::tempdir().expect("a directory");
        let (volume, mount) = (root.path().join("v"), root.path().join("v/mount"));
        clear(&mount, STEPS).expect("there is nothing");
        make(&mount).expect("made");
        make(&mount).expect("made before");
        let record = CsiVolumeRecord { driver: "d".to_owned(), handle: "h".to_owned(), ..CsiVolumeRecord::default() };
        record.write(&volume).expect("written");
        fs::write(mount.join("data"), "precious").expect("written");
        assert!(matches!(clear(&mount, STEPS), Err(CleanupError::Io { .. })));
        assert!(mount.join("data").exists() && CsiVolumeRecord::read(&volume).is_ok_and(|read| read.is_some()));
        fs::remove_file(mount.join("data")).expect("removed");
        fs::write(volume.join("other"), "precious").expect("written");
        assert!(clear(&mount, STEPS).is_err());
        fs::remove_file(volume.join("other")).expect("removed");
        clear(&mount, STEPS).expect("cleared");
        assert!(!volume.exists());
        assert!(mounted(Path::new("/")).is_ok_and(|root| root.is_some()));
    }
}
