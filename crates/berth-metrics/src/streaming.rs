//! Metrics of streaming requests: exec, attach, and port-forward (spec 04 §8).

use prometheus::IntCounterVec;

use super::{Registry, Stability::Alpha};

/// Metric handles of the streaming endpoints.
#[derive(Clone, Debug)]
pub struct StreamingMetrics {
    web_sockets: IntCounterVec,
}

impl StreamingMetrics {
    /// Registers the families; a series appears with the first stream of its subresource.
    pub fn new(registry: &Registry) -> Self {
        Self {
            web_sockets: registry.counters(
                Alpha,
                "kubelet_websocket_streaming_requests_total",
                "Total number of WebSocket streaming requests received by the kubelet, by subresource.",
                &["subresource"],
            ),
        }
    }

    /// Counts a WebSocket request served by the kubelet; `subresource` is `exec`, `attach`, or `portforward`.
    pub fn web_socket(&self, subresource: &'static str) {
        self.web_sockets.with_label_values(&[subresource]).inc();
    }
}
