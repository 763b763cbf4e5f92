//! A cAdvisor metric family: name, help, labels, and how its values follow from the inputs. Pure.
//!
//! Two writers use the table of families: the page `/metrics/cadvisor`, and `ListPodSandboxMetrics` of CRI. Where they
//! differ on purpose, a field of the family selects it. Implements spec 04b §11, 09a §5.

use berth_sys::{
    cgroup::files::{DeviceIo, Throttling, UNLIMITED},
    netlink::counters::LinkCounters,
    open_files::OpenFiles,
};

use super::reading::{CgroupMemory, Cpu, CpuShare, Pressures, Reading};

/// Labels of every series of a cgroup, in this order.
pub const BASE_LABELS: [&str; 6] = ["container", "id", "image", "name", "namespace", "pod"];

/// A sample value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Value {
    /// An unsigned integer.
    Count(u64),
    /// A signed integer.
    Signed(i64),
    /// Nanoseconds, written in seconds.
    Nanoseconds(u64),
    /// Microseconds, written in seconds.
    Microseconds(u64),
    /// Milliseconds, written in seconds.
    Milliseconds(u64),
}

/// Counters of one block device from `/proc/diskstats`; times in milliseconds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DiskCounters {
    /// Device name, such as `sda1`.
    pub name: String,
    /// Reads completed, reads merged, sectors read, time spent reading.
    pub reads: [u64; 4],
    /// Writes completed, writes merged, sectors written, time spent writing.
    pub writes: [u64; 4],
    /// I/Os in progress, time spent doing I/Os, weighted time spent doing I/Os.
    pub io: [u64; 3],
}

/// Device with capacity and usage, for the `container_fs_*` families.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MountedFileSystem {
    /// Device such as `/dev/sda1`; of a memory file system its mount point.
    pub device: String,
    /// Total size, bytes.
    pub capacity: u64,
    /// Used bytes.
    pub used: u64,
    /// Total inodes.
    pub inodes: u64,
    /// Inodes that are not in use, those reserved for root included.
    pub inodes_free: u64,
    /// Counters of its block device; `None` where it has none.
    pub disk: Option<DiskCounters>,
}

/// Inputs of the metrics of one cgroup.
#[derive(Clone, Debug)]
pub struct MetricInputs<'a> {
    /// Values of the cgroup.
    pub reading: &'a Reading,
    /// Start time, seconds since the epoch.
    pub started_at: i64,
    /// Time at which the cgroup was last seen, seconds since the epoch.
    pub seen_at: u64,
    /// Open files, where they were counted.
    pub files: Option<OpenFiles>,
    /// Network interfaces, without loopback.
    pub links: &'a [LinkCounters],
    /// Mounted file systems.
    pub mounted: &'a [MountedFileSystem],
    /// File system of the container's writable layer; `used` is what the container wrote.
    pub writable_layer: Option<MountedFileSystem>,
    /// Names of the reading's devices, in their order.
    pub device_names: Vec<String>,
}

impl<'a> MetricInputs<'a> {
    /// Inputs of a cgroup about which nothing but its reading is known.
    pub fn of(reading: &'a Reading) -> Self {
        Self {
            reading,
            started_at: 0,
            seen_at: 0,
            files: None,
            links: &[],
            mounted: &[],
            writable_layer: None,
            device_names: Vec::new(),
        }
    }

    fn devices(&self) -> impl Iterator<Item = (&DeviceIo, &str)> {
        self.reading.devices.iter().zip(self.device_names.iter().map(String::as_str))
    }
}

/// Callback for each value: values of the family's own labels, and the value.
pub type MetricSink<'a> = &'a mut dyn FnMut(&[&str], Value);

/// Type of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    /// A cumulative value.
    Counter,
    /// A value that may decrease.
    Gauge,
}

/// Origin of a family's values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricSource {
    /// The cgroup, its processes, and its file systems.
    Cgroup,
    /// Pressure stall information (PSI), which not every kernel reports.
    Pressure,
    /// Network interfaces, which belong to the pod.
    Network,
}

/// Timestamp of the series of a family on the page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stamp {
    /// Time of the reading.
    Reading,
    /// Time of the page.
    Page,
    /// No timestamp.
    None,
}

/// Series that the page omits and CRI reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageOmission {
    /// None.
    Nothing,
    /// Series whose value is 0.
    Zeros,
    /// Series of app containers.
    Containers,
}

/// A metric family.
pub struct Family {
    /// Metric name.
    pub name: &'static str,
    /// Help text.
    pub help: &'static str,
    /// Type of the metric.
    pub kind: MetricKind,
    /// Timestamp of its series on the page.
    pub stamp: Stamp,
    /// Series that the page omits.
    pub page_omits: PageOmission,
    /// Whether CRI metrics have the family too.
    pub in_cri: bool,
    pub(super) samples: Samples,
}

/// How values follow from the inputs.
pub(super) enum Samples {
    /// One value without labels of its own; `None`: no series.
    One(fn(&MetricInputs<'_>) -> Option<Value>),
    /// One value with a constant label: name, label value, and value.
    Labeled(&'static [&'static str; 1], &'static str, fn(&MetricInputs<'_>) -> Option<Value>),
    /// A value of the CPU usage.
    Cpu(fn(&Cpu) -> Value),
    /// A value of the CFS throttling; only for cgroups with a CPU quota.
    Throttling(fn(&Throttling) -> Value),
    /// A value of the CPU weight and quota.
    Share(fn(&CpuShare) -> Option<u64>),
    /// A value of the memory usage.
    CgroupMemory(fn(&CgroupMemory) -> u64),
    /// A memory limit; no limit is 0.
    Limit(fn(&CgroupMemory) -> u64),
    /// Page faults by scope and failure type.
    Faults,
    /// A value of each block device.
    Device(fn(&DeviceIo) -> Option<Value>),
    /// Bytes of each block device by operation.
    DeviceBytes,
    /// A count of the cgroup for each block device that no mounted file system is on, and one of the disk for each
    /// mounted file system.
    Operations(fn(&DeviceIo) -> u64, fn(&DiskCounters) -> u64),
    /// A value of each file system.
    FileSystem(fn(&MountedFileSystem) -> u64),
    /// A value of the disk of each mounted file system.
    Disk(fn(&DiskCounters) -> Value),
    /// A value of each network interface.
    Link(fn(&LinkCounters) -> u64),
    /// Stall time in microseconds.
    Pressure(fn(&Pressures) -> Option<u64>),
}

impl Family {
    /// Names of the family's own labels, sorted.
    pub fn labels(&self) -> &'static [&'static str] {
        match &self.samples {
            Samples::Labeled(label, ..) => *label,
            Samples::Faults => &["failure_type", "scope"],
            Samples::DeviceBytes => &["device", "major", "minor", "operation"],
            Samples::Device(_) | Samples::Operations(..) | Samples::FileSystem(_) | Samples::Disk(_) => &["device"],
            Samples::Link(_) => &["interface"],
            Samples::One(_)
            | Samples::Cpu(_)
            | Samples::Throttling(_)
            | Samples::Share(_)
            | Samples::CgroupMemory(_)
            | Samples::Limit(_)
            | Samples::Pressure(_) => &[],
        }
    }

    /// Origin of the values.
    pub fn source(&self) -> MetricSource {
        match self.samples {
            Samples::Pressure(_) => MetricSource::Pressure,
            Samples::Link(_) => MetricSource::Network,
            _ => MetricSource::Cgroup,
        }
    }

    /// Passes all values of the family to `sink`.
    pub fn write(&self, inputs: &MetricInputs<'_>, sink: MetricSink<'_>) {
        let (reading, mounted) = (inputs.reading, inputs.mounted);
        let disks = || mounted.iter().filter_map(|mounted| Some((&*mounted.device, mounted.disk.as_ref()?)));
        let one = match &self.samples {
            Samples::One(value) => value(inputs),
            Samples::Cpu(value) => reading.cpu.as_ref().map(value),
            Samples::Throttling(value) => {
                let has_quota = reading.share.is_some_and(|share| share.quota.is_some());
                reading.cpu.filter(|_| has_quota).map(|cpu| value(&cpu.throttling))
            }
            Samples::Share(value) => reading.share.as_ref().and_then(value).map(Value::Count),
            Samples::CgroupMemory(value) => reading.memory.as_ref().map(value).map(Value::Count),
            Samples::Limit(value) => {
                let limit = reading.memory.as_ref().map(value);
                limit.map(|limit| Value::Count(if limit > UNLIMITED { 0 } else { limit }))
            }
            Samples::Pressure(stalled) => stalled(&reading.pressure).map(Value::Microseconds),
            Samples::Labeled(_, label, value) => {
                return value(inputs).into_iter().for_each(|value| sink(&[label], value));
            }
            Samples::Faults => {
                let Some(stat) = reading.memory.map(|memory| memory.stat) else { return };
                for scope in ["container", "hierarchy"] {
                    sink(&["pgfault", scope], Value::Count(stat.pgfault));
                    sink(&["pgmajfault", scope], Value::Count(stat.pgmajfault));
                }
                return;
            }
            Samples::Device(value) => {
                let values = inputs.devices().filter_map(|(io, device)| Some((device, value(io)?)));
                return values.for_each(|(device, value)| sink(&[device], value));
            }
            Samples::DeviceBytes => {
                for (io, device) in inputs.devices() {
                    let (major, minor) = (io.device.0.to_string(), io.device.1.to_string());
                    sink(&[device, &major, &minor, "Read"], Value::Count(io.read_bytes));
                    sink(&[device, &major, &minor, "Write"], Value::Count(io.written_bytes));
                }
                return;
            }
            Samples::Operations(of_device, of_disk) => {
                let is_mounted = |device: &str| mounted.iter().any(|mounted| mounted.device == device);
                for (io, device) in inputs.devices().filter(|(_, device)| !is_mounted(device)) {
                    sink(&[device], Value::Count(of_device(io)));
                }
                return disks().for_each(|(device, disk)| sink(&[device], Value::Count(of_disk(disk))));
            }
            Samples::FileSystem(value) => {
                let all = mounted.iter().chain(&inputs.writable_layer);
                return all.for_each(|fs| sink(&[&fs.device], Value::Count(value(fs))));
            }
            Samples::Disk(value) => return disks().for_each(|(device, disk)| sink(&[device], value(disk))),
            Samples::Link(value) => {
                return inputs.links.iter().for_each(|link| sink(&[&link.name], Value::Count(value(link))));
            }
        };
        if let Some(value) = one {
            sink(&[], value);
        }
    }
}
