//! Mount setup in the container's process: attach, mask, protect, and pivot into the root.
//!
//! Every target is resolved inside the root by descriptors, so that links of the image or of a volume cannot lead
//! outside. Implements spec 09a §8, §10 step 8.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use nix::{
    libc,
    mount::{MntFlags, umount2},
};
use rustix::fs::{CWD, FileType, Mode, OFlags, symlinkat};

use super::{
    error_context::{ErrorContext, Step, failure},
    mounts::PreparedMount,
};
use crate::plan::{Access, Mount, MountKind};
use berth_sys::{
    in_root::{self, CreateKind},
    mount_api::{self, Change, MountScope},
};

/// Attaches the root on the working directory, which is the stage directory.
pub(super) fn root(root: BorrowedFd<'_>) -> Step<()> {
    let stage = rustix::fs::openat(CWD, ".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    mount_api::attach(root, stage.context(|| "open staging directory")?.as_fd()).context(|| "attach root filesystem")
}

/// Attaches one prepared mount, or creates it if it is a new file system.
pub(super) fn mount(root: BorrowedFd<'_>, mount: &Mount, ready: &PreparedMount) -> Step<()> {
    let target = Path::new(&mount.target);
    match (ready, &mount.source) {
        (PreparedMount::Tree { mount: tree, is_directory }, _) => {
            let missing = if *is_directory { CreateKind::Directory } else { CreateKind::File };
            put(root, target, missing, tree.as_fd())
        }
        (PreparedMount::Groups(groups), _) => old_groups(root, mount, groups),
        (PreparedMount::New, MountKind::New { kind, data }) => {
            // Like runc: behind a link of the image it could not be masked (CVE-2023-28642).
            if matches!(kind.as_str(), "proc" | "sysfs") {
                let found = in_root::is_ordinary_directory(root, target);
                if !found.context(|| format!("stat {}", mount.target))? {
                    let text = format!("filesystem {kind:?} must be mounted on ordinary directory: {}", mount.target);
                    return Err(failure(text));
                }
            }
            let made = new(kind, data, mount)?;
            put(root, target, CreateKind::Directory, made.as_fd())
        }
        (PreparedMount::New | PreparedMount::Layers, _) => {
            Err(failure(format!("no prepared mount for {}", mount.target)))
        }
    }
}

fn put(root: BorrowedFd<'_>, target: &Path, missing: CreateKind, mount: BorrowedFd<'_>) -> Step<()> {
    let what = || format!("mount {}", target.display());
    let at = in_root::open_or_make(root, target, missing).context(what)?;
    mount_api::attach(mount, at.as_fd()).context(what)
}

fn new(kind: &str, data: &str, mount: &Mount) -> Step<OwnedFd> {
    let read_only = if mount.access == Access::ReadWrite { 0 } else { libc::MS_RDONLY };
    let flags = mount.flags | read_only;
    let kernel_name = if kind == "cgroup" { "cgroup2" } else { kind };
    let made = match mount_api::new_mount(kernel_name, data, flags) {
        // The user namespace may not map the group: terminals then belong to group 0.
        Err(error) if kind == "devpts" && error.raw_os_error() == Some(libc::EINVAL) => {
            let rest: Vec<&str> = data.split(',').filter(|option| !option.starts_with("gid=")).collect();
            mount_api::new_mount(kernel_name, &rest.join(","), flags)
        }
        // Options that the kernel lacks, or that are not permitted: the hierarchy is the same without them.
        Err(_) if kind == "cgroup" => mount_api::new_mount(kernel_name, "", flags).or_else(|_| host_groups(flags)),
        other => other,
    };
    made.context(|| format!("mount {kind} ({data}) on {}", mount.target))
}

/// Fallback if no new cgroup v2 mount is permitted: a clone of the host's.
fn host_groups(flags: u64) -> io::Result<OwnedFd> {
    let taken = mount_api::clone_path(Path::new("/sys/fs/cgroup"), MountScope::Tree)?;
    let change = Change { set: mount_api::attributes(flags), propagation: libc::MS_PRIVATE, ids: None };
    mount_api::change(taken.as_fd(), MountScope::Tree, change)?;
    Ok(taken)
}

/// Mounts a directory for each cgroup v1 hierarchy, as on the host, with the container's own cgroup in it.
fn old_groups(root: BorrowedFd<'_>, mount: &Mount, groups: &[(String, OwnedFd)]) -> Step<()> {
    let target = Path::new(&mount.target);
    let what = || format!("mount {}", mount.target);
    let folder = mount_api::new_mount("tmpfs", "mode=755", mount.flags & !libc::MS_RDONLY).context(what)?;
    put(root, target, CreateKind::Directory, folder.as_fd())?;
    let read_only = if mount.access == Access::ReadWrite { 0 } else { libc::MOUNT_ATTR_RDONLY };
    let set = mount_api::attributes(mount.flags) | read_only;
    for (name, group) in groups {
        mount_api::change(group.as_fd(), MountScope::Top, Change { set, ..Change::default() }).context(what)?;
        put(root, &target.join(name), CreateKind::Directory, group.as_fd())?;
        for part in name.split(',').filter(|part| part != name) {
            // `cpu` and `cpuacct` are links to `cpu,cpuacct`.
            symlinkat(name.as_str(), &folder, part).context(what)?;
        }
    }
    mount_api::change(folder.as_fd(), MountScope::Top, Change { set: read_only, ..Change::default() }).context(what)
}

/// Masks paths: a file by `/dev/null`, a directory by an empty tmpfs. Missing paths are skipped.
pub(super) fn mask(root: BorrowedFd<'_>, paths: &[String]) -> Step<()> {
    let mut empty: Option<OwnedFd> = None;
    for path in paths {
        let what = || format!("mask {path}");
        let Some(target) = present(root, path)? else { continue };
        let is_directory = FileType::from_raw_mode(rustix::fs::fstat(&target).context(what)?.st_mode).is_dir();
        let cover = match &empty {
            _ if !is_directory => null().context(what)?,
            Some(shown) => mount_api::clone_at(shown.as_fd(), MountScope::Top).context(what)?,
            None => mount_api::new_mount("tmpfs", "size=0,nr_inodes=1", libc::MS_RDONLY).context(what)?,
        };
        mount_api::attach(cover.as_fd(), target.as_fd()).context(what)?;
        if is_directory && empty.is_none() {
            empty = Some(cover); // one tmpfs masks all directories
        }
    }
    Ok(())
}

/// The host's `/dev/null`: the container's may be anything.
fn null() -> io::Result<OwnedFd> {
    let null = mount_api::clone_path(Path::new("/dev/null"), MountScope::Top)?;
    let found = rustix::fs::fstat(&null)?;
    let is_null = FileType::from_raw_mode(found.st_mode).is_char_device() && found.st_rdev == rustix::fs::makedev(1, 3);
    if is_null { Ok(null) } else { Err(io::Error::other("/dev/null of the host is not the null device")) }
}

/// Makes paths read-only, with all submounts.
pub(super) fn protect(root: BorrowedFd<'_>, paths: &[String]) -> Step<()> {
    for path in paths {
        let what = || format!("remount {path} read-only");
        let Some(target) = present(root, path)? else { continue };
        let copy = mount_api::clone_at(target.as_fd(), MountScope::Tree).context(what)?;
        let change = Change { set: libc::MOUNT_ATTR_RDONLY, ..Change::default() };
        mount_api::change(copy.as_fd(), MountScope::Tree, change).context(what)?;
        mount_api::attach(copy.as_fd(), target.as_fd()).context(what)?;
    }
    Ok(())
}

fn present(root: BorrowedFd<'_>, path: &str) -> Step<Option<OwnedFd>> {
    match in_root::open(root, Path::new(path)) {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(error) => Err(error).context(|| format!("open {path}")),
    }
}

/// Pivots into the root and detaches the old root.
pub(super) fn pivot(root: BorrowedFd<'_>, is_shared: bool) -> Step<()> {
    rustix::process::fchdir(root).context(|| "change to root directory")?;
    rustix::process::pivot_root(".", ".").context(|| "pivot_root")?;
    // The old root is stacked on the new one now, and no change of it may propagate to the host.
    umount2(".", MntFlags::MNT_DETACH).context(|| "unmount old root")?;
    rustix::process::chdir("/").context(|| "change to root directory")?;
    let propagation = if is_shared { libc::MS_SHARED } else { libc::MS_SLAVE };
    mount_api::change_root(propagation, MountScope::Top).context(|| "set propagation of the root mount")
}
