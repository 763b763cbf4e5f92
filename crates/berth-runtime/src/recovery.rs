//! Recovery at start: restores sandboxes and containers of an earlier daemon, removes orphans.
//!
//! ```text
//!  records ─► sandboxes ─► their shims ─► reconciled ─► owners ─► network ─► orphans ─► ready
//! ```
//!
//! Until it is complete, every call but `Version` and `Status` waits. Implements spec 09 §7, §8.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{
    actor::{SHIM_ANSWER, kill_all, mark_containers_lost},
    container::Container,
    cri::{delete_container, sandbox_files, sandbox_stop},
    errors::{RuntimeError, RuntimeResult, outcome},
    ids, lost_networks,
    ports::{Groups, ShimSession},
    reconciliation,
    runtime::{Runtime, blocking, now_ns},
    sandbox::Sandbox,
    store::{self, Layout, StoredObject, layout::DOOMED, objects::SandboxPhase},
};
use berth_metrics::NetworkOperation;
use berth_shim::plan::{Hello, ProcessTarget, Reply, Scope, ShimRequest};
use berth_sys::atomic_file;

/// Maximum number of sandboxes that are recovered in parallel.
const AT_ONCE: usize = 16;
/// Timeout of a shim's connection and reply.
const SHIM_LIMIT: Duration = Duration::from_secs(2);
/// Time for a container start in progress to complete; after it the container is killed.
const START_LIMIT: Duration = Duration::from_millis(500);
/// Poll interval for starts in progress.
const START_PAUSE: Duration = Duration::from_millis(10);
/// `SIGKILL`.
const KILL: i32 = 9;

/// Records read from disk.
#[derive(Default)]
struct StoredRecords {
    sandboxes: BTreeMap<String, Sandbox>,
    /// Last write of each container's record, nanoseconds since the epoch.
    written: BTreeMap<String, i64>,
    broken_sandboxes: Vec<String>,
    broken_containers: Vec<String>,
}

/// Recovers everything from an earlier daemon, then marks the runtime as ready.
///
/// # Errors
/// The records cannot be read at all.
pub async fn recover(runtime: &Arc<Runtime>) -> RuntimeResult<()> {
    let (layout, boot_id) = (runtime.shell.layout.clone(), runtime.host.boot_id.clone());
    let left = blocking("reading sandbox and container records", move || read(&layout, &boot_id)).await?;
    let count = (left.sandboxes.len(), left.written.len());
    let (broken_sandboxes, broken_containers) = (left.broken_sandboxes, left.broken_containers);
    let written = Arc::new(left.written);
    let all = stream::iter(left.sandboxes.into_values());
    all.for_each_concurrent(AT_ONCE, |sandbox| {
        let (runtime, written) = (runtime.clone(), written.clone());
        async move { recover_sandbox(&runtime, sandbox, &written).await }
    })
    .await;
    let broken = broken_sandboxes.len() + broken_containers.len();
    runtime.shell.metrics.broken_objects.inc_by(u64::try_from(broken).unwrap_or_default());
    for id in &broken_sandboxes {
        remove_orphan(runtime, id).await;
    }
    let begun = std::time::Instant::now();
    let recovered = runtime.ports.network.recover(lost_networks::connected(runtime)).await;
    runtime.shell.metrics.network(NetworkOperation::Recover, begun, outcome(&recovered));
    match recovered {
        Ok(lost) => lost_networks::mark_not_ready(runtime, &lost).await,
        Err(cause) => warn!(err = %cause, "Failed to recover pod networks"),
    }
    clean(runtime).await;
    runtime.set_ready();
    info!(sandboxes = count.0, containers = count.1, broken, "Embedded runtime recovered sandboxes and containers");
    Ok(())
}

fn read(layout: &Layout, boot_id: &str) -> RuntimeResult<StoredRecords> {
    let mark = layout.state.join("boot_id");
    // Informational: each record has its own boot id. A full disk must not prevent the removal of what fills it.
    if let Err(error) = atomic_file::replace_unsynced(&mark, boot_id.as_bytes(), 0o600) {
        warn!(path = %mark.display(), err = %error, "Failed to write boot ID");
    }
    let mut left = StoredRecords::default();
    for found in store::sandboxes(layout)? {
        let (id, sandbox) = match found {
            StoredObject::Whole { meta, state, .. } => (meta.id.clone(), Sandbox::from_record(meta, state)),
            StoredObject::Broken { id, cause } => {
                warn!(podSandboxID = id, err = cause, "Sandbox record is corrupt");
                (id, None)
            }
        };
        match sandbox {
            Some(sandbox) => drop(left.sandboxes.insert(id, sandbox)),
            None => left.broken_sandboxes.push(id),
        }
    }
    for found in store::containers(layout)? {
        let (id, container) = match found {
            StoredObject::Whole { meta, state, written_ns } => {
                let (id, spec) = (meta.id.clone(), store::spec(layout, &meta.id));
                left.written.insert(id.clone(), written_ns);
                (id, spec.and_then(|spec| Container::restore(meta, state, spec)))
            }
            StoredObject::Broken { id, cause } => {
                warn!(containerID = id, err = cause, "Container record is corrupt");
                (id, None)
            }
        };
        let owner = container.as_ref().and_then(|c| left.sandboxes.get_mut(&c.meta.sandbox_id));
        match (owner, container) {
            (Some(sandbox), Some(container)) => drop(sandbox.containers.insert(id, container)),
            _ => left.broken_containers.push(id),
        }
    }
    Ok(left)
}

/// Recovers one sandbox: reconnects to its shim, or ends what remains of it.
async fn recover_sandbox(runtime: &Arc<Runtime>, mut sandbox: Sandbox, written: &BTreeMap<String, i64>) {
    for container in sandbox.containers.values() {
        let request = (container.config.clone(), sandbox.id().to_owned());
        runtime.container_names.restore(&container.meta.name, container.id(), request);
        if let Err(cause) = runtime.ports.images.pin(&container.meta.image_id, container.id()).await {
            warn!(containerID = container.id(), err = %cause, "Failed to protect the image of the container from garbage collection");
        }
    }
    let request = (sandbox.config.clone(), sandbox.meta.runtime_handler.clone());
    runtime.sandbox_names.restore(&sandbox.meta.name, sandbox.id(), request);
    let is_of_this_boot = sandbox.boot_id == runtime.host.boot_id;
    let connected = match sandbox.phase {
        SandboxPhase::Ready if is_of_this_boot => find(runtime, &mut sandbox).await,
        // Its shim may be outside the sandbox's cgroup, so it needs an explicit shutdown.
        SandboxPhase::Creating if is_of_this_boot => connect_incomplete(runtime, &sandbox).await,
        _ => {
            if sandbox.phase == SandboxPhase::Ready {
                sandbox.phase = SandboxPhase::NotReady;
            }
            for (id, container) in &mut sandbox.containers {
                reconciliation::after_reboot(container, written.get(id).copied().unwrap_or_default(), now_ns());
            }
            None
        }
    };
    let is_half_made = sandbox.phase == SandboxPhase::Creating;
    let pod = runtime.adopt(sandbox);
    if let Some(connected) = connected
        && let Err(cause) = pod.connect(connected).await
    {
        warn!(err = %cause, "Sandbox was removed during recovery");
    }
    // Writes the whole record: the shim's report is not on disk yet.
    if let Err(cause) = pod.turn(|_| ()).await {
        warn!(err = %cause, "Failed to write recovered sandbox record");
    }
    if is_half_made && let Err(cause) = sandbox_stop::undo(runtime, &pod).await {
        warn!(podSandboxID = pod.now().id(), err = %cause, "Failed to remove incomplete sandbox");
        // Listed as not ready, so that the kubelet can stop and remove it.
        let _ = pod.turn(|sandbox| sandbox.phase = SandboxPhase::NotReady).await;
    }
}

/// Connects to the shim of an incomplete sandbox, if it was started.
async fn connect_incomplete(runtime: &Arc<Runtime>, sandbox: &Sandbox) -> Option<ShimSession> {
    let found = timeout(SHIM_LIMIT, runtime.ports.shims.find(sandbox.id())).await;
    found.ok()?.ok().map(|(connected, _)| connected)
}

/// Connects to a sandbox's shim and adopts its report; without a shim all its containers are lost.
async fn find(runtime: &Arc<Runtime>, sandbox: &mut Sandbox) -> Option<ShimSession> {
    let found = match timeout(SHIM_LIMIT, runtime.ports.shims.find(sandbox.id())).await {
        Ok(found) => found,
        Err(_) => Err(RuntimeError::deadline(format!("shim did not respond within {SHIM_LIMIT:?}"))),
    };
    match found {
        Ok((connected, hello)) => {
            let hello = wait_for_starts(&connected, hello).await;
            let unknown = reconciliation::with_shim(sandbox, &hello, runtime.shell.config.oom_reason, now_ns());
            for id in unknown {
                drop_unknown(&connected, &id).await;
            }
            Some(connected)
        }
        Err(cause) => {
            warn!(podSandboxID = sandbox.id(), err = %cause, "Failed to reconnect to the shim of the sandbox, killing its containers");
            runtime.shell.metrics.shims_lost.inc();
            kill_all(&runtime.shell, sandbox).await;
            mark_containers_lost(&runtime.shell, sandbox, runtime.shell.config.oom_reason, now_ns());
            None
        }
    }
}

/// The shim's report once no start is in progress: the caller of such a start no longer exists. Kills containers whose
/// start takes too long.
async fn wait_for_starts(connected: &ShimSession, mut hello: Hello) -> Hello {
    let begun = Instant::now();
    while !hello.starting.is_empty() && begun.elapsed() < 2 * START_LIMIT {
        if begun.elapsed() > START_LIMIT {
            for id in &hello.starting {
                kill(connected, id).await;
            }
        }
        sleep(START_PAUSE).await;
        match connected.shim.request(ShimRequest::Hello, Vec::new(), SHIM_ANSWER).await {
            Ok((Reply::Hello(now), _)) => hello = now,
            // The end of the event channel reports the lost connection.
            _ => break,
        }
    }
    hello
}

/// Kills a container that is running or starting.
async fn kill(connected: &ShimSession, id: &str) {
    let to = ProcessTarget::Container(id.to_owned());
    let kill = ShimRequest::Signal { to, signal: KILL, scope: Scope::ControlGroup };
    if let Err(cause) = connected.shim.request(kill, Vec::new(), SHIM_ANSWER).await {
        warn!(containerID = id, err = %cause, "Failed to kill container");
    }
}

/// Kills and forgets a container without a record.
async fn drop_unknown(connected: &ShimSession, id: &str) {
    kill(connected, id).await;
    let forget = ShimRequest::Forget(id.to_owned());
    if let Err(cause) = connected.shim.request(forget, Vec::new(), SHIM_ANSWER).await {
        warn!(containerID = id, err = %cause, "Failed to remove container without a record from its shim");
    }
}

/// Deletes everything that belongs to no object.
async fn clean(runtime: &Arc<Runtime>) {
    let mut known = BTreeSet::new();
    for pod in runtime.pods() {
        let now = pod.now();
        known.insert(now.id().to_owned());
        known.extend(now.containers.keys().cloned());
    }
    runtime.ports.images.release_others(&known).await;
    let (layout, groups) = (runtime.shell.layout.clone(), runtime.shell.groups.clone());
    let shims = store::names(&layout.shims()).unwrap_or_default();
    for id in shims.iter().filter(|id| !known.contains(*id)) {
        remove_orphan(runtime, id).await;
    }
    let cleaned = blocking("deleting orphaned container directories and cgroups", move || {
        for name in store::names(&layout.containers())? {
            if name.starts_with(DOOMED) {
                store::delete(&layout.containers().join(&name))?;
            } else if ids::is_id(&name) && !known.contains(&name) {
                remove_groups(&*groups, &name)?;
                delete_container(&layout, &name)?;
            }
        }
        Ok(())
    });
    if let Err(cause) = cleaned.await {
        warn!(err = %cause, "Failed to delete orphaned container directories and cgroups");
    }
}

/// Removes the cgroups of an object without a record; without one they are found by id.
fn remove_groups(groups: &dyn Groups, id: &str) -> RuntimeResult<()> {
    groups.find(id)?.iter().try_for_each(|group| groups.remove(group))
}

/// Removes the remains of a sandbox without a record: shim, cgroups, shared memory, directories.
async fn remove_orphan(runtime: &Arc<Runtime>, id: &str) {
    if let Ok(Ok((connected, hello))) = timeout(SHIM_LIMIT, runtime.ports.shims.find(id)).await {
        for record in &hello.containers {
            drop_unknown(&connected, &record.id).await;
        }
        // The cgroup is killed in any case.
        let _ = connected.shim.request(ShimRequest::Shutdown, Vec::new(), SHIM_ANSWER).await;
    }
    let (shell, id) = (runtime.shell.clone(), id.to_owned());
    let removal = blocking("removing orphaned sandbox", move || {
        remove_groups(&*shell.groups, &id)?;
        sandbox_files::unmount_shared_memory(&shell.layout.shared_memory(&id))?;
        store::delete(&shell.layout.shim(&id))?;
        store::delete(&shell.layout.sandbox(&id))
    });
    if let Err(cause) = removal.await {
        warn!(err = %cause, "Failed to remove orphaned sandbox");
    }
}
