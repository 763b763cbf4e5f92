//! In-place resize with exclusive CPUs (gate `InPlacePodVerticalScalingExclusiveCPUs`): kept, assigned, or refused.

use super::fixture::{
    CPU_FILE, FakeNode, StateDirectory, machine_of, pod, static_cpus, with_option, with_static_memory, with_topology,
};
use crate::{
    placement::PlacementSettings,
    topology::machines::{machine_a, machine_b},
};
use berth_ports::ContainerPlacements;
use berth_types::CpuSet;

/// The static CPU policy with one reserved CPU and the gate.
fn resizable() -> PlacementSettings {
    PlacementSettings { resizes_exclusive_cpus: true, ..static_cpus("1") }
}

/// As in the reference, the policy decides whether a container with CPUs can request another number of them.
#[tokio::test]
async fn a_container_keeps_its_cpus() {
    for (case, settings, is_refused) in [
        ("none", resizable(), false),
        ("best-effort", with_topology(resizable(), "best-effort", "container"), false),
        ("restricted", with_topology(resizable(), "restricted", "container"), true),
        ("restricted, pod", with_topology(resizable(), "restricted", "pod"), true),
        ("single-numa-node", with_topology(resizable(), "single-numa-node", "container"), true),
        ("whole cores", with_option(resizable(), "full-pcpus-only"), false),
    ] {
        let files = StateDirectory::new();
        let agent = files.start(&settings, machine_of(machine_a())).await;
        let original = pod("p", &["c=2"]);
        agent.admit(&original).expect("CPUs are free");
        for cpu in ["3", "1"] {
            let resized = agent.admit(&pod("p", &[&format!("c={cpu}")]));
            let reason = resized.as_ref().err().map(|refusal| refusal.reason);
            assert_eq!(reason, is_refused.then_some(Some("TopologyAffinityError")), "{case} {cpu}: {resized:?}");
            assert_eq!(agent.cpus(&original, "c"), "1,5", "{case} {cpu}");
        }
        // A fraction of a CPU needs no exclusive ones, and takes none away.
        agent.admit(&pod("p", &["c=1500m"])).expect("nothing to allocate");
        assert!(agent.manager.placement(original.uid(), "c").has_exclusive_cpus, "{case}");
        agent.stop().await;

        // After a restart the pod is admitted with the size that was granted.
        let agent = files.start(&settings, machine_of(machine_a())).await;
        agent.admit(&original).expect("it has its CPUs");
        assert_eq!((agent.cpus(&original, "c").as_str(), agent.shared().as_str()), ("1,5", "0,2-4,6-7"), "{case}");
        agent.stop().await;
    }
}

#[tokio::test]
async fn a_memory_request_that_grows_keeps_its_block() {
    let files = StateDirectory::new();
    let settings = with_topology(with_static_memory(resizable()), "restricted", "container");
    let agent = files.start(&settings, machine_of(machine_b())).await;
    let original = pod("p", &["c=2/1Gi"]);
    agent.admit(&original).expect("both are free");
    let before = agent.manager.memory(original.uid(), "c");
    agent.admit(&pod("p", &["c=2/3Gi"])).expect("the block stays as it is");
    assert_eq!(agent.manager.memory(original.uid(), "c"), before);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_running_container_gets_its_first_cpus() {
    let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
    let agent = files.start(&resizable(), machine_of(machine_a())).await;
    let _changed = agent.reconcile(&node);
    let (original, other) = (pod("p", &["c=1500m"]), pod("other", &["c=500m"]));
    node.activate(&[&original, &other]);
    for pod in [&original, &other] {
        agent.admit(pod).expect("the shared pool has no limit");
    }
    let id = agent.start_container(&node, &original, "c").await;
    let shared = agent.start_container(&node, &other, "c").await;
    assert_eq!(node.records().cpus(&id), "0-7");

    let refusal = agent.admit(&pod("p", &["c=8"])).expect_err("one CPU is reserved");
    let text = "not enough cpus available to satisfy request: requested=8, available=7";
    assert_eq!((refusal.reason, refusal.message.as_str()), (None, text));
    assert_eq!(agent.shared(), "0-7");

    agent.admit(&pod("p", &["c=2"])).expect("CPUs are free");
    node.until_cpus(&id, "1,5").await;
    node.until_cpus(&shared, "0,2-4,6-7").await;
    agent.stop().await;
    assert!(files.read(CPU_FILE).contains(r#""entries":{"p":{"c":"1,5"}}"#));
}

/// The agent can end between the checkpoint and the update of the container.
#[tokio::test(start_paused = true)]
async fn cpus_of_a_resize_are_applied_after_a_restart() {
    let content = r#"{"policyName":"static","defaultCpuSet":"0,2-4,6-7","entries":{"p":{"c":"1,5"}},"checksum":0}"#;
    // Without the gate the runtime has created the container with its CPUs.
    for (settings, expected) in [(resizable(), "1,5"), (static_cpus("1"), "0-7")] {
        let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
        files.write(CPU_FILE, content);
        let resized = pod("p", &["c=2"]);
        node.activate(&[&resized]);
        let id = node.run(&resized, "c", CpuSet::parse("0-7").expect("a list"));
        let agent = files.start(&settings, machine_of(machine_a())).await;
        let _changed = agent.reconcile(&node);
        agent.admit(&resized).expect("it has its CPUs");
        agent.next_pass().await;
        agent.next_pass().await;
        assert_eq!(node.records().cpus(&id), expected);
        agent.stop().await;
    }
}
