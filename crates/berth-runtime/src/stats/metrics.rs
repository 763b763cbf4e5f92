//! Pod and container metrics as CRI messages, from the table of cAdvisor families. Pure.
//!
//! Describes only families that get a value, and those of disks, which a kernel may not count. Implements spec 09a §5,
//! 09 §11.3, 04b §11.

use berth_cadvisor::{
    Family, MetricInputs, MetricKind, MetricSource, Value,
    families::{BASE_LABELS, FAMILIES},
    reading::Reading,
};
use berth_proto::cri::{self, MetricType};
use berth_sys::netlink::counters::LinkCounters;

/// Values of the labels that every metric has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Labels {
    /// Container name; empty for the pod itself.
    pub container: String,
    /// Cgroup path.
    pub id: String,
    /// Image reference as the container was created with.
    pub image: String,
    /// Container id.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Pod name.
    pub pod: String,
}

/// Descriptors of all families with values; PSI only if `has_pressure`.
pub fn descriptors(has_pressure: bool) -> Vec<cri::MetricDescriptor> {
    let is_described = |family: &&Family| family.in_cri && (has_pressure || family.source() != MetricSource::Pressure);
    let describe = |family: &Family| cri::MetricDescriptor {
        name: family.name.to_owned(),
        help: family.help.to_owned(),
        label_keys: BASE_LABELS.iter().chain(family.labels()).map(|key| (*key).to_owned()).collect(),
    };
    FAMILIES.iter().filter(is_described).map(describe).collect()
}

/// Metrics of a container.
pub fn of_container(labels: &Labels, inputs: &MetricInputs<'_>) -> Vec<cri::Metric> {
    let mut all = Vec::new();
    for source in [MetricSource::Cgroup, MetricSource::Pressure] {
        write(source, labels, inputs, &mut all);
    }
    all
}

/// Metrics of a pod: its network interfaces, without loopback.
pub fn of_pod(labels: &Labels, links: &[LinkCounters]) -> Vec<cri::Metric> {
    let (links, reading) =
        (links.iter().filter(|link| link.name != "lo").cloned().collect::<Vec<_>>(), Reading::default());
    let mut all = Vec::new();
    write(MetricSource::Network, labels, &MetricInputs { links: &links, ..MetricInputs::of(&reading) }, &mut all);
    all
}

fn write(source: MetricSource, labels: &Labels, inputs: &MetricInputs<'_>, out: &mut Vec<cri::Metric>) {
    let base = [&labels.container, &labels.id, &labels.image, &labels.name, &labels.namespace, &labels.pod];
    for family in FAMILIES.iter().filter(|family| family.in_cri && family.source() == source) {
        let metric_type = match family.kind {
            MetricKind::Counter => MetricType::Counter,
            MetricKind::Gauge => MetricType::Gauge,
        };
        family.write(inputs, &mut |own, value| {
            let Some(value) = whole(value) else { return };
            out.push(cri::Metric {
                name: family.name.to_owned(),
                // 0: read at the time of the request.
                timestamp: 0,
                metric_type: metric_type.into(),
                label_values: base.into_iter().cloned().chain(own.iter().map(|value| (*value).to_owned())).collect(),
                value: Some(cri::UInt64Value { value }),
            });
        });
    }
}

/// Whole seconds of a time in nanoseconds since the epoch; times before it are 0.
pub fn whole_seconds(ns: i64) -> i64 {
    ns.max(0) / 1_000_000_000
}

/// The value as the message carries it: whole seconds. It cannot carry a negative number, such as -1 (no limit).
fn whole(value: Value) -> Option<u64> {
    match value {
        Value::Count(count) => Some(count),
        Value::Signed(number) => u64::try_from(number).ok(),
        Value::Nanoseconds(ns) => Some(ns / 1_000_000_000),
        Value::Microseconds(us) => Some(us / 1_000_000),
        Value::Milliseconds(ms) => Some(ms / 1000),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::stats::{CgroupMemory, Cpu, CpuShare, CpuTimes, DeviceIo, OpenFiles, PressureStats, Throttling};
    use berth_cadvisor::{MountedFileSystem, reading::Pressures};
    use berth_sys::netlink::counters::DirectionCounters;

    /// The descriptors that critest expects, without its optional ones (`unimplementedMetricDescriptors`).
    const EXPECTED: &[&str] = &[
        "container_blkio_device_usage_total",
        "container_cpu_cfs_periods_total",
        "container_cpu_cfs_throttled_periods_total",
        "container_cpu_cfs_throttled_seconds_total",
        "container_cpu_system_seconds_total",
        "container_cpu_usage_seconds_total",
        "container_cpu_user_seconds_total",
        "container_file_descriptors",
        "container_fs_inodes_free",
        "container_fs_inodes_total",
        "container_fs_limit_bytes",
        "container_fs_reads_bytes_total",
        "container_fs_reads_total",
        "container_fs_usage_bytes",
        "container_fs_writes_bytes_total",
        "container_fs_writes_total",
        "container_last_seen",
        "container_memory_cache",
        "container_memory_failcnt",
        "container_memory_failures_total",
        "container_memory_kernel_usage",
        "container_memory_mapped_file",
        "container_memory_max_usage_bytes",
        "container_memory_rss",
        "container_memory_swap",
        "container_memory_usage_bytes",
        "container_memory_working_set_bytes",
        "container_network_receive_bytes_total",
        "container_network_receive_errors_total",
        "container_network_receive_packets_dropped_total",
        "container_network_receive_packets_total",
        "container_network_transmit_bytes_total",
        "container_network_transmit_errors_total",
        "container_network_transmit_packets_dropped_total",
        "container_network_transmit_packets_total",
        "container_oom_events_total",
        "container_processes",
        "container_sockets",
        "container_spec_cpu_period",
        "container_spec_cpu_shares",
        "container_spec_memory_limit_bytes",
        "container_spec_memory_swap_limit_bytes",
        "container_start_time_seconds",
        "container_threads",
        "container_threads_max",
    ];

    fn reading() -> Reading {
        let stalls = Some(PressureStats::default());
        let times = CpuTimes { usage_ns: 2_999_999_999, ..CpuTimes::default() };
        let throttling = Throttling { periods: 3, ..Throttling::default() };
        Reading {
            at: 5_900_000_000,
            cpu: Some(Cpu { times, throttling, rate: None }),
            share: Some(CpuShare { shares: 1024, quota: Some(20_000), period: 100_000 }),
            memory: Some(CgroupMemory { limit: u64::MAX, shown_swap_limit: 7, ..CgroupMemory::default() }),
            devices: vec![DeviceIo { device: (8, 1), read_bytes: 9, ..DeviceIo::default() }],
            processes: Some(2),
            threads: Some((0, 0)),
            pressure: Pressures { cpu: stalls, memory: stalls, io: stalls },
            ..Reading::default()
        }
    }

    fn inputs(reading: &Reading) -> MetricInputs<'_> {
        let device = "/dev/x".to_owned();
        let layer = MountedFileSystem {
            device,
            capacity: 5,
            used: 6,
            inodes: 4,
            inodes_free: 3,
            ..MountedFileSystem::default()
        };
        MetricInputs {
            started_at: whole_seconds(1_500_000_000),
            seen_at: whole_seconds(reading.at).unsigned_abs(),
            files: Some(OpenFiles { descriptors: 4, sockets: 1, soft_limit: Some(1024) }),
            writable_layer: Some(layer),
            device_names: vec!["/dev/x".to_owned()],
            ..MetricInputs::of(reading)
        }
    }

    #[test]
    fn every_family_has_help_labels_and_values() {
        let labels = Labels { container: "c".to_owned(), pod: "p".to_owned(), ..Labels::default() };
        let link = |name: &str| LinkCounters {
            name: name.to_owned(),
            received: DirectionCounters { bytes: 3, ..DirectionCounters::default() },
            ..LinkCounters::default()
        };
        let mut by_name: BTreeMap<String, Vec<cri::Metric>> = BTreeMap::new();
        let of_pod = of_pod(&Labels::default(), &[link("lo"), link("eth0")]);
        for metric in of_container(&labels, &inputs(&reading())).into_iter().chain(of_pod) {
            by_name.entry(metric.name.clone()).or_default().push(metric);
        }
        let described = descriptors(true);
        for descriptor in &described {
            assert!(!descriptor.help.is_empty(), "{descriptor:?}");
            let metrics = by_name.get(&descriptor.name).unwrap_or_else(|| panic!("{} has no value", descriptor.name));
            for metric in metrics {
                assert_eq!(metric.label_values.len(), descriptor.label_keys.len(), "{metric:?}");
            }
        }
        assert_eq!(by_name.len(), described.len());
        for name in EXPECTED {
            assert!(described.iter().any(|descriptor| descriptor.name == *name), "{name} is missing");
        }
        assert!(descriptors(false).iter().all(|descriptor| !descriptor.name.contains("pressure")));
        let one = |name: &str| by_name[name][0].value.map(|value| value.value);
        assert_eq!(one("container_cpu_usage_seconds_total"), Some(2), "truncated");
        assert_eq!(
            (one("container_spec_memory_limit_bytes"), one("container_spec_memory_swap_limit_bytes")),
            (Some(0), Some(7))
        );
        assert_eq!((one("container_last_seen"), one("container_start_time_seconds")), (Some(5), Some(1)));
        let bytes = &by_name["container_network_receive_bytes_total"];
        assert_eq!((bytes.len(), bytes[0].label_values[6].as_str()), (1, "eth0"));
        assert_eq!(by_name["container_blkio_device_usage_total"][1].label_values[6..], ["/dev/x", "8", "1", "Write"]);
    }

    #[test]
    fn what_is_not_known_has_no_value() {
        let names: Vec<_> = of_container(&Labels::default(), &MetricInputs::of(&Reading::default()))
            .into_iter()
            .map(|m| m.name)
            .collect();
        assert!(!names.iter().any(|name| name.contains("_cfs_") || name.contains("memory") || name.contains("_fs_")));
    }
}
