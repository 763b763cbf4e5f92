//! Pod worker syncs at the end of a pod: stop its containers, then clean up its resources.
//!
//! Implements spec 02a §9.7 SyncTerminatingPod, SyncTerminatingRuntimePod, SyncTerminatedPod.

use std::{sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, warn};

use super::pod_sync::{Outcome, SyncContext};
use crate::engine::lifecycle::{StatusOverride, SyncTransition};
use berth_ports::{EventRecord, Grace, KillPod};
use berth_status::{BuildKind, Phase};
use berth_types::{Pod, api, observation::ObservedPod};

/// Longest wait for the unready status to be sent before containers are stopped.
const STATUS_SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// Polling interval of that wait.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl SyncContext<'_> {
    /// Stops all containers of the pod. `grace` is live: shortening it shortens the running kill.
    pub async fn stop(
        mut self,
        grace: watch::Receiver<Option<Grace>>,
        order: Option<StatusOverride>,
    ) -> Result<Outcome, String> {
        if let Some(pod) = &self.pod {
            // If an earlier agent began to stop the pod, its readiness probes are not running in this
            // one.
            self.context.probes.add(pod);
            // Before any wait: liveness of a terminating pod must not matter while the runtime does not
            // answer.
            self.context.probes.stop_liveness(pod.uid());
        }
        let observed = self.observe().await?;
        if let Some(pod) = self.pod.clone() {
            self.publish(&pod, &observed, BuildKind::Ongoing, order.as_ref());
        }
        match order.as_ref().filter(|order| order.is_unready) {
            Some(order) => self.kill_unready(observed, grace, order.status_reserve).await?,
            None => self.kill(observed, grace).await?,
        }
        if let Some(pod) = &self.pod {
            self.context.probes.remove(pod.uid());
        }
        let observed = self.observe().await?;
        let running: Vec<String> = observed.running().map(|c| c.id.to_string()).collect();
        if !running.is_empty() {
            let ids = running.join(" ");
            self.memory.progress.enter("kill");
            return Err(format!("detected running containers after a successful KillPod, CRI violation: [{ids}]"));
        }
        // Before the final status: the API server releases a claim of a terminated pod.
        self.memory.progress.enter("release of resource claims");
        self.context.claims.unprepare(&self.memory.id.uid).await?;
        match self.pod.clone() {
            Some(pod) => self.publish(&pod, &observed, BuildKind::Terminal, order.as_ref()),
            None => self.remove_orphan(&observed).await?, // no other component does
        }
        Ok(Outcome::Moved(SyncTransition::Stopped))
    }

    /// Removes leftovers of a pod that only the runtime knew. Housekeeping removes what remains on disk
    /// or in the cgroup tree.
    async fn remove_orphan(&mut self, observed: &Arc<ObservedPod>) -> Result<(), String> {
        self.remove_from_runtime(observed).await?;
        let id = self.memory.id.clone();
        self.memory.progress.enter("remove pod cgroup");
        if let Err(error) = self.context.resources.remove(&id).await {
            debug!(podUID = %id.uid, err = %error, "Failed to remove orphaned pod cgroup");
        }
        self.memory.progress.enter("remove pod directory");
        if let Err(error) = self.context.volumes.remove_directory(&id.uid).await {
            debug!(podUID = %id.uid, err = %error, "Failed to remove orphaned pod directory");
        }
        Ok(())
    }

    /// Kills with the pod's own grace period; for a pod whose cgroup has disappeared.
    pub async fn kill_all(&mut self, observed: Arc<ObservedPod>) -> Result<(), String> {
        let (_keep, grace) = watch::channel(None);
        self.kill(observed, grace).await
    }

    /// Kills once the unready status has been sent to the API server, or after a timeout; the wait
    /// counts toward the grace period (spec 05 §7.7).
    async fn kill_unready(
        &mut self,
        observed: Arc<ObservedPod>,
        mut grace: watch::Receiver<Option<Grace>>,
        words: Duration,
    ) -> Result<(), String> {
        let given = *grace.borrow_and_update();
        let waited = self.wait_status_sent(given).await;
        let words = if self.context.config.api_client { words } else { Duration::ZERO };
        let left = |grace: Option<Grace>| grace.map(|Grace(grace)| Grace(left_of(grace, waited, words)));
        let (shorter, live) = watch::channel(left(given));
        let shortens = async {
            while grace.changed().await.is_ok() {
                shorter.send_replace(left(*grace.borrow_and_update()));
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            killed = self.kill(observed, live) => killed,
            () = shortens => Ok(()), // never completes
        }
    }

    /// Waits until the status was sent, or the timeout expired; returns the time spent.
    async fn wait_status_sent(&mut self, grace: Option<Grace>) -> Duration {
        let pod = self.pod.as_ref().filter(|_| self.context.config.api_client);
        let Some(uid) = pod.map(|pod| pod.uid().clone()) else { return Duration::ZERO };
        self.memory.progress.enter("publish unready status");
        let (began, status) = (Instant::now(), self.context.status.clone());
        let is_unsent = || status.cached(&uid).is_some_and(|kept| kept.unsent_since.is_some());
        let sent = async {
            while is_unsent() {
                sleep(STATUS_POLL_INTERVAL).await;
            }
        };
        let _ = timeout(patience(grace), sent).await; // an unresponsive API server must not block the kill
        began.elapsed()
    }

    async fn kill(&mut self, observed: Arc<ObservedPod>, grace: watch::Receiver<Option<Grace>>) -> Result<(), String> {
        self.memory.progress.enter("kill");
        let request = KillPod { pod: self.pod.clone(), observed, grace, progress: self.memory.progress.clone() };
        let killed = self.context.runtime.kill_pod(request).await;
        self.memory.wanted = self.context.observer.action_completed(&self.memory.id.uid);
        killed.map_err(|error| {
            let text = format!("error killing pod: {error}");
            self.context.events.record(EventRecord::warning(&self.memory.id, "FailedKillPod", text.clone()));
            text
        })
    }

    /// Cleans up after a pod that no longer runs: volumes, cgroup, and, if its content is removable,
    /// its dead containers and sandboxes.
    pub async fn clean_up(mut self, content_removable: bool) -> Result<Outcome, String> {
        let observed = self.observe().await?;
        let Some(pod) = self.pod.clone() else { return Ok(Outcome::Moved(SyncTransition::CleanedUp)) };
        self.publish(&pod, &observed, BuildKind::Terminal, None);
        self.memory.progress.enter("unmount volumes");
        self.context.volumes.unmount(pod.uid()).await.map_err(|error| error.to_string())?;
        // After the unmount: mounted volumes are refreshed from these objects.
        self.context.objects.unregister(pod.uid());
        self.memory.progress.enter("remove pod cgroup");
        self.context.resources.remove(pod.id()).await.map_err(|error| error.to_string())?;
        self.context.status.terminate(&pod, self.context.clock.now());
        if content_removable && let Err(error) = self.remove_content(&observed).await {
            // Housekeeping removes it once the record of the pod is removed.
            warn!(pod = %pod.object_name(), podUID = %pod.uid(), err = %error, "Failed to remove content of terminated pod");
        }
        Ok(Outcome::Moved(SyncTransition::CleanedUp))
    }

    /// Removes the pod from the runtime and its directory from the disk, and waits for an observation
    /// that shows it gone.
    async fn remove_content(&mut self, observed: &Arc<ObservedPod>) -> Result<(), String> {
        self.remove_from_runtime(observed).await?;
        self.memory.progress.enter("remove pod directory");
        self.context.volumes.remove_directory(&self.memory.id.uid).await.map_err(|error| error.to_string())
    }

    async fn remove_from_runtime(&mut self, observed: &Arc<ObservedPod>) -> Result<(), String> {
        self.memory.progress.enter("remove containers and sandboxes");
        let removed = self.context.runtime.remove_pod(observed).await;
        if observed.is_absent() {
            return removed; // only its logs were removed
        }
        self.memory.wanted = self.context.observer.action_completed(&self.memory.id.uid);
        removed?;
        // A failed observation is no reason to retry the removal.
        let _seen = self.observe().await;
        Ok(())
    }

    fn publish(&mut self, pod: &Arc<Pod>, observed: &ObservedPod, kind: BuildKind, order: Option<&StatusOverride>) {
        let mut built = self.build(pod, observed, kind);
        if self.memory.over && Phase::of(&built).is_none_or(|phase| !phase.is_terminal()) {
            built.phase = Some("Failed".to_owned());
            let message = match pod.containers() {
                [] => "The pod has no containers",
                _ => "The pod's sandbox no longer exists and its restart policy does not allow a new one",
            };
            built.message = Some(message.to_owned());
        }
        if let Some(order) = order {
            overrule(&mut built, order, pod.generation(), self.context.clock.now());
        }
        let now = self.context.clock.now();
        match kind {
            BuildKind::Ongoing => self.context.status.set(pod, built, now),
            BuildKind::Terminal => self.context.status.set_stopped(pod, built, now),
        };
    }
}

/// A quarter of the grace period, at most [`STATUS_SEND_TIMEOUT`].
fn patience(grace: Option<Grace>) -> Duration {
    grace.map_or(STATUS_SEND_TIMEOUT, |Grace(grace)| (grace / 4).min(STATUS_SEND_TIMEOUT))
}

/// Remaining grace period of the containers. Runtimes count in whole seconds: if part of the period is
/// reserved for the final status, the rest is rounded down to full seconds.
fn left_of(grace: Duration, waited: Duration, words: Duration) -> Duration {
    let left = grace.saturating_sub(waited);
    if words.is_zero() { left } else { Duration::from_secs(left.saturating_sub(words).as_secs()) }
}

/// Spec 05 §7.7: a pod that terminates with its node is no endpoint any more.
fn make_unready(status: &mut api::PodStatus, now: jiff::Timestamp) {
    let conditions = status.conditions.iter_mut().flatten();
    for condition in conditions.filter(|c| ["Ready", "ContainersReady"].contains(&c.type_.as_str())) {
        if condition.status == "True" {
            condition.status = "False".to_owned();
            condition.reason = Some("PodFailed".to_owned());
            condition.last_transition_time = Some(Time(now));
        }
    }
}

/// Overrides phase, reason, and message with those of an eviction, preemption, or shutdown.
fn overrule(status: &mut api::PodStatus, order: &StatusOverride, generation: i64, now: jiff::Timestamp) {
    if !(order.keeps_success && Phase::of(status) == Some(Phase::Succeeded)) {
        status.phase = Some("Failed".to_owned());
    }
    status.reason = Some(order.reason.clone());
    status.message = Some(order.message.clone());
    if order.is_unready {
        make_unready(status, now);
    }
    let Some((reason, message)) = &order.disruption else { return };
    let conditions = status.conditions.get_or_insert_default();
    conditions.retain(|c| c.type_ != "DisruptionTarget");
    conditions.push(api::PodCondition {
        type_: "DisruptionTarget".to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.clone()),
        message: Some(message.clone()),
        last_transition_time: Some(Time(now)),
        observed_generation: Some(generation).filter(|generation| *generation != 0),
        ..Default::default()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_succeeded_stays_so_at_the_end_of_the_node_only() {
        // Spec 05 §7.4: reason and message are set in either case.
        for (phase, keeps_success, expected) in [
            ("Running", true, "Failed"),
            ("Failed", true, "Failed"),
            ("Succeeded", true, "Succeeded"),
            ("Succeeded", false, "Failed"),
        ] {
            let (reason, message) = ("Terminated".to_owned(), "The node goes down.".to_owned());
            let order = StatusOverride {
                reason,
                message,
                disruption: None,
                keeps_success,
                is_unready: true,
                status_reserve: Duration::ZERO,
            };
            let mut status = api::PodStatus { phase: Some(phase.to_owned()), ..Default::default() };
            overrule(&mut status, &order, 0, jiff::Timestamp::UNIX_EPOCH);
            assert_eq!(status.phase.as_deref(), Some(expected), "{phase}");
            let reported = (status.reason.as_deref(), status.message.as_deref());
            assert_eq!(reported, (Some("Terminated"), Some("The node goes down.")), "{phase}");
        }
    }

    #[test]
    fn last_words_have_their_share_of_a_grace_period_where_they_must_fit_into_it() {
        for (grace, waited, words, expected) in [
            (8000, 100, 0, 7900),
            (8000, 100, 300, 7000),
            (8000, 700, 300, 7000),
            (8000, 701, 300, 6000),
            (8000, 0, 1000, 7000),
            (1000, 250, 250, 0),
            (0, 0, 300, 0),
        ] {
            let [grace, waited, words, expected] = [grace, waited, words, expected].map(Duration::from_millis);
            assert_eq!(left_of(grace, waited, words), expected, "{grace:?} {waited:?} {words:?}");
        }
    }

    #[test]
    fn the_wait_for_the_unready_status_is_bounded_by_the_grace_period() {
        for (grace, expected) in [(None, 1000), (Some(0), 0), (Some(1), 250), (Some(4), 1000), (Some(300), 1000)] {
            let expected = Duration::from_millis(expected);
            assert_eq!(patience(grace.map(Grace::from_secs)), expected, "{grace:?}");
        }
    }
}
