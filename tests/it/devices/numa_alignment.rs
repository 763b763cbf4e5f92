//! Alignment of devices with CPUs: hints of devices decide the CPUs, and the affinity decides the devices.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::json;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::fixture::{self, Agent, EVER, GPU, Node, RecordedFile, no_options, pod_of};
use berth_metrics::Registry;
use berth_ports::{ContainerPlacements, DiskStateFile, PodDevices};
use berth_proto::device_plugin::Device;
use berth_resources::{
    cpu::InitialContainers,
    placement::{PlacementManager, PlacementManagerDeps, PlacementPolicies, PlacementSettings},
    topology::{CpuInfo, CpuTopology, MachineTopology, NumaNode},
};
use berth_testkit::device_plugin::{SamplePlugin, healthy, on_node};
use berth_types::{Pod, quantity::Amount};

const LOCALITY: &str = "Resources cannot be allocated with Topology locality";

/// An agent on a machine with the CPUs 0-3 on NUMA node 0, and 4-7 on node 1; CPU 0 is reserved.
struct AlignedAgent {
    agent: Agent,
    placements: Arc<PlacementManager>,
    plugin: SamplePlugin,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    _node: Node,
}

impl AlignedAgent {
    async fn start(policy: &str, scope: &str, devices: Vec<Device>) -> Self {
        let node = Node::new();
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let placements = placements(policy, scope, &tasks, &shutdown).await;
        let mut plugin = node.plugin(GPU, no_options());
        let count = u64::try_from(devices.len()).expect("a small number");
        plugin.set_devices(devices);
        let file = Arc::new(DiskStateFile::new(node.checkpoint()));
        let agent = node.start_aligned(file, EVER, placements.clone()).await;
        agent.register(&mut plugin).await;
        agent.until_capacity(GPU, (count, count)).await;
        Self { agent, placements, plugin, tasks, shutdown, _node: node }
    }

    /// CPUs of the container `c`.
    fn cpus(&self, pod: &Pod) -> String {
        self.placements.placement(pod.uid(), "c").cpus.to_string()
    }

    async fn stop(self) {
        self.agent.stop().await;
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        drop(self.plugin);
    }
}

async fn placements(
    policy: &str,
    scope: &str,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> Arc<PlacementManager> {
    let info = |cpu: u32| CpuInfo { node: cpu / 4, socket: cpu / 4, core: cpu, uncore_cache: cpu / 4 };
    let machine = MachineTopology {
        cpus: CpuTopology { cpus: (0..8).map(|cpu| (cpu, info(cpu))).collect() },
        nodes: (0..2).map(|id| (id, NumaNode::default())).collect(),
        ..MachineTopology::default()
    };
    let settings = PlacementSettings {
        cpu_policy: "static".to_owned(),
        reserved: BTreeMap::from([("cpu".to_owned(), Amount::parse("1").expect("an amount"))]),
        memory_policy: "None".to_owned(),
        topology_policy: policy.to_owned(),
        topology_scope: scope.to_owned(),
        ..PlacementSettings::default()
    };
    let deps = PlacementManagerDeps {
        cpu_file: RecordedFile::containing(None),
        memory_file: RecordedFile::containing(None),
        containers: InitialContainers::new(),
        registry: Registry::new(),
        tasks: tasks.clone(),
        shutdown: shutdown.clone(),
    };
    let policies = PlacementPolicies::new(&settings, machine).expect("correct settings");
    PlacementManager::open(policies, deps).await.expect("a fresh node")
}

/// A Guaranteed pod with CPUs and devices for the container `c`.
fn pod(name: &str, cpus: u64, devices: u64) -> Arc<Pod> {
    let mut amounts = json!({"cpu": cpus.to_string(), "memory": "1Mi"});
    if devices > 0 {
        amounts[GPU] = devices.to_string().into();
    }
    let resources = json!({"requests": amounts, "limits": amounts});
    pod_of(name, json!({"containers": [{"name": "c", "resources": resources}]}))
}

#[tokio::test]
async fn cpus_come_from_the_node_of_the_devices() {
    for scope in ["container", "pod"] {
        let aligned = AlignedAgent::start("restricted", scope, vec![on_node("d1", 1), on_node("d2", 1)]).await;
        let (with, without) = (pod("with", 2, 1), pod("without", 2, 0));
        aligned.agent.admit(&without, &[]).await.expect("CPUs are free");
        aligned.agent.admit(&with, &[&without]).await.expect("node 1 has both");
        assert_eq!((aligned.cpus(&without).as_str(), aligned.cpus(&with).as_str()), ("1-2", "4-5"), "{scope}");
        assert_eq!(aligned.agent.ids(&with, "c"), ["d1"], "{scope}");
        // Admitted again, as after a restart: devices and CPUs stay.
        aligned.agent.admit(&with, &[&without]).await.expect("it has both");
        assert_eq!((aligned.cpus(&with).as_str(), aligned.agent.ids(&with, "c")), ("4-5", vec!["d1".to_owned()]));
        aligned.agent.devices.release(with.uid());
        let placement = aligned.placements.placement(with.uid(), "c");
        assert_eq!((placement.cpus.to_string().as_str(), placement.has_exclusive_cpus), ("0,3-7", false), "{scope}");
        aligned.stop().await;
    }
}

#[tokio::test]
async fn devices_come_from_the_node_of_the_cpus() {
    let devices = || vec![on_node("d0", 0), on_node("d1", 1), on_node("d2", 0)];
    for (policy, cpus, expected_cpus, expected_device) in [
        ("restricted", 4, "4-7", "d1"),
        ("restricted", 3, "1-3", "d0"),
        ("single-numa-node", 4, "4-7", "d1"),
        // No affinity: a whole node, and the first device.
        ("none", 4, "4-7", "d0"),
    ] {
        let aligned = AlignedAgent::start(policy, "container", devices()).await;
        let owner = pod("owner", cpus, 1);
        aligned.agent.admit(&owner, &[]).await.expect("CPUs and devices are free");
        let actual = (aligned.cpus(&owner), aligned.agent.ids(&owner, "c"));
        assert_eq!(actual, (expected_cpus.to_owned(), vec![expected_device.to_owned()]), "{policy} {cpus}");
        aligned.stop().await;
    }
}

#[tokio::test]
async fn a_pod_whose_devices_and_cpus_cannot_meet_is_refused() {
    for scope in ["container", "pod"] {
        let aligned = AlignedAgent::start("single-numa-node", scope, vec![on_node("d1", 1)]).await;
        let (large, owner) = (pod("large", 4, 0), pod("owner", 1, 1));
        aligned.agent.admit(&large, &[]).await.expect("node 1 is free");
        assert_eq!(aligned.cpus(&large), "4-7");
        let refused = aligned.agent.admit(&owner, &[&large]).await;
        assert_eq!(refused, Err(LOCALITY.to_owned()), "{scope}");
        let detail = "the preferred NUMA nodes have nothing in common: example.com/gpu prefers 1; cpu prefers 0";
        assert_eq!(aligned.placements.refusal(owner.uid()).as_deref(), Some(detail), "{scope}");
        assert_eq!(aligned.agent.ids(&owner, "c"), [] as [String; 0], "{scope}");
        assert!(!aligned.placements.placement(owner.uid(), "c").has_exclusive_cpus, "{scope}");

        // The end of the other pod makes room.
        aligned.agent.admit(&owner, &[]).await.expect("node 1 is free");
        assert_eq!((aligned.cpus(&owner).as_str(), aligned.agent.ids(&owner, "c")), ("4", vec!["d1".to_owned()]));
        aligned.stop().await;
    }
}

/// A resize changes no device, and the policy decides about the CPUs.
#[tokio::test]
async fn a_resized_pod_keeps_devices_and_cpus() {
    for (policy, is_refused) in [("none", false), ("best-effort", false), ("restricted", true)] {
        let aligned = AlignedAgent::start(policy, "container", vec![on_node("d1", 1), on_node("d2", 1)]).await;
        let owner = pod("owner", 2, 1);
        aligned.agent.admit(&owner, &[]).await.expect("CPUs and devices are free");
        let before = (aligned.cpus(&owner), aligned.agent.ids(&owner, "c"));
        let resized = aligned.agent.devices.admit_resize(&pod("owner", 3, 1));
        let message = resized.err().map(|refusal| refusal.message);
        assert_eq!(message.as_deref(), is_refused.then_some(LOCALITY), "{policy}");
        assert_eq!((aligned.cpus(&owner), aligned.agent.ids(&owner, "c")), before, "{policy}");
        aligned.stop().await;
    }
}

/// A device without topology is no reason to refuse a pod.
#[tokio::test]
async fn devices_without_topology_have_no_preference() {
    let aligned = AlignedAgent::start("single-numa-node", "container", vec![healthy("d1")]).await;
    let owner = pod("owner", 4, 1);
    aligned.agent.admit(&owner, &[]).await.expect("any device will do");
    assert_eq!((aligned.cpus(&owner).as_str(), aligned.agent.ids(&owner, "c")), ("4-7", vec!["d1".to_owned()]));
    let many = fixture::pod("many", 2);
    let text = "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 0";
    assert_eq!(aligned.agent.admit(&many, &[&owner]).await, Err(text.to_owned()));
    aligned.stop().await;
}
