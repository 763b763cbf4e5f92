//! The one task of all probes: their next moments, and the attempts that are under way.
//!
//! ```text
//!  orders ──────────┐                    ┌─► results, status, events, metrics
//!  alarm: a moment ─┼─► Turn (pure) ─────┤
//!  an attempt ended ┘                    └─► an attempt, at most one per probe
//! ```
//!
//! An attempt ends with its probe; while it is under way its probe has no next moment. Moments that have passed are
//! dropped. Behaviour: spec 05 §1.2.
//!
//! What a probe costs a node at rest is above all waking up for it. So the moments of all probes lie on common marks
//! (`marks`), one timer is set for the next of them (`alarm`), and attempts are polled by this task instead of being
//! tasks of their own that other threads take; those that end together are taken in together. They
//! come last, so that what floods one of them (`stream`) keeps nobody from beginning, and none lives on what the runtime
//! lets a task do in a row: that one of them could use up for all.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
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
use tokio::{sync::mpsc, task::coop::unconstrained, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{
    alarm::Alarm,
    attempt::{self, Ask, Asker},
    kind::{Handler, Kind, Pace, declared},
    manager::Known,
    marks::{Marks, is_shared},
    outcome::Outcome,
    probe::{Look, Probe, address},
    results::Results,
    seen::{Seen, seen},
    turn::{Next, Now},
};
use berth_metrics::{ProbeMetrics, ProbePaces};
use berth_ports::{Clock, Event, EventSink, ProbeResult, ProbedPods, Pulse};
use berth_sys::panics::said;
use berth_types::{ContainerId, Pod, PodUid};

/// What an earlier agent learnt of containers that are not probed by then is forgotten, and after that as often.
const RESTORED_FOR: Duration = Duration::from_secs(600);

/// So many attempts of one moment begin together, and as many more when these have ended: what they need at the same
/// time is memory that stays with the agent, and answers that come together are read together…
const TOGETHER: usize = 8;
/// … or after that, for nobody waits for those that hang.
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
    /// Their next moments.
    moments: BTreeSet<(Instant, ProbeId)>,
    /// Those whose moment has come; when the next of them begin at the latest, and when no more attempts than that are
    /// under way.
    line: VecDeque<ProbeId>,
    line_moves_at: Instant,
    line_moves_from: usize,
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
            moments: BTreeSet::new(),
            line: VecDeque::new(),
            line_moves_at: Instant::now(),
            line_moves_from: 0,
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
        tokio::pin!(restored_until, stopped);
        let (mut holds_restored, mut alarm) = (true, Alarm::new());
        loop {
            self.deps.pulse.rests();
            let next = self.next_moment();
            tokio::select! {
                biased;
                () = &mut stopped => return,
                Some(order) = orders.recv() => self.on_order(order),
                Some((pod, container)) = asked.recv() => self.on_asked(&pod, &container),
                () = poll_fn(|context| alarm.poll(next, context)) => self.on_alarm(),
                () = &mut restored_until, if holds_restored => {
                    holds_restored = self.forget_restored();
                    restored_until.as_mut().reset(Instant::now() + RESTORED_FOR);
                }
                ended = poll_fn(|context| ended(&mut self.attempts, context)) => {
                    ended.into_iter().flatten().for_each(|(id, outcome)| self.on_ended(id, outcome));
                    if self.attempts.len() <= self.line_moves_from {
                        self.move_line();
                    }
                }
            }
        }
    }

    /// Forgets what an earlier agent learnt, but of those whose first moment is still to come; tells whether there are
    /// such.
    fn forget_restored(&self) -> bool {
        let to_come = self.probes.values().filter(|probe| probe.turn.instance().is_none());
        let instances: HashSet<ContainerId> =
            to_come.filter_map(|probe| Some(Self::look(&*self.deps.pods, probe)?.0.instance?.id)).collect();
        self.results.forget_restored(|container| instances.contains(container))
    }

    /// How a probe's container stands, and where it is.
    fn look(pods: &dyn ProbedPods, probe: &Probe) -> Option<(Seen, Option<String>)> {
        let known = pods.status(probe.pod.uid())?;
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
                false => self.marks.anywhere(now + delay, pace.period),
            };
            self.probes.insert(id, Probe::new(pod, &one, base, &self.deps));
            match delay.is_zero() {
                true => self.on_moment(id),
                false => self.schedule(id),
            }
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
        let is_it = |probe: &Probe| {
            *probe.container == *container
                && match probe.kind() {
                    Kind::Readiness => true,
                    // More often it would fail sooner than its period and threshold allow.
                    Kind::Startup => {
                        let seen = Self::look(&*self.deps.pods, probe).and_then(|(seen, _)| seen.instance);
                        seen.is_some_and(|instance| probe.turn.instance() != Some(&instance.id))
                    }
                    Kind::Liveness => false,
                }
        };
        let asked: Vec<ProbeId> = ids.iter().copied().filter(|id| self.probes.get(id).is_some_and(is_it)).collect();
        for id in asked {
            if let Some(probe) = self.probes.get_mut(&id) {
                probe.is_asked = true;
            }
            self.schedule(id);
        }
    }

    /// Sets a probe's next moment; none while an attempt is under way or about to begin.
    fn schedule(&mut self, id: ProbeId) {
        let Some(probe) = self.probes.get_mut(&id) else { return };
        if probe.attempt.is_some() || probe.in_line.is_some() {
            return;
        }
        let at = probe.next_moment(Instant::now());
        if let Some(before) = probe.moment.replace(at) {
            self.moments.remove(&(before, id));
        }
        self.moments.insert((at, id));
    }

    /// When there is something to do next, whatever happens: a probe's moment, or that of those in line.
    fn next_moment(&self) -> Option<Instant> {
        let line = (!self.line.is_empty()).then_some(self.line_moves_at);
        let first = self.moments.first().map(|(at, _)| *at);
        line.into_iter().chain(first).min()
    }

    fn on_alarm(&mut self) {
        let now = Instant::now();
        if !self.line.is_empty() && self.line_moves_at <= now {
            self.move_line();
        }
        let mut due = Vec::with_capacity(TOGETHER);
        while let Some(moment) = self.moments.first().copied().filter(|(at, _)| *at <= now) {
            self.moments.pop_first();
            due.push(moment);
        }
        if !due.is_empty() {
            self.on_moments(due);
        }
    }

    /// Puts them in line, those alike one after the other; each has the same place every time.
    fn on_moments(&mut self, due: Vec<(Instant, ProbeId)>) {
        let mut next: Vec<(Handler, ProbeId)> = Vec::with_capacity(due.len());
        for (at, id) in due {
            if let Some(probe) = self.probes.get_mut(&id) {
                (probe.moment, probe.in_line) = (None, Some(at));
                next.push((probe.handler, id));
            }
        }
        next.sort_unstable();
        let is_first = self.line.is_empty();
        self.line.extend(next.into_iter().map(|(_, id)| id));
        if is_first {
            self.move_line();
        }
    }

    /// Begins the attempts of the next in line.
    fn move_line(&mut self) {
        self.line_moves_from = self.attempts.len();
        while self.attempts.len() < self.line_moves_from + TOGETHER
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
        let Some(probe) = self.probes.get_mut(&id) else { return };
        // Before the look: what changes meanwhile is looked at again.
        let changes = self.deps.pods.changes();
        let look = match probe.look.take() {
            Some(look) if look.changes == changes => look,
            before => {
                let found = Self::look(&*self.deps.pods, probe);
                // Most changes are those of other pods.
                let ask = before.filter(|look| look.found == found).and_then(|look| look.ask);
                Look { changes, found, ask }
            }
        };
        let look = probe.look.insert(look);
        let due = probe.in_line.take().unwrap_or(now);
        probe.retry_at = None;
        if let Some(base) = restarted {
            (probe.base, probe.is_asked, probe.asked_at) = (base, false, Some(now));
        }
        let clocks = Now { uptime: now - self.begun, wall: self.deps.clock.now() };
        let step = probe.turn.begin(look.found.as_ref().map(|(seen, _)| seen), clocks);
        let kind = probe.turn.fixed().kind;
        if let Some(gone) = &step.forget {
            self.results.forget(gone, kind);
            (probe.told, probe.runs) = (None, None);
        }
        if let Some(instance) = probe.turn.instance() {
            self.results.seed(instance, kind, step.seed);
            if let Some(result) = step.set {
                // Whoever needs to know that nothing runs knows it from the runtime.
                self.results.set(instance, kind, result);
                probe.told = Some(result);
            }
        }
        match (step.next, probe.turn.instance()) {
            (Next::Stop, _) => self.end(id),
            (Next::Probe, Some(instance)) => {
                let make = || {
                    let ip = look.found.as_ref().and_then(|(_, ip)| ip.clone());
                    Arc::new(Ask::new(probe.pod.clone(), probe.container.clone(), kind, instance.clone(), ip))
                };
                let ask = look.ask.get_or_insert_with(make).clone();
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
            let event = Event::warning(probe.pod.id(), reason, text).at(probe.place.field_path(&probe.container));
            self.deps.events.record(event);
        }
        let Some(result) = outcome.result() else { return };
        let took = (result == ProbeResult::Success).then(|| begun.elapsed());
        probe.counter.add(took);
        let (Some(becomes), Some(instance)) = (probe.turn.count(result), probe.turn.instance()) else { return };
        if probe.told.replace(becomes) == Some(becomes) || !self.results.set(instance, kind, becomes) {
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
        if let Some(at) = probe.moment {
            self.moments.remove(&(at, id));
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

/// Some of the attempts that have ended, `None` for one that was broken off.
fn ended(
    attempts: &mut FuturesUnordered<BoxFuture<'static, Option<Ended>>>,
    context: &mut Context<'_>,
) -> Poll<Vec<Option<Ended>>> {
    let mut ended = Vec::new();
    while ended.len() < TOGETHER
        && let Poll::Ready(Some(one)) = attempts.poll_next_unpin(context)
    {
        ended.reserve_exact(TOGETHER - ended.len());
        ended.push(one);
    }
    if ended.is_empty() { Poll::Pending } else { Poll::Ready(ended) }
}

#[cfg(test)]
mod tests;
