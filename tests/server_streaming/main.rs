//! `/exec`, `/attach`, `/portForward` and `/run` against the streaming server of the scripted
//! runtime, against runtimes that behave badly, and against a real containerd.

#[path = "../kit/mod.rs"]
mod kit;

mod adversity;
mod real;
mod rig;

use std::{sync::Arc, time::Duration};

use berth::{cri::RuntimeService, proto::cri, server::streaming::StreamingConfig};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use kit::{
    pods,
    scripted::{Fault, ScriptedCri, streaming::StreamServer},
};
use rig::{LIMIT, Rig, Spdy, all, start, web_socket_head};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    time::timeout,
};
use tokio_tungstenite::tungstenite::Message;

const EXEC: &str = "/exec/default/web/c";

/// A scripted runtime with its streaming server, and the endpoints before it.
pub struct World {
    cri: Arc<ScriptedCri>,
    server: StreamServer,
    rig: Rig,
}

impl World {
    async fn new() -> Self {
        Self::with(StreamingConfig::default(), false).await
    }

    async fn with(config: StreamingConfig, tty: bool) -> Self {
        let cri = ScriptedCri::new(Arc::new(berth::engine::ports::SystemClock));
        let server = StreamServer::start(&cri).await;
        let rig = serve(&cri, config, tty).await;
        Self { cri, server, rig }
    }
}

/// The endpoints before a runtime that runs one pod, `web`.
pub async fn serve(cri: &Arc<ScriptedCri>, config: StreamingConfig, tty: bool) -> Rig {
    let pod = pods::pod("web", json!({"containers": [{"name": "c", "tty": tty}]}));
    let meta =
        cri::PodSandboxMetadata { name: "web".into(), uid: "uid-web".into(), namespace: "default".into(), attempt: 0 };
    let sandbox = cri::PodSandboxConfig { metadata: Some(meta), ..Default::default() };
    let container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "docker.io/library/busybox:1".into(), ..Default::default() }),
        ..Default::default()
    };
    let seen = start(&**cri, &pod, sandbox, container).await;
    Rig::serve(cri.clone() as Arc<dyn RuntimeService>, pod, seen, config).await
}

/// Runs a command with v4, without input; what it printed, and its status.
async fn command(rig: &Rig, words: &[&str]) -> (Bytes, String) {
    let words: String = words.iter().map(|word| format!("&command={}", word.replace(' ', "+"))).collect();
    let client = rig.spdy(&format!("{EXEC}?output=1{words}"), &["v4.channel.k8s.io"]).await;
    let mut error = client.stream("error").await;
    let mut stdout = client.stream("stdout").await;
    let printed = all(&mut stdout).await;
    let status = all(&mut error).await;
    client.connection.close();
    timeout(LIMIT, client.task).await.expect("in time").expect("no panic");
    (printed, String::from_utf8(status.to_vec()).expect("text"))
}

#[tokio::test]
async fn what_is_refused_and_how() {
    let world = World::new().await;
    let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0";
    let rows = [
        // AC-04b-S1
        (format!("GET {EXEC}?command=sh HTTP/1.1"), 400, "you must specify at least 1 of stdin, stdout, stderr"),
        ("GET /exec/default/nope/c?output=1 HTTP/1.1".to_owned(), 404, "pod does not exist"),
        ("GET /exec/default/web/uid-other/c?output=1 HTTP/1.1".to_owned(), 404, "pod not found"),
        ("GET /attach/default/web/uid-other/c?output=1 HTTP/1.1".to_owned(), 404, "pod not found"),
        ("GET /exec/default/web/nope?output=1 HTTP/1.1".to_owned(), 500, "container not found (\"nope\")"),
        (
            "GET /attach/default/web/nope?output=1 HTTP/1.1".to_owned(),
            500,
            "container nope not found in pod web_default",
        ),
        // AC-04b-S2
        (format!("GET {EXEC}?output=1 HTTP/1.1"), 500, "Upgrade request required\n"),
        ("GET /attach/default/web/c?output=1 HTTP/1.1".to_owned(), 500, "Upgrade request required\n"),
        ("POST /portForward/default/web HTTP/1.1".to_owned(), 500, "Upgrade request required\n"),
        ("GET /portForward/default/nope HTTP/1.1".to_owned(), 404, "pod does not exist"),
        ("GET /portForward/default/web/uid-other HTTP/1.1".to_owned(), 404, "pod not found"),
        (web_socket_head("/portForward/default/web", "v4.channel.k8s.io"), 400, "query parameter \"port\" is required"),
        ("POST /run/default/nope/c?cmd=ls HTTP/1.1".to_owned(), 404, "pod does not exist"),
        ("POST /run/default/web/nope?cmd=ls HTTP/1.1".to_owned(), 500, "container not found (\"nope\")"),
    ];
    for (head, status, body) in rows {
        assert_eq!(world.rig.ask(&head).await, (status, body.to_owned()), "{head}");
    }
    let calls = world.cri.calls();
    let prepared = calls.iter().filter(|call| ["exec", "attach", "port_forward"].contains(&call.op));
    assert_eq!(prepared.count(), 0, "no one-time URL was wasted");

    for (code, status) in
        [(tonic::Code::NotFound, 404), (tonic::Code::ResourceExhausted, 429), (tonic::Code::Internal, 500)]
    {
        world.cri.fault("exec", "", Fault::Error(code, "m".to_owned()), Some(1));
        let (head, _) = world.rig.request(&format!("POST {EXEC}?output=1 HTTP/1.1\r\n{upgrade}")).await;
        assert_eq!(head.status, status);
        assert_eq!(head.header("retry-after"), if status == 429 { vec!["60"] } else { vec![] });
    }
}

#[tokio::test]
async fn flags_come_from_a_form_too() {
    let world = World::new().await;
    let form = "input=1&output=1";
    let head = format!(
        "POST {EXEC}?command=cat HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Type: application/x-www-form-urlencoded\r\n\
         Content-Length: {}\r\nHost: node\r\n\r\n{form}",
        form.len()
    );
    let mut tcp = tokio::net::TcpStream::connect(world.rig.address).await.expect("it listens");
    tcp.write_all(head.as_bytes()).await.expect("sent");
    let mut answer = [0; 12];
    timeout(LIMIT, tcp.read_exact(&mut answer)).await.expect("in time").expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 101");
}

#[tokio::test]
async fn spdy_goes_through_untouched() {
    let world = World::new().await;
    // AC-04b-S3
    let client = world
        .rig
        .spdy(&format!("{EXEC}?input=1&output=1&command=cat"), &["v5.channel.k8s.io", "v4.channel.k8s.io"])
        .await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["v4.channel.k8s.io"]);
    let mut error = client.stream("error").await;
    let mut stdin = client.stream("stdin").await;
    let mut stdout = client.stream("stdout").await;
    stdin.write(Bytes::from_static(b"foo")).await.expect("sent");
    stdin.finish().await.expect("sent");
    assert_eq!(all(&mut stdout).await, "foo");
    assert_eq!(all(&mut error).await, r#"{"metadata":{},"status":"Success"}"#);
    timeout(LIMIT, client.task).await.expect("the runtime closes, and so do we").expect("no panic");

    // AC-04b-S4
    let head = format!(
        "POST {EXEC}?output=1&command=cat HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: v9\r\nAuthorization: Bearer secret"
    );
    let (head, mut tcp) = world.rig.request(&head).await;
    assert_eq!((head.status, head.header("x-accepted-stream-protocol-versions").len()), (403, 4));
    let mut rest = Vec::new();
    timeout(LIMIT, tcp.read_to_end(&mut rest)).await.expect("both sides are closed").expect("in order");
    assert!(rest.starts_with(b"unable to upgrade: unable to negotiate protocol: client supports [v9]"));

    // AC-04b-S5
    let (_, status) = command(&world.rig, &["sh", "-c", "exit 7"]).await;
    assert!(
        status.contains(r#""reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}"#)
    );
}

#[tokio::test]
async fn version_5_is_translated() {
    let world = World::new().await;
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    // AC-04b-S6
    let (head, mut socket) = world.rig.web_socket(&target, "v4.channel.k8s.io, v5.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    assert_eq!(head.header("sec-websocket-accept"), ["s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]);
    assert_eq!(next(&mut socket).await, [1], "it is connected");
    for message in [&b"\0foo"[..], &[255, 0]] {
        socket.send(Message::Binary(Bytes::copy_from_slice(message))).await.expect("sent");
    }
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    let last = timeout(LIMIT, socket.next()).await.expect("in time");
    let Some(Ok(Message::Close(Some(close)))) = last else { panic!("{last:?}") };
    assert_eq!(u16::from(close.code), 1000, "kubectl takes any other end for a failure");

    let (_, mut socket) = world
        .rig
        .web_socket(&format!("{EXEC}?error=1&command=sh&command=-c&command=exit+7"), "v5.channel.k8s.io")
        .await;
    assert_eq!(next(&mut socket).await, [2]);
    let status = String::from_utf8(next(&mut socket).await).expect("text");
    assert!(
        status.contains("command terminated with non-zero exit code: command terminated with exit code 7"),
        "{status}"
    );

    let page = berth_metrics(&world.rig);
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"exec\"} 2"), "{page}");
}

/// The exposition of a rig's metrics.
fn berth_metrics(rig: &Rig) -> String {
    let mut page = Vec::new();
    berth::metrics::exposition::Format::negotiate(None).encode(rig.registry.gather(), &mut page);
    String::from_utf8(page).expect("text")
}

/// The next binary message.
async fn next<T>(socket: &mut tokio_tungstenite::WebSocketStream<T>) -> Vec<u8>
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    match timeout(LIMIT, socket.next()).await.expect("in time") {
        Some(Ok(Message::Binary(bytes))) => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn terminals_are_what_the_container_says() {
    let world = World::with(StreamingConfig::default(), true).await;
    let (_, mut socket) = world.rig.web_socket("/attach/default/web/c?output=1&input=1", "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    socket.send(Message::Binary(Bytes::from_static(b"\0x"))).await.expect("sent");
    assert_eq!(next(&mut socket).await, b"\x01x");
    let page = berth_metrics(&world.rig);
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"attach\"} 1"), "{page}");

    let (_, mut socket) =
        world.rig.web_socket(&format!("{EXEC}?output=1&tty=1&error=1&command=size"), "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    socket.send(Message::Binary(Bytes::from_static(b"\x04{\"Width\":80,\"Height\":24}"))).await.expect("sent");
    assert_eq!(next(&mut socket).await, b"\x01{\"Width\":80,\"Height\":24}");
}

#[tokio::test]
async fn older_web_sockets_are_the_runtimes_business() {
    let world = World::new().await;
    // AC-04b-S7
    let (head, mut socket) =
        world.rig.web_socket(&format!("{EXEC}?input=1&output=1&command=cat"), "v4.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    socket.send(Message::Binary(Bytes::from_static(b"\0foo"))).await.expect("sent");
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert!(!berth_metrics(&world.rig).contains("websocket_streaming"), "nothing ended here");

    // AC-04b-S9
    let (_, mut socket) =
        world.rig.web_socket("/portForward/default/web?port=7000,8000&port=9000", "v4.channel.k8s.io").await;
    let mut greetings = Vec::new();
    for _ in 0..6 {
        greetings.push(next(&mut socket).await);
    }
    assert_eq!(greetings[0], [0, 0x58, 0x1b]);
    assert_eq!(greetings[5], [5, 0x28, 0x23]);
    let call = world.cri.calls().into_iter().find(|call| call.op == "port_forward").expect("asked");
    assert_eq!(call.detail, "[7000, 8000, 9000]");

    let off = World::with(StreamingConfig { terminate_web_sockets: false, ..StreamingConfig::default() }, false).await;
    let (head, _) = off.rig.web_socket(&format!("{EXEC}?output=1&command=cat"), "v5.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v4.channel.k8s.io"], "what the runtime says");
    let (status, body) = off.rig.ask(&web_socket_head("/portForward/default/web", "SPDY/3.1+portforward.k8s.io")).await;
    assert_eq!((status, body.as_str()), (400, "query parameter \"port\" is required"));
}

/// A port that answers one line with another, and a port that nobody listens on.
async fn ports() -> (u16, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let open = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut question = [0; 5];
                tcp.read_exact(&mut question).await.expect("a question");
                tcp.write_all(b"pong\n").await.expect("taken");
            });
        }
    });
    let unused = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    (open, unused.local_addr().expect("an address").port())
}

/// A closed port, then an open one, on one connection.
async fn forwards(client: &Spdy, open: u16, closed: u16) {
    let pair = async |port: u16, request: &str| {
        let port = port.to_string();
        let headers = |kind| [("port", port.clone()), ("streamType", kind), ("requestID", request.to_owned())];
        let opened = async |kind: &str| {
            let headers = headers(kind.to_owned());
            let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            client.open(&headers).await
        };
        let mut error = opened("error").await;
        error.finish().await.expect("sent");
        (opened("data").await, error)
    };
    let (mut data, mut error) = pair(closed, "0").await;
    let text = String::from_utf8(all(&mut error).await.to_vec()).expect("text");
    assert!(text.starts_with(&format!("error forwarding port {closed} to pod ")), "{text}");
    assert_eq!(all(&mut data).await, "");
    let (mut data, mut error) = pair(open, "1").await;
    data.write(Bytes::from_static(b"ping\n")).await.expect("sent");
    assert_eq!(all(&mut data).await, "pong\n");
    data.finish().await.expect("sent");
    assert_eq!(all(&mut error).await, "");
}

#[tokio::test]
async fn a_closed_port_does_not_end_a_port_forward() {
    // AC-04b-S8
    let world = World::new().await;
    let (open, closed) = ports().await;
    let client = world.rig.spdy("/portForward/default/web", &["portforward.k8s.io"]).await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["portforward.k8s.io"]);
    forwards(&client, open, closed).await;
}

#[tokio::test]
async fn a_tunnel_carries_spdy_in_a_web_socket() {
    // AC-04b-S10
    let world = World::new().await;
    let (open, closed) = ports().await;
    let (head, socket) = world.rig.web_socket("/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let (mut from, mut to) = tokio::io::split(theirs);
    let (mut send, mut receive) = socket.split();
    tokio::spawn(async move {
        let mut buffer = vec![0; 777]; // frames span messages
        while let Ok(read) = from.read(&mut buffer).await {
            if read == 0 || send.send(Message::Binary(Bytes::copy_from_slice(&buffer[..read]))).await.is_err() {
                break;
            }
        }
    });
    tokio::spawn(async move {
        while let Some(Ok(Message::Binary(bytes))) = receive.next().await {
            to.write_all(&bytes).await.expect("taken");
        }
    });
    let client = Spdy::over(head, ours);
    forwards(&client, open, closed).await;
    let page = berth_metrics(&world.rig);
    assert!(page.contains("kubelet_websocket_streaming_requests_total{subresource=\"portforward\"} 1"), "{page}");

    let (status, body) =
        world.rig.ask(&web_socket_head("/portForward/default/web?port=80", "SPDY/3.1+other.k8s.io")).await;
    assert_eq!(status, 403, "the runtime's refusal is passed on: {body}");
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a folder").count()
}

/// In a process of its own: the other tests have descriptors too.
#[test]
fn a_thousand_commands_leave_nothing_behind() {
    const ALONE: &str = "BERTH_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        return runtime.expect("a runtime").block_on(a_thousand_commands());
    }
    let mut alone = std::process::Command::new(std::env::current_exe().expect("a test"));
    alone.args(["--exact", "a_thousand_commands_leave_nothing_behind", "--nocapture"]).env(ALONE, "1");
    assert!(alone.status().expect("it runs").success());
}

async fn a_thousand_commands() {
    // AC-04b-S11
    let world = World::new().await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let settled = async |limit: (usize, usize)| {
        let until = async {
            while world.rig.streaming.open() > 0 || descriptors() > limit.0 || tasks() > limit.1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let done = timeout(Duration::from_secs(10), until).await;
        assert!(
            done.is_ok(),
            "{} streams, {} descriptors, {} tasks, before: {limit:?}",
            world.rig.streaming.open(),
            descriptors(),
            tasks()
        );
    };
    for _ in 0..3 {
        command(&world.rig, &["flood", "10"]).await;
    }
    let baseline = (descriptors() + 2, tasks() + 2);
    for number in 0..1000 {
        if number % 10 == 0 {
            let (_, mut socket) =
                world.rig.web_socket(&format!("{EXEC}?output=1&command=sleep"), "v5.channel.k8s.io").await;
            next(&mut socket).await;
            continue; // a client that just goes
        }
        if number % 10 == 1 {
            let head = format!(
                "POST {EXEC}?output=1&command=cat HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                 X-Stream-Protocol-Version: v9"
            );
            assert_eq!(world.rig.request(&head).await.0.status, 403);
            continue; // an upgrade that fails
        }
        if number % 10 == 2 {
            world.cri.stream_at("http://127.0.0.1:1");
            let head = format!("POST {EXEC}?output=1&command=cat HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1");
            assert_eq!(world.rig.request(&head).await.0.status, 500);
            world.cri.stream_at(&world.server.url);
            continue; // a runtime that is not there
        }
        let (printed, status) = command(&world.rig, &["flood", "10"]).await;
        assert_eq!((printed.len(), status.is_empty()), (10, false));
    }
    settled(baseline).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_flows_while_complaints_are_unread() {
    // AC-04b-S13
    const LOTS: usize = 100 << 20;
    let world = World::new().await;
    let client = world
        .rig
        .spdy(
            &format!("{EXEC}?output=1&error=1&command=complain&command=100000&command={LOTS}"),
            &["v4.channel.k8s.io"],
        )
        .await;
    let (mut error, mut stdout, _unread) =
        (client.stream("error").await, client.stream("stdout").await, client.stream("stderr").await);
    let mut got = 0;
    while let Some(bytes) = timeout(LIMIT, stdout.read()).await.expect("in time").expect("whole") {
        got += bytes.len();
    }
    assert_eq!(got, LOTS);
    assert_eq!(all(&mut error).await, r#"{"metadata":{},"status":"Success"}"#);

    // A client of version 5 that reads nothing holds up its own command and nothing else.
    let (_, mut socket) = world
        .rig
        .web_socket(
            &format!("{EXEC}?output=1&error=1&command=complain&command=100000&command={LOTS}"),
            "v5.channel.k8s.io",
        )
        .await;
    assert_eq!(command(&world.rig, &["flood", "10"]).await.0.len(), 10);
    let mut counts = [0usize; 4];
    while counts[3] == 0 {
        let message = next(&mut socket).await;
        counts[usize::from(message[0])] += message.len() - 1;
    }
    assert_eq!((counts[1], counts[2]), (LOTS, 100_000));
}

#[tokio::test]
async fn run_prints_what_a_command_printed() {
    let world = World::new().await;
    world.cri.on_exec("ls -a", 0, "out", "err", Duration::ZERO);
    world.cri.on_exec("false", 3, "lost", "why", Duration::ZERO);
    assert_eq!(world.rig.ask("POST /run/default/web/c?cmd=ls%20-a HTTP/1.1").await, (200, "outerr".to_owned()));
    assert_eq!(world.rig.ask("POST /run/default/web/uid-web/c?cmd=x HTTP/1.1").await, (200, String::new()));
    let failed = (500, "command 'false' exited with 3: why".to_owned());
    assert_eq!(world.rig.ask("POST /run/default/web/c?cmd=false HTTP/1.1").await, failed);
    let (head, _) = world.rig.request("POST /run/default/web/c?cmd=ls%20-a HTTP/1.1").await;
    assert_eq!(head.header("content-type"), ["application/json"]);
}

#[tokio::test]
async fn a_caller_may_hold_so_many_streams() {
    let world = World::with(StreamingConfig { most_per_caller: 2, ..StreamingConfig::default() }, false).await;
    let head = |user: &str| {
        format!(
            "POST {EXEC}?output=1&command=sleep HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: v4.channel.k8s.io\r\nX-User: {user}"
        )
    };
    let mut held = Vec::new();
    for _ in 0..2 {
        let (answer, tcp) = world.rig.request(&head("a")).await;
        assert_eq!(answer.status, 101);
        held.push(tcp);
    }
    let (answer, _) = world.rig.request(&head("a")).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, vec!["60"]));
    let (answer, _) = world.rig.request(&head("b")).await;
    assert_eq!(answer.status, 101, "others have their own share");
    held.clear();
    let given_back = async {
        while world.rig.request(&head("a")).await.0.status != 101 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, given_back).await.expect("what is closed is given back");
}

#[tokio::test]
async fn streams_finish_while_the_agent_ends() {
    let world = World::new().await;
    let target = format!("{EXEC}?input=1&output=1&command=cat");
    let (_, mut socket) = world.rig.web_socket(&target, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1], "it is connected");
    world.rig.stop.cancel();
    for message in [&b"\0foo"[..], &[255, 0]] {
        socket.send(Message::Binary(Bytes::copy_from_slice(message))).await.expect("sent");
    }
    assert_eq!(next(&mut socket).await, b"\x01foo");
    assert_eq!(next(&mut socket).await, b"\x03{\"metadata\":{},\"status\":\"Success\"}");
    drop(socket);
    timeout(LIMIT, world.rig.streaming.closed()).await.expect("in time");
}

#[tokio::test]
async fn streams_end_with_the_agent() {
    let config = StreamingConfig { grace: Duration::from_millis(50), ..StreamingConfig::default() };
    let world = World::with(config, false).await;
    let client = world.rig.spdy(&format!("{EXEC}?output=1&command=sleep"), &["v4.channel.k8s.io"]).await;
    let mut error = client.stream("error").await;
    assert_eq!(world.rig.streaming.open(), 1);
    world.rig.stop.cancel();
    timeout(LIMIT, world.rig.streaming.closed()).await.expect("in time");
    assert!(timeout(LIMIT, error.read()).await.expect("in time").is_err());
    assert_eq!(world.server.url.split(':').count(), 3);
}
