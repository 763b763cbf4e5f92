//! The mirror pod writer against a fake client.

use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::{
    api::Verb,
    testing::{FakeApi, refused},
};
use berth_metrics::Registry;
use berth_types::PodUid;

#[derive(Default)]
struct MirrorEventSink(Mutex<Vec<String>>);

impl EventSink for MirrorEventSink {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("whole").push(format!("{}: {}", event.reason, event.message));
    }
}

struct World {
    api: Arc<FakeApi>,
    mirrors: Mirrors,
    pods: watch::Sender<Arc<Snapshot<Pod>>>,
    nodes: watch::Sender<Arc<Snapshot<api::Node>>>,
    events: Arc<MirrorEventSink>,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn pod(uid: &str) -> Arc<Pod> {
    let annotations = json!({"kubernetes.io/config.hash": uid, "kubernetes.io/config.source": "file"});
    let object = json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": uid, "annotations": annotations},
        "spec": {"nodeName": "node", "containers": [{"name": "c"}]}});
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

fn mirror(uid: &str, hash: &str, deleting: bool) -> Value {
    let mut metadata = json!({"name": "web", "namespace": "ns", "uid": uid, "resourceVersion": "5",
        "annotations": {"kubernetes.io/config.mirror": hash}});
    if deleting {
        metadata["deletionTimestamp"] = "2026-01-01T00:00:30Z".into();
    }
    json!({"metadata": metadata, "spec": {"containers": []}})
}

impl World {
    fn begin(answer: impl FnMut(&Call) -> Result<Value, ApiError> + Send + 'static) -> Self {
        let api = FakeApi::new(answer);
        let (pods, pods_shown) = watch::channel(Arc::default());
        let (nodes, nodes_shown) = watch::channel(Arc::default());
        let (events, stop) = (Arc::new(MirrorEventSink::default()), CancellationToken::new());
        let (mirrors, writer) = mirrors(MirrorDeps {
            node: "node".into(),
            api: api.clone(),
            pods: ReflectorStore::new(pods_shown),
            nodes: ReflectorStore::new(nodes_shown),
            events: events.clone(),
            metrics: ApiWriteMetrics::new(&Registry::new()),
        });
        tokio::spawn(writer.run(stop.clone()));
        Self { api, mirrors, pods, nodes, events, stop }
    }

    fn show(&self, version: u64, mirror: Option<Value>) {
        let key = ("ns".to_owned(), "web".to_owned());
        let objects = mirror.map(|object| (key, Arc::new(serde_json::from_value(object).expect("a pod"))));
        let objects = objects.into_iter().collect();
        self.pods.send_replace(Arc::new(Snapshot { synced: true, version: version.to_string(), objects }));
    }

    fn show_node(&self, uid: &str) {
        let node = serde_json::from_value(json!({"metadata": {"name": "node", "uid": uid}})).expect("a node");
        let objects = [((String::new(), "node".to_owned()), Arc::new(node))].into();
        self.nodes.send_replace(Arc::new(Snapshot { synced: true, version: "1".into(), objects }));
    }

    fn keep(&self, state: Option<MirrorPodState>) {
        self.mirrors.set_desired(state.into_iter().map(|state| (pod("u").full_name(), state)).collect());
    }

    fn verbs(&self) -> Vec<Verb> {
        self.api.calls().iter().map(|call| call.verb).collect()
    }
}

fn desired(uid: &str) -> Option<MirrorPodState> {
    Some(MirrorPodState::Desired(PodUid::from(uid)))
}

async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn made(version: &str) -> Result<Value, ApiError> {
    Ok(json!({"metadata": {"uid": "m2", "resourceVersion": version}}))
}

#[tokio::test(start_paused = true)]
async fn a_mirror_lives_as_long_as_its_pod() {
    // AC-10a-33: steps 1 to 9 of the mirror pod flow
    let mut version = 4;
    let world = World::begin(move |call| {
        version += if call.verb == Verb::Create { 3 } else { 0 };
        made(&version.to_string())
    });
    world.mirrors.ensure(&pod("u"));
    settle().await;
    world.show(4, None);
    settle().await;
    assert_eq!(world.verbs(), [], "its owner is not known yet");
    world.show_node("n1");
    settle().await;
    assert_eq!(world.verbs(), [Verb::Create]);
    let call = world.api.calls()[0].clone();
    assert_eq!(call.path(), "/api/v1/namespaces/ns/pods");
    world.mirrors.ensure(&pod("u"));
    world.show(6, None);
    settle().await;
    assert_eq!(world.verbs().len(), 1, "the watch has not shown it yet");
    world.show(7, Some(mirror("m", "u", false)));
    settle().await;
    // A user deletes it with a grace period: it is deleted at once, and recreated once it is gone.
    tokio::time::advance(AGAIN).await;
    world.show(8, Some(mirror("m", "u", true)));
    settle().await;
    assert_eq!(world.verbs(), [Verb::Create, Verb::Delete]);
    let body: Value = serde_json::from_slice(&world.api.calls()[1].body.clone().expect("a body").bytes).expect("JSON");
    assert_eq!(body, json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "m"}}));
    world.show(9, None);
    settle().await;
    assert_eq!(world.verbs(), [Verb::Create, Verb::Delete, Verb::Create]);
    // The manifest is edited: the old mirror stays until a worker starts the new pod.
    world.show(10, Some(mirror("m2", "u", false)));
    world.keep(desired("u2"));
    settle().await;
    assert_eq!(world.verbs().len(), 3);
    world.mirrors.ensure(&pod("u2"));
    settle().await;
    world.show(11, None);
    settle().await;
    assert_eq!(world.verbs().len(), 4, "not twice a second, whatever happens");
    tokio::time::sleep(AGAIN).await;
    settle().await;
    assert_eq!(world.verbs()[3..], [Verb::Delete, Verb::Create]);
    // The manifest is removed: its mirror is deleted once the pod has terminated, and is not recreated.
    world.show(13, Some(mirror("m3", "u2", false)));
    world.keep(Some(MirrorPodState::Terminating));
    settle().await;
    assert_eq!(world.verbs().len(), 5);
    world.keep(None);
    settle().await;
    world.show(14, None);
    settle().await;
    assert_eq!(world.verbs()[5..], [Verb::Delete]);
}

#[tokio::test(start_paused = true)]
async fn a_refused_mirror_is_tried_once_an_hour() {
    // AC-10-27
    let world = World::begin(|_| Err(refused(403, "Forbidden", "can not create pods that reference service accounts")));
    world.show(4, None);
    world.show_node("n1");
    world.mirrors.ensure(&pod("u"));
    tokio::time::sleep(Duration::from_secs(3500)).await;
    assert_eq!(world.verbs(), [Verb::Create]);
    let events = world.events.0.lock().expect("whole").clone();
    assert_eq!(events, ["APIWriteRefused: create pods ns/web: can not create pods that reference service accounts"]);
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(world.verbs().len(), 2);
    world.show_node("n2");
    settle().await;
    assert_eq!(world.verbs().len(), 3, "another node object may own it");
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_exists_is_taken_as_it_is() {
    // AC-10-28
    let world = World::begin(|_| Err(refused(409, "AlreadyExists", "pods \"web\" already exists")));
    world.show(4, None);
    world.show_node("n1");
    world.mirrors.ensure(&pod("u"));
    settle().await;
    world.show(5, Some(mirror("m", "u", false)));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(world.verbs(), [Verb::Create]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_repeated_and_gone_is_gone() {
    let mut answers = vec![Err(refused(404, "NotFound", "")), Err(refused(500, "InternalError", ""))];
    let world = World::begin(move |_| answers.pop().expect("no more"));
    world.show(4, Some(mirror("m", "u", false)));
    settle().await;
    assert_eq!(world.verbs(), [], "no request before the sources are synced");
    world.keep(None);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.verbs(), [Verb::Delete, Verb::Delete]);
}
