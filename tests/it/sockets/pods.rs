//! The pods API: lists, and watches of pod changes.

use std::{sync::Arc, time::Duration};

use berth::serving::pods::EnginePods;
use berth_metrics::{PodWatchMetrics, Registry};
use berth_proto::v1alpha1::{
    EventType, GetPodRequest, ListPodsRequest, WatchPodsEvent, WatchPodsRequest, pods_client::PodsClient,
};
use berth_server::{
    grpc::{PodsApi, Socket},
    ports::{PodDirectory, PodFeed},
};
use berth_types::{Pod, PodUid, api};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming, transport::Channel};

use crate::sockets::{PATIENCE, connect, opened};
use berth_testkit::{
    agent::Machine,
    pods::{pod, simple},
};

/// Pods that the test changes.
struct FakePodDirectory {
    pods: watch::Sender<Arc<Vec<Arc<Pod>>>>,
    statuses: watch::Sender<u64>,
}

impl PodDirectory for FakePodDirectory {
    fn pods(&self) -> Arc<Vec<Arc<Pod>>> {
        self.pods.borrow().clone()
    }

    fn is_active(&self, _pod: &Pod) -> bool {
        true
    }

    fn status(&self, _uid: &PodUid) -> Option<Arc<api::PodStatus>> {
        None
    }
}

impl PodFeed for FakePodDirectory {
    fn changes(&self) -> BoxStream<'static, ()> {
        let pods = stream::unfold(self.pods.subscribe(), async |mut all| all.changed().await.ok().map(|()| ((), all)));
        let statuses =
            stream::unfold(self.statuses.subscribe(), async |mut all| all.changed().await.ok().map(|()| ((), all)));
        stream::select(pods, statuses).boxed()
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    fed: Arc<FakePodDirectory>,
    registry: Registry,
    stop: CancellationToken,
}

impl Fixture {
    async fn new(pods: Vec<Arc<Pod>>) -> Self {
        let fed =
            Arc::new(FakePodDirectory { pods: watch::Sender::new(Arc::new(pods)), statuses: watch::Sender::new(0) });
        let (dir, registry) = (tempfile::tempdir().expect("a directory"), Registry::new());
        let api = PodsApi::new(fed.clone(), PodWatchMetrics::new(&registry));
        let fixture = Self { dir, fed, registry, stop: CancellationToken::new() };
        let (socket, trouble) = Socket::new(fixture.socket(), api.routes());
        tokio::spawn(socket.run(fixture.stop.clone()));
        tokio::spawn(api.run(fixture.stop.clone()));
        opened(trouble).await;
        fixture
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("pods-api/pods-api.sock")
    }

    async fn client(&self) -> PodsClient<Channel> {
        PodsClient::new(connect(self.socket()).await)
    }

    fn set(&self, pods: Vec<Arc<Pod>>) {
        self.fed.pods.send_replace(Arc::new(pods));
    }

    fn dropped(&self) -> f64 {
        let families = self.registry.gather();
        families[0].get_metric()[0].get_counter().get_value()
    }
}

async fn next(events: &mut Streaming<WatchPodsEvent>) -> (EventType, String) {
    let event = timeout(PATIENCE, events.message()).await.expect("in time").expect("an event").expect("no end");
    (event.r#type(), String::from_utf8_lossy(&event.pod).into_owned())
}

#[tokio::test]
async fn pods_are_listed_by_uid_and_found() {
    let fixture = Fixture::new(vec![simple("b"), simple("a")]).await;
    let mut client = fixture.client().await;
    let list = client.list_pods(ListPodsRequest {}).await.expect("answered").into_inner().pods;
    let names: Vec<bool> = list.iter().map(|pod| String::from_utf8_lossy(pod).contains("uid-a")).collect();
    assert_eq!(names, [true, false]);
    let get = |uid: &str| GetPodRequest { pod_uid: uid.to_owned() };
    let pod = client.get_pod(get("uid-a")).await.expect("answered").into_inner().pod;
    assert_eq!(pod, list[0]);
    let missing = client.get_pod(get("x")).await.expect_err("nobody");
    assert_eq!((missing.code(), missing.message()), (Code::NotFound, "pod with UID x not found"));
}

#[tokio::test]
async fn a_watch_reports_existing_pods_and_their_changes() {
    let (a, b) = (simple("a"), simple("b"));
    let fixture = Fixture::new(vec![b.clone(), a.clone()]).await;
    let mut events = fixture.client().await.watch_pods(WatchPodsRequest {}).await.expect("watching").into_inner();
    for name in ["uid-a", "uid-b"] {
        let (kind, bytes) = next(&mut events).await;
        assert!(kind == EventType::Added && bytes.contains(name), "{kind:?} {bytes}");
    }
    assert_eq!(next(&mut events).await, (EventType::InitialSyncComplete, String::new()));
    let other_a = pod("a", serde_json::json!({"containers": [{"name": "other"}]}));
    fixture.set(vec![other_a.clone(), b.clone()]);
    let (kind, bytes) = next(&mut events).await;
    assert!(kind == EventType::Modified && bytes.contains("other"), "{kind:?} {bytes}");
    fixture.set(vec![other_a, b, simple("c")]);
    let (kind, bytes) = next(&mut events).await;
    assert!(kind == EventType::Added && bytes.contains("uid-c"), "{kind:?} {bytes}");
    fixture.set(vec![]);
    let (kind, bytes) = next(&mut events).await;
    assert!(kind == EventType::Deleted && bytes.contains("uid-a") && !bytes.contains("other"), "{kind:?} {bytes}");
    fixture.stop.cancel();
    let end = async { while events.message().await.is_ok_and(|event| event.is_some()) {} };
    timeout(PATIENCE, end).await.expect("streams end with the agent");
}

#[tokio::test]
async fn who_does_not_read_is_dropped_and_others_are_not() {
    // AC-04b-M17
    let fixture = Fixture::new(vec![]).await;
    let mut reader = fixture.client().await.watch_pods(WatchPodsRequest {}).await.expect("watching").into_inner();
    let mut sleeper = fixture.client().await.watch_pods(WatchPodsRequest {}).await.expect("watching").into_inner();
    assert_eq!(next(&mut reader).await.0, EventType::InitialSyncComplete);
    // Large enough to fill the transport's buffers, many enough to fill the queue.
    let large = |n: usize| {
        let text = "x".repeat(64 << 10);
        pod("large", serde_json::json!({"containers": [{"name": "main", "args": [text, n.to_string()]}]}))
    };
    let mut updates = 0;
    while fixture.dropped() == 0.0 {
        updates += 1;
        assert!(updates < 2_000, "nobody is dropped");
        fixture.set(vec![large(updates)]);
        let (kind, _) = next(&mut reader).await;
        assert!(matches!(kind, EventType::Added | EventType::Modified));
    }
    assert_eq!(fixture.dropped(), 1.0);
    let last = async {
        loop {
            match sleeper.message().await {
                Ok(Some(_)) => {}
                other => break other,
            }
        }
    };
    let end = timeout(PATIENCE, last).await.expect("in time").expect_err("it was dropped");
    assert_eq!((end.code(), end.message()), (Code::ResourceExhausted, "watch client channel closed"));
    fixture.set(vec![]);
    assert_eq!(next(&mut reader).await.0, EventType::Deleted, "the other one still hears");
}

#[tokio::test(start_paused = true)]
async fn the_pods_and_statuses_of_the_engine_are_published() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = simple("web");
    agent.only_static([&web]).await;
    let feed = EnginePods { pods: agent.engine.pods.clone(), status: agent.status.clone() };
    let mut changes = feed.changes();
    agent.until_ready(web.uid(), PATIENCE).await;
    timeout(Duration::from_secs(1), changes.next()).await.expect("it has changed").expect("it lives");
    assert_eq!(feed.status(web.uid()).and_then(|s| s.phase.clone()).as_deref(), Some("Running"));
    agent.stop(PATIENCE).await;
}
