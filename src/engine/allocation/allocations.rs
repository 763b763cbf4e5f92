//! What pods hold, for everyone to read, and how far resizes are. Behaviour: spec 02a §8.3-8.4.
//!
//! One lock around a small map, never held across an await: progress told by a worker and a new
//! grant by the allocator cannot pass each other (spec 02a §14).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    conditions::{PendingReason, ResizeConditions},
    resize::summary,
};
use berth_metrics::AllocationMetrics;
use berth_ports::{Clock, Event, EventSink};
use berth_types::{Pod, PodUid, api, resource_state::ResourceEntries};

/// How far the worker is with carrying out a granted resize.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress<'a> {
    /// What is allocated is not applied yet.
    Ongoing,
    /// What is allocated is applied.
    Done,
    /// Applying it failed.
    Failed(&'a str),
}

/// A shared view of allocations and resize conditions.
#[derive(Clone)]
pub struct Allocations(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    events: Arc<dyn EventSink>,
    clock: Arc<dyn Clock>,
    metrics: AllocationMetrics,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) entries: ResourceEntries,
    pub(super) conditions: HashMap<PodUid, ResizeConditions>,
}

impl Allocations {
    pub(super) fn new(
        entries: ResourceEntries,
        events: Arc<dyn EventSink>,
        clock: Arc<dyn Clock>,
        metrics: AllocationMetrics,
    ) -> Self {
        let state = Mutex::new(State { entries, ..State::default() });
        Self(Arc::new(Inner { state, events, clock, metrics }))
    }

    /// The pod with the resources it holds in place of those it asks for; the same `Arc` where
    /// nothing differs or nothing is known.
    pub fn allocated(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        let spec = self.read(|state| state.entries.get(pod.uid()).and_then(|held| held.applied_to(pod)));
        spec.map_or_else(|| pod.clone(), |spec| Arc::new(pod.with_spec(spec)))
    }

    /// Whether the pod holds something else than it asks for; a pod that holds nothing does not.
    pub fn wants_resize(&self, pod: &Pod) -> bool {
        self.read(|state| state.entries.get(pod.uid()).is_some_and(|held| held.differs_from(pod)))
    }

    /// The resize conditions of a pod, for its status: pending first.
    pub fn conditions(&self, pod: &PodUid) -> Vec<api::PodCondition> {
        self.read(|state| state.conditions.get(pod).map(ResizeConditions::to_api).unwrap_or_default())
    }

    /// Takes the conditions of the API's status for a pod of which none are known (after a
    /// restart of the agent).
    pub fn seed(&self, pod: &Pod) {
        let seen = ResizeConditions::from_api(pod);
        if !seen.is_empty() && !pod.is_api_terminal() {
            self.change(|state| {
                state.conditions.entry(pod.uid().clone()).or_insert(seen);
            });
        }
    }

    /// A worker tells how far it is. `allocated` is the pod as it worked on it: news about what
    /// is no longer allocated are ignored.
    pub fn progress(&self, allocated: &Pod, progress: Progress<'_>) {
        let (now, uid, generation) = (self.0.clock.now(), allocated.uid(), allocated.generation());
        let event = self.change(|state| {
            if state.entries.get(uid).is_some_and(|held| held.differs_from(allocated)) {
                return None;
            }
            match progress {
                Progress::Ongoing => {
                    state.conditions.entry(uid.clone()).or_default().set_in_progress(generation, now);
                    None
                }
                Progress::Done => {
                    state.conditions.get_mut(uid)?.in_progress.take()?;
                    let text = format!("Pod resize completed: {}", summary(allocated, ""));
                    Some(Event::normal(allocated.id(), "ResizeCompleted", text))
                }
                Progress::Failed(error) => {
                    let conditions = state.conditions.entry(uid.clone()).or_default();
                    let text = || format!("Pod resize error: {}", summary(allocated, error));
                    conditions
                        .set_failed(error, generation, now)
                        .then(|| Event::warning(allocated.id(), "ResizeError", text()))
                }
            }
        });
        if let Some(event) = event {
            self.0.events.record(event);
        }
    }

    /// The pod is terminal: nothing is resized any more.
    pub fn finished(&self, pod: &PodUid) {
        self.change(|state| state.conditions.remove(pod));
    }

    pub(super) fn read<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.0.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the state and counts the conditions again.
    pub(super) fn change<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut state);
        state.conditions.retain(|_, c| !c.is_empty());
        self.count(&state);
        result
    }

    fn count(&self, state: &State) {
        let metrics = &self.0.metrics;
        metrics.pending.reset();
        let mut in_progress = 0;
        for conditions in state.conditions.values() {
            if let Some(pending) = &conditions.pending {
                metrics.pending.with_label_values(&[pending.reason.metric_label()]).inc();
            }
            in_progress += i64::from(conditions.in_progress.is_some());
        }
        metrics.in_progress.set(in_progress);
    }

    pub(super) fn is_deferred(&self, pod: &PodUid) -> bool {
        let deferred = |c: &ResizeConditions| c.pending.as_ref().is_some_and(|p| p.reason == PendingReason::Deferred);
        self.read(|state| state.conditions.get(pod).is_some_and(deferred))
    }
}
