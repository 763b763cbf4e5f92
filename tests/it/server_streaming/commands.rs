//! Exec and attach over every protocol of the server's endpoints.

use berth_server::streaming::StreamingConfig;
use bytes::Bytes;
use futures::StreamExt;
use tokio::{io::AsyncReadExt, time::timeout};
use tokio_tungstenite::tungstenite::Message;

use crate::server_streaming::fixture::{EXEC, RuntimeKind, RuntimeUnderTest, Terminal, command, is_success};
use berth_testkit::{
    scripted_cri::streaming::COMPLAINS,
    streams::clients::{LIMIT, all, next, send_message, spdy_head, web_socket_head, words},
};

on_both_runtimes! {
    spdy_goes_through_untouched
    every_version_of_spdy_carries_a_command
    version_5_is_translated
    terminals_follow_the_container_spec
    clients_attach_to_what_runs
    older_web_sockets_are_the_runtimes_business
    output_flows_while_complaints_are_unread
}

async fn spdy_goes_through_untouched(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    // AC-04b-S3
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    let client = world.endpoint.spdy(&target, &["v5.channel.k8s.io", "v4.channel.k8s.io"]).await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["v4.channel.k8s.io"]);
    let mut streams = client.command(&["error", "stdin", "stdout"]).await;
    let stdin = streams.get_mut("stdin").expect("open");
    stdin.write(Bytes::from_static(b"foo")).await.expect("sent");
    stdin.finish().await.expect("sent");
    assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "foo");
    let status = all(streams.get_mut("error").expect("open")).await;
    assert!(is_success(&status), "{status}");
    timeout(LIMIT, client.task).await.expect("the runtime closes, and so do we").expect("no panic");

    // AC-04b-S4
    let target = format!("{EXEC}?output=1&command=cat");
    let (head, mut tcp) =
        world.endpoint.request(&format!("{}\r\nAuthorization: Bearer secret", spdy_head(&target, &["v9"]))).await;
    assert_eq!((head.status, head.header("x-accepted-stream-protocol-versions").len()), (403, 4));
    let length: usize = head.header("content-length").first().expect("a length").parse().expect("a number");
    let mut body = vec![0; length];
    timeout(LIMIT, tcp.read_exact(&mut body)).await.expect("in time").expect("a body");
    assert!(body.starts_with(b"unable to upgrade: unable to negotiate protocol: client supports [v9]"));
    if matches!(world.below, RuntimeUnderTest::Scripted { .. }) {
        assert_eq!(timeout(LIMIT, tcp.read(&mut body)).await.expect("both sides are closed").expect("in order"), 0);
    }

    // AC-04b-S5
    let (_, status) = command(&world.endpoint, &["sh", "-c", "exit 7"]).await;
    let causes = r#""reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}"#;
    assert!(status.contains(causes), "{status}");
    world.end().await;
}

async fn every_version_of_spdy_carries_a_command(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    for version in ["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"] {
        let target = format!("{EXEC}?input=1&output=1&command=cat");
        let client = world.endpoint.spdy(&target, &[version]).await;
        assert_eq!(client.head.header("x-stream-protocol-version"), [version]);
        let mut streams = client.command(&["error", "stdin", "stdout"]).await;
        let stdin = streams.get_mut("stdin").expect("open");
        stdin.write(Bytes::from(vec![b'x'; 300_000])).await.expect("sent");
        stdin.finish().await.expect("sent");
        assert_eq!(all(streams.get_mut("stdout").expect("open")).await.len(), 300_000, "{version}");
        // The status of a protocol version comes from the runtime.
        all(streams.get_mut("error").expect("open")).await;
    }
    world.end().await;
}

async fn version_5_is_translated(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    // AC-04b-S6
    let (head, mut socket) = world.endpoint.web_socket(&target, "v4.channel.k8s.io, v5.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    assert_eq!(head.header("sec-websocket-accept"), ["s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]);
    assert_eq!(next(&mut socket).await, [1], "it is connected");
    send_message(&mut socket, b"\0foo").await;
    send_message(&mut socket, &[255, 0]).await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    let last = timeout(LIMIT, socket.next()).await.expect("in time");
    let Some(Ok(Message::Close(Some(close)))) = last else { panic!("{last:?}") };
    assert_eq!(u16::from(close.code), 1000, "kubectl takes any other end for a failure");

    let target = format!("{EXEC}?error=1{}", words(&["sh", "-c", "exit 7"]));
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [2]);
    let status = String::from_utf8(next(&mut socket).await).expect("text");
    assert!(
        status.contains("command terminated with non-zero exit code: command terminated with exit code 7"),
        "{status}"
    );
    let page = world.ends.metrics();
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"exec\"} 2"), "{page}");
    world.end().await;
}

async fn terminals_follow_the_container_spec(on: RuntimeKind) {
    let Some(world) = on.with(StreamingConfig::default(), Terminal::Given).await else { return };
    let (_, mut socket) =
        world.endpoint.web_socket("/attach/default/web/c?output=1&input=1", "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    send_message(&mut socket, b"\0x").await;
    assert_eq!(next(&mut socket).await, b"\x01x");
    let page = world.ends.metrics();
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"attach\"} 1"), "{page}");

    let target = format!("{EXEC}?output=1&tty=1&error=1{}", words(&["stty", "size"]));
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    send_message(&mut socket, b"\x04{\"Width\":81,\"Height\":24}").await;
    assert_eq!(next(&mut socket).await, b"\x0124 81\r\n");

    let client = world.endpoint.spdy(&target, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdout", "resize"]).await;
    streams["resize"].write(Bytes::from_static(b"{\"Width\":101,\"Height\":33}")).await.expect("sent");
    assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "33 101\r\n");
    world.end().await;
}

async fn clients_attach_to_what_runs(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let target = "/attach/default/web/c?output=1&input=1";
    let client = world.endpoint.spdy(target, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdin", "stdout"]).await;
    streams["stdin"].write(Bytes::from_static(b"one\n")).await.expect("sent");
    let stdout = streams.get_mut("stdout").expect("open");
    let echoed = timeout(LIMIT, stdout.read()).await.expect("in time").expect("whole").expect("open");
    assert_eq!(echoed, "one\n");
    client.connection.close();
    for protocol in ["v5.channel.k8s.io", "v4.channel.k8s.io"] {
        let (head, mut socket) = world.endpoint.web_socket(target, protocol).await;
        assert_eq!(head.header("sec-websocket-protocol"), [protocol]);
        assert_eq!(next(&mut socket).await, [1]);
        send_message(&mut socket, b"\0two\n").await;
        assert_eq!(next(&mut socket).await, b"\x01two\n");
    }
    world.end().await;
}

async fn older_web_sockets_are_the_runtimes_business(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    // AC-04b-S7
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    let (head, mut socket) = world.endpoint.web_socket(&target, "v4.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    send_message(&mut socket, b"\0foo").await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert!(!world.ends.metrics().contains("websocket_streaming"), "nothing ended here");
    drop(socket);
    world.end().await;

    // With the gate off, the newest version is passed to the runtime, too.
    let config = StreamingConfig { terminate_web_sockets: false, ..StreamingConfig::default() };
    let off = on.with(config, Terminal::None).await.expect("as before");
    let head = web_socket_head(&target, "v5.channel.k8s.io");
    let (head, _) = off.endpoint.request(&head).await;
    match off.below {
        RuntimeUnderTest::Scripted { .. } => assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"]),
        RuntimeUnderTest::Embedded(_) => assert_eq!(head.status, 403, "it does not know it either"),
    }
    let tunnel = web_socket_head("/portForward/default/web", "SPDY/3.1+portforward.k8s.io");
    let (status, body) = off.endpoint.ask(&tunnel).await;
    assert_eq!((status, body.as_str()), (400, "query parameter \"port\" is required"));
    off.end().await;
}

async fn output_flows_while_complaints_are_unread(on: RuntimeKind) {
    // AC-04b-S13
    const LOTS: usize = 100 << 20;
    let Some(world) = on.world().await else { return };
    let arguments = words(&["sh", "-c", COMPLAINS, "100000", &LOTS.to_string()]);
    let target = format!("{EXEC}?output=1&error=1{arguments}");
    let client = world.endpoint.spdy(&target, &["v4.channel.k8s.io"]).await;
    let (mut error, mut stdout, _unread) =
        (client.stream("error").await, client.stream("stdout").await, client.stream("stderr").await);
    let mut got = 0;
    while let Some(bytes) = timeout(LIMIT, stdout.read()).await.expect("in time").expect("whole") {
        got += bytes.len();
    }
    assert_eq!(got, LOTS);
    let status = all(&mut error).await;
    assert!(is_success(&status), "{status}");

    // A v5 client that reads nothing blocks its own command only.
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(command(&world.endpoint, &["head", "-c", "10", "/dev/zero"]).await.0.len(), 10);
    let mut counts = [0usize; 4];
    while counts[3] == 0 {
        let message = next(&mut socket).await;
        counts[usize::from(message[0])] += message.len() - 1;
    }
    assert_eq!((counts[1], counts[2]), (LOTS, 100_000));
    world.end().await;
}
