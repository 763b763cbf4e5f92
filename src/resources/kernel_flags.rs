//! Kernel settings that pods rely on: written where they differ, or only checked.
//!
//! Behaviour: spec 06a §8.2.

use std::{fs, path::Path};

use tracing::info;

use super::manager::blocking;
use crate::engine::ports::ResourceError;

/// Setting below `/proc/sys` and the value it must have.
const WANTED: [(&str, i64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// `protectKernelDefaults`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protect {
    /// A setting that differs is written.
    No,
    /// A setting that differs stops the start.
    Yes,
}

/// Brings the kernel's settings below `root` (`/proc/sys`) to what pods rely on.
///
/// # Errors
/// All settings that differ and may not be, or cannot be, changed.
pub async fn apply(root: &Path, protect: Protect) -> Result<(), ResourceError> {
    let root = root.to_owned();
    blocking("kernel settings", move || {
        let complaints: Vec<String> =
            WANTED.iter().filter_map(|(name, wanted)| one(&root, name, *wanted, protect).err()).collect();
        if complaints.is_empty() { Ok(()) } else { Err(ResourceError(complaints.join(", "))) }
    })
    .await
}

fn one(root: &Path, name: &str, wanted: i64, protect: Protect) -> Result<(), String> {
    let path = root.join(name);
    let failed = |e: std::io::Error| format!("{}: {e}", path.display());
    let actual = fs::read_to_string(&path).map_err(failed)?;
    let actual = actual.trim();
    if actual.parse() == Ok(wanted) {
        return Ok(());
    }
    if protect == Protect::Yes {
        return Err(format!("invalid kernel flag: {name}, expected value: {wanted}, actual value: {actual}"));
    }
    info!(path = name, from = actual, to = wanted, "Updating kernel flag");
    fs::write(&path, wanted.to_string()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(overcommit: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (name, wanted) in WANTED {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("has one")).expect("makeable");
            fs::write(path, format!("{wanted}\n")).expect("writable");
        }
        fs::write(root.path().join("vm/overcommit_memory"), overcommit).expect("writable");
        root
    }

    #[tokio::test]
    async fn protected_settings_are_only_checked() {
        // AC-06a-16
        let root = settings("0\n");
        let error = apply(root.path(), Protect::Yes).await.expect_err("differs");
        assert_eq!(error.0, "invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0");
        apply(settings("1\n").path(), Protect::Yes).await.expect("all as wanted");
    }

    #[tokio::test]
    async fn other_settings_are_written() {
        let root = settings("0\n");
        apply(root.path(), Protect::No).await.expect("writable");
        assert_eq!(fs::read_to_string(root.path().join("vm/overcommit_memory")).expect("readable"), "1");
        fs::remove_file(root.path().join("kernel/panic")).expect("removable");
        let error = apply(root.path(), Protect::No).await.expect_err("missing");
        assert!(error.0.contains("kernel/panic: No such file"), "{error}");
    }
}
