//! Kernel settings (sysctls) that pods rely on: writes them, or only checks them.
//!
//! Implements spec 06a §8.2.

use std::{fs, path::Path};

use tracing::{info, warn};

use super::manager::blocking;
use berth_ports::ResourceError;

/// Path below `/proc/sys` and required value.
const WANTED: [(&str, i64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// Action for a setting that differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnDifference {
    /// The agent does not start (`protectKernelDefaults`).
    Refuse,
    /// The setting is written.
    Write,
    /// The setting is written if possible: in a user namespace it is not.
    TryToWrite,
}

/// Sets the kernel settings below `root` (`/proc/sys`) to the required values.
///
/// # Errors
/// All settings that differ and must not be, or cannot be, changed.
pub async fn apply(root: &Path, on_difference: OnDifference) -> Result<(), ResourceError> {
    let root = root.to_owned();
    blocking("kernel settings", move || {
        let complaints: Vec<String> =
            WANTED.iter().filter_map(|(name, wanted)| one(&root, name, *wanted, on_difference).err()).collect();
        if complaints.is_empty() { Ok(()) } else { Err(ResourceError(complaints.join(", "))) }
    })
    .await
}

fn one(root: &Path, name: &str, wanted: i64, on_difference: OnDifference) -> Result<(), String> {
    let path = root.join(name);
    let failed = |e: std::io::Error| format!("{}: {e}", path.display());
    let actual = fs::read_to_string(&path).map_err(failed)?;
    let actual = actual.trim();
    if actual.parse() == Ok(wanted) {
        return Ok(());
    }
    if on_difference == OnDifference::Refuse {
        return Err(format!("invalid kernel flag: {name}, expected value: {wanted}, actual value: {actual}"));
    }
    info!(path = name, from = actual, to = wanted, "Updating kernel flag");
    match fs::write(&path, wanted.to_string()).map_err(failed) {
        Err(err) if on_difference == OnDifference::TryToWrite => {
            warn!(err, "Updating kernel flag failed (running in UserNS, ignoring)");
            Ok(())
        }
        written => written,
    }
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
        let error = apply(root.path(), OnDifference::Refuse).await.expect_err("differs");
        assert_eq!(error.0, "invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0");
        apply(settings("1\n").path(), OnDifference::Refuse).await.expect("all as wanted");
    }

    #[tokio::test]
    async fn other_settings_are_written() {
        let root = settings("0\n");
        apply(root.path(), OnDifference::Write).await.expect("writable");
        assert_eq!(fs::read_to_string(root.path().join("vm/overcommit_memory")).expect("readable"), "1");
        fs::remove_file(root.path().join("kernel/panic")).expect("removable");
        let error = apply(root.path(), OnDifference::Write).await.expect_err("missing");
        assert!(error.0.contains("kernel/panic: No such file"), "{error}");
    }

    #[tokio::test]
    async fn what_cannot_be_written_may_be_ignored_but_not_what_cannot_be_read() {
        let root = settings("0\n");
        let path = root.path().join("vm/overcommit_memory");
        fs::remove_file(&path).expect("removable");
        // Readable as a number, and not writable even by root.
        std::os::unix::fs::symlink("/proc/self/sessionid", &path).expect("a link");
        let error = apply(root.path(), OnDifference::Write).await.expect_err("not writable");
        assert!(error.0.contains("vm/overcommit_memory: "), "{error}");
        apply(root.path(), OnDifference::TryToWrite).await.expect("ignored");
        fs::remove_file(&path).expect("removable");
        apply(root.path(), OnDifference::TryToWrite).await.expect_err("missing");
    }
}
