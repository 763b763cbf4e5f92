//! End of streams: agent shutdown, runtime death, client disconnect, and resource leaks.

use std::time::Duration;

use berth_server::streaming::StreamingConfig;
use tokio::time::timeout;

use crate::server_streaming::fixture::{EXEC, Fixture, RuntimeKind, RuntimeUnderTest, Terminal, command, is_success};
use berth_testkit::{
    leak_test::{ResourceCounts, run_alone},
    streams::clients::{LIMIT, all, next, send_message, spdy_head, words},
};

on_both_runtimes! {
    streams_finish_while_the_agent_ends
    streams_end_with_the_agent
    a_container_that_dies_with_its_runtime
}

async fn streams_finish_while_the_agent_ends(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1], "it is connected");
    world.ends.stop.cancel();
    send_message(&mut socket, b"\0foo").await;
    send_message(&mut socket, &[255, 0]).await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    drop(socket);
    timeout(LIMIT, world.ends.streaming.closed()).await.expect("in time");
    world.end().await;
}

async fn streams_end_with_the_agent(on: RuntimeKind) {
    let config = StreamingConfig { grace: Duration::from_millis(50), ..StreamingConfig::default() };
    let Some(world) = on.with(config, Terminal::None).await else { return };
    let target = format!("{EXEC}?output=1{}", words(&["sleep", "1000"]));
    let client = world.endpoint.spdy(&target, &["v4.channel.k8s.io"]).await;
    let mut error = client.stream("error").await;
    assert_eq!(world.ends.streaming.open(), 1);
    world.ends.stop.cancel();
    timeout(LIMIT, world.ends.streaming.closed()).await.expect("in time");
    assert!(timeout(LIMIT, error.read()).await.expect("in time").is_err());
    world.end().await;
}

async fn a_container_that_dies_with_its_runtime(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let target = format!("{EXEC}?output=1{}", world.last_words());
    let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    let client = world.endpoint.spdy(&target, &["v4.channel.k8s.io"]).await;
    let (mut error, mut stdout) = (client.stream("error").await, client.stream("stdout").await);
    world.runtime_dies();
    assert_eq!(all(&mut stdout).await, "");
    let status = all(&mut error).await;
    assert!(!is_success(&status), "{status}");
    timeout(LIMIT, client.task).await.expect("in time").expect("no panic");
    let status = String::from_utf8(next(&mut socket).await).expect("text");
    assert!(status.contains("\"status\":\"Failure\""), "that is no success: {status}");
    if matches!(world.below, RuntimeUnderTest::Scripted { .. }) {
        assert!(status.contains("error reading from error stream"), "{status}");
    }
    world.end().await;
}

#[test]
fn a_thousand_commands_leave_nothing_behind() {
    run_alone("server_streaming::stream_end::a_thousand_commands_leave_nothing_behind", async || {
        commands(RuntimeKind::Scripted, 1000).await
    });
}

#[test]
fn hundreds_of_commands_leave_nothing_behind_in_our_own_runtime() {
    let test = "hundreds_of_commands_leave_nothing_behind_in_our_own_runtime";
    run_alone(&format!("server_streaming::stream_end::{test}"), async || {
        commands(RuntimeKind::Embedded(test), 300).await
    });
}

async fn commands(on: RuntimeKind, count: usize) {
    // AC-04b-S11
    let Some(world) = on.world().await else { return };
    for number in 0..5 {
        one_of_them(&world, number).await;
    }
    world.ends.no_stream_is_left().await;
    let before = ResourceCounts::now();
    for number in 0..count {
        one_of_them(&world, number).await;
    }
    before.until_settled(4, || world.ends.streaming.open() == 0).await;
    world.end().await;
}

async fn one_of_them(world: &Fixture, number: usize) {
    // It ends with its input: a command that does not would outlive its client.
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    match number % 10 {
        // Clients that disconnect: after their streams are open, and before.
        0 => {
            let (_, mut socket) = world.endpoint.web_socket(&target, "v5.channel.k8s.io").await;
            next(&mut socket).await;
        }
        3 => drop(world.endpoint.spdy(&target, &["v4.channel.k8s.io"]).await),
        // An upgrade that fails.
        1 => assert_eq!(world.endpoint.request(&spdy_head(&target, &["v9"])).await.0.status, 403),
        // A runtime that is down.
        2 => {
            let RuntimeUnderTest::Scripted { cri, server } = &world.below else { return };
            cri.stream_at("http://127.0.0.1:1");
            assert_eq!(world.endpoint.request(&spdy_head(&target, &[])).await.0.status, 500);
            cri.stream_at(&server.url);
        }
        _ => {
            let (printed, status) = command(&world.endpoint, &["head", "-c", "10", "/dev/zero"]).await;
            assert_eq!((printed.len(), is_success(&status)), (10, true), "{status}");
        }
    }
}
