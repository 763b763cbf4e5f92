//! The status writer against a fake client.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::{
    Snapshot,
    api::{ApiStatus, Verb, WatchStream},
    testing::{FakeApi, refused},
};
use berth_metrics::{Registry, StatusMetrics};
use berth_types::Pod;

struct At(i64);

impl Clock for At {
    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0).expect("a small number")
    }
}

#[derive(Default)]
struct StatusEventSink(Mutex<Vec<EventRecord>>);

impl EventSink for StatusEventSink {
    fn record(&self, event: EventRecord) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

/// Fixture: a writer and its dependencies.
struct World {
    status: Arc<StatusManager>,
    store: watch::Sender<Arc<Snapshot<Pod>>>,
    events: Arc<StatusEventSink>,
    registry: Registry,
    stop: CancellationToken,
    objects: Mutex<HashMap<String, Value>>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn uid_of(name: &str) -> String {
    format!("uid-{name}")
}

fn pod(name: &str, metadata: Value) -> Pod {
    let mut all = json!({"name": name, "namespace": "ns", "uid": uid_of(name)});
    all.as_object_mut().expect("an object").extend(metadata.as_object().expect("an object").clone());
    let object = json!({"metadata": all, "spec": {"containers": [{"name": "c"}]}});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn phase(phase: &str) -> api::PodStatus {
    serde_json::from_value(json!({"phase": phase, "startTime": "2026-01-01T00:00:00Z"})).expect("a status")
}

/// Pod object in a response.
fn object(name: &str, version: u64, metadata: Value, status: Value) -> Value {
    let mut all = json!({"name": name, "namespace": "ns", "uid": uid_of(name), "resourceVersion": version.to_string()});
    all.as_object_mut().expect("an object").extend(metadata.as_object().expect("an object").clone());
    json!({"metadata": all, "spec": {"containers": [{"name": "c"}]}, "status": status})
}

impl World {
    fn begin(api: Arc<dyn ApiClient>) -> Self {
        let registry = Registry::new();
        let status = Arc::new(StatusManager::new(StatusMetrics::new(&registry)));
        let (store, shown) = watch::channel(Arc::default());
        let (events, stop) = (Arc::new(StatusEventSink::default()), CancellationToken::new());
        let deps = StatusWriterDeps {
            status: status.clone(),
            api,
            pods: ReflectorStore::new(shown),
            events: events.clone(),
            clock: Arc::new(At(1000)),
            metrics: ApiWriteMetrics::new(&registry),
            on_written: None,
            liveness: TaskLiveness::default(),
        };
        tokio::spawn(StatusWriter::new(deps).run(stop.clone()));
        Self { status, store, events, registry, stop, objects: Mutex::default() }
    }

    /// Makes the watch show these objects.
    fn show(&self, objects: impl IntoIterator<Item = Value>) {
        let mut all = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        for object in objects {
            all.insert(object["metadata"]["name"].as_str().expect("a name").to_owned(), object);
        }
        self.store.send_replace(Arc::new(Snapshot {
            synced: true,
            version: String::new(),
            objects: all
                .iter()
                .map(|(name, object)| {
                    let pod: Pod = serde_json::from_value(object.clone()).expect("a pod");
                    (("ns".to_owned(), name.clone()), Arc::new(pod))
                })
                .collect(),
        }));
    }

    fn set(&self, name: &str, phase_now: &str) {
        let (pod, now) = (pod(name, json!({})), At(990).now());
        match phase_now {
            "Failed" => self.status.set_stopped(&pod, phase(phase_now), now),
            _ => self.status.set(&pod, phase(phase_now), now),
        };
    }

    fn pending(&self) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|f| f.name() == "berth_pod_status_pending").expect("there");
        family.get_metric()[0].get_gauge().get_value()
    }
}

/// Runs all tasks until they are idle.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

fn bodies(api: &FakeApi) -> Vec<(Verb, String, Value)> {
    let body =
        |call: &Call| call.body.as_ref().map_or(Value::Null, |b| serde_json::from_slice(&b.bytes).expect("JSON"));
    api.calls().iter().map(|call| (call.verb, call.path(), body(call))).collect()
}

fn pending(name: &str, version: u64) -> Value {
    object(name, version, json!({}), json!({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"}))
}

#[tokio::test(start_paused = true)]
async fn what_the_server_has_already_is_not_sent() {
    // AC-10-42, AC-10-19
    let api = FakeApi::new(|_| Err(refused(500, "InternalError", "never asked")));
    let world = World::begin(api.clone());
    let names: Vec<String> = (0..110).map(|i| format!("p{i}")).collect();
    names.iter().for_each(|name| world.set(name, "Pending"));
    settle().await;
    assert_eq!((api.calls().len(), world.pending()), (0, 110.0), "nothing was shown yet");
    world.show(names.iter().map(|name| pending(name, 5)));
    settle().await;
    assert_eq!((api.calls().len(), world.pending(), world.status.unsent().len()), (0, 0.0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_change_is_one_patch_and_its_echo_is_no_work() {
    let api = FakeApi::new(|_| {
        Ok(object("p", 6, json!({}), json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"})))
    });
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    settle().await;
    let wanted = json!({"metadata": {"uid": "uid-p"}, "status": {"phase": "Running"}});
    assert_eq!(bodies(&api), [(Verb::Patch, "/api/v1/namespaces/ns/pods/p/status".to_owned(), wanted)]);
    assert_eq!((world.pending(), world.status.unsent().len()), (0.0, 0));
    // The watch shows an object older than our write (a condition by another writer), then our write.
    let mut late = pending("p", 5);
    late["metadata"]["labels"] = json!({"a": "b"});
    world.show([late]);
    settle().await;
    world.show([object("p", 6, json!({}), json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}))]);
    settle().await;
    assert_eq!(api.calls().len(), 1);
    let families = world.registry.gather();
    let family = families.iter().find(|f| f.name() == "kubelet_pod_status_sync_duration_seconds").expect("there");
    let histogram = family.get_metric()[0].get_histogram();
    assert_eq!((histogram.get_sample_count(), histogram.get_sample_sum()), (1, 10.0));
}

#[tokio::test(start_paused = true)]
async fn a_second_change_is_compared_with_the_response_not_the_watch() {
    let mut version = 5;
    let api = FakeApi::new(move |call| {
        version += 1;
        let body: Value = serde_json::from_slice(&call.body.as_ref().expect("a body").bytes).expect("JSON");
        Ok(object(
            "p",
            version,
            json!({}),
            json!({"phase": body["status"]["phase"], "startTime": "2026-01-01T00:00:00Z"}),
        ))
    });
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    settle().await;
    // Back to the status that the watch still shows: compared with that, nothing would be sent.
    world.set("p", "Pending");
    settle().await;
    let phases: Vec<Value> = bodies(&api).into_iter().map(|(_, _, body)| body["status"]["phase"].clone()).collect();
    assert_eq!(phases, ["Running", "Pending"]);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_is_ended_in_two_requests() {
    // AC-10-24, AC-10-25, AC-02b-13
    let deleting = || json!({"deletionTimestamp": "2026-01-01T00:00:30Z", "finalizers": ["x/y"]});
    let over = move || object("p", 8, deleting(), json!({"phase": "Failed", "startTime": "2026-01-01T00:00:00Z"}));
    let api = FakeApi::new(move |_| Ok(over()));
    let world = World::begin(api.clone());
    let shown = object("p", 7, deleting(), json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}));
    world.show([shown]);
    let ours = pod("p", deleting());
    world.status.set(&ours, phase("Failed"), At(990).now());
    settle().await;
    assert_eq!(api.calls().len(), 0, "something may run");
    world.status.set_stopped(&ours, phase("Failed"), At(990).now());
    settle().await;
    assert_eq!(api.calls().len(), 1, "volumes are still there");
    world.status.terminate(&ours, At(990).now());
    settle().await;
    let all = bodies(&api);
    assert_eq!((all.len(), all[0].0, all[1].0), (2, Verb::Patch, Verb::Delete));
    assert_eq!(all[1].2, json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "uid-p"}}));
    assert!(world.status.all_cached().is_empty(), "forgotten");
    world.show([over()]);
    settle().await;
    assert_eq!(api.calls().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_delete_is_repeated_until_the_pod_is_gone() {
    // AC-10-26
    let mut answers = vec![
        Err(refused(404, "NotFound", "not found")),
        Err(refused(503, "ServiceUnavailable", "later")),
        Err(ApiError::Lost("connection reset".into())),
    ];
    let api = FakeApi::new(move |_| answers.pop().expect("no more"));
    let world = World::begin(api.clone());
    let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:30Z"});
    let status = json!({"phase": "Failed", "startTime": "2026-01-01T00:00:00Z"});
    world.show([object("p", 7, deleting.clone(), status)]);
    let ours = pod("p", deleting);
    world.status.set_stopped(&ours, phase("Failed"), At(990).now());
    world.status.terminate(&ours, At(990).now());
    let began = Instant::now();
    let mut asked = api.asked.subscribe();
    asked.wait_for(|count| *count == 3).await.expect("asked");
    assert!(began.elapsed() >= Duration::from_millis(600) && began.elapsed() < Duration::from_millis(700));
    settle().await;
    assert!(world.status.all_cached().is_empty());
    assert!(api.calls().iter().all(|call| call.verb == Verb::Delete));
}

#[tokio::test(start_paused = true)]
async fn what_the_server_refuses_is_not_repeated() {
    // AC-10-22
    let api = FakeApi::new(|_| Err(refused(422, "Invalid", "may not be transitioned to non-terminated state")));
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((api.calls().len(), world.pending()), (1, 1.0));
    let events: Vec<String> =
        world.events.0.lock().expect("whole").iter().map(|e| format!("{}: {}", e.reason, e.message)).collect();
    assert_eq!(events, ["StatusUpdateRejected: may not be transitioned to non-terminated state"]);
    world.set("p", "Failed");
    settle().await;
    assert_eq!(api.calls().len(), 2, "a new version is another try");
    world.show([pending("p", 6)]);
    settle().await;
    assert_eq!(api.calls().len(), 3, "and so is a newer object");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_gone_is_dropped() {
    // AC-10-20, AC-10-21
    for (code, reason, message) in
        [(404, "NotFound", ""), (422, "Invalid", "metadata.uid: Invalid value: field is immutable")]
    {
        let api = FakeApi::new(move |_| Err(refused(code, reason, message)));
        let world = World::begin(api.clone());
        world.show([pending("p", 5)]);
        world.set("p", "Running");
        settle().await;
        world.set("p", "Failed");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!((api.calls().len(), world.pending()), (1, 0.0), "{code}");
        let mut other = pending("p", 9);
        other["metadata"]["uid"] = "another".into();
        world.show([other]);
        settle().await;
        assert_eq!(api.calls().len(), 1, "{code}: the new pod is left alone");
    }
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_write_is_repeated_while_the_pod_is_there() {
    // AC-10-21
    let api = FakeApi::new(|_| Err(refused(403, "Forbidden", "no relationship found")));
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    let mut asked = api.asked.subscribe();
    asked.wait_for(|count| *count == 4).await.expect("asked");
    world.store.send_replace(Arc::new(Snapshot { synced: true, ..Snapshot::default() }));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(api.calls().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn the_retry_after_of_the_server_is_respected() {
    // AC-10-35
    let mut first = true;
    let api = FakeApi::new(move |_| {
        if std::mem::take(&mut first) {
            let wait = Some(Duration::from_secs(3));
            let status =
                ApiStatus { code: 429, reason: "TooManyRequests".into(), retry_after: wait, ..ApiStatus::default() };
            return Err(ApiError::Refused(Box::new(status)));
        }
        Ok(pending("p", 6))
    });
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    let began = Instant::now();
    api.asked.subscribe().wait_for(|count| *count == 2).await.expect("asked");
    assert!(began.elapsed() >= Duration::from_secs(3) && began.elapsed() < Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_the_latest_goes_out_soon() {
    // AC-10-43
    let away = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let is_away = away.clone();
    let api = FakeApi::new(move |_| match is_away.load(std::sync::atomic::Ordering::Relaxed) {
        true => Err(ApiError::Unreachable("connection refused".into())),
        false => Ok(pending("p", 6)),
    });
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    tokio::time::sleep(Duration::from_secs(300)).await;
    world.set("p", "Failed");
    tokio::time::sleep(Duration::from_secs(300)).await;
    let asked = api.calls().len();
    away.store(false, std::sync::atomic::Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let all = bodies(&api);
    assert_eq!((all.len(), &all[asked].2["status"]["phase"]), (asked + 1, &json!("Failed")));
}

/// Client that never answers for the pods of those names.
struct Stuck {
    names: Vec<&'static str>,
    inner: Arc<FakeApi>,
}

#[async_trait]
impl ApiClient for Stuck {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        let stuck = self.names.contains(&call.name.as_str());
        let answer = self.inner.call(call).await;
        if stuck {
            std::future::pending::<()>().await;
        }
        answer
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        self.inner.watch(call).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_holds_up_its_own_pod_only() {
    // AC-10a-27
    let inner = FakeApi::new(|call| {
        Ok(object(&call.name, 6, json!({}), json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"})))
    });
    let world = World::begin(Arc::new(Stuck { names: vec!["p7"], inner: inner.clone() }));
    let names: Vec<String> = (0..110).map(|i| format!("p{i}")).collect();
    world.show(names.iter().map(|name| pending(name, 5)));
    names.iter().for_each(|name| world.set(name, "Running"));
    let began = Instant::now();
    inner.asked.subscribe().wait_for(|count| *count == 110).await.expect("asked");
    settle().await;
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(world.status.unsent().len(), 1);
    world.set("p7", "Failed");
    settle().await;
    assert_eq!(inner.calls().len(), 110, "one write of a pod at a time");
    inner.asked.subscribe().wait_for(|count| *count == 111).await.expect("asked");
    assert!(began.elapsed() >= DEADLINE, "again after its deadline");
}

#[tokio::test(start_paused = true)]
async fn a_malformed_response_does_not_count_as_written() {
    let count = std::sync::atomic::AtomicUsize::new(0);
    let api = FakeApi::new(move |_| match count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
        0 => Ok(json!([])),
        1 => Ok(json!({"kind": "Status", "status": "Success"})),
        _ => Ok(object("p", 6, json!({}), json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}))),
    });
    let world = World::begin(api.clone());
    world.show([pending("p", 5)]);
    world.set("p", "Running");
    api.asked.subscribe().wait_for(|count| *count == 3).await.expect("asked");
    settle().await;
    assert_eq!((api.calls().len(), world.status.unsent().len()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn ends_and_readiness_go_before_the_rest() {
    let api = FakeApi::new(|call| Ok(object(&call.name, 6, json!({}), json!({}))));
    let world = World::begin(Arc::new(Stuck { names: vec!["a", "b"], inner: api.clone() }));
    let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let ready: api::PodStatus = serde_json::from_value(ready).expect("a status");
    let asked = || api.calls().into_iter().map(|call| call.name).collect::<Vec<_>>();

    ["a", "b", "c", "d"].iter().for_each(|name| world.set(name, "Running"));
    world.show(["a", "b"].map(|name| pending(name, 5)));
    settle().await;
    world.show(["c", "d"].map(|name| pending(name, 5)));
    settle().await;
    let mut first = asked();
    first.sort();
    assert_eq!(first, ["a", "b"], "two are under way: the rest may change yet");

    world.status.set(&pod("ready", json!({})), ready.clone(), At(990).now());
    world.show([pending("ready", 5)]);
    settle().await;
    assert_eq!(asked()[2..], ["ready"]);

    let began = Instant::now();
    world.status.set(&pod("d", json!({})), ready, At(995).now());
    world.set("c", "Pending");
    world.set("c", "Running");
    settle().await;
    assert_eq!(asked()[3..], ["d"], "it became urgent while it waited");
    api.asked.subscribe().wait_for(|count| *count == 5).await.expect("asked");
    assert!(began.elapsed() <= STUCK, "stuck writes delay other pods only briefly");
    let all = bodies(&api);
    assert_eq!(
        (api.calls()[4].name.as_str(), &all[4].2["status"]["phase"]),
        ("c", &json!("Running")),
        "intermediate states are not published"
    );
}
