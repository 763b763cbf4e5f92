//! Reflectors against a fake server, under a paused clock.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{sync::mpsc::UnboundedSender, task::JoinHandle, time::Instant};

use super::*;
use crate::{
    api::{ApiError, Call, Resource, Verb},
    store::Snapshot,
    testing::{FakeApi, event, marker, refused},
};
use berth_metrics::Registry;
use berth_types::api;

struct Bench {
    api: Arc<FakeApi>,
    store: ReflectorStore<api::ConfigMap>,
    nudge: Arc<Notify>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    registry: Registry,
}

/// Reflects ConfigMaps; `answer` answers lists.
fn follow(
    prepare: impl FnOnce(&FakeApi),
    answer: impl FnMut(&Call) -> Result<Value, ApiError> + Send + 'static,
) -> Bench {
    let (api, registry) = (FakeApi::new(answer), Registry::new());
    prepare(&api);
    let deps = ReflectorDeps::new(ReflectorMetrics::new(&registry), CancellationToken::new());
    let (nudge, stop) = (deps.nudge.clone(), deps.stop.clone());
    let selection = Selection::one(Resource::CONFIG_MAPS, "ns", "a");
    let (store, run) = reflect(api.clone(), selection, deps);
    Bench { api, store, nudge, stop, task: tokio::spawn(run), registry }
}

fn no_list(call: &Call) -> Result<Value, ApiError> {
    panic!("nothing is to be listed: {call:?}")
}

impl Bench {
    /// Waits for that many calls; returns the last one and its time.
    async fn asked(&self, count: usize) -> (Call, Instant) {
        let mut asked = self.api.asked.subscribe();
        let waited = tokio::time::timeout(Duration::from_secs(3600), asked.wait_for(|now| *now >= count)).await;
        waited.expect("the request arrives in time").expect("the server is there");
        (self.api.calls()[count - 1].clone(), Instant::now())
    }

    async fn until(&mut self, mut is: impl FnMut(&Snapshot<api::ConfigMap>) -> bool) -> Arc<Snapshot<api::ConfigMap>> {
        let found = async {
            loop {
                let snapshot = self.store.snapshot();
                if is(&snapshot) {
                    return snapshot;
                }
                self.store.changed().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(3600), found).await.expect("seen in time")
    }

    fn names(&self) -> Vec<String> {
        self.store.snapshot().objects.keys().map(|(_, name)| name.clone()).collect()
    }

    /// Value of the state gauge.
    fn state(&self) -> Option<f64> {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "berth_reflector_state")?;
        family.get_metric().first().map(|metric| metric.get_gauge().get_value())
    }
}

fn map(name: &str, version: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"k": value},
        "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": version,
            "managedFields": [{"manager": "m"}]}})
}

fn value(snapshot: &Snapshot<api::ConfigMap>, name: &str) -> Option<String> {
    snapshot.get("ns", name)?.data.as_ref()?.get("k").cloned()
}

fn end(version: &str) -> Value {
    marker("v1", "ConfigMap", version)
}

fn send_events(watch: &UnboundedSender<Value>, events: impl IntoIterator<Item = Value>) {
    for event in events {
        watch.send(event).expect("the channel has a receiver");
    }
}

fn version(call: &Call) -> Option<&str> {
    call.query.iter().find(|(name, _)| *name == "resourceVersion").map(|(_, value)| value.as_str())
}

fn is_stream(call: &Call) -> bool {
    call.verb == Verb::Watch && call.query.iter().any(|(name, _)| *name == "sendInitialEvents")
}

#[tokio::test(start_paused = true)]
async fn all_is_there_at_the_marker_and_changes_are_followed() {
    let mut bench = follow(|_| {}, no_list);
    let watch = bench.api.next_watch();
    send_events(&watch, [event("ADDED", map("a", "3", "1")), event("ADDED", map("b", "4", "1"))]);
    let (call, began) = bench.asked(1).await;
    assert!(is_stream(&call) && version(&call).is_none());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!bench.store.snapshot().synced && bench.names().is_empty(), "AC-10-9: not before the marker");
    assert_eq!(bench.state(), Some(0.0));
    send_events(&watch, [end("5")]);
    let snapshot = bench.until(|snapshot| snapshot.synced).await;
    assert_eq!((snapshot.objects.len(), snapshot.version.as_str()), (2, "5"));
    assert!(snapshot.objects.values().all(|object| object.metadata.managed_fields.is_none()));
    assert_eq!(bench.state(), Some(1.0));
    let sent = Instant::now();
    send_events(&watch, [event("MODIFIED", map("a", "6", "2")), event("DELETED", map("b", "7", "1"))]);
    let snapshot = bench.until(|snapshot| snapshot.version == "7").await;
    assert_eq!((value(&snapshot, "a").as_deref(), snapshot.objects.len()), (Some("2"), 1));
    assert_eq!(sent.elapsed(), Duration::ZERO, "AC-10-16: nothing is waited for");
    assert!(began.elapsed() < Duration::from_secs(1800));
}

#[tokio::test(start_paused = true)]
async fn a_stream_cut_before_the_marker_leaves_nothing_behind() {
    // AC-10-9
    let mut bench = follow(|_| {}, no_list);
    let cut = bench.api.next_watch();
    send_events(&cut, [event("ADDED", map("a", "3", "1")), event("ADDED", map("b", "4", "1"))]);
    bench.asked(1).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let fresh = bench.api.next_watch();
    drop(cut);
    let (call, _) = bench.asked(2).await;
    assert!(is_stream(&call) && version(&call).is_none());
    assert!(!bench.store.snapshot().synced);
    // AC-10-10: a bookmark with the value "false" ends nothing.
    let mut not_yet = end("8");
    not_yet["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"] = json!("false");
    send_events(&fresh, [event("ADDED", map("a", "3", "1")), not_yet]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!bench.store.snapshot().synced);
    send_events(&fresh, [end("9")]);
    bench.until(|snapshot| snapshot.synced).await;
    assert_eq!(bench.names(), ["a"], "b was deleted in between");
}

#[tokio::test(start_paused = true)]
async fn a_server_without_streaming_lists_is_listed() {
    // AC-10-8
    let pages = |call: &Call| {
        assert_eq!(call.verb, Verb::List);
        let is_first = !call.query.iter().any(|(name, _)| *name == "continue");
        Ok(match is_first {
            true => json!({"metadata": {"resourceVersion": "40", "continue": "more"}, "items": [map("a", "3", "1")]}),
            false => json!({"metadata": {"resourceVersion": "40"}, "items": [map("b", "4", "1"), {"metadata": 7}]}),
        })
    };
    let mut kept = None;
    let mut bench = follow(
        |api| {
            api.next_watch_fails(refused(422, "Invalid", "sendInitialEvents is forbidden for watch"));
            kept = Some(api.next_watch());
        },
        pages,
    );
    let snapshot = bench.until(|snapshot| snapshot.synced).await;
    assert_eq!((bench.names(), snapshot.version.as_str()), (vec!["a".to_owned(), "b".to_owned()], "40"));
    let (watch, at) = bench.asked(4).await;
    let calls = bench.api.calls();
    assert!(is_stream(&calls[0]));
    assert_eq!((version(&calls[1]), version(&calls[2])), (Some("0"), None));
    assert!(calls[1].query.contains(&("limit", "500".to_owned())));
    assert!(!is_stream(&watch) && version(&watch) == Some("40") && at.elapsed() == Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_forgotten_version_empties_nothing() {
    // AC-10-11
    let mut bench = follow(|_| {}, no_list);
    let first = bench.api.next_watch();
    send_events(&first, [event("ADDED", map("a", "3", "1")), event("ADDED", map("b", "4", "1")), end("500")]);
    let before = bench.until(|snapshot| snapshot.synced).await;
    let second = bench.api.next_watch();
    send_events(
        &first,
        [event("ERROR", json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}))],
    );
    let (call, _) = bench.asked(2).await;
    assert!(is_stream(&call) && version(&call) == Some("500"));
    assert_eq!(bench.names(), ["a", "b"]);
    send_events(&second, [event("ADDED", map("a", "3", "1")), event("ADDED", map("b", "501", "2")), end("510")]);
    let after = bench.until(|snapshot| snapshot.version == "510").await;
    let object = |snapshot: &Snapshot<api::ConfigMap>, name: &str| snapshot.get("ns", name).expect("there").clone();
    assert!(Arc::ptr_eq(&object(&before, "a"), &object(&after, "a")), "what is the same stays the same");
    assert_eq!(value(&after, "b").as_deref(), Some("2"));
    // AC-10-12
    let third = bench.api.next_watch();
    let mut too_new = refused(504, "Timeout", "Too large resource version");
    if let ApiError::Refused(status) = &mut too_new {
        status.causes =
            vec![crate::api::ApiStatusCause { reason: "ResourceVersionTooLarge".into(), ..Default::default() }];
    }
    let gone = event("ERROR", json!({"kind": "Status", "code": 500, "reason": "InternalError", "message": "x"}));
    bench.api.next_watch_fails(too_new);
    drop(third);
    let fourth = bench.api.next_watch();
    send_events(&second, [gone]);
    let (call, _) = bench.asked(3).await;
    assert!(is_stream(&call) && version(&call) == Some("510"));
    let (call, _) = bench.asked(4).await;
    assert!(version(&call).is_some_and(|version| version == "510"), "the stream that ended in no time: {call:?}");
    drop(fourth);
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_are_taken_up_where_they_were() {
    // AC-10-14
    let mut bench = follow(|_| {}, no_list);
    let mut watch = bench.api.next_watch();
    send_events(&watch, [end("5")]);
    bench.until(|snapshot| snapshot.synced).await;
    for round in 2..8 {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let next = bench.api.next_watch();
        send_events(&watch, [event("ADDED", map("a", &format!("{round}0"), "1"))]);
        let ended = Instant::now();
        drop(std::mem::replace(&mut watch, next));
        let (call, at) = bench.asked(round).await;
        assert_eq!((is_stream(&call), version(&call)), (false, Some(format!("{round}0").as_str())));
        assert_eq!(at - ended, Duration::ZERO);
    }
    // AC-10-28 of part B: a truncated line loses only its own event.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let next = bench.api.next_watch();
    send_events(&watch, [json!("half a li")]);
    let (call, _) = bench.asked(8).await;
    assert_eq!((is_stream(&call), version(&call)), (false, Some("70")));
    // AC-10-13
    let mut busy = refused(429, "TooManyRequests", "later");
    if let ApiError::Refused(status) = &mut busy {
        status.retry_after = Some(Duration::from_secs(2));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    bench.api.next_watch_fails(busy);
    let _last = bench.api.next_watch();
    drop(next);
    let (_, refused_at) = bench.asked(9).await;
    assert_eq!(bench.state(), Some(2.0));
    let (call, at) = bench.asked(10).await;
    assert!(at - refused_at >= Duration::from_secs(2) && !is_stream(&call) && version(&call) == Some("70"));
    assert_eq!(bench.names(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn who_may_not_read_yet_is_let_in_soon() {
    // AC-10-29
    let forbidden = || refused(403, "Forbidden", "no relationship found between node 'n' and this object");
    let mut kept = None;
    let mut bench = follow(
        |api| {
            (0..3).for_each(|_| api.next_watch_fails(forbidden()));
            let watch = api.next_watch();
            send_events(&watch, [event("ADDED", map("a", "3", "1")), end("5")]);
            kept = Some(watch);
        },
        no_list,
    );
    let began = Instant::now();
    bench.until(|snapshot| snapshot.synced).await;
    assert_eq!(began.elapsed(), Duration::from_millis(350));
    assert_eq!(bench.names(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_nudge_ends_a_wait() {
    let refuse = |_: &Call| Err(refused(403, "Forbidden", "no"));
    // No watch is prepared: every one is refused.
    let mut bench = follow(|_| {}, refuse);
    bench.asked(12).await;
    let asked = bench.api.calls().len();
    let watch = bench.api.next_watch();
    send_events(&watch, [end("5")]);
    let nudged = Instant::now();
    bench.nudge.notify_one();
    bench.asked(asked + 1).await;
    bench.until(|snapshot| snapshot.synced).await;
    assert_eq!(nudged.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn other_credentials_end_a_wait() {
    // A joining node is `system:anonymous` until its first certificate is issued.
    let refuse = |_: &Call| Err(refused(403, "Forbidden", "no"));
    let mut bench = follow(|_| {}, refuse);
    bench.asked(12).await;
    let asked = bench.api.calls().len();
    let watch = bench.api.next_watch();
    send_events(&watch, [end("5")]);
    let changed = Instant::now();
    bench.api.credentials.send_modify(|count| *count += 1);
    bench.asked(asked + 1).await;
    bench.until(|snapshot| snapshot.synced).await;
    assert_eq!(changed.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_costs_only_itself() {
    let mut bench = follow(|_| {}, no_list);
    let watch = bench.api.next_watch();
    let mut broken = map("b", "4", "1");
    broken["data"] = json!(["not", "a", "map"]);
    let unknown = event("RENAMED", json!({"metadata": {"name": "a"}}));
    send_events(&watch, [event("ADDED", map("a", "3", "1")), event("ADDED", broken.clone()), unknown, end("5")]);
    bench.until(|snapshot| snapshot.synced).await;
    send_events(&watch, [event("ADDED", broken), event("ADDED", map("c", "6", "1"))]);
    bench.until(|snapshot| snapshot.version == "6").await;
    assert_eq!(bench.names(), ["a", "c"]);
    bench.stop.cancel();
    bench.task.await.expect("ended");
    assert_eq!((bench.store.snapshot().objects.len(), bench.store.get("ns", "c").is_some()), (2, true), "it stays");
}
