//! Authentication: client certificates and bearer tokens, checked on every request.
//!
//! Implements spec 10a §6.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::WebPkiClientVerifier,
};
use serde_json::Value;
use x509_parser::{certificate::X509Certificate, prelude::FromDer, x509::AttributeTypeAndValue};

use super::{
    super::{
        refusal::Refusal,
        view::{Caller, View},
    },
    fields::{text, time_at},
    tokens,
};

const AUTHENTICATED: &str = "system:authenticated";

/// Authenticates a caller by leaf certificate (DER) or bearer token.
///
/// # Errors
/// 401: the credentials are invalid, or there are none and anonymous access is disabled.
pub fn authenticate(
    view: &dyn View,
    certificate: Option<&[u8]>,
    bearer: Option<&str>,
    user_agent: &str,
) -> Result<Caller, Refusal> {
    let caller = match (certificate.and_then(|shown| by_certificate(view, shown)), bearer) {
        (Some(caller), _) => Some(caller),
        (None, Some(token)) => by_token(view, token, &[tokens::AUDIENCE.to_owned()]).ok().map(|(caller, _)| caller),
        (None, None) if certificate.is_none() && view.rules().anonymous => {
            let groups = vec!["system:unauthenticated".to_owned()];
            Some(Caller { name: "system:anonymous".to_owned(), groups, ..Caller::default() })
        }
        (None, None) => None,
    };
    let caller = caller.ok_or_else(Refusal::unauthorized)?;
    Ok(Caller { user_agent: user_agent.to_owned(), ..caller })
}

/// Cache of client certificates with verified signatures; their validity period is checked on every request.
#[derive(Debug, Default)]
pub struct CertificateCache {
    /// Authority that they were verified against; `within` is its own validity.
    authority: String,
    within: Option<Window>,
    /// Caller and validity by certificate (DER).
    leaves: HashMap<Vec<u8>, (Caller, Window)>,
}

/// Validity period in seconds since 1970, both ends inclusive.
type Window = (i64, i64);

/// Maximum number of cached certificates; a full cache is cleared.
const LEAVES: usize = 256;

/// Caller of a client certificate that the authority signed and that is valid now.
fn by_certificate(view: &dyn View, shown: &[u8]) -> Option<Caller> {
    let rules = view.rules();
    let mut verified = rules.verified.lock().unwrap_or_else(PoisonError::into_inner);
    if verified.authority != rules.authority.certificate {
        let root = CertificateDer::from_pem_slice(rules.authority.certificate.as_bytes()).ok()?;
        let within = Some(window(&X509Certificate::from_der(&root).ok()?.1));
        *verified = CertificateCache { authority: rules.authority.certificate.clone(), within, leaves: HashMap::new() };
    }
    if !verified.leaves.contains_key(shown) {
        let found = verify(view, shown)?;
        if verified.leaves.len() >= LEAVES {
            verified.leaves.clear();
        }
        verified.leaves.insert(shown.to_vec(), found);
    }
    let (caller, own) = verified.leaves.get(shown)?;
    let now = view.now().as_second();
    let holds = |(from, until): Window| (from..=until).contains(&now);
    (holds(*own) && verified.within.is_some_and(holds)).then(|| caller.clone())
}

fn window(certificate: &X509Certificate<'_>) -> Window {
    (certificate.validity().not_before.timestamp(), certificate.validity().not_after.timestamp())
}

fn verify(view: &dyn View, shown: &[u8]) -> Option<(Caller, Window)> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(view.rules().authority.certificate.as_bytes()) {
        roots.add(root.ok()?).ok()?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().ok()?;
    let seconds = u64::try_from(view.now().as_second()).ok()?;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
    verifier.verify_client_cert(&CertificateDer::from(shown), &[], now).ok()?;
    let (_, parsed) = X509Certificate::from_der(shown).ok()?;
    let words = |value: &AttributeTypeAndValue<'_>| value.as_str().unwrap_or_default().to_owned();
    let name = parsed.subject().iter_common_name().next().map(words).filter(|name| !name.is_empty())?;
    let mut groups: Vec<String> = parsed.subject().iter_organization().map(words).collect();
    groups.push(AUTHENTICATED.to_owned());
    Some((Caller { name, groups, ..Caller::default() }, window(&parsed)))
}

/// Authenticates a token; returns its caller and the matching audiences.
///
/// # Errors
/// The reason why the token is invalid.
pub fn by_token(view: &dyn View, token: &str, audiences: &[String]) -> Result<(Caller, Vec<String>), String> {
    let ours = || audiences.iter().filter(|audience| *audience == tokens::AUDIENCE).cloned().collect::<Vec<_>>();
    if let Some((name, groups)) = view.rules().tokens.get(token) {
        let groups = groups.iter().cloned().chain([AUTHENTICATED.to_owned()]).collect();
        return Ok((Caller { name: name.clone(), groups, ..Caller::default() }, ours()));
    }
    if let Some((id, secret)) = bootstrap(token) {
        let caller = by_bootstrap(view, id, secret).ok_or("the bootstrap token is unknown or expired")?;
        return Ok((caller, ours()));
    }
    tokens::verify(view, token, audiences)
}

/// ID and secret of a token in bootstrap token format.
fn bootstrap(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.split_once('.')?;
    let plain = |text: &str| text.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    (id.len() == 6 && secret.len() == 16 && plain(id) && plain(secret)).then_some((id, secret))
}

fn by_bootstrap(view: &dyn View, id: &str, secret: &str) -> Option<Caller> {
    let stored = view.get("secrets", "kube-system", &format!("bootstrap-token-{id}"))?;
    let field = |key: &str| decoded(&stored, key);
    let is_over = stored.pointer("/metadata/deletionTimestamp").is_some();
    let expires = field("expiration");
    let is_late = !expires.is_empty() && expires.parse::<jiff::Timestamp>().map_or(true, |end| end <= view.now());
    let is_right = text(&stored, "/type") == "bootstrap.kubernetes.io/token"
        && field("token-id") == id
        && field("token-secret") == secret
        && field("usage-bootstrap-authentication") == "true";
    if is_over || is_late || !is_right {
        return None;
    }
    let extra = field("auth-extra-groups");
    let extra = extra.split(',').map(str::trim).filter(|group| group.starts_with("system:bootstrappers:"));
    let groups = ["system:bootstrappers"].into_iter().chain(extra).chain([AUTHENTICATED]).map(str::to_owned).collect();
    Some(Caller { name: format!("system:bootstrap:{id}"), groups, ..Caller::default() })
}

fn decoded(secret: &Value, key: &str) -> String {
    let bytes = STANDARD.decode(text(secret, &format!("/data/{key}"))).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_default()
}

/// Whether an object is gone as far as bound tokens are concerned: deleted for more than a minute.
pub fn is_over(view: &dyn View, object: &Value) -> bool {
    let since = time_at(object, "/metadata/deletionTimestamp");
    since.is_some_and(|since| view.now().duration_since(since).as_secs() > 60)
}

#[cfg(test)]
mod tests {
    use berth::certificates::{Authority, Validity};
    use jiff::SignedDuration;
    use serde_json::json;

    use super::{super::tests::FixedView, *};

    fn der(pem: &str) -> Vec<u8> {
        CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM").to_vec()
    }

    /// AC-10a-20: the clock jumps, the connection stays.
    #[test]
    fn a_certificate_is_judged_with_every_request() {
        let mut view = FixedView::with(&[]);
        let validity = Validity::days(view.now, 1);
        let authority = Authority::create("test", Validity::days(view.now, 30)).expect("an authority");
        let shown = der(&authority.client("system:node:n", &["system:nodes"], validity).expect("issued").certificate);
        assert_eq!(
            authenticate(&view, Some(&shown), None, "x"),
            Err(Refusal::unauthorized()),
            "of a stranger's authority"
        );
        view.rules.authority = authority.own().clone();
        let caller = authenticate(&view, Some(&shown), None, "kubelet/x").expect("known");
        assert_eq!(
            (caller.node(), caller.is_in("system:authenticated"), caller.user_agent.as_str()),
            (Some("n"), true, "kubelet/x")
        );
        view.now += SignedDuration::from_hours(24);
        let refusal = authenticate(&view, Some(&shown), None, "x").expect_err("expired");
        assert_eq!((refusal.code, refusal.message.as_str()), (401, "Unauthorized"));
        let serving = der(&authority
            .serving("n", &["127.0.0.1".to_owned()], Validity::days(view.now, 1))
            .expect("issued")
            .certificate);
        assert!(authenticate(&view, Some(&serving), None, "x").is_err(), "not for clients");
    }

    #[test]
    fn a_bootstrap_token_is_a_secret() {
        let secret = |changes: Value| {
            let mut data = json!({"token-id": "abcdef", "token-secret": "0123456789abcdef", "expiration": "2026-01-02T00:00:00Z",
                "usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:kubeadm,other"});
            for (key, value) in changes.as_object().expect("fields") {
                data[key.as_str()] = value.clone();
            }
            let encoded: serde_json::Map<String, Value> = data
                .as_object()
                .expect("fields")
                .iter()
                .map(|(key, value)| (key.clone(), STANDARD.encode(value.as_str().expect("text")).into()))
                .collect();
            json!({"metadata": {"namespace": "kube-system", "name": "bootstrap-token-abcdef"}, "type": "bootstrap.kubernetes.io/token", "data": encoded})
        };
        let token = Some("abcdef.0123456789abcdef");
        let view = FixedView::with(&[("secrets", secret(json!({})))]);
        let caller = authenticate(&view, None, token, "").expect("known");
        assert_eq!(caller.name, "system:bootstrap:abcdef");
        assert_eq!(caller.groups, ["system:bootstrappers", "system:bootstrappers:kubeadm", "system:authenticated"]);
        for wrong in [
            json!({"token-secret": "x"}),
            json!({"expiration": "2025-12-31T00:00:00Z"}),
            json!({"usage-bootstrap-authentication": "false"}),
        ] {
            let view = FixedView::with(&[("secrets", secret(wrong.clone()))]);
            assert!(authenticate(&view, None, token, "").is_err(), "{wrong}");
        }
    }

    #[test]
    fn strangers_are_anonymous_but_liars_are_not() {
        let mut view = FixedView::with(&[]);
        assert_eq!(authenticate(&view, None, None, "").expect("a stranger").name, "system:anonymous");
        assert!(authenticate(&view, None, Some("nonsense"), "").is_err());
        assert!(authenticate(&view, Some(b"nonsense"), None, "").is_err());
        assert!(
            authenticate(&view, None, Some(super::super::settings::ADMIN_TOKEN), "")
                .expect("admin")
                .is_in("system:masters")
        );
        view.rules.anonymous = false;
        assert!(authenticate(&view, None, None, "").is_err());
    }
}
