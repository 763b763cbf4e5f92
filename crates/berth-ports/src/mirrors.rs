//! Port of the mirror pod manager: API server copies of static pods.

use std::{collections::HashMap, sync::Arc};

use berth_types::{Pod, PodFullName, PodUid};

/// Desired state of the mirror pods of one full name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MirrorPodState {
    /// A static pod of that UID is desired: its mirror pod stays, and is recreated if lost.
    Desired(PodUid),
    /// A pod of that name terminates: its mirror pod stays until then, and is not recreated.
    Terminating,
}

/// Keeps one mirror pod per static pod. Never blocks; the implementation handles errors (spec 02a §5).
pub trait MirrorPods: Send + Sync + 'static {
    /// Requests a mirror pod for a static pod. Called at each sync of the pod.
    fn ensure(&self, pod: &Arc<Pod>);
    /// Sets all names that may have a mirror pod; mirror pods of other names are deleted. Called repeatedly, once every
    /// source has delivered its pods.
    fn set_desired(&self, names: HashMap<PodFullName, MirrorPodState>);
}
