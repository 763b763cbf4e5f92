//! Node addresses: `--node-ip`; of a node without an API server, the detected ones and `podCIDR`.

use std::{net::IpAddr, sync::Arc};

use futures::FutureExt;
use tokio::{
    sync::{oneshot, watch},
    time::timeout,
};
use tracing::warn;

use super::composition_root::{Base, BuildError, SETTLE};
use crate::node::{
    KernelNetwork, StandaloneAddresses,
    pod_cidr::{SendCidr, set_pod_cidr},
};
use berth_config::LoadedConfig;
use berth_cri::{CriError, RuntimeService};
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

/// Sends `podCIDR` of a node without an API server to the runtime. Returns when the runtime has accepted it, so that
/// the first pod gets an address of it, or after [`SETTLE`]; from then on, updates are retried in the background.
pub(super) async fn send_pod_cidr(loaded: &LoadedConfig, base: &Base, cri: Arc<dyn RuntimeService>) {
    let update = set_pod_cidr(loaded.config.pod_cidr.clone(), cidr_sender(cri), base.stop.child_token());
    let (ended, has_ended) = oneshot::channel();
    base.tasks.spawn(async move {
        update.await;
        // Nothing receives it after the timeout.
        let _ = ended.send(());
    });
    let _in_time = timeout(SETTLE, has_ended).await;
}

/// Returns the call that sends a pod CIDR to the runtime.
pub(super) fn cidr_sender(cri: Arc<dyn RuntimeService>) -> Box<SendCidr<CriError>> {
    Box::new(move |cidr| {
        let cri = cri.clone();
        async move { cri.update_runtime_config(&cidr).await }.boxed()
    })
}
