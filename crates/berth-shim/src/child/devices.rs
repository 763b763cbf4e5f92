//! Device nodes and symbolic links in a container's `/dev` (spec 09a §8.4).
//!
//! In a user namespace nobody may create working nodes: the helper creates them on the host, on the tmpfs where the
//! root is assembled, and they are bind-mounted one by one.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, chownat, fstat, makedev, mknodat, openat, symlinkat, unlinkat,
    },
    io::Errno,
};

use super::{
    error_context::{ErrorContext, Step, failure},
    process_setup::on_host,
};
use crate::plan::{Device, IdMap};
use berth_sys::{
    in_root::{self, CreateKind},
    mount_api::{self, MountScope},
};

/// Links that every `/dev` created here has.
const LINKS: [(&str, &str); 6] = [
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("core", "/proc/kcore"),
];

/// Creates nodes on the host, owned as mapped for the container; relative to the working directory, the stage.
pub(super) fn stage(devices: &[Device], users: (IdMap, IdMap)) -> Step<Vec<OwnedFd>> {
    let mut staged = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let name = PathBuf::from(format!("device-{index}"));
        let (uid, gid) = (on_host(device.uid, Some(users.0)), on_host(device.gid, Some(users.1)));
        let owner = uid
            .zip(gid)
            .ok_or_else(|| failure(format!("{}: owner is not mapped in the user namespace", device.path)))?;
        node(CWD, &name, device, owner).context(|| format!("create {}", device.path))?;
        staged
            .push(mount_api::clone_path(&name, MountScope::Top).context(|| format!("clone mount of {}", device.path))?);
    }
    Ok(staged)
}

/// Installs devices in the root: the staged ones, or new nodes.
pub(super) fn install(root: BorrowedFd<'_>, devices: &[Device], staged: Option<&[OwnedFd]>) -> Step<()> {
    for (index, device) in devices.iter().enumerate() {
        let path = Path::new(&device.path);
        match staged.and_then(|staged| staged.get(index)) {
            Some(mount) => {
                let target = in_root::open_or_make(root, path, CreateKind::File)
                    .context(|| format!("create {}", device.path))?;
                mount_api::attach(mount.as_fd(), target.as_fd()).context(|| format!("mount {}", device.path))?;
            }
            None => {
                let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(failure(format!("invalid device path {}", device.path)));
                };
                let folder = in_root::open_or_make(root, folder, CreateKind::Directory)
                    .context(|| format!("create directory of {}", device.path))?;
                replace(folder.as_fd(), Path::new(name), device).context(|| format!("create {}", device.path))?;
            }
        }
    }
    Ok(())
}

/// Creates a node and replaces an existing one: a node of the image or of a mount is not trusted.
fn replace(folder: BorrowedFd<'_>, name: &Path, device: &Device) -> io::Result<()> {
    let owner = (device.uid, device.gid);
    match node(folder, name, device, owner) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            unlinkat(folder, name, AtFlags::empty())?;
            node(folder, name, device, owner)
        }
        other => other,
    }
}

fn node(folder: BorrowedFd<'_>, name: &Path, device: &Device, (uid, gid): (u32, u32)) -> io::Result<()> {
    let kind = match device.kind {
        'b' => FileType::BlockDevice,
        'c' | 'u' => FileType::CharacterDevice,
        'p' => FileType::Fifo,
        other => return Err(io::Error::other(format!("unknown device type {other:?}"))),
    };
    let mode = Mode::from_raw_mode(device.mode & 0o7777);
    let (major, minor) = device.numbers;
    let numbers = makedev(major, minor);
    // The umask is empty: the mode is correct from the start.
    mknodat(folder, name, kind, mode, numbers)?;
    // Another container may share the directory and replace the node: only the node itself is changed.
    let made = openat(folder, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&made)?;
    if FileType::from_raw_mode(stat.st_mode) != kind || (kind != FileType::Fifo && stat.st_rdev != numbers) {
        return Err(io::Error::other("replaced during creation"));
    }
    chownat(&made, "", Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?;
    Ok(())
}

/// Creates the links of `/dev`; existing entries are kept.
pub(super) fn link(root: BorrowedFd<'_>) -> Step<()> {
    let folder = in_root::open_or_make(root, Path::new("/dev"), CreateKind::Directory).context(|| "create /dev")?;
    for (name, target) in LINKS {
        match symlinkat(target, &folder, name) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error).context(|| format!("create /dev/{name}")),
        }
    }
    Ok(())
}

/// Bind-mounts the pty slave on `/dev/console`.
pub(super) fn console(root: BorrowedFd<'_>, slave: &OwnedFd) -> Step<()> {
    let target =
        in_root::open_or_make(root, Path::new("/dev/console"), CreateKind::File).context(|| "create /dev/console")?;
    let mount = mount_api::clone_at(slave.as_fd(), MountScope::Top)
        .context(|| "clone mount of the terminal for /dev/console")?;
    mount_api::attach(mount.as_fd(), target.as_fd()).context(|| "mount /dev/console")
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
        sync::atomic::{AtomicBool, Ordering},
    };

    use rustix::fs::{OFlags, RenameFlags, renameat_with};

    use super::*;

    /// Another user of the directory replaces the node by a link to a file of the host while it is created.
    #[test]
    fn a_node_that_is_swapped_for_a_link_changes_no_file_of_the_host() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "needs root");
            return println!("skipped: a_node_that_is_swapped_for_a_link_changes_no_file_of_the_host: needs root");
        }
        let host = tempfile::tempdir().expect("a directory");
        let victim = host.path().join("victim");
        fs::write(&victim, "secret").expect("written");
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).expect("set");
        // On tmpfs, as an emptyDir of medium Memory: there the race is won soon.
        let shared = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let folder = rustix::fs::openat(CWD, shared.path(), OFlags::DIRECTORY, Mode::empty()).expect("open");
        let device =
            Device { path: "/s/dev0".to_owned(), kind: 'c', numbers: (1, 3), mode: 0o666, uid: 65_534, gid: 65_534 };
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (link, node) = (shared.path().join("l"), shared.path().join("dev0"));
                while !over.load(Ordering::Relaxed) {
                    let _ = symlink(&victim, &link); // it may exist still
                    if fs::symlink_metadata(&node).is_ok_and(|found| !found.is_symlink()) {
                        let _ = renameat_with(CWD, &link, CWD, &node, RenameFlags::EXCHANGE); // race lost
                        let _ = fs::remove_file(&node);
                        let _ = fs::remove_file(&link);
                    }
                }
            });
            for _ in 0..20_000 {
                let _ = replace(folder.as_fd(), Path::new("dev0"), &device); // it fails where the race is won
            }
            over.store(true, Ordering::Relaxed);
        });
        let found = fs::metadata(&victim).expect("there");
        assert_eq!((found.mode() & 0o7777, found.uid()), (0o600, 0), "a file of the host was changed");
    }
}
