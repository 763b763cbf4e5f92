//! Admission refusal: reason and message for status, event, and metric. Pure. Implements spec 02a §6.

use std::borrow::Cow;

use crate::engine::allocation::resource_fit::Insufficient;

/// Failure of one admission predicate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PredicateFailure {
    /// A resource is insufficient.
    Insufficient(Insufficient),
    /// A predicate of the node does not match.
    Predicate {
        /// Name of the predicate; becomes the reason of the refusal.
        name: &'static str,
        /// Upstream's text of the failure.
        text: &'static str,
    },
}

/// A refused admission.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct AdmissionRejection {
    /// `status.reason` and the reason of the event.
    pub reason: Cow<'static, str>,
    /// The message of the event; the status carries [`AdmissionRejection::status_message`].
    pub message: Cow<'static, str>,
    /// Failures of the predicates; empty where another handler refused.
    pub failures: Vec<PredicateFailure>,
    /// Label `reason_detail` of `pod_infeasible_resizes_total`, where the resize handler refused.
    pub detail: Option<&'static str>,
}

impl AdmissionRejection {
    /// Creates a refusal from reason and message.
    pub fn new(reason: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self { reason: reason.into(), message: message.into(), failures: Vec::new(), detail: None }
    }

    /// Creates a refusal for devices that cannot be allocated, from the allocation's error (spec 06c §1.6).
    pub fn failed_allocation(error: &str) -> Self {
        Self::new("UnexpectedAdmissionError", format!("Allocate failed due to {error}, which is unexpected"))
    }

    /// Creates a refusal from predicate failures: the first one determines reason and message.
    pub fn of(failures: Vec<PredicateFailure>) -> Self {
        let (reason, message) = match failures.first() {
            Some(PredicateFailure::Insufficient(short)) => (
                format!("OutOf{}", short.resource).into(),
                format!(
                    "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
                    short.resource, short.requested, short.used, short.capacity
                )
                .into(),
            ),
            Some(PredicateFailure::Predicate { name, text }) => {
                (Cow::Borrowed(*name), format!("Predicate {name} failed: {text}").into())
            }
            None => ("UnknownReason".into(), Cow::Borrowed("")),
        };
        Self { reason, message, failures, detail: None }
    }

    /// `status.message` of the rejected pod.
    pub fn status_message(&self) -> String {
        format!("Pod was rejected: {}", self.message)
    }

    /// Whether node affinity is the only failure: re-read the node once and retry admission
    /// (spec 02a §6.2).
    pub fn is_node_affinity_only(&self) -> bool {
        matches!(self.failures.as_slice(), [PredicateFailure::Predicate { name: "NodeAffinity", .. }])
    }

    /// Label `reason` of `kubelet_admission_rejections_total` (spec 02a §6.4): a closed set.
    pub fn metric_reason(&self) -> &'static str {
        match KNOWN.iter().find(|known| **known == self.reason) {
            Some(known) => known,
            None if self.reason.starts_with("OutOf") => "OutOfExtendedResources",
            None => "Other",
        }
    }
}

const KNOWN: &[&str] = &[
    "AppArmor",
    "PodOSSelectorNodeLabelDoesNotMatch",
    "PodOSNotSupported",
    "InvalidNodeInfo",
    "InitContainerRestartPolicyForbidden",
    "SupplementalGroupsPolicyNotSupported",
    "UnexpectedAdmissionError",
    "UnknownReason",
    "UnexpectedPredicateFailureType",
    "OutOfcpu",
    "OutOfmemory",
    "OutOfephemeral-storage",
    "OutOfpods",
    "PodLevelResourcesNotSupported",
    "PodFeatureUnsupported",
    "node(s) had taints that the pod didn't tolerate",
    "Evicted",
    "SysctlForbidden",
    "TopologyAffinityError",
    "NodeShutdown",
    "VolumeAttachmentLimitExceeded",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metric_knows_a_closed_set_of_reasons() {
        // AC-08-21
        for (reason, label) in [
            ("OutOfcpu", "OutOfcpu"),
            ("OutOfephemeral-storage", "OutOfephemeral-storage"),
            ("OutOfexample.com/gpu", "OutOfExtendedResources"),
            ("OutOfhugepages-2Mi", "OutOfExtendedResources"),
            ("NodeAffinity", "Other"),
            ("NodePorts", "Other"),
            ("TaintToleration", "Other"),
            ("Evicted", "Evicted"),
        ] {
            assert_eq!(AdmissionRejection::new(reason, "").metric_reason(), label, "{reason}");
        }
    }
}
