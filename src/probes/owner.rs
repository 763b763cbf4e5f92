//! The one task of all probes: a wheel of their next moments, and the attempts that are under way.
//!
//! ```text
//!  orders ──────────┐                    ┌─► results, status, events, metrics
//!  wheel: a moment ─┼─► Turn (pure) ─────┤
//!  an attempt ended ┘                    └─► a task for an attempt, at most one per probe
//! ```
//!
//! An attempt is a task that ends with its probe; while it is under way its probe has no next moment. Moments that have
//! passed are dropped. Behaviour: spec 05 §1.2.

use std::{collections::HashMap, future::poll_fn, sync::Arc, time::Duration};

use rand::Rng;
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinError, JoinSet},
    time::Instant,
};
use tokio_util::{
    sync::CancellationToken,
    time::{DelayQueue, delay_queue},
};
use tracing::error;

use super::{
    attempt::{self, Ask, Asker},
    kind::{Declared, Kind, Pace, declared},
    manager::Known,
    outcome::Outcome,
    results::Results,
    seen::seen,
    turn::{Fixed, Next, Now, Turn},
};
use crate::{
    engine::ports::{Clock, Event, EventSink, ProbeResult, ProbedPods, Pulse},
    metrics::{ProbeMetrics, ProbedContainer},
    pod::{ContainerKind, Pod, PodUid, api},
};

/// What is asked for out of turn is asked for at most so often.
const BETWEEN_ASKED: Duration = Duration::from_secs(1);
/// What an earlier agent learnt of containers that nobody has begun to probe by then is forgotten.
const RESTORED_FOR: Duration = Duration::from_secs(600);

/// What the task is told.
#[derive(Debug)]
pub enum Order {
    /// Begin the probes of a pod; those that are there go on.
    Add(Arc<Pod>),
    /// End all but readiness.
    StopLiveness(PodUid),
    /// End all.
    Remove(PodUid),
}

/// What the task asks and tells.
pub struct Deps {
    /// Makes attempts.
    pub asker: Arc<dyn Asker>,
    /// How pods stand.
    pub pods: Arc<dyn ProbedPods>,
    /// Events.
    pub events: Arc<dyn EventSink>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Counts.
    pub metrics: ProbeMetrics,
    /// When the agent started, by the wall clock.
    pub started_at: jiff::Timestamp,
    /// Tells that the task lives.
    pub pulse: Pulse,
}

/// One probe.
struct Probe {
    pod: Arc<Pod>,
    container: Arc<str>,
    place: ContainerKind,
    turn: Turn,
    /// Its moments are whole periods after this.
    base: Instant,
    timer: Option<delay_queue::Key>,
    attempt: Option<(AbortHandle, Instant)>,
    /// It is asked for out of turn.
    is_asked: bool,
    asked_at: Option<Instant>,
}

type ProbeId = u64;
type Ended = (ProbeId, Outcome);

/// See the file's documentation.
pub struct Owner {
    deps: Deps,
    results: Arc<Results>,
    known: Arc<Known>,
    begun: Instant,
    probes: HashMap<ProbeId, Probe>,
    by_pod: HashMap<PodUid, Vec<ProbeId>>,
    last_id: ProbeId,
    wheel: DelayQueue<ProbeId>,
    attempts: JoinSet<Ended>,
}

impl Owner {
    /// Knows no pod yet.
    pub fn new(deps: Deps, results: Arc<Results>, known: Arc<Known>) -> Self {
        Self {
            deps,
            results,
            known,
            begun: Instant::now(),
            probes: HashMap::new(),
            by_pod: HashMap::new(),
            last_id: 0,
            wheel: DelayQueue::new(),
            attempts: JoinSet::new(),
        }
    }

    /// Runs until stopped. What is under way then is broken off, and forgotten by nobody.
    pub async fn run(
        mut self,
        mut orders: mpsc::UnboundedReceiver<Order>,
        mut asked: mpsc::Receiver<(PodUid, String)>,
        stop: CancellationToken,
    ) {
        let restored_until = tokio::time::sleep(RESTORED_FOR);
        tokio::pin!(restored_until);
        let mut holds_restored = true;
        loop {
            self.deps.pulse.rests();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some(order) = orders.recv() => self.on_order(order),
                Some((pod, container)) = asked.recv() => self.on_asked(&pod, &container),
                Some(ended) = self.attempts.join_next(), if !self.attempts.is_empty() => self.on_ended(ended),
                Some(due) = poll_fn(|context| self.wheel.poll_expired(context)), if !self.wheel.is_empty() => {
                    self.on_moment(due.into_inner());
                }
                () = &mut restored_until, if holds_restored => {
                    holds_restored = false;
                    self.results.forget_restored();
                }
            }
        }
    }

    fn on_order(&mut self, order: Order) {
        self.deps.pulse.works();
        match order {
            Order::Add(pod) => self.add(&pod),
            Order::StopLiveness(uid) => self.end_all(&uid, |kind| kind != Kind::Readiness),
            Order::Remove(uid) => self.end_all(&uid, |_| true),
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
            let delay = self.first_delay(&Pace::of(one.probe));
            self.probes.insert(id, self.probe(pod, &one, Instant::now() + delay));
            match delay.is_zero() {
                true => self.on_moment(id),
                false => self.schedule(id),
            }
        }
    }

    fn probe(&self, pod: &Arc<Pod>, one: &Declared<'_>, base: Instant) -> Probe {
        let fixed = Fixed {
            kind: one.kind,
            pace: Pace::of(one.probe),
            is_sidecar: Pod::is_sidecar(one.container),
            agent_started: self.deps.started_at,
        };
        Probe {
            pod: pod.clone(),
            container: one.container.name.as_str().into(),
            place: one.place,
            turn: Turn::new(fixed),
            base,
            timer: None,
            attempt: None,
            is_asked: false,
            asked_at: None,
        }
    }

    /// Soon after the agent's start all probes of the node begin: spread over their periods.
    fn first_delay(&self, pace: &Pace) -> Duration {
        let is_restart = pace.period > self.begun.elapsed();
        if is_restart { pace.period.mul_f64(rand::rng().random()) } else { Duration::ZERO }
    }

    fn on_asked(&mut self, pod: &PodUid, container: &str) {
        self.deps.pulse.works();
        let ids = self.by_pod.get(pod).map(Vec::as_slice).unwrap_or_default();
        let is_it = |probe: &Probe| *probe.container == *container && probe.kind() == Kind::Readiness;
        let Some(id) = ids.iter().copied().find(|id| self.probes.get(id).is_some_and(is_it)) else { return };
        if let Some(probe) = self.probes.get_mut(&id) {
            probe.is_asked = true;
        }
        self.schedule(id);
    }

    /// Puts a probe's next moment on the wheel; none while an attempt is under way.
    fn schedule(&mut self, id: ProbeId) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        if probe.attempt.is_some() {
            return;
        }
        let at = probe.next_moment(Instant::now());
        match &probe.timer {
            Some(timer) => self.wheel.reset_at(timer, at),
            None => probe.timer = Some(self.wheel.insert_at(id, at)),
        }
    }

    fn on_moment(&mut self, id: ProbeId) {
        self.deps.pulse.works();
        let Some(probe) = self.probes.get_mut(&id) else { return };
        probe.timer = None;
        let now = Instant::now();
        if std::mem::take(&mut probe.is_asked) {
            (probe.base, probe.asked_at) = (now, Some(now));
        }
        let status = self.deps.pods.status(probe.pod.uid());
        let ip = status.as_ref().and_then(|s| address(&probe.pod, &s.status));
        let pod = probe.pod.clone();
        let seen = probe
            .declared(&pod)
            .and_then(|one| Some(seen(&pod, &one, &status.as_ref()?.status, status.as_ref()?.restart_all)));
        let clocks = Now { uptime: now - self.begun, wall: self.deps.clock.now() };
        let step = probe.turn.begin(seen.as_ref(), clocks);
        let kind = probe.kind();
        if let Some(gone) = &step.forget {
            self.results.forget(gone, kind);
        }
        if let Some(instance) = probe.turn.instance() {
            self.results.seed(instance, kind, step.seed);
            if let Some(result) = step.set {
                // Whoever needs to know that nothing runs knows it from the runtime.
                self.results.set(instance, kind, result);
            }
        }
        match (step.next, probe.turn.instance().cloned()) {
            (Next::Stop, _) => self.end(id),
            (Next::Probe, Some(instance)) => {
                let ask = Ask { pod, container: probe.container.clone(), kind, id: instance, ip };
                let asker = self.deps.asker.clone();
                let handle = self.attempts.spawn(async move { (id, attempt::result(&*asker, &ask).await) });
                probe.attempt = Some((handle, now));
            }
            (Next::Probe | Next::Wait, _) => self.schedule(id),
        }
    }

    fn on_ended(&mut self, ended: Result<Ended, JoinError>) {
        self.deps.pulse.works();
        let (id, outcome) = match ended {
            Ok((id, outcome)) => (id, Some(outcome)),
            Err(failed) => {
                let is_it = |probe: &Probe| probe.attempt.as_ref().is_some_and(|(task, _)| task.id() == failed.id());
                let Some(id) = self.probes.iter().find(|(_, probe)| is_it(probe)).map(|(id, _)| *id) else { return };
                error!(err = %failed, "A probe's attempt has crashed");
                (id, None)
            }
        };
        let Some(probe) = self.probes.get_mut(&id) else { return };
        let begun = probe.attempt.take().map(|(_, begun)| begun);
        if let (Some(outcome), Some(begun)) = (outcome, begun) {
            self.take_in(id, &outcome, begun);
        }
        self.schedule(id);
    }

    fn take_in(&mut self, id: ProbeId, outcome: &Outcome, begun: Instant) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        let kind = probe.kind();
        if let Some(instance) = probe.turn.instance() {
            self.results.histories.add(instance, kind, outcome, self.deps.clock.now());
        }
        if let Some((reason, text)) = outcome.event(kind) {
            let event = Event::warning(probe.pod.id(), reason, text).at(probe.place.field_path(&probe.container));
            self.deps.events.record(event);
        }
        let Some(result) = outcome.result() else { return };
        let took = (result == ProbeResult::Success).then(|| begun.elapsed());
        self.deps.metrics.counted(kind.label(), &probe.labels(), took);
        let (Some(becomes), Some(instance)) = (probe.turn.count(result), probe.turn.instance()) else { return };
        if !self.results.set(instance, kind, becomes) {
            return;
        }
        let passed = becomes == ProbeResult::Success;
        match kind {
            Kind::Readiness => self.deps.pods.set_ready(&probe.pod, instance, passed),
            Kind::Startup => self.deps.pods.set_started(&probe.pod, instance, passed),
            Kind::Liveness if passed => return, // nobody doubted it
            Kind::Liveness => {}
        }
        self.deps.pods.wake(probe.pod.uid());
    }

    /// Ends a probe whose container will not come back by itself.
    fn end(&mut self, id: ProbeId) {
        let Some(probe) = self.remove(id) else { return };
        let uid = probe.pod.uid();
        if let Some(ids) = self.by_pod.get_mut(uid) {
            ids.retain(|other| *other != id);
        }
        self.known.may_begin_again(uid);
    }

    fn end_all(&mut self, uid: &PodUid, which: impl Fn(Kind) -> bool) {
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
        if let Some(timer) = &probe.timer {
            self.wheel.remove(timer);
        }
        if let Some((attempt, _)) = &probe.attempt {
            attempt.abort();
        }
        if let Some(instance) = probe.turn.instance() {
            self.results.forget(instance, probe.kind());
        }
        self.deps.metrics.forget(probe.kind().label(), &probe.labels());
        Some(probe)
    }
}

impl Probe {
    fn kind(&self) -> Kind {
        self.turn.fixed().kind
    }

    fn labels(&self) -> ProbedContainer<'_> {
        let pod = self.pod.id();
        ProbedContainer { container: &self.container, pod: &pod.name, namespace: &pod.namespace, uid: pod.uid.as_str() }
    }

    fn declared<'a>(&self, pod: &'a Pod) -> Option<Declared<'a>> {
        let (place, container) = pod.container(&self.container)?;
        Some(Declared { container, place, kind: self.kind(), probe: self.kind().of(container)? })
    }

    /// The first whole period that is still to come, or sooner where it is asked for.
    fn next_moment(&self, now: Instant) -> Instant {
        let period = self.turn.fixed().pace.period;
        let passed = now.saturating_duration_since(self.base);
        let regular = if now < self.base {
            self.base
        } else {
            let into = Duration::from_nanos((passed.as_nanos() % period.as_nanos().max(1)).try_into().unwrap_or(0));
            now + period.saturating_sub(into)
        };
        if !self.is_asked {
            return regular;
        }
        let soonest = self.asked_at.map_or(now, |at| (at + BETWEEN_ASKED).max(now));
        soonest.min(regular)
    }
}

/// Where a pod is asked. One in the node's network that knows no address of its own is asked on the node's.
fn address(pod: &Pod, status: &api::PodStatus) -> Option<String> {
    let told = status.pod_ip.clone().filter(|ip| !ip.is_empty());
    told.or_else(|| pod.is_host_network().then(|| "127.0.0.1".to_owned()))
}

#[cfg(test)]
mod tests;
