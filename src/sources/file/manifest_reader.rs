//! Reads static pod manifests from the file system. Blocking.
//!
//! A file whose stamp has not changed since the last read is not read again, one whose bytes have not
//! changed is not parsed again.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use inotify::{Inotify, WatchMask};
use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::{
    FileConfig,
    directory_watcher::{DirectoryChange, PreparedWatch},
};
use crate::sources::{
    MANIFEST_LIMIT,
    manifest_decoder::{self, DecodeError, Manifest},
    references::ReferenceRule,
    static_pod::{self, ManifestOrigin},
};
use berth_types::{Pod, PodSource};

/// A valid manifest, with the digest of its bytes.
#[derive(Clone, Debug)]
pub struct KnownFile {
    digest: [u8; 32],
    stamp: Option<Stamp>,
    /// The pod of the manifest.
    pub pod: Arc<Pod>,
}

/// File metadata that changes whenever the content does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    /// Device, inode, size.
    what: (u64, u64, u64),
    /// Time of the last change of content or inode: seconds, nanoseconds.
    changed: (i64, i64),
}

/// File times have the granularity of kernel ticks: a file that changed within this many seconds can
/// change again without a new time.
const TICK: i64 = 2;

impl Stamp {
    /// `None` for a file that was changed just now, or in the future.
    fn settled(meta: &fs::Metadata) -> Option<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
        let is_settled = i64::try_from(now).is_ok_and(|now| meta.ctime() < now - TICK);
        is_settled
            .then(|| Self { what: (meta.dev(), meta.ino(), meta.size()), changed: (meta.ctime(), meta.ctime_nsec()) })
    }
}

/// All valid manifests by path; the set has the order of the paths.
pub type Files = BTreeMap<PathBuf, KnownFile>;

/// A rejected manifest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rejection {
    /// Path of the manifest.
    pub path: PathBuf,
    /// Label `reason` of the metric.
    pub reason: &'static str,
    /// Error text.
    pub text: String,
}

/// Result of reading the file system.
#[derive(Debug, Default)]
pub struct ReadResult {
    /// Valid manifests.
    pub files: Files,
    /// Rejected manifests.
    pub rejected: Vec<Rejection>,
    /// Subdirectories and special files.
    pub skipped: Vec<(PathBuf, &'static str)>,
    /// Whether the path itself does not exist.
    pub missing: bool,
    /// Device and inode of the directory to watch.
    pub directory: Option<(u64, u64)>,
}

/// The path could not be read; the previous state is kept.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The path is neither a file nor a directory.
    #[error("path is not a directory or file")]
    OtherType,
    /// The I/O error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The path is a single file, and that is rejected.
    #[error("{0}")]
    File(String),
}

/// Reads the manifests of one path for one node.
#[derive(Clone, Debug)]
pub struct ManifestReader {
    path: Arc<Path>,
    node_name: Arc<str>,
    references: ReferenceRule,
}

impl ManifestReader {
    /// Makes the path absolute, without a trailing `/`.
    pub fn new(config: &FileConfig) -> Self {
        // `components` drops the trailing slash; without a working directory the path stays relative.
        let path: PathBuf = config.path.components().collect();
        let path = std::path::absolute(&path).unwrap_or(path);
        Self { path: path.into(), node_name: config.node_name.clone(), references: config.references }
    }

    /// The configured path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads all manifests.
    ///
    /// # Errors
    /// The path cannot be read, so the manifests are unknown.
    pub fn list(&self, known: &Files) -> Result<ReadResult, ReadError> {
        let meta = match fs::metadata(&self.path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(ReadResult { missing: true, ..ReadResult::default() });
            }
            Err(e) => return Err(e.into()),
        };
        let mut result = ReadResult::default();
        if meta.is_dir() {
            result.directory = Some((meta.dev(), meta.ino()));
            for entry in fs::read_dir(&self.path)? {
                let path = self.path.join(entry?.file_name());
                if !is_ignored(&path) {
                    self.entry(path, known, &mut result);
                }
            }
        } else if meta.is_file() {
            result.directory = self.path.parent().and_then(|dir| fs::metadata(dir).ok()).map(|m| (m.dev(), m.ino()));
            let file = self.read(&self.path, &meta, known.get(&*self.path)).map_err(|r| ReadError::File(r.text))?;
            result.files.insert(self.path.to_path_buf(), file);
        } else {
            return Err(ReadError::OtherType);
        }
        Ok(result)
    }

    fn entry(&self, path: PathBuf, known: &Files, result: &mut ReadResult) {
        match fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => result.skipped.push((path, "not recursing into directory")),
            Ok(meta) if !meta.is_file() => result.skipped.push((path, "not a directory or file")),
            Ok(meta) => match self.read(&path, &meta, known.get(&path)) {
                Ok(file) => {
                    result.files.insert(path, file);
                }
                Err(rejection) => result.rejected.push(rejection),
            },
            Err(e) => result.rejected.push(rejection(&path, "read", &e)),
        }
    }

    /// Reads what the watch reported. A file that became invalid keeps its pod until the next list: it
    /// may be partially written.
    pub fn changed(&self, mut known: Files, noticed: Vec<DirectoryChange>) -> ReadResult {
        let mut result = ReadResult::default();
        for one in noticed {
            match one {
                DirectoryChange::Gone(path) => {
                    known.remove(&path);
                }
                DirectoryChange::Created(path) if is_being_written(&path) => {}
                DirectoryChange::Created(path) | DirectoryChange::Changed(path) => {
                    let mut one = ReadResult::default();
                    self.entry(path, &known, &mut one);
                    known.append(&mut one.files);
                    result.rejected.append(&mut one.rejected);
                    result.skipped.append(&mut one.skipped);
                }
                DirectoryChange::Everything | DirectoryChange::Lost => {}
            }
        }
        result.files = known;
        result
    }

    /// Prepares the watch of the directory, or of the parent directory of a single file, because
    /// replacing the file removes a watch on it. `None` if the path does not exist.
    pub fn watch(&self) -> Option<io::Result<PreparedWatch>> {
        let meta = match fs::metadata(&self.path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
            Err(e) => return Some(Err(e)),
        };
        let (directory, only) = match (meta.is_dir(), self.path.parent(), self.path.file_name()) {
            (false, Some(parent), Some(name)) => (parent, Some(name.to_owned())),
            _ => (&*self.path, None),
        };
        Some(self.prepare(directory, only))
    }

    fn prepare(&self, directory: &Path, only: Option<std::ffi::OsString>) -> io::Result<PreparedWatch> {
        let events = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::ATTRIB
            | WatchMask::MOVED_TO
            | WatchMask::DELETE
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let inotify = Inotify::init()?;
        inotify.watches().add(directory, events)?;
        let meta = fs::metadata(directory)?;
        Ok(PreparedWatch { inotify, directory: directory.to_owned(), identity: (meta.dev(), meta.ino()), only })
    }

    fn read(&self, path: &Path, meta: &fs::Metadata, known: Option<&KnownFile>) -> Result<KnownFile, Rejection> {
        let same = |known: &&KnownFile| known.stamp.is_some() && known.stamp == Stamp::settled(meta);
        if let Some(known) = known.filter(same) {
            return Ok(known.clone());
        }
        let (bytes, stamp) = read_at_most(path).map_err(|e| rejection(path, "read", &e))?;
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        if let Some(known) = known.filter(|known| known.digest == digest) {
            return Ok(KnownFile { stamp, ..known.clone() });
        }
        let location = path.to_string_lossy();
        let not_parsed = |e: DecodeError| Rejection {
            path: path.to_owned(),
            reason: "parse",
            text: format!("{location}: couldn't parse as pod({e}), please check config file"),
        };
        let pod = match manifest_decoder::decode(&bytes).map_err(not_parsed)? {
            Manifest::Pod(pod) => *pod,
            Manifest::List(_) => return Err(not_parsed(DecodeError::List)),
        };
        let origin = ManifestOrigin {
            source: PodSource::File,
            location: &location,
            node_name: &self.node_name,
            references: self.references,
        };
        let pod = static_pod::prepared(pod, origin).map_err(|e| rejection(path, "invalid", &e))?;
        Ok(KnownFile { digest, stamp, pod })
    }
}

fn rejection(path: &Path, reason: &'static str, e: &dyn std::fmt::Display) -> Rejection {
    Rejection { path: path.to_owned(), reason, text: e.to_string() }
}

/// Whether the file is hidden, or a leftover of an editor.
pub fn is_ignored(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.starts_with(b".") || [&b"~"[..], b".swp", b".bak"].iter().any(|end| name.ends_with(end))
}

/// A new regular file is read once its writer closes it; only links are complete when they appear.
fn is_being_written(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.nlink() == 1)
}

/// The bytes, and the file's stamp from before they were read.
fn read_at_most(path: &Path) -> io::Result<(Vec<u8>, Option<Stamp>)> {
    // The file may have been replaced by a FIFO: neither open nor read may wait for a writer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MANIFEST_LIMIT).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) >= MANIFEST_LIMIT {
        return Err(io::Error::other("file exceeds the size limit"));
    }
    Ok((bytes, Stamp::settled(&meta)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_files_and_backups_are_ignored() {
        for name in ["a/.hidden.yaml", "a/x.yaml~", "a/.x.yaml.swp", "a/x.swp", "a/x.yaml.bak"] {
            assert!(is_ignored(Path::new(name)), "{name}");
        }
        for name in ["a/x.yaml", "a/x", "a/x.json", "a/bak"] {
            assert!(!is_ignored(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn a_stamp_is_trusted_only_once_it_is_old() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let meta = || fs::metadata(file.path()).expect("there");
        assert_eq!(Stamp::settled(&meta()), None, "may change again within the tick");
        let old = fs::metadata("/proc/self/exe").expect("this program");
        assert!(Stamp::settled(&old).is_some() || old.ctime() + TICK >= meta().ctime(), "built long ago");
    }

    #[test]
    fn a_slash_at_the_end_is_dropped() {
        let config = FileConfig {
            path: "/etc/manifests//".into(),
            period: std::time::Duration::ZERO,
            node_name: "n".into(),
            references: ReferenceRule::RefuseAll,
        };
        assert_eq!(ManifestReader::new(&config).path().to_str(), Some("/etc/manifests"));
    }
}
