//! Network namespaces: run code in one, and bind one to a file (as `ip netns` does).
//!
//! Entering a namespace affects one thread, so the work runs on a thread of its own that ends afterwards: pool threads
//! never change their namespace.

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
/// Stack size, bytes: enough for a few system calls.
const STACK: usize = 256 * 1024;

/// Runs a function in a network namespace, on a thread of its own. Blocks until it is done.
///
/// # Errors
/// The error of entering the namespace, or of the function.
pub fn within<T: Send>(namespace: BorrowedFd<'_>, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let body = || {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            act()
        };
        let spawned =
            thread::Builder::new().name("pod-network".to_owned()).stack_size(STACK).spawn_scoped(scope, body)?;
        spawned.join().unwrap_or_else(|_| Err(io::Error::other("thread in the network namespace panicked")))
    })
}

/// Opens the namespace that a file is bound to.
///
/// # Errors
/// The error of opening; `EINVAL` if the file is not a namespace.
pub fn open_file(path: &Path) -> io::Result<OwnedFd> {
    let fd = open(path, OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW, Mode::empty())?;
    if fstatfs(&fd)?.filesystem_type() != NSFS {
        return Err(Errno::EINVAL.into());
    }
    Ok(fd)
}

/// Binds a namespace to a file. A file bound to another namespace is replaced.
///
/// # Errors
/// The kernel's error; no file is left then.
pub fn bind_file(path: &Path, namespace: BorrowedFd<'_>) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    unbind_file(path)?;
    OpenOptions::new().write(true).create_new(true).mode(0o444).open(path)?;
    let source = format!("/proc/thread-self/fd/{}", namespace.as_fd().as_raw_fd());
    let none: Option<&str> = None;
    mount(Some(source.as_str()), path, none, MsFlags::MS_BIND, none).map_err(|e| {
        // The mount error matters more.
        let _ = fs::remove_file(path);
        e.into()
    })
}

/// Unmounts and deletes the file of a namespace. A missing file is success.
///
/// # Errors
/// The kernel's error.
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

/// Whether a namespace is bound to the file.
pub fn is_bound(path: &Path) -> bool {
    open_file(path).is_ok()
}
