//! Registry of the liveness of long-running tasks, by name (spec 05 §11).

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use berth_ports::TaskLiveness;

/// Liveness of the registered tasks. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct TaskLivenessRegistry(Arc<Mutex<Vec<(&'static str, TaskLiveness)>>>);

impl TaskLivenessRegistry {
    /// Registers a task; its name becomes that of a health check.
    pub fn of(&self, name: &'static str) -> TaskLiveness {
        let liveness = TaskLiveness::default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((name, liveness.clone()));
        liveness
    }

    /// Names of all registered tasks.
    pub fn names(&self) -> Vec<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(name, _)| *name).collect()
    }

    /// Time since the last report of a task that is overdue; `None` if it is not overdue or unknown.
    pub fn overdue_for(&self, name: &str) -> Option<Duration> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|(known, _)| *known == name)?.1.overdue_for()
    }
}
