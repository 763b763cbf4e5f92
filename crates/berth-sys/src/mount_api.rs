//! File-descriptor mount API: fsopen, fsmount, open_tree, move_mount, and mount_setattr.
//!
//! A detached mount propagates nowhere and disappears with its descriptor. Implements spec 09 D7.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use nix::libc;
use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
    },
};

/// Scope of a mount operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MountScope {
    /// Only the mount itself.
    Top,
    /// The mount and all submounts.
    Tree,
}

/// Clones the mount at a path as a detached mount; follows symbolic links.
///
/// # Errors
/// The kernel's error.
pub fn clone_path(path: &Path, reach: MountScope) -> io::Result<OwnedFd> {
    Ok(open_tree(CWD, path, clone_flags(reach))?)
}

/// Clones the mount at an `O_PATH` descriptor as a detached mount.
///
/// # Errors
/// The kernel's error; `EINVAL` if it belongs to another mount namespace.
pub fn clone_at(at: BorrowedFd<'_>, reach: MountScope) -> io::Result<OwnedFd> {
    Ok(open_tree(at, "", clone_flags(reach) | OpenTreeFlags::AT_EMPTY_PATH)?)
}

fn clone_flags(reach: MountScope) -> OpenTreeFlags {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if reach == MountScope::Tree { flags | OpenTreeFlags::AT_RECURSIVE } else { flags }
}

/// Creates a detached mount of a new file system: its type, options as `mount(8)` spells them, and `MS_*` flags.
///
/// # Errors
/// The kernel's error.
pub fn new_mount(kind: &str, data: &str, flags: u64) -> io::Result<OwnedFd> {
    new_mount_of(kind, kind, data, flags)
}

/// As [`new_mount`], with a source: a device, or a text for the mount table.
///
/// # Errors
/// The kernel's error.
pub fn new_mount_of(kind: &str, source: &str, data: &str, flags: u64) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Shown in mount tables; a file system type without a source rejects it.
    let _ignored = fsconfig_set_string(&context, "source", source);
    if flags & libc::MS_RDONLY != 0 {
        // Also for the file system: the device must not be written either.
        let _ignored = fsconfig_set_flag(&context, "ro");
    }
    for option in data.split(',').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some((key, value)) => fsconfig_set_string(&context, key, value)?,
            None => fsconfig_set_flag(&context, option)?,
        }
    }
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::from_bits_retain(u32::try_from(attributes(flags)).unwrap_or_default());
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Attaches a detached mount at `target`.
///
/// # Errors
/// The kernel's error.
pub fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", target, "", flags)?)
}

/// Mount attributes to change.
#[derive(Clone, Copy, Default, Debug)]
pub struct Change<'a> {
    /// `MOUNT_ATTR_*` bits to set; see [`attributes`].
    pub set: u64,
    /// `MS_PRIVATE`, `MS_SLAVE`, or `MS_SHARED`; 0 for no change.
    pub propagation: u64,
    /// User namespace of an idmapped mount.
    pub ids: Option<BorrowedFd<'a>>,
}

/// Changes the attributes of a mount (`mount_setattr`, Linux 5.12).
///
/// # Errors
/// The kernel's error.
pub fn change(mount: BorrowedFd<'_>, reach: MountScope, change: Change<'_>) -> io::Result<()> {
    let mut attr =
        libc::mount_attr { attr_set: change.set, attr_clr: 0, propagation: change.propagation, userns_fd: 0 };
    if let Some(ids) = change.ids {
        attr.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attr.userns_fd = u64::try_from(ids.as_raw_fd()).unwrap_or_default(); // an open descriptor is never negative
    }
    // The access time modes are one field of several bits: the old value must be cleared.
    if attr.attr_set & libc::MOUNT_ATTR__ATIME != 0 {
        attr.attr_clr |= libc::MOUNT_ATTR__ATIME;
    }
    let reach = if reach == MountScope::Tree { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty string, `attr` a complete struct of the given size; both outlive the call, and the
    // descriptors are open.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | reach,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Converts `MS_*` bits to `MOUNT_ATTR_*` bits; bits without a counterpart are dropped.
pub fn attributes(flags: u64) -> u64 {
    const PAIRS: [(u64, u64); 7] = [
        (libc::MS_RDONLY, libc::MOUNT_ATTR_RDONLY),
        (libc::MS_NOSUID, libc::MOUNT_ATTR_NOSUID),
        (libc::MS_NODEV, libc::MOUNT_ATTR_NODEV),
        (libc::MS_NOEXEC, libc::MOUNT_ATTR_NOEXEC),
        (libc::MS_NOATIME, libc::MOUNT_ATTR_NOATIME),
        (libc::MS_STRICTATIME, libc::MOUNT_ATTR_STRICTATIME),
        (libc::MS_NODIRATIME, libc::MOUNT_ATTR_NODIRATIME),
    ];
    PAIRS.into_iter().filter(|(flag, _)| flags & flag != 0).fold(0, |all, (_, attribute)| all | attribute)
}

/// Changes the propagation of `/` or of all mounts of this mount namespace: `MS_SLAVE`, `MS_PRIVATE`, or `MS_SHARED`.
///
/// # Errors
/// The kernel's error.
pub fn change_root(propagation: u64, reach: MountScope) -> io::Result<()> {
    let root =
        rustix::fs::open("/", rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    change(root.as_fd(), reach, Change { propagation, ..Change::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_mount_become_attributes() {
        assert_eq!(attributes(libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC), 0b1110);
        assert_eq!(attributes(libc::MS_RDONLY | libc::MS_STRICTATIME), 0x21);
        assert_eq!(attributes(libc::MS_RELATIME | libc::MS_BIND | libc::MS_REC), 0);
    }
}
