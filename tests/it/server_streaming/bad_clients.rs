//! Misbehaving streaming clients: unread output, lost connections, silence, and garbage.

use std::time::Duration;

use berth_server::streaming::StreamingConfig;
use futures::SinkExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};
use tokio_tungstenite::tungstenite::Message;

use crate::server_streaming::fixture::{EXEC, RuntimeKind, Terminal, command};
use berth_testkit::streams::clients::{LIMIT, ended, next, send_message, spdy_head, web_socket_head, words};

on_both_runtimes! {
    a_client_that_stops_reading_or_just_goes
    silence_ends_a_web_socket_after_the_idle_timeout
    clients_that_send_garbage
}

/// A command that only sleeps.
fn sleeps() -> String {
    words(&["sleep", "1000"])
}

async fn a_client_that_stops_reading_or_just_goes(on: RuntimeKind) {
    let config = StreamingConfig { heartbeat: Duration::from_millis(20), ..StreamingConfig::default() };
    let Some(world) = on.with(config, Terminal::None).await else { return };
    // A client that reads nothing stops its own command only; when it disconnects, everything of it ends.
    let flood = format!("{EXEC}?output=1{}", words(&["head", "-c", "1000000000", "/dev/zero"]));
    let client = world.endpoint.spdy(&flood, &["v4.channel.k8s.io"]).await;
    let _streams = (client.stream("error").await, client.stream("stdout").await);
    assert_eq!(command(&world.endpoint, &["head", "-c", "10", "/dev/zero"]).await.0.len(), 10);
    world.ends.until_open(1).await;
    client.task.abort();
    world.ends.no_stream_is_left().await;
    // Unread input does not hide that the client has disconnected.
    let target = format!("{EXEC}?input=1&output=1{}", sleeps());
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    let lots = Message::Binary(vec![0; 1 << 20].into());
    let filling = async { while socket.send(lots.clone()).await.is_ok() {} };
    assert!(timeout(Duration::from_millis(300), filling).await.is_err(), "it is full now");
    assert_eq!(world.ends.streaming.open(), 1);
    drop(socket);
    world.ends.no_stream_is_left().await;
    world.end().await;
}

async fn silence_ends_a_web_socket_after_the_idle_timeout(on: RuntimeKind) {
    let config = StreamingConfig { idle: Some(Duration::from_millis(50)), ..StreamingConfig::default() };
    let Some(world) = on.with(config, Terminal::None).await else { return };
    let target = format!("{EXEC}?output=1{}", sleeps());
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    ended(&mut socket).await;
    world.ends.no_stream_is_left().await;
    world.end().await;
}

async fn clients_that_send_garbage(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let target = format!("{EXEC}?input=1&output=1{}", sleeps());
    let upgrades = [spdy_head(&target, &["v4.channel.k8s.io"]), web_socket_head(&target, "v5.channel.k8s.io")];
    // Either side may close; the connection must end.
    let send = async |head: &str, garbage: &[u8]| {
        let (answer, mut tcp) = world.endpoint.request(head).await;
        assert_eq!(answer.status, 101);
        tcp.write_all(garbage).await.expect("sent");
        let mut rest = Vec::new();
        let _ = timeout(LIMIT, tcp.read_to_end(&mut rest)).await.expect("closed in time");
    };
    for garbage in
        [&b"\xffnothing of the kind"[..], &[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff], &[0x80, 2, 0, 1, 0, 0, 0, 0], &[0; 64]]
    {
        send(&upgrades[0], garbage).await;
    }
    for garbage in [
        &[0x82, 0xff, 0, 0, 0, 0, 0xff, 0, 0, 0, 1, 2, 3, 4][..], // a message of 4 GiB
        &[0x82, 0x01, 0],                                         // not masked
        &[0xf2, 0x80, 1, 2, 3, 4],                                // reserved bits
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        send(&upgrades[1], garbage).await;
    }
    for message in [&[255][..], &[255, 9], &[255, 0, 0]] {
        let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
        next(&mut socket).await;
        send_message(&mut socket, message).await;
        ended(&mut socket).await;
    }
    // A tunnel carries binary messages, not text.
    let (_, mut socket) = world.endpoint.web_socket("/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
    socket.send(Message::Text("hello".into())).await.expect("sent");
    ended(&mut socket).await;
    world.ends.no_stream_is_left().await;
    world.end().await;
}
