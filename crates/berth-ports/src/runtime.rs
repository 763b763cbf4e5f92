//! The role of the runtime room: carry out one pod's plan.

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{MountedVolumes, PullSecret, Stage};
use berth_types::{ContainerId, Pod, PodUid, api, observed::ObservedPod};

/// One turn of a pod that should run.
#[derive(Clone)]
pub struct SyncPod {
    /// The pod, with allocated resources.
    pub pod: Arc<Pod>,
    /// A look that began after the last action.
    pub observed: Arc<ObservedPod>,
    /// The status just built.
    pub status: Arc<api::PodStatus>,
    /// Pull secrets.
    pub secrets: Arc<[PullSecret]>,
    /// Mounted volumes.
    pub volumes: Arc<MountedVolumes>,
    /// The pod's cgroup parent in the driver's notation.
    pub cgroup_parent: String,
    /// All containers are to be removed for a restart-all (spec 03a §3.3).
    pub restart_all: bool,
    /// Termination was requested: start nothing more, do not report what fails now.
    pub stopping: CancellationToken,
    /// Told once sandbox, network and volumes are ready, before any image is pulled.
    pub sandbox_ready: Arc<dyn Fn() + Send + Sync>,
    /// Where each wait is named.
    pub stage: Stage,
}

/// What an action was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ActionKind {
    /// A container was started.
    StartContainer,
    /// A container was killed.
    KillContainer,
    /// A sandbox was created.
    CreatePodSandbox,
    /// All sandboxes were stopped.
    KillPodSandbox,
    /// Resources were changed in place.
    ResizePodInPlace,
    /// A container was removed for a restart-all.
    RemoveContainer,
}

/// Why a container does not start: becomes `state.waiting`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartFailure {
    /// `CrashLoopBackOff`, `ErrImagePull`, `RunContainerError`, …
    pub reason: String,
    /// The message.
    pub message: String,
}

/// One action and how it ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ActionOutcome {
    /// What it was.
    pub action: ActionKind,
    /// Container name, or the pod's name.
    pub target: Arc<str>,
    /// `None` where it succeeded.
    pub failure: Option<StartFailure>,
}

/// What one turn did.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SyncOutcome {
    /// In the order they were carried out.
    pub actions: Vec<ActionOutcome>,
    /// Whether the runtime may have changed: the next turn needs a fresh look.
    pub acted: bool,
    /// The earliest moment at which something held back may be tried again (back-off).
    pub retry_at: Option<Instant>,
    /// Whether this turn removed the containers of a restart-all: turn again at once.
    pub reset: bool,
    /// Whether nothing of the pod is alive and nothing of it will ever start again.
    pub over: bool,
    /// Failure of the turn as a whole.
    pub error: Option<String>,
}

impl SyncOutcome {
    /// The error text of the turn: its own, or the failing actions joined; `None` when all is well.
    pub fn error_text(&self) -> Option<String> {
        if self.error.is_some() {
            return self.error.clone();
        }
        let failing: Vec<String> = self
            .actions
            .iter()
            .filter_map(|a| {
                a.failure.as_ref().map(|f| {
                    format!("failed to \"{:?}\" for \"{}\" with {}: \"{}\"", a.action, a.target, f.reason, f.message)
                })
            })
            .collect();
        match failing.len() {
            0 => None,
            1 => failing.into_iter().next(),
            _ => Some(format!("[{}]", failing.join(", "))),
        }
    }
}

/// How long containers have to stop; whole seconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Grace(pub Duration);

/// The longest grace period: a hundred years. A definition may name any number of seconds, of which
/// no clock has the end, and from 292 years on runtimes count backwards.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Grace {
    /// That long, but no longer than a hundred years.
    pub fn of(period: Duration) -> Self {
        Self(period.min(LONGEST))
    }

    /// From whole seconds; negative counts as 0.
    pub fn from_secs(seconds: i64) -> Self {
        Self::of(Duration::from_secs(seconds.max(0).unsigned_abs()))
    }
}

/// Why a pod or container is killed: decides the grace period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KillReason {
    /// Anything without a special grace period.
    Unspecified,
    /// The startup probe failed.
    StartupProbe,
    /// The liveness probe failed.
    LivenessProbe,
    /// The postStart hook failed.
    FailedPostStartHook,
}

/// The order to stop a pod.
#[derive(Clone)]
pub struct KillPod {
    /// The pod's definition; `None` for one that only the runtime knows.
    pub pod: Option<Arc<Pod>>,
    /// What is there to stop.
    pub observed: Arc<ObservedPod>,
    /// Overrides every other grace period. Live: a shorter value cuts a kill short
    /// (spec 02a §14 "pass a live deadline to the kill operation").
    pub grace: watch::Receiver<Option<Grace>>,
    /// Where each wait is named.
    pub stage: Stage,
}

/// Carries out plans by CRI calls. One call at a time per pod; pods never wait for each other.
#[async_trait]
pub trait PodRuntime: Send + Sync + 'static {
    /// Computes and carries out one pass (spec 03a §3-4).
    async fn sync_pod(&self, request: SyncPod) -> SyncOutcome;
    /// Kills all running containers, then stops all sandboxes (spec 03a §9).
    ///
    /// # Errors
    /// The joined texts of what could not be stopped.
    async fn kill_pod(&self, request: KillPod) -> Result<(), String>;
    /// Removes dead instances of one container beyond those worth keeping (spec 02a §9.8);
    /// `all` removes every exited container of the pod.
    fn prune(&self, observed: &Arc<ObservedPod>, container: Option<(&str, &ContainerId)>, all: bool);
    /// Removes all containers of a pod that has ended, with their logs, its sandboxes, and its
    /// log directory.
    ///
    /// # Errors
    /// The joined texts of what could not be removed; a running container is refused.
    async fn remove_pod(&self, observed: &Arc<ObservedPod>) -> Result<(), String>;
    /// Whether something that runs has other resources than `pod` holds (spec 02a §9.7 step 2).
    fn resize_in_progress(&self, pod: &Pod, observed: &ObservedPod) -> bool;
    /// Forgets back-off and other memory of a pod that is gone.
    fn forget(&self, pod: &PodUid);
    /// Forgets all pods but these, also what an earlier life of the agent has written down of them.
    fn retain(&self, pods: &HashSet<PodUid>);
    /// How the runtime calls itself: the scheme of container ids (`containerd`).
    fn name(&self) -> Arc<str>;
}

/// What the engine knows of a pod's future (spec 02a §9.6): decides what garbage collection takes.
pub trait PodFates: Send + Sync + 'static {
    /// Whether every source has told its pods.
    fn sources_ready(&self) -> bool;
    /// Whether everything of a pod may be removed: it is gone, or unknown after the first sync.
    fn content_may_go(&self, pod: &PodUid) -> bool;
    /// Whether a pod has terminated, though it may not be deleted.
    fn is_terminated(&self, pod: &PodUid) -> bool;
}
