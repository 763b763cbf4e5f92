//! Merges the cached pod status into the API server's status. Pure. Implements spec 02b §8.3.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    conditions::{CONTAINERS_READY, DISRUPTION_TARGET, READY, is_owned, make},
    lookup::{condition, is_true},
    normalization::set_transition_time,
    phase::Phase,
    previous_status::starts_after,
};
use berth_types::api;

/// Whether the pod may still use what its termination releases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemainingResources {
    /// Containers may run, or resources remain: a terminal phase is not published yet.
    Something,
    /// No containers run and no resources remain.
    Nothing,
}

/// Status to write over the current one of the API server.
pub fn merge(
    api: &api::PodStatus,
    cached: &api::PodStatus,
    remains: RemainingResources,
    now: Timestamp,
) -> api::PodStatus {
    let ended = |status| Phase::of(status).is_some_and(Phase::is_terminal);
    let ending = !ended(api) && ended(cached);
    let mut merged = cached.clone();
    merged.conditions = Some(merged_conditions(api, cached, ending && remains == RemainingResources::Nothing, now));
    merged.resource_claim_statuses.clone_from(&api.resource_claim_statuses);
    merged.extended_resource_claim_status.clone_from(&api.extended_resource_claim_status);
    merged.node_allocatable_resource_claim_statuses.clone_from(&api.node_allocatable_resource_claim_statuses);
    if ending && remains == RemainingResources::Something {
        merged.phase.clone_from(&api.phase);
        merged.reason.clone_from(&api.reason);
        merged.message.clone_from(&api.message);
    }
    if ended(cached) && starts_after(cached, api) {
        keep_times(&mut merged, api);
    }
    if ended(&merged) && (is_true(&merged, READY) || is_true(&merged, CONTAINERS_READY)) {
        let reason = if Phase::of(&merged) == Some(Phase::Failed) { "PodFailed" } else { "PodCompleted" };
        for type_ in [CONTAINERS_READY, READY] {
            let mut untrue = make(type_, false, reason, "");
            untrue.observed_generation = cached.observed_generation;
            put(&mut merged, untrue, now);
        }
    }
    merged
}

/// Keeps the times that an earlier agent published for unchanged conditions (spec 10a §22).
fn keep_times(merged: &mut api::PodStatus, api: &api::PodStatus) {
    merged.start_time.clone_from(&api.start_time);
    for own in merged.conditions.iter_mut().flatten().filter(|c| is_owned(&c.type_)) {
        if let Some(published) = condition(api, &own.type_).filter(|published| published.status == own.status) {
            own.last_transition_time.clone_from(&published.last_transition_time);
        }
    }
}

fn merged_conditions(
    api: &api::PodStatus,
    cached: &api::PodStatus,
    disrupts: bool,
    now: Timestamp,
) -> Vec<api::PodCondition> {
    let mut all: Vec<_> = api.conditions.iter().flatten().filter(|c| !is_owned(&c.type_)).cloned().collect();
    for own in cached.conditions.iter().flatten() {
        if is_owned(&own.type_) {
            all.push(own.clone());
        } else if own.type_ == DISRUPTION_TARGET && disrupts {
            // Published only once the pod has really ended, so this is its transition time.
            let mut fresh = api::PodStatus { conditions: Some(vec![own.clone()]), ..Default::default() };
            set_transition_time(&mut fresh, api, DISRUPTION_TARGET, now);
            for updated in fresh.conditions.into_iter().flatten() {
                match all.iter_mut().find(|c| c.type_ == updated.type_) {
                    Some(place) => *place = updated,
                    None => all.push(updated),
                }
            }
        }
    }
    all
}

fn put(status: &mut api::PodStatus, mut new: api::PodCondition, now: Timestamp) {
    let before = condition(status, &new.type_).filter(|c| c.status == new.status);
    new.last_transition_time = before.and_then(|c| c.last_transition_time.clone()).or(Some(Time(now)));
    let list = status.conditions.get_or_insert_default();
    match list.iter_mut().find(|c| c.type_ == new.type_) {
        Some(place) => *place = new,
        None => list.push(new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::at;
    use serde_json::{Value, json};

    fn status(v: Value) -> api::PodStatus {
        serde_json::from_value(v).expect("a status")
    }

    fn merged(api: Value, cached: Value, remains: RemainingResources) -> Value {
        let merged = merge(&status(api), &status(cached), remains, at(0));
        serde_json::to_value(merged).expect("JSON")
    }

    #[test]
    fn conditions_of_others_come_from_the_api() {
        // AC-02b-10
        let api = json!({"phase": "Running", "conditions": [
            {"type": "example.com/x", "status": "True"}, {"type": "Ready", "status": "False"}],
            "nominatedNodeName": "n", "resourceClaimStatuses": [{"name": "r"}]});
        let cached = json!({"phase": "Running", "conditions": [
            {"type": "example.com/x", "status": "False"}, {"type": "Ready", "status": "True"},
            {"type": "DisruptionTarget", "status": "True"}]});
        assert_eq!(
            merged(api, cached, RemainingResources::Nothing),
            json!({"phase": "Running", "resourceClaimStatuses": [{"name": "r"}], "conditions": [
                {"type": "example.com/x", "status": "True"}, {"type": "Ready", "status": "True"}]})
        );
    }

    #[test]
    fn a_terminal_status_of_an_earlier_agent_keeps_its_times() {
        let published = |second: u32, phase: &str| {
            let at = format!("2026-01-01T00:00:{second:02}Z");
            json!({"phase": phase, "startTime": at, "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}]})
        };
        assert_eq!(
            merged(published(1, "Succeeded"), published(9, "Succeeded"), RemainingResources::Nothing),
            published(1, "Succeeded")
        );
        assert_eq!(
            merged(published(9, "Succeeded"), published(1, "Succeeded"), RemainingResources::Nothing),
            published(1, "Succeeded")
        );
        assert_eq!(
            merged(published(1, "Failed"), published(9, "Running"), RemainingResources::Something),
            published(9, "Running"),
            "another life"
        );
    }

    #[test]
    fn the_terminal_phase_is_published_when_nothing_runs() {
        // AC-02b-12
        let api = || json!({"phase": "Running", "message": "m"});
        let cached = || {
            json!({"phase": "Failed", "reason": "Evicted", "observedGeneration": 3, "conditions": [
                {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "Ready", "status": "True"}]})
        };
        assert_eq!(
            merged(api(), cached(), RemainingResources::Something),
            json!({"phase": "Running", "message": "m", "observedGeneration": 3,
                "conditions": [{"type": "Ready", "status": "True"}]})
        );
        let epoch = "1970-01-01T00:00:00Z";
        let not_ready = |type_: &str| {
            json!({"type": type_, "status": "False", "reason": "PodFailed", "observedGeneration": 3,
                "lastTransitionTime": epoch})
        };
        assert_eq!(
            merged(api(), cached(), RemainingResources::Nothing),
            json!({"phase": "Failed", "reason": "Evicted", "observedGeneration": 3, "conditions": [
                {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": epoch},
                not_ready("Ready"), not_ready("ContainersReady")]})
        );
    }
}
