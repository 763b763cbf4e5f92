//! Probe scheduler: one task that owns all probes and their attempts in flight.
//!
//! ```text
//!  commands, triggers ┐                          ┌─► results, status, events, metrics
//!  timer: due ────────┼─► state_machine (pure) ──┤
//!  an attempt ended ──┘                          └─► an attempt, at most one per probe
//! ```
//!
//! An attempt ends with its probe; while it is in flight, its probe has no scheduled attempt. Missed attempts are
//! dropped. Implements spec 05 §1.2.
//!
//! The main cost of probes on an idle node is waking up, so attempts of all probes are aligned to a common grid
//! (`time_grid`). Attempts are tasks. A semaphore bounds how many start at the same time, because the memory that they
//! need then stays with the agent; an attempt returns its permit after 20 ms, so probes that hang do not delay others.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    panic::AssertUnwindSafe,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use rand::Rng;
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{
    attempt::{self, ProbeRequest, Prober},
    kind::{ProbeKind, ProbeTiming, declared},
    manager::RegisteredPods,
    outcome::Outcome,
    pod_observation::{PodObservation, seen},
    probe::{CachedObservation, Probe, address},
    results::Results,
    state_machine::{ClockReading, Next},
    time_grid::Schedule,
};
use berth_metrics::{ProbeMetrics, ProbeTimeliness, ProbeTimelinessMetrics};
use berth_ports::{Clock, EventRecord, EventSink, ProbeResult, ProbedPods, TaskLiveness};
use berth_sys::panics::panic_message;
use berth_types::{ContainerId, Pod, PodUid};

/// Interval after which results of an earlier agent are dropped if their container is not probed by then.
const RESTORED_FOR: Duration = Duration::from_secs(600);

/// Maximum number of attempts that have a permit at the same time.
const PERMITS: usize = 64;
/// Maximum time that an attempt keeps its permit.
const PERMIT_TIME: Duration = Duration::from_millis(20);

/// Order to the task.
#[derive(Debug)]
pub enum ProbeCommand {
    /// Starts the probes of a pod; existing ones continue.
    Add(Arc<Pod>),
    /// Ends all probes except readiness.
    StopLiveness(PodUid),
    /// Ends all probes.
    Remove(PodUid),
}

/// Dependencies of the task.
pub struct ProbeDeps {
    /// Makes attempts.
    pub asker: Arc<dyn Prober>,
    /// Statuses of pods.
    pub pods: Arc<dyn ProbedPods>,
    /// Receives events.
    pub events: Arc<dyn EventSink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Probe metrics.
    pub metrics: ProbeMetrics,
    /// Metrics of the delay of attempts.
    pub paces: ProbeTimelinessMetrics,
    /// Start of the agent, by the wall clock.
    pub started_at: jiff::Timestamp,
    /// Reports that the task is alive.
    pub liveness: TaskLiveness,
}

type ProbeId = u64;

/// A completed attempt.
struct AttemptResult {
    id: ProbeId,
    /// Start of the attempt.
    begun: Instant,
    /// Its outcome, or the text of its panic.
    outcome: Result<Outcome, String>,
}

/// The task that owns all probes; see the module's documentation.
pub struct ProbeScheduler {
    deps: ProbeDeps,
    results: Arc<Results>,
    known: Arc<RegisteredPods>,
    begun: Instant,
    schedule: Schedule,
    probes: HashMap<ProbeId, Probe>,
    by_pod: HashMap<PodUid, Vec<ProbeId>>,
    last_id: ProbeId,
    /// Scheduled attempts.
    moments: BTreeSet<(Instant, ProbeId)>,
    permits: Arc<Semaphore>,
    attempts: JoinSet<AttemptResult>,
}

impl ProbeScheduler {
    /// Creates the task's state, without pods.
    pub fn new(deps: ProbeDeps, results: Arc<Results>, known: Arc<RegisteredPods>) -> Self {
        Self {
            deps,
            results,
            known,
            begun: Instant::now(),
            schedule: Schedule::starting(Instant::now()),
            probes: HashMap::new(),
            by_pod: HashMap::new(),
            last_id: 0,
            moments: BTreeSet::new(),
            permits: Arc::new(Semaphore::new(PERMITS)),
            attempts: JoinSet::new(),
        }
    }

    /// Runs until stopped. Attempts in flight are then aborted; results are kept.
    pub async fn run(
        mut self,
        mut orders: mpsc::UnboundedReceiver<ProbeCommand>,
        mut asked: mpsc::Receiver<(PodUid, String)>,
        stop: CancellationToken,
    ) {
        let (restored_until, stopped) = (tokio::time::sleep(RESTORED_FOR), stop.cancelled());
        tokio::pin!(restored_until, stopped);
        let mut holds_restored = true;
        loop {
            self.deps.liveness.mark_idle();
            let next = self.moments.first().map(|(at, _)| *at);
            tokio::select! {
                biased;
                () = &mut stopped => return,
                Some(order) = orders.recv() => self.on_order(order),
                Some((pod, container)) = asked.recv() => self.on_trigger(&pod, &container),
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => self.on_due(),
                () = &mut restored_until, if holds_restored => {
                    holds_restored = self.forget_restored();
                    restored_until.as_mut().reset(Instant::now() + RESTORED_FOR);
                }
                // An aborted attempt has no result.
                Some(ended) = self.attempts.join_next() => ended.into_iter().for_each(|ended| self.on_ended(ended)),
            }
        }
    }

    /// Drops results of an earlier agent, except those of containers whose first attempt is still scheduled; returns
    /// whether any remain.
    fn forget_restored(&self) -> bool {
        let to_come = self.probes.values().filter(|probe| probe.turn.instance().is_none());
        let instances: HashSet<ContainerId> =
            to_come.filter_map(|probe| Some(Self::observe(&*self.deps.pods, probe)?.0.instance?.id)).collect();
        self.results.forget_restored(|container| instances.contains(container))
    }

    /// Observation of a probe's container, and the pod's address; `None` if the pod has no status.
    fn observe(pods: &dyn ProbedPods, probe: &Probe) -> Option<(PodObservation, Option<String>)> {
        let known = pods.status(probe.pod.uid())?;
        let seen = seen(&probe.pod, &probe.declared(&probe.pod)?, &known.status, known.restart_all);
        Some((seen, address(&probe.pod, &known.status)))
    }

    fn on_order(&mut self, order: ProbeCommand) {
        self.deps.liveness.report_progress();
        match order {
            ProbeCommand::Add(pod) => self.add(&pod),
            ProbeCommand::StopLiveness(uid) => self.end_all(&uid, |kind| kind != ProbeKind::Readiness),
            ProbeCommand::Remove(uid) => self.end_all(&uid, |_| true),
        }
    }

    fn add(&mut self, pod: &Arc<Pod>) {
        for one in declared(pod) {
            let ids = self.by_pod.entry(pod.uid().clone()).or_default();
            let is_same = |id: &ProbeId| {
                self.probes.get(id).is_some_and(|p| *p.container == *one.container.name && p.kind() == one.kind)
            };
            if ids.iter().any(is_same) {
                continue;
            }
            self.last_id += 1;
            ids.push(self.last_id);
            let id = self.last_id;
            let pace = ProbeTiming::of(one.probe);
            let (now, delay) = (Instant::now(), self.first_delay(&pace));
            let base = match delay.is_zero() {
                true => self.schedule.at_or_after(now + pace.period, pace.period),
                false => self.schedule.at_or_before(now + delay, pace.period),
            };
            self.probes.insert(id, Probe::new(pod, &one, base, &self.deps));
            match delay.is_zero() {
                true => self.on_moment(id, now),
                false => self.schedule(id),
            }
        }
    }

    /// Initial delay. All probes of a node start soon after the agent: spreads them over their periods.
    fn first_delay(&self, pace: &ProbeTiming) -> Duration {
        let is_restart = pace.period > self.begun.elapsed();
        if is_restart { pace.period.mul_f64(rand::rng().random()) } else { Duration::ZERO }
    }

    fn on_trigger(&mut self, pod: &PodUid, container: &str) {
        self.deps.liveness.report_progress();
        let ids = self.by_pod.get(pod).map(Vec::as_slice).unwrap_or_default();
        let is_it = |probe: &Probe| {
            *probe.container == *container
                && match probe.kind() {
                    ProbeKind::Readiness => true,
                    // An additional attempt would let it fail sooner than its period and threshold allow.
                    ProbeKind::Startup => {
                        let seen = Self::observe(&*self.deps.pods, probe).and_then(|(seen, _)| seen.instance);
                        seen.is_some_and(|instance| probe.turn.instance() != Some(&instance.id))
                    }
                    ProbeKind::Liveness => false,
                }
        };
        let asked: Vec<ProbeId> = ids.iter().copied().filter(|id| self.probes.get(id).is_some_and(is_it)).collect();
        for id in asked {
            if let Some(probe) = self.probes.get_mut(&id) {
                probe.is_triggered = true;
            }
            self.schedule(id);
        }
    }

    /// Schedules a probe's next attempt; none while an attempt is in flight.
    fn schedule(&mut self, id: ProbeId) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        if probe.attempt.is_some() {
            return;
        }
        let at = probe.next_attempt(Instant::now());
        if let Some(before) = probe.next_attempt_at.replace(at) {
            self.moments.remove(&(before, id));
        }
        self.moments.insert((at, id));
    }

    fn on_due(&mut self) {
        let now = Instant::now();
        while let Some((due, id)) = self.moments.first().copied().filter(|(at, _)| *at <= now) {
            self.moments.pop_first();
            if let Some(probe) = self.probes.get_mut(&id) {
                probe.next_attempt_at = None;
                self.on_moment(id, due);
            }
        }
    }

    /// Handles a scheduled attempt of a probe; `due` is the scheduled time.
    fn on_moment(&mut self, id: ProbeId, due: Instant) {
        self.deps.liveness.report_progress();
        let now = Instant::now();
        let asked = self.probes.get(&id).filter(|probe| probe.is_triggered).map(|probe| *probe.turn.fixed());
        let restarted = asked.map(|fixed| self.schedule.at_or_after(now + fixed.pace.period, fixed.pace.period));
        let Some(probe) = self.probes.get_mut(&id) else { return };
        // Read before the status: a change meanwhile causes another read.
        let changes = self.deps.pods.changes();
        let observation = match probe.last_observation.take() {
            Some(cached) if cached.changes == changes => cached,
            before => {
                let found = Self::observe(&*self.deps.pods, probe);
                // Most changes are those of other pods.
                let ask = before.filter(|cached| cached.found == found).and_then(|cached| cached.ask);
                CachedObservation { changes, found, ask }
            }
        };
        let observation = probe.last_observation.insert(observation);
        probe.retry_at = None;
        if let Some(base) = restarted {
            (probe.base, probe.is_triggered, probe.triggered_at) = (base, false, Some(now));
        }
        let clocks = ClockReading { uptime: now - self.begun, wall: self.deps.clock.now() };
        let step = probe.turn.begin(observation.found.as_ref().map(|(seen, _)| seen), clocks);
        let kind = probe.turn.fixed().kind;
        if let Some(gone) = &step.forget {
            self.results.forget(gone, kind);
            (probe.last_published, probe.runs) = (None, None);
        }
        if let Some(instance) = probe.turn.instance() {
            self.results.seed(instance, kind, step.seed);
            if let Some(result) = step.set {
                // Nothing is woken: that no container runs is known from the runtime.
                self.results.set(instance, kind, result);
                probe.last_published = Some(result);
            }
        }
        match (step.next, probe.turn.instance()) {
            (Next::Stop, _) => self.end(id),
            (Next::Probe, Some(instance)) => {
                let make = || {
                    let ip = observation.found.as_ref().and_then(|(_, ip)| ip.clone());
                    Arc::new(ProbeRequest::new(probe.pod.clone(), probe.container.clone(), kind, instance.clone(), ip))
                };
                let ask = observation.ask.get_or_insert_with(make).clone();
                let attempt = attempt(id, due, self.deps.asker.clone(), ask, self.permits.clone(), probe.pace.clone());
                probe.attempt = Some(self.attempts.spawn(attempt));
            }
            (Next::Probe | Next::Wait, _) => self.schedule(id),
        }
    }

    fn on_ended(&mut self, AttemptResult { id, begun, outcome }: AttemptResult) {
        self.deps.liveness.report_progress();
        let Some(probe) = self.probes.get_mut(&id) else { return };
        probe.attempt = None;
        match outcome {
            Ok(outcome) => self.apply_outcome(id, &outcome, begun),
            Err(panic) => error!(err = panic, "Probe attempt panicked"),
        }
        self.schedule(id);
    }

    fn apply_outcome(&mut self, id: ProbeId, outcome: &Outcome, begun: Instant) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        let kind = probe.kind();
        if let Some(instance) = probe.turn.instance() {
            let runs = probe.runs.get_or_insert_with(|| self.results.histories.begin(instance, kind));
            runs.add(outcome, self.deps.clock.now());
        }
        probe.log(outcome);
        let now = Instant::now();
        if outcome.result() != Some(ProbeResult::Success)
            && let Some(pause) = probe.turn.early_failure(begun - self.begun, now - self.begun)
        {
            probe.retry_at = Some(now + pause);
            return;
        }
        if let Some((reason, text)) = outcome.event(kind) {
            let event = EventRecord::warning(probe.pod.id(), reason, text).at(probe.place.field_path(&probe.container));
            self.deps.events.record(event);
        }
        let Some(result) = outcome.result() else { return };
        let took = (result == ProbeResult::Success).then(|| begun.elapsed());
        probe.counter.add(took);
        let (Some(becomes), Some(instance)) = (probe.turn.count(result), probe.turn.instance()) else { return };
        if probe.last_published.replace(becomes) == Some(becomes) || !self.results.set(instance, kind, becomes) {
            return;
        }
        let passed = becomes == ProbeResult::Success;
        match kind {
            ProbeKind::Readiness => self.deps.pods.set_ready(&probe.pod, instance, passed),
            ProbeKind::Startup => self.deps.pods.set_started(&probe.pod, instance, passed),
            ProbeKind::Liveness if passed => return, // liveness was success by default
            ProbeKind::Liveness => {}
        }
        self.deps.pods.wake(probe.pod.uid());
    }

    /// Ends a probe whose container does not restart.
    fn end(&mut self, id: ProbeId) {
        let Some(probe) = self.remove(id) else { return };
        let uid = probe.pod.uid();
        if let Some(ids) = self.by_pod.get_mut(uid) {
            ids.retain(|other| *other != id);
        }
        self.known.mark_partly_started(uid);
    }

    fn end_all(&mut self, uid: &PodUid, which: impl Fn(ProbeKind) -> bool) {
        let Some(ids) = self.by_pod.remove(uid) else { return };
        let (gone, stay): (Vec<_>, Vec<_>) =
            ids.into_iter().partition(|id| self.probes.get(id).is_none_or(|probe| which(probe.kind())));
        for id in gone {
            self.remove(id);
        }
        if !stay.is_empty() {
            self.by_pod.insert(uid.clone(), stay);
        }
    }

    fn remove(&mut self, id: ProbeId) -> Option<Probe> {
        let probe = self.probes.remove(&id)?;
        if let Some(at) = probe.next_attempt_at {
            self.moments.remove(&(at, id));
        }
        if let Some(attempt) = &probe.attempt {
            attempt.abort();
        }
        if let Some(instance) = probe.turn.instance() {
            self.results.forget(instance, probe.kind());
        }
        Some(probe)
    }
}

/// Makes one attempt, once a permit is available.
async fn attempt(
    id: ProbeId,
    due: Instant,
    asker: Arc<dyn Prober>,
    ask: Arc<ProbeRequest>,
    permits: Arc<Semaphore>,
    pace: ProbeTimeliness,
) -> AttemptResult {
    let permit = permits.acquire().await;
    let begun = Instant::now();
    let _in_flight = pace.begun(begun.saturating_duration_since(due));
    let mut work = pin!(AssertUnwindSafe(attempt::result(&*asker, &ask)).catch_unwind());
    let outcome = match timeout(PERMIT_TIME, &mut work).await {
        Ok(outcome) => outcome,
        Err(_) => {
            drop(permit);
            work.await
        }
    };
    AttemptResult { id, begun, outcome: outcome.map_err(|panic| panic_message(&*panic)) }
}

#[cfg(test)]
mod tests;
