//! Traces of a node: spans that a collector receives (spec 08 §13).

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use berth_testkit::{
    main_port::MainPort,
    otlp_collector::{OtlpCollector, ReceivedSpan},
    process::{Agent, Home, NODE, manifest, manifest_of, skips},
    scripted_cri::Fault,
};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::agent::ScriptedServer;

/// Trace context of a client.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

/// A home of an agent that records all spans, and sends them to the collector.
fn traced_home(runtime: &ScriptedServer, collector: &OtlpCollector) -> Home {
    runtime.home().with(json!({"tracing": {"endpoint": collector.endpoint(), "samplingRatePerMillion": 1_000_000}}))
}

fn named<'a>(spans: &'a [ReceivedSpan], name: &str) -> Option<&'a ReceivedSpan> {
    spans.iter().find(|span| span.name == name)
}

fn parent<'a>(spans: &'a [ReceivedSpan], call: &ReceivedSpan) -> Option<&'a ReceivedSpan> {
    spans.iter().find(|span| span.span_id == call.parent_id)
}

/// Span of the request that [`list_pods`] sends.
fn request_of_test(spans: &[ReceivedSpan]) -> Option<&ReceivedSpan> {
    spans.iter().find(|span| span.attributes.get("user_agent.original").is_some_and(|agent| agent == "test"))
}

/// Sends `GET /pods` with trace context to the read-only port.
async fn list_pods(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.expect("connected");
    let request = format!(
        "GET /pods HTTP/1.1\r\nhost: node\r\ntraceparent: 00-{TRACE}-{CLIENT}-01\r\nuser-agent: test\r\nconnection: \
         close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("answered");
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_of_a_pod_is_a_trace_with_the_calls_of_the_runtime() {
    // AC-08-24
    if skips("the_start_of_a_pod_is_a_trace_with_the_calls_of_the_runtime") {
        return;
    }
    let collector = OtlpCollector::start().await;
    let runtime = ScriptedServer::new().await;
    let home = traced_home(&runtime, &collector);
    home.put_pod(&manifest("web"));
    let mut agent: Agent = home.start().await;
    let pod = agent.until_ready("web").await;
    list_pods(home.read_only_port()).await;

    let calls = ["RunPodSandbox", "CreateContainer", "StartContainer"];
    let calls = calls.map(|call| format!("runtime.v1.RuntimeService/{call}"));
    let is_complete = |spans: &[ReceivedSpan]| {
        let has_parent = |call: &String| named(spans, call).is_some_and(|call| parent(spans, call).is_some());
        let garbage = named(spans, "Containers/GarbageCollect");
        calls.iter().all(has_parent) && request_of_test(spans).is_some() && garbage.is_some()
    };
    let spans = collector.wait_for(is_complete).await;

    let garbage = named(&spans, "Containers/GarbageCollect").expect("it was waited for");
    assert_eq!((garbage.parent_id.as_str(), &garbage.error), ("", &None));
    let is_list = |span: &ReceivedSpan| span.name == "runtime.v1.RuntimeService/ListContainers";
    assert!(spans.iter().any(|span| is_list(span) && span.parent_id == garbage.span_id), "{spans:#?}");

    for span in &spans {
        assert_eq!(span.resource.get("service.name").map(String::as_str), Some("kubelet"), "{span:?}");
        assert!(span.resource.contains_key("host.name"), "{span:?}");
    }
    for call in &calls {
        let call = named(&spans, call).expect("it was waited for");
        assert!(call.error.is_none(), "{call:?}");
        let sync = parent(&spans, call).expect("it was waited for");
        assert!(sync.error.is_none(), "{sync:?}");
        assert_eq!((sync.name.as_str(), sync.parent_id.as_str()), ("syncPod", ""));
        assert_eq!(sync.trace_id, call.trace_id);
        assert_eq!(sync.scope, "k8s.io/kubernetes/pkg/kubelet");
        assert_eq!(sync.attributes["k8s.pod"], format!("default/web-{NODE}"));
        assert_eq!(sync.attributes["k8s.pod.uid"], pod["metadata"]["uid"].as_str().expect("it has one"));
        assert_eq!(sync.attributes["k8s.pod.update_type"], "create");
        assert_eq!(call.attributes["rpc.system.name"], "grpc");
        assert_eq!(call.attributes["rpc.method"], call.name);
        assert_eq!(call.attributes["rpc.response.status_code"], "OK");
        // What the runtime records of the call belongs to the same trace.
        let sent = format!("00-{}-{}-01", call.trace_id, call.span_id);
        let received = runtime.cri.traceparents();
        assert!(received.contains(&sent), "{sent}: {received:?}");
    }

    runtime.cri.fault("pull_image", "absent", Fault::Error(tonic::Code::Unknown, "no such image".into()), None);
    // The failure of a pod is an exception of its sync.
    home.put_pod(&manifest_of("broken", json!({"containers": [{"name": "c", "image": "registry.example/absent:1"}]})));
    let is_failed_sync = |span: &&ReceivedSpan| {
        span.name == "syncPod" && span.attributes["k8s.pod.name"].starts_with("broken") && span.error.is_some()
    };
    let spans = collector.wait_for(|spans| spans.iter().any(|span| is_failed_sync(&span))).await;
    let failed = spans.iter().find(is_failed_sync).expect("it was waited for");
    assert_eq!(failed.events, ["exception"]);
    let pull = spans.iter().find(|span| span.name == "runtime.v1.ImageService/PullImage").expect("a pull");
    assert_eq!((&pull.parent_id, pull.error.is_some()), (&failed.span_id, true), "{pull:?}");

    // A client's trace is linked, not joined: clients do not decide what is sampled.
    let request = request_of_test(&spans).expect("it was waited for");
    assert_eq!(request.name, "/pods");
    assert_eq!(request.parent_id, "");
    assert_ne!(request.trace_id, TRACE);
    assert_eq!(request.links, [(TRACE.to_owned(), CLIENT.to_owned())]);
    assert_eq!(request.attributes["http.route"], "/pods");
    assert_eq!(request.attributes["http.response.status_code"], "200");

    // The last spans are exported at the end of the agent, and log records name their trace.
    home.remove("web.json");
    agent.until_gone("web").await;
    let status = agent.end_with(Signal::SIGTERM).await;
    assert_eq!(status.code(), Some(0));
    let spans = collector.wait_for(|spans| named(spans, "syncTerminatingPod").is_some()).await;
    let traces: BTreeSet<String> = spans.iter().map(|span| format!("trace_id=\"{}\"", span.trace_id)).collect();
    let log = agent.whole_log();
    assert!(traces.iter().any(|trace| log.contains(trace)), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_that_is_no_address_stops_the_start() {
    if skips("an_endpoint_that_is_no_address_stops_the_start") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"tracing": {"endpoint": "host:port"}}));
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1));
    let log = agent.whole_log();
    assert!(log.contains("tracing.endpoint: \\\"host:port\\\": expected host:port"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_does_not_answer_delays_nothing_and_the_stop_by_seconds() {
    if skips("a_collector_that_does_not_answer_delays_nothing_and_the_stop_by_seconds") {
        return;
    }
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port"); // accepts nothing
    let endpoint = hanging.local_addr().expect("bound").to_string();
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"tracing": {"endpoint": endpoint, "samplingRatePerMillion": 1_000_000}}));
    home.put_pod(&manifest("web"));
    let mut agent = home.start().await;
    agent.until_ready("web").await;
    let begun = Instant::now();
    assert_eq!(agent.end_with(Signal::SIGTERM).await.code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let log = agent.whole_log();
    assert!(log.contains("Timed out exporting the last spans"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_stream_that_the_runtime_does_not_implement_is_an_error_and_the_list_after_it_is_not() {
    if skips("a_list_stream_that_the_runtime_does_not_implement_is_an_error_and_the_list_after_it_is_not") {
        return;
    }
    let (collector, runtime) = (OtlpCollector::start().await, ScriptedServer::new().await);
    let home = traced_home(&runtime, &collector).with(json!({"featureGates": {"CRIListStreaming": true}}));
    home.put_pod(&manifest("web"));
    let agent = home.start().await;
    agent.until_ready("web").await; // lists have ended, and no other stream begins
    assert_eq!(agent.stop().await, Some(0));

    let is_stream = |span: &&ReceivedSpan| span.name.starts_with("runtime.v1.RuntimeService/Stream");
    let is_list = |span: &&ReceivedSpan| {
        let has_status = span.attributes.get("rpc.response.status_code").is_some_and(|status| status == "OK");
        span.name == "runtime.v1.RuntimeService/ListContainers" && has_status
    };
    let spans = collector
        .wait_for(|spans| spans.iter().any(|span| is_stream(&span)) && spans.iter().any(|span| is_list(&span)))
        .await;
    for stream in spans.iter().filter(is_stream) {
        let status = stream.attributes.get("rpc.response.status_code").map(String::as_str);
        assert_eq!(status, Some("Unimplemented"), "{stream:?}");
        let text = "rpc error: code = Unimplemented desc = the runtime does not implement the stream";
        assert_eq!(stream.error.as_deref(), Some(text));
    }
    let list = spans.iter().find(is_list).expect("it was waited for");
    assert_eq!(list.error, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_is_not_ready_is_an_exception_of_the_sync() {
    if skips("a_network_that_is_not_ready_is_an_exception_of_the_sync") {
        return;
    }
    let (collector, runtime) = (OtlpCollector::start().await, ScriptedServer::new().await);
    runtime.cri.set_conditions(true, false);
    let home = traced_home(&runtime, &collector);
    home.put_pod(&manifest("web"));
    let agent = home.start().await;
    let series = "berth_pod_waiting_seconds{reason=\"network\"}";
    agent.until("the pod waits for its network", async || agent.metric(series).await.is_some()).await;
    assert_eq!(agent.stop().await, Some(0));

    let text = "network is not ready: container runtime network not ready: NetworkReady=false reason:Scripted \
                message:not ready";
    // Syncs before the first status of the runtime fail, too.
    let is_failed = |span: &&ReceivedSpan| span.name == "syncPod" && span.error.as_deref() == Some(text);
    let spans = collector.wait_for(|spans| spans.iter().any(|span| is_failed(&span))).await;
    let sync = spans.iter().find(is_failed).expect("it was waited for");
    assert_eq!(sync.events, ["exception"]);
    assert_eq!(sync.attributes["k8s.pod"], format!("default/web-{NODE}"));
    assert!(named(&spans, "runtime.v1.RuntimeService/RunPodSandbox").is_none(), "{spans:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_garbage_collection_of_images_is_a_trace_with_the_calls_of_the_runtime() {
    if skips("a_garbage_collection_of_images_is_a_trace_with_the_calls_of_the_runtime") {
        return;
    }
    let (collector, runtime) = (OtlpCollector::start().await, ScriptedServer::new().await);
    // The first round removes every image that no container uses.
    let home = traced_home(&runtime, &collector).with(json!({"imageMinimumGCAge": "1ns", "imageMaximumGCAge": "2ns"}));
    let agent = home.start().await;
    runtime.until("an image is removed", &agent, |cri| cri.count("remove_image") > 0).await;
    assert_eq!(agent.stop().await, Some(0)); // the round ends first

    let spans = collector.wait_for(|spans| named(spans, "Images/GarbageCollect").is_some()).await;
    let round = named(&spans, "Images/GarbageCollect").expect("it was waited for");
    assert_eq!((round.parent_id.as_str(), &round.error), ("", &None));
    assert_eq!(round.scope, "k8s.io/kubernetes/pkg/kubelet/images");
    for call in ["ImageService/ListImages", "ImageService/RemoveImage", "RuntimeService/ListContainers"] {
        let is_child = |span: &ReceivedSpan| {
            span.name == format!("runtime.v1.{call}") && parent(&spans, span) == Some(round) && span.error.is_none()
        };
        let child = spans.iter().find(|span| is_child(span)).unwrap_or_else(|| panic!("{call}: {spans:#?}"));
        assert_eq!(child.trace_id, round.trace_id);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_a_request_causes_in_other_tasks_are_children_of_its_span() {
    if skips("calls_that_a_request_causes_in_other_tasks_are_children_of_its_span") {
        return;
    }
    let (collector, runtime) = (OtlpCollector::start().await, ScriptedServer::new().await);
    let port = MainPort::new();
    let gates = json!({"featureGates": {"PodAndContainerStatsFromCRI": true}});
    let home = traced_home(&runtime, &collector).with(port.fields()).with(gates);
    home.put_pod(&manifest("web"));
    let agent = home.start().await;
    agent.until_ready("web").await;
    port.open().await;
    let summary = agent.get("/stats/summary").await.expect("an answer");
    assert_eq!(summary.status, 200, "{}", summary.body);
    let client = port.client("admin", &["system:masters"]);
    let (certificate, key) = (client.certificate.display().to_string(), client.key.display().to_string());
    let path = format!("/checkpoint/default/web-{NODE}/main");
    let checkpoint = port.curl(&path, &["--cert", &certificate, "--key", &key, "-X", "POST"]).await;
    assert_eq!(checkpoint.status, 200, "{checkpoint:?}");
    assert_eq!(agent.stop().await, Some(0));

    let (statistics, checkpoint) = ("/stats/summary", "/checkpoint/{podNamespace}/{podID}/{containerName}");
    let spans =
        collector.wait_for(|spans| named(spans, statistics).is_some() && named(spans, checkpoint).is_some()).await;
    for (route, call) in [
        (statistics, "RuntimeService/ListContainerStats"),
        (statistics, "RuntimeService/ListPodSandboxStats"),
        (statistics, "ImageService/ImageFsInfo"),
        (checkpoint, "RuntimeService/CheckpointContainer"),
    ] {
        let request = named(&spans, route).expect("it was waited for");
        assert_eq!((request.parent_id.as_str(), &request.error), ("", &None));
        let is_child =
            |span: &&ReceivedSpan| span.name == format!("runtime.v1.{call}") && parent(&spans, span) == Some(request);
        let child = spans.iter().find(is_child).unwrap_or_else(|| panic!("{route}: {call}: {spans:#?}"));
        assert_eq!((&child.trace_id, &child.error), (&request.trace_id, &None));
    }
}
