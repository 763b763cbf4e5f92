//! Cache of recently verified file-based volumes, so that a pod sync can skip unchanged ones. Blocking.

use std::{
    collections::HashMap,
    fs,
    hash::{BuildHasher, Hash, RandomState},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::atomic_writer;

/// Upper bound, with margin, on the granularity of kernel file timestamps: a change within this time after another one
/// may have the same timestamp.
const COARSE: Duration = Duration::from_millis(50);
/// Age from which a volume is compared file by file again, because another program may have written into a file.
const THOROUGH: Duration = Duration::from_secs(300);

/// Cache by volume directory. A node has thousands of volumes, so that the cache keeps a hash that detects changes, not
/// the content.
#[derive(Debug, Default)]
pub struct VerifiedCache {
    hasher: RandomState,
    seen: Mutex<HashMap<Box<Path>, VerifiedVolume>>,
}

#[derive(Debug)]
struct VerifiedVolume {
    /// Hash of the published content and its [`VersionStamp`].
    print: u64,
    at: Instant,
}

/// Published version, with inode and change time of the volume directory and of the version directory; both change when
/// an entry is added or removed.
#[derive(Hash, Debug)]
struct VersionStamp {
    version: PathBuf,
    changed: [(u64, i64, i64); 2],
}

impl VerifiedCache {
    fn seen(&self) -> MutexGuard<'_, HashMap<Box<Path>, VerifiedVolume>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the same content was published and verified recently, and no entry was added or removed since.
    pub fn is_same(&self, dir: &Path, what: &impl Hash) -> bool {
        let Some(places) = places(dir) else { return false };
        let print = self.hasher.hash_one((what, places));
        self.seen().get(dir).is_some_and(|seen| seen.print == print && seen.at.elapsed() < THOROUGH)
    }

    /// Records that the content was published.
    pub fn published(&self, dir: &Path, what: &impl Hash) {
        let places = places(dir).filter(VersionStamp::are_settled);
        let print = places.map(|places| self.hasher.hash_one((what, places)));
        let mut seen = self.seen();
        match print {
            Some(print) => drop(seen.insert(dir.into(), VerifiedVolume { print, at: Instant::now() })),
            None => drop(seen.remove(dir)),
        }
    }

    /// Forgets the volumes of a pod directory.
    pub fn forget(&self, pod: &Path) {
        self.seen().retain(|dir, _| !dir.starts_with(pod));
    }
}

impl VersionStamp {
    /// Whether the timestamps are old enough that any later change alters them.
    fn are_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let settled = now.saturating_sub(COARSE);
        let is_old = |(_, seconds, nanos): &(u64, i64, i64)| {
            let (Ok(seconds), Ok(nanos)) = (u64::try_from(*seconds), u32::try_from(*nanos)) else { return false };
            Duration::new(seconds, nanos) < settled
        };
        self.changed.iter().all(is_old)
    }
}

fn places(dir: &Path) -> Option<VersionStamp> {
    let version = atomic_writer::current(dir)?;
    let changed = |path: &Path| {
        let meta = fs::symlink_metadata(path).ok()?;
        Some((meta.ino(), meta.ctime(), meta.ctime_nsec()))
    };
    let changed = [changed(dir)?, changed(&dir.join(&version))?];
    Some(VersionStamp { version, changed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic_writer::{FileProjection, Payload};

    fn payload(text: &str) -> Payload {
        let content = FileProjection { data: text.as_bytes().to_owned(), mode: 0o644, owner: None };
        Payload::from([("a".to_owned(), content)])
    }

    #[test]
    fn a_changed_volume_is_verified_again() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().join("pod/volume");
        fs::create_dir_all(&dir).expect("writable");
        let cache = VerifiedCache::default();
        let write = |text: &str| {
            let now = jiff::Timestamp::now();
            atomic_writer::write(&dir, &payload(text), |_| Ok(()), now).expect("published");
            assert!(!cache.is_same(&dir, &payload(text)), "what comes now may not show");
            let deadline = Instant::now() + Duration::from_secs(60);
            while !cache.is_same(&dir, &payload(text)) {
                assert!(Instant::now() < deadline, "it never settles");
                cache.published(&dir, &payload(text));
            }
        };
        assert!(!cache.is_same(&dir, &payload("1")), "never published");
        write("1");
        assert!(cache.is_same(&dir, &payload("1")));
        assert!(!cache.is_same(&dir, &payload("2")), "it is to change");
        fs::remove_file(dir.join("a")).expect("a link");
        assert!(!cache.is_same(&dir, &payload("1")), "a link is missing");
        write("1");
        let version = dir.join(fs::read_link(dir.join("..data")).expect("a link"));
        fs::remove_file(version.join("a")).expect("a file");
        assert!(!cache.is_same(&dir, &payload("1")), "a file is missing");
        write("2");
        assert!(cache.is_same(&dir, &payload("2")));
        cache.forget(&root.path().join("pod"));
        assert!(!cache.is_same(&dir, &payload("2")), "forgotten");
    }
}
