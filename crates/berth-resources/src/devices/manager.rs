//! Device manager: registers plugins, follows their devices, and allocates them to pods (spec 06c §1).
//!
//! The state is behind one mutex that is never held across an await. Each plugin's device list is read by a task of its
//! own, and each pod's devices are allocated by a task of its own: a plugin that hangs delays only pods that need it.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info};

use super::{
    alignment::ResourceAlignment,
    checkpoint::Checkpoint,
    container_options,
    inventory::Inventory,
    model::{DeviceAssignment, DeviceId},
    requests,
    reusable_devices::ReusableDevices,
    state::{ManagerState, PodAllocation},
};
use crate::{checkpoint_writer::CheckpointWriter, numa::NumaMask};
use berth_metrics::DeviceMetrics;
use berth_ports::{AllocationRefusal, ContainerDevices, DeviceAdmission, DeviceCapacity, PodDevices, StateFile};
use berth_types::{Pod, PodUid, api};

/// Settings of the device manager.
#[derive(Clone, Debug)]
pub struct DeviceManagerConfig {
    /// Directory of the registration socket and of the plugins' sockets.
    pub directory: PathBuf,
    /// How long pods wait after a start of the agent for a plugin that the checkpoint names; zero for no wait.
    pub registration_wait: Duration,
}

/// Dependencies of the device manager.
pub struct DeviceManagerDeps {
    /// The checkpoint `kubelet_internal_checkpoint`.
    pub file: Arc<dyn StateFile>,
    /// Metrics of device plugins.
    pub metrics: DeviceMetrics,
    /// Receives pods whose devices changed their health.
    pub on_health_change: Box<dyn Fn(Vec<PodUid>) + Send + Sync>,
    /// Allocates CPUs and memory together with the devices.
    pub alignment: Arc<dyn ResourceAlignment>,
    /// NUMA nodes of the machine.
    pub numa_nodes: NumaMask,
    /// Tracks the manager's tasks.
    pub tasks: TaskTracker,
    /// Ends the manager's tasks.
    pub shutdown: CancellationToken,
}

/// A device of a container, or an allocatable one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedDevice {
    /// Resource name.
    pub resource: String,
    /// Device ID.
    pub id: String,
    /// NUMA nodes; empty without topology.
    pub nodes: Vec<i64>,
    /// Whether the plugin reports it as healthy, or has not reported since the agent started.
    pub is_healthy: bool,
}

/// A device, and the container that it is assigned to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DeviceOwner {
    /// Resource name.
    pub resource: String,
    /// Device ID.
    pub id: DeviceId,
    /// UID of the pod.
    pub pod: PodUid,
    /// Container name.
    pub container: String,
}

/// See the module documentation.
pub struct DeviceManager {
    pub(super) config: DeviceManagerConfig,
    pub(super) metrics: DeviceMetrics,
    pub(super) alignment: Arc<dyn ResourceAlignment>,
    pub(super) numa_nodes: NumaMask,
    /// Permit of the pod whose hints are merged.
    pub(super) alignments: Semaphore,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    pub(super) started_at: Instant,
    has_checkpoint: bool,
    state: Arc<Mutex<ManagerState>>,
    /// Incremented after each change of the state.
    changes: watch::Sender<u64>,
    capacity: watch::Sender<Arc<BTreeMap<String, DeviceCapacity>>>,
    checkpoint: CheckpointWriter,
    on_health_change: Box<dyn Fn(Vec<PodUid>) + Send + Sync>,
}

impl DeviceManager {
    /// Restores the manager from its checkpoint and starts its tasks. A checkpoint that is damaged or cannot be read is
    /// logged, and the manager starts without assignments (AC-06c-12): plugins can write to its directory, and must not
    /// keep the agent from starting.
    pub async fn open(config: DeviceManagerConfig, deps: DeviceManagerDeps) -> Arc<Self> {
        let content = deps.file.read().await.map_err(|error| error.to_string());
        let has_checkpoint = !matches!(content, Ok(None));
        let decoded = content.and_then(|content| match content {
            Some(content) => Checkpoint::decode(&content).map_err(|error| error.to_string()),
            None => Ok(Checkpoint::default()),
        });
        let restored = decoded.unwrap_or_else(|err| {
            error!(path = %deps.file.path().display(), err, "Failed to read device checkpoint, starting without device assignments");
            Checkpoint::default()
        });
        let started_at = Instant::now();
        let assigned = restored.pods.values().flat_map(BTreeMap::values).flat_map(BTreeMap::keys).cloned();
        let resources: BTreeSet<String> = restored.registered.into_keys().chain(assigned).collect();
        let state = ManagerState {
            inventory: Inventory::restored(resources, started_at, config.registration_wait),
            assignments: restored.pods,
            ..ManagerState::default()
        };
        let capacity = watch::Sender::new(Arc::new(state.inventory.capacity()));
        let state = Arc::new(Mutex::new(state));
        let encoded = state.clone();
        let checkpoint = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.file, move || {
            // Copied under the lock, encoded without it.
            let checkpoint = encoded.lock().unwrap_or_else(PoisonError::into_inner).checkpoint();
            checkpoint.encode()
        });
        let manager = Arc::new(Self {
            config,
            metrics: deps.metrics,
            alignment: deps.alignment,
            numa_nodes: deps.numa_nodes,
            alignments: Semaphore::new(1),
            tasks: deps.tasks,
            shutdown: deps.shutdown,
            started_at,
            has_checkpoint,
            state,
            changes: watch::Sender::new(0),
            capacity,
            checkpoint,
            on_health_change: deps.on_health_change,
        });
        manager.spawn(expire(manager.clone()));
        manager
    }

    /// Whether the checkpoint existed when the manager was opened.
    pub fn has_checkpoint(&self) -> bool {
        self.has_checkpoint
    }

    /// Capacity of all device resources, for the node status.
    pub fn capacity(&self) -> watch::Receiver<Arc<BTreeMap<String, DeviceCapacity>>> {
        self.capacity.subscribe()
    }

    /// Devices of a container; each once.
    pub fn devices_of(&self, pod: &PodUid, container: &str) -> Vec<ListedDevice> {
        let state = self.state();
        let Some(assignments) = state.assignments.get(pod).and_then(|pod| pod.get(container)) else {
            return Vec::new();
        };
        let listed = |resource: &String, assignment: &DeviceAssignment| -> Vec<ListedDevice> {
            let device = |id: &DeviceId| listed_device(&state.inventory, resource, id);
            assignment.ids().iter().map(device).collect()
        };
        assignments.iter().flat_map(|(resource, assignment)| listed(resource, assignment)).collect()
    }

    /// All devices of all resources.
    pub fn all_devices(&self) -> Vec<ListedDevice> {
        let state = self.state();
        let resources = state.inventory.resources();
        resources
            .flat_map(|(resource, entry)| entry.devices.keys().map(move |id| (resource, id)))
            .map(|(resource, id)| listed_device(&state.inventory, resource, id))
            .collect()
    }

    /// All assigned devices, by pod and container. One that an init container left to a later container is listed for
    /// both.
    pub fn assignments(&self) -> Vec<DeviceOwner> {
        let state = self.state();
        let mut owners = Vec::new();
        for (pod, containers) in &state.assignments {
            for (container, resources) in containers {
                for (resource, assignment) in resources {
                    let owner = |id| DeviceOwner {
                        resource: resource.clone(),
                        id,
                        pod: pod.clone(),
                        container: container.clone(),
                    };
                    owners.extend(assignment.ids().into_iter().map(owner));
                }
            }
        }
        owners
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ManagerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes waiting tasks.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut ManagerState) -> T) -> T {
        let result = change(&mut self.state());
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
        result
    }

    /// As [`Self::change`] for changes of the inventory: publishes the capacity.
    pub(super) fn change_inventory<T>(&self, change: impl FnOnce(&mut ManagerState) -> T) -> T {
        let (result, capacity) = {
            let mut state = self.state();
            let result = change(&mut state);
            (result, state.inventory.capacity())
        };
        self.capacity.send_if_modified(|known| {
            let is_new = **known != capacity;
            if is_new {
                *known = Arc::new(capacity);
            }
            is_new
        });
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
        result
    }

    /// Spawns a task that ends with the manager.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let shutdown = self.shutdown.clone();
        self.tasks.spawn(async move {
            shutdown.run_until_cancelled(task).await;
        })
    }

    /// Subscribes to changes of the state.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Schedules a write of the checkpoint.
    pub(super) fn save_later(&self) {
        self.checkpoint.request();
    }

    /// Writes the checkpoint.
    ///
    /// # Errors
    /// The text of the write's error.
    pub(super) async fn save(&self) -> Result<(), String> {
        self.checkpoint.write().await
    }

    /// Starts the task that allocates a pod's devices; its outcome is stored in `allocations`.
    fn start_allocation(self: &Arc<Self>, state: &mut ManagerState, pod: &Arc<Pod>) {
        state.last_allocation = state.last_allocation.saturating_add(1);
        let number = state.last_allocation;
        let (allocator, candidate) = (self.clone(), pod.clone());
        let task = self.spawn(async move {
            let began = Instant::now();
            let outcome = allocator.allocate(&candidate, number).await;
            allocator.alignment.admission_ended(began.elapsed(), outcome.is_err());
            allocator.change(|state| {
                // Of a pod that was released meanwhile nobody asks for the outcome.
                if state.is_current(candidate.uid(), number) {
                    state.allocations.insert(candidate.uid().clone(), PodAllocation::Finished(outcome));
                }
            });
        });
        let running = PodAllocation::Running { number, task: task.abort_handle() };
        state.allocations.insert(pod.uid().clone(), running);
    }

    /// Allocates the devices that an admitted pod lacks because the checkpoint was lost.
    async fn allocate_late(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<(), String> {
        self.start_allocation(&mut self.state(), pod);
        PodDeviceAllocator(self.clone()).settled(pod.uid()).await;
        match self.state().allocations.remove(pod.uid()) {
            Some(PodAllocation::Finished(outcome)) => outcome.map_err(|refusal| refusal.message),
            Some(PodAllocation::Running { .. }) | None => Err("the pod was released".to_owned()),
        }
    }

    /// Decision on a pod whose allocation was started before: it is not repeated.
    fn allocation_in_progress(&self, pod: &Arc<Pod>) -> Option<DeviceAdmission> {
        let mut state = self.state();
        match state.allocations.get(pod.uid())? {
            PodAllocation::Running { .. } => Some(DeviceAdmission::Pending(state.missing_plugin(pod))),
            PodAllocation::Finished(_) => match state.allocations.remove(pod.uid()) {
                Some(PodAllocation::Finished(Err(refusal))) => Some(DeviceAdmission::Rejected(refusal)),
                _ => Some(DeviceAdmission::Allocated),
            },
        }
    }

    pub(super) fn begin_alignment(&self, pod: &Pod) -> Result<(), AllocationRefusal> {
        self.alignment.begin(pod, &|| self.state().pod_hints(pod, self.numa_nodes))
    }

    /// Allocates CPUs and memory to a pod that needs no devices, or has them already.
    fn align_containers(&self, pod: &Pod) -> Result<(), AllocationRefusal> {
        self.begin_alignment(pod)?;
        let mut reusable = ReusableDevices::default();
        for (container, reuse) in requests::containers(pod) {
            let hints = || self.state().container_hints(pod, container, &reusable, self.numa_nodes);
            self.alignment.allocate(pod, container, &hints)?;
            reusable.add(self.state().container_devices(pod.uid(), &container.name), reuse);
        }
        Ok(())
    }

    /// Reports the pods that have one of these devices.
    pub(super) fn report_health_change(&self, resource: &str, devices: &BTreeSet<DeviceId>) {
        let pods = self.state().pods_with(resource, devices);
        if !pods.is_empty() {
            (self.on_health_change)(pods);
        }
    }
}

fn listed_device(inventory: &Inventory, resource: &str, id: &DeviceId) -> ListedDevice {
    let device = inventory.device(resource, id);
    // A device of the checkpoint is healthy until its plugin reports otherwise: a restart of the agent changes no
    // status.
    let is_unreported = inventory.get(resource).is_some_and(|entry| !entry.has_reported());
    ListedDevice {
        resource: resource.to_owned(),
        id: id.to_string(),
        nodes: device.map(|device| device.nodes.iter().copied().collect()).unwrap_or_default(),
        is_healthy: is_unreported || device.is_some_and(|device| device.is_healthy),
    }
}

/// Drops resources whose plugin is gone for too long.
async fn expire(manager: Arc<DeviceManager>) {
    let mut changes = manager.changes();
    loop {
        let next = manager.state().inventory.next_expiry();
        let expiry = async {
            match next {
                Some(at) => sleep_until(at + Duration::from_millis(1)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = changes.changed() => {}
            () = expiry => {
                let dropped = manager.change_inventory(|state| state.inventory.expire(Instant::now()));
                if !dropped.is_empty() {
                    info!(resources = ?dropped, "Dropping resources of device plugins that did not register again");
                    manager.save_later();
                }
            }
        }
    }
}

/// [`DeviceManager`] as a port of the engine.
#[derive(Clone)]
pub struct PodDeviceAllocator(pub Arc<DeviceManager>);

#[async_trait]
impl PodDevices for PodDeviceAllocator {
    fn admit(&self, pod: &Arc<Pod>, is_running: bool, active: &dyn Fn() -> Option<HashSet<PodUid>>) -> DeviceAdmission {
        let manager = &self.0;
        if let Some(admission) = manager.allocation_in_progress(pod) {
            return admission;
        }
        let active = active();
        let needs_devices = {
            let mut state = manager.state();
            let needs_devices = !is_running && state.needs_allocation(pod);
            if let Some(active) = active.as_ref().filter(|_| needs_devices) {
                state.retain(active, pod.uid());
            }
            needs_devices
        };
        if let Some(active) = active {
            manager.alignment.retain(active, pod.uid());
        }
        if needs_devices {
            let mut state = manager.state();
            manager.start_allocation(&mut state, pod);
            return DeviceAdmission::Pending(state.missing_plugin(pod));
        }
        if is_running && manager.alignment.is_allocated(pod) {
            return DeviceAdmission::Allocated;
        }
        let began = Instant::now();
        let aligned = manager.align_containers(pod);
        manager.alignment.admission_ended(began.elapsed(), aligned.is_err());
        aligned.map_or_else(DeviceAdmission::Rejected, |()| DeviceAdmission::Allocated)
    }

    fn admit_resize(&self, pod: &Pod) -> Result<(), AllocationRefusal> {
        let (manager, began) = (&self.0, Instant::now());
        let aligned = manager.align_containers(pod);
        manager.alignment.admission_ended(began.elapsed(), aligned.is_err());
        aligned
    }

    async fn settled(&self, pod: &PodUid) {
        let mut changes = self.0.changes();
        while matches!(self.0.state().allocations.get(pod), Some(PodAllocation::Running { .. })) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn allocatable(&self, pod: &PodUid) -> BTreeMap<String, u64> {
        let state = self.0.state();
        let containers = state.assignments.get(pod).into_iter().flat_map(BTreeMap::values);
        let resources: BTreeSet<&String> = containers.flat_map(BTreeMap::keys).collect();
        let capacity = state.inventory.capacity();
        let allocatable = |resource: &String| {
            let healthy = capacity.get(resource).map_or(0, |found| found.allocatable);
            let assigned = u64::try_from(state.assigned(resource).len()).unwrap_or(u64::MAX);
            (resource.clone(), healthy.max(assigned))
        };
        resources.into_iter().map(allocatable).collect()
    }

    fn release(&self, pod: &PodUid) {
        // First the devices: an allocation in progress ends.
        let had_devices = self.0.change(|state| state.release(pod));
        self.0.alignment.release(pod);
        if had_devices {
            self.0.save_later();
        }
    }

    async fn container_devices(&self, pod: &Arc<Pod>, container: &api::Container) -> Result<ContainerDevices, String> {
        let manager = &self.0;
        let resources: Vec<&str> = {
            let state = manager.state();
            let limits = requests::limits(pod, container).map(|(resource, _)| resource);
            limits.filter(|resource| state.is_device_resource(resource)).collect()
        };
        if resources.is_empty() {
            return Ok(ContainerDevices::default());
        }
        let is_missing = |resource: &&str| {
            let state = manager.state();
            state.assignment(pod.uid(), &container.name, resource).is_none()
        };
        if resources.iter().any(is_missing) {
            manager.allocate_late(pod).await?;
        }
        for resource in resources {
            manager.pre_start(pod, &container.name, resource).await?;
        }
        let state = manager.state();
        let assignments = state.assignments.get(pod.uid()).and_then(|containers| containers.get(&container.name));
        Ok(assignments.map(|found| container_options::merged(&container.name, found)).unwrap_or_default())
    }

    fn health(&self, pod: &PodUid, container: &str) -> Vec<api::ResourceStatus> {
        let mut statuses: Vec<api::ResourceStatus> = Vec::new();
        for device in self.0.devices_of(pod, container) {
            let health = if device.is_healthy { "Healthy" } else { "Unhealthy" };
            let entry =
                api::ResourceHealth { health: Some(health.to_owned()), resource_id: device.id, ..Default::default() };
            match statuses.last_mut().filter(|last| last.name == device.resource) {
                Some(last) => last.resources.get_or_insert_default().push(entry),
                None => statuses.push(api::ResourceStatus { name: device.resource, resources: Some(vec![entry]) }),
            }
        }
        statuses
    }
}
