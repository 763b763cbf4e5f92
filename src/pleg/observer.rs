//! PLEG handle: starts the tasks and implements [`PodObserver`].

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    PlegConfig, PlegDeps, health,
    hints::{Follower, StreamState},
    owner::{Inbox, LastGood, Owner, OwnerDeps, Waiter},
    pod_query::PodQuerier,
    store::ObservationStore,
};
use berth_ports::{PodObserver, PodView, RuntimePods};
use berth_types::{
    PodRef, PodUid,
    observation::{Generation, ObservedPod},
};

/// A pod whose query has been running for long.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StuckPod {
    /// Identity of the pod that is being queried.
    pub pod: PodRef,
    /// How long the query has been running.
    pub since: Duration,
}

/// Handle to PLEG and its pod store; see the module documentation.
pub struct Pleg {
    store: Arc<ObservationStore>,
    waiters: mpsc::Sender<Waiter>,
    last_good: LastGood,
    unhealthy_after: Duration,
}

/// Starts PLEG with the first complete list. The task ends when `cancel` is cancelled.
pub fn start(deps: PlegDeps, config: PlegConfig, cancel: CancellationToken) -> (Arc<Pleg>, JoinHandle<()>) {
    let (store, marked) = ObservationStore::new();
    let (hints, hinted) = mpsc::channel(1024);
    let (waiters, waiting) = mpsc::channel(64);
    let (state, stream) = watch::channel(StreamState::default());
    let last_good: LastGood = Arc::new(watch::Sender::new(None));
    let recovered = Arc::new(Notify::new());
    let pleg = Arc::new(Pleg {
        store: store.clone(),
        waiters,
        last_good: last_good.clone(),
        unhealthy_after: config.unhealthy_after,
    });
    let follower = Follower {
        sources: deps.hints,
        config: config.clone(),
        clock: deps.clock.clone(),
        metrics: deps.metrics.clone(),
        hints,
        state,
        recovered: recovered.clone(),
    };
    let owner = Owner::new(OwnerDeps {
        store,
        querier: Arc::new(PodQuerier { cri: deps.cri, messages: deps.messages }),
        config,
        clock: deps.clock,
        metrics: deps.metrics,
        died: deps.died,
        last_good,
        recovered,
    });
    let inbox = Inbox { marked, hints: hinted, waiters: waiting, stream };
    let task = tokio::spawn(async move {
        tokio::select! {
            () = owner.run(inbox, cancel) => {}
            () = follower.run() => {}
        }
    });
    (pleg, task)
}

impl Pleg {
    /// Waits until the first complete list has succeeded.
    pub async fn listed(&self) {
        // The handle owns the sender, so it is never closed.
        let _ = self.last_good.subscribe().wait_for(Option::is_some).await;
    }

    /// Pods whose query has been running for longer than `limit`; for diagnostics, not for health.
    pub fn stuck(&self, limit: Duration) -> Vec<StuckPod> {
        self.store.stuck(limit).into_iter().map(|(pod, since)| StuckPod { pod, since }).collect()
    }
}

#[async_trait]
impl PodObserver for Pleg {
    fn view(&self, pod: &PodRef) -> PodView {
        self.store.view(pod)
    }

    fn action_completed(&self, pod: &PodUid) -> Generation {
        self.store.acted(pod)
    }

    fn known(&self) -> Option<RuntimePods> {
        self.store.known()
    }

    fn known_pod(&self, pod: &PodUid) -> Option<Arc<ObservedPod>> {
        self.store.known_pod(pod)
    }

    fn may_be_alive(&self, pod: &PodUid) -> bool {
        self.store.may_be_alive(pod)
    }

    async fn list(&self) -> Result<RuntimePods, String> {
        let (waiter, answer) = oneshot::channel();
        let ended = || "PLEG stopped".to_owned();
        self.waiters.send(waiter).await.map_err(|_| ended())?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    fn health(&self) -> Option<String> {
        let last = *self.last_good.borrow();
        health::verdict(last.map(|at| Instant::now() - at), self.unhealthy_after)
    }
}
