//! Admission predicate `NodeAffinity`: node selector and required node affinity of the pod.
//!
//! Pure. Implements spec 02a §6.2.

use std::collections::BTreeMap;

use super::PredicateFailure;
use berth_types::{Pod, node_selector};

/// Node labels by key.
type Labels = BTreeMap<String, String>;

pub(super) fn check(pod: &Pod, node: &str, labels: &Labels) -> Option<PredicateFailure> {
    let selected = pod.spec().node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let affinity = pod.spec().affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    let fits = selected && required.is_none_or(|r| node_selector::matches(r, node, labels));
    (!fits).then_some(PredicateFailure::Predicate {
        name: "NodeAffinity",
        text: "node(s) didn't match Pod's node affinity/selector",
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fits(spec: Value) -> bool {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        let labels = [("zone", "a"), ("size", "5"), ("gpu", "")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        check(&pod, "node-1", &labels).is_none()
    }

    fn required(terms: Value) -> Value {
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": terms}}}})
    }

    fn one(key: &str, operator: &str, values: &[&str]) -> bool {
        fits(required(json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}])))
    }

    #[test]
    fn operators_compare_labels() {
        assert!(one("zone", "In", &["b", "a"]) && !one("zone", "In", &["b"]) && !one("none", "In", &["a"]));
        assert!(one("zone", "NotIn", &["b"]) && !one("zone", "NotIn", &["a"]) && one("none", "NotIn", &["a"]));
        assert!(one("gpu", "Exists", &[]) && !one("none", "Exists", &[]));
        assert!(one("none", "DoesNotExist", &[]) && !one("gpu", "DoesNotExist", &[]));
        assert!(one("size", "Gt", &["4"]) && !one("size", "Gt", &["5"]) && !one("none", "Gt", &["4"]));
        assert!(one("size", "Lt", &["6"]) && !one("size", "Lt", &["5"]) && !one("zone", "Lt", &["5"]));
        assert!(!one("size", "Gt", &["1", "2"]) && !one("size", "Near", &["5"]) && !one("zone", "NotIn", &[]));
    }

    #[test]
    fn terms_are_alternatives_and_empty_ones_match_nothing() {
        let zone = |value: &str| json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [value]}]});
        assert!(fits(required(json!([zone("b"), zone("a")]))));
        assert!(!fits(required(json!([zone("b"), {}]))));
        assert!(!fits(required(json!([]))));
        let named = |operator: &str, name: &str| json!([{"matchFields": [{"key": "metadata.name", "operator": operator, "values": [name]}]}]);
        assert!(fits(required(named("In", "node-1"))) && !fits(required(named("In", "node-2"))));
        assert!(fits(required(named("NotIn", "node-2"))) && !fits(required(named("NotIn", "node-1"))));
        assert!(!fits(required(named("Exists", "node-1"))));
    }

    #[test]
    fn a_selector_and_an_affinity_must_both_match() {
        assert!(fits(json!({"nodeSelector": {"zone": "a", "size": "5"}})));
        assert!(!fits(json!({"nodeSelector": {"zone": "a", "size": "6"}})));
        let mut both = required(json!([{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]));
        both["nodeSelector"] = json!({"zone": "b"});
        assert!(!fits(both));
    }
}
