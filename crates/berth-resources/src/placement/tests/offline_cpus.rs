//! CPUs that go offline while the agent runs, and return.

use super::fixture::{CPU_FILE, FakeNode, StateDirectory, machine_of, pod, static_cpus, with_topology};
use crate::{
    devices::alignment::ResourceAlignment,
    topology::machines::{machine_a, machine_b},
};
use berth_types::CpuSet;

const SHARED_POOL: &str = "kubelet_cpu_manager_shared_pool_size_millicores";

#[tokio::test(start_paused = true)]
async fn an_offline_cpu_is_excluded_until_it_is_online_again() {
    let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    let changed = agent.reconcile(&node);
    let [shared, first, second] =
        [("shared", "c=500m"), ("first", "c=1"), ("second", "c=1")].map(|(uid, container)| pod(uid, &[container]));
    node.activate(&[&shared, &first, &second]);
    agent.admit(&shared).expect("the shared pool has no limit");
    let id = agent.start_container(&node, &shared, "c").await;

    // CPU 4 would be the first choice.
    node.set_online("0-3,5-7");
    changed.send(()).expect("the reconciler runs");
    node.until_cpus(&id, "0-3,5-7").await;
    assert_eq!(agent.metric(SHARED_POOL, &[]), Some(6000.0));
    agent.admit(&first).expect("other CPUs are free");
    assert_eq!((agent.cpus(&first, "c").as_str(), agent.shared().as_str()), ("1", "0,2-3,5-7"));
    node.until_cpus(&id, "0,2-3,5-7").await;
    agent.start_container(&node, &first, "c").await;
    // The file does not change: offline CPUs are a matter of the moment.
    assert!(files.read(CPU_FILE).contains(r#""defaultCpuSet":"0,2-7","entries":{"first":{"c":"1"}}"#));

    // Without an event the periodic pass notices the change.
    node.set_online("0-7");
    node.until_cpus(&id, "0,2-7").await;
    agent.admit(&second).expect("CPUs are free");
    assert_eq!(agent.cpus(&second, "c"), "4");
    assert_eq!(agent.metric(SHARED_POOL, &[]), Some(5000.0));
    agent.stop().await;
}

#[tokio::test]
async fn offline_cpus_serve_no_request() {
    let files = StateDirectory::new();
    let settings = with_topology(static_cpus("2"), "restricted", "container");
    let agent = files.start(&settings, machine_of(machine_b())).await;
    let pinned = pod("p", &["c=2"]);
    // Two CPUs of node 1 and none of node 0 are left beside the reserved ones.
    agent.manager.set_online(&CpuSet::parse("0,3,6,9").expect("a list"), false);
    agent.admit(&pinned).expect("CPUs 3 and 9 are online");
    assert_eq!((agent.cpus(&pinned, "c").as_str(), agent.shared().as_str()), ("3,9", "0,6"));
    let refusal = agent.admit(&pod("q", &["c=1"])).expect_err("all online CPUs are assigned");
    assert_eq!(refusal.reason, Some("TopologyAffinityError"));
    assert_eq!(refusal.detail.as_deref(), Some("cpu: not available on any NUMA nodes"));

    // An exclusive CPU that is offline stays with its container, and returns to the pool online.
    agent.manager.set_online(&CpuSet::parse("0,6,9").expect("a list"), false);
    assert_eq!(agent.cpus(&pinned, "c"), "3,9");
    agent.manager.release(pinned.uid());
    assert_eq!(agent.shared(), "0,6,9");
    agent.manager.set_online(&CpuSet::parse("0-11").expect("a list"), false);
    assert_eq!(agent.shared(), "0-11");
    agent.stop().await;
}
