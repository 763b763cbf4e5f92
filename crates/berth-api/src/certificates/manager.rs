//! Certificate rotation manager: waits until renewal is due, requests, stores, and publishes.
//!
//! One task owns the current pair. An expired certificate counts as absent: the manager then rereads the files on disk
//! and the bootstrap credentials, and retries without limit. (The kubelet exits after five minutes and restarts with
//! the same files.)
//!
//! Implements spec 01 §11.4, §20.

use std::{pin::Pin, sync::Arc, time::Duration};

use jiff::{Timestamp, tz::TimeZone};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{
    key::PrivateKey,
    kubeconfig::CertificateOrigin,
    leaf::Leaf,
    pair::Pair,
    request::NamingScheme,
    schedule::{Due, due, retry, server_answers},
    signing_request::{SigningRequest, SigningRequestError},
    store::CertificateStore,
    template::{Purpose, Template},
};
use crate::{CertifiedPair, ClientIdentity, api::ApiClient};
use berth_metrics::CertificateMetrics;
use berth_ports::{Clock, EventRecord, EventSink};

/// Timeout for approval and signing.
const LIMIT: Duration = Duration::from_secs(15 * 60);
/// Longest interval between reads of the wall clock, which may be set, or jump after a suspend.
const RECHECK: Duration = Duration::from_secs(60);
/// How long a client certificate may be absent before this is logged, and interval of the log line.
const OVERDUE: Duration = Duration::from_secs(5 * 60);
/// Event reason of a failed certificate request.
const REASON: &str = "CertificateRequestFailed";

/// Receives the current pair.
pub trait IdentitySink: Send + Sync + 'static {
    /// Uses `pair` from now on; `None`: no client certificate.
    fn set(&self, pair: Option<Arc<Pair>>);
}

impl IdentitySink for watch::Sender<Option<Arc<Pair>>> {
    fn set(&self, pair: Option<Arc<Pair>>) {
        self.send_replace(pair);
    }
}

impl IdentitySink for ClientIdentity {
    fn set(&self, pair: Option<Arc<Pair>>) {
        let read = |pair: &Pair| CertifiedPair::from_pem(pair.certificate.as_bytes(), pair.key.as_bytes());
        match pair.as_deref().map(read).transpose() {
            Ok(pair) => {
                // The transport compares the pair with the previous one.
                let _ = Self::set(self, pair);
            }
            Err(error) => error!(err = %error, "Failed to load client certificate"),
        }
    }
}

/// Opens a client on configuration that is reread each time. The client serves one attempt: see
/// [`scoped_client`](super::scoped_client).
pub type ApiConnector =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Arc<dyn ApiClient>, String>> + Send>> + Send + Sync>;

/// Source of an initial pair besides the store: the kubeconfig. Blocking.
pub type Seed = Arc<dyn Fn() -> Option<(Pair, CertificateOrigin)> + Send + Sync>;

/// Health of a certificate rotation: expiry, failed attempts, and last error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateState {
    /// Last second of validity of the current certificate, since the epoch; `None`: there is none.
    pub valid_until: Option<i64>,
    /// Consecutive failed attempts.
    pub failures: u32,
    /// Error of the last failed attempt.
    pub error: Option<String>,
    /// Whether the last response shows that the API server is up.
    pub server_answers: bool,
}

/// Dependencies of a manager.
pub struct ManagerDeps {
    /// Certificate store on disk.
    pub store: CertificateStore,
    /// Source of an initial pair where the store has none.
    pub seed: Option<Seed>,
    /// Client for requests with a valid certificate.
    pub api: Arc<dyn ApiClient>,
    /// Opens a client for requests without a valid certificate.
    pub bootstrap: Option<ApiConnector>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Expiry, failed requests, and, for serving certificates, the age at rotation.
    pub metrics: CertificateMetrics,
    /// Receives the current pair.
    pub sink: Arc<dyn IdentitySink>,
    /// Receives events about failures.
    pub events: Arc<dyn EventSink>,
}

/// Rotation task of one certificate.
pub struct CertificateManager {
    parts: ManagerDeps,
    purpose: Purpose,
    templates: watch::Receiver<Option<Template>>,
    state: watch::Sender<CertificateState>,
    current: Option<CurrentPair>,
    /// Whether the current pair is replaced regardless of its age.
    is_forced: bool,
    pending: Option<SigningRequest>,
    /// When the pair became absent, or when its absence was last logged.
    absent: Instant,
}

/// Certificate pair in use, with what determines its renewal time.
struct CurrentPair {
    pair: Arc<Pair>,
    leaf: Leaf,
    /// Position of the renewal time within its window, 0..1.
    chance: f64,
}

impl CertificateManager {
    /// Loads the current pair and publishes it.
    pub async fn open(purpose: Purpose, parts: ManagerDeps, templates: watch::Receiver<Option<Template>>) -> Self {
        let mut manager = Self {
            parts,
            purpose,
            templates,
            state: watch::Sender::default(),
            current: None,
            is_forced: false,
            pending: None,
            absent: Instant::now(),
        };
        manager.refresh().await;
        manager
    }

    /// State of the certificate.
    pub fn state(&self) -> watch::Receiver<CertificateState> {
        self.state.subscribe()
    }

    /// Runs until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.run_loop() => {}
        }
    }

    async fn run_loop(&mut self) {
        loop {
            self.refresh().await;
            let template = self.templates.borrow_and_update().clone();
            let current =
                self.current.as_ref().filter(|_| !self.is_forced).map(|current| (&current.leaf, current.chance));
            match (due(current, template.as_ref(), self.now()), template) {
                (Due::Now, Some(template)) => self.attempt(template).await,
                (Due::At(at), _) => self.pause(self.until(at).min(RECHECK)).await,
                _ => self.pause(RECHECK).await,
            }
        }
    }

    fn now(&self) -> i64 {
        self.parts.clock.now().as_second()
    }

    /// Time until that second or until expiry, at least 1 s because the clock may stand still.
    fn until(&self, at: i64) -> Duration {
        let seconds =
            at.min(self.current.as_ref().map_or(at, |current| current.leaf.not_after)).saturating_sub(self.now());
        Duration::from_secs(u64::try_from(seconds).unwrap_or_default().max(1))
    }

    async fn pause(&mut self, limit: Duration) {
        tokio::select! {
            () = sleep(limit) => {}
            () = moved(&mut self.templates) => {}
        }
    }

    /// Drops an expired pair, and loads one from disk where there is none.
    async fn refresh(&mut self) {
        let now = self.now();
        if self.current.as_ref().is_some_and(|current| current.leaf.is_expired(now)) {
            error!(purpose = ?self.purpose, "The certificate has expired");
            self.absent = Instant::now();
            self.publish(None);
        }
        if self.current.is_some() {
            return;
        }
        let (store, seed, at) = (self.parts.store.clone(), self.parts.seed.clone(), self.parts.clock.now());
        let found = tokio::task::spawn_blocking(move || find(&store, seed.as_deref(), at)).await;
        let Ok(Some((pair, leaf, is_forced))) = found else { return };
        self.is_forced = is_forced;
        self.publish(Some((pair, leaf)));
    }

    /// Runs one request until it succeeds, fails, times out, or the template changes.
    async fn attempt(&mut self, template: Template) {
        let mut templates = self.templates.clone();
        // Does not wait beyond expiry: then the bootstrap client must be used.
        let limit = self.current.as_ref().map_or(LIMIT, |current| self.until(current.leaf.not_after).min(LIMIT));
        let outcome = tokio::select! {
            biased;
            () = differs(&mut templates, &template) => return,
            outcome = timeout(limit, self.issue(template.clone())) => outcome.unwrap_or(Err(SigningRequestError::TimedOut)),
        };
        match outcome {
            Ok(pair) => self.take(pair).await,
            Err(error) => self.failed(error).await,
        }
    }

    /// Requests a certificate and waits for it. The request stays in `pending`.
    async fn issue(&mut self, template: Template) -> Result<(Pair, Leaf), SigningRequestError> {
        let now = self.now();
        let request = match self.pending.take().filter(|pending| pending.template == template) {
            Some(pending) => pending,
            None => {
                let key = PrivateKey::generate().map_err(|e| SigningRequestError::Own(e.to_string()))?;
                SigningRequest::new(template.clone(), key, NamingScheme::Rotation)?
            }
        };
        let request = self.pending.insert(request);
        let mut client = match (&self.current, &self.parts.bootstrap) {
            (None, Some(open)) => open().await.map_err(SigningRequestError::Own)?,
            _ => self.parts.api.clone(),
        };
        match (request.make(&*client, now).await, &self.parts.bootstrap) {
            // The certificate was revoked or the authority replaced: the bootstrap credentials may still be valid.
            (Err(SigningRequestError::Create(error)), Some(open)) if error.code() == 401 && self.current.is_some() => {
                client = open().await.map_err(|_| SigningRequestError::Create(error))?;
                request.make(&*client, now).await?;
            }
            (outcome, _) => outcome?,
        }
        self.state.send_modify(|state| state.server_answers = true);
        let chain = request.wait(&*client).await?;
        let pair = Pair::join(&chain, &request.key()).map_err(SigningRequestError::Refused)?;
        match pair.leaf().filter(|leaf| leaf.covers(&template) && !leaf.is_expired(now)) {
            Some(leaf) => Ok((pair, leaf)),
            None => {
                Err(SigningRequestError::Refused("issued certificate does not match the signing request".to_owned()))
            }
        }
    }

    async fn take(&mut self, (pair, leaf): (Pair, Leaf)) {
        let (store, kept, now) = (self.parts.store.clone(), pair.clone(), local(self.parts.clock.now()));
        match tokio::task::spawn_blocking(move || store.update(&kept, &now)).await {
            Ok(Ok(path)) => info!(path = %path.display(), purpose = ?self.purpose, "Received certificate"),
            Ok(Err(error)) => error!(err = %error, "Failed to store new certificate, using it from memory"),
            Err(error) => error!(err = %error, "Failed to store new certificate, using it from memory"),
        }
        if let Some(old) = &self.current {
            self.parts.metrics.replaced(self.now().saturating_sub(old.leaf.not_before));
            if self.purpose == Purpose::Client {
                info!("Certificate rotation detected, shutting down client connections to start using new credentials");
            }
        }
        (self.pending, self.is_forced) = (None, false);
        self.publish(Some((pair, leaf)));
        self.state.send_modify(|state| (state.failures, state.error) = (0, None));
    }

    async fn failed(&mut self, error: SigningRequestError) {
        self.parts.metrics.failures.inc();
        if !error.is_retryable() {
            self.pending = None;
        }
        let text = error.to_string();
        error!(err = text, purpose = ?self.purpose, "Failed while requesting a signed certificate from the control plane");
        if self.state.borrow().error.as_ref() != Some(&text) {
            self.parts.events.record(EventRecord::node_warning(REASON, text.clone()));
        }
        self.state.send_modify(|state| {
            state.failures = state.failures.saturating_add(1);
            state.error = Some(text);
            match &error {
                SigningRequestError::Create(error) => state.server_answers = server_answers(Err(error)),
                SigningRequestError::Own(_) | SigningRequestError::TimedOut => {}
                _ => state.server_answers = true,
            }
        });
        self.log_if_overdue();
        let failures = self.state.borrow().failures;
        self.pause(retry(failures, rand::random())).await;
    }

    fn log_if_overdue(&mut self) {
        if self.purpose != Purpose::Client || self.current.is_some() || self.absent.elapsed() < OVERDUE {
            return;
        }
        self.absent = Instant::now();
        if self.state.borrow().server_answers {
            error!("No valid client certificate is found and the server is responsive; retrying");
        } else {
            warn!("No valid client certificate is found but the server is not responsive; retrying");
        }
    }

    /// Makes the pair current: publishes it, its state, and its expiry.
    fn publish(&mut self, found: Option<(Pair, Leaf)>) {
        self.current = found.map(|(pair, leaf)| CurrentPair { pair: Arc::new(pair), leaf, chance: rand::random() });
        let last = self.current.as_ref().map(|current| current.leaf.not_after);
        self.parts.metrics.expiry.set(last);
        self.parts.sink.set(self.current.as_ref().map(|current| current.pair.clone()));
        self.state.send_modify(|state| state.valid_until = last);
    }
}

/// Loads an unexpired pair from disk: from the store, else from the kubeconfig. Also returns whether it must be
/// replaced at once, as an inline pair of a kubeconfig must.
fn find(
    store: &CertificateStore,
    seed: Option<&(dyn Fn() -> Option<(Pair, CertificateOrigin)> + Send + Sync)>,
    at: Timestamp,
) -> Option<(Pair, Leaf, bool)> {
    let good = |pair: Pair| {
        let leaf = pair.leaf().filter(|leaf| !leaf.is_expired(at.as_second()))?;
        Some((pair, leaf))
    };
    let stored = store.current().unwrap_or_else(|error| {
        error!(err = %error, "Failed to load stored certificate");
        None
    });
    if let Some((pair, leaf)) = stored.and_then(good) {
        return Some((pair, leaf, false));
    }
    let (pair, origin) = seed?()?;
    let (pair, leaf) = good(pair)?;
    if origin == CertificateOrigin::Data
        && let Err(error) = store.update(&pair, &local(at))
    {
        error!(err = %error, "Failed to store the certificate from the kubeconfig");
    }
    Some((pair, leaf, origin == CertificateOrigin::Data))
}

fn local(at: Timestamp) -> jiff::Zoned {
    at.to_zoned(TimeZone::system())
}

/// Waits for the next change; pends forever once the sender is gone.
async fn moved(templates: &mut watch::Receiver<Option<Template>>) {
    if templates.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Returns when the template differs from `from`.
async fn differs(templates: &mut watch::Receiver<Option<Template>>, from: &Template) {
    while templates.borrow_and_update().as_ref() == Some(from) {
        moved(templates).await;
    }
}

#[cfg(test)]
mod tests;
