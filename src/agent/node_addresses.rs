//! The addresses of this node: those that the operator gave, and on a node without an API server those it has.

use std::{net::IpAddr, sync::Arc};

use tokio::sync::watch;
use tracing::warn;

use super::build::{Base, BuildError};
use crate::{
    config::{self, Loaded},
    engine::ports::NodeFacts,
    metrics::NodeMetrics,
    node::{KernelNetwork, OwnAddresses},
};

/// `--node-ip`, without what is no address.
///
/// # Errors
/// The addresses make neither a single nor a dual-stack node.
pub(super) fn given(loaded: &Loaded) -> Result<Vec<IpAddr>, BuildError> {
    let found = config::node_ips(&loaded.flags.node_ip).map_err(BuildError)?;
    if !found.ignored.is_empty() {
        warn!(nodeIPs = ?found.ignored, "Could not parse some node IP(s), ignoring them");
    }
    Ok(found.ips)
}

/// Without an API server: pods are told the addresses that the machine has, before the first one starts. Metrics of a
/// node's start are there, at zero, as the reference has them.
///
/// # Errors
/// As [`given`].
pub(super) async fn tell(loaded: &Loaded, base: &Base, facts: watch::Sender<Arc<NodeFacts>>) -> Result<(), BuildError> {
    let hostname = facts.borrow().hostname.clone();
    let own = OwnAddresses { given: given(loaded)?, hostname, network: Arc::new(KernelNetwork::default()), facts };
    own.tell().await;
    let _at_zero = NodeMetrics::new(&base.registry);
    base.tasks.spawn(own.follow(base.stop.child_token()));
    Ok(())
}
