//! Admission predicates: OS, resource fit, node affinity, node name, host ports, and taints.
//!
//! Pure. Implements spec 02a §6.2, 06 §7.

use super::{
    Admission, AdmissionRejection, AdmitInput, PredicateFailure, Purpose, host_ports, node_affinity, preemption, taints,
};
use crate::engine::allocation::resource_fit::{Insufficient, insufficient};

const OS: &str = "linux";
const OS_LABEL: &str = "kubernetes.io/os";

pub(super) fn check(input: &AdmitInput<'_>, admitted: &mut Admission) -> Result<(), AdmissionRejection> {
    if input.node.name.is_empty() {
        return Err(AdmissionRejection::new("InvalidNodeInfo", "Kubelet cannot get node info."));
    }
    platform(input)?;
    let failures = failures(input);
    if failures.is_empty() {
        return Ok(());
    }
    if !input.pod.is_critical() {
        return Err(AdmissionRejection::of(failures));
    }
    preempt(input, failures, admitted)
}

/// Checks of the platform: each refuses at once.
fn platform(input: &AdmitInput<'_>) -> Result<(), AdmissionRejection> {
    if input.pod.labels().get(OS_LABEL).is_some_and(|os| os != OS) {
        return Err(AdmissionRejection::new(
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ));
    }
    let spec = input.pod.spec();
    if spec.os.as_ref().is_some_and(|os| os.name != OS) {
        return Err(AdmissionRejection::new(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ));
    }
    let groups = spec.security_context.as_ref().and_then(|s| s.supplemental_groups_policy.as_deref());
    if groups == Some("Strict") && !input.node.supplemental_groups_policy {
        return Err(AdmissionRejection::new(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        ));
    }
    Ok(())
}

/// Failures of all predicates, in the order of evaluation.
fn failures(input: &AdmitInput<'_>) -> Vec<PredicateFailure> {
    let (pod, node) = (input.pod, input.node);
    let short = match input.purpose {
        Purpose::Restored => Vec::new(),
        Purpose::New | Purpose::Resize { .. } => insufficient(pod, input.others().map(|p| &**p), &node.allocatable),
    };
    let mut failures: Vec<PredicateFailure> = short.into_iter().map(PredicateFailure::Insufficient).collect();
    // The OS label is corrected before it is compared.
    let mut labels = node.labels.clone();
    labels.insert(OS_LABEL.to_owned(), OS.to_owned());
    failures.extend(node_affinity::check(pod, &node.name, &labels));
    if pod.spec().node_name.as_ref().is_some_and(|name| !name.is_empty() && *name != node.name) {
        let text = "node(s) didn't match the requested node name";
        failures.push(PredicateFailure::Predicate { name: "NodeName", text });
    }
    failures.extend(host_ports::check(pod, input.others()));
    failures.extend(taints::check(pod, &node.taints));
    failures
}

/// A critical pod that only lacks resources preempts other pods (spec 02a §6.3).
fn preempt(
    input: &AdmitInput<'_>,
    failures: Vec<PredicateFailure>,
    admitted: &mut Admission,
) -> Result<(), AdmissionRejection> {
    let (mut short, mut other) = (Vec::<Insufficient>::new(), Vec::new());
    for failure in failures {
        match failure {
            PredicateFailure::Insufficient(resource) => short.push(resource),
            PredicateFailure::Predicate { .. } => other.push(failure),
        }
    }
    if !other.is_empty() {
        return Err(AdmissionRejection::of(other));
    }
    let candidates: Vec<_> = input.others().cloned().collect();
    match preemption::victims(input.pod, &candidates, &short) {
        Ok(victims) => {
            admitted.victims = victims;
            admitted.signal = short.into_iter().next().map(|s| s.resource).unwrap_or_default();
            Ok(())
        }
        Err(error) => Err(AdmissionRejection::new(
            "UnexpectedAdmissionError",
            format!("Unexpected error while attempting to recover from admission failure: preemption: {error}"),
        )),
    }
}
