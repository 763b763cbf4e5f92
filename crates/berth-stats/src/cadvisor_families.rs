//! Metric families of `/metrics/cadvisor`: names, labels, and conditions. Pure.
//! Implements spec 04b §11.
//!
//! Device times are in seconds; the reference divides them by a million too many.

use super::{
    cadvisor_page::{Behind, CgroupEntry, Extra, Family, MountedFileSystem, SampleValue, Series, Stamp},
    cgroup_files::{DeviceIo, IoCost, PressureStats, UNLIMITED},
    network::Interface,
    reading::{CgroupMemory, Cpu},
};

const fn counter(name: &'static str, help: &'static str, write: fn(&CgroupEntry<'_>, &mut Series<'_, '_>)) -> Family {
    Family { name, help, kind: "counter", stamp: Stamp::Reading, write }
}

const fn gauge(name: &'static str, help: &'static str, write: fn(&CgroupEntry<'_>, &mut Series<'_, '_>)) -> Family {
    Family { name, help, kind: "gauge", stamp: Stamp::Reading, write }
}

const fn fact(name: &'static str, help: &'static str, write: fn(&CgroupEntry<'_>, &mut Series<'_, '_>)) -> Family {
    Family { name, help, kind: "gauge", stamp: Stamp::None, write }
}

/// All families, sorted by name.
pub const FAMILIES: &[Family] = &[
    counter("container_blkio_device_usage_total", "Blkio Device bytes usage", |e, s| {
        // Every public scrape configuration drops this family for containers (spec 08 §8.3).
        for io in e.reading.devices.iter().filter(|_| !e.is_container) {
            let (device, major, minor) = (device(e, io), io.device.0.to_string(), io.device.1.to_string());
            for (operation, value) in [("Read", io.read_bytes), ("Write", io.written_bytes)] {
                let extra: [Extra<'_>; 4] = [
                    (Behind::Container, "device", &device),
                    (Behind::Image, "major", &major),
                    (Behind::Image, "minor", &minor),
                    (Behind::Namespace, "operation", operation),
                ];
                s.put_with(&extra, SampleValue::Count(value));
            }
        }
    }),
    counter("container_cpu_cfs_burst_periods_total", "Number of periods when burst occurs.", |e, s| {
        throttling(e, s, |cpu| SampleValue::Count(cpu.throttling.burst_periods));
    }),
    counter("container_cpu_cfs_burst_seconds_total", "Total time duration the container has been bursted.", |e, s| {
        throttling(e, s, |cpu| SampleValue::Nanoseconds(cpu.throttling.burst_ns))
    }),
    counter("container_cpu_cfs_periods_total", "Number of elapsed enforcement period intervals.", |e, s| {
        throttling(e, s, |cpu| SampleValue::Count(cpu.throttling.periods));
    }),
    counter("container_cpu_cfs_throttled_periods_total", "Number of throttled period intervals.", |e, s| {
        throttling(e, s, |cpu| SampleValue::Count(cpu.throttling.throttled_periods));
    }),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Total time duration the container has been throttled.",
        |e, s| throttling(e, s, |cpu| SampleValue::Nanoseconds(cpu.throttling.throttled_ns)),
    ),
    counter("container_cpu_system_seconds_total", "Cumulative system cpu time consumed in seconds.", |e, s| {
        cpu(e, s, |cpu| SampleValue::Nanoseconds(cpu.times.system_ns));
    }),
    counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed in seconds.", |e, s| {
        if let Some(used) = e.reading.cpu.map(|cpu| cpu.times.usage_ns).filter(|used| *used > 0) {
            s.put_with(&[(Behind::Container, "cpu", "total")], SampleValue::Nanoseconds(used));
        }
    }),
    counter("container_cpu_user_seconds_total", "Cumulative user cpu time consumed in seconds.", |e, s| {
        cpu(e, s, |cpu| SampleValue::Nanoseconds(cpu.times.user_ns));
    }),
    gauge("container_file_descriptors", "Number of open file descriptors for the container.", |e, s| {
        if let Some(files) = e.files {
            s.put(SampleValue::Count(files.descriptors));
        }
    }),
    gauge("container_fs_inodes_free", "Number of available Inodes", |e, s| {
        mounted(e, s, |m| Some(SampleValue::Count(m.fs.inodes_free)));
    }),
    gauge("container_fs_inodes_total", "Number of Inodes", |e, s| {
        mounted(e, s, |m| Some(SampleValue::Count(m.fs.inodes)));
    }),
    counter("container_fs_io_cost_indebt_seconds_total", "Cumulative IOCost debt in seconds", |e, s| {
        cost(e, s, |cost| cost.indebt);
    }),
    counter("container_fs_io_cost_indelay_seconds_total", "Cumulative IOCost delay in seconds", |e, s| {
        cost(e, s, |cost| cost.indelay);
    }),
    counter("container_fs_io_cost_usage_seconds_total", "Cumulative IOCost usage in seconds", |e, s| {
        cost(e, s, |cost| cost.usage);
    }),
    counter("container_fs_io_cost_wait_seconds_total", "Cumulative IOCost wait in seconds", |e, s| {
        cost(e, s, |cost| cost.wait);
    }),
    gauge("container_fs_io_current", "Number of I/Os currently in progress", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.io[0])));
    }),
    counter("container_fs_io_time_seconds_total", "Cumulative count of seconds spent doing I/Os", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Milliseconds(disk.io[1])));
    }),
    counter("container_fs_io_time_weighted_seconds_total", "Cumulative weighted I/O time in seconds", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Milliseconds(disk.io[2])));
    }),
    gauge(
        "container_fs_limit_bytes",
        "Number of bytes that can be consumed by the container on this filesystem.",
        |e, s| mounted(e, s, |m| Some(SampleValue::Count(m.fs.capacity))),
    ),
    counter("container_fs_read_seconds_total", "Cumulative count of seconds spent reading", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Milliseconds(disk.reads[3])));
    }),
    counter("container_fs_reads_bytes_total", "Cumulative count of bytes read", |e, s| {
        devices(e, s, |io| io.read_bytes);
    }),
    counter("container_fs_reads_merged_total", "Cumulative count of reads merged", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.reads[1])));
    }),
    counter("container_fs_reads_total", "Cumulative count of reads completed", |e, s| {
        other_devices(e, s, |io| io.reads);
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.reads[0])));
    }),
    counter("container_fs_sector_reads_total", "Cumulative count of sector reads completed", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.reads[2])));
    }),
    counter("container_fs_sector_writes_total", "Cumulative count of sector writes completed", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.writes[2])));
    }),
    gauge(
        "container_fs_usage_bytes",
        "Number of bytes that are consumed by the container on this filesystem.",
        |e, s| mounted(e, s, |m| Some(SampleValue::Count(m.fs.used()))),
    ),
    counter("container_fs_write_seconds_total", "Cumulative count of seconds spent writing", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Milliseconds(disk.writes[3])));
    }),
    counter("container_fs_writes_bytes_total", "Cumulative count of bytes written", |e, s| {
        devices(e, s, |io| io.written_bytes);
    }),
    counter("container_fs_writes_merged_total", "Cumulative count of writes merged", |e, s| {
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.writes[1])));
    }),
    counter("container_fs_writes_total", "Cumulative count of writes completed", |e, s| {
        other_devices(e, s, |io| io.writes);
        mounted(e, s, |m| m.disk.as_ref().map(|disk| SampleValue::Count(disk.writes[0])));
    }),
    gauge("container_health_state", "The result of the container's health check", |_, s| {
        s.put(SampleValue::Signed(-1))
    }),
    Family {
        name: "container_last_seen",
        help: "Last time a container was seen by the exporter",
        kind: "gauge",
        stamp: Stamp::Page,
        write: |e, s| s.put(SampleValue::Count(e.now)),
    },
    gauge("container_memory_cache", "Number of bytes of page cache memory.", |e, s| {
        memory(e, s, |memory| memory.stat.file);
    }),
    counter("container_memory_failcnt", "Number of memory usage hits limits", |e, s| {
        memory(e, s, |memory| memory.failures);
    }),
    counter("container_memory_failures_total", "Cumulative count of memory allocation failures.", |e, s| {
        let Some(memory) = e.reading.memory else { return };
        for scope in ["container", "hierarchy"] {
            for (failure, value) in [("pgfault", memory.stat.pgfault), ("pgmajfault", memory.stat.pgmajfault)] {
                let extra = [(Behind::Container, "failure_type", failure), (Behind::Pod, "scope", scope)];
                s.put_with(&extra, SampleValue::Count(value));
            }
        }
    }),
    gauge("container_memory_kernel_usage", "Size of kernel memory allocated in bytes.", |e, s| {
        memory(e, s, |memory| memory.kernel);
    }),
    gauge("container_memory_mapped_file", "Size of memory mapped files in bytes.", |e, s| {
        memory(e, s, |memory| memory.stat.mapped_file);
    }),
    gauge("container_memory_max_usage_bytes", "Maximum memory usage recorded in bytes", |e, s| {
        memory(e, s, |memory| memory.peak);
    }),
    gauge("container_memory_rss", "Size of RSS in bytes.", |e, s| memory(e, s, |memory| memory.stat.anon)),
    gauge("container_memory_swap", "Container swap usage in bytes.", |e, s| memory(e, s, |memory| memory.swap)),
    gauge("container_memory_total_active_file_bytes", "Current total active file in bytes.", |e, s| {
        memory(e, s, |memory| memory.stat.active_file);
    }),
    gauge("container_memory_total_inactive_file_bytes", "Current total inactive file in bytes.", |e, s| {
        memory(e, s, |memory| memory.stat.inactive_file);
    }),
    gauge(
        "container_memory_usage_bytes",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        |e, s| memory(e, s, |memory| memory.usage),
    ),
    gauge("container_memory_working_set_bytes", "Current working set in bytes.", |e, s| {
        memory(e, s, CgroupMemory::working_set);
    }),
    counter("container_network_receive_bytes_total", "Cumulative count of bytes received", |e, s| {
        network(e, s, |i| i.received.bytes);
    }),
    counter(
        "container_network_receive_errors_total",
        "Cumulative count of errors encountered while receiving",
        |e, s| network(e, s, |i| i.received.errors),
    ),
    counter(
        "container_network_receive_packets_dropped_total",
        "Cumulative count of packets dropped while receiving",
        |e, s| network(e, s, |i| i.received.dropped),
    ),
    counter("container_network_receive_packets_total", "Cumulative count of packets received", |e, s| {
        network(e, s, |i| i.received.packets);
    }),
    counter("container_network_transmit_bytes_total", "Cumulative count of bytes transmitted", |e, s| {
        network(e, s, |i| i.sent.bytes);
    }),
    counter(
        "container_network_transmit_errors_total",
        "Cumulative count of errors encountered while transmitting",
        |e, s| network(e, s, |i| i.sent.errors),
    ),
    counter(
        "container_network_transmit_packets_dropped_total",
        "Cumulative count of packets dropped while transmitting",
        |e, s| network(e, s, |i| i.sent.dropped),
    ),
    counter("container_network_transmit_packets_total", "Cumulative count of packets transmitted", |e, s| {
        network(e, s, |i| i.sent.packets);
    }),
    counter("container_oom_events_total", "Count of out of memory events observed for the container", |e, s| {
        memory(e, s, |memory| memory.oom_kills);
    }),
    counter(
        "container_pressure_cpu_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to CPU congestion.",
        |e, s| pressure(e, s, e.reading.pressure.cpu, |stalls| stalls.full.total),
    ),
    counter(
        "container_pressure_cpu_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to CPU congestion.",
        |e, s| pressure(e, s, e.reading.pressure.cpu, |stalls| stalls.some.total),
    ),
    counter(
        "container_pressure_io_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to IO congestion.",
        |e, s| pressure(e, s, e.reading.pressure.io, |stalls| stalls.full.total),
    ),
    counter(
        "container_pressure_io_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to IO congestion.",
        |e, s| pressure(e, s, e.reading.pressure.io, |stalls| stalls.some.total),
    ),
    counter(
        "container_pressure_memory_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to memory congestion.",
        |e, s| pressure(e, s, e.reading.pressure.memory, |stalls| stalls.full.total),
    ),
    counter(
        "container_pressure_memory_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to memory congestion.",
        |e, s| pressure(e, s, e.reading.pressure.memory, |stalls| stalls.some.total),
    ),
    gauge("container_processes", "Number of processes running inside the container.", |e, s| {
        if let Some(count) = e.reading.processes {
            s.put(SampleValue::Count(u64::from(count)));
        }
    }),
    gauge("container_sockets", "Number of open sockets for the container.", |e, s| {
        if let Some(files) = e.files {
            s.put(SampleValue::Count(files.sockets));
        }
    }),
    fact("container_spec_cpu_period", "CPU period of the container.", |e, s| {
        if let Some(share) = e.reading.share {
            s.put(SampleValue::Count(share.period));
        }
    }),
    fact("container_spec_cpu_quota", "CPU quota of the container.", |e, s| {
        if let Some(quota) = e.reading.share.and_then(|share| share.quota) {
            s.put(SampleValue::Count(quota));
        }
    }),
    fact("container_spec_cpu_shares", "CPU share of the container.", |e, s| {
        if let Some(share) = e.reading.share {
            s.put(SampleValue::Count(share.shares));
        }
    }),
    fact("container_spec_memory_limit_bytes", "Memory limit for the container.", |e, s| {
        limit(e, s, |memory| memory.limit);
    }),
    fact("container_spec_memory_reservation_limit_bytes", "Memory reservation limit for the container.", |e, s| {
        limit(e, s, |memory| memory.reserved)
    }),
    fact("container_spec_memory_swap_limit_bytes", "Memory swap limit for the container.", |e, s| {
        limit(e, s, |memory| memory.shown_swap_limit);
    }),
    fact("container_start_time_seconds", "Start time of the container since unix epoch in seconds.", |e, s| {
        s.put(SampleValue::Signed(e.started_at));
    }),
    gauge("container_threads", "Number of threads running inside the container", |e, s| {
        if let Some((threads, _)) = e.reading.threads {
            s.put(SampleValue::Count(threads));
        }
    }),
    gauge(
        "container_threads_max",
        "Maximum number of threads allowed inside the container, infinity if value is zero",
        |e, s| {
            if let Some((_, max)) = e.reading.threads {
                s.put(SampleValue::Count(max));
            }
        },
    ),
    gauge(
        "container_ulimits_soft",
        "Soft ulimit values for the container root process. Unlimited if -1, except priority and nice",
        |e, s| {
            if let Some(limit) = e.files.and_then(|files| files.soft_limit) {
                s.put_with(&[(Behind::Pod, "ulimit", "max_open_files")], SampleValue::Signed(limit));
            }
        },
    ),
];

fn cpu(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&Cpu) -> SampleValue) {
    if let Some(cpu) = &entry.reading.cpu {
        series.put(value(cpu));
    }
}

/// Writes a throttling value; only for cgroups with a CPU quota.
fn throttling(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&Cpu) -> SampleValue) {
    if entry.reading.share.is_some_and(|share| share.quota.is_some()) {
        cpu(entry, series, value);
    }
}

fn memory(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&CgroupMemory) -> u64) {
    if let Some(memory) = &entry.reading.memory {
        series.put(SampleValue::Count(value(memory)));
    }
}

/// Writes a memory limit; no limit is written as 0.
fn limit(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&CgroupMemory) -> u64) {
    if let Some(memory) = &entry.reading.memory {
        series.put(SampleValue::Count(Some(value(memory)).filter(|limit| *limit <= UNLIMITED).unwrap_or_default()));
    }
}

fn network(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&Interface) -> u64) {
    for interface in entry.network.into_iter().flat_map(|network| &network.interfaces) {
        series.put_with(&[(Behind::Image, "interface", &interface.name)], SampleValue::Count(value(interface)));
    }
}

fn pressure(
    entry: &CgroupEntry<'_>,
    series: &mut Series<'_, '_>,
    stalls: Option<PressureStats>,
    value: fn(&PressureStats) -> u64,
) {
    if let Some(stalls) = stalls.filter(|_| entry.has_pressure) {
        series.put(SampleValue::Microseconds(value(&stalls)));
    }
}

fn mounted(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&MountedFileSystem) -> Option<SampleValue>) {
    for mounted in entry.mounted {
        if let Some(value) = value(mounted) {
            series.put_with(&[(Behind::Container, "device", &mounted.device)], value);
        }
    }
}

fn devices(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&DeviceIo) -> u64) {
    for io in &entry.reading.devices {
        series.put_with(&[(Behind::Container, "device", &device(entry, io))], SampleValue::Count(value(io)));
    }
}

/// Writes a value of each device that no mounted file system reports.
fn other_devices(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&DeviceIo) -> u64) {
    for io in &entry.reading.devices {
        let device = device(entry, io);
        if !entry.mounted.iter().any(|mounted| mounted.device == device) {
            series.put_with(&[(Behind::Container, "device", &device)], SampleValue::Count(value(io)));
        }
    }
}

fn cost(entry: &CgroupEntry<'_>, series: &mut Series<'_, '_>, value: fn(&IoCost) -> u64) {
    for io in &entry.reading.devices {
        if let Some(cost) = &io.cost {
            let device = device(entry, io);
            series.put_with(&[(Behind::Container, "device", &device)], SampleValue::Microseconds(value(cost)));
        }
    }
}

/// Device path such as `/dev/sda`; a device that is gone keeps its numbers, so that two devices never share a label.
fn device(entry: &CgroupEntry<'_>, io: &DeviceIo) -> String {
    match entry.devices.get(&io.device) {
        Some(known) => format!("/dev/{}", known.name),
        None => format!("{}:{}", io.device.0, io.device.1),
    }
}
