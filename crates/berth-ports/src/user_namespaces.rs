//! The role of who hands out host ids to pods with their own user namespace.

use async_trait::async_trait;

use super::ResourceError;
use berth_types::PodUid;

/// Host ids that belong to one pod: its id 0 is the host's `first`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IdRange {
    /// The first host id.
    pub first: u32,
    /// How many ids.
    pub length: u32,
}

/// Hands out ranges that never overlap and remembers them across restarts (spec 06 §5).
#[async_trait]
pub trait UserNamespaces: Send + Sync + 'static {
    /// The pod's range; the one it has, or the lowest free one, written down before it is returned.
    ///
    /// # Errors
    /// Where no range is free, or what is written down for the pod is malformed.
    async fn assign(&self, pod: &PodUid) -> Result<IdRange, ResourceError>;
    /// Takes the range of a pod back, if it has one.
    async fn release(&self, pod: &PodUid);
}
