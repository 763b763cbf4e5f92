//! Idempotent creation of sandboxes and containers, across lost answers and cancelled callers.
//!
//! Each create call runs in its own task: a caller may give up without cancelling it, and the next sync
//! resumes waiting. If the answer was lost (deadline, broken connection), the object is looked up by
//! its identity and adopted; until it is found, or the runtime must have given up, nothing is created
//! again (spec 03a §16). A reserved name is an answer: it was reserved by a call of a previous agent,
//! which may yet succeed (its object is then adopted) or be undone (the name is then free again). A
//! runtime that reserves names may be called again soon.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use berth_cri::{CriError, CriResult, RuntimeService};
use berth_proto::cri;
use berth_sys::backoff::Backoff;
use berth_types::{PodUid, SandboxId};

const UID_LABEL: &str = "io.kubernetes.pod.uid";
const CONTAINER_LABEL: &str = "io.kubernetes.container.name";

/// Identity of the object to create.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum CreateKey {
    /// A sandbox of a pod.
    Sandbox { pod: PodUid, attempt: u32 },
    /// A container in a sandbox.
    Container { pod: PodUid, sandbox: SandboxId, name: String, attempt: u32 },
}

impl CreateKey {
    fn pod(&self) -> &PodUid {
        match self {
            Self::Sandbox { pod, .. } | Self::Container { pod, .. } => pod,
        }
    }
}

/// Why a create returned no object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum CreateError {
    /// The runtime refused, or may still be working on the call.
    Cri(CriError),
    /// Another call has reserved the name; retry after that time.
    Reserved(CriError, Duration),
    /// The caller was cancelled; the create continues.
    Stopped,
}

type Call = Shared<BoxFuture<'static, CriResult<String>>>;

/// State of a create that has not succeeded yet.
struct PendingCreate {
    /// The call, while it runs or its answer has not been taken.
    call: Option<Call>,
    /// The answer was lost: nothing is created before this time.
    doubt_until: Option<Instant>,
    /// How often the name was reserved.
    refusals: u32,
}

/// Retry delays for a reserved name.
const RESERVED: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));

/// Creates in flight of all pods.
pub(super) struct CreationTracker {
    cri: Arc<dyn RuntimeService>,
    /// How long a runtime may continue a call after its deadline.
    patience: Duration,
    open: Arc<Mutex<HashMap<CreateKey, PendingCreate>>>,
}

impl CreationTracker {
    pub(super) fn new(cri: Arc<dyn RuntimeService>, patience: Duration) -> Self {
        Self { cri, patience, open: Arc::default() }
    }

    /// Creates the object, or returns the one that an earlier attempt has created.
    pub(super) async fn create(
        &self,
        key: CreateKey,
        call: impl Future<Output = CriResult<String>> + Send + 'static,
        stop: &CancellationToken,
    ) -> Result<String, CreateError> {
        let call = match self.running(&key) {
            Some(running) => running,
            None => {
                if let Some(until) = self.retry_not_before(&key) {
                    if let Some(id) = self.find(&key).await {
                        self.close(&key);
                        return Ok(id);
                    }
                    if Instant::now() < until {
                        return Err(CreateError::Cri(still_creating(&key)));
                    }
                }
                self.launch(&key, call)
            }
        };
        let answer = tokio::select! {
            biased;
            answer = call => answer,
            () = stop.cancelled() => return Err(CreateError::Stopped),
        };
        self.settle(key, answer).await
    }

    /// Waits up to `limit` for sandboxes of a pod that are being created, and returns their IDs. A
    /// sandbox that is created later is stopped immediately.
    pub(super) async fn late_sandboxes(&self, pod: &PodUid, limit: Duration) -> Vec<String> {
        let deadline = Instant::now() + limit;
        let keys: Vec<CreateKey> = {
            let open = self.lock();
            open.keys().filter(|key| matches!(key, CreateKey::Sandbox { .. }) && key.pod() == pod).cloned().collect()
        };
        let mut found = Vec::new();
        for key in keys {
            let id = match self.running(&key) {
                Some(call) => tokio::time::timeout_at(deadline, call).await.ok().and_then(Result::ok),
                None => self.find(&key).await,
            };
            self.close(&key);
            found.extend(id);
        }
        found
    }

    /// Removes the state of a pod; sandboxes that are still being created for it are stopped once
    /// created.
    pub(super) fn forget(&self, pod: &PodUid) {
        self.lock().retain(|key, _| key.pod() != pod);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CreateKey, PendingCreate>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self, key: &CreateKey) -> Option<Call> {
        self.lock().get(key).and_then(|open| open.call.clone())
    }

    fn retry_not_before(&self, key: &CreateKey) -> Option<Instant> {
        self.lock().get(key).and_then(|open| open.doubt_until)
    }

    fn refusals(&self, key: &CreateKey) -> u32 {
        self.lock().get(key).map_or(0, |open| open.refusals)
    }

    fn close(&self, key: &CreateKey) {
        let mut open = self.lock();
        open.remove(key);
        if open.is_empty() {
            // Release the capacity: hundreds of concurrent creates are rare.
            *open = HashMap::new();
        }
    }

    fn launch(&self, key: &CreateKey, call: impl Future<Output = CriResult<String>> + Send + 'static) -> Call {
        let (cri, open, named) = (self.cri.clone(), self.open.clone(), key.clone());
        // Inserted before the call runs: a create without an entry is no longer wanted.
        let refusals = self.refusals(key);
        self.lock().insert(key.clone(), PendingCreate { call: None, doubt_until: None, refusals });
        let task = tokio::spawn(berth_otel::in_current_span(async move {
            let answer = call.await;
            let wanted = open.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&named);
            if let (CreateKey::Sandbox { pod, .. }, Ok(id), false) = (&named, &answer, wanted) {
                info!(podUID = %pod, sandboxID = %id, "Stopping sandbox of an abandoned create request");
                if let Err(err) = cri.stop_pod_sandbox(id).await {
                    warn!(podUID = %pod, sandboxID = %id, %err, "Failed to stop sandbox of an abandoned create request");
                }
            }
            answer
        }));
        let call =
            async move { task.await.unwrap_or_else(|e| Err(CriError::Invalid(format!("create task failed: {e}")))) };
        let call = call.boxed().shared();
        if let Some(known) = self.lock().get_mut(key) {
            known.call = Some(call.clone());
        }
        call
    }

    async fn settle(&self, key: CreateKey, answer: CriResult<String>) -> Result<String, CreateError> {
        let error = match answer {
            Ok(id) => {
                self.close(&key);
                return Ok(id);
            }
            Err(error) => error,
        };
        let reserved = is_reserved(&error);
        let wait = match lost_answer(&error, self.patience) {
            None if !reserved => {
                self.close(&key);
                return Err(CreateError::Cri(error));
            }
            wait => wait.unwrap_or_default(),
        };
        // Record the lost answer before the lookup: the caller may be cancelled during it.
        let before = self.refusals(&key);
        let doubt_until = Some(Instant::now() + wait);
        self.lock().insert(key.clone(), PendingCreate { call: None, doubt_until, refusals: before.saturating_add(1) });
        match self.find(&key).await {
            Some(id) => {
                info!(podUID = %key.pod(), id, %error, "Adopting object of a create request without response");
                self.close(&key);
                Ok(id)
            }
            None if reserved => Err(CreateError::Reserved(error, RESERVED.nth(before))),
            None => Err(CreateError::Cri(error)),
        }
    }

    /// Looks up the object of that identity, if it exists and is usable.
    async fn find(&self, key: &CreateKey) -> Option<String> {
        let found = match key {
            CreateKey::Sandbox { pod, attempt } => self.find_sandbox(pod, *attempt).await,
            CreateKey::Container { pod, sandbox, name, attempt } => {
                self.find_container(pod, sandbox, name, *attempt).await
            }
        };
        found.unwrap_or_else(|err| {
            warn!(podUID = %key.pod(), %err, "Failed to look up object of a create request without response");
            None
        })
    }

    async fn find_sandbox(&self, pod: &PodUid, attempt: u32) -> CriResult<Option<String>> {
        let filter = cri::PodSandboxFilter {
            label_selector: [(UID_LABEL.to_owned(), pod.to_string())].into(),
            ..Default::default()
        };
        let ready = cri::PodSandboxState::SandboxReady as i32;
        let listed = self.cri.list_pod_sandbox(Some(filter)).await?;
        let same = |s: &cri::PodSandbox| s.state == ready && s.metadata.as_ref().is_some_and(|m| m.attempt == attempt);
        Ok(listed.into_iter().find(same).map(|s| s.id))
    }

    async fn find_container(
        &self,
        pod: &PodUid,
        sandbox: &SandboxId,
        name: &str,
        attempt: u32,
    ) -> CriResult<Option<String>> {
        let labels = [(UID_LABEL.to_owned(), pod.to_string()), (CONTAINER_LABEL.to_owned(), name.to_owned())];
        let filter = cri::ContainerFilter {
            pod_sandbox_id: sandbox.to_string(),
            label_selector: labels.into(),
            ..Default::default()
        };
        let created = cri::ContainerState::ContainerCreated as i32;
        let listed = self.cri.list_containers(Some(filter)).await?;
        let same = |c: &cri::Container| c.state == created && c.metadata.as_ref().is_some_and(|m| m.attempt == attempt);
        Ok(listed.into_iter().find(same).map(|c| c.id))
    }
}

/// How long nothing may be created again; `None` if the runtime refused.
fn lost_answer(error: &CriError, patience: Duration) -> Option<Duration> {
    if error.is_timeout() {
        Some(patience)
    } else if error.is_unavailable() {
        Some(Duration::ZERO)
    } else {
        None
    }
}

/// Whether the runtime refused because the name is reserved.
fn is_reserved(error: &CriError) -> bool {
    matches!(error, CriError::Rpc { message, .. } if message.contains("is reserved"))
}

fn still_creating(key: &CreateKey) -> CriError {
    CriError::Invalid(match key {
        CreateKey::Sandbox { attempt, .. } => {
            format!("attempt {attempt} to create the sandbox has not completed and may still be running")
        }
        CreateKey::Container { name, attempt, .. } => {
            format!("attempt {attempt} to create container {name:?} has not completed and may still be running")
        }
    })
}
