//! Pod and container metrics as cAdvisor names them: name, help, labels, and values per family. Pure.
//!
//! Describes only families that get a value, and those of disks, which a kernel may not count. Implements spec 09a §5,
//! 09 §11.3, 04b §11.

use super::{
    DeviceIo, OpenFiles, PressureStats, Throttling,
    group_files::UNLIMITED,
    reading::{MemoryReading, Reading},
    volume::Volume,
};
use berth_proto::cri::{self, MetricType};
use berth_sys::netlink::counters::LinkCounters;

/// Labels of every metric, in this order.
const BASE: [&str; 6] = ["container", "id", "image", "name", "namespace", "pod"];
/// Nanoseconds per second.
const SECOND_NS: u64 = 1_000_000_000;
/// Microseconds per second.
const SECOND_US: u64 = 1_000_000;

/// Values of the labels that every metric has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Labels {
    /// Container name; empty for the pod itself.
    pub container: String,
    /// Cgroup path.
    pub id: String,
    /// Image name of the container; for the pod itself that of the pause image.
    pub image: String,
    /// Container id.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Pod name.
    pub pod: String,
}

/// Inputs of a container's metrics.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ContainerSample {
    /// Cgroup reading.
    pub reading: Reading,
    /// Start time, nanoseconds since the epoch.
    pub started_ns: i64,
    /// Open files and sockets of its processes.
    pub open: OpenFiles,
    /// File system of its writable layer.
    pub volume: Option<Volume>,
    /// Bytes in its writable layer.
    pub written: Option<u64>,
    /// Device names, in the order of the reading's devices.
    pub devices: Vec<String>,
}

/// Callback for each value: values of the family's own labels, and the number.
type ValueSink<'a> = &'a mut dyn FnMut(&[&str], u64);

/// A metric family of containers.
struct Family {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    extra: &'static [&'static str],
    values: fn(&ContainerSample, ValueSink<'_>),
}

const fn counter(name: &'static str, help: &'static str, values: fn(&ContainerSample, ValueSink<'_>)) -> Family {
    Family { name, help, kind: MetricType::Counter, extra: &[], values }
}

const fn gauge(name: &'static str, help: &'static str, values: fn(&ContainerSample, ValueSink<'_>)) -> Family {
    Family { name, help, kind: MetricType::Gauge, extra: &[], values }
}

const fn of(extra: &'static [&'static str], family: Family) -> Family {
    Family { extra, ..family }
}

const FAMILIES: &[Family] = &[
    of(
        &["device", "major", "minor", "operation"],
        counter("container_blkio_device_usage_total", "Blkio Device bytes usage", |s, put| {
            for (io, name) in s.reading.devices.iter().zip(&s.devices) {
                let (major, minor) = (io.device.0.to_string(), io.device.1.to_string());
                put(&[name, &major, &minor, "Read"], io.read_bytes);
                put(&[name, &major, &minor, "Write"], io.written_bytes);
            }
        }),
    ),
    counter("container_cpu_cfs_periods_total", "Number of elapsed enforcement period intervals.", |s, put| {
        throttling(s, put, |throttling| throttling.periods);
    }),
    counter("container_cpu_cfs_throttled_periods_total", "Number of throttled period intervals.", |s, put| {
        throttling(s, put, |throttling| throttling.throttled_periods);
    }),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Total time duration the container has been throttled.",
        |s, put| throttling(s, put, |throttling| throttling.throttled_ns / SECOND_NS),
    ),
    counter("container_cpu_system_seconds_total", "Cumulative system cpu time consumed in seconds.", |s, put| {
        cpu(s, put, |cpu| cpu.system_ns);
    }),
    of(
        &["cpu"],
        counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed in seconds.", |s, put| {
            if let Some(cpu) = s.reading.cpu {
                put(&["total"], cpu.usage_ns / SECOND_NS);
            }
        }),
    ),
    counter("container_cpu_user_seconds_total", "Cumulative user cpu time consumed in seconds.", |s, put| {
        cpu(s, put, |cpu| cpu.user_ns);
    }),
    gauge("container_file_descriptors", "Number of open file descriptors for the container.", |s, put| {
        put(&[], s.open.descriptors);
    }),
    of(
        &["device"],
        gauge("container_fs_inodes_free", "Number of available Inodes", |s, put| volume(s, put, |v| v.inodes_free)),
    ),
    of(&["device"], gauge("container_fs_inodes_total", "Number of Inodes", |s, put| volume(s, put, |v| v.inodes))),
    of(
        &["device"],
        gauge(
            "container_fs_limit_bytes",
            "Number of bytes that can be consumed by the container on this filesystem.",
            |s, put| volume(s, put, |v| v.capacity),
        ),
    ),
    of(
        &["device"],
        counter("container_fs_reads_bytes_total", "Cumulative count of bytes read", |s, put| {
            devices(s, put, |io| io.read_bytes);
        }),
    ),
    of(
        &["device"],
        counter("container_fs_reads_total", "Cumulative count of reads completed", |s, put| {
            devices(s, put, |io| io.reads);
        }),
    ),
    of(
        &["device"],
        gauge(
            "container_fs_usage_bytes",
            "Number of bytes that are consumed by the container on this filesystem.",
            |s, put| volume(s, put, |_| s.written.unwrap_or_default()),
        ),
    ),
    of(
        &["device"],
        counter("container_fs_writes_bytes_total", "Cumulative count of bytes written", |s, put| {
            devices(s, put, |io| io.written_bytes);
        }),
    ),
    of(
        &["device"],
        counter("container_fs_writes_total", "Cumulative count of writes completed", |s, put| {
            devices(s, put, |io| io.writes);
        }),
    ),
    gauge("container_last_seen", "Last time a container was seen by the exporter", |s, put| {
        put(&[], seconds(s.reading.at_ns));
    }),
    gauge("container_memory_cache", "Number of bytes of page cache memory.", |s, put| memory(s, put, |m| m.file)),
    counter("container_memory_failcnt", "Number of memory usage hits limits", |s, put| memory(s, put, |m| m.failures)),
    of(
        &["failure_type", "scope"],
        counter("container_memory_failures_total", "Cumulative count of memory allocation failures.", |s, put| {
            let Some(memory) = s.reading.memory else { return };
            for scope in ["container", "hierarchy"] {
                put(&["pgfault", scope], memory.faults);
                put(&["pgmajfault", scope], memory.major_faults);
            }
        }),
    ),
    gauge("container_memory_kernel_usage", "Size of kernel memory allocated in bytes.", |s, put| {
        memory(s, put, |m| m.kernel);
    }),
    gauge("container_memory_mapped_file", "Size of memory mapped files in bytes.", |s, put| {
        memory(s, put, |m| m.mapped_file);
    }),
    gauge("container_memory_max_usage_bytes", "Maximum memory usage recorded in bytes", |s, put| {
        memory(s, put, |m| m.peak);
    }),
    gauge("container_memory_rss", "Size of RSS in bytes.", |s, put| memory(s, put, |m| m.anon)),
    gauge("container_memory_swap", "Container swap usage in bytes.", |s, put| {
        memory(s, put, |m| m.swap.unwrap_or_default());
    }),
    gauge(
        "container_memory_usage_bytes",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        |s, put| memory(s, put, |m| m.usage),
    ),
    gauge("container_memory_working_set_bytes", "Current working set in bytes.", |s, put| {
        memory(s, put, MemoryReading::working_set);
    }),
    counter("container_oom_events_total", "Count of out of memory events observed for the container", |s, put| {
        memory(s, put, |m| m.oom_kills);
    }),
    gauge("container_processes", "Number of processes running inside the container.", |s, put| {
        put(&[], u64::try_from(s.reading.processes.len()).unwrap_or_default());
    }),
    gauge("container_sockets", "Number of open sockets for the container.", |s, put| put(&[], s.open.sockets)),
    gauge("container_spec_cpu_period", "CPU period of the container.", |s, put| share(s, put, |s| Some(s.period))),
    gauge("container_spec_cpu_quota", "CPU quota of the container.", |s, put| share(s, put, |s| s.quota)),
    gauge("container_spec_cpu_shares", "CPU share of the container.", |s, put| share(s, put, |s| Some(s.shares))),
    gauge("container_spec_memory_limit_bytes", "Memory limit for the container.", |s, put| {
        memory(s, put, |m| limit(m.limit));
    }),
    gauge("container_spec_memory_reservation_limit_bytes", "Memory reservation limit for the container.", |s, put| {
        memory(s, put, |m| limit(m.reserved));
    }),
    gauge("container_spec_memory_swap_limit_bytes", "Memory swap limit for the container.", |s, put| {
        memory(s, put, |m| m.swap_limit.map_or(0, limit));
    }),
    gauge("container_start_time_seconds", "Start time of the container since unix epoch in seconds.", |s, put| {
        put(&[], seconds(s.started_ns));
    }),
    gauge("container_threads", "Number of threads running inside the container", |s, put| {
        put(&[], s.reading.tasks.unwrap_or_default());
    }),
    gauge(
        "container_threads_max",
        "Maximum number of threads allowed inside the container, infinity if value is zero",
        |s, put| put(&[], s.reading.tasks_limit),
    ),
    of(
        &["ulimit"],
        gauge(
            "container_ulimits_soft",
            "Soft ulimit values for the container root process. Unlimited if -1, except priority and nice",
            |s, put| {
                // The message cannot carry -1 (no limit).
                if let Some(limit) = s.open.soft_limit.and_then(|limit| u64::try_from(limit).ok()) {
                    put(&["max_open_files"], limit);
                }
            },
        ),
    ),
];

/// PSI families; only where the kernel reports pressure.
const PRESSURE: &[Family] = &[
    counter(
        "container_pressure_cpu_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to CPU congestion.",
        |s, put| stalled(put, s.reading.cpu_stalls, |stalls| stalls.full.total),
    ),
    counter(
        "container_pressure_cpu_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to CPU congestion.",
        |s, put| stalled(put, s.reading.cpu_stalls, |stalls| stalls.some.total),
    ),
    counter(
        "container_pressure_io_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to IO congestion.",
        |s, put| stalled(put, s.reading.io_stalls, |stalls| stalls.full.total),
    ),
    counter(
        "container_pressure_io_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to IO congestion.",
        |s, put| stalled(put, s.reading.io_stalls, |stalls| stalls.some.total),
    ),
    counter(
        "container_pressure_memory_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to memory congestion.",
        |s, put| stalled(put, s.reading.memory_stalls, |stalls| stalls.full.total),
    ),
    counter(
        "container_pressure_memory_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to memory congestion.",
        |s, put| stalled(put, s.reading.memory_stalls, |stalls| stalls.some.total),
    ),
];

/// A metric family of a pod's network interfaces.
struct LinkFamily {
    name: &'static str,
    help: &'static str,
    value: fn(&LinkCounters) -> u64,
}

const fn link(name: &'static str, help: &'static str, value: fn(&LinkCounters) -> u64) -> LinkFamily {
    LinkFamily { name, help, value }
}

const LINKS: &[LinkFamily] = &[
    link("container_network_receive_bytes_total", "Cumulative count of bytes received", |l| l.received.bytes),
    link("container_network_receive_errors_total", "Cumulative count of errors encountered while receiving", |l| {
        l.received.errors
    }),
    link(
        "container_network_receive_packets_dropped_total",
        "Cumulative count of packets dropped while receiving",
        |l| l.received.dropped,
    ),
    link("container_network_receive_packets_total", "Cumulative count of packets received", |l| l.received.packets),
    link("container_network_transmit_bytes_total", "Cumulative count of bytes transmitted", |l| l.sent.bytes),
    link("container_network_transmit_errors_total", "Cumulative count of errors encountered while transmitting", |l| {
        l.sent.errors
    }),
    link(
        "container_network_transmit_packets_dropped_total",
        "Cumulative count of packets dropped while transmitting",
        |l| l.sent.dropped,
    ),
    link("container_network_transmit_packets_total", "Cumulative count of packets transmitted", |l| l.sent.packets),
];

/// Descriptors of all families with values; PSI only if `has_pressure`.
pub fn descriptors(has_pressure: bool) -> Vec<cri::MetricDescriptor> {
    let describe = |name: &str, help: &str, extra: &[&str]| cri::MetricDescriptor {
        name: name.to_owned(),
        help: help.to_owned(),
        label_keys: BASE.iter().chain(extra).map(|key| (*key).to_owned()).collect(),
    };
    let pressure = if has_pressure { PRESSURE } else { &[] };
    let of_containers = FAMILIES.iter().chain(pressure).map(|family| describe(family.name, family.help, family.extra));
    let mut all: Vec<_> = of_containers.collect();
    all.extend(LINKS.iter().map(|family| describe(family.name, family.help, &["interface"])));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Metrics of a container.
pub fn of_container(labels: &Labels, subject: &ContainerSample) -> Vec<cri::Metric> {
    let mut all = Vec::new();
    for family in FAMILIES.iter().chain(PRESSURE) {
        (family.values)(subject, &mut |extra, value| {
            all.push(metric(family.name, family.kind, values(labels, extra), value));
        });
    }
    all
}

/// Metrics of a pod: its network interfaces, without loopback.
pub fn of_pod(labels: &Labels, links: &[LinkCounters]) -> Vec<cri::Metric> {
    let mut all = Vec::new();
    for family in LINKS {
        for link in links.iter().filter(|link| link.name != "lo") {
            let values = values(labels, &[&link.name]);
            all.push(metric(family.name, MetricType::Counter, values, (family.value)(link)));
        }
    }
    all
}

fn values(labels: &Labels, extra: &[&str]) -> Vec<String> {
    let base = [&labels.container, &labels.id, &labels.image, &labels.name, &labels.namespace, &labels.pod];
    base.into_iter().cloned().chain(extra.iter().map(|value| (*value).to_owned())).collect()
}

fn metric(name: &str, kind: MetricType, label_values: Vec<String>, value: u64) -> cri::Metric {
    cri::Metric {
        name: name.to_owned(),
        // 0: read at the time of the request.
        timestamp: 0,
        metric_type: kind.into(),
        label_values,
        value: Some(cri::UInt64Value { value }),
    }
}

fn cpu(subject: &ContainerSample, put: ValueSink<'_>, ns: fn(&super::Cpu) -> u64) {
    if let Some(cpu) = &subject.reading.cpu {
        put(&[], ns(cpu) / SECOND_NS);
    }
}

/// Throttling values; only where the container has a quota.
fn throttling(subject: &ContainerSample, put: ValueSink<'_>, value: fn(&Throttling) -> u64) {
    let has_quota = subject.reading.share.is_some_and(|share| share.quota.is_some());
    if let Some(cpu) = subject.reading.cpu.as_ref().filter(|_| has_quota) {
        put(&[], value(&cpu.throttling));
    }
}

fn share(subject: &ContainerSample, put: ValueSink<'_>, value: fn(&super::Share) -> Option<u64>) {
    if let Some(value) = subject.reading.share.as_ref().and_then(value) {
        put(&[], value);
    }
}

fn memory(subject: &ContainerSample, put: ValueSink<'_>, value: fn(&MemoryReading) -> u64) {
    if let Some(memory) = &subject.reading.memory {
        put(&[], value(memory));
    }
}

fn volume(subject: &ContainerSample, put: ValueSink<'_>, value: impl Fn(&Volume) -> u64) {
    if let Some(volume) = &subject.volume {
        put(&[&volume.device], value(volume));
    }
}

fn devices(subject: &ContainerSample, put: ValueSink<'_>, value: fn(&DeviceIo) -> u64) {
    for (io, name) in subject.reading.devices.iter().zip(&subject.devices) {
        put(&[name], value(io));
    }
}

fn stalled(put: ValueSink<'_>, stalls: Option<PressureStats>, us: fn(&PressureStats) -> u64) {
    if let Some(stalls) = &stalls {
        put(&[], us(stalls) / SECOND_US);
    }
}

/// Limit value in metrics: 0 for no limit.
fn limit(limit: u64) -> u64 {
    if limit > UNLIMITED { 0 } else { limit }
}

fn seconds(ns: i64) -> u64 {
    u64::try_from(ns).unwrap_or_default() / SECOND_NS
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::stats::{Cpu, Share};
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

    fn subject() -> ContainerSample {
        let stalls = Some(PressureStats::default());
        let reading = Reading {
            at_ns: 5_900_000_000,
            cpu: Some(Cpu {
                usage_ns: 2_999_999_999,
                throttling: Throttling { periods: 3, ..Throttling::default() },
                ..Cpu::default()
            }),
            share: Some(Share { shares: 1024, quota: Some(20_000), period: 100_000 }),
            memory: Some(MemoryReading { limit: u64::MAX, swap_limit: Some(7), ..MemoryReading::default() }),
            devices: vec![DeviceIo { device: (8, 1), read_bytes: 9, ..DeviceIo::default() }],
            processes: vec![1, 2],
            cpu_stalls: stalls,
            memory_stalls: stalls,
            io_stalls: stalls,
            ..Reading::default()
        };
        let volume = Some(Volume { device: "/dev/x".to_owned(), capacity: 5, inodes: 4, inodes_free: 3 });
        let open = OpenFiles { descriptors: 4, sockets: 1, soft_limit: Some(1024) };
        ContainerSample {
            reading,
            started_ns: 1_500_000_000,
            open,
            volume,
            written: Some(6),
            devices: vec!["/dev/x".to_owned()],
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
        for metric in of_container(&labels, &subject()).into_iter().chain(of_pod) {
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
        let names: Vec<_> =
            of_container(&Labels::default(), &ContainerSample::default()).into_iter().map(|m| m.name).collect();
        assert!(!names.iter().any(|name| name.contains("_cfs_") || name.contains("memory") || name.contains("_fs_")));
    }
}
