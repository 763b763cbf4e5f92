//! Metrics of writes to the API server: rejected writes, pending statuses, and events.
//!
//! Implements spec 10 §10, 05 §13.1.

use prometheus::{IntCounterVec, IntGauge};

use super::{Registry, Stability::Alpha};

/// Metric handles of API writers: statuses, mirror pods, events.
#[derive(Clone, Debug)]
pub struct ApiWriteMetrics {
    refused: IntCounterVec,
    /// Pod statuses whose latest version the API server does not have yet.
    pub status_pending: IntGauge,
    events_dropped: IntCounterVec,
    /// Events waiting to be sent.
    pub events_queued: IntGauge,
}

/// Reason for which an event was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventLoss {
    /// The queue was full; the oldest event was dropped.
    Overrun,
    /// The spam filter: too many events about one object.
    Spam,
    /// The API server rejected it.
    Refused,
    /// Delivery failed for too long.
    Undeliverable,
}

impl EventLoss {
    fn label(self) -> &'static str {
        match self {
            Self::Overrun => "overrun",
            Self::Spam => "spam",
            Self::Refused => "refused",
            Self::Undeliverable => "undeliverable",
        }
    }
}

impl ApiWriteMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let metrics = Self {
            refused: registry.counters(
                Alpha,
                "berth_api_refused_total",
                "Cumulative number of writes permanently rejected by the API server, by resource, verb, and reason.",
                &["resource", "verb", "reason"],
            ),
            status_pending: registry.gauge(
                Alpha,
                "berth_pod_status_pending",
                "Number of pod statuses whose latest version is not yet sent to the API server.",
            ),
            events_dropped: registry.counters(
                Alpha,
                "berth_events_dropped_total",
                "Cumulative number of events dropped before they were sent to the API server, by cause.",
                &["cause"],
            ),
            events_queued: registry.gauge(
                Alpha,
                "berth_events_queued",
                "Number of events queued for sending to the API server.",
            ),
        };
        // Initialized to 0: `increase()` misses a series that starts at one.
        for cause in [EventLoss::Overrun, EventLoss::Spam, EventLoss::Refused, EventLoss::Undeliverable] {
            metrics.events_dropped.with_label_values(&[cause.label()]);
        }
        metrics
    }

    /// Counts a write that the API server rejected permanently.
    pub fn refused(&self, resource: &str, verb: &str, reason: &str) {
        self.refused.with_label_values(&[resource, verb, reason]).inc();
    }

    /// Counts a dropped event.
    pub fn events_lost(&self, cause: EventLoss) {
        self.events_dropped.with_label_values(&[cause.label()]).inc();
    }
}
