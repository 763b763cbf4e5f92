//! Mount preparation on the host: bind mounts, cgroups, and idmapped mounts as detached mounts.
//!
//! A path is resolved once. The mount attached later is the one found here, whatever happens to the path
//! (spec 09a §8.2).

use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use nix::libc;
use rustix::fs::FileType;

use super::{
    PodContext,
    error_context::{ErrorContext, Step, failure, reason},
    namespaces, process_setup,
};
use crate::plan::{Access, Mount, MountKind, Namespace, Propagation};
use berth_sys::{
    child_process::SingleThreaded,
    mount_api::{self, Change, MountScope},
};

/// A mount ready to be attached.
#[derive(Debug)]
pub(super) enum PreparedMount {
    /// A clone of a host path.
    Tree {
        /// The detached mount.
        mount: OwnedFd,
        /// Whether its root is a directory.
        is_directory: bool,
    },
    /// A new file system, created in the container's namespaces.
    New,
    /// The container's cgroup v1 directories, by hierarchy name.
    Groups(Vec<(String, OwnedFd)>),
    /// Layers of an image; mounted together with the root.
    Layers,
}

/// Prepares all mounts that come from the host.
pub(super) fn prepare(
    alone: SingleThreaded,
    mounts: &[Mount],
    groups: &[PathBuf],
    around: &PodContext<'_>,
) -> Step<Vec<PreparedMount>> {
    let one = |mount: &Mount| match &mount.source {
        MountKind::Bind(path) => bind(alone, path, mount, around),
        MountKind::New { kind, .. } if kind == "cgroup" && process_setup::is_old(groups) => {
            old_groups(groups).map(PreparedMount::Groups)
        }
        MountKind::New { .. } => Ok(PreparedMount::New),
        MountKind::Layers { .. } => Ok(PreparedMount::Layers),
    };
    mounts.iter().map(one).collect()
}

fn bind(alone: SingleThreaded, path: &Path, mount: &Mount, around: &PodContext<'_>) -> Step<PreparedMount> {
    let what = || format!("mount {} on {}", path.display(), mount.target);
    let taken = match mount_api::clone_path(path, MountScope::Tree) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // The umask is empty here: without a mode the directory would be world-writable.
            let mut directories = fs::DirBuilder::new();
            let made = directories.recursive(true).mode(0o755).create(path);
            made.context(|| format!("create {}", path.display()))?;
            mount_api::clone_path(path, MountScope::Tree)
        }
        other => other,
    };
    let taken = taken.context(what)?;
    apply_attributes(alone, taken.as_fd(), mount, around)?;
    Ok(PreparedMount::Tree { is_directory: is_directory(taken.as_fd()).context(what)?, mount: taken })
}

/// Whether the root of a mount is a directory.
pub(super) fn is_directory(mount: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(mount)?.st_mode) == FileType::Directory)
}

/// Applies propagation, flags, access, and id mappings to a detached mount.
pub(super) fn apply_attributes(
    alone: SingleThreaded,
    taken: BorrowedFd<'_>,
    mount: &Mount,
    around: &PodContext<'_>,
) -> Step<()> {
    let target = &mount.target;
    let propagation = match mount.propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::Slave => libc::MS_SLAVE,
        Propagation::Shared => 0,
    };
    if propagation != 0 {
        mount_api::change(taken, MountScope::Tree, Change { propagation, ..Change::default() })
            .context(|| format!("set propagation of {target}"))?;
    }
    let is_read_only = mount.access == Access::ReadOnly || mount.flags & libc::MS_RDONLY != 0;
    let set = mount_api::attributes(mount.flags) | if is_read_only { libc::MOUNT_ATTR_RDONLY } else { 0 };
    if set != 0 {
        mount_api::change(taken, MountScope::Top, Change { set, ..Change::default() })
            .context(|| format!("set mount flags of {target}"))?;
    }
    if mount.access == Access::RecursivelyReadOnly {
        let change = Change { set: libc::MOUNT_ATTR_RDONLY, ..Change::default() };
        mount_api::change(taken, MountScope::Tree, change)
            .context(|| format!("RROUnsupported: set {target} recursively read-only"))?;
    }
    match (&mount.source, mount.ids) {
        // Layers are mapped one by one before they are stacked.
        (MountKind::Bind(path), Some(ids)) => map_ids(alone, taken, path, ids, around),
        _ => Ok(()),
    }
}

fn map_ids(
    alone: SingleThreaded,
    taken: BorrowedFd<'_>,
    path: &Path,
    ids: (crate::plan::IdMap, crate::plan::IdMap),
    around: &PodContext<'_>,
) -> Step<()> {
    let made;
    let users = match around.namespace(Namespace::User) {
        Some(users) if around.users == Some(ids) => users,
        _ => {
            made = namespaces::user_namespace(alone, ids)?;
            &made
        }
    };
    idmap(taken, users.as_fd(), path)
}

/// Makes a detached mount an idmapped mount of a user namespace.
pub(super) fn idmap(taken: BorrowedFd<'_>, users: BorrowedFd<'_>, path: &Path) -> Step<()> {
    mount_api::change(taken, MountScope::Top, Change { ids: Some(users), ..Change::default() }).map_err(|error| {
        failure(format!(
            "failed to set MOUNT_ATTR_IDMAP on {}: {} (maybe the filesystem used doesn't support idmap mounts on this \
             kernel?)",
            path.display(),
            reason(&error)
        ))
    })
}

/// Clones cgroup v1 directories; `/sys/fs/cgroup/memory/kubepods/x` belongs to the hierarchy `memory`.
fn old_groups(groups: &[PathBuf]) -> Step<Vec<(String, OwnedFd)>> {
    let mut taken = Vec::new();
    for group in groups {
        let below = group.strip_prefix("/sys/fs/cgroup").ok().and_then(|below| below.components().next());
        let Some(name) = below.and_then(|name| name.as_os_str().to_str()) else { continue };
        let what = || format!("open cgroup {}", group.display());
        let mount = mount_api::clone_path(group, MountScope::Top).context(what)?;
        let change = Change { propagation: libc::MS_PRIVATE, ..Change::default() };
        mount_api::change(mount.as_fd(), MountScope::Top, change).context(what)?;
        taken.push((name.to_owned(), mount));
    }
    Ok(taken)
}
