//! Pod worker sync: reconciles the running containers with the desired pod (spec 02a §9.7 SyncPod).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use rand::Rng;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::{
    WorkerContext,
    deadline::by_deadline,
    pod_status::{StatusParts, build_status},
    prerequisites::PodPrerequisites,
    resize::PodLevelValues,
};
use crate::engine::{
    lifecycle::SyncTransition,
    sync_delay::{self, SyncResult},
};
use berth_ports::{ActionKind, EventRecord, PodProgress, PodView, PullSecret, SyncOutcome, SyncPod};
use berth_status::{
    BuildKind,
    lookup::{ContainerStateRef, state},
};
use berth_types::{
    Pod, PodRef, api,
    observation::{Generation, ObservedPod},
    spec::ANNOTATION_SEEN,
};

/// State of a worker that persists between syncs.
pub(super) struct WorkerState {
    /// Identity of the pod.
    pub id: PodRef,
    /// Progress, published to readers.
    pub progress: PodProgress,
    /// Observations of the pod.
    pub view: PodView,
    /// Minimum generation of an observation to be used.
    pub wanted: Generation,
    /// Start failures by container name; become `state.waiting` of the status.
    pub failures: BTreeMap<String, berth_status::StartFailure>,
    /// The pod's cgroup parent, once it is known to exist.
    pub cgroup: Option<String>,
    /// Whether the last attempt to create the cgroup failed.
    pub no_cgroup: bool,
    /// Whether the first sync has begun.
    pub begun: bool,
    /// Whether the pod was observed running.
    pub was_running: bool,
    /// Whether the runtime reported that nothing of the pod can start any more.
    pub over: bool,
    /// Whether the last sync was blocked by a runtime or network that is not ready.
    pub blocked_on_runtime: bool,
    /// Back-off of actions, if one is in effect.
    pub hold: Option<ActionBackOff>,
    /// Consecutive failed syncs.
    pub failed_in_a_row: u32,
    /// The last failure that was logged, and when.
    pub last_failure: Option<(String, Instant)>,
    /// When the active deadline expires.
    pub deadline: Option<Timestamp>,
    /// Rejection of the pod by this node after admission.
    pub rejection: Option<berth_status::Eviction>,
    /// Pod-level resource values, as last read.
    pub in_force: Option<PodLevelValues>,
}

/// Back-off that postpones all actions of a pod after a sync.
pub(super) struct ActionBackOff {
    /// End of the back-off.
    pub until: Instant,
    /// Earlier end of the back-off if the pod changes in the meantime.
    pub soonest: Instant,
    /// Observation at the time of the back-off.
    pub seen: Arc<ObservedPod>,
    /// Cause of the back-off.
    pub after: BackOffCause,
}

/// Cause of a back-off, which determines the result of the blocked sync.
#[derive(Clone, Copy)]
pub(super) enum BackOffCause {
    /// An action with a back-off of its own.
    BackOff,
    /// An error without a back-off of its own.
    Error,
}

impl ActionBackOff {
    /// Result of a sync that this back-off blocks for that long.
    fn end(&self, left: Duration) -> SyncResult {
        match self.after {
            BackOffCause::BackOff => SyncResult::InBackOff(left),
            BackOffCause::Error => SyncResult::RetryAfter(left),
        }
    }
}

impl WorkerState {
    pub fn new(id: PodRef, progress: PodProgress, view: PodView) -> Self {
        Self {
            id,
            progress,
            view,
            wanted: Generation::default(),
            failures: BTreeMap::new(),
            cgroup: None,
            no_cgroup: false,
            begun: false,
            was_running: false,
            over: false,
            blocked_on_runtime: false,
            hold: None,
            failed_in_a_row: 0,
            last_failure: None,
            deadline: None,
            rejection: None,
            in_force: None,
        }
    }
}

/// Outcome of a sync.
pub(super) enum Outcome {
    /// The lifecycle moves on.
    Moved(SyncTransition),
    /// The lifecycle state stays.
    Unchanged(SyncResult),
}

/// Context of one sync.
pub(super) struct SyncContext<'a> {
    pub context: &'a Arc<WorkerContext>,
    pub memory: &'a mut WorkerState,
    pub pod: Option<Arc<Pod>>,
    /// Whether this sync was caused by a message of the sync loop.
    pub update_pending: bool,
}

/// Input of the prepare step of a sync.
struct PrepareInput {
    observed: Arc<ObservedPod>,
    status: Arc<api::PodStatus>,
    restart_all: bool,
}

/// Whether two observations have the same content, regardless of when they were made.
fn same_content(a: &ObservedPod, b: &ObservedPod) -> bool {
    a.sandboxes == b.sandboxes && a.containers == b.containers && a.ips == b.ips
}

impl SyncContext<'_> {
    /// Waits for an observation that began after the last action. A failure records an event and fails
    /// the sync.
    pub async fn observe(&mut self) -> Result<Arc<ObservedPod>, String> {
        self.memory.progress.enter("runtime status");
        let limit = self.context.config.observation_timeout;
        let text = match tokio::time::timeout(limit, self.memory.view.fresh(self.memory.wanted)).await {
            Ok(seen) => match seen.error {
                None => return Ok(seen.pod),
                Some(error) => error.to_string(),
            },
            Err(_) => format!("timed out after {limit:?} waiting for the runtime status of the pod"),
        };
        let text = format!("error determining status: {text}");
        self.context.events.record(EventRecord::warning(&self.memory.id, "FailedSync", text.clone()));
        Err(text)
    }

    /// Builds the pod's status from an observation.
    pub fn build(&mut self, pod: &Pod, observed: &ObservedPod, kind: BuildKind) -> api::PodStatus {
        let eviction = self.memory.rejection.clone().or_else(|| self.past_deadline(pod));
        let cgroup = self.memory.in_force.as_ref().map(|read| read.values);
        let failures = &self.memory.failures;
        let parts = StatusParts { pod, observed, failures, kind, eviction, cgroup, sandbox_ready: false };
        build_status(self.context, &parts)
    }

    /// Runs one sync.
    pub async fn sync(mut self, stopping: CancellationToken) -> Result<Outcome, String> {
        let Some(pod) = self.pod.clone() else { return Ok(Outcome::Unchanged(SyncResult::Settled)) };
        self.note_first_turn(&pod);
        self.take_due_deadline();
        let observed = self.observe().await?;
        self.note_resize_progress(&pod, &observed).await;
        let built = self.build(&pod, &observed, BuildKind::Ongoing);
        let now = self.context.clock.now();
        let terminal = berth_status::Phase::of(&built).is_some_and(berth_status::Phase::is_terminal);
        self.note_running(&pod, &built);
        let restart_all = berth_status::restart_all::in_progress(&built);
        let built = Arc::new(built);
        self.context.status.set(&pod, (*built).clone(), now);
        self.trigger_probes(&pod, &built);
        if terminal {
            self.context.allocations.finished(pod.uid());
            return Ok(Outcome::Moved(SyncTransition::PhaseTerminal));
        }
        self.note_deadline(&pod);
        if pod.is_static() {
            self.context.mirrors.ensure(&pod);
        }
        if let Some(end) = self.runtime_in_the_way(&pod) {
            return Ok(Outcome::Unchanged(end));
        }
        if let Some(end) = self.remaining_backoff(&observed) {
            return Ok(Outcome::Unchanged(end));
        }
        self.context.objects.register(&pod);
        let input = PrepareInput { observed, status: built, restart_all };
        let left = Self::until_deadline(self.context, self.memory);
        by_deadline(left, stopping.clone(), self.act(pod, input, stopping)).await
    }

    /// The part of a sync that may block: prerequisites, then actions of the runtime.
    async fn act(mut self, pod: Arc<Pod>, input: PrepareInput, stopping: CancellationToken) -> Result<Outcome, String> {
        let observed = input.observed.clone();
        let prerequisites = match self.prerequisites(&pod, &observed, &stopping).await {
            Err(_) if self.memory.rejection.is_some() => return Ok(self.reject(&pod, &observed)),
            result => result?,
        };
        let Some(prerequisites) = prerequisites else { return Ok(Outcome::Unchanged(SyncResult::SyncAgain)) };
        let request = self.prepare(&pod, input, prerequisites, stopping).await;
        self.memory.progress.enter_frame("containers");
        let done = self.context.runtime.sync_pod(request).await;
        if done.is_finished {
            // The phase need not be terminal: a container that never ran would stay waiting forever.
            self.memory.over = true;
            self.context.allocations.finished(pod.uid());
            return Ok(Outcome::Moved(SyncTransition::PhaseTerminal));
        }
        Ok(Outcome::Unchanged(self.conclude(done, observed)))
    }

    /// Triggers probes of containers that run but have not started, or have started but are not ready,
    /// ahead of their next period.
    fn trigger_probes(&self, pod: &Pod, built: &api::PodStatus) {
        let is_asked = |status: &&api::ContainerStatus| {
            let Some((_, container)) = pod.container(&status.name) else { return false };
            match (state(status), status.started) {
                (ContainerStateRef::Running, Some(true)) => !status.ready && container.readiness_probe.is_some(),
                (ContainerStateRef::Running, _) => container.startup_probe.is_some(),
                _ => false,
            }
        };
        let statuses = built.init_container_statuses.iter().chain(&built.container_statuses).flatten();
        for status in statuses.filter(is_asked) {
            self.context.probes.trigger(pod.uid(), &status.name);
        }
    }

    /// Prepares what a pod needs before its sandbox: pull secrets, probes.
    async fn prepare(
        &mut self,
        pod: &Arc<Pod>,
        input: PrepareInput,
        prerequisites: PodPrerequisites,
        stopping: CancellationToken,
    ) -> SyncPod {
        let PrepareInput { observed, status, restart_all } = input;
        let secrets = self.secrets(pod).await;
        self.context.probes.add(pod);
        let sandbox_seen = observed.clone();
        SyncPod {
            pod: pod.clone(),
            observed,
            status,
            secrets,
            volumes: prerequisites.volumes,
            cgroup_parent: prerequisites.cgroup,
            restart_all,
            stopping,
            sandbox_ready: self.sandbox_ready(pod, &sandbox_seen),
            progress: self.memory.progress.clone(),
        }
    }

    async fn secrets(&self, pod: &Arc<Pod>) -> Arc<[PullSecret]> {
        if pod.spec().image_pull_secrets.as_ref().is_none_or(Vec::is_empty) {
            return Arc::from([]);
        }
        self.memory.progress.enter("image pull secrets");
        let (found, missing) = self.context.objects.pull_secrets(pod).await;
        if !missing.is_empty() {
            let names = missing.join(", ");
            let text = format!(
                "Unable to retrieve some image pull secrets ({names}); attempting to pull the image may not succeed."
            );
            self.context.events.record(EventRecord::warning(pod.id(), "FailedToRetrieveImagePullSecret", text));
        }
        found.into()
    }

    /// Publishes `PodReadyToStartContainers` as soon as sandbox, network, and volumes are ready.
    fn sandbox_ready(&self, pod: &Arc<Pod>, observed: &Arc<ObservedPod>) -> Arc<dyn Fn() + Send + Sync> {
        let (context, pod, observed) = (self.context.clone(), pod.clone(), observed.clone());
        let failures = self.memory.failures.clone();
        Arc::new(move || {
            let parts = StatusParts {
                pod: &pod,
                observed: &observed,
                failures: &failures,
                kind: BuildKind::Ongoing,
                eviction: None,
                cgroup: None,
                sandbox_ready: true,
            };
            let built = build_status(&context, &parts);
            context.status.set(&pod, built, context.clock.now());
        })
    }

    /// Whether a runtime or network that is not ready blocks the sync of this pod.
    fn runtime_in_the_way(&mut self, pod: &Arc<Pod>) -> Option<SyncResult> {
        let state = self.context.runtime_state.borrow().clone();
        self.memory.blocked_on_runtime = false;
        if let Some(error) = &state.runtime_error {
            self.memory.blocked_on_runtime = true;
            self.memory.progress.enter("runtime");
            let text = format!("the runtime is not ready: {error}");
            berth_otel::record_exception(&text);
            self.memory.progress.fail(&text);
            debug!(pod = %pod.object_name(), err = %error, "Skipping pod synchronization");
            return Some(SyncResult::Failed);
        }
        if let Some(error) = state.network_error.as_ref().filter(|_| !pod.is_host_network()) {
            self.memory.blocked_on_runtime = true;
            self.memory.progress.enter("network");
            let text = format!("network is not ready: {error}");
            berth_otel::record_exception(&text);
            self.memory.progress.fail(&text);
            self.context.events.record(EventRecord::warning(pod.id(), "NetworkNotReady", text));
            return Some(SyncResult::NetworkNotReady);
        }
        None
    }

    /// Records the results of the runtime's actions; returns when to sync next.
    fn conclude(&mut self, done: SyncOutcome, observed: Arc<ObservedPod>) -> SyncResult {
        let before = self.memory.failures.clone();
        for action in done.actions.iter().filter(|a| a.action == ActionKind::StartContainer) {
            match &action.failure {
                Some(failure) => {
                    let (reason, message) = (failure.reason.clone(), failure.message.clone());
                    self.memory
                        .failures
                        .insert(action.target.to_string(), berth_status::StartFailure { reason, message })
                }
                None => self.memory.failures.remove(&*action.target),
            };
        }
        if done.acted {
            self.memory.wanted = self.context.observer.action_completed(&self.memory.id.uid);
        }
        let failed = done.error_text();
        self.note_failure(failed.as_deref());
        self.report_resize_failure(&done);
        self.memory.hold = self.hold(failed.is_some(), done.retry_at, observed);
        if done.acted || done.reset || before != self.memory.failures {
            return SyncResult::SyncAgain;
        }
        match &self.memory.hold {
            Some(hold) => hold.end(hold.until.saturating_duration_since(Instant::now())),
            None => SyncResult::Settled,
        }
    }

    /// Back-off of actions: exactly until the back-off of an action ends, or, after an error, for the
    /// default delay. If the pod changes in the meantime the error back-off is shorter, growing
    /// exponentially.
    fn hold(&mut self, failed: bool, retry_at: Option<Instant>, seen: Arc<ObservedPod>) -> Option<ActionBackOff> {
        let now = Instant::now();
        if let Some(until) = retry_at {
            self.memory.failed_in_a_row = 0;
            return Some(ActionBackOff { until, soonest: now, seen, after: BackOffCause::BackOff });
        }
        if !failed {
            self.memory.failed_in_a_row = 0;
            return None;
        }
        let again = sync_delay::delay(&SyncResult::Failed, self.context.config.sync_frequency, rand::rng().random());
        let soonest = Duration::from_millis(200) * 2_u32.pow(self.memory.failed_in_a_row.min(6));
        self.memory.failed_in_a_row = self.memory.failed_in_a_row.saturating_add(1);
        Some(ActionBackOff { until: now + again, soonest: now + soonest.min(again), seen, after: BackOffCause::Error })
    }

    /// Remaining back-off of actions; `None` if they may proceed. A new message of the sync loop, or a
    /// changed observation, ends it early.
    fn remaining_backoff(&self, observed: &ObservedPod) -> Option<SyncResult> {
        let hold = self.memory.hold.as_ref().filter(|_| !self.update_pending)?;
        let changed = !same_content(&hold.seen, observed);
        let due = if changed { hold.soonest } else { hold.until };
        let left = due.saturating_duration_since(Instant::now());
        (!left.is_zero()).then(|| hold.end(left))
    }

    /// Records a failure, and logs it: an identical text at most once a minute.
    fn note_failure(&mut self, text: Option<&str>) {
        let Some(text) = text else {
            self.memory.last_failure = None;
            return;
        };
        self.memory.progress.fail(text);
        berth_otel::record_exception(text);
        let known = self.memory.last_failure.as_ref();
        if known.is_some_and(|(old, at)| old == text && at.elapsed() < Duration::from_secs(60)) {
            return;
        }
        error!(pod = %self.memory.id.object_name(), podUID = %self.memory.id.uid, err = %text, "Error syncing pod, skipping");
        self.memory.last_failure = Some((text.to_owned(), Instant::now()));
    }

    fn note_first_turn(&mut self, pod: &Pod) {
        if self.memory.begun {
            return;
        }
        self.memory.begun = true;
        self.context.metrics.containers_per_pod.observe(pod.containers().len() as f64);
        if let Some(seconds) = self.since_seen(pod) {
            self.context.metrics.worker_start.observe(seconds);
        }
    }

    fn note_running(&mut self, pod: &Pod, built: &api::PodStatus) {
        if self.memory.was_running || built.phase.as_deref() != Some("Running") {
            return;
        }
        self.memory.was_running = true;
        if let Some(seconds) = self.since_seen(pod) {
            self.context.metrics.pod_start.observe(seconds);
        }
    }

    fn since_seen(&self, pod: &Pod) -> Option<f64> {
        let seen: jiff::Timestamp = pod.annotation(ANNOTATION_SEEN)?.parse().ok()?;
        Some(self.context.clock.now().duration_since(seen).as_secs_f64().max(0.0))
    }
}
