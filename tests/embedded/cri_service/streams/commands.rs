//! Exec over every version of SPDY and WebSocket subprotocols.

use berth_proto::cri;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::fixture::{ALL, Fixture, READS, SUCCESS, TERMINAL, exit_status};
use berth_testkit::{
    embedded::in_process::container,
    streams::clients::{LIMIT, all, channels, next, send_message, spdy_head, up_to, web_socket_head},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_over_spdy() {
    let Some(world) = Fixture::asleep("commands_over_spdy").await else { return };
    // AC-04b-S3, S5: stdout and stderr arrive completely before the status.
    let url = world.exec("cat; echo oops >&2; exit 7", ALL).await;
    let client = world.endpoint.spdy(&url, &["v5.channel.k8s.io", "v4.channel.k8s.io"]).await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["v4.channel.k8s.io"]);
    let mut streams = client.command(&["error", "stdin", "stdout", "stderr"]).await;
    let stdin = streams.get_mut("stdin").expect("open");
    stdin.write(Bytes::from("hello\n")).await.expect("sent");
    stdin.finish().await.expect("sent");
    assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "hello\n");
    assert_eq!(all(streams.get_mut("stderr").expect("open")).await, "oops\n");
    assert_eq!(all(streams.get_mut("error").expect("open")).await, exit_status(7));
    timeout(LIMIT, client.task).await.expect("the server closes").expect("no panic");

    // Exits by signal, and programs that cannot be executed.
    let run = async |script: &str, protocol: &str| {
        let url = world.exec(script, READS).await;
        let client = world.endpoint.spdy(&url, &[protocol]).await;
        let mut streams = client.command(&["error", "stdout"]).await;
        let printed = all(streams.get_mut("stdout").expect("open")).await;
        (printed, all(streams.get_mut("error").expect("open")).await)
    };
    assert_eq!(run("kill -9 $$", "v4.channel.k8s.io").await, (String::new(), exit_status(137)));
    assert_eq!(run("echo hi", "v4.channel.k8s.io").await, ("hi\n".to_owned(), SUCCESS.to_owned()));
    assert_eq!(run("echo hi", "v3.channel.k8s.io").await, ("hi\n".to_owned(), String::new()));
    let text = "command terminated with non-zero exit code: exit status 3";
    assert_eq!(run("exit 3", "v2.channel.k8s.io").await, (String::new(), text.to_owned()));
    assert_eq!(run("echo hi; exit 3", "channel.k8s.io").await, ("hi\n".to_owned(), String::new()));

    // AC-09a-X7, streamed: a process that inherited the pipe does not delay the status, and gets no write error.
    let heir = "(until cat /tmp/go; do sleep 0.1; done 2>/dev/null; echo late; echo $? > /tmp/late) & echo hi";
    let (printed, status) = run(heir, "v4.channel.k8s.io").await;
    assert_eq!((printed.as_str(), status.as_str()), ("hi\n", SUCCESS));
    let late = "echo > /tmp/go; until cat /tmp/late 2>/dev/null; do sleep 0.1; done";
    assert_eq!(world.daemon.exec(&world.container, late).await.0, "0\n");

    let request = cri::ExecRequest {
        container_id: world.container.clone(),
        cmd: vec!["/nowhere".to_owned()],
        stdout: true,
        ..Default::default()
    };
    let url = world.run(request).await;
    let client = world.endpoint.spdy(&url, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdout"]).await;
    let status = all(streams.get_mut("error").expect("open")).await;
    assert!(
        status.contains("Internal error occurred: error executing command in container: failed to exec in container")
            && status.contains("/nowhere"),
        "{status}"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminals_have_their_size_from_the_start_and_hang_up() {
    let Some(world) = Fixture::asleep("terminals_have_their_size_from_the_start_and_hang_up").await else { return };
    let script = "stty size; trap 'stty size' WINCH; echo ready; read line; echo got $line; \
                  trap 'echo hung > /tmp/hung; exit' HUP; while :; do sleep 0.1; done";
    let url = world.exec(script, TERMINAL).await;
    let client = world.endpoint.spdy(&url, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdin", "stdout", "resize"]).await;
    let sized = |columns: u16, rows: u16| Bytes::from(format!("{{\"Width\":{columns},\"Height\":{rows}}}"));
    streams["resize"].write(sized(101, 33)).await.expect("sent");
    let stdout = streams.get_mut("stdout").expect("open");
    let printed = up_to(stdout, "ready\r\n").await;
    assert!(printed.starts_with("33 101\r\n"), "{printed:?}");
    streams["stdin"].write(Bytes::from("x\n")).await.expect("sent");
    up_to(streams.get_mut("stdout").expect("open"), "got x\r\n").await;
    streams["resize"].write(sized(77, 22)).await.expect("sent");
    up_to(streams.get_mut("stdout").expect("open"), "22 77\r\n").await;
    client.connection.close();
    drop(streams);
    let (output, _) =
        world.daemon.exec(&world.container, "while ! cat /tmp/hung 2>/dev/null; do sleep 0.1; done").await;
    assert_eq!(output, "hung\n", "who leaves a terminal hangs up");

    // The same over a WebSocket, and without any size.
    let (_, mut socket) =
        world.endpoint.web_socket(&world.exec("stty size", TERMINAL).await, "v5.channel.k8s.io").await;
    send_message(&mut socket, b"\x04{\"Width\":90,\"Height\":30}").await;
    let [stdout, _, status] = channels(&mut socket).await;
    assert_eq!((stdout.as_str(), status.as_str()), ("30 90\r\n", r#"{"metadata":{},"status":"Success"}"#));
    let (_, mut socket) =
        world.endpoint.web_socket(&world.exec("stty size", TERMINAL).await, "v4.channel.k8s.io").await;
    assert_eq!(channels(&mut socket).await, ["24 80\r\n".to_owned(), String::new(), SUCCESS.to_owned()]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_over_web_sockets() {
    let Some(world) = Fixture::asleep("commands_over_web_sockets").await else { return };
    // AC-04b-S6
    let (head, mut socket) = world.endpoint.web_socket(&world.exec("cat", ALL).await, "v5.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    send_message(&mut socket, b"\0foo").await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    send_message(&mut socket, &[255, 0]).await;
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    let last = timeout(LIMIT, socket.next()).await.expect("in time");
    let Some(Ok(Message::Close(Some(close)))) = last else { panic!("{last:?}") };
    assert_eq!(u16::from(close.code), 1000, "kubectl takes any other end for a failure");

    let script = "head -c 3; echo; echo oops >&2; exit 9";
    for (protocol, status) in [
        ("v4.channel.k8s.io", exit_status(9)),
        ("channel.k8s.io", "command terminated with non-zero exit code: exit status 9".to_owned()),
        ("", "command terminated with non-zero exit code: exit status 9".to_owned()),
    ] {
        let (head, mut socket) = world.endpoint.web_socket(&world.exec(script, ALL).await, protocol).await;
        assert_eq!(head.header("sec-websocket-protocol").concat(), protocol);
        send_message(&mut socket, b"\0foo").await;
        assert_eq!(channels(&mut socket).await, ["foo\n".to_owned(), "oops\n".to_owned(), status], "{protocol}");
    }
    let (_, mut socket) = world.endpoint.web_socket(&world.exec("head -c 3", ALL).await, "base64.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, b"1");
    socket.send(Message::Text("0Zm9v".into())).await.expect("sent");
    assert_eq!(next(&mut socket).await, b"1Zm9v");

    // A client without a supported subprotocol gets an error.
    let url = world.exec("true", ALL).await;
    let (head, _) = world.endpoint.request(&web_socket_head(&url, "v9.channel.k8s.io")).await;
    assert_eq!(head.status, 403);
    // AC-04b-S4
    let url = world.exec("true", ALL).await;
    let (head, _) = world.endpoint.request(&spdy_head(&url, &["v9"])).await;
    assert_eq!((head.status, head.header("x-accepted-stream-protocol-versions").len()), (403, 4));
    let (head, _) = world.endpoint.request(&spdy_head(&url, &["v4.channel.k8s.io"])).await;
    assert_eq!(head.status, 404, "a URL is met once");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_whose_client_has_gone_goes_on() {
    let security = cri::LinuxContainerSecurityContext {
        run_as_user: Some(cri::Int64Value { value: 1000 }),
        namespace_options: Some(cri::NamespaceOption {
            pid: cri::NamespaceMode::Container.into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut config = container("c", "trap 'exit 0' TERM; while :; do sleep 0.1; done");
    config.linux.as_mut().expect("given").security_context = Some(security);
    let Some(world) = Fixture::with("a_command_whose_client_has_gone_goes_on", config).await else { return };
    let url = world
        .exec(
            "echo began; while read line; do :; done; echo late && echo late >&2 && echo well > /tmp/end; sleep 1",
            ALL,
        )
        .await;
    let client = world.endpoint.spdy(&url, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdin", "stdout", "stderr"]).await;
    up_to(streams.get_mut("stdout").expect("open"), "began\n").await;
    drop(streams);
    client.connection.close();
    drop(client);
    let (output, _) =
        world.daemon.exec(&world.container, "while ! cat /tmp/end 2>/dev/null; do sleep 0.05; done").await;
    assert_eq!(output, "well\n", "what it prints is read and dropped");

    // Not root: its streams belong to it all the same.
    let url = world.exec("id -u; echo again > /dev/stdout; echo oops > /dev/stderr", ALL).await;
    let (_, mut socket) = world.endpoint.web_socket(&url, "v4.channel.k8s.io").await;
    assert_eq!(channels(&mut socket).await, ["1000\nagain\n".to_owned(), "oops\n".to_owned(), SUCCESS.to_owned()]);
    world.end().await;
}
