//! Metrics of graceful node shutdown (spec 05 §7.6, spec 08 §4.8).

use jiff::Timestamp;
use prometheus::Gauge;

use super::{Registry, Stability::Alpha};

/// Metric handles of graceful node shutdown.
#[derive(Clone, Debug)]
pub struct ShutdownMetrics {
    start: Gauge,
    end: Gauge,
}

impl ShutdownMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let gauge = |name, help| registry.float_gauge(Alpha, name, help);
        Self {
            start: gauge(
                "kubelet_graceful_shutdown_start_time_seconds",
                "Last graceful shutdown start time since unix epoch in seconds",
            ),
            end: gauge(
                "kubelet_graceful_shutdown_end_time_seconds",
                "Last graceful shutdown start time since unix epoch in seconds",
            ),
        }
    }

    /// Sets start and end time of the last shutdown, seconds since the epoch; `None` is exported as 0.
    pub fn set(&self, start: Option<Timestamp>, end: Option<Timestamp>) {
        let seconds = |time: Option<Timestamp>| time.map_or(0.0, |time| time.as_millisecond() as f64 / 1000.0);
        self.start.set(seconds(start));
        self.end.set(seconds(end));
    }
}
