//! What is done with volumes, and how many there are (spec 08 §4.9).

use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntGaugeVec};

use super::{OrphanMetrics, Registry, Stability::Alpha, buckets::STORAGE};

/// What is done with a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StorageOperation {
    /// It is made ready for its pod.
    Mount,
    /// It is taken down.
    Unmount,
    /// It is given to its pod as a device.
    Map,
    /// The device is taken from the pod.
    Unmap,
    /// What all pods shared is undone.
    UnmountDevice,
    /// The same of a device.
    UnmapDevice,
    /// The node's part of an expansion.
    Resize,
    /// It is given to the pod's group.
    Give,
    /// It is seen whether it is attached.
    Verify,
}

impl StorageOperation {
    fn label(self) -> &'static str {
        match self {
            Self::Mount => "volume_mount",
            Self::Unmount => "volume_unmount",
            Self::Map => "map_volume",
            Self::Unmap => "unmap_volume",
            Self::UnmountDevice => "unmount_device",
            Self::UnmapDevice => "unmap_device",
            Self::Resize => "volume_fs_resize",
            Self::Give => "volume_apply_access_control",
            Self::Verify => "verify_controller_attached_volume",
        }
    }
}

/// Whose operation it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operated<'a> {
    /// Label `volume_plugin`, or the driver's name.
    pub plugin: &'a str,
    /// The volume was said by a name that was built in once.
    pub is_migrated: bool,
}

impl<'a> From<&'a str> for Operated<'a> {
    fn from(plugin: &'a str) -> Self {
        Self { plugin, is_migrated: false }
    }
}

/// Of which volumes one speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum World {
    /// Those that are there.
    Actual,
    /// Those that should be.
    Desired,
}

impl World {
    /// Label `state`.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Actual => "actual_state_of_world",
            Self::Desired => "desired_state_of_world",
        }
    }
}

/// As labels say it.
pub(super) fn truth(is_so: bool) -> &'static str {
    if is_so { "true" } else { "false" }
}

/// What became of volumes that an earlier agent left.
#[derive(Clone, Debug)]
struct Rebuilt {
    all: IntCounter,
    failed: IntCounter,
    /// Nothing counts up these: what is not understood is left alone.
    _cleaned: [IntCounter; 2],
}

impl Rebuilt {
    fn new(registry: &Registry) -> Self {
        let counter = |name: &str, help: &str| registry.counter(Alpha, name, help);
        Self {
            all: counter(
                "reconstruct_volume_operations_total",
                "The number of volumes that were attempted to be reconstructed from the operating system during kubelet startup. This includes both successful and failed reconstruction.",
            ),
            failed: counter(
                "reconstruct_volume_operations_errors_total",
                "The number of volumes that failed reconstruction from the operating system during kubelet startup.",
            ),
            _cleaned: [
                counter(
                    "force_cleaned_failed_volume_operations_total",
                    "The number of volumes that were force cleaned after their reconstruction failed during kubelet startup. This includes both successful and failed cleanups.",
                ),
                counter(
                    "force_cleaned_failed_volume_operation_errors_total",
                    "The number of volumes that failed force cleanup after their reconstruction failed during kubelet startup.",
                ),
            ],
        }
    }
}

/// Handles of what is counted of volumes.
#[derive(Clone, Debug)]
pub struct VolumeMetrics {
    operations: HistogramVec,
    overall: HistogramVec,
    totals: IntGaugeVec,
    rebuilt: Rebuilt,
    orphans: OrphanMetrics,
}

impl VolumeMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            operations: registry.histograms(
                Alpha,
                "storage_operation_duration_seconds",
                "Storage operation duration",
                STORAGE,
                &["volume_plugin", "operation_name", "status", "migrated"],
            ),
            overall: registry.histograms(
                Alpha,
                "volume_operation_total_seconds",
                "Storage operation end to end duration in seconds",
                STORAGE,
                &["plugin_name", "operation_name"],
            ),
            totals: registry.gauges(
                Alpha,
                "volume_manager_total_volumes",
                "Number of volumes in Volume Manager",
                &["plugin_name", "state"],
            ),
            rebuilt: Rebuilt::new(registry),
            orphans: OrphanMetrics::new(registry),
        }
    }

    /// An earlier agent left so many volumes, of which so many are not understood.
    pub fn rebuilt(&self, all: usize, failed: usize) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        self.rebuilt.all.inc_by(count(all));
        self.rebuilt.failed.inc_by(count(failed));
    }

    /// Those of pods that nobody knows.
    pub fn orphans(&self) -> OrphanMetrics {
        self.orphans.clone()
    }

    /// An operation on a volume of that plugin ended.
    pub fn ended<'a>(
        &self,
        on: impl Into<Operated<'a>>,
        operation: StorageOperation,
        succeeded: bool,
        elapsed: Duration,
    ) {
        let Operated { plugin, is_migrated } = on.into();
        let status = if succeeded { "success" } else { "fail-unknown" };
        let labels = [plugin, operation.label(), status, truth(is_migrated)];
        self.operations.with_label_values(&labels).observe(elapsed.as_secs_f64());
    }

    /// A volume was mounted so long after it was asked for first.
    pub fn mounted(&self, plugin: &str, since_asked: Duration) {
        self.overall.with_label_values(&[plugin, "overall_volume_mount"]).observe(since_asked.as_secs_f64());
    }

    /// There are so many more volumes of that plugin, or fewer.
    pub fn changed(&self, plugin: &str, world: World, by: i64) {
        self.totals.with_label_values(&[plugin, world.label()]).add(by);
    }
}
