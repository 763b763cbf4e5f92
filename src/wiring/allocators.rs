//! Devices of device plugins and resource claims, opened together.

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

/// What allocates devices to pods.
#[derive(Clone)]
pub(super) struct Allocators {
    pub(super) devices: Devices,
    pub(super) claims: Claims,
}

impl Allocators {
    /// Opens both; `node` are the facts of a node, which get the devices of a node without a cluster.
    ///
    /// # Errors
    /// Invalid settings, or a checkpoint that cannot be used.
    pub(super) async fn open(
        loaded: &LoadedConfig,
        base: &Base,
        cluster: Option<&Cluster>,
        node: &watch::Sender<Arc<NodeFacts>>,
    ) -> Result<Self, BuildError> {
        let devices = devices::open(base, cluster.is_none().then(|| node.clone())).await?;
        let claims = claims::open(loaded, base, cluster).await?;
        Ok(Self { devices, claims })
    }

    /// Resyncs pods through the sync loop when their devices change health.
    pub(super) fn resync_through(&self, commands: &mpsc::Sender<SyncLoopCommand>) {
        self.devices.resync_through(commands.clone());
        self.claims.resync_through(commands.clone());
    }
}
