//! Devices of device plugins and resource claims, opened together, and CPUs and memory.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::{
    claims::{self, Claims},
    cluster::Cluster,
    composition_root::{Base, BuildError},
    devices::{self, Devices},
};
use crate::engine::SyncLoopCommand;
use berth_config::LoadedConfig;
use berth_ports::NodeFacts;
use berth_resources::placement::PlacementManager;
use berth_types::PodUid;

/// Resyncs pods whose devices changed health, once the sync loop exists.
#[derive(Clone)]
pub(super) struct PodResync(watch::Sender<Option<mpsc::Sender<SyncLoopCommand>>>);

impl PodResync {
    /// Returns a function that resyncs pods.
    pub(super) fn callback(&self) -> Box<dyn Fn(Vec<PodUid>) + Send + Sync> {
        let commands = self.0.subscribe();
        Box::new(move |pods| {
            let Some(commands) = commands.borrow().clone() else { return };
            for pod in pods {
                // A full queue: the periodic sync of the pod updates its status.
                let _ = commands.try_send(SyncLoopCommand::Resync(pod));
            }
        })
    }
}

/// What allocates devices to pods.
#[derive(Clone)]
pub(super) struct Allocators {
    pub(super) devices: Devices,
    pub(super) claims: Claims,
    pub(super) placement: Arc<PlacementManager>,
    resync: PodResync,
}

impl Allocators {
    /// Opens devices and claims; `node` are the facts of a node, which get the devices of a node without a cluster.
    ///
    /// # Errors
    /// Invalid settings, or a checkpoint that cannot be used.
    pub(super) async fn open(
        loaded: &LoadedConfig,
        base: &Base,
        cluster: Option<&Cluster>,
        placement: Arc<PlacementManager>,
        node: &watch::Sender<Arc<NodeFacts>>,
    ) -> Result<Self, BuildError> {
        let resync = PodResync(watch::Sender::new(None));
        let devices = devices::open(base, &resync, placement.clone(), cluster.is_none().then(|| node.clone())).await?;
        let claims = claims::open(loaded, base, &resync, cluster).await?;
        Ok(Self { devices, claims, placement, resync })
    }

    /// Resyncs pods through the sync loop when their devices change health.
    pub(super) fn resync_through(&self, commands: &mpsc::Sender<SyncLoopCommand>) {
        self.resync.0.send_replace(Some(commands.clone()));
    }
}
