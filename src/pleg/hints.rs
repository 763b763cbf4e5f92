//! Streams of hints: who may have changed. Followed for ever, believed never.
//!
//! A hint marks a pod; a lost one is made good by the list, a doubled or late one costs a look.
//! A stream that breaks (a clean end counts) is opened again after 100 ms, doubling to 30 s; each
//! break and each opening asks for a list at once (spec 03b §7, §15 item 2).

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
use berth_types::PodUid;

/// Something about one object of the runtime may have changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hint {
    /// Id of a container or sandbox.
    pub object: String,
    /// Its pod, where the source knows.
    pub pod: Option<PodUid>,
    /// What a look should show.
    pub expect: Expect,
    /// When the event was made, in nanoseconds since the epoch, where the source tells.
    pub created_at: Option<i64>,
}

/// Why there are no hints (any more).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HintError {
    /// The runtime does not have this source: the next one is tried.
    #[error("not supported by the runtime: {0}")]
    Unsupported(String),
    /// The stream broke or could not be opened: it is tried again.
    #[error("{0}")]
    Broken(String),
}

/// A stream of hints.
pub type HintStream = BoxStream<'static, Result<Hint, HintError>>;

/// A source of hints.
#[async_trait]
pub trait EventHints: Send + Sync + 'static {
    /// How the source is called in the log.
    fn name(&self) -> &'static str;
    /// Opens the stream. May stay pending until the first event; has no deadline.
    ///
    /// # Errors
    /// See [`HintError`].
    async fn open(&self) -> Result<HintStream, HintError>;
}

/// State of the stream, as the list timer needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct StreamState {
    /// Whether a stream is open.
    pub is_live: bool,
    /// How often one was opened or broke: a change asks for a list.
    pub turns: u64,
}

/// Follows the sources.
pub(super) struct Follower {
    pub sources: Vec<Arc<dyn EventHints>>,
    pub config: PlegConfig,
    pub clock: Arc<dyn Clock>,
    pub metrics: PlegMetrics,
    pub hints: mpsc::Sender<Hint>,
    pub state: watch::Sender<StreamState>,
    /// Told when the runtime answers again after it did not: it may be another one now.
    pub recovered: Arc<Notify>,
}

impl Follower {
    /// Runs until dropped.
    pub async fn run(self) {
        let mut refused = vec![false; self.sources.len()];
        let mut delay = self.config.reconnect_first;
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
            debug!(source = source.name(), err = %error, retryIn = ?delay, "Event stream ended");
            self.metrics.stream_errors.inc();
            if began.elapsed() > self.config.reconnect_max {
                delay = self.config.reconnect_first;
            }
            sleep(delay).await;
            delay = next_delay(delay, self.config.reconnect_max);
            refused.fill(false);
        }
    }

    /// Follows one source until it ends; says why it ended.
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
        // A runtime without events answers so as the first item: wait a little before the
        // stream counts as open.
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
        // Waiting here slows the stream down, never the owner; a closed channel is shutdown.
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

/// 100 ms, doubling, up to `max`.
fn next_delay(delay: Duration, max: Duration) -> Duration {
    delay.saturating_mul(2).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest() {
        let max = Duration::from_secs(30);
        let delays = std::iter::successors(Some(Duration::from_millis(100)), |d| Some(next_delay(*d, max)));
        let seconds: Vec<f64> = delays.take(11).map(|d| d.as_secs_f64()).collect();
        assert_eq!(seconds, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]);
    }
}
