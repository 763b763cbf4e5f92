//! Container lifecycle events from the difference of two pod observations. Pure.
//!
//! Spec 03b §6: table of old and new states. Only the log, the metrics, and the pruning of dead
//! containers use these events: workers follow observations.

use std::sync::Arc;

use berth_types::{
    ContainerId,
    observation::{ContainerState, ObservedContainer, ObservedPod},
};

/// Kind of a lifecycle event; displayed as the event's name in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChangeKind {
    /// The container is running.
    ContainerStarted,
    /// The container exited.
    ContainerDied,
    /// The container was removed from the runtime.
    ContainerRemoved,
    /// The container was created, or its state became unknown; internal.
    ContainerChanged,
}

/// One lifecycle event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// Kind of the event.
    pub kind: ChangeKind,
    /// ID of the instance.
    pub id: ContainerId,
    /// Name of the container.
    pub container: Arc<str>,
    /// Exit code, if the new observation still shows the exited container.
    pub exit_code: Option<i32>,
}

/// The events from `old` (`None`: never observed) to `new`, in the order of the containers.
pub fn between(old: Option<&ObservedPod>, new: &ObservedPod) -> Vec<Change> {
    let before: &[ObservedContainer] = old.map_or(&[], |pod| &pod.containers);
    let mut changes = Vec::new();
    for container in &new.containers {
        let was = before.iter().find(|c| c.id == container.id).map(|c| c.state);
        if let Some(kind) = appeared(was, container.state) {
            let exit_code = (container.state == ContainerState::Exited).then_some(container.exit_code);
            changes.push(change(kind, container, exit_code));
        }
    }
    for gone in before.iter().filter(|c| !new.containers.iter().any(|n| n.id == c.id)) {
        if gone.state != ContainerState::Exited {
            changes.push(change(ChangeKind::ContainerDied, gone, None));
        }
        changes.push(change(ChangeKind::ContainerRemoved, gone, None));
    }
    changes
}

fn change(kind: ChangeKind, container: &ObservedContainer, exit_code: Option<i32>) -> Change {
    Change { kind, id: container.id.clone(), container: container.name.clone(), exit_code }
}

/// Created and unknown are one state here, as in the table.
fn appeared(old: Option<ContainerState>, new: ContainerState) -> Option<ChangeKind> {
    use ContainerState::{Created, Exited, Running, Unknown};
    match (old, new) {
        (Some(Running), Running) | (Some(Exited), Exited) | (Some(Created | Unknown), Created | Unknown) => None,
        (_, Running) => Some(ChangeKind::ContainerStarted),
        (_, Exited) => Some(ChangeKind::ContainerDied),
        (_, Created | Unknown) => Some(ChangeKind::ContainerChanged),
    }
}

#[cfg(test)]
mod tests {
    use ChangeKind::{ContainerChanged, ContainerDied, ContainerRemoved, ContainerStarted};
    use ContainerState::{Created, Exited, Running, Unknown};

    use super::*;
    use crate::pleg::cri_conversions::fixtures::{container, pod};

    fn kinds(old: Option<ContainerState>, new: Option<ContainerState>) -> Vec<ChangeKind> {
        let show = |state: Option<ContainerState>| pod(state.map(|s| container("c1", "main", s)));
        between(Some(&show(old)), &show(new)).into_iter().map(|c| c.kind).collect()
    }

    #[test]
    fn the_table_of_old_and_new_states() {
        for (name, old, new, wanted) in [
            ("same", Some(Running), Some(Running), vec![]),
            ("same dead", Some(Exited), Some(Exited), vec![]),
            ("created to unknown is one state", Some(Created), Some(Unknown), vec![]),
            ("new and running", None, Some(Running), vec![ContainerStarted]),
            ("started", Some(Created), Some(Running), vec![ContainerStarted]),
            ("AC-03b-23 exits", Some(Running), Some(Exited), vec![ContainerDied]),
            ("exited before the first look", None, Some(Exited), vec![ContainerDied]),
            ("lost track", Some(Running), Some(Unknown), vec![ContainerChanged]),
            ("created", None, Some(Created), vec![ContainerChanged]),
            ("removed after exit", Some(Exited), None, vec![ContainerRemoved]),
            ("AC-03b-24 came and went between", None, None, vec![]),
            ("AC-03b-25 running then gone", Some(Running), None, vec![ContainerDied, ContainerRemoved]),
            ("created then gone", Some(Created), None, vec![ContainerDied, ContainerRemoved]),
        ] {
            assert_eq!(kinds(old, new), wanted, "{name}");
        }
    }

    #[test]
    fn a_first_observation_reports_exited_containers_too() {
        let new = pod([container("c1", "main", Exited)]);
        let found = between(None, &new);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].kind, found[0].exit_code), (ContainerDied, Some(0)));
    }
}
