//! PLEG owner task: schedules pod queries and runtime lists.
//!
//! At most one query per pod is running; marks set in the meantime cost one more query after it.
//! Queries and lists are separate tasks with timeouts: this loop never waits for the runtime.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use tokio::{
    sync::{Notify, Semaphore, mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    ChangeKind, ContainerDied, Expect, Hint, PlegConfig,
    audit_list::{List, ListEnd, ListStart, list},
    changes,
    expectations::Expectations,
    hints::StreamState,
    inventory::Inventory,
    pod_query::PodQuerier,
    query_task::{QueryResult, QueryTask},
    store::{Mark, ObservationStore},
};
use berth_cri::CriError;
use berth_metrics::PlegMetrics;
use berth_ports::{Clock, LatestObservation, RuntimePods};
use berth_sys::backoff::Backoff;
use berth_types::{
    PodUid,
    observation::{Generation, ObservedPod},
};

/// Sender to a caller that waits for a complete list.
pub(super) type Waiter = oneshot::Sender<Result<RuntimePods, String>>;

/// How long hints about unknown or just started objects wait for a query that explains them anyway.
const SUSPICION: Duration = Duration::from_millis(200);
/// How long a runtime may take to clean up after a container before the pod is queried.
const CLEARING_UP: Duration = Duration::from_millis(100);
/// How long a worker may take to drop its view after it observed that the pod is gone.
const LETTING_GO: Duration = Duration::from_secs(1);
/// Maximum number of suspects; others are left to the list.
const SUSPECTS: usize = 1024;

/// Inputs of the task.
pub(super) struct Inbox {
    pub marked: mpsc::UnboundedReceiver<PodUid>,
    pub hints: mpsc::Receiver<Hint>,
    pub waiters: mpsc::Receiver<Waiter>,
    pub stream: watch::Receiver<StreamState>,
}

/// Start time of the last successful list, for health checks and waiters of the first list.
pub(super) type LastGood = Arc<watch::Sender<Option<Instant>>>;

/// Dependencies of the task.
pub(super) struct OwnerDeps {
    pub store: Arc<ObservationStore>,
    pub querier: Arc<PodQuerier>,
    pub config: PlegConfig,
    pub clock: Arc<dyn Clock>,
    pub metrics: PlegMetrics,
    pub died: Option<mpsc::Sender<ContainerDied>>,
    pub last_good: LastGood,
    pub recovered: Arc<Notify>,
}

/// State of one pod beyond its slot in the store.
#[derive(Default)]
struct PodRecord {
    last: Option<Arc<ObservedPod>>,
    /// Sequence number of the query that `last` came from, or of the running one.
    seq: u64,
    is_querying: bool,
    failures: u32,
    promised: Expectations,
}

#[derive(Default)]
struct Lists {
    /// Whether a list is running.
    is_running: bool,
    /// Whether the last list failed.
    is_failing: bool,
    next: Option<Instant>,
    last_start: Option<Instant>,
    /// Waiters of the running list.
    served: Vec<Waiter>,
    /// Waiters of the next list: they were added after the current one began.
    queued: Vec<Waiter>,
    /// Whether another list must follow the running one.
    is_wanted: bool,
    /// Shortened period after an audit found changes without an event.
    distrust: Option<Duration>,
}

/// State of the owner task; see the module documentation.
pub(super) struct Owner {
    tools: OwnerDeps,
    records: HashMap<PodUid, PodRecord>,
    inventory: Inventory,
    lists: Lists,
    /// Times at which pods are marked again.
    again: BTreeSet<(Instant, PodUid)>,
    /// Objects from hints, with the pod if the hint had one; examined at `suspects_due`.
    suspects: HashMap<String, Option<PodUid>>,
    suspects_due: Option<Instant>,
    /// Pods of which only a view is left; removed at `leaving_due`, or after a list.
    leaving: Vec<PodUid>,
    leaving_due: Option<Instant>,
    seq: u64,
    places: Arc<Semaphore>,
    queries: JoinSet<QueryResult>,
    listing: JoinSet<ListEnd>,
    stream: StreamState,
}

impl Owner {
    pub fn new(tools: OwnerDeps) -> Self {
        let places = Arc::new(Semaphore::new(tools.config.parallel_queries.max(1)));
        Self {
            tools,
            records: HashMap::new(),
            inventory: Inventory::default(),
            lists: Lists::default(),
            again: BTreeSet::new(),
            suspects: HashMap::new(),
            suspects_due: None,
            leaving: Vec::new(),
            leaving_due: None,
            seq: 0,
            places,
            queries: JoinSet::new(),
            listing: JoinSet::new(),
            stream: StreamState::default(),
        }
    }

    /// Runs until cancelled; running queries end with it.
    pub async fn run(mut self, mut inbox: Inbox, cancel: CancellationToken) {
        self.begin_list();
        loop {
            let wake = self.wake();
            tokio::select! {
                biased; // cancellation wins over work, results win over new marks
                () = cancel.cancelled() => return,
                Some(Ok(end)) = self.queries.join_next() => self.on_query_end(end),
                Some(Ok(end)) = self.listing.join_next() => self.listed(end),
                Some(uid) = inbox.marked.recv() => self.marked(uid),
                Some(hint) = inbox.hints.recv() => self.hinted(hint),
                Some(waiter) = inbox.waiters.recv() => self.asked(waiter),
                Ok(()) = inbox.stream.changed() => {
                    let state = *inbox.stream.borrow_and_update();
                    self.on_stream_change(state);
                }
                () = sleep_until(wake) => self.tick(Instant::now()),
            }
        }
    }

    fn wake(&self) -> Instant {
        let again = self.again.first().map(|(at, _)| *at);
        let times = [again, self.suspects_due, self.leaving_due, self.lists.next];
        times.into_iter().flatten().min().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600))
    }

    fn tick(&mut self, now: Instant) {
        while self.again.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, uid)) = self.again.pop_first() else { break };
            if self.records.get(&uid).is_some_and(|r| r.failures > 0 || !r.promised.is_empty()) {
                self.tools.store.mark(&uid, Mark::Changed);
            }
        }
        if self.suspects_due.is_some_and(|at| at <= now) {
            self.examine_suspects();
        }
        if self.leaving_due.is_some_and(|at| at <= now) {
            self.leaving_due = None;
            for uid in std::mem::take(&mut self.leaving) {
                self.forget(&uid);
            }
        }
        if self.lists.next.is_some_and(|at| at <= now) {
            self.begin_list();
        }
    }

    /// Removes a pod that is gone from the runtime, unless it has a view or a running query.
    fn forget(&mut self, uid: &PodUid) -> bool {
        let gone = |r: &PodRecord| !r.is_querying && r.last.as_ref().is_none_or(|pod| pod.is_absent());
        let forgotten = self.records.get(uid).is_some_and(gone) && self.tools.store.forget_unused(uid);
        if forgotten {
            self.records.remove(uid);
        }
        forgotten
    }

    fn marked(&mut self, uid: PodUid) {
        // A mark set during a query stays set: the next query follows that one.
        let is_querying = self.records.get(&uid).is_some_and(|r| r.is_querying);
        if !is_querying && self.tools.store.is_marked(&uid) {
            self.begin_query(uid);
        }
    }

    fn begin_query(&mut self, uid: PodUid) {
        self.seq += 1;
        let record = self.records.entry(uid.clone()).or_default();
        record.is_querying = true;
        record.seq = self.seq;
        let task = QueryTask {
            uid,
            last: record.last.clone(),
            store: self.tools.store.clone(),
            querier: self.tools.querier.clone(),
            clock: self.tools.clock.clone(),
            places: self.places.clone(),
            patience: self.tools.config.query_permit_timeout,
            deadline: self.tools.config.query_timeout,
        };
        self.queries.spawn(task.run());
    }

    fn on_query_end(&mut self, end: QueryResult) {
        self.tools.metrics.pod_relist_duration.observe(end.took.as_secs_f64());
        let uid = end.uid;
        let record = self.records.entry(uid.clone()).or_default();
        record.is_querying = false;
        match end.result {
            Ok(pod) => self.on_observation(&uid, Arc::new(pod)),
            Err(error) => self.failed(&uid, end.generation, error),
        }
        if self.tools.store.is_marked(&uid) {
            self.begin_query(uid);
        } else if self.records.get(&uid).is_some_and(|r| r.last.as_ref().is_none_or(|pod| pod.is_absent()))
            && !self.forget(&uid)
        {
            self.leaving.push(uid);
            self.leaving_due.get_or_insert_with(|| Instant::now() + LETTING_GO);
        }
    }

    fn on_observation(&mut self, uid: &PodUid, pod: Arc<ObservedPod>) {
        let Some(record) = self.records.get_mut(uid) else { return };
        let last = record.last.replace(pod.clone());
        record.failures = 0;
        let again = record.promised.check(&pod);
        self.inventory.replace(last.as_deref(), &pod);
        let seen = LatestObservation { pod: pod.clone(), generation: pod.generation, error: None };
        self.tools.store.publish(seen);
        if let Some(delay) = again {
            self.again.insert((Instant::now() + delay, uid.clone()));
        }
        self.report(last.as_deref(), &pod);
        self.count();
    }

    fn failed(&mut self, uid: &PodUid, generation: Generation, error: String) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.failures = record.failures.saturating_add(1);
        let config = &self.tools.config;
        let delay = Backoff::new(config.retry_first, config.retry_max).nth(record.failures - 1);
        self.again.insert((Instant::now() + delay, uid.clone()));
        let known = record.last.clone().or_else(|| self.tools.store.latest(uid));
        let Some(pod) = known else { return };
        if record.failures.is_power_of_two() {
            warn!(pod = %pod.id.object_name(), podUID = %uid, err = %error,
                attempts = record.failures, "Unable to retrieve pod status");
        }
        self.tools.store.publish(LatestObservation { pod, generation, error: Some(error.into()) });
    }

    /// Logs container events and reports dead containers to the pruner.
    fn report(&self, last: Option<&ObservedPod>, pod: &Arc<ObservedPod>) {
        for change in changes::between(last, pod) {
            let uid = &pod.id.uid;
            debug!(pod = %pod.id.object_name(), podUID = %uid,
                event = ?change.kind, containerID = %change.id, "SyncLoop (PLEG): event for pod");
            if change.kind != ChangeKind::ContainerDied {
                continue;
            }
            if let Some(code) = change.exit_code {
                info!(podID = %uid, containerID = %change.id, exitCode = code, "Generic (PLEG): container finished");
            }
            // Containers that were dead before the first observation are left to garbage collection.
            let Some(died) = self.tools.died.as_ref().filter(|_| last.is_some()) else { continue };
            let report = ContainerDied { pod: pod.clone(), container: change.container, id: change.id };
            if died.try_send(report).is_err() {
                self.tools.metrics.discarded.inc();
            }
        }
    }

    fn count(&self) {
        let totals = self.inventory.totals();
        self.tools.metrics.running_pods.set(totals.running_pods);
        for (gauge, count) in self.tools.metrics.running_containers.iter().zip(totals.containers) {
            gauge.set(count);
        }
    }
}

/// Lists.
impl Owner {
    fn begin_list(&mut self) {
        if self.lists.is_running {
            return;
        }
        self.seq += 1;
        let now = Instant::now();
        let start =
            ListStart { seq: self.seq, generation: self.tools.store.now(), at: now, wall: self.tools.clock.now() };
        let last_good = *self.tools.last_good.borrow();
        if let Some(last) = last_good {
            self.tools.metrics.relist_interval.observe((now - last).as_secs_f64());
        }
        self.lists.is_running = true;
        self.lists.is_wanted = false;
        self.lists.next = None;
        self.lists.last_start = Some(now);
        let queued = std::mem::take(&mut self.lists.queued);
        self.lists.served.extend(queued);
        let (cri, limit) = (self.tools.querier.cri.clone(), self.tools.config.list_deadline);
        let lost = || CriError::Invalid("list of the runtime's pods panicked".to_owned());
        self.listing.spawn(async move {
            let listing = AssertUnwindSafe(list(cri, start, limit)).catch_unwind();
            listing.await.unwrap_or_else(|_| ListEnd { start, result: Err(lost()) })
        });
    }

    fn listed(&mut self, end: ListEnd) {
        self.tools.metrics.relist_duration.observe(end.start.at.elapsed().as_secs_f64());
        self.lists.is_running = false;
        let answer = match end.result {
            Ok(list) => {
                self.audited(end.start, &list);
                Ok(())
            }
            Err(error) => {
                if !self.lists.is_failing {
                    warn!(err = %error, "Unable to list pods from the runtime");
                }
                self.lists.is_failing = true;
                Err(error.to_string())
            }
        };
        for waiter in self.lists.served.drain(..) {
            let known = answer.clone().map(|()| self.tools.store.known().unwrap_or_default());
            // The caller may have given up.
            let _ = waiter.send(known);
        }
        self.lists.next = Some(Instant::now() + self.period());
        if self.lists.is_wanted || !self.lists.queued.is_empty() {
            self.begin_list();
        }
    }

    fn audited(&mut self, start: ListStart, list: &List) {
        let mut differing = self.inventory.audit(list.objects());
        // A query that began later than this list is newer.
        differing.retain(|uid| self.records.get(uid).is_none_or(|r| r.seq < start.seq));
        let records = &self.records;
        let last = |uid: &PodUid| records.get(uid).and_then(|r| r.last.clone());
        let pods = list.pods(&differing, start, last);
        self.tools.store.listed(start.generation, start.wall, &list.pod_uids(), pods);
        let suspected: HashSet<&str> =
            list.objects().filter(|o| self.suspects.contains_key(o.id)).map(|o| o.pod).collect();
        self.distrust_stream(differing.iter().any(|uid| !suspected.contains(uid.as_str())));
        for uid in &differing {
            self.tools.store.mark(uid, Mark::Changed);
        }
        for uid in self.tools.store.sweep() {
            self.records.remove(&uid);
        }
        self.tools.last_good.send_replace(Some(start.at));
        let seconds = std::time::Duration::try_from(start.wall.duration_since(jiff::Timestamp::UNIX_EPOCH));
        self.tools.metrics.last_seen.set(seconds.unwrap_or_default().as_secs_f64());
        if std::mem::take(&mut self.lists.is_failing) {
            info!("Listing pods from the runtime succeeds again");
            self.tools.recovered.notify_one();
        }
        self.count();
    }

    /// An audit that finds changes without an event shortens the period of lists: to that of a node
    /// without a stream, doubling with each clean audit.
    fn distrust_stream(&mut self, has_missed: bool) {
        let shortest = self.tools.config.relist_period;
        self.lists.distrust = match self.lists.distrust {
            _ if !self.stream.is_live => None,
            _ if has_missed => Some(shortest),
            Some(period) => Some(period.saturating_mul(2)).filter(|p| *p < self.tools.config.audit_period),
            None => None,
        };
    }

    fn period(&self) -> Duration {
        let config = &self.tools.config;
        if self.stream.is_live && !self.lists.is_failing {
            self.lists.distrust.unwrap_or(config.audit_period)
        } else {
            config.relist_period
        }
    }

    fn asked(&mut self, waiter: Waiter) {
        self.lists.queued.push(waiter);
        self.begin_list();
    }

    /// A stream opened or broke: events may have been lost in either case.
    fn on_stream_change(&mut self, state: StreamState) {
        self.stream = state;
        self.lists.distrust = None;
        if self.lists.is_running {
            // The running list may be older than the lost events: run another one after it.
            self.lists.is_wanted = true;
        } else {
            self.begin_list();
        }
    }
}

/// Hints.
impl Owner {
    fn hinted(&mut self, hint: Hint) {
        let known = self.inventory.pod_of(&hint.object).cloned();
        let pod = known.or(hint.pod);
        let is_urgent = !matches!(hint.expect, Expect::Started);
        match pod {
            Some(uid) if is_urgent => {
                let is_known = self.inventory.state_of(&hint.object).is_some();
                let is_querying = self.records.get(&uid).is_some_and(|r| r.is_querying);
                if hint.expect == Expect::Gone && !is_known && !is_querying {
                    return; // a query has already shown it
                }
                let record = self.records.entry(uid.clone()).or_default();
                record.promised.add(&hint.object, hint.expect);
                if hint.expect == Expect::Stopping {
                    self.again.insert((Instant::now() + CLEARING_UP, uid));
                } else {
                    self.tools.store.mark(&uid, Mark::Changed);
                }
            }
            pod if self.suspects.len() < SUSPECTS => {
                self.suspects.insert(hint.object, pod);
                self.suspects_due.get_or_insert_with(|| Instant::now() + SUSPICION);
            }
            _ => {}
        }
    }

    /// Examines objects that no query has explained in the meantime: by a query if the pod is known,
    /// else by one list for all.
    fn examine_suspects(&mut self) {
        self.suspects_due = None;
        let mut wants_list = false;
        for (object, pod) in self.suspects.drain() {
            if self.inventory.state_of(&object).is_some_and(super::inventory::ObjectState::is_up) {
                continue;
            }
            match self.inventory.pod_of(&object).cloned().or(pod) {
                Some(uid) => self.tools.store.mark(&uid, Mark::Changed),
                None => wants_list = true,
            }
        }
        if wants_list {
            let soonest = self.lists.last_start.map_or_else(Instant::now, |at| at + self.tools.config.relist_period);
            let next = self.lists.next.map_or(soonest, |next| next.min(soonest));
            self.lists.next = (!self.lists.is_running).then_some(next);
        }
    }
}
