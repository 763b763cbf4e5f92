//! Pod state snapshot for garbage collection, published by the sync loop.

use std::{collections::HashMap, sync::Arc};

use tokio::sync::watch;

use super::lifecycle::Lifecycle;
use berth_ports::PodFates;
use berth_types::PodUid;

/// Lifecycle states of all pods at one moment.
#[derive(Clone, Debug, Default)]
pub struct Fates {
    /// Whether every source has delivered its pods.
    pub sources_ready: bool,
    /// Lifecycle of each pod that is desired or has a record; `None` where it is desired without a
    /// record (it was rejected or awaits admission).
    pub pods: HashMap<PodUid, Option<Lifecycle>>,
}

/// Reader of the latest `Fates`.
#[derive(Clone, Debug)]
pub struct FatesView(pub(super) watch::Receiver<Arc<Fates>>);

impl FatesView {
    /// Waits until every source has delivered its pods, or the sync loop has ended.
    pub async fn sources_told(&self) {
        let _ = self.0.clone().wait_for(|fates| fates.sources_ready).await;
    }

    /// Whether the pod has a record and is not terminated: containers of it may run.
    pub fn is_active(&self, pod: &PodUid) -> bool {
        self.0.borrow().pods.get(pod).is_some_and(|life| life.as_ref().is_some_and(|life| !life.is_terminated()))
    }

    /// Waits until the pod is finished or unknown, or the sync loop has ended.
    pub async fn finished(&self, pod: &PodUid) {
        let is_over = |life: &Option<Lifecycle>| life.as_ref().is_none_or(Lifecycle::is_finished);
        let _ = self.0.clone().wait_for(|fates| fates.pods.get(pod).is_none_or(is_over)).await;
    }

    /// Whether the pod's termination was requested or has begun.
    pub fn is_stopping(&self, pod: &PodUid) -> bool {
        self.0.borrow().pods.get(pod).is_some_and(|life| life.as_ref().is_some_and(Lifecycle::is_stopping))
    }
}

impl PodFates for FatesView {
    fn sources_ready(&self) -> bool {
        self.0.borrow().sources_ready
    }

    fn content_may_go(&self, pod: &PodUid) -> bool {
        let fates = self.0.borrow();
        match fates.pods.get(pod) {
            None => fates.sources_ready,
            Some(life) => life.as_ref().is_some_and(Lifecycle::content_removable),
        }
    }

    fn is_terminated(&self, pod: &PodUid) -> bool {
        let fates = self.0.borrow();
        fates.pods.get(pod).is_some_and(|life| life.as_ref().is_some_and(Lifecycle::is_terminated))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lifecycle::StopCause;

    #[test]
    fn nothing_of_an_unknown_pod_goes_before_the_sources_have_told() {
        let (sender, receiver) = watch::channel(Arc::new(Fates::default()));
        let view = FatesView(receiver);
        let [known, refused, unknown] = ["known", "refused", "unknown"].map(PodUid::from);
        assert!(!view.sources_ready() && !view.content_may_go(&unknown));
        let finished = Lifecycle::Finished { cause: StopCause::Completed };
        let pods = [(known.clone(), Some(finished)), (refused.clone(), None)].into();
        sender.send_replace(Arc::new(Fates { sources_ready: true, pods }));
        assert!(view.content_may_go(&unknown) && !view.content_may_go(&known) && !view.content_may_go(&refused));
        assert!(view.is_terminated(&known) && !view.is_terminated(&unknown));
    }
}
