//! `StopContainer` and `RemoveContainer` of CRI. Implements spec 09a §3.2 (AC-09a-X5).

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use super::container::delete;
use crate::{
    actor::{SHIM_ANSWER, SandboxHandle},
    container::{self, Phase, StopAction},
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    runtime::{Runtime, blocking},
};
use berth_shim::plan::{ProcessTarget, Scope, ShimRequest};
use berth_sys::failpoint;

/// How long a killed process may take to exit.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// `SIGKILL`.
const KILL: i32 = 9;

/// Stops a container with a grace period in seconds; succeeds if it does not exist or does not run.
///
/// # Errors
/// The container survives SIGKILL, or the shim fails.
pub async fn stop(runtime: &Arc<Runtime>, id: &str, seconds: i64) -> RuntimeResult<()> {
    let (pod, id) = match runtime.container(id) {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    runtime.detached(async move { stop_in(&pod, &id, seconds).await }).await
}

async fn stop_in(pod: &SandboxHandle, id: &str, seconds: i64) -> RuntimeResult<()> {
    settle_start(pod, id).await?;
    let asked = id.to_owned();
    let decide = pod.turn_on_full_disk(move |sandbox| {
        let container = sandbox.container_mut(&asked)?;
        Ok((container::decide_stop(container, seconds), container.meta.stop_signal))
    });
    let (stop, signal) = match decide.await? {
        Ok(decided) => decided,
        // Removed in the meantime.
        Err::<_, RuntimeError>(_) => return Ok(()),
    };
    match stop {
        StopAction::Nothing => return Ok(()),
        StopAction::SendSignal => {
            failpoint::reached("stop.decided");
            send(pod, id, signal, Scope::Process).await?;
            failpoint::reached("stop.asked");
        }
        StopAction::Wait | StopAction::Kill => {}
    }
    let grace = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    if stop != StopAction::Kill && ended(pod, id, grace).await? {
        return Ok(());
    }
    kill(pod, id).await
}

/// Kills a container and waits for its exit.
///
/// # Errors
/// The container survives SIGKILL, or the shim fails.
pub async fn kill(pod: &SandboxHandle, id: &str) -> RuntimeResult<()> {
    settle_start(pod, id).await?;
    let killed = id.to_owned();
    let running = pod.turn_on_full_disk(move |sandbox| {
        let container = sandbox.containers.get_mut(&killed);
        container.filter(|c| c.running().is_ok()).map(|c| c.is_killed = true).is_some()
    });
    if !running.await? {
        return Ok(());
    }
    failpoint::reached("kill.decided");
    send(pod, id, KILL, Scope::Process).await?;
    failpoint::reached("kill.sent");
    if ended(pod, id, KILL_LIMIT).await? {
        return Ok(());
    }
    Err(RuntimeError::deadline(format!("container \"{id}\" did not exit within {KILL_LIMIT:?} after SIGKILL")))
}

/// Waits until a start in progress completes; the start has its own timeout.
pub async fn settle_start(pod: &SandboxHandle, id: &str) -> RuntimeResult<()> {
    let is_settled = |c: &container::Container| c.phase != Phase::Starting;
    pod.wait_for(|sandbox| sandbox.containers.get(id).is_none_or(is_settled)).await.map(drop)
}

async fn send(pod: &SandboxHandle, id: &str, signal: i32, scope: Scope) -> RuntimeResult<()> {
    let request = ShimRequest::Signal { to: ProcessTarget::Container(id.to_owned()), signal, scope };
    match pod.shim()?.request(request, Vec::new(), SHIM_ANSWER).await {
        // It has exited in the meantime; the shim reports the exit separately.
        Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::State) => Ok(()),
        other => other.map(drop),
    }
}

/// Whether the container exits within the limit.
async fn ended(pod: &SandboxHandle, id: &str, limit: Duration) -> RuntimeResult<bool> {
    let is_over = |c: &container::Container| c.finished().is_some();
    let ended = pod.wait_for(|sandbox| sandbox.containers.get(id).is_none_or(is_over));
    match timeout(limit, ended).await {
        Ok(ended) => ended.map(|_| true),
        Err(_) => Ok(false),
    }
}

/// Removes a container, killing it first if it runs; succeeds if it does not exist.
///
/// # Errors
/// A step failed; the removal can be retried.
pub async fn remove(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<()> {
    let (pod, id) = match runtime.container(id) {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let removing = runtime.clone();
    runtime.detached(async move { remove_from(&removing, &pod, &id).await }).await
}

/// Removes a container of the sandbox.
///
/// # Errors
/// A step failed; the removal can be retried.
pub async fn remove_from(runtime: &Arc<Runtime>, pod: &SandboxHandle, id: &str) -> RuntimeResult<()> {
    let lane = pod.lane.clone();
    let _lane = lane.lock().await;
    kill(pod, id).await?;
    let gone = id.to_owned();
    let marked = pod.turn_on_full_disk(move |sandbox| {
        sandbox.containers.get_mut(&gone).map(|container| {
            container.is_removing = true;
            container.meta.clone()
        })
    });
    let Some(meta) = marked.await? else { return Ok(()) };
    failpoint::reached("remove.marked");
    if let Ok(shim) = pod.shim() {
        // A shim that is gone has nothing to forget.
        let _ = shim.request(ShimRequest::Forget(id.to_owned()), Vec::new(), SHIM_ANSWER).await;
    }
    let (shell, sandbox, container) = (runtime.shell.clone(), pod.now(), id.to_owned());
    let group = meta.group.clone();
    blocking("deleting container", move || {
        failpoint::reached("remove.forgotten");
        shell.groups.remove(&group)?;
        failpoint::reached("remove.group");
        let record = shell.exit_record(&sandbox, &container);
        match std::fs::remove_file(&record) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(RuntimeError::file("delete", &record, &e));
            }
            _ => {}
        }
        failpoint::reached("remove.record");
        delete(&shell.layout, &container)
    })
    .await?;
    failpoint::reached("remove.directory");
    runtime.ports.images.release(&meta.image_id, id).await;
    failpoint::reached("remove.root");
    let gone = id.to_owned();
    pod.turn_on_full_disk(move |sandbox| drop(sandbox.containers.remove(&gone))).await?;
    runtime.forget_container(id);
    runtime.container_names.release(&meta.name, id);
    Ok(())
}
