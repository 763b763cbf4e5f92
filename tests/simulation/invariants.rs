//! What must never happen, however bad things are.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use berth::pod::{Pod, PodRef, PodUid, RestartPolicy, api};

use crate::world::World;
use berth_testkit::scripted::ScriptedCri;

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
    let once = |pod: &&Arc<Pod>| {
        let restarts_all = berth::status::restart_all::has_rule(pod);
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
