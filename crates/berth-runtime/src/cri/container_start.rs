//! `StartContainer` of CRI. Implements spec 09a §3.2, §10.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tracing::warn;

use crate::{
    actor::SandboxHandle,
    container::Phase,
    errors::{RuntimeError, RuntimeResult},
    ports::CgroupLimits,
    runtime::{Runtime, blocking, now_ns},
    sandbox::Sandbox,
};
use berth_metrics::LaunchStep;
use berth_shim::plan::{LaunchPlan, Reply, ShimRequest, StartTimings, StartedProcess};
use berth_sys::failpoint;

/// Time added to the shim's own launch timeout before the request to it times out.
const GRACE: Duration = Duration::from_secs(5);

/// Starts a container that was created and never started.
///
/// # Errors
/// The container is in another state, or could not be started: then it is exited with code 128.
pub async fn start(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<()> {
    let (pod, id) = runtime.container(id)?;
    let begun = id.clone();
    let begin = pod.turn(move |sandbox| {
        let is_ready = sandbox.ready();
        let container = sandbox.container_mut(&begun)?;
        if container.phase == Phase::Created {
            is_ready?;
        }
        container.begin_start()
    });
    begin.await??;
    failpoint::reached("start.begun");
    let starting = runtime.clone();
    runtime.detached(async move { launch(&starting, &pod, &id).await }).await
}

async fn launch(runtime: &Arc<Runtime>, pod: &SandboxHandle, id: &str) -> RuntimeResult<()> {
    let outcome = match runtime.starts.acquire().await {
        Ok(_turn) => attempt(runtime, pod, id).await,
        Err(error) => Err(RuntimeError::other(error.to_string())),
    };
    let container = id.to_owned();
    match outcome {
        Ok(started) => {
            let begun = container.clone();
            // The process runs: if it has filled the disk already, the record is written later. After a restart of the
            // agent before that, the shim reports the process while it lives.
            let mark = move |sandbox: &mut Sandbox| sandbox.container_mut(&begun).map(|c| c.mark_started(started));
            let early = pod.turn_on_full_disk(mark).await??;
            failpoint::reached("start.written");
            let Some(exit) = early else { return Ok(()) };
            // A separate turn: subscribers get a started event, then a stopped event.
            let rule = runtime.shell.config.oom_reason;
            let ended =
                move |sandbox: &mut Sandbox| sandbox.container_mut(&container).map(|c| c.mark_exited(&exit, rule));
            pod.turn_on_full_disk(ended).await?.map(drop)
        }
        Err(cause) => {
            clean_up(runtime, pod, id).await;
            let text = cause.text.clone();
            let failed = move |sandbox: &mut Sandbox| {
                let container = sandbox.container_mut(&container);
                container.map(|c| c.start_failed(&text, now_ns()))
            };
            // The event is sent in any case; a failed write is retried.
            let _ = pod.turn(failed).await;
            Err(cause)
        }
    }
}

async fn attempt(runtime: &Arc<Runtime>, pod: &SandboxHandle, id: &str) -> RuntimeResult<StartedProcess> {
    let sandbox = pod.now();
    let container = sandbox.container(id)?;
    let (shell, group) = (runtime.shell.clone(), container.meta.group.clone());
    let limits = CgroupLimits::Container(container.resources.clone());
    let devices = container.devices.clone();
    let groups = blocking("creating cgroup", move || {
        let groups = shell.groups.create(&group, &limits)?;
        failpoint::reached("start.group");
        shell.groups.allow_devices(&group, &devices)?;
        failpoint::reached("start.devices");
        Ok(groups)
    })
    .await?;
    let mut plan = LaunchPlan { groups, ..(*container.plan).clone() };
    if let Some(resources) = container.resources.as_ref().filter(|_| container.is_updated) {
        plan.process.oom_score_adj = i32::try_from(resources.oom_score_adj).ok();
    }
    let limit = Duration::from_millis(plan.limit_ms).saturating_add(GRACE);
    let begun = Instant::now();
    let launched = pod.shim()?.request(ShimRequest::Launch(Box::new(plan)), Vec::new(), limit).await;
    let whole = begun.elapsed();
    settle(runtime, container.meta.group.clone());
    match launched? {
        (Reply::Started(started), _) => {
            count(runtime, whole, started.took);
            failpoint::reached("start.launched");
            Ok(started)
        }
        _ => Err(RuntimeError::other("unexpected response from shim: expected a process")),
    }
}

/// Records the duration of the steps that the shim measured; the remainder of the total belongs to the last step.
fn count(runtime: &Runtime, whole: Duration, took: StartTimings) {
    let micros = |count: u32| Duration::from_micros(count.into());
    let (root, clone) = (micros(took.root), micros(took.clone));
    let steps = [
        (LaunchStep::Root, root),
        (LaunchStep::Clone, clone),
        (LaunchStep::Exec, whole.saturating_sub(root).saturating_sub(clone)),
    ];
    steps.into_iter().for_each(|(step, took)| runtime.shell.metrics.launched(step, took));
}

/// Releases, in the background, what keeps a new cgroup alive while it is empty.
pub fn settle(runtime: &Arc<Runtime>, group: String) {
    let shell = runtime.shell.clone();
    runtime.shell.spawn(async move {
        let _ = tokio::task::spawn_blocking(move || shell.groups.settle(&group)).await;
    });
}

async fn clean_up(runtime: &Arc<Runtime>, pod: &SandboxHandle, id: &str) {
    let Ok(group) = pod.now().container(id).map(|c| c.meta.group.clone()) else { return };
    let shell = runtime.shell.clone();
    if let Err(cause) = blocking("removing cgroup", move || shell.groups.remove(&group)).await {
        warn!(containerID = id, err = %cause, "Failed to remove cgroup of container that failed to start");
    }
}
