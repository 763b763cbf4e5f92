//! A signing request as the API server tells it, and how far it has come. Pure. Spec 10 §4.10.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;

/// What counts of a `CertificateSigningRequest`, of any version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Signing {
    /// Who it is.
    pub metadata: Identity,
    /// What was asked.
    pub spec: Asked,
    /// What came of it.
    pub status: Answered,
}

/// Which object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Its version.
    pub resource_version: String,
}

/// What was asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Asked {
    /// The request: PEM, in base64.
    pub request: String,
    /// Who is to sign.
    pub signer_name: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Answered {
    /// Decisions.
    pub conditions: Vec<Decision>,
    /// The certificate: PEM, in base64.
    pub certificate: String,
}

/// One decision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Decision {
    /// `Approved`, `Denied`, `Failed`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Machine-readable.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// A list of them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SigningList {
    /// Whose version a watch begins at.
    pub metadata: Identity,
    /// The requests.
    pub items: Vec<Signing>,
}

/// How far a request has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nobody has decided, or nobody has signed.
    Waiting,
    /// There is a certificate (chain), PEM.
    Issued(String),
    /// There will be none, and why.
    Refused(String),
}

impl Signing {
    /// How far it has come.
    pub fn progress(&self) -> Progress {
        let told = |kind: &str| self.status.conditions.iter().find(|decision| decision.kind == kind);
        let because = |what: &str, decision: &Decision| {
            let Decision { reason, message, .. } = decision;
            Progress::Refused(format!("certificate signing request {what}, reason: {reason}, message: {message}"))
        };
        if let Some(decision) = told("Denied") {
            return because("is denied", decision);
        }
        if let Some(decision) = told("Failed") {
            return because("failed", decision);
        }
        if told("Approved").is_none() || self.status.certificate.is_empty() {
            return Progress::Waiting;
        }
        match decode(&self.status.certificate) {
            Some(pem) => Progress::Issued(pem),
            None => Progress::Refused("the certificate of the signing request is no text in base64".to_owned()),
        }
    }

    /// The certificate that stands in it, decoded; whether approved or not.
    pub fn certificate(&self) -> Option<String> {
        decode(&self.status.certificate).filter(|pem| !pem.is_empty())
    }

    /// The request, PEM.
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
        let refused = |text: &str| Progress::Refused(text.to_owned());
        let decision = |kind: &str| json!({"type": kind, "status": "True", "reason": "R", "message": "m"});
        for (status, expected) in [
            (json!({}), Progress::Waiting),
            (json!({"conditions": [decision("Approved")]}), Progress::Waiting), // the first MODIFIED
            (json!({"certificate": "UEVN"}), Progress::Waiting),
            (json!({"conditions": [decision("Approved")], "certificate": "UEVN"}), Progress::Issued("PEM".to_owned())),
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
                refused("the certificate of the signing request is no text in base64"),
            ),
        ] {
            let signing: Signing = serde_json::from_value(json!({"status": status})).expect("an object");
            assert_eq!(signing.progress(), expected, "{status}");
        }
    }
}
