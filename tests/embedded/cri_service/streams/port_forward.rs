//! Port-forward to a pod over every protocol.

use std::collections::BTreeMap;

use berth_server::streaming::spdy::Headers;
use futures::StreamExt;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::fixture::Fixture;
use berth_testkit::streams::{
    clients::{LIMIT, Spdy, next, send_message, up_to, web_socket_head},
    ports::Ports,
};

async fn forwards(world: &Fixture, ports: &Ports, client: &Spdy) {
    // AC-04b-S8
    let text = ports.a_closed_one_ends_nothing(client).await;
    let (sandbox, closed) = (&world.sandbox, ports.closed);
    let begins = format!(
        "error forwarding port {closed} to pod {sandbox}, uid : failed to connect to localhost:{closed} inside namespace \"{sandbox}\", IPv4: "
    );
    assert!(text.starts_with(&begins) && text.contains(" IPv6 "), "{text}");
    ports.half_closed_ones_are_answered(client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_are_forwarded_over_every_protocol() {
    let Some(world) = Fixture::asleep("ports_are_forwarded_over_every_protocol").await else { return };
    let ports = Ports::open().await;
    let client = world.endpoint.spdy(&world.forward(&[]).await, &["portforward.k8s.io"]).await;
    forwards(&world, &ports, &client).await;
    let open = ports.line;
    let taken = client.pair(open, "taken").await;
    let again = client.connection.open(Headers::of(&[
        ("port", &open.to_string()),
        ("streamType", "data"),
        ("requestID", "taken"),
    ]));
    let mut again = again.await.expect("open");
    assert!(timeout(LIMIT, again.accepted()).await.expect("in time").is_err());
    let (_data, mut error) = taken;
    up_to(&mut error, "data stream already assigned").await;

    // AC-04b-S10
    let (head, socket) = world.endpoint.web_socket(&world.forward(&[]).await, "SPDY/3.1+portforward.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
    forwards(&world, &ports, &Spdy::within(head, socket)).await;

    // AC-04b-S9, small: a pair of channels for each port.
    let (line, closed) = (ports.line, ports.closed);
    let (_, mut socket) = world.endpoint.web_socket(&world.forward(&[line, closed]).await, "v4.channel.k8s.io").await;
    let [low, high] = line.to_le_bytes();
    for channel in 0..4 {
        let greeting = next(&mut socket).await;
        assert_eq!((greeting[0], greeting.len()), (channel, 3));
        assert!(channel > 1 || greeting[1..] == [low, high]);
    }
    send_message(&mut socket, b"\0ping\n").await;
    let mut received = BTreeMap::<u8, Vec<u8>>::new();
    while let Some(Ok(message)) = timeout(LIMIT, socket.next()).await.expect("in time") {
        if let Message::Binary(bytes) = message {
            received.entry(bytes[0]).or_default().extend_from_slice(&bytes[1..]);
        }
    }
    assert_eq!(received.keys().copied().collect::<Vec<_>>(), [0, 3], "it ends once all ports have");
    assert_eq!(received[&0], b"pong\n");
    assert!(received[&3].starts_with(format!("error forwarding port {closed} to pod ").as_bytes()));
    let (head, _) = world.endpoint.request(&web_socket_head(&world.forward(&[]).await, "v4.channel.k8s.io")).await;
    assert_eq!(head.status, 400, "ports are needed where no connection names its own");
    world.end().await;
}
