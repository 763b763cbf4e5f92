//! Runtimes and clients that behave badly.

use std::{sync::Arc, time::Duration};

use berth::server::streaming::StreamingConfig;
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    EXEC, World,
    kit::{
        scripted::ScriptedCri,
        web::{Answer, Server},
    },
    next,
    rig::{LIMIT, Rig, all},
    serve,
};

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io";

/// The endpoints before a runtime whose streaming server is at `base`.
async fn rig_at(base: &str) -> Rig {
    let cri = ScriptedCri::new(Arc::new(berth::engine::ports::SystemClock));
    cri.stream_at(base);
    serve(&cri, StreamingConfig::default(), false).await
}

async fn spdy_answer(base: &str) -> (u16, String) {
    rig_at(base).await.ask(&format!("POST {EXEC}?output=1&command=cat HTTP/1.1\r\n{UPGRADE}")).await
}

/// The status on channel 3 of a client of version 5.
async fn v5_status(rig: &Rig) -> String {
    let (_, mut socket) = rig.web_socket(&format!("{EXEC}?output=1&command=cat"), "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    let message = next(&mut socket).await;
    assert_eq!(message[0], 3);
    String::from_utf8(message[1..].to_vec()).expect("text")
}

/// A runtime that says this and then nothing, on every connection.
async fn saying(text: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = vec![0; 64 << 10];
                let _ = tcp.read(&mut request).await;
                let _ = tcp.write_all(text).await;
                while tcp.read(&mut request).await.is_ok_and(|read| read > 0) {}
            });
        }
    });
    url
}

#[tokio::test]
async fn a_runtime_that_sends_us_elsewhere_is_not_followed() {
    // AC-04b-S12
    let mut server = Server::start([Answer::Redirect("http://127.0.0.1:1/secret")]).await;
    let base = server.url().trim_end_matches("/pods").to_owned();
    let (status, body) = spdy_answer(&base).await;
    assert_eq!((status, body.as_str()), (500, "invalid upgrade response: status code 302\n"));
    let head = server.heads.recv().await.expect("one request");
    assert!(head.starts_with("POST /exec/token001 HTTP/1.1\r\n") && !head.contains("output=1"), "{head}");
    assert!(server.heads.try_recv().is_err());
    assert!(v5_status(&rig_at(&base).await).await.contains("Internal error occurred: unable to upgrade connection: "));

    let server = Server::start([Answer::Plain(200, "hello".to_owned())]).await;
    let base = server.url().trim_end_matches("/pods").to_owned();
    let (status, body) = spdy_answer(&base).await;
    assert_eq!((status, body.as_str()), (500, "invalid upgrade response: status code 200\n"));
    let server = Server::start([Answer::Plain(404, "404 page not found\n".to_owned())]).await;
    let base = server.url().trim_end_matches("/pods").to_owned();
    assert_eq!(spdy_answer(&base).await, (404, "404 page not found\n".to_owned()), "an expired token");
    assert!(v5_status(&rig_at(&base).await).await.contains("unable to upgrade connection: 404 page not found"));
    let server = Server::start([Answer::Garbage]).await;
    let (status, body) = spdy_answer(server.url().trim_end_matches("/pods")).await;
    assert_eq!((status, body.starts_with("error sending request: ")), (500, true), "{body}");
}

#[tokio::test]
async fn a_runtime_that_is_gone_or_elsewhere() {
    let (status, body) = spdy_answer("http://127.0.0.1:1").await;
    let refused = "error dialing backend: dial tcp 127.0.0.1:1: connect: connection refused\n";
    assert_eq!((status, body.as_str()), (500, refused));
    let status = v5_status(&rig_at("http://127.0.0.1:1").await).await;
    assert!(
        status.contains(
            "Internal error occurred: error sending request: dial tcp 127.0.0.1:1: connect: connection refused"
        ),
        "{status}"
    );
    for elsewhere in ["http://192.0.2.1:80", "http://metadata.example", "http://user@127.0.0.1:1"] {
        let (status, body) = spdy_answer(elsewhere).await;
        assert_eq!(
            (status, body.starts_with("error dialing backend: the runtime's streaming URL")),
            (500, true),
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_runtime_that_never_answers() {
    let cri = ScriptedCri::new(Arc::new(berth::engine::ports::SystemClock));
    cri.stream_at(&saying(b"").await);
    let config = StreamingConfig { answer: Duration::from_millis(50), ..StreamingConfig::default() };
    let rig = serve(&cri, config, false).await;
    let (status, body) = rig.ask(&format!("POST {EXEC}?output=1&command=cat HTTP/1.1\r\n{UPGRADE}")).await;
    assert_eq!((status, body.as_str()), (500, "error sending request: no answer within 50ms\n"));
    let status = v5_status(&rig).await;
    assert!(status.contains("error sending request: no answer within 50ms"), "{status}");
    nothing_is_left(&rig).await;
}

#[tokio::test]
async fn web_pages_of_other_sites_cannot_use_a_browsers_certificate() {
    // Spec 04 §10, cross-site WebSocket.
    let world = World::new().await;
    for target in [format!("{EXEC}?output=1&command=cat"), "/portForward/default/web?port=80".to_owned()] {
        for (lines, refused) in [
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: https://evil.example", true),
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: null", true),
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: https://node.evil.example", true),
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: https://node", false),
            ("X-Via: x509\r\nX-User: kate", false),
            ("X-Via: x509\r\nX-User: kube-apiserver-kubelet-client\r\nOrigin: https://dashboard.example", false),
            ("X-User: kate\r\nOrigin: https://evil.example", false),
        ] {
            let asked = |protocol| format!("{}\r\n{lines}", crate::web_socket_head(&target, protocol));
            for protocol in ["v4.channel.k8s.io", "v5.channel.k8s.io", "SPDY/3.1+portforward.k8s.io"] {
                let (answer, _) = world.rig.request(&asked(protocol)).await;
                assert_eq!(answer.status == 403, refused, "{target} {protocol} {lines}: {}", answer.status);
            }
        }
    }
    let run = "POST /run/default/web/c?cmd=ls HTTP/1.1\r\nX-Via: x509\r\nX-User: kate\r\nOrigin: https://evil.example";
    assert_eq!(world.rig.ask(run).await.0, 403);
    assert!(world.cri.calls().iter().all(|call| call.op != "exec_sync"), "and nothing was run");
}

#[tokio::test]
async fn a_client_that_stops_reading_or_just_goes() {
    let config = StreamingConfig { heartbeat: Duration::from_millis(20), ..StreamingConfig::default() };
    let world = World::with(config, false).await;
    // Who takes nothing stops his own command; when he goes, everything of it ends.
    let flood = format!("POST {EXEC}?output=1&command=flood&command=1000000000 HTTP/1.1\r\n{UPGRADE}");
    let (answer, tcp) = world.rig.request(&flood).await;
    assert_eq!(answer.status, 101);
    let client = crate::rig::Spdy::over(answer, tcp);
    let _streams = (client.stream("error").await, client.stream("stdout").await);
    assert_eq!(crate::command(&world.rig, &["flood", "10"]).await.0.len(), 10);
    assert_eq!(world.rig.streaming.open(), 1);
    client.task.abort();
    nothing_is_left(&world.rig).await;
    // Input that nobody reads does not hide that the client has gone.
    let target = format!("{EXEC}?input=1&output=1&command=sleep");
    let (_, mut socket) = world.rig.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    let lots = Message::Binary(vec![0; 1 << 20].into());
    let filling = async { while socket.send(lots.clone()).await.is_ok() {} };
    assert!(timeout(Duration::from_millis(300), filling).await.is_err(), "it is full now");
    assert_eq!(world.rig.streaming.open(), 1);
    drop(socket);
    nothing_is_left(&world.rig).await;
}

#[tokio::test]
async fn silence_ends_a_web_socket_after_the_idle_timeout() {
    let config = StreamingConfig { idle: Some(Duration::from_millis(50)), ..StreamingConfig::default() };
    let world = World::with(config, false).await;
    let target = format!("{EXEC}?output=1&command=sleep");
    let (_, mut socket) = world.rig.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    while let Some(Ok(_)) = timeout(LIMIT, socket.next()).await.expect("closed in time") {}
    nothing_is_left(&world.rig).await;
}

/// Waits until every stream has ended, here and in the runtime.
async fn nothing_is_left(rig: &Rig) {
    let ended = async {
        while rig.streaming.open() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, ended).await.expect("nothing is left");
}

#[tokio::test]
async fn a_container_that_dies_with_its_runtime() {
    let world = World::new().await;
    let client = world.rig.spdy(&format!("{EXEC}?output=1&command=vanish"), &["v4.channel.k8s.io"]).await;
    let (mut error, mut stdout) = (client.stream("error").await, client.stream("stdout").await);
    assert!(timeout(LIMIT, stdout.read()).await.expect("in time").is_err());
    assert_eq!(all(&mut error).await, "");
    timeout(LIMIT, client.task).await.expect("in time").expect("no panic");

    let (_, mut socket) = world.rig.web_socket(&format!("{EXEC}?output=1&command=vanish"), "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    let status = String::from_utf8(next(&mut socket).await).expect("text");
    assert!(status.contains("error reading from error stream"), "that is no success: {status}");
}

#[tokio::test]
async fn a_runtime_that_does_not_speak_spdy() {
    let switched = |rest: &str| {
        format!("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n{rest}")
    };
    let mut garbage = switched("").into_bytes();
    garbage.extend_from_slice(b"\xffnothing of the kind");
    let status = v5_status(&rig_at(&saying(garbage.leak()).await).await).await;
    assert!(status.contains("error creating streams: the connection ended"), "{status}");
    let mut oversized = switched("").into_bytes();
    oversized.extend_from_slice(&[0x80, 3, 0, 2, 0, 0xff, 0xff, 0xff]);
    let status = v5_status(&rig_at(&saying(oversized.leak()).await).await).await;
    assert!(status.contains("error creating streams: the connection ended"), "{status}");
}

#[tokio::test]
async fn clients_that_send_garbage() {
    let world = World::new().await;
    // Through the splice: the runtime ends it, and so do we.
    for garbage in
        [&b"\xffnothing of the kind"[..], &[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff], &[0x80, 2, 0, 1, 0, 0, 0, 0], &[0; 64]]
    {
        let (head, mut tcp) =
            world.rig.request(&format!("POST {EXEC}?output=1&command=sleep HTTP/1.1\r\n{UPGRADE}")).await;
        assert_eq!(head.status, 101);
        tcp.write_all(garbage).await.expect("sent");
        let mut rest = Vec::new();
        let _ = timeout(LIMIT, tcp.read_to_end(&mut rest)).await.expect("closed in time");
    }
    // Where a WebSocket ends here.
    let target = format!("{EXEC}?input=1&output=1&command=sleep");
    for message in [vec![255], vec![255, 9], vec![255, 0, 0]] {
        let (_, mut socket) = world.rig.web_socket(&target, "v5.channel.k8s.io").await;
        next(&mut socket).await;
        socket.send(Message::Binary(message.into())).await.expect("sent");
        while let Some(Ok(_)) = timeout(LIMIT, socket.next()).await.expect("closed in time") {}
    }
    for bytes in [
        &[0x82, 0xff, 0, 0, 0, 0, 0xff, 0, 0, 0, 1, 2, 3, 4][..], // a message of 4 GiB
        &[0x82, 0x01, 0],                                         // not masked
        &[0xf2, 0x80, 1, 2, 3, 4],                                // reserved bits
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut tcp = upgraded(&world.rig, &target).await;
        tcp.write_all(bytes).await.expect("sent");
        let mut rest = Vec::new();
        let _ = timeout(LIMIT, tcp.read_to_end(&mut rest)).await.expect("closed in time");
    }
    // A tunnel carries bytes, not text.
    let (_, mut socket) = world.rig.web_socket("/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
    socket.send(Message::Text("hello".into())).await.expect("sent");
    while let Some(Ok(_)) = timeout(LIMIT, socket.next()).await.expect("closed in time") {}
    nothing_is_left(&world.rig).await;
}

async fn upgraded(rig: &Rig, target: &str) -> TcpStream {
    let (head, tcp) = rig.request(&crate::web_socket_head(target, "v5.channel.k8s.io")).await;
    assert_eq!(head.status, 101);
    tcp
}

#[tokio::test]
async fn requests_that_are_no_web_sockets() {
    let world = World::new().await;
    let head = crate::web_socket_head(&format!("{EXEC}?output=1&command=cat"), "v5.channel.k8s.io");
    let without = |name: &str| head.lines().filter(|line| !line.starts_with(name)).collect::<Vec<_>>().join("\r\n");
    let (status, _) = world.rig.ask(&without("Sec-WebSocket-Key")).await;
    assert_eq!(status, 400);
    let (answer, _) = world.rig.request(&without("Sec-WebSocket-Version")).await;
    assert_eq!((answer.status, answer.header("sec-websocket-version")), (400, vec!["13"]));
    let (status, _) = world.rig.ask(&head.replacen("GET", "POST", 1)).await;
    assert_eq!(status, 405);
}
