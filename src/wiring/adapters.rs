//! Adapters between the ports of different modules.

use std::{path::PathBuf, sync::Arc};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    logs::{RunningLog, RunningLogs},
    pleg::ContainerDied,
    runtime::RuntimeManager,
    sources::ports::SourceEvents,
};
use berth_ports::{EventRecord, EventSink, NodeFacts, PodObserver, PodRuntime, RuntimeState};
use berth_types::{Pod, PodRef};

/// Records warnings of pod sources as events.
pub struct SourceWarnings(pub Arc<dyn EventSink>);

impl SourceEvents for SourceWarnings {
    fn warning(&self, pod: &PodRef, reason: &'static str, message: String) {
        self.0.record(EventRecord::warning(pod, reason, message));
    }

    fn observed(&self, _pod: &Arc<Pod>) {} // only pods of the API server have a startup latency
}

/// Copies features of the runtime to the node's facts, where admission reads them.
pub async fn follow_runtime_features(
    mut runtime: watch::Receiver<Arc<RuntimeState>>,
    node: watch::Sender<Arc<NodeFacts>>,
    stop: CancellationToken,
) {
    loop {
        let supported = runtime.borrow_and_update().supplemental_groups_policy;
        node.send_if_modified(|facts| {
            let news = facts.supplemental_groups_policy != supported;
            if news {
                Arc::make_mut(facts).supplemental_groups_policy = supported;
            }
            news
        });
        tokio::select! {
            () = stop.cancelled() => return,
            changed = runtime.changed() => if changed.is_err() { return },
        }
    }
}

/// Prunes dead instances when a container dies: there may be more than the limit then.
pub async fn forward_deaths(
    mut deaths: mpsc::Receiver<ContainerDied>,
    runtime: Arc<RuntimeManager>,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            died = deaths.recv() => match died {
                Some(died) => runtime.prune(&died.pod, Some((&died.container, &died.id)), false),
                None => return,
            },
        }
    }
}

/// Logs of the containers that run according to PLEG.
pub fn running_logs(observer: Arc<dyn PodObserver>) -> RunningLogs {
    Box::new(move || {
        let known = observer.known().unwrap_or_default();
        let running = known.pods.values().flat_map(|pod| pod.running());
        let with_log = running.filter(|container| !container.log_path.is_empty());
        with_log.map(|c| RunningLog { container: c.id.clone(), path: PathBuf::from(&c.log_path) }).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_the_runtime_can_do_becomes_a_fact_about_the_node() {
        let (runtime, seen) = watch::channel(Arc::<RuntimeState>::default());
        let (node, mut facts) = watch::channel(Arc::<NodeFacts>::default());
        let following = tokio::spawn(follow_runtime_features(seen, node, CancellationToken::new()));
        for supported in [true, false] {
            runtime.send_modify(|state| Arc::make_mut(state).supplemental_groups_policy = supported);
            let result = facts.wait_for(|facts| facts.supplemental_groups_policy == supported).await;
            assert!(result.is_ok());
        }
        drop(runtime);
        following.await.expect("it ends with the runtime check");
    }
}
