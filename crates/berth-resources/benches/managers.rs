//! Benchmark of the CPU, memory, and topology managers on a machine with 512 CPUs, with a bar for each figure.
//!
//! Pods are admitted as the sync loop does it, through the device manager, with the static policies and the topology
//! policy `restricted`. State files are on disk. The exit code is 1 if a figure exceeds its bar.
//!
//! `cargo bench -p berth-resources --bench managers`

use std::{
    collections::{BTreeMap, HashSet},
    fmt::Debug,
    fs,
    hint::black_box,
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::stream;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use berth_metrics::{DeviceMetrics, Registry};
use berth_ports::{DeviceAdmission, DiskStateFile, PodDevices, StateFile};
use berth_resources::{
    cpu::InitialContainers,
    devices::{DeviceManager, DeviceManagerConfig, DeviceManagerDeps, PodDeviceAllocator},
    memory::NodeMemoryReservation,
    numa::{HintList, MergeTopology, NumaMask, TopologyHint, merge::merge},
    placement::{
        CpusetReconcilerDeps, CpusetUpdater, PlacementManager, PlacementManagerDeps, PlacementPolicies,
        PlacementSettings, PodContainers, RunningContainer, reconcile_cpusets,
    },
    topology::{CpuInfo, CpuTopology, MachineTopology, NumaNode},
};
use berth_types::{ContainerId, CpuSet, Pod, PodUid, quantity::Amount, resources::Amounts};

/// Pods of a full node.
const PODS: usize = 110;
/// Cores of the machine, with two threads each.
const CORES: u32 = 256;
const CORES_PER_NODE: u32 = 32;
/// Runs of a measurement; the shortest counts, which other processes disturb least.
const ROUNDS: usize = 20;

/// Device manager, and CPU, memory, and topology managers, with their tasks.
struct Managers {
    devices: PodDeviceAllocator,
    placement: Arc<PlacementManager>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl Managers {
    /// Opens the managers with the state files of this directory.
    async fn open(directory: &Path, settings: &PlacementSettings, machine: MachineTopology) -> Self {
        let (registry, tasks, shutdown) = (Registry::new(), TaskTracker::new(), CancellationToken::new());
        let file = |name: &str| -> Arc<dyn StateFile> { Arc::new(DiskStateFile::new(directory.join(name))) };
        let policies = PlacementPolicies::new(settings, machine).expect("correct settings");
        let deps = PlacementManagerDeps {
            cpu_file: file("cpu_manager_state"),
            memory_file: file("memory_manager_state"),
            containers: InitialContainers::new(),
            registry: registry.clone(),
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
        };
        let placement = PlacementManager::open(policies, deps).await.expect("valid state files");
        let deps = DeviceManagerDeps {
            file: file("kubelet_internal_checkpoint"),
            metrics: DeviceMetrics::new(&registry),
            on_health_change: Box::new(|_| {}),
            alignment: placement.clone(),
            numa_nodes: placement.policies().topology.topology.nodes(),
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
        };
        let config = DeviceManagerConfig { directory: directory.to_owned(), registration_wait: Duration::ZERO };
        let devices = PodDeviceAllocator(DeviceManager::open(config, deps).await);
        Self { devices, placement, tasks, shutdown }
    }

    fn admit(&self, pod: &Arc<Pod>) {
        let admission = self.devices.admit(pod, false, &|| None);
        assert_eq!(admission, DeviceAdmission::Allocated, "{}", pod.name());
    }

    fn exclusive(&self) -> usize {
        self.placement.snapshot().exclusive.len()
    }

    /// Duration of the admissions of these pods together; they are released afterwards.
    fn admission(&self, pods: &[Arc<Pod>]) -> Duration {
        let began = Instant::now();
        pods.iter().for_each(|pod| self.admit(pod));
        let took = began.elapsed();
        assert_eq!(self.exclusive(), pods.len());
        pods.iter().for_each(|pod| self.devices.release(pod.uid()));
        took
    }

    /// Ends the tasks, once what was requested before is in the state files.
    async fn close(self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// A machine with four sockets, two NUMA nodes of 64 GiB in each.
fn machine() -> MachineTopology {
    let info = |core: u32| CpuInfo {
        node: core / CORES_PER_NODE,
        socket: core / (2 * CORES_PER_NODE),
        core,
        uncore_cache: core / (2 * CORES_PER_NODE),
    };
    let cpus = CpuTopology { cpus: (0..2 * CORES).map(|cpu| (cpu, info(cpu % CORES))).collect() };
    let node = |id: u32| (id, NumaNode { memory: 64 << 30, ..NumaNode::default() });
    let nodes = (0..CORES / CORES_PER_NODE).map(node).collect();
    MachineTopology { cpus, nodes, ..MachineTopology::default() }
}

/// Static policies with two reserved CPUs, and 1 GiB reserved on node 0.
fn static_policies() -> PlacementSettings {
    let amounts = |resource: &str, quantity: &str| -> Amounts {
        [(resource.to_owned(), Amount::parse(quantity).expect("an amount"))].into()
    };
    let memory = amounts("memory", "1Gi");
    PlacementSettings {
        cpu_policy: "static".to_owned(),
        reserved: amounts("cpu", "2"),
        memory_policy: "Static".to_owned(),
        not_allocatable: memory.clone(),
        reserved_memory: vec![NodeMemoryReservation { node: 0, amounts: memory }],
        topology_policy: "restricted".to_owned(),
        ..PlacementSettings::default()
    }
}

/// A Guaranteed pod with one CPU.
fn pod(number: usize) -> Arc<Pod> {
    let amounts = json!({"cpu": "1", "memory": "64Mi"});
    let container = json!({"name": "c", "resources": {"requests": amounts, "limits": amounts}});
    let name = format!("pod{number}");
    let metadata = json!({"name": name, "namespace": "n", "uid": name});
    let object = json!({"metadata": metadata, "spec": {"containers": [container]}});
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

/// Running containers of pinned pods; counts passes of the reconciler and writes of CPU sets.
struct PinnedNode {
    pods: HashSet<PodUid>,
    running: Vec<RunningContainer>,
    passes: watch::Sender<usize>,
    writes: AtomicUsize,
}

impl PodContainers for PinnedNode {
    fn active(&self) -> Option<HashSet<PodUid>> {
        Some(self.pods.clone())
    }

    fn running(&self) -> Option<Vec<RunningContainer>> {
        self.passes.send_modify(|passes| *passes += 1);
        Some(self.running.clone())
    }
}

#[async_trait]
impl CpusetUpdater for PinnedNode {
    async fn set_cpus(&self, _: &ContainerId, _: &CpuSet) -> Result<(), String> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Number of CPU sets that an agent writes after a restart, while these pods keep running.
async fn writes_after_a_restart(directory: &Path, pods: &[Arc<Pod>]) -> usize {
    let managers = Managers::open(directory, &static_policies(), machine()).await;
    pods.iter().for_each(|pod| managers.admit(pod));
    managers.close().await;

    let managers = Managers::open(directory, &static_policies(), machine()).await;
    assert_eq!(managers.exclusive(), pods.len(), "the checkpoint has all assignments");
    pods.iter().for_each(|pod| managers.admit(pod));
    let container = |pod: &Arc<Pod>| RunningContainer {
        pod: pod.uid().clone(),
        name: "c".to_owned(),
        id: ContainerId::from(pod.name()),
    };
    let node = Arc::new(PinnedNode {
        pods: pods.iter().map(|pod| pod.uid().clone()).collect(),
        running: pods.iter().map(container).collect(),
        passes: watch::Sender::new(0),
        writes: AtomicUsize::new(0),
    });
    let deps = CpusetReconcilerDeps {
        containers: node.clone(),
        updater: node.clone(),
        // A directory without `/sys`: the online CPUs are those of the start.
        root: "/nonexistent".into(),
        period: Duration::from_secs(1),
        keeps_offline: false,
    };
    let (manager, shutdown) = (managers.placement.clone(), managers.shutdown.clone());
    managers.tasks.spawn(reconcile_cpusets(manager, deps, stream::pending::<()>(), shutdown));
    // The third pass begins once the second has ended.
    let mut passes = node.passes.subscribe();
    passes.wait_for(|passes| *passes >= 3).await.expect("the reconciler runs");
    managers.close().await;
    node.writes.load(Ordering::Relaxed)
}

/// Anonymous memory of this process, in bytes.
fn anonymous() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap_or_default();
    let kib = line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// Growth of the process by the managers of a full node.
async fn memory_of_the_managers(directory: &Path, pods: &[Arc<Pod>]) -> u64 {
    // Threads, and what the allocator and the runtime allocate once.
    let small = tempfile::tempdir().expect("a directory");
    Managers::open(small.path(), &PlacementSettings::default(), MachineTopology::default()).await.close().await;
    let before = anonymous();
    let managers = Managers::open(directory, &static_policies(), machine()).await;
    pods.iter().for_each(|pod| managers.admit(pod));
    // The state files are written in the background.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let grown = anonymous().saturating_sub(before);
    assert_eq!(managers.exclusive(), pods.len());
    managers.close().await;
    grown
}

/// Merge of 8 resources on a machine with 36 NUMA nodes: each has a hint for every set of two or three nodes.
fn merge_of_36_nodes() -> Duration {
    let nodes: BTreeMap<u32, NumaNode> = (0..36).map(|id| (id, NumaNode::default())).collect();
    let topology = MergeTopology::new(&MachineTopology { nodes, ..MachineTopology::default() }, false);
    let pairs: Vec<[u32; 2]> = (0..36).flat_map(|a| (a + 1..36).map(move |b| [a, b])).collect();
    let triples = pairs.iter().flat_map(|&[a, b]| (b + 1..36).map(move |c| [a, b, c]));
    let mut masks: Vec<NumaMask> = pairs.iter().map(|pair| pair.iter().copied().collect()).collect();
    masks.extend(triples.map(|nodes| nodes.into_iter().collect::<NumaMask>()));
    let hints: Vec<TopologyHint> =
        masks.into_iter().map(|mask| TopologyHint { mask: Some(mask), is_preferred: false }).collect();
    let lists = [HintList { resource: "r", hints: &hints }; 8];
    shortest(|| {
        let began = Instant::now();
        black_box(merge(black_box(&lists), &topology));
        began.elapsed()
    })
}

fn shortest(mut measured: impl FnMut() -> Duration) -> Duration {
    (0..ROUNDS).map(|_| measured()).min().unwrap_or_default()
}

/// Prints a figure; returns whether it meets its bar.
fn meets<T: Debug + PartialOrd>(title: &str, value: T, bar: T) -> bool {
    let is_met = value <= bar;
    println!("{title:<64} {value:>10.1?}  ≤ {bar:?}  {}", if is_met { "ok" } else { "over" });
    is_met
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // cargo passes this for `cargo bench`, but not for `cargo test --all-targets`.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("nothing measured: run `cargo bench -p berth-resources --bench managers`");
        return ExitCode::SUCCESS;
    }
    let directories = ["memory", "admission", "restart"].map(|_| tempfile::tempdir().expect("a directory"));
    let [memory, admission, restart] = directories.each_ref().map(|directory| directory.path());
    let pods: Vec<Arc<Pod>> = (0..PODS).map(pod).collect();
    // First: later on the allocator has free memory.
    let grown = memory_of_the_managers(memory, &pods).await;
    let managers = Managers::open(admission, &static_policies(), machine()).await;
    let one = shortest(|| managers.admission(&pods[..1]));
    let all = shortest(|| managers.admission(&pods));
    managers.close().await;
    let writes = writes_after_a_restart(restart, &pods).await;
    let results = [
        meets("allocation of 1 of 512 CPUs", one, Duration::from_millis(1)),
        meets("admission of 110 Guaranteed pods", all, Duration::from_millis(100)),
        meets("merge of 8 resources on 36 NUMA nodes", merge_of_36_nodes(), Duration::from_millis(50)),
        meets("CPU sets written after a restart with 110 pinned pods", writes, 0),
        meets("memory of the managers with 110 pinned pods, in kB", grown / 1000, 1000),
    ];
    if results.into_iter().all(|is_met| is_met) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
