//! `UpdateContainerResources`, `UpdatePodSandboxResources`, and `ReopenContainerLog` of CRI.
//!
//! Implements spec 09a §3.2, §9.4.

use std::sync::Arc;

use super::container_stop::settle_start;
use crate::{
    actor::SHIM_ANSWER,
    container::{Phase, merge},
    errors::{RuntimeError, RuntimeResult},
    ports::CgroupLimits,
    runtime::{Runtime, blocking},
};
use berth_proto::cri;
use berth_shim::plan::ShimRequest;

/// Updates a container's resources: immediately if it runs, otherwise at its start.
///
/// # Errors
/// The container is being removed, or the kernel rejects a limit; the old limits then remain in force.
pub async fn update(runtime: &Arc<Runtime>, id: &str, new: cri::LinuxContainerResources) -> RuntimeResult<()> {
    let (pod, id) = runtime.container(id)?;
    let changing = runtime.clone();
    runtime
        .detached(async move {
            // A container that is starting has its limits already.
            settle_start(&pod, &id).await?;
            let lane = pod.lane.clone();
            let _lane = lane.lock().await;
            let now = pod.now();
            let container = now.container(&id)?;
            if container.is_removing {
                return Err(RuntimeError::state("container is being removed"));
            }
            let all = merge(&container.resources.clone().unwrap_or_default(), &new);
            if matches!(container.phase, Phase::Running(_)) {
                let (shell, group) = (changing.shell.clone(), container.meta.group.clone());
                let limits = CgroupLimits::Container(Some(all.clone()));
                blocking("updating container resources", move || shell.groups.limit(&group, &limits)).await?;
            }
            pod.turn(move |sandbox| {
                sandbox.container_mut(&id).map(|container| {
                    container.resources = Some(all);
                    container.is_updated = true;
                })
            })
            .await?
        })
        .await
}

/// Records a sandbox's resources; the kubelet writes the pod cgroup itself.
///
/// # Errors
/// There is no such sandbox.
pub async fn update_sandbox(
    runtime: &Arc<Runtime>,
    request: cri::UpdatePodSandboxResourcesRequest,
) -> RuntimeResult<()> {
    let pod = runtime.pod(&request.pod_sandbox_id)?;
    pod.turn(move |sandbox| {
        sandbox.overhead = request.overhead.or_else(|| sandbox.overhead.take());
        sandbox.resources = request.resources.or_else(|| sandbox.resources.take());
    })
    .await
}

/// Reopens a container's log file after rotation.
///
/// # Errors
/// The container does not run (AC-09a-X19).
pub async fn reopen_log(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<()> {
    let (pod, id) = runtime.container(id)?;
    let not_running = |_| RuntimeError::state("container is not running");
    pod.now().container(&id)?.running().map_err(not_running)?;
    pod.shim()?.request(ShimRequest::ReopenLog(id), Vec::new(), SHIM_ANSWER).await.map(drop)
}
