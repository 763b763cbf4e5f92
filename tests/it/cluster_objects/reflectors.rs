//! Reflector consistency: the store equals the server's objects, whatever happens to the watch.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use berth_api::{ReflectorDeps, ReflectorStore, Selection, api::Resource, reflect};
use berth_metrics::{ReflectorMetrics, Registry};
use berth_types::api::ConfigMap;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use berth_testkit::{
    api_client::connect,
    api_server::{ApiServer, Effect, Fault, Ring},
};

/// Longer than two back-off pauses of a reflector.
const SOON: Duration = Duration::from_secs(60);

fn map(name: &str, value: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name, "namespace": "default"},
           "data": {"k": value}})
}

async fn follow(server: &ApiServer) -> ReflectorStore<ConfigMap> {
    let deps = ReflectorDeps::new(ReflectorMetrics::new(&Registry::new()), CancellationToken::new());
    let (store, run) = reflect(connect(&server.kubeconfig()).await, Selection::all(Resource::CONFIG_MAPS), deps);
    tokio::spawn(run);
    store
}

/// Names and resource versions on the server.
fn there(server: &ApiServer) -> BTreeMap<String, String> {
    let text = |object: &Value, key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
    server.all("configmaps").iter().map(|object| (text(object, "name"), text(object, "resourceVersion"))).collect()
}

fn here(store: &ReflectorStore<ConfigMap>) -> BTreeMap<String, String> {
    let meta = |object: &Arc<ConfigMap>| {
        let meta = &object.metadata;
        (meta.name.clone().unwrap_or_default(), meta.resource_version.clone().unwrap_or_default())
    };
    store.snapshot().objects.values().map(meta).collect()
}

async fn same(store: &mut ReflectorStore<ConfigMap>, server: &ApiServer, after: &str) {
    let until = Instant::now() + SOON;
    while here(store) != there(server) {
        let left = until.saturating_duration_since(Instant::now());
        let waited = timeout(left, store.changed()).await;
        let asked = || server.log().of("configmaps").iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(
            waited.is_ok(),
            "after {after}: {:?}, but the server has {:?}\n{}",
            here(store),
            there(server),
            asked()
        );
    }
}

/// Faults of a healthy watch.
enum WatchFault {
    /// The connection is cut; the following watches get these effects, one each.
    Then(Vec<Effect>),
    /// The server restarts.
    Restart(Ring),
}

/// The store follows changes during and after the fault; it is never empty.
async fn survives(name: &str, trouble: WatchFault) {
    let server = ApiServer::start().await;
    for name in ["a", "b", "c"] {
        server.create(map(name, "0"));
    }
    let mut store = follow(&server).await;
    timeout(SOON, store.synced()).await.expect("synced");
    same(&mut store, &server, "the start").await;
    let fewest = Arc::new(AtomicUsize::new(usize::MAX));
    let (mut seen, fewest_seen) = (store.clone(), fewest.clone());
    let watching = tokio::spawn(async move {
        loop {
            fewest_seen.fetch_min(seen.snapshot().objects.len(), Ordering::Relaxed);
            seen.changed().await;
        }
    });
    let change = |value: &str| {
        server.create(map(&format!("n{value}"), "1"));
        server.patch("configmaps", "default", "a", json!({"data": {"k": value}}));
    };
    match trouble {
        WatchFault::Then(effects) => {
            let on_watches = |effect| server.fault(Fault::new(effect).on("watch", "configmaps"));
            let faults: Vec<_> = effects.into_iter().map(on_watches).collect();
            server.connections().iter().for_each(|connection| connection.close());
            change("1");
            server.delete("configmaps", "default", "b", None);
            same(&mut store, &server, name).await;
            assert!(faults.iter().all(|fault| server.hits(*fault) == 1), "{name} never came");
        }
        WatchFault::Restart(ring) => {
            server.restart(ring, Duration::from_millis(300)).await;
            change("1");
            same(&mut store, &server, name).await;
        }
    }
    change("2");
    same(&mut store, &server, name).await;
    watching.abort();
    assert!(fewest.load(Ordering::Relaxed) >= 3, "{name}: the store was empty");
}

#[tokio::test]
async fn a_store_survives_every_trouble_of_a_watch() {
    let gone = || Effect::status(410, "Expired", "too old resource version");
    let no_streams = Effect::status(422, "Invalid", "sendInitialEvents is forbidden for watch");
    let cases = [
        ("a line that broke off, AC-10a-28", WatchFault::Then(vec![Effect::Truncate(1, 40)])),
        ("watches that end, AC-10-14", WatchFault::Then(vec![Effect::EndWatch(1), Effect::EndWatch(1)])),
        ("429, AC-10-13", WatchFault::Then(vec![Effect::too_many(1)])),
        ("410 and a cut before the marker, AC-10-9, AC-10-11", WatchFault::Then(vec![gone(), Effect::CutBeforeMarker])),
        ("410 and no streaming lists, AC-10-8", WatchFault::Then(vec![gone(), no_streams])),
        ("500", WatchFault::Then(vec![Effect::status(500, "InternalError", "etcdserver: leader changed")])),
        ("a reset", WatchFault::Then(vec![Effect::Reset])),
        ("a restart", WatchFault::Restart(Ring::Keep)),
        ("a restart that forgot, AC-10-11", WatchFault::Restart(Ring::Wipe)),
    ];
    futures::future::join_all(cases.map(|(name, trouble)| survives(name, trouble))).await;
}

#[tokio::test]
async fn a_server_of_before_is_listed_in_pages() {
    // AC-10-8
    let server = ApiServer::start().await;
    server.switch(|switches| (switches.watch_list, switches.pages_at_zero) = (false, true));
    (0..501).for_each(|n| drop(server.create(map(&format!("m{n:03}"), "0"))));
    let mut store = follow(&server).await;
    timeout(SOON, store.synced()).await.expect("synced");
    same(&mut store, &server, "two pages").await;
    server.create(map("late", "0"));
    same(&mut store, &server, "a watch from the list's version").await;
    let log = server.log().of("configmaps");
    assert_eq!(log.verbs(), ["watch", "list", "list", "watch"]);
    assert_eq!(log[1].query("resourceVersion").as_deref(), Some("0"));
}
