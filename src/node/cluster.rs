//! This node in a cluster: its object, its lease, and what hangs on them. Spec 05 §4-5, 10 §4.1-4.2.
//!
//! [`start`] gives the tasks; each owns its state and ends with its token. What other rooms know
//! comes in as values and `watch`es, what pods have to know of the node goes out as facts.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    beat::Beat,
    csi_node::{CsiNode, UNINITIALIZED},
    host_network::HostNetwork,
    initial::Origin,
    lease::LeaseKeeper,
    lease_object::Holder,
    published, slices,
    status::{Devices, NodeImage, StatusSettings},
    status_writer::StatusWriter,
};
use berth_api::{Store, api::ApiClient};
use berth_metrics::NodeMetrics;
use berth_ports::{Clock, EventSink, NodeFacts, Pulse, RuntimeState};
use berth_types::api;

/// The configuration's part.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// What the status is made of.
    pub status: StatusSettings,
    /// What a new object takes from us.
    pub origin: Origin,
    /// `registerNode`.
    pub register: bool,
    /// Whether a node that was deleted is registered again; off, as in the reference.
    pub reregister: bool,
    /// `nodeStatusUpdateFrequency`.
    pub update_frequency: Duration,
    /// `nodeStatusReportFrequency`.
    pub report_frequency: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_seconds: i32,
    /// Whether nothing is remembered of device plugins: extended resources of an existing object
    /// begin at zero.
    pub devices_lost: bool,
    /// Whether slices of device drivers are ours to remove (gate `DynamicResourceAllocation`).
    pub wipes_slices: bool,
}

/// Hears which volumes the API server knows to be in use.
pub type VolumesReported = Arc<dyn Fn(&[String]) + Send + Sync>;

/// Who is asked, and what others know.
#[derive(Clone)]
pub struct NodeDeps {
    /// The API server.
    pub api: Arc<dyn ApiClient>,
    /// The watch on the own node.
    pub nodes: Store<api::Node>,
    /// Facts about the node: pressures, shutdown and features are read, labels, taints, addresses
    /// and foreign resources are written.
    pub facts: watch::Sender<Arc<NodeFacts>>,
    /// What the runtime check finds.
    pub runtime: watch::Receiver<Arc<RuntimeState>>,
    /// `<name>://<version>` of the runtime.
    pub runtime_version: watch::Receiver<String>,
    /// Images of the runtime, as last listed; `None` before the first list.
    pub images: Arc<dyn Fn() -> Option<Vec<NodeImage>> + Send + Sync>,
    /// Device plugins.
    pub devices: watch::Receiver<Arc<Devices>>,
    /// Volumes in use; `None` before the volume manager knows.
    pub volumes_in_use: watch::Receiver<Option<Vec<String>>>,
    /// Hears which volumes the API server knows to be in use.
    pub volumes_reported: VolumesReported,
    /// Hears the node's pod ranges, comma-joined, for the runtime.
    pub pod_cidr: watch::Sender<String>,
    /// The machine's network.
    pub network: Arc<dyn HostNetwork>,
    /// Takes events.
    pub events: Arc<dyn EventSink>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Uniform in 0..1.
    pub chance: Arc<dyn Fn() -> f64 + Send + Sync>,
    /// What is counted.
    pub metrics: NodeMetrics,
    /// Tell that the tasks live.
    pub pulses: NodePulses,
}

/// Signs of life of those who keep the node known.
#[derive(Clone, Debug, Default)]
pub struct NodePulses {
    /// Of who keeps the lease.
    pub lease: Pulse,
    /// Of who keeps the status.
    pub status: Pulse,
}

/// What ends the tasks.
#[derive(Clone, Debug)]
pub struct Stops {
    /// All but the lease.
    pub work: CancellationToken,
    /// The lease, which outlives a shutdown of the node.
    pub lease: CancellationToken,
}

/// The tasks of a node in a cluster, each with its name. They are safe to drop.
pub fn start(config: ClusterConfig, deps: NodeDeps, stops: &Stops) -> Vec<(&'static str, BoxFuture<'static, ()>)> {
    let config = Arc::new(config);
    let name = config.status.name.clone();
    let seconds = u64::try_from(config.lease_seconds).unwrap_or_default();
    let beat = Beat(config.update_frequency.min(Duration::from_secs(seconds)));
    let (registered, is_registered) = watch::channel(false);
    let (storage, storage_error) = watch::channel(Some(UNINITIALIZED.to_owned()));
    let work = || stops.work.clone();

    let facts = published::follow(deps.nodes.clone(), name.clone(), deps.facts.clone(), work());
    let csi = CsiNode {
        api: deps.api.clone(),
        nodes: deps.nodes.clone(),
        name: name.clone(),
        registered: is_registered.clone(),
        storage,
    };
    let lease = LeaseKeeper {
        api: deps.api.clone(),
        beat,
        holder: Holder { node: name.clone(), seconds: config.lease_seconds },
        nodes: deps.nodes.clone(),
        registered: is_registered,
        reached: deps.api.reached(),
        clock: deps.clock.clone(),
        chance: deps.chance.clone(),
        metrics: deps.metrics.clone(),
        events: deps.events.clone(),
        last: None,
        seen: false,
        conflicts: 0,
        wrote: Vec::new(),
        rival: None,
        pulse: deps.pulses.lease.clone(),
    };
    let mut tasks = vec![
        ("node facts", facts.boxed()),
        ("CSINode", csi.run(work()).boxed()),
        ("node lease", lease.run(stops.lease.clone()).boxed()),
    ];
    if config.wipes_slices {
        let wiping = slices::wipe(deps.api.clone(), deps.nodes.clone(), name, deps.chance.clone(), work());
        tasks.push(("resource slices", wiping.boxed()));
    }
    let writer = StatusWriter::new(config, deps, beat, (registered, storage_error));
    tasks.push(("node status", writer.run(work()).boxed()));
    tasks
}

#[cfg(test)]
mod tests;
