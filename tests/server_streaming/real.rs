//! Streams of a real containerd. Needs root; says so where it cannot run.

use std::time::Duration;

use berth::{
    cri::{CriConfig, connect},
    metrics::Registry,
    proto::cri,
    server::streaming::StreamingConfig,
};
use bytes::Bytes;
use futures::SinkExt;
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

use crate::{
    EXEC, command, forwards,
    kit::{
        containerd::{Containerd, start_or_skip},
        image::BUSYBOX,
        pods,
    },
    next, ports,
    rig::{Rig, all, start},
};

async fn rig(containerd: &Containerd) -> Rig {
    let config = CriConfig {
        endpoint: containerd.endpoint(),
        image_endpoint: String::new(),
        request_timeout: Duration::from_secs(60),
        list_streaming: false,
    };
    let runtime = connect(&config, &Registry::new()).expect("an endpoint").runtime;
    let pod = pods::pod("web", json!({"containers": [{"name": "c"}]}));
    let meta =
        cri::PodSandboxMetadata { name: "web".into(), uid: "uid-web".into(), namespace: "default".into(), attempt: 0 };
    // The host's network, so that the test's own ports are those of the pod.
    let namespaces = cri::NamespaceOption { network: cri::NamespaceMode::Node.into(), ..Default::default() };
    let security = cri::LinuxSandboxSecurityContext { namespace_options: Some(namespaces), ..Default::default() };
    let linux = cri::LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() };
    let log_directory = containerd.dir().join("logs").display().to_string();
    let sandbox =
        cri::PodSandboxConfig { metadata: Some(meta), log_directory, linux: Some(linux), ..Default::default() };
    let container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: BUSYBOX.into(), ..Default::default() }),
        command: vec!["/bin/sleep".into(), "1000".into()],
        log_path: "c.log".into(),
        ..Default::default()
    };
    let seen = start(&*runtime, &pod, sandbox, container).await;
    Rig::serve(runtime, pod, seen, StreamingConfig::default()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_real_containerd() {
    let Some(containerd) = start_or_skip("streams_of_a_real_containerd") else { return };
    let rig = rig(&containerd).await;

    // Commands over SPDY.
    let (printed, status) = command(&rig, &["sh", "-c", "echo hello"]).await;
    assert_eq!(printed, "hello\n");
    assert!(status.contains("\"status\":\"Success\""), "{status}");
    let (_, status) = command(&rig, &["sh", "-c", "exit 7"]).await;
    assert!(status.contains("NonZeroExitCode") && status.contains("\"message\":\"7\""), "{status}");
    let client =
        rig.spdy(&format!("{EXEC}?input=1&output=1&command=cat"), &["v5.channel.k8s.io", "v4.channel.k8s.io"]).await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["v4.channel.k8s.io"]);
    let mut error = client.stream("error").await;
    let mut stdin = client.stream("stdin").await;
    let mut stdout = client.stream("stdout").await;
    stdin.write(Bytes::from(vec![b'x'; 300_000])).await.expect("sent");
    stdin.finish().await.expect("sent");
    assert_eq!(all(&mut stdout).await.len(), 300_000);
    assert!(!all(&mut error).await.is_empty());

    // Version 5, translated; and version 4, which containerd speaks itself.
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    let (_, mut socket) = rig.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    for message in [&b"\0foo"[..], &[255, 0]] {
        socket.send(Message::Binary(Bytes::copy_from_slice(message))).await.expect("sent");
    }
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    let (head, mut socket) = rig.web_socket(&target, "v4.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    socket.send(Message::Binary(Bytes::from_static(b"\0foo"))).await.expect("sent");
    assert_eq!(next(&mut socket).await, b"\x01foo");

    // Ports.
    let (open, closed) = ports().await;
    let client = rig.spdy("/portForward/default/web", &["portforward.k8s.io"]).await;
    forwards(&client, open, closed).await;
    let (_, mut socket) =
        rig.web_socket(&format!("/portForward/default/web?port={open},8000&port=9000"), "v4.channel.k8s.io").await;
    let mut channels = Vec::new();
    for _ in 0..6 {
        channels.push(next(&mut socket).await[0]);
    }
    channels.sort_unstable();
    assert_eq!(channels, [0, 1, 2, 3, 4, 5]);

    // No stream of ours.
    assert_eq!(rig.ask("POST /run/default/web/c?cmd=echo%20hi HTTP/1.1").await, (200, "hi\n".to_owned()));
    let head = format!(
        "POST {EXEC}?output=1&command=sh HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v9"
    );
    let (answer, _) = rig.request(&head).await;
    assert_eq!(answer.status, 403);
    assert!(!answer.header("x-accepted-stream-protocol-versions").is_empty());
    rig.stop.cancel();
    rig.streaming.closed().await;
    drop(containerd);
}
