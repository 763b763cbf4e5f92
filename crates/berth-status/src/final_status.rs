//! Final status of a pod: every container terminated, and a terminal phase. Pure.
//!
//! Implements spec 02b §7.1.

use super::{
    containers::{LOST_AT_END, STATUS_UNKNOWN},
    lookup::{ContainerStateRef, end_not_observed, exit, last_exit, state, terminated},
    phase::Phase,
};
use berth_types::{Pod, api};

/// Final status of a pod: containers whose end was not observed count as failed, and the phase is terminal (except for
/// static pods).
pub fn terminate(pod: &Pod, status: &api::PodStatus) -> api::PodStatus {
    let mut status = status.clone();
    if initialized(pod, &status) {
        for container in status.container_statuses.iter_mut().flatten() {
            mark_terminated(container);
        }
    }
    if let Some(init) = status.init_container_statuses.as_mut() {
        // Init containers after the last one that ever started were never due to start.
        let started = init.iter().rposition(was_started).map_or(1, |last| last + 1);
        init.iter_mut().take(started).for_each(mark_terminated);
    }
    if !pod.is_static() && !Phase::of(&status).is_some_and(Phase::is_terminal) {
        status.phase = Some(Phase::Failed.as_str().to_owned());
    }
    status
}

/// Whether regular containers could have started.
fn initialized(pod: &Pod, status: &api::PodStatus) -> bool {
    if pod.init_containers().is_empty() || status.container_statuses.iter().flatten().any(was_started) {
        return true;
    }
    let Some(last) = status.init_container_statuses.iter().flatten().next_back() else { return false };
    let done = |end: Option<&api::ContainerStateTerminated>| end.is_some_and(|e| e.exit_code == 0);
    let is_sidecar = pod.init_containers().iter().any(|c| c.name == last.name && Pod::is_sidecar(c));
    done(exit(last))
        || done(last_exit(last))
        || (is_sidecar && state(last) == ContainerStateRef::Running && last.started == Some(true))
}

fn was_started(status: &api::ContainerStatus) -> bool {
    state(status) != ContainerStateRef::Waiting || last_exit(status).is_some()
}

fn mark_terminated(status: &mut api::ContainerStatus) {
    if exit(status).is_none() {
        status.state = Some(terminated(end_not_observed(STATUS_UNKNOWN, LOST_AT_END)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{exited, pod, running, static_pod, status, waiting, waiting_after};

    /// Exit codes in the final status, `None` for containers that stay open; init containers first.
    fn codes(entries: &[(&str, serde_json::Value)]) -> Vec<Option<i32>> {
        let names: Vec<&str> = entries.iter().map(|(n, _)| *n).collect();
        let all = entries.iter().map(|(n, s)| api::ContainerStatus { started: Some(true), ..status(n, s.clone()) });
        let (init, regular): (Vec<_>, Vec<_>) = all.partition(|s| s.name.starts_with(['i', 's']));
        let before = api::PodStatus {
            phase: Some("Running".to_owned()),
            init_container_statuses: Some(init),
            container_statuses: Some(regular),
            ..Default::default()
        };
        let after = terminate(&pod("Always", &names), &before);
        let all = after.init_container_statuses.iter().chain(&after.container_statuses).flatten();
        all.map(|s| exit(s).map(|e| e.exit_code)).collect()
    }

    #[test]
    fn what_could_have_started_counts_as_failed() {
        for (case, entries, expected) in [
            (
                "no init",
                vec![("c", running()), ("d", exited(0)), ("e", waiting())],
                vec![Some(137), Some(0), Some(137)],
            ),
            ("init never started", vec![("i", waiting()), ("c", waiting())], vec![Some(137), None]),
            (
                "second init never started",
                vec![("i", exited(0)), ("i2", waiting()), ("c", waiting())],
                vec![Some(0), None, None],
            ),
            (
                "second init started once",
                vec![("i", waiting()), ("i2", waiting_after(1)), ("i3", waiting()), ("c", waiting())],
                vec![Some(137), Some(137), None, None],
            ),
            ("init done", vec![("i", exited(0)), ("c", waiting())], vec![Some(0), Some(137)]),
            ("init done before", vec![("i", waiting_after(0)), ("c", waiting())], vec![Some(137), Some(137)]),
            ("last is a running sidecar", vec![("s", running()), ("c", waiting())], vec![Some(137), Some(137)]),
            ("a regular one ran", vec![("i", waiting()), ("c", waiting_after(0))], vec![Some(137), Some(137)]),
        ] {
            assert_eq!(codes(&entries), expected, "{case}");
        }
    }

    #[test]
    fn only_static_pods_keep_an_open_phase() {
        let running = api::PodStatus { phase: Some("Running".to_owned()), ..Default::default() };
        assert_eq!(terminate(&pod("Always", &["c"]), &running).phase.as_deref(), Some("Failed"));
        assert_eq!(terminate(&static_pod("Always", &["c"]), &running).phase.as_deref(), Some("Running"));
        let done = api::PodStatus { phase: Some("Succeeded".to_owned()), ..Default::default() };
        assert_eq!(terminate(&pod("Always", &["c"]), &done).phase.as_deref(), Some("Succeeded"));
    }
}
