//! Fixture: a placement manager with its state files, and a node whose runtime can fail or hang.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    sync::{mpsc, watch},
    task::yield_now,
    time::timeout,
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cpu::InitialContainers,
    devices::alignment::ResourceAlignment,
    memory::NodeMemoryReservation,
    numa::ProviderHints,
    placement::{
        CpusetReconcilerDeps, CpusetUpdater, PlacementManager, PlacementManagerDeps, PlacementPolicies,
        PlacementSettings, PodContainers, RunningContainer, reconcile_cpusets,
    },
    topology::{CpuTopology, MachineTopology, NumaNode},
};
use berth_metrics::Registry;
use berth_ports::{AllocationRefusal, ContainerPlacements, DiskStateFile, StateFile};
use berth_types::{ContainerId, CpuSet, Pod, PodUid, quantity::Amount, resources::Amounts};

/// State file of the CPU manager.
pub const CPU_FILE: &str = "cpu_manager_state";
/// State file of the memory manager.
pub const MEMORY_FILE: &str = "memory_manager_state";
/// Content of [`CPU_FILE`] under the policy `none`.
pub const NONE_CPU: &str = r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#;
/// Content of [`MEMORY_FILE`] under the policy `None`.
pub const NONE_MEMORY: &str = r#"{"policyName":"None","machineState":{},"checksum":4236770233}"#;
/// Time between two periodic passes of the reconciler: the default of `cpuManagerReconcilePeriod`.
pub const PERIOD: Duration = Duration::from_secs(10);
/// Timeout of steps that must happen; most tests run on tokio's paused clock.
pub const EVER: Duration = Duration::from_secs(60);
/// 1 GiB.
pub const GI: u64 = 1 << 30;

/// The static policy of the CPU manager with this number of reserved CPUs.
pub fn static_cpus(reserved: &str) -> PlacementSettings {
    PlacementSettings {
        cpu_policy: "static".to_owned(),
        reserved: amounts("cpu", reserved),
        ..PlacementSettings::default()
    }
}

/// Adds an option of the static CPU policy.
pub fn with_option(mut settings: PlacementSettings, option: &str) -> PlacementSettings {
    settings.cpu_options.insert(option.to_owned(), "true".to_owned());
    settings
}

/// Adds the static policy of the memory manager, with 1 GiB reserved on node 0.
pub fn with_static_memory(settings: PlacementSettings) -> PlacementSettings {
    let reserved = amounts("memory", "1Gi");
    PlacementSettings {
        memory_policy: "Static".to_owned(),
        not_allocatable: reserved.clone(),
        reserved_memory: vec![NodeMemoryReservation { node: 0, amounts: reserved }],
        ..settings
    }
}

/// Adds a policy of the topology manager.
pub fn with_topology(settings: PlacementSettings, policy: &str, scope: &str) -> PlacementSettings {
    PlacementSettings { topology_policy: policy.to_owned(), topology_scope: scope.to_owned(), ..settings }
}

fn amounts(resource: &str, quantity: &str) -> Amounts {
    [(resource.to_owned(), Amount::parse(quantity).expect(quantity))].into()
}

/// A machine with 8 GiB of memory on each node of its CPUs.
pub fn machine_of(cpus: CpuTopology) -> MachineTopology {
    let ids: BTreeSet<u32> = cpus.cpus.values().map(|info| info.node).collect();
    let memory: Vec<u64> = ids.iter().map(|_| 8 * GI).collect();
    machine_with(cpus, &memory)
}

/// A machine with this memory in bytes on the nodes 0, 1, …
pub fn machine_with(cpus: CpuTopology, memory: &[u64]) -> MachineTopology {
    let node = |memory: &u64| NumaNode { memory: *memory, ..NumaNode::default() };
    MachineTopology { cpus, nodes: (0..).zip(memory.iter().map(node)).collect(), ..MachineTopology::default() }
}

/// A Guaranteed pod. Containers are `name=cpu` or `name=cpu/memory`, init containers `*name=…`.
pub fn pod(uid: &str, containers: &[&str]) -> Pod {
    let (mut init, mut regular) = (Vec::new(), Vec::new());
    for text in containers {
        match text.strip_prefix('*') {
            Some(text) => init.push(container(text)),
            None => regular.push(container(text)),
        }
    }
    let spec = json!({ "initContainers": init, "containers": regular });
    let object = json!({ "metadata": { "name": uid, "namespace": "n", "uid": uid }, "spec": spec });
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn container(text: &str) -> Value {
    let (name, resources) = text.split_once('=').expect("name=cpu");
    let (cpu, memory) = resources.split_once('/').unwrap_or((resources, "1Mi"));
    let amounts = json!({ "cpu": cpu, "memory": memory });
    json!({ "name": name, "resources": { "requests": amounts, "limits": amounts } })
}

/// Directory of the state files, which outlives the agents that use it.
pub struct StateDirectory(TempDir);

impl StateDirectory {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    pub fn write(&self, file: &str, content: &str) {
        fs::write(self.path(file), content).expect("written");
    }

    pub fn read(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).expect("a state file")
    }

    /// Names of the files, sorted.
    pub fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("a directory");
        let entries = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    pub async fn try_start(&self, settings: &PlacementSettings, machine: MachineTopology) -> Result<Agent, String> {
        let file = |name: &str| -> Arc<dyn StateFile> { Arc::new(DiskStateFile::new(self.path(name))) };
        Agent::start(settings, machine, [file(CPU_FILE), file(MEMORY_FILE)]).await
    }

    pub async fn start(&self, settings: &PlacementSettings, machine: MachineTopology) -> Agent {
        self.try_start(settings, machine).await.expect("correct settings and state files")
    }
}

/// State file in memory. A kill can hit a write before or after it takes effect.
#[derive(Default)]
pub struct MemoryFile {
    content: Mutex<Option<Vec<u8>>>,
    is_full: AtomicBool,
}

impl MemoryFile {
    pub fn content(&self) -> Vec<u8> {
        self.content.lock().expect("whole").clone().expect("written")
    }

    /// Makes writes fail, or succeed again.
    pub fn set_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Relaxed);
    }
}

#[async_trait]
impl StateFile for MemoryFile {
    fn path(&self) -> &Path {
        Path::new("/in/memory")
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.lock().expect("whole").clone())
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        yield_now().await;
        if self.is_full.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk is full"));
        }
        *self.content.lock().expect("whole") = Some(content);
        yield_now().await;
        Ok(())
    }
}

/// A placement manager with its tasks.
pub struct Agent {
    pub manager: Arc<PlacementManager>,
    registry: Registry,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl Agent {
    /// Starts an agent with the state files of the CPU and of the memory manager.
    pub async fn start(
        settings: &PlacementSettings,
        machine: MachineTopology,
        [cpu_file, memory_file]: [Arc<dyn StateFile>; 2],
    ) -> Result<Self, String> {
        let policies = PlacementPolicies::new(settings, machine).map_err(|error| error.to_string())?;
        let (registry, tasks, shutdown) = (Registry::new(), TaskTracker::new(), CancellationToken::new());
        let deps = PlacementManagerDeps {
            cpu_file,
            memory_file,
            containers: InitialContainers::new(),
            registry: registry.clone(),
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
        };
        let manager = PlacementManager::open(policies, deps).await?;
        Ok(Self { manager, registry, tasks, shutdown })
    }

    /// Admits a pod as the device manager does; no pod loses its resources.
    pub fn admit(&self, pod: &Pod) -> Result<(), AllocationRefusal> {
        self.admit_among(pod, None)
    }

    /// Admits a pod; all pods but this one and the active ones lose their resources.
    pub fn admit_among(&self, pod: &Pod, active: Option<&HashSet<PodUid>>) -> Result<(), AllocationRefusal> {
        let no_devices = ProviderHints::new;
        if let Some(active) = active {
            self.manager.retain(active.clone(), pod.uid());
        }
        let mut result = self.manager.begin(pod, &no_devices);
        for container in pod.init_containers().iter().chain(pod.containers()) {
            result = result.and_then(|()| self.manager.allocate(pod, container, &no_devices).map(drop));
        }
        self.manager.admission_ended(Duration::ZERO, result.is_err());
        result
    }

    /// CPUs of a container.
    pub fn cpus(&self, pod: &Pod, container: &str) -> String {
        self.manager.placement(pod.uid(), container).cpus.to_string()
    }

    /// CPUs of the shared pool.
    pub fn shared(&self) -> String {
        self.manager.snapshot().shared.to_string()
    }

    /// Value of a counter or gauge with these label values, in any order; `None` without a series.
    pub fn metric(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name)?;
        let has_label = |value: &&str, series: &[String]| series.iter().any(|label| label == value);
        family.get_metric().iter().find_map(|metric| {
            let values: Vec<String> = metric.get_label().iter().map(|label| label.value().to_owned()).collect();
            let matches = values.len() == labels.len() && labels.iter().all(|value| has_label(value, &values));
            matches.then(|| metric.get_counter().get_value() + metric.get_gauge().get_value())
        })
    }

    /// Runs the reconciler on a node. A message reports that pods have changed.
    pub fn reconcile(&self, node: &Arc<FakeNode>) -> mpsc::UnboundedSender<()> {
        let (changed, changes) = mpsc::unbounded_channel();
        let containers = Arc::new(ObservedNode { node: node.clone(), manager: self.manager.clone() });
        // A directory without `/sys`: the online CPUs are those of the start.
        let deps = CpusetReconcilerDeps {
            containers,
            updater: node.clone(),
            root: "/nonexistent".into(),
            period: PERIOD,
            keeps_offline: false,
        };
        let changes = UnboundedReceiverStream::new(changes);
        self.tasks.spawn(reconcile_cpusets(self.manager.clone(), deps, changes, self.shutdown.clone()));
        changed
    }

    /// Waits until the reconciler ends a pass.
    pub async fn next_pass(&self) {
        let mut passes = self.manager.reconciled.subscribe();
        timeout(EVER, passes.changed()).await.expect("a pass ends in time").expect("the manager exists");
    }

    /// Creates and starts a container as a pod worker does.
    pub async fn start_container(&self, node: &FakeNode, pod: &Pod, container: &str) -> ContainerId {
        let placement = self.manager.prepare(pod.uid(), container).await.expect("the state files are written");
        yield_now().await;
        let id = node.run(pod, container, placement.cpus);
        yield_now().await;
        self.manager.created(pod, container, &id);
        id
    }

    /// Stops the agent; the state files get what was requested before.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.tasks.close();
        timeout(EVER, self.tasks.wait()).await.expect("all tasks end");
    }
}

/// Misbehavior of the runtime in updates of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpdateFault {
    /// Returns an error.
    Refuse,
    /// Never returns.
    Hang,
}

/// Pods and running containers of a node.
#[derive(Clone, Default)]
pub struct NodeRecords {
    online: CpuSet,
    /// Pods that keep their resources; `None` until the sources are ready.
    active: Option<HashSet<PodUid>>,
    /// Running containers, and the CPUs that the runtime has given them.
    containers: BTreeMap<ContainerId, (RunningContainer, CpuSet)>,
    /// All calls of the runtime.
    updates: Vec<(ContainerId, String)>,
    faults: BTreeMap<ContainerId, UpdateFault>,
}

impl NodeRecords {
    /// CPUs of a running container.
    pub fn cpus(&self, id: &ContainerId) -> String {
        self.containers.get(id).map(|(_, cpus)| cpus.to_string()).expect("a running container")
    }

    /// Running containers with their CPUs.
    pub fn containers(&self) -> impl Iterator<Item = &(RunningContainer, CpuSet)> {
        self.containers.values()
    }

    /// CPUs of all updates of a container, failed ones included.
    pub fn updates_of(&self, id: &ContainerId) -> Vec<&str> {
        self.updates.iter().filter(|(updated, _)| updated == id).map(|(_, cpus)| cpus.as_str()).collect()
    }

    /// Number of all updates.
    pub fn updates(&self) -> usize {
        self.updates.len()
    }

    pub fn active(&self) -> Option<&HashSet<PodUid>> {
        self.active.as_ref()
    }

    pub fn is_active(&self, pod: &Pod) -> bool {
        self.active.as_ref().is_some_and(|active| active.contains(pod.uid()))
    }

    pub fn is_running(&self, pod: &Pod, container: &str) -> bool {
        let matches = |running: &RunningContainer| running.pod == *pod.uid() && running.name == container;
        self.containers.values().any(|(running, _)| matches(running))
    }
}

/// A node that outlives its agents: pods, running containers, and the runtime.
pub struct FakeNode(watch::Sender<NodeRecords>);

impl FakeNode {
    /// A node with these online CPUs, and without pods. The sources are ready.
    pub fn new(cpus: &CpuTopology) -> Arc<Self> {
        let records = NodeRecords { online: cpus.all(), active: Some(HashSet::new()), ..NodeRecords::default() };
        Arc::new(Self(watch::Sender::new(records)))
    }

    pub fn records(&self) -> NodeRecords {
        self.0.borrow().clone()
    }

    pub fn set_online(&self, online: &str) {
        let online = CpuSet::parse(online).expect(online);
        self.0.send_modify(|records| records.online = online);
    }

    /// Adds pods that keep their resources.
    pub fn activate(&self, pods: &[&Pod]) {
        let uids = pods.iter().map(|pod| pod.uid().clone());
        self.0.send_modify(|records| records.active.get_or_insert_default().extend(uids));
    }

    /// Forgets all pods until the sources are ready again.
    pub fn lose_sources(&self) {
        self.0.send_modify(|records| records.active = None);
    }

    /// Ends a pod with its containers.
    pub fn end(&self, pod: &Pod) {
        self.0.send_modify(|records| {
            records.containers.retain(|_, (container, _)| container.pod != *pod.uid());
            if let Some(active) = &mut records.active {
                active.remove(pod.uid());
            }
        });
    }

    /// Adds a running container.
    pub fn run(&self, pod: &Pod, container: &str, cpus: CpuSet) -> ContainerId {
        let id = ContainerId::from(format!("{}-{container}", pod.uid()));
        let running = RunningContainer { pod: pod.uid().clone(), name: container.to_owned(), id: id.clone() };
        self.0.send_modify(|records| drop(records.containers.insert(id.clone(), (running, cpus))));
        id
    }

    /// Ends a container of a pod that continues.
    pub fn exit(&self, id: &ContainerId) {
        self.0.send_modify(|records| drop(records.containers.remove(id)));
    }

    /// Makes the updates of a container fail or hang; `None` ends that.
    pub fn set_fault(&self, id: &ContainerId, fault: Option<UpdateFault>) {
        self.0.send_modify(|records| {
            records.faults.remove(id);
            records.faults.extend(fault.map(|fault| (id.clone(), fault)));
        });
    }

    /// Forgets the recorded updates.
    pub fn clear_updates(&self) {
        self.0.send_modify(|records| records.updates.clear());
    }

    /// Waits until a container has these CPUs.
    pub async fn until_cpus(&self, id: &ContainerId, expected: &str) {
        let mut records = self.0.subscribe();
        let reached = timeout(EVER, records.wait_for(|records| records.cpus(id) == expected)).await.map(drop);
        assert!(reached.is_ok(), "{id} has the CPUs {}, expected {expected}", self.records().cpus(id));
    }
}

#[async_trait]
impl CpusetUpdater for FakeNode {
    async fn set_cpus(&self, id: &ContainerId, cpus: &CpuSet) -> Result<(), String> {
        self.0.send_modify(|records| records.updates.push((id.clone(), cpus.to_string())));
        let fault = self.0.borrow().faults.get(id).copied();
        match fault {
            Some(UpdateFault::Refuse) => return Err("the runtime is busy".to_owned()),
            Some(UpdateFault::Hang) => std::future::pending::<()>().await,
            None => yield_now().await,
        }
        self.0.send_modify(|records| {
            if let Some((_, current)) = records.containers.get_mut(id) {
                *current = cpus.clone();
            }
        });
        Ok(())
    }
}

/// What the reconciler of one agent observes of a node.
struct ObservedNode {
    node: Arc<FakeNode>,
    manager: Arc<PlacementManager>,
}

impl PodContainers for ObservedNode {
    fn active(&self) -> Option<HashSet<PodUid>> {
        let records = self.node.records();
        // There is no sysfs in tests: the online CPUs are set here.
        self.manager.set_online(&records.online, false);
        records.active
    }

    fn running(&self) -> Option<Vec<RunningContainer>> {
        Some(self.node.records().containers.into_values().map(|(container, _)| container).collect())
    }
}
