//! Next reconciliation step of a pod's status on the API server. Pure.
//!
//! Implements spec 02b §8.3, 10 §4.3, §5.3.

use jiff::Timestamp;

use super::server_pod::ServerPod;
use berth_status::{
    CachedStatus,
    diff::is_same,
    lookup::is_true,
    patch::patch,
    previous_status::waits_for,
    status_merge::{RemainingResources, merge},
};
use berth_types::api;

/// Observation of the pod's object on the server.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ObservedPod<'a> {
    /// The watch is not synced yet.
    Unknown,
    /// No object has that name.
    Absent,
    /// This object has that name.
    Seen(ServerPod<'a>),
}

/// Version of a status, and the version of the server's pod that it was compared with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ComparedVersions {
    /// Version of the status.
    pub status: u64,
    /// Resource version of the server's pod.
    pub server: String,
}

/// Results of earlier steps for one pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StatusHistory {
    /// This comparison needs no further write: the status was written, is equal, or was refused for good.
    pub settled: Option<ComparedVersions>,
    /// Resource version that the watch showed when the server answered that the pod does not exist.
    pub gone: Option<String>,
    /// Whether the pod was deleted by this writer.
    pub deleted: bool,
}

/// Next step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StatusStep {
    /// Patch the status of the server's pod.
    Patch {
        /// Body of the patch.
        body: Vec<u8>,
        /// Versions that the write settles.
        versions: ComparedVersions,
    },
    /// Delete the server's pod, with a UID precondition.
    Delete {
        /// `metadata.uid`.
        uid: String,
    },
    /// Nothing to write: the server already has this status.
    AlreadySent(ComparedVersions),
    /// Nothing to do now.
    Rest(IdleReason),
}

/// Why there is nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IdleReason {
    /// There is no object to compare with yet: the watch is not synced, a static pod has no mirror, or the local status
    /// has not caught up with the one that the mirror shows.
    Waits,
    /// The pod was deleted, or another one has its name; its status is never written again.
    Gone,
    /// Nothing changed since the last settled comparison.
    Settled,
}

/// Computes the next step for one pod.
pub fn next(kept: &CachedStatus, sight: ObservedPod<'_>, memory: &StatusHistory, now: Timestamp) -> StatusStep {
    let server = match sight {
        ObservedPod::Unknown => return StatusStep::Rest(IdleReason::Waits),
        ObservedPod::Absent if kept.is_static => return StatusStep::Rest(IdleReason::Waits),
        ObservedPod::Absent => return StatusStep::Rest(IdleReason::Gone),
        ObservedPod::Seen(server) => server,
    };
    if kept.is_static && server.mirror_of != Some(kept.pod.uid.as_str()) {
        return StatusStep::Rest(IdleReason::Waits); // a mirror of an earlier version, or another pod with the name
    }
    if kept.is_static && server.status.is_some_and(|reported| waits_for(&kept.status, reported)) {
        return StatusStep::Rest(IdleReason::Waits); // the local status is about to catch up with the one an earlier agent wrote
    }
    let is_other = !kept.is_static && server.uid != kept.pod.uid.as_str();
    if is_other || memory.deleted || memory.gone.as_deref() == Some(server.version) {
        return StatusStep::Rest(IdleReason::Gone);
    }
    let versions = ComparedVersions { status: kept.version, server: server.version.to_owned() };
    let settled = memory.settled.as_ref() == Some(&versions);
    if !settled && let Some(body) = change(kept, &server, now) {
        return StatusStep::Patch { body, versions };
    }
    if may_be_deleted(&server, kept.finished) {
        return StatusStep::Delete { uid: server.uid.to_owned() };
    }
    if settled { StatusStep::Rest(IdleReason::Settled) } else { StatusStep::AlreadySent(versions) }
}

/// Builds the patch from the server's status to ours; `None` if none is needed. A status that was sent before is sent
/// again only if the server's differs.
fn change(kept: &CachedStatus, server: &ServerPod<'_>, now: Timestamp) -> Option<Vec<u8>> {
    let empty = api::PodStatus::default();
    let theirs = server.status.unwrap_or(&empty);
    let merged = merge(theirs, &kept.status, kept.remains, now);
    if kept.unsent_since.is_none() && is_same(theirs, &merged) {
        return None;
    }
    patch(server.uid, theirs, &merged)
}

/// Whether the server's pod can be deleted: deletion was requested, it is no mirror, its status is terminal, and the
/// pod has finished locally.
fn may_be_deleted(server: &ServerPod<'_>, finished: bool) -> bool {
    server.deleting && server.mirror_of.is_none() && server.is_terminal() && finished
}

/// Whether the write takes precedence over others: the end of a pod, or a change of readiness, which routes traffic.
pub fn is_urgent(kept: &CachedStatus, sight: ObservedPod<'_>) -> bool {
    let ObservedPod::Seen(server) = sight else { return false };
    let was_ready = server.status.is_some_and(|status| is_true(status, "Ready"));
    let is_over = kept.finished || kept.remains == RemainingResources::Nothing;
    let ends = is_over && (server.deleting || !server.is_terminal());
    ends || was_ready != is_true(&kept.status, "Ready")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use berth_types::{PodRef, spec::PodHead};

    fn kept(status: Value) -> CachedStatus {
        CachedStatus {
            pod: PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() },
            is_static: false,
            status: Arc::new(serde_json::from_value(status).expect("a status")),
            version: 3,
            unsent_since: Some(Timestamp::UNIX_EPOCH),
            finished: false,
            remains: RemainingResources::Something,
        }
    }

    fn object(metadata: Value, status: Value) -> PodHead {
        let mut all = json!({"uid": "u", "resourceVersion": "7"});
        all.as_object_mut().expect("an object").extend(metadata.as_object().expect("an object").clone());
        let read: api::Pod = serde_json::from_value(json!({"metadata": all, "status": status})).expect("a pod");
        PodHead::new(read.metadata, read.status)
    }

    fn step(kept: &CachedStatus, pod: &PodHead, memory: &StatusHistory) -> StatusStep {
        next(kept, ObservedPod::Seen(ServerPod::watched(pod)), memory, Timestamp::UNIX_EPOCH)
    }

    fn versions() -> ComparedVersions {
        ComparedVersions { status: 3, server: "7".to_owned() }
    }

    fn patch_of(step: StatusStep) -> Value {
        match step {
            StatusStep::Patch { body, versions: of } => {
                assert_eq!(of, versions());
                serde_json::from_slice(&body).expect("JSON")
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_differs_is_sent_to_the_pod_it_was_made_for() {
        let running = kept(json!({"phase": "Running"}));
        let pending = object(json!({}), json!({"phase": "Pending"}));
        let body = patch_of(step(&running, &pending, &StatusHistory::default()));
        assert_eq!(body, json!({"metadata": {"uid": "u"}, "status": {"phase": "Running"}}));
        let same = object(json!({}), json!({"phase": "Running"}));
        // AC-10-42: a status equal to the watched one is not sent.
        assert_eq!(step(&running, &same, &StatusHistory::default()), StatusStep::AlreadySent(versions()));
        // AC-02b-14, AC-10-20: another pod of that name is not touched.
        let other = object(json!({"uid": "v"}), json!({"phase": "Pending"}));
        assert_eq!(step(&running, &other, &StatusHistory::default()), StatusStep::Rest(IdleReason::Gone));
        for (sight, rest) in [(ObservedPod::Unknown, IdleReason::Waits), (ObservedPod::Absent, IdleReason::Gone)] {
            let step = next(&running, sight, &StatusHistory::default(), Timestamp::UNIX_EPOCH);
            assert_eq!(step, StatusStep::Rest(rest), "{sight:?}");
        }
    }

    #[test]
    fn a_static_pod_speaks_through_its_mirror() {
        let fixed = CachedStatus { is_static: true, ..kept(json!({"phase": "Running"})) };
        let annotated = |hash: &str| {
            let annotations = json!({"kubernetes.io/config.mirror": hash});
            object(json!({"uid": "m", "annotations": annotations}), json!({"phase": "Pending"}))
        };
        let body = patch_of(step(&fixed, &annotated("u"), &StatusHistory::default()));
        assert_eq!(body, json!({"metadata": {"uid": "m"}, "status": {"phase": "Running"}}));
        for (case, pod) in [("of its past", annotated("old")), ("no mirror", object(json!({}), json!({})))] {
            assert_eq!(step(&fixed, &pod, &StatusHistory::default()), StatusStep::Rest(IdleReason::Waits), "{case}");
        }
        assert_eq!(
            next(&fixed, ObservedPod::Absent, &StatusHistory::default(), Timestamp::UNIX_EPOCH),
            StatusStep::Rest(IdleReason::Waits),
            "no mirror yet"
        );
        let over = CachedStatus { is_static: true, finished: true, ..kept(json!({"phase": "Failed"})) };
        let annotations = json!({"kubernetes.io/config.mirror": "u"});
        let deleted = json!({"annotations": annotations, "deletionTimestamp": "2026-01-01T00:00:00Z"});
        let mirror = object(deleted, json!({"phase": "Failed"}));
        assert_eq!(
            step(&over, &mirror, &StatusHistory::default()),
            StatusStep::AlreadySent(versions()),
            "mirrors have their own end"
        );
    }

    #[test]
    fn a_status_that_lags_behind_its_mirror_is_not_sent() {
        // AC-10a-38: row 7
        let status =
            |second: u32, phase: &str| json!({"phase": phase, "startTime": format!("2026-01-01T00:00:{second:02}Z")});
        let mirror = |reported: Value| {
            object(json!({"uid": "m", "annotations": {"kubernetes.io/config.mirror": "u"}}), reported)
        };
        for (case, own, reported, waits) in [
            ("an agent that was restarted", status(20, "Pending"), status(10, "Running"), true),
            ("following it", status(10, "Pending"), status(10, "Running"), false),
            ("a life after another", status(20, "Running"), status(10, "Failed"), false),
            ("over meanwhile", status(20, "Failed"), status(10, "Running"), false),
        ] {
            let fixed = CachedStatus { is_static: true, remains: RemainingResources::Nothing, ..kept(own) };
            let step = step(&fixed, &mirror(reported), &StatusHistory::default());
            assert_eq!(step == StatusStep::Rest(IdleReason::Waits), waits, "{case}: {step:?}");
        }
    }

    #[test]
    fn what_was_settled_is_not_sent_again() {
        let running = kept(json!({"phase": "Running"}));
        let pending = object(json!({}), json!({"phase": "Pending"}));
        let settled = StatusHistory { settled: Some(versions()), ..StatusHistory::default() };
        assert_eq!(step(&running, &pending, &settled), StatusStep::Rest(IdleReason::Settled));
        // AC-10-22: a new version, or a newer object, is tried again.
        let newer = CachedStatus { version: 4, ..running.clone() };
        assert!(matches!(step(&newer, &pending, &settled), StatusStep::Patch { .. }));
        let changed = object(json!({"resourceVersion": "8"}), json!({"phase": "Pending"}));
        assert!(matches!(step(&running, &changed, &settled), StatusStep::Patch { .. }));
        // AC-10-21: a deleted pod is never written, whatever is new locally.
        let gone = StatusHistory { gone: Some("7".to_owned()), ..StatusHistory::default() };
        assert_eq!(step(&newer, &pending, &gone), StatusStep::Rest(IdleReason::Gone));
    }

    #[test]
    fn what_others_change_is_no_work_unless_it_is_ours() {
        // AC-02b-10, AC-02b-11
        let ready = |extra: Value| {
            let mut conditions =
                vec![json!({"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"})];
            conditions.extend(extra.as_array().cloned().unwrap_or_default());
            json!({"phase": "Running", "conditions": conditions})
        };
        let sent = CachedStatus { unsent_since: None, ..kept(ready(json!([]))) };
        let theirs = json!([{"type": "example.com/x", "status": "True"}]);
        let mut later = ready(theirs);
        later["conditions"][0]["lastTransitionTime"] = "2026-01-02T00:00:00Z".into();
        assert_eq!(
            step(&sent, &object(json!({}), later), &StatusHistory::default()),
            StatusStep::AlreadySent(versions())
        );
        let meddled = object(json!({}), json!({"phase": "Pending", "conditions": []}));
        let body = patch_of(step(&sent, &meddled, &StatusHistory::default()));
        assert_eq!(body["status"]["phase"], "Running");
    }

    #[test]
    fn the_terminal_status_is_sent_before_the_pod_is_deleted() {
        // AC-02b-12, AC-02b-13, AC-10-24
        let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let runs = object(deleting.clone(), json!({"phase": "Running"}));
        let over = object(deleting, json!({"phase": "Failed"}));
        let failed = kept(json!({"phase": "Failed"}));
        assert_eq!(
            step(&failed, &runs, &StatusHistory::default()),
            StatusStep::AlreadySent(versions()),
            "something may run"
        );
        let stopped = CachedStatus { remains: RemainingResources::Nothing, ..failed };
        let body = patch_of(step(&stopped, &runs, &StatusHistory::default()));
        assert_eq!(body["status"]["phase"], "Failed");
        assert_eq!(
            step(&stopped, &over, &StatusHistory::default()),
            StatusStep::AlreadySent(versions()),
            "not finished"
        );
        let finished = CachedStatus { finished: true, ..stopped };
        assert!(
            matches!(step(&finished, &runs, &StatusHistory::default()), StatusStep::Patch { .. }),
            "the end comes first"
        );
        let delete = StatusStep::Delete { uid: "u".to_owned() };
        assert_eq!(step(&finished, &over, &StatusHistory::default()), delete);
        let settled = StatusHistory { settled: Some(versions()), ..StatusHistory::default() };
        assert_eq!(step(&finished, &over, &settled), delete);
        let without_deletion = object(json!({}), json!({"phase": "Failed"}));
        assert_eq!(
            step(&finished, &without_deletion, &StatusHistory::default()),
            StatusStep::AlreadySent(versions()),
            "no deletion requested"
        );
        // AC-10-25: even while finalizers keep the object.
        let deleted = StatusHistory { deleted: true, ..StatusHistory::default() };
        assert_eq!(step(&finished, &over, &deleted), StatusStep::Rest(IdleReason::Gone));
    }

    #[test]
    fn ends_and_readiness_go_first() {
        let ready = |status: &str| json!({"conditions": [{"type": "Ready", "status": status}]});
        let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let finished = CachedStatus { finished: true, ..kept(ready("False")) };
        for (case, kept, pod, urgent) in [
            ("ready", kept(ready("True")), object(json!({}), ready("False")), true),
            ("unready", kept(json!({})), object(json!({}), ready("True")), true),
            ("as before", kept(ready("True")), object(json!({}), ready("True")), false),
            ("its end", finished.clone(), object(deleting, ready("False")), true),
            ("its end, without deletion", finished.clone(), object(json!({}), ready("False")), true),
            ("its end, which was told", finished, object(json!({}), json!({"phase": "Failed"})), false),
        ] {
            assert_eq!(is_urgent(&kept, ObservedPod::Seen(ServerPod::watched(&pod))), urgent, "{case}");
        }
        assert!(!is_urgent(&kept(json!({})), ObservedPod::Absent));
    }
}
