//! Selects the init containers to run next. Pure.
//!
//! Iterates from the last to the first, because finished ones may have been removed: the last one that
//! has a status shows the progress of initialization (spec 03a §3.5).

use super::{
    actions::{
        ContainerKillReason, Kill, PodActionInputs, PodActions, ProbeVerdict, definition_changed, settle_resize,
    },
    resize,
};
use berth_types::{
    ContainerKind, Pod, RestartPolicy, api,
    observation::{ContainerState, ObservedContainer},
    restart_decision,
};

const UNKNOWN: &str = "Init container is in \"unknown\" state, try killing it before restart";

/// State of the iteration.
struct InitIteration<'i, 'a> {
    inputs: &'i PodActionInputs<'a>,
    /// All init containers are done: regular containers may run.
    initialised: bool,
    /// A later container has run in this sandbox, so this one was initialized before.
    later_ran: bool,
}

/// The pod can no longer be initialized.
struct InitFailed;

/// Adds the actions for init containers; returns whether regular containers may run.
pub(super) fn walk(inputs: &PodActionInputs, actions: &mut PodActions) -> bool {
    let all = inputs.pod.init_containers();
    if all.is_empty() {
        return true;
    }
    let started = any_regular_started(inputs);
    let mut walk = InitIteration { inputs, initialised: started, later_ran: started };
    for (index, container) in all.iter().enumerate().rev() {
        let Some(instance) = inputs.observed.active().find(|c| *c.name == *container.name) else {
            if walk.later_ran && Pod::is_sidecar(container) {
                actions.start_init.push(index);
            }
            continue;
        };
        if walk.later_ran && !Pod::is_sidecar(container) {
            continue;
        }
        if walk.step(index, container, instance, actions).is_err() {
            actions.kill_pod = true;
            actions.start_init.clear();
            return false;
        }
        walk.later_ran = true;
    }
    if !walk.later_ran {
        actions.start_init.push(0);
    }
    actions.start_init.reverse();
    walk.initialised
}

/// Exited containers do not count: after a reboot all containers are exited.
fn any_regular_started(inputs: &PodActionInputs) -> bool {
    inputs.pod.containers().iter().any(|container| {
        let newest = inputs.observed.active().find(|c| *c.name == *container.name);
        newest.is_some_and(|c| matches!(c.state, ContainerState::Created | ContainerState::Running))
    })
}

impl InitIteration<'_, '_> {
    fn step(
        &mut self,
        index: usize,
        container: &api::Container,
        instance: &ObservedContainer,
        actions: &mut PodActions,
    ) -> Result<(), InitFailed> {
        let sidecar = Pod::is_sidecar(container);
        match instance.state {
            ContainerState::Created => actions.start_init.push(index),
            ContainerState::Running if sidecar => self.sidecar_runs(index, container, instance, actions),
            ContainerState::Running => {
                if self.inputs.gates.resize_init {
                    self.resize(index, container, instance, actions);
                }
            }
            ContainerState::Exited if sidecar => actions.start_init.push(index),
            ContainerState::Exited if has_failed(instance) => {
                if !restart_decision::should_start(self.inputs.pod, container, Some(instance)) {
                    return Err(InitFailed);
                }
                actions.start_init.push(index);
            }
            ContainerState::Exited => self.done(index, actions),
            ContainerState::Unknown => {
                if !sidecar && restart_decision::effective_policy(self.inputs.pod, container) == RestartPolicy::Never {
                    return Err(InitFailed);
                }
                self.replace(
                    index,
                    container,
                    instance,
                    (UNKNOWN.to_owned(), ContainerKillReason::Unspecified),
                    actions,
                );
            }
        }
        Ok(())
    }

    fn sidecar_runs(
        &mut self,
        index: usize,
        container: &api::Container,
        instance: &ObservedContainer,
        actions: &mut PodActions,
    ) {
        let name = &container.name;
        let probed = self.inputs.probes.get(&instance.id).copied().unwrap_or_default();
        if container.startup_probe.is_some() {
            match probed.startup {
                None => return,
                Some(ProbeVerdict::Failure) => {
                    let why =
                        (format!("Init container {name} failed startup probe"), ContainerKillReason::StartupProbe);
                    return self.replace(index, container, instance, why, actions);
                }
                Some(ProbeVerdict::Success) => {}
            }
        }
        if index + 1 == self.inputs.pod.init_containers().len() {
            self.initialised = true;
        } else if !self.later_ran {
            actions.start_init.push(index + 1);
        }
        if definition_changed(container, instance) {
            let why = (format!("Init container {name} definition changed"), ContainerKillReason::Unspecified);
            return self.replace(index, container, instance, why, actions);
        }
        if container.liveness_probe.is_some() {
            match probed.liveness {
                None => return,
                Some(ProbeVerdict::Failure) => {
                    let why =
                        (format!("Init container {name} failed liveness probe"), ContainerKillReason::LivenessProbe);
                    return self.replace(index, container, instance, why, actions);
                }
                Some(ProbeVerdict::Success) => {}
            }
        }
        self.resize(index, container, instance, actions);
    }

    fn done(&mut self, index: usize, actions: &mut PodActions) {
        if index + 1 == self.inputs.pod.init_containers().len() {
            self.initialised = true;
        } else {
            actions.start_init.push(index + 1);
        }
    }

    fn replace(
        &self,
        index: usize,
        container: &api::Container,
        instance: &ObservedContainer,
        (message, cause): (String, ContainerKillReason),
        actions: &mut PodActions,
    ) {
        actions.kill.push(Kill { id: instance.id.clone(), name: container.name.clone(), message, cause });
        actions.start_init.push(index);
    }

    fn resize(&self, index: usize, container: &api::Container, instance: &ObservedContainer, actions: &mut PodActions) {
        let target = resize::ResizeTarget { kind: ContainerKind::Init, index, id: instance.id.clone() };
        settle_resize(self.inputs, container, target, actions);
    }
}

/// `OOMKilled` counts as failed even with exit code 0: a child process of a plain init container may
/// have been killed while its parent continued.
fn has_failed(instance: &ObservedContainer) -> bool {
    instance.exit_code != 0 || instance.reason == "OOMKilled"
}
