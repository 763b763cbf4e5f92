//! Semantic comparison of two pod statuses, restricted to what a kubelet writes. Pure.
//!
//! Implements spec 02b §8.2 step 7.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    conditions::{DISRUPTION_TARGET, is_owned},
    lookup,
    normalization::lists_mut,
};
use berth_types::{
    ContainerKind, api,
    quantity::{Amount, QuantityFormat},
};

/// Whether the statuses are equal in everything that a kubelet writes. Quantities are compared by value, missing lists
/// equal empty ones, and conditions are compared by type, status, reason, and message; times of conditions and fields
/// owned by others are ignored.
pub fn is_same(a: &api::PodStatus, b: &api::PodStatus) -> bool {
    same_conditions(a, b) && same_conditions(b, a) && plain(a) == plain(b)
}

/// Whether `b` contains every compared condition of `a` with equal content.
fn same_conditions(a: &api::PodStatus, b: &api::PodStatus) -> bool {
    let compared = |c: &&api::PodCondition| is_owned(&c.type_) || c.type_ == DISRUPTION_TARGET;
    let text = |t: &Option<String>| t.clone().unwrap_or_default();
    a.conditions.iter().flatten().filter(compared).all(|c| {
        lookup::condition(b, &c.type_).is_some_and(|other| {
            c.status == other.status
                && text(&c.reason) == text(&other.reason)
                && text(&c.message) == text(&other.message)
        })
    })
}

/// The remaining fields in normal form.
fn plain(status: &api::PodStatus) -> api::PodStatus {
    let mut status = without_blanks(&api::PodStatus {
        conditions: None,
        resource_claim_statuses: None,
        extended_resource_claim_status: None,
        node_allocatable_resource_claim_statuses: None,
        ..status.clone()
    });
    for_each_amount(&mut status, |_, quantity| {
        if let Ok(amount) = Amount::parse(&quantity.0) {
            // Within one suffix family, equal numbers have the same text.
            quantity.0 = Amount::from_value(0, QuantityFormat::DecimalSi).plus(amount).canonical();
        }
    });
    status
}

/// The status without empty texts, lists, and states, and with quantities in canonical form.
pub(super) fn without_blanks(status: &api::PodStatus) -> api::PodStatus {
    let mut status = status.clone();
    for text in [
        &mut status.reason,
        &mut status.message,
        &mut status.host_ip,
        &mut status.pod_ip,
        &mut status.nominated_node_name,
        &mut status.resize,
        &mut status.phase,
        &mut status.qos_class,
    ] {
        drop_empty_text(text);
    }
    for condition in status.conditions.iter_mut().flatten() {
        drop_empty_text(&mut condition.reason);
        drop_empty_text(&mut condition.message);
        condition.observed_generation = condition.observed_generation.filter(|g| *g != 0);
    }
    status.observed_generation = status.observed_generation.filter(|g| *g != 0);
    for_each_amount(&mut status, |_, quantity| {
        if let Ok(amount) = Amount::parse(&quantity.0) {
            quantity.0 = amount.canonical();
        }
    });
    drop_empty(&mut status.conditions);
    drop_empty(&mut status.pod_ips);
    drop_empty(&mut status.host_ips);
    drop_empty(&mut status.resource_claim_statuses);
    drop_empty(&mut status.node_allocatable_resource_claim_statuses);
    drop_no_amounts(&mut status.allocated_resources);
    drop_no_resources(&mut status.resources);
    for (_, list) in lists_mut(&mut status) {
        list.iter_mut().for_each(plain_container);
    }
    drop_empty(&mut status.container_statuses);
    drop_empty(&mut status.init_container_statuses);
    drop_empty(&mut status.ephemeral_container_statuses);
    status
}

/// Gives the quantities of `old` the spelling of `new` where the values are equal.
pub(super) fn spell_alike(old: &mut api::PodStatus, new: &mut api::PodStatus) {
    let mut texts = BTreeMap::new();
    for_each_amount(new, |place, quantity| {
        texts.insert(place, quantity.0.clone());
    });
    for_each_amount(old, |place, quantity| {
        if let Some(text) = texts.get(&place)
            && let (Ok(a), Ok(b)) = (Amount::parse(&quantity.0), Amount::parse(text))
            && a == b
        {
            quantity.0.clone_from(text);
        }
    });
}

/// Location of a quantity: container (none for the pod), field, and resource name.
type QuantityLocation = (Option<(ContainerKind, String)>, &'static str, String);

/// Visits every quantity of a status.
fn for_each_amount(status: &mut api::PodStatus, mut visit: impl FnMut(QuantityLocation, &mut Quantity)) {
    let mut each = |owner: &Option<(ContainerKind, String)>,
                    allocated: &mut Option<BTreeMap<String, Quantity>>,
                    resources: &mut Option<api::ResourceRequirements>| {
        let (requests, limits) = resources.as_mut().map_or((None, None), |r| (r.requests.as_mut(), r.limits.as_mut()));
        for (field, list) in [("allocated", allocated.as_mut()), ("requests", requests), ("limits", limits)] {
            for (name, quantity) in list.into_iter().flatten() {
                visit((owner.clone(), field, name.clone()), quantity);
            }
        }
    };
    each(&None, &mut status.allocated_resources, &mut status.resources);
    for (kind, list) in lists_mut(status) {
        for c in list.iter_mut() {
            each(&Some((kind, c.name.clone())), &mut c.allocated_resources, &mut c.resources);
        }
    }
}

fn plain_container(status: &mut api::ContainerStatus) {
    for state in [&mut status.state, &mut status.last_state] {
        if let Some(api::ContainerState { terminated: Some(end), .. }) = state {
            drop_empty_text(&mut end.reason);
            drop_empty_text(&mut end.message);
            drop_empty_text(&mut end.container_id);
            end.signal = end.signal.filter(|s| *s != 0);
        }
        if let Some(api::ContainerState { waiting: Some(waiting), .. }) = state {
            drop_empty_text(&mut waiting.reason);
            drop_empty_text(&mut waiting.message);
        }
        if *state == Some(api::ContainerState::default()) {
            *state = None;
        }
    }
    drop_empty_text(&mut status.container_id);
    drop_no_amounts(&mut status.allocated_resources);
    drop_no_resources(&mut status.resources);
    drop_empty(&mut status.allocated_resources_status);
    for mount in status.volume_mounts.iter_mut().flatten() {
        mount.read_only = mount.read_only.filter(|r| *r);
    }
    drop_empty(&mut status.volume_mounts);
    if let Some(linux) = status.user.as_mut().and_then(|u| u.linux.as_mut()) {
        drop_empty(&mut linux.supplemental_groups);
    }
}

/// Empty resources stay: to the API server, a running container without resources is on a node that cannot resize.
fn drop_no_resources(resources: &mut Option<api::ResourceRequirements>) {
    if let Some(some) = resources {
        drop_no_amounts(&mut some.requests);
        drop_no_amounts(&mut some.limits);
        drop_empty(&mut some.claims);
    }
}

fn drop_no_amounts(list: &mut Option<BTreeMap<String, Quantity>>) {
    if list.as_ref().is_some_and(BTreeMap::is_empty) {
        *list = None;
    }
}

fn drop_empty_text(text: &mut Option<String>) {
    if text.as_deref() == Some("") {
        *text = None;
    }
}

fn drop_empty<T>(list: &mut Option<Vec<T>>) {
    if list.as_ref().is_some_and(Vec::is_empty) {
        *list = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn same(a: Value, b: Value) -> bool {
        let status = |v: Value| serde_json::from_value::<api::PodStatus>(v).expect("a status");
        let (a, b) = (status(a), status(b));
        assert_eq!(is_same(&a, &b), is_same(&b, &a), "symmetric");
        is_same(&a, &b)
    }

    #[test]
    fn equivalent_statuses_are_the_same() {
        // AC-02b-11
        let ready = |time: &str, reason: &str| json!({"conditions": [{"type": "Ready", "status": "True", "reason": reason, "lastTransitionTime": time}]});
        let container = |extra: Value| {
            let mut c = json!({"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0});
            c.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
            json!({"containerStatuses": [c]})
        };
        for (case, a, b) in [
            ("transition times", ready("2026-01-01T00:00:00Z", ""), ready("2026-01-02T00:00:00Z", "")),
            ("empty lists", json!({"podIPs": [], "containerStatuses": []}), json!({})),
            ("empty texts", json!({"reason": "", "message": ""}), json!({})),
            (
                "conditions of others",
                json!({"conditions": [{"type": "example.com/x", "status": "True"}]}),
                json!({"conditions": [{"type": "example.com/x", "status": "False"}]}),
            ),
            (
                "claims of others",
                json!({"resourceClaimStatuses": [{"name": "x"}]}),
                json!({"resourceClaimStatuses": [{"name": "y"}]}),
            ),
            (
                "quantities",
                json!({"allocatedResources": {"cpu": "1", "memory": "1Gi"}}),
                json!({"allocatedResources": {"cpu": "1000m", "memory": "1073741824"}}),
            ),
            ("empty states", container(json!({"state": {}, "lastState": {}})), container(json!({}))),
            ("no resources", container(json!({"resources": {}})), container(json!({"resources": {"limits": {}}}))),
        ] {
            assert!(same(a, b), "{case}");
        }
    }

    #[test]
    fn different_statuses_are_not_the_same() {
        let container = |resources: Value| {
            let mut c = json!({"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0});
            c.as_object_mut().expect("an object").extend(resources.as_object().expect("an object").clone());
            json!({"containerStatuses": [c]})
        };
        let condition = |status: &str, reason: &str, message: &str| json!({"conditions": [{"type": "Ready", "status": status, "reason": reason, "message": message}]});
        for (case, a, b) in [
            ("phase", json!({"phase": "Pending"}), json!({"phase": "Running"})),
            ("condition's status", condition("True", "", ""), condition("False", "", "")),
            ("condition's reason", condition("True", "a", ""), condition("True", "b", "")),
            ("condition's message", condition("True", "", "a"), condition("True", "", "b")),
            ("condition gone", condition("True", "", ""), json!({})),
            ("disruption", json!({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}), json!({})),
            ("resources of a pod", json!({"resources": {}}), json!({})),
            ("resources of a container", container(json!({"resources": {}})), container(json!({}))),
            ("quantity", json!({"allocatedResources": {"cpu": "1"}}), json!({"allocatedResources": {"cpu": "1001m"}})),
            ("generation", json!({"observedGeneration": 1}), json!({"observedGeneration": 2})),
            ("start time", json!({"startTime": "2026-01-01T00:00:00Z"}), json!({})),
        ] {
            assert!(!same(a, b), "{case}");
        }
    }
}
