//! Task of one pod observation: acquires a permit, clears the mark, queries with a timeout.
//!
//! An observation that takes longer than its patience releases its semaphore permit and continues
//! without one: pods that hang cannot use up the permits.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

use super::{
    pod_query::{PodQuerier, QueryParams},
    store::{Mark, ObservationStore, QueryStart},
};
use berth_cri::CriError;
use berth_ports::Clock;
use berth_types::{
    PodUid,
    observation::{Generation, ObservedPod},
};

/// Result of an observation.
pub(super) struct QueryResult {
    pub uid: PodUid,
    pub generation: Generation,
    pub took: Duration,
    pub result: Result<ObservedPod, String>,
}

/// Inputs of one observation.
pub(super) struct QueryTask {
    pub uid: PodUid,
    pub last: Option<Arc<ObservedPod>>,
    pub store: Arc<ObservationStore>,
    pub querier: Arc<PodQuerier>,
    pub clock: Arc<dyn Clock>,
    pub places: Arc<Semaphore>,
    pub patience: Duration,
    pub deadline: Duration,
}

impl QueryTask {
    /// Runs to completion; a panic becomes a failed observation.
    pub async fn run(self) -> QueryResult {
        let place = self.places.clone().acquire_owned().await;
        let began = Instant::now();
        let Some(beginning) = self.store.begin(&self.uid) else {
            return self.end(Generation(0), began, Err("pod is no longer observed".to_owned()));
        };
        let generation = beginning.generation;
        let result = {
            let query = AssertUnwindSafe(timeout(self.deadline, self.observe(&beginning))).catch_unwind();
            tokio::pin!(query);
            let outcome = tokio::select! {
                outcome = &mut query => outcome,
                () = sleep(self.patience) => {
                    drop(place);
                    query.await
                }
            };
            match outcome {
                Ok(Ok(Ok(pod))) => Ok(pod),
                Ok(Ok(Err(error))) => Err(error.to_string()),
                Ok(Err(_)) => Err(format!(
                    "pod {}: timed out reading its state from the runtime after {:?}",
                    beginning.pod, self.deadline
                )),
                Err(_) => Err("observation of the pod panicked".to_owned()),
            }
        };
        self.end(generation, began, result)
    }

    async fn observe(&self, beginning: &QueryStart) -> Result<ObservedPod, CriError> {
        let at = QueryParams {
            pod: &beginning.pod,
            last: self.last.as_deref(),
            acted: beginning.mark == Mark::Acted,
            generation: beginning.generation,
            began_at: self.clock.now(),
        };
        self.querier.observe(at).await
    }

    fn end(self, generation: Generation, began: Instant, result: Result<ObservedPod, String>) -> QueryResult {
        QueryResult { uid: self.uid, generation, took: began.elapsed(), result }
    }
}
