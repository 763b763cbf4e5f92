//! Evictor: reclaims node-level resources first, then evicts one pod at a time.
//!
//! One task owns the list of pods whose eviction timed out. Implements spec 05 §3.4 steps 8-13, §3.6-3.7.

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
    message::{EvictionVerdict, verdict},
    pod_ranking::{is_exempt, rank},
    ports::{MemoryShortage, Pods, Reclaim, UsageScope},
    pressure::{grace, is_resolved, missing},
    signals::{Layout, Uptime, resource},
    usage::Candidate,
    watcher::NodeSnapshot,
};
use berth_config::eviction::{Signal, Threshold};
use berth_metrics::EvictionMetrics;
use berth_ports::{EventRecord, EventSink, TaskLiveness};
use berth_types::{Pod, PodUid};

/// Period of the check of local storage limits; also how long a signal is suspended for which no pod could be evicted.
const PERIOD: Duration = Duration::from_secs(10);
/// Delay before usage is read again after a failed read.
const RETRY: Duration = Duration::from_secs(1);
/// Timeout for the cleanup of an evicted pod, before another one is considered.
const GONE: Duration = Duration::from_secs(30);
/// Delay until a disk shows freed space: runtimes delete in the background.
const SETTLE: Duration = Duration::from_secs(1);
/// Maximum number of page cache reclaims before a pod is evicted.
const TAKINGS: usize = 4;
/// Maximum number of consecutive reclaims without effect while a hard threshold is met: the workload that fills memory
/// is faster.
const FRUITLESS: usize = 2;
/// Deadline for all reclaims together while a hard threshold is met. A slow kernel needs most of it.
const TAKING: Duration = Duration::from_secs(2);
/// Grace period in seconds while a hard threshold is met.
const SHORT: i64 = 1;
/// Timeout for a fresh observation of the watcher.
const OBSERVATION_TIMEOUT: Duration = Duration::from_secs(15);

/// Dependencies of the evictor.
pub struct EvictorDeps {
    /// The pods of this node.
    pub pods: Arc<dyn Pods>,
    /// Reclaims resources that nothing uses.
    pub reclaim: Arc<dyn Reclaim>,
    /// Receives events.
    pub events: Arc<dyn EventSink>,
    /// Eviction metrics.
    pub metrics: EvictionMetrics,
    /// Reports that the task is alive.
    pub liveness: TaskLiveness,
}

/// Evictor of this node; see the module's documentation.
pub struct Evictor {
    config: Arc<EvictionConfig>,
    deps: EvictorDeps,
    began: Instant,
    pictures: watch::Receiver<Option<Arc<NodeSnapshot>>>,
    /// Pods whose cleanup timed out: they are not waited for again.
    stuck: HashSet<PodUid>,
    /// Signals for which nothing could be done, each with the time until which it is suspended.
    suspended: BTreeMap<Signal, Instant>,
    limits_at: Instant,
    /// No evictable pod existed: the agent starts and knows no pod yet, or critical pods only.
    has_no_evictable_pod: bool,
}

/// Result of an eviction pass: whether to evaluate again or suspend a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PassResult {
    /// Resources were freed or will be: evaluate again immediately.
    Freed,
    /// Nothing had to be done.
    Nothing,
    /// Nothing could be done for that signal; it is suspended for that duration.
    Failed(Signal, Duration),
}

/// Trigger of an eviction pass: a threshold that is met, or the periodic check of local storage limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PassReason {
    Shortage,
    Limits,
}

impl Evictor {
    /// Creates an evictor to run. `pictures` are the watcher's observations, whose moments count from `began`.
    pub fn new(
        config: Arc<EvictionConfig>,
        deps: EvictorDeps,
        pictures: watch::Receiver<Option<Arc<NodeSnapshot>>>,
        began: Instant,
    ) -> Self {
        Self {
            config,
            deps,
            began,
            pictures,
            stuck: HashSet::new(),
            suspended: BTreeMap::new(),
            limits_at: Instant::now() + PERIOD,
            has_no_evictable_pod: false,
        }
    }

    /// Evicts until `stop` is cancelled.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.run_pass() => {}
            }
        }
    }

    async fn run_pass(&mut self) {
        let cause = self.wait().await;
        let outcome = match cause {
            PassReason::Limits => {
                self.limits_at = Instant::now() + PERIOD;
                self.enforce_limits().await
            }
            PassReason::Shortage => self.reclaim_or_evict().await,
        };
        if let PassResult::Failed(signal, pause) = outcome {
            self.suspended.insert(signal, Instant::now() + pause);
        }
    }

    /// Waits until a threshold is due or limits have to be checked.
    async fn wait(&mut self) -> PassReason {
        loop {
            self.deps.liveness.report_progress();
            let now = Instant::now();
            self.suspended.retain(|_, until| *until > now);
            if self.has_no_evictable_pod && self.deps.pods.active().iter().any(|pod| self.is_evictable(pod)) {
                // Resumes only the signal that ranks first: the new pods may not help with the others, and those can
                // wait.
                let picture = self.latest();
                let mut due = picture.due.iter().map(|(threshold, _)| threshold.signal);
                if let Some(first) = due.find(|signal| self.suspended.contains_key(signal)) {
                    self.suspended.remove(&first);
                }
                self.has_no_evictable_pod = false;
            }
            self.has_no_evictable_pod &= !self.suspended.is_empty();
            let (suspended, limits_at) = (self.suspended.clone(), self.limits_at);
            let is_due = |picture: &Option<Arc<NodeSnapshot>>| {
                picture.as_ref().is_some_and(|picture| first_not_suspended(&suspended, picture).is_some())
            };
            let again = suspended.values().min().copied().unwrap_or_else(|| limits_at.max(now + PERIOD));
            let again = if self.has_no_evictable_pod { again.min(now + RETRY) } else { again };
            tokio::select! {
                biased;
                is_found = async { self.pictures.wait_for(is_due).await.is_ok() } => {
                    if is_found {
                        return PassReason::Shortage;
                    }
                    std::future::pending::<()>().await; // the watcher has ended
                }
                () = sleep_until(limits_at), if self.config.local_storage => return PassReason::Limits,
                () = sleep_until(again) => {}
            }
        }
    }

    /// Evicts pods that exceed their limits on local storage.
    async fn enforce_limits(&mut self) -> PassResult {
        let active = self.deps.pods.active();
        if !active.iter().any(|pod| has_limits(pod)) {
            return PassResult::Nothing;
        }
        // All limits of pods apply to the node's file system.
        let candidates = self.unless_memory_is_short(Signal::NodeFs, self.candidates(active, UsageScope::Disks)).await;
        let Some(candidates) = candidates.flatten() else { return PassResult::Nothing };
        self.evict_exceeding(&candidates).await
    }

    async fn evict_exceeding(&mut self, candidates: &[Candidate]) -> PassResult {
        if !self.config.local_storage {
            return PassResult::Nothing;
        }
        let layout = self.latest().layout;
        let can_go = |candidate: &&Candidate| self.is_evictable(&candidate.pod);
        let found: Vec<(Arc<Pod>, EvictionVerdict)> = candidates
            .iter()
            .filter(can_go)
            .filter_map(|candidate| Some((candidate.pod.clone(), exceeded(candidate, layout)?)))
            .collect();
        if found.is_empty() {
            return PassResult::Nothing;
        }
        let gone = join_all(found.iter().map(|(pod, verdict)| self.evict(pod, verdict))).await;
        self.mark_stuck(found.iter().zip(gone).filter(|(_, is_gone)| !is_gone).map(|((pod, _), _)| pod.uid().clone()));
        // Observations from before the evictions are outdated.
        self.wait_for_observation(self.began.elapsed() + SETTLE).await;
        PassResult::Freed
    }

    /// Frees resources for the first threshold that is met and not suspended.
    async fn reclaim_or_evict(&mut self) -> PassResult {
        let Some(signal) = first_not_suspended(&self.suspended, &self.latest()) else { return PassResult::Nothing };
        let needs = match signal {
            signal if is_memory(signal) => UsageScope::Memory,
            Signal::Pid => UsageScope::Processes,
            _ => UsageScope::DisksNow,
        };
        let active = self.deps.pods.active();
        let Some(candidates) = self.unless_memory_is_short(signal, self.candidates(active, needs)).await else {
            return PassResult::Nothing;
        };
        let Some(candidates) = candidates else { return PassResult::Failed(signal, RETRY) };
        if needs == UsageScope::DisksNow && self.evict_exceeding(&candidates).await == PassResult::Freed {
            return PassResult::Freed;
        }
        info!(resourceName = resource(signal), "Eviction manager: attempting to reclaim");
        let text = format!("Attempting to reclaim {}", resource(signal));
        self.deps.events.record(EventRecord::node_warning("EvictionThresholdMet", text));
        let mut picture = self.latest();
        let Some(is_tried) = self.unless_memory_is_short(signal, self.reclaim(signal, picture.layout)).await else {
            return PassResult::Nothing;
        };
        if is_tried {
            picture = self.wait_for_observation(self.began.elapsed() + SETTLE).await;
            if is_relieved(&picture) {
                return PassResult::Freed;
            }
        }
        let (picture, candidates) = self.reclaim_page_cache(signal, picture, candidates).await;
        if is_relieved(&picture) {
            return PassResult::Freed;
        }
        self.evict_one(signal, &picture, candidates).await
    }

    /// Runs `work` for a signal; returns `None` if a hard memory threshold is met meanwhile, which takes precedence.
    /// An image removal that has begun still completes; dead containers are removed in another pass.
    async fn unless_memory_is_short<T>(&self, signal: Signal, work: impl Future<Output = T>) -> Option<T> {
        let mut pictures = self.pictures.clone();
        let is_it =
            |(due, _): &(Threshold, Uptime)| due.is_hard() && is_memory(due.signal) && !self.is_suspended(due.signal);
        let is_short = |picture: &Option<Arc<NodeSnapshot>>| picture.as_ref().is_some_and(|p| p.due.iter().any(is_it));
        tokio::select! {
            biased;
            done = work => Some(done),
            Ok(_) = pictures.wait_for(is_short), if !is_memory(signal) => None,
        }
    }

    /// Reclaims page cache as long as that helps; returns the resulting observation and candidates.
    async fn reclaim_page_cache(
        &mut self,
        signal: Signal,
        mut picture: Arc<NodeSnapshot>,
        mut candidates: Vec<Candidate>,
    ) -> (Arc<NodeSnapshot>, Vec<Candidate>) {
        let until = Instant::now() + TAKING;
        let mut fruitless = 0;
        // The workload that fills memory continues meanwhile.
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
            picture = self.wait_for_observation(self.began.elapsed()).await;
            let after = shortage(&picture, signal);
            if after.is_none() {
                break;
            }
            fruitless = if after < before { 0 } else { fruitless + 1 };
            // The pod whose page cache was reclaimed is not necessarily the one that fills memory.
            let active = self.deps.pods.active();
            candidates = self.candidates(active, UsageScope::Memory).await.unwrap_or(candidates);
        }
        (picture, candidates)
    }

    /// Reclaims page cache if memory is what is missing: active file pages count as used, but can be reclaimed. Returns
    /// whether that was attempted.
    async fn take_back(&self, signal: Signal, picture: &NodeSnapshot, candidates: &mut [Candidate]) -> bool {
        let Some((bytes, least)) = shortage(picture, signal).filter(|_| is_memory(signal)) else { return false };
        rank(candidates, signal, picture.layout);
        let Some(worst) = candidates.iter().find(|candidate| !is_exempt(candidate)) else { return false };
        self.deps.liveness.report_progress();
        let missing = MemoryShortage { bytes, least, of_machine: signal == Signal::Memory };
        let is_tried = self.deps.reclaim.page_cache(worst.pod.uid(), missing).await;
        if is_tried {
            info!(bytes, pod = %worst.pod.object_name(), "Eviction manager: reclaimed page cache");
        }
        is_tried
    }

    /// Reclaims node-level resources that help with the signal; returns whether anything was attempted.
    async fn reclaim(&self, signal: Signal, layout: Layout) -> bool {
        let (containers, images) = reclaims(signal, layout);
        self.deps.liveness.report_progress();
        if containers && let Err(err) = self.deps.reclaim.containers().await {
            warn!(err, "Eviction manager: unexpected error when attempting to reclaim dead containers");
        }
        self.deps.liveness.report_progress();
        if images && let Err(err) = self.deps.reclaim.images().await {
            warn!(err, "Eviction manager: unexpected error when attempting to reclaim images");
        }
        containers || images
    }

    /// Evicts the first candidate that may be evicted; none if the signal is no longer due.
    async fn evict_one(
        &mut self,
        signal: Signal,
        picture: &NodeSnapshot,
        mut candidates: Vec<Candidate>,
    ) -> PassResult {
        let is_it = |due: &&(Threshold, Uptime)| due.0.signal == signal;
        let Some((first, since)) = picture.due.iter().find(is_it) else { return PassResult::Freed };
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
                self.mark_stuck([pod.uid().clone()].into_iter());
            }
            // Observations from before the eviction are outdated.
            let settle = if signal == Signal::Pid { Duration::ZERO } else { SETTLE };
            self.wait_for_observation(self.began.elapsed() + settle).await;
            return PassResult::Freed;
        }
        info!("Eviction manager: unable to evict any pods from the node");
        self.has_no_evictable_pod = !candidates.iter().any(|candidate| self.is_evictable(&candidate.pod));
        PassResult::Failed(signal, PERIOD)
    }

    /// Evicts a pod and waits for its cleanup; returns whether that completed.
    async fn evict(&self, pod: &Arc<Pod>, verdict: &EvictionVerdict) -> bool {
        let event = EventRecord::warning(pod.id(), "Evicted", verdict.message.clone());
        self.deps.events.record(event.annotated(verdict.annotations.iter().cloned()));
        self.deps.liveness.expect_within(Duration::from_secs(verdict.grace.max(0).unsigned_abs()).saturating_mul(2));
        match self.terminate(pod, verdict).await {
            Ok(()) => info!(pod = %pod.object_name(), "Eviction manager: pod is evicted successfully"),
            Err(err) => {
                let text = "Container runtime did not kill the pod within specified grace period.";
                self.deps.events.record(EventRecord::warning(pod.id(), "ExceededGracePeriod", text));
                error!(pod = %pod.object_name(), err, "Eviction manager: pod failed to evict");
            }
        }
        self.deps.metrics.evicted(verdict.signal);
        let is_gone = timeout(GONE, self.deps.pods.cleaned_up(pod.uid())).await.is_ok();
        if !is_gone {
            info!(pod = %pod.object_name(), "Eviction manager: timed out waiting for pods to be cleaned up");
        }
        is_gone
    }

    /// Stops a pod. A running grace period is shortened once any hard threshold is met, because no other pod is evicted
    /// meanwhile.
    /// Suspended signals other than the pod's own do not shorten it: nothing can be done for them.
    async fn terminate(&self, pod: &Arc<Pod>, verdict: &EvictionVerdict) -> Result<(), String> {
        let mut pictures = self.pictures.clone();
        let may_help = |signal: Signal| signal.as_str() == verdict.signal || !self.is_suspended(signal);
        let is_hard = |(due, _): &(Threshold, Uptime)| due.is_hard() && may_help(due.signal);
        let is_urgent =
            |picture: &Option<Arc<NodeSnapshot>>| picture.as_ref().is_some_and(|p| p.due.iter().any(is_hard));
        tokio::select! {
            biased;
            ended = self.deps.pods.evict(pod, verdict) => return ended,
            Ok(_) = pictures.wait_for(is_urgent), if verdict.grace > SHORT => {}
        }
        info!(pod = %pod.object_name(), "Eviction manager: hard threshold met, shortening grace period of pod");
        self.deps.pods.evict(pod, &EvictionVerdict { grace: SHORT, ..verdict.clone() }).await
    }

    /// Returns whether a signal is suspended now; a suspension may expire during another operation.
    fn is_suspended(&self, signal: Signal) -> bool {
        self.suspended.get(&signal).is_some_and(|until| *until > Instant::now())
    }

    /// Returns whether a pod may be evicted: it is not critical, and no eviction of it timed out.
    fn is_evictable(&self, pod: &Pod) -> bool {
        !pod.is_critical() && !self.stuck.contains(pod.uid())
    }

    fn mark_stuck(&mut self, stuck: impl Iterator<Item = PodUid>) {
        let active: HashSet<PodUid> = self.deps.pods.active().iter().map(|pod| pod.uid().clone()).collect();
        self.stuck.extend(stuck);
        self.stuck.retain(|uid| active.contains(uid));
    }

    /// Combines pods with their usage; `None` if usage could not be read.
    async fn candidates(&self, active: Vec<Arc<Pod>>, needs: UsageScope) -> Option<Vec<Candidate>> {
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

    fn latest(&self) -> Arc<NodeSnapshot> {
        self.pictures.borrow().clone().unwrap_or_default()
    }

    /// Waits for an observation that began after `at`; returns the latest one after a timeout.
    async fn wait_for_observation(&mut self, at: Uptime) -> Arc<NodeSnapshot> {
        let is_later = |picture: &Option<Arc<NodeSnapshot>>| picture.as_ref().is_some_and(|picture| picture.at > at);
        if timeout(OBSERVATION_TIMEOUT, self.pictures.wait_for(is_later)).await.is_err() {
            debug!("Eviction manager: timed out waiting for fresh node stats");
        }
        self.latest()
    }
}

/// The first due signal that is not suspended.
fn first_not_suspended(suspended: &BTreeMap<Signal, Instant>, picture: &NodeSnapshot) -> Option<Signal> {
    picture.due.iter().map(|(threshold, _)| threshold.signal).find(|signal| !suspended.contains_key(signal))
}

/// Returns whether no threshold is met any more, and logs that.
fn is_relieved(picture: &NodeSnapshot) -> bool {
    let is_resolved = is_resolved(&picture.thresholds, &picture.seen);
    if is_resolved {
        info!("Eviction manager: able to reduce resource pressure without evicting pods.");
    }
    is_resolved
}

/// Amount of a signal that is missing, and the amount that has to be available then. A soft threshold within its grace
/// period requires nothing yet.
fn shortage(picture: &NodeSnapshot, signal: Signal) -> Option<(u64, u64)> {
    let due: Vec<Threshold> = picture.due.iter().map(|(threshold, _)| threshold.clone()).collect();
    missing(&due, &picture.seen, signal)
}

const fn is_memory(signal: Signal) -> bool {
    matches!(signal, Signal::Memory | Signal::AllocatableMemory)
}

/// Node-level resources that help with a signal: (dead containers, unused images).
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
