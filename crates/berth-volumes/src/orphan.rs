//! Teardown of volumes and directories of terminated and orphaned pods. Blocking.
//!
//! Never deletes foreign data: volumes of plugins that only this agent writes are removed with their content, every
//! other volume directory only if it is empty, and nothing at all while a foreign mount exists below the pod directory
//! or a foreign entry is in it. Implements spec 07 §4.3, §5.4, §17.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::mount::{UnmountFlags, unmount};

use super::{
    layout::{OWNED, PARTS, PodLayout},
    rebuild,
};
use berth_sys::{
    mount_table,
    tree_removal::{remove_empty_directory, remove_tree},
};

/// Memory-backed file systems of the agent's own volumes.
const IN_MEMORY: [&str; 2] = ["tmpfs", "hugetlbfs"];

/// Why the volumes or the directory of an orphaned pod cannot be removed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TeardownError {
    /// File systems that this agent did not mount are still mounted.
    #[error("mounted volumes=[{}]", .0.join(" "))]
    Mounted(Vec<String>),
    /// A volume cannot be torn down.
    #[error("UnmountVolume.TearDown failed for volume {volume:?} : {reason}")]
    TearDown {
        /// Name of the volume.
        volume: String,
        /// Cause.
        reason: String,
    },
    /// A volume directory cannot be removed.
    #[error("orphaned pod {pod:?} found, but failed to rmdir() volume at path {path}: {reason}")]
    Volume {
        /// UID of the pod.
        pod: String,
        /// Path of the directory.
        path: String,
        /// Cause.
        reason: String,
    },
    /// A sub-path cannot be removed.
    #[error("orphaned pod {pod:?} found, but failed to remove subpath at path {path}: {reason}")]
    SubPath {
        /// UID of the pod.
        pod: String,
        /// Path of the sub-path.
        path: String,
        /// Cause.
        reason: String,
    },
    /// Another part of the pod directory cannot be removed.
    #[error("orphaned pod {pod:?} found, but error occurred when trying to remove {what}: {reason}")]
    Other {
        /// UID of the pod.
        pod: String,
        /// Part that cannot be removed: `the volumes dir`, …
        what: String,
        /// Cause.
        reason: String,
    },
}

/// Unmounts and removes the volumes of a terminated pod; keeps the pod directory.
pub fn tear_down(layout: &PodLayout) -> Result<(), TeardownError> {
    unmount_sub_paths(layout).map_err(|e| not_down("", &e))?;
    unmount_in_memory(layout, &OWNED)?;
    nothing_mounted(&layout.volumes())?;
    for (plugin, name, path) in volumes(layout).map_err(|e| not_down("", &e))? {
        if OWNED.contains(&plugin.as_str()) {
            let marker = layout.marker(&plugin, &name);
            remove_tree(&marker).and_then(|()| remove_tree(&path)).map_err(|e| not_down(&name, &e))?;
        } else {
            remove_empty_directory(&path).map_err(|e| not_down(&name, &e))?;
        }
    }
    Ok(())
}

fn not_down(volume: &str, cause: &dyn std::fmt::Display) -> TeardownError {
    TeardownError::TearDown { volume: volume.to_owned(), reason: cause.to_string() }
}

/// Removes the whole directory of an orphaned pod; returns whether it contained volumes.
pub fn remove_pod(layout: &PodLayout) -> Result<bool, TeardownError> {
    let pod = layout.pod().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let other = |what: String| {
        let pod = pod.clone();
        move |e: io::Error| TeardownError::Other { pod, what, reason: e.to_string() }
    };
    let parts = children(layout.pod()).map_err(other("the pod directory".to_owned()))?;
    if let Some(foreign) = parts.iter().find(|part| !is_of_a_pod(part)) {
        let cause = io::Error::other(format!("{} is not part of a pod", foreign.display()));
        return Err(other("the pod directory".to_owned())(cause));
    }
    // The pod was removed while no agent ran. The agent's own bind mounts and memory-backed file systems are unmounted
    // as for any pod; memory-backed data ends with its pod.
    for mount in mounted_below(&layout.sub_paths())?.into_iter().rev() {
        unmount(&mount.target, UnmountFlags::NOFOLLOW).map_err(|e| TeardownError::SubPath {
            pod: pod.clone(),
            path: mount.target.display().to_string(),
            reason: e.to_string(),
        })?;
    }
    unmount_in_memory(layout, &OWNED)?;
    nothing_mounted(layout.pod())?;
    let found = volumes(layout).map_err(other("the volumes dir".to_owned()))?;
    let had_volumes = !found.is_empty();
    for (plugin, name, path) in found {
        // A complete, unmounted volume of the agent: the pod was removed before its teardown.
        let marker = layout.marker(&plugin, &name);
        let ours = OWNED.contains(&plugin.as_str()) && marker.join("ready").exists();
        let removed = if ours { remove_tree(&path) } else { remove_empty_directory(&path) };
        removed.map_err(|e| TeardownError::Volume {
            pod: pod.clone(),
            path: path.display().to_string(),
            reason: e.to_string(),
        })?;
    }
    for path in sub_paths(layout).map_err(other("the volume-subpaths dir".to_owned()))? {
        remove_one(&path).map_err(|e| TeardownError::SubPath {
            pod: pod.clone(),
            path: path.display().to_string(),
            reason: e.to_string(),
        })?;
    }
    empty_directories(&layout.volumes()).map_err(other("the volumes dir".to_owned()))?;
    empty_directories(&layout.sub_paths()).map_err(other("the volume-subpaths dir".to_owned()))?;
    for part in parts {
        remove_tree(&part).map_err(other(part.display().to_string()))?;
    }
    remove_empty_directory(layout.pod()).map_err(other("the pod directory".to_owned()))?;
    Ok(had_volumes)
}

fn is_of_a_pod(part: &Path) -> bool {
    let Some(name) = part.file_name().and_then(|name| name.to_str()) else { return false };
    // Temporary file of an atomic replacement that was interrupted (`sys/atomic_file.rs`).
    let is_temporary = || {
        let is_named = |rest: &str| rest.len() == 8 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
        name.strip_prefix('.').is_some_and(is_named) && fs::symlink_metadata(part).is_ok_and(|meta| meta.is_file())
    };
    PARTS.contains(&name) || is_temporary()
}

/// Unmounts memory-backed file systems at volume roots of these plugins: this agent or an earlier one mounted them.
fn unmount_in_memory(layout: &PodLayout, plugins: &[&str]) -> Result<(), TeardownError> {
    let found = volumes(layout).map_err(|e| not_down("", &e))?.into_iter();
    let roots: Vec<PathBuf> = found.filter(|(plugin, ..)| plugins.contains(&plugin.as_str())).map(|v| v.2).collect();
    for mount in mounted_below(&layout.volumes())?.into_iter().rev() {
        if IN_MEMORY.contains(&mount.kind.as_str()) && roots.contains(&mount.target) {
            unmount(&mount.target, UnmountFlags::NOFOLLOW).map_err(|e| {
                let volume = mount.target.file_name().unwrap_or_default().to_string_lossy().into_owned();
                not_down(&volume, &e)
            })?;
        }
    }
    Ok(())
}

/// Unmounts and removes sub-paths, which this agent binds; runs before the teardown of their volumes.
pub fn unmount_sub_paths(layout: &PodLayout) -> io::Result<()> {
    for mount in mount_table::below(&layout.sub_paths())?.into_iter().rev() {
        unmount(&mount.target, UnmountFlags::NOFOLLOW)?;
    }
    for path in sub_paths(layout)? {
        remove_one(&path)?;
    }
    empty_directories(&layout.sub_paths())
}

fn mounted_below(path: &Path) -> Result<Vec<mount_table::Mount>, TeardownError> {
    // An unreadable mount table counts as something mounted.
    mount_table::below(path).map_err(|e| TeardownError::Mounted(vec![e.to_string()]))
}

fn nothing_mounted(path: &Path) -> Result<(), TeardownError> {
    let mounted = mounted_below(path)?;
    if mounted.is_empty() {
        return Ok(());
    }
    Err(TeardownError::Mounted(mounted.into_iter().map(|mount| mount.target.display().to_string()).collect()))
}

/// Returns plugin directory, name, and path of every volume on disk.
fn volumes(layout: &PodLayout) -> io::Result<Vec<(String, String, PathBuf)>> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut found = Vec::new();
    for plugin in children(&layout.volumes())? {
        found.extend(children(&plugin)?.into_iter().map(|path| (name(&plugin), name(&path), path)));
    }
    Ok(found)
}

/// Returns the path `<volume>/<container>/<index>` of every sub-path on disk.
fn sub_paths(layout: &PodLayout) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for volume in children(&layout.sub_paths())? {
        for container in children(&volume)? {
            found.extend(children(&container)?);
        }
    }
    Ok(found)
}

/// Returns the entries of a directory; none if the path is missing or not a directory. An unreadable directory is an
/// error. Does not follow symlinks.
fn children(path: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => rebuild::children(path),
        Ok(_) => Ok(Vec::new()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Removes a file or an empty directory.
fn remove_one(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => remove_empty_directory(path),
        Ok(_) => fs::remove_file(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Removes two levels of empty directories and their parent.
fn empty_directories(path: &Path) -> io::Result<()> {
    for child in children(path)? {
        for grandchild in children(&child)? {
            remove_empty_directory(&grandchild)?;
        }
        remove_empty_directory(&child)?;
    }
    remove_empty_directory(path)
}
