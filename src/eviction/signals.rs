//! Eviction signals: readings of the node, and what is available of each resource. Pure.
//!
//! Implements spec 05 §3.1, §3.3.

use std::{collections::BTreeMap, time::Duration};

use berth_config::eviction::{Signal, Threshold, ThresholdValue};
use berth_types::{
    quantity::{Amount, QuantityFormat},
    resources::{EPHEMERAL_STORAGE, MEMORY},
};

/// Time since the agent's start.
pub type Uptime = Duration;

/// Pressure condition of the node, in the order of reporting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PressureCondition {
    /// `MemoryPressure`
    Memory,
    /// `DiskPressure`
    Disk,
    /// `PIDPressure`
    Pid,
}

impl PressureCondition {
    /// Type of the node condition.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }

    /// Condition of a signal.
    pub const fn of(signal: Signal) -> Self {
        match signal {
            Signal::Memory | Signal::AllocatableMemory => Self::Memory,
            Signal::Pid => Self::Pid,
            Signal::NodeFs
            | Signal::NodeFsInodes
            | Signal::ImageFs
            | Signal::ImageFsInodes
            | Signal::ContainerFs
            | Signal::ContainerFsInodes => Self::Disk,
        }
    }
}

/// Resource name of a signal, as used in messages.
pub const fn resource(signal: Signal) -> &'static str {
    match signal {
        Signal::Memory | Signal::AllocatableMemory => MEMORY,
        Signal::NodeFs | Signal::ImageFs | Signal::ContainerFs => EPHEMERAL_STORAGE,
        Signal::NodeFsInodes | Signal::ImageFsInodes | Signal::ContainerFsInodes => "inodes",
        Signal::Pid => "pids",
    }
}

/// Memory of the machine, or of all pods.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryReading {
    /// Total bytes, or the limit.
    pub total: u64,
    /// Bytes in use that are not reclaimable immediately.
    pub working_set: u64,
}

/// Reading of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskReading {
    /// Device number: equal ones are the same file system.
    pub device: u64,
    /// Total bytes.
    pub capacity: u64,
    /// Bytes available to unprivileged users.
    pub available: u64,
    /// Total inodes.
    pub inodes: u64,
    /// Free inodes of the file system (`f_ffree`).
    pub inodes_free: u64,
}

/// One reading of the node; values that could not be read are absent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readings {
    /// Time of the reading.
    pub at: Uptime,
    /// Memory of the machine.
    pub memory: Option<MemoryReading>,
    /// Memory of all pods, if they have a limit.
    pub pods_memory: Option<MemoryReading>,
    /// File system of the root directory.
    pub node_fs: Option<DiskReading>,
    /// File system of images.
    pub image_fs: Option<DiskReading>,
    /// File system of writable layers.
    pub container_fs: Option<DiskReading>,
    /// Maximum number of processes, and the current number.
    pub processes: Option<(u64, u64)>,
    /// Last known devices of these file systems: one that cannot be read once has not moved.
    pub devices: Devices,
}

/// Devices of file systems; absent before the first successful read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Devices {
    /// Device of the root directory.
    pub node: Option<u64>,
    /// Device of images.
    pub images: Option<u64>,
    /// Device of writable layers, if they have a path of their own.
    pub containers: Option<u64>,
}

/// Available and total amount of one eviction signal at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalObservation {
    /// Amount that is available.
    pub available: Amount,
    /// Total amount.
    pub capacity: i64,
    /// Time of the observation.
    pub at: Uptime,
}

/// Observations by signal.
pub type Observations = BTreeMap<Signal, SignalObservation>;

/// Which file systems images, writable layers, and node files share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Layout {
    /// All share one file system.
    #[default]
    Single,
    /// Images and writable layers share one of their own.
    DedicatedImages,
    /// Images have one of their own; writable layers are on the node's file system.
    Split,
}

impl Readings {
    /// Layout of the file systems; [`Layout::Single`] if it cannot be determined.
    pub fn layout(&self) -> Layout {
        let device = |disk: Option<DiskReading>, last: Option<u64>| disk.map(|disk| disk.device).or(last);
        let (node, images) = (device(self.node_fs, self.devices.node), device(self.image_fs, self.devices.images));
        let containers = device(self.container_fs, self.devices.containers).or(images);
        match (node, images) {
            (_, Some(images)) if containers != Some(images) => Layout::Split,
            (Some(node), Some(images)) if node != images => Layout::DedicatedImages,
            _ => Layout::Single,
        }
    }

    /// Available amount of each signal.
    pub fn observations(&self) -> Observations {
        let mut all = Observations::new();
        let mut see = |signal, available: u64, capacity: u64, format| {
            let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
            let available = Amount::from_value(whole(available), format);
            all.insert(signal, SignalObservation { available, capacity: whole(capacity), at: self.at });
        };
        for (signal, memory) in [(Signal::Memory, self.memory), (Signal::AllocatableMemory, self.pods_memory)] {
            if let Some(memory) = memory {
                let left = memory.total.saturating_sub(memory.working_set);
                see(signal, left, left.saturating_add(memory.working_set), QuantityFormat::BinarySi);
            }
        }
        // Writable layers without a path of their own share the file system of images.
        let layers = self.container_fs.or(self.image_fs.filter(|_| self.devices.containers.is_none()));
        for (bytes, inodes, disk) in [
            (Signal::NodeFs, Signal::NodeFsInodes, self.node_fs),
            (Signal::ImageFs, Signal::ImageFsInodes, self.image_fs),
            (Signal::ContainerFs, Signal::ContainerFsInodes, layers),
        ] {
            let Some(disk) = disk else { continue };
            see(bytes, disk.available, disk.capacity, QuantityFormat::BinarySi);
            // Some file systems allocate inodes dynamically and report 0.
            if disk.inodes != 0 {
                see(inodes, disk.inodes_free, disk.inodes, QuantityFormat::DecimalSi);
            }
        }
        if let Some((max, now)) = self.processes {
            see(Signal::Pid, max.saturating_sub(now), max, QuantityFormat::DecimalSi);
        }
        all
    }
}

/// Thresholds in force with that layout, sorted by signal: those of writable layers are copied from the file system
/// that stores them.
pub fn in_force(configured: &[Threshold], layout: Layout) -> Vec<Threshold> {
    let source = |signal| match (layout, signal) {
        (Layout::DedicatedImages, Signal::ImageFs) | (Layout::Single | Layout::Split, Signal::NodeFs) => {
            Some(Signal::ContainerFs)
        }
        (Layout::DedicatedImages, Signal::ImageFsInodes) | (Layout::Single | Layout::Split, Signal::NodeFsInodes) => {
            Some(Signal::ContainerFsInodes)
        }
        _ => None,
    };
    let own = |threshold: &&Threshold| !matches!(threshold.signal, Signal::ContainerFs | Signal::ContainerFsInodes);
    let copies = configured.iter().filter(own).filter_map(|threshold| {
        let signal = source(threshold.signal)?;
        Some(Threshold { signal, ..threshold.clone() })
    });
    let mut all: Vec<Threshold> = configured.iter().filter(own).cloned().chain(copies).collect();
    all.sort_by_key(|threshold| threshold.signal);
    all
}

/// Returns whether less than `below` is available; with `more`, less than their sum.
pub fn is_short(seen: &SignalObservation, below: ThresholdValue, more: Option<ThresholdValue>) -> bool {
    let bound = below.of(seen.capacity);
    let bound = more.map_or(bound, |more| bound.plus(more.of(seen.capacity)));
    seen.available < bound
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(device: u64) -> Option<DiskReading> {
        Some(DiskReading { device, capacity: 1000, available: 100, inodes: 50, inodes_free: 5 })
    }

    fn readings(node: u64, images: Option<u64>, containers: Option<u64>) -> Readings {
        let of = |device: Option<u64>| device.and_then(disk);
        Readings {
            at: Uptime::from_secs(7),
            memory: Some(MemoryReading { total: 8 << 30, working_set: 6 << 30 }),
            pods_memory: Some(MemoryReading { total: 10, working_set: 12 }),
            node_fs: disk(node),
            image_fs: of(images),
            container_fs: of(containers),
            processes: Some((100, 30)),
            devices: Devices::default(),
        }
    }

    #[test]
    fn a_file_system_that_cannot_be_read_keeps_its_last_device() {
        let whole = |images, containers| Devices { node: Some(1), images: Some(images), containers };
        for (seen, last, layout) in [
            (readings(1, None, None), whole(2, None), Layout::DedicatedImages),
            (readings(1, None, None), whole(1, None), Layout::Single),
            (readings(1, Some(2), None), whole(2, Some(1)), Layout::Split),
            (readings(1, None, Some(1)), whole(2, Some(1)), Layout::Split),
            (Readings { node_fs: None, ..readings(1, Some(2), None) }, whole(2, None), Layout::DedicatedImages),
            (readings(1, Some(1), None), whole(2, None), Layout::Single),
        ] {
            let seen = Readings { devices: last, ..seen };
            assert_eq!(seen.layout(), layout, "{seen:?}");
        }
        let lost = Readings { devices: whole(2, Some(1)), ..readings(1, Some(2), None) };
        assert!(!lost.observations().contains_key(&Signal::ContainerFs), "they do not lie with images");
    }

    #[test]
    fn file_systems_are_distinguished_by_their_devices() {
        for (node, images, containers, layout) in [
            (1, Some(1), None, Layout::Single),
            (1, Some(1), Some(1), Layout::Single),
            (1, None, None, Layout::Single),
            (1, Some(2), None, Layout::DedicatedImages),
            (1, Some(2), Some(2), Layout::DedicatedImages),
            (1, Some(2), Some(1), Layout::Split),
            (1, Some(1), Some(2), Layout::Split),
        ] {
            assert_eq!(readings(node, images, containers).layout(), layout, "{node} {images:?} {containers:?}");
        }
    }

    #[test]
    fn every_signal_has_what_is_left_of_it() {
        let seen = readings(1, Some(2), None).observations();
        let shown: Vec<String> =
            seen.iter().map(|(s, o)| format!("{} {}/{}", s.as_str(), o.available.canonical(), o.capacity)).collect();
        assert_eq!(
            shown,
            [
                "memory.available 2Gi/8589934592",
                "allocatableMemory.available 0/12",
                "nodefs.available 100/1000",
                "nodefs.inodesFree 5/50",
                "imagefs.available 100/1000",
                "imagefs.inodesFree 5/50",
                "containerfs.available 100/1000",
                "containerfs.inodesFree 5/50",
                "pid.available 70/100",
            ]
        );
        assert!(Readings::default().observations().is_empty());
        let without_number = Readings { node_fs: Some(DiskReading::default()), ..Readings::default() };
        assert_eq!(without_number.observations().len(), 1, "no inodes without a number");
    }

    #[test]
    fn writable_layers_have_the_thresholds_of_where_they_lie() {
        let threshold =
            |signal| Threshold { signal, below: ThresholdValue::Share(0.1), grace: None, min_reclaim: None };
        let configured = [
            threshold(Signal::Pid),
            threshold(Signal::ContainerFs),
            threshold(Signal::NodeFs),
            threshold(Signal::ImageFs),
            threshold(Signal::ImageFsInodes),
        ];
        let signals = |layout| -> Vec<&str> {
            in_force(&configured, layout).iter().map(|threshold| threshold.signal.as_str()).collect()
        };
        let own = ["nodefs.available", "imagefs.available", "imagefs.inodesFree"];
        assert_eq!(signals(Layout::Single), [&own[..], &["containerfs.available", "pid.available"]].concat());
        assert_eq!(signals(Layout::Split), signals(Layout::Single));
        let dedicated = ["containerfs.available", "containerfs.inodesFree", "pid.available"];
        assert_eq!(signals(Layout::DedicatedImages), [&own[..], &dedicated].concat());
    }
}
