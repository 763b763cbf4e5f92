//! The snapshot of all pods that the sync loop publishes: everything outside the engine reads pods from it.

use std::{collections::HashMap, sync::Arc};

use futures::{Stream, stream};
use tokio::sync::watch;

use super::{lifecycle::Lifecycle, worker_status::PodWorkerStatus};
use berth_ports::PodStateProvider;
use berth_types::{Pod, PodUid};

/// All pods at one moment.
#[derive(Clone, Debug, Default)]
pub struct PodSnapshot {
    /// Whether every source has delivered its pods.
    pub sources_ready: bool,
    /// Desired pods (mirror pods excluded), sorted by namespace, name, and UID.
    pub desired: Arc<Vec<Arc<Pod>>>,
    /// Lifecycle of each pod that is desired or has a record; `None` where it is desired without a
    /// record (it was rejected or awaits admission).
    pub lifecycles: HashMap<PodUid, Option<Lifecycle>>,
    /// Status of each pod's worker, unordered.
    pub workers: Vec<PodWorkerStatus>,
}

/// Reader of the latest [`PodSnapshot`]. Cheap to clone; never blocks.
#[derive(Clone, Debug)]
pub struct PodReader(watch::Receiver<Arc<PodSnapshot>>);

impl PodReader {
    /// Reads what is sent to that channel.
    pub fn new(snapshots: watch::Receiver<Arc<PodSnapshot>>) -> Self {
        Self(snapshots)
    }

    /// A fixed set of desired pods, for tests of readers.
    pub fn fixed(desired: Vec<Arc<Pod>>) -> Self {
        let snapshot = PodSnapshot { sources_ready: true, desired: Arc::new(desired), ..PodSnapshot::default() };
        Self(watch::channel(Arc::new(snapshot)).1)
    }

    /// The latest snapshot.
    pub fn latest(&self) -> Arc<PodSnapshot> {
        self.0.borrow().clone()
    }

    /// Desired pods.
    pub fn desired(&self) -> Arc<Vec<Arc<Pod>>> {
        self.0.borrow().desired.clone()
    }

    /// Yields after each change; ends with the sync loop.
    pub fn changes(&self) -> impl Stream<Item = ()> + Send + 'static {
        stream::unfold(self.0.clone(), async |mut snapshots| snapshots.changed().await.ok().map(|()| ((), snapshots)))
    }

    /// Waits until every source has delivered its pods, or the sync loop has ended.
    pub async fn sources_ready(&self) {
        let _ = self.0.clone().wait_for(|snapshot| snapshot.sources_ready).await;
    }

    /// Whether the pod has a record and is not terminated: containers of it may run.
    pub fn is_active(&self, pod: &PodUid) -> bool {
        self.0.borrow().lifecycles.get(pod).is_some_and(|life| life.as_ref().is_some_and(|life| !life.is_terminated()))
    }

    /// Waits until the pod is finished or unknown, or the sync loop has ended.
    pub async fn finished(&self, pod: &PodUid) {
        let is_over = |life: &Option<Lifecycle>| life.as_ref().is_none_or(Lifecycle::is_finished);
        let _ = self.0.clone().wait_for(|snapshot| snapshot.lifecycles.get(pod).is_none_or(is_over)).await;
    }

    /// Whether the pod's termination was requested or has begun.
    pub fn is_stopping(&self, pod: &PodUid) -> bool {
        self.0.borrow().lifecycles.get(pod).is_some_and(|life| life.as_ref().is_some_and(Lifecycle::is_stopping))
    }
}

impl PodStateProvider for PodReader {
    fn sources_ready(&self) -> bool {
        self.0.borrow().sources_ready
    }

    fn should_pod_content_be_removed(&self, pod: &PodUid) -> bool {
        let snapshot = self.0.borrow();
        match snapshot.lifecycles.get(pod) {
            None => snapshot.sources_ready,
            Some(life) => life.as_ref().is_some_and(Lifecycle::content_removable),
        }
    }

    fn is_terminated(&self, pod: &PodUid) -> bool {
        let snapshot = self.0.borrow();
        snapshot.lifecycles.get(pod).is_some_and(|life| life.as_ref().is_some_and(Lifecycle::is_terminated))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lifecycle::StopCause;

    #[test]
    fn content_of_an_unknown_pod_is_kept_until_the_sources_are_ready() {
        let (sender, receiver) = watch::channel(Arc::new(PodSnapshot::default()));
        let view = PodReader::new(receiver);
        let [known, refused, unknown] = ["known", "refused", "unknown"].map(PodUid::from);
        assert!(!PodStateProvider::sources_ready(&view) && !view.should_pod_content_be_removed(&unknown));
        let finished = Lifecycle::Finished { cause: StopCause::Completed };
        let lifecycles = [(known.clone(), Some(finished)), (refused.clone(), None)].into();
        sender.send_replace(Arc::new(PodSnapshot { sources_ready: true, lifecycles, ..PodSnapshot::default() }));
        assert!(
            view.should_pod_content_be_removed(&unknown)
                && !view.should_pod_content_be_removed(&known)
                && !view.should_pod_content_be_removed(&refused)
        );
        assert!(view.is_terminated(&known) && !view.is_terminated(&unknown));
    }
}
