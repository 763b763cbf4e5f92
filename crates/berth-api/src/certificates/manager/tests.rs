//! The manager against a scripted API server that really signs, under a paused clock.

use std::{
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde_json::Value;

use super::*;
use crate::{
    api::{ApiError, Call, Verb},
    certificates::testing::{Authority, DAY, list, stored},
    testing::{FakeApi, refused},
};
use berth_metrics::Registry;

/// Wall clock that starts at a given time and advances with tokio's.
struct TokioClock(Instant, i64);

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        let since = i64::try_from(self.0.elapsed().as_secs()).expect("not for ever");
        Timestamp::from_second(self.1 + since).expect("a time")
    }
}

#[derive(Default)]
struct RecordedEvents(Mutex<Vec<EventRecord>>);

impl EventSink for RecordedEvents {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("not poisoned").push(event);
    }
}

/// Fixture around a manager.
struct World {
    folder: tempfile::TempDir,
    authority: Arc<Authority>,
    clock: Arc<TokioClock>,
    shown: watch::Receiver<Option<Arc<Pair>>>,
    sink: Arc<watch::Sender<Option<Arc<Pair>>>>,
    events: Arc<RecordedEvents>,
    metrics: CertificateMetrics,
    opened: Arc<AtomicUsize>,
    stop: CancellationToken,
}

const START: i64 = 1_800_000_000;

impl World {
    fn new() -> Self {
        let (sink, shown) = watch::channel(None);
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            authority: Arc::new(Authority::new()),
            clock: Arc::new(TokioClock(Instant::now(), START)),
            shown,
            sink: Arc::new(sink),
            events: Arc::default(),
            metrics: CertificateMetrics::client(&Registry::new(), || 0),
            opened: Arc::default(),
            stop: CancellationToken::new(),
        }
    }

    fn now(&self) -> i64 {
        self.clock.now().as_second()
    }

    fn store(&self, purpose: Purpose) -> CertificateStore {
        CertificateStore::new(self.folder.path(), purpose, None)
    }

    fn keep(&self, pair: &Pair) {
        self.store(Purpose::Client).update(pair, &local(Timestamp::UNIX_EPOCH)).expect("kept");
    }

    /// Fake API server that signs each request at once, valid for `seconds` from now.
    fn signs(&self, seconds: i64) -> Arc<FakeApi> {
        let (authority, clock, mut kept) = (self.authority.clone(), self.clock.clone(), Value::Null);
        FakeApi::new(move |call| match call.verb {
            Verb::Create => {
                let now = clock.now().as_second();
                kept = authority.answer(&stored(call, "u"), now, now + seconds);
                Ok(stored(call, "u"))
            }
            _ => Ok(list(std::slice::from_ref(&kept))),
        })
    }

    async fn start(
        &self,
        purpose: Purpose,
        api: &Arc<FakeApi>,
        bootstrap: Option<&Arc<FakeApi>>,
        templates: watch::Receiver<Option<Template>>,
    ) -> watch::Receiver<CertificateState> {
        self.start_with(purpose, api, bootstrap, templates, None).await
    }

    async fn start_with(
        &self,
        purpose: Purpose,
        api: &Arc<FakeApi>,
        bootstrap: Option<&Arc<FakeApi>>,
        templates: watch::Receiver<Option<Template>>,
        seed: Option<Seed>,
    ) -> watch::Receiver<CertificateState> {
        let opened = self.opened.clone();
        let open = |api: Arc<FakeApi>| -> ApiConnector {
            Arc::new(move || {
                opened.fetch_add(1, Ordering::Relaxed);
                let api: Arc<dyn ApiClient> = api.clone();
                Box::pin(async move { Ok(api) })
            })
        };
        let parts = ManagerDeps {
            store: self.store(purpose),
            seed,
            api: api.clone(),
            bootstrap: bootstrap.cloned().map(open),
            clock: self.clock.clone(),
            metrics: self.metrics.clone(),
            sink: self.sink.clone(),
            events: self.events.clone(),
        };
        let manager = CertificateManager::open(purpose, parts, templates).await;
        let state = manager.state();
        tokio::spawn(manager.run(self.stop.clone()));
        state
    }

    async fn shown(&self, wanted: impl FnMut(&Option<Arc<Pair>>) -> bool) -> Option<Arc<Pair>> {
        self.shown.clone().wait_for(wanted).await.expect("a manager").clone()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn client() -> watch::Receiver<Option<Template>> {
    watch::channel(Some(Template::client("n"))).1
}

fn creates(api: &FakeApi) -> Vec<Call> {
    api.calls().into_iter().filter(|call| call.verb == Verb::Create).collect()
}

fn refusing() -> Arc<FakeApi> {
    FakeApi::new(|_| Err(refused(403, "Forbidden", "no")))
}

#[tokio::test(start_paused = true)]
async fn a_first_certificate_is_asked_for_with_the_bootstrap() {
    // AC-01-32
    let world = World::new();
    let (api, bootstrap) = (refusing(), world.signs(100 * 3600));
    let state = world.start(Purpose::Client, &api, Some(&bootstrap), client()).await;
    let pair = world.shown(Option::is_some).await.expect("a pair");
    assert_eq!(world.store(Purpose::Client).current().expect("readable").as_ref(), Some(&*pair));
    assert_eq!(state.borrow().valid_until, Some(pair.leaf().expect("a leaf").not_after));
    let [made] = creates(&bootstrap).try_into().expect("one request");
    let body: Value = serde_json::from_slice(&made.body.expect("a body").bytes).expect("JSON");
    assert_eq!(body["metadata"]["generateName"], "csr-");
    assert_eq!(body["spec"]["usages"], serde_json::json!(["digital signature", "client auth"]));
    assert!(api.calls().is_empty(), "no request is sent without credentials");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_replaced_in_time() {
    // AC-01-33
    let world = World::new();
    let first = world.authority.pair("n", START, START + 100 * 3600);
    world.keep(&first);
    let (api, bootstrap) = (world.signs(100 * 3600), refusing());
    world.start(Purpose::Client, &api, Some(&bootstrap), client()).await;
    assert_eq!(world.shown.borrow().as_deref(), Some(&first), "shown before anything runs");
    world.shown(|pair| pair.as_deref() != Some(&first)).await;
    let hours = (world.now() - START) as f64 / 3600.0;
    assert!((70.0..=90.1).contains(&hours), "{hours}");
    assert_eq!((creates(&api).len(), creates(&bootstrap).len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn an_expired_certificate_recovers_by_the_bootstrap() {
    // Spec 10 §8.3; AC-10a-20 from the client's side.
    let world = World::new();
    world.keep(&world.authority.pair("n", START, START + 600));
    let (api, bootstrap) = (FakeApi::new(|_| Err(refused(401, "Unauthorized", "Unauthorized"))), world.signs(DAY));
    // The bootstrap credentials are accepted again only after a while, as when an operator creates a new token.
    let (good, since) = (bootstrap.clone(), world.clock.clone());
    let asked = Arc::new(Mutex::new(0_usize));
    let count = asked.clone();
    let inner = Mutex::new(good);
    let late = FakeApi::new(move |call| {
        *count.lock().expect("not poisoned") += 1;
        if since.now().as_second() < START + 3600 {
            return Err(refused(401, "Unauthorized", "Unauthorized"));
        }
        let inner = inner.lock().expect("not poisoned");
        futures::FutureExt::now_or_never(inner.call(call.clone()))
            .expect("answers at once")
            .map(|bytes| serde_json::from_slice(&bytes).expect("JSON"))
    });
    let state = world.start(Purpose::Client, &api, Some(&late), client()).await;
    world.shown(Option::is_none).await;
    assert!(state.borrow().valid_until.is_none());
    let pair = world.shown(Option::is_some).await.expect("a pair");
    assert_eq!(pair.leaf().expect("a leaf").common_name, "system:node:n");
    let waited = world.now() - START;
    assert!((3600..3600 + 60).contains(&waited), "{waited} s: asked all the time, at most each 32 s");
    assert!(world.opened.load(Ordering::Relaxed) > 50, "the bootstrap is read again each time");
    assert!(*asked.lock().expect("not poisoned") < 150);
    assert_eq!((state.borrow().failures, state.borrow().error.clone()), (0, None));
    assert!(world.metrics.failures.get() > 50);
    let events = world.events.0.lock().expect("not poisoned").len();
    assert_eq!(events, 1, "one event for one cause");
}

#[tokio::test(start_paused = true)]
async fn whom_the_server_does_not_know_any_more_asks_with_the_bootstrap() {
    let world = World::new();
    let first = world.authority.pair("n", START, START + DAY);
    world.keep(&first);
    let api = FakeApi::new(|_| Err(refused(401, "Unauthorized", "Unauthorized")));
    let bootstrap = world.signs(DAY);
    world.start(Purpose::Client, &api, Some(&bootstrap), client()).await;
    world.shown(|pair| pair.as_deref() != Some(&first)).await;
    assert!(world.now() - START < DAY, "before it expires");
    assert_eq!((creates(&api).len(), creates(&bootstrap).len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_denied_request_is_followed_by_another() {
    // Spec 10a §12, variants; AC-10a-22 from the client's side.
    let world = World::new();
    let (authority, now) = (world.authority.clone(), world.now());
    let (mut kept, mut count) = (Value::Null, 0);
    let bootstrap = FakeApi::new(move |call| match call.verb {
        Verb::Create => {
            count += 1;
            kept = authority.answer(&stored(call, "u"), now, now + DAY);
            match count {
                1 => kept["status"] = serde_json::json!({"conditions": [{"type": "Denied", "reason": "R"}]}),
                2 => kept["metadata"]["name"] = "other".into(),
                _ => {}
            }
            Ok(stored(call, "u"))
        }
        _ => Ok(list(std::slice::from_ref(&kept))),
    });
    let state = world.start(Purpose::Client, &refusing(), Some(&bootstrap), client()).await;
    world.shown(Option::is_some).await;
    let waited = world.now() - START;
    assert!((6..=8).contains(&waited), "2 s, then 4 s: {waited}");
    let names: Vec<Value> =
        creates(&bootstrap).iter().map(|call| stored(call, "u")["metadata"]["name"].clone()).collect();
    assert!(names.len() == 3 && names[0] != names[1] && names[1] != names[2], "a new key for each: {names:?}");
    assert_eq!(world.metrics.failures.get(), 2);
    assert!(state.borrow().error.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_serving_request_waits_for_addresses_and_is_made_once() {
    // AC-10a-21 from the client's side: nobody approves it.
    let world = World::new();
    let kept = Arc::new(Mutex::new(Vec::<Value>::new()));
    let there = kept.clone();
    let api = FakeApi::new(move |call| {
        let mut kept = there.lock().expect("not poisoned");
        if call.verb == Verb::Create {
            kept.push(stored(call, "u"));
            return kept.last().cloned().ok_or(ApiError::Malformed(String::new()));
        }
        Ok(list(&kept))
    });
    let (wanted, templates) = watch::channel(None);
    world.start(Purpose::Serving, &api, None, templates).await;
    sleep(Duration::from_secs(3600)).await;
    assert!(api.calls().is_empty(), "no address is known");
    let mut template = Template { purpose: Purpose::Serving, ips: vec![[10, 0, 0, 1].into()], ..Template::client("n") };
    wanted.send_replace(Some(template.clone()));
    sleep(Duration::from_secs(3 * 3600)).await;
    assert_eq!(creates(&api).len(), 1, "it lies there, and is waited for");
    template.ips.push([10, 0, 0, 2].into());
    wanted.send_replace(Some(template.clone()));
    sleep(Duration::from_secs(5)).await;
    assert_eq!(creates(&api).len(), 2, "another address, another request");
    let made = kept.lock().expect("not poisoned").clone();
    kept.lock().expect("not poisoned")[1] = world.authority.answer(&made[1], world.now(), world.now() + DAY);
    let pair = world.shown(Option::is_some).await.expect("a pair");
    assert_eq!(pair.leaf().expect("a leaf").ips, template.ips);
    assert_eq!(made[1]["spec"]["signerName"], "kubernetes.io/kubelet-serving");
}

#[tokio::test(start_paused = true)]
async fn what_stands_in_a_kubeconfig_is_used_and_replaced_at_once() {
    let world = World::new();
    let embedded = world.authority.pair("n", START, START + 100 * DAY);
    let api = world.signs(DAY);
    let seeds = embedded.clone();
    let seed: Seed = Arc::new(move || Some((seeds.clone(), CertificateOrigin::Data)));
    world.start_with(Purpose::Client, &api, None, client(), Some(seed)).await;
    assert_eq!(world.shown.borrow().as_deref(), Some(&embedded));
    assert_eq!(world.store(Purpose::Client).current().expect("readable"), Some(embedded.clone()));
    world.shown(|pair| pair.as_deref() != Some(&embedded)).await;
    assert!(world.now() - START < 5);
}

#[tokio::test(start_paused = true)]
async fn a_pair_written_by_another_process_is_adopted() {
    let world = World::new();
    let api = refusing();
    let state = world.start(Purpose::Client, &api, None, client()).await;
    let mut failing = state.clone();
    failing.wait_for(|state| state.failures >= 3).await.expect("a manager");
    assert!(state.borrow().server_answers, "it refuses, so it is there");
    let renewed = world.authority.pair("n", START, START + 100 * DAY);
    world.keep(&renewed);
    assert_eq!(world.shown(Option::is_some).await.as_deref(), Some(&renewed));
    assert!(Path::new(&world.store(Purpose::Client).link()).is_symlink());
}

#[test]
fn the_identity_sink_updates_the_transport() {
    let (authority, identity) = (Authority::new(), ClientIdentity::anonymous());
    let pair = Arc::new(authority.pair("n", START, START + DAY));
    let sink: &dyn IdentitySink = &identity;
    sink.set(Some(pair));
    assert_eq!(identity.current().map(|pair| pair.chain().len()), Some(1));
    sink.set(None);
    assert!(identity.current().is_none());
}
