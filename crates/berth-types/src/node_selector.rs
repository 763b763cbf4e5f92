//! Matches node selectors, of pods and of persistent volumes, against a node. Pure.
//! Implements spec 02a §6.2, spec 07 §4.2.

use std::collections::BTreeMap;

use super::api;

/// Label values by key.
type Labels = BTreeMap<String, String>;

/// Whether any term of the selector matches the node.
pub fn matches(selector: &api::NodeSelector, node: &str, labels: &Labels) -> bool {
    selector.node_selector_terms.iter().any(|one| term(one, node, labels))
}

/// Whether all requirements of a term match; an empty term matches nothing.
fn term(term: &api::NodeSelectorTerm, node: &str, labels: &Labels) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|e| expression(e, labels))
        && fields.iter().all(|f| field(f, node))
}

/// Whether a label requirement matches; a malformed one matches nothing.
fn expression(requirement: &api::NodeSelectorRequirement, labels: &Labels) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let label = labels.get(&requirement.key);
    match requirement.operator.as_str() {
        "In" => label.is_some_and(|l| values.contains(l)),
        "NotIn" => !values.is_empty() && label.is_none_or(|l| !values.contains(l)),
        "Exists" => values.is_empty() && label.is_some(),
        "DoesNotExist" => values.is_empty() && label.is_none(),
        "Gt" => numbers(label, values).is_some_and(|(own, bound)| own > bound),
        "Lt" => numbers(label, values).is_some_and(|(own, bound)| own < bound),
        _ => false,
    }
}

fn numbers(label: Option<&String>, values: &[String]) -> Option<(i64, i64)> {
    let [bound] = values else { return None };
    Some((label?.parse().ok()?, bound.parse().ok()?))
}

/// Whether a field requirement matches: the only field is the node's name, compared with exactly one value.
fn field(requirement: &api::NodeSelectorRequirement, node: &str) -> bool {
    let Some([value]) = requirement.values.as_deref() else { return false };
    match (requirement.key.as_str(), requirement.operator.as_str()) {
        ("metadata.name", "In") => value == node,
        ("metadata.name", "NotIn") => value != node,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn one_term_is_enough() {
        let selects = |terms: serde_json::Value| {
            let selector = serde_json::from_value(json!({"nodeSelectorTerms": terms})).expect("a selector");
            matches(&selector, "n", &BTreeMap::from([("zone".to_owned(), "a".to_owned())]))
        };
        let zone = |value: &str| json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [value]}]});
        let name = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
        assert!(selects(json!([zone("b"), zone("a")])) && selects(json!([name])));
        assert!(!selects(json!([zone("b")])) && !selects(json!([])) && !selects(json!([{}])));
    }
}
