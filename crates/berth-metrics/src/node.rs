//! Metrics of node startup and the node lease. Implements spec 08 §4.5, §6.

use std::{
    fs,
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use prometheus::{
    Gauge,
    core::{Collector, Desc},
    proto::MetricFamily,
};
use tokio::time::Instant;

use super::{Registry, Stability::Alpha, start_time_seconds};

/// Metric handles of the node.
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    pre_kubelet: Gauge,
    pre_registration: Gauge,
    registration: Gauge,
    post_registration: Gauge,
    total: Gauge,
    lease: LeaseAge,
}

impl NodeMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let gauge = |name, help| registry.float_gauge(Alpha, name, help);
        let lease = LeaseAge::new();
        registry.collector(lease.clone());
        Self {
            pre_kubelet: gauge(
                "kubelet_node_startup_pre_kubelet_duration_seconds",
                "Duration in seconds of node startup before kubelet starts.",
            ),
            pre_registration: gauge(
                "kubelet_node_startup_pre_registration_duration_seconds",
                "Duration in seconds of node startup before registration.",
            ),
            registration: gauge(
                "kubelet_node_startup_registration_duration_seconds",
                "Duration in seconds of node startup during registration.",
            ),
            post_registration: gauge(
                "kubelet_node_startup_post_registration_duration_seconds",
                "Duration in seconds of node startup after registration.",
            ),
            total: gauge("kubelet_node_startup_duration_seconds", "Duration in seconds of node startup in total."),
            lease,
        }
    }

    /// Records that this process created the node object, with the times of the first attempt and of the creation.
    pub fn registered(&self, first_attempt: Timestamp, created: Timestamp) {
        let process = start_time_seconds();
        if let (Some(boot), Some(process)) = (boot_seconds(), process) {
            self.pre_kubelet.set(process - boot);
        }
        if let Some(process) = process {
            self.pre_registration.set(seconds(first_attempt) - process);
        }
        self.registration.set(seconds(created) - seconds(first_attempt));
    }

    /// Records the first ready status of a node created at `created`.
    pub fn ready(&self, created: Timestamp, now: Timestamp) {
        self.post_registration.set(seconds(now) - seconds(created));
        if let Some(boot) = boot_seconds() {
            self.total.set(seconds(now) - boot);
        }
    }

    /// Records a lease renewal now.
    pub fn lease_renewed(&self) {
        *self.lease.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

fn seconds(time: Timestamp) -> f64 {
    time.as_millisecond() as f64 / 1000.0
}

/// Boot time of the machine, seconds since the epoch.
fn boot_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// Age of the last lease renewal, computed at each scrape; absent before the first one.
#[derive(Clone, Debug)]
struct LeaseAge {
    last: Arc<Mutex<Option<Instant>>>,
    gauge: Gauge,
}

impl LeaseAge {
    fn new() -> Self {
        let help = "[ALPHA] Time in seconds since the last renewal of the node lease.";
        let gauge = Gauge::new("berth_lease_renew_age_seconds", help).expect("the name is a constant that is valid");
        Self { last: Arc::default(), gauge }
    }
}

impl Collector for LeaseAge {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.map_or_else(Vec::new, |last| {
            self.gauge.set(last.elapsed().as_secs_f64());
            self.gauge.collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn startup_durations_and_the_lease_age_are_exposed() {
        let registry = Registry::new();
        let metrics = NodeMetrics::new(&registry);
        let value = |name: &str| {
            let families = registry.gather();
            let family = families.iter().find(|family| family.name() == name)?;
            Some(family.get_metric()[0].get_gauge().get_value())
        };
        assert_eq!(value("berth_lease_renew_age_seconds"), None);
        let now = |text: &str| text.parse::<Timestamp>().expect("a time");
        let created = now("2026-01-01T00:00:02.5Z");
        metrics.registered(now("2026-01-01T00:00:00Z"), created);
        metrics.ready(created, now("2026-01-01T00:00:06.5Z"));
        metrics.lease_renewed();
        assert_eq!(value("kubelet_node_startup_registration_duration_seconds"), Some(2.5));
        assert_eq!(value("kubelet_node_startup_post_registration_duration_seconds"), Some(4.0));
        assert!(value("berth_lease_renew_age_seconds").is_some_and(|age| age < 60.0));
    }
}
