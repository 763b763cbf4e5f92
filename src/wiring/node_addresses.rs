//! Node addresses: `--node-ip`, and the detected addresses of a node without an API server.

use std::{net::IpAddr, sync::Arc};

use tokio::sync::watch;
use tracing::warn;

use super::composition_root::{Base, BuildError};
use crate::node::{KernelNetwork, StandaloneAddresses};
use berth_config::LoadedConfig;
use berth_metrics::NodeMetrics;
use berth_ports::NodeFacts;

/// The valid addresses of `--node-ip`; invalid ones are logged and ignored.
///
/// # Errors
/// The addresses make neither a single nor a dual-stack node.
pub(super) fn configured(loaded: &LoadedConfig) -> Result<Vec<IpAddr>, BuildError> {
    let found = berth_config::node_ips(&loaded.flags.node_ip).map_err(BuildError)?;
    if !found.ignored.is_empty() {
        warn!(nodeIPs = ?found.ignored, "Could not parse some node IP(s), ignoring them");
    }
    Ok(found.ips)
}

/// Publishes the detected addresses of a node without an API server before the first pod starts, and registers the
/// metrics of node startup at zero, as kubelet does.
///
/// # Errors
/// As [`configured`].
pub(super) async fn publish_own(
    loaded: &LoadedConfig,
    base: &Base,
    facts: watch::Sender<Arc<NodeFacts>>,
) -> Result<(), BuildError> {
    let hostname = facts.borrow().hostname.clone();
    let own = StandaloneAddresses {
        configured: configured(loaded)?,
        hostname,
        network: Arc::new(KernelNetwork::default()),
        facts,
    };
    own.publish_once().await;
    let _at_zero = NodeMetrics::new(&base.registry);
    base.tasks.spawn(own.follow(base.stop.child_token()));
    Ok(())
}
