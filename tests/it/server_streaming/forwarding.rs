//! Port-forward over every protocol.

use crate::server_streaming::fixture::{RuntimeKind, RuntimeUnderTest};
use berth_testkit::streams::{
    clients::{Spdy, next, web_socket_head},
    ports::Ports,
};

on_both_runtimes! {
    a_closed_port_does_not_end_a_port_forward
    a_tunnel_carries_spdy_in_a_web_socket
    no_request_of_thousands_is_lost
    channels_of_a_web_socket_are_those_of_its_ports
}

async fn a_closed_port_does_not_end_a_port_forward(on: RuntimeKind) {
    // AC-04b-S8
    let Some(world) = on.world().await else { return };
    let ports = Ports::open().await;
    let client = world.endpoint.spdy("/portForward/default/web", &["portforward.k8s.io"]).await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["portforward.k8s.io"]);
    ports.a_closed_one_ends_nothing(&client).await;
    ports.half_closed_ones_are_answered(&client).await;
    world.end().await;
}

/// `BERTH_FORWARDS` is the number of requests of each kind, 500 by default.
async fn no_request_of_thousands_is_lost(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let count = std::env::var("BERTH_FORWARDS").ok().and_then(|count| count.parse().ok()).unwrap_or(500);
    let ports = Ports::open().await;
    for at_a_time in [50, 200] {
        let client = world.endpoint.spdy("/portForward/default/web", &["portforward.k8s.io"]).await;
        ports.all_are_answered(&client, count, at_a_time).await;
        let (head, socket) = world.endpoint.web_socket("/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
        ports.all_are_answered(&Spdy::within(head, socket), count, at_a_time).await;
    }
    world.end().await;
}

async fn a_tunnel_carries_spdy_in_a_web_socket(on: RuntimeKind) {
    // AC-04b-S10
    let Some(world) = on.world().await else { return };
    let ports = Ports::open().await;
    let (head, socket) = world.endpoint.web_socket("/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
    let client = Spdy::within(head, socket);
    ports.a_closed_one_ends_nothing(&client).await;
    ports.half_closed_ones_are_answered(&client).await;
    let page = world.ends.metrics();
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"portforward\"} 1"), "{page}");

    let other = web_socket_head("/portForward/default/web?port=80", "SPDY/3.1+other.k8s.io");
    let (status, body) = world.endpoint.ask(&other).await;
    assert_eq!(status, 403, "the runtime's refusal is passed on: {body}");
    drop(client);
    world.end().await;
}

async fn channels_of_a_web_socket_are_those_of_its_ports(on: RuntimeKind) {
    // AC-04b-S9
    let Some(world) = on.world().await else { return };
    let closed = [Ports::open().await.closed, Ports::open().await.closed, Ports::open().await.closed];
    let [one, two, three] = closed;
    let target = format!("/portForward/default/web?port={one},{two}&port={three}");
    let (_, mut socket) = world.endpoint.web_socket(&target, "v4.channel.k8s.io").await;
    let mut greetings = Vec::new();
    while greetings.len() < 6 {
        let message = next(&mut socket).await;
        // The error of a port without a listener may arrive in between.
        greetings.extend((message.len() == 3).then_some(message));
    }
    greetings.sort_unstable();
    let expected = (0..6).map(|channel: u8| {
        let [low, high] = closed[usize::from(channel / 2)].to_le_bytes();
        vec![channel, low, high]
    });
    assert_eq!(greetings, expected.collect::<Vec<_>>());
    if let RuntimeUnderTest::Scripted { cri, .. } = &world.below {
        let call = cri.calls().into_iter().find(|call| call.op == "port_forward").expect("asked");
        assert_eq!(call.detail, format!("{closed:?}"));
    }
    world.end().await;
}
