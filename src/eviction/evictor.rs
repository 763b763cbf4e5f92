//! Frees what is short: what nobody needs first, then one pod at a time. One task owns who is on the way out.
//! Behaviour: spec 05 §3.4 steps 8-13, §3.6-3.7.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{
    EvictionConfig,
    limits::{exceeded, has_limits},
    message::{Verdict, verdict},
    ports::{Missing, Needs, Pods, Reclaim},
    pressure::{grace, is_resolved, missing},
    rank::{is_exempt, rank},
    signals::{Layout, Moment, resource},
    usage::Candidate,
    watcher::Picture,
};
use berth_config::eviction::{Signal, Threshold};
use berth_metrics::EvictionMetrics;
use berth_ports::{Event, EventSink, Pulse};
use berth_types::{Pod, PodUid};

/// How often limits of pods are looked at, and how long nothing is tried again that could not be done.
const PERIOD: Duration = Duration::from_secs(10);
/// How long what could not be asked is left alone.
const RETRY: Duration = Duration::from_secs(1);
/// How long a pod that was evicted is waited for before another is thought of.
const GONE: Duration = Duration::from_secs(30);
/// How long a disk takes to show that something was removed from it: runtimes free in the background.
const SETTLE: Duration = Duration::from_secs(1);
/// How often pages of files are taken back before a pod has to go.
const TAKINGS: usize = 4;
/// How many of them may bring nothing where a hard threshold is met: who fills memory is faster.
const FRUITLESS: usize = 2;
/// How long they may take altogether then. A slow kernel needs most of it.
const TAKING: Duration = Duration::from_secs(2);
/// Seconds that are left to a pod where a hard threshold is met.
const SHORT: i64 = 1;
/// How long a fresh look is waited for.
const LOOK_PATIENCE: Duration = Duration::from_secs(15);

/// What the evictor needs of others.
pub struct EvictorDeps {
    /// The pods.
    pub pods: Arc<dyn Pods>,
    /// Frees what nobody needs.
    pub reclaim: Arc<dyn Reclaim>,
    /// Takes events.
    pub events: Arc<dyn EventSink>,
    /// What is counted.
    pub metrics: EvictionMetrics,
    /// Tells that the task lives.
    pub pulse: Pulse,
}

/// Evicts; see the module's documentation.
pub struct Evictor {
    config: Arc<EvictionConfig>,
    deps: EvictorDeps,
    began: Instant,
    pictures: watch::Receiver<Option<Arc<Picture>>>,
    /// Told to end and still there: they are not waited for again.
    stuck: HashSet<PodUid>,
    /// For which signals nothing could be done, and until when that is not tried again.
    held: BTreeMap<Signal, Instant>,
    limits_at: Instant,
    /// No pod was there that could have been evicted: it begins, and was told of none yet, or of critical ones only.
    is_alone: bool,
}

/// What a pass came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// Something is free now, or will be: look again at once.
    Freed,
    /// Nothing had to be done.
    Nothing,
    /// Nothing could be done for that signal; not again before that much time.
    Failed(Signal, Duration),
}

/// What a pass is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cause {
    Shortage,
    Limits,
}

impl Evictor {
    /// An evictor to run; `pictures` are the watcher's, of which moments count from `began`.
    pub fn new(
        config: Arc<EvictionConfig>,
        deps: EvictorDeps,
        pictures: watch::Receiver<Option<Arc<Picture>>>,
        began: Instant,
    ) -> Self {
        Self {
            config,
            deps,
            began,
            pictures,
            stuck: HashSet::new(),
            held: BTreeMap::new(),
            limits_at: Instant::now() + PERIOD,
            is_alone: false,
        }
    }

    /// Evicts until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.turn() => {}
            }
        }
    }

    async fn turn(&mut self) {
        let cause = self.wait().await;
        let outcome = match cause {
            Cause::Limits => {
                self.limits_at = Instant::now() + PERIOD;
                self.keep_limits().await
            }
            Cause::Shortage => self.relieve().await,
        };
        if let Outcome::Failed(signal, pause) = outcome {
            self.held.insert(signal, Instant::now() + pause);
        }
    }

    /// Waits until something is to be done.
    async fn wait(&mut self) -> Cause {
        loop {
            self.deps.pulse.works();
            let now = Instant::now();
            self.held.retain(|_, until| *until > now);
            if self.is_alone && self.deps.pods.active().iter().any(|pod| self.may_go(pod)) {
                // Of what is relieved first only: for the others it may be of no help, and nobody has to hurry.
                let picture = self.latest();
                let mut due = picture.due.iter().map(|(threshold, _)| threshold.signal);
                if let Some(first) = due.find(|signal| self.held.contains_key(signal)) {
                    self.held.remove(&first);
                }
                self.is_alone = false;
            }
            self.is_alone &= !self.held.is_empty();
            let (held, limits_at) = (self.held.clone(), self.limits_at);
            let is_due = |picture: &Option<Arc<Picture>>| {
                picture.as_ref().is_some_and(|picture| first_but(&held, picture).is_some())
            };
            let again = held.values().min().copied().unwrap_or_else(|| limits_at.max(now + PERIOD));
            let again = if self.is_alone { again.min(now + RETRY) } else { again };
            tokio::select! {
                biased;
                is_found = async { self.pictures.wait_for(is_due).await.is_ok() } => {
                    if is_found {
                        return Cause::Shortage;
                    }
                    std::future::pending::<()>().await; // the watcher is gone
                }
                () = sleep_until(limits_at), if self.config.local_storage => return Cause::Limits,
                () = sleep_until(again) => {}
            }
        }
    }

    /// Lets pods go that take more of the disk than they may.
    async fn keep_limits(&mut self) -> Outcome {
        let active = self.deps.pods.active();
        if !active.iter().any(|pod| has_limits(pod)) {
            return Outcome::Nothing;
        }
        // All that pods are held to lies on the node's disk.
        let candidates = self.unless_memory_is_short(Signal::NodeFs, self.candidates(active, Needs::Disks)).await;
        let Some(candidates) = candidates.flatten() else { return Outcome::Nothing };
        self.evict_exceeding(&candidates).await
    }

    async fn evict_exceeding(&mut self, candidates: &[Candidate]) -> Outcome {
        if !self.config.local_storage {
            return Outcome::Nothing;
        }
        let layout = self.latest().layout;
        let can_go = |candidate: &&Candidate| self.may_go(&candidate.pod);
        let found: Vec<(Arc<Pod>, Verdict)> = candidates
            .iter()
            .filter(can_go)
            .filter_map(|candidate| Some((candidate.pod.clone(), exceeded(candidate, layout)?)))
            .collect();
        if found.is_empty() {
            return Outcome::Nothing;
        }
        let gone = join_all(found.iter().map(|(pod, verdict)| self.evict(pod, verdict))).await;
        self.remember(found.iter().zip(gone).filter(|(_, is_gone)| !is_gone).map(|((pod, _), _)| pod.uid().clone()));
        // What was seen before they went says nothing any more.
        self.look_after(self.began.elapsed() + SETTLE).await;
        Outcome::Freed
    }

    /// Frees what the first threshold that is met calls for, of those for which something may be done.
    async fn relieve(&mut self) -> Outcome {
        let Some(signal) = first_but(&self.held, &self.latest()) else { return Outcome::Nothing };
        let needs = match signal {
            signal if is_memory(signal) => Needs::Memory,
            Signal::Pid => Needs::Processes,
            _ => Needs::DisksNow,
        };
        let active = self.deps.pods.active();
        let Some(candidates) = self.unless_memory_is_short(signal, self.candidates(active, needs)).await else {
            return Outcome::Nothing;
        };
        let Some(candidates) = candidates else { return Outcome::Failed(signal, RETRY) };
        if needs == Needs::DisksNow && self.evict_exceeding(&candidates).await == Outcome::Freed {
            return Outcome::Freed;
        }
        info!(resourceName = resource(signal), "Eviction manager: attempting to reclaim");
        let text = format!("Attempting to reclaim {}", resource(signal));
        self.deps.events.record(Event::node_warning("EvictionThresholdMet", text));
        let mut picture = self.latest();
        let Some(is_tried) = self.unless_memory_is_short(signal, self.reclaim(signal, picture.layout)).await else {
            return Outcome::Nothing;
        };
        if is_tried {
            picture = self.look_after(self.began.elapsed() + SETTLE).await;
            if is_relieved(&picture) {
                return Outcome::Freed;
            }
        }
        let (picture, candidates) = self.take_pages(signal, picture, candidates).await;
        if is_relieved(&picture) {
            return Outcome::Freed;
        }
        self.evict_one(signal, &picture, candidates).await
    }

    /// Does that for a signal, unless memory gets short beyond a hard threshold meanwhile, which waits for nothing else.
    /// Images that are being removed go all the same, and dead containers in another round.
    async fn unless_memory_is_short<T>(&self, signal: Signal, work: impl Future<Output = T>) -> Option<T> {
        let mut pictures = self.pictures.clone();
        let is_it =
            |(due, _): &(Threshold, Moment)| due.is_hard() && is_memory(due.signal) && !self.is_held(due.signal);
        let is_short = |picture: &Option<Arc<Picture>>| picture.as_ref().is_some_and(|p| p.due.iter().any(is_it));
        tokio::select! {
            biased;
            done = work => Some(done),
            Ok(_) = pictures.wait_for(is_short), if !is_memory(signal) => None,
        }
    }

    /// Has pages of files taken back as long as that helps; says how the node and its pods stand then.
    async fn take_pages(
        &mut self,
        signal: Signal,
        mut picture: Arc<Picture>,
        mut candidates: Vec<Candidate>,
    ) -> (Arc<Picture>, Vec<Candidate>) {
        let until = Instant::now() + TAKING;
        let mut fruitless = 0;
        // Who fills memory goes on meanwhile.
        for _ in 0..TAKINGS {
            let is_hard = picture.due.iter().any(|(due, _)| due.signal == signal && due.is_hard());
            if is_hard && (fruitless == FRUITLESS || Instant::now() >= until) {
                break;
            }
            let before = shortage(&picture, signal);
            let taken = self.take_back(signal, &picture, &mut candidates);
            let is_tried = if is_hard { timeout_at(until, taken).await.unwrap_or(true) } else { taken.await };
            if !is_tried {
                break;
            }
            picture = self.look_after(self.began.elapsed()).await;
            let after = shortage(&picture, signal);
            if after.is_none() {
                break;
            }
            fruitless = if after < before { 0 } else { fruitless + 1 };
            // Whose pages were taken is not the one who fills memory.
            let active = self.deps.pods.active();
            candidates = self.candidates(active, Needs::Memory).await.unwrap_or(candidates);
        }
        (picture, candidates)
    }

    /// Has pages of files taken back where they are what is missing: they count as used, and can be had. Says whether it
    /// was tried.
    async fn take_back(&self, signal: Signal, picture: &Picture, candidates: &mut [Candidate]) -> bool {
        let Some((bytes, least)) = shortage(picture, signal).filter(|_| is_memory(signal)) else { return false };
        rank(candidates, signal, picture.layout);
        let Some(worst) = candidates.iter().find(|candidate| !is_exempt(candidate)) else { return false };
        self.deps.pulse.works();
        let missing = Missing { bytes, least, of_machine: signal == Signal::Memory };
        let is_tried = self.deps.reclaim.page_cache(worst.pod.uid(), missing).await;
        if is_tried {
            info!(bytes, pod = %worst.pod.object_name(), "Eviction manager: page cache of pods was taken back");
        }
        is_tried
    }

    /// Frees what nobody needs, where that helps; says whether anything was tried.
    async fn reclaim(&self, signal: Signal, layout: Layout) -> bool {
        let (containers, images) = reclaims(signal, layout);
        self.deps.pulse.works();
        if containers && let Err(err) = self.deps.reclaim.containers().await {
            warn!(err, "Eviction manager: unexpected error when attempting to reclaim dead containers");
        }
        self.deps.pulse.works();
        if images && let Err(err) = self.deps.reclaim.images().await {
            warn!(err, "Eviction manager: unexpected error when attempting to reclaim images");
        }
        containers || images
    }

    /// Lets the first pod go that may; none where that signal calls for it no more.
    async fn evict_one(&mut self, signal: Signal, picture: &Picture, mut candidates: Vec<Candidate>) -> Outcome {
        let is_it = |due: &&(Threshold, Moment)| due.0.signal == signal;
        let Some((first, since)) = picture.due.iter().find(is_it) else { return Outcome::Freed };
        info!(resourceName = resource(signal), "Eviction manager: must evict pod(s) to reclaim");
        rank(&mut candidates, signal, picture.layout);
        let names: Vec<String> = candidates.iter().map(|candidate| candidate.pod.object_name()).collect();
        info!(pods = ?names, "Eviction manager: pods ranked for eviction");
        for (threshold, _) in &picture.due {
            let seen = picture.seen.get(&threshold.signal).map_or(picture.at, |seen| seen.at);
            self.deps.metrics.stats_age(threshold.signal.as_str(), self.began.elapsed().saturating_sub(seen));
        }
        let (its, others): (Vec<_>, Vec<_>) = picture.due.iter().partition(is_it);
        let due: Vec<Threshold> = its.into_iter().chain(others).map(|(threshold, _)| threshold.clone()).collect();
        for candidate in &candidates {
            let pod = &candidate.pod;
            if is_exempt(candidate) {
                info!(pod = %pod.object_name(), "Eviction manager: cannot evict a critical pod");
                continue;
            }
            if self.stuck.contains(pod.uid()) {
                continue;
            }
            let own = pod.spec().termination_grace_period_seconds;
            let grace = grace(first, self.config.max_pod_grace, own);
            let Some(verdict) = verdict(candidate, &due, &picture.seen, grace) else { break };
            self.deps.metrics.reacted(verdict.signal, self.began.elapsed().saturating_sub(*since));
            if !self.evict(pod, &verdict).await {
                self.remember([pod.uid().clone()].into_iter());
            }
            // What was seen before it went says nothing any more.
            let settle = if signal == Signal::Pid { Duration::ZERO } else { SETTLE };
            self.look_after(self.began.elapsed() + settle).await;
            return Outcome::Freed;
        }
        info!("Eviction manager: unable to evict any pods from the node");
        self.is_alone = !candidates.iter().any(|candidate| self.may_go(&candidate.pod));
        Outcome::Failed(signal, PERIOD)
    }

    /// Lets a pod go and waits until it is gone; says whether it is.
    async fn evict(&self, pod: &Arc<Pod>, verdict: &Verdict) -> bool {
        let event = Event::warning(pod.id(), "Evicted", verdict.message.clone());
        self.deps.events.record(event.annotated(verdict.annotations.iter().cloned()));
        self.deps.pulse.expects(Duration::from_secs(verdict.grace.max(0).unsigned_abs()).saturating_mul(2));
        match self.end(pod, verdict).await {
            Ok(()) => info!(pod = %pod.object_name(), "Eviction manager: pod is evicted successfully"),
            Err(err) => {
                let text = "Container runtime did not kill the pod within specified grace period.";
                self.deps.events.record(Event::warning(pod.id(), "ExceededGracePeriod", text));
                error!(pod = %pod.object_name(), err, "Eviction manager: pod failed to evict");
            }
        }
        self.deps.metrics.evicted(verdict.signal);
        let is_gone = timeout(GONE, self.deps.pods.gone(pod.uid())).await.is_ok();
        if !is_gone {
            info!(pod = %pod.object_name(), "Eviction manager: timed out waiting for pods to be cleaned up");
        }
        is_gone
    }

    /// Stops a pod. One that was given time has none left once a hard threshold is crossed, of whatever: nobody else is
    /// evicted meanwhile. Where nothing could be done for one, nobody has to hurry for it.
    async fn end(&self, pod: &Arc<Pod>, verdict: &Verdict) -> Result<(), String> {
        let mut pictures = self.pictures.clone();
        let may_help = |signal: Signal| signal.as_str() == verdict.signal || !self.is_held(signal);
        let is_hard = |(due, _): &(Threshold, Moment)| due.is_hard() && may_help(due.signal);
        let is_urgent = |picture: &Option<Arc<Picture>>| picture.as_ref().is_some_and(|p| p.due.iter().any(is_hard));
        tokio::select! {
            biased;
            ended = self.deps.pods.evict(pod, verdict) => return ended,
            Ok(_) = pictures.wait_for(is_urgent), if verdict.grace > SHORT => {}
        }
        info!(pod = %pod.object_name(), "Eviction manager: a hard threshold is met, the pod has to end at once");
        self.deps.pods.evict(pod, &Verdict { grace: SHORT, ..verdict.clone() }).await
    }

    /// Whether nothing is tried for that signal now; what holds may be over while something else is under way.
    fn is_held(&self, signal: Signal) -> bool {
        self.held.get(&signal).is_some_and(|until| *until > Instant::now())
    }

    /// Whether a pod may be told to go, and was not yet in vain.
    fn may_go(&self, pod: &Pod) -> bool {
        !pod.is_critical() && !self.stuck.contains(pod.uid())
    }

    fn remember(&mut self, stuck: impl Iterator<Item = PodUid>) {
        let active: HashSet<PodUid> = self.deps.pods.active().iter().map(|pod| pod.uid().clone()).collect();
        self.stuck.extend(stuck);
        self.stuck.retain(|uid| active.contains(uid));
    }

    /// Pods with what they take; `None` where that could not be asked.
    async fn candidates(&self, active: Vec<Arc<Pod>>, needs: Needs) -> Option<Vec<Candidate>> {
        let mut usages = match self.deps.pods.usages(needs).await {
            Ok(usages) => usages,
            Err(err) => {
                error!(err, "Eviction manager: failed to get summary stats");
                return None;
            }
        };
        let candidate = |pod: Arc<Pod>| Candidate { usage: usages.remove(pod.uid()), pod };
        Some(active.into_iter().map(candidate).collect())
    }

    fn latest(&self) -> Arc<Picture> {
        self.pictures.borrow().clone().unwrap_or_default()
    }

    /// How the node stands by a look that began later than that.
    async fn look_after(&mut self, at: Moment) -> Arc<Picture> {
        let is_later = |picture: &Option<Arc<Picture>>| picture.as_ref().is_some_and(|picture| picture.at > at);
        if timeout(LOOK_PATIENCE, self.pictures.wait_for(is_later)).await.is_err() {
            debug!("Eviction manager: no fresh look in time");
        }
        self.latest()
    }
}

/// What is to be relieved first, but for what is on hold.
fn first_but(held: &BTreeMap<Signal, Instant>, picture: &Picture) -> Option<Signal> {
    picture.due.iter().map(|(threshold, _)| threshold.signal).find(|signal| !held.contains_key(signal))
}

/// Whether the node is short of nothing any more, which is told.
fn is_relieved(picture: &Picture) -> bool {
    let is_resolved = is_resolved(&picture.thresholds, &picture.seen);
    if is_resolved {
        info!("Eviction manager: able to reduce resource pressure without evicting pods.");
    }
    is_resolved
}

/// What is missing of a signal, and what is to be left. A soft threshold whose grace has not passed calls for nothing yet.
fn shortage(picture: &Picture, signal: Signal) -> Option<(u64, u64)> {
    let due: Vec<Threshold> = picture.due.iter().map(|(threshold, _)| threshold.clone()).collect();
    missing(&due, &picture.seen, signal)
}

const fn is_memory(signal: Signal) -> bool {
    matches!(signal, Signal::Memory | Signal::AllocatableMemory)
}

/// What of the node's own helps with a signal: dead containers, images.
const fn reclaims(signal: Signal, layout: Layout) -> (bool, bool) {
    match (signal, layout) {
        (Signal::Memory | Signal::AllocatableMemory | Signal::Pid, _)
        | (Signal::NodeFs | Signal::NodeFsInodes, Layout::DedicatedImages) => (false, false),
        (Signal::ImageFs | Signal::ImageFsInodes, Layout::Split) => (false, true),
        (_, Layout::Split) => (true, false),
        _ => (true, true),
    }
}

#[cfg(test)]
mod tests;
