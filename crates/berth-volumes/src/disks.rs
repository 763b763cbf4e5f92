//! What volumes on disks of a network have in common: one mount for all pods of the node, a bind for each.
//! Behaviour: spec 07 §4.3, §7.8, §10.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{
    device::{Class, Found, GroupOf, OpError, Published, Trouble, Usage},
    format, fullness, give, local,
    machine::{self, Work},
    selinux,
    spec::Mode,
};
use berth_ports::Fullness;
use berth_sys::mount_table::Mount;

/// The file system of a blank disk where nothing is said.
const DEFAULT_KIND: &str = "ext4";

/// A failure after something was done.
pub fn uncertain(text: impl Into<String>) -> OpError {
    OpError::uncertain(text)
}

/// Mounts what is on a disk at the place that all pods share, and makes a file system first where nothing is.
///
/// # Errors
/// In the reference's words.
pub async fn stage(work: &Work, usage: &Usage, disk: &Path, shared: &Path, kind: Option<&str>) -> Result<(), OpError> {
    if work.is_mounted(shared).await? {
        return Ok(());
    }
    let label = usage.label.as_deref().map(selinux::option);
    let options: Vec<String> = usage.spec.mount_options().into_iter().chain(label).collect();
    let kind = kind.filter(|kind| !kind.is_empty()).unwrap_or(DEFAULT_KIND);
    format::format_and_mount(work, disk, shared, kind, &options, usage.spec.read_only()).await
}

/// Gives the pod what all pods share.
///
/// # Errors
/// What stands in the way.
pub async fn publish(work: &Work, plugin: &str, usage: &Usage, shared: &Path) -> Result<Published, OpError> {
    let (machine, source, target) = (work.machine().clone(), shared.to_owned(), usage.target.clone());
    let (read_only, options) = (usage.spec.read_only(), usage.spec.mount_options());
    let is_new = work.operation().blocking(move || {
        local::make(&target)?;
        let table = machine.mounts().map_err(machine::unread)?;
        if table.iter().any(|mount| mount.target == target) {
            return Ok(false);
        }
        // What is not the mount of the disk is the node's own directory: nobody's data may go there.
        if !table.iter().any(|mount| mount.target == source) {
            return Err(OpError::failed(format!("{} is not mounted", source.display())));
        }
        let binds: Vec<String> = options.into_iter().filter(|option| is_of_bind(option)).collect();
        let bound = machine.bind(&source, &target, read_only, &binds);
        bound.map_err(|error| OpError { class: Class::Uncertain, ..error })?;
        Ok(true)
    });
    let is_new = is_new.await?;
    let group = usage.group.filter(|_| !usage.is_shared_now && !usage.is_republish && !read_only);
    if let Some(of) = group {
        // What an agent before this one bound it has given, too, if the root says so: that is done last.
        let was_given = !is_new && usage.was_rebuilt;
        let of = GroupOf { on_root_mismatch: of.on_root_mismatch || was_given, ..of };
        give::give(usage, plugin, usage.target.clone(), of).await?;
    }
    Ok(Published { path: usage.target.clone(), relabel: usage.label.is_none() })
}

/// The label that a disk is mounted with at the place that all pods share.
pub fn label(table: &[Mount], shared: &Path) -> Option<String> {
    let mount = table.iter().rfind(|mount| mount.target == shared)?;
    selinux::mounted_with(&mount.options)
}

/// Options of a file system are no options of a bind.
fn is_of_bind(option: &str) -> bool {
    ["ro", "nodev", "noexec", "nosuid", "noatime", "nodiratime", "relatime"].contains(&option)
}

/// How full it is.
///
/// # Errors
/// It is a device, or does not say.
pub async fn fullness(usage: &Usage, path: &Path) -> Result<Fullness, OpError> {
    match usage.mode {
        Mode::Filesystem => fullness::of_filesystem(&usage.operation, path).await,
        Mode::Block => Err(OpError::failed("a device is not asked how full it is").because(Trouble::Unsupported)),
    }
}

/// Takes from the pod what all pods share.
///
/// # Errors
/// In the reference's words.
pub async fn unpublish(work: &Work, target: &Path) -> Result<(), OpError> {
    work.unmount(target).await.map_err(uncertain)?;
    remove_dir(work, target).await
}

/// Removes an empty directory; one that is not there is fine.
///
/// # Errors
/// What stands in the way.
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

/// Unmounts what all pods shared, unless it is mounted elsewhere, too: its disk goes next.
///
/// # Errors
/// In the reference's words.
pub async fn unstage(work: &Work, shared: &Path) -> Result<(), OpError> {
    let table = work.mounts().await?;
    let mut others = machine::elsewhere(&table, shared);
    // The same directory by another name: an agent in a container sees both.
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

/// The directory in which a pod has a device that an earlier agent left: its file there is the device to which the
/// pod's link leads. Blocking.
///
/// # Errors
/// None is, or it cannot be told.
pub fn mapped(found: &Found, directories: Vec<PathBuf>) -> Result<PathBuf, String> {
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
        _ => Err("no global map path of the pod leads to the device".to_owned()),
    }
}
