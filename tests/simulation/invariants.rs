//! Invariants that hold under any faults: runtime contract, call rate, and restart counts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use berth_types::{Pod, PodRef, PodUid, RestartPolicy, api};

use crate::run_state::RunState;
use berth_testkit::scripted_cri::ScriptedCri;

/// Mutating CRI operations.
const ACTS: [&str; 7] = [
    "run_podsandbox",
    "stop_podsandbox",
    "remove_podsandbox",
    "create_container",
    "start_container",
    "stop_container",
    "remove_container",
];
/// Maximum number of equal calls on a target within [`WINDOW`], whatever the runtime returns.
const MOST_ACTS: usize = 10;
/// Window of the call rate.
const WINDOW: Duration = Duration::from_secs(1);

/// Checks the runtime's whole history.
pub fn check(cri: &ScriptedCri, world: &RunState) -> Result<(), String> {
    if let Some(violation) = cri.violations().first() {
        return Err(violation.clone());
    }
    let history = cri.history();
    if let Some(overlap) = history.overlaps().first() {
        return Err(overlap.clone());
    }
    if let Some(span) = history.doubled_sandboxes().iter().find(|span| span.until.is_none()) {
        return Err(format!("{} has two ready sandboxes for good", span.whose));
    }
    paced(cri)?;
    let once = |pod: &&Arc<Pod>| {
        let restarts_all = berth_status::restart_all::has_rule(pod);
        pod.restart_policy() == RestartPolicy::Never && !restarts_all && !world.returned.contains(pod.uid())
    };
    for pod in world.wanted().filter(once) {
        for container in pod.containers().iter().filter(|c| c.restart_policy.is_none()) {
            let starts = history.starts(pod.uid().as_str(), &container.name);
            if starts > 1 {
                return Err(format!("{}: {} was started {starts} times under Never", pod.uid(), container.name));
            }
        }
    }
    Ok(())
}

/// Asserts that nothing is retried without a pause: not even when the failed call itself causes a change event.
fn paced(cri: &ScriptedCri) -> Result<(), String> {
    let calls = cri.calls();
    let mut by_target = BTreeMap::<_, Vec<_>>::new();
    for call in calls.iter().filter(|call| ACTS.contains(&call.op)) {
        // A pod may have several sandboxes, and a container several instances: the details of these calls identify the
        // instance.
        let has_id = matches!(call.op, "stop_podsandbox" | "remove_podsandbox" | "remove_container");
        let instance = if has_id { call.detail.as_str() } else { "" };
        by_target.entry((call.op, &call.target, instance)).or_default().push(call.at);
    }
    for ((op, target, _), times) in by_target {
        let crowded = times.windows(MOST_ACTS + 1).find(|times| times[MOST_ACTS] - times[0] < WINDOW);
        if crowded.is_some() {
            return Err(format!("{op} of {target} was called more than {MOST_ACTS} times within {WINDOW:?}"));
        }
    }
    Ok(())
}

/// Restart counts only grow during one life of a pod. An agent that has lost the status in a restart, and does not
/// observe an instance, cannot know the count until there is one again: it may report a lower one until then, not
/// afterwards.
pub fn restart_counts(
    statuses: &[(PodRef, Arc<api::PodStatus>)],
    returned: &BTreeSet<PodUid>,
    known: &mut BTreeMap<(PodUid, String), i32>,
) -> Result<(), String> {
    for (pod, status) in statuses.iter().filter(|(pod, _)| !returned.contains(&pod.uid)) {
        for container in status.container_statuses.iter().flatten().filter(|c| c.container_id.is_some()) {
            let before = known.insert((pod.uid.clone(), container.name.clone()), container.restart_count);
            if before.is_some_and(|before| before > container.restart_count) {
                let (name, now) = (&container.name, container.restart_count);
                return Err(format!("{}: restart count of {name} fell from {before:?} to {now}", pod.uid));
            }
        }
    }
    Ok(())
}
