//! Validation of an existing service account token by its claims. Pure.
//!
//! Decides whether a token found in a pod's volume can still be used. Its signature is not verified: anyone who can
//! write to the volume controls the pod anyway, and a forged token affects only that pod, whose requests are rejected.
//!
//! Implements spec 10 §11, spec 10a §22.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;

/// Tolerated clock skew between nodes and servers, in seconds.
const SKEW: i64 = 60;

/// Expected claims of a token.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedClaims<'a> {
    /// Namespace of the pod and of the service account.
    pub namespace: &'a str,
    /// Name of the service account.
    pub account: &'a str,
    /// UID of the pod it is bound to.
    pub pod: &'a str,
    /// Audience; empty for the API server, whose own audience is not known here.
    pub audience: &'a str,
    /// Requested lifetime, in seconds.
    pub seconds: Option<i64>,
}

/// Validity of a token, in seconds of wall time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenValidity {
    /// Expiry that the server reported when it issued the token, since the epoch.
    pub expires: i64,
    /// Granted lifetime.
    pub seconds: i64,
}

/// Why a token is unusable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TokenRejection {
    /// The text is no service account token.
    #[error("not a service account token")]
    NoToken,
    /// It is bound to another pod or service account.
    #[error("bound to pod {pod:?} and service account {namespace}/{account}")]
    OtherPod {
        /// UID of the pod.
        pod: String,
        /// Namespace of the service account.
        namespace: String,
        /// Name of the service account.
        account: String,
    },
    /// It has another audience.
    #[error("issued for audiences {0:?}")]
    OtherAudience(Vec<String>),
    /// It was requested with another lifetime.
    #[error("lifetime is {0}s")]
    OtherLifetime(i64),
    /// It was issued in the future: the clock of the node or of the server was wrong, so its age is unknown.
    #[error("issued in the future")]
    FromTheFuture,
    /// It has expired.
    #[error("expired")]
    Expired,
}

#[derive(Deserialize)]
struct Claims {
    aud: Audiences,
    exp: i64,
    iat: i64,
    #[serde(rename = "kubernetes.io")]
    bound: KubernetesClaims,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct KubernetesClaims {
    namespace: String,
    serviceaccount: BoundObjectRef,
    pod: BoundObjectRef,
    /// Reported expiry, if the actual one (`exp`) is later: the server logs clients that use the token in between, and
    /// does not reject them.
    warnafter: Option<i64>,
}

#[derive(Deserialize)]
struct BoundObjectRef {
    name: String,
    uid: String,
}

/// Validates a token and returns its validity.
///
/// # Errors
/// The token is unusable: a new one must be requested.
pub fn validate(token: &str, whose: &ExpectedClaims<'_>, now: i64) -> Result<TokenValidity, TokenRejection> {
    let Claims { aud, exp, iat, bound } = claims(token).ok_or(TokenRejection::NoToken)?;
    let audiences = match aud {
        Audiences::One(one) => vec![one],
        Audiences::Many(many) => many,
    };
    // A service account that was recreated cannot be detected here: the server rejects the next renewal.
    let is_own = bound.pod.uid == whose.pod
        && bound.namespace == whose.namespace
        && bound.serviceaccount.name == whose.account
        && !bound.serviceaccount.uid.is_empty();
    if !is_own {
        let (namespace, account) = (bound.namespace, bound.serviceaccount.name);
        return Err(TokenRejection::OtherPod { pod: bound.pod.uid, namespace, account });
    }
    let is_for = if whose.audience.is_empty() { !audiences.is_empty() } else { audiences == [whose.audience] };
    if !is_for {
        return Err(TokenRejection::OtherAudience(audiences));
    }
    let expires = bound.warnafter.unwrap_or(exp);
    let seconds = expires.saturating_sub(iat);
    // The server may grant less than requested, never more.
    if seconds <= 0 || whose.seconds.is_some_and(|asked| seconds > asked) {
        return Err(TokenRejection::OtherLifetime(seconds));
    }
    if iat > now.saturating_add(SKEW) {
        return Err(TokenRejection::FromTheFuture);
    }
    if now > expires {
        return Err(TokenRejection::Expired);
    }
    Ok(TokenValidity { expires, seconds })
}

fn claims(token: &str) -> Option<Claims> {
    let mut parts = token.split('.');
    let (_, claims, signature) = (parts.next()?, parts.next()?, parts.next()?);
    if signature.is_empty() || parts.next().is_some() {
        return None;
    }
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn whose() -> ExpectedClaims<'static> {
        ExpectedClaims { namespace: "ns", account: "sa", pod: "u", audience: "", seconds: Some(3607) }
    }

    /// Claims of a token that was issued `age` seconds ago.
    fn claims_of(age: i64, lives: i64) -> Value {
        let made = NOW - age;
        json!({"aud": ["https://api"], "iat": made, "nbf": made, "exp": made + lives, "iss": "i", "sub": "s",
            "kubernetes.io": {"namespace": "ns", "pod": {"name": "p", "uid": "u"},
                "serviceaccount": {"name": "sa", "uid": "s"}}})
    }

    fn token(claims: &Value) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims.to_string()))
    }

    fn changed(pointer: &str, value: Value) -> String {
        let mut claims = claims_of(100, 3607);
        *claims.pointer_mut(pointer).expect("a claim") = value;
        token(&claims)
    }

    #[test]
    fn a_token_serves_to_its_end() {
        let fine = |age, lives| validate(&token(&claims_of(age, lives)), &whose(), NOW);
        assert_eq!(fine(100, 3607), Ok(TokenValidity { expires: NOW + 3507, seconds: 3607 }));
        assert_eq!(fine(100, 600), Ok(TokenValidity { expires: NOW + 500, seconds: 600 }), "granted less");
        assert_eq!(fine(-SKEW, 3607), Ok(TokenValidity { expires: NOW + 3667, seconds: 3607 }), "clocks differ");
        assert_eq!(fine(600, 600), Ok(TokenValidity { expires: NOW, seconds: 600 }), "its last second");
        assert_eq!(fine(601, 600), Err(TokenRejection::Expired));
        assert_eq!(fine(-SKEW - 1, 3607), Err(TokenRejection::FromTheFuture));
        assert_eq!(fine(0, 3608), Err(TokenRejection::OtherLifetime(3608)));
        assert_eq!(fine(0, 0), Err(TokenRejection::OtherLifetime(0)));
    }

    #[test]
    fn the_reported_expiry_applies_if_the_token_is_valid_longer() {
        // Spec 10 §4.7: 3607 s with the server's own audience.
        let mut claims = claims_of(100, 365 * 24 * 3600);
        claims["kubernetes.io"]["warnafter"] = json!(NOW - 100 + 3607);
        assert_eq!(validate(&token(&claims), &whose(), NOW), Ok(TokenValidity { expires: NOW + 3507, seconds: 3607 }));
        claims["kubernetes.io"]["warnafter"] = json!(NOW - 1);
        assert_eq!(validate(&token(&claims), &whose(), NOW), Err(TokenRejection::Expired));
    }

    #[test]
    fn a_token_of_another_pod_is_rejected() {
        for (case, token) in [
            ("pod", changed("/kubernetes.io/pod/uid", json!("v"))),
            ("namespace", changed("/kubernetes.io/namespace", json!("other"))),
            ("account", changed("/kubernetes.io/serviceaccount/name", json!("other"))),
            ("no account", changed("/kubernetes.io/serviceaccount/uid", json!(""))),
        ] {
            let unfit = validate(&token, &whose(), NOW);
            assert!(matches!(unfit, Err(TokenRejection::OtherPod { .. })), "{case}: {unfit:?}");
        }
    }

    #[test]
    fn a_token_is_for_one_audience() {
        for (asked, audiences, fits) in [
            ("", json!(["a", "b"]), true),
            ("", json!([]), false),
            ("a", json!(["a"]), true),
            ("a", json!("a"), true),
            ("a", json!(["a", "b"]), false),
            ("a", json!(["b"]), false),
        ] {
            let judged =
                validate(&changed("/aud", audiences.clone()), &ExpectedClaims { audience: asked, ..whose() }, NOW);
            assert_eq!(judged.is_ok(), fits, "{asked:?} {audiences}: {judged:?}");
        }
    }

    #[test]
    fn what_is_no_token_is_not_taken_for_one() {
        let unbound = {
            let mut claims = claims_of(0, 3607);
            claims["kubernetes.io"].as_object_mut().expect("an object").remove("pod");
            token(&claims)
        };
        let fine = token(&claims_of(0, 3607));
        for text in [
            "",
            "a",
            "a.b",
            "..",
            "a.b.c",
            "a.e30.c",
            unbound.as_str(),
            &format!("{fine}.d"),
            fine.trim_end_matches("c2ln"),
            &changed("/exp", json!("soon")),
            &changed("/iat", json!(1e300)),
        ] {
            assert_eq!(validate(text, &whose(), NOW), Err(TokenRejection::NoToken), "{text}");
        }
        let far = changed("/exp", json!(i64::MAX));
        assert!(matches!(validate(&far, &whose(), NOW), Err(TokenRejection::OtherLifetime(_))), "no overflow");
        let ever = validate(&changed("/iat", json!(i64::MIN)), &ExpectedClaims { seconds: None, ..whose() }, NOW);
        assert_eq!(ever.map(|life| life.seconds), Ok(i64::MAX), "no overflow");
    }
}
