//! Clients attached to a running container; any of them may stop reading.

use berth_proto::cri;
use berth_server::streaming::spdy::{Headers, frames::Encoder};
use bytes::{Bytes, BytesMut};
use tokio::{io::AsyncWriteExt, time::timeout};

use super::fixture::{ALL, Fixture, READS, SUCCESS, TERMINAL};
use berth_testkit::{
    embedded::in_process::container,
    streams::clients::{LIMIT, all, channels, next, send_message, spdy_head, up_to},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_clients_attach_and_none_holds_up_the_container() {
    let config = cri::ContainerConfig {
        stdin: true,
        stdin_once: true,
        ..container("c", "while read line; do echo \"got $line\"; echo \"err $line\" >&2; done; echo bye; exit 5")
    };
    let Some(world) = Fixture::with("several_clients_attach_and_none_holds_up_the_container", config).await else {
        return;
    };
    let spdy = world.endpoint.spdy(&world.attach(ALL).await, &["v4.channel.k8s.io"]).await;
    let mut streams = spdy.command(&["error", "stdin", "stdout", "stderr"]).await;
    let (_, mut socket) = world.endpoint.web_socket(&world.attach(READS).await, "v4.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    // This client is attached only now: a WebSocket upgrade is answered before the attach.
    let (_, mut writes) = world.endpoint.web_socket(&world.attach(ALL).await, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut writes).await, [1]);
    send_message(&mut writes, b"\0one\n").await;
    assert_eq!(up_to(streams.get_mut("stdout").expect("open"), "got one\n").await, "got one\n");
    assert_eq!(up_to(streams.get_mut("stderr").expect("open"), "err one\n").await, "err one\n");
    streams["stdin"].write(Bytes::from("two\n")).await.expect("sent");
    up_to(streams.get_mut("stdout").expect("open"), "got two\n").await;
    // The first end of input closes the container's stdin.
    streams.get_mut("stdin").expect("open").finish().await.expect("sent");
    assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "bye\n");
    assert_eq!(all(streams.get_mut("error").expect("open")).await, SUCCESS, "its end is no failure of attaching");
    let [stdout, stderr, status] = channels(&mut socket).await;
    assert!(stdout.ends_with("got two\nbye\n") && stderr.is_empty(), "{stdout:?} {stderr:?}");
    assert_eq!(status, SUCCESS);
    let [_, stderr, status] = channels(&mut writes).await;
    assert_eq!((stderr.as_str(), status.as_str()), ("err one\nerr two\n", r#"{"metadata":{},"status":"Success"}"#));
    assert_eq!(world.daemon.exited(&world.container).await.exit_code, 5);
    let request = cri::AttachRequest { container_id: world.container.clone(), stdout: true, ..Default::default() };
    let refused = world.daemon.calls.rpc.clone().attach(request).await.expect_err("it has ended");
    assert_eq!(
        (refused.code(), refused.message()),
        (tonic::Code::FailedPrecondition, "container is in CONTAINER_EXITED state")
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_ends_its_input_leaves_and_the_container_goes_on() {
    // As in containerd: `echo x | crictl attach -i` returns, and so do detach keys at a terminal.
    for (tty, stdin_once) in [(false, false), (true, false), (true, true)] {
        let script = "while read line; do echo \"got $line\"; done; echo closed; sleep 1000";
        let config = cri::ContainerConfig { stdin: true, stdin_once, tty, ..container("c", script) };
        let Some(world) = Fixture::with("who_ends_its_input_leaves_and_the_container_goes_on", config).await else {
            return;
        };
        for line in ["one", "two"] {
            let flags = if tty { TERMINAL } else { ALL };
            let client = world.endpoint.spdy(&world.attach(flags).await, &["v4.channel.k8s.io"]).await;
            let kinds =
                if tty { &["error", "stdin", "stdout", "resize"][..] } else { &["error", "stdin", "stdout", "stderr"] };
            let mut streams = client.command(kinds).await;
            streams["stdin"].write(Bytes::from(format!("{line}\n"))).await.expect("sent");
            let end = if tty { format!("got {line}\r\n") } else { format!("got {line}\n") };
            up_to(streams.get_mut("stdout").expect("open"), &end).await;
            streams.get_mut("stdin").expect("open").finish().await.expect("sent");
            assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "", "{tty} {stdin_once}");
            assert_eq!(all(streams.get_mut("error").expect("open")).await, SUCCESS);
        }
        let (output, code) = world.daemon.exec(&world.container, "echo here").await;
        assert_eq!((output.as_str(), code), ("here\n", 0), "it still runs");
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_reading_blocks_no_other_client() {
    // The container prints more than all buffers can store, and writes a file once it is through.
    let script = "while [ ! -e /tmp/go ]; do sleep 0.05; done; head -c 20000000 /dev/zero; echo through > /tmp/through; \
                  trap 'exit 0' TERM; while :; do sleep 0.1; done";
    let Some(world) = Fixture::with("a_client_that_stops_reading_blocks_no_other_client", container("c", script)).await
    else {
        return;
    };
    let url = world.attach(READS).await;
    // This client opens its streams, and then does not read from its connection.
    let (head, mut silent) = world.endpoint.request(&spdy_head(&url, &["v4.channel.k8s.io"])).await;
    assert_eq!(head.status, 101);
    let mut frames = BytesMut::new();
    let mut encoder = Encoder::default();
    for (id, kind) in [(1, "error"), (3, "stdout")] {
        encoder.syn_stream(id, &Headers::of(&[("streamType", kind)]), &mut frames).expect("packed");
    }
    silent.write_all(&frames).await.expect("sent");
    let (_, mut socket) = world.endpoint.web_socket(&world.attach(READS).await, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    world.daemon.exec(&world.container, "touch /tmp/go").await;
    let (output, _) =
        world.daemon.exec(&world.container, "while ! cat /tmp/through 2>/dev/null; do sleep 0.05; done").await;
    assert_eq!(output, "through\n", "clients that do not read are no reason to wait");

    // AC-04b-S13: stdout flows while stderr is unread.
    const LOTS: usize = 100_000_000;
    let url = world.exec(&format!("head -c 100000 /dev/zero >&2; head -c {LOTS} /dev/zero"), ALL).await;
    let client = world.endpoint.spdy(&url, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdin", "stdout", "stderr"]).await;
    let mut got = 0;
    while let Some(bytes) =
        timeout(LIMIT, streams.get_mut("stdout").expect("open").read()).await.expect("in time").expect("whole")
    {
        got += bytes.len();
    }
    assert_eq!(got, LOTS);
    assert_eq!(all(streams.get_mut("error").expect("open")).await, SUCCESS);
    assert_eq!(all(streams.get_mut("stderr").expect("open")).await.len(), 100_000);
    drop((silent, socket));
    world.end().await;
}
