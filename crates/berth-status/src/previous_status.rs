//! Previous status for an update: cached status or the status of the mirror pod. Pure.
//!
//! Implements spec 02b §8.2, spec 10a §22 row 7.
//!
//! An agent that starts gets its static pods at once, and their mirror pods later or never. The statuses that it builds
//! meanwhile ignore those of an earlier agent: their times start again, and probes that have not run yet count as
//! failed. Such a status is not published while the mirror pod's status has an earlier start time; the next status
//! follows the mirror pod's.

use super::phase::Phase;
use berth_types::{Pod, api};

/// Whether `kept` was built without knowledge of `told`, which an earlier agent published for the same pod.
pub fn starts_after(kept: &api::PodStatus, published: &api::PodStatus) -> bool {
    match (&kept.start_time, &published.start_time) {
        (Some(kept), Some(published)) => published.0 < kept.0,
        _ => false,
    }
}

/// Whether the mirror pod's status shows a static pod that is still active. A terminal one restarts with the agent: it
/// may have been refused or evicted.
pub fn is_active(mirror: &api::PodStatus) -> bool {
    mirror.start_time.is_some() && !has_ended(mirror)
}

/// Whether the cached status of a static pod is withheld until it follows the status of its mirror pod.
pub fn waits_for(kept: &api::PodStatus, mirror: &api::PodStatus) -> bool {
    starts_after(kept, mirror) && is_active(mirror) && !has_ended(kept)
}

/// Whether the next status of a pod follows the status in its API object instead of the cached one.
pub fn follows_object(pod: &Pod, kept: &api::PodStatus) -> bool {
    pod.is_static() && pod.status.as_ref().is_some_and(|published| starts_after(kept, published))
}

fn has_ended(status: &api::PodStatus) -> bool {
    Phase::of(status).is_some_and(Phase::is_terminal)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::at;

    fn status(started: Option<i64>, phase: &str) -> api::PodStatus {
        let started = started.map(|second| at(second).to_string());
        serde_json::from_value(json!({"startTime": started, "phase": phase})).expect("a status")
    }

    #[test]
    fn only_a_later_start_of_what_goes_on_waits() {
        for (case, kept, mirror, waits) in [
            ("started before the agent", (Some(20), "Running"), (Some(10), "Running"), true),
            ("our own", (Some(20), "Running"), (Some(20), "Running"), false),
            ("a mirror just made", (Some(20), "Running"), (None, "Pending"), false),
            ("the mirror ended", (Some(20), "Pending"), (Some(10), "Failed"), false),
            ("it ended meanwhile", (Some(20), "Succeeded"), (Some(10), "Running"), false),
            ("a clock that was set back", (Some(10), "Running"), (Some(20), "Running"), false),
        ] {
            let (kept, mirror) = (status(kept.0, kept.1), status(mirror.0, mirror.1));
            assert_eq!(waits_for(&kept, &mirror), waits, "{case}");
        }
    }
}
