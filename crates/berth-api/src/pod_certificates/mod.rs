//! Pod certificates: generates keys, requests certificates for them, and renews them in time.
//!
//! ```text
//!  a projection ─► PodCertificates ─► one task each ─► key ─► PodCertificateRequest ─► the signer
//!        ▲                              │   ▲                                            │
//!        └── key and chain, errors ◄────┘   └────── requests of this node, followed ◄────┘
//! ```
//!
//! Input: the projections of pods whose volumes are set up. Output: a key and its certificate chain, and the pods to
//! resync. One task owns each certificate; it ends with its pod, and drops the key. Keys exist in memory and in the
//! pod's volume only, so a restarted agent requests new certificates; volumes keep their content meanwhile. `request.rs`
//! builds requests and interprets their outcome, `keys.rs` generates keys, `controller.rs` runs the task.
//!
//! Implements spec 07 §9.4.

mod controller;
mod keys;
mod request;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, timeout_at},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::{
    api::{ApiClient, Resource},
    objects::ChangeNotifier,
    reflector::{ReflectorDeps, Selection, reflect},
    store::ReflectorStore,
};
use berth_metrics::ReflectorMetrics;
use berth_ports::{CertificateRequest, Clock, Credential, EventSink, ObjectError};
use berth_types::{Pod, PodUid};
use controller::{CertificateState, PodCertificateController};

/// How long the first read waits for the signer: most signers answer at once, and a pod that waits reports no failure.
const PATIENCE: Duration = Duration::from_secs(5);

/// Dependencies of pod certificates.
pub struct CertificateDeps {
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Metrics of reflectors.
    pub metrics: ReflectorMetrics,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Receives events about refused, overdue, and expired certificates.
    pub events: Arc<dyn EventSink>,
    /// Name of this node.
    pub node: String,
    /// UID of the `Node` object; empty until it is known.
    pub node_uid: watch::Receiver<String>,
    /// Notifies pods of new certificates.
    pub notifier: ChangeNotifier,
    /// Tracks the spawned tasks.
    pub tasks: TaskTracker,
    /// Stops the spawned tasks.
    pub stop: CancellationToken,
}

/// Pod, volume, and index of the source in the volume.
type Key = (PodUid, String, usize);

struct CertificateEntry {
    signer: String,
    shown: watch::Receiver<CertificateState>,
    since: Instant,
    /// Stops the task when the entry is dropped.
    _stop_guard: DropGuard,
}

/// Certificates of all pods.
pub struct PodCertificates {
    deps: Arc<CertificateDeps>,
    entries: Mutex<HashMap<Key, CertificateEntry>>,
    /// Requests of this node; the reflector starts with the first certificate.
    requests: OnceLock<ReflectorStore<PodCertificateRequest>>,
    making: Arc<Semaphore>,
}

impl PodCertificates {
    /// Returns an empty set of certificates.
    pub fn new(deps: CertificateDeps) -> Self {
        let (deps, making) = (Arc::new(deps), Arc::new(Semaphore::new(1)));
        Self { deps, entries: Mutex::default(), requests: OnceLock::new(), making }
    }

    /// Key and certificate for a projection. The first call starts the task that requests it.
    ///
    /// # Errors
    /// None was issued yet, or the request was denied or failed; the text is the kubelet's.
    pub async fn of(&self, pod: &Pod, ask: &CertificateRequest) -> Result<Arc<Credential>, ObjectError> {
        let (mut shown, since) = {
            let mut entries = self.locked();
            let key = (pod.uid().clone(), ask.volume.clone(), ask.source);
            let entry = entries.entry(key).or_insert_with(|| self.begin(pod, ask));
            (entry.shown.clone(), entry.since)
        };
        let decided = shown.wait_for(|shown| !matches!(shown, CertificateState::Waiting));
        drop(timeout_at(since + PATIENCE, decided).await);
        let text = match &*shown.borrow() {
            CertificateState::Issued(current) => return Ok(current.credential.clone()),
            CertificateState::Waiting => "credential bundle is not issued yet".to_owned(),
            CertificateState::Denied(why) => permanently("denied", why),
            CertificateState::Failed(why) => permanently("failed", why),
        };
        Err(ObjectError::Other(text))
    }

    /// Stops the tasks of a pod and drops its keys.
    pub fn forget(&self, pod: &PodUid) {
        self.locked().retain(|(of, ..), _| of != pod);
    }

    /// Number of certificates by signer and state.
    pub fn states(&self) -> Vec<(String, &'static str, i64)> {
        let (entries, now) = (self.locked(), self.deps.clock.now());
        let state = |entry: &CertificateEntry| match &*entry.shown.borrow() {
            CertificateState::Waiting => "not_yet_issued",
            CertificateState::Denied(_) => "denied",
            CertificateState::Failed(_) => "failed",
            CertificateState::Issued(current) => request::state(&current.issued, now),
        };
        request::counted(entries.values().map(|entry| (entry.signer.as_str(), state(entry))))
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<Key, CertificateEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, pod: &Pod, ask: &CertificateRequest) -> CertificateEntry {
        let stop = self.deps.stop.child_token();
        let (show, shown) = watch::channel(CertificateState::Waiting);
        let account = pod.spec().service_account_name.clone().filter(|name| !name.is_empty());
        let controller = PodCertificateController {
            deps: self.deps.clone(),
            making: self.making.clone(),
            requests: self.requests.get_or_init(|| self.follow()).clone(),
            pod: pod.id().clone(),
            account: account.unwrap_or_else(|| "default".to_owned()),
            ask: ask.clone(),
            shown: show,
        };
        let ends = stop.clone();
        self.deps.tasks.spawn(async move {
            ends.run_until_cancelled(controller.run()).await;
        });
        let signer = ask.projection.signer_name.clone();
        CertificateEntry { signer, shown, since: Instant::now(), _stop_guard: stop.drop_guard() }
    }

    fn follow(&self) -> ReflectorStore<PodCertificateRequest> {
        let own = Selection::matching(Resource::POD_CERTIFICATES, &format!("spec.nodeName={}", self.deps.node));
        let deps = ReflectorDeps::new(self.deps.metrics.clone(), self.deps.stop.clone());
        let (store, following) = reflect(self.deps.api.clone(), own, deps);
        self.deps.tasks.spawn(following);
        store
    }
}

fn permanently(what: &str, why: &request::FailureCause) -> String {
    let request::FailureCause { reason, message } = why;
    format!("PodCertificateRequest was permanently {what}: reason={reason:?} message={message:?}")
}
