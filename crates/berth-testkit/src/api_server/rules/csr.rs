//! Certificate signing requests: validation, automatic approval, and signing. Pure, but for keys.
//!
//! Implements spec 10a §4 and §7.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::{SignedDuration, Timestamp};
use rcgen::{CertificateSigningRequestParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose, SanType};
use serde_json::{Value, json};

use super::{
    super::{refusal::Cause, view::Caller},
    fields::{list, number, set, take_over, text, texts, time},
    settings::Rules,
};

/// Signer of kubelet client certificates.
pub const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// Signer of kubelet serving certificates; never approved automatically.
pub const SERVING_SIGNER: &str = "kubernetes.io/kubelet-serving";

const SHORT: i64 = 8 * 3600;
const BACKDATED: i64 = 300;
const YEAR: i64 = 365 * 24 * 3600;

/// Prepares and validates a new request; records its creator in the spec.
pub fn create(caller: &Caller, csr: &mut Value, causes: &mut Vec<Cause>) {
    set(csr, "status", json!({}));
    let spec = &mut csr["spec"];
    set(spec, "username", caller.name.clone());
    set(spec, "groups", json!(caller.groups));
    for (key, value) in [("uid", json!(caller.uid)), ("extra", json!(caller.extra))] {
        let is_empty = value == json!("") || value == json!({});
        set(spec, key, value);
        if is_empty {
            super::fields::remove(spec, key);
        }
    }
    if text(spec, "/signerName").is_empty() {
        causes.push(Cause::required("spec.signerName", ""));
    }
    if list(spec, "/usages").is_empty() {
        causes.push(Cause::required("spec.usages", ""));
    }
    if let Err(why) = parse(&csr["spec"]) {
        causes.push(Cause::invalid("spec.request", &csr["spec"]["request"], &why));
    }
    if let Some(seconds) = number(csr, "/spec/expirationSeconds").filter(|seconds| *seconds < 600) {
        let detail = "may not specify a duration less than 600 seconds (10 minutes)";
        causes.push(Cause::invalid("spec.expirationSeconds", &json!(seconds), detail));
    }
}

/// Restricts changes: `approval` changes conditions, `status` the rest of the status, and nothing the spec.
pub fn update(subresource: &str, old: &Value, csr: &mut Value) {
    take_over(csr, "spec", old);
    match subresource {
        "approval" => {
            let conditions = csr["status"]["conditions"].clone();
            take_over(csr, "status", old);
            set(&mut csr["status"], "conditions", conditions);
        }
        "status" => {
            // The signer must not change Approved and Denied.
            let kept = |c: &&Value| ["Approved", "Denied"].contains(&text(c, "/type"));
            let mut conditions: Vec<Value> = list(old, "/status/conditions").iter().filter(kept).cloned().collect();
            conditions.extend(list(csr, "/status/conditions").iter().filter(|c| !kept(c)).cloned());
            if !conditions.is_empty() {
                set(&mut csr["status"], "conditions", conditions);
            }
        }
        _ => take_over(csr, "status", old),
    }
}

fn parse(spec: &Value) -> Result<CertificateSigningRequestParams, String> {
    let pem = STANDARD.decode(text(spec, "/request")).map_err(|err| err.to_string())?;
    let pem = String::from_utf8(pem).map_err(|err| err.to_string())?;
    if !pem.contains("-----BEGIN CERTIFICATE REQUEST-----") {
        return Err("PEM block type must be CERTIFICATE REQUEST".to_owned());
    }
    CertificateSigningRequestParams::from_pem(&pem).map_err(|err| err.to_string())
}

/// Subject of a request: common name, and organizations in order.
fn subject(params: &CertificateSigningRequestParams) -> (String, Vec<String>) {
    let (mut name, mut organizations) = (String::new(), Vec::new());
    for (kind, value) in params.params.distinguished_name.iter() {
        let value = match value {
            rcgen::DnValue::Utf8String(value) => value.clone(),
            rcgen::DnValue::PrintableString(value) => value.as_str().to_owned(),
            _ => String::new(),
        };
        match kind {
            rcgen::DnType::CommonName => name = value,
            rcgen::DnType::OrganizationName => organizations.push(value),
            _ => {}
        }
    }
    (name, organizations)
}

/// Common name in the request's subject; `None` if the request does not parse.
pub fn common_name(csr: &Value) -> Option<String> {
    parse(&csr["spec"]).ok().map(|params| subject(&params).0)
}

/// Message of the approver's condition; `None` if the request needs manual approval.
///
/// `may` returns whether the requestor may create a subresource of `certificatesigningrequests`.
pub fn approval(csr: &Value, may: impl Fn(&str) -> bool) -> Option<&'static str> {
    if !list(csr, "/status/conditions").is_empty() || text(csr, "/spec/signerName") != CLIENT_SIGNER {
        return None;
    }
    let params = parse(&csr["spec"]).ok()?;
    let (name, organizations) = subject(&params);
    let usages = texts(csr, "/spec/usages");
    let needed = ["digital signature", "client auth"].iter().all(|usage| usages.iter().any(|u| u == usage));
    let known = usages.iter().all(|u| ["digital signature", "client auth", "key encipherment"].contains(&u.as_str()));
    let is_kubelets = organizations == ["system:nodes"] && name.starts_with("system:node:");
    if !is_kubelets || !params.params.subject_alt_names.is_empty() || !needed || !known {
        return None;
    }
    if name == text(csr, "/spec/username") && may("selfnodeclient") {
        return Some("Auto approving self kubelet client certificate after SubjectAccessReview.");
    }
    may("nodeclient").then_some("Auto approving kubelet client certificate after SubjectAccessReview.")
}

/// Returns the request with an additional condition.
pub fn with_condition(csr: &Value, kind: &str, reason: &str, message: &str, now: Timestamp) -> Value {
    let mut csr = csr.clone();
    let condition = json!({"type": kind, "status": "True", "reason": reason, "message": message,
        "lastUpdateTime": time(now), "lastTransitionTime": time(now)});
    let conditions: Vec<Value> = list(&csr, "/status/conditions").iter().cloned().chain([condition]).collect();
    set(&mut csr["status"], "conditions", conditions);
    csr
}

/// Whether the request has a condition of that type.
pub fn has_condition(csr: &Value, kind: &str) -> bool {
    list(csr, "/status/conditions").iter().any(|condition| text(condition, "/type") == kind)
}

/// Returns the request with its certificate, or with a `Failed` condition.
pub fn sign(csr: &Value, rules: &Rules, now: Timestamp) -> Value {
    match certificate(csr, rules, now) {
        Ok(pem) => {
            let mut csr = csr.clone();
            set(&mut csr["status"], "certificate", STANDARD.encode(pem));
            csr
        }
        Err(why) => with_condition(csr, "Failed", "SignerValidationFailure", &why, now),
    }
}

/// Issues the certificate. It starts 5 minutes ago and ends the requested duration after that; durations below 8
/// hours count from now. If the rules set a lifetime, it starts now.
fn certificate(csr: &Value, rules: &Rules, now: Timestamp) -> Result<String, String> {
    let mut asked = parse(&csr["spec"])?;
    match text(csr, "/spec/signerName") {
        CLIENT_SIGNER if !asked.params.subject_alt_names.is_empty() => {
            return Err("DNS or IP SANs are not allowed".to_owned());
        }
        SERVING_SIGNER if !serves(&asked.params.subject_alt_names) => {
            return Err("DNS or IP subjectAltName is required".to_owned());
        }
        _ => {}
    }
    let ttl = number(csr, "/spec/expirationSeconds").unwrap_or(YEAR).clamp(600, YEAR);
    let end = if ttl < SHORT { ttl } else { ttl - BACKDATED };
    let at = |seconds: i64| now.saturating_add(SignedDuration::from_secs(seconds)).map_err(|err| err.to_string());
    let stamp = |at: Timestamp| {
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(at.as_second()).unwrap_or_default())
    };
    let life = rules.certificates_live.map(|life| (0, life.as_secs()));
    let (begins, ends) = life.unwrap_or((-BACKDATED, end));
    asked.params.not_before = stamp(at(begins)?);
    asked.params.not_after = stamp(at(ends)?);
    asked.params.key_usages.clear();
    asked.params.extended_key_usages.clear();
    for usage in texts(csr, "/spec/usages") {
        match usage.as_str() {
            "digital signature" => asked.params.key_usages.push(KeyUsagePurpose::DigitalSignature),
            "key encipherment" => asked.params.key_usages.push(KeyUsagePurpose::KeyEncipherment),
            "client auth" => asked.params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth),
            "server auth" => asked.params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth),
            other => return Err(format!("unsupported usage {other:?}")),
        }
    }
    let key = KeyPair::from_pem(&rules.authority.key).map_err(|err| err.to_string())?;
    let issuer = Issuer::from_ca_cert_pem(&rules.authority.certificate, key).map_err(|err| err.to_string())?;
    asked.signed_by(&issuer).map(|signed| signed.pem()).map_err(|err| err.to_string())
}

fn serves(names: &[SanType]) -> bool {
    names.iter().any(|name| matches!(name, SanType::DnsName(_) | SanType::IpAddress(_)))
}

/// Table tests, and requests that tests of other modules sign.
#[cfg(test)]
pub mod tests {
    use rcgen::{CertificateParams, DnType};
    use x509_parser::prelude::FromDer;

    use super::{super::tests::authority, *};

    fn now() -> Timestamp {
        "2026-01-01T00:00:00Z".parse().expect("a time")
    }

    /// Request with that common name, organization, and subject alternative names.
    pub fn request(name: &str, organization: &str, names: &[&str], usages: &[&str], user: &str) -> Value {
        let mut params =
            CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).expect("names");
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, organization);
        params.distinguished_name.push(DnType::CommonName, name);
        let pem =
            params.serialize_request(&KeyPair::generate().expect("a key")).expect("a request").pem().expect("text");
        json!({"kind": "CertificateSigningRequest", "metadata": {"name": "csr-x"}, "spec": {"request": STANDARD.encode(pem),
            "signerName": CLIENT_SIGNER, "usages": usages, "username": user}})
    }

    const USAGES: &[&str] = &["digital signature", "client auth"];
    const NODE: &str = "system:node:n";

    /// AC-10a-21, AC-10a-22, and the table of spec 10a §7.
    #[test]
    fn only_what_a_kubelet_may_ask_for_is_approved() {
        let serving = |mut csr: Value| {
            csr["spec"]["signerName"] = json!(SERVING_SIGNER);
            csr
        };
        let own = Some("Auto approving self kubelet client certificate after SubjectAccessReview.");
        let other = Some("Auto approving kubelet client certificate after SubjectAccessReview.");
        for (case, csr, may, expected) in [
            ("own", request(NODE, "system:nodes", &[], USAGES, NODE), "selfnodeclient", own),
            ("bootstrap", request(NODE, "system:nodes", &[], USAGES, "system:bootstrap:a"), "nodeclient", other),
            ("of another", request(NODE, "system:nodes", &[], USAGES, "system:node:m"), "selfnodeclient", None),
            ("may not", request(NODE, "system:nodes", &[], USAGES, NODE), "nothing", None),
            ("AC-10a-22", request(NODE, "system:nodes", &["h.example"], USAGES, NODE), "selfnodeclient", None),
            ("AC-10a-21", serving(request(NODE, "system:nodes", &[], USAGES, NODE)), "selfnodeclient", None),
            ("masters", request(NODE, "system:masters", &[], USAGES, NODE), "selfnodeclient", None),
            ("name", request("admin", "system:nodes", &[], USAGES, "admin"), "selfnodeclient", None),
            ("usages", request(NODE, "system:nodes", &[], &["client auth"], NODE), "selfnodeclient", None),
            (
                "usages",
                request(NODE, "system:nodes", &[], &["digital signature", "client auth", "server auth"], NODE),
                "selfnodeclient",
                None,
            ),
            (
                "encipherment",
                request(NODE, "system:nodes", &[], &["digital signature", "client auth", "key encipherment"], NODE),
                "selfnodeclient",
                own,
            ),
        ] {
            assert_eq!(approval(&csr, |what| what == may), expected, "{case}");
        }
        let done = with_condition(&request(NODE, "system:nodes", &[], USAGES, NODE), "Denied", "r", "m", now());
        assert_eq!(approval(&done, |_| true), None);
    }

    #[test]
    fn a_certificate_lives_as_long_as_was_asked() {
        for (asked, begins, ends) in [
            (None, -300, YEAR - 300),
            (Some(3600), -300, 3600),
            (Some(9 * 3600), -300, 9 * 3600 - 300),
            (Some(9 * YEAR), -300, YEAR - 300),
        ] {
            let mut csr = request(NODE, "system:nodes", &[], USAGES, NODE);
            if let Some(asked) = asked {
                csr["spec"]["expirationSeconds"] = json!(asked);
            }
            let signed = sign(&csr, &Rules::new(authority()), now());
            let pem = STANDARD.decode(text(&signed, "/status/certificate")).expect("encoded");
            let (_, pem) = x509_parser::pem::parse_x509_pem(&pem).expect("PEM");
            let (_, parsed) =
                x509_parser::certificate::X509Certificate::from_der(&pem.contents).expect("a certificate");
            let from_now = |time: x509_parser::time::ASN1Time| time.timestamp() - now().as_second();
            assert_eq!(
                (from_now(parsed.validity().not_before), from_now(parsed.validity().not_after)),
                (begins, ends),
                "{asked:?}"
            );
            assert_eq!(parsed.subject().to_string(), "O=system:nodes, CN=system:node:n");
            let usage = parsed.extended_key_usage().expect("readable").expect("there").value;
            assert!(usage.client_auth && !usage.server_auth);
        }
    }

    #[test]
    fn what_cannot_be_signed_fails() {
        let mut csr = request(NODE, "system:nodes", &[], &["server auth"], NODE);
        csr["spec"]["signerName"] = json!(SERVING_SIGNER);
        let signed = sign(&csr, &Rules::new(authority()), now());
        assert_eq!(signed["status"]["conditions"][0]["reason"], "SignerValidationFailure");
        assert!(signed["status"]["certificate"].is_null());
    }

    #[test]
    fn the_server_sets_the_requestor_of_a_csr() {
        let caller = Caller { name: "u".to_owned(), groups: vec!["g".to_owned()], ..Caller::default() };
        let mut csr = request(NODE, "system:nodes", &[], USAGES, "liar");
        csr["status"] = json!({"certificate": "eA=="});
        let mut causes = Vec::new();
        create(&caller, &mut csr, &mut causes);
        assert_eq!((causes.len(), &csr["spec"]["username"], &csr["status"]), (0, &json!("u"), &json!({})));
        csr["spec"]["request"] = json!("eA==");
        create(&caller, &mut csr, &mut causes);
        assert_eq!(causes.len(), 1, "{causes:?}");
    }

    #[test]
    fn subresources_change_what_is_theirs() {
        let old = json!({"spec": {"a": 1}, "status": {}});
        let wanted = json!({"spec": {"a": 2}, "status": {"certificate": "eA==", "conditions": [{"type": "Approved"}, {"type": "Failed"}]}});
        for (subresource, expected) in [
            ("", json!({})),
            ("approval", json!({"conditions": [{"type": "Approved"}, {"type": "Failed"}]})),
            ("status", json!({"certificate": "eA==", "conditions": [{"type": "Failed"}]})),
        ] {
            let mut csr = wanted.clone();
            update(subresource, &old, &mut csr);
            assert_eq!(csr, json!({"spec": {"a": 1}, "status": expected}), "{subresource}");
        }
    }
}
