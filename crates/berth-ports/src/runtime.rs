//! Port of the container runtime: sync, kill, and remove one pod (`PodRuntime`).

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{MountedVolumes, PodProgress, PullSecret};
use berth_types::{ContainerId, Pod, PodUid, api, observation::ObservedPod};

/// Input of one sync of a pod that should run.
#[derive(Clone)]
pub struct SyncPod {
    /// The pod, with allocated resources.
    pub pod: Arc<Pod>,
    /// Observation whose read began after the last action.
    pub observed: Arc<ObservedPod>,
    /// The status computed for this sync.
    pub status: Arc<api::PodStatus>,
    /// Image pull secrets.
    pub secrets: Arc<[PullSecret]>,
    /// Mounted volumes.
    pub volumes: Arc<MountedVolumes>,
    /// The pod's cgroup parent in the notation of the cgroup driver.
    pub cgroup_parent: String,
    /// Whether all containers are to be removed for a restart-all (spec 03a §3.3).
    pub restart_all: bool,
    /// Cancelled on a termination request: start nothing more, and report no failures from then on.
    pub stopping: CancellationToken,
    /// Callback, called once sandbox, network, and volumes are ready, before any image is pulled.
    pub sandbox_ready: Arc<dyn Fn() + Send + Sync>,
    /// Receives the name of each wait.
    pub progress: PodProgress,
}

/// Kind of a sync action.
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

/// Why a container does not start; becomes `state.waiting`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartFailure {
    /// `CrashLoopBackOff`, `ErrImagePull`, `RunContainerError`, …
    pub reason: String,
    /// Message for people.
    pub message: String,
}

/// One action and its result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ActionOutcome {
    /// Kind of the action.
    pub action: ActionKind,
    /// Container name, or the pod's name.
    pub target: Arc<str>,
    /// The failure; `None` on success.
    pub failure: Option<StartFailure>,
}

/// Result of one sync.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SyncOutcome {
    /// Actions in execution order.
    pub actions: Vec<ActionOutcome>,
    /// Whether the runtime may have changed: the next sync needs a fresh observation.
    pub acted: bool,
    /// Earliest time at which an action delayed by back-off may be retried.
    pub retry_at: Option<Instant>,
    /// Whether this sync removed the containers of a restart-all: sync again immediately.
    pub reset: bool,
    /// Whether nothing of the pod runs and nothing of it will ever start again.
    pub is_finished: bool,
    /// Error of the sync as a whole.
    pub error: Option<String>,
}

impl SyncOutcome {
    /// Error text of the sync: its own, or the joined texts of the failed actions; `None` on success.
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

/// Termination grace period of containers; whole seconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Grace(pub Duration);

/// Maximum grace period: a hundred years. A pod may specify any number of seconds, whose deadline no clock can
/// represent, and from 292 years on runtimes overflow to negative values.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Grace {
    /// `period`, capped at a hundred years.
    pub fn of(period: Duration) -> Self {
        Self(period.min(LONGEST))
    }

    /// From whole seconds; a negative value counts as 0.
    pub fn from_secs(seconds: i64) -> Self {
        Self::of(Duration::from_secs(seconds.max(0).unsigned_abs()))
    }
}

/// Why a pod or container is killed; determines the grace period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KillReason {
    /// Any reason without a special grace period.
    Unspecified,
    /// The startup probe failed.
    StartupProbe,
    /// The liveness probe failed.
    LivenessProbe,
    /// The postStart hook failed.
    FailedPostStartHook,
}

/// Input of a pod kill.
#[derive(Clone)]
pub struct KillPod {
    /// The pod's specification; `None` for a pod known only to the runtime.
    pub pod: Option<Arc<Pod>>,
    /// Observation of what runs.
    pub observed: Arc<ObservedPod>,
    /// Overrides every other grace period. Live: a shorter value cuts a running kill short
    /// (spec 02a §14 "pass a live deadline to the kill operation").
    pub grace: watch::Receiver<Option<Grace>>,
    /// Receives the name of each wait.
    pub progress: PodProgress,
}

/// Executes pod actions by CRI calls. One call at a time per pod; pods never wait for each other.
#[async_trait]
pub trait PodRuntime: Send + Sync + 'static {
    /// Computes and executes the actions of one sync (spec 03a §3-4).
    async fn sync_pod(&self, request: SyncPod) -> SyncOutcome;
    /// Kills all running containers, then stops all sandboxes (spec 03a §9).
    ///
    /// # Errors
    /// The joined texts of the containers and sandboxes that could not be stopped.
    async fn kill_pod(&self, request: KillPod) -> Result<(), String>;
    /// Removes dead instances of one container in excess of those to keep (spec 02a §9.8);
    /// `all` removes every exited container of the pod.
    fn prune(&self, observed: &Arc<ObservedPod>, container: Option<(&str, &ContainerId)>, all: bool);
    /// Removes all containers of a terminated pod with their logs, its sandboxes, and its log directory.
    ///
    /// # Errors
    /// The joined texts of what could not be removed; a running container is refused.
    async fn remove_pod(&self, observed: &Arc<ObservedPod>) -> Result<(), String>;
    /// Whether a running container has other resources than `pod` specifies (spec 02a §9.7 step 2).
    fn resize_in_progress(&self, pod: &Pod, observed: &ObservedPod) -> bool;
    /// Drops back-off and other cached state of a deleted pod.
    fn forget(&self, pod: &PodUid);
    /// Drops the state of all other pods, including what a previous run of the agent persisted.
    fn retain(&self, pods: &HashSet<PodUid>);
    /// Name of the runtime: the scheme of container ids (`containerd`).
    fn name(&self) -> Arc<str>;
}

/// Deletion state of pods in the engine (spec 02a §9.6); decides what garbage collection removes.
pub trait PodStateProvider: Send + Sync + 'static {
    /// Whether every source has delivered its pods.
    fn sources_ready(&self) -> bool;
    /// Whether everything of a pod may be removed: the pod is deleted, or unknown after the first sync.
    fn should_pod_content_be_removed(&self, pod: &PodUid) -> bool;
    /// Whether a pod has terminated, even if it may not be deleted yet.
    fn is_terminated(&self, pod: &PodUid) -> bool;
}
