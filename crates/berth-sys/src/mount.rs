//! Mounts, bind mounts, shared propagation, and unmounts at paths of this mount namespace.
//!
//! Uses the new mount API: a mount has its options before it is visible, and no path is resolved twice. A kernel
//! without it (or a seccomp filter that blocks it) falls back to `mount(2)`. Blocks: call it from the blocking pool;
//! the kernel may wait for a disk or a server. Implements spec 07 §14.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use nix::libc;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, openat, statx},
    io::Errno,
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, mount_remount,
    },
};

use super::{
    mount_api::{self, Change, MountScope},
    mount_table::{self, Mount},
};

/// Per-mount options with their `MS_*` flags; all others belong to the file system.
const FLAGS: [(&str, u64); 13] = [
    ("ro", libc::MS_RDONLY),
    ("rw", 0),
    ("defaults", 0),
    ("nosuid", libc::MS_NOSUID),
    ("nodev", libc::MS_NODEV),
    ("noexec", libc::MS_NOEXEC),
    ("noatime", libc::MS_NOATIME),
    ("nodiratime", libc::MS_NODIRATIME),
    ("relatime", libc::MS_RELATIME),
    ("strictatime", libc::MS_STRICTATIME),
    ("suid", 0),
    ("dev", 0),
    ("exec", 0),
];

/// Parameters of a new mount.
#[derive(Clone, Copy, Debug)]
pub struct NewFileSystem<'a> {
    /// File system type, e.g. `tmpfs`.
    pub kind: &'a str,
    /// Source: a device, or any text for a file system without one.
    pub source: &'a str,
    /// Options as `mount(8)` takes them.
    pub options: &'a [String],
}

/// Mounts a new file system on a directory.
///
/// # Errors
/// The kernel's error; `EINVAL` for an option that the file system does not know.
pub fn file_system(new: NewFileSystem<'_>, target: &Path) -> io::Result<()> {
    let (flags, data) = split(new.options);
    let made = mount_api::new_mount_of(new.kind, new.source, &data, flags).and_then(|mount| {
        let at = open(target)?;
        mount_api::attach(mount.as_fd(), at.as_fd())
    });
    match made {
        Err(e) if is_unknown(&e) => {
            let text = |text: &str| CString::new(text).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
            let (source, kind, data) = (text(new.source)?, text(new.kind)?, text(&data)?);
            let flags = MountFlags::from_bits_retain(u32::try_from(flags).unwrap_or_default());
            Ok(rustix::mount::mount(source.as_c_str(), target, kind.as_c_str(), flags, data.as_c_str())?)
        }
        other => other,
    }
}

/// Bind-mounts the target of an open descriptor on a path, without its submounts.
///
/// # Errors
/// The kernel's error.
pub fn bind(source: impl AsFd, target: &Path, options: &[String]) -> io::Result<()> {
    let (flags, _) = split(options);
    let made = mount_api::clone_at(source.as_fd(), MountScope::Top).and_then(|mount| {
        let set = mount_api::attributes(flags);
        if set != 0 {
            mount_api::change(mount.as_fd(), MountScope::Top, Change { set, ..Change::default() })?;
        }
        let at = open(target)?;
        mount_api::attach(mount.as_fd(), at.as_fd())
    });
    match made {
        Err(e) if is_unknown(&e) => bind_by_path(source, target, flags),
        other => other,
    }
}

/// Ensures that future mounts below a directory propagate to and from other mount namespaces: if its mount is not
/// shared, bind-mounts the directory recursively on itself and makes that mount shared. Returns whether this was
/// necessary. The path must not contain symbolic links.
///
/// # Errors
/// The kernel's error.
pub fn share(directory: &Path) -> io::Result<bool> {
    share_with(directory, &mount_table::read()?)
}

fn share_with(directory: &Path, table: &[Mount]) -> io::Result<bool> {
    if mount_table::containing_mount(table, directory).is_some_and(|mount| mount.is_shared) {
        return Ok(false);
    }
    let made = mount_api::clone_path(directory, MountScope::Tree).and_then(|mount| {
        let shared = Change { propagation: libc::MS_SHARED, ..Change::default() };
        mount_api::change(mount.as_fd(), MountScope::Tree, shared)?;
        mount_api::attach(mount.as_fd(), open(directory)?.as_fd())
    });
    match made {
        Err(e) if is_unknown(&e) => {
            mount_bind_recursive(directory, directory)?;
            mount_change(directory, MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
        }
        other => other?,
    }
    Ok(true)
}

/// Bind mount for old kernels: the kernel resolves our own `/proc/self/fd` link, which leads to exactly what was
/// opened.
fn bind_by_path(source: impl AsFd, target: &Path, flags: u64) -> io::Result<()> {
    let link = format!("/proc/self/fd/{}", source.as_fd().as_raw_fd());
    mount_bind(link, target)?;
    if flags == 0 {
        return Ok(());
    }
    let flags = MountFlags::from_bits_retain(u32::try_from(flags).unwrap_or_default());
    // Restrictions of the source stay in force: the kernel refuses to lift them.
    let inherited = inherited(target)?;
    mount_remount(target, MountFlags::BIND | flags | inherited, "").map_err(|e| {
        let _ = unmount(target); // a writable bind mount is worse than none
        e.into()
    })
}

/// Restrictions of an existing mount, as flags for a remount.
///
/// # Errors
/// The kernel's error.
pub fn inherited(at: &Path) -> io::Result<MountFlags> {
    let all = MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC
        | MountFlags::NOATIME
        | MountFlags::NODIRATIME;
    let found = rustix::fs::statvfs(at)?.f_flag.bits();
    Ok(MountFlags::from_bits_retain(u32::try_from(found).unwrap_or_default()) & all)
}

/// Unmounts the topmost mount at a path; success if nothing is mounted there.
///
/// # Errors
/// The kernel's error, `EBUSY` if the mount is in use.
pub fn unmount(target: &Path) -> io::Result<()> {
    match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Lazily unmounts a mount: it ends once nobody uses it. For storage that does not respond.
///
/// # Errors
/// The kernel's error.
pub fn detach(target: &Path) -> io::Result<()> {
    match rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Whether a path is a mount point; contacts no file server.
///
/// # Errors
/// The kernel's error.
pub fn is_mount_point(path: &Path) -> io::Result<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    match statx(CWD, path, flags, StatxFlags::TYPE) {
        Ok(found) if found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            return Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
        }
        Ok(_) | Err(Errno::NOSYS) => {}
        Err(e) => return Err(e.into()),
    }
    let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::fs::lstat(path)?.st_dev != rustix::fs::lstat(parent)?.st_dev)
}

/// Splits options into `MS_*` flags and the remaining options of the file system.
fn split(options: &[String]) -> (u64, String) {
    let (mut flags, mut data) = (0, Vec::new());
    for option in options {
        match FLAGS.iter().find(|(name, _)| name == option) {
            Some((_, flag)) => flags |= flag,
            None => data.push(option.as_str()),
        }
    }
    (flags, data.join(","))
}

fn open(target: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, target, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// Whether the new mount API is missing, blocked, or unknown to the file system type.
fn is_unknown(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [Errno::NOSYS, Errno::PERM, Errno::OPNOTSUPP].iter().any(|errno| Some(errno.raw_os_error()) == code)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn options(all: &[&str]) -> Vec<String> {
        all.iter().map(|option| (*option).to_owned()).collect()
    }

    #[test]
    fn options_are_the_mounts_or_the_file_systems() {
        let parted = split(&options(&["ro", "size=64", "nosuid", "defaults", "noswap"]));
        assert_eq!(parted, (libc::MS_RDONLY | libc::MS_NOSUID, "size=64,noswap".to_owned()));
        assert_eq!(split(&[]), (0, String::new()));
    }

    /// In a mount namespace of its own: not visible outside.
    #[test]
    fn what_is_mounted_in_a_shared_directory_travels() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().canonicalize().expect("it is there");
        let aside = std::thread::spawn(move || {
            use nix::sched::{CloneFlags, unshare};
            if let Err(e) = unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS) {
                return println!("skipped: what_is_mounted_in_a_shared_directory_travels needs root ({e})");
            }
            mount_api::change_root(libc::MS_PRIVATE, MountScope::Tree).expect("private");
            let (root, copy, earlier) = (path.join("root"), path.join("copy"), path.join("root/earlier"));
            for directory in [&root, &copy, &earlier, &root.join("later")] {
                fs::create_dir(directory).expect("makeable");
            }
            let tmpfs = |at: &Path| file_system(NewFileSystem { kind: "tmpfs", source: "tmpfs", options: &[] }, at);
            tmpfs(&earlier).expect("mountable");
            fs::write(earlier.join("file"), "x").expect("writable");
            // The table of the thread: that of the process belongs to another namespace.
            let table = || mount_table::parse(&fs::read("/proc/thread-self/mountinfo").expect("a table"));
            assert!(!mount_table::containing_mount(&table(), &root).expect("in /").is_shared);
            share_with(&root, &table()).expect("shareable");
            assert!(mount_table::containing_mount(&table(), &root).expect("itself").is_shared);
            assert!(earlier.join("file").exists(), "what was mounted before is not hidden");
            // As in a container with bidirectional propagation.
            rustix::mount::mount_bind_recursive(&root, &copy).expect("bindable");
            tmpfs(&root.join("later")).expect("mountable");
            tmpfs(&copy.join("earlier")).expect("mountable");
            let targets: Vec<_> = table().into_iter().map(|mount| mount.target).collect();
            assert!(targets.contains(&copy.join("later")), "to it: {targets:?}");
            assert_eq!(targets.iter().filter(|target| **target == earlier).count(), 3, "and from it: {targets:?}");
            let before = table().len();
            assert!(!share_with(&root, &table()).expect("as it is"), "once is enough");
            assert_eq!(table().len(), before);
        });
        aside.join().expect("no panic");
    }

    #[test]
    fn what_is_mounted_is_seen_bound_and_unmounted() {
        let dir = tempfile::tempdir().expect("a directory");
        let (volume, bound) = (dir.path().join("volume"), dir.path().join("bound"));
        fs::create_dir(&volume).expect("makeable");
        fs::create_dir(&bound).expect("makeable");
        let new = NewFileSystem { kind: "tmpfs", source: "tmpfs", options: &options(&["size=65536", "nosuid"]) };
        match file_system(new, &volume) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return println!("skipped: needs root"),
            other => other.expect("mountable"),
        }
        assert!(is_mount_point(&volume).expect("seen") && !is_mount_point(&bound).expect("seen"));
        fs::write(volume.join("file"), "x").expect("writable");
        let source = open(&volume).expect("there");
        for by_path in [false, true] {
            if by_path {
                bind_by_path(&source, &bound, libc::MS_RDONLY).expect("bindable");
            } else {
                bind(&source, &bound, &options(&["ro"])).expect("bindable");
            }
            assert_eq!(fs::read_to_string(bound.join("file")).expect("the same"), "x", "{by_path}");
            let refused = fs::write(bound.join("file"), "y").expect_err("read-only");
            assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem, "{by_path}");
            unmount(&bound).expect("unmounted");
            assert!(!bound.join("file").exists(), "{by_path}");
        }
        drop(source);
        let file = fs::File::open(volume.join("file")).expect("readable");
        assert!(unmount(&volume).is_err(), "in use");
        detach(&volume).expect("taken away");
        assert!(!volume.join("file").exists());
        unmount(&volume).expect("nothing there");
        drop(file);
    }

    #[test]
    fn an_unknown_option_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let odd = options(&["no-such-option=1"]);
        let refused = file_system(NewFileSystem { kind: "tmpfs", source: "x", options: &odd }, dir.path());
        let code = refused.expect_err("refused").raw_os_error();
        // Without privileges the options are not checked.
        let expected = [Errno::INVAL, Errno::PERM].map(|errno| Some(errno.raw_os_error()));
        assert!(expected.contains(&code), "{code:?}");
    }
}
