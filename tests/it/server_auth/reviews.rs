//! TokenReview and SubjectAccessReview against an API server with faults.

use std::time::{Duration, Instant};

use berth_api::Reviews;
use berth_metrics::{Registry, ReviewMetrics};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReviewSpec};

use berth_testkit::{
    api_client::connect,
    api_server::{
        ApiServer, SimpleFault,
        reviews::{ACCESSES, TOKENS},
    },
};

struct Bench {
    api: ApiServer,
    reviews: Reviews,
    registry: Registry,
}

impl Bench {
    async fn new() -> Self {
        let api = ApiServer::start().await;
        let registry = Registry::new();
        let client = connect(&api.kubeconfig()).await;
        Self { api, reviews: Reviews::new(client, ReviewMetrics::new(&registry)), registry }
    }

    /// Number of attempts counted with that code.
    fn counted(&self, family: &str, code: &str) -> f64 {
        let families = self.registry.gather();
        let metrics = families.iter().filter(|f| f.name() == family).flat_map(|f| f.get_metric());
        metrics.filter(|m| m.get_label()[0].value() == code).map(|m| m.get_counter().get_value()).sum()
    }
}

#[tokio::test]
async fn a_token_is_somebodys_or_nobodys() {
    let bench = Bench::new().await;
    bench.api.accept_token("good", "kate", &["dev"]);
    bench.api.refuse_token("old", "token has expired");
    let good = bench.reviews.token("good").await.expect("an answer");
    let user = good.user.expect("a user");
    assert_eq!(
        (good.authenticated, user.username.as_deref(), user.uid.as_deref()),
        (Some(true), Some("kate"), Some("uid-kate"))
    );
    let old = bench.reviews.token("old").await.expect("an answer");
    assert_eq!((old.authenticated, old.error.as_deref()), (Some(false), Some("token has expired")));
    assert_eq!(bench.reviews.token("other").await.expect("an answer").authenticated, Some(false));
    let asked = bench.api.requests(TOKENS);
    assert_eq!(asked.len(), 3);
    assert_eq!(asked[0].body["spec"], serde_json::json!({"token": "good"}), "no audiences");
    assert_eq!(bench.counted("apiserver_delegated_authn_request_total", "201"), 3.0);
}

#[tokio::test]
async fn an_access_is_allowed_or_not() {
    let bench = Bench::new().await;
    bench.api.allow("kate", "get", "pods");
    let ask = |user: &str| SubjectAccessReviewSpec {
        user: Some(user.to_owned()),
        resource_attributes: Some(ResourceAttributes {
            verb: Some("get".to_owned()),
            resource: Some("nodes".to_owned()),
            subresource: Some("pods".to_owned()),
            ..ResourceAttributes::default()
        }),
        ..SubjectAccessReviewSpec::default()
    };
    assert!(bench.reviews.access(ask("kate")).await.expect("an answer").allowed);
    assert!(!bench.reviews.access(ask("tom")).await.expect("an answer").allowed);
    bench.api.forbid("kate", "get", "pods");
    assert!(!bench.reviews.access(ask("kate")).await.expect("an answer").allowed);
    assert_eq!(bench.counted("apiserver_delegated_authz_request_total", "201"), 3.0);
    assert_eq!(bench.api.requests(ACCESSES).len(), 3);
}

#[tokio::test]
async fn what_may_pass_is_tried_again() {
    let bench = Bench::new().await;
    bench.api.accept_token("good", "kate", &[]);
    bench.api.trouble(
        TOKENS,
        [SimpleFault::Status(500, None), SimpleFault::Cut, SimpleFault::Late(Duration::from_millis(50))],
    );
    let good = bench.reviews.token("good").await.expect("an answer at last");
    assert_eq!((good.authenticated, bench.api.requests(TOKENS).len()), (Some(true), 3));
    let count = |code: &str| bench.counted("apiserver_delegated_authn_request_total", code);
    assert_eq!((count("500"), count("<error>"), count("201")), (1.0, 1.0, 1.0));
}

#[tokio::test]
async fn permanent_errors_are_returned_at_once() {
    let mut bench = Bench::new().await;
    for (trouble, expected) in [
        (SimpleFault::Status(403, None), "unknown (post tokenreviews.authentication.k8s.io)"),
        (SimpleFault::Status(503, None), "the server is currently unable to handle the request"),
        (SimpleFault::Garbage, "invalid response"),
    ] {
        bench.api.trouble(TOKENS, [trouble]);
        let before = bench.api.requests(TOKENS).len();
        let error = bench.reviews.token("good").await.expect_err(expected).to_string();
        assert!(error.starts_with(TOKENS) && error.contains(expected), "{error}");
        assert_eq!(bench.api.requests(TOKENS).len(), before + 1);
    }
    bench.api.stop_listening().await;
    let fresh = connect(&bench.api.kubeconfig()).await;
    let (refused, begun) = (Reviews::new(fresh, ReviewMetrics::new(&Registry::new())), Instant::now());
    let error = refused.token("good").await.expect_err("refused").to_string();
    assert!(error.to_lowercase().contains("refused"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5), "a refused connection is not tried again");
}

#[tokio::test]
async fn a_reviewer_that_hangs_is_given_up() {
    let bench = Bench::new().await;
    bench.api.trouble(TOKENS, [SimpleFault::Hang]);
    let begun = Instant::now();
    let error = bench.reviews.token("good").await.expect_err("no answer").to_string();
    assert!(error.contains("request timed out after 10s"), "{error}");
    assert_eq!(begun.elapsed().as_secs(), 10);
    assert_eq!(bench.counted("apiserver_delegated_authn_request_total", "<error>"), 1.0);
}
