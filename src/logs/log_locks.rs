//! Set of locked log paths: removal and rotation of one log exclude each other.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::Notify;

/// Locked paths. Cheap to clone; the mutex is held for a set operation only.
#[derive(Clone, Debug, Default)]
pub struct LogLocks(Arc<LockedPaths>);

#[derive(Debug, Default)]
struct LockedPaths {
    paths: Mutex<HashSet<PathBuf>>,
    freed: Notify,
}

/// A locked path, until dropped.
#[derive(Debug)]
pub struct LogLock {
    busy: LogLocks,
    path: PathBuf,
}

impl LogLocks {
    /// Locks a path without waiting; `None` if it is locked.
    pub fn try_hold(&self, path: &Path) -> Option<LogLock> {
        let mut paths = self.0.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths.insert(path.to_owned()).then(|| LogLock { busy: self.clone(), path: path.to_owned() })
    }

    /// Waits for the lock of a path. The wait is limited by the timeout of `ReopenContainerLog` and the
    /// time to compress one file.
    pub async fn hold(&self, path: &Path) -> LogLock {
        loop {
            let freed = self.0.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if let Some(lock) = self.try_hold(path) {
                return lock;
            }
            freed.await;
        }
    }
}

impl Drop for LogLock {
    fn drop(&mut self) {
        self.busy.0.paths.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
        self.busy.0.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_per_path() {
        let busy = LogLocks::default();
        let first = busy.try_hold(Path::new("/a")).expect("free");
        assert!(busy.try_hold(Path::new("/a")).is_none());
        assert!(busy.try_hold(Path::new("/b")).is_some());
        let waiting = tokio::spawn({
            let busy = busy.clone();
            async move { busy.hold(Path::new("/a")).await }
        });
        tokio::task::yield_now().await;
        drop(first);
        waiting.await.expect("taken over");
    }
}
