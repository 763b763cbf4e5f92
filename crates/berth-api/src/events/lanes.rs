//! Events that wait to be sent, in a lane per object: a call that hangs holds up its own lane only.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

use super::{
    series::{About, Series},
    verdict::Kind,
};

/// One write that waits.
#[derive(Debug)]
pub struct Waiting {
    /// What is written.
    pub series: Series,
    /// How.
    pub kind: Kind,
    /// Tries so far.
    pub tries: u32,
    not_before: Option<Instant>,
    number: u64,
}

/// Whose lane it is.
pub type Object = (&'static str, String, String, String);

#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<Waiting>,
    in_flight: bool,
}

/// All lanes.
#[derive(Debug, Default)]
pub struct Lanes {
    lanes: HashMap<Object, Lane>,
    waiting: usize,
    numbers: u64,
}

/// Whose lane events about that go to.
pub fn object_of(about: &About) -> Object {
    let (kind, namespace, name, uid) = about.object();
    (kind, namespace.to_owned(), name.to_owned(), uid.to_owned())
}

impl Lanes {
    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// One more, at the end of its lane.
    pub fn push(&mut self, series: Series, kind: Kind) {
        self.numbers += 1;
        self.waiting += 1;
        let lane = self.lanes.entry(object_of(&series.about)).or_default();
        lane.queue.push_back(Waiting { series, kind, tries: 0, not_before: None, number: self.numbers });
    }

    /// Forgets the oldest that waits.
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

    /// The oldest that may be sent now; its lane is busy until [`Lanes::landed`].
    pub fn take(&mut self, now: Instant) -> Option<Waiting> {
        let may_go = |waiting: &&Waiting| waiting.not_before.is_none_or(|at| at <= now);
        let free = self.lanes.iter().filter(|(_, lane)| !lane.in_flight);
        let fronts = free.filter_map(|(object, lane)| Some((lane.queue.front().filter(may_go)?.number, object)));
        let object = fronts.min().map(|(_, object)| object.clone())?;
        let lane = self.lanes.get_mut(&object)?;
        let taken = lane.queue.pop_front()?;
        lane.in_flight = true;
        self.waiting -= 1;
        Some(taken)
    }

    /// When the next may be sent, where that is later than now.
    pub fn wakes_at(&self) -> Option<Instant> {
        let free = self.lanes.values().filter(|lane| !lane.in_flight);
        free.filter_map(|lane| lane.queue.front()?.not_before).min()
    }

    /// A write ended for good.
    pub fn landed(&mut self, object: &Object) {
        if let Some(lane) = self.lanes.get_mut(object) {
            lane.in_flight = false;
        }
        self.tidy(object);
    }

    /// A write is to be made again, before all others of its lane.
    pub fn again(&mut self, mut waiting: Waiting, not_before: Option<Instant>) {
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
