//! Checks and normalizes a pod status before it is stored: transitions, times, sizes, order. Pure.
//!
//! Implements spec 02b §8.2.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    conditions::{
        ALL_CONTAINERS_RESTARTING, CONTAINERS_READY, DISRUPTION_TARGET, INITIALIZED, POD_SCHEDULED, READY,
        READY_TO_START,
    },
    lookup::{self, exit, find},
    restart_all,
};
use berth_types::{ContainerKind, Pod, RestartPolicy, api, cut_at_char, restart_decision::restarts_after_exit};

/// Maximum bytes of termination messages per pod, shared by its containers.
const MESSAGES_BYTES: usize = 12_288;

/// Conditions whose transition time is set here; resize conditions set their own.
const TIMED: [&str; 7] =
    [CONTAINERS_READY, READY, INITIALIZED, READY_TO_START, POD_SCHEDULED, DISRUPTION_TARGET, ALL_CONTAINERS_RESTARTING];

/// Illegal transition from the previous status: a logic error of the agent.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransitionError {
    /// A terminated container that must not restart left the terminated state.
    #[error("terminated container {0} attempted illegal transition to non-terminated state")]
    LeftTerminated(String),
    /// The init container statuses are not in the order of the specification.
    #[error("found mismatch between pod spec and status, container: {0}")]
    Mismatch(String),
}

/// Converts a status to the form in which it is stored and sent.
///
/// # Errors
/// If a container makes an illegal transition.
pub fn accept(
    pod: &Pod,
    old: &api::PodStatus,
    mut status: api::PodStatus,
    now: Timestamp,
) -> Result<api::PodStatus, TransitionError> {
    check_moves(pod, old, &status)?;
    let seen = old.observed_generation.unwrap_or(0).max(pod.generation());
    status.observed_generation = Some(seen).filter(|g| *g != 0);
    for type_ in TIMED {
        set_transition_time(&mut status, old, type_, now);
    }
    let started = old.start_time.clone().or(status.start_time.take());
    status.start_time = Some(started.unwrap_or(Time(now)));
    normalize(pod, &mut status);
    Ok(status)
}

/// Sets `lastTransitionTime` of one condition: `now` where it is new or its status changed.
pub(super) fn set_transition_time(status: &mut api::PodStatus, old: &api::PodStatus, type_: &str, now: Timestamp) {
    let before = lookup::condition(old, type_);
    for condition in status.conditions.iter_mut().flatten().filter(|c| c.type_ == type_) {
        let kept = before.filter(|b| b.status == condition.status).and_then(|b| b.last_transition_time.clone());
        condition.last_transition_time = Some(kept.unwrap_or(Time(now)));
    }
}

fn check_moves(pod: &Pod, old: &api::PodStatus, new: &api::PodStatus) -> Result<(), TransitionError> {
    if pod.restart_policy() == RestartPolicy::Always || restart_all::has_rule(pod) {
        return Ok(());
    }
    let regular = new.container_statuses.as_deref().unwrap_or_default();
    for before in old.container_statuses.iter().flatten() {
        let container = pod.containers().iter().find(|c| c.name == before.name);
        check_move(pod, container, before, regular)?;
    }
    let init = new.init_container_statuses.as_deref().unwrap_or_default();
    for (i, before) in old.init_container_statuses.iter().flatten().enumerate() {
        let container = pod.init_containers().get(i).filter(|c| c.name == before.name);
        let Some(container) = container else { return Err(TransitionError::Mismatch(before.name.clone())) };
        if !Pod::is_sidecar(container) {
            check_move(pod, Some(container), before, init)?;
        }
    }
    Ok(())
}

fn check_move(
    pod: &Pod,
    container: Option<&api::Container>,
    before: &api::ContainerStatus,
    now: &[api::ContainerStatus],
) -> Result<(), TransitionError> {
    let Some(end) = exit(before) else { return Ok(()) };
    let retried = end.exit_code != 0 && pod.restart_policy() == RestartPolicy::OnFailure;
    if retried || container.is_some_and(|c| restarts_after_exit(pod, c, end.exit_code)) {
        return Ok(());
    }
    match find(now, &before.name) {
        Some(status) if exit(status).is_none() => Err(TransitionError::LeftTerminated(before.name.clone())),
        _ => Ok(()),
    }
}

/// Normal form, on which comparison and sending rely: whole seconds, bounded messages, sorted lists.
pub fn normalize(pod: &Pod, status: &mut api::PodStatus) {
    let containers = pod.containers().len() + pod.init_containers().len() + pod.ephemeral_containers().len();
    let limit = MESSAGES_BYTES / containers.max(1);
    status.start_time.as_mut().map(to_seconds);
    for condition in status.conditions.iter_mut().flatten() {
        condition.last_probe_time.as_mut().map(to_seconds);
        condition.last_transition_time.as_mut().map(to_seconds);
    }
    for (_, list) in lists_mut(status) {
        for container in list.iter_mut() {
            for state in [&mut container.state, &mut container.last_state].into_iter().flatten() {
                normalise_state(state, limit);
            }
        }
    }
    for list in [&mut status.container_statuses, &mut status.ephemeral_container_statuses].into_iter().flatten() {
        list.sort_by(|a, b| a.name.cmp(&b.name));
    }
    if let Some(init) = status.init_container_statuses.as_mut() {
        let place = |s: &api::ContainerStatus| pod.init_containers().iter().position(|c| c.name == s.name);
        init.sort_by_key(|s| place(s).unwrap_or(usize::MAX));
    }
}

/// The three lists of container statuses, with their kind.
pub(super) fn lists_mut(
    status: &mut api::PodStatus,
) -> impl Iterator<Item = (ContainerKind, &mut Vec<api::ContainerStatus>)> {
    [
        (ContainerKind::Regular, &mut status.container_statuses),
        (ContainerKind::Init, &mut status.init_container_statuses),
        (ContainerKind::Ephemeral, &mut status.ephemeral_container_statuses),
    ]
    .into_iter()
    .filter_map(|(kind, list)| Some((kind, list.as_mut()?)))
}

fn normalise_state(state: &mut api::ContainerState, limit: usize) {
    if let Some(running) = &mut state.running {
        running.started_at.as_mut().map(to_seconds);
    }
    if let Some(end) = &mut state.terminated {
        end.started_at.as_mut().map(to_seconds);
        end.finished_at.as_mut().map(to_seconds);
        if let Some(message) = &mut end.message {
            let keep = cut_at_char(message, limit).len();
            message.truncate(keep);
        }
    }
}

fn to_seconds(time: &mut Time) {
    time.0 = Timestamp::from_second(time.0.as_second()).unwrap_or(time.0);
}

/// Container that has just terminated: one increment of `terminated_containers_total`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TerminatedContainer {
    /// Kind of the container.
    pub kind: ContainerKind,
    /// Exit code; the label `exit_code` of the metric.
    pub exit_code: i32,
    /// Reason; empty where there is none.
    pub reason: String,
}

/// Containers that terminated between two statuses.
pub fn newly_ended(old: &api::PodStatus, new: &api::PodStatus) -> Vec<TerminatedContainer> {
    let lists = [
        (ContainerKind::Regular, &old.container_statuses, &new.container_statuses),
        (ContainerKind::Init, &old.init_container_statuses, &new.init_container_statuses),
        (ContainerKind::Ephemeral, &old.ephemeral_container_statuses, &new.ephemeral_container_statuses),
    ];
    let mut ended = Vec::new();
    for (kind, old, new) in lists {
        let old = old.as_deref().unwrap_or_default();
        for status in new.iter().flatten() {
            let Some(end) = exit(status) else { continue };
            if find(old, &status.name).and_then(exit).is_none() {
                let reason = end.reason.clone().unwrap_or_default();
                ended.push(TerminatedContainer { kind, exit_code: end.exit_code, reason });
            }
        }
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conditions::make,
        fixture::{at, exited, pod, pod_with, running, status, waiting},
    };
    use proptest::prelude::*;

    fn with(init: Vec<api::ContainerStatus>, regular: Vec<api::ContainerStatus>) -> api::PodStatus {
        api::PodStatus { init_container_statuses: Some(init), container_statuses: Some(regular), ..Default::default() }
    }

    #[test]
    fn containers_do_not_leave_their_end() {
        let left = |name: &str| Some(TransitionError::LeftTerminated(name.to_owned()));
        for (case, policy, before, now, expected) in [
            ("never", "Never", status("c", exited(1)), status("c", running()), left("c")),
            ("never, still ended", "Never", status("c", exited(1)), status("c", exited(0)), None),
            ("on failure, failed", "OnFailure", status("c", exited(1)), status("c", waiting()), None),
            ("on failure, well", "OnFailure", status("c", exited(0)), status("c", waiting()), left("c")),
            ("always", "Always", status("c", exited(0)), status("c", running()), None),
            ("gone from the list", "Never", status("d", exited(0)), status("c", running()), None),
        ] {
            let old = with(vec![], vec![before]);
            let refused = accept(&pod(policy, &["c"]), &old, with(vec![], vec![now]), at(0)).err();
            assert_eq!(refused, expected, "{case}");
        }
        let old = with(vec![status("i", exited(0)), status("s", exited(0))], vec![]);
        let new = with(vec![status("i", exited(0)), status("s", running())], vec![]);
        assert!(accept(&pod("Never", &["i", "s"]), &old, new, at(0)).is_ok(), "sidecars restart");
        let new = with(vec![status("i", running())], vec![]);
        assert_eq!(accept(&pod("Never", &["i", "s"]), &old, new, at(0)).err(), left("i"));
        let mismatch = accept(&pod("Never", &["s", "i"]), &old, with(vec![], vec![]), at(0)).err();
        assert_eq!(mismatch, Some(TransitionError::Mismatch("i".to_owned())));
    }

    #[test]
    fn a_rule_lets_a_container_leave_its_end() {
        for (action, code, refused) in
            [("Restart", 42, false), ("Restart", 1, true), ("RestartAllContainers", 1, false)]
        {
            let pod = pod_with(serde_json::json!({"restartPolicy": "Never", "containers": [
                {"name": "c", "restartPolicy": "Never", "restartPolicyRules": [
                    {"action": action, "exitCodes": {"operator": "In", "values": [42]}}]}]}));
            let old = with(vec![], vec![status("c", exited(code))]);
            let outcome = accept(&pod, &old, with(vec![], vec![status("c", waiting())]), at(0));
            assert_eq!(outcome.is_err(), refused, "{action} {code}");
        }
    }

    #[test]
    fn generation_and_start_time_never_go_back() {
        let pod = pod("Always", &["c"]);
        let first = accept(&pod, &api::PodStatus::default(), api::PodStatus::default(), at(50)).expect("legal");
        assert_eq!((first.observed_generation, first.start_time.clone()), (Some(3), Some(Time(at(50)))));
        let old = api::PodStatus { observed_generation: Some(9), ..first };
        let next = accept(&pod, &old, api::PodStatus::default(), at(60)).expect("legal");
        assert_eq!((next.observed_generation, next.start_time), (Some(9), Some(Time(at(50)))));
    }

    #[test]
    fn messages_share_their_bytes_and_are_cut_between_characters() {
        // AC-02b-15
        let names = ["i", "s", "a", "b", "c", "d"];
        let pod = pod("Always", &names);
        let entry = |name: &str| {
            let mut end = exited(1);
            end["terminated"]["message"] = "ä".repeat(2048).replacen('ä', "x", 1).into();
            api::ContainerStatus { last_state: status(name, end.clone()).state, ..status(name, end) }
        };
        let status = with(vec![entry("i"), entry("s")], names[2..].iter().map(|n| entry(n)).collect());
        let accepted = accept(&pod, &api::PodStatus::default(), status, at(0)).expect("legal");
        let all = accepted.container_statuses.iter().chain(&accepted.init_container_statuses).flatten();
        let lengths: Vec<usize> = all
            .flat_map(|s| [exit(s), lookup::last_exit(s)])
            .map(|e| e.and_then(|e| e.message.as_ref()).expect("a message").len())
            .collect();
        // 2048 bytes would split an `ä`.
        assert_eq!(lengths, [2047; 12]);
    }

    #[test]
    fn lists_are_sorted_and_times_whole() {
        let pod = pod("Always", &["s", "i", "b", "a"]);
        let mut status = with(
            vec![status("i", running()), status("s", running())],
            vec![status("b", running()), status("a", running())],
        );
        status.start_time = Some(Time(Timestamp::new(7, 999_999_999).expect("a time")));
        let accepted = accept(&pod, &api::PodStatus::default(), status, at(0)).expect("legal");
        let names = |list: &Option<Vec<api::ContainerStatus>>| -> Vec<String> {
            list.iter().flatten().map(|s| s.name.clone()).collect()
        };
        assert_eq!(names(&accepted.init_container_statuses), ["s", "i"]);
        assert_eq!(names(&accepted.container_statuses), ["a", "b"]);
        assert_eq!(accepted.start_time, Some(Time(at(7))));
    }

    #[test]
    fn an_end_is_counted_once() {
        let before = with(vec![status("i", exited(0))], vec![status("a", running()), status("b", exited(1))]);
        let mut end = exited(2);
        end["terminated"]["reason"] = "Error".into();
        let after =
            with(vec![status("i", exited(0))], vec![status("a", end), status("b", exited(1)), status("c", exited(3))]);
        let regular = |exit_code, reason: &str| TerminatedContainer {
            kind: ContainerKind::Regular,
            exit_code,
            reason: reason.into(),
        };
        assert_eq!(newly_ended(&before, &after), [regular(2, "Error"), regular(3, "")]);
        assert_eq!(newly_ended(&after, &after), []);
    }

    proptest! {
        #[test]
        fn transition_times_change_with_the_status_only(flips in prop::collection::vec((0..TIMED.len(), any::<bool>()), 1..20)) {
            let pod = pod("Always", &["c"]);
            let mut old = api::PodStatus::default();
            for (second, (which, holds)) in flips.into_iter().enumerate() {
                let now = at(i64::try_from(second).unwrap_or(0) + 1);
                let mut conditions = old.conditions.clone().unwrap_or_default();
                conditions.retain(|c| c.type_ != TIMED[which]);
                conditions.push(make(TIMED[which], holds, "", ""));
                let new = api::PodStatus { conditions: Some(conditions), ..Default::default() };
                let new = accept(&pod, &old, new, now).expect("legal");
                for c in new.conditions.iter().flatten() {
                    let before = lookup::condition(&old, &c.type_);
                    match before.filter(|b| b.status == c.status) {
                        Some(same) => prop_assert_eq!(&same.last_transition_time, &c.last_transition_time),
                        None => prop_assert_eq!(&c.last_transition_time, &Some(Time(now))),
                    }
                }
                old = new;
            }
        }
    }
}
