//! `started` and `ready` of container statuses, from probe results. Pure. Implements spec 02b §3.6.

use std::time::Duration;

use super::{
    ProbeOutcome, StatusInput,
    lookup::{ContainerStateRef, exit, state},
};
use berth_types::{ContainerId, Pod, api};

/// Containers that started this much before the agent were started by an earlier agent.
const BEFORE_AGENT: Duration = Duration::from_secs(10);

/// Sets `started` and `ready` of all init and regular containers.
pub(super) fn set_readiness(
    input: &StatusInput<'_>,
    init: &mut [api::ContainerStatus],
    regular: &mut [api::ContainerStatus],
) {
    for (container, status) in input.pod.init_containers().iter().zip(init) {
        status.started = Some(started(input, container, status));
        status.ready = if Pod::is_sidecar(container) {
            ready(input, container, status)
        } else {
            exit(status).is_some_and(|e| e.exit_code == 0)
        };
    }
    for status in regular {
        let Some(container) = input.pod.containers().iter().find(|c| c.name == status.name) else { continue };
        status.started = Some(started(input, container, status));
        status.ready = ready(input, container, status);
    }
}

fn started(input: &StatusInput<'_>, container: &api::Container, status: &api::ContainerStatus) -> bool {
    if state(status) != ContainerStateRef::Running {
        return false;
    }
    match outcome(input, status).startup {
        Some(success) => success,
        None => status.started == Some(true) || container.startup_probe.is_none(),
    }
}

fn ready(input: &StatusInput<'_>, container: &api::Container, status: &api::ContainerStatus) -> bool {
    if status.started != Some(true) {
        return false;
    }
    match outcome(input, status).readiness {
        Some(success) => success,
        // A restart of the agent neither loses readiness nor grants it to a container that was not ready.
        None if is_inherited(input, status) => container.readiness_probe.is_none() || was_ready(input, status),
        None => container.readiness_probe.is_none(),
    }
}

/// Whether the API status reports this same instance as ready.
fn was_ready(input: &StatusInput<'_>, status: &api::ContainerStatus) -> bool {
    let Some(api_status) = input.pod.status.as_deref() else { return false };
    let lists = [&api_status.container_statuses, &api_status.init_container_statuses];
    let same = |s: &&api::ContainerStatus| s.container_id.is_some() && s.container_id == status.container_id;
    lists.into_iter().flatten().flatten().find(same).is_some_and(|s| s.ready)
}

/// Whether an earlier agent started the container.
fn is_inherited(input: &StatusInput<'_>, status: &api::ContainerStatus) -> bool {
    let started_at =
        status.state.as_ref().and_then(|s| s.running.as_ref()).and_then(|r| r.started_at.as_ref()).map(|t| t.0);
    let border = input.node.agent_started.checked_sub(BEFORE_AGENT);
    matches!((started_at, border), (Some(at), Ok(border)) if at < border)
}

fn outcome(input: &StatusInput<'_>, status: &api::ContainerStatus) -> ProbeOutcome {
    let id = status.container_id.as_deref().and_then(|id| id.split_once("://")).map(|(_, id)| ContainerId::from(id));
    id.map(|id| (input.probes)(&id)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{
        AGENT_STARTED, RuntimeState, StatusFixture, at, exited, observed, pod_with, running, status, waiting,
    };

    fn judged(
        probes: serde_json::Value,
        outcome: ProbeOutcome,
        entry: api::ContainerStatus,
        api_status: serde_json::Value,
    ) -> (Option<bool>, bool) {
        let mut container = probes;
        container["name"] = "c".into();
        let mut world = StatusFixture::new(
            pod_with(serde_json::json!({"containers": [container]})),
            observed(&[("c", RuntimeState::Running)]),
        );
        world.set_api_status(api_status);
        world.set_probes(outcome);
        let mut list = [entry];
        set_readiness(&world.input(), &mut [], &mut list);
        (list[0].started, list[0].ready)
    }

    fn entry(state: serde_json::Value) -> api::ContainerStatus {
        api::ContainerStatus { container_id: Some("containerd://c-0".to_owned()), ..status("c", state) }
    }

    /// Running, started this many seconds before the agent.
    fn older_than_agent(seconds: i64) -> api::ContainerStatus {
        entry(serde_json::json!({"running": {"startedAt": at(AGENT_STARTED - seconds).to_string()}}))
    }

    #[test]
    fn started_and_ready_follow_the_probes() {
        use serde_json::json;
        let startup = || json!({"startupProbe": {}});
        let readiness = || json!({"readinessProbe": {}});
        let none = ProbeOutcome::default();
        let probe_results = |startup, readiness| ProbeOutcome { startup, readiness };
        let carried = api::ContainerStatus { started: Some(true), ..entry(running()) };
        for (case, probes, outcome, entry, expected) in [
            ("no probes", json!({}), none, entry(running()), (true, true)),
            ("waits", json!({}), none, entry(waiting()), (false, false)),
            ("ended", json!({}), none, entry(exited(0)), (false, false)),
            ("startup not run yet", startup(), none, entry(running()), (false, false)),
            ("startup failed", startup(), probe_results(Some(false), None), carried.clone(), (false, false)),
            ("startup passed", startup(), probe_results(Some(true), None), entry(running()), (true, true)),
            ("started carried over", startup(), none, carried, (true, true)),
            ("readiness not run yet", readiness(), none, entry(running()), (true, false)),
            ("readiness passed", readiness(), probe_results(None, Some(true)), entry(running()), (true, true)),
            ("readiness failed", readiness(), probe_results(None, Some(false)), entry(running()), (true, false)),
        ] {
            let (started, ready) = judged(probes, outcome, entry, json!({}));
            assert_eq!((started, ready), (Some(expected.0), expected.1), "{case}");
        }
    }

    #[test]
    fn ac_05_11_readiness_survives_the_agent() {
        use serde_json::json;
        let probe = || json!({"readinessProbe": {}});
        let none = ProbeOutcome::default();
        let failed = ProbeOutcome { startup: None, readiness: Some(false) };
        let ready_status = |id: &str, ready: bool| {
            json!({"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [
                {"name": "c", "containerID": id, "ready": ready, "image": "", "imageID": "", "restartCount": 0}]})
        };
        let same = "containerd://c-0";
        for (case, outcome, age, api_status, expected) in [
            ("was ready, though another was not", none, 60, ready_status(same, true), true),
            ("was not ready", none, 60, ready_status(same, false), false),
            ("another instance was", none, 60, ready_status("containerd://older", true), false),
            ("nothing is known", none, 60, json!({}), false),
            ("too young to be inherited", none, 5, ready_status(same, true), false),
            ("probe fails", failed, 60, ready_status(same, true), false),
        ] {
            assert_eq!(judged(probe(), outcome, older_than_agent(age), api_status).1, expected, "{case}");
        }
        assert!(judged(json!({}), none, older_than_agent(60), json!({})).1, "no probe");
    }

    #[test]
    fn init_containers_are_ready_when_done() {
        let world = StatusFixture::new(crate::fixture::pod("Always", &["i", "i2", "s", "c"]), observed(&[]));
        let mut init = [status("i", exited(0)), status("i2", exited(1)), status("s", running())];
        set_readiness(&world.input(), &mut init, &mut []);
        assert_eq!(init.map(|s| (s.started, s.ready)), [(Some(false), true), (Some(false), false), (Some(true), true)]);
    }
}
