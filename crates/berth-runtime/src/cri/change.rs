//! `UpdateContainerResources`, `UpdatePodSandboxResources`, `ReopenContainerLog`. Behaviour: spec 09a §3.2, §9.4.

use std::sync::Arc;

use super::container_end::settle_start;
use crate::{
    actor::SHIM_ANSWER,
    container::{Phase, merge},
    errors::{RuntimeError, RuntimeResult},
    ports::Limits,
    runtime::{Runtime, blocking},
};
use berth_proto::cri;
use berth_shim::plan::Request;

/// Changes what a container may use: at once where it runs, else when it starts.
///
/// # Errors
/// It is being removed, or the kernel refuses; then everything is as before.
pub async fn update(runtime: &Arc<Runtime>, id: &str, new: cri::LinuxContainerResources) -> RuntimeResult<()> {
    let (pod, id) = runtime.container(id)?;
    let changing = runtime.clone();
    runtime
        .detached(async move {
            // One that is being started has its limits already.
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
                let limits = Limits::Container(Some(all.clone()));
                blocking("changing limits", move || shell.groups.limit(&group, &limits)).await?;
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

/// Notes what a pod may use; its control group is written by the kubelet.
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

/// Opens a container's log anew, after it was renamed.
///
/// # Errors
/// The container does not run (AC-09a-X19).
pub async fn reopen_log(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<()> {
    let (pod, id) = runtime.container(id)?;
    let not_running = |_| RuntimeError::state("container is not running");
    pod.now().container(&id)?.running().map_err(not_running)?;
    pod.shim()?.ask(Request::ReopenLog(id), Vec::new(), SHIM_ANSWER).await.map(drop)
}
