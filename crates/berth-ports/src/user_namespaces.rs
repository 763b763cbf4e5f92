//! Port of the user namespace manager: host id ranges for pods with `hostUsers: false`.

use async_trait::async_trait;

use super::ResourceError;
use berth_types::PodUid;

/// Host id range of one pod: id 0 in the pod is `first` on the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IdRange {
    /// First host id.
    pub first: u32,
    /// Number of ids.
    pub length: u32,
}

/// Allocates disjoint id ranges and persists them across restarts (spec 06 §5).
#[async_trait]
pub trait UserNamespaces: Send + Sync + 'static {
    /// Returns the pod's range: its existing one, or the lowest free one, persisted before it is returned.
    ///
    /// # Errors
    /// If no range is free, or the pod's persisted range is malformed.
    async fn assign(&self, pod: &PodUid) -> Result<IdRange, ResourceError>;
    /// Releases the range of a pod, if it has one.
    async fn release(&self, pod: &PodUid);
}
