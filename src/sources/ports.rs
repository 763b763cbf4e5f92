//! What the sources need of others.

use std::sync::Arc;

use async_trait::async_trait;

use berth_types::{Pod, PodRef};

/// Takes what the mux has to tell about pods. Never blocks.
pub trait SourceEvents: Send + Sync + 'static {
    /// An event of type Warning on a pod.
    fn warning(&self, pod: &PodRef, reason: &'static str, message: String);
    /// A pod of the API was seen in a set (startup latency, spec 02b §9).
    fn observed(&self, pod: &Arc<Pod>);
}

/// The pods of the API server that are bound to this node (spec 02a §1.8).
///
/// Whoever plays this role lists and watches; a lost watch is its own affair. Standalone nodes
/// have none, and then no `api` source is registered.
#[async_trait]
pub trait PodSourceFeed: Send + 'static {
    /// The next complete set. Waits while disconnected, so that pods are not removed because the
    /// API server cannot be reached; `None` when the agent stops.
    ///
    /// Safe to drop while waiting.
    async fn next_set(&mut self) -> Option<Vec<Arc<Pod>>>;
}
