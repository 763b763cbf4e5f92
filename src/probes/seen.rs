//! What a pod's status says to one of its probes. Pure. Behaviour: spec 05 §1.3.

use jiff::Timestamp;

use super::kind::Declared;
use berth_types::{ContainerId, Pod, api, restart::restarts_after_exit};

/// The pod as its latest status tells of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// It has failed or succeeded.
    pub is_over: bool,
    /// Its deletion was asked for.
    pub is_deleting: bool,
    /// The container's instance, once it has one.
    pub instance: Option<Instance>,
}

/// One instance of a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Instance {
    /// The runtime's id.
    pub id: ContainerId,
    /// Whether it runs.
    pub state: State,
    /// Whether it counts as started.
    pub is_started: bool,
}

/// What an instance does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It runs, since then where the runtime says so.
    Running(Option<Timestamp>),
    /// It does not run yet, or not yet again.
    Waiting,
    /// It has ended, and another one will be started.
    WillRestart,
    /// It has ended for good.
    Ended,
}

/// Reads the status for one probe; `restart_all` where all containers of the pod are being restarted.
pub fn seen(pod: &Pod, probe: &Declared<'_>, status: &api::PodStatus, restart_all: bool) -> Seen {
    Seen {
        is_over: matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")),
        is_deleting: pod.is_deleting(),
        instance: own_status(status, &probe.container.name).and_then(|own| instance(pod, probe, own, restart_all)),
    }
}

/// The status of a container, regular ones first.
fn own_status<'a>(status: &'a api::PodStatus, name: &str) -> Option<&'a api::ContainerStatus> {
    let lists = [&status.container_statuses, &status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|own| own.name == name)
}

fn instance(pod: &Pod, probe: &Declared<'_>, own: &api::ContainerStatus, restart_all: bool) -> Option<Instance> {
    let (_, id) = own.container_id.as_deref()?.split_once("://")?;
    let state = own.state.as_ref();
    let state = if let Some(running) = state.and_then(|s| s.running.as_ref()) {
        State::Running(running.started_at.as_ref().map(|at| at.0))
    } else if let Some(ended) = state.and_then(|s| s.terminated.as_ref()) {
        let again = Pod::is_sidecar(probe.container)
            || restart_all
            || restarts_after_exit(pod, probe.container, ended.exit_code);
        if again { State::WillRestart } else { State::Ended }
    } else {
        State::Waiting
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

    fn look(policy: &str, container: Value, own: Value, restart_all: bool) -> Option<Instance> {
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
        assert_eq!(look("Always", json!({}), json!({"state": {"waiting": {}}}), false), None);
        let own = json!({"containerID": "containerd://x", "started": true, "state": {"waiting": {}}});
        let expected = Instance { id: "x".into(), state: State::Waiting, is_started: true };
        assert_eq!(look("Always", json!({}), own, false), Some(expected));
        let own = json!({"containerID": "containerd://x", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}});
        let at = "2026-01-01T00:00:00Z".parse().expect("a time");
        let expected = Instance { id: "x".into(), state: State::Running(Some(at)), is_started: false };
        assert_eq!(look("Always", json!({}), own, false), Some(expected));
    }

    #[test]
    fn what_has_ended_is_waited_for_where_it_comes_back() {
        let rule = json!({"restartPolicy": "Never", "restartPolicyRules": [
            {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]});
        for (policy, container, code, restart_all, expected) in [
            ("Always", json!({}), 0, false, State::WillRestart),
            ("OnFailure", json!({}), 1, false, State::WillRestart),
            ("OnFailure", json!({}), 0, false, State::Ended),
            ("Never", json!({}), 1, false, State::Ended),
            ("Never", json!({}), 1, true, State::WillRestart),
            ("Never", json!({"restartPolicy": "Always"}), 0, false, State::WillRestart),
            ("Always", rule.clone(), 1, false, State::Ended),
            ("Always", rule, 42, false, State::WillRestart),
        ] {
            let own = json!({"containerID": "containerd://x", "state": {"terminated": {"exitCode": code}}});
            let told = look(policy, container.clone(), own, restart_all).map(|i| i.state);
            assert_eq!(told, Some(expected), "{policy} {container} {code}");
        }
    }
}
