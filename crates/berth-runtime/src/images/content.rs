//! Content store: blobs by digest, and partial downloads.
//!
//! An existing blob is complete: it is hashed, synced, and only then renamed into place. Unfinished downloads stay in
//! `ingest/` for a day, so that a pull can resume. Blocking. Implements spec 09 §6, §7.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::{
    digest::{Digest, Hasher},
    error::{ImageError, ImageErrorKind, IoContext},
    model::Descriptor,
};
use berth_sys::failpoint;

/// How long unfinished downloads are kept.
const KEEP_PARTS: Duration = Duration::from_secs(24 * 3600);

/// Blobs by digest, on disk.
#[derive(Clone, Debug)]
pub struct ContentStore {
    blobs: PathBuf,
    ingest: PathBuf,
}

impl ContentStore {
    /// Opens the store below `$ROOT/content`; creates its directories.
    ///
    /// # Errors
    /// A directory cannot be created.
    pub fn open(root: &Path) -> Result<Self, ImageError> {
        let content = root.join("content");
        let out = Self { blobs: content.join("blobs/sha256"), ingest: content.join("ingest") };
        for folder in [&out.blobs, &out.ingest] {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .attempt(format!("create {}", folder.display()))?;
        }
        Ok(out)
    }

    /// Path of a blob, whether or not it exists.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs.join(digest.hex())
    }

    /// Path of a partial download.
    pub fn part(&self, digest: &Digest) -> PathBuf {
        self.ingest.join(format!("{}.part", digest.hex()))
    }

    /// Path for a new temporary file of unknown digest; the caller deletes it.
    pub fn scratch(&self) -> PathBuf {
        self.ingest.join(format!("scratch-{:016x}.part", rand::random::<u64>()))
    }

    /// Whether the blob exists.
    pub fn has(&self, digest: &Digest) -> bool {
        self.path(digest).exists()
    }

    /// Content of a blob, verified against its digest; `None` if it does not exist.
    ///
    /// # Errors
    /// The blob cannot be read, is longer than `limit`, or does not match its digest.
    pub fn read(&self, digest: &Digest, limit: u64) -> Result<Option<Vec<u8>>, ImageError> {
        let file = match File::open(self.path(digest)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.attempt(format!("open blob {digest}"))?,
        };
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes).attempt(format!("read blob {digest}"))?;
        check(digest, None, Digest::of(&bytes), bytes.len() as u64)?;
        Ok(Some(bytes))
    }

    /// Opens a blob.
    ///
    /// # Errors
    /// The blob does not exist or cannot be opened.
    pub fn open_blob(&self, digest: &Digest) -> Result<File, ImageError> {
        File::open(self.path(digest)).attempt(format!("open blob {digest}"))
    }

    /// Stores the bytes as a blob; returns its digest.
    ///
    /// # Errors
    /// The blob cannot be written.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest, ImageError> {
        let digest = Digest::of(bytes);
        if !self.has(&digest) {
            let scratch = self.scratch();
            let mut file = create(&scratch)?;
            let done =
                file.write_all(bytes).attempt("write blob").and_then(|()| self.install(&file, &scratch, &digest));
            if done.is_err() {
                // The write error is the one to report.
                let _ = fs::remove_file(&scratch);
            }
            done?;
        }
        Ok(digest)
    }

    /// Stores a stream as a blob if it matches the descriptor. An existing blob is kept and the stream not read.
    ///
    /// # Errors
    /// Digest or size do not match, or the blob cannot be written.
    pub fn keep(&self, from: impl Read, announced: &Descriptor) -> Result<(), ImageError> {
        if self.has(&announced.digest) {
            return Ok(());
        }
        let scratch = self.scratch();
        let mut file = create(&scratch)?;
        // Read one byte more to detect a stream that is too long.
        let copied = hashed(from.take(announced.size.saturating_add(1)), Some(&mut file));
        let done = copied.and_then(|(digest, length)| {
            check(&announced.digest, Some(announced.size), digest, length)?;
            self.install(&file, &scratch, &announced.digest)
        });
        if done.is_err() {
            // The write error is the one to report.
            let _ = fs::remove_file(&scratch);
        }
        done
    }

    /// Rehashes a blob of any length.
    ///
    /// # Errors
    /// The blob does not exist, cannot be read, or does not match its digest.
    pub fn verify(&self, digest: &Digest) -> Result<(), ImageError> {
        let (found, length) = hashed(self.open_blob(digest)?, None)?;
        check(digest, None, found, length)
    }

    /// Opens a partial download for resumption, positioned at its end, with the hash of its content. One that is longer
    /// than the blob is emptied.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn resume(&self, digest: &Digest, size: u64) -> Result<(File, Hasher), ImageError> {
        let path = self.part(digest);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(&path).attempt("open partial blob")?;
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; 256 << 10];
        loop {
            let count = file.read(&mut buffer).attempt("read partial blob")?;
            hasher.update(buffer.get(..count).unwrap_or_default());
            if count == 0 {
                return Ok((file, hasher));
            }
            if hasher.length() > size {
                self.restart(&mut file)?;
                return Ok((file, Hasher::default()));
            }
        }
    }

    /// Empties a partial download.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn restart(&self, file: &mut File) -> Result<(), ImageError> {
        file.set_len(0).attempt("truncate partial blob")?;
        io::Seek::rewind(file).attempt("truncate partial blob")
    }

    /// Moves a completed download into the store if it matches digest and size; otherwise deletes it.
    ///
    /// # Errors
    /// Digest or size do not match, or the file cannot be synced or renamed.
    pub fn finish(&self, file: &File, hasher: Hasher, digest: &Digest, size: u64) -> Result<(), ImageError> {
        let part = self.part(digest);
        let length = hasher.length();
        if let Err(error) = check(digest, Some(size), hasher.finish(), length) {
            // The mismatch is the error to report; the part must not be resumed.
            let _ = fs::remove_file(&part);
            return Err(error);
        }
        self.install(file, &part, digest)
    }

    fn install(&self, file: &File, from: &Path, digest: &Digest) -> Result<(), ImageError> {
        failpoint::reached("blob.written");
        file.sync_data().attempt("sync blob")?;
        failpoint::reached("blob.synced");
        fs::rename(from, self.path(digest)).attempt("rename blob")?;
        failpoint::reached("blob.renamed");
        File::open(&self.blobs).and_then(|folder| folder.sync_all()).attempt("sync blobs")
    }

    /// Deletes a blob; succeeds if it does not exist.
    ///
    /// # Errors
    /// The blob cannot be deleted.
    pub fn remove(&self, digest: &Digest) -> Result<(), ImageError> {
        match fs::remove_file(self.path(digest)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.attempt(format!("remove blob {digest}")),
        }
    }

    /// Digests and lengths of all blobs.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<(Digest, u64)>, ImageError> {
        let mut out = Vec::new();
        for entry in fs::read_dir(&self.blobs).attempt("list blobs")? {
            let entry = entry.attempt("list blobs")?;
            let digest = entry.file_name().to_str().and_then(|name| name.parse::<Digest>().ok());
            if let (Some(digest), Ok(metadata)) = (digest, entry.metadata()) {
                out.push((digest, metadata.len()));
            }
        }
        Ok(out)
    }

    /// Deletes left-overs: temporary files, and partial downloads older than a day.
    ///
    /// # Errors
    /// The directory cannot be read, or a file cannot be deleted.
    pub fn clean(&self, now: SystemTime) -> Result<(), ImageError> {
        for entry in fs::read_dir(&self.ingest).attempt("list ingest")? {
            let entry = entry.attempt("list ingest")?;
            let written = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old = written.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > KEEP_PARTS));
            if is_old || entry.file_name().to_string_lossy().starts_with("scratch-") {
                fs::remove_file(entry.path()).attempt("clean ingest")?;
            }
        }
        Ok(())
    }
}

/// Digest and length of a stream, which is also written to a file if one is given.
fn hashed(mut from: impl Read, mut to: Option<&mut File>) -> Result<(Digest, u64), ImageError> {
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = from.read(&mut buffer).attempt("read blob")?;
        let piece = buffer.get(..count).unwrap_or_default();
        if piece.is_empty() {
            let length = hasher.length();
            return Ok((hasher.finish(), length));
        }
        hasher.update(piece);
        if let Some(file) = &mut to {
            file.write_all(piece).attempt("write blob")?;
        }
    }
}

/// Creates a new file for reading and writing, mode 0600.
///
/// # Errors
/// The file exists or cannot be created.
pub fn create(path: &Path) -> Result<File, ImageError> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path).attempt("create file in ingest")
}

/// Compares actual digest and length with the expected ones.
///
/// # Errors
/// Size or digest do not match.
pub fn check(expected: &Digest, size: Option<u64>, actual: Digest, length: u64) -> Result<(), ImageError> {
    if let Some(size) = size.filter(|size| *size != length) {
        let text = format!("blob {expected}: {length} bytes instead of {size}: size mismatch");
        return Err(ImageError::new(ImageErrorKind::DataLoss, text));
    }
    if *expected == actual {
        return Ok(());
    }
    Err(ImageError::new(ImageErrorKind::DataLoss, format!("blob {expected}: digest mismatch: content has {actual}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_is_whole_or_not_there() {
        let root = tempfile::tempdir().expect("a directory");
        let content = ContentStore::open(root.path()).expect("makeable");
        let digest = content.put(b"hello").expect("writable");
        assert_eq!(content.read(&digest, 100).expect("whole").as_deref(), Some(&b"hello"[..]));
        fs::write(content.path(&digest), b"hellO").expect("writable");
        assert_eq!(content.read(&digest, 100).expect_err("changed").kind, ImageErrorKind::DataLoss);
        assert!(content.read(&Digest::of(b"other"), 100).expect("no error").is_none());
    }

    #[test]
    fn a_stream_is_kept_if_it_is_what_it_is_announced_as() {
        let root = tempfile::tempdir().expect("a directory");
        let content = ContentStore::open(root.path()).expect("makeable");
        let announced = Descriptor::of("", b"hello");
        for wrong in [&b"hell"[..], b"hello!", b"hellO"] {
            assert_eq!(content.keep(wrong, &announced).expect_err("another").kind, ImageErrorKind::DataLoss);
            assert!(!content.has(&announced.digest));
        }
        assert_eq!(fs::read_dir(root.path().join("content/ingest")).expect("there").count(), 0, "nothing stays");
        content.keep(&b"hello"[..], &announced).expect("kept");
        content.verify(&announced.digest).expect("whole");
        fs::write(content.path(&announced.digest), b"hellO").expect("writable");
        assert_eq!(content.verify(&announced.digest).expect_err("changed").kind, ImageErrorKind::DataLoss);
    }

    #[test]
    fn a_download_goes_on_where_it_stopped() {
        let root = tempfile::tempdir().expect("a directory");
        let content = ContentStore::open(root.path()).expect("makeable");
        let digest = Digest::of(b"hello world");
        let (mut file, hasher) = content.resume(&digest, 11).expect("new");
        assert_eq!(hasher.length(), 0);
        file.write_all(b"hello ").expect("writable");
        drop(file);
        let (mut file, mut hasher) = content.resume(&digest, 11).expect("half");
        assert_eq!(hasher.length(), 6);
        file.write_all(b"world").expect("writable");
        hasher.update(b"world");
        content.finish(&file, hasher, &digest, 11).expect("whole");
        assert!(content.has(&digest) && !content.part(&digest).exists());

        let wrong = Digest::of(b"right");
        let (mut file, mut hasher) = content.resume(&wrong, 5).expect("new");
        file.write_all(b"wrong").expect("writable");
        hasher.update(b"wrong");
        assert!(content.finish(&file, hasher, &wrong, 5).is_err());
        assert!(!content.has(&wrong) && !content.part(&wrong).exists());

        fs::write(content.part(&wrong), b"longer than it").expect("writable");
        assert_eq!(content.resume(&wrong, 5).expect("thrown away").1.length(), 0);
    }
}
