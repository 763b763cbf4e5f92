//! Figures of the device manager: admission, restart, and lookups of many devices. Bars are those of debug builds.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use berth_ports::{DeviceAdmission, PodDevices};
use berth_testkit::{
    device_plugin::{PluginMethod, SamplePlugin, numbered},
    port_fakes::MemoryFile,
};
use berth_types::Pod;

use super::fixture::{Agent, EVER, GPU, Node, count, no_options, pod};

/// Upper bound in debug builds; release builds are measured against 5 ms.
const BAR: Duration = Duration::from_millis(50);
/// Pods of a full node.
const PODS: usize = 110;
/// Devices of each pod.
const DEVICES_PER_POD: usize = 2;
/// Runs of a measurement; the shortest counts, which other processes disturb least.
const RUNS: usize = 40;

fn shortest(what: &str, measured: impl Fn()) -> Duration {
    let run = |_| {
        let begun = Instant::now();
        measured();
        begun.elapsed()
    };
    let shortest = (0..RUNS).map(run).min().expect("runs");
    println!("{what}: {shortest:?}, bar {BAR:?}");
    shortest
}

/// A node with device pods whose checkpoint is in memory.
struct FullNode {
    node: Node,
    plugin: SamplePlugin,
    file: Arc<MemoryFile>,
    pods: Vec<Arc<Pod>>,
}

impl FullNode {
    /// Starts an agent and admits [`PODS`] pods of [`DEVICES_PER_POD`] devices each.
    async fn start() -> (Self, Agent) {
        let node = Node::new();
        let plugin = node.plugin(GPU, no_options());
        plugin.set_devices(numbered(PODS * DEVICES_PER_POD));
        let number = u64::try_from(DEVICES_PER_POD).expect("a small number");
        let pods = (0..PODS).map(|index| pod(&format!("pod{index}"), number)).collect();
        let mut full = Self { node, plugin, file: Arc::default(), pods };
        let agent = full.agent().await;
        full.admit_all(&agent).await;
        (full, agent)
    }

    /// Starts an agent, and waits until the plugin has registered.
    async fn agent(&mut self) -> Agent {
        let agent = self.node.start_with(self.file.clone(), EVER).await;
        agent.register(&mut self.plugin).await;
        let total = u64::try_from(PODS * DEVICES_PER_POD).expect("a small number");
        agent.until_capacity(GPU, (total, total)).await;
        agent
    }

    async fn admit_all(&self, agent: &Agent) {
        let active: Vec<&Arc<Pod>> = self.pods.iter().collect();
        for pod in &self.pods {
            agent.admit(pod, &active).await.expect("devices are free");
        }
    }
}

#[tokio::test]
async fn a_satisfied_pod_with_a_thousand_devices_is_admitted_within_the_bar() {
    let node = Node::new();
    let (_plugin, agent) = node.start_with_devices(numbered(1000)).await;
    let owner = pod("owner", 1000);
    agent.admit(&owner, &[]).await.expect("devices are free");
    assert_eq!(agent.ids(&owner, "c").len(), 1000);
    let took = shortest("admission of a satisfied pod with 1,000 devices", || {
        assert_eq!(agent.devices.admit(&owner, false, &|| None), DeviceAdmission::Allocated);
    });
    assert!(took <= BAR, "{took:?}");
    agent.stop().await;
}

#[tokio::test]
async fn a_restart_with_110_device_pods_repeats_no_allocation() {
    // AC-06c-10
    let (mut full, agent) = FullNode::start().await;
    let (owners, allocations) = (agent.owners(), count(&full.plugin, PluginMethod::Allocate));
    assert_eq!((owners.len(), allocations), (PODS * DEVICES_PER_POD, PODS));
    agent.stop().await;
    let agent = full.agent().await;
    full.admit_all(&agent).await;
    assert_eq!(count(&full.plugin, PluginMethod::Allocate) - allocations, 0);
    assert_eq!(agent.owners(), owners);
    agent.stop().await;
}

#[tokio::test]
async fn a_restart_with_110_device_pods_reports_no_health_change() {
    let (mut full, agent) = FullNode::start().await;
    agent.stop().await;
    // The report precedes the end of the plugin's first list, and `agent` waits for that.
    let agent = full.agent().await;
    full.admit_all(&agent).await;
    let changed = agent.changed.lock().expect("whole").len();
    assert_eq!(changed, 0, "all devices are as healthy as before the restart");
    agent.stop().await;
}

#[tokio::test]
async fn the_devices_of_110_pods_are_listed_within_the_bar() {
    let (full, agent) = FullNode::start().await;
    let took = shortest("devices_of over 110 pods", || {
        let devices = |pod: &Arc<Pod>| agent.manager.devices_of(pod.uid(), "c").len();
        assert_eq!(full.pods.iter().map(devices).sum::<usize>(), PODS * DEVICES_PER_POD);
    });
    assert!(took <= BAR, "{took:?}");
    agent.stop().await;
}
