//! Metrics of volume operations and volume counts (spec 08 §4.9).

use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntGaugeVec};

use super::{OrphanMetrics, Registry, Stability::Alpha, buckets::STORAGE};

/// Operation on a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StorageOperation {
    /// Mounts a volume for a pod.
    Mount,
    /// Unmounts a volume from a pod.
    Unmount,
    /// Maps a block device into a pod.
    Map,
    /// Unmaps a block device from a pod.
    Unmap,
    /// Unmounts the global mount that all pods of the volume share.
    UnmountDevice,
    /// Unmaps the global map of a block device.
    UnmapDevice,
    /// Expands the volume on the node.
    Resize,
    /// Applies the ownership of the pod's `fsGroup`.
    ApplyFsGroup,
    /// Verifies that the controller has attached the volume.
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
            Self::ApplyFsGroup => "volume_apply_access_control",
            Self::Verify => "verify_controller_attached_volume",
        }
    }
}

/// Volume plugin of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OperationTarget<'a> {
    /// Value of the label `volume_plugin`, or the driver name.
    pub plugin: &'a str,
    /// Whether the volume names an in-tree plugin that was migrated to CSI.
    pub is_migrated: bool,
}

impl<'a> From<&'a str> for OperationTarget<'a> {
    fn from(plugin: &'a str) -> Self {
        Self { plugin, is_migrated: false }
    }
}

/// The volumes that are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum World {
    /// Volumes in the actual state of world.
    Actual,
    /// Volumes in the desired state of world.
    Desired,
}

impl World {
    /// Value of the label `state`.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Actual => "actual_state_of_world",
            Self::Desired => "desired_state_of_world",
        }
    }
}

/// Label value of a boolean.
pub(super) fn truth(is_so: bool) -> &'static str {
    if is_so { "true" } else { "false" }
}

/// Reconstruction of volumes that a previous agent left mounted.
#[derive(Clone, Debug)]
struct ReconstructionCounters {
    all: IntCounter,
    failed: IntCounter,
    /// Always 0: a volume that cannot be reconstructed is left alone.
    _cleaned: [IntCounter; 2],
}

impl ReconstructionCounters {
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

/// Metric handles of volumes.
#[derive(Clone, Debug)]
pub struct VolumeMetrics {
    operations: HistogramVec,
    overall: HistogramVec,
    totals: IntGaugeVec,
    rebuilt: ReconstructionCounters,
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
            rebuilt: ReconstructionCounters::new(registry),
            orphans: OrphanMetrics::new(registry),
        }
    }

    /// Counts the volumes that a previous agent left, and those whose reconstruction failed.
    pub fn rebuilt(&self, all: usize, failed: usize) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        self.rebuilt.all.inc_by(count(all));
        self.rebuilt.failed.inc_by(count(failed));
    }

    /// Returns the handles of the orphan cleanup.
    pub fn orphans(&self) -> OrphanMetrics {
        self.orphans.clone()
    }

    /// Records a finished operation on a volume of a plugin.
    pub fn ended<'a>(
        &self,
        on: impl Into<OperationTarget<'a>>,
        operation: StorageOperation,
        succeeded: bool,
        elapsed: Duration,
    ) {
        let OperationTarget { plugin, is_migrated } = on.into();
        let status = if succeeded { "success" } else { "fail-unknown" };
        let labels = [plugin, operation.label(), status, truth(is_migrated)];
        self.operations.with_label_values(&labels).observe(elapsed.as_secs_f64());
    }

    /// Records a mounted volume with the time since it was first requested.
    pub fn mounted(&self, plugin: &str, since_asked: Duration) {
        self.overall.with_label_values(&[plugin, "overall_volume_mount"]).observe(since_asked.as_secs_f64());
    }

    /// Changes the number of volumes of a plugin by `by`.
    pub fn changed(&self, plugin: &str, world: World, by: i64) {
        self.totals.with_label_values(&[plugin, world.label()]).add(by);
    }
}
