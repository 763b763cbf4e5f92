//! ConfigMaps, Secrets, and tokens that a node reads for its pods' volumes.

use std::{fs, sync::Arc, time::Duration};

use berth_api::{ApiObjects, ApiStorage, ChangedPods, ObjectsConfig, ObjectsDeps, Strategy};
use berth_metrics::{ReflectorMetrics, Registry, VolumeMetrics};
use berth_ports::{EventRecord, EventSink, NodeFacts, ObjectSource, SystemClock, VolumeManager};
use berth_types::Pod;
use berth_volumes::{CredentialStorage, PodVolumeManager, VolumesConfig, VolumesDeps};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use berth_testkit::{api_client::connect, api_server::ApiServer};

const SOON: Duration = Duration::from_secs(60);

struct NoEvents;

impl EventSink for NoEvents {
    fn record(&self, event: EventRecord) {
        panic!("no event is expected: {event:?}");
    }
}

/// The object-related parts of node `n`.
struct Node {
    objects: Arc<ApiObjects>,
    changed: ChangedPods,
    volumes: PodVolumeManager,
    root: tempfile::TempDir,
    _stop: DropGuard,
}

impl Node {
    async fn of(server: &ApiServer) -> Self {
        server.create(json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n"}}));
        let (stop, registry) = (CancellationToken::new(), Registry::new());
        let api = connect(&server.node_kubeconfig("n")).await;
        // No pod has a claim here: attached volumes need not be watched.
        let attached = watch::channel(None).1;
        let metrics = ReflectorMetrics::new(&registry);
        let (storage, _) = ApiStorage::new(api.clone(), attached, metrics.clone(), stop.clone());
        let deps = ObjectsDeps {
            api,
            metrics,
            clock: Arc::new(SystemClock),
            ttl: watch::channel(Duration::from_secs(60)).1,
            certificates: None,
            tasks: TaskTracker::new(),
            stop: stop.clone(),
        };
        let config =
            ObjectsConfig { strategy: Strategy::Watch, sync_frequency: Duration::from_secs(60), trust_bundles: false };
        let (objects, changed, upkeep) = ApiObjects::new(&config, deps);
        tokio::spawn(upkeep);
        let root = tempfile::tempdir().expect("a directory");
        let volumes = PodVolumeManager::new(
            VolumesConfig { root: root.path().to_owned(), credentials: CredentialStorage::OnDisk },
            VolumesDeps {
                facts: watch::channel(Arc::new(NodeFacts::default())).1,
                objects: objects.clone(),
                events: Arc::new(NoEvents),
                clock: Arc::new(SystemClock),
                metrics: VolumeMetrics::new(&registry),
                storage,
                plugins: Vec::new(),
                labels: None,
                reported: watch::channel(Arc::default()).1,
                in_use: watch::Sender::default(),
                tasks: TaskTracker::new(),
                stop: stop.clone(),
            },
        );
        Self { objects, changed, volumes, root, _stop: stop.drop_guard() }
    }

    fn shown(&self, pod: &Pod, plugin: &str, volume: &str, file: &str) -> String {
        let path = self.root.path().join(format!("pods/{}/volumes/kubernetes.io~{plugin}/{volume}/{file}", pod.uid()));
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }
}

/// A pod that mounts a ConfigMap and a Secret.
fn manifest(name: &str) -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "default"}, "spec": {
        "volumes": [{"name": "cm", "configMap": {"name": "cm"}}, {"name": "sec", "secret": {"secretName": "sec"}}],
        "containers": [{"name": "c", "image": "i", "volumeMounts": [
            {"name": "cm", "mountPath": "/cm"}, {"name": "sec", "mountPath": "/sec"}]}]}})
}

fn stored(server: &ApiServer, name: &str) -> Arc<Pod> {
    let object = server.get("pods", "default", name).expect("stored");
    Arc::new(Pod::new(serde_json::from_value((*object).clone()).expect("a pod")).expect("complete"))
}

fn config_map(value: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "cm", "namespace": "default"},
           "data": {"k": value}})
}

fn secret() -> Value {
    json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "sec", "namespace": "default"},
           "data": {"k": "czE="}})
}

#[tokio::test]
async fn a_pod_of_a_cluster_is_shown_what_it_mounts() {
    let server = ApiServer::start().await;
    let node = Node::of(&server).await;
    server.create(config_map("1"));
    server.create(secret());
    server.create(manifest("p"));
    server.bind("default", "p", "n");
    let pod = stored(&server, "p");
    node.objects.register(&pod);
    let mounted = timeout(SOON, node.volumes.mount(&pod)).await.expect("in time").expect("mounted");
    let access = mounted.by_name.keys().find(|name| name.starts_with("kube-api-access-")).expect("its access");
    assert_eq!(
        (node.shown(&pod, "configmap", "cm", "k"), node.shown(&pod, "secret", "sec", "k")),
        ("1".into(), "s1".into())
    );
    assert_eq!(node.shown(&pod, "projected", access, "namespace"), "default");
    assert_eq!(node.shown(&pod, "projected", access, "ca.crt").trim(), server.authority_pem().trim());
    let token = node.shown(&pod, "projected", access, "token");
    let review = json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "spec": {"token": token}});
    let reviewed = server.create(review);
    assert_eq!(reviewed["status"]["user"]["username"], "system:serviceaccount:default:default", "{reviewed}");
    node.volumes.mount(&pod).await.expect("again");
    let log = server.log().by("system:node:n");
    let tokens = log.of("serviceaccounts").sub("token").codes();
    // The node authorizer may not have known the pod at first.
    assert_eq!(tokens.iter().filter(|code| **code != 403).count(), 1, "issued once: {tokens:?}");
    let odd = log.filter(|request| request.code.is_some_and(|code| code >= 400 && code != 403));
    assert!(odd.is_empty(), "{}", odd.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
    // 10a §19: steps 4 and 5.
    node.volumes.unmount(pod.uid()).await.expect("unmounted");
    node.objects.unregister(pod.uid());
}

#[tokio::test]
async fn a_secret_comes_with_the_pod_that_refers_to_it() {
    // AC-10-29: no event is recorded, and the pod starts within a second of the permission.
    let server = ApiServer::start().await;
    server.rules(|rules| rules.graph_lag = Duration::from_secs(120));
    let node = Node::of(&server).await;
    server.create(config_map("1"));
    server.create(secret());
    server.create(manifest("p"));
    server.bind("default", "p", "n");
    let pod = stored(&server, "p");
    node.objects.register(&pod);
    let authorized = async {
        let refused = "the authorizer is behind, and refuses";
        server.wait_until(refused, SOON, |seen| seen.log().of("secrets").codes().contains(&403)).await;
        server.rules(|rules| rules.graph_lag = Duration::ZERO);
        Instant::now()
    };
    let (mounted, since) = tokio::join!(node.volumes.mount(&pod), authorized);
    mounted.expect("mounted");
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
}

#[tokio::test]
async fn a_change_reaches_fifty_pods_without_a_request() {
    // AC-10a-36
    let server = ApiServer::start().await;
    let mut node = Node::of(&server).await;
    server.create(config_map("1"));
    server.create(secret());
    let mut pods = Vec::new();
    for n in 0..50 {
        let name = format!("p{n}");
        server.create(manifest(&name));
        server.bind("default", &name, "n");
        pods.push(stored(&server, &name));
    }
    for pod in &pods {
        node.objects.register(pod);
        timeout(SOON, node.volumes.mount(pod)).await.expect("in time").expect("mounted");
    }
    let streams = server.log().by("system:node:n").of("configmaps").filter(|request| request.code == Some(200)).len();
    assert_eq!(streams, 2, "one for each object, shared by all pods");
    while timeout(Duration::from_secs(1), node.changed.next()).await.is_ok() {}
    let (last, changed) = (server.log().len(), Instant::now());
    server.update(config_map("2"));
    for _ in &pods {
        let uid = timeout(SOON, node.changed.next()).await.expect("received");
        let pod = pods.iter().find(|pod| *pod.uid() == uid).expect("one of them");
        node.volumes.mount(pod).await.expect("refreshed");
    }
    assert!(changed.elapsed() < SOON, "{:?}", changed.elapsed());
    assert!(pods.iter().all(|pod| node.shown(pod, "configmap", "cm", "k") == "2"));
    assert_eq!(server.log().len(), last, "no request");
    pods.iter().for_each(|pod| node.objects.unregister(pod.uid()));
    let until = Instant::now() + SOON;
    while server.log().of("configmaps").iter().any(|request| request.end.is_none()) && Instant::now() < until {
        sleep(Duration::from_millis(20)).await;
    }
    assert!(server.log().of("configmaps").iter().all(|request| request.end.is_some()), "the watch has ended");
}
