//! Interfaces of the pod sources to events and to the API server.

use std::sync::Arc;

use async_trait::async_trait;

use berth_types::{Pod, PodRef};

/// Receives events and observations from the mux. Never blocks.
pub trait SourceEvents: Send + Sync + 'static {
    /// Records a Warning event on a pod.
    fn warning(&self, pod: &PodRef, reason: &'static str, message: String);
    /// Reports that a pod of the API was in a set (startup latency, spec 02b §9).
    fn observed(&self, pod: &Arc<Pod>);
}

/// The pods of the API server that are bound to this node (spec 02a §1.8).
///
/// The implementation lists and watches, and handles lost watches itself. Standalone nodes have none,
/// and then no `api` source is registered.
#[async_trait]
pub trait PodSourceFeed: Send + 'static {
    /// Waits for the next complete set. Pending while disconnected, so that pods are not removed
    /// because the API server is unreachable; `None` when the agent stops.
    ///
    /// Cancel-safe.
    async fn next_set(&mut self) -> Option<Vec<Arc<Pod>>>;
}
