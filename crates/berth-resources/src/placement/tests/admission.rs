//! Admission through the device manager's hook: assignment, refusal, release, scope, restart, races.

use std::{
    collections::HashSet,
    sync::{Arc, Barrier},
    thread,
};

use super::fixture::{
    Agent, CPU_FILE, FakeNode, MemoryFile, StateDirectory, machine_of, pod, static_cpus, with_option, with_topology,
};
use crate::{
    cpu::checkpoint::encode,
    devices::alignment::ResourceAlignment,
    placement::PlacementSettings,
    topology::machines::{machine, machine_a, machine_b},
};
use berth_ports::{AllocationRefusal, ContainerPlacements};
use berth_types::ContainerId;

#[tokio::test(start_paused = true)]
async fn a_container_gets_its_cpus_and_the_file_is_written_before_it_starts() {
    // AC-06b-11
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    let pinned = pod("p", &["c=1"]);
    agent.admit(&pinned).expect("CPUs are free");
    let placement = agent.manager.prepare(pinned.uid(), "c").await.expect("written");
    assert_eq!((placement.cpus.to_string().as_str(), placement.has_exclusive_cpus), ("4", true));
    assert_eq!(agent.shared(), "0-3,5-7");
    let state = agent.manager.state().cpu.clone();
    assert_eq!(files.read(CPU_FILE).into_bytes(), encode("static", &state));
    assert!(files.read(CPU_FILE).contains(r#""defaultCpuSet":"0-3,5-7","entries":{"p":{"c":"4"}}"#));
    agent.manager.release(pinned.uid());
    agent.manager.cpu_checkpoint.write().await.expect("written");
    assert!(files.read(CPU_FILE).contains(r#""defaultCpuSet":"0-7","checksum":14413152}"#));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_container_does_not_start_before_its_cpus_are_on_disk() {
    let (file, memory_file) = (Arc::new(MemoryFile::default()), Arc::new(MemoryFile::default()));
    let (settings, machine) = (static_cpus("1"), machine_of(machine_a()));
    let agent = Agent::start(&settings, machine, [file.clone(), memory_file]).await.expect("correct settings");
    let pinned = pod("p", &["c=1"]);
    agent.admit(&pinned).expect("CPUs are free");
    file.set_full(true);
    let full = "failed to write checkpoint file: the disk is full";
    for _ in 0..2 {
        let error = agent.manager.prepare(pinned.uid(), "c").await.expect_err("the disk is full");
        assert_eq!(error, full);
    }
    file.set_full(false);
    agent.manager.prepare(pinned.uid(), "c").await.expect("the write is repeated");
    let state = agent.manager.state().cpu.clone();
    assert_eq!(file.content(), encode("static", &state));
    agent.stop().await;
}

/// The node runs for years: what is kept per pod ends with the pod's resources.
#[tokio::test(start_paused = true)]
async fn nothing_is_kept_of_pods_without_resources() {
    let files = StateDirectory::new();
    let agent = files.start(&PlacementSettings::default(), machine_of(machine_a())).await;
    let pinned = pod("p", &["c=1"]);
    agent.admit(&pinned).expect("the policies are none");
    agent.manager.prepare(pinned.uid(), "c").await.expect("nothing to write");
    agent.manager.created(&pinned, "c", &ContainerId::from("1"));
    assert!(agent.manager.unsaved().is_empty());
    assert!(agent.manager.applied().prepared.is_empty() && agent.manager.applied().containers.is_empty());
    agent.stop().await;

    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    agent.admit(&pod("shared", &["c=500m"])).expect("the shared pool has no limit");
    assert!(agent.manager.unsaved().is_empty());
    agent.admit(&pinned).expect("CPUs are free");
    assert_eq!(agent.manager.unsaved().len(), 1);
    agent.manager.release(pinned.uid());
    assert!(agent.manager.unsaved().is_empty());
    agent.stop().await;
}

#[tokio::test]
async fn only_whole_cpus_of_guaranteed_pods_are_exclusive() {
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    for (containers, exclusive) in [
        (&["c=2"][..], Some("1,5")),
        // AC-06b-13
        (&["c=1500m"], None),
        (&["c=2000m"], Some("1,5")),
    ] {
        let pod = pod("p", containers);
        agent.admit(&pod).expect("CPUs are free");
        let placement = agent.manager.placement(pod.uid(), "c");
        assert_eq!(placement.has_exclusive_cpus, exclusive.is_some(), "{containers:?}");
        assert_eq!(placement.cpus.to_string(), exclusive.unwrap_or("0-7"), "{containers:?}");
        agent.manager.release(pod.uid());
    }
    assert_eq!(agent.manager.allocatable().cpus.to_string(), "1-7");
    agent.stop().await;
}

#[tokio::test]
async fn init_containers_leave_their_cpus_to_the_next_container() {
    // AC-06b-27
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    let pinned = pod("p", &["*i=2", "c=4"]);
    agent.admit(&pinned).expect("CPUs are free");
    let sets = |agent: &Agent| [agent.cpus(&pinned, "i"), agent.cpus(&pinned, "c"), agent.shared()];
    assert_eq!(sets(&agent), ["1,5", "1-2,5-6", "0,3-4,7"]);
    agent.stop().await;

    // After a restart the pod is admitted again, and nothing changes.
    let before = files.read(CPU_FILE);
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    agent.admit(&pinned).expect("it has its CPUs");
    assert_eq!(sets(&agent), ["1,5", "1-2,5-6", "0,3-4,7"]);
    agent.stop().await;
    assert_eq!(files.read(CPU_FILE), before);
}

#[tokio::test]
async fn a_refused_pod_keeps_cpus_until_it_is_released() {
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine(1, 1, 3, 1))).await;
    let late = pod("late", &["a=1", "b=2"]);
    let refusal = agent.admit(&late).expect_err("two CPUs are available");
    let text = "not enough cpus available to satisfy request: requested=2, available=1";
    assert_eq!(refusal, AllocationRefusal::from(text.to_owned()));
    assert_eq!(agent.manager.refusal(late.uid()).as_deref(), Some(text));
    assert_eq!((agent.cpus(&late, "a").as_str(), agent.shared().as_str()), ("1", "0,2"));
    agent.manager.release(late.uid());
    assert_eq!(agent.shared(), "0-2");
    agent.stop().await;
}

#[tokio::test]
async fn pods_that_are_not_active_lose_their_cpus_at_the_next_admission() {
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    let [gone, stays, new] = ["gone", "stays", "new"].map(|uid| pod(uid, &["c=3"]));
    for pod in [&gone, &stays] {
        agent.admit(pod).expect("CPUs are free");
    }
    let active = HashSet::from([stays.uid().clone()]);
    let before = agent.cpus(&stays, "c");
    assert!(agent.admit(&new).is_err(), "the sources are not ready");
    agent.admit_among(&new, Some(&active)).expect("the CPUs of one pod are free again");
    assert_eq!(agent.cpus(&stays, "c"), before);
    assert!(!agent.manager.placement(gone.uid(), "c").has_exclusive_cpus);
    assert_eq!(agent.manager.snapshot().exclusive.len(), 2);
    agent.stop().await;
}

#[tokio::test]
async fn whole_cores_are_refused_with_the_error_of_the_reference() {
    // AC-06b-12
    let files = StateDirectory::new();
    let settings = with_option(static_cpus("1"), "full-pcpus-only");
    let agent = files.start(&settings, machine_of(machine_a())).await;
    let refusal = agent.admit(&pod("p", &["c=1"])).expect_err("half a core");
    assert_eq!(refusal.reason, Some("SMTAlignmentError"));
    assert_eq!(refusal.message, "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2");
    let whole = pod("q", &["c=6"]);
    agent.admit(&whole).expect("three cores are free");
    assert_eq!(agent.cpus(&whole, "c"), "1-3,5-7");
    // The pod that fills the node is admitted again, as after a restart.
    agent.admit(&whole).expect("it has its CPUs");
    agent.stop().await;
}

#[tokio::test]
async fn a_pod_that_fits_no_single_node_is_refused_with_the_reason() {
    // AC-06b-20
    let files = StateDirectory::new();
    let settings = with_topology(static_cpus("2"), "single-numa-node", "container");
    let agent = files.start(&settings, machine_of(machine_b())).await;
    let large = pod("large", &["c=7"]);
    let detail = "cpu: not available on a single NUMA node; available on nodes 0,1";
    let refusal = agent.admit(&large).expect_err("a node has six CPUs");
    let expected = AllocationRefusal {
        reason: Some("TopologyAffinityError"),
        message: "Resources cannot be allocated with Topology locality".to_owned(),
        detail: Some(detail.to_owned()),
    };
    assert_eq!(refusal, expected);
    assert_eq!(agent.manager.refusal(large.uid()).as_deref(), Some(detail));
    // A repeated refusal is recorded once; a pod that was not refused has none.
    agent.admit(&large).expect_err("a node has six CPUs");
    let refusals = agent.manager.snapshot().refusals;
    assert_eq!(refusals.iter().map(|refusal| refusal.pod.uid.as_str()).collect::<Vec<_>>(), ["large"]);
    let small = pod("small", &["c=6"]);
    agent.admit(&small).expect("node 1 is free");
    assert_eq!((agent.cpus(&small, "c").as_str(), agent.manager.refusal(small.uid())), ("1,3,5,7,9,11", None));
    agent.stop().await;
}

#[tokio::test]
async fn the_scope_decides_whether_containers_are_aligned_together() {
    // Node 0 has four CPUs that are not reserved, node 1 has six.
    for (scope, first, second, third) in [("container", "2,8", "4,10", "1,7"), ("pod", "1,7", "3,9", "5,11")] {
        let files = StateDirectory::new();
        let settings = with_topology(static_cpus("2"), "single-numa-node", scope);
        let agent = files.start(&settings, machine_of(machine_b())).await;
        let together = pod("p", &["a=2", "b=2", "c=2"]);
        agent.admit(&together).expect("CPUs are free");
        let sets = ["a", "b", "c"].map(|container| agent.cpus(&together, container));
        assert_eq!(sets, [first, second, third], "{scope}");
        let large = pod("q", &["a=4", "b=4"]);
        let refusal = agent.admit(&large).expect_err("neither together nor one by one");
        assert_eq!(refusal.reason, Some("TopologyAffinityError"), "{scope}");
        agent.stop().await;
    }
}

#[tokio::test]
async fn one_of_two_containers_gets_the_last_cpu() {
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("1"), machine_of(machine(1, 1, 2, 1))).await;
    let pods = [pod("a", &["c=1"]), pod("b", &["c=1"])];
    for round in 0..100 {
        let (agent, barrier) = (&agent, &Barrier::new(2));
        let results = thread::scope(|scope| {
            let threads = pods.each_ref().map(|pod| {
                scope.spawn(move || {
                    barrier.wait();
                    agent.admit(pod)
                })
            });
            threads.map(|thread| thread.join().expect("no panic"))
        });
        let text = "not enough cpus available to satisfy request: requested=1, available=0";
        let refused: Vec<&AllocationRefusal> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        assert_eq!(refused, [&AllocationRefusal::from(text.to_owned())], "round {round}");
        assert_eq!(agent.manager.snapshot().exclusive.len(), 1, "round {round}");
        for pod in &pods {
            agent.manager.release(pod.uid());
        }
        assert_eq!(agent.shared(), "0-1", "round {round}");
    }
    agent.stop().await;
}

/// The bar of issue 37: a restart with 110 pinned pods changes no CPU set, and no byte of the file.
#[tokio::test(start_paused = true)]
async fn a_restart_updates_no_container() {
    // AC-06b-18
    let (files, topology) = (StateDirectory::new(), machine(2, 1, 32, 2));
    let settings = with_topology(static_cpus("2"), "restricted", "container");
    let node = FakeNode::new(&topology);
    let pods: Vec<_> = (0..110).map(|number| pod(&format!("pod{number}"), &["c=1"])).collect();
    node.activate(&pods.iter().collect::<Vec<_>>());
    let agent = files.start(&settings, machine_of(topology.clone())).await;
    let _changed = agent.reconcile(&node);
    for pod in &pods {
        agent.admit(pod).expect("CPUs are free");
    }
    for pod in &pods {
        agent.start_container(&node, pod, "c").await;
    }
    let sets = |agent: &Agent| pods.iter().map(|pod| agent.cpus(pod, "c")).collect::<Vec<_>>();
    let before = (sets(&agent), agent.shared(), files.read(CPU_FILE));
    agent.stop().await;

    node.clear_updates();
    let agent = files.start(&settings, machine_of(topology)).await;
    let _changed = agent.reconcile(&node);
    for pod in &pods {
        agent.admit(pod).expect("it has its CPUs");
    }
    // The first pass of the reconciler, and a periodic one.
    agent.next_pass().await;
    agent.next_pass().await;
    assert_eq!(node.records().updates(), 0);
    assert_eq!((sets(&agent), agent.shared(), files.read(CPU_FILE)), before);
    agent.stop().await;
    assert_eq!(files.read(CPU_FILE), before.2);
}
