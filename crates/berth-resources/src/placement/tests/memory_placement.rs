//! Memory of NUMA nodes through the placement manager: blocks, refusal, init containers, restart.

use super::fixture::{
    Agent, GI, MEMORY_FILE, StateDirectory, machine_with, pod, static_cpus, with_static_memory, with_topology,
};
use crate::{devices::alignment::ResourceAlignment, placement::PlacementSettings, topology::machines::machine_b};
use berth_ports::{ContainerPlacements, PlacedMemory};

fn placed(bytes: u64, nodes: &[i64]) -> PlacedMemory {
    PlacedMemory { resource: "memory".to_owned(), bytes, nodes: nodes.to_vec() }
}

#[tokio::test(start_paused = true)]
async fn a_large_container_gets_both_nodes_and_keeps_them() {
    // Two nodes with 4 GiB of allocatable memory each.
    let machine = || machine_with(machine_b(), &[5 * GI, 4 * GI]);
    let (large, small) = (pod("large", &["c=1/6Gi"]), pod("small", &["c=1/1Gi"]));
    for (policy, is_refused) in [("none", false), ("best-effort", false), ("restricted", true)] {
        let files = StateDirectory::new();
        let settings = with_topology(with_static_memory(PlacementSettings::default()), policy, "container");
        let agent = files.start(&settings, machine()).await;
        assert_eq!(agent.manager.allocatable().memory, [placed(4 * GI, &[0]), placed(4 * GI, &[1])]);
        // AC-06b-24
        agent.admit(&large).expect("both nodes together have enough");
        assert_eq!(agent.manager.memory(large.uid(), "c"), [placed(6 * GI, &[0, 1])]);
        let placement = agent.manager.prepare(large.uid(), "c").await.expect("written");
        assert_eq!((placement.memory_nodes.as_str(), placement.cpus.is_empty()), ("0,1", true));
        assert!(files.read(MEMORY_FILE).contains(r#""numaAffinity":[0,1],"type":"memory","size":6442450944"#));
        let free = |agent: &Agent| {
            let machine = agent.manager.snapshot().memory.expect("the static policy");
            machine.nodes.values().map(|node| node.tables["memory"].free).collect::<Vec<u64>>()
        };
        assert_eq!(free(&agent), [0, 2 * GI]);

        // AC-06b-25
        let admitted = agent.admit(&small);
        assert_eq!(admitted.is_err(), is_refused, "{policy}: {admitted:?}");
        if let Err(refusal) = admitted {
            assert_eq!(refusal.reason, Some("TopologyAffinityError"));
            let detail = "memory: not available on the smallest possible number of NUMA nodes; available on nodes 0,1";
            assert_eq!(refusal.detail.as_deref(), Some(detail));
        } else {
            assert_eq!(agent.manager.placement(small.uid(), "c").memory_nodes, "0,1");
        }
        agent.stop().await;

        let before = files.read(MEMORY_FILE);
        let agent = files.start(&settings, machine()).await;
        agent.admit(&large).expect("it has its memory");
        assert_eq!(agent.manager.memory(large.uid(), "c"), [placed(6 * GI, &[0, 1])]);
        assert_eq!(files.read(MEMORY_FILE), before);
        for pod in [&large, &small] {
            agent.manager.release(pod.uid());
        }
        assert_eq!(free(&agent), [4 * GI, 4 * GI]);
        agent.stop().await;
        assert!(!files.read(MEMORY_FILE).contains("entries"));
    }
}

#[tokio::test]
async fn a_refusal_names_the_memory_of_the_nodes() {
    let files = StateDirectory::new();
    let settings = with_static_memory(PlacementSettings::default());
    let agent = files.start(&settings, machine_with(machine_b(), &[5 * GI, 4 * GI])).await;
    let large = pod("large", &["c=1/9Gi"]);
    let refusal = agent.admit(&large).expect_err("8 GiB are allocatable");
    let text = "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available";
    assert_eq!((refusal.reason, refusal.message.as_str()), (None, text));
    let detail = refusal.detail.expect("free memory of the nodes");
    assert!(detail.contains("node 0 free/allocatable memory=4Gi/4Gi"), "{detail}");
    assert_eq!(agent.manager.refusal(large.uid()), Some(detail));
    agent.stop().await;
}

/// CPUs and memory of one container come from the same node.
#[tokio::test]
async fn cpus_and_memory_are_aligned() {
    let files = StateDirectory::new();
    let settings = with_topology(with_static_memory(static_cpus("2")), "single-numa-node", "container");
    // Node 0 has 1 GiB that is not reserved.
    let agent = files.start(&settings, machine_with(machine_b(), &[2 * GI, 4 * GI])).await;
    let pinned = pod("p", &["c=2/2Gi"]);
    agent.admit(&pinned).expect("node 1 has both");
    assert_eq!(agent.cpus(&pinned, "c"), "1,7");
    assert_eq!(agent.manager.memory(pinned.uid(), "c"), [placed(2 * GI, &[1])]);
    // No nodes that can be used together have 3 GiB. Then the memory manager has no hint, and its allocation fails.
    let refusal = agent.admit(&pod("q", &["c=2/3Gi"])).expect_err("2 GiB are left on node 1, 1 GiB on node 0");
    let text = "[memorymanager] failed to find NUMA nodes to extend the current topology hint";
    assert_eq!((refusal.reason, refusal.message.as_str()), (None, text));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn memory_of_ended_init_containers_is_free_when_the_next_one_is_created() {
    let files = StateDirectory::new();
    let settings = with_static_memory(PlacementSettings::default());
    let agent = files.start(&settings, machine_with(machine_b(), &[5 * GI, 4 * GI])).await;
    let owner = pod("owner", &["*i=1/3Gi", "c=1/1Gi"]);
    agent.admit(&owner).expect("memory is free");
    let sizes = || ["i", "c"].map(|name| agent.manager.memory(owner.uid(), name).iter().map(|b| b.bytes).sum::<u64>());
    // The regular container reuses 1 GiB.
    assert_eq!(sizes(), [2 * GI, GI]);
    agent.manager.prepare(owner.uid(), "i").await.expect("written");
    agent.manager.created(&owner, "i", &"id-i".into());
    assert_eq!(sizes(), [2 * GI, GI]);
    agent.manager.prepare(owner.uid(), "c").await.expect("written");
    agent.manager.created(&owner, "c", &"id-c".into());
    assert_eq!(sizes(), [0, GI]);
    agent.stop().await;
    assert!(!files.read(MEMORY_FILE).contains(r#""i":"#));

    // After a restart the init container gets no memory again.
    let agent = files.start(&settings, machine_with(machine_b(), &[5 * GI, 4 * GI])).await;
    agent.admit(&owner).expect("it has its memory");
    assert!(agent.manager.memory(owner.uid(), "i").is_empty());
    agent.stop().await;
}
