//! Validates affinity, topology spread constraints, and label selectors of a pod. Pure.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{
    field::{FieldErrors, Path},
    metadata,
};
use berth_types::{api, names};

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
const UNKNOWN_OPERATOR: &str = "not a valid selector operator";

/// One requirement of a label selector, for nodes or for pods.
struct Requirement<'a> {
    operator: &'a str,
    values: &'a [String],
}

/// Checks the affinity of a pod.
pub fn check(affinity: &api::Affinity, at: &Path, errors: &mut FieldErrors) {
    if let Some(node) = affinity.node_affinity.as_ref() {
        node_affinity(node, &at.child("nodeAffinity"), errors);
    }
    let of_pods = [
        affinity.pod_affinity.as_ref().map(|a| {
            let (required, preferred) = (
                &a.required_during_scheduling_ignored_during_execution,
                &a.preferred_during_scheduling_ignored_during_execution,
            );
            ("podAffinity", required, preferred)
        }),
        affinity.pod_anti_affinity.as_ref().map(|a| {
            let (required, preferred) = (
                &a.required_during_scheduling_ignored_during_execution,
                &a.preferred_during_scheduling_ignored_during_execution,
            );
            ("podAntiAffinity", required, preferred)
        }),
    ];
    for (member, required, preferred) in of_pods.into_iter().flatten() {
        let at = at.child(member);
        for (i, term) in required.iter().flatten().enumerate() {
            pod_term(term, &at.child(REQUIRED).index(i), errors);
        }
        for (i, one) in preferred.iter().flatten().enumerate() {
            let at = at.child(PREFERRED).index(i);
            weight(one.weight, &at, errors);
            pod_term(&one.pod_affinity_term, &at.child("podAffinityTerm"), errors);
        }
    }
}

fn node_affinity(affinity: &api::NodeAffinity, at: &Path, errors: &mut FieldErrors) {
    if let Some(required) = affinity.required_during_scheduling_ignored_during_execution.as_ref() {
        let at = at.child(REQUIRED).child("nodeSelectorTerms");
        if required.node_selector_terms.is_empty() {
            errors.required(&at, "must have at least one node selector term");
        }
        for (i, term) in required.node_selector_terms.iter().enumerate() {
            node_term(term, true, &at.index(i), errors);
        }
    }
    for (i, one) in affinity.preferred_during_scheduling_ignored_during_execution.iter().flatten().enumerate() {
        let at = at.child(PREFERRED).index(i);
        weight(one.weight, &at, errors);
        node_term(&one.preference, false, &at.child("preference"), errors);
    }
}

fn weight(weight: i32, at: &Path, errors: &mut FieldErrors) {
    if !(1..=100).contains(&weight) {
        errors.invalid(&at.child("weight"), weight, "must be in the range 1-100");
    }
}

/// `check_values`: preferences may contain values that are not valid label values.
fn node_term(term: &api::NodeSelectorTerm, check_values: bool, at: &Path, errors: &mut FieldErrors) {
    for (i, one) in term.match_expressions.iter().flatten().enumerate() {
        let at = at.child("matchExpressions").index(i);
        let values = one.values.as_deref().unwrap_or_default();
        if matches!(one.operator.as_str(), "Gt" | "Lt") {
            if values.len() != 1 {
                let text = "must be specified single value when `operator` is 'Lt' or 'Gt'";
                errors.required(&at.child("values"), text);
            }
        } else {
            operator(&Requirement { operator: &one.operator, values }, &at, errors);
        }
        errors.complaints(&at.child("key"), &one.key, names::qualified_name(&one.key));
        if check_values {
            label_values(values, &at, errors);
        }
    }
    for (i, one) in term.match_fields.iter().flatten().enumerate() {
        let at = at.child("matchFields").index(i);
        let values = one.values.as_deref().unwrap_or_default();
        if !matches!(one.operator.as_str(), "In" | "NotIn") {
            errors.invalid(&at.child("operator"), &one.operator, UNKNOWN_OPERATOR);
        } else if values.len() != 1 {
            let text = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";
            errors.required(&at.child("values"), text);
        }
        if one.key != "metadata.name" {
            errors.invalid(&at.child("key"), &one.key, "not a valid field selector key");
            continue;
        }
        for (j, value) in values.iter().enumerate() {
            errors.complaints(&at.child("values").index(j), value, names::dns_subdomain(value));
        }
    }
}

fn pod_term(term: &api::PodAffinityTerm, at: &Path, errors: &mut FieldErrors) {
    label_selector(term.label_selector.as_ref(), &at.child("labelSelector"), errors);
    label_selector(term.namespace_selector.as_ref(), &at.child("namespaceSelector"), errors);
    for name in term.namespaces.iter().flatten() {
        errors.complaints(&at.child("namespace"), name, names::dns_label(name));
    }
    let keys = LabelKeys {
        matching: term.match_label_keys.as_deref().unwrap_or_default(),
        mismatching: term.mismatch_label_keys.as_deref().unwrap_or_default(),
    };
    label_keys(&keys, term.label_selector.as_ref(), at, errors);
    let at = at.child("topologyKey");
    if term.topology_key.is_empty() {
        errors.required(&at, "can not be empty");
    }
    errors.complaints(&at, &term.topology_key, names::qualified_name(&term.topology_key));
}

/// Keys of the pod's own labels that are added to a selector.
struct LabelKeys<'a> {
    matching: &'a [String],
    mismatching: &'a [String],
}

/// Checks these keys, and that they contradict neither each other nor the selector.
fn label_keys(keys: &LabelKeys<'_>, selector: Option<&LabelSelector>, at: &Path, errors: &mut FieldErrors) {
    for (member, keys) in [("matchLabelKeys", keys.matching), ("mismatchLabelKeys", keys.mismatching)] {
        let at = at.child(member);
        if selector.is_none() && !keys.is_empty() {
            errors.forbidden(&at, "must not be specified when labelSelector is not set");
            continue;
        }
        for (i, key) in keys.iter().enumerate() {
            errors.complaints(&at.index(i), key, names::qualified_name(key));
        }
    }
    let at = at.child("matchLabelKeys");
    let mut selected: BTreeSet<&str> = BTreeSet::new();
    selected
        .extend(selector.into_iter().flat_map(|one| one.match_labels.iter().flatten()).map(|(key, _)| key.as_str()));
    // The API server merges the keys into the selector before it checks for duplicate keys.
    for one in selector.into_iter().flat_map(|one| one.match_expressions.iter().flatten()) {
        let position = keys.matching.iter().rposition(|key| *key == one.key);
        if let Some(i) = position.filter(|_| selected.contains(one.key.as_str())) {
            errors.invalid(&at.index(i), &one.key, "exists in both matchLabelKeys and labelSelector");
        }
        selected.insert(&one.key);
    }
    for (i, key) in keys.matching.iter().enumerate().filter(|(_, key)| keys.mismatching.contains(key)) {
        errors.invalid(&at.index(i), key, "exists in both matchLabelKeys and mismatchLabelKeys");
    }
}

fn label_selector(selector: Option<&LabelSelector>, at: &Path, errors: &mut FieldErrors) {
    let Some(selector) = selector else { return };
    metadata::labels(selector.match_labels.as_ref(), &at.child("matchLabels"), errors);
    for (i, one) in selector.match_expressions.iter().flatten().enumerate() {
        let at = at.child("matchExpressions").index(i);
        let values = one.values.as_deref().unwrap_or_default();
        operator(&Requirement { operator: &one.operator, values }, &at, errors);
        errors.complaints(&at.child("key"), &one.key, names::qualified_name(&one.key));
        label_values(values, &at, errors);
    }
}

fn operator(one: &Requirement<'_>, at: &Path, errors: &mut FieldErrors) {
    let at_values = at.child("values");
    match (one.operator, one.values.is_empty()) {
        ("In" | "NotIn", true) => {
            errors.required(&at_values, "must be specified when `operator` is 'In' or 'NotIn'");
        }
        ("Exists" | "DoesNotExist", false) => {
            errors.forbidden(&at_values, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
        }
        ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => {}
        (other, _) => errors.invalid(&at.child("operator"), other, UNKNOWN_OPERATOR),
    }
}

fn label_values(values: &[String], at: &Path, errors: &mut FieldErrors) {
    for (i, value) in values.iter().enumerate() {
        errors.complaints(&at.child("values").index(i), value, names::label_value(value));
    }
}

/// Checks the topology spread constraints of a pod.
pub fn topology_spread(constraints: &[api::TopologySpreadConstraint], at: &Path, errors: &mut FieldErrors) {
    let mut later = BTreeSet::new();
    let mut repeated = Vec::new();
    for (i, one) in constraints.iter().enumerate().rev() {
        if !later.insert((one.topology_key.as_str(), one.when_unsatisfiable.as_str())) {
            repeated.push(i);
        }
    }
    for (i, one) in constraints.iter().enumerate() {
        let at = at.index(i);
        if one.max_skew <= 0 {
            errors.invalid(&at.child("maxSkew"), one.max_skew, "must be greater than zero");
        }
        if one.topology_key.is_empty() {
            errors.required(&at.child("topologyKey"), "can not be empty");
        }
        let when = one.when_unsatisfiable.as_str();
        if !matches!(when, "DoNotSchedule" | "ScheduleAnyway") {
            errors.unsupported(&at.child("whenUnsatisfiable"), when, &["DoNotSchedule", "ScheduleAnyway"]);
        }
        if repeated.contains(&i) {
            let pair = format!("{{{}, {when}}}", one.topology_key);
            errors.duplicate(&at.child("{topologyKey, whenUnsatisfiable}"), &pair);
        }
        if let Some(domains) = one.min_domains {
            let at = at.child("minDomains");
            if domains <= 0 {
                errors.invalid(&at, domains, "must be greater than zero");
            }
            if when != "DoNotSchedule" {
                let text = format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {when}");
                errors.invalid(&at, domains, &text);
            }
        }
        for (member, policy) in
            [("nodeAffinityPolicy", &one.node_affinity_policy), ("nodeTaintsPolicy", &one.node_taints_policy)]
        {
            if let Some(policy) = policy.as_deref().filter(|policy| !matches!(*policy, "Honor" | "Ignore")) {
                errors.unsupported(&at.child(member), policy, &["Honor", "Ignore"]);
            }
        }
        let keys = LabelKeys { matching: one.match_label_keys.as_deref().unwrap_or_default(), mismatching: &[] };
        label_keys(&keys, one.label_selector.as_ref(), &at, errors);
        label_selector(one.label_selector.as_ref(), &at.child("labelSelector"), errors);
    }
}
