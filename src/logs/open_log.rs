//! Open log file, and lookup of its successor after a rotation.

use std::{
    fs::File,
    io::{self, IoSliceMut},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::io::ReadWriteFlags;

use super::{confined_path::LogLocation, dirs, retention, tail::tail_start};

/// An open log file with its identity on disk.
pub struct OpenLog {
    file: Arc<File>,
    identity: (u64, u64),
}

impl OpenLog {
    /// Opens a regular file in the directory of a pod's logs.
    ///
    /// # Errors
    /// It cannot be opened, or is not a regular file.
    pub async fn open(place: &LogLocation, path: &Path) -> io::Result<Self> {
        let (place, path) = (place.clone(), path.to_owned());
        let opened = tokio::task::spawn_blocking(move || regular(&place, &path)).await.map_err(io::Error::other)?;
        let (file, identity) = opened?;
        Ok(Self { file: Arc::new(file), identity })
    }

    /// Reads at an offset into `bytes` from index `from`; returns the buffer and the number of bytes
    /// read. Data in the page cache is read at once; disk I/O runs on the blocking pool.
    pub async fn read_at(&self, mut bytes: Vec<u8>, from: usize, offset: u64) -> (Vec<u8>, io::Result<usize>) {
        let mut slices = [IoSliceMut::new(bytes.get_mut(from..).unwrap_or_default())];
        if let Ok(read) = rustix::io::preadv2(&self.file, &mut slices, offset, ReadWriteFlags::NOWAIT) {
            return (bytes, Ok(read));
        }
        // Not in the page cache, or not supported by the file system.
        let file = self.file.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let read = file.read_at(bytes.get_mut(from..).unwrap_or_default(), offset);
            (bytes, read)
        });
        reading.await.unwrap_or_else(|error| (Vec::new(), Err(io::Error::other(error))))
    }

    /// Offset of the last `lines` lines.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn tail(&self, lines: u64) -> io::Result<u64> {
        let file = self.file.clone();
        let found = tokio::task::spawn_blocking(move || tail_start(&file, lines)).await;
        found.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// The file that follows this one: the next rotated file after several rotations, else the current
    /// log; `None` while this file is the current log.
    pub async fn successor(&self, log: &Path) -> Option<Successor> {
        let (log, mine) = (log.to_owned(), self.identity);
        let found = tokio::task::spawn_blocking(move || {
            let path = next_file(&log, mine)?;
            Some(Successor { identity: identity(&path)?, path })
        });
        found.await.ok().flatten()
    }

    /// Whether this is that file: another rotation may have reused its name.
    pub fn is(&self, meant: &Successor) -> bool {
        self.identity == meant.identity
    }
}

/// The file that follows a rotated one.
pub struct Successor {
    /// Its current path.
    pub path: PathBuf,
    identity: (u64, u64),
}

fn regular(place: &LogLocation, path: &Path) -> io::Result<(std::fs::File, (u64, u64))> {
    let file = place.open(path)?;
    let meta = file.metadata()?;
    Ok((file, (meta.dev(), meta.ino())))
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

fn next_file(log: &Path, mine: (u64, u64)) -> Option<PathBuf> {
    // Absent between rename and reopen: there is no successor yet.
    if identity(log)? == mine {
        return None;
    }
    let names = retention::oldest_first(dirs::beside(log, ".").unwrap_or_default());
    let files: Vec<PathBuf> = names.into_iter().map(|name| log.with_file_name(name)).collect();
    let at = files.iter().position(|path| identity(path) == Some(mine));
    let later = at.and_then(|at| files.get(at + 1..)).unwrap_or_default();
    let plain = later.iter().find(|path| path.extension().is_none_or(|e| e != "gz"));
    Some(plain.cloned().unwrap_or_else(|| log.to_owned()))
}
