//! The role of PLEG: the one store of what really runs.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use tokio::sync::watch;

use berth_types::{
    PodRef, PodUid,
    observed::{Generation, ObservedPod},
};

/// The latest look at one pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// What was seen; the last good look where this one failed.
    pub pod: Arc<ObservedPod>,
    /// The generation at which this look (failed or not) began; `pod.generation` may be older
    /// when it failed.
    pub generation: Generation,
    /// Why this look failed.
    pub error: Option<Arc<str>>,
}

/// One pod's observations, as its worker follows them.
///
/// `None` until a first look, or a complete list that began after start, tells about the pod.
#[derive(Clone, Debug)]
pub struct PodView {
    receiver: watch::Receiver<Option<Observation>>,
    acted: Generation,
}

impl PodView {
    /// Wraps the store's channel; `acted` is the generation of the last action that ended on the pod before.
    pub fn new(receiver: watch::Receiver<Option<Observation>>, acted: Generation) -> Self {
        Self { receiver, acted }
    }

    /// The latest observation, marking it as seen.
    pub fn latest(&mut self) -> Option<Observation> {
        self.receiver.borrow_and_update().clone()
    }

    /// Waits until the latest observation changed since [`PodView::latest`]. Pending for ever
    /// once the store is gone.
    pub async fn moved(&mut self) {
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for a look that began at `wanted` or later, and not before the last action of who
    /// worked on the pod before. Has no deadline of its own: the caller bounds and names the wait.
    pub async fn fresh(&mut self, wanted: Generation) -> Observation {
        let wanted = wanted.max(self.acted);
        loop {
            if let Some(seen) = self.latest()
                && seen.generation >= wanted
            {
                return seen;
            }
            self.moved().await;
        }
    }
}

/// Every pod the runtime holds, with whether anything of it is alive.
#[derive(Clone, Debug, Default)]
pub struct RuntimePods {
    /// By UID; last look at each.
    pub pods: HashMap<PodUid, Arc<ObservedPod>>,
}

/// The pod store.
#[async_trait]
pub trait PodObserver: Send + Sync + 'static {
    /// Follows one pod. The store keeps an entry while a view or runtime objects exist.
    fn view(&self, pod: &PodRef) -> PodView;
    /// Says that an action on the pod has just ended: bumps the generation, asks for a look at
    /// once, and returns the generation an observation must have to count.
    fn acted(&self, pod: &PodUid) -> Generation;
    /// Everything known now, without asking the runtime; `None` before the first complete list.
    fn known(&self) -> Option<RuntimePods>;
    /// One pod of [`PodObserver::known`].
    fn known_pod(&self, pod: &PodUid) -> Option<Arc<ObservedPod>> {
        self.known()?.pods.remove(pod)
    }
    /// Whether anything of a pod may be alive: what [`PodObserver::known`] says of it, and true
    /// before the first complete list.
    fn may_be_alive(&self, pod: &PodUid) -> bool {
        self.known().is_none_or(|known| known.pods.get(pod).is_some_and(|seen| seen.is_alive()))
    }
    /// Lists the runtime now and returns everything.
    ///
    /// # Errors
    /// The runtime's error as text.
    async fn list(&self) -> Result<RuntimePods, String>;
    /// `None` while healthy; else the text behind `PLEG is not healthy: ` (spec 03b §6).
    fn health(&self) -> Option<String>;
}
