//! Metrics of the PodResources API and of the pods API. Implements spec 04b §12, 08 §4.14.

use prometheus::{IntCounter, IntCounterVec};

use super::{Registry, Stability};

/// The `server_api_version` label.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndpointVersion {
    /// `v1`
    V1,
    /// `v1alpha1`
    V1Alpha1,
}

impl EndpointVersion {
    fn label(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V1Alpha1 => "v1alpha1",
        }
    }
}

/// RPC of the PodResources API; v1alpha1 requests are counted in total only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PodResourcesCall {
    /// `List`
    List,
    /// `GetAllocatableResources`
    GetAllocatable,
    /// `Get`
    Get,
}

/// Metric handles of the PodResources API.
#[derive(Clone)]
pub struct PodResourcesMetrics {
    total: IntCounterVec,
    requests: [IntCounterVec; 3],
    errors: [IntCounterVec; 3],
}

impl PodResourcesMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let family = |suffix: &str, help: &str| {
            let name = format!("kubelet_pod_resources_endpoint_{suffix}");
            registry.counters(Stability::Alpha, &name, help, &["server_api_version"])
        };
        Self {
            total: family("requests_total", "Cumulative number of requests to the PodResource endpoint."),
            requests: [
                family("requests_list", "Number of requests to the PodResource List endpoint."),
                family(
                    "requests_get_allocatable",
                    "Number of requests to the PodResource GetAllocatableResources endpoint.",
                ),
                family("requests_get", "Number of requests to the PodResource Get endpoint."),
            ],
            errors: [
                family("errors_list", "Number of requests to the PodResource List endpoint which returned error."),
                family(
                    "errors_get_allocatable",
                    "Number of requests to the PodResource GetAllocatableResources endpoint which returned error.",
                ),
                family("errors_get", "Number of requests to the PodResource Get endpoint which returned error."),
            ],
        }
    }

    /// Counts an accepted request.
    pub fn requested(&self, version: EndpointVersion, call: PodResourcesCall) {
        self.total.with_label_values(&[version.label()]).inc();
        if version == EndpointVersion::V1 {
            self.requests[call as usize].with_label_values(&[version.label()]).inc();
        }
    }

    /// Counts a v1 request that was answered with an error.
    pub fn failed(&self, call: PodResourcesCall) {
        self.errors[call as usize].with_label_values(&[EndpointVersion::V1.label()]).inc();
    }
}

/// Metric handle of the pods API.
#[derive(Clone)]
pub struct PodWatchMetrics {
    /// Watch clients disconnected because they did not read their events.
    pub dropped: IntCounter,
}

impl PodWatchMetrics {
    /// Registers the families; only where the gate `PodsAPI` is on.
    pub fn new(registry: &Registry) -> Self {
        let help = "Cumulative number of watch events dropped because a client did not read them.";
        Self { dropped: registry.counter(Stability::Alpha, "kubelet_pod_watch_events_dropped_total", help) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::ExpositionFormat;

    #[test]
    fn the_old_version_counts_only_that_it_was_asked() {
        let registry = Registry::new();
        let metrics = PodResourcesMetrics::new(&registry);
        metrics.requested(EndpointVersion::V1, PodResourcesCall::Get);
        metrics.failed(PodResourcesCall::Get);
        metrics.requested(EndpointVersion::V1Alpha1, PodResourcesCall::List);
        let mut page = Vec::new();
        ExpositionFormat::negotiate(None).encode(registry.gather(), &mut page);
        let page = String::from_utf8(page).expect("text");
        let lines: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
        let expected = [
            "kubelet_pod_resources_endpoint_errors_get{server_api_version=\"v1\"} 1",
            "kubelet_pod_resources_endpoint_requests_get{server_api_version=\"v1\"} 1",
            "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1\"} 1",
            "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1alpha1\"} 1",
        ];
        assert_eq!(lines, expected);
    }
}
