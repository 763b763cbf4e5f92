//! Network namespaces: entering one, and the file that names it.
//!
//! Only a thread enters a namespace, so that what is to be done there is done on a thread of its own that ends afterwards:
//! threads of pools never change theirs.

use std::{
    fs::{self, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    thread,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns},
    sys::{
        stat::Mode,
        statfs::{FsType, fstatfs},
    },
};

/// `NSFS_MAGIC`.
const NSFS: FsType = FsType(0x6e73_6673);
/// Enough for a few system calls.
const STACK: usize = 256 * 1024;

/// Does something in a namespace, on a thread of its own. Blocks until it is done.
///
/// # Errors
/// What entering says, or what is done.
pub fn within<T: Send>(namespace: BorrowedFd<'_>, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let body = || {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            act()
        };
        let spawned =
            thread::Builder::new().name("pod-network".to_owned()).stack_size(STACK).spawn_scoped(scope, body)?;
        spawned.join().unwrap_or_else(|_| Err(io::Error::other("the thread in the network namespace died")))
    })
}

/// Opens the namespace a file names.
///
/// # Errors
/// What opening says; `EINVAL` where the file names none.
pub fn open_file(path: &Path) -> io::Result<OwnedFd> {
    let fd = open(path, OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW, Mode::empty())?;
    if fstatfs(&fd)?.filesystem_type() != NSFS {
        return Err(Errno::EINVAL.into());
    }
    Ok(fd)
}

/// Lets a file name a namespace. A file that names one already is replaced.
///
/// # Errors
/// What the kernel says; nothing is left then.
pub fn bind_file(path: &Path, namespace: BorrowedFd<'_>) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    unbind_file(path)?;
    OpenOptions::new().write(true).create_new(true).mode(0o444).open(path)?;
    let source = format!("/proc/thread-self/fd/{}", namespace.as_fd().as_raw_fd());
    let none: Option<&str> = None;
    mount(Some(source.as_str()), path, none, MsFlags::MS_BIND, none).map_err(|e| {
        // What counts is why it could not be mounted.
        let _ = fs::remove_file(path);
        e.into()
    })
}

/// Removes such a file. One that is gone is fine.
///
/// # Errors
/// What the kernel says.
pub fn unbind_file(path: &Path) -> io::Result<()> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => break,
            Err(e) => return Err(e.into()),
        }
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Whether a file names a namespace.
pub fn is_bound(path: &Path) -> bool {
    open_file(path).is_ok()
}
