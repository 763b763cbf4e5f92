//! Pod certificates: `PodCertificateRequest` object, its outcome, and expiry warnings. Pure.
//!
//! Implements spec 07 §9.4, spec 05 (events).

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequestStatus;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};

use crate::{api::Resource, certificates::pem};
use berth_ports::CertificateRequest;
use berth_types::PodRef;

/// Time after the renewal time from which on a certificate is overdue.
const OVERDUE: SignedDuration = SignedDuration::from_mins(10);

/// Cause of a denied or failed request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FailureCause {
    /// Machine-readable reason of the condition.
    pub reason: String,
    /// Human-readable message of the condition.
    pub message: String,
}

/// Certificate chain in PEM, with its expiry and the time of its renewal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IssuedCertificate {
    /// Leaf and intermediates, PEM.
    pub chain: String,
    /// Time from which on it should be renewed.
    pub begin_refresh: Timestamp,
    /// Time of expiry.
    pub not_after: Timestamp,
}

/// Outcome of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CertificateRequestState {
    /// Pending: no condition yet.
    Waiting,
    /// The certificate was issued.
    Issued(IssuedCertificate),
    /// The request was denied; no certificate will be issued.
    Denied(FailureCause),
    /// The signer failed to issue a certificate.
    Failed(FailureCause),
}

/// Identity in a request: pod, service account, node.
#[derive(Clone, Copy, Debug)]
pub struct RequestIdentity<'a> {
    /// Pod that gets the certificate.
    pub pod: &'a PodRef,
    /// Name and UID of its service account.
    pub account: (&'a str, &'a str),
    /// Name and UID of the node.
    pub node: (&'a str, &'a str),
}

/// Builds the request object. `stub` is the empty PKCS #10 request signed by the key.
pub fn object(whose: &RequestIdentity<'_>, ask: &CertificateRequest, stub: &[u8]) -> Value {
    let (pod, wanted) = (whose.pod, &ask.projection);
    let mut spec = json!({
        "signerName": wanted.signer_name,
        "podName": &*pod.name,
        "podUID": pod.uid.as_str(),
        "serviceAccountName": whose.account.0,
        "serviceAccountUID": whose.account.1,
        "nodeName": whose.node.0,
        "nodeUID": whose.node.1,
        "stubPKCS10Request": STANDARD.encode(stub),
    });
    if let Some(seconds) = wanted.max_expiration_seconds {
        spec["maxExpirationSeconds"] = seconds.into();
    }
    if let Some(annotations) = wanted.user_annotations.as_ref().filter(|all| !all.is_empty()) {
        spec["unverifiedUserAnnotations"] = json!(annotations);
    }
    let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": &*pod.name, "uid": pod.uid.as_str()});
    json!({
        "apiVersion": Resource::POD_CERTIFICATES.api_version(),
        "kind": Resource::POD_CERTIFICATES.kind,
        "metadata": {"generateName": "req-", "namespace": &*pod.namespace, "ownerReferences": [owner]},
        "spec": spec,
    })
}

/// Derives the outcome from the conditions of a request.
pub fn outcome(status: Option<&PodCertificateRequestStatus>) -> CertificateRequestState {
    let Some(status) = status else { return CertificateRequestState::Waiting };
    for condition in status.conditions.iter().flatten().filter(|condition| condition.status == "True") {
        let why = || FailureCause { reason: condition.reason.clone(), message: condition.message.clone() };
        match condition.type_.as_str() {
            "Denied" => return CertificateRequestState::Denied(why()),
            "Failed" => return CertificateRequestState::Failed(why()),
            "Issued" => return issued(status),
            _ => {}
        }
    }
    CertificateRequestState::Waiting
}

/// An unusable certificate is a permanent failure: the issued fields are immutable.
fn issued(status: &PodCertificateRequestStatus) -> CertificateRequestState {
    let chain = status.certificate_chain.as_deref().and_then(alone);
    let times = (status.begin_refresh_at.as_ref(), status.not_after.as_ref());
    let (Some(chain), (Some(begin_refresh), Some(not_after))) = (chain, times) else {
        let message = "the issued certificate cannot be parsed".to_owned();
        return CertificateRequestState::Failed(FailureCause { reason: "InvalidCertificate".to_owned(), message });
    };
    CertificateRequestState::Issued(IssuedCertificate { chain, begin_refresh: begin_refresh.0, not_after: not_after.0 })
}

/// Concatenates the certificates of a PEM text in order and drops everything else; `None` if there is none or one is
/// malformed.
fn alone(text: &str) -> Option<String> {
    let mut chain = String::new();
    for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
        chain.push_str(&pem("CERTIFICATE", &certificate.ok()?));
    }
    (!chain.is_empty()).then_some(chain)
}

/// Expiry warning; each is emitted once per certificate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Warning {
    /// The certificate should have been renewed.
    Overdue,
    /// The certificate has expired.
    Expired,
}

impl Warning {
    /// All warnings.
    pub const ALL: [Self; 2] = [Self::Overdue, Self::Expired];

    /// Time from which on the warning applies.
    pub fn from(self, issued: &IssuedCertificate) -> Timestamp {
        match self {
            Self::Overdue => issued.begin_refresh.saturating_add(OVERDUE).unwrap_or(Timestamp::MAX),
            Self::Expired => issued.not_after,
        }
    }

    /// Reason and message of the event.
    pub fn event(self) -> (&'static str, &'static str) {
        match self {
            Self::Overdue => ("CertificateOverdueForRefresh", "PodCertificate refresh overdue"),
            Self::Expired => ("CertificateExpired", "PodCertificate expired"),
        }
    }
}

/// State of a certificate, as the metric labels it.
pub fn state(issued: &IssuedCertificate, now: Timestamp) -> &'static str {
    match Warning::ALL.into_iter().rev().find(|warning| now > warning.from(issued)) {
        Some(Warning::Expired) => "expired",
        Some(Warning::Overdue) => "overdue_for_refresh",
        None => "fresh",
    }
}

/// Counts certificates by signer and state.
pub fn counted<'a>(all: impl Iterator<Item = (&'a str, &'static str)>) -> Vec<(String, &'static str, i64)> {
    let mut counts: BTreeMap<(&str, &'static str), i64> = BTreeMap::new();
    for one in all {
        *counts.entry(one).or_default() += 1;
    }
    counts.into_iter().map(|((signer, state), count)| (signer.to_owned(), state, count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("in range")
    }

    fn status(value: Value) -> PodCertificateRequestStatus {
        serde_json::from_value(value).expect("a status")
    }

    fn condition(kind: &str, status: &str) -> Value {
        json!({"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": at(0).to_string()})
    }

    #[test]
    fn the_object_has_the_fields_of_the_projection() {
        let pod = PodRef { uid: "u".into(), name: "p".into(), namespace: "ns".into() };
        let whose = RequestIdentity { pod: &pod, account: ("sa", "s"), node: ("n", "m") };
        let ask = |projection: Value| CertificateRequest {
            volume: "v".to_owned(),
            source: 0,
            projection: serde_json::from_value(projection).expect("a projection"),
        };
        let plain = object(&whose, &ask(json!({"signerName": "a/b", "keyType": "ED25519"})), b"request");
        let mut expected = json!({
            "apiVersion": "certificates.k8s.io/v1beta1",
            "kind": "PodCertificateRequest",
            "metadata": {"generateName": "req-", "namespace": "ns", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]},
            "spec": {"signerName": "a/b", "podName": "p", "podUID": "u", "serviceAccountName": "sa",
                "serviceAccountUID": "s", "nodeName": "n", "nodeUID": "m", "stubPKCS10Request": "cmVxdWVzdA=="},
        });
        assert_eq!(plain, expected);
        let full = ask(json!({"signerName": "a/b", "keyType": "ED25519", "maxExpirationSeconds": 3600,
            "userAnnotations": {"a/b": "c"}}));
        expected["spec"]["maxExpirationSeconds"] = json!(3600);
        expected["spec"]["unverifiedUserAnnotations"] = json!({"a/b": "c"});
        assert_eq!(object(&whose, &full, b"request"), expected);
    }

    #[test]
    fn what_a_request_has_come_to() {
        let why = FailureCause { reason: "R".to_owned(), message: "m".to_owned() };
        for (conditions, expected) in [
            (json!([]), CertificateRequestState::Waiting),
            (json!([condition("Denied", "False")]), CertificateRequestState::Waiting),
            (json!([condition("Else", "True")]), CertificateRequestState::Waiting),
            (json!([condition("Denied", "True")]), CertificateRequestState::Denied(why.clone())),
            (json!([condition("Failed", "True")]), CertificateRequestState::Failed(why)),
        ] {
            assert_eq!(outcome(Some(&status(json!({"conditions": conditions})))), expected);
        }
        assert_eq!(outcome(None), CertificateRequestState::Waiting);
    }

    #[test]
    fn a_chain_is_its_certificates_alone() {
        let (one, two) = (pem("CERTIFICATE", &[1; 100]), pem("CERTIFICATE", &[2; 3]));
        let of = |chain: &str| {
            outcome(Some(&status(json!({"conditions": [condition("Issued", "True")], "certificateChain": chain,
                "beginRefreshAt": at(10).to_string(), "notAfter": at(20).to_string()}))))
        };
        let issued = |chain: String| {
            CertificateRequestState::Issued(IssuedCertificate { chain, begin_refresh: at(10), not_after: at(20) })
        };
        assert_eq!(of(&format!("# leaf\n{two}\n\nmore\n{one}{one}")), issued(format!("{two}{one}{one}")));
        for bad in ["", "no certificate", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"] {
            assert!(matches!(of(bad), CertificateRequestState::Failed(_)), "{bad}");
        }
        let timeless = json!({"conditions": [condition("Issued", "True")], "certificateChain": one});
        assert!(matches!(outcome(Some(&status(timeless))), CertificateRequestState::Failed(_)));
    }

    #[test]
    fn a_certificate_ages() {
        let issued = IssuedCertificate { chain: String::new(), begin_refresh: at(0), not_after: at(3600) };
        for (second, expected) in [
            (-5, "fresh"),
            (600, "fresh"),
            (601, "overdue_for_refresh"),
            (3600, "overdue_for_refresh"),
            (3601, "expired"),
        ] {
            assert_eq!(state(&issued, at(second)), expected, "{second}");
        }
        let ever = IssuedCertificate { begin_refresh: Timestamp::MAX, ..issued };
        assert_eq!(Warning::Overdue.from(&ever), Timestamp::MAX, "no overflow");
    }

    #[test]
    fn certificates_are_counted_by_signer_and_state() {
        let all = [("a", "fresh"), ("b", "fresh"), ("a", "fresh"), ("a", "denied")];
        let expected = [("a", "denied", 1), ("a", "fresh", 2), ("b", "fresh", 1)];
        let expected: Vec<_> = expected.map(|(signer, state, count)| (signer.to_owned(), state, count)).into();
        assert_eq!(counted(all.into_iter()), expected);
    }
}
