//! What all workers share.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Report;
use crate::engine::allocation::Allocations;
use berth_metrics::EngineMetrics;
use berth_ports::{
    Clock, EventSink, MirrorPods, NodeFacts, ObjectSource, PodObserver, PodRuntime, ProbeManager, ResourceManager,
    RuntimeState, VolumeManager,
};
use berth_status::StatusManager;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// `syncFrequency`: the longest a settled pod goes without a turn.
    pub sync_frequency: Duration,
    /// How often housekeeping runs.
    pub housekeeping_period: Duration,
    /// Longest wait for one look at a pod before the turn fails.
    pub look_limit: Duration,
    /// Whether an API client exists (addresses are published, mirror pods are made).
    pub api_client: bool,
    /// Whether the first node address is IPv6.
    pub prefer_ipv6: bool,
    /// When this agent started.
    pub started_at: Timestamp,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            sync_frequency: Duration::from_secs(60),
            housekeeping_period: Duration::from_secs(2),
            look_limit: Duration::from_secs(120),
            api_client: false,
            prefer_ipv6: false,
            started_at: Timestamp::UNIX_EPOCH,
        }
    }
}

/// The players of every role, and what is published to all.
pub struct WorkerContext {
    /// Carries out plans.
    pub runtime: Arc<dyn PodRuntime>,
    /// Shows what really runs.
    pub observer: Arc<dyn PodObserver>,
    /// Mounts.
    pub volumes: Arc<dyn VolumeManager>,
    /// Probes.
    pub probes: Arc<dyn ProbeManager>,
    /// Pod cgroups.
    pub resources: Arc<dyn ResourceManager>,
    /// API objects.
    pub objects: Arc<dyn ObjectSource>,
    /// Mirrors of static pods.
    pub mirrors: Arc<dyn MirrorPods>,
    /// Events.
    pub events: Arc<dyn EventSink>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// What pods hold, and how their resizes stand.
    pub allocations: Allocations,
    /// Status cache.
    pub status: Arc<StatusManager>,
    /// Facts about the node.
    pub node: watch::Receiver<Arc<NodeFacts>>,
    /// What the runtime check found.
    pub runtime_state: watch::Receiver<Arc<RuntimeState>>,
    /// Counts.
    pub metrics: EngineMetrics,
    /// Settings.
    pub config: EngineConfig,
    /// Where workers report.
    pub reports: mpsc::Sender<Report>,
    /// All workers' tasks.
    pub tasks: TaskTracker,
    /// Cancelled when the agent stops; pods keep running.
    pub shutdown: CancellationToken,
}
