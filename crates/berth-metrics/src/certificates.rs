//! Metrics of kubelet certificates and pod certificates (spec 08 §4.13).

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use prometheus::{
    Gauge, Histogram, IntCounter, IntGaugeVec,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{Registry, Stability, buckets};

/// Expiry of the current certificate, seconds since the epoch; none initially. Clones share it.
#[derive(Clone, Debug)]
pub struct CertificateExpiry(Arc<AtomicI64>);

/// Stands for no certificate.
const NONE: i64 = i64::MAX;

impl CertificateExpiry {
    pub(super) fn none() -> Self {
        Self(Arc::new(AtomicI64::new(NONE)))
    }

    /// Sets the expiry after the certificate has changed; `None` for no certificate.
    pub fn set(&self, last: Option<i64>) {
        self.0.store(last.unwrap_or(NONE), Ordering::Relaxed);
    }
}

/// Metric handles of a certificate manager.
#[derive(Clone, Debug)]
pub struct CertificateMetrics {
    /// Expiry of the certificate in use.
    pub expiry: CertificateExpiry,
    /// Failed certificate requests.
    pub failures: IntCounter,
    age: Option<Histogram>,
}

impl CertificateMetrics {
    /// Registers the families of the client certificate. `now` returns the current second since the epoch.
    pub fn client(registry: &Registry, now: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        let expiry = CertificateExpiry::none();
        register_ttl(
            registry,
            "kubelet_certificate_manager_client_ttl_seconds",
            "Gauge of the TTL (time-to-live) of the Kubelet's client certificate. The value is in seconds until \
             certificate expiry (negative if already expired). If client certificate is invalid or unused, the value \
             will be +INF.",
            &expiry,
            now,
        );
        let failures = registry.counter(
            Stability::Alpha,
            "kubelet_certificate_manager_client_expiration_renew_errors",
            "Counter of certificate renewal errors.",
        );
        Self { expiry, failures, age: None }
    }

    /// Registers the families of the serving certificate. `now` returns the current second since the epoch.
    pub fn serving(registry: &Registry, now: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        let expiry = CertificateExpiry::none();
        register_ttl(
            registry,
            "kubelet_certificate_manager_server_ttl_seconds",
            "Gauge of the shortest TTL (time-to-live) of the Kubelet's serving certificate. The value is in seconds \
             until certificate expiry (negative if already expired). If serving certificate is invalid or unused, the \
             value will be +INF.",
            &expiry,
            now,
        );
        let failures = registry.counter(
            Stability::Alpha,
            "kubelet_server_expiration_renew_errors",
            "Counter of certificate renewal errors.",
        );
        let age = registry.histogram(
            Stability::Alpha,
            "kubelet_certificate_manager_server_rotation_seconds",
            "Histogram of the number of seconds the previous certificate lived before being rotated.",
            buckets::CERTAGE,
        );
        Self { expiry, failures, age: Some(age) }
    }

    /// Records a rotation, `seconds` after the start of the previous certificate's validity.
    pub fn replaced(&self, seconds: i64) {
        if let Some(age) = &self.age {
            age.observe(seconds as f64);
        }
    }
}

type Now = Arc<dyn Fn() -> i64 + Send + Sync>;

/// Registers a gauge of the remaining lifetime of a certificate. It bypasses the stability wrapper, so its help text
/// has no prefix (spec 08 §2).
pub(super) fn register_ttl(
    registry: &Registry,
    name: &str,
    help: &str,
    expiry: &CertificateExpiry,
    now: impl Fn() -> i64 + Send + Sync + 'static,
) {
    // A private registry creates the gauge; ours registers the collector around it.
    let gauge = Registry::new().float_gauge(Stability::Bare, name, help);
    registry.collector(Ttl { gauge, expiry: expiry.clone(), now: Arc::new(now) });
}

/// Computes the remaining lifetime of a certificate at each scrape.
struct Ttl {
    gauge: Gauge,
    expiry: CertificateExpiry,
    now: Now,
}

impl Collector for Ttl {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.set(match self.expiry.0.load(Ordering::Relaxed) {
            NONE => f64::INFINITY,
            last => last.saturating_sub((self.now)()) as f64,
        });
        self.gauge.collect()
    }
}

/// Returns the number of certificates by signer and state.
type States = Arc<dyn Fn() -> Vec<(String, &'static str, i64)> + Send + Sync>;

/// Registers the gauge of pod certificates; `states` returns their number by signer and state (spec 08 §4.9).
pub fn register_pod_certificates(
    registry: &Registry,
    states: impl Fn() -> Vec<(String, &'static str, i64)> + Send + Sync + 'static,
) {
    // A private registry creates the gauges; ours registers the collector around them.
    let gauges = Registry::new().gauges(
        Stability::Alpha,
        "kubelet_podcertificate_states",
        "Gauge vector reporting the number of pod certificate projection sources, faceted by signer_name and state.",
        &["signer_name", "state"],
    );
    registry.collector(OfPods { gauges, states: Arc::new(states) });
}

/// Reads the numbers of pod certificates at each scrape.
struct OfPods {
    gauges: IntGaugeVec,
    states: States,
}

impl Collector for OfPods {
    fn desc(&self) -> Vec<&Desc> {
        self.gauges.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauges.reset();
        for (signer, state, count) in (self.states)() {
            self.gauges.with_label_values(&[signer.as_str(), state]).set(count);
        }
        self.gauges.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(registry: &Registry, name: &str) -> f64 {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("a family");
        family.get_metric()[0].get_gauge().get_value()
    }

    /// AC-08-20
    #[test]
    fn certificate_ttl_is_computed_at_each_scrape() {
        let (registry, now) = (Registry::new(), Arc::new(AtomicI64::new(100)));
        let clock = now.clone();
        let metrics = CertificateMetrics::client(&registry, move || clock.load(Ordering::Relaxed));
        let name = "kubelet_certificate_manager_client_ttl_seconds";
        assert_eq!(value(&registry, name), f64::INFINITY);
        metrics.expiry.set(Some(160));
        assert_eq!(value(&registry, name), 60.0);
        now.store(200, Ordering::Relaxed);
        assert_eq!(value(&registry, name), -40.0);
        let all = registry.gather();
        let has = |part: &str| all.iter().any(|family| family.name().contains(part));
        assert!(has("client_expiration_renew_errors") && !has("server"), "one manager, one set of families");
        let served = CertificateMetrics::serving(&registry, || 0);
        served.replaced(3600);
        assert_eq!(value(&registry, "kubelet_certificate_manager_server_ttl_seconds"), f64::INFINITY);
    }

    #[test]
    fn certificates_of_pods_are_counted_when_asked() {
        let (registry, count) = (Registry::new(), Arc::new(AtomicI64::new(2)));
        let current = count.clone();
        register_pod_certificates(&registry, move || match current.load(Ordering::Relaxed) {
            0 => vec![],
            count => vec![("a/b".to_owned(), "fresh", count)],
        });
        assert_eq!(value(&registry, "kubelet_podcertificate_states"), 2.0);
        count.store(0, Ordering::Relaxed);
        let families = registry.gather();
        assert!(families.iter().all(|family| family.get_metric().is_empty()), "no series remains without certificates");
    }
}
