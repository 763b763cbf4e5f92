//! Pod updates that the config mux sends to the sync loop. Pure.

use std::sync::Arc;

use super::{Pod, PodSource};

/// Kind of a pod update from one source (spec 02a §2.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Pods with new UIDs.
    Add,
    /// Pods with semantic changes.
    Update,
    /// Pods with semantic changes and a deletion timestamp.
    Delete,
    /// Pods whose UIDs are no longer in the set.
    Remove,
    /// Pods of which only the status differs.
    Reconcile,
}

/// One ordered update of pods of one source. The first update of each source may be empty: it reports that the source
/// is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct PodChange {
    /// Kind of the update.
    pub operation: Operation,
    /// Source of the pods.
    pub source: PodSource,
    /// The affected pods.
    pub pods: Vec<Arc<Pod>>,
}
