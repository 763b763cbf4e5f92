//! Mirror pods: what the API server shows of static pods.

use std::{collections::HashMap, sync::Arc};

use berth_types::{Pod, PodFullName, PodUid};

/// What becomes of the mirror of one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MirrorFate {
    /// A static pod of that UID is desired: its mirror stays, and is made anew where it is lost.
    Desired(PodUid),
    /// A pod of that name is on its way out: its mirror stays until then, and is not made anew.
    Leaving,
}

/// Keeps a mirror of each static pod. Never blocks; errors are its own (spec 02a §5).
pub trait MirrorPods: Send + Sync + 'static {
    /// A static pod is worked on: it is to have a mirror. Told at each turn.
    fn want(&self, pod: &Arc<Pod>);
    /// All names that may have a mirror; those of any other name go. Told again and again, once
    /// every source has told its pods.
    fn keep(&self, names: HashMap<PodFullName, MirrorFate>);
}
