//! Per-object queues of event writes: a write that hangs blocks only its own object's queue.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

use super::{
    retry_policy::EventWrite,
    series::{InvolvedObject, Series},
};

/// Create or patch of one event, with its retry state.
#[derive(Debug)]
pub struct QueuedWrite {
    /// Event to write.
    pub series: Series,
    /// POST or PATCH.
    pub kind: EventWrite,
    /// Failed attempts so far.
    pub tries: u32,
    not_before: Option<Instant>,
    number: u64,
}

/// Queue key: kind, namespace, name, and UID of the involved object.
pub type Object = (&'static str, String, String, String);

#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<QueuedWrite>,
    in_flight: bool,
}

/// All queues.
#[derive(Debug, Default)]
pub struct ObjectQueues {
    lanes: HashMap<Object, Lane>,
    waiting: usize,
    numbers: u64,
}

/// Queue key of an involved object.
pub fn object_of(about: &InvolvedObject) -> Object {
    let (kind, namespace, name, uid) = about.object();
    (kind, namespace.to_owned(), name.to_owned(), uid.to_owned())
}

impl ObjectQueues {
    /// Number of queued writes; those in flight do not count.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Appends a write to its object's queue.
    pub fn push(&mut self, series: Series, kind: EventWrite) {
        self.numbers += 1;
        self.waiting += 1;
        let lane = self.lanes.entry(object_of(&series.about)).or_default();
        lane.queue.push_back(QueuedWrite { series, kind, tries: 0, not_before: None, number: self.numbers });
    }

    /// Drops the oldest queued write.
    pub fn drop_oldest(&mut self) {
        let fronts = self.lanes.iter().filter_map(|(object, lane)| Some((lane.queue.front()?.number, object)));
        let Some(object) = fronts.min().map(|(_, object)| object.clone()) else { return };
        if let Some(lane) = self.lanes.get_mut(&object)
            && lane.queue.pop_front().is_some()
        {
            self.waiting -= 1;
        }
        self.tidy(&object);
    }

    /// Takes the oldest write that is due; its queue is blocked until [`ObjectQueues::complete`].
    pub fn take(&mut self, now: Instant) -> Option<QueuedWrite> {
        let may_go = |waiting: &&QueuedWrite| waiting.not_before.is_none_or(|at| at <= now);
        let free = self.lanes.iter().filter(|(_, lane)| !lane.in_flight);
        let fronts = free.filter_map(|(object, lane)| Some((lane.queue.front().filter(may_go)?.number, object)));
        let object = fronts.min().map(|(_, object)| object.clone())?;
        let lane = self.lanes.get_mut(&object)?;
        let taken = lane.queue.pop_front()?;
        lane.in_flight = true;
        self.waiting -= 1;
        Some(taken)
    }

    /// Earliest time at which a write in back-off becomes due.
    pub fn wakes_at(&self) -> Option<Instant> {
        let free = self.lanes.values().filter(|lane| !lane.in_flight);
        free.filter_map(|lane| lane.queue.front()?.not_before).min()
    }

    /// Unblocks the queue of a completed write.
    pub fn complete(&mut self, object: &Object) {
        if let Some(lane) = self.lanes.get_mut(object) {
            lane.in_flight = false;
        }
        self.tidy(object);
    }

    /// Requeues a failed write at the head of its queue.
    pub fn requeue(&mut self, mut waiting: QueuedWrite, not_before: Option<Instant>) {
        waiting.not_before = not_before;
        self.waiting += 1;
        let lane = self.lanes.entry(object_of(&waiting.series.about)).or_default();
        lane.in_flight = false;
        lane.queue.push_front(waiting);
    }

    fn tidy(&mut self, object: &Object) {
        if self.lanes.get(object).is_some_and(|lane| lane.queue.is_empty() && !lane.in_flight) {
            self.lanes.remove(object);
        }
    }
}
