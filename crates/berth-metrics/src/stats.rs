//! Metrics of resource statistics: collection cost, volume usage, and log usage.
//!
//! Implements spec 08 §4.1, §4.9, §10.

use std::{sync::Arc, time::Duration};

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntGauge, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{Registry, Stability::Alpha, buckets::DEF};

/// Source of pod statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StatsSource {
    /// Cgroups, which the agent reads itself.
    #[default]
    Groups,
    /// The container runtime, through CRI.
    Runtime,
}

/// Metric handles of the statistics provider.
#[derive(Clone, Debug)]
pub struct StatsMetrics {
    seconds: Histogram,
    cgroups: IntGauge,
    provider: IntGaugeVec,
    walks: HistogramVec,
}

impl StatsMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let seconds = registry.histograms(
            Alpha,
            "berth_stats_collection_seconds",
            "Duration in seconds of collecting pod and container statistics.",
            DEF,
            &["scope"],
        );
        Self {
            seconds: seconds.with_label_values(&["pods"]),
            cgroups: registry.gauge(
                Alpha,
                "berth_stats_cgroups",
                "Number of cgroups from which statistics are collected.",
            ),
            provider: registry.gauges(
                Alpha,
                "kubelet_metrics_provider",
                "Whether the provider of pod and container statistics is in use.",
                &["provider"],
            ),
            walks: registry.histograms(
                Alpha,
                "kubelet_volume_metric_collection_duration_seconds",
                "Duration in seconds to calculate volume stats",
                DEF,
                &["metric_source"],
            ),
        }
    }

    /// Records one reading of all cgroups: its duration, and their number.
    pub fn read(&self, elapsed: Duration, cgroups: usize) {
        self.seconds.observe(elapsed.as_secs_f64());
        self.cgroups.set(i64::try_from(cgroups).unwrap_or(i64::MAX));
    }

    /// Sets the source in `kubelet_metrics_provider`.
    pub fn set_source(&self, source: StatsSource) {
        let (is, is_not) = match source {
            StatsSource::Groups => ("cadvisor", "cri"),
            StatsSource::Runtime => ("cri", "cadvisor"),
        };
        let _ = self.provider.remove_label_values(&[is_not]); // absent unless the source changed
        self.provider.with_label_values(&[is]).set(1);
    }

    /// Records a volume usage query that was answered; `source` names the answering driver.
    pub fn volume_queried(&self, source: &str, elapsed: Duration) {
        self.walks.with_label_values(&[source]).observe(elapsed.as_secs_f64());
    }

    /// Records a walk over a volume's directory tree.
    pub fn walked(&self, elapsed: Duration) {
        self.walks.with_label_values(&["du"]).observe(elapsed.as_secs_f64());
    }
}

/// Usage of a claim's volume, in bytes and inodes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClaimUsage {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    /// Bytes of capacity, available, and used; inodes total, free, and used.
    pub numbers: [u64; 6],
    /// Whether the volume's condition is abnormal; `None` where its driver reports none.
    pub is_abnormal: Option<bool>,
}

/// Usage of a container's logs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LogUsage {
    /// UID of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Used bytes.
    pub bytes: u64,
}

/// Source of known disk usage; never waits for a disk.
pub trait DiskUsages: Send + Sync + 'static {
    /// Returns the known usage of claims' volumes, and of the logs of running containers.
    fn known(&self) -> (Vec<ClaimUsage>, Vec<LogUsage>);
}

/// Registers the families of volumes and logs, which are computed at each scrape.
pub fn register_disk_usages(registry: &Registry, usages: Arc<dyn DiskUsages>) {
    let volumes = VOLUMES.map(|(name, help)| gauge(name, help, &CLAIM));
    let health = gauge(HEALTH.0, HEALTH.1, &CLAIM);
    registry.collector(Disks { usages, volumes, health, logs: gauge(LOGS.0, LOGS.1, &CONTAINER) });
}

const CLAIM: [&str; 2] = ["namespace", "persistentvolumeclaim"];
const CONTAINER: [&str; 4] = ["uid", "namespace", "pod", "container"];
const VOLUMES: [(&str, &str); 6] = [
    ("kubelet_volume_stats_capacity_bytes", "[ALPHA] Capacity in bytes of the volume"),
    ("kubelet_volume_stats_available_bytes", "[ALPHA] Number of available bytes in the volume"),
    ("kubelet_volume_stats_used_bytes", "[ALPHA] Number of used bytes in the volume"),
    ("kubelet_volume_stats_inodes", "[ALPHA] Maximum number of inodes in the volume"),
    ("kubelet_volume_stats_inodes_free", "[ALPHA] Number of free inodes in the volume"),
    ("kubelet_volume_stats_inodes_used", "[ALPHA] Number of used inodes in the volume"),
];
const HEALTH: (&str, &str) = (
    "kubelet_volume_stats_health_status_abnormal",
    "[ALPHA] Abnormal volume health status. The count is either 1 or 0. 1 indicates the volume is unhealthy, 0 indicates volume is healthy",
);
const LOGS: (&str, &str) =
    ("kubelet_container_log_filesystem_used_bytes", "[ALPHA] Bytes used by the container's logs on the filesystem.");

fn gauge(name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    GaugeVec::new(Opts::new(name, help), labels).expect("names and labels are constants that the tests check")
}

struct Disks {
    usages: Arc<dyn DiskUsages>,
    volumes: [GaugeVec; 6],
    health: GaugeVec,
    logs: GaugeVec,
}

impl Disks {
    fn families(&self) -> impl Iterator<Item = &GaugeVec> + Clone {
        self.volumes.iter().chain([&self.health, &self.logs])
    }
}

impl Collector for Disks {
    fn desc(&self) -> Vec<&Desc> {
        self.families().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let families = self.families();
        families.clone().for_each(GaugeVec::reset);
        let set = |gauge: Gauge, bytes: u64| gauge.set(bytes as f64);
        let (claims, logs) = self.usages.known();
        for usage in claims {
            for (family, number) in self.volumes.iter().zip(usage.numbers) {
                set(family.with_label_values(&[&usage.namespace, &usage.claim]), number);
            }
            if let Some(is_abnormal) = usage.is_abnormal {
                set(self.health.with_label_values(&[&usage.namespace, &usage.claim]), u64::from(is_abnormal));
            }
        }
        for usage in logs {
            let labels = [&usage.uid, &usage.namespace, &usage.pod, &usage.container];
            set(self.logs.with_label_values(&labels), usage.bytes);
        }
        families.flat_map(Collector::collect).filter(|family| !family.get_metric().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Usages;

    impl DiskUsages for Usages {
        fn known(&self) -> (Vec<ClaimUsage>, Vec<LogUsage>) {
            let claim = |namespace: &str| ClaimUsage {
                namespace: namespace.to_owned(),
                claim: "data".to_owned(),
                numbers: [100, 60, 40, 10, 7, 3],
                // Only one driver reports a condition.
                is_abnormal: (namespace == "b").then_some(true),
            };
            (vec![claim("a"), claim("b")], Vec::new())
        }
    }

    #[test]
    fn claim_volumes_have_all_six_values_and_their_reported_health() {
        let registry = Registry::new();
        register_disk_usages(&registry, Arc::new(Usages));
        let families = registry.gather();
        let series: Vec<(&str, usize, f64)> = families
            .iter()
            .map(|f| (f.name(), f.get_metric().len(), f.get_metric()[0].get_gauge().get_value()))
            .collect();
        assert_eq!(
            series,
            [
                ("kubelet_volume_stats_available_bytes", 2, 60.0),
                ("kubelet_volume_stats_capacity_bytes", 2, 100.0),
                ("kubelet_volume_stats_health_status_abnormal", 1, 1.0),
                ("kubelet_volume_stats_inodes", 2, 10.0),
                ("kubelet_volume_stats_inodes_free", 2, 7.0),
                ("kubelet_volume_stats_inodes_used", 2, 3.0),
                ("kubelet_volume_stats_used_bytes", 2, 40.0),
            ]
        );
    }

    #[test]
    fn only_the_current_provider_is_exposed() {
        let registry = Registry::new();
        let metrics = StatsMetrics::new(&registry);
        metrics.set_source(StatsSource::Groups);
        metrics.set_source(StatsSource::Runtime);
        let families = registry.gather();
        let family = families.iter().find(|f| f.name() == "kubelet_metrics_provider").expect("there");
        let providers: Vec<&str> = family.get_metric().iter().map(|m| m.get_label()[0].value()).collect();
        assert_eq!(providers, ["cri"]);
    }
}
