//! Metric families of cgroups as cAdvisor names them. Pure.
//! Implements spec 04b §11, 09a §5, 09 §11.3.
//!
//! Device times are in seconds; the reference divides them by a million too many.

pub use super::family::BASE_LABELS;
use super::{
    family::{Family, MetricKind, PageOmission, Samples, Stamp, Value},
    reading::CgroupMemory,
};

const fn family(kind: MetricKind, name: &'static str, help: &'static str, samples: Samples) -> Family {
    Family { name, help, kind, stamp: Stamp::Reading, page_omits: PageOmission::Nothing, in_cri: true, samples }
}

const fn counter(name: &'static str, help: &'static str, samples: Samples) -> Family {
    family(MetricKind::Counter, name, help, samples)
}

const fn gauge(name: &'static str, help: &'static str, samples: Samples) -> Family {
    family(MetricKind::Gauge, name, help, samples)
}

/// A gauge whose series carry no timestamp.
const fn fact(name: &'static str, help: &'static str, samples: Samples) -> Family {
    Family { stamp: Stamp::None, ..family(MetricKind::Gauge, name, help, samples) }
}

/// A family that CRI metrics do not have.
const fn only_page(family: Family) -> Family {
    Family { in_cri: false, ..family }
}

const fn page_omits(page_omits: PageOmission, family: Family) -> Family {
    Family { page_omits, ..family }
}

/// All families, sorted by name.
pub const FAMILIES: &[Family] = &[
    // Every public scrape configuration drops this family for containers (spec 08 §8.3).
    page_omits(
        PageOmission::Containers,
        counter("container_blkio_device_usage_total", "Blkio Device bytes usage", Samples::DeviceBytes),
    ),
    only_page(counter(
        "container_cpu_cfs_burst_periods_total",
        "Number of periods when burst occurs.",
        Samples::Throttling(|t| Value::Count(t.burst_periods)),
    )),
    only_page(counter(
        "container_cpu_cfs_burst_seconds_total",
        "Total time duration the container has been bursted.",
        Samples::Throttling(|t| Value::Nanoseconds(t.burst_ns)),
    )),
    counter(
        "container_cpu_cfs_periods_total",
        "Number of elapsed enforcement period intervals.",
        Samples::Throttling(|t| Value::Count(t.periods)),
    ),
    counter(
        "container_cpu_cfs_throttled_periods_total",
        "Number of throttled period intervals.",
        Samples::Throttling(|t| Value::Count(t.throttled_periods)),
    ),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Total time duration the container has been throttled.",
        Samples::Throttling(|t| Value::Nanoseconds(t.throttled_ns)),
    ),
    counter(
        "container_cpu_system_seconds_total",
        "Cumulative system cpu time consumed in seconds.",
        Samples::Cpu(|cpu| Value::Nanoseconds(cpu.times.system_ns)),
    ),
    page_omits(
        PageOmission::Zeros,
        counter(
            "container_cpu_usage_seconds_total",
            "Cumulative cpu time consumed in seconds.",
            Samples::Labeled(&["cpu"], "total", |i| i.reading.cpu.map(|cpu| Value::Nanoseconds(cpu.times.usage_ns))),
        ),
    ),
    counter(
        "container_cpu_user_seconds_total",
        "Cumulative user cpu time consumed in seconds.",
        Samples::Cpu(|cpu| Value::Nanoseconds(cpu.times.user_ns)),
    ),
    gauge(
        "container_file_descriptors",
        "Number of open file descriptors for the container.",
        Samples::One(|i| i.files.map(|files| Value::Count(files.descriptors))),
    ),
    gauge("container_fs_inodes_free", "Number of available Inodes", Samples::FileSystem(|fs| fs.inodes_free)),
    gauge("container_fs_inodes_total", "Number of Inodes", Samples::FileSystem(|fs| fs.inodes)),
    only_page(counter(
        "container_fs_io_cost_indebt_seconds_total",
        "Cumulative IOCost debt in seconds",
        Samples::Device(|io| io.cost.map(|cost| Value::Microseconds(cost.indebt))),
    )),
    only_page(counter(
        "container_fs_io_cost_indelay_seconds_total",
        "Cumulative IOCost delay in seconds",
        Samples::Device(|io| io.cost.map(|cost| Value::Microseconds(cost.indelay))),
    )),
    only_page(counter(
        "container_fs_io_cost_usage_seconds_total",
        "Cumulative IOCost usage in seconds",
        Samples::Device(|io| io.cost.map(|cost| Value::Microseconds(cost.usage))),
    )),
    only_page(counter(
        "container_fs_io_cost_wait_seconds_total",
        "Cumulative IOCost wait in seconds",
        Samples::Device(|io| io.cost.map(|cost| Value::Microseconds(cost.wait))),
    )),
    only_page(gauge(
        "container_fs_io_current",
        "Number of I/Os currently in progress",
        Samples::Disk(|disk| Value::Count(disk.io[0])),
    )),
    only_page(counter(
        "container_fs_io_time_seconds_total",
        "Cumulative count of seconds spent doing I/Os",
        Samples::Disk(|disk| Value::Milliseconds(disk.io[1])),
    )),
    only_page(counter(
        "container_fs_io_time_weighted_seconds_total",
        "Cumulative weighted I/O time in seconds",
        Samples::Disk(|disk| Value::Milliseconds(disk.io[2])),
    )),
    gauge(
        "container_fs_limit_bytes",
        "Number of bytes that can be consumed by the container on this filesystem.",
        Samples::FileSystem(|fs| fs.capacity),
    ),
    only_page(counter(
        "container_fs_read_seconds_total",
        "Cumulative count of seconds spent reading",
        Samples::Disk(|disk| Value::Milliseconds(disk.reads[3])),
    )),
    counter(
        "container_fs_reads_bytes_total",
        "Cumulative count of bytes read",
        Samples::Device(|io| Some(Value::Count(io.read_bytes))),
    ),
    only_page(counter(
        "container_fs_reads_merged_total",
        "Cumulative count of reads merged",
        Samples::Disk(|disk| Value::Count(disk.reads[1])),
    )),
    counter(
        "container_fs_reads_total",
        "Cumulative count of reads completed",
        Samples::Operations(|io| io.reads, |disk| disk.reads[0]),
    ),
    only_page(counter(
        "container_fs_sector_reads_total",
        "Cumulative count of sector reads completed",
        Samples::Disk(|disk| Value::Count(disk.reads[2])),
    )),
    only_page(counter(
        "container_fs_sector_writes_total",
        "Cumulative count of sector writes completed",
        Samples::Disk(|disk| Value::Count(disk.writes[2])),
    )),
    gauge(
        "container_fs_usage_bytes",
        "Number of bytes that are consumed by the container on this filesystem.",
        Samples::FileSystem(|fs| fs.used),
    ),
    only_page(counter(
        "container_fs_write_seconds_total",
        "Cumulative count of seconds spent writing",
        Samples::Disk(|disk| Value::Milliseconds(disk.writes[3])),
    )),
    counter(
        "container_fs_writes_bytes_total",
        "Cumulative count of bytes written",
        Samples::Device(|io| Some(Value::Count(io.written_bytes))),
    ),
    only_page(counter(
        "container_fs_writes_merged_total",
        "Cumulative count of writes merged",
        Samples::Disk(|disk| Value::Count(disk.writes[1])),
    )),
    counter(
        "container_fs_writes_total",
        "Cumulative count of writes completed",
        Samples::Operations(|io| io.writes, |disk| disk.writes[0]),
    ),
    only_page(gauge(
        "container_health_state",
        "The result of the container's health check",
        Samples::One(|_| Some(Value::Signed(-1))),
    )),
    Family {
        stamp: Stamp::Page,
        ..gauge(
            "container_last_seen",
            "Last time a container was seen by the exporter",
            Samples::One(|i| Some(Value::Count(i.seen_at))),
        )
    },
    gauge("container_memory_cache", "Number of bytes of page cache memory.", Samples::CgroupMemory(|m| m.stat.file)),
    counter("container_memory_failcnt", "Number of memory usage hits limits", Samples::CgroupMemory(|m| m.failures)),
    counter("container_memory_failures_total", "Cumulative count of memory allocation failures.", Samples::Faults),
    gauge(
        "container_memory_kernel_usage",
        "Size of kernel memory allocated in bytes.",
        Samples::CgroupMemory(|m| m.kernel),
    ),
    gauge(
        "container_memory_mapped_file",
        "Size of memory mapped files in bytes.",
        Samples::CgroupMemory(|m| m.stat.mapped_file),
    ),
    gauge(
        "container_memory_max_usage_bytes",
        "Maximum memory usage recorded in bytes",
        Samples::CgroupMemory(|m| m.peak),
    ),
    gauge("container_memory_rss", "Size of RSS in bytes.", Samples::CgroupMemory(|m| m.stat.anon)),
    gauge("container_memory_swap", "Container swap usage in bytes.", Samples::CgroupMemory(|m| m.swap)),
    only_page(gauge(
        "container_memory_total_active_file_bytes",
        "Current total active file in bytes.",
        Samples::CgroupMemory(|m| m.stat.active_file),
    )),
    only_page(gauge(
        "container_memory_total_inactive_file_bytes",
        "Current total inactive file in bytes.",
        Samples::CgroupMemory(|m| m.stat.inactive_file),
    )),
    gauge(
        "container_memory_usage_bytes",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        Samples::CgroupMemory(|m| m.usage),
    ),
    gauge(
        "container_memory_working_set_bytes",
        "Current working set in bytes.",
        Samples::CgroupMemory(CgroupMemory::working_set),
    ),
    counter(
        "container_network_receive_bytes_total",
        "Cumulative count of bytes received",
        Samples::Link(|link| link.received.bytes),
    ),
    counter(
        "container_network_receive_errors_total",
        "Cumulative count of errors encountered while receiving",
        Samples::Link(|link| link.received.errors),
    ),
    counter(
        "container_network_receive_packets_dropped_total",
        "Cumulative count of packets dropped while receiving",
        Samples::Link(|link| link.received.dropped),
    ),
    counter(
        "container_network_receive_packets_total",
        "Cumulative count of packets received",
        Samples::Link(|link| link.received.packets),
    ),
    counter(
        "container_network_transmit_bytes_total",
        "Cumulative count of bytes transmitted",
        Samples::Link(|link| link.sent.bytes),
    ),
    counter(
        "container_network_transmit_errors_total",
        "Cumulative count of errors encountered while transmitting",
        Samples::Link(|link| link.sent.errors),
    ),
    counter(
        "container_network_transmit_packets_dropped_total",
        "Cumulative count of packets dropped while transmitting",
        Samples::Link(|link| link.sent.dropped),
    ),
    counter(
        "container_network_transmit_packets_total",
        "Cumulative count of packets transmitted",
        Samples::Link(|link| link.sent.packets),
    ),
    counter(
        "container_oom_events_total",
        "Count of out of memory events observed for the container",
        Samples::CgroupMemory(|m| m.oom_kills),
    ),
    counter(
        "container_pressure_cpu_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to CPU congestion.",
        Samples::Pressure(|p| p.cpu.map(|cpu| cpu.full.total)),
    ),
    counter(
        "container_pressure_cpu_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to CPU congestion.",
        Samples::Pressure(|p| p.cpu.map(|cpu| cpu.some.total)),
    ),
    counter(
        "container_pressure_io_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to IO congestion.",
        Samples::Pressure(|p| p.io.map(|io| io.full.total)),
    ),
    counter(
        "container_pressure_io_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to IO congestion.",
        Samples::Pressure(|p| p.io.map(|io| io.some.total)),
    ),
    counter(
        "container_pressure_memory_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to memory congestion.",
        Samples::Pressure(|p| p.memory.map(|memory| memory.full.total)),
    ),
    counter(
        "container_pressure_memory_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to memory congestion.",
        Samples::Pressure(|p| p.memory.map(|memory| memory.some.total)),
    ),
    gauge(
        "container_processes",
        "Number of processes running inside the container.",
        Samples::One(|i| i.reading.processes.map(|count| Value::Count(u64::from(count)))),
    ),
    gauge(
        "container_sockets",
        "Number of open sockets for the container.",
        Samples::One(|i| i.files.map(|files| Value::Count(files.sockets))),
    ),
    fact("container_spec_cpu_period", "CPU period of the container.", Samples::Share(|share| Some(share.period))),
    fact("container_spec_cpu_quota", "CPU quota of the container.", Samples::Share(|share| share.quota)),
    fact("container_spec_cpu_shares", "CPU share of the container.", Samples::Share(|share| Some(share.shares))),
    fact("container_spec_memory_limit_bytes", "Memory limit for the container.", Samples::Limit(|m| m.limit)),
    fact(
        "container_spec_memory_reservation_limit_bytes",
        "Memory reservation limit for the container.",
        Samples::Limit(|m| m.reserved),
    ),
    fact(
        "container_spec_memory_swap_limit_bytes",
        "Memory swap limit for the container.",
        Samples::Limit(|m| m.shown_swap_limit),
    ),
    fact(
        "container_start_time_seconds",
        "Start time of the container since unix epoch in seconds.",
        Samples::One(|i| Some(Value::Signed(i.started_at))),
    ),
    gauge(
        "container_threads",
        "Number of threads running inside the container",
        Samples::One(|i| i.reading.threads.map(|(threads, _)| Value::Count(threads))),
    ),
    gauge(
        "container_threads_max",
        "Maximum number of threads allowed inside the container, infinity if value is zero",
        Samples::One(|i| i.reading.threads.map(|(_, max)| Value::Count(max))),
    ),
    gauge(
        "container_ulimits_soft",
        "Soft ulimit values for the container root process. Unlimited if -1, except priority and nice",
        Samples::Labeled(&["ulimit"], "max_open_files", |i| i.files?.soft_limit.map(Value::Signed)),
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The page inserts own labels after the first of every cgroup.
    #[test]
    fn families_and_their_labels_are_sorted() {
        assert!(FAMILIES.is_sorted_by_key(|family| family.name));
        for family in FAMILIES {
            assert!(family.labels().is_sorted() && family.labels().iter().all(|label| *label > BASE_LABELS[0]));
        }
    }
}
