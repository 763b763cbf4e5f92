//! Atomic writer: publishes a set of files at once, so that readers never see a mixture of versions.
//!
//! Blocking. Implements spec 07 §8 exactly, because programs watch `..data`.
//!
//! ```text
//! dir/ ..2026_05_04_03_02_01.1234567890/{a,sub/b}    real files
//!      ..data -> ..2026_05_04_03_02_01.1234567890
//!      a -> ..data/a      sub -> ..data/sub           (first path element only)
//! ```
//!
//! Improves on upstream (spec 07 §17): a failed write keeps the old version and leaves no temporary files, leftovers of
//! a crash are removed, and a published volume is never torn down.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, fchown, symlink},
    path::{Path, PathBuf},
};

use jiff::{Timestamp, tz::TimeZone};
use tracing::debug;

use berth_sys::{
    beneath::{self, OpenedEntry},
    tree_removal::remove_tree,
};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// File to publish.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FileProjection {
    /// Content in bytes.
    pub data: Vec<u8>,
    /// Exact mode bits, independent of the umask.
    pub mode: u32,
    /// UID of the owner; `None` keeps the agent's own.
    pub owner: Option<u32>,
}

/// Files by path relative to the volume directory.
pub type Payload = BTreeMap<String, FileProjection>;

/// Error of a write; the previous version stays published.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Invalid path.
    #[error("{0}")]
    Path(String),
    /// A system call failed.
    #[error("{action} {}: {cause}", path.display())]
    Io {
        /// Attempted action.
        action: &'static str,
        /// Path that the action was applied to.
        path: PathBuf,
        /// Error of the system call.
        cause: io::Error,
    },
}

/// Result of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteOutcome {
    /// A new version was published.
    Published,
    /// The published files were already equal to the payload.
    Unchanged,
}

/// Publishes the payload in `dir`; `own` sets owners and modes of the whole volume before the switch.
///
/// # Errors
/// If a path is invalid, or a system call fails before the new version is in place.
pub fn write(
    dir: &Path,
    payload: &Payload,
    own: impl Fn(&Path) -> io::Result<()>,
    now: Timestamp,
) -> Result<WriteOutcome, WriteError> {
    let payload = validated(payload)?;
    let old = current(dir);
    let stale = match &old {
        Some(old) => stale_paths(&dir.join(old), &payload).map_err(failed("reading", dir))?,
        None => BTreeSet::new(),
    };
    let needed = old.is_none() || !stale.is_empty() || differs(dir, old.as_deref(), &payload);
    if needed {
        publish(dir, &payload, own, now)?;
    }
    // Runs even if nothing was written: an earlier write may have crashed before this step.
    let first: BTreeSet<&OsStr> =
        payload.keys().filter_map(|path| path.components().next()).map(|c| c.as_os_str()).collect();
    link_first_elements(dir, &first)?;
    clean(dir, &first);
    Ok(if needed { WriteOutcome::Published } else { WriteOutcome::Unchanged })
}

/// Whether any version is published.
pub fn is_published(dir: &Path) -> bool {
    current(dir).is_some()
}

/// Returns a file of the published version; `None` if it does not exist, if a symlink is in the path, or if it has more
/// than `longest` bytes.
pub fn read(dir: &Path, path: &str, longest: u64) -> Option<Vec<u8>> {
    let version = current(dir)?;
    let OpenedEntry::File(file) = beneath::open(dir, &version.join(path)).ok()? else { return None };
    let mut data = Vec::new();
    let read = file.take(longest.saturating_add(1)).read_to_end(&mut data).ok()?;
    (u64::try_from(read).ok()? <= longest).then_some(data)
}

fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> WriteError {
    let path = path.to_owned();
    move |cause| WriteError::Io { action, path: path.clone(), cause }
}

/// Writes a new version beside the old one, then switches `..data` to it.
fn publish(
    dir: &Path,
    payload: &BTreeMap<PathBuf, &FileProjection>,
    own: impl Fn(&Path) -> io::Result<()>,
    now: Timestamp,
) -> Result<(), WriteError> {
    let name = version_name(now);
    let version = dir.join(&name);
    let attempt = || -> Result<(), WriteError> {
        fs::create_dir(&version).map_err(failed("creating", &version))?;
        let mode = Permissions::from_mode(0o755);
        fs::set_permissions(&version, mode).map_err(failed("changing the mode of", &version))?;
        payload.iter().try_for_each(|(path, content)| write_file(&version, path, content))?;
        own(dir).map_err(failed("changing the owner of", dir))?;
        let new = dir.join(NEW_DATA);
        remove_file(&new).map_err(failed("removing", &new))?;
        symlink(&name, &new).map_err(failed("linking", &new))?;
        fs::rename(&new, dir.join(DATA)).map_err(failed("renaming", &new))
    };
    attempt().inspect_err(|_| {
        let _ = remove_file(&dir.join(NEW_DATA))
            .inspect_err(|e| debug!(err = %e, "Failed to remove link of failed update"));
        let _ =
            remove_tree(&version).inspect_err(|e| debug!(err = %e, "Failed to remove data directory of failed update"));
    })
}

fn write_file(version: &Path, path: &Path, content: &FileProjection) -> Result<(), WriteError> {
    // Nearly all files are at the top level of the version.
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let parent = version.join(parent);
        DirBuilder::new().recursive(true).mode(0o777).create(&parent).map_err(failed("creating", &parent))?;
    }
    let path = &version.join(path);
    let io = failed("writing", path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(&io)?;
    file.write_all(&content.data).map_err(&io)?;
    // Independent of the umask.
    file.set_permissions(Permissions::from_mode(content.mode)).map_err(&io)?;
    match content.owner {
        Some(owner) => fchown(&file, Some(owner), None).map_err(failed("changing the owner of", path)),
        None => Ok(()),
    }
}

fn link_first_elements(dir: &Path, first: &BTreeSet<&OsStr>) -> Result<(), WriteError> {
    for name in first {
        let link = dir.join(name);
        if fs::symlink_metadata(&link).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            symlink(Path::new(DATA).join(name), &link).map_err(failed("linking", &link))?;
        }
    }
    Ok(())
}

/// Removes unreferenced versions (the previous one and those of crashes) and the writer's own symlinks to removed
/// files. Keeps everything that anyone else put into the volume, and follows no symlink.
fn clean(dir: &Path, first: &BTreeSet<&OsStr>) {
    let current = current(dir);
    let new = dir.join(NEW_DATA);
    let log_failure = |path: &Path, removed: io::Result<()>| {
        if let Err(e) = removed {
            debug!(path = %path.display(), err = %e, "Failed to remove stale data");
        }
    };
    log_failure(&new, remove_file(&new));
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let is_version = matches!(name.as_encoded_bytes(), [b'.', b'.', digit, ..] if digit.is_ascii_digit());
        if is_version {
            if Some(Path::new(&name)) != current.as_deref() {
                log_failure(&path, remove_tree(&path));
            }
        } else if !first.contains(name.as_os_str())
            && fs::read_link(&path).is_ok_and(|target| target == Path::new(DATA).join(&name))
        {
            log_failure(&path, remove_file(&path));
        }
    }
}

/// Returns the directory name of the published version; `None` if a symlink is in its place.
pub fn current(dir: &Path) -> Option<PathBuf> {
    let target = fs::read_link(dir.join(DATA)).ok()?;
    let mut parts = target.components();
    let is_name = matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(_)), None));
    let is_there = || fs::symlink_metadata(dir.join(&target)).is_ok_and(|meta| meta.is_dir());
    if is_name && is_there() { Some(target) } else { None }
}

/// Returns old paths that are neither new paths nor their parents.
fn stale_paths(old: &Path, payload: &BTreeMap<PathBuf, &FileProjection>) -> io::Result<BTreeSet<PathBuf>> {
    let keep: BTreeSet<&Path> = payload.keys().flat_map(|path| path.ancestors()).collect();
    let (mut found, mut todo) = (BTreeSet::new(), vec![PathBuf::new()]);
    while let Some(relative) = todo.pop() {
        let entries = match fs::read_dir(old.join(&relative)) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        for entry in entries {
            let entry = entry?;
            let path = relative.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                todo.push(path.clone());
            }
            if !keep.contains(path.as_path()) {
                found.insert(path);
            }
        }
    }
    Ok(found)
}

fn differs(dir: &Path, old: Option<&Path>, payload: &BTreeMap<PathBuf, &FileProjection>) -> bool {
    let Some(old) = old.map(|old| dir.join(old)) else { return true };
    payload.iter().any(|(path, content)| fs::read(old.join(path)).ok().as_ref() != Some(&content.data))
}

fn version_name(now: Timestamp) -> String {
    let now = now.to_zoned(TimeZone::UTC);
    format!("..{}.{:010}", now.strftime("%Y_%m_%d_%H_%M_%S"), rand::random::<u32>())
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn validated(payload: &Payload) -> Result<BTreeMap<PathBuf, &FileProjection>, WriteError> {
    payload.iter().map(|(path, content)| Ok((clean_path(path)?, content))).collect()
}

/// Returns the path without repeated slashes and `.` elements.
fn clean_path(path: &str) -> Result<PathBuf, WriteError> {
    let refuse = |text: String| Err(WriteError::Path(format!("invalid path: {text}")));
    if path.is_empty() {
        return refuse("must not be empty: \"\"".to_owned());
    }
    if path.starts_with('/') {
        return refuse(format!("must be relative path: {path}"));
    }
    if path.len() > 4096 {
        return refuse("must be less than or equal to 4096 characters".to_owned());
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if parts.contains(&"..") {
        return refuse(format!("must not contain '..': {path}"));
    }
    if parts.iter().any(|part| part.len() > 255) {
        return refuse("filenames must be less than or equal to 255 characters".to_owned());
    }
    match parts.first() {
        None => refuse(format!("must not be empty: {path:?}")),
        Some(first) if first.starts_with("..") => refuse(format!("must not start with '..': {path}")),
        Some(_) => Ok(parts.iter().collect()),
    }
}

#[cfg(test)]
mod tests;
