//! Runtime event streams as hints: which pods may have changed.
//!
//! A hint marks a pod for a query; a lost one is compensated by the list, a duplicate or late one costs
//! a query. A broken stream (a clean end counts) is reopened after 100 ms, doubling to 30 s; each break
//! and each opening triggers a list (spec 03b §7, §15 item 2).

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::{StreamExt, stream::BoxStream};
use tokio::{
    sync::{Notify, mpsc, watch},
    time::{Instant, sleep},
};
use tracing::{debug, info};

use super::{Expect, PlegConfig};
use berth_metrics::PlegMetrics;
use berth_ports::Clock;
use berth_sys::backoff::Backoff;
use berth_types::PodUid;

/// Hint that an object of the runtime may have changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hint {
    /// ID of a container or sandbox.
    pub object: String,
    /// UID of its pod, if the source provides it.
    pub pod: Option<PodUid>,
    /// State change that the query should show.
    pub expect: Expect,
    /// Time of the event in nanoseconds since the epoch, if the source provides it.
    pub created_at: Option<i64>,
}

/// Why a stream ended or could not be opened.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HintError {
    /// The runtime does not support this source: the next one is used.
    #[error("not supported by the runtime: {0}")]
    Unsupported(String),
    /// The stream broke or could not be opened: it is retried.
    #[error("{0}")]
    Broken(String),
}

/// Stream of hints from one event source; it is not read after its first error.
pub type HintStream = BoxStream<'static, Result<Hint, HintError>>;

/// A source of hints.
#[async_trait]
pub trait EventHints: Send + Sync + 'static {
    /// Name of the source in the log.
    fn name(&self) -> &'static str;
    /// Opens the stream. May stay pending until the first event; has no timeout.
    ///
    /// # Errors
    /// See [`HintError`].
    async fn open(&self) -> Result<HintStream, HintError>;
}

/// State of the stream, for the list timer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct StreamState {
    /// Whether a stream is open.
    pub is_live: bool,
    /// Number of openings and breaks: each change triggers a list.
    pub turns: u64,
}

/// Follows the event sources.
pub(super) struct Follower {
    pub sources: Vec<Arc<dyn EventHints>>,
    pub config: PlegConfig,
    pub clock: Arc<dyn Clock>,
    pub metrics: PlegMetrics,
    pub hints: mpsc::Sender<Hint>,
    pub state: watch::Sender<StreamState>,
    /// Notified when the runtime responds again after an outage: it may be a different one now.
    pub recovered: Arc<Notify>,
}

impl Follower {
    /// Runs until dropped.
    pub async fn run(self) {
        let mut refused = vec![false; self.sources.len()];
        let mut backoff = Backoff::new(self.config.reconnect_first, self.config.reconnect_max);
        loop {
            let Some(at) = refused.iter().position(|r| !r) else {
                self.recovered.notified().await;
                refused.fill(false);
                continue;
            };
            let Some(source) = self.sources.get(at) else { continue };
            let began = Instant::now();
            let error = self.follow(&**source).await;
            if let HintError::Unsupported(reason) = &error {
                info!(source = source.name(), err = %reason, "Event source is not available");
                if let Some(refused) = refused.get_mut(at) {
                    *refused = true;
                }
                continue;
            }
            debug!(source = source.name(), err = %error, retryIn = ?backoff.peek(), "Event stream ended");
            self.metrics.stream_errors.inc();
            if began.elapsed() > self.config.reconnect_max {
                backoff.reset();
            }
            sleep(backoff.next_delay()).await;
            refused.fill(false);
        }
    }

    /// Follows one source until it ends; returns why it ended.
    async fn follow(&self, source: &dyn EventHints) -> HintError {
        let mut opening = source.open();
        let opened = tokio::select! {
            done = &mut opening => done,
            () = sleep(self.config.open_patience) => {
                self.turn(true);
                opening.await
            }
        };
        let end = match opened {
            Ok(stream) => self.drain(stream, source.name()).await,
            Err(error) => error,
        };
        self.turn(false);
        end
    }

    async fn drain(&self, mut stream: HintStream, name: &'static str) -> HintError {
        let mut first = true;
        // A runtime without events reports that as the first item: the stream counts as open only after
        // a short wait.
        let patience = sleep(self.config.open_patience);
        tokio::pin!(patience);
        loop {
            let item = tokio::select! {
                biased;
                item = stream.next() => item,
                () = &mut patience, if first => {
                    first = false;
                    self.opened(name);
                    continue;
                }
            };
            match item {
                Some(Ok(hint)) => {
                    if std::mem::take(&mut first) {
                        self.opened(name);
                    }
                    self.pass(hint).await;
                }
                Some(Err(error)) => return error,
                None => return HintError::Broken("the stream ended".to_owned()),
            }
        }
    }

    fn opened(&self, name: &'static str) {
        info!(source = name, "Event stream is open");
        self.metrics.stream_opened.inc();
        self.turn(true);
    }

    async fn pass(&self, hint: Hint) {
        if let Some(created) = hint.created_at {
            let age = self.clock.now().as_nanosecond() - i128::from(created);
            let age = Duration::from_nanos(u64::try_from(age).unwrap_or(0));
            self.metrics.stream_latency.observe(age.as_secs_f64());
        }
        // Backpressure slows down the stream, never the owner; a closed channel means shutdown.
        let _ = self.hints.send(hint).await;
    }

    fn turn(&self, is_live: bool) {
        self.state.send_if_modified(|state| {
            let changed = state.is_live != is_live;
            if changed {
                *state = StreamState { is_live, turns: state.turns + 1 };
            }
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest() {
        let PlegConfig { reconnect_first, reconnect_max, .. } = PlegConfig::default();
        let mut backoff = Backoff::new(reconnect_first, reconnect_max);
        let seconds: Vec<f64> = (0..11).map(|_| backoff.next_delay().as_secs_f64()).collect();
        assert_eq!(seconds, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]);
    }
}
