//! Applies the entries of a layer's tar stream to its directory and enforces limits.
//!
//! Nothing outside the directory changes, whatever the layer contains, and its author learns nothing about this
//! machine. Entries that need a missing privilege (device nodes in a nested container) are omitted with a warning; a
//! failure that security depends on is an error. Implements spec 09b §5.2.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use tracing::warn;

use self::deletions::{is_at_or_below, is_whiteout};
use super::{
    decompressor::{self, DecompressedStream},
    limits::{LayerFormat, Totals, UnpackPolicy},
    path,
    root::{self, NameInDirectory, PathMode, RootDir},
    whiteouts::{NameKind, classify},
};
use crate::images::{
    digest::{Digest, HashingReader},
    error::{ImageError, ImageErrorKind as ErrorKind, IoContext},
    tar::reader::{TarEntry, TarEntryKind, TarReader},
    tar_split::RecipeRecorder,
};
use berth_sys::write_back;

/// Maximum user or group ID.
const HIGHEST_ID: u64 = i32::MAX as u64;
/// Bytes written between two checks of free space.
const FREE_SPACE_CHECK_BYTES: u64 = 64 << 20;
/// Buffer for file content, bytes.
const BUFFER: usize = 256 << 10;
/// Minimum size of a file for early write-back, bytes: the layer is synced at the end and waits less then.
const EARLY: u64 = 256 << 10;

/// Result of unpacking a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerSummary {
    /// Digest of the uncompressed stream.
    pub diff_id: Digest,
    /// Total size of files, bytes.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
    /// Length of the uncompressed stream, bytes.
    pub stream: u64,
    /// Whether the recipe can restore the stream from the files.
    pub is_noted: bool,
}

/// Access and modification time: seconds and nanoseconds each.
type Times = ((i64, u32), (i64, u32));
type Stream<'a> = RecipeRecorder<HashingReader<Box<dyn DecompressedStream + 'a>>>;

/// Unpacks a layer of any known compression into an existing directory.
///
/// # Errors
/// The stream is invalid or exceeds the limits, or a write fails. The directory is partially filled then.
pub fn apply<R: Read>(packed: R, into: &Path, policy: &UnpackPolicy) -> Result<LayerSummary, ImageError> {
    apply_noting(packed, into, policy, None)
}

/// Like [`apply`]; also writes the recipe that restores the stream.
///
/// # Errors
/// As for [`apply`].
pub fn apply_noting<R: Read>(
    packed: R,
    into: &Path,
    policy: &UnpackPolicy,
    recipe: Option<File>,
) -> Result<LayerSummary, ImageError> {
    let root = RootDir::open(into).attempt("open layer directory")?;
    let place = UnpackTarget { root, way: PathMode::Proc, alive: &mut || {} };
    apply_in(decompressor::decompress_inline(packed)?, place, policy, recipe)
}

/// Directory that receives the files of a layer, with a progress callback.
pub struct UnpackTarget<'a> {
    /// The open directory.
    pub root: RootDir,
    /// How names are passed to system calls without an `…at` form.
    pub way: PathMode,
    /// Called repeatedly while the unpack makes progress.
    pub alive: &'a mut dyn FnMut(),
}

/// Like [`apply_noting`], for an uncompressed stream.
///
/// # Errors
/// As for [`apply`].
pub fn apply_in<'a>(
    stream: Box<dyn DecompressedStream + 'a>,
    into: UnpackTarget<'a>,
    policy: &'a UnpackPolicy,
    recipe: Option<File>,
) -> Result<LayerSummary, ImageError> {
    let stream = HashingReader::new(stream);
    let mut layer = Layer::new(into, policy, TarReader::new(RecipeRecorder::new(stream, recipe)?));
    layer.run()?;
    layer.finish_folders()?;
    let totals = layer.totals;
    let (stream, is_noted) = layer.drain()?.finish()?;
    let length = stream.length();
    let (bytes, entries) = (totals.bytes, totals.entries);
    Ok(LayerSummary { diff_id: stream.finish(), bytes, entries, stream: length, is_noted })
}

struct Layer<'a> {
    root: RootDir,
    way: PathMode,
    alive: &'a mut dyn FnMut(),
    policy: &'a UnpackPolicy,
    tar: TarReader<Stream<'a>>,
    totals: Totals,
    unchecked_bytes: u64,
    /// Times of directories by path; set last, because creating entries changes them.
    folders: BTreeMap<Vec<u8>, Times>,
    /// Paths created by this layer in a merged tree, spared by its deletions. An overlay layer contains nothing else.
    made: BTreeSet<Vec<u8>>,
    buffer: Vec<u8>,
}

impl<'a> Layer<'a> {
    fn new(into: UnpackTarget<'a>, policy: &'a UnpackPolicy, tar: TarReader<Stream<'a>>) -> Self {
        Self {
            root: into.root,
            way: into.way,
            alive: into.alive,
            policy,
            tar,
            totals: Totals::default(),
            unchecked_bytes: 0,
            folders: BTreeMap::new(),
            made: BTreeSet::new(),
            buffer: vec![0; BUFFER],
        }
    }

    fn run(&mut self) -> Result<(), ImageError> {
        loop {
            // Limits first: skipped content counts too.
            self.check()?;
            let Some(entry) = self.tar.next_entry().map_err(|error| self.broken(&error))? else { return Ok(()) };
            self.totals.entries += 1;
            let shown = String::from_utf8_lossy(entry.name.get(..200).unwrap_or(&entry.name)).into_owned();
            self.entry(&entry).map_err(|error| error.within(format!("unpack {shown:?}")))?;
        }
    }

    /// An error in the archive structure.
    fn broken(&self, error: &crate::images::tar::TarError) -> ImageError {
        ImageError::bad_content(format!("invalid layer: {error}"))
    }

    fn check(&mut self) -> Result<(), ImageError> {
        (self.alive)();
        let stream = self.tar.get_ref().inner();
        self.policy.bounds.check(self.totals, stream.inner().packed(), stream.length())
    }

    fn entry(&mut self, entry: &TarEntry) -> Result<(), ImageError> {
        if entry.uid > HIGHEST_ID || entry.gid > HIGHEST_ID {
            return Err(ImageError::bad_content(format!("owner {}:{} out of range", entry.uid, entry.gid)));
        }
        let parts = path::parts(&entry.name)?;
        let Some((last, before)) = parts.split_last() else { return self.root_itself(entry) };
        if classify(last) == NameKind::Ignored {
            return Ok(());
        }
        let parent = self.parent(before)?;
        let key = |name: &[u8]| [before, &[name]].concat().join(&b'/');
        match classify(last) {
            NameKind::Opaque => self.opaque(&parent, &before.join(&b'/')),
            NameKind::Removed(name) => {
                let at = NameInDirectory { parent: parent.as_fd(), name: OsStr::from_bytes(name) };
                self.whiteout(at, &key(name))
            }
            _ => {
                let at = NameInDirectory { parent: parent.as_fd(), name: OsStr::from_bytes(last) };
                self.ordinary(entry, at, key(last))
            }
        }
    }

    fn root_itself(&mut self, entry: &TarEntry) -> Result<(), ImageError> {
        if entry.kind != TarEntryKind::Directory {
            return Err(ImageError::bad_content("root is not a directory"));
        }
        let itself = self.root.resolve(b"", OFlags::RDONLY | OFlags::DIRECTORY).attempt("open root")?;
        let at = NameInDirectory { parent: itself.as_fd(), name: OsStr::new(".") };
        owner(at, entry)?;
        at.set_mode(entry.mode).attempt("set mode")?;
        self.attributes(at, entry)?;
        self.folders.insert(Vec::new(), (entry.atime.unwrap_or(entry.mtime), entry.mtime));
        Ok(())
    }

    fn ordinary(&mut self, entry: &TarEntry, at: NameInDirectory<'_>, key: Vec<u8>) -> Result<(), ImageError> {
        let is_folder = entry.kind == TarEntryKind::Directory;
        let stat = at.stat().attempt("stat")?;
        let was_removed = stat.as_ref().is_some_and(is_whiteout);
        let there = stat.map(|stat| FileType::from_raw_mode(stat.st_mode));
        // Resolved before anything is removed: a link to itself must not lose the file.
        let target = match &entry.kind {
            TarEntryKind::HardLink(target) => Some(self.link_target(target)?),
            _ => None,
        };
        if there.is_some() && !(is_folder && there == Some(FileType::Directory)) {
            if let Some((folder, name)) = &target {
                let same =
                    NameInDirectory { parent: folder.as_fd(), name: OsStr::from_bytes(name) }.stat().ok().flatten();
                let here = at.stat().ok().flatten();
                if same.zip(here).is_some_and(|(a, b)| (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)) {
                    return Ok(());
                }
            }
            at.remove().attempt("remove existing entry")?;
            self.folders.retain(|path, _| !is_at_or_below(path, &key));
        }
        match &entry.kind {
            TarEntryKind::Regular => self.file(entry, at, &key)?,
            TarEntryKind::HardLink(_) => {
                let (folder, name) = target.ok_or_else(|| ImageError::bad_content("hardlink target not found"))?;
                rustix::fs::linkat(&folder, OsStr::from_bytes(&name), at.parent, at.name, AtFlags::empty())
                    .attempt("link")?;
            }
            TarEntryKind::Symlink(text) => symlink(text, at)?,
            TarEntryKind::Directory => root::make_folder(at, 0o755).attempt("create directory")?,
            TarEntryKind::Fifo => node(at, FileType::Fifo, 0)?,
            TarEntryKind::Character(major, minor) => {
                if !self.device(at, FileType::CharacterDevice, *major, *minor)? {
                    return Ok(());
                }
            }
            TarEntryKind::Block(major, minor) => {
                if !self.device(at, FileType::BlockDevice, *major, *minor)? {
                    return Ok(());
                }
            }
        }
        if !matches!(entry.kind, TarEntryKind::HardLink(_)) {
            self.describe(entry, at, &key)?;
        }
        if was_removed && is_folder {
            self.set_opaque(at)?;
        }
        if self.policy.form == LayerFormat::Merged {
            self.made.insert(key);
        }
        Ok(())
    }

    /// Sets owner, then mode (a change of owner clears setuid), attributes, times.
    fn describe(&mut self, entry: &TarEntry, at: NameInDirectory<'_>, key: &[u8]) -> Result<(), ImageError> {
        owner(at, entry)?;
        if !matches!(entry.kind, TarEntryKind::Symlink(_)) {
            at.set_mode(entry.mode).attempt("set mode")?;
        }
        self.attributes(at, entry)?;
        let times = (entry.atime.unwrap_or(entry.mtime), entry.mtime);
        if entry.kind == TarEntryKind::Directory {
            self.folders.insert(key.to_vec(), times);
            return Ok(());
        }
        at.set_times(times.0, times.1).attempt("set times")
    }

    fn file(&mut self, entry: &TarEntry, at: NameInDirectory<'_>, key: &[u8]) -> Result<(), ImageError> {
        self.totals.bytes = self.totals.bytes.saturating_add(entry.length());
        // Reject by declared size, before anything is written.
        self.check()?;
        let mut file = root::create_file(at).attempt("create file")?;
        match &entry.sparse {
            None => {
                self.tar.get_mut().file(key, entry.size);
                self.piece(&mut file, entry.size)?;
            }
            Some(map) => {
                for (offset, length) in &map.pieces {
                    file.seek(SeekFrom::Start(*offset)).attempt("seek")?;
                    self.piece(&mut file, *length)?;
                }
                file.set_len(map.size).attempt("set length")?;
            }
        }
        Ok(())
    }

    fn piece(&mut self, file: &mut File, length: u64) -> Result<(), ImageError> {
        let mut left = length;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
            let window = self.buffer.get_mut(..most).unwrap_or_default();
            let count = self.tar.read(window).map_err(|error| unreadable(&error))?;
            if count == 0 {
                return Err(ImageError::bad_content("invalid layer: unexpected end of archive"));
            }
            file.write_all(window.get(..count).unwrap_or_default()).attempt("write")?;
            left = left.saturating_sub(count as u64);
            self.check_free_space(count as u64)?;
        }
        if length >= EARLY {
            write_back::begin(file);
        }
        Ok(())
    }

    fn check_free_space(&mut self, more: u64) -> Result<(), ImageError> {
        self.unchecked_bytes += more;
        if self.unchecked_bytes < FREE_SPACE_CHECK_BYTES {
            return Ok(());
        }
        self.unchecked_bytes = 0;
        self.check()?;
        let disk = rustix::fs::fstatvfs(self.root.fd()).attempt("stat filesystem")?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < self.policy.keep_free {
            return Err(ImageError::new(ErrorKind::ResourceExhausted, "layer exceeds limits: not enough disk space"));
        }
        Ok(())
    }

    /// The directory and name of a hard link's target.
    fn link_target(&self, target: &[u8]) -> Result<(OwnedFd, Vec<u8>), ImageError> {
        let missing = || ImageError::bad_content("hardlink target not found");
        let parts = path::parts(target)?;
        let (last, before) = parts.split_last().ok_or_else(missing)?;
        let folder =
            self.root.resolve(&before.join(&b'/'), OFlags::RDONLY | OFlags::DIRECTORY).map_err(|_| missing())?;
        let stat = NameInDirectory { parent: folder.as_fd(), name: OsStr::from_bytes(last) }.stat().ok().flatten();
        let stat = stat.ok_or_else(missing)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Err(ImageError::bad_content("hardlink target is a directory")),
            _ if is_whiteout(&stat) => Err(missing()),
            _ => Ok((folder, last.to_vec())),
        }
    }

    /// Creates a device node; returns false where that is not permitted.
    fn device(&self, at: NameInDirectory<'_>, kind: FileType, major: u32, minor: u32) -> Result<bool, ImageError> {
        if (major, minor) == (0, 0) && kind == FileType::CharacterDevice {
            // An overlay would take it for a whiteout.
            warn!(name = %at.name.to_string_lossy(), "Skipped device 0:0 of a layer");
            return Ok(false);
        }
        match rustix::fs::mknodat(
            at.parent,
            at.name,
            kind,
            Mode::from_raw_mode(0o600),
            rustix::fs::makedev(major, minor),
        ) {
            Err(Errno::PERM) => {
                warn!(name = %at.name.to_string_lossy(), "Skipped device of a layer: permission denied");
                Ok(false)
            }
            other => other.map(|()| true).attempt("create device"),
        }
    }

    fn attributes(&self, at: NameInDirectory<'_>, entry: &TarEntry) -> Result<(), ImageError> {
        for (name, value) in &entry.attributes {
            // These control overlayfs; a layer must not set them.
            if name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.") || name.contains(&0) {
                continue;
            }
            let shown = String::from_utf8_lossy(name).into_owned();
            match at.set_attribute(self.way, name, value) {
                Ok(()) => {}
                Err(error) if name == b"security.capability" => {
                    return Err(ImageError::io(format!("set attribute {shown}"), &error.into()));
                }
                Err(Errno::OPNOTSUPP) => {
                    warn!(attribute = %shown, "Skipped extended attribute of a layer: not supported")
                }
                Err(Errno::PERM) if name.starts_with(b"user.") && entry.kind != TarEntryKind::Regular => {
                    warn!(attribute = %shown, "Skipped extended attribute of a layer: only valid on regular files");
                }
                Err(Errno::PERM) if name.starts_with(b"trusted.") || name.starts_with(b"security.") => {
                    warn!(attribute = %shown, "Skipped extended attribute of a layer: permission denied");
                }
                Err(error) => return Err(ImageError::io(format!("set attribute {shown}"), &error.into())),
            }
        }
        Ok(())
    }

    /// Sets the times of directories, deepest first.
    fn finish_folders(&mut self) -> Result<(), ImageError> {
        for (path, (atime, mtime)) in std::mem::take(&mut self.folders).into_iter().rev() {
            let Ok(folder) = self.root.resolve(&path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW) else {
                // A later entry replaced the directory.
                continue;
            };
            (self.alive)();
            rustix::fs::futimens(&folder, &root::times(atime, mtime)).attempt("set times of directory")?;
        }
        Ok(())
    }

    /// Reads the bytes after the archive, because the digest covers the whole stream.
    fn drain(mut self) -> Result<Stream<'a>, ImageError> {
        let mut rest = std::mem::take(&mut self.buffer);
        let (totals, bounds) = (self.totals, self.policy.bounds);
        let mut stream = self.tar.into_inner();
        loop {
            (self.alive)();
            match stream.read(&mut rest).map_err(|error| unreadable(&error))? {
                0 => return Ok(stream),
                _ => bounds.check(totals, stream.inner().inner().packed(), stream.inner().length())?,
            }
        }
    }
}

fn unreadable(error: &io::Error) -> ImageError {
    ImageError::bad_content(format!("invalid layer: {error}"))
}

fn owner(at: NameInDirectory<'_>, entry: &TarEntry) -> Result<(), ImageError> {
    // Both were checked against the maximum ID.
    let id = |value: u64| u32::try_from(value).unwrap_or(u32::MAX >> 1);
    at.set_owner(id(entry.uid), id(entry.gid)).attempt("set owner")
}

fn symlink(text: &[u8], at: NameInDirectory<'_>) -> Result<(), ImageError> {
    if text.contains(&0) {
        return Err(ImageError::bad_content("link target contains a NUL byte"));
    }
    rustix::fs::symlinkat(OsStr::from_bytes(text), at.parent, at.name).attempt("create link")
}

fn node(at: NameInDirectory<'_>, kind: FileType, device: u64) -> Result<(), ImageError> {
    rustix::fs::mknodat(at.parent, at.name, kind, Mode::from_raw_mode(0o600), device).attempt("create device node")
}

mod deletions;

#[cfg(test)]
mod tests;
