//! Port of the PLEG: pod observations with generations, and views for pod workers.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use tokio::sync::watch;

use berth_types::{
    PodRef, PodUid,
    observation::{Generation, ObservedPod},
};

/// Latest observation of one pod.
#[derive(Clone, Debug, PartialEq)]
pub struct LatestObservation {
    /// Observed pod; the last successful read if this one failed.
    pub pod: Arc<ObservedPod>,
    /// Generation at which this read (failed or not) began; `pod.generation` may be older if it failed.
    pub generation: Generation,
    /// Why this read failed; `None` on success.
    pub error: Option<Arc<str>>,
}

/// A pod worker's subscription to the observations of one pod.
///
/// `None` until a first read of the pod, or a complete list that began after the start, covers the pod.
#[derive(Clone, Debug)]
pub struct PodView {
    receiver: watch::Receiver<Option<LatestObservation>>,
    acted: Generation,
}

impl PodView {
    /// Wraps the store's channel; `action_completed` is the generation of the last completed action on the pod.
    pub fn new(receiver: watch::Receiver<Option<LatestObservation>>, acted: Generation) -> Self {
        Self { receiver, acted }
    }

    /// Latest observation, marked as read.
    pub fn latest(&mut self) -> Option<LatestObservation> {
        self.receiver.borrow_and_update().clone()
    }

    /// Waits until the observation changes after [`PodView::latest`]. Pending forever once the store is gone.
    pub async fn changed(&mut self) {
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for a read that began at `wanted` or later, and not before the last action of a previous worker of the
    /// pod. Has no deadline of its own: the caller bounds and names the wait.
    pub async fn fresh(&mut self, wanted: Generation) -> LatestObservation {
        let wanted = wanted.max(self.acted);
        loop {
            if let Some(seen) = self.latest()
                && seen.generation >= wanted
            {
                return seen;
            }
            self.changed().await;
        }
    }
}

/// All pods in the runtime.
#[derive(Clone, Debug, Default)]
pub struct RuntimePods {
    /// Last observation of each pod, by UID.
    pub pods: HashMap<PodUid, Arc<ObservedPod>>,
}

/// The PLEG's pod store.
#[async_trait]
pub trait PodObserver: Send + Sync + 'static {
    /// Subscribes to one pod. The store keeps an entry while a view or runtime objects exist.
    fn view(&self, pod: &PodRef) -> PodView;
    /// Reports a completed action on the pod: increments the generation, requests an immediate read, and returns the
    /// minimum generation of an observation that includes the action.
    fn action_completed(&self, pod: &PodUid) -> Generation;
    /// Snapshot of all pods without a runtime call; `None` before the first complete list.
    fn known(&self) -> Option<RuntimePods>;
    /// One pod of [`PodObserver::known`].
    fn known_pod(&self, pod: &PodUid) -> Option<Arc<ObservedPod>> {
        self.known()?.pods.remove(pod)
    }
    /// Whether anything of a pod may be alive, from [`PodObserver::known`]; true before the first complete list.
    fn may_be_alive(&self, pod: &PodUid) -> bool {
        self.known().is_none_or(|known| known.pods.get(pod).is_some_and(|seen| seen.is_alive()))
    }
    /// Lists the runtime now and returns all pods.
    ///
    /// # Errors
    /// The runtime's error as text.
    async fn list(&self) -> Result<RuntimePods, String>;
    /// `None` while healthy; otherwise the text after `PLEG is not healthy: ` (spec 03b §6).
    fn health(&self) -> Option<String>;
}
