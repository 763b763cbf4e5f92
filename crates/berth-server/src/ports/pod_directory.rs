//! Which pods there are, as snapshots of what the sync loop and the status manager publish.

use std::sync::Arc;

use tokio::sync::watch;

use berth_types::{Pod, PodUid, api};

/// All pods, anew with each change.
pub type PodSnapshots = watch::Receiver<Arc<Vec<Arc<Pod>>>>;

/// The pods this agent has been told to run.
pub trait PodDirectory: Send + Sync + 'static {
    /// All of them, mirrors excluded, in order of namespace, name and UID.
    fn pods(&self) -> Arc<Vec<Arc<Pod>>>;
    /// Whether a pod still counts: not known to be terminated, and its phase not terminal unless its
    /// termination goes on (spec 04b §12).
    fn is_active(&self, pod: &Pod) -> bool;
    /// What the status manager says of a pod, where it says anything.
    fn status(&self, uid: &PodUid) -> Option<Arc<api::PodStatus>>;

    /// The pod of that namespace and name.
    fn find(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.pods().iter().find(|pod| pod.namespace() == namespace && pod.name() == name).cloned()
    }
}

/// A directory that tells when it has changed.
pub trait PodFeed: PodDirectory {
    /// Changes with every pod that comes, changes or goes; and with every status.
    fn changes(&self) -> (PodSnapshots, watch::Receiver<u64>);
}
