//! Metrics of the embedded runtime: objects, launches, networks, pulls, and execs.
//!
//! Implements spec 09 §13 of `docs/spec`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{Registry, Stability::Alpha, buckets};

/// Step of launching a pod or a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaunchStep {
    /// Starts the shim of the pod.
    Spawn,
    /// Creates the namespaces of the pod.
    Namespaces,
    /// Connects the pod to the network.
    Network,
    /// Creates the mounts and the root file system of a container.
    Root,
    /// Creates the container's process in its namespaces.
    Clone,
    /// Pivots into the root file system and executes the program; includes all remaining time of the start.
    Exec,
}

impl LaunchStep {
    fn label(self) -> &'static str {
        match self {
            Self::Spawn => "spawn",
            Self::Namespaces => "netns",
            Self::Network => "network",
            Self::Root => "rootfs",
            Self::Clone => "clone",
            Self::Exec => "exec",
        }
    }
}

/// Operation on a pod's network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkOperation {
    /// Connects a pod.
    Attach,
    /// Disconnects a pod.
    Detach,
    /// Recovers the networks of existing pods after a start of the agent.
    Recover,
}

impl NetworkOperation {
    fn label(self) -> &'static str {
        match self {
            Self::Attach => "add",
            Self::Detach => "del",
            Self::Recover => "recover",
        }
    }
}

/// Outcome of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The operation succeeded.
    Succeeded,
    /// The operation failed.
    Failed,
    /// The operation exceeded its timeout.
    TimedOut,
}

impl Outcome {
    fn label(self) -> &'static str {
        match self {
            Self::Succeeded => "success",
            Self::Failed => "error",
            Self::TimedOut => "timeout",
        }
    }
}

/// Histogram of layer unpacking.
#[derive(Clone, Debug)]
pub struct Unpacks(Histogram);

impl Unpacks {
    /// Records an unpacked layer and its duration.
    pub fn took(&self, took: Duration) {
        self.0.observe(took.as_secs_f64());
    }
}

/// Metric handles of the embedded runtime.
#[derive(Clone, Debug)]
pub struct EmbeddedMetrics {
    launch: HistogramVec,
    network_operations: IntCounterVec,
    network_seconds: HistogramVec,
    pulls: IntCounterVec,
    execs: IntCounterVec,
    /// Shims that disappeared; their containers are killed.
    pub shims_lost: IntCounter,
    /// Pods and containers whose records could not be read.
    pub broken_objects: IntCounter,
    /// Layers unpacked.
    pub unpacks: Unpacks,
}

impl EmbeddedMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            launch: registry.histograms(
                Alpha,
                "berth_runtime_launch_duration_seconds",
                "Duration in seconds of a step of starting a pod sandbox or a container.",
                buckets::DEF,
                &["step"],
            ),
            network_operations: registry.counters(
                Alpha,
                "berth_runtime_network_operations_total",
                "Cumulative number of pod network operations.",
                &["op", "result"],
            ),
            network_seconds: registry.histograms(
                Alpha,
                "berth_runtime_network_operation_seconds",
                "Duration in seconds of a pod network operation.",
                buckets::DEF,
                &["op"],
            ),
            pulls: registry.counters(Alpha, "berth_runtime_pulls_total", "Cumulative number of image pulls.", &["result"]),
            execs: registry.counters(
                Alpha,
                "berth_runtime_exec_total",
                "Cumulative number of commands executed in containers; a non-zero exit code does not count as an error.",
                &["result"],
            ),
            shims_lost: registry.counter(Alpha, "berth_runtime_shim_lost_total", "Cumulative number of shims that exited unexpectedly."),
            broken_objects: registry.counter(
                Alpha,
                "berth_runtime_broken_objects_total",
                "Cumulative number of pods and containers whose state could not be read.",
            ),
            unpacks: Unpacks(registry.histogram(
                Alpha,
                "berth_runtime_unpack_seconds",
                "Duration in seconds of unpacking an image layer.",
                buckets::RUNTIME,
            )),
        }
    }

    /// Records the duration of a launch step.
    pub fn launched(&self, step: LaunchStep, took: Duration) {
        self.launch.with_label_values(&[step.label()]).observe(took.as_secs_f64());
    }

    /// Records a finished network operation.
    pub fn network(&self, operation: NetworkOperation, begun: Instant, outcome: Outcome) {
        self.network_operations.with_label_values(&[operation.label(), outcome.label()]).inc();
        self.network_seconds.with_label_values(&[operation.label()]).observe(begun.elapsed().as_secs_f64());
    }

    /// Counts an image pull.
    pub fn pulled(&self, outcome: Outcome) {
        self.pulls.with_label_values(&[outcome.label()]).inc();
    }

    /// Counts an exec.
    pub fn executed(&self, outcome: Outcome) {
        self.execs.with_label_values(&[outcome.label()]).inc();
    }
}

/// Objects of the runtime at the time of a scrape.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EmbeddedObjects {
    /// Number of pods by state.
    pub pods: Vec<(&'static str, usize)>,
    /// Number of containers by state.
    pub containers: Vec<(&'static str, usize)>,
    /// Number of image layers.
    pub layers: usize,
    /// Bytes used by images.
    pub image_bytes: u64,
    /// Leased IPv4 and IPv6 addresses.
    pub leases: (usize, usize),
    /// Number of times the nftables rules were restored.
    pub filter_reapplied: u64,
    /// Compressed bytes of pulled layers.
    pub pulled_bytes: u64,
    /// Unused objects removed by garbage collection, by kind.
    pub removed: Vec<(&'static str, u64)>,
    /// Container logs: bytes written, lines dropped, failed writes and opens.
    pub log: (u64, u64, u64),
}

/// Registers the families of runtime objects, computed at each scrape.
pub fn register_embedded_objects(registry: &Registry, objects: Arc<dyn Fn() -> EmbeddedObjects + Send + Sync>) {
    let gauges = |name: &str, help: &str, label: &str| {
        IntGaugeVec::new(Opts::new(name, help), &[label]).expect("constants that the tests check")
    };
    let gauge = |name: &str, help: &str| IntGauge::new(name, help).expect("constants that the tests check");
    let reapplied = IntCounter::new(
        "berth_runtime_nft_reapplied_total",
        "[ALPHA] Cumulative number of times the nftables rules were restored after another process removed them.",
    );
    let pulled = IntCounter::new(
        "berth_runtime_pull_bytes_total",
        "[ALPHA] Cumulative number of compressed bytes of pulled image layers.",
    );
    let log = |name: &str, help: &str| IntCounter::new(name, help).expect("constants that the tests check");
    let logs = [
        log("berth_runtime_log_bytes_total", "[ALPHA] Cumulative number of bytes written to container logs."),
        log(
            "berth_runtime_log_dropped_lines_total",
            "[ALPHA] Cumulative number of log lines dropped because they could not be written to the container log.",
        ),
        log(
            "berth_runtime_log_write_errors_total",
            "[ALPHA] Cumulative number of failed opens of and writes to container logs.",
        ),
    ];
    let removed = Opts::new(
        "berth_runtime_gc_removed_total",
        "[ALPHA] Cumulative number of unused objects removed by garbage collection, by kind.",
    );
    registry.collector(ObjectCollector {
        objects,
        logs,
        pulled: pulled.expect("constants that the tests check"),
        removed: IntCounterVec::new(removed, &["kind"]).expect("constants that the tests check"),
        pods: gauges("berth_runtime_pods", "[ALPHA] Number of pod sandboxes by state.", "state"),
        containers: gauges("berth_runtime_containers", "[ALPHA] Number of containers by state.", "state"),
        layers: gauge("berth_runtime_layers", "[ALPHA] Number of image layers."),
        image_bytes: gauge("berth_runtime_image_bytes", "[ALPHA] Disk space in bytes used by images and their layers."),
        leases: gauges("berth_runtime_leases", "[ALPHA] Number of IP addresses leased to pods, by family.", "family"),
        reapplied: reapplied.expect("constants that the tests check"),
    });
}

struct ObjectCollector {
    objects: Arc<dyn Fn() -> EmbeddedObjects + Send + Sync>,
    pods: IntGaugeVec,
    containers: IntGaugeVec,
    layers: IntGauge,
    image_bytes: IntGauge,
    leases: IntGaugeVec,
    reapplied: IntCounter,
    pulled: IntCounter,
    removed: IntCounterVec,
    logs: [IntCounter; 3],
}

/// Raises a counter to a total that is counted elsewhere.
fn raise(counter: &IntCounter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

impl ObjectCollector {
    fn all(&self) -> [&dyn Collector; 11] {
        let [bytes, dropped, errors] = &self.logs;
        [
            &self.pods,
            &self.containers,
            &self.layers,
            &self.image_bytes,
            &self.leases,
            &self.reapplied,
            &self.pulled,
            &self.removed,
            bytes,
            dropped,
            errors,
        ]
    }
}

impl Collector for ObjectCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let objects = (self.objects)();
        let whole = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for (family, states) in [(&self.pods, &objects.pods), (&self.containers, &objects.containers)] {
            for (state, count) in states {
                family.with_label_values(&[state]).set(whole(*count));
            }
        }
        self.layers.set(whole(objects.layers));
        self.image_bytes.set(i64::try_from(objects.image_bytes).unwrap_or(i64::MAX));
        self.leases.with_label_values(&["ipv4"]).set(whole(objects.leases.0));
        self.leases.with_label_values(&["ipv6"]).set(whole(objects.leases.1));
        raise(&self.reapplied, objects.filter_reapplied);
        raise(&self.pulled, objects.pulled_bytes);
        let (bytes, dropped, errors) = objects.log;
        self.logs.iter().zip([bytes, dropped, errors]).for_each(|(counter, count)| raise(counter, count));
        for (kind, count) in &objects.removed {
            raise(&self.removed.with_label_values(&[kind]), *count);
        }
        self.all().into_iter().flat_map(Collector::collect).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_their_names() {
        let registry = Registry::new();
        let metrics = EmbeddedMetrics::new(&registry);
        let objects = || EmbeddedObjects {
            pods: vec![("ready", 2), ("notready", 0)],
            containers: vec![("running", 3)],
            filter_reapplied: 4,
            leases: (2, 1),
            removed: vec![("layer", 5)],
            log: (6, 7, 8),
            ..EmbeddedObjects::default()
        };
        register_embedded_objects(&registry, Arc::new(objects));
        metrics.launched(LaunchStep::Spawn, Duration::from_millis(3));
        metrics.network(NetworkOperation::Attach, Instant::now(), Outcome::Succeeded);
        metrics.pulled(Outcome::Failed);
        metrics.executed(Outcome::TimedOut);
        metrics.shims_lost.inc();
        for _ in 0..2 {
            let families = registry.gather();
            let names: Vec<&str> = families.iter().map(MetricFamily::name).collect();
            assert!(names.iter().all(|name| name.starts_with("berth_runtime_")), "{names:?}");
            assert_eq!(names.len(), 19, "{names:?}");
            let counted = |name: &str| {
                let family = families.iter().find(|family| family.name() == name).expect("received");
                family.get_metric()[0].get_counter().get_value()
            };
            assert_eq!(counted("berth_runtime_nft_reapplied_total"), 4.0);
            assert_eq!(counted("berth_runtime_log_bytes_total"), 6.0);
            assert_eq!(counted("berth_runtime_log_dropped_lines_total"), 7.0);
            assert_eq!(counted("berth_runtime_log_write_errors_total"), 8.0);
        }
    }
}
