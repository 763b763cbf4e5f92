//! Metrics of API transports: creation, CA bundle reloads, and exec credential plugins.
//!
//! Implements spec 08 §4.15 of `docs/spec`.

use jiff::Timestamp;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use super::{CertificateExpiry, Registry, Stability::Alpha, buckets, certificates::register_ttl};

/// Result of a reload of the CA bundle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaReload {
    /// The content is unchanged.
    Unchanged,
    /// The content changed and is in use from now on.
    Updated,
    /// The file cannot be read.
    ReadError,
    /// The file is empty.
    Empty,
    /// The content cannot be parsed.
    ParseError,
}

impl CaReload {
    fn labels(self) -> [&'static str; 2] {
        match self {
            Self::Unchanged => ["success", "unchanged"],
            Self::Updated => ["success", "updated"],
            Self::ReadError => ["failure", "read_error"],
            Self::Empty => ["failure", "empty"],
            Self::ParseError => ["failure", "ca_parse_error"],
        }
    }
}

/// Result of a run of an exec credential plugin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecCall {
    /// The plugin returned credentials.
    Good,
    /// The plugin exited with this code.
    Failed(i32),
    /// The program does not exist.
    NotFound,
    /// The program could not be run to completion.
    Broken,
}

/// Metric handles of transports.
#[derive(Clone, Debug)]
pub struct TransportMetrics {
    entries: IntGauge,
    created: IntCounterVec,
    reloads: IntCounterVec,
    identities_gone: IntCounter,
    gone: IntCounterVec,
    exec_calls: IntCounterVec,
    exec_age: Histogram,
    exec_expiry: CertificateExpiry,
}

impl TransportMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let exec_expiry = CertificateExpiry::none();
        register_ttl(
            registry,
            "rest_client_exec_plugin_ttl_seconds",
            "Gauge of the shortest TTL (time-to-live) of the client certificate(s) managed by the auth exec plugin. The \
             value is in seconds until certificate expiry (negative if already expired). If auth exec plugins are unused \
             or manage no TLS certificates, the value will be +INF.",
            &exec_expiry,
            || Timestamp::now().as_second(),
        );
        let counters = |name, help, labels: &[&str]| registry.counters(Alpha, name, help, labels);
        Self {
            entries: registry.gauge(
                Alpha,
                "rest_client_transport_cache_entries",
                "Number of transports to API servers that are in use.",
            ),
            created: counters(
                "rest_client_transport_create_calls_total",
                "Number of calls to get a new transport, partitioned by the result: hit, miss, miss-gc, uncacheable.",
                &["result"],
            ),
            reloads: counters(
                "rest_client_transport_ca_reload_total",
                "Number of times a CA reload is attempted, partitioned by the result and reason for the reload attempt.",
                &["result", "reason"],
            ),
            identities_gone: registry.counter(
                Alpha,
                "rest_client_transport_cert_rotation_gc_calls_total",
                "Number of client certificate rotations that ended with their transport.",
            ),
            gone: counters(
                "rest_client_transport_cache_gc_calls_total",
                "Number of times a transport was to be removed, partitioned by the result: deleted, skipped.",
                &["result"],
            ),
            exec_calls: counters(
                "rest_client_exec_plugin_call_total",
                "Number of calls to an exec plugin, partitioned by the type of event encountered and an optional exit code.",
                &["code", "call_status"],
            ),
            exec_age: registry.histogram(
                Alpha,
                "rest_client_exec_plugin_certificate_rotation_age",
                "Histogram of the number of seconds the last auth exec plugin client certificate lived before being \
                 rotated. If auth exec plugin client certificates are unused, histogram will contain no data.",
                buckets::EXECAGE,
            ),
            exec_expiry,
        }
    }

    /// Counts a created transport; it is in use until the returned value is dropped.
    pub fn opened(&self, identity: CertRotation) -> OpenTransport {
        self.entries.inc();
        self.created.with_label_values(&["miss"]).inc();
        OpenTransport { metrics: self.clone(), identity }
    }

    /// Counts a reload of the CA bundle.
    pub fn ca_reloaded(&self, outcome: CaReload) {
        self.reloads.with_label_values(&outcome.labels()).inc();
    }

    /// Counts a run of an exec credential plugin.
    pub fn ran_exec(&self, outcome: ExecCall) {
        let (code, status) = match outcome {
            ExecCall::Good => (0, "no_error"),
            ExecCall::Failed(code) => (code, "plugin_execution_error"),
            ExecCall::NotFound => (1, "plugin_not_found_error"),
            ExecCall::Broken => (1, "client_internal_error"),
        };
        self.exec_calls.with_label_values(&[&*code.to_string(), status]).inc();
    }

    /// Records a new client certificate of an exec plugin: its expiry in seconds since the epoch, and the lifetime of
    /// the previous one in seconds, if there was one.
    pub fn exec_certificate(&self, until: Option<i64>, last: Option<i64>) {
        self.exec_expiry.set(until);
        if let Some(seconds) = last {
            self.exec_age.observe(seconds as f64);
        }
    }
}

/// Whether a transport follows the rotation of a client certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CertRotation {
    /// The client certificate is rotated.
    Yes,
    /// The transport presents no client certificate, or always the same one.
    No,
}

/// A transport in use; dropping it counts its removal.
#[derive(Debug)]
pub struct OpenTransport {
    metrics: TransportMetrics,
    identity: CertRotation,
}

impl Drop for OpenTransport {
    fn drop(&mut self) {
        self.metrics.entries.dec();
        self.metrics.gone.with_label_values(&["deleted"]).inc();
        if self.identity == CertRotation::Yes {
            self.metrics.identities_gone.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All series with a count, as `family{values} value`.
    fn series(registry: &Registry) -> Vec<String> {
        let families = registry.gather();
        let lines = families.iter().flat_map(|family| {
            family.get_metric().iter().map(|metric| {
                let values: Vec<&str> = metric.get_label().iter().map(|label| label.value()).collect();
                let number = metric.get_counter().get_value()
                    + metric.get_gauge().get_value()
                    + metric.get_histogram().get_sample_sum();
                let name = family.name().trim_start_matches("rest_client_");
                format!("{name} {} {number}", values.join(" "))
            })
        });
        lines.collect()
    }

    #[test]
    fn unused_metrics_have_their_initial_values() {
        let registry = Registry::new();
        TransportMetrics::new(&registry);
        assert_eq!(
            series(&registry),
            [
                "exec_plugin_certificate_rotation_age  0",
                "exec_plugin_ttl_seconds  inf",
                "transport_cache_entries  0",
                "transport_cert_rotation_gc_calls_total  0",
            ]
        );
        let ttl = registry.gather().into_iter().find(|family| family.name() == "rest_client_exec_plugin_ttl_seconds");
        assert!(ttl.expect("there").help().starts_with("Gauge of the shortest"), "it has no prefix");
    }

    #[test]
    fn what_happens_to_transports_is_counted() {
        let registry = Registry::new();
        let metrics = TransportMetrics::new(&registry);
        let (first, second) = (metrics.opened(CertRotation::Yes), metrics.opened(CertRotation::No));
        for outcome in
            [CaReload::Unchanged, CaReload::Updated, CaReload::ReadError, CaReload::Empty, CaReload::ParseError]
        {
            metrics.ca_reloaded(outcome);
        }
        for outcome in [ExecCall::Good, ExecCall::Failed(3), ExecCall::NotFound, ExecCall::Broken] {
            metrics.ran_exec(outcome);
        }
        metrics.exec_certificate(Some(0), None);
        metrics.exec_certificate(Some(0), Some(700));
        drop(second);
        let mut lines = series(&registry);
        lines.retain(|line| !line.starts_with("exec_plugin_ttl_seconds"));
        assert_eq!(
            lines,
            [
                "exec_plugin_call_total client_internal_error 1 1",
                "exec_plugin_call_total no_error 0 1",
                "exec_plugin_call_total plugin_execution_error 3 1",
                "exec_plugin_call_total plugin_not_found_error 1 1",
                "exec_plugin_certificate_rotation_age  700",
                "transport_ca_reload_total ca_parse_error failure 1",
                "transport_ca_reload_total empty failure 1",
                "transport_ca_reload_total read_error failure 1",
                "transport_ca_reload_total unchanged success 1",
                "transport_ca_reload_total updated success 1",
                "transport_cache_entries  1",
                "transport_cache_gc_calls_total deleted 1",
                "transport_cert_rotation_gc_calls_total  0",
                "transport_create_calls_total miss 2",
            ]
        );
        drop(first);
        assert!(series(&registry).contains(&"transport_cert_rotation_gc_calls_total  1".to_owned()));
    }
}
