//! Container log writer: one `writev` per record, reopened on request after log rotation.
//!
//! Until the reopen, output continues into the renamed file. A record that cannot be written is dropped and counted,
//! and the next one is tried again: a full disk must not stop a container. Implements spec 09a §13.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::DirBuilderExt},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    io::IoSlice,
};

use super::{
    super::log_tally::LogTally,
    log_record::{self, Tag},
};

/// Log file of a container; both output streams write to it.
#[derive(Debug)]
pub struct Log {
    target: Option<(PathBuf, OwnedFd)>,
    lost: u64,
    /// Changes since the last [`Log::news`].
    news: LogTally,
    /// Whether a full disk truncated the last record: the next write begins with a newline.
    is_torn: bool,
}

impl Log {
    /// Opens the log; without a path, output is discarded and not counted.
    ///
    /// # Errors
    /// The file system's error, with the path.
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        let target = path.map(|path| open(path).map(|file| (path.to_owned(), file))).transpose()?;
        Ok(Self { target, lost: 0, news: LogTally::default(), is_torn: false })
    }

    /// Reopens the path; the old file is closed only afterwards.
    ///
    /// # Errors
    /// The file system's error; the old file stays in use then.
    pub fn reopen(&mut self) -> io::Result<()> {
        if let Some((path, file)) = &mut self.target {
            *file = open(path).inspect_err(|_| self.news.errors = self.news.errors.saturating_add(1))?;
            self.is_torn = false;
        }
        Ok(())
    }

    /// Writes a record with the current time. Returns the error of the first lost record only.
    pub fn write(&mut self, stream: &[u8; 6], tag: Tag, content: &[u8]) -> Option<io::Error> {
        let (_, file) = self.target.as_ref()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let head = log_record::head(now, stream, tag);
        let prefix: &[u8] = if self.is_torn { b"\n" } else { b"" };
        let whole = prefix.len() + head.len() + content.len() + 1;
        let parts = [IoSlice::new(prefix), IoSlice::new(&head), IoSlice::new(content), IoSlice::new(b"\n")];
        let error = match rustix::io::writev(file, &parts) {
            Ok(written) if written == whole => {
                self.is_torn = false;
                self.news.bytes = self.news.bytes.saturating_add(written as u64);
                return None;
            }
            Ok(written) => {
                self.is_torn = written > 0;
                self.news.bytes = self.news.bytes.saturating_add(written as u64);
                io::Error::from(io::ErrorKind::StorageFull)
            }
            Err(e) => e.into(),
        };
        self.lost = self.lost.saturating_add(1);
        let news = LogTally { bytes: 0, dropped: 1, errors: 1 };
        self.news = self.news.plus(news);
        (self.lost == 1).then_some(error)
    }

    /// Closes the file; further output is discarded.
    pub fn close(&mut self) {
        self.target = None;
    }

    /// Takes the changes since the last call.
    pub fn news(&mut self) -> LogTally {
        std::mem::take(&mut self.news)
    }

    /// Number of records that could not be written.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

/// Opens a log for appending, and creates its parent directories. Refuses a FIFO or a link.
fn open(path: &Path) -> io::Result<OwnedFd> {
    let with_path = |e: io::Error| io::Error::new(e.kind(), format!("open log {}: {e}", path.display()));
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(with_path)?;
    }
    let flags =
        OFlags::APPEND | OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o640)).map_err(|e| with_path(e.into()))?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(|e| with_path(e.into()))?.st_mode);
    if kind != FileType::RegularFile {
        return Err(with_path(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &Path) -> Vec<String> {
        let text = fs::read_to_string(path).expect("readable");
        text.lines().map(|line| line.get(31..).expect("a stamp").to_owned()).collect()
    }

    /// AC-09a-X13
    #[test]
    fn a_renamed_file_is_written_until_the_log_is_opened_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, old) = (folder.path().join("a/b/0.log"), folder.path().join("a/b/0.log.1"));
        let mut log = Log::open(Some(&path)).expect("opened");
        assert!(log.write(b"stdout", Tag::Full, b"one").is_none());
        fs::rename(&path, &old).expect("renamed");
        assert!(log.write(b"stderr", Tag::Partial, b"two").is_none());
        assert!(!path.exists());
        log.reopen().expect("opened");
        assert!(log.write(b"stdout", Tag::Full, b"").is_none());
        assert_eq!(lines(&old), ["stdout F one", "stderr P two"]);
        assert_eq!(lines(&path), ["stdout F "]);
        assert_eq!(log.lost(), 0);
    }

    #[test]
    fn a_log_that_cannot_be_opened_again_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, old) = (folder.path().join("0.log"), folder.path().join("1.log"));
        let mut log = Log::open(Some(&path)).expect("opened");
        fs::rename(&path, &old).expect("renamed");
        std::os::unix::fs::symlink("/dev/null", &path).expect("a link");
        log.reopen().expect_err("a link");
        assert!(log.write(b"stdout", Tag::Full, b"still").is_none());
        assert_eq!(lines(&old), ["stdout F still"]);
        assert_eq!(log.news(), LogTally { bytes: 46, dropped: 0, errors: 1 });
    }

    #[test]
    fn what_cannot_be_written_is_counted() {
        let full = rustix::fs::open("/dev/full", OFlags::WRONLY, Mode::empty()).expect("a device");
        let mut log = Log { target: Some((PathBuf::from("/dev/full"), full)), ..Log::open(None).expect("nothing") };
        assert!(log.write(b"stdout", Tag::Full, b"x").is_some());
        assert!(log.write(b"stdout", Tag::Full, b"x").is_none(), "reported once");
        assert_eq!(log.lost(), 2);
        assert_eq!(log.news(), LogTally { bytes: 0, dropped: 2, errors: 2 });
        assert_eq!(log.news(), LogTally::default());
    }
}
