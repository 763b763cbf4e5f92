//! The object source against a fake cluster: a few objects, and their watches.

use std::{
    sync::{Mutex, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::Instant};

use super::*;
use crate::{
    api::{ApiError, Call, Verb, WatchStream},
    testing::{event, marker, refused},
};
use berth_metrics::Registry;
use berth_ports::SystemClock;

type Listener = (Call, mpsc::UnboundedSender<Value>);

#[derive(Default)]
struct Cluster {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    objects: Vec<(&'static str, Value)>,
    listeners: Vec<Listener>,
    calls: Vec<Call>,
    version: u32,
    /// Reads of this resource are forbidden.
    forbidden: Option<&'static str>,
    /// Watches are established and send nothing.
    mute: bool,
    /// The next watch of this resource panics.
    panics: Option<&'static str>,
}

fn concerns(call: &Call, resource: &str, object: &Value) -> bool {
    let meta = &object["metadata"];
    let named = call.query.iter().find_map(|(_, value)| value.strip_prefix("metadata.name="));
    call.resource.plural == resource
        && (call.namespace.is_empty() || meta["namespace"] == call.namespace.as_str())
        && named.is_none_or(|name| meta["name"] == name)
}

impl Cluster {
    fn locked(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the object, and sends it to its watches.
    fn put(&self, resource: &'static str, mut object: Value) {
        let mut state = self.locked();
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        let same = |(of, other): &&mut (&str, Value)| {
            *of == resource && other["metadata"]["name"] == object["metadata"]["name"]
        };
        let kind = match state.objects.iter_mut().find(same) {
            Some((_, known)) => {
                *known = object.clone();
                "MODIFIED"
            }
            None => {
                state.objects.push((resource, object.clone()));
                "ADDED"
            }
        };
        state.listeners.retain(|(_, send)| !send.is_closed());
        for (_, send) in state.listeners.iter().filter(|(call, _)| concerns(call, resource, &object)) {
            let _gone = send.send(event(kind, object.clone()));
        }
    }

    fn delete(&self, resource: &'static str, name: &str) {
        let mut state = self.locked();
        let at = state.objects.iter().position(|(of, object)| *of == resource && object["metadata"]["name"] == name);
        let (_, object) = state.objects.remove(at.expect("it exists"));
        for (_, send) in state.listeners.iter().filter(|(call, _)| concerns(call, resource, &object)) {
            let _gone = send.send(event("DELETED", object.clone()));
        }
    }

    /// Calls for that resource so far.
    fn calls(&self, resource: &str) -> Vec<Call> {
        self.locked().calls.iter().filter(|call| call.resource.plural == resource).cloned().collect()
    }

    fn watching(&self, resource: &str) -> usize {
        let state = self.locked();
        state.listeners.iter().filter(|(call, send)| call.resource.plural == resource && !send.is_closed()).count()
    }
}

struct ChannelWatch(mpsc::UnboundedReceiver<Value>);

impl WatchStream for ChannelWatch {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(Bytes::from(event.to_string()))))
    }
}

#[async_trait]
impl ApiClient for Cluster {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        let mut state = self.locked();
        state.calls.push(call.clone());
        let found = state.objects.iter().find(|(resource, object)| {
            concerns(&call, resource, object) && object["metadata"]["name"] == call.name.as_str()
        });
        match found {
            Some((_, object)) => Ok(Bytes::from(object.to_string())),
            None => Err(refused(404, "NotFound", &format!("{} {:?} not found", call.resource.plural, call.name))),
        }
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        let mut state = self.locked();
        state.calls.push(call.clone());
        assert_eq!(call.verb, Verb::Watch);
        let is_hit = state.panics.take_if(|resource| *resource == call.resource.plural).is_some();
        assert!(!is_hit, "as asked for");
        if state.forbidden == Some(call.resource.plural) {
            return Err(refused(403, "Forbidden", "no relationship found between node 'n' and this object"));
        }
        let (send, events) = mpsc::unbounded_channel();
        if !state.mute {
            let matching = state.objects.iter().filter(|(resource, object)| concerns(&call, resource, object));
            matching.for_each(|(_, object)| send.send(event("ADDED", object.clone())).expect("it listens"));
            let end = marker(&call.resource.api_version(), call.resource.kind, &state.version.to_string());
            send.send(end).expect("it listens");
        }
        state.listeners.push((call, send));
        Ok(Box::new(ChannelWatch(events)))
    }
}

struct Bench {
    cluster: Arc<Cluster>,
    objects: Arc<ApiObjects>,
    changed: ChangedPods,
    ttl: watch::Sender<Duration>,
    _stop: tokio_util::sync::DropGuard,
}

fn bench(strategy: Strategy) -> Bench {
    let (cluster, stop) = (Arc::new(Cluster::default()), CancellationToken::new());
    let (ttl, reads) = watch::channel(Duration::from_secs(60));
    let deps = ObjectsDeps {
        api: cluster.clone(),
        metrics: ReflectorMetrics::new(&Registry::new()),
        clock: Arc::new(SystemClock),
        ttl: reads,
        certificates: None,
        tasks: TaskTracker::new(),
        stop: stop.clone(),
    };
    let config = ObjectsConfig { strategy, sync_frequency: Duration::from_secs(60), trust_bundles: false };
    let (objects, changed, upkeep) = ApiObjects::new(&config, deps);
    tokio::spawn(upkeep);
    Bench { cluster, objects, changed, ttl, _stop: stop.drop_guard() }
}

fn config_map(name: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"k": value}, "binaryData": {"b": "AAE="},
        "metadata": {"name": name, "namespace": "ns", "uid": name}})
}

fn secret(name: &str, value: &str) -> Value {
    let data = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, value);
    json!({"apiVersion": "v1", "kind": "Secret", "data": {"k": data}, "type": "Opaque",
        "metadata": {"name": name, "namespace": "ns", "uid": name}})
}

/// A pod that mounts these ConfigMaps and Secrets.
fn pod(uid: &str, config_maps: &[&str], secrets: &[&str]) -> Pod {
    let maps = config_maps.iter().map(|name| json!({"name": format!("m-{name}"), "configMap": {"name": name}}));
    let secrets = secrets.iter().map(|name| json!({"name": format!("s-{name}"), "secret": {"secretName": name}}));
    let object = json!({"metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"containers": [], "volumes": maps.chain(secrets).collect::<Vec<_>>()}});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

impl Bench {
    async fn read(&self, name: &str) -> Result<String, String> {
        let data = self.objects.config_map("ns", name).await.map_err(|e| e.to_string())?;
        Ok(data.get("k").cloned().unwrap_or_default())
    }

    async fn notified_pods(&mut self, count: usize) -> BTreeSet<String> {
        let mut pods = BTreeSet::new();
        while pods.len() < count {
            let pod = tokio::time::timeout(Duration::from_secs(3600), self.changed.next()).await.expect("received");
            pods.insert(pod.to_string());
        }
        pods
    }
}

#[tokio::test(start_paused = true)]
async fn objects_are_watched_while_pods_reference_them() {
    let mut bench = bench(Strategy::Watch);
    bench.cluster.put("configmaps", config_map("a", "1"));
    assert_eq!(bench.read("a").await, Err("object \"ns\"/\"a\" not registered".to_owned()));
    for uid in ["u", "v"] {
        bench.objects.register(&pod(uid, &["a", "none"], &[]));
        bench.objects.register(&pod(uid, &["a", "none"], &[]));
    }
    assert_eq!(bench.read("a").await, Ok("1".to_owned()));
    assert_eq!(bench.read("none").await, Err("configmap \"none\" not found".to_owned()));
    assert_eq!(bench.cluster.watching("configmaps"), 2, "one for each object, whoever uses it");
    let files = bench.objects.config_map_files("ns", "a").await.expect("read");
    assert_eq!(files.get("b").map(Vec::as_slice), Some(&[0, 1][..]));
    // AC-10a-36: a change arrives without a request, and its users are notified.
    let (asked, changed) = (bench.cluster.calls("configmaps").len(), Instant::now());
    bench.cluster.put("configmaps", config_map("a", "2"));
    assert_eq!(bench.notified_pods(2).await, ["u".to_owned(), "v".to_owned()].into());
    assert!(changed.elapsed() < Duration::from_secs(1));
    assert_eq!((bench.read("a").await, bench.cluster.calls("configmaps").len()), (Ok("2".to_owned()), asked));
    bench.cluster.delete("configmaps", "a");
    bench.notified_pods(2).await;
    assert_eq!(bench.read("a").await, Err("configmap \"a\" not found".to_owned()));
    bench.cluster.put("configmaps", config_map("a", "3"));
    bench.notified_pods(2).await;
    assert_eq!(bench.read("a").await, Ok("3".to_owned()));
    bench.objects.unregister(&"u".into());
    assert_eq!(bench.read("a").await, Ok("3".to_owned()));
    bench.objects.unregister(&"v".into());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.cluster.watching("configmaps"), 0);
    assert!(bench.read("a").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn immutable_objects_are_followed_no_longer_than_read() {
    // AC-02b-21, AC-10-30
    let mut bench = bench(Strategy::Watch);
    let mut fixed = secret("s", "x");
    fixed["immutable"] = true.into();
    bench.cluster.put("secrets", fixed);
    bench.objects.register(&pod("u", &[], &["s"]));
    assert_eq!(bench.objects.secret("ns", "s").await.expect("read").get("k").map(Vec::as_slice), Some(&b"x"[..]));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.cluster.watching("secrets"), 0);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(bench.objects.secret("ns", "s").await.is_ok());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(bench.objects.secret("ns", "s").await.is_ok());
    assert_eq!(bench.cluster.calls("secrets").len(), 1);
    assert!(tokio::time::timeout(Duration::from_secs(60), bench.changed.next()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn who_follows_and_panics_begins_again() {
    let mut bench = bench(Strategy::Watch);
    bench.cluster.put("configmaps", config_map("a", "1"));
    bench.cluster.locked().panics = Some("configmaps");
    bench.objects.register(&pod("u", &["a"], &[]));
    bench.read("a").await.expect_err("nobody follows it");
    assert_eq!(bench.cluster.watching("configmaps"), 0);
    assert_eq!(bench.cluster.locked().panics, None, "it has");
    assert_eq!(bench.notified_pods(1).await, ["u".to_owned()].into(), "a waiter that gave up is notified");
    assert_eq!(bench.read("a").await, Ok("1".to_owned()));
    bench.cluster.put("configmaps", config_map("a", "2"));
    bench.notified_pods(1).await;
    assert_eq!(bench.read("a").await, Ok("2".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn an_idle_object_is_unwatched_and_still_served() {
    let bench = bench(Strategy::Watch);
    bench.cluster.put("configmaps", config_map("a", "1"));
    bench.objects.register(&pod("u", &["a"], &[]));
    assert_eq!(bench.read("a").await, Ok("1".to_owned()));
    tokio::time::sleep(Duration::from_secs(299)).await;
    assert_eq!(bench.cluster.watching("configmaps"), 1, "five times syncFrequency");
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(bench.cluster.watching("configmaps"), 0);
    bench.cluster.put("configmaps", config_map("a", "2"));
    assert_eq!(bench.read("a").await, Ok("2".to_owned()), "the watch is reopened");
    assert_eq!(bench.cluster.watching("configmaps"), 1);
    tokio::time::sleep(Duration::from_secs(500)).await;
    bench.cluster.locked().mute = true;
    let began = Instant::now();
    assert_eq!(bench.read("a").await, Ok("2".to_owned()), "what was known");
    assert_eq!(began.elapsed(), Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_may_not_be_read_yet_comes_with_the_permission() {
    // AC-10-29
    let mut bench = bench(Strategy::Watch);
    bench.cluster.put("secrets", secret("s", "x"));
    bench.cluster.locked().forbidden = Some("secrets");
    bench.objects.register(&pod("u", &[], &["s"]));
    let (objects, cluster, began) = (bench.objects.clone(), bench.cluster.clone(), Instant::now());
    let grant = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        cluster.locked().forbidden = None;
    };
    let (read, ()) = tokio::join!(objects.secret("ns", "s"), grant);
    assert!(read.is_ok() && began.elapsed() <= Duration::from_millis(700), "{:?}", began.elapsed());
    // Without the permission: the kubelet's error text; the pod is notified once permission is granted.
    bench.cluster.locked().forbidden = Some("secrets");
    bench.objects.register(&pod("v", &[], &["t"]));
    let failed = bench.objects.secret("ns", "t").await.expect_err("forbidden");
    assert_eq!(failed.to_string(), "failed to sync secret cache: timed out waiting for the condition");
    bench.cluster.locked().forbidden = None;
    bench.cluster.put("secrets", secret("t", "y"));
    assert_eq!(bench.notified_pods(1).await, ["v".to_owned()].into());
    assert!(bench.objects.secret("ns", "t").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn cached_objects_are_read_again_after_a_while() {
    let bench = bench(Strategy::Cache);
    bench.cluster.put("configmaps", config_map("a", "1"));
    assert!(bench.read("a").await.is_err(), "not registered");
    bench.objects.register(&pod("u", &["a"], &[]));
    assert_eq!((bench.read("a").await, bench.read("a").await), (Ok("1".to_owned()), Ok("1".to_owned())));
    let calls = bench.cluster.calls("configmaps");
    assert_eq!((calls.len(), calls[0].verb, calls[0].query.len()), (1, Verb::Get, 0), "live after a new reference");
    bench.cluster.put("configmaps", config_map("a", "2"));
    assert_eq!(bench.read("a").await, Ok("1".to_owned()));
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(bench.read("a").await, Ok("2".to_owned()));
    assert!(bench.cluster.calls("configmaps")[1].query.contains(&("resourceVersion", "0".to_owned())));
    bench.ttl.send(Duration::ZERO).expect("the channel has a receiver");
    let old = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "a", "resourceVersion": "1"}});
    bench.cluster.locked().objects[0].1 = old;
    assert_eq!(bench.read("a").await, Ok("2".to_owned()), "an older version is not taken");
    bench.cluster.delete("configmaps", "a");
    assert_eq!(bench.read("a").await, Err("configmaps \"a\" not found".to_owned()));
    bench.objects.unregister(&"u".into());
    assert!(bench.read("a").await.expect_err("gone").ends_with("not registered"));
}

#[tokio::test(start_paused = true)]
async fn got_objects_are_asked_for_each_time() {
    let bench = bench(Strategy::Get);
    bench.cluster.put("configmaps", config_map("a", "1"));
    assert_eq!(bench.read("a").await, Ok("1".to_owned()));
    bench.cluster.put("configmaps", config_map("a", "2"));
    assert_eq!(bench.read("a").await, Ok("2".to_owned()));
    assert_eq!(bench.read("b").await, Err("configmaps \"b\" not found".to_owned()));
    assert_eq!(bench.cluster.calls("configmaps").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn services_and_classes_are_known_once_they_were_read() {
    let bench = bench(Strategy::Watch);
    let service = |namespace: &str, name: &str| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace}});
    bench.cluster.put("services", service("default", "kubernetes"));
    bench.cluster.put("services", service("ns", "web"));
    bench.cluster.put("services", service("other", "db"));
    let class = json!({"metadata": {"name": "kata"}, "handler": "kata-qemu"});
    bench.cluster.put("runtimeclasses", class);
    assert!(bench.objects.services("ns").is_none(), "02b §10.1");
    assert_eq!(bench.objects.runtime_handler(Some("kata")).await.as_deref(), Ok("kata-qemu"));
    let names = |namespace: &str| {
        let found = bench.objects.services(namespace).expect("read");
        found.iter().filter_map(|service| service.metadata.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!((names("ns"), names("default")), (vec!["web".into(), "kubernetes".into()], vec!["kubernetes".into()]));
    let selector = ("fieldSelector", "spec.clusterIP!=None".to_owned());
    assert!(bench.cluster.calls("services")[0].query.contains(&selector));
    for class in [None, Some("")] {
        assert_eq!(bench.objects.runtime_handler(class).await.as_deref(), Ok(""));
    }
    let failed = bench.objects.runtime_handler(Some("none")).await.expect_err("no such class");
    assert_eq!(failed.to_string(), "runtimeclass.node.k8s.io \"none\" not found");
}

#[tokio::test(start_paused = true)]
async fn pull_secrets_are_read_and_missing_ones_are_listed() {
    let bench = bench(Strategy::Watch);
    let mut pull = secret("pull", "ignored");
    pull["type"] = "kubernetes.io/dockerconfigjson".into();
    pull["data"] = json!({".dockerconfigjson": "e30="});
    bench.cluster.put("secrets", pull);
    bench.cluster.put("secrets", secret("opaque", "x"));
    let names: Vec<Value> = ["pull", "opaque", "none", ""].iter().map(|name| json!({"name": name})).collect();
    let object = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [], "imagePullSecrets": names}});
    let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
    bench.objects.register(&pod);
    let (found, missing) = bench.objects.pull_secrets(&pod).await;
    let expected = PullSecret {
        coordinates: ("ns".into(), "pull".into(), "pull".into()),
        kind: "kubernetes.io/dockerconfigjson".into(),
        data: b"{}".to_vec(),
    };
    assert_eq!((found, missing), (vec![expected], vec!["none".to_owned()]));
}
