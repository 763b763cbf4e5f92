//! Requests to the server (spec 04 §8, 08 §4.12). Label values come from fixed sets only: what a
//! stranger asks for never becomes a series.

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use super::{Registry, Stability, buckets};

const LABELS: &[&str] = &["method", "path", "server_type", "long_running"];

/// Handles of the request metrics.
#[derive(Clone)]
pub struct ServerMetrics {
    /// Requests that arrived, counted before anybody is asked who he is.
    pub requests: IntCounterVec,
    /// Seconds until the last byte of the answer, or until a stream ended.
    pub duration: HistogramVec,
    /// Requests being answered.
    pub inflight: IntGaugeVec,
    /// Handlers that panicked.
    pub panics: prometheus::IntCounter,
}

impl ServerMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let alpha = Stability::Alpha;
        Self {
            requests: registry.counters(
                alpha,
                "kubelet_http_requests_total",
                "Number of the http requests received since the server started",
                LABELS,
            ),
            duration: registry.histograms(
                alpha,
                "kubelet_http_requests_duration_seconds",
                "Duration in seconds to serve http requests",
                buckets::DEF,
                LABELS,
            ),
            inflight: registry.gauges(
                alpha,
                "kubelet_http_inflight_requests",
                "Number of the inflight http requests",
                LABELS,
            ),
            panics: registry.counter(
                alpha,
                "kubelet_http_panics_total",
                "Number of handlers of http requests that panicked",
            ),
        }
    }
}
