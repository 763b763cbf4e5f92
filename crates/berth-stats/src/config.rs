//! Configuration and dependencies of the statistics provider.

use std::{path::PathBuf, sync::Arc, time::Duration};

use super::{Host, PodCgroupPaths, summary::PodPaths};
use berth_cri::{ImageService, RuntimeService};
use berth_metrics::{StatsMetrics, StatsSource};
use berth_ports::{ClaimedVolumes, Clock, PodObserver};
use berth_types::PodRef;

/// Looks up the directories of a pod on the node's disk.
pub trait PodDirectories: Send + Sync + 'static {
    /// Returns the directories of a pod.
    fn of(&self, pod: &PodRef) -> PodPaths;
}

/// Whether pages have the deprecated metric families that are hidden by default (spec 08 §2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HiddenMetrics {
    /// Pages leave them out.
    #[default]
    Omitted,
    /// Pages have them (`showHiddenMetricsForVersion`).
    Shown,
}

/// Configuration of the provider.
#[derive(Clone, Debug, Default)]
pub struct StatsConfig {
    /// Name of the Node object; `nodeName` of the summary.
    pub node_name: String,
    /// Root of the file system: `/`, or a test directory.
    pub root: PathBuf,
    /// Root directory of the agent; its file system is reported as the node's.
    pub root_directory: PathBuf,
    /// `volumeStatsAggPeriod`; `None` where volumes are not measured.
    pub volume_period: Option<Duration>,
    /// `kubeletCgroups`; empty for the cgroup of this process.
    pub kubelet_group: String,
    /// `--runtime-cgroups`; empty for the cgroup of the runtime's process.
    pub runtime_group: String,
    /// `systemCgroups`; empty for none.
    pub system_group: String,
    /// Command name of the runtime's process.
    pub runtime_process: String,
    /// Whether the cAdvisor page includes file systems (`localStorageCapacityIsolation`).
    pub reports_filesystems: bool,
    /// Maximum number of open cgroup files.
    pub max_open: usize,
    /// Constant facts of the machine.
    pub host: Host,
    /// Source of pod statistics (gate `PodAndContainerStatsFromCRI`).
    pub source: StatsSource,
    /// Whether pages have hidden metric families (`showHiddenMetricsForVersion`).
    pub hidden_metrics: HiddenMetrics,
}

/// Dependencies of the provider.
pub struct StatsDeps {
    /// Observer of running pods.
    pub observer: Arc<dyn PodObserver>,
    /// CRI runtime service: statistics of containers and pods, images of sandboxes.
    pub runtime: Arc<dyn RuntimeService>,
    /// CRI image service: usage of the image file systems.
    pub images: Arc<dyn ImageService>,
    /// Candidate paths of pod cgroups.
    pub groups: Arc<dyn PodCgroupPaths>,
    /// Directories of pods.
    pub directories: Arc<dyn PodDirectories>,
    /// Usage of volumes behind claims; `None` where there are none.
    pub claimed: Option<Arc<dyn ClaimedVolumes>>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Metrics of the provider itself.
    pub metrics: StatsMetrics,
}
