//! Checks that runtime, statuses, disk, and engine match the desired state.

use std::collections::BTreeMap;

use berth_proto::cri;
use berth_types::{Pod, RestartPolicy, api, hash, restart_decision};

use crate::run_state::RunState;

/// Sandboxes and containers of a pod in the runtime.
#[derive(Default)]
struct RuntimePod {
    sandboxes: Vec<cri::PodSandbox>,
    containers: Vec<cri::Container>,
}

impl RuntimePod {
    fn ready(&self) -> impl Iterator<Item = &cri::PodSandbox> {
        self.sandboxes.iter().filter(|s| s.state() == cri::PodSandboxState::SandboxReady)
    }

    fn running(&self) -> impl Iterator<Item = &cri::Container> {
        self.containers.iter().filter(|c| c.state() == cri::ContainerState::ContainerRunning)
    }
}

fn name_of(container: &cri::Container) -> &str {
    container.metadata.as_ref().map_or("", |m| &m.name)
}

const UID: &str = "io.kubernetes.pod.uid";

fn runtime_pods(world: &RunState) -> BTreeMap<String, RuntimePod> {
    let mut pods: BTreeMap<String, RuntimePod> = BTreeMap::new();
    for sandbox in world.machine.cri.sandboxes() {
        pods.entry(sandbox.labels[UID].clone()).or_default().sandboxes.push(sandbox);
    }
    for container in world.machine.cri.listed() {
        pods.entry(container.labels[UID].clone()).or_default().containers.push(container);
    }
    pods
}

/// Checks runtime, statuses, disk, and engine; ignores a pod of the name `except`.
pub async fn settled(world: &RunState, except: Option<&str>) -> Result<(), String> {
    let counts = |uid: &str| except.is_none_or(|name| uid.split('-').nth(1) != Some(name));
    let mut pods = runtime_pods(world);
    for pod in world.wanted().filter(|pod| counts(pod.uid().as_str())) {
        let uid = pod.uid().as_str();
        if pod.is_deleting() {
            return Err(format!("{uid} is still being deleted"));
        }
        let observed = pods.remove(uid).unwrap_or_default();
        as_wanted(world, pod, &observed).map_err(|lacking| format!("{uid}: {lacking}"))?;
    }
    let wanted = |uid: &str| world.wanted().any(|pod| pod.uid().as_str() == uid);
    if let Some((uid, observed)) = pods.iter().find(|(uid, _)| counts(uid) && !wanted(uid)) {
        let (sandboxes, containers) = (observed.sandboxes.len(), observed.containers.len());
        return Err(format!("{uid} is not wanted, but has {sandboxes} sandboxes and {containers} containers"));
    }
    let left = world.machine.disk.pods().into_iter().chain(world.machine.disk.cgroups());
    if let Some(uid) = left.into_iter().find(|uid| counts(uid.as_str()) && !wanted(uid.as_str())) {
        return Err(format!("{uid} is not wanted, but has a directory or a cgroup"));
    }
    workers(world, counts, wanted).await
}

async fn workers(world: &RunState, counts: impl Fn(&str) -> bool, wanted: impl Fn(&str) -> bool) -> Result<(), String> {
    let Some(agent) = &world.agent else { return Err("the agent is down".to_owned()) };
    for view in agent.describe().await {
        let uid = view.id.uid.as_str();
        if counts(uid) && !wanted(uid) {
            return Err(format!("{uid} is not wanted, but worked on: {:?} {:?}", view.life, view.step));
        }
        if counts(uid) && view.life.is_stopping() && !view.life.is_finished() {
            return Err(format!("{uid} is still stopping: {:?} {:?}", view.life, view.step));
        }
    }
    let statuses = agent.status.snapshot();
    match statuses.iter().find(|(pod, _)| counts(pod.uid.as_str()) && !wanted(pod.uid.as_str())) {
        Some((pod, _)) => Err(format!("{} is not wanted, but has a status", pod.uid)),
        None => Ok(()),
    }
}

fn as_wanted(world: &RunState, pod: &Pod, observed: &RuntimePod) -> Result<(), String> {
    let agent = world.agent.as_ref().ok_or("the agent is down")?;
    let status = agent.status.status(pod.uid()).ok_or("no status")?;
    let policy = pod.restart_policy();
    match status.phase.as_deref() {
        Some("Running") => runs(world, pod, observed, &status),
        Some(phase @ ("Succeeded" | "Failed")) => {
            may_end(world, pod, observed, phase)
                .map_err(|wrong| format!("{wrong}, under {policy:?}; {}", states(&status)))?;
            ended(observed, &status)
        }
        phase => Err(format!("phase {phase:?} under {policy:?}; {}", states(&status))),
    }
}

/// Container states of a status, for error messages.
fn states(status: &api::PodStatus) -> String {
    let state = |c: &api::ContainerStatus| {
        let state = c.state.clone().unwrap_or_default();
        let text = match (state.waiting, state.running, state.terminated) {
            (Some(w), ..) => format!("waits: {}", w.reason.unwrap_or_default()),
            (_, Some(_), _) => "runs".to_owned(),
            (.., Some(t)) => format!("ended: {} {}", t.exit_code, t.reason.unwrap_or_default()),
            _ => "nothing".to_owned(),
        };
        format!("{} {text}", c.name)
    };
    let all = status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    all.map(state).collect::<Vec<_>>().join(", ")
}

fn ended(observed: &RuntimePod, status: &api::PodStatus) -> Result<(), String> {
    if let Some(container) = observed.running().next() {
        return Err(format!("{:?}, but {} runs", status.phase, name_of(container)));
    }
    if observed.ready().next().is_some() {
        return Err(format!("{:?}, but a sandbox is ready", status.phase));
    }
    if !status.init_container_statuses.iter().flatten().all(succeeded) {
        return Ok(()); // containers of an uninitialized pod stay waiting
    }
    let open =
        status.container_statuses.iter().flatten().find(|c| c.state.as_ref().is_none_or(|s| s.terminated.is_none()));
    open.map_or(Ok(()), |c| Err(format!("{:?}, but {} has not ended: {}", status.phase, c.name, states(status))))
}

fn succeeded(init: &api::ContainerStatus) -> bool {
    init.state.as_ref().and_then(|s| s.terminated.as_ref()).is_some_and(|t| t.exit_code == 0)
}

fn runs(world: &RunState, pod: &Pod, observed: &RuntimePod, status: &api::PodStatus) -> Result<(), String> {
    let ready: Vec<_> = observed.ready().collect();
    let [sandbox] = ready.as_slice() else { return Err(format!("{} ready sandboxes", ready.len())) };
    let mut alive = 0;
    for (container, is_sidecar) in pod
        .containers()
        .iter()
        .map(|c| (c, false))
        .chain(pod.init_containers().iter().filter(|c| Pod::is_sidecar(c)).map(|c| (c, true)))
    {
        let name = &container.name;
        let instances: Vec<_> = observed.running().filter(|c| name_of(c) == name).collect();
        match instances.as_slice() {
            [instance] if instance.pod_sandbox_id == sandbox.id => {
                alive += usize::from(!is_sidecar);
                fits(container, instance, status)?;
            }
            [] if !is_sidecar && is_done(world, pod, observed, container) => {}
            found => return Err(format!("{name} runs {} times; {}", found.len(), states(status))),
        }
    }
    let is_init =
        |c: &cri::Container| pod.init_containers().iter().any(|i| i.name == name_of(c) && !Pod::is_sidecar(i));
    match observed.running().find(|c| is_init(c)) {
        Some(init) => Err(format!("{} still runs", name_of(init))),
        None if alive == 0 => Err("no container runs".to_owned()),
        None => Ok(()),
    }
}

/// Whether a container has exited and is not restarted.
fn is_done(world: &RunState, pod: &Pod, observed: &RuntimePod, container: &api::Container) -> bool {
    let exit = exit_of_newest(world, observed, &container.name);
    exit.is_some_and(|code| !restart_decision::restarts_after_exit(pod, container, code))
}

/// Exit code of a container's newest instance, if it has exited; ids are assigned in the order of creation.
fn exit_of_newest(world: &RunState, observed: &RuntimePod, name: &str) -> Option<i32> {
    let newest = observed.containers.iter().filter(|c| name_of(c) == name).max_by_key(|c| &c.id)?;
    let all = world.machine.cri.containers().into_iter();
    let exited = all.filter(|c| c.state() == cri::ContainerState::ContainerExited);
    exited.into_iter().find(|c| c.id == newest.id).map(|c| c.exit_code)
}

/// Checks whether a pod may have that final phase.
fn may_end(world: &RunState, pod: &Pod, observed: &RuntimePod, phase: &str) -> Result<(), String> {
    // A pod that never restarts may fail at any time; one with policy OnFailure counts as succeeded once its sandbox is
    // gone and all containers are done.
    match (pod.restart_policy(), phase) {
        (RestartPolicy::Never, _) | (RestartPolicy::OnFailure, "Succeeded") => return Ok(()),
        _ => {}
    }
    let is_init = |c: &&api::Container| !Pod::is_sidecar(c);
    let hopeless = |c: &api::Container| {
        let exit = exit_of_newest(world, observed, &c.name);
        exit.is_some_and(|code| code != 0 && !restart_decision::restarts_after_exit(pod, c, code))
    };
    if phase == "Failed" && pod.init_containers().iter().filter(is_init).any(hopeless) {
        return Ok(());
    }
    let exits = |c: &api::Container| exit_of_newest(world, observed, &c.name);
    if let Some(open) = pod.containers().iter().find(|c| !is_done(world, pod, observed, c)) {
        return Err(format!("{phase}, but {} is not done: {:?}", open.name, exits(open)));
    }
    let failed = pod.containers().iter().any(|c| exits(c) != Some(0));
    if failed == (phase == "Failed") { Ok(()) } else { Err(format!("{phase}, though a container failed: {failed}")) }
}

fn fits(container: &api::Container, instance: &cri::Container, status: &api::PodStatus) -> Result<(), String> {
    let name = &container.name;
    let wanted = hash::container_hash(name, container.image.as_deref().unwrap_or_default());
    if instance.annotations["io.kubernetes.container.hash"] != format!("{wanted:x}") {
        return Err(format!("{name} runs another image"));
    }
    let all = status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    let reported = all.into_iter().find(|c| c.name == *name).ok_or_else(|| format!("no status of {name}"))?;
    let running = reported.state.as_ref().is_some_and(|s| s.running.is_some());
    if !running || !reported.ready {
        return Err(format!("{name} runs, but its status says: {}", states(status)));
    }
    if reported.container_id.as_deref() != Some(&format!("scripted://{}", instance.id)) {
        return Err(format!("{name} runs as {}, but its status has {:?}", instance.id, reported.container_id));
    }
    Ok(())
}
