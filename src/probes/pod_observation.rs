//! Observation of a container in its pod's status, for one probe. Pure.
//!
//! Implements spec 05 §1.3.

use jiff::Timestamp;

use super::kind::DeclaredProbe;
use berth_types::{ContainerId, Pod, api, restart_decision::restarts_after_exit};

/// Observation of the pod, from its latest status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodObservation {
    /// The pod's phase is Failed or Succeeded.
    pub is_over: bool,
    /// The pod is being deleted.
    pub is_deleting: bool,
    /// Instance of the container, once it has one.
    pub instance: Option<Instance>,
}

/// One instance of a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Instance {
    /// Container ID of the runtime.
    pub id: ContainerId,
    /// State of the instance.
    pub state: InstanceState,
    /// Whether the container status reports it as started.
    pub is_started: bool,
}

/// State of a container instance in the pod status, as far as probes depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InstanceState {
    /// Running, with the start time if the runtime reports it.
    Running(Option<Timestamp>),
    /// Waiting to start, or to restart.
    Waiting,
    /// Terminated, and will be restarted.
    WillRestart,
    /// Terminated for good.
    Ended,
}

/// Reads the status for one probe; `restart_all` is set while all containers of the pod are being restarted.
pub fn seen(pod: &Pod, probe: &DeclaredProbe<'_>, status: &api::PodStatus, restart_all: bool) -> PodObservation {
    PodObservation {
        is_over: matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")),
        is_deleting: pod.is_deleting(),
        instance: own_status(status, &probe.container.name).and_then(|own| instance(pod, probe, own, restart_all)),
    }
}

/// Status of a container, those of regular containers first.
fn own_status<'a>(status: &'a api::PodStatus, name: &str) -> Option<&'a api::ContainerStatus> {
    let lists = [&status.container_statuses, &status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|own| own.name == name)
}

fn instance(pod: &Pod, probe: &DeclaredProbe<'_>, own: &api::ContainerStatus, restart_all: bool) -> Option<Instance> {
    let (_, id) = own.container_id.as_deref()?.split_once("://")?;
    let state = own.state.as_ref();
    let state = if let Some(running) = state.and_then(|s| s.running.as_ref()) {
        InstanceState::Running(running.started_at.as_ref().map(|at| at.0))
    } else if let Some(ended) = state.and_then(|s| s.terminated.as_ref()) {
        let again = Pod::is_sidecar(probe.container)
            || restart_all
            || restarts_after_exit(pod, probe.container, ended.exit_code);
        if again { InstanceState::WillRestart } else { InstanceState::Ended }
    } else {
        InstanceState::Waiting
    };
    Some(Instance { id: id.into(), state, is_started: own.started == Some(true) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probes::{
        kind::declared,
        testing::{pod, status},
    };
    use serde_json::{Value, json};

    fn observe_instance(policy: &str, container: Value, own: Value, restart_all: bool) -> Option<Instance> {
        let mut container = container;
        container["name"] = "c".into();
        container["livenessProbe"] = json!({"tcpSocket": {"port": 1}});
        let pod = pod(json!({"restartPolicy": policy, "containers": [container]}));
        let mut own = own;
        own["name"] = "c".into();
        let probe = declared(&pod).next().expect("a probe");
        seen(&pod, &probe, &status(json!({"phase": "Running", "containerStatuses": [own]})), restart_all).instance
    }

    #[test]
    fn an_instance_is_what_has_an_id() {
        assert_eq!(observe_instance("Always", json!({}), json!({"state": {"waiting": {}}}), false), None);
        let own = json!({"containerID": "containerd://x", "started": true, "state": {"waiting": {}}});
        let expected = Instance { id: "x".into(), state: InstanceState::Waiting, is_started: true };
        assert_eq!(observe_instance("Always", json!({}), own, false), Some(expected));
        let own = json!({"containerID": "containerd://x", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}});
        let at = "2026-01-01T00:00:00Z".parse().expect("a time");
        let expected = Instance { id: "x".into(), state: InstanceState::Running(Some(at)), is_started: false };
        assert_eq!(observe_instance("Always", json!({}), own, false), Some(expected));
    }

    #[test]
    fn what_has_ended_is_waited_for_where_it_comes_back() {
        let rule = json!({"restartPolicy": "Never", "restartPolicyRules": [
            {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]});
        for (policy, container, code, restart_all, expected) in [
            ("Always", json!({}), 0, false, InstanceState::WillRestart),
            ("OnFailure", json!({}), 1, false, InstanceState::WillRestart),
            ("OnFailure", json!({}), 0, false, InstanceState::Ended),
            ("Never", json!({}), 1, false, InstanceState::Ended),
            ("Never", json!({}), 1, true, InstanceState::WillRestart),
            ("Never", json!({"restartPolicy": "Always"}), 0, false, InstanceState::WillRestart),
            ("Always", rule.clone(), 1, false, InstanceState::Ended),
            ("Always", rule, 42, false, InstanceState::WillRestart),
        ] {
            let own = json!({"containerID": "containerd://x", "state": {"terminated": {"exitCode": code}}});
            let state = observe_instance(policy, container.clone(), own, restart_all).map(|i| i.state);
            assert_eq!(state, Some(expected), "{policy} {container} {code}");
        }
    }
}
