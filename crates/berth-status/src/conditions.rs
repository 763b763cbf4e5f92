//! Pod conditions owned by the kubelet: Ready, ContainersReady, Initialized, and others. Pure.
//!
//! Implements spec 02b §7.

use super::{
    lookup::{ContainerStateRef, find, is_true, state},
    phase::Phase,
};
use berth_types::{
    Pod, api,
    observation::{NetworkMode, ObservedPod, SandboxState},
};

/// The pod is assigned to a node.
pub const POD_SCHEDULED: &str = "PodScheduled";
/// The pod can serve traffic.
pub const READY: &str = "Ready";
/// Initialization is complete.
pub const INITIALIZED: &str = "Initialized";
/// All containers are ready.
pub const CONTAINERS_READY: &str = "ContainersReady";
/// A granted resize is being actuated, or its actuation failed.
pub const RESIZE_IN_PROGRESS: &str = "PodResizeInProgress";
/// A resize is not accepted yet.
pub const RESIZE_PENDING: &str = "PodResizePending";
/// The sandbox exists and its network is configured.
pub const READY_TO_START: &str = "PodReadyToStartContainers";
/// All containers are being restarted in place.
pub const ALL_CONTAINERS_RESTARTING: &str = "AllContainersRestarting";
/// The pod is about to be terminated; other components also write this condition.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// Conditions that only a kubelet writes (spec 02b §1.1).
pub const OWNED: [&str; 8] = [
    POD_SCHEDULED,
    READY,
    INITIALIZED,
    CONTAINERS_READY,
    RESIZE_IN_PROGRESS,
    RESIZE_PENDING,
    READY_TO_START,
    ALL_CONTAINERS_RESTARTING,
];

/// Whether only a kubelet writes conditions of this type.
pub fn is_owned(type_: &str) -> bool {
    OWNED.contains(&type_)
}

/// Creates a condition; empty texts are omitted.
pub(super) fn make(type_: &str, holds: bool, reason: &str, message: &str) -> api::PodCondition {
    let text = |t: &str| (!t.is_empty()).then(|| t.to_owned());
    api::PodCondition {
        type_: type_.to_owned(),
        status: if holds { "True" } else { "False" }.to_owned(),
        reason: text(reason),
        message: text(message),
        ..Default::default()
    }
}

/// Inputs of most conditions.
pub struct Containers<'a> {
    /// Pod whose spec lists the expected containers and readiness gates.
    pub pod: &'a Pod,
    /// Statuses of init containers, followed by those of regular containers.
    pub statuses: &'a [api::ContainerStatus],
    /// Newly computed phase.
    pub phase: Phase,
}

impl Containers<'_> {
    fn of_generation(&self, condition: api::PodCondition) -> api::PodCondition {
        with_generation(self.pod, condition)
    }

    /// Computes `ContainersReady`.
    pub fn containers_ready(&self) -> api::PodCondition {
        let condition = self.containers_readiness(CONTAINERS_READY);
        self.of_generation(condition)
    }

    /// Computes `Ready`: all containers are ready and all readiness gates are true.
    pub fn ready(&self, others: &[api::PodCondition]) -> api::PodCondition {
        let containers = self.containers_readiness(READY);
        if containers.status != "True" {
            return self.of_generation(containers);
        }
        let closed: Vec<String> = self
            .pod
            .spec()
            .readiness_gates
            .iter()
            .flatten()
            .filter_map(|gate| closed_gate(&gate.condition_type, others))
            .collect();
        let condition = if closed.is_empty() {
            containers
        } else {
            make(READY, false, "ReadinessGatesNotReady", &closed.join(", "))
        };
        self.of_generation(condition)
    }

    fn containers_readiness(&self, type_: &str) -> api::PodCondition {
        if self.statuses.is_empty() {
            return make(type_, false, "UnknownContainerStatuses", "");
        }
        let sidecars = self.pod.init_containers().iter().filter(|c| Pod::is_sidecar(c));
        let (unknown, unready) = self.sort_out(sidecars.chain(self.pod.containers()), |_, status| status.ready);
        if self.phase == Phase::Succeeded && unknown.is_empty() {
            return make(type_, false, "PodCompleted", "");
        }
        if self.phase == Phase::Failed {
            return make(type_, false, "PodFailed", "");
        }
        match complaint(&unknown, "unready", &unready) {
            Some(message) => make(type_, false, "ContainersNotReady", &message),
            None => make(type_, true, "", ""),
        }
    }

    /// Computes `Initialized`, given the previous status.
    pub fn initialized(&self, old: &api::PodStatus) -> api::PodCondition {
        let condition = self.initialization(old);
        self.of_generation(condition)
    }

    fn initialization(&self, old: &api::PodStatus) -> api::PodCondition {
        let init = self.pod.init_containers();
        if self.statuses.is_empty() && !init.is_empty() {
            return make(INITIALIZED, false, "UnknownContainerStatuses", "");
        }
        let (unknown, incomplete) = self.sort_out(init.iter(), |container, status| {
            if Pod::is_sidecar(container) { status.started == Some(true) } else { status.ready }
        });
        if self.phase == Phase::Succeeded && unknown.is_empty() {
            return make(INITIALIZED, true, "PodCompleted", "");
        }
        let regular_started = self.pod.containers().iter().filter_map(|c| find(self.statuses, &c.name)).any(|status| {
            // A regular container that has ever left waiting proves that initialization was complete.
            matches!(state(status), ContainerStateRef::Running | ContainerStateRef::Terminated(_))
        });
        if regular_started {
            return make(INITIALIZED, true, "", "");
        }
        match complaint(&unknown, "incomplete", &incomplete) {
            // While all containers restart, initialization stays complete.
            Some(_) if is_true(old, INITIALIZED) => make(INITIALIZED, true, "", ""),
            Some(message) => make(INITIALIZED, false, "ContainersNotInitialized", &message),
            None => make(INITIALIZED, true, "", ""),
        }
    }

    /// Names of containers without a status, and of containers whose status is not good.
    fn sort_out<'c>(
        &self,
        containers: impl Iterator<Item = &'c api::Container>,
        good: impl Fn(&api::Container, &api::ContainerStatus) -> bool,
    ) -> (Vec<&'c str>, Vec<&'c str>) {
        let (mut unknown, mut bad) = (Vec::new(), Vec::new());
        for container in containers {
            match find(self.statuses, &container.name) {
                None => unknown.push(container.name.as_str()),
                Some(status) if !good(container, status) => bad.push(container.name.as_str()),
                Some(_) => {}
            }
        }
        (unknown, bad)
    }
}

/// `PodReadyToStartContainers`; `just_ready` where the observation is older than the sandbox.
pub fn ready_to_start(pod: &Pod, observed: &ObservedPod, just_ready: bool) -> api::PodCondition {
    with_generation(pod, make(READY_TO_START, just_ready || has_sandbox(pod, observed), "", ""))
}

/// `PodScheduled`, always true on a node.
pub fn scheduled(pod: &Pod) -> api::PodCondition {
    with_generation(pod, make(POD_SCHEDULED, true, "", ""))
}

/// Whether the newest sandbox is ready for containers.
fn has_sandbox(pod: &Pod, observed: &ObservedPod) -> bool {
    let Some(newest) = observed.sandboxes.first() else { return false };
    let ready = observed.sandboxes.iter().filter(|s| s.state == SandboxState::Ready).count();
    let wanted = if pod.is_host_network() { NetworkMode::Node } else { NetworkMode::Pod };
    newest.state == SandboxState::Ready
        && ready == 1
        && newest.network_mode == wanted
        && (pod.is_host_network() || !newest.has_network || !newest.ips.is_empty())
}

pub(super) fn with_generation(pod: &Pod, mut condition: api::PodCondition) -> api::PodCondition {
    condition.observed_generation = Some(pod.generation()).filter(|g| *g != 0);
    condition
}

/// Whether the state of a readiness gate changed, which may change `Ready`.
pub fn readiness_gates_changed(old: &Pod, new: &Pod) -> bool {
    let gate_message = |pod: &Pod, gate: &str| {
        let all = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        closed_gate(gate, all)
    };
    let mut gates = new.spec().readiness_gates.iter().flatten().map(|gate| &gate.condition_type);
    gates.any(|gate| gate_message(old, gate) != gate_message(new, gate))
}

fn closed_gate(type_: &str, conditions: &[api::PodCondition]) -> Option<String> {
    match conditions.iter().find(|c| c.type_ == type_) {
        None => Some(format!("corresponding condition of pod readiness gate {type_:?} does not exist.")),
        Some(c) if c.status != "True" => {
            Some(format!("the status of pod readiness gate {type_:?} is not \"True\", but {}", c.status))
        }
        Some(_) => None,
    }
}

fn complaint(unknown: &[&str], word: &str, bad: &[&str]) -> Option<String> {
    let mut messages = Vec::new();
    if !unknown.is_empty() {
        messages.push(format!("containers with unknown status: [{}]", unknown.join(" ")));
    }
    if !bad.is_empty() {
        messages.push(format!("containers with {word} status: [{}]", bad.join(" ")));
    }
    (!messages.is_empty()).then(|| messages.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{exited, observed, pod, pod_with, running, status, waiting};

    fn condition_fields(condition: &api::PodCondition) -> (&str, &str, &str) {
        let (reason, message) = (condition.reason.as_deref(), condition.message.as_deref());
        (&condition.status, reason.unwrap_or_default(), message.unwrap_or_default())
    }

    fn ready(name: &str, state: serde_json::Value) -> api::ContainerStatus {
        api::ContainerStatus { ready: true, started: Some(true), ..status(name, state) }
    }

    #[test]
    fn containers_are_ready_together() {
        let pod = pod("Never", &["i", "s", "c", "d"]);
        let some = [ready("s", running()), status("c", running())];
        let all = [ready("s", running()), ready("c", running()), ready("d", running())];
        for (case, statuses, phase, expected) in [
            ("none", &[][..], Phase::Running, ("False", "UnknownContainerStatuses", "")),
            (
                "some",
                &some[..],
                Phase::Running,
                (
                    "False",
                    "ContainersNotReady",
                    "containers with unknown status: [d], containers with unready status: [c]",
                ),
            ),
            ("all", &all[..], Phase::Running, ("True", "", "")),
            ("AC-02b-6", &all[..], Phase::Succeeded, ("False", "PodCompleted", "")),
            ("AC-02b-4", &all[..], Phase::Failed, ("False", "PodFailed", "")),
        ] {
            let containers = Containers { pod: &pod, statuses, phase };
            assert_eq!(condition_fields(&containers.containers_ready()), expected, "{case}");
            assert_eq!(condition_fields(&containers.ready(&[])), expected, "{case}");
        }
    }

    #[test]
    fn readiness_gates_keep_a_pod_unready() {
        // AC-02b-8
        let pod = pod_with(serde_json::json!({"containers": [{"name": "c"}],
            "readinessGates": [{"conditionType": "a"}, {"conditionType": "b"}]}));
        let statuses = [ready("c", running())];
        let containers = Containers { pod: &pod, statuses: &statuses, phase: Phase::Running };
        assert_eq!(condition_fields(&containers.containers_ready()).0, "True");
        let b = make("b", false, "", "");
        assert_eq!(
            condition_fields(&containers.ready(std::slice::from_ref(&b))),
            (
                "False",
                "ReadinessGatesNotReady",
                "corresponding condition of pod readiness gate \"a\" does not exist., the status of pod readiness gate \
                 \"b\" is not \"True\", but False"
            )
        );
        assert_eq!(condition_fields(&containers.ready(&[make("a", true, "", ""), make("b", true, "", "")])).0, "True");
    }

    #[test]
    fn a_pod_stays_initialised() {
        let pod = pod("Always", &["i", "s", "c"]);
        let fresh = api::PodStatus::default();
        let before = api::PodStatus { conditions: Some(vec![make(INITIALIZED, true, "", "")]), ..Default::default() };
        let waits = [status("i", waiting()), status("s", running()), status("c", waiting())];
        let done = [ready("i", exited(0)), ready("s", running()), status("c", waiting())];
        let runs = [status("i", waiting()), status("s", waiting()), status("c", running())];
        for (case, statuses, old, phase, expected) in [
            ("nothing known", &[][..], &fresh, Phase::Pending, ("False", "UnknownContainerStatuses", "")),
            (
                "AC-02b-1",
                &waits[..],
                &fresh,
                Phase::Pending,
                ("False", "ContainersNotInitialized", "containers with incomplete status: [i s]"),
            ),
            ("was before", &waits[..], &before, Phase::Pending, ("True", "", "")),
            ("all done", &done[..], &fresh, Phase::Pending, ("True", "", "")),
            ("a regular one runs", &runs[..], &fresh, Phase::Running, ("True", "", "")),
            ("over", &done[..], &fresh, Phase::Succeeded, ("True", "PodCompleted", "")),
        ] {
            let containers = Containers { pod: &pod, statuses, phase };
            assert_eq!(condition_fields(&containers.initialized(old)), expected, "{case}");
        }
    }

    #[test]
    fn the_sandbox_must_be_the_only_ready_one_and_have_a_network() {
        use crate::fixture::sandbox;
        let plain = pod("Always", &["c"]);
        let host = pod_with(serde_json::json!({"hostNetwork": true, "containers": [{"name": "c"}]}));
        let with = |sandboxes: Vec<_>| ObservedPod { sandboxes, ..observed(&[]) };
        let good = sandbox("s", SandboxState::Ready, &["10.0.0.1"]);
        let mut no_ip = sandbox("s", SandboxState::Ready, &[]);
        let mut node = good.clone();
        node.network_mode = NetworkMode::Node;
        for (case, pod, sandboxes, expected) in [
            ("none", &plain, vec![], "False"),
            ("good", &plain, vec![good.clone()], "True"),
            ("stopped", &plain, vec![sandbox("s", SandboxState::NotReady, &["10.0.0.1"])], "False"),
            ("two ready", &plain, vec![good.clone(), good.clone()], "False"),
            ("old one stopped", &plain, vec![good.clone(), sandbox("o", SandboxState::NotReady, &[])], "True"),
            ("no address", &plain, vec![no_ip.clone()], "False"),
            ("other mode", &plain, vec![node.clone()], "False"),
            ("host network", &host, vec![node], "True"),
        ] {
            assert_eq!(ready_to_start(pod, &with(sandboxes), false).status, expected, "{case}");
        }
        no_ip.has_network = false;
        assert_eq!(ready_to_start(&plain, &with(vec![no_ip]), false).status, "True", "runtime without network report");
        assert_eq!(ready_to_start(&plain, &with(vec![]), true).status, "True", "reported before it is observed");
    }
}
