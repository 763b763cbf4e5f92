//! Computes the actions of one pod sync from desired and observed state (`computePodActions`). Pure.
//!
//! Considers the containers of the *newest* sandbox: leftovers of former sandboxes only determine
//! whether an exited regular container may be restarted (spec 03a §3, §16).

use std::collections::HashMap;

use super::{
    init,
    resize::{self, ResizePlan},
};
use berth_types::{
    ContainerId, ContainerKind, Pod, RestartPolicy, SandboxId, api, hash,
    observation::{ContainerState, NetworkMode, ObservedContainer, ObservedPod, SandboxState},
    resource_state::PodResources,
    restart_decision::{self, RuleAction},
};

/// Latest result of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProbeVerdict {
    /// The probe succeeded.
    Success,
    /// The probe failed as often as its failure threshold requires.
    Failure,
}

/// Probe results of one container instance; `None` where there is no result yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ContainerProbeResults {
    /// Result of the startup probe.
    pub startup: Option<ProbeVerdict>,
    /// Result of the liveness probe.
    pub liveness: Option<ProbeVerdict>,
}

/// Feature gates that change decisions (spec 03a §1).
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

/// Inputs of the decision.
pub struct PodActionInputs<'a> {
    /// The pod with its allocated resources.
    pub pod: &'a Pod,
    /// Observation of the runtime after the last action.
    pub observed: &'a ObservedPod,
    /// Probe results of running instances.
    pub probes: &'a HashMap<ContainerId, ContainerProbeResults>,
    /// Resources last applied; `None` without a record.
    pub actuated: Option<&'a PodResources>,
    /// Whether all containers are to be removed (spec 03a §3.3).
    pub restart_all: bool,
    /// Feature gates.
    pub gates: Gates,
}

/// Cause of a container kill: determines its grace period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContainerKillReason {
    /// Any cause without a special grace period.
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
    /// ID of the instance.
    pub id: ContainerId,
    /// Name of the container.
    pub name: String,
    /// Message of the `Killing` event.
    pub message: String,
    /// Cause of the kill.
    pub cause: ContainerKillReason,
}

/// An instance to remove for a restart of all containers; its logs are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reset {
    /// ID of the instance.
    pub id: ContainerId,
    /// Name of the container.
    pub name: String,
    /// Whether the instance must be killed first.
    pub kill_first: bool,
}

/// Actions of one sync. Lists of containers are indices into the pod's lists.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodActions {
    /// Kill all containers and stop all sandboxes.
    pub kill_pod: bool,
    /// Whether a new sandbox is created; only after everything is stopped (`kill_pod`).
    pub create_sandbox: bool,
    /// The newest sandbox; `None` if there is none, or if its replacement records no event.
    pub sandbox: Option<SandboxId>,
    /// Attempt number of the sandbox: the next one if a sandbox is created.
    pub attempt: u32,
    /// Init containers to start, in order.
    pub start_init: Vec<usize>,
    /// Regular containers to start, in order.
    pub start: Vec<usize>,
    /// Ephemeral containers to start, in order.
    pub start_ephemeral: Vec<usize>,
    /// Containers to kill, unless the whole pod is killed.
    pub kill: Vec<Kill>,
    /// Instances to remove for a restart of all containers, in order.
    pub reset: Vec<Reset>,
    /// In-place resource changes.
    pub resize: ResizePlan,
}

/// Computes the actions of one sync (spec 03a §3).
pub fn compute(inputs: &PodActionInputs) -> PodActions {
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

/// Decides whether the sandbox must be (re-)created. Spec 03a §3.1.
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

/// Decides what to start in a new sandbox. Spec 03a §3.2.
fn into_new_sandbox(inputs: &PodActionInputs, actions: &mut PodActions) {
    let (pod, observed) = (inputs.pod, inputs.observed);
    let existed = actions.attempt != 0;
    if pod.restart_policy() == RestartPolicy::Never && existed && !observed.containers.is_empty() {
        actions.create_sandbox = false;
        return;
    }
    let succeeded_for_good = |container: &api::Container| {
        restart_decision::effective_policy(pod, container) == RestartPolicy::OnFailure
            && observed.newest(&container.name).is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0)
    };
    let candidates: Vec<usize> =
        pod.containers().iter().enumerate().filter(|(_, c)| !succeeded_for_good(c)).map(|(i, _)| i).collect();
    let any_started = || {
        let seen = pod.containers().iter().filter_map(|c| observed.newest(&c.name));
        seen.into_iter().any(|c| c.state != ContainerState::Unknown)
    };
    // Otherwise the sandbox of a pod without containers (the API server rejects these) would be created
    // and stopped repeatedly.
    if candidates.is_empty() && (pod.containers().is_empty() || any_started()) {
        actions.create_sandbox = false;
    } else if pod.init_containers().is_empty() {
        actions.start = candidates;
    } else {
        actions.start_init = vec![0];
    }
}

/// Spec 03a §3.3: instances without a matching rule before those that triggered the restart, regular
/// before init containers.
fn resets(pod: &Pod, observed: &ObservedPod) -> Vec<Reset> {
    let is_source = |definition: &api::Container, instance: &ObservedContainer| {
        instance.state == ContainerState::Exited
            && restart_decision::matching_rule(definition, instance.exit_code) == Some(RuleAction::RestartAllContainers)
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

/// Spec 03a §3.4: an ephemeral container is started once and never restarted.
fn fresh_ephemeral(inputs: &PodActionInputs) -> Vec<usize> {
    let all = inputs.pod.ephemeral_containers().iter().enumerate();
    all.filter(|(_, c)| inputs.observed.newest(&c.name).is_none()).map(|(i, _)| i).collect()
}

/// Action for one regular container.
enum ContainerAction {
    Leave,
    Start,
    Kill {
        message: String,
        cause: ContainerKillReason,
        restart: bool,
    },
    /// It keeps running, unless a resize requires a restart.
    Keep,
}

/// Computes the actions for regular containers. Spec 03a §3.6.
fn regular(inputs: &PodActionInputs, actions: &mut PodActions) {
    let mut kept = false;
    for (index, container) in inputs.pod.containers().iter().enumerate() {
        let newest = inputs.observed.newest(&container.name);
        match (next(inputs, container, newest), newest) {
            (ContainerAction::Leave, _) => {}
            (ContainerAction::Start, _) => actions.start.push(index),
            (ContainerAction::Kill { message, cause, restart }, Some(instance)) => {
                if restart {
                    actions.start.push(index);
                }
                // Its restart rules depend on the exit code, which is not known yet.
                kept |= restart_decision::has_restart_rule(container);
                actions.kill.push(Kill { id: instance.id.clone(), name: container.name.clone(), message, cause });
            }
            (ContainerAction::Keep, Some(instance)) => {
                let target = resize::ResizeTarget { kind: ContainerKind::Regular, index, id: instance.id.clone() };
                kept |= settle_resize(inputs, container, target, actions);
            }
            (ContainerAction::Kill { .. } | ContainerAction::Keep, None) => {}
        }
    }
    if !kept && actions.start.is_empty() {
        actions.kill_pod = true;
        actions.start_init.clear();
    }
}

fn next(inputs: &PodActionInputs, container: &api::Container, newest: Option<&ObservedContainer>) -> ContainerAction {
    let pod = inputs.pod;
    let Some(instance) = newest else {
        return if restart_decision::should_start(pod, container, None) {
            ContainerAction::Start
        } else {
            ContainerAction::Leave
        };
    };
    let may_again = restart_decision::effective_policy(pod, container) != RestartPolicy::Never;
    let killed = |text: String, cause, restart: bool| ContainerAction::Kill {
        message: if restart { format!("{text}, will be restarted") } else { text },
        cause,
        restart,
    };
    let unknown = "Container is in \"unknown\" state, try killing it before restart";
    match instance.state {
        ContainerState::Running if !is_active(inputs.observed, instance) => killed(
            format!("Container {} runs in a previous sandbox", container.name),
            ContainerKillReason::Unspecified,
            may_again && !pod.is_deleting(),
        ),
        ContainerState::Running => running(inputs, container, instance, may_again, killed),
        _ if !restart_decision::should_start(pod, container, Some(instance)) => ContainerAction::Leave,
        ContainerState::Unknown => ContainerAction::Kill {
            message: unknown.to_owned(),
            cause: ContainerKillReason::Unspecified,
            restart: true,
        },
        ContainerState::Created | ContainerState::Exited => ContainerAction::Start,
    }
}

fn running(
    inputs: &PodActionInputs,
    container: &api::Container,
    instance: &ObservedContainer,
    may_again: bool,
    killed: impl Fn(String, ContainerKillReason, bool) -> ContainerAction,
) -> ContainerAction {
    let name = &container.name;
    if definition_changed(container, instance) {
        return killed(format!("Container {name} definition changed"), ContainerKillReason::Unspecified, true);
    }
    let probed = inputs.probes.get(&instance.id).copied().unwrap_or_default();
    if probed.liveness == Some(ProbeVerdict::Failure) {
        return killed(
            format!("Container {name} failed liveness probe"),
            ContainerKillReason::LivenessProbe,
            may_again,
        );
    }
    if probed.startup == Some(ProbeVerdict::Failure) {
        return killed(format!("Container {name} failed startup probe"), ContainerKillReason::StartupProbe, may_again);
    }
    ContainerAction::Keep
}

/// Checks the resources of a running container; returns whether it keeps running (spec 03a §3.8).
pub(super) fn settle_resize(
    inputs: &PodActionInputs,
    container: &api::Container,
    target: resize::ResizeTarget,
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
                cause: ContainerKillReason::Unspecified,
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

/// Whether name or image differ from those the instance was created with; a missing hash counts as 0.
pub(super) fn definition_changed(container: &api::Container, instance: &ObservedContainer) -> bool {
    let wanted = hash::container_hash(&container.name, container.image.as_deref().unwrap_or_default());
    instance.hash.unwrap_or(0) != wanted
}

#[cfg(test)]
mod tests;
