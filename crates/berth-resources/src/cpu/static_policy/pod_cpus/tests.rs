//! Tests of the CPUs of pods with pod-level resources: parts, refusals, hints, random sequences. Pure.

use std::collections::HashSet;

use berth_types::quantity::{Amount, QuantityFormat};
use proptest::prelude::*;

use super::*;
use crate::{
    cpu::{
        CpuAllocation, ReservedCpus, ReusableCpus, StaticOptions,
        checkpoint::{InitialContainers, decode, encode},
        fixtures::{Containers, cpus, pod, pod_level, state},
    },
    numa::TopologyHint,
    pod_level::PodLevelManagement,
    topology::{
        CpuTopology,
        machines::{machine, machine_a, machine_b},
    },
};

/// Policy with the gate on and one reserved CPU.
fn policy(topology: CpuTopology, options: StaticOptions) -> StaticPolicy {
    let options = StaticOptions { pod_level: PodLevelManagement::On, ..options };
    let count = Amount::from_value(1, QuantityFormat::DecimalSi);
    let reserved = ReservedCpus::choose(&topology, count, &CpuSet::default(), options).expect("a reserved CPU");
    StaticPolicy { topology, reserved, options }
}

fn fresh(policy: &StaticPolicy) -> CpuState {
    let mut state = CpuState::default();
    policy.initialize(&mut state).expect("a fresh state");
    state
}

#[test]
fn containers_get_parts_or_share_the_pool_of_the_pod() {
    let policy = policy(machine_a(), StaticOptions::default());
    type Case<'a> = (&'a str, Containers<'a>, Containers<'a>, &'a str, &'a [(&'a str, &'a str)], usize);
    let cases: [Case<'_>; 6] = [
        ("4", &[], &["a=1", "b=2", "c"], "1-2,5-6", &[("a", "1"), ("b", "2,6"), ("c", "5")], 2),
        ("4", &[], &["a", "b"], "1-2,5-6", &[("a", "1-2,5-6"), ("b", "1-2,5-6")], 0),
        ("2", &[], &["a=500m", "b=1"], "1,5", &[("a", "5"), ("b", "1")], 1),
        ("2", &["s*"], &["a=1"], "1,5", &[("a", "1"), ("s", "5")], 1),
        ("4", &[], &["a=2", "b=2"], "1-2,5-6", &[("a", "1,5"), ("b", "2,6")], 2),
        // Init containers run on what the sidecars before them leave.
        (
            "4",
            &["i=3", "s*=1", "j"],
            &["a=2", "b"],
            "1-2,5-6",
            &[("i", "1-2,5"), ("s", "1"), ("j", "2,5-6"), ("a", "2,6"), ("b", "5")],
            3,
        ),
    ];
    for (cpu, init, regular, whole, parts, exclusive) in cases {
        let (pod, mut state) = (pod_level("p", cpu, init, regular), fresh(&policy));
        let allocation = policy.allocate_pod(&mut state, &pod, None).expect("enough CPUs");
        let shared = parts.len() - exclusive;
        assert!(allocation.alignment.is_some(), "{init:?} {regular:?}");
        assert_eq!((allocation.exclusive, allocation.shared), (exclusive, shared), "{init:?} {regular:?}");
        assert_eq!(state.pod_entries.get(pod.uid()), Some(&cpus(whole)), "{init:?} {regular:?}");
        for (container, part) in parts {
            assert_eq!(state.container(pod.uid(), container), Some(&cpus(part)), "{init:?} {regular:?} {container}");
        }
        assert_eq!(state.default, cpus("0-7").difference(&cpus(whole)));
        // The pod keeps what it has.
        let before = state.clone();
        let again = policy.allocate_pod(&mut state, &pod, None);
        assert_eq!(again, Ok(PodCpuAllocation { alignment: None, ..allocation }));
        assert_eq!(state, before);
        assert!(state.release_pod(pod.uid()));
        assert_eq!(state, fresh(&policy));
    }
}

#[test]
fn cpus_of_a_pod_come_from_the_chosen_node() {
    let policy = policy(machine_b(), StaticOptions::default());
    let (pod, mut state) = (pod_level("p", "4", &[], &["a=1", "b"]), fresh(&policy));
    policy.allocate_pod(&mut state, &pod, Some(NumaMask::from_bits(2))).expect("enough CPUs");
    assert_eq!(state.pod_entries.get(pod.uid()), Some(&cpus("1,3,7,9")));
}

#[test]
fn only_whole_pod_level_requests_of_guaranteed_pods_count() {
    let with_gate = policy(machine_a(), StaticOptions::default());
    let without = StaticPolicy { options: StaticOptions::default(), ..with_gate.clone() };
    for (pod, of_pod, of_container) in [
        (pod_level("p", "4", &[], &["c=2"]), 4, 2),
        (pod_level("p", "1500m", &[], &["c=1"]), 0, 1),
        (pod_level("p", "4", &[], &["c"]), 4, 0),
        (pod_level("p", "4", &[], &["c=500m"]), 4, 0),
    ] {
        let container = &pod.containers()[0];
        assert_eq!((with_gate.pod_cpus(&pod), with_gate.container_cpus(&pod, container)), (of_pod, of_container));
        assert_eq!((without.pod_cpus(&pod), without.container_cpus(&pod, container)), (0, 0));
        let mut state = fresh(&without);
        assert_eq!(without.allocate_pod(&mut state, &pod, None), Ok(PodCpuAllocation::default()));
        assert_eq!(state, fresh(&without));
    }
    // A pod without pod-level resources is as without the gate.
    let pod = pod("p", &[], &["c=2"]);
    assert_eq!((with_gate.pod_cpus(&pod), with_gate.container_cpus(&pod, &pod.containers()[0])), (0, 2));
}

#[test]
fn refused_pods_change_nothing() {
    let default = StaticOptions::default();
    let full = StaticOptions { full_cores_only: true, ..default };
    let empty = Some("EmptyPodSharedPoolError");
    type Case<'a> = (StaticOptions, &'a str, Containers<'a>, Containers<'a>, Option<&'a str>, &'a str);
    let cases: [Case<'_>; 6] = [
        (
            default,
            "4",
            &[],
            &["a=1", "b=3", "c"],
            empty,
            "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared \
             containers",
        ),
        (
            default,
            "2",
            &["s*=2", "i"],
            &["a=1"],
            empty,
            "pod rejected, pod has shared init containers but no cpus available for them",
        ),
        (
            default,
            "2",
            &["s*=1", "i=2"],
            &["a=1"],
            empty,
            "pod rejected, largest exclusive init container requests 2 cpus, but only 1 available",
        ),
        (default, "8", &[], &["a"], None, "not enough cpus available to satisfy request: requested=8, available=7"),
        // More than the pod has: not valid in the API.
        (default, "2", &[], &["a=3"], None, "not enough cpus available to satisfy request: requested=3, available=2"),
        (
            full,
            "3",
            &[],
            &["a"],
            Some("SMTAlignmentError"),
            "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2",
        ),
    ];
    for (options, cpu, init, regular, reason, text) in cases {
        let policy = policy(machine_a(), options);
        let mut state = fresh(&policy);
        let error = policy.allocate_pod(&mut state, &pod_level("p", cpu, init, regular), None).expect_err(text);
        assert_eq!((error.reason(), error.to_string().as_str()), (reason, text));
        assert_eq!(state, fresh(&policy), "{text}");
    }
}

#[test]
fn hints_follow_from_the_pod_level_request() {
    let policy = policy(machine_b(), StaticOptions::default());
    let pod = pod_level("p", "4", &[], &["a=1", "b"]);
    let hint = |bits, is_preferred| TopologyHint { mask: Some(NumaMask::from_bits(bits)), is_preferred };
    let hints = |state: &CpuState, pod: &Pod| policy.pod_hints(state, &ReusableCpus::default(), pod);
    // CPU 0 of node 0 is reserved.
    let free = [hint(1, true), hint(2, true), hint(3, false)];
    assert_eq!(hints(&fresh(&policy), &pod), Some(free.to_vec()));
    // The CPUs of the pod decide, whatever its containers have.
    let assigned = state("0,2,4-6,8,10-11", &[("p", "1,3,7,9"), ("p/a", "1"), ("p/b", "3,7,9")]);
    assert_eq!(hints(&assigned, &pod), Some(vec![hint(2, true), hint(3, false)]));
    for (pod, expected) in [
        (pod_level("p", "2", &[], &["a=1", "b"]), Some(Vec::new())),
        (pod_level("q", "4", &[], &["a=4", "b"]), Some(Vec::new())),
        (pod_level("q", "1500m", &[], &["a=1"]), None),
    ] {
        assert_eq!(hints(&assigned, &pod), expected, "{}", pod.uid());
    }
}

fn whole_pods() -> Vec<Pod> {
    vec![
        pod_level("a", "2", &[], &["c=1", "d"]),
        pod_level("b", "4", &["i=3", "s*=1", "j"], &["c=2", "d", "e"]),
        pod_level("c", "1", &["i"], &["c"]),
        pod_level("d", "3", &["s*"], &["c=2"]),
        pod("e", &["i=2"], &["c=1"]),
        pod("f", &[], &["c=2", "d=500m"]),
    ]
}

/// Allocates as in the scope `pod`; a refused pod is released, as after its rejection.
fn admit(policy: &StaticPolicy, state: &mut CpuState, reusable: &mut ReusableCpus, pod: &Pod) {
    let is_admitted = match policy.options.pod_level.manages(pod) {
        true => policy.allocate_pod(state, pod, None).is_ok(),
        false => pod.init_containers().iter().chain(pod.containers()).all(|container| {
            let allocated: Result<CpuAllocation, _> = policy.allocate(state, reusable, pod, container, None);
            allocated.is_ok()
        }),
    };
    if !is_admitted {
        state.release_pod(pod.uid());
    }
}

/// Checks that no CPU of a pod is used outside of it, and none of a container's part by another running container.
fn check(policy: &StaticPolicy, state: &CpuState, pods: &[Pod]) {
    let exclusive = state.exclusive();
    assert!(state.default.is_disjoint(&exclusive), "{state:?}");
    assert_eq!(state.default.union(&exclusive), policy.topology.all(), "{state:?}");
    assert!(exclusive.is_disjoint(&policy.reserved.cpus), "{state:?}");
    let whole = |pod: &Pod| state.pod(pod.uid()).union(state.pod_entries.get(pod.uid()).unwrap_or(&CpuSet::default()));
    assert_eq!(pods.iter().map(|pod| whole(pod).len()).sum::<usize>(), exclusive.len(), "{state:?}");
    for pod in pods.iter().filter(|pod| state.pod_entries.contains_key(pod.uid())) {
        let entry = &state.pod_entries[pod.uid()];
        assert_eq!(entry.len(), policy.pod_cpus(pod), "{state:?}");
        let sidecars = pod.init_containers().iter().filter(|container| Pod::is_sidecar(container));
        let running: Vec<&api::Container> = sidecars.chain(pod.containers()).collect();
        let (own, shared): (Vec<&api::Container>, Vec<_>) =
            running.into_iter().partition(|container| policy.container_cpus(pod, container) > 0);
        let part = |container: &api::Container| state.container(pod.uid(), &container.name).expect("a part").clone();
        let mut taken = CpuSet::default();
        for container in own {
            let cpus = part(container);
            assert_eq!(cpus.len(), policy.container_cpus(pod, container), "{state:?}");
            assert!(cpus.is_disjoint(&taken), "{state:?}");
            taken = taken.union(&cpus);
        }
        for container in shared {
            assert_eq!(part(container), entry.difference(&taken), "{state:?}");
        }
        for cpus in state.assignments[pod.uid()].values() {
            assert!(cpus.is_subset(entry) && !cpus.is_empty(), "{state:?}");
        }
    }
}

fn any_topology() -> impl Strategy<Value = CpuTopology> {
    (0..4).prop_map(|index| match index {
        0 => machine_a(),
        1 => machine_b(),
        2 => machine(2, 2, 2, 2),
        _ => machine(1, 4, 3, 1),
    })
}

#[derive(Clone, Debug)]
enum PodCpuStep {
    Admit { pod: usize },
    ReleasePod { pod: usize },
    Restart,
}

fn any_step() -> impl Strategy<Value = PodCpuStep> {
    prop_oneof![
        4 => (0_usize..6).prop_map(|pod| PodCpuStep::Admit { pod }),
        2 => (0_usize..6).prop_map(|pod| PodCpuStep::ReleasePod { pod }),
        1 => Just(PodCpuStep::Restart),
    ]
}

proptest! {
    #[test]
    fn no_cpu_of_a_pod_is_used_outside_of_it(
        topology in any_topology(),
        spreads in any::<bool>(),
        steps in prop::collection::vec(any_step(), 1..16),
    ) {
        let policy = policy(topology, StaticOptions { distributes_over_nodes: spreads, ..StaticOptions::default() });
        let (pods, mut state, mut reusable) = (whole_pods(), fresh(&policy), ReusableCpus::default());
        for step in steps {
            match step {
                PodCpuStep::Admit { pod } => admit(&policy, &mut state, &mut reusable, &pods[pod]),
                PodCpuStep::ReleasePod { pod } => {
                    state.release_pod(pods[pod].uid());
                    prop_assert!(!state.has_pod(pods[pod].uid()));
                }
                PodCpuStep::Restart => {
                    let restored = decode(&encode("static", &state), "static", &InitialContainers::new());
                    prop_assert_eq!(restored.as_ref(), Ok(&state));
                    prop_assert_eq!(policy.initialize(&mut state), Ok(false));
                    reusable = ReusableCpus::default();
                }
            }
            check(&policy, &state, &pods);
        }
        state.retain(&HashSet::new());
        prop_assert_eq!(state, fresh(&policy));
    }
}
