//! Service account tokens: TokenRequest issues them, TokenReview and authentication verify them.
//!
//! Implements spec 10a §8.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jiff::SignedDuration;
use rcgen::{KeyPair, PublicKeyData, SigningKey};
use rustls::SignatureScheme;
use serde_json::{Value, json};

use super::{
    super::{
        refusal::{Cause, Refusal},
        view::{Caller, Reply, Request, View},
    },
    authentication::is_over,
    fields::{number, set, text, texts, time},
    node_restriction,
};

/// Audience of the server itself, and issuer of its tokens.
pub const AUDIENCE: &str = "https://kubernetes.default.svc.cluster.local";
/// Requested lifetime of a pod's token volume in seconds, and the actual lifetime of such a token.
const REQUESTED: i64 = 3607;
const EXTENDED: i64 = 365 * 24 * 3600;

/// Handles a TokenRequest: issues a token, bound to a pod if the request asks for it.
///
/// # Errors
/// 400, 403, 404, 409, 422.
pub fn request(view: &dyn View, request: &Request) -> Result<Reply, Refusal> {
    let mut body = request.body.clone().unwrap_or_default();
    node_restriction::token(view, request, &body)?;
    let (namespace, name) = (&request.namespace, &request.name);
    let account =
        view.get("serviceaccounts", namespace, name).ok_or_else(|| Refusal::not_found("serviceaccounts", name))?;
    if body.pointer("/spec/expirationSeconds").is_none() {
        set(&mut body["spec"], "expirationSeconds", 3600);
    }
    if texts(&body, "/spec/audiences").is_empty() {
        set(&mut body["spec"], "audiences", json!([AUDIENCE]));
    }
    check(namespace, name, &body)?;
    let requested = text(&body, "/metadata/uid");
    let uid = text(&account, "/metadata/uid");
    if !requested.is_empty() && requested != uid {
        let why =
            format!("the UID in the token request ({requested}) does not match the UID of the service account ({uid})");
        return Err(Refusal::conflict("TokenRequest.authentication.k8s.io", name, &why));
    }
    let pod = bound_pod(view, namespace, name, &body)?;
    let asked = number(&body, "/spec/expirationSeconds").unwrap_or_default();
    let seconds = view.rules().token_seconds.map_or(asked, |most| asked.min(most));
    set(&mut body["spec"], "expirationSeconds", seconds);
    let audiences = texts(&body, "/spec/audiences");
    let token = mint(view, &account, pod.as_deref(), &audiences, seconds);
    let expires = view.now().saturating_add(SignedDuration::from_secs(seconds)).unwrap_or(view.now());
    let answer = json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": time(view.now())},
        "spec": body["spec"], "status": {"token": token, "expirationTimestamp": time(expires)}});
    Ok(Reply { code: 201, body: answer, writes: Vec::new() })
}

fn check(namespace: &str, name: &str, body: &Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    for (field, expected, what) in
        [("name", name, "service account name"), ("namespace", namespace, "service account namespace")]
    {
        let value = text(body, &format!("/metadata/{field}"));
        if !value.is_empty() && value != expected {
            let detail = format!("must match the {what} if specified");
            causes.push(Cause::invalid(&format!("metadata.{field}"), &json!(value), &detail));
        }
    }
    let field = "spec.expirationSeconds";
    match number(body, "/spec/expirationSeconds").unwrap_or_default() {
        short if short < 600 => {
            causes.push(Cause::invalid(field, &json!(short), "may not specify a duration less than 10 minutes"));
        }
        long if long > 1 << 32 => {
            causes.push(Cause::invalid(field, &json!(long), "may not specify a duration larger than 2^32 seconds"));
        }
        _ => {}
    }
    if causes.is_empty() { Ok(()) } else { Err(Refusal::invalid("TokenRequest.authentication.k8s.io", name, causes)) }
}

fn bound_pod(
    view: &dyn View,
    namespace: &str,
    account: &str,
    body: &Value,
) -> Result<Option<std::sync::Arc<Value>>, Refusal> {
    let bound = |field: &str| text(body, &format!("/spec/boundObjectRef/{field}"));
    match bound("kind") {
        "" => return Ok(None),
        "Pod" => {}
        other => return Err(Refusal::bad_request(format!("cannot bind token to object of type {other}"))),
    }
    let name = bound("name");
    let pod = view.get("pods", namespace, name).ok_or_else(|| Refusal::not_found("pods", name))?;
    if text(&pod, "/spec/serviceAccountName") != account {
        let text = format!(
            "cannot bind token for serviceaccount \"{account}\" to pod running with different serviceaccount name."
        );
        return Err(Refusal::bad_request(text));
    }
    let uid = bound("uid");
    if !uid.is_empty() && uid != text(&pod, "/metadata/uid") {
        let why = format!(
            "the UID in the bound object reference ({uid}) does not match the UID in record. \
             The object might have been deleted and then recreated"
        );
        return Err(Refusal::conflict("Pod", name, &why));
    }
    Ok(Some(pod))
}

/// Issues a signed token. A token for a pod's own token volume lives longer than its response states.
fn mint(view: &dyn View, account: &Value, pod: Option<&Value>, audiences: &[String], seconds: i64) -> String {
    let now = view.now().as_second();
    let who = |object: &Value| json!({"name": text(object, "/metadata/name"), "uid": text(object, "/metadata/uid")});
    let namespace = text(account, "/metadata/namespace");
    let mut bound = json!({"namespace": namespace, "serviceaccount": who(account)});
    let mut lives = seconds;
    if let Some(pod) = pod {
        set(&mut bound, "pod", who(pod));
        let node = text(pod, "/spec/nodeName");
        if !node.is_empty() {
            let stored = view.get("nodes", "", node);
            set(&mut bound, "node", stored.map_or_else(|| json!({"name": node}), |node| who(&node)));
        }
        if seconds == REQUESTED && audiences == [AUDIENCE] {
            set(&mut bound, "warnafter", now + REQUESTED);
            lives = EXTENDED;
        }
    }
    let name = text(account, "/metadata/name");
    let id = format!("{:016x}{:016x}", view.random(), view.random());
    let claims = json!({"aud": audiences, "exp": now + lives, "iat": now, "iss": AUDIENCE, "jti": id, "nbf": now,
        "sub": format!("system:serviceaccount:{namespace}:{name}"), "kubernetes.io": bound});
    sign(&view.rules().token_key, &claims)
}

fn sign(key: &str, claims: &Value) -> String {
    let header = json!({"alg": "ES256", "kid": "test", "typ": "JWT"});
    let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", encode(&header), encode(claims));
    let signature = KeyPair::from_pem(key).and_then(|key| key.sign(signed.as_bytes())).unwrap_or_default();
    let signature = raw_signature(&signature).unwrap_or_default();
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

/// Converts a DER signature to two 32-byte numbers: JWTs do not use DER.
fn raw_signature(der: &[u8]) -> Option<Vec<u8>> {
    let mut raw = Vec::with_capacity(64);
    let mut rest = der.get(2..)?;
    for _ in 0..2 {
        let length = usize::from(*rest.get(1)?);
        let number = rest.get(2..2 + length)?;
        let digits =
            number.iter().position(|byte| *byte != 0).and_then(|first| number.get(first..)).unwrap_or_default();
        raw.extend(std::iter::repeat_n(0, 32_usize.checked_sub(digits.len())?));
        raw.extend(digits);
        rest = rest.get(2 + length..)?;
    }
    Some(raw)
}

fn der_signature(raw: &[u8]) -> Option<Vec<u8>> {
    let mut numbers = Vec::new();
    for number in [raw.get(..32)?, raw.get(32..64)?] {
        let first = number.iter().position(|byte| *byte != 0).unwrap_or(31);
        let digits = number.get(first..)?;
        let sign = usize::from(digits.first().is_some_and(|byte| *byte >= 0x80));
        numbers.extend([2, u8::try_from(digits.len() + sign).ok()?]);
        numbers.extend(std::iter::repeat_n(0, sign));
        numbers.extend(digits);
    }
    let mut der = vec![0x30, u8::try_from(numbers.len()).ok()?];
    der.extend(numbers);
    (raw.len() == 64).then_some(der)
}

fn is_signed(key: &str, signed: &[u8], signature: &str) -> Option<bool> {
    let key = KeyPair::from_pem(key).ok()?;
    let signature = der_signature(&URL_SAFE_NO_PAD.decode(signature).ok()?)?;
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
    let ours = algorithms.mapping.iter().find(|(scheme, _)| *scheme == SignatureScheme::ECDSA_NISTP256_SHA256)?.1;
    Some(ours.iter().any(|algorithm| algorithm.verify_signature(key.der_bytes(), signed, &signature).is_ok()))
}

/// Verifies a token; returns its account and the matching audiences.
///
/// # Errors
/// The reason why the token is invalid.
pub fn verify(view: &dyn View, token: &str, audiences: &[String]) -> Result<(Caller, Vec<String>), String> {
    let refuse = |why: &str| Err(format!("[invalid bearer token, {why}]"));
    let Some((signed, signature)) = token.rsplit_once('.') else { return refuse("not a token") };
    if !is_signed(&view.rules().token_key, signed.as_bytes(), signature).unwrap_or_default() {
        return refuse("the signature is wrong");
    }
    let claims = signed.split_once('.').and_then(|(_, claims)| URL_SAFE_NO_PAD.decode(claims).ok());
    let claims: Value = claims.and_then(|claims| serde_json::from_slice(&claims).ok()).unwrap_or_default();
    let now = view.now().as_second();
    let at = |claim: &str| number(&claims, &format!("/{claim}")).unwrap_or_default();
    if now >= at("exp") || now < at("nbf") {
        return refuse("service account token has expired");
    }
    let own = texts(&claims, "/aud");
    let shared: Vec<String> = audiences.iter().filter(|audience| own.contains(audience)).cloned().collect();
    if shared.is_empty() {
        return refuse(&format!("token audiences {own:?} is invalid for the target audiences {audiences:?}"));
    }
    match still_bound(view, &claims) {
        Ok(caller) => Ok((caller, shared)),
        Err(why) => refuse(&why),
    }
}

/// Returns the account if it and the bound pod are still those of the claims.
fn still_bound(view: &dyn View, claims: &Value) -> Result<Caller, String> {
    let bound = &claims["kubernetes.io"];
    let (namespace, name) = (text(bound, "/namespace"), text(bound, "/serviceaccount/name"));
    for (resource, field) in [("serviceaccounts", "serviceaccount"), ("pods", "pod")] {
        let Some(reference) = bound.get(field) else { continue };
        let object = view.get(resource, namespace, text(reference, "/name"));
        let object = object.filter(|object| object["metadata"]["uid"] == reference["uid"] && !is_over(view, object));
        object.ok_or_else(|| format!("{field} {} has been deleted", text(reference, "/name")))?;
    }
    let mut extra: std::collections::BTreeMap<String, Vec<String>> = std::collections::BTreeMap::new();
    let mut add_extra = |key: &str, value: &str| {
        if !value.is_empty() {
            extra.insert(format!("authentication.kubernetes.io/{key}"), vec![value.to_owned()]);
        }
    };
    add_extra("credential-id", &format!("JTI={}", text(claims, "/jti")));
    for (key, pointer) in
        [("pod-name", "/pod/name"), ("pod-uid", "/pod/uid"), ("node-name", "/node/name"), ("node-uid", "/node/uid")]
    {
        add_extra(key, text(bound, pointer));
    }
    let space = format!("system:serviceaccounts:{namespace}");
    Ok(Caller {
        name: format!("system:serviceaccount:{namespace}:{name}"),
        uid: text(bound, "/serviceaccount/uid").to_owned(),
        groups: vec!["system:serviceaccounts".to_owned(), space, "system:authenticated".to_owned()],
        extra,
        user_agent: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            access,
            tests::{FixedView, node},
        },
        *,
    };

    fn world() -> FixedView {
        let account = json!({"metadata": {"name": "sa", "namespace": "a", "uid": "s"}});
        let pod = json!({"metadata": {"name": "p", "namespace": "a", "uid": "u"}, "spec": {"nodeName": "n", "serviceAccountName": "sa",
            "volumes": [{"projected": {"sources": [{"serviceAccountToken": {}}]}}]}});
        let node = json!({"metadata": {"name": "n", "uid": "i"}});
        FixedView::with(&[("serviceaccounts", account), ("pods", pod), ("nodes", node)])
    }

    fn ask(spec: Value) -> Request {
        let body = Some(json!({"spec": spec}));
        Request {
            caller: node("n"),
            namespace: "a".to_owned(),
            name: "sa".to_owned(),
            resource: "serviceaccounts".to_owned(),
            body,
            ..Request::default()
        }
    }

    fn for_pod(seconds: i64) -> Request {
        ask(
            json!({"expirationSeconds": seconds, "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "p", "uid": "u"}}),
        )
    }

    fn claims(token: &str) -> Value {
        let claims = token.split('.').nth(1).expect("three parts");
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).expect("encoded")).expect("JSON")
    }

    /// AC-10a-24.
    #[test]
    fn a_pod_token_outlives_its_reported_expiration() {
        let view = world();
        let now = view.now.as_second();
        let body = request(&view, &for_pod(3607)).expect("a token").body;
        assert_eq!(body["status"]["expirationTimestamp"], "2026-01-01T01:00:07Z");
        let payload = claims(text(&body, "/status/token"));
        assert_eq!(
            (payload["exp"].as_i64(), payload["kubernetes.io"]["warnafter"].as_i64()),
            (Some(now + EXTENDED), Some(now + 3607))
        );
        assert_eq!(payload["kubernetes.io"]["node"], json!({"name": "n", "uid": "i"}));
        assert_eq!((&payload["sub"], &payload["aud"]), (&json!("system:serviceaccount:a:sa"), &json!([AUDIENCE])));
        let short = claims(text(&request(&view, &for_pod(600)).expect("a token").body, "/status/token"));
        assert_eq!((short["exp"].as_i64(), &short["kubernetes.io"]["warnafter"]), (Some(now + 600), &Value::Null));
    }

    #[test]
    fn the_server_may_grant_less_than_is_asked_for() {
        let mut view = world();
        view.rules.token_seconds = Some(10);
        let body = request(&view, &for_pod(3607)).expect("a token").body;
        assert_eq!(body["status"]["expirationTimestamp"], "2026-01-01T00:00:10Z");
        assert_eq!(body["spec"]["expirationSeconds"], 10);
        let payload = claims(text(&body, "/status/token"));
        assert_eq!(payload["exp"].as_i64(), Some(view.now.as_second() + 10));
        view.rules.token_seconds = Some(7200);
        let body = request(&view, &for_pod(3607)).expect("a token").body;
        assert_eq!(body["spec"]["expirationSeconds"], 3607);
    }

    #[test]
    fn tokens_that_cannot_be_are_refused() {
        let view = world();
        let mut admin = ask(json!({}));
        admin.caller = Caller::default();
        let with = |body: Value| Request { body: Some(body), ..admin.clone() };
        let bound = |name: &str, uid: &str| json!({"spec": {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid}}});
        for (request_, code, expected) in [
            (
                for_pod(599),
                422,
                "TokenRequest.authentication.k8s.io \"sa\" is invalid: spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 10 minutes",
            ),
            (Request { name: "gone".to_owned(), ..admin.clone() }, 404, "serviceaccounts \"gone\" not found"),
            (
                with(json!({"metadata": {"uid": "x"}})),
                409,
                "Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"sa\": the UID in the token request (x) does not match the UID of the service account (s)",
            ),
            (
                with(json!({"metadata": {"name": "x"}})),
                422,
                "TokenRequest.authentication.k8s.io \"sa\" is invalid: metadata.name: Invalid value: \"x\": must match the service account name if specified",
            ),
            (with(bound("gone", "u")), 404, "pods \"gone\" not found"),
            (
                with(bound("p", "x")),
                409,
                "Operation cannot be fulfilled on Pod \"p\": the UID in the bound object reference (x) does not match the UID in record. The object might have been deleted and then recreated",
            ),
            (ask(json!({})), 403, "serviceaccounts \"sa\" is forbidden: node requested token not bound to a pod"),
        ] {
            let refusal = request(&view, &request_).expect_err(expected);
            assert_eq!((refusal.code, refusal.message.as_str()), (code, expected));
        }
        let other = json!({"metadata": {"name": "q", "namespace": "a"}, "spec": {"serviceAccountName": "x"}});
        let account = json!({"metadata": {"name": "sa", "namespace": "a", "uid": "s"}});
        let refusal =
            request(&FixedView::with(&[("serviceaccounts", account), ("pods", other)]), &with(bound("q", "")))
                .expect_err("another account");
        assert_eq!(
            refusal.message,
            "cannot bind token for serviceaccount \"sa\" to pod running with different serviceaccount name."
        );
    }

    /// AC-10a-25, and other reasons why a token is invalid.
    #[test]
    fn a_token_ends_with_its_pod() {
        let view = world();
        let token = text(&request(&view, &for_pod(600)).expect("a token").body, "/status/token").to_owned();
        let review = |view: &FixedView, token: &str, audiences: Value| {
            let body = json!({"spec": {"token": token, "audiences": audiences}});
            access::token_review(view, &Request { body: Some(body), ..Request::default() }).expect("answered").body["status"].clone()
        };
        let status = review(&view, &token, json!(null));
        assert_eq!(
            (&status["authenticated"], &status["user"]["username"]),
            (&json!(true), &json!("system:serviceaccount:a:sa"))
        );
        assert_eq!(
            status["user"]["groups"],
            json!(["system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"])
        );
        assert_eq!(status["user"]["extra"]["authentication.kubernetes.io/pod-name"], json!(["p"]));
        assert_eq!(status["audiences"], json!([AUDIENCE]));
        let key = view.rules.token_key.clone();
        let fine =
            |view: &FixedView, token: &str, audiences: Value| review(view, token, audiences)["authenticated"] == true;
        assert!(!fine(&view, &token, json!(["other"])), "audience");
        assert!(!fine(&view, &format!("{token}x"), json!(null)), "signature");
        for (since, expected) in [(59, true), (61, false)] {
            let account = json!({"metadata": {"name": "sa", "namespace": "a", "uid": "s"}});
            let ended = time(view.now - SignedDuration::from_secs(since));
            let pod = json!({"metadata": {"name": "p", "namespace": "a", "uid": "u", "deletionTimestamp": ended}});
            let mut later = FixedView::with(&[("serviceaccounts", account), ("pods", pod)]);
            later.rules.token_key.clone_from(&key);
            assert_eq!(fine(&later, &token, json!(null)), expected, "{since} s");
        }
        let account =
            |uid: &str| ("serviceaccounts", json!({"metadata": {"name": "sa", "namespace": "a", "uid": uid}}));
        let pod = ("pods", json!({"metadata": {"name": "p", "namespace": "a", "uid": "u"}}));
        for (objects, expected) in
            [(vec![account("s")], false), (vec![account("new"), pod.clone()], false), (vec![account("s"), pod], true)]
        {
            let mut other = FixedView::with(&objects);
            other.rules.token_key.clone_from(&key);
            assert_eq!(fine(&other, &token, json!(null)), expected, "{objects:?}");
            other.now += SignedDuration::from_secs(601);
            assert!(!fine(&other, &token, json!(null)), "expired");
        }
    }
}
