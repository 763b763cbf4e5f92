//! Access cache with a scripted reviewer, under paused time.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;

use super::*;
use crate::{
    auth::{AuthorizationDecision, Authorizer, UserInfo},
    ports::AccessVerdict,
};

type Answers = Box<dyn Fn(&AccessRequest, usize) -> Result<AccessVerdict, ReviewError> + Send + Sync>;

struct ScriptedReviewer {
    answers: Answers,
    asked: AtomicUsize,
}

#[async_trait]
impl AccessReviewer for ScriptedReviewer {
    async fn review(&self, request: &AccessRequest) -> Result<AccessVerdict, ReviewError> {
        let count = self.asked.fetch_add(1, Ordering::Relaxed);
        (self.answers)(request, count)
    }
}

const YES: Result<AccessVerdict, ReviewError> = Ok(AccessVerdict { allowed: true, denied: false });
const NO: Result<AccessVerdict, ReviewError> = Ok(AccessVerdict { allowed: false, denied: false });

struct Bench {
    reviewer: Arc<ScriptedReviewer>,
    authorizer: Authorizer,
}

impl Bench {
    fn new(
        answers: impl Fn(&AccessRequest, usize) -> Result<AccessVerdict, ReviewError> + Send + Sync + 'static,
    ) -> Self {
        Self::holding_on(Duration::ZERO, answers)
    }

    fn holding_on(
        stale: Duration,
        answers: impl Fn(&AccessRequest, usize) -> Result<AccessVerdict, ReviewError> + Send + Sync + 'static,
    ) -> Self {
        let reviewer = Arc::new(ScriptedReviewer { answers: Box::new(answers), asked: AtomicUsize::new(0) });
        let ttls = AccessTtls { authorized: Duration::from_secs(300), unauthorized: Duration::from_secs(30), stale };
        let cache = AccessCache::new(reviewer.clone(), ttls, TaskTracker::new(), CancellationToken::new());
        Self { reviewer, authorizer: Authorizer::webhook(cache, "node") }
    }

    async fn ask(&self, user: &str, subresources: &[&str]) -> AuthorizationDecision {
        let who = UserInfo { name: user.to_owned(), ..UserInfo::unauthenticated_listener() };
        self.authorizer.authorize(&who, "get", subresources).await
    }

    fn asked(&self) -> usize {
        self.reviewer.asked.load(Ordering::Relaxed)
    }
}

#[tokio::test(start_paused = true)]
async fn each_subresource_is_asked_for_until_one_is_allowed() {
    let bench = Bench::new(|request, _| match (request.identity.name.as_str(), request.subresource.as_str()) {
        ("a", "pods") | ("b", "proxy") => YES,
        ("c", "pods") => Ok(AccessVerdict { allowed: false, denied: true }),
        ("c", "proxy") => YES,
        ("e", "healthz") => Err(ReviewError("broken".to_owned())),
        ("f", _) => Ok(AccessVerdict { allowed: true, denied: true }),
        _ => NO,
    });
    let failed = |user: &str| AuthorizationDecision::Failed {
        text: format!("Authorization error (user={user}, verb=get, resource=nodes, subresource=healthz)"),
    };
    let forbidden = "Forbidden (user=d, verb=get, resource=nodes, subresource(s)=[healthz proxy])\n";
    for (user, subresources, verdict, asked) in [
        ("a", ["pods", "proxy"], AuthorizationDecision::Allowed, 1), // AC-04-4
        ("b", ["configz", "proxy"], AuthorizationDecision::Allowed, 2), // AC-04-5
        ("c", ["pods", "proxy"], AuthorizationDecision::Allowed, 2),
        ("d", ["healthz", "proxy"], AuthorizationDecision::Forbidden { text: forbidden.to_owned() }, 2), // AC-04-6
        ("e", ["healthz", "proxy"], failed("e"), 1),                                                     // AC-04-7
        ("f", ["healthz", "proxy"], failed("f"), 1),
    ] {
        let before = bench.asked();
        assert_eq!(bench.ask(user, &subresources).await, verdict, "{user}");
        assert_eq!(bench.asked() - before, asked, "{user}");
    }
}

#[tokio::test(start_paused = true)]
async fn verdicts_are_remembered_each_for_its_time() {
    for (answer, seconds) in [(YES, 240), (NO, 30)] {
        let bench = Bench::new(move |_, _| answer.clone());
        let first = bench.ask("a", &["pods"]).await;
        tokio::time::advance(Duration::from_secs(seconds - 1)).await;
        assert_eq!((bench.ask("a", &["pods"]).await, bench.asked()), (first.clone(), 1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(bench.ask("a", &["pods"]).await, first);
        tokio::task::yield_now().await;
        assert_eq!(bench.asked(), 2, "reviewed again; a positive entry is refreshed early");
        bench.ask("a", &["proxy"]).await;
        assert_eq!(bench.asked(), 3);
    }
    let failing = Bench::new(|_, _| Err(ReviewError("gone".to_owned())));
    for count in 1..4 {
        assert!(matches!(failing.ask("a", &["pods"]).await, AuthorizationDecision::Failed { .. }));
        assert_eq!(failing.asked(), count, "failures are not remembered");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cached_approval_is_used_until_it_expires_when_reviews_fail() {
    let bench = Bench::new(|_, count| if count == 0 { YES } else { Err(ReviewError("gone".to_owned())) });
    assert_eq!(bench.ask("a", &["metrics"]).await, AuthorizationDecision::Allowed);
    tokio::time::advance(Duration::from_secs(299)).await;
    assert_eq!(bench.ask("a", &["metrics"]).await, AuthorizationDecision::Allowed);
    tokio::task::yield_now().await;
    assert_eq!(bench.asked(), 2);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(matches!(bench.ask("a", &["metrics"]).await, AuthorizationDecision::Failed { .. }));
}

#[tokio::test(start_paused = true)]
async fn only_metrics_and_health_hold_on_while_the_api_server_is_gone() {
    // Spec 04 §10; off by default, see the test before this one.
    let gone = |_: &AccessRequest, count| if count < 3 { YES } else { Err(ReviewError("gone".to_owned())) };
    let bench = Bench::holding_on(Duration::from_secs(60), gone);
    let all = ["metrics", "healthz", "pods"];
    for subresource in all {
        assert_eq!(bench.ask("a", &[subresource]).await, AuthorizationDecision::Allowed);
    }
    for (after, is_usable) in [(301, true), (58, true), (2, false)] {
        tokio::time::advance(Duration::from_secs(after)).await;
        for subresource in all {
            let may = bench.ask("a", &[subresource]).await == AuthorizationDecision::Allowed;
            assert_eq!(may, is_usable && subresource != "pods", "{subresource} {after}");
        }
        assert!(
            matches!(bench.ask("b", &["metrics"]).await, AuthorizationDecision::Failed { .. }),
            "never was allowed"
        );
    }
    let refused = Bench::holding_on(Duration::from_secs(60), |_, count| if count == 0 { YES } else { NO });
    refused.ask("a", &["metrics"]).await;
    tokio::time::advance(Duration::from_secs(301)).await;
    assert!(
        matches!(refused.ask("a", &["metrics"]).await, AuthorizationDecision::Forbidden { .. }),
        "who answers is obeyed"
    );
}

#[tokio::test(start_paused = true)]
async fn words_too_long_to_be_kept_are_asked_about_each_time() {
    let bench = Bench::new(|_, _| YES);
    let long = "x".repeat(LONGEST);
    for count in 1..3 {
        assert_eq!(bench.ask(&long, &["pods"]).await, AuthorizationDecision::Allowed);
        assert_eq!(bench.asked(), count);
    }
}

#[tokio::test]
async fn without_reviews_there_are_two_ways() {
    let who = UserInfo::anonymous();
    assert_eq!(Authorizer::always_allow().authorize(&who, "", &["proxy"]).await, AuthorizationDecision::Allowed);
    let standalone = Authorizer::standalone(crate::auth::AuthorizationPolicy::masters_only());
    let text = "Forbidden (user=system:anonymous, verb=, resource=nodes, subresource(s)=[proxy])\n".to_owned();
    assert_eq!(standalone.authorize(&who, "", &["proxy"]).await, AuthorizationDecision::Forbidden { text });
    let master = UserInfo { groups: vec!["system:masters".to_owned()], ..who };
    assert_eq!(standalone.authorize(&master, "create", &["proxy"]).await, AuthorizationDecision::Allowed);
}
