//! `rest_client_*` metrics of requests to the API server (spec 08 §4.15).

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec};

use super::{Registry, Stability::Alpha, TransportMetrics, buckets};

/// Metric handles of the API client.
#[derive(Clone, Debug)]
pub struct RestClientMetrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
    sent: HistogramVec,
    received: HistogramVec,
    retries: IntCounterVec,
    limited: HistogramVec,
    /// Handles of the transports below the requests.
    pub transports: TransportMetrics,
}

impl RestClientMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let by_verb = ["verb", "host"];
        Self {
            requests: registry.counters(
                Alpha,
                "rest_client_requests_total",
                "Number of HTTP requests, partitioned by status code, method, and host.",
                &["code", "method", "host"],
            ),
            seconds: registry.histograms(
                Alpha,
                "rest_client_request_duration_seconds",
                "Request latency in seconds. Broken down by verb, and host.",
                buckets::REST,
                &by_verb,
            ),
            sent: registry.histograms(
                Alpha,
                "rest_client_request_size_bytes",
                "Request size in bytes. Broken down by verb and host.",
                buckets::SIZE,
                &by_verb,
            ),
            received: registry.histograms(
                Alpha,
                "rest_client_response_size_bytes",
                "Response size in bytes. Broken down by verb and host.",
                buckets::SIZE,
                &by_verb,
            ),
            retries: registry.counters(
                Alpha,
                "rest_client_request_retries_total",
                "Number of request retries, partitioned by status code, verb, and host.",
                &["code", "verb", "host"],
            ),
            limited: registry.histograms(
                Alpha,
                "rest_client_rate_limiter_duration_seconds",
                "Client side rate limiter latency in seconds. Broken down by verb, and host.",
                buckets::REST,
                &by_verb,
            ),
            transports: TransportMetrics::new(registry),
        }
    }

    /// Counts a retry; `status` is that of the failed attempt, 0 if there was no response.
    pub fn retried(&self, host: &str, method: &str, status: u16) {
        let code = if status == 0 { "<error>".to_owned() } else { status.to_string() };
        self.retries.with_label_values(&[&*code, method, host]).inc();
    }

    /// Records a finished request; `status` is `None` if there was no response.
    pub fn ended(&self, host: &str, method: &str, status: Option<u16>, elapsed: Duration) {
        let code = status.map_or_else(|| "<error>".to_owned(), |status| status.to_string());
        self.requests.with_label_values(&[&*code, method, host]).inc();
        self.seconds.with_label_values(&[method, host]).observe(elapsed.as_secs_f64());
    }

    /// Records how long the rate limiter delayed a request.
    pub fn limited(&self, host: &str, method: &str, wait: Duration) {
        self.limited.with_label_values(&[method, host]).observe(wait.as_secs_f64());
    }

    /// Records the size of a request body.
    pub fn sent(&self, host: &str, method: &str, bytes: u64) {
        self.sent.with_label_values(&[method, host]).observe(bytes as f64);
    }

    /// Records the size of a response body.
    pub fn received(&self, host: &str, method: &str, bytes: u64) {
        self.received.with_label_values(&[method, host]).observe(bytes as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_what_came_of_them() {
        let registry = Registry::new();
        let metrics = RestClientMetrics::new(&registry);
        metrics.ended("api:6443", "POST", Some(201), Duration::from_millis(20));
        metrics.ended("api:6443", "POST", None, Duration::from_secs(10));
        metrics.sent("api:6443", "POST", 100);
        metrics.received("api:6443", "POST", 200);
        let mut families = registry.gather();
        families.retain(|family| family.name().contains("_request") || family.name().contains("_response"));
        let names: Vec<&str> = families.iter().map(|family| family.name()).collect();
        assert_eq!(
            names,
            [
                "rest_client_request_duration_seconds",
                "rest_client_request_size_bytes",
                "rest_client_requests_total",
                "rest_client_response_size_bytes"
            ]
        );
        let series = families[2].get_metric();
        let labels = |at: usize| series[at].get_label().iter().map(|label| label.value()).collect::<Vec<_>>();
        assert_eq!((labels(0), labels(1)), (vec!["201", "api:6443", "POST"], vec!["<error>", "api:6443", "POST"]));
        assert_eq!(families[0].get_metric()[0].get_histogram().get_sample_count(), 2);
    }
}
