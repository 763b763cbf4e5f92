//! Streaming through a real containerd. Needs root; reports where it is skipped.

use std::time::Duration;

use berth_cri::{CriConfig, connect};
use berth_metrics::Registry;
use berth_proto::cri;
use berth_server::streaming::StreamingConfig;
use bytes::Bytes;
use serde_json::json;

use crate::server_streaming::fixture::{EXEC, command, is_success};
use berth_testkit::{
    containerd::{Containerd, start_or_skip},
    cri_calls, pods,
    streams::{
        clients::{all, next, send_message, spdy_head},
        endpoints::{Endpoints, start},
        ports::Ports,
    },
};

async fn before(containerd: &Containerd) -> Endpoints {
    let config = CriConfig {
        endpoint: containerd.endpoint(),
        image_endpoint: String::new(),
        request_timeout: Duration::from_secs(60),
        list_streaming: false,
    };
    let runtime = connect(&config, &Registry::new()).expect("an endpoint").runtime;
    let pod = pods::pod("web", json!({"containers": [{"name": "c"}]}));
    // The host network, so that the test's own ports are those of the pod.
    let namespaces = cri::NamespaceOption { network: cri::NamespaceMode::Node.into(), ..Default::default() };
    let log_directory = containerd.dir().join("logs").display().to_string();
    let sandbox = cri::PodSandboxConfig { log_directory, ..cri_calls::sandbox("web", namespaces) };
    let container = cri_calls::container("c", "exec sleep 1000", cri::NamespaceMode::Container);
    let seen = start(&*runtime, &pod, sandbox, container).await;
    Endpoints::serve(runtime, pod, seen, StreamingConfig::default()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_real_containerd() {
    let Some(containerd) = start_or_skip("streams_of_a_real_containerd") else { return };
    let ends = before(&containerd).await;

    // Commands over SPDY.
    let (printed, status) = command(&ends.endpoint, &["sh", "-c", "echo hello"]).await;
    assert_eq!(printed, "hello\n");
    assert!(is_success(&status), "{status}");
    let (_, status) = command(&ends.endpoint, &["sh", "-c", "exit 7"]).await;
    assert!(status.contains("NonZeroExitCode") && status.contains("\"message\":\"7\""), "{status}");
    let client = ends
        .endpoint
        .spdy(&format!("{EXEC}?input=1&output=1&command=cat"), &["v5.channel.k8s.io", "v4.channel.k8s.io"])
        .await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["v4.channel.k8s.io"]);
    let mut error = client.stream("error").await;
    let mut stdin = client.stream("stdin").await;
    let mut stdout = client.stream("stdout").await;
    stdin.write(Bytes::from(vec![b'x'; 300_000])).await.expect("sent");
    stdin.finish().await.expect("sent");
    assert_eq!(all(&mut stdout).await.len(), 300_000);
    assert!(!all(&mut error).await.is_empty());

    // Version 5, translated; and version 4, which containerd implements itself.
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    let (_, mut socket) = ends.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    send_message(&mut socket, b"\0foo").await;
    send_message(&mut socket, &[255, 0]).await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    let (head, mut socket) = ends.endpoint.web_socket(&target, "v4.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    send_message(&mut socket, b"\0foo").await;
    assert_eq!(next(&mut socket).await, b"\x01foo");

    // Port-forward.
    let ports = Ports::open().await;
    let client = ends.endpoint.spdy("/portForward/default/web", &["portforward.k8s.io"]).await;
    ports.a_closed_one_ends_nothing(&client).await;
    let (_, mut socket) = ends
        .endpoint
        .web_socket(&format!("/portForward/default/web?port={},8000&port=9000", ports.line), "v4.channel.k8s.io")
        .await;
    let mut channels = Vec::new();
    for _ in 0..6 {
        channels.push(next(&mut socket).await[0]);
    }
    channels.sort_unstable();
    assert_eq!(channels, [0, 1, 2, 3, 4, 5]);

    // Requests without a stream of the agent.
    assert_eq!(ends.endpoint.ask("POST /run/default/web/c?cmd=echo%20hi HTTP/1.1").await, (200, "hi\n".to_owned()));
    let head = spdy_head(&format!("{EXEC}?output=1&command=sh"), &["v9"]);
    let (answer, _) = ends.endpoint.request(&head).await;
    assert_eq!(answer.status, 403);
    assert!(!answer.header("x-accepted-stream-protocol-versions").is_empty());
    ends.stop.cancel();
    ends.streaming.closed().await;
    drop(containerd);
}
