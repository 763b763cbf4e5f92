//! Node condition setters: memory, disk, and PID pressure, and readiness. Pure.
//!
//! Implements spec 05 §4.5-4.6.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::StatusBuilder;
use berth_types::{
    api,
    resources::{CPU, EPHEMERAL_STORAGE, MEMORY, PODS},
};

/// Last reported status of a condition, and the server's status it was based on: if the server still has that one, it
/// has not received the report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ReportedCondition {
    status: String,
    since: Timestamp,
    /// Status on the server at that time; `None` if the condition did not exist.
    on: Option<String>,
}

/// Reason and message of a condition, and the reason of its event.
struct Texts {
    reason: &'static str,
    message: &'static str,
    event: &'static str,
}

/// Pressure conditions: type, texts while true, texts while false.
const PRESSURES: [(&str, Texts, Texts); 3] = [
    (
        "MemoryPressure",
        Texts {
            reason: "KubeletHasInsufficientMemory",
            message: "kubelet has insufficient memory available",
            event: "NodeHasInsufficientMemory",
        },
        Texts {
            reason: "KubeletHasSufficientMemory",
            message: "kubelet has sufficient memory available",
            event: "NodeHasSufficientMemory",
        },
    ),
    (
        "DiskPressure",
        Texts { reason: "KubeletHasDiskPressure", message: "kubelet has disk pressure", event: "NodeHasDiskPressure" },
        Texts {
            reason: "KubeletHasNoDiskPressure",
            message: "kubelet has no disk pressure",
            event: "NodeHasNoDiskPressure",
        },
    ),
    (
        "PIDPressure",
        Texts {
            reason: "KubeletHasInsufficientPID",
            message: "kubelet has insufficient PID available",
            event: "NodeHasInsufficientPID",
        },
        Texts {
            reason: "KubeletHasSufficientPID",
            message: "kubelet has sufficient PID available",
            event: "NodeHasSufficientPID",
        },
    ),
];

const READY: &str = "Ready";

pub(super) fn pressures(work: &mut StatusBuilder<'_>) {
    for (kind, there, gone) in &PRESSURES {
        let facts = &work.known.facts;
        let is_there = facts.pressures.iter().chain(&facts.restored_pressures).any(|pressure| pressure == kind);
        let texts = if is_there { there } else { gone };
        let status = if is_there { "True" } else { "False" };
        let before = previous(work, kind);
        let kept = before.filter(|before| before.status == status);
        let kept = kept.map(|before| (before.reason.unwrap_or_default(), before.message.unwrap_or_default()));
        let (reason, message) = kept.unwrap_or_else(|| (texts.reason.to_owned(), texts.message.to_owned()));
        if put(work, kind, status, reason, message) != Transition::Not {
            work.push_event(texts.event);
        }
    }
}

pub(super) fn ready(work: &mut StatusBuilder<'_>) {
    let troubles = troubles(work);
    let is_ready = troubles.is_empty();
    let (status, reason, mut message) = if is_ready {
        ("True", "KubeletReady", "kubelet is posting ready status".to_owned())
    } else {
        ("False", "KubeletNotReady", aggregate(&troubles))
    };
    if let Some(problem) = &work.settings.soft_problem {
        message = format!("{message}. WARNING: {problem}");
    }
    if put(work, READY, status, reason.to_owned(), message) == Transition::Changed {
        work.push_event(if is_ready { "NodeReady" } else { "NodeNotReady" });
    }
}

fn troubles(work: &StatusBuilder<'_>) -> Vec<String> {
    let known = work.known;
    let shutdown = known.facts.shutting_down.then(|| "node is shutting down".to_owned());
    let given = [
        known.runtime.runtime_error.clone(),
        known.runtime.network_error.clone(),
        known.storage_error.clone(),
        shutdown,
    ];
    let mut troubles: Vec<String> = given.into_iter().flatten().collect();
    let storage = work.settings.node.local_storage_isolation.then_some(EPHEMERAL_STORAGE);
    let capacity = work.status.capacity.as_ref();
    let missing = [Some(CPU), Some(MEMORY), Some(PODS), storage].into_iter().flatten();
    let missing: Vec<&str> = missing.filter(|name| !capacity.is_some_and(|has| has.contains_key(*name))).collect();
    if !missing.is_empty() {
        troubles.push(format!("missing node capacity for resources: {}", missing.join(", ")));
    }
    troubles
}

/// Joins several errors in brackets; an error that is already aggregated loses its brackets.
fn aggregate(troubles: &[String]) -> String {
    let inner = |text: &String| text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text).to_owned();
    let mut all: Vec<String> = Vec::new();
    for text in troubles.iter().map(inner) {
        if !all.contains(&text) {
            all.push(text);
        }
    }
    match (all.as_slice(), troubles) {
        ([_], [whole]) => whole.clone(),
        ([one], _) => one.clone(),
        (many, _) => format!("[{}]", many.join(", ")),
    }
}

/// Transition of a condition's status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transition {
    /// Unchanged since the last report.
    Not,
    /// The condition is new.
    New,
    /// The status changed.
    Changed,
}

fn previous(work: &StatusBuilder<'_>, kind: &str) -> Option<api::NodeCondition> {
    work.status.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind).cloned()
}

/// Sets a condition in place, or appends it.
fn put(work: &mut StatusBuilder<'_>, kind: &'static str, status: &str, reason: String, message: String) -> Transition {
    let now = work.known.now;
    let before = previous(work, kind);
    let reported = work.memory.conditions.get(kind);
    let (moved, reported) = transition(before.as_ref(), reported, status, now);
    let since = reported.since;
    work.memory.conditions.insert(kind, reported);
    let condition = api::NodeCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason),
        message: Some(message),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(Time(since)),
    };
    let conditions = work.status.conditions.get_or_insert_default();
    match conditions.iter_mut().find(|known| known.type_ == kind) {
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
    moved
}

/// Computes the transition to `status`, given the server's condition and our last report.
fn transition(
    before: Option<&api::NodeCondition>,
    reported: Option<&ReportedCondition>,
    status: &str,
    now: Timestamp,
) -> (Transition, ReportedCondition) {
    let on = before.map(|before| before.status.clone());
    let is_reported = reported.is_some_and(|reported| reported.status == status);
    let moved = |is_moved: bool| match (is_moved, &on, reported) {
        (false, ..) => Transition::Not,
        (true, None, None) => Transition::New,
        (true, ..) => Transition::Changed,
    };
    let then = |since, on| ReportedCondition { status: status.to_owned(), since, on };
    if let Some(before) = before.filter(|before| before.status == status) {
        // The server has the status. It is news only if another status was reported in between.
        let since = before.last_transition_time.as_ref().map_or(now, |time| time.0);
        return (moved(reported.is_some() && !is_reported), then(since, on));
    }
    match reported.filter(|reported| is_reported && reported.on == on) {
        Some(pending) => (Transition::Not, pending.clone()),
        None => (moved(true), then(now, on)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_that_others_changed_is_a_turn() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let server = |status: &str, second| api::NodeCondition {
            status: status.to_owned(),
            last_transition_time: Some(Time(at(second))),
            ..api::NodeCondition::default()
        };
        let (moved, reported) = transition(None, None, "True", at(1));
        assert_eq!((moved, reported.since), (Transition::New, at(1)));
        let (moved, reported) = transition(None, Some(&reported), "True", at(2));
        assert_eq!((moved, reported.since), (Transition::Not, at(1)));
        let (moved, reported) = transition(Some(&server("True", 1)), Some(&reported), "True", at(3));
        assert_eq!((moved, reported.since), (Transition::Not, at(1)));
        // The control plane marked the node Unknown: becoming ready again is one transition.
        let (moved, reported) = transition(Some(&server("Unknown", 50)), Some(&reported), "True", at(60));
        assert_eq!((moved, reported.since), (Transition::Changed, at(60)));
        let (moved, reported) = transition(Some(&server("Unknown", 50)), Some(&reported), "True", at(70));
        assert_eq!((moved, reported.since), (Transition::Not, at(60)));
        // The status changed back before the server received it.
        let (moved, reported) = transition(Some(&server("Unknown", 50)), Some(&reported), "False", at(80));
        assert_eq!((moved, reported.since), (Transition::Changed, at(80)));
        let (moved, _) = transition(Some(&server("True", 60)), Some(&reported), "True", at(90));
        assert_eq!(moved, Transition::Changed);
        // Another process reported the same.
        assert_eq!(transition(Some(&server("True", 1)), None, "True", at(9)).0, Transition::Not);
        assert_eq!(transition(Some(&server("False", 1)), None, "True", at(9)).0, Transition::Changed);
    }

    #[test]
    fn several_errors_are_aggregated() {
        let text = |list: &[&str]| aggregate(&list.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>());
        assert_eq!(text(&["a"]), "a");
        assert_eq!(text(&["a", "a"]), "a");
        assert_eq!(text(&["[a, b]", "c", "c"]), "[a, b, c]");
        assert_eq!(text(&["[a, b]"]), "[a, b]");
    }
}
