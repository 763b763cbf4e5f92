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
    /// A look that is under way, maybe for ever: there is no other meanwhile.
    look: Option<JoinHandle<io::Result<Room>>>,
}

impl RoomWatch {
    /// Looks at nothing yet.
    pub(super) fn new(room: RoomOf, policy: GcPolicy) -> Self {
        Self { room, policy, place: None, tried: None, next: Instant::now(), look: None }
    }

    /// Images are there.
    pub(super) fn at(&mut self, place: &Path) {
        if self.place.as_deref() != Some(place) {
            self.place = Some(place.to_owned());
        }
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
            let room = self.room.clone();
            let look = self.look.get_or_insert_with(|| spawn_blocking(move || room(&place)));
            let seen = look.await;
            self.look = None;
            let seen = seen.ok().and_then(Result::ok).unwrap_or(Room { capacity: 0, available: u64::MAX });
            self.next = Instant::now() + unreachable_for(&self.policy, seen);
            if matches!(demand(&self.policy, seen), Demand::Free { .. }) {
                return;
            }
        }
    }
}
