//! Opens the CPU, memory, and topology managers, and the reconciler of CPU sets.

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::Arc,
};

use async_trait::async_trait;
use serde::Deserialize;
use tracing::warn;

use super::{
    composition_root::{Base, BuildError, state_file, wrong},
    settings,
};
use crate::{
    engine::PodReader,
    node::{self, MachineInfo, reservations::Reservations},
    pleg::cri_conversions::container_uid,
};
use berth_config::LoadedConfig;
use berth_cri::RuntimeService;
use berth_ports::PodObserver;
use berth_proto::cri;
use berth_resources::{
    cpu::InitialContainers,
    memory::NodeMemoryReservation,
    placement::{
        CpusetReconcilerDeps, CpusetUpdater, PlacementManager, PlacementManagerDeps, PlacementPolicies,
        PlacementSettings, PodContainers, RunningContainer, reconcile_cpusets, renew_state_files,
    },
    pod_level::PodLevelManagement,
    topology::{self, MachineTopology},
};
use berth_types::{ContainerId, CpuSet, PodUid, resources};

/// Section `resourceManagers` of the agent's own settings (`/etc/berth/config.yaml`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ResourceManagerSettings {
    /// Whether state files that do not fit are moved aside at the start, if no pod in them has containers. Default: the
    /// start fails, as in kubelet.
    renew_state_files: bool,
}

impl ResourceManagerSettings {
    fn read() -> Result<Self, BuildError> {
        let Some(section) = berth_runtime::settings::section("resourceManagers").map_err(BuildError)? else {
            return Ok(Self::default());
        };
        serde_json::from_value(section).map_err(|error| BuildError(format!("resourceManagers: {error}")))
    }
}

/// Opens the managers: checks their settings against the machine and restores their checkpoints.
///
/// # Errors
/// Wrong settings, or a checkpoint that does not fit; the texts are kubelet's.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    machine: &MachineInfo,
    runtime: &dyn RuntimeService,
) -> Result<Arc<PlacementManager>, BuildError> {
    let own = ResourceManagerSettings::read()?;
    let settings = placement_settings(loaded, machine)?;
    let policies = PlacementPolicies::new(&settings, machine_topology(&settings)?).map_err(wrong)?;
    // A checkpoint of the oldest format names containers by their IDs, and a renewal depends on the pods that run.
    let containers = match policies.cpu.is_some() || own.renew_state_files {
        true => initial_containers(runtime).await?,
        false => InitialContainers::new(),
    };
    let deps = PlacementManagerDeps {
        cpu_file: state_file(loaded, "cpu_manager_state"),
        memory_file: state_file(loaded, "memory_manager_state"),
        containers,
        registry: base.registry.clone(),
        tasks: base.tasks.tracker().clone(),
        shutdown: base.stop.child_token(),
    };
    if own.renew_state_files {
        renew_state_files(&policies, &deps).await.map_err(BuildError)?;
    }
    PlacementManager::open(policies, deps).await.map_err(BuildError)
}

/// Starts the reconciler of the CPU sets of running containers.
pub(super) fn reconcile(
    loaded: &LoadedConfig,
    base: &Base,
    manager: Arc<PlacementManager>,
    pods: PodReader,
    observer: Arc<dyn PodObserver>,
    runtime: Arc<dyn RuntimeService>,
) {
    let (changes, period) = (pods.changes(), loaded.config.cpu_manager_reconcile_period.std());
    let deps = CpusetReconcilerDeps {
        containers: Arc::new(ObservedContainers { pods, observer }),
        updater: Arc::new(RuntimeCpusets(runtime)),
        root: "/".into(),
        period,
        keeps_offline: loaded.host.cgroup_v1,
    };
    base.tasks.spawn(reconcile_cpusets(manager, deps, changes, base.stop.child_token()));
}

fn machine_topology(settings: &PlacementSettings) -> Result<MachineTopology, BuildError> {
    match topology::sysfs::read(Path::new("/")) {
        Ok(topology) => Ok(topology),
        // Only the static policies and the topology manager depend on it.
        Err(error) if settings.are_policies_off() => {
            warn!(err = %error, "Failed to read the topology of the machine");
            Ok(MachineTopology::default())
        }
        Err(error) => Err(wrong(error)),
    }
}

fn placement_settings(loaded: &LoadedConfig, machine: &MachineInfo) -> Result<PlacementSettings, BuildError> {
    let config = &loaded.config;
    let has_pod_level = loaded.gates.enabled("PodLevelResourceManagers") && loaded.gates.enabled("PodLevelResources");
    let node = settings::node(loaded);
    let capacity = node::capacity(&node, machine);
    let reservations = Reservations::new(&node.reserved, &machine.cpus, &capacity).map_err(wrong)?;
    let mut reserved = reservations.kube.clone();
    resources::add(&mut reserved, &reservations.system);
    let reserved_memory = config.reserved_memory.iter().map(|reservation| NodeMemoryReservation {
        node: reservation.numa_node,
        amounts: reservation.limits.iter().map(|(name, quantity)| (name.clone(), quantity.amount())).collect(),
    });
    Ok(PlacementSettings {
        cpu_policy: config.cpu_manager_policy.clone(),
        cpu_options: config.cpu_manager_policy_options.clone(),
        cpu_beta_options: loaded.gates.enabled("CPUManagerPolicyBetaOptions"),
        cpu_alpha_options: loaded.gates.enabled("CPUManagerPolicyAlphaOptions"),
        disables_cpu_quota: loaded.gates.enabled("DisableCPUQuotaWithExclusiveCPUs"),
        resizes_exclusive_cpus: loaded.gates.enabled("InPlacePodVerticalScalingExclusiveCPUs"),
        pod_level: if has_pod_level { PodLevelManagement::On } else { PodLevelManagement::Off },
        reserved_cpus: CpuSet::parse(&config.reserved_system_cpus).map_err(wrong)?,
        reserved,
        not_allocatable: reservations.total(),
        memory_policy: config.memory_manager_policy.clone(),
        reserved_memory: reserved_memory.collect(),
        topology_policy: config.topology_manager_policy.clone(),
        topology_scope: config.topology_manager_scope.clone(),
        topology_options: config.topology_manager_policy_options.clone(),
    })
}

async fn initial_containers(runtime: &dyn RuntimeService) -> Result<InitialContainers, BuildError> {
    let containers = runtime.list_containers(None).await.map_err(wrong)?;
    let entry = |container: cri::Container| {
        let pod = PodUid::from(container_uid(&container));
        Some((ContainerId::from(container.id.as_str()), (pod, container.metadata?.name)))
    };
    Ok(containers.into_iter().filter_map(entry).collect::<BTreeMap<_, _>>())
}

/// Pods of the engine and containers of the PLEG.
struct ObservedContainers {
    pods: PodReader,
    observer: Arc<dyn PodObserver>,
}

impl PodContainers for ObservedContainers {
    fn active(&self) -> Option<HashSet<PodUid>> {
        let snapshot = self.pods.latest();
        // A pod without lifecycle awaits admission; a rejected one has no resources any more.
        let is_active =
            |life: &Option<crate::engine::lifecycle::Lifecycle>| life.as_ref().is_none_or(|life| !life.is_terminated());
        let active = snapshot.lifecycles.iter().filter(|(_, life)| is_active(life)).map(|(uid, _)| uid.clone());
        snapshot.sources_ready.then(|| active.collect())
    }

    fn running(&self) -> Option<Vec<RunningContainer>> {
        let known = self.observer.known()?;
        let containers = known.pods.iter().flat_map(|(uid, pod)| {
            pod.running().map(|container| RunningContainer {
                pod: uid.clone(),
                name: container.name.to_string(),
                id: container.id.clone(),
            })
        });
        Some(containers.collect())
    }
}

/// CPU sets of the container runtime.
struct RuntimeCpusets(Arc<dyn RuntimeService>);

#[async_trait]
impl CpusetUpdater for RuntimeCpusets {
    async fn set_cpus(&self, container: &ContainerId, cpus: &CpuSet) -> Result<(), String> {
        let linux = cri::LinuxContainerResources { cpuset_cpus: cpus.to_string(), ..Default::default() };
        self.0.update_container_resources(container.as_str(), linux).await.map_err(|error| error.to_string())
    }
}
