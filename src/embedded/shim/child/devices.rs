//! Device nodes and links in a container's `/dev` (spec 09a §8.4).
//!
//! In a user namespace nobody may make nodes that work: the helper makes them on the host, on the tmpfs where the root
//! is put together, and they are bound one by one.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, Uid, chmodat, chownat, makedev, mknodat, symlinkat, unlinkat},
    io::Errno,
};

use super::{
    join::on_host,
    told::{Step, Told, failure},
};
use crate::{
    embedded::shim::plan::{Device, IdMap},
    sys::{
        in_root::{self, Missing},
        mount_api::{self, Reach},
    },
};

/// Links that every `/dev` of ours has.
const LINKS: [(&str, &str); 6] = [
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("core", "/proc/kcore"),
];

/// Makes nodes on the host, owned as the container sees it; relative to the working directory, the stage.
pub(super) fn stage(devices: &[Device], users: (IdMap, IdMap)) -> Step<Vec<OwnedFd>> {
    let mut staged = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let name = PathBuf::from(format!("device-{index}"));
        let (uid, gid) = (on_host(device.uid, Some(users.0)), on_host(device.gid, Some(users.1)));
        let owner = uid.zip(gid).ok_or_else(|| failure(format!("{}: its owner is not mapped", device.path)))?;
        node(CWD, &name, device, owner).told(|| format!("make {}", device.path))?;
        staged.push(mount_api::clone_path(&name, Reach::Top).told(|| format!("take {}", device.path))?);
    }
    Ok(staged)
}

/// Puts devices into the root: those staged, or new ones.
pub(super) fn install(root: BorrowedFd<'_>, devices: &[Device], staged: Option<&[OwnedFd]>) -> Step<()> {
    for (index, device) in devices.iter().enumerate() {
        let path = Path::new(&device.path);
        match staged.and_then(|staged| staged.get(index)) {
            Some(mount) => {
                let target =
                    in_root::open_or_make(root, path, Missing::File).told(|| format!("make {}", device.path))?;
                mount_api::attach(mount.as_fd(), target.as_fd()).told(|| format!("mount {}", device.path))?;
            }
            None => {
                let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(failure(format!("{} is no path of a device", device.path)));
                };
                let folder = in_root::open_or_make(root, folder, Missing::Directory)
                    .told(|| format!("make the directory of {}", device.path))?;
                replace(folder.as_fd(), Path::new(name), device).told(|| format!("make {}", device.path))?;
            }
        }
    }
    Ok(())
}

/// A node that is there already, of the image or of a mount, is not to be trusted.
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
        other => return Err(io::Error::other(format!("{other:?} is no kind of device"))),
    };
    let mode = Mode::from_raw_mode(device.mode & 0o7777);
    let (major, minor) = device.numbers;
    mknodat(folder, name, kind, mode, makedev(major, minor))?;
    chmodat(folder, name, mode, AtFlags::empty())?;
    chownat(folder, name, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}

/// Makes the links of `/dev`, where nothing stands in their place.
pub(super) fn link(root: BorrowedFd<'_>) -> Step<()> {
    let folder = in_root::open_or_make(root, Path::new("/dev"), Missing::Directory).told(|| "make /dev")?;
    for (name, target) in LINKS {
        match symlinkat(target, &folder, name) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error).told(|| format!("make /dev/{name}")),
        }
    }
    Ok(())
}

/// Shows the terminal as `/dev/console`.
pub(super) fn console(root: BorrowedFd<'_>, slave: &OwnedFd) -> Step<()> {
    let target = in_root::open_or_make(root, Path::new("/dev/console"), Missing::File).told(|| "make /dev/console")?;
    let mount = mount_api::clone_at(slave.as_fd(), Reach::Top).told(|| "take the terminal as /dev/console")?;
    mount_api::attach(mount.as_fd(), target.as_fd()).told(|| "mount /dev/console")
}
