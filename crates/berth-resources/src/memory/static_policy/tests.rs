//! Tests of the static memory policy: allocation, reuse, release, validation, random sequences.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::memory::fixture::{GI, MI, Role, mask, pod, pod_with_spec, reserved, topology, two_nodes};

use Role::{App, Init, Sidecar};

const ANY: TopologyHint = TopologyHint { mask: None, is_preferred: false };

fn on(nodes: &[u32], is_preferred: bool) -> TopologyHint {
    TopologyHint { mask: Some(mask(nodes)), is_preferred }
}

fn policy() -> StaticMemoryPolicy {
    let (topology, reserved) = two_nodes();
    StaticMemoryPolicy::new(&topology, &reserved)
}

fn container(pod: &Pod, index: usize) -> &api::Container {
    containers(pod).nth(index).expect("a container")
}

/// Allocates all containers of a pod; they must succeed.
fn admit(policy: &mut StaticMemoryPolicy, pod: &Pod, hint: TopologyHint) {
    for container in containers(pod) {
        assert_eq!(policy.allocate(pod, container, hint), Ok(MemoryAllocation::New), "{}", container.name);
    }
}

/// Sizes in GiB of the first block of each container; `None` without an entry.
fn sizes(policy: &StaticMemoryPolicy, pod: &Pod) -> Vec<Option<u64>> {
    let recorded = containers(pod).map(|container| policy.recorded(pod.uid(), &container.name));
    recorded.map(|blocks| blocks.map(|blocks| blocks[0].size / GI)).collect()
}

/// Free memory of each node in GiB.
fn free(policy: &StaticMemoryPolicy) -> Vec<u64> {
    policy.state.machine.nodes.values().map(|node| node.tables["memory"].free / GI).collect()
}

fn groups(policy: &StaticMemoryPolicy) -> Vec<NumaMask> {
    policy.state.machine.nodes.values().map(|node| node.group).collect()
}

/// What the next agent makes of the checkpoint.
fn restart(policy: &StaticMemoryPolicy) -> Result<StaticMemoryPolicy, MemoryStateError> {
    let (topology, reserved) = two_nodes();
    restore(&topology, &reserved, policy)
}

fn restore(
    topology: &MachineTopology,
    reserved: &ReservedMemory,
    policy: &StaticMemoryPolicy,
) -> Result<StaticMemoryPolicy, MemoryStateError> {
    let content = policy.checkpoint().encode();
    let state = MemoryCheckpoint::restore(&content, MemoryPolicy::Static).expect("a checkpoint");
    StaticMemoryPolicy::restore(topology, reserved, state)
}

#[test]
fn a_large_container_uses_several_nodes_that_then_stay_together() {
    // AC-06b-24
    let mut policy = policy();
    let large = pod("large", &[(App, 6 * GI, 0)]);
    admit(&mut policy, &large, ANY);
    let block = MemoryBlock { nodes: mask(&[0, 1]), resource: "memory".to_owned(), size: 6 * GI };
    assert_eq!(policy.blocks_of(large.uid(), "c0"), [block]);
    assert_eq!((free(&policy), groups(&policy)), (vec![0, 2], vec![mask(&[0, 1]); 2]));

    // AC-06b-25
    let small = pod("small", &[(App, GI, 0)]);
    let hint = on(&[0, 1], false);
    let hints: ProviderHints = [("memory".to_owned(), Some(vec![hint]))].into();
    assert_eq!(policy.container_hints(&small, container(&small, 0)), hints);
    assert_eq!(policy.pod_hints(&small), hints);
    for given in [ANY, hint] {
        let mut policy = policy.clone();
        admit(&mut policy, &small, given);
        assert_eq!(policy.mems_of(small.uid(), "c0"), mask(&[0, 1]));
        assert_eq!((free(&policy), groups(&policy)), (vec![0, 1], vec![mask(&[0, 1]); 2]));
        assert_eq!(restart(&policy), Ok(policy));
    }
    let refused = policy.clone().allocate(&small, container(&small, 0), TopologyHint { is_preferred: true, ..ANY });
    let error = refused.expect_err("a preferred hint is required");
    assert_eq!(error.to_string(), "[memorymanager] failed to find the default preferred hint");

    assert!(policy.release(large.uid(), "c0") && !policy.release(large.uid(), "c0"));
    assert_eq!(policy, self::policy());
}

#[test]
fn only_guaranteed_pods_without_pod_level_resources_are_pinned() {
    let amounts = json!({"cpu": "1", "memory": "1Gi"});
    let guaranteed = json!({"name": "c0", "resources": {"requests": amounts, "limits": amounts}});
    for (spec, expected) in [
        (json!({"containers": [guaranteed]}), true),
        (json!({"containers": [guaranteed], "resources": {}}), true),
        (json!({"containers": [guaranteed], "resources": {"requests": {"x.y/z": "1"}, "limits": {}}}), false),
        (json!({"containers": [guaranteed], "resources": {"requests": amounts, "limits": amounts}}), false),
        (json!({"containers": [guaranteed, {"name": "c1"}]}), false),
        (json!({"containers": [{"name": "c0", "resources": {"requests": amounts}}]}), false),
        (json!({"containers": [{"name": "c0"}]}), false),
    ] {
        let (mut policy, pod) = (policy(), pod_with_spec("p", spec.clone()));
        assert_eq!(is_pinned(&pod), expected, "{spec}");
        let has_hints = !policy.container_hints(&pod, container(&pod, 0)).is_empty();
        assert_eq!((has_hints, !policy.pod_hints(&pod).is_empty()), (expected, expected), "{spec}");
        let outcome = if expected { MemoryAllocation::New } else { MemoryAllocation::NotPinned };
        assert_eq!(policy.allocate(&pod, container(&pod, 0), ANY), Ok(outcome), "{spec}");
        assert_eq!(!policy.mems_of(pod.uid(), "c0").is_empty(), expected, "{spec}");
    }
}

#[test]
fn an_allocation_is_idempotent() {
    let (mut policy, pod) = (policy(), pod("p", &[(App, 4 * GI, 0)]));
    admit(&mut policy, &pod, on(&[1], true));
    let before = policy.clone();
    for hint in [ANY, on(&[0], true)] {
        assert_eq!(policy.allocate(&pod, container(&pod, 0), hint), Ok(MemoryAllocation::Unchanged));
    }
    assert_eq!(policy, before);
    let hints: ProviderHints = [("memory".to_owned(), Some(vec![on(&[1], true)]))].into();
    assert_eq!(policy.container_hints(&pod, container(&pod, 0)), hints);
    assert_eq!(policy.pod_hints(&pod), hints);
}

#[test]
fn requests_must_be_whole_numbers_of_known_resources() {
    let with = |name: &str, quantity: &str| {
        let mut amounts = json!({"cpu": "1", "memory": "1Gi"});
        amounts[name] = quantity.into();
        let resources = json!({"requests": amounts, "limits": amounts});
        pod_with_spec("p", json!({"containers": [{"name": "c0", "resources": resources}]}))
    };
    let mut policy = policy();
    let fraction = with("memory", "1500m");
    let error = policy.allocate(&fraction, container(&fraction, 0), ANY).expect_err("a fraction");
    assert_eq!(error.to_string(), "[memorymanager] failed to represent quantity as int64");
    assert_eq!(policy.container_hints(&fraction, container(&fraction, 0)), ProviderHints::new());
    assert_eq!(policy.pod_hints(&fraction), ProviderHints::new());

    let unknown = with("hugepages-1Gi", "1Gi");
    assert_eq!(policy.container_hints(&unknown, container(&unknown, 0)), ProviderHints::new());
    assert!(policy.allocate(&unknown, container(&unknown, 0), on(&[0], true)).is_err());

    // Zero is recorded for known resources only: the checkpoint must pass the validation.
    for (pod, blocks) in [(with("hugepages-1Gi", "0"), 1), (with("hugepages-2Mi", "0"), 2)] {
        let mut policy = self::policy();
        admit(&mut policy, &pod, ANY);
        assert_eq!(policy.blocks_of(pod.uid(), "c0").len(), blocks);
        assert_eq!(restart(&policy), Ok(policy));
    }
}

#[test]
fn later_containers_reuse_the_memory_of_init_containers() {
    let hint = on(&[0], true);
    let pod = pod("p", &[(Init, 2 * GI, 0), (Init, 3 * GI, 0), (Sidecar, GI, 0), (App, 2 * GI, 0)]);
    let mut policy = policy();
    let steps = [
        ([Some(2), None, None, None], 2),
        ([Some(0), Some(3), None, None], 1),
        ([Some(0), Some(2), Some(1), None], 1),
        ([Some(0), Some(0), Some(1), Some(2)], 1),
    ];
    for (index, (expected, free_on_first)) in steps.into_iter().enumerate() {
        assert_eq!(policy.allocate(&pod, container(&pod, index), hint), Ok(MemoryAllocation::New));
        assert_eq!(sizes(&policy, &pod), expected, "container {index}");
        assert_eq!(free(&policy), [free_on_first, 4], "container {index}");
        policy = restart(&policy).expect("a valid state");
    }
    // The sidecar's memory is not reused, and its start releases both init containers.
    assert!(policy.release_init_before(&pod, "c2") && !policy.release_init_before(&pod, "c3"));
    assert_eq!((sizes(&policy, &pod), free(&policy)), (vec![None, None, Some(1), Some(2)], vec![1, 4]));
    assert_eq!(restart(&policy), Ok(policy.clone()));

    // The agent restarts: the ended init containers need no memory again.
    let mut other = policy.clone();
    for index in 0..4 {
        let outcome = policy.allocate(&pod, container(&pod, index), hint);
        assert_eq!(outcome, Ok(MemoryAllocation::Unchanged), "container {index}");
        let has_hints = !policy.container_hints(&pod, container(&pod, index)).is_empty();
        assert_eq!(has_hints, index >= 2, "container {index}");
    }
    assert!(other.retain(&HashSet::new()) && !other.retain(&HashSet::new()));
    assert_eq!(other, self::policy());
}

#[test]
fn memory_is_reused_on_the_same_nodes_only() {
    let (mut policy, pod) = (policy(), pod("p", &[(Init, 2 * GI, 0), (App, 3 * GI, 0)]));
    policy.allocate(&pod, container(&pod, 0), on(&[0], true)).expect("allocated");
    policy.allocate(&pod, container(&pod, 1), on(&[1], true)).expect("allocated");
    assert_eq!((sizes(&policy, &pod), free(&policy)), (vec![Some(2), Some(3)], vec![2, 1]));
    assert!(policy.release_init_before(&pod, "c1"));
    assert_eq!(free(&policy), [4, 1]);
}

#[test]
fn reusable_memory_counts_for_a_container_on_a_full_node() {
    let (mut policy, pod) = (policy(), pod("p", &[(Init, 3 * GI, 0), (App, 4 * GI, 0)]));
    let hint = on(&[0], true);
    policy.allocate(&pod, container(&pod, 0), hint).expect("allocated");
    let expected = vec![on(&[0], true), on(&[1], true)];
    let hints: ProviderHints = [("memory".to_owned(), Some(expected))].into();
    assert_eq!(policy.container_hints(&pod, container(&pod, 1)), hints);
    policy.allocate(&pod, container(&pod, 1), hint).expect("allocated");
    assert_eq!((sizes(&policy, &pod), free(&policy)), (vec![Some(0), Some(4)], vec![0, 4]));
    // The reduced block of the init container gives no preference.
    assert_eq!(policy.container_hints(&pod, container(&pod, 0)), ProviderHints::new());
    assert_eq!(policy.pod_hints(&pod), ProviderHints::new());
}

#[test]
fn inactive_pods_are_released() {
    let mut policy = policy();
    for uid in ["a", "b", "c"] {
        admit(&mut policy, &pod(uid, &[(App, GI, 0)]), on(&[0], true));
    }
    assert_eq!(free(&policy), [1, 4]);
    assert!(policy.retain(&HashSet::from(["b".into(), "x".into()])));
    assert_eq!((free(&policy), policy.state.assignments.len()), (vec![3, 4], 1));
    assert!(!policy.retain(&HashSet::from(["b".into()])));
}

#[test]
fn allocatable_memory_is_listed_by_node_and_resource() {
    let topology = topology(&[(4 * GI + 2 * MI, 1), (3 * GI, 0)]);
    let policy = StaticMemoryPolicy::new(&topology, &reserved(&topology, "1Gi"));
    let block = |node: u32, resource: &str, size: u64| MemoryBlock {
        nodes: mask(&[node]),
        resource: resource.to_owned(),
        size,
    };
    let expected = [block(0, "hugepages-2Mi", 2 * MI), block(0, "memory", 3 * GI), block(1, "memory", 3 * GI)];
    assert_eq!(policy.allocatable(), expected);
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let mut policy = policy();
    admit(&mut policy, &pod("p", &[(App, GI, 0)]), on(&[0], true));
    let prefix = "[memorymanager] (pod: p, container: c0) the memory assignment uses";
    let different = "[memorymanager] the expected machine state is different from the real one";
    fn first_block(state: &mut MemoryCheckpoint) -> &mut MemoryBlock {
        let pod = state.assignments.get_mut(&PodUid::from("p")).expect("the pod");
        pod.get_mut("c0").and_then(|blocks| blocks.first_mut()).expect("a block")
    }
    fn without_blocks(state: &mut MemoryCheckpoint) {
        state.assignments.insert(PodUid::from("q"), BTreeMap::from([("c".to_owned(), Vec::new())]));
    }
    type Change = fn(&mut MemoryCheckpoint);
    let cases: [(Change, String); 7] = [
        (
            |state| state.machine.nodes.clear(),
            "[memorymanager] machine state can not be empty when it has memory assignments".to_owned(),
        ),
        (|state| first_block(state).nodes = mask(&[0, 2]), format!("{prefix} the NUMA that does not exist")),
        (
            |state| first_block(state).resource = "hugepages-1Gi".to_owned(),
            format!("{prefix} memory resource that does not exist"),
        ),
        (|state| first_block(state).size += 1, different.to_owned()),
        (|state| first_block(state).nodes = mask(&[0, 1]), different.to_owned()),
        (|state| drop(state.machine.nodes.remove(&1)), different.to_owned()),
        (without_blocks, String::new()),
    ];
    let (topology, reserved) = two_nodes();
    for (change, error) in cases {
        let mut state = policy.checkpoint().clone();
        change(&mut state);
        let restored = StaticMemoryPolicy::restore(&topology, &reserved, state);
        assert_eq!(restored.map_or_else(|cause| cause.to_string(), |_| String::new()), error);
    }

    // The machine's memory, or the reservation, has changed: refused only if containers have memory.
    let grown = crate::memory::fixture::topology(&[(6 * GI, 0), (4 * GI, 0)]);
    let larger = crate::memory::fixture::reserved(&topology, "2Gi");
    for (topology, reserved) in [(&grown, &reserved), (&topology, &larger)] {
        assert_eq!(restore(topology, reserved, &policy), Err(MemoryStateError::Different));
        let fresh = StaticMemoryPolicy::new(topology, reserved);
        assert_eq!(restore(topology, reserved, &self::policy()), Ok(fresh.clone()));
        let empty = MemoryCheckpoint::new(MemoryPolicy::Static);
        assert_eq!(StaticMemoryPolicy::restore(topology, reserved, empty), Ok(fresh));
    }
}

#[test]
fn memory_of_pods_with_pod_level_resources_is_released_with_their_last_container() {
    let (topology, reserved) = two_nodes();
    let block = |size: u64| MemoryBlock { nodes: mask(&[1]), resource: "memory".to_owned(), size };
    let mut state = policy().state;
    let containers = [("a".to_owned(), vec![block(GI)]), ("b".to_owned(), vec![block(2 * GI)])];
    state.assignments.insert("p".into(), containers.into());
    state.pods.insert("p".into(), vec![block(4 * GI)]);
    state.machine.take(&block(4 * GI), 4 * GI);
    let mut policy = StaticMemoryPolicy::restore(&topology, &reserved, state).expect("a valid state");
    assert_eq!(restart(&policy), Ok(policy.clone()));
    let uid = PodUid::from("p");
    assert!(policy.release(&uid, "a"));
    assert_eq!((free(&policy), policy.mems_of(&uid, "b")), (vec![4, 0], mask(&[1])));
    assert!(policy.release(&uid, "b"));
    assert_eq!(policy, self::policy());
}

/// A step of a random sequence.
#[derive(Clone, Debug)]
enum Step {
    /// Allocates the containers of a new pod until one fails, with a hint for each.
    Admit(Vec<(Role, u64, u64)>, Vec<Option<u64>>),
    /// Starts the container with this number in the pod with this one.
    Start(usize, usize),
    /// Releases the pod with this number.
    Remove(usize),
}

fn any_pod() -> impl Strategy<Value = Vec<(Role, u64, u64)>> {
    let sizes = || (1..6_u64, 0..3_u64).prop_map(|(memory, pages)| (memory * GI / 2, pages * 2 * MI));
    let role = prop_oneof![Just(Init), Just(Sidecar)];
    let init = (role, sizes()).prop_map(|(role, (memory, pages))| (role, memory, pages));
    let app = sizes().prop_map(|(memory, pages)| (App, memory, pages));
    (prop::collection::vec(init, 0..3), prop::collection::vec(app, 1..3)).prop_map(|(init, app)| [init, app].concat())
}

fn any_step() -> impl Strategy<Value = Step> {
    let hints = prop::collection::vec(prop::option::of(1..8_u64), 4);
    prop_oneof![
        3 => (any_pod(), hints).prop_map(|(pod, hints)| Step::Admit(pod, hints)),
        2 => (0..8_usize, 0..4_usize).prop_map(|(pod, container)| Step::Start(pod, container)),
        1 => (0..8_usize).prop_map(Step::Remove),
    ]
}

/// Blocks add up to what is reserved, and every group to what is allocatable.
fn assert_sums(policy: &StaticMemoryPolicy) {
    let machine = &policy.state.machine;
    for node in machine.nodes.values() {
        for resource in node.tables.keys() {
            let blocks = policy.state.assignments.values().flat_map(BTreeMap::values).flatten();
            let own = blocks.filter(|block| block.nodes == node.group && block.resource == *resource);
            let reserved = machine.reserved(node.group, resource);
            assert_eq!(own.map(|block| block.size).sum::<u64>(), reserved, "{resource} {:?}", node.group);
            let sum = machine.free(node.group, resource) + reserved;
            assert_eq!(sum, machine.allocatable(node.group, resource), "{resource} {:?}", node.group);
        }
    }
}

proptest! {
    #[test]
    fn any_sequence_keeps_the_state_valid(steps in prop::collection::vec(any_step(), 1..20)) {
        let topology = topology(&[(4 * GI, 4), (3 * GI, 2), (3 * GI, 0)]);
        let reserved = reserved(&topology, "1Gi");
        let idle = StaticMemoryPolicy::new(&topology, &reserved);
        let (mut policy, mut pods) = (idle.clone(), Vec::new());
        for step in steps {
            match step {
                Step::Admit(containers_of_pod, hints) => {
                    let pod = pod(&format!("p{}", pods.len()), &containers_of_pod);
                    for (container, hint) in containers(&pod).zip(hints) {
                        let hint = TopologyHint { mask: hint.map(NumaMask::from_bits), is_preferred: false };
                        let before = policy.clone();
                        if policy.allocate(&pod, container, hint).is_err() {
                            prop_assert_eq!(&policy, &before);
                            break;
                        }
                        assert_sums(&policy);
                    }
                    pods.push(pod);
                }
                Step::Start(pod, index) => {
                    let pod = pods.get(pod);
                    if let Some((pod, container)) = pod.and_then(|pod| Some((pod, containers(pod).nth(index)?))) {
                        policy.release_init_before(pod, &container.name);
                    }
                }
                Step::Remove(number) => {
                    let others = pods.iter().enumerate().filter(|(other, _)| *other != number);
                    policy.retain(&others.map(|(_, pod)| pod.uid().clone()).collect());
                }
            }
            assert_sums(&policy);
            prop_assert_eq!(restore(&topology, &reserved, &policy), Ok(policy.clone()));
        }
        policy.retain(&HashSet::new());
        prop_assert_eq!(policy, idle);
    }
}
