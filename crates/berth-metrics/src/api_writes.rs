//! What is written to the API server, and what it does not take (spec 10 §10, 05 §13.1).

use prometheus::{IntCounterVec, IntGauge};

use super::{Registry, Stability::Alpha};

/// Handles of those who write objects: statuses, mirror pods, events.
#[derive(Clone, Debug)]
pub struct ApiWriteMetrics {
    refused: IntCounterVec,
    /// Statuses of which the server has not got the latest version.
    pub status_pending: IntGauge,
    events_dropped: IntCounterVec,
    /// Events that wait to be sent.
    pub events_queued: IntGauge,
}

/// Why an event was not sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventLoss {
    /// Too many waited; the oldest went.
    Overrun,
    /// The spam filter: too many about one object.
    Spam,
    /// The server refused it.
    Refused,
    /// It could not be delivered for too long.
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
                "Writes that the API server refused for good, by resource, verb and reason.",
                &["resource", "verb", "reason"],
            ),
            status_pending: registry.gauge(
                Alpha,
                "berth_pod_status_pending",
                "Pod statuses of which the API server has not got the latest version.",
            ),
            events_dropped: registry.counters(
                Alpha,
                "berth_events_dropped_total",
                "Events that were not sent to the API server, by cause.",
                &["cause"],
            ),
            events_queued: registry.gauge(
                Alpha,
                "berth_events_queued",
                "Events that wait to be sent to the API server.",
            ),
        };
        // Who asks for an increase misses a series that begins with one.
        for cause in [EventLoss::Overrun, EventLoss::Spam, EventLoss::Refused, EventLoss::Undeliverable] {
            metrics.events_dropped.with_label_values(&[cause.label()]);
        }
        metrics
    }

    /// The server refused a write for good.
    pub fn refused(&self, resource: &str, verb: &str, reason: &str) {
        self.refused.with_label_values(&[resource, verb, reason]).inc();
    }

    /// Events were not sent.
    pub fn events_lost(&self, cause: EventLoss) {
        self.events_dropped.with_label_values(&[cause.label()]).inc();
    }
}
