//! Keeps a copy of what the API server has: one reflector for whatever is followed.
//!
//! In: a selection. Out: a [`Store`], read as snapshots, never empty because of an outage; or whatever
//! a [`Follower`] makes of what comes, where a store would be too much. One task owns the objects.
//! `step.rs` decides what is asked next, `event.rs` and `lean.rs` read what comes, `run.rs` does it,
//! `follower.rs` keeps it. Behaviour: spec 10 §3, §8.4, §8.5.

mod backoff;
mod event;
mod follower;
mod lean;
mod request;
mod run;
mod step;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{api::ApiClient, store::Store};
use berth_metrics::ReflectorMetrics;

pub(crate) use backoff::QuickRetry;
pub use event::Kept;
pub use follower::Follower;
pub use request::Selection;

/// What a reflector needs of others.
#[derive(Clone, Debug)]
pub struct ReflectorDeps {
    /// What is counted.
    pub metrics: ReflectorMetrics,
    /// Ends it; the store keeps what it has.
    pub stop: CancellationToken,
    /// Ends a wait at once: somebody wants it now, and a refusal may be no longer true.
    pub nudge: Arc<Notify>,
}

impl ReflectorDeps {
    /// Never nudged.
    pub fn new(metrics: ReflectorMetrics, stop: CancellationToken) -> Self {
        Self { metrics, stop, nudge: Arc::default() }
    }
}

/// Follows what is selected for as long as the future is polled and not stopped. Safe to drop.
///
/// The store is unsynced until everything was there once; from then on it is only ever as new as
/// can be had.
pub fn reflect<T: Kept>(
    api: Arc<dyn ApiClient>,
    selection: Selection,
    deps: ReflectorDeps,
) -> (Store<T>, impl Future<Output = ()> + Send + use<T>) {
    let (send, snapshots) = watch::channel(Arc::default());
    let stop = deps.stop.clone();
    let following = follow(api, follower::Snapshots::new(selection, send, deps.nudge), &deps.metrics);
    let until_stopped = async move {
        // What was known stays: the store outlives who filled it.
        let _stopped = stop.run_until_cancelled(following).await;
    };
    (Store::new(snapshots), until_stopped)
}

/// Gives `follower` what it follows for as long as the future is polled and it has not enough. Safe to drop.
pub fn follow<F: Follower>(
    api: Arc<dyn ApiClient>,
    follower: F,
    metrics: &ReflectorMetrics,
) -> impl Future<Output = ()> + Send + use<F> {
    let mut reflector = run::Reflector::new(api, follower, metrics);
    async move { reflector.run().await }
}
