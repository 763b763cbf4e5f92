//! Whiteouts and opaque directories of a layer.
//!
//! An overlay represents deletions by device nodes and attributes; in a merged tree they are carried out.
//! Implements spec 09b §5.2.

use std::{
    ffi::OsStr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use rustix::{
    fs::{FileType, OFlags, Stat},
    io::Errno,
};

use super::{Layer, node};
use crate::images::{
    error::{ImageError, IoContext},
    unpacker::{
        limits::LayerFormat,
        root::{self, NameInDirectory},
    },
};

impl Layer<'_> {
    pub(super) fn parent(&self, parts: &[&[u8]]) -> Result<OwnedFd, ImageError> {
        let parent_error = |error: Errno| match error {
            Errno::NOTDIR => ImageError::bad_content("parent is not a directory"),
            other => ImageError::io("open parent directory", &other.into()),
        };
        match self.root.folder(parts) {
            Err(Errno::NOTDIR) if self.replace_whiteout(parts)? => self.root.folder(parts).map_err(parent_error),
            other => other.map_err(parent_error),
        }
    }

    /// Replaces a whiteout on the path by an opaque directory, if there is one: the layer deleted the name and creates
    /// it again.
    fn replace_whiteout(&self, parts: &[&[u8]]) -> Result<bool, ImageError> {
        for end in 1..=parts.len() {
            let (Some(name), Some(before)) = (parts.get(end - 1), parts.get(..end - 1)) else { continue };
            let Ok(folder) = self.root.resolve(&before.join(&b'/'), OFlags::RDONLY | OFlags::DIRECTORY) else {
                return Ok(false);
            };
            let at = NameInDirectory { parent: folder.as_fd(), name: OsStr::from_bytes(name) };
            if at.stat().attempt("stat parent directory")?.as_ref().is_some_and(is_whiteout) {
                at.remove().attempt("remove whiteout")?;
                root::make_folder(at, 0o755).attempt("create parent directory")?;
                self.set_opaque(at)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Deletes a name of lower layers: entries of this layer stay, and an existing directory becomes opaque.
    pub(super) fn whiteout(&mut self, at: NameInDirectory<'_>, key: &[u8]) -> Result<(), ImageError> {
        if self.policy.form == LayerFormat::Merged {
            return self.remove_lower(at, key);
        }
        match at.stat().attempt("stat")? {
            None => node(at, FileType::CharacterDevice, 0),
            Some(stat) if is_folder(stat.st_mode) => self.set_opaque(at),
            Some(_) => Ok(()),
        }
    }

    pub(super) fn opaque(&mut self, folder: &OwnedFd, key: &[u8]) -> Result<(), ImageError> {
        if self.policy.form != LayerFormat::Merged {
            let at = NameInDirectory { parent: folder.as_fd(), name: OsStr::new(".") };
            return self.set_opaque(at);
        }
        self.clear(folder, key)
    }

    /// Removes the entries of lower layers from a directory of a merged tree.
    fn clear(&mut self, folder: &OwnedFd, key: &[u8]) -> Result<(), ImageError> {
        for name in root::names(folder).attempt("list directory")? {
            let mut below = key.to_vec();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(name.as_bytes());
            self.remove_lower(NameInDirectory { parent: folder.as_fd(), name: &name }, &below)?;
        }
        Ok(())
    }

    /// Removes the entries of lower layers at a path of a merged tree; spares those of this layer.
    fn remove_lower(&mut self, at: NameInDirectory<'_>, key: &[u8]) -> Result<(), ImageError> {
        let has_made = self.made.contains(key)
            || self.made.range(child_prefix(key)..).next().is_some_and(|path| is_at_or_below(path, key));
        if !has_made {
            return at.remove().attempt("remove entry of a lower layer");
        }
        match at.open_folder() {
            Ok(folder) => self.clear(&folder, key),
            Err(_) => Ok(()),
        }
    }

    pub(super) fn set_opaque(&self, at: NameInDirectory<'_>) -> Result<(), ImageError> {
        match self.policy.form {
            LayerFormat::Merged => Ok(()),
            LayerFormat::Overlay { userxattr } => {
                let name: &[u8] = if userxattr { b"user.overlay.opaque" } else { b"trusted.overlay.opaque" };
                at.set_attribute(self.way, name, b"y").attempt("mark directory opaque")
            }
        }
    }
}

pub(super) fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

fn is_folder(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::Directory
}

fn child_prefix(key: &[u8]) -> Vec<u8> {
    [key, b"/"].concat()
}

pub(super) fn is_at_or_below(path: &[u8], folder: &[u8]) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}
