//! Opens the resource manager, with the cgroup driver of runtime or configuration.

use std::{path::Path, sync::Arc};

use tokio::{sync::oneshot, time::timeout};

use super::{
    composition_root::{Base, BuildError, SETTLE, wrong},
    settings,
};
use crate::{
    node::MachineInfo,
    resources::{
        self, IdRanges, ManagerDeps, kernel_flags,
        system_cgroups::{ProcessTable, SystemCgroups},
        userns,
    },
};
use berth_config::LoadedConfig;
use berth_cri::{RuntimeCgroupDriver, RuntimeInfo};
use berth_metrics::CgroupMetrics;
use berth_ports::{ContainerPlacements, ResourceManager};
use berth_sys::cgroup::{
    Hierarchy,
    systemd::{Bus, Units},
};

/// Cgroup driver. The runtime's takes precedence over the configuration's (spec 01 §13).
pub(super) fn cgroup_driver(loaded: &LoadedConfig, info: &RuntimeInfo) -> resources::CgroupDriver {
    match info.cgroup_driver {
        RuntimeCgroupDriver::Systemd => resources::CgroupDriver::Systemd,
        RuntimeCgroupDriver::AsConfigured if loaded.config.cgroup_driver == "systemd" => {
            resources::CgroupDriver::Systemd
        }
        RuntimeCgroupDriver::Cgroupfs | RuntimeCgroupDriver::AsConfigured => resources::CgroupDriver::Cgroupfs,
    }
}

/// systemd, if it is the cgroup driver and reachable; the resource manager reports its absence if required.
fn units(driver: resources::CgroupDriver) -> Option<Arc<dyn Units>> {
    let bus = (driver == resources::CgroupDriver::Systemd).then(Bus::of_this_machine)?;
    bus.ok().map(|bus| Arc::new(bus) as Arc<dyn Units>)
}

/// Opens the resource manager: kernel settings, pod cgroups, host ids.
///
/// # Errors
/// Unusable cgroups, ID ranges, or kernel settings.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    machine: &MachineInfo,
    info: &RuntimeInfo,
    placements: Arc<dyn ContainerPlacements>,
) -> Result<(Arc<dyn ResourceManager>, Arc<IdRanges>), BuildError> {
    let driver = cgroup_driver(loaded, info);
    let per_pod = loaded.config.user_namespaces.as_ref().and_then(|u| u.ids_per_pod).unwrap_or(65536);
    let max_pods = u64::try_from(loaded.config.max_pods).unwrap_or_default();
    let space = userns::discover(u64::try_from(per_pod).unwrap_or(65536), max_pods).await.map_err(wrong)?;
    let ids = Arc::new(IdRanges::open(&loaded.root_directory(), space).await.map_err(wrong)?);
    let hierarchy = if loaded.config.cgroups_per_qos { Some(Hierarchy::detect().map_err(wrong)?) } else { None };
    let mut metrics = CgroupMetrics::new(&base.registry);
    if settings::memory_reservation_policy(loaded).is_some() {
        metrics = metrics.with_memory_qos(&base.registry);
    }
    if let Some(hierarchy) = &hierarchy {
        metrics.set_version(hierarchy.version());
    }
    let manager = resources::PodCgroupManager::new(
        settings::resources(loaded, machine, driver)?,
        hierarchy,
        ManagerDeps { events: base.events.clone(), metrics, ids: ids.clone(), units: units(driver), placements },
    )
    .map_err(wrong)?;
    let on_difference = settings::kernel_flags(loaded, berth_sys::machine::in_user_namespace());
    kernel_flags::apply(Path::new("/proc/sys"), on_difference).await.map_err(wrong)?;
    manager.start().await.map_err(wrong)?;
    base.tasks.spawn(manager.clone().run(base.stop.child_token()));
    move_processes(loaded, base).await?;
    Ok((manager, ids))
}

/// Keeps the agent and system processes in `kubeletCgroups` and `systemCgroups`. Returns after the first round, because
/// later parts read the agent's own cgroup, but after [`SETTLE`] at most: a write that hangs does not delay pods.
async fn move_processes(loaded: &LoadedConfig, base: &Base) -> Result<(), BuildError> {
    let config = settings::system_cgroups(loaded)?;
    if config.is_empty() {
        return Ok(());
    }
    let hierarchy = Hierarchy::detect().map_err(wrong)?;
    let mover = SystemCgroups::new(hierarchy, ProcessTable::default(), config);
    let (ended, first_round) = oneshot::channel();
    base.tasks.spawn(mover.run(ended, base.stop.child_token()));
    let _in_time = timeout(SETTLE, first_round).await;
    Ok(())
}
