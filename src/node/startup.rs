//! How long this node took to start: told once, and only by the process that made the node. Spec 08 §4.5.

use jiff::Timestamp;

use berth_metrics::NodeMetrics;
use berth_types::api;

/// The way from the first attempt to the first ready status.
pub(super) struct Start {
    metrics: NodeMetrics,
    stage: Stage,
}

enum Stage {
    /// Nothing was tried.
    Fresh,
    /// First tried then.
    Trying(Timestamp),
    /// Made then, not ready yet.
    Created(Timestamp),
    /// All is told.
    Over,
}

impl Start {
    pub(super) fn new(metrics: NodeMetrics) -> Self {
        Self { metrics, stage: Stage::Fresh }
    }

    /// The node is about to be made.
    pub(super) fn attempted(&mut self, now: Timestamp) {
        if matches!(self.stage, Stage::Fresh) {
            self.stage = Stage::Trying(now);
        }
    }

    /// We made it.
    pub(super) fn created(&mut self, now: Timestamp) {
        if let Stage::Trying(first) = self.stage {
            self.metrics.registered(first, now);
            self.stage = Stage::Created(now);
        }
    }

    /// A status was told.
    pub(super) fn told(&mut self, node: &api::Node, now: Timestamp) {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let is_ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        match self.stage {
            Stage::Created(created) if is_ready => {
                self.metrics.ready(created, now);
                self.stage = Stage::Over;
            }
            Stage::Trying(_) => self.stage = Stage::Over, // it was there already
            _ => {}
        }
    }
}
