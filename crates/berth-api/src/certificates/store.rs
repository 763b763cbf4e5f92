//! Certificate store on disk: dated PEM files and a symlink to the current one.
//!
//! `kubelet-client-2026-01-31-12-00-00.pem` ← `kubelet-client-current.pem`. The link is replaced atomically by renaming
//! another over it, so that a current pair always exists. The kubelet removes the link first and repairs at start what
//! a crash left; Berth performs the same repair. The newest files are kept; the kubelet keeps all. Implements
//! spec 01 §11.5. Blocking: call it from the blocking pool.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, symlink},
    path::{Path, PathBuf},
};

use jiff::Zoned;

use super::{pair::Pair, template::Purpose};
use berth_sys::atomic_file;

/// Number of dated files kept.
const KEPT: usize = 5;
/// Readable by the agent's user only.
const MODE: u32 = 0o600;
/// Mode of the directory.
const DIRECTORY: u32 = 0o755;
/// Bytes read of a file at most.
const LIMIT: u64 = 1 << 20;

/// A pair cannot be read or stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file exists but is no valid pair.
    #[error("{path}: {cause}")]
    Unusable {
        /// Path of the file.
        path: String,
        /// Parse error of the pair, or text of the I/O error of reading it.
        cause: String,
    },
    /// A regular file is in the place of the link.
    #[error("expected \"{0}\" to be a symlink but it is a file")]
    NoLink(String),
    /// A file, the link, or the directory cannot be written.
    #[error("cannot write {path}: {cause}")]
    Write {
        /// Path of the file.
        path: String,
        /// I/O error of creating the directory, the file, or the link.
        cause: io::Error,
    },
}

/// Certificate files of one purpose.
#[derive(Clone, Debug)]
pub struct CertificateStore {
    directory: PathBuf,
    prefix: &'static str,
    configured: Option<(PathBuf, PathBuf)>,
}

impl CertificateStore {
    /// Returns the store in `directory`. `configured` are certificate and key files that serve where there is no
    /// current pair.
    pub fn new(directory: &Path, purpose: Purpose, configured: Option<(PathBuf, PathBuf)>) -> Self {
        Self { directory: directory.to_owned(), prefix: purpose.prefix(), configured }
    }

    /// Path of the link to the current pair.
    pub fn link(&self) -> PathBuf {
        self.directory.join(format!("{}-current.pem", self.prefix))
    }

    /// Current pair, expired or not; `None` if there is none.
    ///
    /// # Errors
    /// A file exists but is no valid pair.
    pub fn current(&self) -> Result<Option<Pair>, StoreError> {
        self.recover();
        let link = self.link();
        if let Some(text) = read(&link)? {
            return Pair::read(&text).map(Some).map_err(|cause| unusable(&link, cause));
        }
        let own = |end: &str| self.directory.join(format!("{}.{end}", self.prefix));
        for (certificate, key) in self.configured.iter().cloned().chain([(own("crt"), own("key"))]) {
            let (Some(first), Some(second)) = (read(&certificate)?, read(&key)?) else { continue };
            return Pair::join(&first, &second).map(Some).map_err(|cause| unusable(&certificate, cause));
        }
        Ok(None)
    }

    /// Stores a pair as the current one and returns the path of its file, which is named by `now` in local time.
    ///
    /// # Errors
    /// The pair cannot be written; the previous pair stays current.
    pub fn update(&self, pair: &Pair, now: &Zoned) -> Result<PathBuf, StoreError> {
        let link = self.link();
        if fs::symlink_metadata(&link).is_ok_and(|found| !found.is_symlink()) {
            return Err(StoreError::NoLink(link.display().to_string()));
        }
        let path = self.directory.join(format!("{}-{}.pem", self.prefix, now.strftime("%Y-%m-%d-%H-%M-%S")));
        let wrong = |path: &Path| {
            let path = path.display().to_string();
            move |cause| StoreError::Write { path, cause }
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(DIRECTORY)
            .create(&self.directory)
            .map_err(wrong(&self.directory))?;
        atomic_file::replace(&path, pair.text().as_bytes(), MODE).map_err(wrong(&path))?;
        self.point(&link, &path).map_err(wrong(&link))?;
        self.prune(&path);
        Ok(path)
    }

    fn point(&self, link: &Path, path: &Path) -> io::Result<()> {
        let updated = self.updated();
        match fs::remove_file(&updated) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        symlink(std::path::absolute(path)?, &updated)?;
        fs::rename(&updated, link)?;
        File::open(&self.directory)?.sync_all()
    }

    fn updated(&self) -> PathBuf {
        self.directory.join(format!("{}-updated.pem", self.prefix))
    }

    /// Completes a link replacement in which the kubelet was interrupted.
    fn recover(&self) {
        let (link, updated) = (self.link(), self.updated());
        if fs::symlink_metadata(&link).is_err() && fs::metadata(&updated).is_ok() {
            // A failure leaves no current pair, which triggers a new request.
            let _ = fs::rename(updated, link);
        }
    }

    /// Removes all but the newest files. Lexical order of the names is order of age.
    fn prune(&self, current: &Path) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let is_dated = |name: &str| {
            let middle = name.strip_prefix(self.prefix).and_then(|rest| rest.strip_suffix(".pem"));
            middle
                .is_some_and(|middle| middle.starts_with('-') && middle.chars().all(|c| c == '-' || c.is_ascii_digit()))
        };
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut dated: Vec<String> = names.filter(|name| is_dated(name)).collect();
        dated.sort_unstable();
        let too_many = dated.len().saturating_sub(KEPT);
        for name in dated.iter().take(too_many) {
            let path = self.directory.join(name);
            if path != current {
                // The next update retries the removal.
                let _ = fs::remove_file(path);
            }
        }
    }
}

fn unusable(path: &Path, cause: String) -> StoreError {
    StoreError::Unusable { path: path.display().to_string(), cause }
}

/// Reads a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>, StoreError> {
    use io::Read;
    let mut text = String::new();
    match File::open(path).and_then(|file| file.take(LIMIT).read_to_string(&mut text)) {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(path, error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::certificates::testing::{Authority, DAY};

    fn at(second: i8) -> Zoned {
        jiff::civil::date(2026, 1, 31).at(12, 0, second, 0).to_zoned(jiff::tz::TimeZone::UTC).expect("a time")
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("listable");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_current_pair_is_behind_a_link() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = folder.path().join("pki");
        let store = CertificateStore::new(&directory, Purpose::Client, None);
        assert_eq!(store.current().expect("readable"), None);
        let authority = Authority::new();
        for second in 0..7 {
            let pair = authority.pair("n", 0, DAY);
            let path = store.update(&pair, &at(second)).expect("kept");
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
            assert_eq!(fs::read_link(store.link()).expect("a link"), path);
            assert_eq!(store.current().expect("readable"), Some(pair));
        }
        let kept = names(&directory);
        assert_eq!(kept.len(), KEPT + 1, "{kept:?}");
        assert_eq!(kept.first().map(String::as_str), Some("kubelet-client-2026-01-31-12-00-02.pem"));
        assert_eq!(kept.last().map(String::as_str), Some("kubelet-client-current.pem"));
        assert_eq!(fs::metadata(&directory).expect("there").permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn an_interrupted_update_is_completed() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = CertificateStore::new(folder.path(), Purpose::Serving, None);
        let pair = Authority::new().pair("n", 0, DAY);
        store.update(&pair, &at(0)).expect("kept");
        let updated = folder.path().join("kubelet-server-updated.pem");
        fs::rename(store.link(), &updated).expect("renamed");
        assert_eq!(store.current().expect("readable"), Some(pair.clone()));
        assert!(store.link().is_symlink() && !updated.is_symlink());

        symlink("/nowhere", &updated).expect("linked");
        store.update(&pair, &at(1)).expect("a left link is no hindrance");
    }

    #[test]
    fn a_file_in_place_of_the_link_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = CertificateStore::new(folder.path(), Purpose::Client, None);
        fs::write(store.link(), "x").expect("written");
        let message = store.update(&Authority::new().pair("n", 0, DAY), &at(0)).expect_err("a file").to_string();
        assert_eq!(message, format!("expected \"{}\" to be a symlink but it is a file", store.link().display()));
        let message = store.current().expect_err("no pair").to_string();
        assert_eq!(message, format!("{}: no certificate found", store.link().display()));
    }

    #[test]
    fn a_pair_is_found_where_it_was_configured() {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::new();
        let place = |name: &str, pair: &Pair| {
            let files = (folder.path().join(format!("{name}.crt")), folder.path().join(format!("{name}.key")));
            fs::write(&files.0, &pair.certificate).expect("written");
            fs::write(&files.1, &pair.key).expect("written");
            files
        };
        let (own, configured) = (authority.pair("own", 0, DAY), authority.pair("configured", 0, DAY));
        place("kubelet-client", &own);
        let files = place("x", &configured);
        let store = |files| CertificateStore::new(folder.path(), Purpose::Client, files);
        assert_eq!(store(Some(files)).current().expect("readable"), Some(configured));
        assert_eq!(store(None).current().expect("readable"), Some(own));
    }
}
