//! Reflector: list and watch of API objects into a local cache.
//!
//! Input: a selection. Output: a [`ReflectorStore`], read as snapshots and never emptied by an outage, or whatever a
//! [`Follower`] builds where a store would need too much memory. One task owns the objects. `state_machine.rs` decides the next
//! request, `event.rs` and `managed_fields_filter.rs` parse responses, `reflector.rs` performs requests, `follower.rs`
//! stores objects.
//!
//! Implements spec 10 §3, §8.4, §8.5.

mod backoff;
mod event;
mod follower;
mod list_watch;
mod managed_fields_filter;
mod request;
mod state_machine;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{api::ApiClient, store::ReflectorStore};
use berth_metrics::ReflectorMetrics;

pub(crate) use backoff::QuickRetry;
pub use event::ReflectedObject;
pub use follower::Follower;
pub use request::Selection;

/// Dependencies of a reflector.
#[derive(Clone, Debug)]
pub struct ReflectorDeps {
    /// Metrics of reflectors.
    pub metrics: ReflectorMetrics,
    /// Stops the reflector; the store keeps its content.
    pub stop: CancellationToken,
    /// Ends a back-off at once: a caller needs an object now, and a refusal may no longer apply.
    pub nudge: Arc<Notify>,
}

impl ReflectorDeps {
    /// Returns dependencies whose `nudge` is never notified.
    pub fn new(metrics: ReflectorMetrics, stop: CancellationToken) -> Self {
        Self { metrics, stop, nudge: Arc::default() }
    }
}

/// Reflects a selection while the returned future is polled, until stopped. Cancel-safe.
///
/// The store is unsynced until it has been complete once; afterwards it is as current as the last received event.
pub fn reflect<T: ReflectedObject>(
    api: Arc<dyn ApiClient>,
    selection: Selection,
    deps: ReflectorDeps,
) -> (ReflectorStore<T>, impl Future<Output = ()> + Send + use<T>) {
    let (send, snapshots) = watch::channel(Arc::default());
    let stop = deps.stop.clone();
    let following = follow(api, follower::Snapshots::new(selection, send, deps.nudge), &deps.metrics);
    let until_stopped = async move {
        // The store keeps its content: it outlives the reflector.
        let _stopped = stop.run_until_cancelled(following).await;
    };
    (ReflectorStore::new(snapshots), until_stopped)
}

/// Feeds a follower while the returned future is polled, until the follower breaks. Cancel-safe.
pub fn follow<F: Follower>(
    api: Arc<dyn ApiClient>,
    follower: F,
    metrics: &ReflectorMetrics,
) -> impl Future<Output = ()> + Send + use<F> {
    let mut reflector = list_watch::Reflector::new(api, follower, metrics);
    async move { reflector.run().await }
}
