//! The event recorder against a fake client.

use async_trait::async_trait;
use serde_json::{Value, json};

use super::*;
use crate::{
    api::{Verb, WatchStream},
    testing::{FakeApi, refused},
};
use berth_metrics::Registry;
use berth_types::PodRef;

struct At(i64);

impl Clock for At {
    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0).expect("a small number")
    }
}

#[derive(Default)]
struct EventCounter(Mutex<usize>);

impl EventSink for EventCounter {
    fn record(&self, _event: EventRecord) {
        *self.0.lock().expect("whole") += 1;
    }
}

fn begin(api: Arc<dyn ApiClient>) -> (EventRecorder, EventSender, Arc<EventCounter>, Registry) {
    let (registry, log) = (Registry::new(), Arc::new(EventCounter::default()));
    let metrics = ApiWriteMetrics::new(&registry);
    let deps = EventDeps { node: "node".into(), api, log: log.clone(), clock: Arc::new(At(1000)), metrics };
    let (recorder, sender) = recorder(deps);
    (recorder, sender, log, registry)
}

fn pod(name: &str) -> PodRef {
    PodRef { uid: format!("uid-{name}").into(), name: name.into(), namespace: "ns".into() }
}

fn lost(registry: &Registry, cause: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|f| f.name() == "berth_events_dropped_total");
    let series = family.into_iter().flat_map(|f| f.get_metric()).find(|m| m.get_label()[0].value() == cause);
    series.map_or(0.0, |m| m.get_counter().get_value())
}

async fn asked(api: &FakeApi, count: usize) {
    api.asked.subscribe().wait_for(|asked| *asked == count).await.expect("asked");
}

#[tokio::test(start_paused = true)]
async fn the_same_event_is_made_once_and_then_counted_up() {
    // AC-10-33
    let api = FakeApi::new(|call| match call.verb {
        Verb::Patch if call.body.as_ref().is_some_and(|body| body.bytes.starts_with(b"{\"count\":4")) => {
            Err(refused(404, "NotFound", "events \"x\" not found"))
        }
        _ => Ok(json!({})),
    });
    let (recorder, sender, log, _) = begin(api.clone());
    let stop = CancellationToken::new();
    let task = tokio::spawn(sender.run(stop.clone()));
    (0..4).for_each(|_| recorder.record(EventRecord::warning(&pod("p"), "BackOff", "m")));
    asked(&api, 5).await;
    let calls = api.calls();
    let verbs: Vec<Verb> = calls.iter().map(|call| call.verb).collect();
    assert_eq!(verbs, [Verb::Create, Verb::Patch, Verb::Patch, Verb::Patch, Verb::Create]);
    assert!(calls.iter().all(|call| call.line == RequestClass::Events && call.namespace == "ns"));
    let body =
        |i: usize| -> Value { serde_json::from_slice(&calls[i].body.as_ref().expect("a body").bytes).expect("JSON") };
    let counts: Vec<Value> = (0..5).map(|i| body(i)["count"].clone()).collect();
    assert_eq!(counts, [1, 2, 3, 4, 4]);
    let name = body(0)["metadata"]["name"].clone();
    assert!(calls[1..4].iter().all(|call| name == call.name.as_str()) && body(4)["metadata"]["name"] == name);
    assert_eq!(*log.0.lock().expect("whole"), 4, "all are logged too");
    stop.cancel();
    task.await.expect("it ends");
}

/// Client that never answers for events about that pod.
struct Stuck(Arc<FakeApi>, &'static str);

#[async_trait]
impl ApiClient for Stuck {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        let text = String::from_utf8_lossy(&call.body.as_ref().expect("a body").bytes).into_owned();
        let answer = self.0.call(call).await;
        if text.contains(self.1) {
            std::future::pending::<()>().await;
        }
        answer
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        self.0.watch(call).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_delays_no_other_object() {
    // AC-10-34
    let api = FakeApi::new(|_| Ok(json!({})));
    let (recorder, sender, _, _) = begin(Arc::new(Stuck(api.clone(), "uid-stuck")));
    let task = tokio::spawn(sender.run(CancellationToken::new()));
    recorder.record(EventRecord::warning(&pod("stuck"), "BackOff", "m"));
    recorder.record(EventRecord::warning(&pod("stuck"), "BackOff", "other"));
    let began = Instant::now();
    (0..100).for_each(|i| recorder.record(EventRecord::normal(&pod(&format!("p{i}")), "Started", "m")));
    asked(&api, 101).await;
    assert!(began.elapsed() < Duration::from_secs(1));
    asked(&api, 102).await;
    assert!(began.elapsed() >= DEADLINE, "its own object waits");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn an_outage_costs_the_oldest() {
    let api = FakeApi::new(|_| Ok(json!({})));
    let (recorder, sender, _, registry) = begin(api.clone());
    for i in 0..1100 {
        recorder.record(EventRecord::normal(&pod(&format!("p{i}")), "Started", "m")); // the sender does not run yet
    }
    assert_eq!(lost(&registry, "overrun"), 100.0);
    let task = tokio::spawn(sender.run(CancellationToken::new()));
    asked(&api, 1000).await;
    let first = api.calls()[0].body.clone().expect("a body");
    assert!(String::from_utf8_lossy(&first.bytes).contains("uid-p100"), "the oldest that is left goes first");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_sent_is_tried_again_for_a_while() {
    let api = FakeApi::new(|call| match call.namespace.as_str() {
        "default" => Err(refused(403, "Forbidden", "no")),
        _ => Err(refused(503, "ServiceUnavailable", "later")),
    });
    let (recorder, sender, _, registry) = begin(api.clone());
    let task = tokio::spawn(sender.run(CancellationToken::new()));
    recorder.record(EventRecord::node_warning("SystemOOM", "m"));
    asked(&api, 1).await;
    recorder.record(EventRecord::warning(&pod("p"), "BackOff", "m"));
    asked(&api, 6).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(api.calls().len(), 6);
    assert_eq!((lost(&registry, "refused"), lost(&registry, "undeliverable")), (1.0, 1.0));
    task.abort();
}

#[test]
fn random_names_are_uuids() {
    let name = random_name();
    assert_eq!((name.len(), &name[14..15]), (36, "4"));
    assert!("89ab".contains(&name[19..20]) && name != random_name());
}
