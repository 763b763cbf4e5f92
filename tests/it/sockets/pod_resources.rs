//! The pod-resources API, versions v1 and v1alpha1.

use std::{
    collections::HashSet,
    os::unix::fs::PermissionsExt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use berth::serving::pods::EnginePods;
use berth_metrics::{PodResourcesMetrics, Registry};
use berth_proto::{
    health::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient},
    pod_resources::{
        AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest,
        pod_resources_lister_client::PodResourcesListerClient,
    },
    v1alpha1::{self, pod_resources_lister_client as alpha},
};
use berth_server::{
    grpc::{PodResourcesDeps, Socket, pod_resources},
    ports::{Allocatable, Claim, Device, ExclusiveAllocations, ExclusiveResources, PodDirectory},
};
use berth_types::{Pod, PodUid, api};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::sockets::{PATIENCE, connect, opened};
use berth_testkit::{
    agent::Machine,
    pods::{pod, simple},
    scripted_cri::Behaviour,
};

/// A fixed set of pods; the named ones are active.
struct FakePodDirectory {
    pods: Arc<Vec<Arc<Pod>>>,
    active: HashSet<&'static str>,
}

impl PodDirectory for FakePodDirectory {
    fn pods(&self) -> Arc<Vec<Arc<Pod>>> {
        self.pods.clone()
    }

    fn is_active(&self, pod: &Pod) -> bool {
        self.active.contains(pod.name())
    }

    fn status(&self, _uid: &PodUid) -> Option<Arc<api::PodStatus>> {
        None
    }
}

/// Two devices for every container named `gpu`; counts the reconcile calls.
#[derive(Default)]
struct Gpus(AtomicUsize);

#[async_trait]
impl ExclusiveResources for Gpus {
    async fn reconcile(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn allocations(&self, _pod: &Pod, container: &str) -> ExclusiveAllocations {
        let devices = if container == "gpu" { self.allocatable().devices } else { Vec::new() };
        ExclusiveAllocations { devices, ..ExclusiveAllocations::default() }
    }

    fn claims(&self, _pod: &Pod, _container: &str) -> Result<Vec<Claim>, String> {
        Err("nobody knows".to_owned())
    }

    fn allocatable(&self) -> Allocatable {
        let device = |id: &str, nodes: &[i64]| Device {
            resource: "example.com/gpu".to_owned(),
            id: id.to_owned(),
            nodes: nodes.to_vec(),
        };
        let devices = vec![device("a", &[0]), device("b", &[0, 1])];
        Allocatable { devices, cpus: [3, 1].into_iter().collect(), memory: Vec::new() }
    }
}

/// A served socket, and the fakes behind it.
struct Fixture {
    dir: tempfile::TempDir,
    gpus: Arc<Gpus>,
    registry: Registry,
    stop: CancellationToken,
}

impl Fixture {
    async fn new() -> Self {
        let sidecar = json!({"name": "sidecar", "restartPolicy": "Always"});
        let spec = json!({"initContainers": [{"name": "setup"}, sidecar], "containers": [{"name": "gpu"}]});
        let pods = Arc::new(vec![simple("done"), pod("web", spec)]);
        let (gpus, registry) = (Arc::new(Gpus::default()), Registry::new());
        let routes = pod_resources(PodResourcesDeps {
            pods: Arc::new(FakePodDirectory { pods, active: ["web"].into() }),
            exclusive: gpus.clone(),
            metrics: PodResourcesMetrics::new(&registry),
            active_only: true,
        });
        let fixture =
            Self { dir: tempfile::tempdir().expect("a directory"), gpus, registry, stop: CancellationToken::new() };
        // Leftovers of a previous agent.
        std::fs::create_dir(fixture.dir.path().join("pod-resources")).expect("makeable");
        for left in [fixture.socket(), fixture.socket().with_extension("new")] {
            drop(std::os::unix::net::UnixListener::bind(left).expect("bindable"));
        }
        let (socket, trouble) = Socket::new(fixture.socket(), routes);
        tokio::spawn(socket.run(fixture.stop.clone()));
        opened(trouble).await;
        fixture
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("pod-resources/kubelet.sock")
    }

    fn count(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let name = format!("kubelet_pod_resources_endpoint_{name}");
        let family = families.iter().find(|family| family.name() == name);
        family.map_or(0, |f| f.get_metric().iter().map(|m| m.get_counter().get_value() as u64).sum())
    }
}

#[tokio::test]
async fn a_list_shows_active_pods_and_their_devices() {
    // AC-04b-M15, AC-04b-M16
    let fixture = Fixture::new().await;
    let mut v1 = PodResourcesListerClient::new(connect(fixture.socket()).await);
    let list = v1.list(ListPodResourcesRequest {}).await.expect("answered").into_inner().pod_resources;
    let names: Vec<&str> = list.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(names, ["web"]);
    let containers: Vec<(&str, usize)> =
        list[0].containers.iter().map(|c| (c.name.as_str(), c.devices.len())).collect();
    assert_eq!(containers, [("sidecar", 0), ("gpu", 3)], "no plain init container; an entry per device and node");
    assert!(list[0].containers[1].dynamic_resources.is_empty(), "claims nobody knows are none");

    let mut old = alpha::PodResourcesListerClient::new(connect(fixture.socket()).await);
    let list = old.list(v1alpha1::ListPodResourcesRequest {}).await.expect("answered").into_inner().pod_resources;
    let names: Vec<(&str, usize)> = list.iter().map(|pod| (pod.name.as_str(), pod.containers.len())).collect();
    assert_eq!(names, [("done", 1), ("web", 1)], "all pods, regular containers only");
    assert_eq!(fixture.gpus.0.load(Ordering::Relaxed), 2, "before every list what is gone is let go");
    assert_eq!((fixture.count("requests_total"), fixture.count("requests_list")), (2, 1));
}

#[tokio::test]
async fn single_pods_and_allocatable_resources_are_returned() {
    let fixture = Fixture::new().await;
    let mut v1 = PodResourcesListerClient::new(connect(fixture.socket()).await);
    let get = |name: &str| GetPodResourcesRequest { pod_name: name.to_owned(), pod_namespace: "default".to_owned() };
    let web = v1.get(get("web")).await.expect("answered").into_inner().pod_resources.expect("the pod");
    assert_eq!((web.name.as_str(), web.containers.len()), ("web", 2));
    for name in ["done", "nobody"] {
        let status = v1.get(get(name)).await.expect_err("not active");
        let text = format!("pod {name} in namespace default not found");
        assert_eq!((status.code(), status.message()), (Code::Unknown, text.as_str()));
    }
    let all = v1.get_allocatable_resources(AllocatableResourcesRequest {}).await.expect("answered").into_inner();
    assert_eq!((all.devices.len(), all.cpu_ids.as_slice(), all.memory.len()), (3, &[1, 3][..], 0));
    let counted =
        ["requests_get", "errors_get", "requests_get_allocatable", "requests_total"].map(|n| fixture.count(n));
    assert_eq!(counted, [3, 2, 1, 4]);
    assert_eq!(fixture.gpus.0.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_tight_loop_is_rate_limited() {
    // AC-04b-M14
    let fixture = Fixture::new().await;
    let mut v1 = PodResourcesListerClient::new(connect(fixture.socket()).await);
    let mut admitted = 0;
    let refused = loop {
        match v1.list(ListPodResourcesRequest {}).await {
            Ok(_) => admitted += 1,
            Err(status) => break status,
        }
        // On a slow machine the rate limiter refills with every call; then concurrent calls exceed it.
        if admitted == 200 {
            let crowd = (0..50).map(|_| {
                let mut client = v1.clone();
                async move { client.list(ListPodResourcesRequest {}).await }
            });
            break futures::future::join_all(crowd).await.into_iter().find_map(Result::err).expect("one is refused");
        }
    };
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "rejected by rate limit"));
    let (counted, lists) = (fixture.count("requests_total"), fixture.count("requests_list"));
    assert!(counted >= 10 && counted == lists, "who is refused is not counted: {counted} {lists}");
    // Both versions share one token bucket.
    let old = alpha::PodResourcesListerClient::new(connect(fixture.socket()).await);
    let crowd = (0..50).map(|_| {
        let (mut new, mut old) = (v1.clone(), old.clone());
        async move {
            let _ = new.list(ListPodResourcesRequest {}).await;
            old.list(v1alpha1::ListPodResourcesRequest {}).await
        }
    });
    assert!(futures::future::join_all(crowd).await.iter().any(Result::is_err));
}

#[tokio::test]
async fn a_socket_that_cannot_be_opened_is_retried_and_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let in_the_way = dir.path().join("pod-resources");
    std::fs::write(&in_the_way, "").expect("writable");
    let deps = PodResourcesDeps {
        pods: Arc::new(FakePodDirectory { pods: Arc::default(), active: HashSet::new() }),
        exclusive: Arc::<Gpus>::default(),
        metrics: PodResourcesMetrics::new(&Registry::new()),
        active_only: true,
    };
    let path = in_the_way.join("kubelet.sock");
    let (socket, mut trouble) = Socket::new(path.clone(), pod_resources(deps));
    let stop = CancellationToken::new();
    let serving = tokio::spawn(socket.run(stop.clone()));
    let reported = trouble.wait_for(|t| t.as_deref().is_some_and(|t| t != "socket is not open yet")).await;
    assert!(reported.expect("it lives").as_deref().is_some_and(|text| text.contains("exists")));
    std::fs::remove_file(&in_the_way).expect("removable");
    opened(trouble).await;
    assert_eq!(std::fs::metadata(&in_the_way).expect("made").permissions().mode() & 0o777, 0o750);
    let mut v1 = PodResourcesListerClient::new(connect(path).await);
    let all = v1.get_allocatable_resources(AllocatableResourcesRequest {}).await.expect("answered").into_inner();
    assert_eq!((all.devices.len(), all.cpu_ids.len(), all.memory.len()), (3, 2, 0));
    drop(v1);
    stop.cancel();
    tokio::time::timeout(PATIENCE, serving).await.expect("it ends").expect("no panic");
}

#[tokio::test]
async fn who_can_ask_at_all_learns_that_it_is_served() {
    let fixture = Fixture::new().await;
    let mut health = HealthClient::new(connect(fixture.socket()).await);
    for service in ["", "v1.PodResourcesLister", "v1alpha1.PodResourcesLister"] {
        let answer = health.check(HealthCheckRequest { service: service.to_owned() }).await.expect("answered");
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving, "{service}");
    }
    let unknown = health.check(HealthCheckRequest { service: "v2.PodResourcesLister".to_owned() }).await;
    assert_eq!(unknown.expect_err("nobody").code(), Code::NotFound);
    let watch = health.watch(HealthCheckRequest::default()).await;
    assert_eq!(watch.err().map(|status| status.code()), Some(Code::Unimplemented));
    // Health checks are neither rate limited nor counted.
    for _ in 0..50 {
        health.check(HealthCheckRequest::default()).await.expect("answered");
    }
    assert_eq!(fixture.count("requests_total"), 0);
}

#[tokio::test]
async fn bad_input_ends_its_own_connection_only() {
    let fixture = Fixture::new().await;
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    // A frame of an illegal length, a stream that was never opened, another protocol, and noise.
    let oversized = [preface, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    let unopened = [preface, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 0, 1, 0, 0, 0, 0, 0, 9, 7]].concat();
    let noise: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for bytes in [oversized, unopened, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), noise] {
        let mut stream = UnixStream::connect(fixture.socket()).await.expect("it listens");
        let _ = stream.write_all(&bytes).await; // the server may close before it has read everything
        let mut answer = Vec::new();
        let end = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
        assert!(end.is_ok(), "{} bytes are left hanging", bytes.len());
    }
    let mut v1 = PodResourcesListerClient::new(connect(fixture.socket()).await);
    // Above the message size limit: rejected, and the next call is served.
    let huge = GetPodResourcesRequest { pod_name: "x".repeat(8 << 20), pod_namespace: "default".to_owned() };
    let refused = v1.get(huge).await.expect_err("too large");
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    v1.list(ListPodResourcesRequest {}).await.expect("answered");
}

#[tokio::test]
async fn a_thousand_connections_block_no_call_and_leave_nothing() {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(soft.max(8_192)), hard).expect("up to the hard limit");
    let fixture = Fixture::new().await;
    let open = || std::fs::read_dir("/proc/self/fd").expect("readable").count();
    let before = open();
    let mut idle = Vec::new();
    for _ in 0..1_000 {
        idle.push(UnixStream::connect(fixture.socket()).await.expect("it listens"));
    }
    let mut v1 = PodResourcesListerClient::new(connect(fixture.socket()).await);
    v1.list(ListPodResourcesRequest {}).await.expect("answered");
    drop((idle, v1));
    // Concurrent tests open files, too.
    let closed = async {
        while open() > before + 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, closed).await.expect("what is closed is let go");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_done_is_not_active_any_more() {
    // AC-04b-M15
    let machine = Machine::new();
    let agent = machine.start().await;
    let once = pod("once", json!({"containers": [{"name": "once"}], "restartPolicy": "Never"}));
    machine.cri.behave("once", [Behaviour::exits(0, Duration::from_secs(1))]);
    let web = simple("web");
    agent.only_static([&once, &web]).await;
    agent.until_ready(web.uid(), PATIENCE).await;
    agent.until(once.uid(), "done", PATIENCE, |status| status.phase.as_deref() == Some("Succeeded")).await;
    let pods = EnginePods { pods: agent.engine.pods.clone(), status: agent.status.clone() };
    let mut changes = Box::pin(agent.engine.pods.changes());
    let done = async {
        while pods.is_active(&once) {
            let _ = tokio::time::timeout(Duration::from_secs(1), futures::StreamExt::next(&mut changes)).await;
        }
    };
    tokio::time::timeout(PATIENCE, done).await.expect("it does not count any more");
    assert!(pods.is_active(&web));
    assert_eq!(pods.find("default", "once").as_deref().map(Pod::name), Some("once"));
    assert_eq!(pods.status(once.uid()).and_then(|s| s.phase.clone()).as_deref(), Some("Succeeded"));
    agent.stop(PATIENCE).await;
}
