//! Node status reporting policy: comparison of statuses, report period, jitter. Pure.
//!
//! Implements spec 05 §4.1, §4.8.

use std::time::Duration;

use berth_types::api;

/// Difference between two node statuses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum StatusChange {
    /// Nothing but heartbeats.
    Nothing,
    /// Only the list of images, which is sent with the next periodic report.
    Images,
    /// Anything else: report it immediately.
    Urgent,
}

/// Compares the reported status with the new one; heartbeats and the order of conditions are ignored.
pub fn change(before: &api::Node, after: &api::Node) -> StatusChange {
    let (mut old, mut new) = (comparable(before), comparable(after));
    let images = [&mut old, &mut new].map(|status| status.images.take().unwrap_or_default());
    // Annotations are compared, too: a cloud provider reads the configured node IPs from them.
    let metadata = |node: &api::Node| {
        let metadata = &node.metadata;
        (metadata.labels.clone().unwrap_or_default(), metadata.annotations.clone().unwrap_or_default())
    };
    if old != new || metadata(before) != metadata(after) {
        StatusChange::Urgent
    } else if images[0] != images[1] {
        // The first image list is reported immediately, later changes are not.
        if images[0].is_empty() { StatusChange::Urgent } else { StatusChange::Images }
    } else {
        StatusChange::Nothing
    }
}

fn comparable(node: &api::Node) -> api::NodeStatus {
    let mut status = node.status.clone().unwrap_or_default();
    let mut conditions = status.conditions.unwrap_or_default();
    for condition in &mut conditions {
        condition.last_heartbeat_time = None;
        // Compared in whole seconds, as they are serialized.
        if let Some(time) = &mut condition.last_transition_time {
            time.0 = jiff::Timestamp::from_second(time.0.as_second()).unwrap_or(time.0);
        }
    }
    conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    status.conditions = Some(conditions);
    fn some<T>(list: Option<Vec<T>>) -> Option<Vec<T>> {
        list.filter(|list| !list.is_empty())
    }
    status.images = some(status.images);
    status.addresses = some(status.addresses);
    status.volumes_in_use = some(status.volumes_in_use);
    status.volumes_attached = some(status.volumes_attached);
    status.runtime_handlers = some(status.runtime_handlers);
    status.declared_features = some(status.declared_features);
    status
}

/// Schedule of reports of an unchanged status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReportSchedule {
    frequency: Duration,
    /// Time from the last report to the next: frequency with jitter.
    until: Duration,
    was_sent: bool,
}

impl ReportSchedule {
    /// Creates a schedule; the first report is due immediately.
    pub fn new(frequency: Duration) -> Self {
        Self { frequency, until: Duration::ZERO, was_sent: false }
    }

    /// Whether a report is due, `since_last` after the last one.
    pub fn is_due(&self, since_last: Duration) -> bool {
        !self.was_sent || since_last >= self.until
    }

    /// Records a report, caused by a change or by the schedule. After a change the next one is shifted by up to half a
    /// period earlier or later (`chance` is uniform in 0..1), so that nodes that changed together do not report
    /// together forever.
    pub fn sent(&mut self, was_changed: bool, chance: f64) {
        let factor = if was_changed || !self.was_sent { 0.5 + chance.clamp(0.0, 1.0) } else { 1.0 };
        self.until = self.frequency.mul_f64(factor);
        self.was_sent = true;
    }
}

/// Delay until the next update: the frequency plus a jitter of up to 4 %.
pub fn jittered(frequency: Duration, chance: f64) -> Duration {
    frequency.mul_f64(1.0 + 0.04 * chance.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn heartbeats_and_order_are_no_change() {
        let node = |status: Value| serde_json::from_value::<api::Node>(json!({"metadata": {}, "status": status}));
        let check = |old: Value, new: Value, expected| {
            assert_eq!(change(&node(old).expect("a node"), &node(new).expect("a node")), expected);
        };
        let condition = |kind: &str, beat: &str, since: &str| {
            json!({"type": kind, "status": "True",
            "lastHeartbeatTime": beat, "lastTransitionTime": since})
        };
        let (a, b, c) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z", "2026-01-01T00:00:00.9Z");
        check(
            json!({"conditions": [condition("A", a, a), condition("B", a, a)], "images": []}),
            json!({"conditions": [condition("B", b, c), condition("A", b, a)], "volumesInUse": []}),
            StatusChange::Nothing,
        );
        let images = |name: &str| json!({"images": [{"names": [name]}]});
        check(images("x"), images("y"), StatusChange::Images);
        check(json!({}), images("x"), StatusChange::Urgent);
        check(json!({}), json!({"images": [{"names": ["x"]}], "phase": "x"}), StatusChange::Urgent);
        check(
            json!({"conditions": [condition("A", a, a)]}),
            json!({"conditions": [condition("A", a, b)]}),
            StatusChange::Urgent,
        );
    }

    #[test]
    fn reports_come_once_a_period_with_a_delay_after_changes() {
        // AC-05-24
        let seconds = Duration::from_secs;
        let mut reports = ReportSchedule::new(seconds(300));
        assert!(reports.is_due(seconds(0)));
        reports.sent(false, 1.0);
        assert!(!reports.is_due(seconds(449)) && reports.is_due(seconds(450)));
        reports.sent(false, 1.0);
        assert!(!reports.is_due(seconds(299)) && reports.is_due(seconds(300)));
        reports.sent(true, 0.0);
        assert!(!reports.is_due(seconds(149)) && reports.is_due(seconds(150)));
        assert_eq!(jittered(seconds(10), 1.0), Duration::from_millis(10_400));
    }
}
