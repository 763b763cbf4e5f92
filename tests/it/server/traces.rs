//! Spans of requests and streams (spec 08 §13). One test: a process exports its traces once.

use std::{collections::BTreeMap, net::TcpListener, sync::Arc, time::Duration};

use berth_metrics::Registry;
use berth_otel::{Scope, TraceExportSettings};
use berth_ports::SystemClock;
use berth_proto::cri;
use berth_server::streaming::spdy::SpdyStream;
use serde_json::json;
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::WebSocketStream;

use super::fixture::{ALL, PATIENCE, RunningListener};
use berth_testkit::{
    image::BUSYBOX,
    otlp_collector::{OtlpCollector, ReceivedSpan},
    pods,
    scripted_cri::{ScriptedCri, streaming::StreamServer},
    streams::{
        clients::{Spdy, StreamEndpoint, next},
        endpoints::{runtime_streams, start},
    },
};

/// Spans that fill a batch of the export.
const BATCH: usize = 512;

/// Ends as many spans as a batch has, so that it is exported at once: with all spans that ended before.
fn fill_batch() {
    for _ in 0..BATCH {
        drop(berth_otel::root_span(Scope::Kubelet, "filler", Vec::new));
    }
}

/// A listener whose streams are those of the pod `traced` on the scripted runtime.
async fn streaming_listener(runtime: &Arc<ScriptedCri>) -> RunningListener {
    let pod = pods::pod("traced", json!({"containers": [{"name": "c"}]}));
    let metadata = cri::PodSandboxMetadata {
        name: "traced".into(),
        uid: "uid-traced".into(),
        namespace: "default".into(),
        attempt: 0,
    };
    let sandbox = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
    let container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: BUSYBOX.into(), ..Default::default() }),
        ..Default::default()
    };
    let seen = start(&**runtime, &pod, sandbox, container).await;
    RunningListener::streaming(Arc::new(runtime_streams(runtime.clone(), pod, seen))).await
}

/// Open streams of the pod `traced`, through which the runtime has answered.
struct OpenStreams {
    _exec: WebSocketStream<TcpStream>,
    _attach: (Spdy, BTreeMap<&'static str, SpdyStream>),
    _forward: (Spdy, (SpdyStream, SpdyStream)),
    /// Listens on the port that is forwarded, and accepts nothing.
    _port: TcpListener,
}

impl OpenStreams {
    async fn open(listener: &RunningListener) -> Self {
        let endpoint = StreamEndpoint(listener.address);
        let target = "/exec/default/traced/c?input=1&output=1&command=cat";
        let (_, mut exec) = endpoint.web_socket(target, "v5.channel.k8s.io").await;
        assert_eq!(next(&mut exec).await, [1], "it is connected");
        let attach = endpoint.spdy("/attach/default/traced/c?input=1&output=1", &["v4.channel.k8s.io"]).await;
        let attached = attach.command(&["error", "stdin", "stdout"]).await;
        let port = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let forward = endpoint.spdy("/portForward/default/traced", &["portforward.k8s.io"]).await;
        let pair = forward.pair(port.local_addr().expect("bound").port(), "0").await;
        Self { _exec: exec, _attach: (attach, attached), _forward: (forward, pair), _port: port }
    }

    /// Disconnects the clients, and waits until the listener has no request in flight.
    async fn disconnect(self, listener: &RunningListener) {
        drop(self);
        let ended = async {
            while listener.metric("kubelet_http_inflight_requests", &[]) > 0.0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, ended).await.expect("timed out waiting for the end of the streams");
    }
}

/// Status code and error of the requests of this test without a stream.
fn answered(spans: &[ReceivedSpan]) -> Vec<(&str, Option<&str>)> {
    // Other tests of the process may send requests, too.
    let is_ours =
        |span: &&ReceivedSpan| span.attributes.get("user_agent.original").is_some_and(|agent| agent == "trace-test");
    let ours = spans.iter().filter(is_ours);
    ours.map(|span| (span.attributes["http.response.status_code"].as_str(), span.error.as_deref())).collect()
}

/// Status code and error of the streams of this test, by route.
fn streamed(spans: &[ReceivedSpan]) -> BTreeMap<&str, (&str, Option<&str>)> {
    let is_ours =
        |span: &&ReceivedSpan| span.attributes.get("url.path").is_some_and(|path| path.contains("/default/traced"));
    let ours = spans.iter().filter(is_ours);
    ours.map(|span| {
        let status = span.attributes["http.response.status_code"].as_str();
        (span.name.as_str(), (status, span.error.as_deref()))
    })
    .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admitted_requests_have_a_span_until_their_answer_or_stream_ends() {
    let collector = OtlpCollector::start().await;
    let settings = TraceExportSettings {
        endpoint: Some(collector.endpoint()),
        sampling_rate_per_million: 1_000_000,
        host_name: "node".to_owned(),
    };
    berth_otel::start_export(&settings, &Registry::new()).expect("an address");
    let runtime = ScriptedCri::new(Arc::new(SystemClock));
    let _server = StreamServer::start(&runtime).await;
    let streaming = streaming_listener(&runtime).await;
    let streams = OpenStreams::open(&streaming).await;

    let agent = "user-agent: trace-test\r\n";
    let guarded = RunningListener::guarded(&[("get", "pods")]).await;
    let refused = "GET /pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\nuser-agent: trace-test\r\n\r\n";
    assert!(guarded.raw(refused).await.starts_with("HTTP/1.1 401 "));
    assert_eq!(guarded.ask("GET", "/metrics", agent).await.0, 403);
    assert_eq!(guarded.ask("GET", "/nothing", agent).await.0, 404);
    assert_eq!(guarded.ask("DELETE", "/pods", agent).await.0, 403);
    assert_eq!(guarded.ask("GET", "/pods", agent).await.0, 200);
    // A panic is an error of the span.
    let panicking = RunningListener::start(ALL, None, true).await;
    assert_eq!(panicking.ask("GET", "/pods", agent).await.0, 500);

    fill_batch();
    let spans = collector.wait_for(|spans| answered(spans).len() >= 2).await;
    assert_eq!(answered(&spans), [("200", None), ("500", Some(""))]);
    // Spans are exported in the order of their ends: a span that ended with the 101 would be among these.
    assert_eq!(streamed(&spans), BTreeMap::new());

    streams.disconnect(&streaming).await;
    fill_batch();
    let spans = collector.wait_for(|spans| streamed(spans).len() == 3).await;
    let expected = [
        "/attach/{podNamespace}/{podID}/{containerName}",
        "/exec/{podNamespace}/{podID}/{containerName}",
        "/portForward/{podNamespace}/{podID}",
    ];
    assert_eq!(streamed(&spans), BTreeMap::from(expected.map(|route| (route, ("101", None)))));
}
