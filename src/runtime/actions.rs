//! What one pass has to do for a pod, from what should be and what is. Pure.
//!
//! Looks at the containers of the *newest* sandbox: leftovers of former sandboxes decide only
//! whether an exited regular container may run again (spec 03a §3, §16).

use std::collections::HashMap;

use super::{
    init,
    resize::{self, ResizePlan},
};
use berth_types::{
    ContainerId, ContainerKind, Pod, RestartPolicy, SandboxId, api, hash,
    observed::{ContainerState, NetworkMode, ObservedContainer, ObservedPod, SandboxState},
    resource_state::PodResources,
    restart::{self, RuleAction},
};

/// What a probe said last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Passed.
    Success,
    /// Failed as often as its threshold says.
    Failure,
}

/// What the probes of one instance said; `None` where there is no result yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Probed {
    /// Startup probe.
    pub startup: Option<Verdict>,
    /// Liveness probe.
    pub liveness: Option<Verdict>,
}

/// Gates that change decisions (spec 03a §1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gates {
    /// `InPlacePodVerticalScalingInitContainers`.
    pub resize_init: bool,
    /// `InPlacePodLevelResourcesVerticalScaling`.
    pub resize_pod_level: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self { resize_init: true, resize_pod_level: true }
    }
}

/// What is decided from.
pub struct Inputs<'a> {
    /// The pod, with allocated resources.
    pub pod: &'a Pod,
    /// What the runtime showed after the last action.
    pub observed: &'a ObservedPod,
    /// Probe results of running instances.
    pub probes: &'a HashMap<ContainerId, Probed>,
    /// Resources last applied; `None` where there is no record.
    pub actuated: Option<&'a PodResources>,
    /// All containers are to be removed (spec 03a §3.3).
    pub restart_all: bool,
    /// Feature gates.
    pub gates: Gates,
}

/// Why a container is killed: decides its grace period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Anything without a special grace period.
    Unspecified,
    /// The startup probe failed.
    StartupProbe,
    /// The liveness probe failed.
    LivenessProbe,
    /// The postStart hook failed.
    FailedPostStartHook,
}

/// A container to kill.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kill {
    /// The instance.
    pub id: ContainerId,
    /// Container name.
    pub name: String,
    /// The event's message.
    pub message: String,
    /// Why.
    pub cause: Cause,
}

/// An instance to remove for a restart-all; its logs stay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reset {
    /// The instance.
    pub id: ContainerId,
    /// Container name.
    pub name: String,
    /// Whether it has to be killed first.
    pub kill_first: bool,
}

/// One pass. Lists of containers are indices into the pod's lists.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodActions {
    /// Kill all containers and stop all sandboxes.
    pub kill_pod: bool,
    /// Create a sandbox.
    pub create_sandbox: bool,
    /// The newest sandbox; `None` where there is none, or its replacement is not worth an event.
    pub sandbox: Option<SandboxId>,
    /// Attempt of the sandbox: the next one where one is created.
    pub attempt: u32,
    /// Init containers to start, in order.
    pub start_init: Vec<usize>,
    /// Regular containers to start, in order.
    pub start: Vec<usize>,
    /// Ephemeral containers to start, in order.
    pub start_ephemeral: Vec<usize>,
    /// Containers to kill, unless the whole pod is killed.
    pub kill: Vec<Kill>,
    /// Instances to remove for a restart-all, in order.
    pub reset: Vec<Reset>,
    /// Resources to change in place.
    pub resize: ResizePlan,
}

/// Decides one pass (spec 03a §3).
pub fn compute(inputs: &Inputs) -> PodActions {
    let mut actions = sandbox_need(inputs.pod, inputs.observed);
    if inputs.restart_all {
        actions.reset = resets(inputs.pod, inputs.observed);
        return actions;
    }
    if actions.kill_pod {
        into_new_sandbox(inputs, &mut actions);
        return actions;
    }
    actions.start_ephemeral = fresh_ephemeral(inputs);
    let initialised = init::walk(inputs, &mut actions);
    if actions.kill_pod || !initialised {
        return actions;
    }
    regular(inputs, &mut actions);
    if inputs.gates.resize_pod_level && resize::pod_level_changed(inputs.pod, inputs.actuated) {
        actions.resize.pod_level = true;
    }
    actions
}

/// Spec 03a §3.1.
fn sandbox_need(pod: &Pod, observed: &ObservedPod) -> PodActions {
    let Some(newest) = observed.sandboxes.first() else {
        return PodActions { kill_pod: true, create_sandbox: true, ..PodActions::default() };
    };
    let wanted = if pod.is_host_network() { NetworkMode::Node } else { NetworkMode::Pod };
    let ready = observed.sandboxes.iter().filter(|s| s.state == SandboxState::Ready).count();
    let replace = |sandbox| PodActions {
        kill_pod: true,
        create_sandbox: true,
        sandbox,
        attempt: newest.attempt.saturating_add(1),
        ..PodActions::default()
    };
    if ready > 1 || newest.state != SandboxState::Ready {
        return replace(Some(newest.id.clone()));
    }
    if newest.network_mode != wanted {
        return replace(None);
    }
    if wanted == NetworkMode::Pod && newest.has_network && newest.ips.is_empty() {
        return replace(Some(newest.id.clone()));
    }
    PodActions { sandbox: Some(newest.id.clone()), attempt: newest.attempt, ..PodActions::default() }
}

/// Spec 03a §3.2.
fn into_new_sandbox(inputs: &Inputs, actions: &mut PodActions) {
    let (pod, observed) = (inputs.pod, inputs.observed);
    let existed = actions.attempt != 0;
    if pod.restart_policy() == RestartPolicy::Never && existed && !observed.containers.is_empty() {
        actions.create_sandbox = false;
        return;
    }
    let succeeded_for_good = |container: &api::Container| {
        restart::effective_policy(pod, container) == RestartPolicy::OnFailure
            && observed.newest(&container.name).is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0)
    };
    let candidates: Vec<usize> =
        pod.containers().iter().enumerate().filter(|(_, c)| !succeeded_for_good(c)).map(|(i, _)| i).collect();
    let any_started = || {
        let seen = pod.containers().iter().filter_map(|c| observed.newest(&c.name));
        seen.into_iter().any(|c| c.state != ContainerState::Unknown)
    };
    // A pod without containers (an API server takes none) would have its sandbox made and stopped in turns.
    if candidates.is_empty() && (pod.containers().is_empty() || any_started()) {
        actions.create_sandbox = false;
    } else if pod.init_containers().is_empty() {
        actions.start = candidates;
    } else {
        actions.start_init = vec![0];
    }
}

/// Spec 03a §3.3: victims before sources, regular before init containers.
fn resets(pod: &Pod, observed: &ObservedPod) -> Vec<Reset> {
    let is_source = |definition: &api::Container, instance: &ObservedContainer| {
        instance.state == ContainerState::Exited
            && restart::matching_rule(definition, instance.exit_code) == Some(RuleAction::RestartAllContainers)
    };
    let (mut victims, mut sources) = (Vec::new(), Vec::new());
    for list in [pod.containers(), pod.init_containers()] {
        for definition in list {
            for instance in observed.containers.iter().filter(|c| *c.name == *definition.name) {
                let group = if is_source(definition, instance) { &mut sources } else { &mut victims };
                group.push(Reset {
                    id: instance.id.clone(),
                    name: definition.name.clone(),
                    kill_first: instance.state != ContainerState::Exited,
                });
            }
        }
    }
    victims.extend(sources);
    victims
}

/// Spec 03a §3.4: started once, never again.
fn fresh_ephemeral(inputs: &Inputs) -> Vec<usize> {
    let all = inputs.pod.ephemeral_containers().iter().enumerate();
    all.filter(|(_, c)| inputs.observed.newest(&c.name).is_none()).map(|(i, _)| i).collect()
}

/// What to do with one regular container.
enum Next {
    Leave,
    Start,
    Kill {
        message: String,
        cause: Cause,
        restart: bool,
    },
    /// It stays, unless its resources say otherwise.
    Keep,
}

/// Spec 03a §3.6.
fn regular(inputs: &Inputs, actions: &mut PodActions) {
    let mut kept = false;
    for (index, container) in inputs.pod.containers().iter().enumerate() {
        let newest = inputs.observed.newest(&container.name);
        match (next(inputs, container, newest), newest) {
            (Next::Leave, _) => {}
            (Next::Start, _) => actions.start.push(index),
            (Next::Kill { message, cause, restart }, Some(instance)) => {
                if restart {
                    actions.start.push(index);
                }
                // Its rules decide by the exit code, which is not known yet.
                kept |= restart::has_restart_rule(container);
                actions.kill.push(Kill { id: instance.id.clone(), name: container.name.clone(), message, cause });
            }
            (Next::Keep, Some(instance)) => {
                let target = resize::Target { kind: ContainerKind::Regular, index, id: instance.id.clone() };
                kept |= settle_resize(inputs, container, target, actions);
            }
            (Next::Kill { .. } | Next::Keep, None) => {}
        }
    }
    if !kept && actions.start.is_empty() {
        actions.kill_pod = true;
        actions.start_init.clear();
    }
}

fn next(inputs: &Inputs, container: &api::Container, newest: Option<&ObservedContainer>) -> Next {
    let pod = inputs.pod;
    let Some(instance) = newest else {
        return if restart::should_start(pod, container, None) { Next::Start } else { Next::Leave };
    };
    let may_again = restart::effective_policy(pod, container) != RestartPolicy::Never;
    let killed = |text: String, cause, restart: bool| Next::Kill {
        message: if restart { format!("{text}, will be restarted") } else { text },
        cause,
        restart,
    };
    let unknown = "Container is in \"unknown\" state, try killing it before restart";
    match instance.state {
        ContainerState::Running if !is_active(inputs.observed, instance) => killed(
            format!("Container {} runs in a former sandbox", container.name),
            Cause::Unspecified,
            may_again && !pod.is_deleting(),
        ),
        ContainerState::Running => running(inputs, container, instance, may_again, killed),
        _ if !restart::should_start(pod, container, Some(instance)) => Next::Leave,
        ContainerState::Unknown => Next::Kill { message: unknown.to_owned(), cause: Cause::Unspecified, restart: true },
        ContainerState::Created | ContainerState::Exited => Next::Start,
    }
}

fn running(
    inputs: &Inputs,
    container: &api::Container,
    instance: &ObservedContainer,
    may_again: bool,
    killed: impl Fn(String, Cause, bool) -> Next,
) -> Next {
    let name = &container.name;
    if definition_changed(container, instance) {
        return killed(format!("Container {name} definition changed"), Cause::Unspecified, true);
    }
    let probed = inputs.probes.get(&instance.id).copied().unwrap_or_default();
    if probed.liveness == Some(Verdict::Failure) {
        return killed(format!("Container {name} failed liveness probe"), Cause::LivenessProbe, may_again);
    }
    if probed.startup == Some(Verdict::Failure) {
        return killed(format!("Container {name} failed startup probe"), Cause::StartupProbe, may_again);
    }
    Next::Keep
}

/// Checks a running container's resources; answers whether it stays as it is (spec 03a §3.8).
pub(super) fn settle_resize(
    inputs: &Inputs,
    container: &api::Container,
    target: resize::Target,
    actions: &mut PodActions,
) -> bool {
    match resize::check(inputs.pod, container, inputs.actuated) {
        resize::Check::Keep => true,
        resize::Check::Update(update) => {
            actions.resize.add(target, update);
            true
        }
        resize::Check::Restart => {
            let starts = if target.kind == ContainerKind::Init { &mut actions.start_init } else { &mut actions.start };
            starts.push(target.index);
            actions.kill.push(Kill {
                id: target.id,
                name: container.name.clone(),
                message: format!("Container {} resize requires restart", container.name),
                cause: Cause::Unspecified,
            });
            actions.resize.pod = true;
            false
        }
    }
}

/// Whether an instance belongs to the newest sandbox.
pub(super) fn is_active(observed: &ObservedPod, instance: &ObservedContainer) -> bool {
    observed.sandboxes.first().is_some_and(|s| s.id == instance.sandbox)
}

/// Whether name or image differ from what the instance was made from; a missing hash reads as 0.
pub(super) fn definition_changed(container: &api::Container, instance: &ObservedContainer) -> bool {
    let wanted = hash::container_hash(&container.name, container.image.as_deref().unwrap_or_default());
    instance.hash.unwrap_or(0) != wanted
}

#[cfg(test)]
mod tests;
