//! Requests and limits. Pure.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::field::{FieldErrors, Path};
use crate::pod::{api, names, quantity::Amount};

/// Checks the resources of a container.
pub fn container(resources: Option<&api::ResourceRequirements>, at: &Path, errors: &mut FieldErrors) {
    check(resources, at, errors);
    for list in resources.into_iter().flat_map(|r| [(&r.limits, "limits"), (&r.requests, "requests")]) {
        for name in list.0.iter().flatten().map(|(name, _)| name) {
            let standard = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
            if !(standard || name.starts_with("hugepages-") || name.contains('/')) {
                let at = at.child(list.1);
                errors.invalid(&at, name, "must be a standard resource for containers");
            }
        }
    }
}

/// Checks the resources of a pod.
pub fn pod(resources: Option<&api::ResourceRequirements>, at: &Path, errors: &mut FieldErrors) {
    check(resources, at, errors);
    for list in resources.into_iter().flat_map(|r| [(&r.limits, "limits"), (&r.requests, "requests")]) {
        for name in list.0.iter().flatten().map(|(name, _)| name) {
            if !(matches!(name.as_str(), "cpu" | "memory") || name.starts_with("hugepages-")) {
                errors.unsupported(&at.child(list.1).key(name), name, &["cpu", "hugepages-", "memory"]);
            }
        }
    }
}

fn check(resources: Option<&api::ResourceRequirements>, at: &Path, errors: &mut FieldErrors) {
    let Some(resources) = resources else { return };
    for (name, limit) in resources.limits.iter().flatten() {
        let at = at.child("limits").key(name);
        errors.complaints(&at, name, names::qualified_name(name));
        not_negative(&limit.0, &at, errors);
        whole(name, limit, &at, errors);
    }
    let path = at.child("requests");
    for (name, request) in resources.requests.iter().flatten() {
        let at = path.key(name);
        errors.complaints(&at, name, names::qualified_name(name));
        not_negative(&request.0, &at, errors);
        whole(name, request, &at, errors);
        let limit = resources.limits.as_ref().and_then(|limits| limits.get(name));
        let overcommit = !name.starts_with("hugepages-") && (!name.contains('/') || name.contains("kubernetes.io/"));
        match limit {
            None if !overcommit => errors.required(&at, "Limit must be set for non overcommitable resources"),
            None => {}
            Some(limit) => {
                let (Ok(asked), Ok(most)) = (Amount::try_from(request), Amount::try_from(limit)) else { continue };
                if !overcommit && asked != most {
                    errors.invalid(&path, &request.0, &format!("must be equal to {name} limit of {}", limit.0));
                } else if asked > most {
                    let text = format!("must be less than or equal to {name} limit of {}", limit.0);
                    errors.invalid(&path, &request.0, &text);
                }
            }
        }
    }
}

/// Extended resources are counted, not measured.
fn whole(name: &str, quantity: &Quantity, at: &Path, errors: &mut FieldErrors) {
    let extended = name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.");
    if extended && Amount::try_from(quantity).is_ok_and(|amount| amount.milli() % 1000 != 0) {
        errors.invalid(at, &quantity.0, "must be an integer");
    }
}

/// Checks one quantity.
pub fn not_negative(quantity: &str, at: &Path, errors: &mut FieldErrors) {
    match Amount::parse(quantity) {
        Ok(amount) if amount.is_negative() => errors.invalid(at, quantity, "must be greater than or equal to 0"),
        Ok(_) => {}
        Err(e) => errors.invalid(at, quantity, &e.to_string()),
    }
}
