//! Notices that the image filesystem has less room than it should, before the next round of collection would.
//! Behaviour: spec 05 §12.

use std::{io, path::Path, path::PathBuf};

use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep_until},
};

use super::{
    gc::RoomOf,
    gc_rank::{Demand, GcPolicy, Room, demand, unreachable_for},
};

/// See the file's documentation.
pub(super) struct RoomWatch {
    room: RoomOf,
    policy: GcPolicy,
    /// Where images are; `None` until the runtime has said so.
    place: Option<PathBuf>,
    is_over: bool,
    next: Instant,
    /// A look that is under way, maybe for ever: there is no other meanwhile.
    look: Option<JoinHandle<io::Result<Room>>>,
}

impl RoomWatch {
    /// Looks at nothing yet.
    pub(super) fn new(room: RoomOf, policy: GcPolicy) -> Self {
        Self { room, policy, place: None, is_over: false, next: Instant::now(), look: None }
    }

    /// Images are there.
    pub(super) fn at(&mut self, place: &Path) {
        if self.place.as_deref() != Some(place) {
            self.place = Some(place.to_owned());
        }
    }

    /// Others have seen it, and do what can be done.
    pub(super) fn know_it_is_over(&mut self) {
        self.is_over = true;
    }

    /// Waits until the high mark is crossed. Safe to drop.
    pub(super) async fn crossed(&mut self) {
        if self.policy.high_percent >= 100 {
            std::future::pending::<()>().await;
        }
        loop {
            let Some(place) = self.place.clone() else { return std::future::pending().await };
            sleep_until(self.next).await;
            let room = self.room.clone();
            let look = self.look.get_or_insert_with(|| spawn_blocking(move || room(&place)));
            let seen = look.await;
            self.look = None;
            let seen = seen.ok().and_then(Result::ok).unwrap_or(Room { capacity: 0, available: u64::MAX });
            self.next = Instant::now() + unreachable_for(&self.policy, seen);
            let is_over = matches!(demand(&self.policy, seen), Demand::Free { .. });
            if std::mem::replace(&mut self.is_over, is_over) != is_over && is_over {
                return;
            }
        }
    }
}
