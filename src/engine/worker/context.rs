//! Shared context of all pod workers: dependencies, settings, and channels.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Report;
use crate::engine::allocation::Allocations;
use berth_metrics::EngineMetrics;
use berth_ports::{
    Clock, EventSink, MirrorPods, NodeFacts, ObjectSource, PodClaims, PodDevices, PodObserver, PodRuntime,
    ProbeManager, ResourceManager, RuntimeState, VolumeManager,
};
use berth_status::StatusManager;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// `syncFrequency`: maximum time between syncs of a settled pod.
    pub sync_frequency: Duration,
    /// Interval of housekeeping in the sync loop; default 2 s.
    pub housekeeping_period: Duration,
    /// Timeout for one observation of a pod; the sync fails after it.
    pub observation_timeout: Duration,
    /// Whether an API client exists (addresses are published, mirror pods are created).
    pub api_client: bool,
    /// Whether the first node address is IPv6.
    pub prefer_ipv6: bool,
    /// Whether the status lists the health of devices (gate `ResourceHealthStatus`).
    pub resource_health: bool,
    /// Start time of this agent.
    pub started_at: Timestamp,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            sync_frequency: Duration::from_secs(60),
            housekeeping_period: Duration::from_secs(2),
            observation_timeout: Duration::from_secs(120),
            api_client: false,
            prefer_ipv6: false,
            resource_health: true,
            started_at: Timestamp::UNIX_EPOCH,
        }
    }
}

/// Dependencies and published state that all workers share.
pub struct WorkerContext {
    /// Executes plans through the container runtime.
    pub runtime: Arc<dyn PodRuntime>,
    /// Observes the actual state of pods.
    pub observer: Arc<dyn PodObserver>,
    /// Mounts and unmounts volumes.
    pub volumes: Arc<dyn VolumeManager>,
    /// Runs probes.
    pub probes: Arc<dyn ProbeManager>,
    /// Manages pod cgroups.
    pub resources: Arc<dyn ResourceManager>,
    /// Allocates devices of device plugins.
    pub devices: Arc<dyn PodDevices>,
    /// Prepares resource claims.
    pub claims: Arc<dyn PodClaims>,
    /// Reads API objects, for example, ConfigMaps and Secrets.
    pub objects: Arc<dyn ObjectSource>,
    /// Creates and deletes mirror pods of static pods.
    pub mirrors: Arc<dyn MirrorPods>,
    /// Records events.
    pub events: Arc<dyn EventSink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Allocated resources and resize conditions.
    pub allocations: Allocations,
    /// Pod status cache.
    pub status: Arc<StatusManager>,
    /// Facts about the node.
    pub node: watch::Receiver<Arc<NodeFacts>>,
    /// Latest runtime and network readiness.
    pub runtime_state: watch::Receiver<Arc<RuntimeState>>,
    /// Metrics of the engine.
    pub metrics: EngineMetrics,
    /// Settings of the engine.
    pub config: EngineConfig,
    /// Sender of workers' reports to the sync loop.
    pub reports: mpsc::Sender<Report>,
    /// Tracks the tasks of all workers.
    pub tasks: TaskTracker,
    /// Cancelled when the agent stops; pods keep running.
    pub shutdown: CancellationToken,
}
