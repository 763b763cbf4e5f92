//! Kills containers and pods within their grace period (spec 03a §9).
//!
//! A grace period is a deadline, not a duration: hooks, the sidecar ordering, and the stop itself share
//! it, and a shorter grace period received meanwhile moves it forward for whichever of them is in
//! progress (spec 02a §14).

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use futures::{
    FutureExt, StreamExt,
    future::{self, BoxFuture},
    stream::FuturesUnordered,
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    actions::{self, ContainerKillReason},
    grace::{self, MINIMUM, StopFacts, whole_seconds},
    hooks::LifecycleHook,
    manager::RuntimeManager,
};
use berth_cri::CriResult;
use berth_ports::{
    ActionKind, ActionOutcome, ConcurrentStep, EventRecord, Grace, KillPod, PodProgress, StartFailure, SyncOutcome,
};
use berth_types::{
    ContainerId, Pod, PodRef,
    observation::{ObservedContainer, ObservedPod},
};

/// Source of a grace period.
pub(super) enum GraceSource {
    /// The container's definition.
    None,
    /// A fixed grace period.
    Fixed(Grace),
    /// A live grace period of the worker, which may shorten it; `None` means that of the definition.
    Live(watch::Receiver<Option<Grace>>),
}

/// A request to kill one container.
pub(super) struct KillRequest {
    pod: PodRef,
    id: ContainerId,
    name: Arc<str>,
    /// `None` if the definition is only known from the container's annotations.
    facts: Option<StopFacts>,
    /// Message of the event; `None` for `Stopping container N`.
    message: Option<String>,
    cause: ContainerKillReason,
    grace: GraceSource,
    turns: Option<Arc<SidecarOrdering>>,
}

impl KillRequest {
    /// The kill that the sync actions require.
    pub(super) fn of(pod: &Pod, kill: &actions::Kill) -> Self {
        Self {
            message: Some(kill.message.clone()),
            cause: kill.cause,
            ..Self::plain(pod, &kill.id, kill.name.as_str().into())
        }
    }

    /// A kill with the minimum grace period, for a container that is removed afterwards.
    pub(super) fn at_once(pod: &Pod, instance: &ObservedContainer) -> Self {
        let grace = GraceSource::Fixed(Grace(Duration::ZERO));
        Self { grace, ..Self::plain(pod, &instance.id, instance.name.clone()) }
    }

    fn plain(pod: &Pod, id: &ContainerId, name: Arc<str>) -> Self {
        Self {
            facts: StopFacts::from_spec(pod, &name),
            pod: pod.id().clone(),
            id: id.clone(),
            name,
            message: None,
            cause: ContainerKillReason::Unspecified,
            grace: GraceSource::None,
            turns: None,
        }
    }
}

/// Sidecar termination order: the containers that must be gone before a sidecar stops. Each container
/// signals when it is gone, whatever the result of its stop; a container that does not run is gone from
/// the start.
pub(super) struct SidecarOrdering {
    waits_for: HashMap<String, Vec<CancellationToken>>,
    gone: HashMap<String, CancellationToken>,
}

impl SidecarOrdering {
    fn new(pod: &Pod, observed: &ObservedPod) -> Self {
        let gone: HashMap<String, CancellationToken> =
            observed.running().map(|c| (c.name.to_string(), CancellationToken::new())).collect();
        let waits = |name: &str| {
            let names = grace::waits_for(pod, name);
            names.into_iter().filter_map(|n| gone.get(n).cloned()).collect::<Vec<_>>()
        };
        let waits_for = gone.keys().map(|name| (name.clone(), waits(name))).collect();
        Self { waits_for, gone }
    }

    async fn of(&self, name: &str) {
        for other in self.waits_for.get(name).into_iter().flatten() {
            other.cancelled().await;
        }
    }

    fn is_gone(&self, name: &str) {
        if let Some(token) = self.gone.get(name) {
            token.cancel();
        }
    }
}

/// A grace period in progress.
struct LiveGrace {
    deadline: Instant,
    /// The step whose deadline is the end of the grace period.
    step: ConcurrentStep,
    given: Option<watch::Receiver<Option<Grace>>>,
}

impl LiveGrace {
    /// `first` receives whether the period is not zero, and starts the first step.
    fn new(
        facts: &StopFacts,
        cause: ContainerKillReason,
        given: GraceSource,
        first: impl FnOnce(bool) -> ConcurrentStep,
    ) -> Self {
        let own = || Grace::of(facts.period(cause)).0;
        let (period, given) = match given {
            GraceSource::None => (own(), None),
            GraceSource::Fixed(grace) => (grace.0, None),
            GraceSource::Live(mut given) => {
                let now = *given.borrow_and_update();
                (now.map_or_else(own, |grace| grace.0), Some(given))
            }
        };
        Self { deadline: Instant::now() + period, step: first(!period.is_zero()), given }
    }

    /// Enters the next step, with the end of the grace period as its deadline.
    fn enter(&self, name: String) {
        self.step.enter_until(name, Some(self.deadline));
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The remaining grace period for the runtime: whole seconds, at least the minimum.
    fn for_runtime(&self) -> Duration {
        whole_seconds(self.left()).max(MINIMUM)
    }

    /// Waits until the deadline has moved forward; forever if it cannot move.
    async fn shortened(&mut self) {
        let Some(given) = &mut self.given else { return future::pending().await };
        loop {
            if given.changed().await.is_err() {
                return future::pending().await;
            }
            let Some(grace) = *given.borrow_and_update() else { continue };
            let deadline = Instant::now() + grace.0;
            if deadline < self.deadline {
                self.deadline = deadline;
                self.step.set_deadline(deadline);
                return;
            }
        }
    }

    /// Runs the work until the deadline, which may move forward; `None` if the deadline passes first.
    async fn within<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(work);
        loop {
            let deadline = self.deadline;
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = tokio::time::sleep_until(deadline) => return None,
                () = self.shortened() => {}
            }
        }
    }
}

impl RuntimeManager {
    /// Kills all containers of a pod, and waits for sandboxes that are still being created.
    pub(super) async fn kill_whole_pod(&self, request: KillPod) -> Result<(), String> {
        let limit = request.grace.borrow().map_or(MINIMUM, |grace| grace.0.max(MINIMUM));
        let (mut outcomes, late) =
            tokio::join!(self.kill_observed(&request), self.creates.late_sandboxes(&request.observed.id.uid, limit));
        for sandbox in late {
            outcomes.push(self.stop_sandboxes(&request.observed.id, [sandbox.as_str()]).await);
        }
        let outcome = SyncOutcome { actions: outcomes, ..SyncOutcome::default() };
        outcome.error_text().map_or(Ok(()), Err)
    }

    /// Kills all running containers in parallel, then stops every sandbox, including stopped ones:
    /// their network may not have been cleaned up.
    pub(super) async fn kill_observed(&self, request: &KillPod) -> Vec<ActionOutcome> {
        let observed = &request.observed;
        let turns =
            request.pod.as_ref().filter(|p| p.has_sidecars()).map(|p| Arc::new(SidecarOrdering::new(p, observed)));
        let kills = observed.running().map(|instance| {
            let order = KillRequest {
                pod: observed.id.clone(),
                id: instance.id.clone(),
                name: instance.name.clone(),
                facts: request.pod.as_ref().and_then(|pod| StopFacts::from_spec(pod, &instance.name)),
                message: None,
                cause: ContainerKillReason::Unspecified,
                grace: GraceSource::Live(request.grace.clone()),
                turns: turns.clone(),
            };
            async {
                let killed = self.kill_container(order, &observed.ips, &request.progress).await;
                outcome(ActionKind::KillContainer, &instance.name, "KillContainerError", killed)
            }
        });
        let mut outcomes = future::join_all(kills).await;
        if !observed.sandboxes.is_empty() {
            let step = request.progress.start_concurrent("StopPodSandbox");
            let stopped = self.stop_sandboxes(&observed.id, observed.sandboxes.iter().map(|s| s.id.as_str())).await;
            if stopped.failure.is_some() {
                step.fail();
            }
            outcomes.push(stopped);
        }
        outcomes
    }

    async fn stop_sandboxes<'a>(&self, pod: &PodRef, ids: impl IntoIterator<Item = &'a str>) -> ActionOutcome {
        let stops = ids.into_iter().map(|id| self.deps.cri.stop_pod_sandbox(id));
        let failed = future::join_all(stops).await.into_iter().filter_map(Result::err).find(|e| !e.is_not_found());
        outcome(ActionKind::KillPodSandbox, &pod.name, "KillPodSandboxError", failed.map_or(Ok(()), Err))
    }

    /// Stops one container: event, preStop hook, sidecar ordering, stop.
    pub(super) async fn kill_container(
        &self,
        order: KillRequest,
        ips: &[IpAddr],
        progress: &PodProgress,
    ) -> CriResult<()> {
        let KillRequest { pod, id, name, facts, message, cause, grace, turns } = order;
        let facts = match facts {
            Some(facts) => facts,
            None => self.facts_from_annotations(&id).await,
        };
        let first = |has_time: bool| match (&facts.pre_stop, &turns) {
            (Some(_), _) if has_time => progress.start_concurrent(format!("preStop hook of {name}")),
            (None, Some(_)) if has_time => progress.start_concurrent(format!("termination ordering of {name}")),
            _ => progress.start_concurrent(format!("StopContainer {name}")),
        };
        let mut grace = LiveGrace::new(&facts, cause, grace, first);
        let message = message.unwrap_or_else(|| format!("Stopping container {name}"));
        self.deps.events.record(at(EventRecord::normal(&pod, "Killing", message), &facts));
        info!(pod = %pod.object_name(), podUID = %pod.uid, containerName = %name, containerID = %id,
            gracePeriod = whole_seconds(grace.left()).as_secs(), "Killing container with a grace period");
        let mut late = None;
        if let Some(handler) = facts.pre_stop.as_ref().filter(|_| !grace.left().is_zero()) {
            grace.enter(format!("preStop hook of {name}"));
            let field_path = facts.field_path.as_deref();
            let hook =
                LifecycleHook { handler, pod: &pod, container: &name, id: &id, ips, ports: &facts.ports, field_path };
            late = self.pre_stop(hook, &facts, &mut grace).await;
        }
        if let Some(turns) = turns.as_ref().filter(|_| !grace.left().is_zero()) {
            grace.enter(format!("termination ordering of {name}"));
            grace.within(turns.of(&name)).await;
        }
        grace.enter(format!("StopContainer {name}"));
        // An overdue hook continues until the container is gone, so that its last actions are not lost.
        let stopped = run_with_overdue_hook(late, self.stop_container(&id, &mut grace)).await;
        if stopped.is_err() {
            grace.step.fail();
        }
        if let Some(turns) = turns {
            turns.is_gone(&name);
        }
        stopped
    }

    /// Runs the preStop hook within the grace period; returns the hook if it is still running then.
    async fn pre_stop<'a>(
        &'a self,
        hook: LifecycleHook<'a>,
        facts: &StopFacts,
        grace: &mut LiveGrace,
    ) -> Option<BoxFuture<'a, Result<(), String>>> {
        let mut running = async move { self.run_hook(&hook).await }.boxed();
        let failed = || {
            let event = EventRecord::warning(hook.pod, "FailedPreStopHook", "PreStopHook failed");
            self.deps.events.record(at(event, facts));
        };
        match grace.within(&mut running).await {
            Some(Ok(())) => {}
            Some(Err(message)) => {
                warn!(pod = %hook.pod.object_name(), podUID = %hook.pod.uid, containerName = hook.container,
                    containerID = %hook.id, err = message, "PreStop hook failed");
                failed();
            }
            None => {
                info!(pod = %hook.pod.object_name(), podUID = %hook.pod.uid, containerName = hook.container,
                    containerID = %hook.id, "PreStop hook not completed in grace period");
                if hook.handler.sleep.is_none() {
                    return Some(running);
                }
                // An interrupted sleep has failed, as upstream.
                self.deps.metrics.sleep_cut.inc();
                failed();
            }
        }
        None
    }

    /// Calls `StopContainer`, and again with a shorter timeout if the grace period is shortened. The
    /// first success counts.
    async fn stop_container(&self, id: &ContainerId, grace: &mut LiveGrace) -> CriResult<()> {
        let mut timeout = grace.for_runtime();
        let mut ends = Instant::now() + timeout;
        let mut calls = FuturesUnordered::new();
        calls.push(self.deps.cri.stop_container(id.as_str(), timeout));
        loop {
            tokio::select! {
                biased;
                answer = calls.next() => match answer {
                    Some(Err(err)) if err.is_not_found() => return Ok(()),
                    Some(Err(err)) if calls.is_empty() => return Err(err),
                    Some(Err(err)) => debug!(containerID = %id, %err, "One of several StopContainer calls failed"),
                    Some(Ok(())) | None => return Ok(()),
                },
                () = grace.shortened() => {
                    timeout = grace.for_runtime();
                    if Instant::now() + timeout < ends {
                        ends = Instant::now() + timeout;
                        info!(containerID = %id, gracePeriod = timeout.as_secs(), "Shortening grace period of container");
                        calls.push(self.deps.cri.stop_container(id.as_str(), timeout));
                    }
                }
            }
        }
    }

    /// Facts from the annotations of a container of an unknown pod; defaults if it is gone.
    async fn facts_from_annotations(&self, id: &ContainerId) -> StopFacts {
        match self.deps.cri.container_status(id.as_str()).await {
            Ok(status) => StopFacts::from_annotations(&status.annotations),
            Err(err) => {
                debug!(containerID = %id, %err, "Failed to read container annotations");
                StopFacts::default()
            }
        }
    }
}

/// Runs `work` to completion, and an overdue hook concurrently.
async fn run_with_overdue_hook<T>(
    mut late: Option<BoxFuture<'_, Result<(), String>>>,
    work: impl Future<Output = T>,
) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        let ended = async {
            match late.as_mut() {
                Some(hook) => hook.await,
                None => future::pending().await,
            }
        };
        tokio::select! {
            biased;
            done = &mut work => return done,
            ended = ended => {
                late = None;
                if let Err(message) = ended {
                    info!(err = message, "PreStop hook failed after its grace period");
                }
            }
        }
    }
}

fn at(event: EventRecord, facts: &StopFacts) -> EventRecord {
    match &facts.field_path {
        Some(path) => event.at(path.clone()),
        None => event,
    }
}

fn outcome(action: ActionKind, target: &str, reason: &str, result: CriResult<()>) -> ActionOutcome {
    let failure = result.err().map(|e| StartFailure { reason: reason.to_owned(), message: e.to_string() });
    ActionOutcome { action, target: target.into(), failure }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Regression test e2e F3.
    #[tokio::test(start_paused = true)]
    async fn a_late_hook_goes_on_until_its_container_is_gone() {
        let sleep = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
        for (hook, stop, ends) in [(3, 4, true), (5, 4, false)] {
            let (has_ended, began) = (AtomicBool::new(false), Instant::now());
            let late = async {
                sleep(hook).await;
                has_ended.store(true, Ordering::Relaxed);
                Err("no".to_owned())
            };
            run_with_overdue_hook(Some(late.boxed()), sleep(stop)).await;
            assert_eq!((has_ended.load(Ordering::Relaxed), began.elapsed().as_secs()), (ends, stop));
        }
    }

    #[tokio::test]
    async fn a_grace_without_end_has_one() {
        // The longest duration in Go's nanoseconds, which runtimes use.
        let most = Duration::from_nanos(i64::MAX.unsigned_abs());
        let facts = StopFacts { termination: Some(i64::MAX), ..StopFacts::default() };
        let live = GraceSource::Live(watch::channel(Some(Grace::from_secs(i64::MAX))).1);
        for given in [GraceSource::None, live] {
            let step = PodProgress::new().start_concurrent("StopContainer main");
            let timeout = LiveGrace::new(&facts, ContainerKillReason::Unspecified, given, |_| step).for_runtime();
            assert!(timeout > most / 10 && timeout < most, "{timeout:?}");
        }
    }
}
