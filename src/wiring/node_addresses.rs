//! Node addresses: `--node-ip`, and without an API server detected addresses and `podCIDR`.

use std::{net::IpAddr, sync::Arc};

use futures::FutureExt;
use tokio::{
    sync::{oneshot, watch},
    time::timeout,
};
use tracing::warn;

use super::composition_root::{Base, BuildError, SETTLE};
use crate::{
    node::{
        KernelNetwork, StandaloneAddresses,
        pod_cidr::{SendCidr, set_pod_cidr},
    },
    task_supervisor::TaskSupervisor,
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
/// the first pod gets an address from it, or after [`SETTLE`]; from then on, it is retried in the background.
pub(super) async fn send_pod_cidr(loaded: &LoadedConfig, base: &Base, cri: Arc<dyn RuntimeService>) {
    let update = set_pod_cidr(loaded.config.pod_cidr.clone(), cidr_sender(cri), base.stop.child_token());
    spawn_and_settle(&base.tasks, update).await;
}

/// Spawns a task. Returns when it has ended, or after [`SETTLE`].
async fn spawn_and_settle(tasks: &TaskSupervisor, task: impl Future<Output = ()> + Send + 'static) {
    let (ended, has_ended) = oneshot::channel();
    tasks.spawn(async move {
        task.await;
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

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use tokio::time::{Instant, sleep};
    use tokio_util::sync::CancellationToken;

    use super::*;

    /// Reply of a runtime to a pod CIDR.
    #[derive(Clone, Copy, Debug)]
    enum CidrReply {
        Accepts,
        Refuses,
        Hangs,
    }

    /// Sender to a runtime with these replies, the last of which stays; it counts the calls.
    fn sender(replies: Vec<CidrReply>, calls: Arc<AtomicUsize>) -> Box<SendCidr<&'static str>> {
        Box::new(move |_| {
            let reply = replies.get(calls.fetch_add(1, Ordering::Relaxed)).or(replies.last()).copied();
            async move {
                match reply {
                    Some(CidrReply::Accepts) => Ok(()),
                    Some(CidrReply::Refuses) => Err("refused"),
                    Some(CidrReply::Hangs) | None => pending().await,
                }
            }
            .boxed()
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_does_not_accept_the_pod_cidr_delays_the_start_for_a_limited_time() {
        use CidrReply::{Accepts, Hangs, Refuses};
        let limit = SETTLE.as_secs();
        for (replies, delay, calls_at_start, calls_later) in [
            (vec![Accepts], 0, 1, 1),
            (vec![Refuses, Accepts], 1, 2, 2),
            (vec![Refuses], limit, 2, 6),
            (vec![Refuses, Refuses, Accepts], limit, 2, 3),
            (vec![Hangs], limit, 1, 1),
        ] {
            let (tasks, stop) = (TaskSupervisor::default(), CancellationToken::new());
            let calls = Arc::new(AtomicUsize::new(0));
            let update = set_pod_cidr("a".to_owned(), sender(replies.clone(), calls.clone()), stop.clone());
            let begun = Instant::now();
            spawn_and_settle(&tasks, update).await;
            assert_eq!(begun.elapsed().as_secs(), delay, "{replies:?}");
            assert_eq!(calls.load(Ordering::Relaxed), calls_at_start, "{replies:?}");
            // Refused calls are repeated in the background: 0, 1, 3, 7, 15, and 31 s after the start.
            sleep(Duration::from_secs(40)).await;
            assert_eq!(calls.load(Ordering::Relaxed), calls_later, "{replies:?}");
            stop.cancel();
            tasks.tracker().close();
            timeout(SETTLE, tasks.tracker().wait()).await.expect("the task ends");
        }
    }
}
