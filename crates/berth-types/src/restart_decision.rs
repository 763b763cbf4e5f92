//! Container restart decisions: restart policy and restart rules. Pure.
//! Implements spec 02b §5, 03a §3.7.

use super::{
    Pod, RestartPolicy, api,
    observation::{ContainerState, ObservedContainer},
};

/// Action of a container restart rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuleAction {
    /// Restarts the container.
    Restart,
    /// Restarts all containers of the pod.
    RestartAllContainers,
}

/// Returns the action of the first rule that matches an exit code; `None` without a match, or if the container has no
/// restart policy of its own, in which case its rules do not count.
pub fn matching_rule(container: &api::Container, exit_code: i32) -> Option<RuleAction> {
    container.restart_policy.as_ref()?;
    let rule = container.restart_policy_rules.as_deref()?.iter().find(|rule| matches(rule, exit_code))?;
    match rule.action.as_str() {
        "Restart" => Some(RuleAction::Restart),
        "RestartAllContainers" => Some(RuleAction::RestartAllContainers),
        _ => None,
    }
}

/// Whether the container has a restart policy of its own and a restart rule with exit codes: then some exit code
/// restarts it, whatever the policy.
pub fn has_restart_rule(container: &api::Container) -> bool {
    let rules = container.restart_policy_rules.as_deref().unwrap_or_default();
    container.restart_policy.is_some() && rules.iter().any(|rule| rule.exit_codes.is_some())
}

fn matches(rule: &api::ContainerRestartRule, exit_code: i32) -> bool {
    let Some(codes) = rule.exit_codes.as_ref() else { return false };
    let listed = codes.values.as_deref().unwrap_or_default().contains(&exit_code);
    match codes.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        _ => false,
    }
}

/// Returns the restart policy of a container: its own, else the pod's.
pub fn effective_policy(pod: &Pod, container: &api::Container) -> RestartPolicy {
    match container.restart_policy.as_deref() {
        Some(own) => RestartPolicy::parse(Some(own)),
        None => pod.restart_policy(),
    }
}

/// Whether a container is restarted after that exit code (spec 02b §5.2).
pub fn restarts_after_exit(pod: &Pod, container: &api::Container, exit_code: i32) -> bool {
    if matching_rule(container, exit_code).is_some() {
        return true;
    }
    match effective_policy(pod, container) {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => exit_code != 0,
        RestartPolicy::Never => false,
    }
}

/// Whether a container is to be started or restarted now, given its newest instance.
pub fn should_start(pod: &Pod, container: &api::Container, newest: Option<&ObservedContainer>) -> bool {
    if pod.is_deleting() {
        return false;
    }
    match newest {
        None => true,
        Some(instance) => match instance.state {
            ContainerState::Running => false,
            ContainerState::Created | ContainerState::Unknown => true,
            ContainerState::Exited => restarts_after_exit(pod, container, instance.exit_code),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(pod_policy: &str, container: serde_json::Value) -> Pod {
        let mut container = container;
        container["name"] = "c".into();
        Pod::new(
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"restartPolicy": pod_policy, "containers": [container]},
            }))
            .expect("a pod"),
        )
        .expect("complete")
    }

    fn restarts(pod_policy: &str, container: serde_json::Value, code: i32) -> bool {
        let pod = pod(pod_policy, container);
        restarts_after_exit(&pod, &pod.containers()[0], code)
    }

    #[test]
    fn rules_come_before_the_containers_policy_and_that_before_the_pods() {
        use serde_json::json;
        let rule = |op: &str, action: &str| {
            json!({"restartPolicy": "Never", "restartPolicyRules": [
                {"action": action, "exitCodes": {"operator": op, "values": [42]}}]})
        };
        assert!(restarts("Always", json!({}), 0));
        assert!(!restarts("OnFailure", json!({}), 0));
        assert!(restarts("OnFailure", json!({}), 1));
        assert!(!restarts("Never", json!({}), 1));
        assert!(restarts("Never", json!({"restartPolicy": "OnFailure"}), 1));
        // AC-02b-7
        assert!(restarts("Never", rule("In", "Restart"), 42));
        assert!(!restarts("Never", rule("In", "Restart"), 1));
        assert!(restarts("Never", rule("NotIn", "RestartAllContainers"), 1));
        let mut without_policy = rule("In", "Restart");
        without_policy.as_object_mut().expect("an object").remove("restartPolicy");
        assert!(!restarts("Never", without_policy, 42), "rules need an own policy");
    }
}
