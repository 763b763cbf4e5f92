//! Whether a token that a pod's volume holds already serves on, by its own claims. Pure. Behaviour: spec 10 §11,
//! spec 10a §22.
//!
//! Its signature is not looked at: who can write into the volume has the pod anyway, and a forged token serves
//! nobody but that pod, which is refused with it.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;

/// Clocks of nodes and servers may differ by so many seconds.
const SKEW: i64 = 60;

/// What a token has to be.
#[derive(Clone, Copy, Debug)]
pub struct Whose<'a> {
    /// The pod's namespace, and the account's.
    pub namespace: &'a str,
    /// The name of the service account.
    pub account: &'a str,
    /// The UID of the pod it is bound to.
    pub pod: &'a str,
    /// Who it is for; empty for the API server, whose own audience is not known here.
    pub audience: &'a str,
    /// How long it was to live, in seconds.
    pub seconds: Option<i64>,
}

/// How long a token serves, in seconds of wall time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Life {
    /// When it ends, as the server told when it was made.
    pub expires: i64,
    /// How long it was given.
    pub seconds: i64,
}

/// Why a token does not serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unfit {
    /// Something else lies there.
    #[error("it is no token of a service account")]
    NoToken,
    /// It is somebody else's.
    #[error("it is bound to pod {pod:?} and service account {namespace}/{account}")]
    OtherPod {
        /// UID of the pod.
        pod: String,
        /// Namespace of the account.
        namespace: String,
        /// Name of the account.
        account: String,
    },
    /// It is for somebody else.
    #[error("it is for {0:?}")]
    OtherAudience(Vec<String>),
    /// Another lifetime was asked for.
    #[error("its lifetime is {0} s")]
    OtherLifetime(i64),
    /// The node's clock was set back, or the server's was wrong: its age says nothing.
    #[error("it is from the future")]
    FromTheFuture,
    /// Its time is over.
    #[error("it has expired")]
    Expired,
}

#[derive(Deserialize)]
struct Claims {
    aud: Audiences,
    exp: i64,
    iat: i64,
    #[serde(rename = "kubernetes.io")]
    bound: Bound,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct Bound {
    namespace: String,
    serviceaccount: Reference,
    pod: Reference,
    /// When it was told to expire, where it lives longer than that: clients that are late are told of, not refused.
    warnafter: Option<i64>,
}

#[derive(Deserialize)]
struct Reference {
    name: String,
    uid: String,
}

/// How long the token serves whom it is to serve.
///
/// # Errors
/// It does not: another one is to be asked for now.
pub fn judge(token: &str, whose: &Whose<'_>, now: i64) -> Result<Life, Unfit> {
    let Claims { aud, exp, iat, bound } = claims(token).ok_or(Unfit::NoToken)?;
    let audiences = match aud {
        Audiences::One(one) => vec![one],
        Audiences::Many(many) => many,
    };
    // An account that was made anew cannot be told from here: the server says so at the next renewal.
    let is_own = bound.pod.uid == whose.pod
        && bound.namespace == whose.namespace
        && bound.serviceaccount.name == whose.account
        && !bound.serviceaccount.uid.is_empty();
    if !is_own {
        let (namespace, account) = (bound.namespace, bound.serviceaccount.name);
        return Err(Unfit::OtherPod { pod: bound.pod.uid, namespace, account });
    }
    let is_for = if whose.audience.is_empty() { !audiences.is_empty() } else { audiences == [whose.audience] };
    if !is_for {
        return Err(Unfit::OtherAudience(audiences));
    }
    let expires = bound.warnafter.unwrap_or(exp);
    let seconds = expires.saturating_sub(iat);
    // The server may grant less than was asked for, never more.
    if seconds <= 0 || whose.seconds.is_some_and(|asked| seconds > asked) {
        return Err(Unfit::OtherLifetime(seconds));
    }
    if iat > now.saturating_add(SKEW) {
        return Err(Unfit::FromTheFuture);
    }
    if now > expires {
        return Err(Unfit::Expired);
    }
    Ok(Life { expires, seconds })
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

    fn whose() -> Whose<'static> {
        Whose { namespace: "ns", account: "sa", pod: "u", audience: "", seconds: Some(3607) }
    }

    /// A token that was made that many seconds ago.
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
        let fine = |age, lives| judge(&token(&claims_of(age, lives)), &whose(), NOW);
        assert_eq!(fine(100, 3607), Ok(Life { expires: NOW + 3507, seconds: 3607 }));
        assert_eq!(fine(100, 600), Ok(Life { expires: NOW + 500, seconds: 600 }), "granted less");
        assert_eq!(fine(-SKEW, 3607), Ok(Life { expires: NOW + 3667, seconds: 3607 }), "clocks differ");
        assert_eq!(fine(600, 600), Ok(Life { expires: NOW, seconds: 600 }), "its last second");
        assert_eq!(fine(601, 600), Err(Unfit::Expired));
        assert_eq!(fine(-SKEW - 1, 3607), Err(Unfit::FromTheFuture));
        assert_eq!(fine(0, 3608), Err(Unfit::OtherLifetime(3608)));
        assert_eq!(fine(0, 0), Err(Unfit::OtherLifetime(0)));
    }

    #[test]
    fn the_told_end_counts_where_the_token_lives_longer() {
        // Spec 10 §4.7: 3607 s with the server's own audience.
        let mut claims = claims_of(100, 365 * 24 * 3600);
        claims["kubernetes.io"]["warnafter"] = json!(NOW - 100 + 3607);
        assert_eq!(judge(&token(&claims), &whose(), NOW), Ok(Life { expires: NOW + 3507, seconds: 3607 }));
        claims["kubernetes.io"]["warnafter"] = json!(NOW - 1);
        assert_eq!(judge(&token(&claims), &whose(), NOW), Err(Unfit::Expired));
    }

    #[test]
    fn somebody_elses_token_does_not_serve() {
        for (case, token) in [
            ("pod", changed("/kubernetes.io/pod/uid", json!("v"))),
            ("namespace", changed("/kubernetes.io/namespace", json!("other"))),
            ("account", changed("/kubernetes.io/serviceaccount/name", json!("other"))),
            ("no account", changed("/kubernetes.io/serviceaccount/uid", json!(""))),
        ] {
            let unfit = judge(&token, &whose(), NOW);
            assert!(matches!(unfit, Err(Unfit::OtherPod { .. })), "{case}: {unfit:?}");
        }
    }

    #[test]
    fn a_token_is_for_one_audience() {
        for (asked, held, fits) in [
            ("", json!(["a", "b"]), true),
            ("", json!([]), false),
            ("a", json!(["a"]), true),
            ("a", json!("a"), true),
            ("a", json!(["a", "b"]), false),
            ("a", json!(["b"]), false),
        ] {
            let judged = judge(&changed("/aud", held.clone()), &Whose { audience: asked, ..whose() }, NOW);
            assert_eq!(judged.is_ok(), fits, "{asked:?} {held}: {judged:?}");
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
            assert_eq!(judge(text, &whose(), NOW), Err(Unfit::NoToken), "{text}");
        }
        let far = changed("/exp", json!(i64::MAX));
        assert!(matches!(judge(&far, &whose(), NOW), Err(Unfit::OtherLifetime(_))), "no overflow");
        let ever = judge(&changed("/iat", json!(i64::MIN)), &Whose { seconds: None, ..whose() }, NOW);
        assert_eq!(ever.map(|life| life.seconds), Ok(i64::MAX), "no overflow");
    }
}
