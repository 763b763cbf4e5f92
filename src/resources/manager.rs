//! Resource manager: pod cgroups for workers; QoS cgroups and node allocatable for the node.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    cgroup_state::CgroupState,
    class_limits::{ClassRules, ReservedRequests},
    class_requests::RequestedResources,
    names::{CgroupDriver, PodTree},
    node_allocatable::{self, Enforcement, Reservation},
    slices::Slices,
    tree::Tree,
    userns::IdRanges,
    values::{self, Amounts, CgroupLimits, PodRules},
};
use berth_metrics::CgroupMetrics;
use berth_ports::{
    ContainerPlacements, ContainerTuning, EventRecord, EventSink, PodCgroup, PodCgroupValues, ResourceError,
    ResourceManager, UserNamespaces,
};
use berth_sys::cgroup::{
    Hierarchy,
    systemd::{
        self, Units,
        cgroup_watcher::{WriteEvents, WrittenCgroups},
    },
};
use berth_types::{ContainerId, ContainerKind, Pod, PodRef, PodUid, qos::Qos};

/// Timeout of a cgroup operation. Killing remaining processes may take seconds.
const LIMIT: Duration = Duration::from_secs(30);
/// Period of verifying QoS cgroups and of retrying node allocatable enforcement.
const VERIFY_PERIOD: Duration = Duration::from_secs(60);

/// Settings of the resource manager.
#[derive(Clone, Debug)]
pub struct ManagerConfig {
    /// `cgroupRoot`.
    pub cgroup_root: String,
    /// `cgroupsPerQOS`.
    pub cgroups_per_qos: bool,
    /// Settings that pod values depend on, including the cgroup driver.
    pub rules: PodRules,
    /// Capacity of the node.
    pub capacity: Amounts,
    /// Reservations of the capacity.
    pub reservations: Vec<Reservation>,
    /// Whether `enforceNodeAllocatable` contains `pods`.
    pub enforce_pods: bool,
    /// Online CPUs of the node (`0-3`); `None` if kubepods gets no cpuset.
    pub online_cpus: Option<String>,
    /// Percentage of `qosReserved` for memory, 0 to 100; `None` without the gate `QOSReserved`.
    pub qos_reserved_memory: Option<u8>,
}

impl ManagerConfig {
    fn class_rules(&self) -> ClassRules {
        let left = self.capacity.less(&node_allocatable::reserved(&self.reservations)).memory_bytes.unwrap_or(0);
        let allocatable_bytes = left.max(0).unsigned_abs();
        let reserved = |memory_percent| ReservedRequests { memory_percent, allocatable_bytes };
        ClassRules {
            hugepage_sizes: self.rules.hugepage_sizes.clone(),
            memory_qos: self.rules.memory_qos,
            reserved: self.qos_reserved_memory.map(reserved),
        }
    }
}

/// Dependencies of the resource manager.
pub struct ManagerDeps {
    /// Recorder of events.
    pub events: Arc<dyn EventSink>,
    /// Metrics of cgroup operations.
    pub metrics: CgroupMetrics,
    /// Host ID ranges: released when a pod's cgroup is removed.
    pub ids: Arc<IdRanges>,
    /// Client of systemd, for the systemd cgroup driver.
    pub units: Option<Arc<dyn Units>>,
    /// CPUs and memory nodes of containers.
    pub placements: Arc<dyn ContainerPlacements>,
}

/// Owner of the pod cgroups. Call [`PodCgroupManager::start`] before the first pod, and run [`PodCgroupManager::run`] in
/// the background.
pub struct PodCgroupManager {
    config: ManagerConfig,
    events: Arc<dyn EventSink>,
    ids: Arc<IdRanges>,
    placements: Arc<dyn ContainerPlacements>,
    names: PodTree,
    /// `None` without pod cgroups (`cgroupsPerQOS: false`).
    groups: Option<Arc<CgroupState>>,
    /// Notifications of changes in slices, until [`PodCgroupManager::run`] takes them.
    writes: Mutex<Option<WriteEvents>>,
}

impl PodCgroupManager {
    /// Creates the manager without changing any cgroup. Must be called within a Tokio runtime.
    /// `hierarchy` is not needed without pod cgroups.
    ///
    /// # Errors
    /// The cgroup root is not a valid name, systemd is the driver but not running, or the reservations
    /// exceed the capacity.
    pub fn new(
        config: ManagerConfig,
        hierarchy: Option<Hierarchy>,
        deps: ManagerDeps,
    ) -> Result<Arc<Self>, ResourceError> {
        let names = PodTree::new(&config.cgroup_root, config.rules.driver)?;
        if let Some(complaint) = node_allocatable::validate(&config.capacity, &config.reservations) {
            return Err(ResourceError(complaint));
        }
        let mut writes = None;
        let groups = if config.cgroups_per_qos {
            let hierarchy = hierarchy.ok_or_else(|| ResourceError("no cgroup hierarchy is mounted".to_owned()))?;
            let mut kubepods = values::of_amounts(
                &node_allocatable::for_pods(&config.capacity, &config.reservations, config.enforce_pods),
                &config.rules.hugepage_sizes,
            );
            kubepods.cpuset_cpus.clone_from(&config.online_cpus);
            let slices = match config.rules.driver {
                CgroupDriver::Cgroupfs => None,
                CgroupDriver::Systemd => {
                    let units = deps.units.clone().ok_or_else(|| ResourceError(systemd::NOT_RUNNING.to_owned()))?;
                    let result = systemd::cgroup_watcher::watch();
                    let watcher = result.map_err(|error| warn!(err = %error, "Failed to watch systemd slices")).ok();
                    let (watch, notifications) = watcher.unzip();
                    writes = notifications;
                    Some(Slices::new(systemd::SystemdDriver::new(units), watch))
                }
            };
            let tree = Tree::new(hierarchy, names.clone(), deps.metrics, slices);
            let rules = config.rules.clone();
            let (requests, placements) = (RequestedResources::new(config.class_rules()), deps.placements.clone());
            Some(Arc::new(CgroupState { tree, requests, rules, placements, kubepods }))
        } else {
            None
        };
        let ManagerDeps { events, ids, placements, .. } = deps;
        Ok(Arc::new(Self { config, events, ids, placements, names, groups, writes: Mutex::new(writes) }))
    }

    /// Creates kubepods and the QoS cgroups, sums the requests of existing pods, and enforces
    /// the reservations on their cgroups.
    ///
    /// # Errors
    /// The agent cannot run pods.
    pub async fn start(&self) -> Result<(), ResourceError> {
        let Some(groups) = self.groups.clone() else { return Ok(()) };
        blocking("kubepods", move || groups.start()).await?;
        for reservation in &self.config.reservations {
            self.enforce(reservation).await?;
        }
        Ok(())
    }

    async fn enforce(&self, reservation: &Reservation) -> Result<(), ResourceError> {
        let Some(groups) = self.groups.clone().filter(|_| reservation.enforcement != Enforcement::None) else {
            return Ok(());
        };
        let (who, cgroup) = (reservation.for_whom.as_str(), reservation.cgroup.clone());
        let compressible = reservation.enforcement == Enforcement::Compressible;
        let limits = node_allocatable::reserved_limits(reservation, &self.config.rules);
        let path = cgroup.clone();
        let done = blocking("reserved cgroup", move || groups.enforce_limits(&path, &limits)).await;
        let what = if compressible { "Reserved Compressible" } else { "Reserved" };
        match &done {
            Ok(()) => {
                let text = format!("Updated limits on {} reserved cgroup {cgroup}", who.to_lowercase());
                self.events.record(EventRecord::node_normal("NodeAllocatableEnforced", text));
            }
            Err(e) => {
                let text = format!("Failed to enforce {who} {what} Cgroup Limits on {cgroup:?}: {e}");
                self.events.record(EventRecord::node_warning("FailedNodeAllocatableEnforcement", text));
            }
        }
        done
    }

    /// Enforces node allocatable on pods, retried each minute until it succeeds, verifies the QoS
    /// cgroups, and restores values that others change in slices of the agent, until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(VERIFY_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut enforced = false;
        let mut writes = self.writes.lock().unwrap_or_else(PoisonError::into_inner).take();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                written = next_write(&mut writes) => {
                    self.repair(written).await;
                    continue;
                }
                _ = ticks.tick() => {}
            }
            self.ids.prune().await;
            let Some(groups) = self.groups.clone() else { continue };
            if !enforced {
                enforced = self.enforce_on_pods(groups.clone()).await;
            }
            if let Err(e) = blocking("QoS cgroups", move || groups.verify()).await {
                warn!(err = %e, "Failed to verify QoS cgroups");
            }
        }
    }

    async fn repair(&self, written: WrittenCgroups) {
        let Some(groups) = self.groups.clone() else { return };
        let repaired = blocking("slices", move || {
            groups.tree.repair(&written);
            Ok(())
        });
        if let Err(e) = repaired.await {
            warn!(err = %e, "Failed to restore changed slice values");
        }
    }

    async fn enforce_on_pods(&self, groups: Arc<CgroupState>) -> bool {
        let done = blocking("kubepods", move || groups.tree.update(&groups.tree.names.kubepods(), &groups.kubepods));
        let event = match done.await {
            Ok(()) => EventRecord::node_normal("NodeAllocatableEnforced", "Updated Node Allocatable limit across pods"),
            Err(e) => EventRecord::node_warning(
                "FailedNodeAllocatableEnforcement",
                format!("Failed to update Node Allocatable Limits {:?}: {e}", ["kubepods"]),
            ),
        };
        let succeeded = event.kind == berth_ports::EventKind::Normal;
        self.events.record(event);
        succeeded
    }
}

#[async_trait]
impl ResourceManager for PodCgroupManager {
    fn cgroup_parent(&self, pod: &Pod) -> String {
        if self.groups.is_none() {
            return String::new();
        }
        let name = self.names.pod(Qos::of(pod), pod.uid());
        // A UID that is not a valid component is rejected by `ensure`, which is called first.
        name.map(|name| self.names.path(&name)).unwrap_or_default()
    }

    async fn exists(&self, pod: &Pod) -> bool {
        let Some(groups) = self.groups.clone() else { return true };
        let pod_id = pod.id().clone();
        let pod = Arc::new(pod.clone());
        match blocking("pod cgroup", move || groups.has_pod(&pod)).await {
            Ok(there) => there,
            Err(e) => {
                // Killing containers because of a read error would be worse than an incomplete cgroup.
                warn!(pod = %pod_id, err = %e, "Failed to check whether pod cgroup exists");
                true
            }
        }
    }

    async fn ensure(&self, pod: &Arc<Pod>) -> Result<PodCgroup, ResourceError> {
        let parent = self.cgroup_parent(pod);
        let Some(groups) = self.groups.clone() else { return Ok(PodCgroup { parent, created: false }) };
        let for_job = pod.clone();
        let ensured = blocking("pod cgroup", move || groups.ensure_pod(&for_job)).await?;
        if !ensured.complaints.is_empty() {
            let text = format!("limits of the pod's cgroup are incomplete: {}", ensured.complaints.join("; "));
            warn!(pod = %pod.id(), err = %text, "Pod cgroup incomplete");
            self.events.record(EventRecord::warning(pod.id(), "PodCgroupIncomplete", text));
        }
        Ok(PodCgroup { parent, created: ensured.created })
    }

    async fn remove(&self, pod: &PodRef) -> Result<(), ResourceError> {
        if let Some(groups) = self.groups.clone() {
            let uid = pod.uid.clone();
            blocking("pod cgroup", move || groups.remove_pod(&uid)).await?;
        }
        self.ids.release(&pod.uid).await;
        Ok(())
    }

    async fn pods(&self) -> Vec<PodUid> {
        let Some(groups) = self.groups.clone() else { return Vec::new() };
        match blocking("pod cgroups", move || groups.tree.pods()).await {
            Ok(pods) => pods.into_iter().map(|(_, uid)| uid).collect(),
            Err(e) => {
                warn!(err = %e, "Failed to get list of pods that still exist on cgroup mounts");
                Vec::new()
            }
        }
    }

    fn tuning(&self, pod: &Pod, _kind: ContainerKind, container: &str) -> Result<ContainerTuning, ResourceError> {
        let placement = self.placements.placement(pod.uid(), container);
        Ok(ContainerTuning {
            cpuset_cpus: placement.cpus.to_string(),
            cpuset_mems: placement.memory_nodes,
            exclusive_cpus: self.placements.runs_without_quota(pod, container),
            ..ContainerTuning::default()
        })
    }

    async fn before_create(&self, pod: &Pod, container: &str) -> Result<Option<String>, ResourceError> {
        let placement = self.placements.prepare(pod.uid(), container).await.map_err(ResourceError)?;
        Ok(Some(placement.cpus.to_string()))
    }

    async fn before_start(&self, pod: &Pod, container: &str, id: &ContainerId) -> Result<(), ResourceError> {
        self.placements.created(pod, container, id);
        Ok(())
    }

    fn released(&self, _pod: &PodUid, _container: &str) {}

    fn desired_pod_values(&self, pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        let Some(groups) = &self.groups else { return Ok(PodCgroupValues::default()) };
        let limits = groups.pod_limits(pod);
        Ok(PodCgroupValues {
            cpu_shares: limits.cpu_shares,
            cpu_quota: limits.cpu_quota,
            cpu_period: limits.cpu_period,
            memory_limit: limits.memory,
        })
    }

    async fn current_pod_values(&self, pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        let Some(groups) = self.groups.clone() else { return Ok(PodCgroupValues::default()) };
        let name = self.names.pod(Qos::of(pod), pod.uid())?;
        let wanted = groups.pod_limits(pod).cpu_shares;
        blocking("pod cgroup", move || groups.tree.values(&name, wanted)).await
    }

    async fn apply_pod_values(&self, pod: &Pod, values: PodCgroupValues) -> Result<(), ResourceError> {
        let Some(groups) = self.groups.clone() else { return Ok(()) };
        let name = self.names.pod(Qos::of(pod), pod.uid())?;
        let limits = CgroupLimits {
            cpu_shares: values.cpu_shares,
            cpu_quota: values.cpu_quota,
            cpu_period: values.cpu_period,
            memory: values.memory_limit,
            ..CgroupLimits::default()
        };
        let pod = pod.clone();
        blocking("pod cgroup", move || {
            groups.tree.update(&name, &limits)?;
            groups.requests.set(&pod);
            groups.write_changed_classes()
        })
        .await
    }

    async fn memory_usage(&self, pod: &Pod, container: Option<&ContainerId>) -> Result<Option<u64>, ResourceError> {
        let Some(groups) = self.groups.clone() else { return Ok(None) };
        let name = self.names.pod(Qos::of(pod), pod.uid())?;
        let container = container.cloned();
        blocking("pod cgroup", move || groups.tree.memory_usage(&name, container.as_ref()).map(Some)).await
    }
}

/// The next notification of changes in slices; pending forever without a watch.
async fn next_write(writes: &mut Option<WriteEvents>) -> WrittenCgroups {
    match writes {
        Some(writes) => writes.next().await,
        None => std::future::pending().await,
    }
}

/// Runs work on the blocking pool; on a timeout the work is abandoned and named in the error.
pub(super) async fn blocking<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> Result<T, ResourceError> + Send + 'static,
) -> Result<T, ResourceError> {
    match tokio::time::timeout(LIMIT, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(result)) => result,
        Ok(Err(e)) => Err(ResourceError(format!("{what}: {e}"))),
        Err(_) => Err(ResourceError(format!("{what}: timed out after {LIMIT:?}"))),
    }
}
