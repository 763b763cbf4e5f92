//! Cluster-facing node tasks: node object, status, lease, CSINode, resource slices.
//!
//! Implements spec 05 §4-5, 10 §4.1-4.2. [`start`] returns the tasks; each owns its state and ends when its token is
//! cancelled. State of other modules comes in as values and `watch`es; what pods need to know of the node is
//! published as facts.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    csi_node::{CsiNodeInitializer, UNINITIALIZED},
    facts_publisher,
    heartbeat_call::HeartbeatDeadline,
    host_network::HostNetwork,
    initial_node::RegistrationSettings,
    lease_controller::LeaseController,
    lease_object::Holder,
    resource_slices,
    status::{DevicePluginResources, NodeImage, StatusSettings},
    status_writer::StatusWriter,
};
use berth_api::{ReflectorStore, api::ApiClient};
use berth_metrics::NodeMetrics;
use berth_ports::{Clock, EventSink, NodeFacts, RuntimeState, TaskLiveness};
use berth_types::api;

/// Configuration of the node tasks.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Constant inputs of the node status.
    pub status: StatusSettings,
    /// Fields of a newly registered node object.
    pub origin: RegistrationSettings,
    /// `registerNode`.
    pub register: bool,
    /// Whether a deleted node is registered again; default off, as in kubelet.
    pub reregister: bool,
    /// `nodeStatusUpdateFrequency`.
    pub update_frequency: Duration,
    /// `nodeStatusReportFrequency`.
    pub report_frequency: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_seconds: i32,
    /// Whether no checkpoint of device plugins exists: extended resources of an existing node object then start at
    /// zero.
    pub devices_lost: bool,
    /// Whether ResourceSlices of device drivers are removed (gate `DynamicResourceAllocation`).
    pub wipes_slices: bool,
}

/// Callback with the volumes in use that the API server has recorded.
pub type VolumesReported = Arc<dyn Fn(&[String]) + Send + Sync>;

/// Dependencies of the node tasks.
#[derive(Clone)]
pub struct NodeDeps {
    /// API client.
    pub api: Arc<dyn ApiClient>,
    /// Watch cache of this node's object.
    pub nodes: ReflectorStore<api::Node>,
    /// Facts about the node: pressures, shutdown, and features are read; labels, taints, addresses, and extended
    /// resources are written.
    pub facts: watch::Sender<Arc<NodeFacts>>,
    /// Result of the runtime check.
    pub runtime: watch::Receiver<Arc<RuntimeState>>,
    /// `<name>://<version>` of the runtime.
    pub runtime_version: watch::Receiver<String>,
    /// Images of the runtime, as last listed; `None` before the first list.
    pub images: Arc<dyn Fn() -> Option<Vec<NodeImage>> + Send + Sync>,
    /// Resources of device plugins.
    pub devices: watch::Receiver<Arc<DevicePluginResources>>,
    /// Volumes in use; `None` before the volume manager has reported them.
    pub volumes_in_use: watch::Receiver<Option<Vec<String>>>,
    /// Callback with the volumes in use that the API server has recorded.
    pub volumes_reported: VolumesReported,
    /// Receives the node's pod CIDRs, comma-joined, for the runtime.
    pub pod_cidr: watch::Sender<String>,
    /// Addresses and routes of the machine.
    pub network: Arc<dyn HostNetwork>,
    /// Event sink.
    pub events: Arc<dyn EventSink>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Random source for jitter, uniform in 0..1.
    pub random: Arc<dyn Fn() -> f64 + Send + Sync>,
    /// Node metrics.
    pub metrics: NodeMetrics,
    /// Liveness of the tasks.
    pub liveness: NodeLiveness,
}

/// Liveness of the lease and status tasks.
#[derive(Clone, Debug, Default)]
pub struct NodeLiveness {
    /// Liveness of the lease task.
    pub lease: TaskLiveness,
    /// Liveness of the status task.
    pub status: TaskLiveness,
}

/// Cancellation tokens of the tasks.
#[derive(Clone, Debug)]
pub struct StopTokens {
    /// Stops all tasks but the lease.
    pub work: CancellationToken,
    /// Stops the lease, which outlives a node shutdown.
    pub lease: CancellationToken,
}

/// Returns the tasks of a node in a cluster, each with its name. They are cancel-safe.
pub fn start(config: ClusterConfig, deps: NodeDeps, stops: &StopTokens) -> Vec<(&'static str, BoxFuture<'static, ()>)> {
    let config = Arc::new(config);
    let name = config.status.name.clone();
    let seconds = u64::try_from(config.lease_seconds).unwrap_or_default();
    let beat = HeartbeatDeadline(config.update_frequency.min(Duration::from_secs(seconds)));
    let (registered, is_registered) = watch::channel(false);
    let (storage, storage_error) = watch::channel(Some(UNINITIALIZED.to_owned()));
    let work = || stops.work.clone();

    let facts = facts_publisher::follow_node(deps.nodes.clone(), name.clone(), deps.facts.clone(), work());
    let csi = CsiNodeInitializer {
        api: deps.api.clone(),
        nodes: deps.nodes.clone(),
        name: name.clone(),
        registered: is_registered.clone(),
        storage,
    };
    let lease = LeaseController {
        api: deps.api.clone(),
        beat,
        holder: Holder { node: name.clone(), seconds: config.lease_seconds },
        nodes: deps.nodes.clone(),
        registered: is_registered,
        reached: deps.api.reached(),
        clock: deps.clock.clone(),
        random: deps.random.clone(),
        metrics: deps.metrics.clone(),
        events: deps.events.clone(),
        last: None,
        node_observed: false,
        conflicts: 0,
        own_renew_times: Vec::new(),
        reported_conflict: None,
        liveness: deps.liveness.lease.clone(),
    };
    let mut tasks = vec![
        ("node facts", facts.boxed()),
        ("CSINode", csi.run(work()).boxed()),
        ("node lease", lease.run(stops.lease.clone()).boxed()),
    ];
    if config.wipes_slices {
        let wiping = resource_slices::delete_resource_slices(
            deps.api.clone(),
            deps.nodes.clone(),
            name,
            None,
            deps.random.clone(),
            work(),
        );
        tasks.push(("resource slices", wiping.boxed()));
    }
    let writer = StatusWriter::new(config, deps, beat, (registered, storage_error));
    tasks.push(("node status", writer.run(work()).boxed()));
    tasks
}

#[cfg(test)]
mod tests;
