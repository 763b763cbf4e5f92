//! emptyDir volumes on disk, in memory (tmpfs), or in huge pages (hugetlbfs).
//!
//! A marker beside the volume shows that it is complete. The volume is set up again if the marker or the directory is
//! missing, or its mount is gone (after a reboot). Implements spec 07 §7.1.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

use tracing::warn;

use super::{SetUp, SetUpError, huge_pages};
use crate::{
    layout::EMPTY_DIR,
    memory,
    ownership::{self, GroupAccess},
};
use berth_ports::MountedVolume;
use berth_sys::{
    mount::{self, NewFileSystem},
    mount_table,
    tree_removal::remove_tree,
};
use berth_types::{api, quantity::Amount};

/// Mode of the volume's root: world-writable.
const MODE: u32 = 0o777;

/// Storage medium of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Medium {
    /// Disk of the node.
    Disk,
    /// Memory, with a size limit in bytes; 0 for no limit.
    Memory(u64),
    /// Huge pages: page size as spelled in the pod, and in bytes.
    HugePages(String, u64),
}

/// Creates the directory, and mounts its medium.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let medium = medium_of(request)?;
    let name = &request.volume.name;
    let dir = request.layout.volume(EMPTY_DIR, name);
    let marker = request.layout.marker(EMPTY_DIR, name);
    if let Medium::HugePages(text, bytes) = &medium {
        same_pages(&dir, text, *bytes)?;
    }
    if medium != Medium::Disk && !mount::is_mount_point(&dir).unwrap_or(false) {
        // The volume was complete before a reboot.
        remove_tree(&marker).map_err(SetUpError::io("removing", &marker))?;
    }
    backing(&dir, &marker, || {
        match &medium {
            Medium::Disk => {}
            Medium::Memory(bytes) => {
                memory::ensure(&dir, *bytes).map_err(SetUpError::io("mounting tmpfs at", &dir))?;
            }
            Medium::HugePages(text, _) => mount_pages(&dir, text)?,
        }
        if let Some(group) = ownership::group_of(request.pod)
            && let Err(e) = ownership::apply(&dir, group, GroupAccess::ReadWrite)
        {
            warn!(volume = %name, err = %e, "Failed to change ownership of emptyDir");
        }
        Ok(())
    })?;
    let sub_path_mode = fs::metadata(&dir).map_or(MODE, |meta| meta.permissions().mode() & 0o7777);
    Ok(MountedVolume { host_path: Some(dir), read_only: false, relabel: true, sub_path_mode })
}

fn medium_of(request: &SetUp<'_>) -> Result<Medium, SetUpError> {
    let source = request.volume.empty_dir.as_ref();
    match source.and_then(|source| source.medium.as_deref()).unwrap_or_default() {
        "" => Ok(Medium::Disk),
        "Memory" => {
            let most = memory::size(request.allocatable, request.pod);
            Ok(Medium::Memory(limited(most, source)))
        }
        huge if huge_pages::is_medium(huge) => {
            let (text, bytes) = huge_pages::size(huge, request.pod)?;
            Ok(Medium::HugePages(text, bytes))
        }
        other => Err(SetUpError::Medium(other.to_owned())),
    }
}

/// Returns the size limit in bytes: the smaller of `most` and the volume's own limit.
fn limited(most: u64, source: Option<&api::EmptyDirVolumeSource>) -> u64 {
    let limit = source.and_then(|source| source.size_limit.as_ref());
    let limit =
        limit.and_then(|limit| Amount::try_from(limit).ok()).and_then(|limit| u64::try_from(limit.value()).ok());
    match limit {
        Some(limit) if limit > 0 && (most == 0 || limit <= most) => limit,
        _ => most,
    }
}

/// Fails if huge pages of another size are already mounted.
fn same_pages(dir: &Path, text: &str, bytes: u64) -> Result<(), SetUpError> {
    let mounts = mount_table::below(dir).map_err(SetUpError::io("reading mount table for", dir))?;
    let present = mounts.into_iter().find(|mount| mount.target == dir && mount.kind == "hugetlbfs");
    match present {
        Some(present) if !huge_pages::is_of_size(&present.options, bytes) => {
            let shown = present.options.split(',').find_map(|option| option.strip_prefix("pagesize="));
            Err(SetUpError::PageSize { mounted: shown.unwrap_or_default().to_owned(), wanted: text.to_owned() })
        }
        _ => Ok(()),
    }
}

fn mount_pages(dir: &Path, size: &str) -> Result<(), SetUpError> {
    let failed = SetUpError::io("mounting hugetlbfs at", dir);
    if mount::is_mount_point(dir).map_err(&failed)? {
        return Ok(());
    }
    let options = [format!("pagesize={size}")];
    mount::file_system(NewFileSystem { kind: "hugetlbfs", source: "nodev", options: &options }, dir).map_err(&failed)
}

/// Creates the directory that backs a volume, unless its marker shows that it is complete; `complete` finishes the
/// set-up before the marker is created.
pub fn backing(dir: &Path, marker: &Path, complete: impl FnOnce() -> Result<(), SetUpError>) -> Result<(), SetUpError> {
    let ready = marker.join("ready");
    if ready.exists() {
        if dir.is_dir() {
            return Ok(());
        }
        remove_tree(marker).map_err(SetUpError::io("removing", marker))?;
    }
    make(dir, MODE).map_err(SetUpError::io("creating", dir))?;
    fs::set_permissions(dir, Permissions::from_mode(MODE)).map_err(SetUpError::io("changing the mode of", dir))?;
    complete()?;
    make(marker, 0o750).map_err(SetUpError::io("creating", marker))?;
    let made = OpenOptions::new().create(true).write(true).truncate(false).open(&ready);
    made.map(drop).map_err(SetUpError::io("creating", &ready))
}

fn make(dir: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_smaller_limit_counts() {
        for (most, limit, expected) in [
            // AC-07-2
            (1 << 30, json!({"sizeLimit": "64Mi"}), 64 << 20),
            (1 << 20, json!({"sizeLimit": "64Mi"}), 1 << 20),
            (0, json!({"sizeLimit": "64Mi"}), 64 << 20),
            (5, json!({"sizeLimit": "0"}), 5),
            (5, json!({}), 5),
        ] {
            let source: api::EmptyDirVolumeSource = serde_json::from_value(limit.clone()).expect("a source");
            assert_eq!(limited(most, Some(&source)), expected, "{most} {limit}");
        }
        assert_eq!(limited(5, None), 5);
    }
}
