//! `CertificateSigningRequest` as the API server returns it, and its progress. Pure.
//!
//! Implements spec 10 §4.10.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;

/// Fields of a `CertificateSigningRequest` that Berth uses; the same in all versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CsrObject {
    /// Object metadata.
    pub metadata: SigningMetadata,
    /// `spec`.
    pub spec: SigningSpec,
    /// `status`.
    pub status: SigningStatus,
}

/// Object or list metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SigningMetadata {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
}

/// `spec` of a signing request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SigningSpec {
    /// Signing request: PEM in base64.
    pub request: String,
    /// `spec.signerName`, such as `kubernetes.io/kubelet-serving`.
    pub signer_name: String,
}

/// `status` of a signing request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SigningStatus {
    /// `Approved`, `Denied`, and `Failed` conditions; empty until an approver or the signer acts.
    pub conditions: Vec<SigningCondition>,
    /// Issued certificate: PEM in base64; empty until signed.
    pub certificate: String,
}

/// Condition of a signing request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SigningCondition {
    /// Type: `Approved`, `Denied`, `Failed`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Machine-readable reason.
    pub reason: String,
    /// Human-readable message.
    pub message: String,
}

/// List of signing requests.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SigningList {
    /// List metadata; a watch starts at its resource version.
    pub metadata: SigningMetadata,
    /// Signing requests.
    pub items: Vec<CsrObject>,
}

/// Progress of a signing request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SigningProgress {
    /// Pending: not approved, or not signed.
    Waiting,
    /// Issued certificate (chain), PEM.
    Issued(String),
    /// Denied or failed, with the cause.
    Refused(String),
}

impl CsrObject {
    /// Derives the progress from conditions and certificate.
    pub fn progress(&self) -> SigningProgress {
        let condition = |kind: &str| self.status.conditions.iter().find(|decision| decision.kind == kind);
        let because = |what: &str, decision: &SigningCondition| {
            let SigningCondition { reason, message, .. } = decision;
            SigningProgress::Refused(format!(
                "certificate signing request {what}, reason: {reason}, message: {message}"
            ))
        };
        if let Some(decision) = condition("Denied") {
            return because("is denied", decision);
        }
        if let Some(decision) = condition("Failed") {
            return because("failed", decision);
        }
        if condition("Approved").is_none() || self.status.certificate.is_empty() {
            return SigningProgress::Waiting;
        }
        match decode(&self.status.certificate) {
            Some(pem) => SigningProgress::Issued(pem),
            None => {
                SigningProgress::Refused("the certificate in the signing request status is not valid base64".to_owned())
            }
        }
    }

    /// Decoded certificate; approved or not.
    pub fn certificate(&self) -> Option<String> {
        decode(&self.status.certificate).filter(|pem| !pem.is_empty())
    }

    /// Signing request, PEM.
    pub fn request(&self) -> Option<String> {
        decode(&self.spec.request)
    }
}

fn decode(base64: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(base64).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn how_far_a_request_has_come() {
        let refused = |text: &str| SigningProgress::Refused(text.to_owned());
        let decision = |kind: &str| json!({"type": kind, "status": "True", "reason": "R", "message": "m"});
        for (status, expected) in [
            (json!({}), SigningProgress::Waiting),
            (json!({"conditions": [decision("Approved")]}), SigningProgress::Waiting), // the first MODIFIED
            (json!({"certificate": "UEVN"}), SigningProgress::Waiting),
            (
                json!({"conditions": [decision("Approved")], "certificate": "UEVN"}),
                SigningProgress::Issued("PEM".to_owned()),
            ),
            (
                json!({"conditions": [decision("Approved"), decision("Denied")], "certificate": "UEVN"}),
                refused("certificate signing request is denied, reason: R, message: m"),
            ),
            (
                json!({"conditions": [decision("Failed")]}),
                refused("certificate signing request failed, reason: R, message: m"),
            ),
            (
                json!({"conditions": [decision("Approved")], "certificate": "%"}),
                refused("the certificate in the signing request status is not valid base64"),
            ),
        ] {
            let signing: CsrObject = serde_json::from_value(json!({"status": status})).expect("an object");
            assert_eq!(signing.progress(), expected, "{status}");
        }
    }
}
