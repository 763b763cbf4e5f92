//! When a node status is worth sending. Pure. Spec 05 §4.1, §4.8.

use std::time::Duration;

use berth_types::api;

/// How much two statuses differ.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Change {
    /// In nothing but heartbeats.
    Nothing,
    /// In the list of images, which waits for the next report.
    Images,
    /// In something that others wait for.
    Something,
}

/// Compares what is to be told with what was told; heartbeats and the order of conditions do not
/// count.
pub fn change(before: &api::Node, after: &api::Node) -> Change {
    let (mut old, mut new) = (comparable(before), comparable(after));
    let images = [&mut old, &mut new].map(|status| status.images.take().unwrap_or_default());
    // Annotations count too: a cloud reads which addresses were given.
    let metadata = |node: &api::Node| {
        let metadata = &node.metadata;
        (metadata.labels.clone().unwrap_or_default(), metadata.annotations.clone().unwrap_or_default())
    };
    if old != new || metadata(before) != metadata(after) {
        Change::Something
    } else if images[0] != images[1] {
        // The first list is waited for; how it changes is not.
        if images[0].is_empty() { Change::Something } else { Change::Images }
    } else {
        Change::Nothing
    }
}

fn comparable(node: &api::Node) -> api::NodeStatus {
    let mut status = node.status.clone().unwrap_or_default();
    let mut conditions = status.conditions.unwrap_or_default();
    for condition in &mut conditions {
        condition.last_heartbeat_time = None;
        // Written with seconds, read with seconds.
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

/// When an unchanged status is told again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reports {
    frequency: Duration,
    /// Frequency and the delay that was drawn.
    until: Duration,
    was_sent: bool,
}

impl Reports {
    /// Nothing was told yet.
    pub fn new(frequency: Duration) -> Self {
        Self { frequency, until: Duration::ZERO, was_sent: false }
    }

    /// Whether it is time, so long after the last one.
    pub fn is_due(&self, since_last: Duration) -> bool {
        !self.was_sent || since_last >= self.until
    }

    /// One was told because of a change, or because it was time. After a change the next one comes
    /// up to half a period earlier or later (`chance` is uniform in 0..1), so that nodes that
    /// changed together do not report together for ever.
    pub fn sent(&mut self, was_changed: bool, chance: f64) {
        let factor = if was_changed || !self.was_sent { 0.5 + chance.clamp(0.0, 1.0) } else { 1.0 };
        self.until = self.frequency.mul_f64(factor);
        self.was_sent = true;
    }
}

/// The pause between two looks: the frequency and up to 4 % more.
pub fn pause(frequency: Duration, chance: f64) -> Duration {
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
            Change::Nothing,
        );
        let images = |name: &str| json!({"images": [{"names": [name]}]});
        check(images("x"), images("y"), Change::Images);
        check(json!({}), images("x"), Change::Something);
        check(json!({}), json!({"images": [{"names": ["x"]}], "phase": "x"}), Change::Something);
        check(
            json!({"conditions": [condition("A", a, a)]}),
            json!({"conditions": [condition("A", a, b)]}),
            Change::Something,
        );
    }

    #[test]
    fn reports_come_once_a_period_with_a_delay_after_changes() {
        // AC-05-24
        let seconds = Duration::from_secs;
        let mut reports = Reports::new(seconds(300));
        assert!(reports.is_due(seconds(0)));
        reports.sent(false, 1.0);
        assert!(!reports.is_due(seconds(449)) && reports.is_due(seconds(450)));
        reports.sent(false, 1.0);
        assert!(!reports.is_due(seconds(299)) && reports.is_due(seconds(300)));
        reports.sent(true, 0.0);
        assert!(!reports.is_due(seconds(149)) && reports.is_due(seconds(150)));
        assert_eq!(pause(seconds(10), 1.0), Duration::from_millis(10_400));
    }
}
