//! Looks up files in stacked layers without mounting them.
//!
//! The result is what overlayfs would show: the topmost layer wins, whiteouts and opaque directories hide lower
//! entries, links resolve inside the root. Used for the few small files read when an image is committed. Blocking.
//! Implements spec 09b §2.

use std::{
    ffi::OsStr,
    io::Read,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::PathBuf,
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
};

use super::{
    record::StoredFile,
    unpacker::root::{NameInDirectory, RootDir},
};

/// Maximum size of a file kept in a record, bytes.
const LONGEST: u64 = 1 << 20;
/// Maximum number of symbolic links in a path.
const MOST_LINKS: usize = 40;

enum MergedEntry {
    File(OwnedFd),
    Link(Vec<u8>),
    Folder,
    Nothing,
}

/// Stacked layer directories, topmost first.
pub struct MergedLayers {
    layers: Vec<RootDir>,
}

impl MergedLayers {
    /// Opens the directories, topmost first.
    ///
    /// # Errors
    /// A directory cannot be opened.
    pub fn open(layers: &[PathBuf]) -> std::io::Result<Self> {
        Ok(Self { layers: layers.iter().map(|path| RootDir::open(path)).collect::<Result<_, _>>()? })
    }

    /// A small file of the root for an image record; an unreadable one counts as missing.
    pub fn small_file(&self, path: &str) -> StoredFile {
        let Some(fd) = self.file(path.as_bytes()) else { return StoredFile::Missing };
        let mut bytes = Vec::new();
        match std::fs::File::from(fd).take(LONGEST + 1).read_to_end(&mut bytes) {
            Err(_) => StoredFile::Missing,
            Ok(length) if length as u64 > LONGEST => StoredFile::TooLong,
            Ok(_) => StoredFile::of(&bytes),
        }
    }

    /// Opens a regular file for reading, following links inside the root.
    pub fn file(&self, path: &[u8]) -> Option<OwnedFd> {
        match self.resolve(path)? {
            MergedEntry::File(fd) => Some(fd),
            _ => None,
        }
    }

    /// Whether the path is a directory, following links inside the root.
    pub fn is_folder(&self, path: &[u8]) -> bool {
        matches!(self.resolve(path), Some(MergedEntry::Folder))
    }

    fn resolve(&self, path: &[u8]) -> Option<MergedEntry> {
        let mut links = 0;
        let mut done: Vec<Vec<u8>> = Vec::new();
        let mut left = components(path);
        while let Some(next) = left.pop() {
            match next.as_slice() {
                b"." => continue,
                b".." => {
                    done.pop();
                    continue;
                }
                _ => done.push(next),
            }
            match self.lookup(&done).ok()? {
                MergedEntry::Folder => {}
                MergedEntry::File(fd) => return left.is_empty().then_some(MergedEntry::File(fd)),
                MergedEntry::Nothing => return None,
                MergedEntry::Link(target) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return None;
                    }
                    done.pop();
                    if target.starts_with(b"/") {
                        done.clear();
                    }
                    left.extend(components(&target));
                }
            }
        }
        Some(MergedEntry::Folder)
    }

    /// The entry of the merged root at a path without symbolic links in its parents.
    fn lookup(&self, path: &[Vec<u8>]) -> Result<MergedEntry, Errno> {
        for layer in &self.layers {
            let (found, hides) = in_layer(layer, path)?;
            if hides || !matches!(found, MergedEntry::Nothing) {
                return Ok(found);
            }
        }
        Ok(MergedEntry::Nothing)
    }
}

/// Components in reverse order, as a stack.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).map(<[u8]>::to_vec).rev().collect()
}

/// One layer's entry at a path, and whether it hides entries of lower layers.
fn in_layer(layer: &RootDir, path: &[Vec<u8>]) -> Result<(MergedEntry, bool), Errno> {
    let mut hides = false;
    let mut folder = layer.resolve(b"", OFlags::RDONLY | OFlags::DIRECTORY)?;
    for (at, part) in path.iter().enumerate() {
        let here = NameInDirectory { parent: folder.as_fd(), name: OsStr::from_bytes(part) };
        let Some(stat) = here.stat()? else { return Ok((MergedEntry::Nothing, hides)) };
        let is_last = at + 1 == path.len();
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                if is_last {
                    return Ok((MergedEntry::Folder, hides));
                }
                let next = here.open_folder()?;
                hides |= is_opaque(&next);
                folder = next;
            }
            FileType::Symlink if is_last => {
                return Ok((
                    MergedEntry::Link(rustix::fs::readlinkat(&folder, here.name, Vec::new())?.into_bytes()),
                    true,
                ));
            }
            FileType::RegularFile if is_last => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                return Ok((MergedEntry::File(rustix::fs::openat(&folder, here.name, flags, Mode::empty())?), true));
            }
            // A whiteout, or a non-directory that hides a lower layer's directory.
            _ => return Ok((MergedEntry::Nothing, true)),
        }
    }
    Ok((MergedEntry::Folder, hides))
}

fn is_opaque(folder: &OwnedFd) -> bool {
    ["trusted.overlay.opaque", "user.overlay.opaque"].iter().any(|name| {
        let mut value = [0u8; 8];
        rustix::fs::fgetxattr(folder, *name, &mut value[..]).is_ok_and(|length| value.get(..length) == Some(b"y"))
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn the_topmost_file_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        for name in ["top/etc", "low/etc", "low/usr/lib", "low/gone"] {
            fs::create_dir_all(at(name)).expect("makeable");
        }
        fs::write(at("low/etc/passwd"), "low").expect("writable");
        fs::write(at("low/etc/group"), "low group").expect("writable");
        fs::write(at("top/etc/passwd"), "top").expect("writable");
        fs::write(at("low/usr/lib/shadow"), "linked").expect("writable");
        symlink("/usr/../usr/lib/shadow", at("top/etc/shadow")).expect("makeable");
        symlink("loop", at("top/etc/loop")).expect("makeable");
        symlink("../../../../usr/lib", at("top/etc/up")).expect("makeable");
        let merged = MergedLayers::open(&[at("top"), at("low")]).expect("there");
        for (path, expected) in [
            ("/etc/passwd", StoredFile::of(b"top")),
            ("etc/group", StoredFile::of(b"low group")),
            ("/etc/shadow", StoredFile::of(b"linked")),
            ("/etc/up/shadow", StoredFile::of(b"linked")),
            ("/etc/loop", StoredFile::Missing),
            ("/etc", StoredFile::Missing),
            ("/etc/passwd/x", StoredFile::Missing),
            ("/nothing", StoredFile::Missing),
        ] {
            assert_eq!(merged.small_file(path), expected, "{path}");
        }
        for (path, expected) in [("etc", true), ("/etc/up", true), ("", true), ("etc/passwd", false), ("x", false)] {
            assert_eq!(merged.is_folder(path.as_bytes()), expected, "{path}");
        }
        fs::write(at("low/etc/long"), vec![b'x'; 2 << 20]).expect("writable");
        assert_eq!(merged.small_file("/etc/long"), StoredFile::TooLong);
    }
}
