//! Streaming endpoints of the agent's server behind a minimal HTTP server, for one pod on any runtime.

use std::{collections::HashMap, convert::Infallible, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::body::Body;
use berth::{
    engine::PodReader,
    serving::{RuntimeStreams, runtime_tls},
};
use berth_cri::RuntimeService;
use berth_metrics::{Registry, StreamingMetrics, exposition::ExpositionFormat};
use berth_ports::{PodObserver, PodView, RuntimePods};
use berth_proto::cri;
use berth_server::{
    attach,
    auth::{AuthenticatedBy, UserInfo},
    exec, port_forward,
    routing::{ContainerPath, PodPath},
    run,
    streaming::{StreamingConfig, StreamingContext},
};
use berth_types::{
    Pod, PodRef, PodUid,
    observation::{
        ContainerState, Generation, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState,
    },
};
use http::{Request, Response};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use tokio::{
    net::TcpListener,
    sync::watch,
    task::AbortHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::clients::{LIMIT, StreamEndpoint};

/// Polling interval for conditions without notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Pod observer with one fixed observation.
struct FixedObserver(Arc<ObservedPod>);

#[async_trait]
impl PodObserver for FixedObserver {
    fn view(&self, _pod: &PodRef) -> PodView {
        PodView::new(watch::channel(None).1, Generation(0))
    }
    fn action_completed(&self, _pod: &PodUid) -> Generation {
        Generation(0)
    }
    fn known(&self) -> Option<RuntimePods> {
        Some(RuntimePods { pods: HashMap::from([(self.0.id.uid.clone(), self.0.clone())]) })
    }
    async fn list(&self) -> Result<RuntimePods, String> {
        self.known().ok_or_else(String::new)
    }
    fn health(&self) -> Option<String> {
        None
    }
}

/// Starts one container of a pod in the runtime; returns the observation that PLEG would make.
pub async fn start(
    runtime: &dyn RuntimeService,
    pod: &Pod,
    linux: cri::PodSandboxConfig,
    container: cri::ContainerConfig,
) -> ObservedPod {
    let name = container.metadata.as_ref().expect("container without metadata").name.clone();
    let sandbox = runtime.run_pod_sandbox(linux.clone(), "").await.expect("failed to run sandbox");
    let id = runtime.create_container(&sandbox, container, linux).await.expect("failed to create container");
    runtime.start_container(&id).await.expect("failed to start container");
    let mut seen = ObservedPod::empty(pod.id().clone(), Generation(1), Timestamp::UNIX_EPOCH);
    seen.sandboxes.push(ObservedSandbox {
        id: sandbox.as_str().into(),
        attempt: 0,
        state: SandboxState::Ready,
        created_at: Timestamp::UNIX_EPOCH,
        network_mode: NetworkMode::Pod,
        has_network: true,
        ips: Vec::new(),
        runtime_handler: String::new(),
    });
    seen.containers.push(ObservedContainer {
        id: id.as_str().into(),
        name: name.as_str().into(),
        sandbox: sandbox.as_str().into(),
        state: ContainerState::Running,
        created_at: Timestamp::UNIX_EPOCH,
        started_at: None,
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: String::new(),
        image_ref: String::new(),
        image_id: String::new(),
        hash: None,
        restart_count: 0,
        log_path: String::new(),
        resources: None,
        user: None,
    });
    seen
}

/// Streams of one pod, as the agent provides them to its server.
pub fn runtime_streams(runtime: Arc<dyn RuntimeService>, pod: Arc<Pod>, seen: ObservedPod) -> RuntimeStreams {
    RuntimeStreams::new(PodReader::fixed(vec![pod]), Arc::new(FixedObserver(Arc::new(seen))), runtime)
}

/// Streaming endpoints with their listener.
pub struct Endpoints {
    /// Address of the listener.
    pub endpoint: StreamEndpoint,
    /// Streaming service behind the endpoints.
    pub streaming: StreamingContext,
    /// Ends all streams.
    pub stop: CancellationToken,
    registry: Registry,
    task: AbortHandle,
}

impl Drop for Endpoints {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Endpoints {
    /// Serves the streams of one pod.
    pub async fn serve(
        runtime: Arc<dyn RuntimeService>,
        pod: Arc<Pod>,
        seen: ObservedPod,
        config: StreamingConfig,
    ) -> Self {
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let ports = runtime_streams(runtime, pod, seen);
        let metrics = StreamingMetrics::new(&registry);
        let streaming = StreamingContext::new(config, Arc::new(ports), runtime_tls(), metrics, stop.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("failed to listen on a port");
        let stream_endpoint = StreamEndpoint(listener.local_addr().expect("failed to get the local address"));
        let shared = streaming.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = shared.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| {
                        let shared = shared.clone();
                        async move { Ok::<_, Infallible>(route(&shared, request).await) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
                });
            }
        });
        Self { endpoint: stream_endpoint, streaming, stop, registry, task: task.abort_handle() }
    }

    /// Waits until no stream of the agent's server is open.
    pub async fn no_stream_is_left(&self) {
        self.until_open(0).await;
    }

    /// Waits until so many streams are open.
    pub async fn until_open(&self, count: usize) {
        let reached = async {
            while self.streaming.open() != count {
                sleep(POLL_INTERVAL).await;
            }
        };
        let limited = timeout(LIMIT, reached).await;
        assert!(limited.is_ok(), "{} streams are open, expected {count}", self.streaming.open());
    }

    /// Metrics in Prometheus exposition format.
    pub fn metrics(&self) -> String {
        let mut page = Vec::new();
        ExpositionFormat::negotiate(None).encode(self.registry.gather(), &mut page);
        String::from_utf8(page).expect("text")
    }
}

async fn route(streaming: &StreamingContext, request: Request<Incoming>) -> Response<Body> {
    let mut request = request.map(Body::new);
    let name = request.headers().get("x-user").map(|user| user.to_str().expect("text").to_owned());
    let via = if request.headers().contains_key("x-via") { AuthenticatedBy::X509 } else { AuthenticatedBy::Token };
    request.extensions_mut().insert(UserInfo { name: name.unwrap_or_default(), via, ..UserInfo::anonymous() });
    let path = request.uri().path().to_owned();
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let pod = |namespace: &str, name: &str, uid: Option<&str>| PodPath {
        namespace: namespace.to_owned(),
        pod: name.to_owned(),
        uid: uid.map(str::to_owned),
    };
    match parts.as_slice() {
        ["portForward", namespace, name, rest @ ..] => {
            port_forward(streaming, &pod(namespace, name, rest.first().copied()), request).await
        }
        [kind, namespace, name, rest @ .., container] => {
            let pod = pod(namespace, name, rest.first().copied());
            let path = ContainerPath { pod, container: (*container).to_owned() };
            match *kind {
                "exec" => exec(streaming, &path, request).await,
                "attach" => attach(streaming, &path, request).await,
                _ => run(streaming, &path, request).await,
            }
        }
        _ => panic!("no such path: {path}"),
    }
}
