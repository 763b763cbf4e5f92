//! Restart of all containers of a pod, triggered by one container's exit. Pure.
//!
//! Implements spec 02b §5.4.

use super::{
    conditions::{ALL_CONTAINERS_RESTARTING, make},
    lookup::{exit, find, is_true},
    phase::Phase,
};
use berth_types::{
    Pod, api,
    observation::{ContainerState, ObservedPod},
    restart_decision::{RuleAction, matching_rule},
};

/// Whether any container of the pod has a `RestartAllContainers` rule; only then the pod has the condition.
pub fn has_rule(pod: &Pod) -> bool {
    all(pod).any(|c| {
        c.restart_policy_rules.as_deref().unwrap_or_default().iter().any(|r| r.action == "RestartAllContainers")
    })
}

/// Whether a restart of all containers is due or in progress.
///
/// A container that exists in the runtime is evaluated by its newest instance, a missing one by its terminated state in
/// the status, so that the restart survives a restart of the agent.
pub fn triggered(pod: &Pod, observed: &ObservedPod, status: &api::PodStatus) -> bool {
    if !has_rule(pod) {
        return false;
    }
    is_true(status, ALL_CONTAINERS_RESTARTING)
        || all(pod).any(|container| {
            let code = match observed.newest(&container.name) {
                Some(newest) => (newest.state == ContainerState::Exited).then_some(newest.exit_code),
                None => reported_exit_code(status, &container.name),
            };
            code.and_then(|code| matching_rule(container, code)) == Some(RuleAction::RestartAllContainers)
        })
}

/// Whether the condition `AllContainersRestarting` is true: all containers are being removed now.
pub fn in_progress(status: &api::PodStatus) -> bool {
    is_true(status, ALL_CONTAINERS_RESTARTING)
}

/// Computes the condition `AllContainersRestarting`, which has no observed generation.
pub(super) fn condition(pod: &Pod, observed: &ObservedPod, triggered: bool, phase: Phase) -> api::PodCondition {
    let type_ = ALL_CONTAINERS_RESTARTING;
    let remains = all(pod).any(|c| observed.newest(&c.name).is_some());
    match phase {
        Phase::Succeeded => make(type_, false, "PodCompleted", ""),
        Phase::Failed => make(type_, false, "PodFailed", ""),
        _ if triggered && remains => {
            make(type_, true, "RestartAllContainersStarted", "container exited with restart policy rule")
        }
        _ => make(type_, false, "", ""),
    }
}

fn reported_exit_code(status: &api::PodStatus, container: &str) -> Option<i32> {
    let lists = [&status.init_container_statuses, &status.container_statuses];
    let container_status = lists.into_iter().flatten().find_map(|list| find(list, container))?;
    exit(container_status).map(|e| e.exit_code)
}

fn all(pod: &Pod) -> impl Iterator<Item = &api::Container> {
    pod.init_containers().iter().chain(pod.containers())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{RuntimeState, exited, observed, pod_with, status};

    fn ruled() -> Pod {
        pod_with(serde_json::json!({"restartPolicy": "Never", "containers": [
            {"name": "a", "restartPolicy": "Never", "restartPolicyRules": [
                {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]},
            {"name": "b"}]}))
    }

    fn status_with_exit(code: i32) -> api::PodStatus {
        api::PodStatus { container_statuses: Some(vec![status("a", exited(code))]), ..Default::default() }
    }

    #[test]
    fn the_newest_exit_decides_and_the_status_where_nothing_is_left() {
        let none = api::PodStatus::default();
        for (case, seen, status, expected) in [
            ("exit matches", vec![("a", RuntimeState::Exited(42)), ("b", RuntimeState::Running)], none.clone(), true),
            ("exit does not match", vec![("a", RuntimeState::Exited(1))], none.clone(), false),
            ("another container's exit", vec![("b", RuntimeState::Exited(42))], none, false),
            ("gone, reported", vec![("b", RuntimeState::Running)], status_with_exit(42), true),
            ("runs again", vec![("a", RuntimeState::Running)], status_with_exit(42), false),
        ] {
            assert_eq!(triggered(&ruled(), &observed(&seen), &status), expected, "{case}");
        }
    }

    #[test]
    fn it_ends_when_nothing_is_left() {
        let condition = |seen: &[(&str, RuntimeState)], triggered, phase| {
            let c = condition(&ruled(), &observed(seen), triggered, phase);
            (c.status, c.reason.unwrap_or_default())
        };
        let started = ("True".to_owned(), "RestartAllContainersStarted".to_owned());
        assert_eq!(condition(&[("b", RuntimeState::Running)], true, Phase::Running), started);
        assert_eq!(condition(&[], true, Phase::Running), ("False".to_owned(), String::new()));
        assert_eq!(
            condition(&[("b", RuntimeState::Running)], false, Phase::Running),
            ("False".to_owned(), String::new())
        );
        assert_eq!(condition(&[], true, Phase::Failed), ("False".to_owned(), "PodFailed".to_owned()));
    }
}
