//! Validates tolerations of a pod, and their deprecated annotation. Pure.

use super::field::{FieldErrors, Path};
use berth_types::{api, names};

/// Deprecated annotation with tolerations as JSON.
pub const ANNOTATION: &str = "scheduler.alpha.kubernetes.io/tolerations";

/// Checks tolerations.
pub fn check(tolerations: &[api::Toleration], at: &Path, errors: &mut FieldErrors) {
    for (i, one) in tolerations.iter().enumerate() {
        let at = at.index(i);
        let (key, value) = (one.key.as_deref().unwrap_or_default(), one.value.as_deref().unwrap_or_default());
        let (operator, effect) = (one.operator.as_deref().unwrap_or_default(), one.effect.as_deref());
        let effect = effect.unwrap_or_default();
        let at_operator = at.child("operator");
        if !key.is_empty() {
            errors.complaints(&at.child("key"), key, names::qualified_name(key));
        } else if operator != "Exists" {
            let text = "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
            errors.invalid(&at_operator, operator, text);
        }
        if one.toleration_seconds.is_some() && effect != "NoExecute" {
            errors.invalid(&at.child("effect"), effect, "effect must be 'NoExecute' when `tolerationSeconds` is set");
        }
        match operator {
            "" | "Equal" => {
                let complaints = names::label_value(value);
                if !complaints.is_empty() {
                    errors.invalid(&at_operator, value, &complaints.join(";"));
                }
            }
            "Exists" if !value.is_empty() => {
                errors.invalid(&at_operator, value, "value must be empty when `operator` is 'Exists'");
            }
            "Exists" => {}
            // Gate `TaintTolerationComparisonOperators`, off by default.
            "Lt" | "Gt" => errors.unsupported(&at_operator, operator, &["Equal", "Exists", "Lt", "Gt"]),
            _ => errors.unsupported(&at_operator, operator, &["Equal", "Exists"]),
        }
        if !effect.is_empty() {
            errors.supported(&at.child("effect"), effect, &["NoSchedule", "PreferNoSchedule", "NoExecute"]);
        }
    }
}

/// Checks the tolerations in an annotation; `at` is the path of the annotations.
pub fn annotation(text: &str, at: &Path, errors: &mut FieldErrors) {
    if text.is_empty() {
        return;
    }
    match serde_json::from_str::<Option<Vec<api::Toleration>>>(text) {
        Ok(tolerations) => check(&tolerations.unwrap_or_default(), &at.child(ANNOTATION), errors),
        Err(e) => errors.invalid(at, ANNOTATION, &e.to_string()),
    }
}
