//! `RunPodSandbox` of CRI: creates a sandbox's namespaces, network, and files.
//!
//! Implements spec 09a §2.2.

use std::{path::PathBuf, sync::Arc, time::Instant};

use tracing::warn;

use super::sandbox_files;
use crate::{
    actor::{SHIM_ANSWER, SandboxHandle},
    config::NAME,
    errors::{RuntimeError, RuntimeResult, outcome},
    ids,
    name_reservations::{self, Claim},
    ports::{AttachedNetwork, CgroupLimits, NetworkPod},
    runtime::{Runtime, blocking, now_ns},
    sandbox::{Sandbox, sandbox_name},
    store::{
        self,
        objects::{SandboxMeta, SandboxPhase, SandboxState, VERSION, pack},
    },
};
use berth_metrics::{LaunchStep, NetworkOperation};
use berth_proto::cri;
use berth_shim::plan::{Namespace, NamespacePlan, Reply, ShimRequest};
use berth_sys::failpoint;

/// Runs a sandbox; an identical request returns the same sandbox.
///
/// # Errors
/// The request is invalid or a step fails; afterwards nothing is left, or a sandbox that is not ready.
pub async fn run(runtime: &Arc<Runtime>, config: cri::PodSandboxConfig, handler: String) -> RuntimeResult<String> {
    let name = sandbox_name(&config)?;
    let is_ours = handler.is_empty() || handler == NAME || runtime.shell.config.runtime_handlers.contains(&handler);
    if !is_ours {
        return Err(RuntimeError::invalid(format!("no runtime for \"{handler}\" is configured")));
    }
    let plan = runtime.ports.planner.namespaces(&config)?;
    let (config, id) = (Arc::new(config), ids::new_id());
    let request = (config.clone(), handler.clone());
    let result_sender = match runtime.sandbox_names.claim(&name, &id, request)? {
        Claim::Acquired(result_sender) => result_sender,
        Claim::InProgress(flight) => return name_reservations::join(flight).await,
        Claim::Existing(old) => {
            let is_ready = runtime.pod(&old).is_ok_and(|pod| pod.now().is_ready());
            return if is_ready { Ok(old) } else { Err(name_reservations::taken(&name, &old)) };
        }
    };
    let (making, id) = (runtime.clone(), id.clone());
    runtime
        .detached(async move {
            let ask = RunRequest { id: id.clone(), name: name.clone(), config, handler, plan };
            let outcome = make(&making, ask).await.map(|()| id.clone());
            match &outcome {
                Ok(_) => making.sandbox_names.complete(&name),
                // A sandbox whose undo failed is listed and keeps its name until it is removed.
                Err(_) if making.pod(&id).is_ok() => making.sandbox_names.complete(&name),
                Err(_) => making.sandbox_names.release(&name, &id),
            }
            result_sender.send_replace(Some(outcome.clone()));
            outcome
        })
        .await
}

struct RunRequest {
    id: String,
    name: String,
    config: Arc<cri::PodSandboxConfig>,
    handler: String,
    plan: NamespacePlan,
}

async fn make(runtime: &Arc<Runtime>, ask: RunRequest) -> RuntimeResult<()> {
    let _turn = runtime.creations.acquire().await.map_err(|error| RuntimeError::other(error.to_string()))?;
    let parent = ask.config.linux.as_ref().map_or("", |linux| linux.cgroup_parent.as_str());
    let group = runtime.ports.groups.name(parent, &ask.id)?;
    let meta = SandboxMeta {
        v: VERSION,
        id: ask.id.clone(),
        name: ask.name.clone(),
        created_ns: now_ns(),
        config: pack(&*ask.config),
        runtime_handler: ask.handler.clone(),
        netns: None,
        ips: Vec::new(),
        group,
        network: serde_json::Value::Null,
    };
    let state = SandboxState {
        v: VERSION,
        state: SandboxPhase::Creating,
        boot_id: runtime.host.boot_id.to_string(),
        resources: None,
        overhead: None,
    };
    let sandbox = Sandbox::from_record(meta.clone(), Some(state.clone()))
        .ok_or_else(|| RuntimeError::invalid("invalid sandbox configuration"))?;
    let sandbox = Sandbox { config: ask.config.clone(), ..sandbox };
    let pod = runtime.adopt(sandbox);
    let outcome = bring_up(runtime, &pod, &ask, meta, state).await;
    let Err(cause) = outcome else { return Ok(()) };
    if let Err(left) = super::sandbox_stop::undo(runtime, &pod).await {
        warn!(podSandboxID = ask.id, err = %left, "Failed to clean up sandbox after failed creation");
        // List it as not ready, so that the kubelet can stop and remove it.
        let _ = pod.turn(|sandbox| sandbox.phase = SandboxPhase::NotReady).await;
    }
    Err(cause)
}

async fn bring_up(
    runtime: &Arc<Runtime>,
    pod: &SandboxHandle,
    ask: &RunRequest,
    meta: SandboxMeta,
    state: SandboxState,
) -> RuntimeResult<()> {
    let (shell, host) = (runtime.shell.clone(), runtime.host.clone());
    let (config, group) = (ask.config.clone(), meta.group.clone());
    let first = meta.clone();
    let groups = blocking("preparing sandbox", move || {
        let directory = shell.layout.sandbox(&first.id);
        failpoint::reached("run.begun");
        store::make_directory(&directory, 0o700)?;
        failpoint::reached("run.directory");
        store::save(&directory.join("meta.json"), &first)?;
        failpoint::reached("run.meta");
        store::save(&directory.join("state.json"), &state)?;
        sandbox_files::write(&directory, &config, &host.hostname)?;
        failpoint::reached("run.files");
        store::make_directory(&shell.layout.shim(&first.id).join("exits"), 0o700)?;
        sandbox_files::mount_shared_memory(&config, &shell.layout.shared_memory(&first.id))?;
        failpoint::reached("run.memory");
        let groups = shell.groups.create(&group, &CgroupLimits::Smallest)?;
        failpoint::reached("run.group");
        Ok(groups)
    })
    .await?;
    let begun = Instant::now();
    let connected = runtime.ports.shims.spawn(&ask.id, &groups).await?;
    runtime.shell.metrics.launched(LaunchStep::Spawn, begun.elapsed());
    failpoint::reached("run.shim");
    pod.connect(connected).await?;
    let attached = connect(runtime, pod, ask, groups).await?;
    failpoint::reached("run.network");
    let attached = attached.map(|a| (Some(a.netns), a.ips, a.persisted)).unwrap_or_default();
    let meta = SandboxMeta { netns: attached.0, ips: attached.1, network: attached.2, ..meta };
    let (shell, written) = (runtime.shell.clone(), meta.clone());
    blocking("writing sandbox record", move || {
        store::save(&shell.layout.sandbox(&written.id).join("meta.json"), &written)
    })
    .await?;
    failpoint::reached("run.final");
    pod.turn(move |sandbox| {
        sandbox.meta = Arc::new(meta);
        sandbox.phase = SandboxPhase::Ready;
    })
    .await?;
    failpoint::reached("run.ready");
    Ok(())
}

/// Creates the namespaces and attaches the network.
async fn connect(
    runtime: &Arc<Runtime>,
    pod: &SandboxHandle,
    ask: &RunRequest,
    groups: Vec<PathBuf>,
) -> RuntimeResult<Option<AttachedNetwork>> {
    let mut plan = ask.plan.clone();
    if plan.hostname.is_empty() {
        plan.hostname.clone_from(&runtime.host.hostname);
    }
    plan.groups = groups;
    let has_network = plan.made.contains(&Namespace::Network);
    let begun = Instant::now();
    let (reply, files) = pod.shim()?.request(ShimRequest::MakeNamespaces(plan), Vec::new(), SHIM_ANSWER).await?;
    runtime.shell.metrics.launched(LaunchStep::Namespaces, begun.elapsed());
    super::container_start::settle(runtime, pod.now().meta.group.clone());
    failpoint::reached("run.namespaces");
    let Reply::Namespaces { made, .. } = reply else {
        return Err(RuntimeError::other("unexpected response from shim: expected namespaces"));
    };
    if !has_network {
        return Ok(None);
    }
    let namespace = made.iter().zip(files).find(|(kind, _)| **kind == Namespace::Network).map(|(_, file)| file);
    let pod = NetworkPod { id: ask.id.clone(), config: ask.config.clone(), persisted: serde_json::Value::Null };
    let begun = Instant::now();
    let attached = runtime.ports.network.attach(pod, namespace).await;
    runtime.shell.metrics.network(NetworkOperation::Attach, begun, outcome(&attached));
    runtime.shell.metrics.launched(LaunchStep::Network, begun.elapsed());
    attached.map(Some)
}
