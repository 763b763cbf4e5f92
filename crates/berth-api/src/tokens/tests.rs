//! The token cache against a fake server, under a paused clock.

use serde_json::Value;

use super::*;
use crate::testing::{FakeApi, refused};

/// Wall clock that advances with tokio's.
struct Wall(Instant);

const EPOCH: i64 = 1_800_000_000;

impl Clock for Wall {
    fn now(&self) -> Timestamp {
        let passed = i64::try_from(self.0.elapsed().as_secs()).expect("small");
        Timestamp::from_second(EPOCH + passed).expect("in range")
    }
}

fn bench(mut answer: impl FnMut(usize, &Call) -> Result<Value, ApiError> + Send + 'static) -> (Arc<FakeApi>, Tokens) {
    let mut count = 0;
    let api = FakeApi::new(move |call| {
        count += 1;
        answer(count, call)
    });
    (api.clone(), Tokens::new(api, Arc::new(Wall(Instant::now()))))
}

/// Response to a request made `after` seconds after the start: a token of that number.
fn issued(number: usize, after: i64, seconds: i64) -> Value {
    let expires = Timestamp::from_second(EPOCH + after + seconds).expect("in range");
    json!({"spec": {"expirationSeconds": seconds}, "status": {"token": format!("t{number}"),
        "expirationTimestamp": expires.to_string()}})
}

fn pod() -> Pod {
    let object = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [], "serviceAccountName": "sa"}});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn ask(audience: &str, seconds: i64) -> TokenRequest {
    TokenRequest { audience: audience.to_owned(), expiration_seconds: Some(seconds) }
}

#[test]
fn short_lives_are_not_spread_to_nothing() {
    for (lifetime, most) in [(3607, 9), (600, 9), (100, 4), (5, 0), (0, 0)] {
        let earliest = (0..500).map(|_| earlier(lifetime)).max();
        assert!(earliest <= Some(most), "{lifetime} s: {earliest:?}");
    }
}

async fn pass(seconds: u64) {
    tokio::time::advance(Duration::from_secs(seconds)).await;
}

#[test]
fn renewal_comes_in_time() {
    // AC-10-31: of 3607 s.
    assert_eq!((renewal(3607, 3607, 0), renewal(3607, 3607, 9)), (2886, 2877));
    assert_eq!(renewal(600, 600, 0), 480);
    assert_eq!(renewal(7 * DAY, 7 * DAY, 3), DAY - 3);
    assert_eq!(renewal(i64::MAX, i64::MAX, 9), DAY - 9, "no overflow");
}

#[tokio::test(start_paused = true)]
async fn a_token_is_asked_for_once_and_renewed_when_due() {
    // AC-10-31: the lifetime of the request counts, whatever the JWT contains.
    let (api, tokens) = bench(|number, _| Ok(issued(number, if number == 1 { 0 } else { 2886 }, 3607)));
    let pod = pod();
    let get = async || tokens.token(&pod, &ask("", 3607)).await.expect("a token");
    assert_eq!(get().await, "t1");
    let call = &api.calls()[0];
    assert_eq!(call.path(), "/api/v1/namespaces/ns/serviceaccounts/sa/token");
    let body: Value = serde_json::from_slice(&call.body.as_ref().expect("a body").bytes).expect("JSON");
    assert_eq!(
        body["spec"],
        json!({"audiences": [], "expirationSeconds": 3607,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "p", "uid": "u"}})
    );
    pass(2876).await;
    assert_eq!((get().await, api.calls().len()), ("t1".to_owned(), 1));
    let began = Instant::now();
    assert_eq!(tokens.due().await, [PodUid::from("u")]);
    assert!(began.elapsed() <= Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((get().await, api.calls().len()), ("t2".to_owned(), 2));
    assert!(tokio::time::timeout(Duration::from_secs(2800), tokens.due()).await.is_err(), "notified once");
    // 10a §20 step 6
    tokens.forget(&"u".into());
    assert!(tokio::time::timeout(Duration::from_secs(8000), tokens.due()).await.is_err());
    assert_eq!(api.calls().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn each_audience_is_a_request_of_its_own() {
    // AC-10-32
    let (api, tokens) = bench(|number, _| Ok(issued(number, 0, 600)));
    let pod = pod();
    for audience in ["vault", "sts", "vault"] {
        tokens.token(&pod, &ask(audience, 600)).await.expect("a token");
    }
    let asked: Vec<Value> = api
        .calls()
        .iter()
        .map(|call| serde_json::from_slice::<Value>(&call.body.as_ref().expect("a body").bytes).expect("JSON"))
        .map(|body| body["spec"]["audiences"].clone())
        .collect();
    assert_eq!(asked, [json!(["vault"]), json!(["sts"])]);
}

#[tokio::test(start_paused = true)]
async fn an_old_token_serves_to_its_end() {
    // AC-07-12
    let (api, tokens) = bench(|number, _| match number {
        1 => Ok(issued(1, 0, 600)),
        _ => Err(refused(500, "InternalError", "no")),
    });
    let pod = pod();
    let get = async || tokens.token(&pod, &ask("", 600)).await;
    get().await.expect("a token");
    pass(481).await;
    assert_eq!(get().await, Ok("t1".to_owned()));
    assert_eq!(get().await, Ok("t1".to_owned()));
    assert_eq!(api.calls().len(), 2, "no request before the retry is due");
    let mut waits = Vec::new();
    for _ in 0..4 {
        let began = Instant::now();
        tokens.due().await;
        waits.push(began.elapsed().as_secs());
        assert_eq!(get().await, Ok("t1".to_owned()));
    }
    assert_eq!(waits, [1, 2, 4, 8]);
    pass(200).await;
    let failed = get().await.expect_err("expired");
    assert_eq!(failed.to_string(), "token sa expired and refresh failed: no");
}

/// Token of the pod in a volume, issued `age` seconds before the start.
fn on_disk(age: i64, seconds: i64) -> String {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    let claims = json!({"aud": ["api"], "iat": EPOCH - age, "exp": EPOCH - age + seconds, "kubernetes.io": {
        "namespace": "ns", "pod": {"name": "p", "uid": "u"}, "serviceaccount": {"name": "sa", "uid": "s"}}});
    format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims.to_string()))
}

#[tokio::test(start_paused = true)]
async fn a_token_on_disk_serves_until_it_is_due() {
    // AC-10a-38: row 9
    let (api, tokens) = bench(|number, _| Ok(issued(number, 2387, 3607)));
    let (pod, stored) = (pod(), on_disk(500, 3607));
    let get = async || tokens.token(&pod, &ask("", 3607)).await.expect("a token");
    tokens.adopt(&pod, &ask("", 3607), &stored);
    pass(2376).await;
    assert_eq!((get().await, api.calls().len()), (stored.clone(), 0));
    assert_eq!(tokens.due().await, [PodUid::from("u")], "in time");
    pass(10).await;
    assert_eq!((get().await, api.calls().len()), ("t1".to_owned(), 1));
    tokens.adopt(&pod, &ask("", 3607), &stored);
    assert_eq!((get().await, api.calls().len()), ("t1".to_owned(), 1), "the requested token is newer");
}

#[tokio::test(start_paused = true)]
async fn a_token_on_disk_that_is_due_serves_while_no_other_is_to_be_had() {
    let (api, tokens) = bench(|_, _| Err(refused(500, "InternalError", "no")));
    let (pod, stored) = (pod(), on_disk(500, 600));
    tokens.adopt(&pod, &ask("", 600), &stored);
    let get = async || tokens.token(&pod, &ask("", 600)).await;
    assert_eq!((get().await, api.calls().len()), (Ok(stored), 1));
    pass(101).await;
    let failed = get().await.expect_err("expired");
    assert_eq!(failed.to_string(), "token sa expired and refresh failed: no");
}

#[tokio::test(start_paused = true)]
async fn a_token_on_disk_that_does_not_serve_is_not_taken() {
    let (api, tokens) = bench(|number, _| Ok(issued(number, 0, 600)));
    let pod = pod();
    for stored in ["", "t0", &on_disk(601, 600), &on_disk(0, 601)] {
        tokens.adopt(&pod, &ask("", 600), stored);
    }
    assert_eq!(tokens.token(&pod, &ask("", 600)).await, Ok("t1".to_owned()));
    assert_eq!(api.calls().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn failures_in_the_reference_words() {
    let elapsed = async |error: ApiError| {
        let (_, tokens) = bench(move |_, _| Err(error.clone()));
        let began = Instant::now();
        let failed = tokens.token(&pod(), &ask("", 600)).await.expect_err("no token");
        (failed.to_string(), began.elapsed())
    };
    let (text, took) = elapsed(refused(404, "NotFound", "serviceaccounts \"sa\" not found")).await;
    assert_eq!((text.as_str(), took), ("failed to fetch token: serviceaccounts \"sa\" not found", Duration::ZERO));
    let (text, _) = elapsed(refused(404, "NotFound", "the server could not find the requested resource")).await;
    assert_eq!(text, "failed to fetch token: the API server does not have TokenRequest endpoints enabled");
    let (_, took) = elapsed(refused(503, "ServiceUnavailable", "no")).await;
    assert!(took <= TROUBLE && took > Duration::from_secs(1), "{took:?}");
    let (_, took) = elapsed(refused(403, "Forbidden", "no")).await;
    assert!(took >= Duration::from_secs(10) && took < Duration::from_secs(12), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_the_authorizer_does_not_know_yet_gets_its_token_soon() {
    let (_, tokens) = bench(|number, _| match number {
        1..4 => Err(refused(403, "Forbidden", "no relationship found")),
        number => Ok(issued(number, 0, 600)),
    });
    let began = Instant::now();
    assert_eq!(tokens.token(&pod(), &ask("", 600)).await, Ok("t4".to_owned()));
    assert_eq!(began.elapsed(), Duration::from_millis(350));
}
