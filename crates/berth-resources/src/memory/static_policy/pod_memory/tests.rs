//! Tests of the memory of pods with pod-level resources: parts, refusals, hints, release, random sequences.

use std::collections::HashSet;

use berth_types::PodUid;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    memory::{
        MachineState, MemoryAllocation, MemoryCheckpoint, MemoryPolicy,
        fixture::{GI, mask, pod_with_spec, two_nodes},
    },
    pod_level::PodLevelManagement,
};

const ANY: TopologyHint = TopologyHint { mask: None, is_preferred: false };

fn policy() -> StaticMemoryPolicy {
    let (topology, reserved) = two_nodes();
    StaticMemoryPolicy::new(&topology, &reserved).with_pod_level(PodLevelManagement::On)
}

/// What the next agent makes of the checkpoint.
fn restart(policy: &StaticMemoryPolicy) -> StaticMemoryPolicy {
    let (topology, reserved) = two_nodes();
    let content = policy.checkpoint().encode();
    let state = MemoryCheckpoint::restore(&content, MemoryPolicy::Static).expect("a checkpoint");
    let restored = StaticMemoryPolicy::restore(&topology, &reserved, state).expect("a valid state");
    restored.with_pod_level(PodLevelManagement::On)
}

/// A Guaranteed pod with pod-level memory. Containers are `name=memory` or, without resources, `name`; sidecars
/// `name*`.
fn pod_level(uid: &str, memory: &str, init: &[&str], regular: &[&str]) -> Pod {
    let container = |text: &&str| -> Value {
        let (name, memory) = text.split_once('=').map_or((*text, None), |(name, memory)| (name, Some(memory)));
        let mut container = json!({ "name": name.trim_end_matches('*') });
        if name.ends_with('*') {
            container["restartPolicy"] = "Always".into();
        }
        if let Some(memory) = memory {
            let amounts = json!({ "cpu": "1", "memory": memory });
            container["resources"] = json!({ "requests": amounts, "limits": amounts });
        }
        container
    };
    let list = |containers: &[&str]| containers.iter().map(container).collect::<Vec<Value>>();
    let amounts = json!({ "cpu": "4", "memory": memory });
    let resources = json!({ "requests": amounts, "limits": amounts });
    pod_with_spec(uid, json!({ "initContainers": list(init), "containers": list(regular), "resources": resources }))
}

fn block(nodes: &[u32], size: u64) -> MemoryBlock {
    MemoryBlock { nodes: mask(nodes), resource: "memory".to_owned(), size }
}

fn free(policy: &StaticMemoryPolicy) -> Vec<u64> {
    policy.state.machine.nodes.values().map(|node| node.tables["memory"].free / GI).collect()
}

#[test]
fn containers_get_parts_or_share_the_pool_of_the_pod() {
    type Case<'a> = (&'a str, &'a [&'a str], &'a [&'a str], &'a [(&'a str, u64)], [usize; 3]);
    let cases: [Case<'_>; 4] = [
        ("4Gi", &[], &["a=1Gi", "b=2Gi", "c"], &[("a", 1), ("b", 2), ("c", 1)], [3, 2, 1]),
        ("4Gi", &[], &["a", "b"], &[("a", 4), ("b", 4)], [1, 0, 2]),
        ("4Gi", &[], &["a=4Gi"], &[("a", 4)], [2, 1, 0]),
        // Init containers have what the sidecars before them leave.
        (
            "4Gi",
            &["i=3Gi", "s*=1Gi", "j", "t*"],
            &["a=2Gi", "b"],
            &[("i", 3), ("s", 1), ("j", 3), ("t", 1), ("a", 2), ("b", 1)],
            [6, 3, 3],
        ),
    ];
    for (memory, init, regular, parts, [requests, exclusive, shared]) in cases {
        let (pod, mut policy) = (pod_level("p", memory, init, regular), policy());
        assert!(policy.needs_pod_memory(&pod), "{init:?} {regular:?}");
        let expected = PodMemoryAllocation { requests, exclusive, shared, is_new: true };
        assert_eq!(policy.allocate_pod(&pod, ANY), Ok(expected), "{init:?} {regular:?}");
        assert_eq!(policy.state.pods[pod.uid()], [block(&[0], 4 * GI)]);
        for (container, size) in parts {
            assert_eq!(policy.blocks_of(pod.uid(), container), [block(&[0], size * GI)], "{container}");
        }
        assert_eq!(free(&policy), [0, 4]);
        assert_eq!(policy.state.machine.nodes[&0].assignments, 1);
        // The pod keeps what it has, also after a restart.
        let mut restarted = restart(&policy);
        assert_eq!(restarted, policy);
        assert!(!restarted.needs_pod_memory(&pod));
        assert_eq!(restarted.allocate_pod(&pod, ANY), Ok(PodMemoryAllocation { is_new: false, ..expected }));
        assert_eq!(restarted, policy);
        assert!(policy.release_pod(pod.uid()));
        assert_eq!(policy, self::policy());
    }
}

#[test]
fn a_large_pod_uses_several_nodes() {
    let mut policy = policy();
    let pod = pod_level("p", "6Gi", &[], &["a=1Gi", "b"]);
    policy.allocate_pod(&pod, ANY).expect("8 GiB are free");
    assert_eq!(policy.blocks_of(pod.uid(), "b"), [block(&[0, 1], 5 * GI)]);
    assert_eq!((free(&policy), policy.mems_of(pod.uid(), "a")), (vec![0, 2], mask(&[0, 1])));
}

#[test]
fn memory_of_a_pod_is_released_with_its_last_container() {
    let mut policy = policy();
    let pod = pod_level("p", "4Gi", &["i=3Gi"], &["a=1Gi", "b"]);
    policy.allocate_pod(&pod, ANY).expect("4 GiB are free");
    // The pool of the pod had the memory of the init container anyway.
    assert!(policy.release_init_before(&pod, "a"));
    assert!(policy.release(pod.uid(), "a"));
    assert_eq!(free(&policy), [0, 4]);
    assert_eq!(restart(&policy), policy);
    assert!(policy.release(pod.uid(), "b"));
    assert_eq!(policy, self::policy());
}

#[test]
fn refused_pods_change_nothing() {
    let empty = Some("EmptyPodSharedPoolError");
    for (pod, reason, text) in [
        (
            pod_level("p", "4Gi", &[], &["a=1Gi", "b=3Gi", "c"]),
            empty,
            "pod rejected, sum of exclusive container memory requests equals pod budget, leaving no memory for shared \
             containers",
        ),
        (
            pod_level("p", "2Gi", &["s*=2Gi", "i"], &["a=1Gi"]),
            empty,
            "pod rejected, pod has shared init containers but no memory available for them",
        ),
        (
            pod_level("p", "2Gi", &["s*=1Gi", "i=2Gi"], &["a=1Gi"]),
            empty,
            "pod rejected, largest exclusive init container requests 2147483648 of memory, but only 1073741824 \
             available",
        ),
        (
            pod_level("p", "9Gi", &[], &["a"]),
            None,
            "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available",
        ),
    ] {
        let mut policy = policy();
        let error = policy.allocate_pod(&pod, ANY).expect_err(text);
        assert_eq!((error.reason(), error.to_string().as_str()), (reason, text));
        assert_eq!(policy, self::policy(), "{text}");
    }
}

#[test]
fn hints_follow_from_the_pod_level_request() {
    let hint = |nodes: &[u32], is_preferred| TopologyHint { mask: Some(mask(nodes)), is_preferred };
    let of_memory = |hints: Vec<TopologyHint>| ProviderHints::from([("memory".to_owned(), Some(hints))]);
    let mut policy = policy();
    let pod = pod_level("p", "3Gi", &[], &["a=1Gi", "b"]);
    let idle = of_memory(vec![hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(policy.pod_hints(&pod), idle);
    let full = pod_level("q", "3Gi", &[], &["a=3Gi", "b"]);
    assert_eq!(policy.pod_hints(&full), of_memory(Vec::new()));
    policy.allocate_pod(&pod, hint(&[1], true)).expect("4 GiB are free");
    assert_eq!(policy.pod_hints(&pod), of_memory(vec![hint(&[1], true)]));
    // Without the gate there is no preference.
    let off = policy.with_pod_level(PodLevelManagement::Off);
    assert_eq!((off.pod_hints(&full), off.needs_pod_memory(&full)), (ProviderHints::new(), false));
}

/// In the scope `container`, containers get memory from the node.
#[test]
fn containers_with_equal_limits_can_get_memory_from_the_node() {
    let mut policy = policy();
    let pod = pod_level("p", "4Gi", &[], &["a=1Gi", "b"]);
    let [own, shared] = [&pod.containers()[0], &pod.containers()[1]];
    assert!(policy.needs_memory(&pod, own) && !policy.needs_memory(&pod, shared));
    assert!(policy.pins(&pod));
    assert_eq!(policy.allocate(&pod, own, ANY), Ok(MemoryAllocation::New));
    assert_eq!(policy.allocate(&pod, shared, ANY), Ok(MemoryAllocation::Unchanged));
    assert_eq!(policy.blocks_of(pod.uid(), "a"), [block(&[0], GI)]);
    assert!(policy.state.pods.is_empty() && policy.blocks_of(pod.uid(), "b").is_empty());
    assert_eq!(free(&policy), [3, 4]);
}

#[derive(Clone, Debug)]
enum PodMemoryStep {
    Admit { pod: usize },
    Release { pod: usize },
    Restart,
}

fn any_step() -> impl Strategy<Value = PodMemoryStep> {
    prop_oneof![
        3 => (0_usize..4).prop_map(|pod| PodMemoryStep::Admit { pod }),
        2 => (0_usize..4).prop_map(|pod| PodMemoryStep::Release { pod }),
        1 => Just(PodMemoryStep::Restart),
    ]
}

proptest! {
    #[test]
    fn reserved_memory_is_that_of_the_pods(steps in prop::collection::vec(any_step(), 1..16)) {
        let pods = [
            pod_level("a", "1Gi", &[], &["c"]),
            pod_level("b", "3Gi", &["i=2Gi", "s*=1Gi"], &["c=1Gi", "d"]),
            pod_level("c", "6Gi", &[], &["c=2Gi", "d"]),
            pod_level("d", "2Gi", &["i"], &["c=2Gi"]),
        ];
        let mut policy = policy();
        for step in steps {
            match step {
                PodMemoryStep::Admit { pod } => drop(policy.allocate_pod(&pods[pod], ANY)),
                PodMemoryStep::Release { pod } => {
                    policy.release_pod(pods[pod].uid());
                }
                PodMemoryStep::Restart => {
                    prop_assert_eq!(&restart(&policy), &policy);
                }
            }
            let blocks = policy.state.pods.values().flatten();
            let reserved = policy.state.machine.reserved(policy.state.machine.all_nodes(), "memory");
            prop_assert_eq!(blocks.map(|block| block.size).sum::<u64>(), reserved);
            for (uid, containers) in &policy.state.assignments {
                let whole = policy.state.pods[uid][0].size;
                prop_assert!(containers.values().flatten().all(|part| part.size > 0 && part.size <= whole));
            }
        }
        policy.retain(&HashSet::<PodUid>::new());
        let (topology, reserved) = two_nodes();
        prop_assert_eq!(&policy.state.machine, &MachineState::initial(&topology, &reserved));
        prop_assert!(policy.state.pods.is_empty() && policy.state.assignments.is_empty());
    }
}
