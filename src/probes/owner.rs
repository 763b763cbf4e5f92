//! The one task of all probes: a wheel of their next moments, and the attempts that are under way.
//!
//! ```text
//!  orders ──────────┐                    ┌─► results, status, events, metrics
//!  wheel: a moment ─┼─► Turn (pure) ─────┤
//!  an attempt ended ┘                    └─► an attempt, at most one per probe
//! ```
//!
//! An attempt ends with its probe; while it is under way its probe has no next moment. Moments that have passed are
//! dropped. Behaviour: spec 05 §1.2.
//!
//! What a probe costs a node at rest is above all waking up for it. So the moments of all probes lie on common marks
//! (`marks`), and attempts are polled by this task instead of being tasks of their own that other threads take. They
//! come last, so that what floods one of them (`stream`) keeps nobody from beginning, and none lives on what the runtime
//! lets a task do in a row: that one of them could use up for all.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    future::poll_fn,
    panic::AssertUnwindSafe,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    future::{AbortHandle, Abortable, BoxFuture},
    stream::FuturesUnordered,
};
use rand::Rng;
use tokio::{
    sync::mpsc,
    task::coop::unconstrained,
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, time::DelayQueue};
use tracing::error;

use super::{
    attempt::{self, Ask, Asker},
    kind::{Declared, Handler, Kind, Pace, declared},
    manager::Known,
    marks::{Marks, is_shared},
    outcome::Outcome,
    probe::{Probe, address},
    results::Results,
    seen::{Seen, seen},
    turn::{Fixed, Next, Now, Turn},
};
use crate::{
    engine::ports::{Clock, Event, EventSink, ProbeResult, ProbedPods, Pulse},
    metrics::{ProbeMetrics, ProbePaces, ProbedContainer},
    pod::{ContainerId, Pod, PodUid},
    sys::panics::said,
};

/// What an earlier agent learnt of containers that are not probed by then is forgotten, and after that as often.
const RESTORED_FOR: Duration = Duration::from_secs(600);

/// So many attempts of one moment begin together, and one more as each ends: what they need at the same time is memory
/// that stays with the agent…
const TOGETHER: usize = 8;
/// … and as many more after that, for nobody waits for those that hang.
const SOON: Duration = Duration::from_millis(2);

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
    /// Whether they are asked in time.
    pub paces: ProbePaces,
    /// When the agent started, by the wall clock.
    pub started_at: jiff::Timestamp,
    /// Tells that the task lives.
    pub pulse: Pulse,
}

type ProbeId = u64;
/// How an attempt ended: with an outcome, or with the text of its panic.
type Ended = (ProbeId, Result<Outcome, String>);

/// See the file's documentation.
pub struct Owner {
    deps: Deps,
    results: Arc<Results>,
    known: Arc<Known>,
    begun: Instant,
    marks: Marks,
    probes: HashMap<ProbeId, Probe>,
    by_pod: HashMap<PodUid, Vec<ProbeId>>,
    last_id: ProbeId,
    wheel: DelayQueue<ProbeId>,
    /// Those whose moment has come, and when the next of them begin at the latest.
    line: VecDeque<ProbeId>,
    line_moves_at: Instant,
    attempts: FuturesUnordered<BoxFuture<'static, Option<Ended>>>,
}

impl Owner {
    /// Knows no pod yet.
    pub fn new(deps: Deps, results: Arc<Results>, known: Arc<Known>) -> Self {
        Self {
            deps,
            results,
            known,
            begun: Instant::now(),
            marks: Marks::from(Instant::now()),
            probes: HashMap::new(),
            by_pod: HashMap::new(),
            last_id: 0,
            wheel: DelayQueue::new(),
            line: VecDeque::new(),
            line_moves_at: Instant::now(),
            attempts: FuturesUnordered::new(),
        }
    }

    /// Runs until stopped. What is under way then is broken off, and forgotten by nobody.
    pub async fn run(
        mut self,
        mut orders: mpsc::UnboundedReceiver<Order>,
        mut asked: mpsc::Receiver<(PodUid, String)>,
        stop: CancellationToken,
    ) {
        let (restored_until, stopped) = (tokio::time::sleep(RESTORED_FOR), stop.cancelled());
        // One timer for good, looked at again when it is over: whoever sets one to an earlier time wakes the runtime.
        let line_moves = sleep_until(self.line_moves_at);
        tokio::pin!(restored_until, stopped, line_moves);
        let mut holds_restored = true;
        loop {
            self.deps.pulse.rests();
            tokio::select! {
                biased;
                () = &mut stopped => return,
                Some(order) = orders.recv() => self.on_order(order),
                Some((pod, container)) = asked.recv() => self.on_asked(&pod, &container),
                () = &mut line_moves, if !self.line.is_empty() => {
                    if self.line_moves_at <= Instant::now() {
                        self.move_line(TOGETHER);
                    }
                    line_moves.as_mut().reset(self.line_moves_at);
                }
                due = poll_fn(|context| due(&mut self.wheel, context)) => self.on_moments(due),
                () = &mut restored_until, if holds_restored => {
                    holds_restored = self.forget_restored();
                    restored_until.as_mut().reset(Instant::now() + RESTORED_FOR);
                }
                Some(ended) = self.attempts.next(), if !self.attempts.is_empty() => {
                    if let Some((id, outcome)) = ended {
                        self.on_ended(id, outcome);
                    }
                    self.move_line(1);
                }
            }
        }
    }

    /// Forgets what an earlier agent learnt, but of those whose first moment is still to come; tells whether there are
    /// such.
    fn forget_restored(&self) -> bool {
        let to_come = self.probes.values().filter(|probe| probe.turn.instance().is_none());
        let instances: HashSet<ContainerId> =
            to_come.filter_map(|probe| Some(self.look(probe)?.0.instance?.id)).collect();
        self.results.forget_restored(|container| instances.contains(container))
    }

    /// How a probe's container stands, and where it is.
    fn look(&self, probe: &Probe) -> Option<(Seen, Option<String>)> {
        let known = self.deps.pods.status(probe.pod.uid())?;
        let seen = seen(&probe.pod, &probe.declared(&probe.pod)?, &known.status, known.restart_all);
        Some((seen, address(&probe.pod, &known.status)))
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
            let pace = Pace::of(one.probe);
            let (now, delay) = (Instant::now(), self.first_delay(&pace));
            let base = match delay.is_zero() {
                true => self.place(one.kind, now + pace.period, pace.period),
                false => self.marks.after(now + delay, pace.period),
            };
            self.probes.insert(id, self.probe(pod, &one, base));
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
        let (id, container) = (pod.id(), one.container.name.as_str());
        let labels = ProbedContainer { container, pod: &id.name, namespace: &id.namespace, uid: id.uid.as_str() };
        Probe {
            counter: self.deps.metrics.begin(one.kind.label(), &labels),
            pace: self.deps.paces.of(one.kind.label(), Handler::of(one.probe).label()),
            pod: pod.clone(),
            container: container.into(),
            place: one.place,
            handler: Handler::of(one.probe),
            turn: Turn::new(fixed),
            base,
            timer: None,
            in_line: None,
            attempt: None,
            is_asked: false,
            asked_at: None,
        }
    }

    /// Where the second moment of a probe that begins now lies.
    fn place(&self, kind: Kind, at: Instant, period: Duration) -> Instant {
        let alike = |probe: &&Probe| probe.turn.fixed().pace.period == period;
        let bases: Vec<Instant> = self.probes.values().filter(alike).map(|probe| probe.base).collect();
        let shared = |mark| bases.iter().filter(|base| is_shared(**base, mark, period)).count();
        self.marks.place(kind, at, period, shared)
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

    /// Puts a probe's next moment on the wheel; none while an attempt is under way or about to begin.
    fn schedule(&mut self, id: ProbeId) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        if probe.attempt.is_some() || probe.in_line.is_some() {
            return;
        }
        let at = probe.next_moment(Instant::now());
        match &probe.timer {
            Some(timer) => self.wheel.reset_at(timer, at),
            None => probe.timer = Some(self.wheel.insert_at(id, at)),
        }
    }

    /// Puts them in line, those alike one after the other; each has the same place every time.
    fn on_moments(&mut self, mut due: Vec<(ProbeId, Instant)>) {
        due.sort_unstable_by_key(|(id, _)| (self.probes.get(id).map(|probe| probe.handler), *id));
        for (id, at) in &due {
            if let Some(probe) = self.probes.get_mut(id) {
                (probe.timer, probe.in_line) = (None, Some(*at)); // it is not on the wheel any more
            }
        }
        let is_first = self.line.is_empty();
        self.line.extend(due.into_iter().map(|(id, _)| id));
        if is_first {
            self.move_line(TOGETHER);
        }
    }

    /// Begins the next so many attempts of those in line.
    fn move_line(&mut self, most: usize) {
        let before = self.attempts.len();
        while self.attempts.len() < before + most
            && let Some(id) = self.line.pop_front()
        {
            self.on_moment(id);
        }
        self.line_moves_at = Instant::now() + SOON;
    }

    fn on_moment(&mut self, id: ProbeId) {
        self.deps.pulse.works();
        let now = Instant::now();
        let asked = self.probes.get(&id).filter(|probe| probe.is_asked).map(|probe| *probe.turn.fixed());
        let restarted = asked.map(|fixed| self.place(fixed.kind, now + fixed.pace.period, fixed.pace.period));
        let (seen, ip) = self.probes.get(&id).and_then(|probe| self.look(probe)).unzip();
        let Some(probe) = self.probes.get_mut(&id) else { return };
        let due = probe.in_line.take().unwrap_or(now);
        if let Some(base) = restarted {
            (probe.base, probe.is_asked, probe.asked_at) = (base, false, Some(now));
        }
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
                let (pod, container) = (probe.pod.clone(), probe.container.clone());
                let ask = Ask { pod, container, kind, id: instance, ip: ip.flatten() };
                let asker = self.deps.asker.clone();
                let (handle, registration) = AbortHandle::new_pair();
                let under_way = probe.pace.begun(now.saturating_duration_since(due));
                let attempt = unconstrained(async move {
                    let _under_way = under_way;
                    attempt::result(&*asker, &ask).await
                });
                let attempt = AssertUnwindSafe(Abortable::new(attempt, registration)).catch_unwind();
                self.attempts.push(Box::pin(attempt.map(move |ended| match ended {
                    Ok(Ok(outcome)) => Some((id, Ok(outcome))),
                    Ok(Err(_aborted)) => None,
                    Err(panic) => Some((id, Err(said(&*panic)))),
                })));
                probe.attempt = Some((handle, now));
            }
            (Next::Probe | Next::Wait, _) => self.schedule(id),
        }
    }

    fn on_ended(&mut self, id: ProbeId, ended: Result<Outcome, String>) {
        self.deps.pulse.works();
        let Some(probe) = self.probes.get_mut(&id) else { return };
        let begun = probe.attempt.take().map(|(_, begun)| begun);
        match (ended, begun) {
            (Ok(outcome), Some(begun)) => self.take_in(id, &outcome, begun),
            (Err(panic), _) => error!(err = panic, "A probe's attempt has crashed"),
            (Ok(_), None) => {}
        }
        self.schedule(id);
    }

    fn take_in(&mut self, id: ProbeId, outcome: &Outcome, begun: Instant) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        let kind = probe.kind();
        if let Some(instance) = probe.turn.instance() {
            self.results.histories.add(instance, kind, outcome, self.deps.clock.now());
        }
        probe.log(outcome);
        if let Some((reason, text)) = outcome.event(kind) {
            let event = Event::warning(probe.pod.id(), reason, text).at(probe.place.field_path(&probe.container));
            self.deps.events.record(event);
        }
        let Some(result) = outcome.result() else { return };
        let took = (result == ProbeResult::Success).then(|| begun.elapsed());
        probe.counter.add(took);
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
        Some(probe)
    }
}

/// The probes whose moment has come, and when that was.
fn due(wheel: &mut DelayQueue<ProbeId>, context: &mut Context<'_>) -> Poll<Vec<(ProbeId, Instant)>> {
    let mut due = Vec::new();
    while let Poll::Ready(Some(expired)) = wheel.poll_expired(context) {
        due.push((*expired.get_ref(), expired.deadline()));
    }
    if due.is_empty() { Poll::Pending } else { Poll::Ready(due) }
}

#[cfg(test)]
mod tests;
