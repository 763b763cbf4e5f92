//! The stream endpoints behind a tiny server, and clients for them.

use std::{collections::HashMap, convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::body::Body;
use berth::{
    agent::{RuntimeStreams, runtime_tls},
    cri::RuntimeService,
    engine::ports::{PodObserver, PodView, RuntimePods},
    metrics::{Registry, StreamingMetrics},
    pod::{
        Pod, PodRef, PodUid,
        observed::{
            ContainerState, Generation, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState,
        },
    },
    proto::cri,
    server::{
        attach,
        auth::{Identity, Via},
        exec, port_forward,
        routing::{ContainerPath, PodPath},
        run,
        streaming::{
            Streaming, StreamingConfig,
            spdy::{Connection, Headers, Incoming as SpdyStreams, Limits, Role, Stream, session},
        },
    },
};
use bytes::Bytes;
use http::{Request, Response};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::AbortHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, tungstenite};
use tokio_util::sync::CancellationToken;

/// No test waits longer for anything.
pub const LIMIT: Duration = Duration::from_secs(60);

/// What runs, as a test said.
pub struct Seen(pub Arc<ObservedPod>);

#[async_trait]
impl PodObserver for Seen {
    fn view(&self, _pod: &PodRef) -> PodView {
        PodView::new(watch::channel(None).1, Generation(0))
    }
    fn acted(&self, _pod: &PodUid) -> Generation {
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

/// Starts one container named `c` of a pod in the runtime; returns what PLEG would see.
pub async fn start(
    runtime: &dyn RuntimeService,
    pod: &Pod,
    linux: cri::PodSandboxConfig,
    container: cri::ContainerConfig,
) -> ObservedPod {
    let sandbox = runtime.run_pod_sandbox(linux.clone(), "").await.expect("a sandbox");
    let id = runtime.create_container(&sandbox, container, linux).await.expect("a container");
    runtime.start_container(&id).await.expect("it runs");
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
        name: "c".into(),
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

/// The endpoints, listening.
pub struct Rig {
    /// Where.
    pub address: SocketAddr,
    /// What is behind them.
    pub streaming: Streaming,
    /// Ends all streams.
    pub stop: CancellationToken,
    /// Metrics.
    pub registry: Registry,
    task: AbortHandle,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Rig {
    /// Serves streams of one pod.
    pub async fn serve(
        runtime: Arc<dyn RuntimeService>,
        pod: Arc<Pod>,
        seen: ObservedPod,
        config: StreamingConfig,
    ) -> Self {
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let pods = watch::channel(Arc::new(vec![pod])).1;
        let ports = RuntimeStreams::new(pods, Arc::new(Seen(Arc::new(seen))), runtime);
        let metrics = StreamingMetrics::new(&registry);
        let streaming = Streaming::new(config, Arc::new(ports), runtime_tls(), metrics, stop.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
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
        Self { address, streaming, stop, registry, task: task.abort_handle() }
    }

    /// Sends a request; the head of the answer, and the connection behind it.
    pub async fn request(&self, head: &str) -> (Head, TcpStream) {
        let mut tcp = TcpStream::connect(self.address).await.expect("it listens");
        tcp.write_all(format!("{head}\r\nHost: node\r\n\r\n").as_bytes()).await.expect("sent");
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            let byte = timeout(LIMIT, tcp.read_u8()).await.expect("an answer in time").expect("an answer");
            text.push(byte);
        }
        (Head::read(&String::from_utf8(text).expect("text")), tcp)
    }

    /// Sends a request that gets an ordinary answer: status and body.
    pub async fn ask(&self, head: &str) -> (u16, String) {
        let (head, mut tcp) = self.request(&format!("{head}\r\nX-Test: 1")).await;
        let length: usize = head.header("content-length").first().expect("a length").parse().expect("a number");
        let mut body = vec![0; length];
        timeout(LIMIT, tcp.read_exact(&mut body)).await.expect("in time").expect("a body");
        (head.status, String::from_utf8(body).expect("text"))
    }

    /// Speaks SPDY with an endpoint.
    pub async fn spdy(&self, target: &str, protocols: &[&str]) -> Spdy {
        let lines: String = protocols.iter().map(|p| format!("\r\nX-Stream-Protocol-Version: {p}")).collect();
        let head =
            format!("POST {target} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0{lines}");
        let (head, tcp) = self.request(&head).await;
        assert_eq!(head.status, 101, "{head:?}");
        Spdy::over(head, tcp)
    }

    /// Speaks a WebSocket with an endpoint.
    pub async fn web_socket(&self, target: &str, protocols: &str) -> (Head, WebSocketStream<TcpStream>) {
        let (head, tcp) = self.request(&web_socket_head(target, protocols)).await;
        assert_eq!(head.status, 101, "{head:?}");
        (head, WebSocketStream::from_raw_socket(tcp, tungstenite::protocol::Role::Client, None).await)
    }
}

/// The head of a WebSocket's request, without the last lines.
pub fn web_socket_head(target: &str, protocols: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: {protocols}"
    )
}

/// The head of an answer.
#[derive(Debug)]
pub struct Head {
    /// Status.
    pub status: u16,
    lines: Vec<(String, String)>,
}

impl Head {
    fn read(text: &str) -> Self {
        let mut lines = text.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status").parse().expect("a number");
        let pairs = lines.filter_map(|line| line.split_once(": "));
        Self { status, lines: pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect() }
    }

    /// All values of a header.
    pub fn header(&self, name: &str) -> Vec<&str> {
        self.lines.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
    }
}

async fn route(streaming: &Streaming, request: Request<Incoming>) -> Response<Body> {
    let mut request = request.map(Body::new);
    let name = request.headers().get("x-user").map(|user| user.to_str().expect("text").to_owned());
    let via = if request.headers().contains_key("x-via") { Via::X509 } else { Via::Token };
    request.extensions_mut().insert(Identity { name: name.unwrap_or_default(), via, ..Identity::anonymous() });
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

/// A SPDY client.
pub struct Spdy {
    /// The answer's head.
    pub head: Head,
    /// Opens streams.
    pub connection: Connection,
    /// None come, but somebody has to refuse them.
    pub incoming: SpdyStreams,
    /// The connection's task.
    pub task: tokio::task::JoinHandle<()>,
}

impl Spdy {
    /// Over any connection.
    pub fn over<T>(head: Head, io: T) -> Self
    where
        T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + 'static,
    {
        let limits = Limits { idle: None, ping: None, streams: 64 };
        let (connection, incoming, driver) = session(io, Role::Client, limits);
        let task = tokio::spawn(async move {
            let _ = driver.run().await;
        });
        Self { head, connection, incoming, task }
    }

    /// Opens a stream of a command.
    pub async fn stream(&self, kind: &str) -> Stream {
        self.open(&[("streamType", kind)]).await
    }

    /// Opens any stream and waits until it is accepted.
    pub async fn open(&self, headers: &[(&str, &str)]) -> Stream {
        let mut stream = self.connection.open(Headers::of(headers)).await.expect("open");
        timeout(LIMIT, stream.accepted()).await.expect("in time").expect("accepted");
        stream
    }
}

/// All that comes on a stream, until it ends in whatever way.
pub async fn all(stream: &mut Stream) -> Bytes {
    let mut bytes = Vec::new();
    while let Ok(Some(more)) = timeout(LIMIT, stream.read()).await.expect("in time") {
        bytes.extend_from_slice(&more);
    }
    bytes.into()
}
