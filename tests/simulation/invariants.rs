//! What must never happen, however bad things are.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use berth_types::{Pod, PodRef, PodUid, RestartPolicy, api};

use crate::world::World;
use berth_testkit::scripted::ScriptedCri;

/// Calls that change something of the runtime.
const ACTS: [&str; 7] = [
    "run_podsandbox",
    "stop_podsandbox",
    "remove_podsandbox",
    "create_container",
    "start_container",
    "stop_container",
    "remove_container",
];
/// As often a call of one target may be made within [`WINDOW`], whatever the runtime answers.
const MOST_ACTS: usize = 10;
/// In which acts are counted.
const WINDOW: Duration = Duration::from_secs(1);

/// Looks through the whole history of the runtime.
pub fn check(cri: &ScriptedCri, world: &World) -> Result<(), String> {
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

/// Nobody tries again without a pause: not even when the own failed call is seen as a change.
fn paced(cri: &ScriptedCri) -> Result<(), String> {
    let calls = cri.calls();
    let mut by_target = BTreeMap::<_, Vec<_>>::new();
    for call in calls.iter().filter(|call| ACTS.contains(&call.op)) {
        // A pod may have several sandboxes, and a container several instances: these calls tell which one is meant.
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

/// Restart counts only grow in one life of a pod. Who does not see an instance, and has lost the status to a
/// restart, cannot know the count before there is one again: it may be told lower until then, not after.
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
