//! Shared code of network disk plugins (iSCSI, FC): one mount per node, one bind mount per pod.
//!
//! Implements spec 07 §4.3, §7.8, §10.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{
    attachable::{Class, ErrorCause, FoundVolume, FsGroup, OpError, PublishedVolume, Usage},
    file_system, group_ownership, local,
    machine::{self, Work},
    selinux,
    spec::Mode,
    usage_stats,
};
use berth_ports::VolumeStats;
use berth_sys::mount_table::Mount;

/// Default file system type for a blank disk.
const DEFAULT_KIND: &str = "ext4";

/// Creates the error of a failure after something may have changed.
pub fn uncertain(text: impl Into<String>) -> OpError {
    OpError::uncertain(text)
}

/// Mounts a disk at the path shared by all pods; formats a blank disk first.
///
/// # Errors
/// With the message of the upstream kubelet.
pub async fn stage(work: &Work, usage: &Usage, disk: &Path, shared: &Path, kind: Option<&str>) -> Result<(), OpError> {
    if work.is_mounted(shared).await? {
        return Ok(());
    }
    let label = usage.label.as_deref().map(selinux::option);
    let options: Vec<String> = usage.spec.mount_options().into_iter().chain(label).collect();
    let kind = kind.filter(|kind| !kind.is_empty()).unwrap_or(DEFAULT_KIND);
    file_system::format_and_mount(work, disk, shared, kind, &options, usage.spec.read_only()).await
}

/// Bind-mounts the shared mount to the pod's target path and applies `fsGroup`.
///
/// # Errors
/// If the shared mount is missing, or the bind mount or ownership change fails.
pub async fn publish(work: &Work, plugin: &str, usage: &Usage, shared: &Path) -> Result<PublishedVolume, OpError> {
    let (machine, source, target) = (work.machine().clone(), shared.to_owned(), usage.target.clone());
    let (read_only, options) = (usage.spec.read_only(), usage.spec.mount_options());
    let is_new = work.operation().blocking(move || {
        local::make(&target)?;
        let table = machine.mounts().map_err(machine::mount_table_error)?;
        if table.iter().any(|mount| mount.target == target) {
            return Ok(false);
        }
        // Without the disk's mount the path is a directory of the node, to which no pod may write.
        if !table.iter().any(|mount| mount.target == source) {
            return Err(OpError::failed(format!("{} is not mounted", source.display())));
        }
        let binds: Vec<String> = options.into_iter().filter(|option| is_of_bind(option)).collect();
        let bound = machine.bind(&source, &target, read_only, &binds);
        bound.map_err(|error| OpError { class: Class::Uncertain, ..error })?;
        Ok(true)
    });
    let is_new = is_new.await?;
    let group = usage.group.filter(|_| !usage.has_other_users && !usage.is_republish && !read_only);
    if let Some(of) = group {
        // An earlier agent's bind mount has the right group if its root shows that: the root is changed last.
        let was_given = !is_new && usage.was_rebuilt;
        let of = FsGroup { on_root_mismatch: of.on_root_mismatch || was_given, ..of };
        group_ownership::apply_fs_group(usage, plugin, usage.target.clone(), of).await?;
    }
    Ok(PublishedVolume { path: usage.target.clone(), relabel: usage.label.is_none() })
}

/// Returns the SELinux label of the shared mount, if it has one.
pub fn label(table: &[Mount], shared: &Path) -> Option<String> {
    let mount = table.iter().rfind(|mount| mount.target == shared)?;
    selinux::label_of_mount(&mount.options)
}

/// Whether the option applies to a bind mount; options of the file system do not.
fn is_of_bind(option: &str) -> bool {
    ["ro", "nodev", "noexec", "nosuid", "noatime", "nodiratime", "relatime"].contains(&option)
}

/// Returns the usage statistics of the volume.
///
/// # Errors
/// If it is a block device, or `statfs` fails.
pub async fn fullness(usage: &Usage, path: &Path) -> Result<VolumeStats, OpError> {
    match usage.mode {
        Mode::Filesystem => usage_stats::of_filesystem(&usage.operation, path).await,
        Mode::Block => {
            Err(OpError::failed("metrics are not supported for block devices").with_cause(ErrorCause::Unsupported))
        }
    }
}

/// Unmounts the pod's bind mount and removes its target directory.
///
/// # Errors
/// With the message of the upstream kubelet.
pub async fn unpublish(work: &Work, target: &Path) -> Result<(), OpError> {
    work.unmount(target).await.map_err(uncertain)?;
    remove_dir(work, target).await
}

/// Removes an empty directory; a missing one is no error.
///
/// # Errors
/// If the directory cannot be removed.
pub async fn remove_dir(work: &Work, path: &Path) -> Result<(), OpError> {
    let path = path.to_owned();
    let removing = work.operation().blocking(move || match fs::remove_dir(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(uncertain(format!("removing {}: {error}", path.display())))
        }
        _ => Ok(()),
    });
    removing.await
}

/// Unmounts the shared mount, unless the disk is mounted elsewhere too: the disk is detached next.
///
/// # Errors
/// With the message of the upstream kubelet.
pub async fn unstage(work: &Work, shared: &Path) -> Result<(), OpError> {
    let table = work.mounts().await?;
    let mut others = machine::elsewhere(&table, shared);
    // The same directory under another name: an agent in a container sees both.
    let own = shared.to_str().and_then(|text| text.get(text.find("/plugins/kubernetes.io/")?..));
    others.retain(|other| !own.is_some_and(|own| other.to_str().is_some_and(|text| text.ends_with(own))));
    if !others.is_empty() {
        let others: Vec<String> = others.iter().map(|path| path.display().to_string()).collect();
        let shared = shared.display().to_string();
        let cause = format!("the device mount path {shared:?} is still mounted by other references {others:?}");
        return Err(OpError::failed(format!("GetDeviceMountRefs check failed: {cause}")));
    }
    work.unmount(shared).await.map_err(uncertain)
}

/// Returns the global map directory of a block device that an earlier agent left: its file for the pod is the device to
/// which the pod's link points. Blocking.
///
/// # Errors
/// If no directory matches, or several are possible.
pub fn mapped(found: &FoundVolume, directories: Vec<PathBuf>) -> Result<PathBuf, String> {
    let device = fs::metadata(&found.path).map(|meta| meta.rdev()).ok();
    let own =
        |directory: &PathBuf| fs::symlink_metadata(directory.join(found.pod.as_str())).map(|meta| meta.rdev()).ok();
    let with_pod: Vec<(&PathBuf, u64)> =
        directories.iter().filter_map(|directory| Some((directory, own(directory)?))).collect();
    if let Some((directory, _)) = with_pod.iter().find(|(_, own)| device == Some(*own)) {
        return Ok((*directory).clone());
    }
    match with_pod.as_slice() {
        [(only, _)] => Ok((*only).clone()),
        _ => Err("no global map path of the device found for the pod".to_owned()),
    }
}
