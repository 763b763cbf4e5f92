//! Metrics of HTTP requests to the agent's main and read-only ports.
//!
//! Label values come from closed sets: request data of unauthenticated clients never creates a series. Implements
//! spec 04 §8, 08 §4.12.

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use super::{Registry, Stability, buckets};

const LABELS: &[&str] = &["method", "path", "server_type", "long_running"];

/// Metric handles of the request pipeline.
#[derive(Clone)]
pub struct ServerMetrics {
    /// Received requests, counted before authentication.
    pub requests: IntCounterVec,
    /// Seconds until the last byte of the response, or until the end of a stream.
    pub duration: HistogramVec,
    /// Requests in progress.
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
