//! Builds a pod status from specification, observation, and probe results. Pure.
//!
//! Implements spec 02b §2.

use super::{
    BuildKind, StatusInput,
    addresses::{known_pod_ips, pod_ips, set_host_ips, set_pod_ips},
    conditions::{self, Containers, DISRUPTION_TARGET, is_owned},
    containers::Conversion,
    lookup,
    phase::{Phase, PhaseInput, phase},
    readiness, resources, restart_all,
};
use berth_types::{ContainerKind, Pod, api, observation::SandboxState, qos::Qos, spec::ephemeral_as_container};

/// Builds the status of a pod. The manager adds transition times, start time, and normal form (`accept`). The build is
/// idempotent: with its own output as `previous` it returns the same status.
pub fn build(input: &StatusInput<'_>) -> api::PodStatus {
    let empty = api::PodStatus::default();
    let old = input.previous.or(input.pod.status.as_deref()).unwrap_or(&empty);
    if was_refused(input, old) {
        return old.clone();
    }
    let mut status = claims_of_others(input.pod);
    status.qos_class = Some(Qos::of(input.pod).as_str().to_owned());
    set_pod_ips(&mut status, own_ips(input, old));
    let restarting = restart_all::triggered(input.pod, input.observed, old);
    let mut lists = Lists::convert(input, old, restarting);
    status.allocated_resources = resources::pod_allocated(input.pod);
    status.resources = Some(resources::pod_resources(input.pod, input.cgroup, old));

    let phase = final_phase(input, old, &lists, &mut status);
    status.phase = Some(phase.as_str().to_owned());
    readiness::set_readiness(input, &mut lists.init, &mut lists.regular);
    status.conditions = Some(all_conditions(input, old, &lists, phase, restarting));
    lists.put_into(&mut status);
    if input.node.api_client {
        set_host_ips(&mut status, input.pod, input.node.host_ips, old);
    }
    status
}

/// Whether the pod failed before any of its containers was created: the status then keeps the reason and lists no
/// containers (after a restart, kubelet adds containers with an unknown end, which hides the reason in `kubectl get`).
fn was_refused(input: &StatusInput<'_>, old: &api::PodStatus) -> bool {
    let is_nonempty = |list: &Option<Vec<api::ContainerStatus>>| list.as_ref().is_some_and(|list| !list.is_empty());
    let lists = [&old.init_container_statuses, &old.container_statuses, &old.ephemeral_container_statuses];
    let is_seen = !(input.observed.sandboxes.is_empty() && input.observed.containers.is_empty());
    Phase::of(old) == Some(Phase::Failed)
        && old.reason.as_ref().is_some_and(|reason| !reason.is_empty())
        && !is_seen
        && !lists.into_iter().any(is_nonempty)
}

/// Fields of the status that other components write and that are passed on unchanged.
fn claims_of_others(pod: &Pod) -> api::PodStatus {
    let Some(api_status) = pod.status.as_deref() else { return api::PodStatus::default() };
    api::PodStatus {
        resource_claim_statuses: api_status.resource_claim_statuses.clone(),
        extended_resource_claim_status: api_status.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: api_status.node_allocatable_resource_claim_statuses.clone(),
        ..Default::default()
    }
}

/// The three lists of container statuses.
struct Lists {
    init: Vec<api::ContainerStatus>,
    regular: Vec<api::ContainerStatus>,
    ephemeral: Vec<api::ContainerStatus>,
}

impl Lists {
    fn convert(input: &StatusInput<'_>, old: &api::PodStatus, restarting: bool) -> Self {
        let conversion = |kind, old| Conversion { input, kind, old, restarting };
        let init = conversion(ContainerKind::Init, old.init_container_statuses.as_deref().unwrap_or_default());
        let regular = conversion(ContainerKind::Regular, old.container_statuses.as_deref().unwrap_or_default());
        let ephemeral =
            conversion(ContainerKind::Ephemeral, old.ephemeral_container_statuses.as_deref().unwrap_or_default());
        let mut lists = Self {
            init: input.pod.init_containers().iter().map(|c| init.convert(c)).collect(),
            regular: input.pod.containers().iter().map(|c| regular.convert(c)).collect(),
            ephemeral: input
                .pod
                .ephemeral_containers()
                .iter()
                .map(|c| ephemeral.convert(&ephemeral_as_container(c)))
                .collect(),
        };
        for list in [&mut lists.regular, &mut lists.ephemeral] {
            list.sort_by(|a, b| a.name.cmp(&b.name));
        }
        lists
    }

    fn put_into(self, status: &mut api::PodStatus) {
        let some = |list: Vec<_>| Some(list).filter(|l| !l.is_empty());
        status.init_container_statuses = some(self.init);
        status.container_statuses = some(self.regular);
        status.ephemeral_container_statuses = some(self.ephemeral);
    }
}

/// Pod addresses, for a pod with its own network; the last known ones remain once no sandbox is ready.
fn own_ips(input: &StatusInput<'_>, old: &api::PodStatus) -> Vec<String> {
    let ips = pod_ips(&input.observed.ips, input.node.prefer_v6);
    let any_ready = input.observed.sandboxes.iter().any(|s| s.state == SandboxState::Ready);
    if ips.is_empty() && !any_ready && !input.pod.is_host_network() {
        return known_pod_ips(old);
    }
    ips.iter().map(ToString::to_string).collect()
}

/// Computes the phase, with its reason and message; a terminal pod stays terminal.
fn final_phase(input: &StatusInput<'_>, old: &api::PodStatus, lists: &Lists, status: &mut api::PodStatus) -> Phase {
    let initialized = input.pod.containers().iter().any(|c| input.observed.active().any(|seen| *seen.name == c.name));
    let computed = phase(&PhaseInput {
        pod: input.pod,
        init: &lists.init,
        regular: &lists.regular,
        terminal_build: input.kind == BuildKind::Terminal,
        initialized,
    });
    let ended = |phase: Option<Phase>| phase.filter(|p| p.is_terminal());
    let api_end = ended(Phase::parse(input.pod.api_phase()));
    let before = Phase::of(old);
    let mut phase = if computed.is_terminal() { computed } else { ended(before).or(api_end).unwrap_or(computed) };
    if Some(phase) == before {
        let api_status = input.pod.status.as_deref();
        let keep = |own: &Option<String>, api: Option<&String>| own.clone().filter(|t| !t.is_empty()).or(api.cloned());
        status.reason = keep(&old.reason, api_status.and_then(|s| s.reason.as_ref()));
        status.message = keep(&old.message, api_status.and_then(|s| s.message.as_ref()));
    }
    if let Some(eviction) = input.eviction {
        phase = Phase::Failed;
        status.reason = Some(eviction.reason.clone());
        status.message = Some(eviction.message.clone());
    }
    api_end.unwrap_or(phase)
}

fn all_conditions(
    input: &StatusInput<'_>,
    old: &api::PodStatus,
    lists: &Lists,
    phase: Phase,
    restarting: bool,
) -> Vec<api::PodCondition> {
    let pod = input.pod;
    let others = pod.status.iter().flat_map(|s| s.conditions.iter().flatten()).filter(|c| !is_owned(&c.type_));
    let mut all: Vec<api::PodCondition> = others.cloned().collect();
    if input.kind == BuildKind::Ongoing {
        all.extend(input.resize.iter().cloned());
    }
    if let Some(disruption) = lookup::condition(old, DISRUPTION_TARGET) {
        match all.iter_mut().find(|c| c.type_ == DISRUPTION_TARGET) {
            Some(existing) => existing.clone_from(disruption),
            None => all.push(disruption.clone()),
        }
    }
    all.push(conditions::ready_to_start(pod, input.observed, input.sandbox_ready));
    let statuses: Vec<api::ContainerStatus> = lists.init.iter().chain(&lists.regular).cloned().collect();
    let containers = Containers { pod, statuses: &statuses, phase };
    all.push(containers.initialized(old));
    let ready = containers.ready(&all);
    all.push(ready);
    all.push(containers.containers_ready());
    all.push(conditions::scheduled(pod));
    if restart_all::has_rule(pod) {
        all.push(restart_all::condition(pod, input.observed, restarting, phase));
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        Eviction, ProbeOutcome, StartFailure,
        fixture::{RuntimeState, StatusFixture, observed, pod, pod_with, sandbox},
        lookup::{condition, exit, last_exit, waiting_reason},
    };
    use proptest::prelude::*;
    use serde_json::json;

    fn condition_fields<'a>(status: &'a api::PodStatus, type_: &str) -> (&'a str, &'a str, &'a str) {
        let c = condition(status, type_).expect("the condition");
        (&c.status, c.reason.as_deref().unwrap_or_default(), c.message.as_deref().unwrap_or_default())
    }

    fn phase_of(status: &api::PodStatus) -> &str {
        status.phase.as_deref().unwrap_or_default()
    }

    #[test]
    fn a_pod_just_accepted_waits_for_initialisation() {
        // AC-02b-1
        let status = StatusFixture::new(pod("Always", &["i", "c"]), observed(&[])).build();
        for list in [&status.init_container_statuses, &status.container_statuses] {
            let entry = &list.as_ref().expect("a list")[0];
            assert_eq!(waiting_reason(entry), Some("PodInitializing"));
        }
        assert_eq!(phase_of(&status), "Pending");
        let message = "containers with incomplete status: [i]";
        assert_eq!(condition_fields(&status, "Initialized"), ("False", "ContainersNotInitialized", message));
        assert_eq!(condition_fields(&status, "PodReadyToStartContainers").0, "False");
        assert_eq!(condition_fields(&status, "PodScheduled").0, "True");
    }

    #[test]
    fn a_crash_loop_shows_the_back_off() {
        // AC-02b-2
        let mut world = StatusFixture::new(pod("Always", &["c"]), observed(&[("c", RuntimeState::Exited(1))]));
        let failure = StartFailure { reason: "CrashLoopBackOff".to_owned(), message: "back-off 10s …".to_owned() };
        world.failures = BTreeMap::from([("c".to_owned(), failure)]);
        let status = world.build();
        let entry = &status.container_statuses.as_ref().expect("a list")[0];
        assert_eq!((phase_of(&status), last_exit(entry).map(|e| e.exit_code)), ("Running", Some(1)));
        assert_eq!(
            condition_fields(&status, "ContainersReady"),
            ("False", "ContainersNotReady", "containers with unready status: [c]")
        );
    }

    #[test]
    fn phases_follow_exits() {
        for (case, policy, seen, expected, ready_reason) in [
            (
                "AC-02b-3",
                "OnFailure",
                vec![("c", RuntimeState::Exited(0)), ("d", RuntimeState::Exited(1))],
                "Running",
                "ContainersNotReady",
            ),
            (
                "AC-02b-4",
                "Never",
                vec![("c", RuntimeState::Exited(0)), ("d", RuntimeState::Exited(1))],
                "Failed",
                "PodFailed",
            ),
            (
                "AC-02b-5",
                "Never",
                vec![("s", RuntimeState::Running), ("c", RuntimeState::Exited(0))],
                "Running",
                "ContainersNotReady",
            ),
            (
                "AC-02b-6",
                "Never",
                vec![("s", RuntimeState::Exited(137)), ("c", RuntimeState::Exited(0))],
                "Succeeded",
                "PodCompleted",
            ),
        ] {
            let names: Vec<&str> = seen.iter().map(|(n, _)| *n).collect();
            let status = StatusFixture::new(pod(policy, &names), observed(&seen)).build();
            assert_eq!((phase_of(&status), condition_fields(&status, "Ready").1), (expected, ready_reason), "{case}");
        }
    }

    #[test]
    fn a_container_that_vanished_does_not_take_the_pod_back() {
        // AC-02b-9
        let mut world = StatusFixture::new(pod("Always", &["c"]), observed(&[("c", RuntimeState::Running)]));
        world.previous = Some(world.build());
        world.observed = observed(&[]);
        let status = world.build();
        let entry = &status.container_statuses.as_ref().expect("a list")[0];
        assert_eq!((phase_of(&status), entry.restart_count, exit(entry)), ("Running", 1, None));
        assert_eq!(last_exit(entry).map(|e| e.exit_code), Some(137));
    }

    #[test]
    fn a_pod_that_ended_stays_ended() {
        let mut world = StatusFixture::new(pod("Always", &["c"]), observed(&[("c", RuntimeState::Running)]));
        let mut before = world.build();
        before.phase = Some("Failed".to_owned());
        before.reason = Some("Evicted".to_owned());
        world.previous = Some(before);
        let status = world.build();
        assert_eq!((phase_of(&status), status.reason.as_deref()), ("Failed", Some("Evicted")), "cached end");
        world.previous = None;
        world.set_api_status(json!({"phase": "Succeeded", "reason": "Done"}));
        let status = world.build();
        assert_eq!((phase_of(&status), status.reason.as_deref()), ("Succeeded", Some("Done")), "the API's end");
    }

    #[test]
    fn an_eviction_fails_the_pod_with_its_own_words() {
        let mut world = StatusFixture::new(pod("Always", &["c"]), observed(&[("c", RuntimeState::Running)]));
        world.eviction = Some(Eviction { reason: "DeadlineExceeded".to_owned(), message: "too long".to_owned() });
        let status = world.build();
        assert_eq!(
            (phase_of(&status), status.reason.as_deref(), status.message.as_deref()),
            ("Failed", Some("DeadlineExceeded"), Some("too long"))
        );
        world.previous = Some(status.clone());
        world.eviction = None;
        assert_eq!(world.build().reason, status.reason, "the words stay with the phase");
        assert_eq!(condition_fields(&status, "Ready").1, "PodFailed");
    }

    #[test]
    fn conditions_of_others_are_kept_in_front() {
        // AC-02b-10
        let mut world = StatusFixture::new(pod("Always", &["c"]), observed(&[]));
        world.set_api_status(json!({"conditions": [
            {"type": "example.com/x", "status": "True"}, {"type": "Ready", "status": "True"}]}));
        let mut old = world.build();
        old.conditions.as_mut().expect("conditions").push(conditions::make(DISRUPTION_TARGET, true, "Evicted", ""));
        world.previous = Some(old);
        let status = world.build();
        let types: Vec<&str> = status.conditions.iter().flatten().map(|c| c.type_.as_str()).collect();
        let expected = [
            "example.com/x",
            "DisruptionTarget",
            "PodReadyToStartContainers",
            "Initialized",
            "Ready",
            "ContainersReady",
            "PodScheduled",
        ];
        assert_eq!(types, expected);
    }

    #[test]
    fn a_readiness_gate_keeps_the_pod_unready() {
        // AC-02b-8
        let gated = pod_with(json!({"containers": [{"name": "c"}], "readinessGates": [{"conditionType": "g"}]}));
        let mut world = StatusFixture::new(gated, observed(&[("c", RuntimeState::Running)]));
        let status = world.build();
        assert_eq!(
            (condition_fields(&status, "ContainersReady").0, condition_fields(&status, "Ready").1),
            ("True", "ReadinessGatesNotReady")
        );
        world.set_api_status(json!({"conditions": [{"type": "g", "status": "True"}]}));
        assert_eq!(condition_fields(&world.build(), "Ready").0, "True");
    }

    #[test]
    fn addresses_follow_the_nodes_family_and_outlive_the_sandbox() {
        // AC-02b-16
        let mut world = StatusFixture::new(pod("Always", &["c"]), observed(&[]));
        world.prefer_v6 = true;
        world.observed.ips = vec!["10.0.0.1".parse().expect("v4"), "fd00::1".parse().expect("v6")];
        let status = world.build();
        let ips = |s: &api::PodStatus| -> Vec<String> { s.pod_ips.iter().flatten().map(|i| i.ip.clone()).collect() };
        assert_eq!(
            (status.pod_ip.as_deref(), ips(&status)),
            (Some("fd00::1"), vec!["fd00::1".to_owned(), "10.0.0.1".to_owned()])
        );
        assert_eq!(status.host_ip, None, "standalone");
        world.previous = Some(status.clone());
        world.observed.ips.clear();
        assert_eq!(ips(&world.build()), ips(&status), "kept after the stop");
        world.observed.sandboxes = vec![sandbox("new", SandboxState::Ready, &[])];
        assert_eq!(ips(&world.build()), Vec::<String>::new(), "a new sandbox has its own");
    }

    #[test]
    fn the_terminal_build_clears_resizes() {
        let mut world = StatusFixture::new(pod("Never", &["c"]), observed(&[("c", RuntimeState::Exited(0))]));
        world.resize = vec![conditions::make(conditions::RESIZE_PENDING, true, "Deferred", "")];
        assert_eq!(condition_fields(&world.build(), "PodResizePending").1, "Deferred");
        world.kind = BuildKind::Terminal;
        assert_eq!(condition(&world.build(), "PodResizePending"), None);
    }

    #[test]
    fn all_containers_restart_once() {
        let ruled = pod_with(json!({"restartPolicy": "Never", "containers": [
            {"name": "a", "restartPolicy": "Never", "restartPolicyRules": [
                {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]},
            {"name": "b"}]}));
        let mut world =
            StatusFixture::new(ruled, observed(&[("a", RuntimeState::Exited(42)), ("b", RuntimeState::Running)]));
        let status = world.build();
        assert_eq!(condition_fields(&status, "AllContainersRestarting").0, "True");
        assert!(restart_all::in_progress(&status));
        world.previous = Some(status);
        world.observed = observed(&[]);
        let status = world.build();
        assert_eq!((condition_fields(&status, "AllContainersRestarting").0, phase_of(&status)), ("False", "Running"));
        let counts: Vec<i32> = status.container_statuses.iter().flatten().map(|s| s.restart_count).collect();
        assert_eq!(counts, [1, 1]);
        world.previous = Some(status);
        world.observed = observed(&[("a", RuntimeState::Running), ("b", RuntimeState::Running)]);
        let status = world.build();
        assert_eq!((condition_fields(&status, "AllContainersRestarting").0, phase_of(&status)), ("False", "Running"));
    }

    fn any_seen() -> impl Strategy<Value = RuntimeState> {
        prop_oneof![
            Just(RuntimeState::Running),
            Just(RuntimeState::Created),
            (0..3i32).prop_map(RuntimeState::Exited),
            Just(RuntimeState::Unknown)
        ]
    }

    proptest! {
        #[test]
        fn building_again_changes_nothing(
            policy in prop_oneof!["Always", "OnFailure", "Never"],
            first in prop::collection::vec(any_seen(), 3),
            then in prop::collection::vec(prop::option::of(any_seen()), 3),
            outcome in (prop::option::of(any::<bool>()), prop::option::of(any::<bool>())),
            terminal in any::<bool>(),
            deleting in any::<bool>(),
        ) {
            let names = ["i", "s", "c"];
            let seen: Vec<_> = names.iter().copied().zip(first).collect();
            let mut world = StatusFixture::new(pod(&policy, &names), observed(&seen));
            if deleting {
                world.delete();
            }
            world.set_probes(ProbeOutcome { startup: outcome.0, readiness: outcome.1 });
            world.previous = Some(world.build());
            world.observed = observed(&names.iter().copied().zip(then).filter_map(|(n, s)| Some((n, s?))).collect::<Vec<_>>());
            world.kind = if terminal { BuildKind::Terminal } else { BuildKind::Ongoing };
            // An instance that the runtime lost is reported as terminated once, then waits.
            world.previous = Some(world.build());
            let settled = world.build();
            world.previous = Some(settled.clone());
            prop_assert_eq!(world.build(), settled);
        }
    }
}
