//! Current wait of a pod, used by both the diagnostics document and the waiting gauge.
//!
//! It is the step of the pod worker or, if that is idle, what the pod itself has yet to do.

use jiff::Timestamp;

use super::document::{Now, WaitInfo, seconds};
use crate::engine::wait_class::{IDLE, WaitClass};
use berth_ports::StepView;
use berth_status::lookup::{self, ContainerStateRef, state};
use berth_types::{Pod, api};

/// Returns the current wait of a pod; `None` if it waits for nothing.
pub fn current_wait(
    step: Option<&StepView>,
    pod: Option<&Pod>,
    status: Option<&api::PodStatus>,
    now: Now,
) -> Option<WaitInfo> {
    let step = step?;
    if step.name == IDLE {
        let (name, since) = idle_wait(pod?, status?)?;
        let lasted = since.map(|since| now.wall.duration_since(since).max(jiff::SignedDuration::ZERO).unsigned_abs());
        let reason = WaitClass::of(&name)?.label().to_owned();
        return Some(WaitInfo { reason, stage: name, since, seconds: lasted.map_or(0.0, seconds), until: None });
    }
    Some(WaitInfo {
        reason: WaitClass::of(&step.name)?.label().to_owned(),
        stage: step.name.to_string(),
        since: now.wall(step.since),
        seconds: seconds(now.steady.saturating_duration_since(step.since)),
        until: step.until.filter(|until| *until > now.steady).and_then(|until| now.wall(until)),
    })
}

/// What a pod with an idle worker has yet to do, and since when: init containers, startup, readiness, readiness gates.
fn idle_wait(pod: &Pod, status: &api::PodStatus) -> Option<(String, Option<Timestamp>)> {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let init = status.init_container_statuses.iter().flatten();
    let is_sidecar = |status: &api::ContainerStatus| {
        pod.init_containers().iter().any(|container| container.name == status.name && Pod::is_sidecar(container))
    };
    let (sidecars, init): (Vec<_>, Vec<_>) = init.partition(|status| is_sidecar(status));
    if let Some((running, since)) = init.into_iter().find_map(|status| Some((status, running_since(status)?))) {
        return Some((format!("init container {}", running.name), since));
    }
    let running = || {
        let all = sidecars.iter().copied().chain(status.container_statuses.iter().flatten());
        all.filter_map(|status| Some((status, running_since(status)?)))
    };
    if let Some((starting, since)) = running().find(|(status, _)| status.started == Some(false)) {
        return Some((format!("startup of {}", starting.name), since));
    }
    let moved = |type_: &str| lookup::condition(status, type_)?.last_transition_time.as_ref().map(|time| time.0);
    if let Some((unready, started)) = running().find(|(status, _)| !status.ready) {
        // Another container may have been unready before this one.
        let since = moved("ContainersReady").or_else(|| moved("Ready")).max(started);
        return Some((format!("readiness of {}", unready.name), since));
    }
    let gates = pod.spec().readiness_gates.iter().flatten();
    let closed = gates.map(|gate| gate.condition_type.as_str()).find(|type_| !lookup::is_true(status, type_))?;
    // The gate's condition may never have been set; the pod is unready since then at the latest.
    Some((format!("readiness gate {closed}"), moved(closed).or_else(|| moved("Ready"))))
}

/// Start of a running container; `None` if it is not running.
fn running_since(status: &api::ContainerStatus) -> Option<Option<Timestamp>> {
    let running = || status.state.as_ref()?.running.as_ref()?.started_at.as_ref().map(|time| time.0);
    (state(status) == ContainerStateRef::Running).then(running)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use tokio::time::Instant;

    use super::*;

    fn pod(spec: &Value) -> Pod {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn status(value: Value) -> api::PodStatus {
        serde_json::from_value(value).expect("a status")
    }

    fn runs(name: &str, started: bool, ready: bool) -> Value {
        json!({"name": name, "image": "i", "imageID": "", "restartCount": 0, "started": started, "ready": ready,
               "state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}}})
    }

    fn ended(name: &str) -> Value {
        json!({"name": name, "image": "i", "imageID": "", "restartCount": 0, "ready": false,
               "state": {"terminated": {"exitCode": 0}}})
    }

    fn condition(type_: &str, is: &str, second: u32) -> Value {
        json!({"type": type_, "status": is, "lastTransitionTime": format!("2026-01-01T00:00:{second:02}Z")})
    }

    #[test]
    fn a_pod_with_an_idle_worker_waits_for_its_next_step() {
        let spec = json!({
            "initContainers": [{"name": "migrate"}, {"name": "proxy", "restartPolicy": "Always"}],
            "containers": [{"name": "main"}, {"name": "other"}],
            "readinessGates": [{"conditionType": "example.com/up"}],
        });
        let (init, done) = ([runs("migrate", false, false)], [ended("migrate"), runs("proxy", true, true)]);
        let unready = [condition("Ready", "False", 20), condition("ContainersReady", "False", 15)];
        let up = [condition("example.com/up", "True", 30), condition("Ready", "True", 30)];
        let all = [runs("main", true, true), runs("other", true, true)];
        for (status, expected) in [
            (json!({"phase": "Pending", "initContainerStatuses": init}), Some(("init container migrate", "init", 50))),
            (
                json!({"phase": "Pending", "initContainerStatuses": [ended("migrate"), runs("proxy", false, false)]}),
                Some(("startup of proxy", "startup", 50)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": done,
                       "containerStatuses": [runs("main", true, false), runs("other", false, false)]}),
                Some(("startup of other", "startup", 50)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": done, "conditions": unready,
                       "containerStatuses": [runs("main", true, true), runs("other", true, false)]}),
                Some(("readiness of other", "readiness", 45)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": [ended("migrate"), runs("proxy", true, false)],
                       "conditions": unready, "containerStatuses": all}),
                Some(("readiness of proxy", "readiness", 45)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": done,
                       "conditions": [condition("ContainersReady", "False", 5)],
                       "containerStatuses": [runs("main", true, true), runs("other", true, false)]}),
                Some(("readiness of other", "readiness", 50)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": done, "containerStatuses": all,
                       "conditions": [condition("Ready", "False", 20), condition("ContainersReady", "True", 15)]}),
                Some(("readiness gate example.com/up", "gate", 40)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": done, "containerStatuses": all,
                       "conditions": [condition("example.com/up", "False", 25), condition("Ready", "False", 20)]}),
                Some(("readiness gate example.com/up", "gate", 35)),
            ),
            (
                json!({"phase": "Running", "initContainerStatuses": done, "containerStatuses": all, "conditions": up}),
                None,
            ),
            (json!({"phase": "Failed", "initContainerStatuses": init}), None),
            (json!({"phase": "Pending"}), Some(("readiness gate example.com/up", "gate", 0))),
        ] {
            let steady = Instant::now();
            let now = Now { wall: "2026-01-01T00:01:00Z".parse().expect("a time"), steady };
            let idle = StepView { name: IDLE.into(), since: steady, until: None };
            let wait = current_wait(Some(&idle), Some(&pod(&spec)), Some(&self::status(status.clone())), now);
            let wait = wait.map(|waits| (waits.stage, waits.reason, waits.seconds));
            let expected = expected.map(|(stage, reason, seconds)| (stage.into(), reason.into(), f64::from(seconds)));
            assert_eq!(wait, expected, "{status:#}");
            let works = StepView { name: "RunPodSandbox".into(), since: steady - Duration::from_secs(2), until: None };
            let wait = current_wait(Some(&works), Some(&pod(&spec)), Some(&self::status(status)), now).expect("a wait");
            assert_eq!((&*wait.reason, wait.seconds), ("sandbox", 2.0), "what its worker does comes first");
        }
    }
}
