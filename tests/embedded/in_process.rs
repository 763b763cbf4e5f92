//! The server's own endpoints before the embedded runtime: no URL is dialled, the client's connection is handed over.
//! Spec 04b §2, §4; 09a §4.

use std::{convert::Infallible, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::body::Body;
use berth::{
    agent::embedded_streams::RuntimeTargets,
    embedded::streams::IN_PROCESS,
    metrics::{Registry, StreamingMetrics, exposition::Format},
    pod::{ContainerId, Pod, SandboxId},
    proto::cri::{self, runtime_service_client::RuntimeServiceClient},
    server::{
        attach, exec, port_forward,
        ports::streams::{Sandbox, StreamError, StreamSet, Streams as StreamPort},
        routing::{ContainerPath, PodPath},
        run,
        streaming::{Streaming, StreamingConfig},
    },
};
use bytes::Bytes;
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{net::TcpListener, time::timeout};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::{
    real::container,
    streams::{LIMIT, SUCCESS, Streams, World, all, channels, exit_status, forwards, next, ports, say, spdy_head},
};

#[allow(dead_code, reason = "the kit is shared")]
#[path = "../kit/pods.rs"]
mod pods;

/// The runtime by its calls, as the agent asks it; one pod, `web`, of one container, `c`.
struct Calls {
    rpc: RuntimeServiceClient<Channel>,
    pod: Arc<Pod>,
    container: ContainerId,
    sandbox: SandboxId,
}

fn refused(status: tonic::Status) -> StreamError {
    StreamError::Other(status.message().to_owned())
}

#[async_trait]
impl StreamPort for Calls {
    fn pod(&self, _: &str, _: &str) -> Option<Arc<Pod>> {
        Some(self.pod.clone())
    }

    async fn running(&self, _: &Pod, container: &str) -> Option<ContainerId> {
        (container == "c").then(|| self.container.clone())
    }

    async fn sandbox(&self, _: &Pod) -> Sandbox {
        Sandbox::Newest(self.sandbox.clone())
    }

    async fn exec(&self, id: &ContainerId, cmd: Vec<String>, set: StreamSet) -> Result<String, StreamError> {
        let StreamSet { stdin, stdout, stderr, tty } = set;
        let container_id = id.as_str().to_owned();
        let request = cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr };
        self.rpc.clone().exec(request).await.map(|reply| reply.into_inner().url).map_err(refused)
    }

    async fn attach(&self, id: &ContainerId, set: StreamSet) -> Result<String, StreamError> {
        let StreamSet { stdin, stdout, stderr, tty } = set;
        let request = cri::AttachRequest { container_id: id.as_str().to_owned(), stdin, tty, stdout, stderr };
        self.rpc.clone().attach(request).await.map(|reply| reply.into_inner().url).map_err(refused)
    }

    async fn port_forward(&self, sandbox: &SandboxId, ports: &[u16]) -> Result<String, StreamError> {
        let port = ports.iter().copied().map(i32::from).collect();
        let request = cri::PortForwardRequest { pod_sandbox_id: sandbox.as_str().to_owned(), port };
        self.rpc.clone().port_forward(request).await.map(|reply| reply.into_inner().url).map_err(refused)
    }

    async fn run(&self, id: &ContainerId, command: &[String]) -> Result<Vec<u8>, StreamError> {
        let request = cri::ExecSyncRequest { container_id: id.as_str().to_owned(), cmd: command.to_vec(), timeout: 0 };
        let reply = self.rpc.clone().exec_sync(request).await.map_err(refused)?.into_inner();
        Ok([reply.stdout, reply.stderr].concat())
    }
}

/// The endpoints, listening.
struct Endpoints {
    streams: Streams,
    streaming: Streaming,
    registry: Registry,
    stop: CancellationToken,
}

impl Endpoints {
    async fn of(world: &World, config: StreamingConfig) -> Self {
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let calls = Calls {
            rpc: world.daemon.rpc.clone(),
            pod: pods::pod("web", json!({"containers": [{"name": "c"}]})),
            container: world.container.as_str().into(),
            sandbox: world.sandbox.as_str().into(),
        };
        let tls = Arc::new(|| panic!("nothing is dialled"));
        let metrics = StreamingMetrics::new(&registry);
        let streaming = Streaming::new(config, Arc::new(calls), tls, metrics, stop.clone());
        streaming.serve_here(IN_PROCESS, Arc::new(RuntimeTargets(world.daemon.runtime.clone())));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let (shared, stopped) = (streaming.clone(), stop.clone());
        let task = tokio::spawn(async move {
            while let Some(Ok((tcp, _))) = stopped.run_until_cancelled(listener.accept()).await {
                let shared = shared.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| {
                        let shared = shared.clone();
                        async move { Ok::<_, Infallible>(route(&shared, request).await) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(tcp), service).with_upgrades().await;
                });
            }
        });
        let streams = Streams { address, stop: stop.clone(), task };
        Self { streams, streaming, registry, stop }
    }

    fn metrics(&self) -> String {
        let mut page = Vec::new();
        Format::negotiate(None).encode(self.registry.gather(), &mut page);
        String::from_utf8(page).expect("text")
    }
}

async fn route(streaming: &Streaming, request: Request<Incoming>) -> Response<Body> {
    let request = request.map(Body::new);
    let path = request.uri().path().to_owned();
    let pod = PodPath { namespace: "default".to_owned(), pod: "web".to_owned(), uid: None };
    let container = ContainerPath { pod: pod.clone(), container: "c".to_owned() };
    match path.as_str() {
        "/exec" => exec(streaming, &container, request).await,
        "/attach" => attach(streaming, &container, request).await,
        "/run" => run(streaming, &container, request).await,
        _ => port_forward(streaming, &pod, request).await,
    }
}

/// A command, as a query spells it.
fn query(script: &str) -> String {
    format!("&command=/bin/sh&command=-c&command={}", script.replace(' ', "+").replace(';', "%3B").replace('&', "%26"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_endpoints_hand_their_clients_over() {
    let config = cri::ContainerConfig { stdin: true, ..container("c", "while read line; do echo got $line; done") };
    let Some(world) = World::with("the_servers_endpoints_hand_their_clients_over", config).await else { return };
    let ends = Endpoints::of(&world, StreamingConfig::default()).await;

    let target = format!("/exec?input=1&output=1{}", query("cat; exit 7"));
    let client = ends.streams.spdy_at(&target, &["v5.channel.k8s.io", "v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdin", "stdout"]).await;
    streams["stdin"].write(Bytes::from("hi")).await.expect("sent");
    streams.get_mut("stdin").expect("open").finish().await.expect("sent");
    assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "hi");
    assert_eq!(all(streams.get_mut("error").expect("open")).await, exit_status(7));

    // AC-04b-S6: no translation, but the same words.
    let (head, mut socket) = ends.streams.web_socket_at(&target, "v5.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    say(&mut socket, b"\0foo").await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    say(&mut socket, &[255, 0]).await;
    let status = String::from_utf8(next(&mut socket).await).expect("text");
    assert!(
        status.starts_with("\u{3}{\"metadata\":{}") && status.contains("terminated with exit code 7\""),
        "{status}"
    );
    drop(socket);

    // AC-04b-S7
    let (head, mut socket) =
        ends.streams.web_socket_at(&format!("/exec?output=1{}", query("echo hi")), "v4.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"]);
    assert_eq!(channels(&mut socket).await, ["hi\n".to_owned(), String::new(), SUCCESS.to_owned()]);
    assert!(ends.metrics().contains("kubelet_websocket_streaming_requests_total{subresource=\"exec\"} 1"));

    let (_, mut socket) = ends.streams.web_socket_at("/attach?input=1&output=1", "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    say(&mut socket, b"\0line\n").await;
    assert_eq!(next(&mut socket).await, b"\x01got line\n");
    drop(socket);

    let both = ports().await;
    let client = ends.streams.spdy_at("/portForward", &["portforward.k8s.io"]).await;
    forwards(&world, &client, both).await;
    client.connection.close();
    let (_, mut socket) =
        ends.streams.web_socket_at(&format!("/portForward?port={}", both.1), "v4.channel.k8s.io").await;
    let mut told = Vec::new();
    while let Some(Ok(Message::Binary(bytes))) =
        timeout(LIMIT, futures::StreamExt::next(&mut socket)).await.expect("in time")
    {
        told.push(bytes);
    }
    assert_eq!((told.len(), told[0][0], told[1][0], told[2][0]), (3, 0, 1, 1), "two greetings and why not");
    drop(socket);
    let (head, _) = ends.streams.web_socket_at("/portForward", "SPDY/3.1+portforward.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
    let page = ends.metrics();
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"portforward\"} 1"), "{page}");

    let (head, _) = ends.streams.request("POST /run?cmd=echo+hi HTTP/1.1\r\nContent-Length: 0").await;
    assert_eq!((head.status, head.header("content-type")), (200, vec!["application/json"]));
    ends.stop.cancel();
    timeout(LIMIT, ends.streaming.closed()).await.expect("all streams end with the agent");

    // With the gate off nothing of the newest is spoken.
    let off = StreamingConfig { terminate_web_sockets: false, grace: Duration::ZERO, ..StreamingConfig::default() };
    let off = Endpoints::of(&world, off).await;
    let head = format!("/exec?output=1{}", query("true"));
    let (head, _) = off.streams.request(&crate::streams::web_socket_head(&head, "v5.channel.k8s.io")).await;
    assert_eq!(head.status, 403);
    let (head, _) = off.streams.request(&spdy_head("/exec?output=1", &["v4.channel.k8s.io"])).await;
    assert_eq!(head.status, 500, "a command that is none is the runtime's to refuse");
    off.streams.end().await;
    world.end().await;
}
