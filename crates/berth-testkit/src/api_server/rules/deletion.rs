//! Effects of DELETE: grace periods, finalizers, and preconditions. Pure.
//!
//! Implements spec 10a §4.1, the whole table.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    super::{
        refusal::Refusal,
        view::{DeleteEffect, DeleteOptions},
    },
    fields::{list, number, set, text, time, time_at},
};

/// Checks the preconditions of a DELETE.
///
/// # Errors
/// 409: UID or resource version differs.
pub fn check_preconditions(kind: &str, old: &Value, options: &DeleteOptions) -> Result<(), Refusal> {
    let name = text(old, "/metadata/name");
    let (uid, version) = (text(old, "/metadata/uid"), text(old, "/metadata/resourceVersion"));
    if let Some(wanted) = options.uid.as_deref().filter(|wanted| *wanted != uid) {
        let why = format!(
            "the UID in the precondition ({wanted}) does not match the UID in record ({uid}). \
             The object might have been deleted and then recreated"
        );
        return Err(Refusal::conflict(kind, name, &why));
    }
    if let Some(wanted) = options.resource_version.as_deref().filter(|wanted| *wanted != version) {
        let why = format!(
            "the ResourceVersion in the precondition ({wanted}) does not match the ResourceVersion in record \
             ({version}). The object might have been modified"
        );
        return Err(Refusal::conflict(kind, name, &why));
    }
    Ok(())
}

/// Effect on a pod, with its grace period.
pub fn pod(old: &Value, options: &DeleteOptions, now: Timestamp) -> DeleteEffect {
    if old.pointer("/metadata/deletionTimestamp").is_some() {
        return again(old, options, now);
    }
    let unbound = text(old, "/spec/nodeName").is_empty();
    let terminal = ["Succeeded", "Failed"].contains(&text(old, "/status/phase"));
    let asked = options.grace.or_else(|| number(old, "/spec/terminationGracePeriodSeconds")).unwrap_or_default();
    let grace = match asked {
        _ if unbound || terminal => 0,
        negative if negative < 0 => 1,
        asked => asked,
    };
    let mut deleting = marked(old, now, grace);
    count_generation(old, &mut deleting);
    end(deleting, grace)
}

/// Effect on a pod that is already being deleted: the grace period only shrinks.
fn again(old: &Value, options: &DeleteOptions, now: Timestamp) -> DeleteEffect {
    let stored = number(old, "/metadata/deletionGracePeriodSeconds").unwrap_or_default();
    if stored == 0 && is_final(old) {
        return DeleteEffect::Remove(Vec::new());
    }
    let asked = options.grace.map(|grace| if grace < 0 { 1 } else { grace });
    match asked {
        Some(0) if stored > 0 => end(marked(old, now, 0), 0),
        Some(grace) if grace < stored => {
            let end = time_at(old, "/metadata/deletionTimestamp").unwrap_or(now);
            let sooner = end.saturating_sub(SignedDuration::from_secs(stored - grace)).unwrap_or(now);
            let (at, grace) = if sooner < now { (now, 1) } else { (sooner, grace) };
            let mut deleting = old.clone();
            set(&mut deleting["metadata"], "deletionTimestamp", time(at));
            set(&mut deleting["metadata"], "deletionGracePeriodSeconds", grace);
            DeleteEffect::Update(deleting)
        }
        _ => DeleteEffect::Nothing,
    }
}

fn end(deleting: Value, grace: i64) -> DeleteEffect {
    if grace == 0 && is_final(&deleting) {
        DeleteEffect::Remove(vec![deleting])
    } else {
        DeleteEffect::Update(deleting)
    }
}

/// Effect on any other object: immediate removal, unless it has finalizers.
pub fn other(old: &Value, now: Timestamp) -> DeleteEffect {
    if is_final(old) {
        return DeleteEffect::Remove(Vec::new());
    }
    if old.pointer("/metadata/deletionTimestamp").is_some() {
        return DeleteEffect::Nothing;
    }
    let mut deleting = marked(old, now, 0);
    count_generation(old, &mut deleting);
    DeleteEffect::Update(deleting)
}

/// Effect on a namespace: it becomes Terminating and is removed once it is empty.
pub fn namespace(old: &Value, now: Timestamp) -> DeleteEffect {
    if old.pointer("/metadata/deletionTimestamp").is_some() {
        return DeleteEffect::Nothing;
    }
    let mut deleting = old.clone();
    set(&mut deleting["metadata"], "deletionTimestamp", time(now));
    set(&mut deleting["status"], "phase", "Terminating");
    DeleteEffect::Update(deleting)
}

fn marked(old: &Value, now: Timestamp, grace: i64) -> Value {
    let mut deleting = old.clone();
    let at = now.saturating_add(SignedDuration::from_secs(grace)).unwrap_or(now);
    set(&mut deleting["metadata"], "deletionTimestamp", time(at));
    set(&mut deleting["metadata"], "deletionGracePeriodSeconds", grace);
    deleting
}

fn count_generation(old: &Value, deleting: &mut Value) {
    if let Some(generation) = number(old, "/metadata/generation").filter(|generation| *generation > 0) {
        set(&mut deleting["metadata"], "generation", generation + 1);
    }
}

fn is_final(object: &Value) -> bool {
    list(object, "/metadata/finalizers").is_empty()
}

/// Returns the pod with the `DisruptionTarget` condition of the eviction API.
pub fn evicting(pod: &Value, now: Timestamp) -> Value {
    let mut pod = pod.clone();
    let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting", "lastProbeTime": null, "lastTransitionTime": time(now)});
    let others = list(&pod, "/status/conditions").iter().filter(|c| text(c, "/type") != "DisruptionTarget");
    let conditions: Vec<Value> = others.cloned().chain([condition]).collect();
    set(&mut pod["status"], "conditions", conditions);
    pod
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2026-01-01T00:00:00Z".parse().expect("a time")
    }

    fn at(seconds: i64) -> Timestamp {
        now() + SignedDuration::from_secs(seconds)
    }

    fn running() -> Value {
        json!({"metadata": {"name": "p", "uid": "B", "resourceVersion": "7", "generation": 1},
            "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}, "status": {"phase": "Running"}})
    }

    fn grace(seconds: i64) -> DeleteOptions {
        DeleteOptions { grace: Some(seconds), ..DeleteOptions::default() }
    }

    fn deleting(since: i64, grace: i64) -> Value {
        let mut pod = running();
        pod["metadata"]["deletionTimestamp"] = json!(time(at(since + grace)));
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        pod["metadata"]["generation"] = json!(2);
        pod
    }

    /// (how it ends, deletionTimestamp in seconds from now, grace, generation)
    fn seen(effect: &DeleteEffect) -> (&'static str, Option<(i64, i64, i64)>) {
        let facts = |pod: &Value| {
            let end = time_at(pod, "/metadata/deletionTimestamp").expect("an end");
            let number = |key: &str| number(pod, key).expect("a number");
            (
                end.duration_since(now()).as_secs(),
                number("/metadata/deletionGracePeriodSeconds"),
                number("/metadata/generation"),
            )
        };
        match effect {
            DeleteEffect::Nothing => ("nothing", None),
            DeleteEffect::Update(pod) => ("stays", Some(facts(pod))),
            DeleteEffect::Remove(before) => ("goes", before.first().map(facts)),
        }
    }

    /// Spec 10a §4.1: the rows of the table.
    #[test]
    fn the_end_of_a_pod_has_a_grace() {
        let with = |mut pod: Value, key: &str, value: Value| {
            *pod.pointer_mut(key).expect("there") = value;
            pod
        };
        let finalizer = |mut pod: Value| {
            pod["metadata"]["finalizers"] = json!(["f"]);
            pod
        };
        let none = DeleteOptions::default();
        for (case, stored, options, expected) in [
            ("AC-10a-8 first", running(), grace(30), ("stays", Some((30, 30, 2)))),
            ("AC-10a-8 second, 5 s later", deleting(-5, 30), grace(10), ("stays", Some((5, 10, 2)))),
            ("AC-10a-8 third", deleting(0, 10), grace(20), ("nothing", None)),
            ("AC-10a-9", deleting(0, 30), grace(0), ("goes", Some((0, 0, 2)))),
            ("AC-10a-10", with(running(), "/status/phase", json!("Failed")), none.clone(), ("goes", Some((0, 0, 2)))),
            ("AC-10a-11 first", finalizer(running()), grace(0), ("stays", Some((0, 0, 2)))),
            ("default grace", running(), none.clone(), ("stays", Some((30, 30, 2)))),
            ("unbound", with(running(), "/spec/nodeName", json!("")), grace(30), ("goes", Some((0, 0, 2)))),
            ("negative", running(), grace(-4), ("stays", Some((1, 1, 2)))),
            ("forced", running(), grace(0), ("goes", Some((0, 0, 2)))),
            ("again, no grace", deleting(0, 30), none.clone(), ("nothing", None)),
            ("again, equal", deleting(0, 30), grace(30), ("nothing", None)),
            ("again, would be over", deleting(-29, 30), grace(10), ("stays", Some((0, 1, 2)))),
            ("again, forced, finalizer", finalizer(deleting(0, 30)), grace(0), ("stays", Some((0, 0, 2)))),
            ("left over", deleting(-1, 0), none.clone(), ("goes", None)),
            ("left over, finalizer", finalizer(deleting(-1, 0)), grace(0), ("nothing", None)),
        ] {
            assert_eq!(seen(&pod(&stored, &options, now())), expected, "{case}");
        }
    }

    #[test]
    fn other_objects_go_at_once_but_for_finalizers() {
        let plain = json!({"metadata": {"name": "c"}});
        assert_eq!(other(&plain, now()), DeleteEffect::Remove(Vec::new()));
        let kept = json!({"metadata": {"name": "c", "finalizers": ["f"]}});
        let DeleteEffect::Update(marked) = other(&kept, now()) else { panic!("it stays") };
        assert_eq!(marked["metadata"]["deletionGracePeriodSeconds"], 0);
        assert_eq!(other(&marked, now()), DeleteEffect::Nothing);
    }

    /// Spec 10 §6.4, row DELETE precondition.
    #[test]
    fn preconditions_are_checked() {
        let options = DeleteOptions { uid: Some("A".to_owned()), ..DeleteOptions::default() };
        let refusal = check_preconditions("Pod", &running(), &options).expect_err("another");
        let text = "Operation cannot be fulfilled on Pod \"p\": the UID in the precondition (A) does not match the UID in \
            record (B). The object might have been deleted and then recreated";
        assert_eq!((refusal.code, refusal.message.as_str()), (409, text));
        let options = DeleteOptions {
            uid: Some("B".to_owned()),
            resource_version: Some("6".to_owned()),
            ..DeleteOptions::default()
        };
        assert_eq!(check_preconditions("Pod", &running(), &options).expect_err("older").code, 409);
        let options = DeleteOptions {
            uid: Some("B".to_owned()),
            resource_version: Some("7".to_owned()),
            ..DeleteOptions::default()
        };
        assert_eq!(check_preconditions("Pod", &running(), &options), Ok(()));
    }
}
