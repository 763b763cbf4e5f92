//! What a pod is told that waits for its volumes. Pure. Behaviour: spec 07 §5.1.

use std::fmt;

use berth_ports::VolumeError;

/// Volumes that a pod waits for, as the reference tells of them (spec 07 §5.1).
pub struct Waiting {
    /// Those that are not there.
    pub missing: Vec<String>,
    /// Those of them that nobody attached.
    pub unattached: Vec<String>,
    /// Those that it cannot be said of what they are.
    pub failed: Vec<String>,
    /// Why.
    pub cause: String,
}

impl Waiting {
    /// The error where volumes that are files of this agent are not there.
    pub fn for_files(missing: Vec<String>, causes: Vec<String>) -> VolumeError {
        let cause = causes.join("; ");
        let text = Self { missing, unattached: Vec::new(), failed: Vec::new(), cause }.to_string();
        VolumeError::NotSetUp { text, causes }
    }
}

impl fmt::Display for Waiting {
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
