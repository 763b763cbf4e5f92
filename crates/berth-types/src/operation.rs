//! What the mux tells the engine. Pure.

use std::sync::Arc;

use super::{Pod, PodSource};

/// What happened to pods of one source (spec 02a §2.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// New UIDs.
    Add,
    /// Semantic changes.
    Update,
    /// Semantic changes with a deletion timestamp.
    Delete,
    /// UIDs gone from the set.
    Remove,
    /// Only the status differs.
    Reconcile,
}

/// One ordered operation on pods of one source. The first of each source may hold no pods: it
/// says that the source has answered.
#[derive(Clone, Debug, PartialEq)]
pub struct PodChange {
    /// What happened.
    pub operation: Operation,
    /// Which source tells it.
    pub source: PodSource,
    /// The pods.
    pub pods: Vec<Arc<Pod>>,
}
