//! `StopPodSandbox` and `RemovePodSandbox` of CRI; every step is idempotent. Implements spec 09a §2.1.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use tracing::warn;

use super::{container_stop, sandbox_files};
use crate::{
    actor::SandboxHandle,
    errors::{ErrorKind, RuntimeError, RuntimeResult, outcome},
    runtime::{Runtime, blocking},
    store::{self, objects::SandboxPhase},
};
use berth_metrics::NetworkOperation;
use berth_shim::plan::ShimRequest;
use berth_sys::failpoint;

/// How long a shim may take to answer the shutdown request.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// Stops a sandbox; succeeds if it does not exist.
///
/// # Errors
/// A step failed; independent steps were still attempted, and the stop can be retried.
pub async fn stop(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<()> {
    let pod = match runtime.pod(id) {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let stopping = runtime.clone();
    runtime.detached(async move { stop_pod(&stopping, &pod).await }).await
}

async fn stop_pod(runtime: &Arc<Runtime>, pod: &SandboxHandle) -> RuntimeResult<()> {
    let lane = pod.lane.clone();
    let _lane = lane.lock().await;
    let now = pod.now();
    if now.is_removed || (now.phase == SandboxPhase::NotReady && pod.shim().is_err() && now.meta.netns.is_none()) {
        return Ok(());
    }
    take_down(runtime, pod).await?;
    pod.turn_on_full_disk(|sandbox| {
        sandbox.phase = SandboxPhase::NotReady;
        Arc::make_mut(&mut sandbox.meta).netns = None;
    })
    .await?;
    failpoint::reached("stop-pod.written");
    Ok(())
}

/// Kills the containers, detaches the network, unmounts shared memory, and ends the shim with its namespaces.
async fn take_down(runtime: &Arc<Runtime>, pod: &SandboxHandle) -> RuntimeResult<()> {
    let now = pod.now();
    let killed = now.containers.values().map(|container| container_stop::kill(pod, container.id()));
    let killed = join_all(killed).await.into_iter().collect::<RuntimeResult<Vec<()>>>();
    failpoint::reached("stop-pod.killed");
    let detached = match has_network(&now) {
        true => {
            let begun = Instant::now();
            let detached = runtime.ports.network.detach(now.network()).await;
            runtime.shell.metrics.network(NetworkOperation::Detach, begun, outcome(&detached));
            detached
        }
        false => Ok(()),
    };
    failpoint::reached("stop-pod.network");
    let path = runtime.shell.layout.shared_memory(now.id());
    let freed =
        blocking("unmounting shared memory of the sandbox", move || sandbox_files::unmount_shared_memory(&path)).await;
    failpoint::reached("stop-pod.memory");
    killed?;
    end_shim(runtime, pod).await?;
    failpoint::reached("stop-pod.group");
    detached.and(freed)
}

fn has_network(sandbox: &crate::sandbox::Sandbox) -> bool {
    let context = sandbox.config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let options = context.and_then(|context| context.namespace_options.as_ref());
    options.is_none_or(|options| options.network() != berth_proto::cri::NamespaceMode::Node)
}

/// Shuts the shim down, which releases its namespaces; then kills and removes its cgroup in any case.
async fn end_shim(runtime: &Arc<Runtime>, pod: &SandboxHandle) -> RuntimeResult<()> {
    if let Some(shim) = pod.detach_shim()
        && let Err(cause) = shim.request(ShimRequest::Shutdown, Vec::new(), GONE_LIMIT).await
    {
        warn!(podSandboxID = pod.now().id(), err = %cause, "Failed to shut down the shim of the sandbox, killing its cgroup");
    }
    failpoint::reached("stop-pod.shim");
    let (shell, group) = (runtime.shell.clone(), pod.now().meta.group.clone());
    blocking("removing cgroup of the sandbox", move || shell.groups.remove(&group)).await
}

/// Removes a sandbox with its containers; succeeds if it does not exist.
///
/// # Errors
/// A step failed; the removal can be retried.
pub async fn remove(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<()> {
    let pod = match runtime.pod(id) {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let removing = runtime.clone();
    runtime
        .detached(async move {
            stop_pod(&removing, &pod).await?;
            let containers: Vec<_> = pod.now().containers.keys().cloned().collect();
            for container in containers {
                container_stop::remove_from(&removing, &pod, &container).await?;
            }
            let lane = pod.lane.clone();
            let _lane = lane.lock().await;
            delete_records(&removing, &pod).await
        })
        .await
}

/// Deletes the records of a sandbox that is stopped and empty, and removes it from memory.
async fn delete_records(runtime: &Arc<Runtime>, pod: &SandboxHandle) -> RuntimeResult<()> {
    let now = pod.now();
    if now.is_removed {
        return Ok(());
    }
    let (shell, id, group) = (runtime.shell.clone(), now.id().to_owned(), now.meta.group.clone());
    blocking("deleting sandbox", move || {
        failpoint::reached("teardown.begun");
        shell.groups.remove(&group)?;
        sandbox_files::unmount_shared_memory(&shell.layout.shared_memory(&id))?;
        failpoint::reached("teardown.freed");
        shell.logs.add_deleted_pod(&shell.layout, &id);
        store::delete(&shell.layout.shim(&id))?;
        failpoint::reached("teardown.shim");
        store::delete(&shell.layout.sandbox(&id))?;
        failpoint::reached("teardown.deleted");
        Ok(())
    })
    .await?;
    // The actor ends after this turn.
    let _ = pod.turn(|sandbox| sandbox.is_removed = true).await;
    runtime.forget_pod(now.id());
    runtime.sandbox_names.release(&now.meta.name, now.id());
    Ok(())
}

/// Undoes a partially created sandbox whose ID no caller has received.
///
/// # Errors
/// The step that failed; some resources are left.
pub async fn undo(runtime: &Arc<Runtime>, pod: &SandboxHandle) -> RuntimeResult<()> {
    take_down(runtime, pod).await.map_err(|cause| RuntimeError::other(cause.text))?;
    delete_records(runtime, pod).await
}
