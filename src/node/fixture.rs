//! Fake API server with one node, its lease, and its CSINode, for the tests of this module.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    cluster_tasks::{ClusterConfig, NodeDeps, NodeLiveness, StopTokens},
    host_network::HostNetwork,
    status::{
        DevicePluginResources,
        addresses::{HostNetworkState, InterfaceAddress},
        tests::settings,
    },
};
use berth_api::{
    ReflectorStore, Snapshot,
    api::{ApiError, Call, Verb},
    testing::{FakeApi, refused},
};
use berth_metrics::{NodeMetrics, Registry};
use berth_ports::{Clock, EventRecord, EventSink, NodeFacts, RuntimeState};
use berth_types::api;

/// Stored objects by resource, and injected faults.
#[derive(Default)]
pub(super) struct Objects {
    version: u64,
    pub(super) objects: BTreeMap<&'static str, Value>,
    faults: Vec<(String, ApiError)>,
}

/// Fixture: fake API server and all dependencies of the node tasks.
pub(super) struct Fixture {
    pub(super) objects: Arc<Mutex<Objects>>,
    pub(super) api: Arc<FakeApi>,
    snapshots: watch::Sender<Arc<Snapshot<api::Node>>>,
    pub(super) facts: watch::Sender<Arc<NodeFacts>>,
    pub(super) runtime: watch::Sender<Arc<RuntimeState>>,
    pub(super) volumes: watch::Sender<Option<Vec<String>>>,
    runtime_version: watch::Sender<String>,
    devices: watch::Sender<Arc<DevicePluginResources>>,
    pub(super) reported: Arc<Mutex<Vec<String>>>,
    pub(super) pod_cidr: watch::Sender<String>,
    pub(super) network: Arc<FakeNetwork>,
    pub(super) events: Arc<Events>,
    pub(super) stop: CancellationToken,
}

/// Network whose observation a test sets.
#[derive(Default)]
pub(super) struct FakeNetwork {
    network: Mutex<HostNetworkState>,
    moved: Notify,
}

impl FakeNetwork {
    pub(super) fn set(&self, network: HostNetworkState) {
        *lock(&self.network) = network;
        self.moved.notify_one();
    }

    fn get(&self) -> HostNetworkState {
        lock(&self.network).clone()
    }
}

#[async_trait]
impl HostNetwork for FakeNetwork {
    async fn observe(&self) -> io::Result<HostNetworkState> {
        Ok(HostNetworkState { resolved: Vec::new(), ..self.get() })
    }

    async fn resolve(&self, _: &str) -> io::Result<Vec<IpAddr>> {
        Ok(self.get().resolved)
    }

    async fn changed(&self) {
        self.moved.notified().await;
    }
}

/// Event sink that records reasons.
#[derive(Default)]
pub(super) struct Events(Mutex<Vec<String>>);

impl EventSink for Events {
    fn record(&self, event: EventRecord) {
        lock(&self.0).push(event.reason.into_owned());
    }
}

impl Events {
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.0))
    }
}

/// Clock that follows tokio's paused clock from a fixed start time.
struct TestClock(tokio::time::Instant);

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        start + self.0.elapsed()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Request as text, such as `PATCH nodes/status`.
pub(super) fn line(call: &Call) -> String {
    let verb = match call.verb {
        Verb::Get => "GET",
        Verb::Create => "POST",
        Verb::Update => "PUT",
        Verb::Patch => "PATCH",
        Verb::Delete | Verb::DeleteCollection => "DELETE",
        Verb::List | Verb::Watch => "LIST",
    };
    let sub = if call.subresource.is_empty() { String::new() } else { format!("/{}", call.subresource) };
    format!("{verb} {}{sub}", call.resource.plural)
}

impl Fixture {
    /// Creates an empty server whose watch on nodes is synced, and a healthy runtime.
    pub(super) fn new() -> Self {
        let objects = Arc::new(Mutex::new(Objects::default()));
        let synced = Snapshot { synced: true, ..Snapshot::default() };
        let snapshots = watch::Sender::new(Arc::new(synced));
        let (state, sender) = (objects.clone(), snapshots.clone());
        let api = FakeApi::new(move |call| {
            let answer = lock(&state).answer(call);
            publish(&sender, &lock(&state));
            answer
        });
        let network = Arc::new(FakeNetwork::default());
        network.set(network_of("10.0.0.2"));
        Self {
            objects,
            api,
            snapshots,
            facts: watch::Sender::default(),
            runtime: watch::Sender::default(),
            volumes: watch::Sender::new(None),
            runtime_version: watch::Sender::new("containerd://2.1.0".to_owned()),
            devices: watch::Sender::default(),
            reported: Arc::default(),
            pod_cidr: watch::Sender::default(),
            network,
            events: Arc::default(),
            stop: CancellationToken::new(),
        }
    }

    pub(super) fn deps(&self) -> NodeDeps {
        let reported = self.reported.clone();
        NodeDeps {
            api: self.api.clone(),
            nodes: ReflectorStore::new(self.snapshots.subscribe()),
            facts: self.facts.clone(),
            runtime: self.runtime.subscribe(),
            runtime_version: self.runtime_version.subscribe(),
            images: Arc::new(|| None),
            devices: self.devices.subscribe(),
            volumes_in_use: self.volumes.subscribe(),
            volumes_reported: Arc::new(move |volumes| *lock(&reported) = volumes.to_vec()),
            pod_cidr: self.pod_cidr.clone(),
            network: self.network.clone(),
            events: self.events.clone(),
            clock: Arc::new(TestClock(tokio::time::Instant::now())),
            random: Arc::new(|| 0.0),
            metrics: NodeMetrics::new(&Registry::new()),
            liveness: NodeLiveness::default(),
        }
    }

    /// Starts all node tasks.
    pub(super) fn start(&self, config: ClusterConfig) {
        let stops = StopTokens { work: self.stop.clone(), lease: self.stop.clone() };
        for (_, task) in super::cluster_tasks::start(config, self.deps(), &stops) {
            tokio::spawn(task);
        }
    }

    /// Makes the next request of that kind (`PATCH nodes/status`) fail.
    pub(super) fn fail(&self, line: &str, error: ApiError) {
        lock(&self.objects).faults.push((line.to_owned(), error));
    }

    /// Changes an object as another client; `None` deletes it.
    pub(super) fn put(&self, resource: &'static str, object: Option<Value>) {
        let mut objects = lock(&self.objects);
        match object {
            Some(object) => drop(objects.store(resource, object)),
            None => {
                objects.version += 1;
                objects.objects.remove(resource);
            }
        }
        publish(&self.snapshots, &objects);
    }

    pub(super) fn get(&self, resource: &str) -> Value {
        lock(&self.objects).objects.get(resource).cloned().unwrap_or_default()
    }

    /// Requests so far, except those that contain `leave_out`.
    pub(super) fn lines(&self, leave_out: &str) -> Vec<String> {
        self.api.calls().iter().map(line).filter(|line| leave_out.is_empty() || !line.contains(leave_out)).collect()
    }

    /// Requests of that kind.
    pub(super) fn calls(&self, kind: &str) -> Vec<Call> {
        self.api.calls().into_iter().filter(|call| line(call) == kind).collect()
    }

    /// Waits until a condition is true; the clock is paused, so a minute passes at once.
    pub(super) async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        for _ in 0..60_000 {
            if holds(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("never: {what}; asked {:?}", self.lines(""));
    }

    pub(super) fn condition(&self, kind: &str) -> Value {
        let node = self.get("nodes");
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
    }
}

pub(super) fn network_of(ip: &str) -> HostNetworkState {
    let address = InterfaceAddress { interface: "eth0".to_owned(), ip: ip.parse().expect("an address"), is_up: true };
    HostNetworkState { addresses: vec![address], default_v4: vec!["eth0".to_owned()], ..HostNetworkState::default() }
}

/// Default configuration of a node `n`.
pub(super) fn config() -> ClusterConfig {
    let mut status = settings();
    status.hostname = "n".to_owned();
    ClusterConfig {
        status,
        origin: super::RegistrationSettings { attach_detach: true, ..super::RegistrationSettings::default() },
        register: true,
        reregister: false,
        update_frequency: Duration::from_secs(10),
        report_frequency: Duration::from_secs(300),
        lease_seconds: 40,
        devices_lost: false,
        wipes_slices: true,
    }
}

fn publish(snapshots: &watch::Sender<Arc<Snapshot<api::Node>>>, objects: &Objects) {
    let node = objects.objects.get("nodes");
    let version = node.map_or(&Value::Null, |node| &node["metadata"]["resourceVersion"]).clone();
    let known = snapshots.borrow().objects.values().next().and_then(|node| node.metadata.resource_version.clone());
    if known.as_deref() == version.as_str() {
        return;
    }
    let mut snapshot = Snapshot { synced: true, version: objects.version.to_string(), ..Snapshot::default() };
    if let Some(node) = node {
        let node: api::Node = serde_json::from_value(node.clone()).expect("a node");
        snapshot.objects.insert((String::new(), "n".to_owned()), Arc::new(node));
    }
    snapshots.send_replace(Arc::new(snapshot));
}

impl Objects {
    fn store(&mut self, resource: &'static str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.version));
        }
        self.objects.insert(resource, object.clone());
        object
    }

    fn answer(&mut self, call: &Call) -> Result<Value, ApiError> {
        let line = line(call);
        if let Some(at) = self.faults.iter().position(|(fault, _)| *fault == line) {
            return Err(self.faults.remove(at).1);
        }
        let resource = call.resource.plural;
        let known = self.objects.get(resource).cloned();
        let body: Value =
            call.body.as_ref().map_or(Value::Null, |body| serde_json::from_slice(&body.bytes).expect("JSON"));
        let missing = || refused(404, "NotFound", "not found");
        let conflict = |text: &str| refused(409, "Conflict", text);
        match call.verb {
            Verb::Get => known.ok_or_else(missing),
            Verb::Create if known.is_some() => Err(refused(409, "AlreadyExists", "already exists")),
            Verb::Create => Ok(self.store(resource, body)),
            // An update of a missing object is a conflict, because its body contains a UID.
            Verb::Update => match known {
                Some(known) if known["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"] => {
                    Ok(self.store(resource, body))
                }
                _ => Err(conflict("the object has been modified")),
            },
            Verb::Patch => {
                let mut object = known.ok_or_else(missing)?;
                if body["metadata"]["uid"].is_string() && body["metadata"]["uid"] != object["metadata"]["uid"] {
                    let mut status = refused(422, "Invalid", "uid: field is immutable").status().cloned().expect("one");
                    let field = "metadata.uid".to_owned();
                    status.causes.push(berth_api::api::ApiStatusCause { field, ..Default::default() });
                    return Err(ApiError::Refused(Box::new(status)));
                }
                merge(&mut object, &body);
                Ok(self.store(resource, object))
            }
            Verb::Delete => self.objects.remove(resource).ok_or_else(missing),
            Verb::DeleteCollection => Ok(json!({})),
            Verb::List | Verb::Watch => Err(missing()),
        }
    }
}

/// Applies a strategic merge patch, as far as node objects need it.
fn merge(object: &mut Value, patch: &Value) {
    let Some(members) = patch.as_object() else { return };
    for (name, value) in members.iter().filter(|(name, _)| !name.starts_with('$')) {
        match value {
            Value::Null => drop(object.as_object_mut().and_then(|object| object.remove(name))),
            Value::Object(_) => {
                if !object[name].is_object() {
                    object[name] = json!({});
                }
                merge(&mut object[name], value);
            }
            Value::Array(items) if name == "conditions" && object[name].is_array() => {
                let known = object[name].as_array_mut().expect("a list");
                for item in items {
                    match known.iter_mut().find(|known| known["type"] == item["type"]) {
                        Some(known) => merge(known, item),
                        None => known.push(item.clone()),
                    }
                }
            }
            Value::Array(items) => {
                object[name] = items.iter().filter(|item| item["$patch"].is_null()).cloned().collect();
            }
            other => object[name] = other.clone(),
        }
    }
}
