//! Disk usage watcher: triggers image garbage collection as soon as the high threshold is crossed.
//!
//! It fires before the next periodic round, and again while usage stays above the threshold. Implements
//! spec 05 §12.

use std::{io, path::Path, path::PathBuf, time::Duration};

use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep_until},
};

use super::{
    gc::DiskSpaceOf,
    gc_rank::{Demand, DiskSpace, GcPolicy, demand, unreachable_for},
};

/// Minimum interval between two rounds.
pub(super) const APART: Duration = Duration::from_secs(30);

/// Watches the disk usage of the image filesystem; see the module documentation.
pub(super) struct DiskUsageWatcher {
    room: DiskSpaceOf,
    policy: GcPolicy,
    /// Mount point of the image filesystem; `None` until the runtime has reported it.
    place: Option<PathBuf>,
    /// When the last round ended.
    tried: Option<Instant>,
    next: Instant,
    /// A running `statvfs` call, which may hang forever: no other is started until it returns.
    call: Option<JoinHandle<io::Result<DiskSpace>>>,
}

impl DiskUsageWatcher {
    /// Creates the watcher without reading anything.
    pub(super) fn new(room: DiskSpaceOf, policy: GcPolicy) -> Self {
        Self { room, policy, place: None, tried: None, next: Instant::now(), call: None }
    }

    /// Sets the mount point. A running call for the previous mount point is abandoned: it may hang.
    fn at(&mut self, place: &Path) {
        if self.place.as_deref() != Some(place) {
            self.place = Some(place.to_owned());
            (self.call, self.next) = (None, Instant::now());
        }
    }

    /// Whether the mount point is known.
    pub(super) fn has_place(&self) -> bool {
        self.place.is_some()
    }

    /// Disk space at the given mount point. Waits while a call hangs, and starts no other. Cancel-safe.
    pub(super) async fn room(&mut self, place: &Path) -> io::Result<DiskSpace> {
        self.at(place);
        // Discard the outdated result of an earlier call.
        self.wait_for_call().await;
        self.start_call(place.to_owned());
        self.wait_for_call().await.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
    }

    /// Starts a `statvfs` call, unless one is running.
    fn start_call(&mut self, place: PathBuf) {
        let room = self.room.clone();
        self.call.get_or_insert_with(|| spawn_blocking(move || room(&place)));
    }

    /// Waits for the result of the running call.
    async fn wait_for_call(&mut self) -> Option<io::Result<DiskSpace>> {
        let seen = self.call.as_mut()?.await;
        self.call = None;
        Some(seen.unwrap_or_else(|error| Err(io::Error::other(error))))
    }

    /// Records the end of a round.
    pub(super) fn tried(&mut self) {
        self.tried = Some(Instant::now());
    }

    /// Remaining time until the next round may run.
    pub(super) fn remaining_interval(&self) -> Duration {
        self.tried.map_or(Duration::ZERO, |tried| (tried + APART).saturating_duration_since(Instant::now()))
    }

    /// Waits until the high threshold is crossed, or still is [`APART`] after the last round.
    /// Cancel-safe.
    pub(super) async fn wait_until_crossed(&mut self) {
        if self.policy.high_percent >= 100 {
            std::future::pending::<()>().await;
        }
        loop {
            let Some(place) = self.place.clone() else { return std::future::pending().await };
            sleep_until(self.next.max(Instant::now() + self.remaining_interval())).await;
            self.start_call(place);
            let seen = self
                .wait_for_call()
                .await
                .and_then(Result::ok)
                .unwrap_or(DiskSpace { capacity: 0, available: u64::MAX });
            self.next = Instant::now() + unreachable_for(&self.policy, seen);
            if matches!(demand(&self.policy, seen), Demand::Free { .. }) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_hanging_statvfs_is_not_followed_by_another() {
        let (release, hang) = mpsc::channel::<()>();
        let (calls, hang) = (Arc::new(AtomicUsize::new(0)), Mutex::new(hang));
        let count = calls.clone();
        let seen = DiskSpace { capacity: 1000, available: 900 };
        let room: DiskSpaceOf = Arc::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            let _ = hang.lock().unwrap_or_else(PoisonError::into_inner).recv(); // no sender
            Ok(seen)
        });
        let mut watch = DiskUsageWatcher::new(room, GcPolicy::default());
        let place = Path::new("/images");
        let moment = Duration::from_millis(10);
        for _ in 0..3 {
            assert!(timeout(moment, watch.room(place)).await.is_err());
            assert!(timeout(moment, watch.wait_until_crossed()).await.is_err());
        }
        assert!(calls.load(Ordering::Relaxed) <= 1, "one at a time");
        drop(release);
        let found = timeout(Duration::from_secs(60), watch.room(place)).await.expect("it hangs no more");
        assert_eq!((found.ok(), calls.load(Ordering::Relaxed)), (Some(seen), 2), "one of now");
    }

    #[tokio::test]
    async fn a_hanging_statvfs_of_the_old_mount_point_does_not_block_the_new_one() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let seen = DiskSpace { capacity: 1000, available: 900 };
        let room: DiskSpaceOf = Arc::new(move |place: &Path| {
            if place == Path::new("/old") {
                let _ = hang.lock().unwrap_or_else(PoisonError::into_inner).recv(); // no sender
            }
            Ok(seen)
        });
        let mut watch = DiskUsageWatcher::new(room, GcPolicy::default());
        assert!(timeout(Duration::from_millis(10), watch.room(Path::new("/old"))).await.is_err());
        let found = timeout(Duration::from_secs(60), watch.room(Path::new("/new"))).await;
        drop(release);
        assert_eq!(found.expect("it waits for nobody").ok(), Some(seen));
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_mount_point_is_checked_at_once() {
        let room: DiskSpaceOf = Arc::new(|place: &Path| {
            let available: u64 = if place == Path::new("/old") { 90 } else { 10 };
            Ok(DiskSpace { capacity: 100 << 30, available: available << 30 })
        });
        let mut watch = DiskUsageWatcher::new(room, GcPolicy::default());
        let moment = Duration::from_millis(100);
        assert!(watch.room(Path::new("/old")).await.is_ok());
        assert!(timeout(moment, watch.wait_until_crossed()).await.is_err(), "there is room, and will be for a while");
        assert!(watch.room(Path::new("/new")).await.is_ok());
        assert!(timeout(moment, watch.wait_until_crossed()).await.is_ok(), "there is none");
    }
}
