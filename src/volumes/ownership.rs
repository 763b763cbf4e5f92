//! Gives a volume to the pod's group. Blocking. Behaviour: spec 07 §10.
//!
//! Children come before their directory, so that the root's mode says that the work was finished.
//! Links are never followed: the owner of a file outside must not change.

use std::{ffi::OsStr, io, os::unix::ffi::OsStrExt, path::Path};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, chmodat, chownat, openat, statat};
use tracing::debug;

/// What the group may do with the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupAccess {
    /// Read and write.
    ReadWrite,
    /// Read.
    ReadOnly,
}

impl GroupAccess {
    fn mode(self) -> u32 {
        match self {
            Self::ReadWrite => 0o660,
            Self::ReadOnly => 0o440,
        }
    }
}

/// The pod's fsGroup; `None` where it is unset or no group ID.
pub fn group_of(pod: &crate::pod::Pod) -> Option<u32> {
    let group = pod.spec().security_context.as_ref()?.fs_group?;
    u32::try_from(group).ok()
}

/// Walks a whole tree. What cannot be changed is skipped, as the reference does.
///
/// # Errors
/// If the tree cannot be walked.
pub fn apply(root: &Path, group: u32, access: GroupAccess) -> io::Result<()> {
    let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a path of an entry"));
    };
    let parent = openat(CWD, parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    entry(&parent, name, Gid::from_raw(group), access)
}

fn entry(parent: impl std::os::fd::AsFd, name: &OsStr, group: Gid, access: GroupAccess) -> io::Result<()> {
    let parent = parent.as_fd();
    let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let mut bits = access.mode();
    if kind == FileType::Directory {
        bits |= 0o2110;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let here = openat(parent, name, flags, Mode::empty())?;
        for child in Dir::read_from(&here)? {
            let child = child?;
            let name = child.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                entry(&here, OsStr::from_bytes(name), group, access)?;
            }
        }
    }
    if let Err(e) = chownat(parent, name, None, Some(group), AtFlags::SYMLINK_NOFOLLOW) {
        debug!(name = %name.to_string_lossy(), err = %e, "Changing the group failed");
    }
    if kind != FileType::Symlink {
        // After the change of group, which clears the set-group-ID bit.
        let mode = Mode::from_raw_mode((stat.st_mode & 0o7777) | bits);
        if let Err(e) = chmodat(parent, name, mode, AtFlags::empty()) {
            debug!(name = %name.to_string_lossy(), err = %e, "Changing the mode failed");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    };

    #[test]
    fn the_group_gets_everything_but_what_links_point_to() {
        // AC-07-28
        let dir = tempfile::tempdir().expect("a directory");
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir_all(root.join("sub")).expect("directories");
        for path in [root.join("sub/file"), outside.clone()] {
            fs::write(&path, "x").expect("a file");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
        }
        symlink(&outside, root.join("link")).expect("a link");
        let own = fs::metadata(dir.path()).expect("metadata").gid();
        apply(&root, own, GroupAccess::ReadWrite).expect("applied");
        let mode = |path: &Path| fs::metadata(path).expect("metadata").mode() & 0o7777;
        assert_eq!(mode(&root.join("sub/file")), 0o660);
        assert_eq!(mode(&root.join("sub")) & 0o2770, 0o2770);
        assert_eq!(mode(&outside), 0o600);
        fs::set_permissions(root.join("sub/file"), fs::Permissions::from_mode(0o600)).expect("a mode");
        apply(&root, own, GroupAccess::ReadOnly).expect("applied");
        assert_eq!(mode(&root.join("sub/file")), 0o640);
    }
}
