//! What counts as the status before. Pure. Behaviour: spec 02b §8.2, spec 10a §22 row 7.
//!
//! An agent that starts sees its static pods at once and their mirrors later, or never. What it said of them
//! meanwhile was said without knowing what an earlier agent had told: their times began anew, and probes that
//! did not run yet count as failed. So it is not told while the mirror tells of an earlier start, and what is
//! said next follows the mirror.

use super::phase::Phase;
use berth_types::{Pod, api};

/// Whether `kept` was made without knowing `told`, which an earlier agent said of the same pod.
pub fn is_unaware(kept: &api::PodStatus, told: &api::PodStatus) -> bool {
    match (&kept.start_time, &told.start_time) {
        (Some(kept), Some(told)) => told.0 < kept.0,
        _ => false,
    }
}

/// Whether the mirror of a static pod tells of a life that goes on. One that has ended begins anew with the agent:
/// it may have been refused, or evicted.
pub fn goes_on(mirror: &api::PodStatus) -> bool {
    mirror.start_time.is_some() && !has_ended(mirror)
}

/// Whether what is kept of a static pod waits until it follows what its mirror tells.
pub fn waits_for(kept: &api::PodStatus, mirror: &api::PodStatus) -> bool {
    is_unaware(kept, mirror) && goes_on(mirror) && !has_ended(kept)
}

/// Whether the next status of a pod follows what its object says, rather than what is kept.
pub fn follows_object(pod: &Pod, kept: &api::PodStatus) -> bool {
    pod.is_static() && pod.status.as_ref().is_some_and(|told| is_unaware(kept, told))
}

fn has_ended(status: &api::PodStatus) -> bool {
    Phase::of(status).is_some_and(Phase::is_terminal)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::at;

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
