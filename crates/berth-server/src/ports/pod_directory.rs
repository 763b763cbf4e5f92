//! Port for pods and their statuses: snapshots that the sync loop and the status manager publish.

use std::sync::Arc;

use futures::stream::BoxStream;

use berth_types::{Pod, PodUid, api};

/// Pods assigned to this agent, with their statuses.
pub trait PodDirectory: Send + Sync + 'static {
    /// All pods except mirror pods, sorted by namespace, name, and UID.
    fn pods(&self) -> Arc<Vec<Arc<Pod>>>;
    /// Whether a pod is active: it is not known to be terminated, and its phase is not terminal unless its termination
    /// is still in progress (spec 04b §12).
    fn is_active(&self, pod: &Pod) -> bool;
    /// Status of a pod in the status manager; `None` where it has none.
    fn status(&self, uid: &PodUid) -> Option<Arc<api::PodStatus>>;

    /// Finds a pod by namespace and name.
    fn find(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.pods().iter().find(|pod| pod.namespace() == namespace && pod.name() == name).cloned()
    }
}

/// Pod directory that notifies watchers of changes.
pub trait PodFeed: PodDirectory {
    /// Yields whenever a pod is added, updated, or removed, or a status changes, from now on; ends with the agent. Changes
    /// in quick succession may yield once.
    fn changes(&self) -> BoxStream<'static, ()>;
}
