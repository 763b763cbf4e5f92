//! Pods with pod-level resources under the gate `PodLevelResourceManagers`: scopes, refusals, restart, quota, metrics.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::fixture::{
    Agent, CPU_FILE, FakeNode, MEMORY_FILE, StateDirectory, machine_of, pod, static_cpus, with_static_memory,
    with_topology,
};
use crate::{
    devices::alignment::ResourceAlignment,
    placement::PlacementSettings,
    pod_level::PodLevelManagement,
    topology::machines::{machine_a, machine_b},
};
use berth_ports::ContainerPlacements;
use berth_types::{Pod, PodUid};

const ALLOCATIONS: &str = "resource_manager_allocations_total";
const ERRORS: &str = "resource_manager_allocation_errors_total";
const ASSIGNMENTS: &str = "resource_manager_container_assignments";
const CPU_REQUESTS: &str = "kubelet_cpu_manager_pinning_requests_total";

fn settings(policy: &str, scope: &str) -> PlacementSettings {
    let settings = with_topology(with_static_memory(static_cpus("1")), policy, scope);
    PlacementSettings { disables_cpu_quota: true, pod_level: PodLevelManagement::On, ..settings }
}

/// A Guaranteed pod with this number of CPUs, and as many GiB of memory. Containers are `name=cpu` with as many GiB of
/// memory, or `name` without resources.
fn pod_level(uid: &str, cpu: &str, containers: &[&str]) -> Pod {
    let resources = |cpu: &str| {
        let amounts = json!({ "cpu": cpu, "memory": format!("{cpu}Gi") });
        json!({ "requests": amounts, "limits": amounts })
    };
    let container = |text: &&str| match text.split_once('=') {
        Some((name, cpu)) => json!({ "name": name, "resources": resources(cpu) }),
        None => json!({ "name": text }),
    };
    let containers: Vec<Value> = containers.iter().map(container).collect();
    let spec = json!({ "containers": containers, "resources": resources(cpu) });
    let object = json!({ "metadata": { "name": uid, "namespace": "n", "uid": uid }, "spec": spec });
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn memory_gib(agent: &Agent, pod: &Pod, container: &str) -> Vec<u64> {
    agent.manager.memory(pod.uid(), container).iter().map(|block| block.bytes >> 30).collect()
}

/// Whether containers run without quota, and whether their pod does.
fn without_quota(agent: &Agent, pod: &Pod) -> (Vec<bool>, bool) {
    let containers = pod.containers().iter();
    let containers = containers.map(|container| agent.manager.runs_without_quota(pod, &container.name));
    (containers.collect(), agent.manager.pod_runs_without_quota(pod))
}

#[tokio::test(start_paused = true)]
async fn a_pod_gets_one_set_that_its_containers_divide() {
    let files = StateDirectory::new();
    let agent = files.start(&settings("restricted", "pod"), machine_of(machine_a())).await;
    let whole = pod_level("p", "4", &["a=1", "b=2", "c"]);
    agent.admit(&whole).expect("seven CPUs are free");
    let cpus = ["a", "b", "c"].map(|container| agent.cpus(&whole, container));
    assert_eq!(cpus, ["1", "2,6", "5"]);
    let memory = ["a", "b", "c"].map(|container| memory_gib(&agent, &whole, container));
    assert_eq!(memory, [[1], [2], [1]]);
    assert_eq!(agent.shared(), "0,3-4,7");
    // The quota of the container in the pool keeps it off the CPUs of the others.
    assert_eq!(without_quota(&agent, &whole), (vec![true, true, false], true));
    agent.manager.prepare(whole.uid(), "a").await.expect("the state files are written");
    let expected = r#""defaultCpuSet":"0,3-4,7","entries":{"p":{"a":"1","b":"2,6","c":"5"}},"#;
    assert!(files.read(CPU_FILE).contains(expected), "{}", files.read(CPU_FILE));
    assert!(files.read(CPU_FILE).contains(r#""podEntries":{"p":{"cpuSet":"1-2,5-6"}},"checksum":"#));
    let expected = r#""podEntries":{"p":{"memoryBlocks":[{"numaAffinity":[0],"type":"memory","size":4294967296}]}}"#;
    assert!(files.read(MEMORY_FILE).contains(expected), "{}", files.read(MEMORY_FILE));
    agent.stop().await;

    // The next agent does not admit the pod again, and would admit it with the same result.
    let agent = files.start(&settings("restricted", "pod"), machine_of(machine_a())).await;
    assert!(agent.manager.is_allocated(&whole));
    agent.admit(&whole).expect("it keeps what it has");
    assert_eq!(["a", "b", "c"].map(|container| agent.cpus(&whole, container)), cpus);
    assert_eq!(agent.shared(), "0,3-4,7");
    assert_eq!(without_quota(&agent, &whole), (vec![true, true, false], true));
    agent.manager.release(whole.uid());
    assert_eq!((agent.shared().as_str(), memory_gib(&agent, &whole, "a")), ("0-7", Vec::new()));
    assert!(!agent.manager.is_allocated(&whole));
    agent.stop().await;
}

#[tokio::test]
async fn without_the_gate_such_pods_share_the_cpus_of_the_node() {
    let files = StateDirectory::new();
    let off = PlacementSettings { pod_level: PodLevelManagement::Off, ..settings("restricted", "pod") };
    let agent = files.start(&off, machine_of(machine_a())).await;
    let whole = pod_level("p", "4", &["a=1", "b=3", "c"]);
    agent.admit(&whole).expect("nothing to allocate");
    assert_eq!((agent.cpus(&whole, "a").as_str(), agent.shared().as_str()), ("0-7", "0-7"));
    assert_eq!(without_quota(&agent, &whole), (vec![false; 3], false));
    assert_eq!(agent.metric(ALLOCATIONS, &["cpu", "pod"]), None);
    agent.stop().await;

    // Entries of an agent with the gate are kept and released.
    let files = StateDirectory::new();
    let agent = files.start(&settings("restricted", "pod"), machine_of(machine_a())).await;
    let whole = pod_level("p", "4", &["a=1", "c"]);
    agent.admit(&whole).expect("seven CPUs are free");
    agent.stop().await;
    let agent = files.start(&off, machine_of(machine_a())).await;
    assert_eq!((agent.cpus(&whole, "a").as_str(), agent.shared().as_str()), ("1", "0,3-4,7"));
    assert_eq!(without_quota(&agent, &whole), (vec![true, true], true));
    agent.manager.release(whole.uid());
    assert_eq!(agent.shared(), "0-7");
    agent.stop().await;
}

/// With other scopes and policies, containers with equal limits get CPUs from the node.
#[tokio::test]
async fn containers_get_cpus_from_the_node_without_the_scope_pod() {
    for (policy, scope) in [("restricted", "container"), ("none", "container"), ("none", "pod")] {
        let files = StateDirectory::new();
        let agent = files.start(&settings(policy, scope), machine_of(machine_a())).await;
        let mixed = pod_level("p", "4", &["a=2", "b"]);
        agent.admit(&mixed).expect("seven CPUs are free");
        assert_eq!((agent.cpus(&mixed, "a").as_str(), agent.cpus(&mixed, "b").as_str()), ("1,5", "0,2-4,6-7"));
        assert_eq!((memory_gib(&agent, &mixed, "a"), memory_gib(&agent, &mixed, "b")), (vec![2], Vec::new()));
        assert_eq!(without_quota(&agent, &mixed), (vec![true, false], true));
        assert!(agent.manager.is_allocated(&mixed));
        assert!(agent.manager.state().cpu.pod_entries.is_empty());
        assert_eq!(agent.metric(ALLOCATIONS, &["cpu", "node"]), Some(1.0));
        assert_eq!(agent.metric(ASSIGNMENTS, &["memory", "node_exclusive"]), Some(1.0));
        agent.stop().await;
    }
}

#[tokio::test]
async fn refusals_have_the_reasons_of_the_reference() {
    let of_pod = "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager";
    let of_container =
        "Pod Scope pod with pod-level resources failed admission with a container-level topology manager";
    let empty = "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared \
                 containers";
    let full = pod_level("full", "4", &["a=1", "b=3", "c"]);
    let (two_nodes, too_large) = (pod_level("large", "7", &["a"]), pod_level("large", "8", &["a=7", "b"]));
    for (policy, scope, candidate, reason, text) in [
        ("restricted", "pod", &full, "TopologyAffinityError", of_pod),
        ("single-numa-node", "pod", &two_nodes, "TopologyAffinityError", of_pod),
        ("single-numa-node", "container", &too_large, "TopologyAffinityError", of_container),
        ("best-effort", "pod", &full, "EmptyPodSharedPoolError", empty),
    ] {
        let files = StateDirectory::new();
        let agent = files.start(&settings(policy, scope), machine_of(machine_b())).await;
        let refusal = agent.admit(candidate).expect_err(text);
        assert_eq!((refusal.reason, refusal.message.as_str()), (Some(reason), text), "{policy} {scope}");
        assert!(agent.manager.refusal(candidate.uid()).is_some());
        assert_eq!(agent.shared(), "0-11");
        // A pod without pod-level resources is refused with the text for all others.
        let other = pod("other", &["c=8"]);
        if policy == "single-numa-node" {
            let refusal = agent.admit(&other).expect_err("no node has eight CPUs");
            assert_eq!(refusal.message, "Resources cannot be allocated with Topology locality");
        }
        agent.stop().await;
    }
}

#[tokio::test]
async fn allocations_and_their_errors_are_counted() {
    let files = StateDirectory::new();
    let agent = files.start(&settings("best-effort", "pod"), machine_of(machine_a())).await;
    let whole = pod_level("p", "4", &["a=1", "b=2", "c"]);
    agent.admit(&whole).expect("seven CPUs are free");
    agent.admit(&whole).expect("it has its CPUs");
    agent.admit(&pod_level("full", "2", &["a=2", "b"])).expect_err("nothing is left for b");
    agent.admit(&pod("plain", &["c=1/1Gi"])).expect("three CPUs are free");
    agent.admit(&pod("large", &["c=6/1Gi"])).expect_err("two CPUs are free");
    for (name, labels, value) in [
        (ALLOCATIONS, &["cpu", "pod"][..], Some(3.0)),
        (ALLOCATIONS, &["memory", "pod"], Some(3.0)),
        (ALLOCATIONS, &["cpu", "node"], Some(1.0)),
        (ALLOCATIONS, &["memory", "node"], Some(1.0)),
        (ASSIGNMENTS, &["cpu", "pod_exclusive"], Some(2.0)),
        (ASSIGNMENTS, &["cpu", "pod_shared"], Some(1.0)),
        (ASSIGNMENTS, &["memory", "pod_exclusive"], Some(2.0)),
        (ASSIGNMENTS, &["memory", "pod_shared"], Some(1.0)),
        (ASSIGNMENTS, &["cpu", "node_exclusive"], Some(1.0)),
        (ASSIGNMENTS, &["memory", "node_exclusive"], Some(1.0)),
        (ERRORS, &["cpu", "pod"], Some(1.0)),
        (ERRORS, &["cpu", "node"], Some(1.0)),
        (ERRORS, &["memory", "pod"], None),
        // Two for each admission of the whole pod, and one for each other pod.
        (CPU_REQUESTS, &[], Some(6.0)),
    ] {
        assert_eq!(agent.metric(name, labels), value, "{name} {labels:?}");
    }
    agent.stop().await;
}

/// Running containers of the node's pool leave the CPUs of a pod, and get them back.
#[tokio::test(start_paused = true)]
async fn no_other_container_runs_on_the_cpus_of_a_pod() {
    let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
    let agent = files.start(&settings("best-effort", "pod"), machine_of(machine_a())).await;
    let (shared, whole) = (pod("shared", &["c=500m"]), pod_level("p", "4", &["a=1", "b"]));
    node.activate(&[&shared, &whole]);
    agent.admit(&shared).expect("the shared pool has no limit");
    let other = node.run(&shared, "c", agent.manager.placement(shared.uid(), "c").cpus);
    let changed = agent.reconcile(&node);
    node.until_cpus(&other, "0-7").await;
    agent.admit(&whole).expect("seven CPUs are free");
    let own = agent.start_container(&node, &whole, "a").await;
    let in_pool = agent.start_container(&node, &whole, "b").await;
    let records = node.records();
    assert_eq!([&own, &in_pool, &other].map(|id| records.cpus(id)), ["1", "2,5-6", "0,3-4,7"]);
    node.end(&whole);
    changed.send(()).expect("the reconciler runs");
    node.until_cpus(&other, "0-7").await;
    agent.stop().await;
}

/// The checksum is that of the text that the reference dumps (spec 06 §4.1).
#[tokio::test]
async fn a_file_of_the_reference_is_continued() {
    let files = StateDirectory::new();
    let dump = "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0-3,7 \
                Entries:(map[string]map[string]string)map[pod:map[a:4 b:5-6]] \
                PodEntries:(state.PodCPUAssignments)map[pod:{CPUSet:(cpuset.CPUSet){elems:(map[int]struct {})map[4:{} \
                5:{} 6:{}]}}] Checksum:(checksum.Checksum)0}";
    let checksum = berth_types::hash::fnv1a_32(dump.as_bytes());
    let entries = r#""entries":{"pod":{"a":"4","b":"5-6"}},"podEntries":{"pod":{"cpuSet":"4-6"}}"#;
    let content = format!(r#"{{"policyName":"static","defaultCpuSet":"0-3,7",{entries},"checksum":{checksum}}}"#);
    files.write(CPU_FILE, &content);
    let agent = files.start(&settings("restricted", "pod"), machine_of(machine_a())).await;
    let pod = pod_level("pod", "3", &["a=1", "b"]);
    assert_eq!((agent.cpus(&pod, "a").as_str(), agent.cpus(&pod, "b").as_str()), ("4", "5-6"));
    assert_eq!(files.read(CPU_FILE), content);
    agent.manager.retain_published(&HashSet::<PodUid>::new());
    assert_eq!(agent.shared(), "0-7");
    agent.stop().await;
}
