//! Clients that misbehave or disconnect: in-memory connections under paused time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::Instant,
};

use super::{ServeOptions, spdy_command, spdy_forward};
use crate::{
    ports::{
        stream_targets::{CommandKind, PodPorts, ProcessStreams, ProcessTarget, Size, Terminal},
        streams::StreamSet,
    },
    streaming::spdy::{ConnectionLimits, Headers, IncomingStreams, Role, SpdyConnection, SpdyStream, session},
};

const IDLE: Duration = Duration::from_secs(600);
const MANNER: ServeOptions = ServeOptions { idle: Some(IDLE), heartbeat: Duration::from_secs(30), knows_newest: true };

/// Process that echoes until its input ends; counts starts and ends.
#[derive(Clone, Default)]
struct Echo {
    started: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
    sizes: Arc<std::sync::Mutex<Vec<Option<Size>>>>,
}

struct DropCounter(Arc<AtomicUsize>);

impl Drop for DropCounter {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Tty(Echo);

#[async_trait]
impl Terminal for Tty {
    async fn resize(&self, size: Size) {
        self.0.sizes.lock().expect("whole").push(Some(size));
    }
}

#[async_trait]
impl ProcessTarget for Echo {
    async fn start(self: Box<Self>, size: Option<Size>) -> Result<ProcessStreams, String> {
        self.started.fetch_add(1, Ordering::SeqCst);
        self.sizes.lock().expect("whole").push(size);
        let (ours, theirs) = duplex(64);
        let (mut from, mut to) = tokio::io::split(theirs);
        let alive = DropCounter(self.dropped.clone());
        let echoing = tokio::spawn(async move {
            let copied = tokio::io::copy(&mut from, &mut to).await;
            let _ = to.shutdown().await;
            copied.map(|count| i32::try_from(count).unwrap_or(-1))
        });
        let (stdout, stdin) = tokio::io::split(ours);
        Ok(ProcessStreams {
            stdin: Some(Box::new(ShutdownOnDrop(stdin))),
            stdout: Some(Box::new(stdout)),
            stderr: None,
            terminal: Some(Box::new(Tty(*self))),
            end: Box::pin(async move {
                let _alive = alive;
                echoing.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
            }),
        })
    }
}

/// Dropping one half of an in-memory pipe does not end it: this wrapper shuts it down.
struct ShutdownOnDrop(tokio::io::WriteHalf<DuplexStream>);

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        let waker = futures::task::noop_waker();
        let mut context = std::task::Context::from_waker(&waker);
        let _ = tokio::io::AsyncWrite::poll_shutdown(std::pin::Pin::new(&mut self.0), &mut context);
    }
}

impl tokio::io::AsyncWrite for ShutdownOnDrop {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut self.0).poll_write(cx, bytes)
    }
    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

struct Client {
    connection: SpdyConnection,
    _incoming: IncomingStreams,
    driver: JoinHandle<()>,
    server: JoinHandle<()>,
}

fn client(io: DuplexStream, server: JoinHandle<()>) -> Client {
    let (connection, incoming, driver) =
        session(io, Role::Client, ConnectionLimits { idle: None, ping: None, streams: 4096 });
    let driver = tokio::spawn(async move {
        let _ = driver.run().await;
    });
    Client { connection, _incoming: incoming, driver, server }
}

impl Client {
    async fn open(&self, headers: &[(&str, &str)]) -> SpdyStream {
        let mut stream = self.connection.open(Headers::of(headers)).await.expect("open");
        stream.accepted().await.expect("accepted");
        stream
    }
}

fn command(process: &Echo, tty: bool, protocol: &'static str) -> Client {
    let (ours, theirs) = duplex(64 << 10);
    let set = StreamSet { stdin: true, stdout: true, stderr: false, tty };
    let request =
        spdy_command::SpdyCommandRequest { verb: CommandKind::Exec, set, process: Box::new(process.clone()), protocol };
    client(ours, tokio::spawn(spdy_command::serve(theirs, request, MANNER)))
}

async fn all(stream: &mut SpdyStream) -> String {
    let mut bytes = Vec::new();
    while let Ok(Some(more)) = stream.read().await {
        bytes.extend_from_slice(&more);
    }
    String::from_utf8(bytes).expect("text")
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_before_all_streams_are_there() {
    let (process, begun) = (Echo::default(), Instant::now());
    let client = command(&process, false, "v4.channel.k8s.io");
    let mut error = client.open(&[("streamType", "error")]).await;
    let _stdin = client.open(&[("streamType", "stdin")]).await;
    assert!(error.read().await.is_err(), "the connection is given up");
    assert_eq!(begun.elapsed().as_secs(), 30);
    client.driver.await.expect("no panic");
    client.server.await.expect("no panic");
    assert_eq!(process.started.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_command_for_its_client() {
    let (process, begun) = (Echo::default(), Instant::now());
    let client = command(&process, false, "v4.channel.k8s.io");
    let _error = client.open(&[("streamType", "error")]).await;
    let stdin = client.open(&[("streamType", "stdin")]).await;
    let mut stdout = client.open(&[("streamType", "stdout")]).await;
    tokio::time::sleep(IDLE / 2).await;
    stdin.write(Bytes::from("x")).await.expect("sent");
    assert_eq!(stdout.read().await, Ok(Some(Bytes::from("x"))));
    assert!(stdout.read().await.is_err());
    assert_eq!(begun.elapsed(), IDLE + IDLE / 2);
    client.server.await.expect("no panic");
    assert_eq!(process.dropped.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn the_first_size_comes_before_the_process() {
    let size = |columns, rows| Some(Size { columns, rows });
    let rows: [(&str, bool, &[Option<Size>]); 3] = [
        ("v4.channel.k8s.io", true, &[size(80, 24), size(90, 30)]),
        ("v3.channel.k8s.io", false, &[None, size(90, 30)]),
        ("v2.channel.k8s.io", false, &[None]),
    ];
    for (protocol, is_early, expected) in rows {
        let process = Echo::default();
        let client = command(&process, true, protocol);
        let mut error = client.open(&[("streamType", "error")]).await;
        let mut stdin = client.open(&[("streamType", "stdin")]).await;
        let mut stdout = client.open(&[("streamType", "stdout")]).await;
        let knows_sizes = protocol != "v2.channel.k8s.io";
        let resize = if knows_sizes { Some(client.open(&[("streamType", "resize")]).await) } else { None };
        let send_size = async |text: &'static str| {
            if let Some(resize) = &resize {
                resize.write(Bytes::from(text)).await.expect("sent");
            }
        };
        if is_early {
            send_size(r#"{"Width":80,"Height":24}"#).await;
        }
        // Paused time advances only when all tasks wait: nothing overtakes the first size.
        tokio::time::sleep(Duration::from_secs(1)).await;
        send_size(r#"{"Width":90,"Height":30}"#).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        stdin.finish().await.expect("sent");
        assert_eq!(all(&mut stdout).await, "");
        let _ = all(&mut error).await;
        assert_eq!(*process.sizes.lock().expect("whole"), expected, "{protocol}");
    }
}

/// Ports of this machine.
struct Here;

#[async_trait]
impl PodPorts for Here {
    fn sandbox(&self) -> &str {
        "s"
    }

    async fn dial(&self, port: u16) -> Result<TcpStream, String> {
        TcpStream::connect(("127.0.0.1", port)).await.map_err(|error| error.to_string())
    }
}

fn forwarding() -> Client {
    let (ours, theirs) = duplex(64 << 10);
    client(ours, tokio::spawn(spdy_forward::serve(theirs, Box::new(Here), ServeOptions { idle: None, ..MANNER })))
}

#[tokio::test(start_paused = true)]
async fn a_stream_without_its_other_half_times_out() {
    let client = forwarding();
    let mut error = client.open(&[("port", "80"), ("streamType", "error"), ("requestID", "7")]).await;
    let begun = Instant::now();
    assert_eq!(all(&mut error).await, "(conn=s, request=7) timed out waiting for streams");
    let waited = begun.elapsed().as_secs();
    assert!((29..=36).contains(&waited), "{waited}");
    client.connection.close();
    client.server.await.expect("no panic");
}

/// Number of requests for each level of concurrency.
const FORWARDS: usize = 600;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_forwards_at_once_lose_nothing() {
    let answer = Bytes::from(vec![b'y'; 20_000]);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let served = answer.clone();
    let server = tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let answer = served.clone();
            tokio::spawn(async move {
                let mut question = [0];
                if tcp.read_exact(&mut question).await.is_ok() {
                    let _ = tcp.write_all(&answer).await; // the client may be gone
                }
            });
        }
    });
    let client = forwarding();
    let number = &AtomicUsize::new(0);
    for at_once in [50, 200] {
        let one = async |_| {
            let request = number.fetch_add(1, Ordering::SeqCst).to_string();
            let headers = |kind| [("port", port.as_str()), ("streamType", kind), ("requestID", request.as_str())];
            let mut error = client.open(&headers("error")).await;
            let mut data = client.open(&headers("data")).await;
            data.write(Bytes::from_static(b"x")).await.expect("sent");
            let got = all(&mut data).await;
            let _ = data.finish().await;
            (got.len(), all(&mut error).await)
        };
        let all = futures::stream::iter(0..FORWARDS).map(one).buffer_unordered(at_once).collect::<Vec<_>>();
        let results = tokio::time::timeout(Duration::from_secs(60), all).await.expect("nothing moves any more");
        let bad: Vec<_> = results.iter().filter(|result| **result != (answer.len(), String::new())).collect();
        assert!(bad.is_empty(), "{} of {FORWARDS} are lost with {at_once} at once: {:?}", bad.len(), bad.first());
    }
    server.abort();
    client.connection.close();
    client.server.await.expect("no panic");
}

#[tokio::test]
async fn half_closed_connections_live_until_they_are_silent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let client = forwarding();
    let mut error = client.open(&[("port", &port), ("streamType", "error"), ("requestID", "1")]).await;
    let mut data = client.open(&[("port", &port), ("streamType", "data"), ("requestID", "1")]).await;
    let (mut tcp, _) = listener.accept().await.expect("somebody");
    // The pod sends nothing more, but still reads.
    tcp.shutdown().await.expect("open");
    assert_eq!(data.read().await, Ok(None));
    tokio::time::pause();
    data.write(Bytes::from("still there")).await.expect("sent");
    let mut received = [0; 11];
    tcp.read_exact(&mut received).await.expect("all of it");
    let begun = Instant::now();
    assert_eq!(tcp.read(&mut received).await.expect("closed in order"), 0);
    let waited = begun.elapsed().as_secs();
    assert!((55..=65).contains(&waited), "{waited}");
    assert_eq!(all(&mut error).await, "");
    client.connection.close();
    client.server.await.expect("no panic");
}
