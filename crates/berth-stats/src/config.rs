//! What the room is told, and whom it asks.

use std::{path::PathBuf, sync::Arc, time::Duration};

use super::{Host, PodGroups, summary::PodPlaces};
use berth_cri::{ImageService, RuntimeService};
use berth_metrics::{StatsMetrics, StatsSource};
use berth_ports::{ClaimedVolumes, Clock, PodObserver};
use berth_types::PodRef;

/// Directories of a pod on the node's disk.
pub trait PodDirectories: Send + Sync + 'static {
    /// Where the directories of a pod are.
    fn of(&self, pod: &PodRef) -> PodPlaces;
}

/// What the provider is told.
#[derive(Clone, Debug, Default)]
pub struct StatsConfig {
    /// The node's name.
    pub node_name: String,
    /// `/`.
    pub root: PathBuf,
    /// The agent's root directory: its file system is the node's.
    pub root_directory: PathBuf,
    /// `volumeStatsAggPeriod`; `None` where volumes are not measured.
    pub volume_period: Option<Duration>,
    /// `kubeletCgroups`; empty for the group this process is in.
    pub kubelet_group: String,
    /// `--runtime-cgroups`; empty for the group of the runtime's process.
    pub runtime_group: String,
    /// `systemCgroups`.
    pub system_group: String,
    /// Name of the runtime's process.
    pub runtime_process: String,
    /// Whether file systems are told of on the page of metrics (`localStorageCapacityIsolation`).
    pub tells_filesystems: bool,
    /// Control files that may stay open.
    pub max_open: usize,
    /// Facts of the machine.
    pub host: Host,
    /// Where the statistics of pods come from (gate `PodAndContainerStatsFromCRI`).
    pub source: StatsSource,
}

/// Whom the provider asks.
pub struct StatsDeps {
    /// What runs.
    pub observer: Arc<dyn PodObserver>,
    /// Writable layers.
    pub runtime: Arc<dyn RuntimeService>,
    /// Images.
    pub images: Arc<dyn ImageService>,
    /// Names of control groups.
    pub groups: Arc<dyn PodGroups>,
    /// Directories of pods.
    pub directories: Arc<dyn PodDirectories>,
    /// Volumes behind claims; `None` where there are none.
    pub claimed: Option<Arc<dyn ClaimedVolumes>>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// What is counted.
    pub metrics: StatsMetrics,
}
