//! Copies image content at a volume's path out of the image's layers. Blocking.
//!
//! Several layers are combined by a detached overlay mount, which ends with its descriptor. Implements spec 09a §8.2.

use std::{
    fmt::Write,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount,
        fsopen,
    },
};

use super::{
    error::{ImageError, IoContext},
    tree_copy::{self, Budget},
    unpacker::root::RootDir,
};

/// Copies a directory of these layers, topmost first, into an existing directory; returns whether the layers have it.
/// Owners, modes, and attributes are preserved, also those of the directory itself.
///
/// # Errors
/// An I/O error; otherwise as [`tree_copy::copy_tree`].
pub fn fill(layers: &[PathBuf], userxattr: bool, path: &str, to: &Path, budget: Budget) -> Result<bool, ImageError> {
    let what = || format!("copy volume {path:?} of the image");
    let (first, _mounted) = match layers {
        [] => return Ok(false),
        [only] => (only.clone(), None),
        several => {
            let mounted = overlay(several, userxattr).attempt(what())?;
            (by_descriptor(&mounted), Some(mounted))
        }
    };
    let root = RootDir::open(&first).attempt(what())?;
    match root.resolve(path.trim_matches('/').as_bytes(), OFlags::PATH | OFlags::DIRECTORY) {
        Ok(found) => tree_copy::copy_tree(&by_descriptor(&found), to, budget).map(|()| true),
        // The volume starts empty.
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Err(error) => Err(io::Error::from(error)).attempt(what()),
    }
}

fn by_descriptor(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/thread-self/fd/{}", fd.as_raw_fd()))
}

/// Read-only overlay of layers, topmost first.
fn overlay(layers: &[PathBuf], userxattr: bool) -> io::Result<OwnedFd> {
    let open = |path: &PathBuf| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, Mode::empty())
    };
    let opened = layers.iter().map(open).collect::<Result<Vec<OwnedFd>, _>>()?;
    // Descriptors are shorter than paths; all of them must fit into one page.
    let mut lower = String::new();
    for fd in &opened {
        let colon = if lower.is_empty() { "" } else { ":" };
        let _ = write!(lower, "{colon}/proc/self/fd/{}", fd.as_raw_fd()); // writing to a String cannot fail
    }
    let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "lowerdir", lower.as_str())?;
    if userxattr {
        fsconfig_set_flag(&fs, "userxattr")?;
    }
    fsconfig_create(&fs)?;
    Ok(fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_RDONLY)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    };

    use super::*;

    #[test]
    fn a_volume_begins_with_what_the_image_has() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped a_volume_begins_with_what_the_image_has: needs root: mounts an overlay, changes owners");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        for folder in ["low/real/sub", "top/real", "to", "one", "none", "out"] {
            fs::create_dir_all(at(folder)).expect("made");
        }
        fs::write(at("low/real/old"), "old").expect("written");
        fs::write(at("low/real/both"), "below").expect("written");
        fs::write(at("top/real/both"), "above").expect("written");
        // A whiteout.
        let gone = nix::sys::stat::SFlag::S_IFCHR;
        nix::sys::stat::mknod(&at("top/real/sub"), gone, nix::sys::stat::Mode::empty(), 0).expect("made");
        chown(at("top/real"), Some(1000), Some(1001)).expect("changed");
        fs::set_permissions(at("top/real"), fs::Permissions::from_mode(0o2750)).expect("changed");
        symlink("/real", at("top/data")).expect("made");
        symlink("../../../../../../out", at("top/away")).expect("made");
        let both = [at("top"), at("low")];
        match fill(&both, false, "/data/", &at("to"), Budget::UNLIMITED) {
            Ok(found) => assert!(found),
            Err(error) => {
                println!("skipped a_volume_begins_with_what_the_image_has: no overlays here: {error}");
                return;
            }
        }
        assert_eq!(fs::read_to_string(at("to/both")).expect("there"), "above");
        assert_eq!(fs::read_to_string(at("to/old")).expect("there"), "old");
        assert!(!at("to/sub").exists(), "the upper layer deleted it");
        let stat = fs::metadata(at("to")).expect("there");
        assert_eq!((stat.uid(), stat.gid(), stat.mode() & 0o7777), (1000, 1001, 0o2750));
        assert!(
            fill(&both[1..], false, "real", &at("one"), Budget::UNLIMITED).expect("one layer")
                && at("one/sub").is_dir()
        );
        for path in ["missing", "real/old", "away"] {
            assert!(!fill(&both, false, path, &at("none"), Budget::UNLIMITED).expect("nothing there"), "{path}");
        }
        assert!(!fill(&[], false, "real", &at("none"), Budget::UNLIMITED).expect("no layers"));
        assert_eq!(fs::read_dir(at("none")).expect("there").count(), 0);
    }
}
