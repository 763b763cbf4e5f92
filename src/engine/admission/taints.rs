//! Admission predicate `TaintToleration`: untolerated `NoExecute` taints.
//!
//! Pure. Implements spec 02a §6.2.

use super::PredicateFailure;
use berth_types::{Pod, api};

/// Checks `NoExecute` taints only; static pods are exempt.
pub(super) fn check(pod: &Pod, taints: &[api::Taint]) -> Option<PredicateFailure> {
    if pod.is_static() {
        return None;
    }
    let tolerations = pod.spec().tolerations.as_deref().unwrap_or_default();
    let mut forbidding = taints.iter().filter(|taint| taint.effect == "NoExecute");
    forbidding.any(|taint| !is_tolerated(taint, tolerations)).then_some(PredicateFailure::Predicate {
        name: "TaintToleration",
        text: "node(s) had taints that the pod didn't tolerate",
    })
}

/// Whether one of the tolerations tolerates the taint.
pub(super) fn is_tolerated(taint: &api::Taint, tolerations: &[api::Toleration]) -> bool {
    tolerations.iter().any(|t| {
        let covers = |own: &Option<String>, of_taint: &str| {
            own.as_deref().is_none_or(|text| text.is_empty() || text == of_taint)
        };
        covers(&t.effect, &taint.effect)
            && covers(&t.key, &taint.key)
            && match t.operator.as_deref() {
                None | Some("" | "Equal") => {
                    t.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
                }
                Some("Exists") => true,
                // `Lt` and `Gt` are behind the gate TaintTolerationComparisonOperators, which is off.
                Some(_) => false,
            }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_toleration_covers_by_effect_key_and_value() {
        let taint: api::Taint =
            serde_json::from_value(json!({"key": "k", "value": "v", "effect": "NoExecute"})).expect("a taint");
        for (toleration, covers) in [
            (json!({"operator": "Exists"}), true),
            (json!({"operator": "Exists", "effect": "NoSchedule"}), false),
            (json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), true),
            (json!({"key": "k", "value": "v"}), true),
            (json!({"key": "k", "operator": "Equal", "value": "w"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (json!({"key": "k"}), false),
            (json!({"key": "k", "operator": "Lt", "value": "1"}), false),
        ] {
            let list = [serde_json::from_value(toleration.clone()).expect("a toleration")];
            assert_eq!(is_tolerated(&taint, &list), covers, "{toleration}");
        }
    }
}
