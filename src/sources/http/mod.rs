//! HTTP source: polls one pod or a list of pods from a URL.
//!
//! A set is sent only for a valid response; after any failure the last set is kept. A response with the
//! bytes that were applied last is not parsed again; rejected bytes are, so that the reason is reported
//! each time. Implements spec 02a §1.7, §14.

mod manifest_fetcher;
mod redirect;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    manifest_decoder::{self, Manifest},
    mux::SourceSender,
    references::ReferenceRule,
    static_pod::{self, InvalidPod, ManifestOrigin},
};
use berth_config::text::{excerpt, without_password};
use berth_metrics::SourceMetrics;
use berth_types::{Pod, PodSource, api, fieldpath::quoted};
use manifest_fetcher::{FetchError, Fetcher};

/// Number of failures logged at the normal level before the verbosity is reduced.
const LOUD_FAILURES: u32 = 3;

/// Settings of the HTTP source.
#[derive(Clone, Debug)]
pub struct HttpConfig {
    /// The URL to poll.
    pub url: String,
    /// Headers of every request, in order; names may repeat.
    pub headers: Vec<(String, String)>,
    /// Period of requests.
    pub period: Duration,
    /// Node name: suffix of pod names, and `spec.nodeName`.
    pub node_name: Arc<str>,
    /// Rule for references to API objects.
    pub references: ReferenceRule,
}

/// State of the source's task.
pub struct HttpSource {
    config: HttpConfig,
    shown: String,
    fetcher: Fetcher,
    sender: SourceSender,
    metrics: SourceMetrics,
    applied: Option<[u8; 32]>,
    failures: u32,
}

/// Why a response is not usable.
#[derive(Debug, thiserror::Error)]
enum PollError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("{url}: {status}")]
    Status { url: String, status: String },
    #[error("zero-length data received from {0}")]
    Empty(String),
    #[error("{url}: received '{body}', but couldn't parse as single ({single}) or multiple pods ({multiple})")]
    NotParsed { url: String, body: String, single: String, multiple: String },
    #[error("{url}: pod {}: {cause}", quoted(.pod))]
    Invalid { url: String, pod: String, cause: InvalidPod },
}

impl HttpSource {
    /// Creates a source that has not sent a request yet.
    pub fn new(config: HttpConfig, sender: SourceSender, metrics: SourceMetrics) -> Self {
        let shown = without_password(&config.url);
        let fetcher = Fetcher::new(&config.url, &config.headers);
        Self { config, shown, fetcher, sender, metrics, applied: None, failures: 0 }
    }

    /// Runs until cancelled.
    pub async fn run(mut self, stop: CancellationToken) {
        info!(url = %self.shown, "Watching URL for pods");
        let mut polls = interval(self.config.period.max(Duration::from_millis(1)));
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = polls.tick() => {}
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                outcome = self.poll() => self.record_outcome(outcome),
            }
        }
    }

    fn record_outcome(&mut self, outcome: Result<(), PollError>) {
        let Err(e) = outcome else {
            if std::mem::take(&mut self.failures) > 0 {
                info!("Successfully read pods from URL");
            }
            return;
        };
        self.metrics.failures.with_label_values(&["http"]).inc();
        match self.failures {
            0..LOUD_FAILURES => info!(err = %e, "Failed to read pods from URL"),
            LOUD_FAILURES => {
                info!(err = %e, "Failed to read pods from URL. Dropping verbosity of this message to V(4)");
            }
            _ => debug!(err = %e, "Failed to read pods from URL"),
        }
        self.failures = self.failures.saturating_add(1);
    }

    async fn poll(&mut self) -> Result<(), PollError> {
        let answer = self.fetcher.get().await?;
        if answer.status != http::StatusCode::OK {
            return Err(PollError::Status { url: self.shown.clone(), status: answer.status.to_string() });
        }
        if answer.body.is_empty() {
            self.applied = None;
            self.sender.send(Vec::new()).await;
            return Err(PollError::Empty(self.shown.clone()));
        }
        let digest: [u8; 32] = Sha256::digest(&answer.body).into();
        if self.applied == Some(digest) {
            return Ok(());
        }
        let (config, shown) = (self.config.clone(), self.shown.clone());
        let parsed = tokio::task::spawn_blocking(move || pods(&answer.body, &config, shown)).await;
        let pods = match parsed {
            Ok(parsed) => parsed.inspect_err(|e| self.count(e))?,
            Err(e) => {
                warn!(err = %e, "Failed to parse response of manifest URL");
                return Ok(());
            }
        };
        self.sender.send(pods).await;
        self.applied = Some(digest);
        Ok(())
    }

    fn count(&self, e: &PollError) {
        let reason = if matches!(e, PollError::Invalid { .. }) { "invalid" } else { "parse" };
        self.metrics.rejected.with_label_values(&["http", reason]).inc();
    }
}

/// The pods of a response; one invalid pod invalidates the whole list.
fn pods(body: &Bytes, config: &HttpConfig, shown: String) -> Result<Vec<Arc<Pod>>, PollError> {
    // Both decodings fail for the same reason: the bytes are decoded once.
    let not_parsed = |reason: String| PollError::NotParsed {
        url: shown.clone(),
        body: excerpt(&String::from_utf8_lossy(body)),
        single: reason.clone(),
        multiple: reason,
    };
    let found = match manifest_decoder::decode(body) {
        Ok(Manifest::Pod(pod)) => vec![*pod],
        Ok(Manifest::List(pods)) => pods,
        Err(e) => return Err(not_parsed(e.to_string())),
    };
    let origin = ManifestOrigin {
        source: PodSource::Http,
        location: &config.url,
        node_name: &config.node_name,
        references: config.references,
    };
    let usable = |pod: api::Pod| {
        let name = excerpt(pod.metadata.name.as_deref().unwrap_or_default());
        let invalid = |cause| PollError::Invalid { url: shown.clone(), pod: name, cause };
        static_pod::prepared(pod, origin).map_err(invalid)
    };
    found.into_iter().map(usable).collect()
}
