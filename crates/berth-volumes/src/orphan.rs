//! Takes down what a pod left on disk. Blocking. Behaviour: spec 07 §4.3, §5.4, §17.
//!
//! Data that is not ours is never deleted: volumes of kinds that this agent writes itself are
//! removed with all they hold, every other volume directory only when it is empty, and nothing at
//! all while something foreign is mounted below or lies where only parts of a pod do.

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
    remove_tree::{remove_empty_directory, remove_tree},
};

/// File systems that hold a volume of ours in memory.
const IN_MEMORY: [&str; 2] = ["tmpfs", "hugetlbfs"];

/// What was left, with all that is wrong.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LeftOver {
    /// Something is mounted that this agent did not mount.
    #[error("mounted volumes=[{}]", .0.join(" "))]
    Mounted(Vec<String>),
    /// A volume cannot be taken down.
    #[error("UnmountVolume.TearDown failed for volume {volume:?} : {reason}")]
    TearDown {
        /// Its name.
        volume: String,
        /// Why not.
        reason: String,
    },
    /// A volume directory cannot be removed.
    #[error("orphaned pod {pod:?} found, but failed to rmdir() volume at path {path}: {reason}")]
    Volume {
        /// The pod.
        pod: String,
        /// The directory.
        path: String,
        /// Why not.
        reason: String,
    },
    /// A sub-path cannot be removed.
    #[error("orphaned pod {pod:?} found, but failed to remove subpath at path {path}: {reason}")]
    SubPath {
        /// The pod.
        pod: String,
        /// The path.
        path: String,
        /// Why not.
        reason: String,
    },
    /// Anything else cannot be removed.
    #[error("orphaned pod {pod:?} found, but error occurred when trying to remove {what}: {reason}")]
    Other {
        /// The pod.
        pod: String,
        /// `the volumes dir`, …
        what: String,
        /// Why not.
        reason: String,
    },
}

/// Unmounts and removes the volumes of a terminated pod; its directory stays.
pub fn tear_down(layout: &PodLayout) -> Result<(), LeftOver> {
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

fn not_down(volume: &str, cause: &dyn std::fmt::Display) -> LeftOver {
    LeftOver::TearDown { volume: volume.to_owned(), reason: cause.to_string() }
}

/// Removes the whole directory of a pod that nobody knows; tells whether there were volumes in it.
pub fn remove_pod(layout: &PodLayout) -> Result<bool, LeftOver> {
    let pod = layout.pod().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let other = |what: String| {
        let pod = pod.clone();
        move |e: io::Error| LeftOver::Other { pod, what, reason: e.to_string() }
    };
    let parts = children(layout.pod()).map_err(other("the pod directory".to_owned()))?;
    if let Some(foreign) = parts.iter().find(|part| !is_of_a_pod(part)) {
        let cause = io::Error::other(format!("{} is no part of a pod", foreign.display()));
        return Err(other("the pod directory".to_owned())(cause));
    }
    // The pod went away while no agent was there. What this agent binds and mounts for itself goes as with any pod;
    // what lay in memory goes with its pod.
    for mount in mounted_below(&layout.sub_paths())?.into_iter().rev() {
        unmount(&mount.target, UnmountFlags::NOFOLLOW).map_err(|e| LeftOver::SubPath {
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
        // Our own volume, complete and not mounted: the pod went away before it was taken down.
        let marker = layout.marker(&plugin, &name);
        let ours = OWNED.contains(&plugin.as_str()) && marker.join("ready").exists();
        let removed = if ours { remove_tree(&path) } else { remove_empty_directory(&path) };
        removed.map_err(|e| LeftOver::Volume {
            pod: pod.clone(),
            path: path.display().to_string(),
            reason: e.to_string(),
        })?;
    }
    for path in sub_paths(layout).map_err(other("the volume-subpaths dir".to_owned()))? {
        remove_one(&path).map_err(|e| LeftOver::SubPath {
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
    // A file that was being replaced when an agent ended (`sys/atomic_file.rs`).
    let is_temporary = || {
        let is_named = |rest: &str| rest.len() == 8 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
        name.strip_prefix('.').is_some_and(is_named) && fs::symlink_metadata(part).is_ok_and(|meta| meta.is_file())
    };
    PARTS.contains(&name) || is_temporary()
}

/// Unmounts file systems in memory that are the root of a volume of these plugins of ours: this
/// agent or another mounted them.
fn unmount_in_memory(layout: &PodLayout, plugins: &[&str]) -> Result<(), LeftOver> {
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

/// Sub-paths are bound by this agent; they go before their volumes.
pub fn unmount_sub_paths(layout: &PodLayout) -> io::Result<()> {
    for mount in mount_table::below(&layout.sub_paths())?.into_iter().rev() {
        unmount(&mount.target, UnmountFlags::NOFOLLOW)?;
    }
    for path in sub_paths(layout)? {
        remove_one(&path)?;
    }
    empty_directories(&layout.sub_paths())
}

fn mounted_below(path: &Path) -> Result<Vec<mount_table::Mount>, LeftOver> {
    // A table that cannot be read counts as something being mounted.
    mount_table::below(path).map_err(|e| LeftOver::Mounted(vec![e.to_string()]))
}

fn nothing_mounted(path: &Path) -> Result<(), LeftOver> {
    let mounted = mounted_below(path)?;
    if mounted.is_empty() {
        return Ok(());
    }
    Err(LeftOver::Mounted(mounted.into_iter().map(|mount| mount.target.display().to_string()).collect()))
}

/// Plugin directory, name and path of every volume on disk.
fn volumes(layout: &PodLayout) -> io::Result<Vec<(String, String, PathBuf)>> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut found = Vec::new();
    for plugin in children(&layout.volumes())? {
        found.extend(children(&plugin)?.into_iter().map(|path| (name(&plugin), name(&path), path)));
    }
    Ok(found)
}

/// `<volume>/<container>/<index>` of every sub-path on disk.
fn sub_paths(layout: &PodLayout) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for volume in children(&layout.sub_paths())? {
        for container in children(&volume)? {
            found.extend(children(&container)?);
        }
    }
    Ok(found)
}

/// The entries of a directory; none of what is no directory. What cannot be read is not empty. Links are not followed.
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

/// Removes two levels of empty directories and the directory that holds them.
fn empty_directories(path: &Path) -> io::Result<()> {
    for child in children(path)? {
        for grandchild in children(&child)? {
            remove_empty_directory(&grandchild)?;
        }
        remove_empty_directory(&child)?;
    }
    remove_empty_directory(path)
}
