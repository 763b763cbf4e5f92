//! Probe results by container instance, written by the probe scheduler and readable by all.
//!
//! Results of an earlier agent are stored separately until the container is probed again. Implements spec 05 §1.1,
//! §1.10 (results survive a restart).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::{checkpoint::ResultsCheckpoint, history::Histories, kind::ProbeKind};
use berth_ports::{ProbeResult, ProbeResults};
use berth_types::ContainerId;

#[derive(Default)]
struct ResultMaps {
    current: HashMap<ContainerId, ProbeResults>,
    restored: HashMap<ContainerId, ProbeResults>,
}

/// Probe results, with change notification.
#[derive(Default)]
pub struct Results {
    /// Recent outcomes of attempts.
    pub histories: Histories,
    state: Mutex<ResultMaps>,
    changed: Notify,
}

/// The field of a probe kind.
pub fn result_mut(results: &mut ProbeResults, kind: ProbeKind) -> &mut Option<ProbeResult> {
    match kind {
        ProbeKind::Startup => &mut results.startup,
        ProbeKind::Readiness => &mut results.readiness,
        ProbeKind::Liveness => &mut results.liveness,
    }
}

impl Results {
    /// Creates results with those that an earlier agent saved.
    pub fn new(saved: ResultsCheckpoint) -> Self {
        let restored = saved.into_results();
        let state = ResultMaps { current: HashMap::new(), restored };
        Self { histories: Histories::default(), state: Mutex::new(state), changed: Notify::new() }
    }

    /// Current results of an instance; startup and readiness fall back to those of an earlier agent.
    pub fn of(&self, container: &ContainerId) -> ProbeResults {
        let state = self.lock();
        let now = state.current.get(container).copied().unwrap_or_default();
        let before = state.restored.get(container).copied().unwrap_or_default();
        ProbeResults {
            startup: now.startup.or(before.startup),
            readiness: now.readiness.or(before.readiness),
            liveness: now.liveness,
        }
    }

    /// Sets the initial result, unless there is one; a result of an earlier agent takes precedence over `seed`.
    pub fn seed(&self, container: &ContainerId, kind: ProbeKind, seed: Option<ProbeResult>) {
        let mut state = self.lock();
        let before = state.restored.get_mut(container).and_then(|results| result_mut(results, kind).take());
        if let Some(result) = before.or(seed) {
            result_mut(state.current.entry(container.clone()).or_default(), kind).get_or_insert(result);
        }
    }

    /// Sets a result; returns whether it changed.
    pub fn set(&self, container: &ContainerId, kind: ProbeKind, result: ProbeResult) -> bool {
        let mut state = self.lock();
        let place = result_mut(state.current.entry(container.clone()).or_default(), kind);
        let is_news = place.replace(result) != Some(result);
        drop(state);
        if is_news {
            self.changed.notify_one();
        }
        is_news
    }

    /// Deletes result and history of one probe.
    pub fn forget(&self, container: &ContainerId, kind: ProbeKind) {
        self.histories.forget(container, kind);
        let mut state = self.lock();
        if let Some(results) = state.current.get_mut(container) {
            *result_mut(results, kind) = None;
            if *results == ProbeResults::default() {
                state.current.remove(container);
            }
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Deletes the results of an earlier agent, except those of containers that may still be probed; returns whether
    /// any remain.
    pub fn forget_restored(&self, is_to_come: impl Fn(&ContainerId) -> bool) -> bool {
        let mut state = self.lock();
        state.restored.retain(|container, results| *results != ProbeResults::default() && is_to_come(container));
        let some = !state.restored.is_empty();
        drop(state);
        self.changed.notify_one();
        some
    }

    /// The results to save.
    pub fn to_save(&self) -> ResultsCheckpoint {
        let state = self.lock();
        ResultsCheckpoint::of(state.restored.iter().chain(&state.current))
    }

    /// Waits for a change of the results.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, ResultMaps> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ProbeResult::{Failure, Success};

    #[test]
    fn only_news_is_news() {
        let results = Results::default();
        let id: ContainerId = "c".into();
        results.seed(&id, ProbeKind::Readiness, Some(Failure));
        assert!(!results.set(&id, ProbeKind::Readiness, Failure), "as it began");
        assert!(results.set(&id, ProbeKind::Readiness, Success) && !results.set(&id, ProbeKind::Readiness, Success));
        assert!(results.set(&id, ProbeKind::Startup, Success), "the first word");
        results.seed(&id, ProbeKind::Readiness, Some(Failure));
        let expected = ProbeResults { startup: Some(Success), readiness: Some(Success), liveness: None };
        assert_eq!(results.of(&id), expected, "what is there stays");
        results.forget(&id, ProbeKind::Readiness);
        results.forget(&id, ProbeKind::Startup);
        assert_eq!(results.of(&id), ProbeResults::default());
        assert!(results.lock().current.is_empty());
    }

    #[test]
    fn ac_05_11_an_earlier_agents_results_stand_until_they_are_replaced() {
        let before = Results::default();
        let id: ContainerId = "c".into();
        before.set(&id, ProbeKind::Readiness, Success);
        before.set(&id, ProbeKind::Startup, Success);
        before.set(&id, ProbeKind::Liveness, Failure);
        let after = Results::new(before.to_save());
        let expected = ProbeResults { startup: Some(Success), readiness: Some(Success), liveness: None };
        assert_eq!(after.of(&id), expected);
        assert_eq!(Results::new(after.to_save()).of(&id), expected, "twice");
        after.seed(&id, ProbeKind::Readiness, Some(Failure));
        assert_eq!(after.of(&id), expected, "no seed over it");
        after.set(&id, ProbeKind::Readiness, Failure);
        assert!(after.forget_restored(|container| *container == id), "its startup probe still has to run");
        assert_eq!(after.of(&id), ProbeResults { readiness: Some(Failure), ..expected });
        assert!(!after.forget_restored(|_| false));
        assert_eq!(after.of(&id), ProbeResults { readiness: Some(Failure), ..ProbeResults::default() });
    }
}
