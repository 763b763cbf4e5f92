//! Pod certificate controller: requests and renews one certificate until the pod ends.
//!
//! Implements spec 07 §9.4.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::{certificates::v1beta1::PodCertificateRequest, core::v1::ServiceAccount};
use serde::Deserialize;
use tokio::{
    sync::{Semaphore, watch},
    task::spawn_blocking,
    time::sleep,
};
use tracing::{info, warn};

use super::{
    CertificateDeps,
    keys::{self, GeneratedKey, KeyError},
    request::{CertificateRequestState, FailureCause, IssuedCertificate, RequestIdentity, Warning, object, outcome},
};
use crate::{
    api::{ApiError, Call, Resource, TypedClient},
    store::ReflectorStore,
};
use berth_ports::{CertificateRequest, Credential, EventRecord};
use berth_sys::backoff::Backoff;
use berth_types::PodRef;

/// Deadline of one API request.
const CALL: Duration = Duration::from_secs(10);
/// Back-off between attempts to create a request.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(60));
/// Jitter of renewals and repeated requests, in seconds.
const SPREAD: i64 = 300;
/// A request that is missing from the store for that long was deleted.
const ABANDONED: SignedDuration = SignedDuration::from_mins(10);
/// Longest interval between reads of the wall clock, which may jump.
const RECHECK: Duration = Duration::from_secs(60);

/// Key and certificate. The key exists here and in the pod's volume only.
pub struct IssuedCredential {
    pub credential: Arc<Credential>,
    pub issued: IssuedCertificate,
}

/// State of a pod certificate.
pub enum CertificateState {
    /// None was issued yet.
    Waiting,
    /// The current certificate.
    Issued(Arc<IssuedCredential>),
    /// The request was denied; no certificate will be issued.
    Denied(FailureCause),
    /// The request failed; no certificate will be issued.
    Failed(FailureCause),
}

/// Controller of one certificate.
pub(super) struct PodCertificateController {
    pub deps: Arc<CertificateDeps>,
    /// Limits concurrent key generation.
    pub making: Arc<Semaphore>,
    pub requests: ReflectorStore<PodCertificateRequest>,
    pub pod: PodRef,
    pub account: String,
    pub ask: CertificateRequest,
    pub shown: watch::Sender<CertificateState>,
}

/// `PodCertificateRequest` that the API server accepted, with its private key.
struct CreatedRequest {
    key: String,
    /// Object name of the request.
    name: String,
}

/// Issued credential, or a refusal with its state, event reason, and event message.
enum RequestOutcome {
    Issued(IssuedCredential),
    Refused(CertificateState, &'static str, String),
}

#[derive(Deserialize)]
struct CreateResponse {
    metadata: CreatedMetadata,
}

#[derive(Deserialize)]
struct CreatedMetadata {
    name: String,
}

impl PodCertificateController {
    /// Requests and renews the certificate until the future is dropped or a request is refused for good.
    pub async fn run(self) {
        let mut watched: Option<(Arc<IssuedCredential>, Vec<Warning>)> = None;
        loop {
            let end = tokio::select! {
                end = self.obtain() => end,
                () = self.age(&mut watched) => continue,
            };
            match end {
                RequestOutcome::Issued(current) => {
                    let refresh = later(current.issued.begin_refresh, spread());
                    let current = Arc::new(current);
                    self.show(CertificateState::Issued(current.clone()));
                    watched = Some((current, Warning::ALL.to_vec()));
                    tokio::select! {
                        () = self.until(refresh) => {}
                        () = self.age(&mut watched) => {}
                    }
                }
                RequestOutcome::Refused(shown, reason, message) => {
                    self.deps.events.record(EventRecord::warning(&self.pod, reason, message));
                    self.show(shown);
                    return;
                }
            }
        }
    }

    fn show(&self, shown: CertificateState) {
        self.shown.send_replace(shown);
        self.deps.notifier.notify([self.pod.uid.clone()]);
    }

    /// Requests a certificate until there is an outcome; a deleted request is created again.
    async fn obtain(&self) -> RequestOutcome {
        loop {
            let asked = match self.request().await {
                Ok(asked) => asked,
                Err(error) => {
                    let why = FailureCause { reason: "UnknownKeyType".to_owned(), message: error.to_string() };
                    return self.refused(CertificateRequestState::Failed(why), "");
                }
            };
            let verdict = self.verdict(&asked.name).await;
            match verdict {
                Some(CertificateRequestState::Issued(issued)) => {
                    info!(pod = %self.pod.object_name(), podUID = %self.pod.uid, signerName = %self.ask.projection.signer_name,
                        notAfter = %issued.not_after, "PodCertificateRequest was issued");
                    let credential = Arc::new(Credential { key: asked.key, chain: issued.chain.clone() });
                    return RequestOutcome::Issued(IssuedCredential { credential, issued });
                }
                Some(refused) => return self.refused(refused, &asked.name),
                None => warn!(pod = %self.pod.object_name(), podUID = %self.pod.uid, name = asked.name,
                    "PodCertificateRequest was deleted, creating a new one"),
            }
        }
    }

    fn refused(&self, verdict: CertificateRequestState, name: &str) -> RequestOutcome {
        let describe = |what: &str, why: &FailureCause| {
            let (namespace, reason, message) = (&self.pod.namespace, &why.reason, &why.message);
            format!("PodCertificateRequest {namespace}/{name} {what}, reason={reason:?}, message={message:?}")
        };
        match verdict {
            CertificateRequestState::Denied(why) => {
                RequestOutcome::Refused(CertificateState::Denied(why.clone()), "Denied", describe("was denied", &why))
            }
            CertificateRequestState::Failed(why) => {
                RequestOutcome::Refused(CertificateState::Failed(why.clone()), "Failed", describe("failed", &why))
            }
            CertificateRequestState::Waiting | CertificateRequestState::Issued(_) => {
                RequestOutcome::Refused(CertificateState::Waiting, "Failed", String::new())
            }
        }
    }

    /// Generates a key and creates a request for it; retries without limit.
    async fn request(&self) -> Result<CreatedRequest, KeyError> {
        let GeneratedKey { key, stub } = self.made().await?;
        let mut backoff = BACKOFF;
        loop {
            match self.create(&stub).await {
                Ok(name) => return Ok(CreatedRequest { key, name }),
                Err(error) => {
                    warn!(pod = %self.pod.object_name(), podUID = %self.pod.uid, err = %error,
                        "Failed to create PodCertificateRequest, retrying");
                    let pause = backoff.next_delay();
                    sleep(error.retry_after().unwrap_or(pause)).await;
                }
            }
        }
    }

    /// Generates one key at a time: some types use a processor for seconds and cannot be cancelled.
    async fn made(&self) -> Result<GeneratedKey, KeyError> {
        let kind = self.ask.projection.key_type.clone();
        let failed = |cause: String| KeyError::Failed(self.ask.projection.key_type.clone(), cause);
        let turn = self.making.clone().acquire_owned().await.map_err(|error| failed(error.to_string()))?;
        let making = spawn_blocking(move || {
            let _turn = turn;
            keys::make(&kind)
        });
        making.await.map_err(|error| failed(error.to_string()))?
    }

    async fn create(&self, stub: &[u8]) -> Result<String, ApiError> {
        let (api, namespace) = (&self.deps.api, &self.pod.namespace);
        let account: ServiceAccount =
            api.ask(Call::get(Resource::SERVICE_ACCOUNTS, namespace, &self.account).within(CALL)).await?;
        let mut node = self.deps.node_uid.clone();
        let known = node.wait_for(|uid| !uid.is_empty()).await.map(|uid| uid.clone());
        let node = known.map_err(|_| ApiError::Unreachable("the agent is shutting down".to_owned()))?;
        let account_uid = account.metadata.uid.unwrap_or_default();
        let whose =
            RequestIdentity { pod: &self.pod, account: (&self.account, &account_uid), node: (&self.deps.node, &node) };
        let object = object(&whose, &self.ask, stub).to_string();
        let created: CreateResponse =
            api.ask(Call::create(Resource::POD_CERTIFICATES, namespace, object).within(CALL)).await?;
        Ok(created.metadata.name)
    }

    /// Waits for the outcome of a request; `None` if it was deleted.
    async fn verdict(&self, name: &str) -> Option<CertificateRequestState> {
        let abandoned = later(self.deps.clock.now(), ABANDONED.saturating_add(spread()));
        let mut requests = self.requests.clone();
        loop {
            let snapshot = requests.snapshot();
            match snapshot.get(&self.pod.namespace, name) {
                Some(request) => match outcome(request.status.as_ref()) {
                    CertificateRequestState::Waiting => {}
                    decided => return Some(decided),
                },
                None if snapshot.synced && self.deps.clock.now() >= abandoned => return None,
                None => {}
            }
            drop(snapshot);
            tokio::select! {
                () = requests.changed() => {}
                () = sleep(RECHECK) => {}
            }
        }
    }

    /// Emits the expiry warnings of a certificate, each once. Never returns.
    async fn age(&self, watched: &mut Option<(Arc<IssuedCredential>, Vec<Warning>)>) {
        if let Some((current, left)) = watched {
            while let Some(next) = left.iter().min_by_key(|warning| warning.from(&current.issued)).copied() {
                self.until(next.from(&current.issued)).await;
                left.retain(|warning| *warning != next);
                let (reason, message) = next.event();
                self.deps.events.record(EventRecord::warning(&self.pod, reason, message));
            }
        }
        std::future::pending().await
    }

    async fn until(&self, at: Timestamp) {
        loop {
            match Duration::try_from(at.duration_since(self.deps.clock.now())) {
                Ok(left) if !left.is_zero() => sleep(left.min(RECHECK)).await,
                _ => return,
            }
        }
    }
}

fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.saturating_add(by).unwrap_or(Timestamp::MAX)
}

fn spread() -> SignedDuration {
    SignedDuration::from_secs(rand::random_range(0..SPREAD))
}
