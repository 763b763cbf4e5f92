//! Order of the authentication methods, and the effect of a failure on the others.

use std::time::Duration;

use async_trait::async_trait;
use axum::http::Request;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::*;
use crate::{
    auth::AuthenticatedBy,
    ports::{ReviewError, TokenReviewer, TokenVerdict},
};
use berth_metrics::Registry;

/// Reviewer whose token is the user name; "bad" is rejected, "down" fails.
struct ByName;

#[async_trait]
impl TokenReviewer for ByName {
    async fn review(&self, token: &str) -> Result<TokenVerdict, ReviewError> {
        match token {
            "bad" => Ok(TokenVerdict::Rejected),
            "down" => Err(ReviewError("refused".to_owned())),
            name => Ok(TokenVerdict::Accepted {
                name: name.to_owned(),
                uid: String::new(),
                groups: Vec::new(),
                extra: Default::default(),
            }),
        }
    }
}

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn ca() -> Issuer {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority")
}

fn certificate(issuer: &Issuer, name: &str) -> CertificateDer<'static> {
    let mut params = CertificateParams::default();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.signed_by(&KeyPair::generate().expect("a key"), issuer).expect("a certificate").into()
}

struct Bench {
    authenticator: Authenticator,
    roots: ClientRoots,
    ours: Issuer,
    theirs: Issuer,
    registry: Registry,
}

impl Bench {
    fn new(anonymous: Anonymous, believes_tokens: bool) -> Self {
        let (ours, theirs, registry) = (ca(), ca(), Registry::new());
        let cas = ClientCas::from_pem(ours.pem().as_bytes()).expect("a bundle");
        let roots: ClientRoots = Arc::new(ArcSwapOption::from_pointee(cas));
        let metrics = AuthMetrics::new(&registry);
        let ttl = Duration::from_secs(120);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let cache = TokenCache::new(Arc::new(ByName), ttl, metrics.clone(), tasks, stop);
        let authenticator = Authenticator::new(AuthenticatorDeps {
            client_roots: roots.clone(),
            tokens: believes_tokens.then_some(cache),
            anonymous,
            metrics,
            now: Arc::new(Timestamp::now),
        });
        Self { authenticator, roots, ours, theirs, registry }
    }

    /// User name or status code, and the remaining headers.
    async fn ask(&self, chain: &[CertificateDer<'static>], headers: &[(&str, &str)]) -> (String, Parts) {
        let request =
            headers.iter().fold(Request::get("/pods"), |request, (name, value)| request.header(*name, *value));
        let (mut parts, ()) = request.body(()).expect("a request").into_parts();
        let outcome = match self.authenticator.authenticate(&mut parts, chain).await {
            Ok(identity) => identity.name,
            Err(refused) => refused.answer().0.as_u16().to_string(),
        };
        (outcome, parts)
    }
}

#[tokio::test]
async fn the_first_that_succeeds_counts_and_a_failure_keeps_from_being_anonymous() {
    let bearer = |token: &'static str| Some(format!("Bearer {token}"));
    for anonymous in [Anonymous::Allow, Anonymous::Reject] {
        let bench = Bench::new(anonymous, true);
        let anonymous_outcome = if anonymous == Anonymous::Allow { "system:anonymous" } else { "401" };
        let (good, bad) = (certificate(&bench.ours, "kate"), certificate(&bench.theirs, "mallory"));
        let nameless = certificate(&bench.ours, "");
        for (chain, header, expected) in [
            (vec![], None, anonymous_outcome), // AC-04-1
            (vec![good.clone()], None, "kate"),
            (vec![good.clone()], bearer("bad"), "kate"),
            (vec![bad.clone()], bearer("tom"), "tom"), // AC-04-18
            (vec![bad.clone()], None, "401"),          // AC-04-19
            (vec![bad.clone()], bearer("bad"), "401"),
            (vec![nameless.clone()], None, anonymous_outcome),
            (vec![nameless.clone()], bearer("tom"), "tom"),
            (vec![], bearer("tom"), "tom"),
            (vec![], bearer("bad"), "401"),
            (vec![], bearer("down"), "401"),
            (vec![], Some("Basic x".to_owned()), anonymous_outcome),
        ] {
            let headers: Vec<_> = header.iter().map(|value| ("authorization", value.as_str())).collect();
            let (outcome, _) = bench.ask(&chain, &headers).await;
            assert_eq!(outcome, expected, "{anonymous:?} {header:?}");
        }
    }
}

#[tokio::test]
async fn tokens_are_ignored_without_token_review() {
    let bench = Bench::new(Anonymous::Allow, false);
    assert_eq!(bench.ask(&[], &[("authorization", "Bearer tom")]).await.0, "system:anonymous");
}

#[tokio::test]
async fn the_credential_that_served_is_gone() {
    let bench = Bench::new(Anonymous::Reject, true);
    let protocols = "v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.dG9t"; // "tom"
    let socket = [("connection", "upgrade"), ("upgrade", "websocket"), ("sec-websocket-protocol", protocols)];
    let (outcome, parts) = bench.ask(&[], &socket).await;
    assert_eq!(
        (outcome.as_str(), parts.headers["sec-websocket-protocol"].as_bytes()),
        ("tom", &b"v5.channel.k8s.io"[..])
    );
    let (outcome, parts) = bench.ask(&[], &[("authorization", "Bearer kate")]).await;
    assert!(outcome == "kate" && parts.headers.is_empty());
    let (outcome, parts) = bench.ask(&[], &[("authorization", "Bearer bad")]).await;
    assert!(outcome == "401" && parts.headers.contains_key("authorization"));
    let chain = [certificate(&bench.ours, "kate")];
    let (outcome, parts) = bench.ask(&chain, &[("authorization", "Bearer tom")]).await;
    assert!(outcome == "kate" && parts.headers.contains_key("authorization"), "the header is not evaluated");
}

#[tokio::test]
async fn who_proved_himself_is_in_the_group_and_his_certificates_life_is_observed() {
    let bench = Bench::new(Anonymous::Reject, true);
    let request = Request::get("/").body(()).expect("a request");
    let (mut parts, ()) = request.into_parts();
    let chain = [certificate(&bench.ours, "kate")];
    let identity = bench.authenticator.authenticate(&mut parts, &chain).await.expect("let in");
    assert_eq!((identity.groups, identity.via), (vec!["system:authenticated".to_owned()], AuthenticatedBy::X509));
    let families = bench.registry.gather();
    let left = families.iter().find(|f| f.name() == "apiserver_client_certificate_expiration_seconds");
    assert_eq!(left.expect("the family").get_metric()[0].get_histogram().get_sample_count(), 1);
}

#[tokio::test]
async fn a_new_bundle_counts_at_once_for_certificates_seen_before() {
    // AC-04-20, the part after the reload.
    let bench = Bench::new(Anonymous::Reject, true);
    let (ours, theirs) = ([certificate(&bench.ours, "kate")], [certificate(&bench.theirs, "tom")]);
    assert_eq!((bench.ask(&ours, &[]).await.0, bench.ask(&theirs, &[]).await.0), ("kate".into(), "401".into()));
    let cas = ClientCas::from_pem(bench.theirs.pem().as_bytes()).expect("a bundle");
    bench.roots.store(Some(Arc::new(cas)));
    assert_eq!((bench.ask(&ours, &[]).await.0, bench.ask(&theirs, &[]).await.0), ("401".into(), "tom".into()));
    bench.roots.store(None);
    assert_eq!(bench.ask(&theirs, &[]).await.0, "401", "no bundle: no opinion");
}
