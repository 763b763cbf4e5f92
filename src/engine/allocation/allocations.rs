//! Shared view of allocated pod resources and resize conditions.
//!
//! Implements spec 02a §8.3-8.4. One mutex guards a small map and is never held across an await: a
//! worker's progress report and a new grant by the allocator are serialized (spec 02a §14).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    conditions::{PendingReason, ResizeConditions},
    resize::summary,
};
use berth_metrics::AllocationMetrics;
use berth_ports::{Clock, EventRecord, EventSink};
use berth_types::{Pod, PodUid, api, resource_state::ResourceEntries};

/// Actuation progress of a granted resize.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ActuationProgress<'a> {
    /// The allocated resources are not applied yet.
    Ongoing,
    /// The allocated resources are applied.
    Done,
    /// Actuation failed, with the error text.
    Failed(&'a str),
}

/// A shared view of allocations and resize conditions.
#[derive(Clone)]
pub struct Allocations(Arc<AllocationsInner>);

struct AllocationsInner {
    state: Mutex<AllocationState>,
    events: Arc<dyn EventSink>,
    clock: Arc<dyn Clock>,
    metrics: AllocationMetrics,
}

#[derive(Default)]
pub(super) struct AllocationState {
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
        let state = Mutex::new(AllocationState { entries, ..AllocationState::default() });
        Self(Arc::new(AllocationsInner { state, events, clock, metrics }))
    }

    /// The pod with its allocated resources in place of the requested ones; the same `Arc` if nothing
    /// differs or the pod has no allocation.
    pub fn allocated(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        let spec = self.read(|state| state.entries.get(pod.uid()).and_then(|allocation| allocation.applied_to(pod)));
        spec.map_or_else(|| pod.clone(), |spec| Arc::new(pod.with_spec(spec)))
    }

    /// Whether the pod requests other resources than it has allocated; false without an allocation.
    pub fn wants_resize(&self, pod: &Pod) -> bool {
        self.read(|state| state.entries.get(pod.uid()).is_some_and(|allocation| allocation.differs_from(pod)))
    }

    /// The resize conditions of a pod for its status, pending first.
    pub fn conditions(&self, pod: &PodUid) -> Vec<api::PodCondition> {
        self.read(|state| state.conditions.get(pod).map(ResizeConditions::to_api).unwrap_or_default())
    }

    /// Restores the conditions from the pod's API status after a restart of the agent; conditions that
    /// are already known win.
    pub fn seed(&self, pod: &Pod) {
        let seen = ResizeConditions::from_api(pod);
        if !seen.is_empty() && !pod.is_api_terminal() {
            self.change(|state| {
                state.conditions.entry(pod.uid().clone()).or_insert(seen);
            });
        }
    }

    /// Records the actuation progress that a worker reports. `allocated` is the pod that the worker
    /// actuated: progress of an outdated allocation is ignored.
    pub fn progress(&self, allocated: &Pod, progress: ActuationProgress<'_>) {
        let (now, uid, generation) = (self.0.clock.now(), allocated.uid(), allocated.generation());
        let event = self.change(|state| {
            if state.entries.get(uid).is_some_and(|allocation| allocation.differs_from(allocated)) {
                return None;
            }
            match progress {
                ActuationProgress::Ongoing => {
                    state.conditions.entry(uid.clone()).or_default().set_in_progress(generation, now);
                    None
                }
                ActuationProgress::Done => {
                    state.conditions.get_mut(uid)?.in_progress.take()?;
                    let text = format!("Pod resize completed: {}", summary(allocated, ""));
                    Some(EventRecord::normal(allocated.id(), "ResizeCompleted", text))
                }
                ActuationProgress::Failed(error) => {
                    let conditions = state.conditions.entry(uid.clone()).or_default();
                    let text = || format!("Pod resize error: {}", summary(allocated, error));
                    conditions
                        .set_failed(error, generation, now)
                        .then(|| EventRecord::warning(allocated.id(), "ResizeError", text()))
                }
            }
        });
        if let Some(event) = event {
            self.0.events.record(event);
        }
    }

    /// Removes the resize conditions of a terminal pod.
    pub fn finished(&self, pod: &PodUid) {
        self.change(|state| state.conditions.remove(pod));
    }

    pub(super) fn read<R>(&self, query: impl FnOnce(&AllocationState) -> R) -> R {
        query(&self.0.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies a change to the state and updates the condition metrics.
    pub(super) fn change<R>(&self, act: impl FnOnce(&mut AllocationState) -> R) -> R {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut state);
        state.conditions.retain(|_, c| !c.is_empty());
        self.count(&state);
        result
    }

    fn count(&self, state: &AllocationState) {
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
