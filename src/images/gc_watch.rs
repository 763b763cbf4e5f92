//! Notices that the image filesystem has less room than it should, before the next round of collection would, and that it
//! still has.
//! Behaviour: spec 05 §12.

use std::{io, path::Path, path::PathBuf, time::Duration};

use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep_until},
};

use super::{
    gc::RoomOf,
    gc_rank::{Demand, GcPolicy, Room, demand, unreachable_for},
};

/// Least time between two rounds.
pub(super) const APART: Duration = Duration::from_secs(30);

/// See the file's documentation.
pub(super) struct RoomWatch {
    room: RoomOf,
    policy: GcPolicy,
    /// Where images are; `None` until the runtime has said so.
    place: Option<PathBuf>,
    /// When the last round ended.
    tried: Option<Instant>,
    next: Instant,
    /// A look at that place that is under way, maybe for ever: there is no other meanwhile.
    look: Option<JoinHandle<io::Result<Room>>>,
}

impl RoomWatch {
    /// Looks at nothing yet.
    pub(super) fn new(room: RoomOf, policy: GcPolicy) -> Self {
        Self { room, policy, place: None, tried: None, next: Instant::now(), look: None }
    }

    /// Images are there. A look at where they were is of no use, and may hang with what they were moved away from.
    fn at(&mut self, place: &Path) {
        if self.place.as_deref() != Some(place) {
            self.place = Some(place.to_owned());
            (self.look, self.next) = (None, Instant::now());
        }
    }

    /// Whether it is known where images are.
    pub(super) fn has_place(&self) -> bool {
        self.place.is_some()
    }

    /// How much room there is for images, which are there. Waits as long as a look hangs, and begins no other. Safe to
    /// drop.
    pub(super) async fn room(&mut self, place: &Path) -> io::Result<Room> {
        self.at(place);
        // Of another time.
        self.looked().await;
        self.look(place.to_owned());
        self.looked().await.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
    }

    /// Begins a look, where none is under way.
    fn look(&mut self, place: PathBuf) {
        let room = self.room.clone();
        self.look.get_or_insert_with(|| spawn_blocking(move || room(&place)));
    }

    /// What the look under way shows.
    async fn looked(&mut self) -> Option<io::Result<Room>> {
        let seen = self.look.as_mut()?.await;
        self.look = None;
        Some(seen.unwrap_or_else(|error| Err(io::Error::other(error))))
    }

    /// A round has done what could be done.
    pub(super) fn tried(&mut self) {
        self.tried = Some(Instant::now());
    }

    /// For how long no other round shall be.
    pub(super) fn rests(&self) -> Duration {
        self.tried.map_or(Duration::ZERO, |tried| (tried + APART).saturating_duration_since(Instant::now()))
    }

    /// Waits until the high mark is crossed, or still is a while after the last round. Safe to drop.
    pub(super) async fn crossed(&mut self) {
        if self.policy.high_percent >= 100 {
            std::future::pending::<()>().await;
        }
        loop {
            let Some(place) = self.place.clone() else { return std::future::pending().await };
            sleep_until(self.next.max(Instant::now() + self.rests())).await;
            self.look(place);
            let seen = self.looked().await.and_then(Result::ok).unwrap_or(Room { capacity: 0, available: u64::MAX });
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
    async fn a_look_that_hangs_is_not_followed_by_another() {
        let (release, hang) = mpsc::channel::<()>();
        let (looks, hang) = (Arc::new(AtomicUsize::new(0)), Mutex::new(hang));
        let count = looks.clone();
        let seen = Room { capacity: 1000, available: 900 };
        let room: RoomOf = Arc::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            let _ = hang.lock().unwrap_or_else(PoisonError::into_inner).recv(); // nobody sends
            Ok(seen)
        });
        let mut watch = RoomWatch::new(room, GcPolicy::default());
        let place = Path::new("/images");
        let moment = Duration::from_millis(10);
        for _ in 0..3 {
            assert!(timeout(moment, watch.room(place)).await.is_err());
            assert!(timeout(moment, watch.crossed()).await.is_err());
        }
        assert!(looks.load(Ordering::Relaxed) <= 1, "one at a time");
        drop(release);
        let found = timeout(Duration::from_secs(60), watch.room(place)).await.expect("it hangs no more");
        assert_eq!((found.ok(), looks.load(Ordering::Relaxed)), (Some(seen), 2), "one of now");
    }

    #[tokio::test]
    async fn a_look_that_hangs_where_images_were_holds_up_none_where_they_are() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let seen = Room { capacity: 1000, available: 900 };
        let room: RoomOf = Arc::new(move |place: &Path| {
            if place == Path::new("/old") {
                let _ = hang.lock().unwrap_or_else(PoisonError::into_inner).recv(); // nobody sends
            }
            Ok(seen)
        });
        let mut watch = RoomWatch::new(room, GcPolicy::default());
        assert!(timeout(Duration::from_millis(10), watch.room(Path::new("/old"))).await.is_err());
        let found = timeout(Duration::from_secs(60), watch.room(Path::new("/new"))).await;
        drop(release);
        assert_eq!(found.expect("it waits for nobody").ok(), Some(seen));
    }

    #[tokio::test(start_paused = true)]
    async fn where_images_have_moved_to_is_looked_at_at_once() {
        let room: RoomOf = Arc::new(|place: &Path| {
            let available: u64 = if place == Path::new("/old") { 90 } else { 10 };
            Ok(Room { capacity: 100 << 30, available: available << 30 })
        });
        let mut watch = RoomWatch::new(room, GcPolicy::default());
        let moment = Duration::from_millis(100);
        assert!(watch.room(Path::new("/old")).await.is_ok());
        assert!(timeout(moment, watch.crossed()).await.is_err(), "there is room, and will be for a while");
        assert!(watch.room(Path::new("/new")).await.is_ok());
        assert!(timeout(moment, watch.crossed()).await.is_ok(), "there is none");
    }
}
