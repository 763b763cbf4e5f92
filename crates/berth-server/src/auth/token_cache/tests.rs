//! Token cache with a scripted reviewer, under paused time.

use std::collections::VecDeque;

use async_trait::async_trait;
use tokio::sync::Semaphore;

use super::*;
use berth_metrics::Registry;

/// Scripted verdict of the reviewer; the last one repeats.
#[derive(Clone)]
enum ScriptedVerdict {
    Yes,
    No,
    Invalid,
    Nothing,
    Hang,
}

struct ScriptedReviewer {
    verdicts: Mutex<VecDeque<ScriptedVerdict>>,
    asked: Mutex<Vec<String>>,
    /// One permit per review that may complete.
    gate: Semaphore,
}

#[async_trait]
impl TokenReviewer for ScriptedReviewer {
    async fn review(&self, token: &str) -> Result<TokenVerdict, ReviewError> {
        self.asked.lock().expect("whole").push(token.to_owned());
        let verdict = {
            let mut verdicts = self.verdicts.lock().expect("whole");
            if verdicts.len() > 1 { verdicts.pop_front() } else { verdicts.front().cloned() }
        };
        self.gate.acquire().await.expect("open").forget();
        match verdict.expect("something") {
            ScriptedVerdict::Yes => Ok(TokenVerdict::Accepted {
                name: token.to_owned(),
                uid: "u".to_owned(),
                groups: vec!["g".to_owned()],
                extra: Default::default(),
            }),
            ScriptedVerdict::No => Ok(TokenVerdict::Rejected),
            ScriptedVerdict::Invalid => Ok(TokenVerdict::Invalid("expired".to_owned())),
            ScriptedVerdict::Nothing => Err(ReviewError("refused".to_owned())),
            ScriptedVerdict::Hang => std::future::pending().await,
        }
    }
}

struct Bench {
    reviewer: Arc<ScriptedReviewer>,
    cache: Arc<TokenCache>,
    registry: Registry,
}

impl Bench {
    fn new(verdicts: &[ScriptedVerdict], ttl: u64) -> Self {
        let reviewer = Arc::new(ScriptedReviewer {
            verdicts: Mutex::new(verdicts.iter().cloned().collect()),
            asked: Mutex::default(),
            gate: Semaphore::new(1000),
        });
        let registry = Registry::new();
        let cache = TokenCache::new(
            reviewer.clone(),
            Duration::from_secs(ttl),
            AuthMetrics::new(&registry),
            TaskTracker::new(),
            CancellationToken::new(),
        );
        Self { reviewer, cache, registry }
    }

    async fn ask(&self, token: &str) -> TokenLookup {
        self.cache.lookup(token, None).await
    }

    fn asked(&self) -> usize {
        self.reviewer.asked.lock().expect("whole").len()
    }

    fn value(&self, family: &str, status: &str) -> f64 {
        let families = self.registry.gather();
        let metrics = families.iter().filter(|f| f.name() == family).flat_map(|f| f.get_metric());
        let named = metrics.filter(|m| m.get_label().iter().any(|l| l.value() == status));
        named.map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
    }
}

fn is_accepted(known: &TokenLookup) -> bool {
    matches!(known, TokenLookup::Accepted(identity) if identity.is_in("system:authenticated") && identity.via == AuthenticatedBy::Token)
}

#[tokio::test(start_paused = true)]
async fn verdicts_are_remembered_and_failures_are_not() {
    // Per row: verdict, and for how many seconds it is cached.
    for (verdict, ttl, remembered) in [
        (ScriptedVerdict::Yes, 120, 120),
        (ScriptedVerdict::Yes, 0, 0),
        (ScriptedVerdict::No, 120, 120),
        (ScriptedVerdict::No, 0, 10),
        (ScriptedVerdict::Invalid, 120, 10),
        (ScriptedVerdict::Nothing, 120, 0),
    ] {
        let bench = Bench::new(&[verdict], ttl);
        let first = bench.ask("a").await;
        if remembered > 0 {
            tokio::time::advance(Duration::from_secs(remembered - 1)).await;
            assert_eq!((bench.ask("a").await, bench.asked()), (first.clone(), 1));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!((bench.ask("a").await, bench.asked()), (first, 2));
        bench.ask("b").await;
        assert_eq!(bench.asked(), 3, "another token is another question");
    }
}

#[tokio::test(start_paused = true)]
async fn many_who_ask_at_once_make_one_review() {
    let bench = Bench::new(&[ScriptedVerdict::Yes], 120);
    bench.reviewer.gate.forget_permits(1000);
    let asking = futures::future::join_all((0..50).map(|_| bench.ask("a")));
    let answer = async { bench.reviewer.gate.add_permits(1000) }; // once all have asked
    let (answers, ()) = tokio::join!(biased; asking, answer);
    assert!(answers.iter().all(is_accepted));
    assert_eq!(bench.asked(), 1);
    assert_eq!(bench.value("authentication_token_cache_request_total", "miss"), 50.0);
    assert_eq!(bench.value("authentication_token_cache_fetch_total", "ok"), 1.0);
    assert_eq!(bench.value("authentication_token_cache_active_fetch_count", "blocked"), 0.0);
    assert_eq!(bench.value("authentication_token_cache_active_fetch_count", "in_flight"), 0.0);
}

#[tokio::test(start_paused = true)]
async fn a_reviewer_that_hangs_is_given_up_and_the_caller_who_leaves_loses_nothing() {
    let bench = Bench::new(&[ScriptedVerdict::Hang, ScriptedVerdict::Yes], 120);
    let began = Instant::now();
    let hung = bench.ask("a").await;
    assert_eq!(hung, TokenLookup::Failed("no response within 30s".to_owned()));
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    assert_eq!(bench.value("authentication_token_cache_fetch_total", "error"), 1.0);

    bench.reviewer.gate.forget_permits(1000);
    let left = timeout(Duration::from_secs(1), bench.ask("a")).await;
    assert!(left.is_err(), "he hangs up while the review goes on");
    bench.reviewer.gate.add_permits(1);
    assert!(is_accepted(&bench.ask("a").await));
    assert_eq!(bench.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_invented_tokens_does_not_become_the_api_servers_work() {
    // Spec 04 §10: a token bucket per address, ten concurrent reviews, ten seconds of caching.
    let bench = Bench::new(&[ScriptedVerdict::Invalid], 120);
    let (bad, good) = (Some(IpAddr::from([192, 0, 2, 1])), Some(IpAddr::from([192, 0, 2, 2])));
    let mut busy = 0;
    for number in 0..1000 {
        busy += usize::from(bench.cache.lookup(&format!("invented {number}"), bad).await == TokenLookup::Busy);
    }
    assert_eq!((bench.asked(), busy), (20, 980));
    assert!(matches!(bench.cache.lookup("another", good).await, TokenLookup::Rejected(_)));
    for _ in 0..1000 {
        assert!(
            matches!(bench.cache.lookup("invented 0", bad).await, TokenLookup::Rejected(_)),
            "remembered: no review"
        );
    }
    assert_eq!(bench.asked(), 21);
}

#[tokio::test(start_paused = true)]
async fn ten_reviews_at_a_time_are_enough() {
    let bench = Bench::new(&[ScriptedVerdict::Yes], 120);
    bench.reviewer.gate.forget_permits(1000);
    let ask = |number: u8| {
        let cache = bench.cache.clone();
        async move { cache.lookup(&format!("token {number}"), Some(IpAddr::from([192, 0, 2, number]))).await }
    };
    let waiting: Vec<_> = (0..10).map(|number| tokio::spawn(ask(number))).collect();
    while bench.asked() < 10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(ask(10).await, TokenLookup::Busy);
    bench.reviewer.gate.add_permits(100);
    for task in waiting {
        assert!(is_accepted(&task.await.expect("ended")));
    }
    assert!(is_accepted(&ask(10).await));
}
