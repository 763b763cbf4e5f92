//! Streaming server of the scripted CRI: exec, attach, and port-forward over SPDY and WebSocket.
//!
//! Its processes are simulated; their command selects the behavior, which is the same in a real container: `cat`
//! echoes, `sh -c "exit N"` exits with that code, `head -c N /dev/zero` prints N bytes, [`COMPLAINS`] prints to
//! stderr before stdout, `stty size` prints the first terminal size it receives, `sleep` does nothing until its
//! streams end. Two commands exist here only: `flood N` prints N bytes, and `vanish` dies with its runtime. Forwarded
//! ports are those of this machine's loopback interface.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use berth_server::streaming::{
    spdy::{
        ConnectionLimits, IncomingStreams as SpdyStreams, Role, SpdyConnection, SpdyStream,
        command::{self, CommandStreams, ExpectedStreams},
        handshake, pairing, session,
    },
    websocket::channels,
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message, handshake::derive_accept_key},
};

use super::{ScriptedCri, StreamRequest};

/// Shell script that prints `$0` bytes to stderr, then `$1` bytes to stdout.
pub const COMPLAINS: &str = "head -c $0 /dev/zero >&2; head -c $1 /dev/zero";

/// Streaming server; stops accepting connections when dropped.
pub struct StreamServer {
    /// Base URL without a path.
    pub url: String,
    /// Number of open streams (SPDY or WebSocket sessions).
    pub open: Arc<AtomicUsize>,
    task: AbortHandle,
}

impl Drop for StreamServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl StreamServer {
    /// Starts the server and registers its URL with the runtime.
    pub async fn start(cri: &Arc<ScriptedCri>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("invalid port");
        let url = format!("http://{}", listener.local_addr().expect("failed to get the local address"));
        cri.stream_at(&url);
        let open = Arc::new(AtomicUsize::new(0));
        let (cri, counted) = (cri.clone(), open.clone());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (cri, counted) = (cri.clone(), counted.clone());
                tokio::spawn(async move {
                    let service = service_fn(|request| {
                        let answer = answer(&cri, &counted, request);
                        async move { Ok::<_, Infallible>(answer) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
                });
            }
        });
        Self { url, open, task: task.abort_handle() }
    }
}

fn text(status: u16, body: &str) -> Response<Full<Bytes>> {
    Response::builder()
        .status(status)
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
        .expect("invalid response")
}

fn answer(cri: &ScriptedCri, open: &Arc<AtomicUsize>, mut request: Request<Incoming>) -> Response<Full<Bytes>> {
    let Some(wanted) = cri.take_stream(request.uri().path()) else { return text(404, "404 page not found\n") };
    if let Some(key) = request.headers().get("sec-websocket-key") {
        let accept = derive_accept_key(key.as_bytes());
        let mut response = text(101, "");
        for (name, value) in [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-accept", accept.as_str()),
            ("sec-websocket-protocol", "v4.channel.k8s.io"),
        ] {
            response.headers_mut().insert(name, value.parse().expect("invalid header value"));
        }
        let upgrade = hyper::upgrade::on(&mut request);
        spawn(open, async move { channel_messages(upgrade.await.expect("upgraded"), &wanted).await });
        return response;
    }
    let is_forward = matches!(wanted, StreamRequest::PortForward(_));
    let accepted = if is_forward { handshake::FORWARD } else { handshake::COMMAND };
    match handshake::negotiate(request.headers(), accepted) {
        Err(refusal) => {
            let mut response = text(refusal.status.as_u16(), &refusal.text);
            for protocol in accepted.iter().filter(|_| refusal.lists_accepted) {
                response.headers_mut().append(handshake::ACCEPTED, protocol.parse().expect("invalid header value"));
            }
            response
        }
        Ok(protocol) => {
            let mut response = text(101, "");
            for (name, value) in
                [("connection", "Upgrade"), ("upgrade", handshake::SPDY), (handshake::PROTOCOL, protocol)]
            {
                response.headers_mut().insert(name, value.parse().expect("invalid header value"));
            }
            let upgrade = hyper::upgrade::on(&mut request);
            spawn(open, async move {
                let io = TokioIo::new(upgrade.await.expect("upgraded"));
                let (connection, incoming, driver) =
                    session(io, Role::Server, ConnectionLimits { idle: None, ping: None, streams: 4096 });
                let served = async {
                    match wanted {
                        StreamRequest::PortForward(_) => forward(incoming).await,
                        StreamRequest::Exec(r) => {
                            let expected =
                                ExpectedStreams { stdin: r.stdin, stdout: r.stdout, stderr: r.stderr, resize: r.tty };
                            run(&connection, incoming, expected, &r.cmd).await;
                        }
                        StreamRequest::Attach(r) => {
                            let expected =
                                ExpectedStreams { stdin: r.stdin, stdout: r.stdout, stderr: r.stderr, resize: r.tty };
                            run(&connection, incoming, expected, &["cat".to_owned()]).await;
                        }
                    }
                    drop(connection);
                };
                let _ = tokio::join!(served, driver.run());
            });
            response
        }
    }
}

fn spawn(open: &Arc<AtomicUsize>, work: impl Future<Output = ()> + Send + 'static) {
    open.fetch_add(1, Ordering::SeqCst);
    let open = open.clone();
    tokio::spawn(async move {
        work.await;
        open.fetch_sub(1, Ordering::SeqCst);
    });
}

async fn run(connection: &SpdyConnection, mut incoming: SpdyStreams, expected: ExpectedStreams, words: &[String]) {
    let Ok(mut streams) = command::accept(&mut incoming, expected).await else { return };
    let Some(code) = process(&mut streams, words).await else { return };
    for stream in [&mut streams.stdout, &mut streams.stderr].into_iter().flatten() {
        let _ = stream.finish().await;
    }
    let status = match code {
        0 => r#"{"metadata":{},"status":"Success"}"#.to_owned(),
        n => format!(
            r#"{{"metadata":{{}},"status":"Failure","message":"command terminated with non-zero exit code: exit status {n}","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"{n}"}}]}}}}"#
        ),
    };
    let _ = streams.error.write(status.into()).await;
    let _ = streams.error.finish().await;
    connection.close();
}

/// Exit code of the simulated process; `None` if the stream ends without a status.
async fn process(streams: &mut CommandStreams, words: &[String]) -> Option<i32> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["cat"] => {
            let (Some(stdin), Some(stdout)) = (&mut streams.stdin, &mut streams.stdout) else { return Some(1) };
            while let Some(bytes) = stdin.read().await.ok()? {
                stdout.write(bytes).await.ok()?;
            }
            Some(0)
        }
        ["sh", "-c", COMPLAINS, complaint, bytes] => {
            flood(streams.stderr.as_mut()?, complaint).await?;
            flood(streams.stdout.as_mut()?, bytes).await
        }
        ["sh", "-c", script] => script.strip_prefix("exit ").and_then(|code| code.parse().ok()).or(Some(127)),
        ["flood", bytes] | ["head", "-c", bytes, "/dev/zero"] => flood(streams.stdout.as_mut()?, bytes).await,
        ["stty", "size"] => {
            let size = streams.resize.as_mut()?.read().await.ok()??;
            let size: serde_json::Value = serde_json::from_slice(&size).ok()?;
            let line = format!("{} {}\r\n", size["Height"], size["Width"]);
            streams.stdout.as_mut()?.write(line.into()).await.ok()?;
            Some(0)
        }
        ["sleep", _] => {
            let _ = streams.error.read().await;
            Some(0)
        }
        ["vanish"] => None,
        _ => Some(127),
    }
}

async fn flood(stream: &mut SpdyStream, bytes: &str) -> Option<i32> {
    let mut left: usize = bytes.parse().ok()?;
    let chunk = Bytes::from(vec![b'x'; 32 << 10]);
    while left > 0 {
        let size = left.min(chunk.len());
        stream.write(chunk.slice(..size)).await.ok()?;
        left -= size;
    }
    Some(0)
}

async fn forward(mut incoming: SpdyStreams) {
    let mut pairs = pairing::Pairs::default();
    let mut halves: HashMap<String, SpdyStream> = HashMap::new();
    while let Some(stream) = incoming.recv().await {
        match pairs.arrive(stream.id(), stream.headers(), Instant::now()) {
            pairing::PairingAction::Reset(_) | pairing::PairingAction::Taken { .. } => drop(stream),
            pairing::PairingAction::Wait { request, .. } => {
                let _ = stream.accept().await;
                halves.insert(request, stream);
            }
            pairing::PairingAction::Connect { request, half, port } => {
                let _ = stream.accept().await;
                let first = halves.remove(&request).expect("no stream is waiting for the request");
                let (data, error) = if half == pairing::PairHalf::Data { (stream, first) } else { (first, stream) };
                tokio::spawn(connect(port, data, error));
            }
        }
    }
}

async fn connect(port: u16, mut data: SpdyStream, mut error: SpdyStream) {
    let tcp = match TcpStream::connect(("127.0.0.1", port)).await {
        Ok(tcp) => tcp,
        Err(why) => {
            let _ = error.write(pairing::failed(port, "sandbox", &why.to_string()).into()).await;
            let _ = error.finish().await;
            return;
        }
    };
    let (mut from, mut to) = tcp.into_split();
    let mut buffer = vec![0; 16 << 10];
    let mut is_data_finished = false;
    loop {
        tokio::select! {
            chunk = data.read(), if !is_data_finished => match chunk {
                Ok(Some(bytes)) => to.write_all(&bytes).await.expect("failed to write to the port"),
                Ok(None) => {
                    is_data_finished = true;
                    let _ = to.shutdown().await; // the peer may have closed already
                }
                Err(_) => return,
            },
            read = from.read(&mut buffer) => match read {
                Ok(read) if read > 0 => {
                    let _ = data.write(Bytes::copy_from_slice(&buffer[..read])).await;
                }
                _ => break,
            },
        }
    }
    let _ = data.finish().await;
    let _ = error.finish().await;
}

/// Echoes channel 0 on channel 1; port forwarding starts with the port greetings.
async fn channel_messages(io: hyper::upgrade::Upgraded, wanted: &StreamRequest) {
    let role = tungstenite::protocol::Role::Server;
    let mut socket = WebSocketStream::from_raw_socket(TokioIo::new(io), role, None).await;
    match wanted {
        StreamRequest::PortForward(r) => {
            let ports: Vec<u16> = r.port.iter().map(|port| u16::try_from(*port).expect("invalid port")).collect();
            for greeting in channels::port_greetings(&ports) {
                let _ = socket.send(Message::Binary(greeting)).await;
            }
        }
        _ => {
            let _ = socket.send(Message::Binary(channels::message(channels::Channel::Stdout, b""))).await;
        }
    }
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Binary(bytes) = message
            && let Ok(channels::ChannelMessage::Stdin(bytes)) = channels::read(bytes)
        {
            let _ = socket.send(Message::Binary(channels::message(channels::Channel::Stdout, &bytes))).await;
        }
    }
}
