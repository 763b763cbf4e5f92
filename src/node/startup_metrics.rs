//! Node startup metrics: recorded once, only by the process that created the node object.
//!
//! Implements spec 08 §4.5.

use jiff::Timestamp;

use berth_metrics::NodeMetrics;
use berth_types::api;

/// Progress from the first registration attempt to the first Ready status.
pub(super) struct StartupMetrics {
    metrics: NodeMetrics,
    stage: StartupStage,
}

enum StartupStage {
    /// No registration attempt yet.
    Fresh,
    /// Registering since the time of the first attempt.
    Trying(Timestamp),
    /// Node object created at this time, not Ready yet.
    Created(Timestamp),
    /// All metrics are recorded, or do not apply.
    Over,
}

impl StartupMetrics {
    pub(super) fn new(metrics: NodeMetrics) -> Self {
        Self { metrics, stage: StartupStage::Fresh }
    }

    /// Records a registration attempt.
    pub(super) fn attempted(&mut self, now: Timestamp) {
        if matches!(self.stage, StartupStage::Fresh) {
            self.stage = StartupStage::Trying(now);
        }
    }

    /// Records that this process created the node.
    pub(super) fn created(&mut self, now: Timestamp) {
        if let StartupStage::Trying(first) = self.stage {
            self.metrics.registered(first, now);
            self.stage = StartupStage::Created(now);
        }
    }

    /// Records a reported status.
    pub(super) fn record_status(&mut self, node: &api::Node, now: Timestamp) {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let is_ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        match self.stage {
            StartupStage::Created(created) if is_ready => {
                self.metrics.ready(created, now);
                self.stage = StartupStage::Over;
            }
            StartupStage::Trying(_) => self.stage = StartupStage::Over, // the node object existed before
            _ => {}
        }
    }
}
