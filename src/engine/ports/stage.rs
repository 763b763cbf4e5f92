//! The name of what a pod is waiting for, so that every wait can be shown.

use std::{
    borrow::Cow,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::time::Instant;

/// What a pod waits for, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageView {
    /// E.g. `RunPodSandbox`, `image busybox:latest`, `grace period`.
    pub name: Cow<'static, str>,
    /// Since when.
    pub since: Instant,
}

/// A worker's current stage: written by who waits, read by `why` and the server.
/// Cheap to clone; the lock is held for a copy only, never across an await.
#[derive(Clone, Debug)]
pub struct Stage(Arc<Mutex<StageView>>);

impl Stage {
    /// Starts as `idle`.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(StageView { name: "idle".into(), since: Instant::now() })))
    }

    /// Enters a stage.
    pub fn set(&self, name: impl Into<Cow<'static, str>>) {
        let next = StageView { name: name.into(), since: Instant::now() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }

    /// The current stage.
    pub fn view(&self) -> StageView {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}
