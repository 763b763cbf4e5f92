//! Pod start latency: SLI durations without image pulls and init containers. Pure.
//!
//! Inputs: pods from the API watch, image pulls, init containers, and status writes. Output: one sample per pod, which
//! the caller logs and observes in the metrics. Implements spec 02b §9, 08 §4.5.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use jiff::Timestamp;

use super::lookup::condition;
use berth_types::{Pod, PodSpec, PodUid, api};

/// Start latency of one pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartSample {
    /// Pod, as named in logs.
    pub pod: String,
    /// Time from the creation of the pod until the watch reported it running.
    pub total: Duration,
    /// `total` without pulls and init containers.
    pub sli: Duration,
    /// Time during which at least one image was being pulled.
    pub pulling: Duration,
    /// Sum of the run times of init containers.
    pub init: Duration,
    /// Number of completed pulls.
    pub pulls: usize,
    /// When a status with all containers running was written.
    pub running_published: Timestamp,
    /// Whether the pod has stateful volumes; `sli` then does not count.
    pub stateful: bool,
    /// Whether this is the first counted sample of a pod with its own network.
    pub first_network: bool,
}

#[derive(Debug)]
struct TrackedPod {
    name: String,
    created: Timestamp,
    /// Whether the pod has stateful volumes.
    stateful: bool,
    /// Whether the pod has its own network namespace.
    own_network: bool,
    /// Sidecars: their runs do not count as initialization.
    sidecars: HashSet<String>,
    pulls_open: VecDeque<Timestamp>,
    pulls: Vec<(Timestamp, Timestamp)>,
    /// Counted runs of init containers.
    init_seen: HashSet<(String, Timestamp)>,
    init: Duration,
    /// When a status with all containers running was written, and when the watch reported it. The watch event may
    /// precede the response to the write, and no other event follows.
    running_published: Option<Timestamp>,
    running_shown: Option<Timestamp>,
}

/// Tracks the start of each pod from the API server.
#[derive(Debug, Default)]
pub struct StartLatency {
    pods: HashMap<PodUid, Box<TrackedPod>>,
    /// Pods that are not measured, or whose sample was returned.
    settled: HashSet<PodUid>,
    network_seen: bool,
}

impl StartLatency {
    /// Handles a pod event of the watch. Returns the sample once, when the watch has reported the pod running and a
    /// status with that was written.
    pub fn handle_watch_event(&mut self, pod: &Pod, now: Timestamp) -> Option<StartSample> {
        if pod.is_static() || self.settled.contains(pod.uid()) {
            return None;
        }
        if pod.is_api_terminal() {
            self.pods.remove(pod.uid());
            return None;
        }
        let status = pod.status.as_deref();
        if status.and_then(|s| condition(s, "PodScheduled")).is_some_and(|c| c.status == "False") {
            // The pod waited for scheduling: its creation time does not measure the node.
            self.pods.remove(pod.uid());
            self.settled.insert(pod.uid().clone());
            return None;
        }
        if !self.pods.contains_key(pod.uid()) {
            self.track(pod);
            return None;
        }
        if status.is_some_and(all_running)
            && let Some(tracked) = self.pods.get_mut(pod.uid())
        {
            tracked.running_shown.get_or_insert(now);
        }
        self.sample(pod.uid())
    }

    /// Returns the sample of a pod whose data is complete.
    fn sample(&mut self, uid: &PodUid) -> Option<StartSample> {
        let (published_at, running_shown) =
            self.pods.get(uid).and_then(|tracked| tracked.running_published.zip(tracked.running_shown))?;
        let tracked = self.pods.remove(uid)?;
        self.settled.insert(uid.clone());
        let total = between(tracked.created, running_shown);
        let pulling = union(&tracked.pulls);
        let stateful = tracked.stateful;
        let first_network = !stateful && tracked.own_network && !self.network_seen;
        self.network_seen |= first_network;
        Some(StartSample {
            pod: tracked.name,
            total,
            sli: total.saturating_sub(pulling).saturating_sub(tracked.init),
            pulling,
            init: tracked.init,
            pulls: tracked.pulls.len(),
            running_published: published_at,
            stateful,
            first_network,
        })
    }

    /// Records the start of an image pull.
    pub fn pull_started(&mut self, uid: &PodUid, now: Timestamp) {
        if let Some(tracked) = self.pods.get_mut(uid) {
            tracked.pulls_open.push_back(now);
        }
    }

    /// Records the end of an image pull, successful or not: a failed pull must not be paired with a later success.
    pub fn pull_finished(&mut self, uid: &PodUid, now: Timestamp) {
        if let Some(tracked) = self.pods.get_mut(uid)
            && let Some(began) = tracked.pulls_open.pop_front()
        {
            tracked.pulls.push((began, now));
        }
    }

    /// Records a run of an init container. Repeated reports of a run count once; sidecars never count.
    pub fn init_ran(&mut self, uid: &PodUid, container: &str, began: Timestamp, ended: Timestamp) {
        if let Some(tracked) = self.pods.get_mut(uid)
            && !tracked.sidecars.contains(container)
            && tracked.init_seen.insert((container.to_owned(), began))
        {
            tracked.init += between(began, ended);
        }
    }

    /// Whether nothing more is measured for a pod.
    pub fn is_settled(&self, uid: &PodUid) -> bool {
        self.settled.contains(uid)
    }

    /// Records a status write. Returns the sample if the watch event came first.
    pub fn status_written(&mut self, uid: &PodUid, status: &api::PodStatus, now: Timestamp) -> Option<StartSample> {
        if let Some(tracked) = self.pods.get_mut(uid).filter(|t| t.running_published.is_none())
            && all_running(status)
        {
            tracked.running_published = Some(now);
        }
        self.sample(uid)
    }

    /// Removes a deleted pod.
    pub fn deleted(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
        self.settled.remove(uid);
    }

    fn track(&mut self, pod: &Pod) {
        let created = pod.metadata.creation_timestamp.as_ref().map(|t| t.0);
        let started_before = pod.status.as_ref().is_some_and(|s| s.start_time.is_some());
        if let Some(created) = created.filter(|_| !started_before) {
            let sidecars = pod.init_containers().iter().filter(|c| Pod::is_sidecar(c));
            let tracked = Box::new(TrackedPod {
                name: pod.object_name(),
                created,
                stateful: is_stateful(pod.spec()),
                own_network: !pod.is_host_network(),
                sidecars: sidecars.map(|c| c.name.clone()).collect(),
                pulls_open: VecDeque::new(),
                pulls: Vec::new(),
                init_seen: HashSet::new(),
                init: Duration::ZERO,
                running_published: None,
                running_shown: None,
            });
            self.pods.insert(pod.uid().clone(), tracked);
        }
    }
}

/// Whether every regular container runs and has a start time.
fn all_running(status: &api::PodStatus) -> bool {
    let list = status.container_statuses.as_deref().unwrap_or_default();
    let runs = |c: &api::ContainerStatus| {
        c.state.as_ref().and_then(|s| s.running.as_ref()).is_some_and(|r| r.started_at.is_some())
    };
    !list.is_empty() && list.iter().all(runs)
}

/// Whether any volume is more than configuration or scratch space.
fn is_stateful(spec: &PodSpec) -> bool {
    spec.volumes().any(|v| {
        v.secret.is_none()
            && v.config_map.is_none()
            && v.downward_api.is_none()
            && v.empty_dir.is_none()
            && v.projected.is_none()
    })
}

/// Total time covered by the intervals, overlaps counted once.
fn union(sessions: &[(Timestamp, Timestamp)]) -> Duration {
    let mut sorted = sessions.to_vec();
    sorted.sort();
    let mut covered = Duration::ZERO;
    let mut until: Option<Timestamp> = None;
    for (began, ended) in sorted {
        let from = until.map_or(began, |u| u.max(began));
        covered += between(from, ended);
        until = Some(until.map_or(ended, |u| u.max(ended)));
    }
    covered
}

/// Elapsed time; zero where the end is not after the beginning.
fn between(began: Timestamp, ended: Timestamp) -> Duration {
    Duration::try_from(ended.duration_since(began)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::at;
    use serde_json::{Value, json};

    fn pod(spec: Value, status: Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([{"name": "c"}]);
        let metadata = json!({"name": "p", "namespace": "n", "uid": "u", "creationTimestamp": at(100).to_string()});
        let object = json!({"metadata": metadata, "spec": spec, "status": status});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn running() -> Value {
        json!({"startTime": at(101).to_string(), "containerStatuses": [{"name": "c", "image": "", "imageID": "",
            "ready": true, "restartCount": 0, "state": {"running": {"startedAt": at(110).to_string()}}}]})
    }

    /// Sample of a pod that was first observed at 101, published running at 111, and reported running by the watch at
    /// 112.
    fn sample(
        latency: &mut StartLatency,
        spec: Value,
        meanwhile: impl Fn(&mut StartLatency, &PodUid),
    ) -> Option<StartSample> {
        let uid = PodUid::from("u");
        assert_eq!(latency.handle_watch_event(&pod(spec.clone(), json!({})), at(101)), None);
        meanwhile(latency, &uid);
        let shown = pod(spec, running());
        let status = shown.status.as_deref().expect("a status");
        assert_eq!(latency.status_written(&uid, status, at(111)), None, "not shown yet");
        let sample = latency.handle_watch_event(&shown, at(112));
        assert_eq!(latency.handle_watch_event(&shown, at(113)), None, "once");
        assert_eq!(latency.status_written(&uid, status, at(113)), None, "once");
        sample
    }

    #[test]
    fn the_watch_may_be_faster_than_the_answer_to_the_write() {
        let (mut latency, uid) = (StartLatency::default(), PodUid::from("u"));
        let shown = pod(json!({}), running());
        let status = shown.status.as_deref().expect("a status");
        assert_eq!(latency.handle_watch_event(&pod(json!({}), json!({})), at(101)), None);
        assert_eq!(latency.status_written(&uid, &api::PodStatus::default(), at(102)), None, "does not run yet");
        assert_eq!(latency.handle_watch_event(&shown, at(110)), None, "not published yet");
        assert_eq!(latency.handle_watch_event(&shown, at(111)), None, "not published yet");
        let sample = latency.status_written(&uid, status, at(112)).expect("a sample");
        assert_eq!((sample.total, sample.running_published), (Duration::from_secs(10), at(112)), "until it was shown");
        assert_eq!(latency.handle_watch_event(&shown, at(113)), None, "once");
    }

    #[test]
    fn a_sidecar_does_not_initialise() {
        let spec = json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}]});
        let sample = sample(&mut StartLatency::default(), spec, |latency, uid| {
            latency.init_ran(uid, "s", at(102), at(109));
            latency.init_ran(uid, "i", at(102), at(103));
        });
        assert_eq!(sample.map(|sample| sample.init), Some(Duration::from_secs(1)));
    }

    #[test]
    fn pulls_and_init_containers_do_not_count() {
        let seconds = Duration::from_secs;
        let sample = sample(&mut StartLatency::default(), json!({}), |latency, uid| {
            for (second, starts) in [(101, true), (102, true), (103, false), (104, false), (105, true)] {
                if starts { latency.pull_started(uid, at(second)) } else { latency.pull_finished(uid, at(second)) }
            }
            for _ in 0..2 {
                latency.init_ran(uid, "i", at(106), at(108));
            }
            latency.init_ran(uid, "j", at(108), at(107));
        })
        .expect("a sample");
        assert_eq!(
            (sample.total, sample.pulling, sample.init, sample.sli),
            (seconds(12), seconds(3), seconds(2), seconds(7))
        );
        assert_eq!((sample.pulls, sample.stateful, sample.running_published), (2, false, at(111)));
    }

    #[test]
    fn the_first_pod_with_a_network_is_marked() {
        let mut latency = StartLatency::default();
        let mut first = |spec: Value| {
            latency.deleted(&"u".into());
            let sample = sample(&mut latency, spec, |_, _| {}).expect("a sample");
            (sample.first_network, sample.stateful)
        };
        assert_eq!(first(json!({"hostNetwork": true})), (false, false));
        assert_eq!(first(json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})), (false, true));
        assert_eq!(first(json!({"volumes": [{"name": "v", "emptyDir": {}}]})), (true, false));
        assert_eq!(first(json!({})), (false, false));
    }

    #[test]
    fn pods_that_waited_or_started_before_are_left_out() {
        let unscheduled = json!({"conditions": [{"type": "PodScheduled", "status": "False"}]});
        for (case, first) in [("waited for a node", unscheduled), ("started before", running())] {
            let mut latency = StartLatency::default();
            latency.handle_watch_event(&pod(json!({}), first), at(101));
            let shown = pod(json!({}), running());
            assert_eq!(latency.handle_watch_event(&shown, at(102)), None);
            latency.status_written(&"u".into(), shown.status.as_deref().expect("a status"), at(103));
            assert_eq!(latency.handle_watch_event(&shown, at(104)), None, "{case}");
        }
    }

    #[test]
    fn what_ended_is_dropped() {
        let mut latency = StartLatency::default();
        latency.handle_watch_event(&pod(json!({}), json!({})), at(101));
        latency.handle_watch_event(&pod(json!({}), json!({"phase": "Failed"})), at(102));
        assert!(latency.pods.is_empty());
    }
}
