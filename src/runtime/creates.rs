//! Creates that happen once, whatever becomes of their answer.
//!
//! A create is its own task: who waits for it may give up without cancelling it, and the next
//! turn takes up the waiting. Where the answer was lost (deadline, broken connection), the object
//! is looked for by its identity and adopted; until it is found, or the runtime must have given
//! up, nothing is created again (spec 03a §16). A name that is reserved is an answer: by the call
//! of an agent that has ended, which may yet succeed (then its object is adopted) or be undone
//! (then the name is free again). A runtime that reserves names may be asked again soon.

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
use berth_types::{PodUid, SandboxId};

const UID_LABEL: &str = "io.kubernetes.pod.uid";
const CONTAINER_LABEL: &str = "io.kubernetes.container.name";

/// What is created.
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

/// Why there is no object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum CreateError {
    /// The runtime refused, or may still be working on it.
    Cri(CriError),
    /// Another call holds the name; it is worth asking again after that time.
    Reserved(CriError, Duration),
    /// The caller was told to stop; the create goes on.
    Stopped,
}

type Call = Shared<BoxFuture<'static, CriResult<String>>>;

/// What is known of a create that has not ended well yet.
struct Open {
    /// The call, while it runs or nobody has taken its answer.
    call: Option<Call>,
    /// Its answer was lost: nothing is created before this moment.
    doubt_until: Option<Instant>,
    /// How often its name was reserved.
    refusals: u32,
}

/// Until a name that is reserved is asked for again, at first; doubles up to [`RESERVED_MAX`].
const RESERVED: Duration = Duration::from_millis(500);
/// The longest of these waits.
const RESERVED_MAX: Duration = Duration::from_secs(10);

/// The creates of all pods.
pub(super) struct Creates {
    cri: Arc<dyn RuntimeService>,
    /// How long a runtime may go on with a call whose deadline has passed.
    patience: Duration,
    open: Arc<Mutex<HashMap<CreateKey, Open>>>,
}

impl Creates {
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
                if let Some(until) = self.doubt(&key) {
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

    /// Waits, at most `limit`, for the sandboxes of a pod that are being created, and returns
    /// their ids. What comes later is stopped as soon as it is there.
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

    /// Forgets a pod; sandboxes that are still being created for it are stopped once there.
    pub(super) fn forget(&self, pod: &PodUid) {
        self.lock().retain(|key, _| key.pod() != pod);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CreateKey, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self, key: &CreateKey) -> Option<Call> {
        self.lock().get(key).and_then(|open| open.call.clone())
    }

    fn doubt(&self, key: &CreateKey) -> Option<Instant> {
        self.lock().get(key).and_then(|open| open.doubt_until)
    }

    fn refusals(&self, key: &CreateKey) -> u32 {
        self.lock().get(key).map_or(0, |open| open.refusals)
    }

    fn close(&self, key: &CreateKey) {
        let mut open = self.lock();
        open.remove(key);
        if open.is_empty() {
            // Hundreds at once are rare.
            *open = HashMap::new();
        }
    }

    fn launch(&self, key: &CreateKey, call: impl Future<Output = CriResult<String>> + Send + 'static) -> Call {
        let (cri, open, named) = (self.cri.clone(), self.open.clone(), key.clone());
        // Known before it runs: what ends unknown is not wanted any more.
        let refusals = self.refusals(key);
        self.lock().insert(key.clone(), Open { call: None, doubt_until: None, refusals });
        let task = tokio::spawn(async move {
            let answer = call.await;
            let wanted = open.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&named);
            if let (CreateKey::Sandbox { pod, .. }, Ok(id), false) = (&named, &answer, wanted) {
                info!(podUID = %pod, sandboxID = %id, "Stopping a sandbox that came too late");
                if let Err(err) = cri.stop_pod_sandbox(id).await {
                    warn!(podUID = %pod, sandboxID = %id, %err, "Failed to stop a sandbox that came too late");
                }
            }
            answer
        });
        let call = async move {
            task.await.unwrap_or_else(|e| Err(CriError::Invalid(format!("the task that creates has failed: {e}"))))
        };
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
        // The doubt is noted before looking: should the caller go away now, it is still there.
        let before = self.refusals(&key);
        let doubt_until = Some(Instant::now() + wait);
        self.lock().insert(key.clone(), Open { call: None, doubt_until, refusals: before.saturating_add(1) });
        match self.find(&key).await {
            Some(id) => {
                info!(podUID = %key.pod(), id, %error, "Adopting what a lost call has created");
                self.close(&key);
                Ok(id)
            }
            None if reserved => {
                let again = RESERVED * 2_u32.pow(before.min(5));
                Err(CreateError::Reserved(error, again.min(RESERVED_MAX)))
            }
            None => Err(CreateError::Cri(error)),
        }
    }

    /// The object of that identity, if it is there and usable.
    async fn find(&self, key: &CreateKey) -> Option<String> {
        let found = match key {
            CreateKey::Sandbox { pod, attempt } => self.find_sandbox(pod, *attempt).await,
            CreateKey::Container { pod, sandbox, name, attempt } => {
                self.find_container(pod, sandbox, name, *attempt).await
            }
        };
        found.unwrap_or_else(|err| {
            warn!(podUID = %key.pod(), %err, "Cannot look for what a lost call has created");
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

/// For how long nothing may be created again; `None` where the answer was no.
fn lost_answer(error: &CriError, patience: Duration) -> Option<Duration> {
    if error.is_timeout() {
        Some(patience)
    } else if error.is_unavailable() {
        Some(Duration::ZERO)
    } else {
        None
    }
}

/// Whether the runtime refused because it keeps one object per name.
fn is_reserved(error: &CriError) -> bool {
    matches!(error, CriError::Rpc { message, .. } if message.contains("is reserved"))
}

fn still_creating(key: &CreateKey) -> CriError {
    CriError::Invalid(match key {
        CreateKey::Sandbox { attempt, .. } => {
            format!("attempt {attempt} to create the sandbox has not been answered and may still be running")
        }
        CreateKey::Container { name, attempt, .. } => {
            format!("attempt {attempt} to create container {name:?} has not been answered and may still be running")
        }
    })
}
