//! Node startup metrics: recorded once, only by the process that created the node object.
//!
//! Implements spec 08 §4.5.

use jiff::Timestamp;

use berth_metrics::NodeMetrics;
use berth_types::api;

/// Progress from the first registration attempt to the first Ready status.
pub(super) struct Start {
    metrics: NodeMetrics,
    stage: Stage,
}

enum Stage {
    /// No registration attempt yet.
    Fresh,
    /// Registering since the time of the first attempt.
    Trying(Timestamp),
    /// Node object created at this time, not Ready yet.
    Created(Timestamp),
    /// All metrics are recorded, or do not apply.
    Over,
}

impl Start {
    pub(super) fn new(metrics: NodeMetrics) -> Self {
        Self { metrics, stage: Stage::Fresh }
    }

    /// Records a registration attempt.
    pub(super) fn attempted(&mut self, now: Timestamp) {
        if matches!(self.stage, Stage::Fresh) {
            self.stage = Stage::Trying(now);
        }
    }

    /// Records that this process created the node.
    pub(super) fn created(&mut self, now: Timestamp) {
        if let Stage::Trying(first) = self.stage {
            self.metrics.registered(first, now);
            self.stage = Stage::Created(now);
        }
    }

    /// Records a reported status.
    pub(super) fn told(&mut self, node: &api::Node, now: Timestamp) {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let is_ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        match self.stage {
            Stage::Created(created) if is_ready => {
                self.metrics.ready(created, now);
                self.stage = Stage::Over;
            }
            Stage::Trying(_) => self.stage = Stage::Over, // the node object existed before
            _ => {}
        }
    }
}
