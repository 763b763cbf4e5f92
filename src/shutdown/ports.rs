//! What the end of a node needs of the engine.

use std::sync::Arc;

use async_trait::async_trait;

use super::classes::Given;
use crate::pod::{Pod, PodUid};

/// The pods.
#[async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Those of which something may run.
    fn active(&self) -> Vec<Arc<Pod>>;
    /// Ends a pod and waits until nothing of it runs and nothing is mounted.
    ///
    /// # Errors
    /// It does not end.
    async fn end(&self, pod: &Arc<Pod>, given: Given) -> Result<(), String>;
    /// Waits until what became of these pods is with the API server, where there is one.
    async fn told(&self, pods: &[PodUid]);
    /// Says whether the node goes down: admission and the node's status follow.
    fn set_shutting_down(&self, is: bool);
}
