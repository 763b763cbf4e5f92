//! Error message of a pod that waits for its volumes. Pure. Implements spec 07 §5.1.

use std::fmt;

use berth_ports::VolumeError;

/// Volumes that a pod waits for, formatted like the upstream kubelet (spec 07 §5.1).
pub struct MountWaitError {
    /// Names of volumes that are not mounted.
    pub missing: Vec<String>,
    /// Names of those that are not attached.
    pub unattached: Vec<String>,
    /// Names of volumes that could not be resolved.
    pub failed: Vec<String>,
    /// Cause of the wait.
    pub cause: String,
}

impl MountWaitError {
    /// Returns the error for file-based volumes that could not be set up.
    pub fn for_files(missing: Vec<String>, causes: Vec<String>) -> VolumeError {
        let cause = causes.join("; ");
        let text = Self { missing, unattached: Vec::new(), failed: Vec::new(), cause }.to_string();
        VolumeError::NotSetUp { text, causes }
    }
}

impl fmt::Display for MountWaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |names: &[String]| {
            let mut names = names.to_vec();
            names.sort();
            names.join(" ")
        };
        let (missing, unattached, failed) = (list(&self.missing), list(&self.unattached), list(&self.failed));
        let cause = &self.cause;
        write!(
            f,
            "unmounted volumes=[{missing}], unattached volumes=[{unattached}], failed to process volumes=[{failed}]: {cause}"
        )
    }
}
