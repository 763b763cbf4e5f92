//! Exec, attach and port-forward of the embedded runtime, with clients of every protocol: spec 09a §4, 04b §3-§5.
//!
//! What needs processes needs root, and says so where it is skipped.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use berth::{
    agent::embedded_streams::RuntimeTargets,
    embedded::{cri as services, runtime::Runtime, streams::IN_PROCESS},
    proto::cri::{self, runtime_service_client::RuntimeServiceClient},
    server::streaming::{
        serve::listener::Listening,
        spdy::{Connection, Headers, Incoming, Limits, Role, Stream, session},
    },
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, tungstenite, tungstenite::Message};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use crate::real::{Daemon, Place, container, daemon, drop_parent_group, left, obstacle, on_a_machine, pod};

/// No test waits longer for anything.
pub const LIMIT: Duration = Duration::from_secs(30);
/// The flags of a request: stdin, stdout, stderr, terminal.
type Flags = [bool; 4];
const ALL: Flags = [true, true, true, false];
const TERMINAL: Flags = [true, true, false, true];

/// A listener before a runtime, as `berth cri` has one.
pub struct Streams {
    pub address: String,
    pub stop: CancellationToken,
    pub task: JoinHandle<()>,
}

impl Streams {
    async fn of(runtime: &Arc<Runtime>) -> Self {
        let listening = Listening::bind("127.0.0.1:0").await.expect("a port");
        let address = listening.url().strip_prefix("http://").expect("http").to_owned();
        let stop = CancellationToken::new();
        let task = tokio::spawn(listening.serve(Arc::new(RuntimeTargets(runtime.clone())), stop.clone()));
        Self { address, stop, task }
    }

    /// Sends a request; the head of the answer, and the connection behind it.
    pub async fn request(&self, head: &str) -> (Head, TcpStream) {
        let mut tcp = TcpStream::connect(&self.address).await.expect("it listens");
        tcp.write_all(format!("{head}\r\nHost: node\r\n\r\n").as_bytes()).await.expect("sent");
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            text.push(timeout(LIMIT, tcp.read_u8()).await.expect("in time").expect("an answer"));
        }
        (Head::read(&String::from_utf8(text).expect("text")), tcp)
    }

    /// Speaks SPDY at a URL.
    pub async fn spdy(&self, url: &str, protocols: &[&str]) -> Spdy {
        self.spdy_at(path(url), protocols).await
    }

    /// Speaks SPDY at a path.
    pub async fn spdy_at(&self, path: &str, protocols: &[&str]) -> Spdy {
        let (head, tcp) = self.request(&spdy_head(path, protocols)).await;
        assert_eq!(head.status, 101, "{head:?}");
        Spdy::over(head, tcp)
    }

    /// Speaks a WebSocket at a URL.
    pub async fn web_socket(&self, url: &str, protocols: &str) -> (Head, WebSocketStream<TcpStream>) {
        self.web_socket_at(path(url), protocols).await
    }

    /// Speaks a WebSocket at a path.
    pub async fn web_socket_at(&self, path: &str, protocols: &str) -> (Head, WebSocketStream<TcpStream>) {
        let (head, tcp) = self.request(&web_socket_head(path, protocols)).await;
        assert_eq!(head.status, 101, "{head:?}");
        (head, WebSocketStream::from_raw_socket(tcp, tungstenite::protocol::Role::Client, None).await)
    }

    pub async fn end(self) {
        self.stop.cancel();
        timeout(LIMIT, self.task).await.expect("in time").expect("no panic");
    }
}

fn path(url: &str) -> &str {
    url.strip_prefix(IN_PROCESS).expect("met in this process")
}

pub fn spdy_head(path: &str, protocols: &[&str]) -> String {
    let lines: String = protocols.iter().map(|p| format!("\r\nX-Stream-Protocol-Version: {p}")).collect();
    format!("POST {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0{lines}")
}

pub fn web_socket_head(path: &str, protocols: &str) -> String {
    let line = if protocols.is_empty() { String::new() } else { format!("\r\nSec-WebSocket-Protocol: {protocols}") };
    format!(
        "GET {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=={line}"
    )
}

/// The head of an answer.
#[derive(Debug)]
pub struct Head {
    pub status: u16,
    lines: Vec<(String, String)>,
}

impl Head {
    fn read(text: &str) -> Self {
        let mut lines = text.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status").parse().expect("a number");
        let pairs = lines.filter_map(|line| line.split_once(": "));
        Self { status, lines: pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect() }
    }

    pub fn header(&self, name: &str) -> Vec<&str> {
        self.lines.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// A SPDY client.
pub struct Spdy {
    pub head: Head,
    pub connection: Connection,
    _incoming: Incoming,
    task: JoinHandle<()>,
}

impl Spdy {
    fn over<T: AsyncRead + AsyncWrite + Send + 'static>(head: Head, io: T) -> Self {
        let (connection, incoming, driver) = session(io, Role::Client, Limits { idle: None, ping: None, streams: 64 });
        let task = tokio::spawn(async move {
            let _ = driver.run().await;
        });
        Self { head, connection, _incoming: incoming, task }
    }

    async fn open(&self, headers: &[(&str, &str)]) -> Stream {
        let mut stream = self.connection.open(Headers::of(headers)).await.expect("open");
        timeout(LIMIT, stream.accepted()).await.expect("in time").expect("accepted");
        stream
    }

    /// Opens the streams of a command.
    pub async fn command(&self, kinds: &[&'static str]) -> BTreeMap<&'static str, Stream> {
        let mut streams = BTreeMap::new();
        for kind in kinds {
            streams.insert(*kind, self.open(&[("streamType", kind)]).await);
        }
        streams
    }

    /// A pair for a port.
    async fn pair(&self, port: u16, request: &str) -> (Stream, Stream) {
        let port = port.to_string();
        let mut error = self.open(&[("port", &port), ("streamType", "error"), ("requestID", request)]).await;
        error.finish().await.expect("sent");
        (self.open(&[("port", &port), ("streamType", "data"), ("requestID", request)]).await, error)
    }
}

/// All that comes on a stream, until it ends in whatever way.
pub async fn all(stream: &mut Stream) -> String {
    let mut bytes = Vec::new();
    while let Ok(Some(more)) = timeout(LIMIT, stream.read()).await.expect("in time") {
        bytes.extend_from_slice(&more);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What comes on a stream up to a text.
async fn up_to(stream: &mut Stream, wanted: &str) -> String {
    let mut text = String::new();
    while !text.contains(wanted) {
        let more = timeout(LIMIT, stream.read()).await;
        let more = more.unwrap_or_else(|_| panic!("{wanted:?} does not come, but {text:?}"));
        text += &String::from_utf8_lossy(&more.expect("whole").unwrap_or_else(|| panic!("it ended with {text:?}")));
    }
    text
}

/// The next message with bytes, as bytes.
pub async fn next(socket: &mut WebSocketStream<TcpStream>) -> Vec<u8> {
    loop {
        match timeout(LIMIT, socket.next()).await.expect("in time") {
            Some(Ok(Message::Binary(bytes))) => return bytes.to_vec(),
            Some(Ok(Message::Text(text))) => return text.as_bytes().to_vec(),
            Some(Ok(Message::Ping(_))) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Messages of channels 1 to 3 up to the end, each channel in one piece.
pub async fn channels(socket: &mut WebSocketStream<TcpStream>) -> [String; 3] {
    let mut all = [const { Vec::new() }; 3];
    while let Some(Ok(message)) = timeout(LIMIT, socket.next()).await.expect("in time") {
        if let Message::Binary(bytes) = message {
            all[usize::from(bytes[0]) - 1].extend_from_slice(&bytes[1..]);
        }
    }
    all.map(|bytes| String::from_utf8(bytes).expect("text"))
}

pub async fn say(socket: &mut WebSocketStream<TcpStream>, message: &[u8]) {
    socket.send(Message::Binary(Bytes::copy_from_slice(message))).await.expect("sent");
}

/// A daemon with a container that runs, and the door to its streams.
pub struct World {
    pub daemon: Daemon,
    pub streams: Streams,
    pub sandbox: String,
    pub container: String,
    place: Place,
}

impl World {
    /// `None` where this machine cannot run it; says so.
    pub async fn with(test: &str, config: cri::ContainerConfig) -> Option<Self> {
        if let Some(why) = obstacle() {
            assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
            println!("skipped {test}: {why}");
            return None;
        }
        let place = Place(tempfile::tempdir().expect("a directory"));
        let daemon = daemon(place.0.path()).await;
        let streams = Streams::of(&daemon.runtime).await;
        let sandbox = daemon.run(pod(place.0.path(), "s")).await;
        let container = daemon.start(&sandbox, config).await;
        Some(Self { daemon, streams, sandbox, container, place })
    }

    /// With a container that sleeps.
    async fn asleep(test: &str) -> Option<Self> {
        Self::with(test, container("c", "trap 'exit 0' TERM; while :; do sleep 0.1; done")).await
    }

    async fn exec(&self, script: &str, [stdin, stdout, stderr, tty]: Flags) -> String {
        let cmd = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let container_id = self.container.clone();
        let request = cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr };
        self.daemon.rpc.clone().exec(request).await.expect("prepared").into_inner().url
    }

    async fn attach(&self, [stdin, stdout, stderr, tty]: Flags) -> String {
        let request = cri::AttachRequest { container_id: self.container.clone(), stdin, tty, stdout, stderr };
        self.daemon.rpc.clone().attach(request).await.expect("prepared").into_inner().url
    }

    async fn forward(&self, ports: &[u16]) -> String {
        let port = ports.iter().copied().map(i32::from).collect();
        let request = cri::PortForwardRequest { pod_sandbox_id: self.sandbox.clone(), port };
        self.daemon.rpc.clone().port_forward(request).await.expect("prepared").into_inner().url
    }

    /// Takes everything down; nothing is left.
    pub async fn end(self) {
        self.streams.end().await;
        self.daemon.remove(&self.sandbox).await;
        assert_eq!(left(self.place.0.path()), Vec::<String>::new());
        drop_parent_group(self.place.0.path());
        self.daemon.stop.cancel();
    }
}

pub const SUCCESS: &str = r#"{"status":"Success"}"#;

pub fn exit_status(code: u8) -> String {
    format!(
        r#"{{"status":"Failure","message":"command terminated with non-zero exit code: exit status {code}","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_over_spdy() {
    let Some(world) = World::asleep("commands_over_spdy").await else { return };
    // AC-04b-S3, S5: what it prints and complains comes whole before its end.
    let url = world.exec("cat; echo oops >&2; exit 7", ALL).await;
    let client = world.streams.spdy(&url, &["v5.channel.k8s.io", "v4.channel.k8s.io"]).await;
    assert_eq!(client.head.header("x-stream-protocol-version"), ["v4.channel.k8s.io"]);
    let mut streams = client.command(&["error", "stdin", "stdout", "stderr"]).await;
    let stdin = streams.get_mut("stdin").expect("open");
    stdin.write(Bytes::from("hello\n")).await.expect("sent");
    stdin.finish().await.expect("sent");
    assert_eq!(all(streams.get_mut("stdout").expect("open")).await, "hello\n");
    assert_eq!(all(streams.get_mut("stderr").expect("open")).await, "oops\n");
    assert_eq!(all(streams.get_mut("error").expect("open")).await, exit_status(7));
    timeout(LIMIT, client.task).await.expect("the server closes").expect("no panic");

    // Signals, and what cannot be executed.
    let run = async |script: &str, protocol: &str| {
        let url = world.exec(script, [false, true, false, false]).await;
        let client = world.streams.spdy(&url, &[protocol]).await;
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

    // AC-09a-X7, streamed: who inherits the pipe does not hold up the end, and is not told off.
    let begun = std::time::Instant::now();
    let (printed, status) = run("(sleep 4; echo late; echo $? > /tmp/late) & echo hi", "v4.channel.k8s.io").await;
    assert_eq!((printed.as_str(), status.as_str()), ("hi\n", SUCCESS));
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(
        world.daemon.exec(&world.container, "while ! cat /tmp/late 2>/dev/null; do sleep 0.1; done").await.0,
        "0\n"
    );

    let request = cri::ExecRequest {
        container_id: world.container.clone(),
        cmd: vec!["/nowhere".to_owned()],
        stdout: true,
        ..Default::default()
    };
    let url = world.daemon.rpc.clone().exec(request).await.expect("prepared").into_inner().url;
    let client = world.streams.spdy(&url, &["v4.channel.k8s.io"]).await;
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
    let Some(world) = World::asleep("terminals_have_their_size_from_the_start_and_hang_up").await else { return };
    let script = "stty size; trap 'stty size' WINCH; echo ready; read line; echo got $line; \
                  trap 'echo hung > /tmp/hung; exit' HUP; while :; do sleep 0.1; done";
    let url = world.exec(script, TERMINAL).await;
    let client = world.streams.spdy(&url, &["v4.channel.k8s.io"]).await;
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
    let (said, _) = world.daemon.exec(&world.container, "while ! cat /tmp/hung 2>/dev/null; do sleep 0.1; done").await;
    assert_eq!(said, "hung\n", "who leaves a terminal hangs up");

    // The same over a WebSocket, and no size at all.
    let (_, mut socket) = world.streams.web_socket(&world.exec("stty size", TERMINAL).await, "v5.channel.k8s.io").await;
    say(&mut socket, b"\x04{\"Width\":90,\"Height\":30}").await;
    let [stdout, _, status] = channels(&mut socket).await;
    assert_eq!((stdout.as_str(), status.as_str()), ("30 90\r\n", r#"{"metadata":{},"status":"Success"}"#));
    let (_, mut socket) = world.streams.web_socket(&world.exec("stty size", TERMINAL).await, "v4.channel.k8s.io").await;
    assert_eq!(channels(&mut socket).await, ["24 80\r\n".to_owned(), String::new(), SUCCESS.to_owned()]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_over_web_sockets() {
    let Some(world) = World::asleep("commands_over_web_sockets").await else { return };
    // AC-04b-S6
    let (head, mut socket) = world.streams.web_socket(&world.exec("cat", ALL).await, "v5.channel.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    assert_eq!(next(&mut socket).await, [1]);
    say(&mut socket, b"\0foo").await;
    assert_eq!(next(&mut socket).await, b"\x01foo");
    say(&mut socket, &[255, 0]).await;
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
        let (head, mut socket) = world.streams.web_socket(&world.exec(script, ALL).await, protocol).await;
        assert_eq!(head.header("sec-websocket-protocol").concat(), protocol);
        say(&mut socket, b"\0foo").await;
        assert_eq!(channels(&mut socket).await, ["foo\n".to_owned(), "oops\n".to_owned(), status], "{protocol}");
    }
    let (_, mut socket) = world.streams.web_socket(&world.exec("head -c 3", ALL).await, "base64.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, b"1");
    socket.send(Message::Text("0Zm9v".into())).await.expect("sent");
    assert_eq!(next(&mut socket).await, b"1Zm9v");

    // Who speaks nothing we know is told so.
    let url = world.exec("true", ALL).await;
    let (head, _) = world.streams.request(&web_socket_head(path(&url), "v9.channel.k8s.io")).await;
    assert_eq!(head.status, 403);
    // AC-04b-S4
    let url = world.exec("true", ALL).await;
    let (head, _) = world.streams.request(&spdy_head(path(&url), &["v9"])).await;
    assert_eq!((head.status, head.header("x-accepted-stream-protocol-versions").len()), (403, 4));
    let (head, _) = world.streams.request(&spdy_head(path(&url), &["v4.channel.k8s.io"])).await;
    assert_eq!(head.status, 404, "a URL is met once");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_clients_attach_and_none_holds_up_the_container() {
    let config = cri::ContainerConfig {
        stdin: true,
        stdin_once: true,
        ..container("c", "while read line; do echo \"got $line\"; echo \"err $line\" >&2; done; echo bye; exit 5")
    };
    let Some(world) = World::with("several_clients_attach_and_none_holds_up_the_container", config).await else {
        return;
    };
    let spdy = world.streams.spdy(&world.attach(ALL).await, &["v4.channel.k8s.io"]).await;
    let mut streams = spdy.command(&["error", "stdin", "stdout", "stderr"]).await;
    let reads = [false, true, false, false];
    let (_, mut socket) = world.streams.web_socket(&world.attach(reads).await, "v4.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    // That one is attached, too: a WebSocket is answered before it is.
    let (_, mut writes) =
        world.streams.web_socket(&world.attach([true, true, true, false]).await, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut writes).await, [1]);
    say(&mut writes, b"\0one\n").await;
    assert_eq!(up_to(streams.get_mut("stdout").expect("open"), "got one\n").await, "got one\n");
    assert_eq!(up_to(streams.get_mut("stderr").expect("open"), "err one\n").await, "err one\n");
    streams["stdin"].write(Bytes::from("two\n")).await.expect("sent");
    up_to(streams.get_mut("stdout").expect("open"), "got two\n").await;
    // The first end of input is the container's.
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
    let refused = world.daemon.rpc.clone().attach(request).await.expect_err("it has ended");
    assert_eq!(
        (refused.code(), refused.message()),
        (tonic::Code::FailedPrecondition, "container is in CONTAINER_EXITED state")
    );
    world.end().await;
}

/// A port that says `pong` once all of a question was asked, and a port nobody listens on.
pub async fn ports() -> (u16, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let open = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut question = String::new();
                tcp.read_to_string(&mut question).await.expect("a question");
                tcp.write_all(format!("pong to {}\n", question.len()).as_bytes()).await.expect("taken");
            });
        }
    });
    let unused = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    (open, unused.local_addr().expect("an address").port())
}

pub async fn forwards(world: &World, client: &Spdy, (open, closed): (u16, u16)) {
    // AC-04b-S8
    let (mut data, mut error) = client.pair(closed, "0").await;
    let text = all(&mut error).await;
    let sandbox = &world.sandbox;
    let begins = format!(
        "error forwarding port {closed} to pod {sandbox}, uid : failed to connect to localhost:{closed} inside namespace \"{sandbox}\", IPv4: "
    );
    assert!(text.starts_with(&begins) && text.contains(" IPv6 "), "{text}");
    assert_eq!(all(&mut data).await, "");
    // Many at once; the pod answers only once it has been told that nothing more comes.
    let mut pairs = Vec::new();
    for number in 1..20_usize {
        let (mut data, error) = client.pair(open, &number.to_string()).await;
        data.write(Bytes::from(vec![b'x'; 1000 * number])).await.expect("sent");
        data.finish().await.expect("sent");
        pairs.push((number, data, error));
    }
    for (number, mut data, mut error) in pairs {
        assert_eq!(all(&mut data).await, format!("pong to {}\n", 1000 * number));
        assert_eq!(all(&mut error).await, "");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_are_forwarded_over_every_protocol() {
    let Some(world) = World::asleep("ports_are_forwarded_over_every_protocol").await else { return };
    let (open, closed) = ports().await;
    let client = world.streams.spdy(&world.forward(&[]).await, &["portforward.k8s.io"]).await;
    forwards(&world, &client, (open, closed)).await;
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
    let (head, socket) = world.streams.web_socket(&world.forward(&[]).await, "SPDY/3.1+portforward.k8s.io").await;
    assert_eq!(head.header("sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let (mut from, mut to) = tokio::io::split(theirs);
    let (mut send, mut receive) = socket.split();
    tokio::spawn(async move {
        let mut buffer = vec![0; 777]; // frames span messages
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            if send.send(Message::Binary(Bytes::copy_from_slice(&buffer[..read]))).await.is_err() {
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
    forwards(&world, &client, (open, closed)).await;

    // AC-04b-S9, small: a pair of channels for each port.
    let lines = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let line = lines.local_addr().expect("an address").port();
    tokio::spawn(async move {
        let (mut tcp, _) = lines.accept().await.expect("somebody");
        let mut question = [0; 5];
        tcp.read_exact(&mut question).await.expect("a question");
        tcp.write_all(b"pong\n").await.expect("taken");
    });
    let (_, mut socket) = world.streams.web_socket(&world.forward(&[line, closed]).await, "v4.channel.k8s.io").await;
    let [low, high] = line.to_le_bytes();
    for channel in 0..4 {
        let greeting = next(&mut socket).await;
        assert_eq!((greeting[0], greeting.len()), (channel, 3));
        assert!(channel > 1 || greeting[1..] == [low, high]);
    }
    say(&mut socket, b"\0ping\n").await;
    let mut told = BTreeMap::<u8, Vec<u8>>::new();
    while let Some(Ok(message)) = timeout(LIMIT, socket.next()).await.expect("in time") {
        if let Message::Binary(bytes) = message {
            told.entry(bytes[0]).or_default().extend_from_slice(&bytes[1..]);
        }
    }
    assert_eq!(told.keys().copied().collect::<Vec<_>>(), [0, 3], "it ends once all ports have");
    assert_eq!(told[&0], b"pong\n");
    assert!(told[&3].starts_with(format!("error forwarding port {closed} to pod ").as_bytes()));
    let (head, _) = world.streams.request(&web_socket_head(path(&world.forward(&[]).await), "v4.channel.k8s.io")).await;
    assert_eq!(head.status, 400, "ports are needed where no connection names its own");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_stops_reading_holds_up_nobody_else() {
    // The container prints more than all buffers hold, and writes down that it got through.
    let script = "while [ ! -e /tmp/go ]; do sleep 0.05; done; head -c 20000000 /dev/zero; echo through > /tmp/through; \
                  trap 'exit 0' TERM; while :; do sleep 0.1; done";
    let Some(world) = World::with("who_stops_reading_holds_up_nobody_else", container("c", script)).await else {
        return;
    };
    let reads = [false, true, false, false];
    let url = world.attach(reads).await;
    // That client opens its streams, and then does not even read its connection.
    let (head, mut silent) = world.streams.request(&spdy_head(path(&url), &["v4.channel.k8s.io"])).await;
    assert_eq!(head.status, 101);
    let mut frames = bytes::BytesMut::new();
    let mut encoder = berth::server::streaming::spdy::frames::Encoder::default();
    for (id, kind) in [(1, "error"), (3, "stdout")] {
        encoder.syn_stream(id, &Headers::of(&[("streamType", kind)]), &mut frames).expect("packed");
    }
    silent.write_all(&frames).await.expect("sent");
    let (_, mut socket) = world.streams.web_socket(&world.attach(reads).await, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    world.daemon.exec(&world.container, "touch /tmp/go").await;
    let (said, _) =
        world.daemon.exec(&world.container, "while ! cat /tmp/through 2>/dev/null; do sleep 0.05; done").await;
    assert_eq!(said, "through\n", "clients that do not read are no reason to wait");

    // AC-04b-S13: what is printed flows while complaints are unread.
    const LOTS: usize = 100_000_000;
    let url = world.exec(&format!("head -c 100000 /dev/zero >&2; head -c {LOTS} /dev/zero"), ALL).await;
    let client = world.streams.spdy(&url, &["v4.channel.k8s.io"]).await;
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
    let Some(world) = World::with("a_command_whose_client_has_gone_goes_on", config).await else { return };
    let url = world
        .exec(
            "echo began; while read line; do :; done; echo late && echo late >&2 && echo well > /tmp/end; sleep 1",
            ALL,
        )
        .await;
    let client = world.streams.spdy(&url, &["v4.channel.k8s.io"]).await;
    let mut streams = client.command(&["error", "stdin", "stdout", "stderr"]).await;
    up_to(streams.get_mut("stdout").expect("open"), "began\n").await;
    drop(streams);
    client.connection.close();
    drop(client);
    let (said, _) = world.daemon.exec(&world.container, "while ! cat /tmp/end 2>/dev/null; do sleep 0.05; done").await;
    assert_eq!(said, "well\n", "what it prints is read and dropped");

    // Not root: its streams are its own all the same.
    let url = world.exec("id -u; echo again > /dev/stdout; echo oops > /dev/stderr", ALL).await;
    let (_, mut socket) = world.streams.web_socket(&url, "v4.channel.k8s.io").await;
    assert_eq!(channels(&mut socket).await, ["1000\nagain\n".to_owned(), "oops\n".to_owned(), SUCCESS.to_owned()]);
    world.end().await;
}

#[test]
fn others_meet_streams_on_loopback_while_the_socket_is_served() {
    // AC-09-E1: streaming, as critest asks for it: over a socket, in a pod's network.
    on_a_machine("others_meet_streams_on_loopback_while_the_socket_is_served", over_a_socket);
}

async fn over_a_socket(place: Place) {
    let daemon = daemon(place.path()).await;
    let listening = Listening::bind("127.0.0.1:0").await.expect("a port");
    let (url, stop) = (listening.url(), CancellationToken::new());
    let task = tokio::spawn(listening.serve(Arc::new(RuntimeTargets(daemon.runtime.clone())), stop.clone()));
    let (runtime, path) = (daemon.runtime.clone(), place.0.path().join("cri.sock"));
    let (at, begins, stopped) = (path.clone(), url.clone(), stop.clone());
    let socket = tokio::spawn(async move { services::over_socket(&runtime, at, &begins, stopped).await });
    let address = url.strip_prefix("http://").expect("http").to_owned();
    let streams = Streams { address: address.clone(), stop: stop.clone(), task };
    let connector = tower::service_fn(move |_: http::Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://socket").connect_with_connector_lazy(connector);
    let mut rpc = RuntimeServiceClient::new(channel);

    let mut config = pod(place.0.path(), "s");
    let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("given");
    context.namespace_options.as_mut().expect("given").network = cri::NamespaceMode::Pod.into();
    let sandbox = daemon.run(config).await;
    let script = "mkdir /tmp/w; echo served > /tmp/w/index.html; httpd -p 127.0.0.1:80 -h /tmp/w; \
                  httpd -p [::1]:81 -h /tmp/w; nc -ll -p 83 -e cat & while read line; do echo got $line; done";
    let id = daemon.start(&sandbox, cri::ContainerConfig { stdin: true, ..container("c", script) }).await;
    let path = |met: String| met.strip_prefix(&url).expect("on loopback").to_owned();

    let request = cri::ExecRequest {
        container_id: id[..13].to_owned(),
        cmd: ["sh", "-c", "tty; read line; echo $line"].map(str::to_owned).to_vec(),
        tty: true,
        stdin: true,
        stdout: true,
        stderr: false,
    };
    let met = path(rpc.exec(request.clone()).await.expect("prepared").into_inner().url);
    let client = streams.spdy_at(&met, &["v4.channel.k8s.io"]).await;
    let mut ends = client.command(&["error", "stdin", "stdout", "resize"]).await;
    ends["stdin"].write(Bytes::from("hello\n")).await.expect("sent");
    let printed = all(ends.get_mut("stdout").expect("open")).await;
    assert!(printed.contains("/dev/pts/0\r\n") && printed.ends_with("hello\r\n"), "{printed:?}");
    let attached = cri::AttachRequest { container_id: id, stdin: true, stdout: true, ..Default::default() };
    let met = path(rpc.attach(attached).await.expect("prepared").into_inner().url);
    let (_, mut joined) = streams.web_socket_at(&met, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut joined).await, [1]);
    say(&mut joined, b"\0x\n").await;
    assert_eq!(next(&mut joined).await, b"\x01got x\n");

    let forward = cri::PortForwardRequest { pod_sandbox_id: sandbox.clone(), port: vec![80] };
    let met = path(rpc.port_forward(forward).await.expect("prepared").into_inner().url);
    let client = streams.spdy_at(&met, &["portforward.k8s.io"]).await;
    for (port, request) in [(80, "four"), (81, "six")] {
        let (mut data, _error) = client.pair(port, request).await;
        data.write(Bytes::from("GET / HTTP/1.0\r\n\r\n")).await.expect("sent");
        let page = all(&mut data).await;
        assert!(page.ends_with("served\n"), "{request}: {page}");
    }
    let (mut data, _error) = client.pair(83, "half").await;
    data.write(Bytes::from("echo")).await.expect("sent");
    data.finish().await.expect("sent");
    assert_eq!(all(&mut data).await, "echo");
    let (_data, mut error) = client.pair(82, "2").await;
    let text = all(&mut error).await;
    let begins = format!("failed to connect to localhost:82 inside namespace \"{sandbox}\", IPv4: ");
    assert!(text.contains(&begins) && text.contains("refused"), "{text}");

    // The listener goes with the socket, and the streams with it.
    let late = path(rpc.exec(request).await.expect("prepared").into_inner().url);
    assert!(late.starts_with("/exec/"));
    streams.end().await;
    timeout(LIMIT, socket).await.expect("in time").expect("no panic").expect("served");
    assert!(TcpStream::connect(&address).await.is_err());
    while let Some(Ok(_)) = timeout(LIMIT, joined.next()).await.expect("in time") {}
    daemon.remove(&sandbox).await;
    assert_eq!(left(place.0.path()), Vec::<String>::new());
    daemon.stop.cancel();
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a folder").count()
}

/// In a process of its own: the other tests have descriptors too.
#[test]
fn hundreds_of_commands_leave_nothing_behind() {
    const ALONE: &str = "BERTH_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        return runtime.expect("a runtime").block_on(hundreds_of_commands());
    }
    let mut alone = std::process::Command::new(std::env::current_exe().expect("a test"));
    alone.args(["--exact", "streams::hundreds_of_commands_leave_nothing_behind", "--nocapture"]).env(ALONE, "1");
    assert!(alone.status().expect("it runs").success());
}

async fn hundreds_of_commands() {
    // AC-04b-S11
    let Some(world) = World::asleep("hundreds_of_commands_leave_nothing_behind").await else { return };
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let command = async |number: usize| {
        let flags = if number % 5 == 1 { TERMINAL } else { ALL };
        let url = world.exec("head -c 10 /dev/zero", flags).await;
        match number % 5 {
            // Clients that just go: before they have their streams, and after.
            2 => drop(world.streams.spdy(&url, &["v4.channel.k8s.io"]).await),
            3 => {
                let (_, mut socket) = world.streams.web_socket(&url, "v5.channel.k8s.io").await;
                assert_eq!(next(&mut socket).await, [1]);
            }
            4 => {
                let (_, mut socket) = world.streams.web_socket(&url, "v4.channel.k8s.io").await;
                assert_eq!(channels(&mut socket).await[0].len(), 10);
            }
            kind => {
                let client = world.streams.spdy(&url, &["v4.channel.k8s.io"]).await;
                let wanted: &[&str] = if kind == 1 {
                    &["error", "stdin", "stdout", "resize"]
                } else {
                    &["error", "stdin", "stdout", "stderr"]
                };
                let mut streams = client.command(wanted).await;
                assert_eq!(all(streams.get_mut("stdout").expect("open")).await.len(), 10);
                assert_eq!(all(streams.get_mut("error").expect("open")).await, SUCCESS);
            }
        }
    };
    command(0).await;
    let baseline = (descriptors() + 4, tasks() + 4);
    let settled = async |limit: (usize, usize)| {
        let until = async {
            while descriptors() > limit.0 || tasks() > limit.1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let done = timeout(Duration::from_secs(20), until).await;
        assert!(done.is_ok(), "{} descriptors, {} tasks, before: {limit:?}", descriptors(), tasks());
    };
    for number in 0..300 {
        command(number).await;
    }
    settled(baseline).await;
    world.end().await;
}
