//! Admission refusal: reason and message for status, event, and metric. Pure. Implements spec 02a §6.

use std::borrow::Cow;

use crate::engine::allocation::resource_fit::Insufficient;
use berth_ports::AllocationRefusal;
use berth_types::cut_at_char;

/// Maximum length of an event's message with an explanation, in bytes: the limit of `note` in `events.k8s.io`.
const EXPLAINED_MESSAGE: usize = 1024;

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
    /// Text of the reference: part of [`AdmissionRejection::status_message`] and [`AdmissionRejection::event_message`].
    pub message: Cow<'static, str>,
    /// What was missing and what would have sufficed, where CPUs or memory could not be aligned or allocated.
    pub explanation: Option<String>,
    /// Failures of the predicates; empty where another handler refused.
    pub failures: Vec<PredicateFailure>,
    /// Label `reason_detail` of `pod_infeasible_resizes_total`, where the resize handler refused.
    pub detail: Option<&'static str>,
}

impl AdmissionRejection {
    /// Creates a refusal from reason and message.
    pub fn new(reason: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self { reason: reason.into(), message: message.into(), explanation: None, failures: Vec::new(), detail: None }
    }

    /// Creates a refusal for resources that cannot be allocated (spec 06 §3.3). An error with a reason of its own is
    /// expected.
    pub fn failed_allocation(refusal: &AllocationRefusal) -> Self {
        let message = &refusal.message;
        let rejection = match refusal.reason {
            Some(reason) => Self::new(reason, message.clone()),
            None => {
                Self::new("UnexpectedAdmissionError", format!("Allocate failed due to {message}, which is unexpected"))
            }
        };
        Self { explanation: refusal.detail.clone(), ..rejection }
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
        Self { reason, message, explanation: None, failures, detail: None }
    }

    /// `status.message` of the rejected pod.
    pub fn status_message(&self) -> String {
        format!("Pod was rejected: {}", self.message)
    }

    /// Message of the event: the text of the reference, then the explanation (spec 06b §5).
    pub fn event_message(&self) -> String {
        match &self.explanation {
            None => self.message.to_string(),
            Some(text) => cut_at_char(&format!("{}: {text}", self.message), EXPLAINED_MESSAGE).to_owned(),
        }
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

    #[test]
    fn only_the_event_explains_a_refused_allocation() {
        let (long, topology) = ("é".repeat(1024), "Resources cannot be allocated with Topology locality");
        let unexpected = "Allocate failed due to no memory, which is unexpected";
        for (reason, message, detail, text, event) in [
            (Some("TopologyAffinityError"), topology, Some("cpu: 0"), topology, format!("{topology}: cpu: 0")),
            (
                Some("TopologyAffinityError"),
                topology,
                Some(long.as_str()),
                topology,
                format!("{topology}: {}", "é".repeat(485)),
            ),
            (None, "no memory", Some("node 0: 1Gi"), unexpected, format!("{unexpected}: node 0: 1Gi")),
            (None, "no memory", None, unexpected, unexpected.to_owned()),
            (Some("SMTAlignmentError"), long.as_str(), None, long.as_str(), long.clone()),
        ] {
            let (message, detail) = (message.to_owned(), detail.map(str::to_owned));
            let rejection = AdmissionRejection::failed_allocation(&AllocationRefusal { reason, message, detail });
            assert_eq!(rejection.reason, reason.unwrap_or("UnexpectedAdmissionError"));
            assert_eq!(rejection.event_message(), event);
            assert_eq!(rejection.status_message(), format!("Pod was rejected: {text}"));
        }
    }
}
