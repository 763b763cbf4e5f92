//! Mounts as descriptors: taken from a path, changed while nobody sees them, then attached.
//!
//! What is not yet attached propagates nowhere and is gone with its descriptor. Spec 09 D7.

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

/// How far a call reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// One mount.
    Top,
    /// It and all mounts below.
    Tree,
}

/// Copies what is mounted at a path, links followed.
///
/// # Errors
/// What the kernel says.
pub fn clone_path(path: &Path, reach: Reach) -> io::Result<OwnedFd> {
    Ok(open_tree(CWD, path, clone_flags(reach))?)
}

/// Copies what an `O_PATH` descriptor leads to.
///
/// # Errors
/// What the kernel says; `EINVAL` where it belongs to another mount namespace.
pub fn clone_at(at: BorrowedFd<'_>, reach: Reach) -> io::Result<OwnedFd> {
    Ok(open_tree(at, "", clone_flags(reach) | OpenTreeFlags::AT_EMPTY_PATH)?)
}

fn clone_flags(reach: Reach) -> OpenTreeFlags {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if reach == Reach::Tree { flags | OpenTreeFlags::AT_RECURSIVE } else { flags }
}

/// A new file system that is mounted nowhere yet: its type, its options as `mount(8)` spells them, its `MS_*` flags.
///
/// # Errors
/// What the kernel says.
pub fn new_mount(kind: &str, data: &str, flags: u64) -> io::Result<OwnedFd> {
    new_mount_of(kind, kind, data, flags)
}

/// [`new_mount`] of that source: a device, or a word for the mount table.
///
/// # Errors
/// What the kernel says.
pub fn new_mount_of(kind: &str, source: &str, data: &str, flags: u64) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Shown in mount tables; a type that takes none says so.
    let _ignored = fsconfig_set_string(&context, "source", source);
    if flags & libc::MS_RDONLY != 0 {
        // Of the file system too: a device must not be written to either.
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

/// Attaches a mount on what `target` leads to.
///
/// # Errors
/// What the kernel says.
pub fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", target, "", flags)?)
}

/// What is changed about mounts.
#[derive(Clone, Copy, Default, Debug)]
pub struct Change<'a> {
    /// `MOUNT_ATTR_*` that are set; see [`attributes`].
    pub set: u64,
    /// `MS_PRIVATE`, `MS_SLAVE` or `MS_SHARED`; 0 leaves it.
    pub propagation: u64,
    /// The user namespace whose ids are shown.
    pub ids: Option<BorrowedFd<'a>>,
}

/// Changes the mount a descriptor leads to (`mount_setattr`, Linux 5.12).
///
/// # Errors
/// What the kernel says.
pub fn change(mount: BorrowedFd<'_>, reach: Reach, change: Change<'_>) -> io::Result<()> {
    let mut attr =
        libc::mount_attr { attr_set: change.set, attr_clr: 0, propagation: change.propagation, userns_fd: 0 };
    if let Some(ids) = change.ids {
        attr.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attr.userns_fd = u64::try_from(ids.as_raw_fd()).unwrap_or_default(); // an open descriptor is never negative
    }
    // They are one field of several bits: what was there has to go first.
    if attr.attr_set & libc::MOUNT_ATTR__ATIME != 0 {
        attr.attr_clr |= libc::MOUNT_ATTR__ATIME;
    }
    let reach = if reach == Reach::Tree { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty string, `attr` a whole record of the size that is told; both outlive the call, and
    // the descriptors are open.
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

/// `MS_*` bits as `MOUNT_ATTR_*` bits; what has no counterpart is left out.
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

/// Changes how mounts below `/` of this mount namespace travel: `MS_SLAVE`, `MS_PRIVATE` or `MS_SHARED`.
///
/// # Errors
/// What the kernel says.
pub fn change_root(propagation: u64, reach: Reach) -> io::Result<()> {
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
