//! WebSocket `v5.channel.k8s.io` to SPDY, for exec and attach on a runtime's own streaming server. Spec 04b §4.2.
//!
//! The client gets its 101 response first; later errors are sent on its status channel. One task moves both directions,
//! with back-pressure: a client that does not read stops the runtime's output, and a process that does not read stops
//! the client's input.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header},
    response::Response,
};
use bytes::{Bytes, BytesMut};
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use hyper_util::rt::TokioIo;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, sleep_until, timeout},
};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{
    channels::{self, Channel, ChannelMessage},
    handshake::{Handshake, Socket},
    status,
};
use crate::streaming::{
    StreamingConfig, StreamingContext,
    query::RequestedStreams,
    spdy::{ConnectionLimits, Headers, Role, SpdyConnection, SpdyStream, StreamClosed, handshake, session},
    stream_limit::Permit,
    upgrade_protocol::V5,
    upgrade_proxy,
};

/// Interval of pings to the runtime; they also reset its idle timer.
const PING: Duration = Duration::from_secs(5);
/// Timeout for the runtime to accept the streams.
const CREATION: Duration = Duration::from_secs(30);
/// Timeout of the last message and the close handshake.
const LAST_WRITE: Duration = Duration::from_secs(10);
/// Maximum length of a status read from the runtime, in bytes.
const STATUS: usize = 64 << 10;
/// Limit of open SPDY streams: those of a command, and a margin for streams that the runtime opens and we refuse.
const STREAMS: usize = 8;

/// Command to run behind a WebSocket.
#[derive(Clone, Debug)]
pub struct WebSocketCommand {
    /// Streaming URL of the runtime.
    pub url: String,
    /// Streams requested from the runtime.
    pub wanted: RequestedStreams,
    /// Metric label: `exec` or `attach`.
    pub subresource: &'static str,
}

/// Responds to the client and translates in a background task.
pub fn translate(
    streaming: &StreamingContext,
    command: WebSocketCommand,
    mut request: Request<Body>,
    permit: Permit,
) -> Response {
    let handshake = match Handshake::of(&mut request) {
        Ok(handshake) => handshake,
        Err(response) => return response,
    };
    streaming.metrics().web_socket(command.subresource);
    let from = upgrade_proxy::client_address(&request);
    let headers = toward_runtime(upgrade_proxy::forwarded(std::mem::take(request.headers_mut()), from));
    let (response, socket) = handshake.complete(V5);
    let own = streaming.clone();
    streaming.spawn(async move {
        if let Some(socket) = socket.await {
            Translation::new(socket, command.wanted, own.config()).run(&own, &command.url, headers).await;
        }
        drop(permit);
    });
    response
}

/// Converts the client's headers: without WebSocket headers, with the SPDY upgrade.
fn toward_runtime(mut headers: HeaderMap) -> HeaderMap {
    for name in [
        header::SEC_WEBSOCKET_KEY,
        header::SEC_WEBSOCKET_VERSION,
        header::SEC_WEBSOCKET_PROTOCOL,
        header::SEC_WEBSOCKET_EXTENSIONS,
        header::ORIGIN,
    ] {
        headers.remove(name);
    }
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(handshake::SPDY));
    headers.insert(handshake::PROTOCOL, HeaderValue::from_static("v4.channel.k8s.io"));
    headers
}

/// SPDY streams to the runtime.
struct RuntimeStreamSet {
    error: SpdyStream,
    stdin: Option<SpdyStream>,
    stdout: Option<SpdyStream>,
    stderr: Option<SpdyStream>,
    resize: Option<SpdyStream>,
}

struct Translation {
    to_client: SplitSink<Socket, Message>,
    from_client: SplitStream<Socket>,
    wanted: RequestedStreams,
    idle: Option<Duration>,
    heartbeat: Duration,
    /// Time of the last frame in either direction.
    active: watch::Sender<Instant>,
}

/// How a translation ended; only a status is sent to the client.
enum TranslationResult {
    /// All streams of the runtime ended, with this status for the client.
    Status(String),
    /// The client disconnected, or the idle timeout expired.
    Disconnected,
}

impl Translation {
    fn new(socket: Socket, wanted: RequestedStreams, config: &StreamingConfig) -> Self {
        let (to_client, from_client) = socket.split();
        let (idle, heartbeat, active) = (config.idle, config.heartbeat, watch::channel(Instant::now()).0);
        Self { to_client, from_client, wanted, idle, heartbeat, active }
    }

    async fn run(mut self, streaming: &StreamingContext, url: &str, headers: HeaderMap) {
        // An empty message on the lowest channel that the client reads signals that it is connected.
        let lowest = match self.wanted {
            RequestedStreams { stdout: true, .. } => Channel::Stdout,
            RequestedStreams { stderr: true, .. } => Channel::Stderr,
            _ => Channel::Status,
        };
        if self.to_client.send(Message::Binary(channels::message(lowest, b""))).await.is_err() {
            return;
        }
        let answered = match streaming.dialer().send_request(url, Method::POST, headers).await {
            Ok(answered) => answered,
            Err(error) => {
                let why = format!("error sending request: {}", error.cause());
                return self.close_with_message(status::internal(&why)).await;
            }
        };
        if answered.response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let body = upgrade_proxy::error_text(answered).await;
            return self.close_with_message(status::of_refusal(&body)).await;
        }
        let upgraded = match hyper::upgrade::on(answered.response).await {
            Ok(upgraded) => upgraded,
            Err(error) => return self.close_with_message(status::internal(&error.to_string())).await,
        };
        let limits = ConnectionLimits { idle: None, ping: Some(PING), streams: STREAMS };
        let (connection, incoming, driver) = session(TokioIo::new(upgraded), Role::Client, limits);
        drop(incoming); // runtimes open no streams; all streams are ours
        // The driver ends last: it sends the runtime a GOAWAY once the connection is dropped.
        let translating = async {
            if let TranslationResult::Status(status) = self.translate(connection).await {
                self.close_with_message(status).await;
            }
        };
        let _ = tokio::join!(translating, driver.run()); // the streams already report how the runtime's side ended
    }

    /// Opens the streams and moves bytes until the runtime has sent everything.
    async fn translate(&mut self, connection: SpdyConnection) -> TranslationResult {
        let streams = match timeout(CREATION, open(&connection, self.wanted)).await {
            Ok(Ok(streams)) => streams,
            Ok(Err(error)) => {
                return TranslationResult::Status(status::internal(&format!("error creating streams: {error}")));
            }
            Err(_) => return TranslationResult::Status(status::internal("error creating streams: timed out")),
        };
        let RuntimeStreamSet { error, stdin, stdout, stderr, resize } = streams;
        let active = self.active.clone();
        let outputs = OutputStreams { error, stdout, stderr, heartbeat: self.heartbeat };
        let silent = idle_timeout(self.idle, self.active.subscribe());
        tokio::select! {
            result = output(&mut self.to_client, outputs, &active) => result,
            () = input(&mut self.from_client, stdin, resize, &active) => TranslationResult::Disconnected,
            () = silent => TranslationResult::Disconnected,
        }
    }

    /// Sends the status and closes the WebSocket.
    async fn close_with_message(self, status: String) {
        let words = Message::Binary(channels::message(Channel::Status, status.as_bytes()));
        close_with_message(self.to_client, self.from_client, Some(words)).await;
    }
}

/// Sends the last message, if any, and closes the WebSocket.
pub async fn close_with_message(
    mut to: SplitSink<Socket, Message>,
    mut from: SplitStream<Socket>,
    words: Option<Message>,
) {
    let closing = async {
        if let Some(words) = words {
            to.send(words).await?;
        }
        // Clients treat a close frame without a code as an error.
        let normal = CloseFrame { code: CloseCode::Normal, reason: Default::default() };
        to.send(Message::Close(Some(normal))).await?;
        // Closing the connection early would reset it, and a client that has not read everything would lose data.
        while let Some(Ok(_)) = from.next().await {}
        to.close().await
    };
    let _ = timeout(LAST_WRITE, closing).await; // best effort: a client that does not read misses it
}

async fn open(connection: &SpdyConnection, wanted: RequestedStreams) -> Result<RuntimeStreamSet, StreamClosed> {
    let stream = |kind: &'static str, is_wanted: bool| async move {
        if !is_wanted {
            return Ok(None);
        }
        connection.open(Headers::of(&[("streamType", kind)])).await.map(Some)
    };
    let mut error = connection.open(Headers::of(&[("streamType", "error")])).await?;
    let mut stdin = stream("stdin", wanted.stdin).await?;
    let mut stdout = stream("stdout", wanted.stdout).await?;
    let mut stderr = stream("stderr", wanted.stderr).await?;
    let mut resize = stream("resize", wanted.tty).await?;
    error.accepted().await?;
    for stream in [&mut stdin, &mut stdout, &mut stderr, &mut resize].into_iter().flatten() {
        stream.accepted().await?;
    }
    Ok(RuntimeStreamSet { error, stdin, stdout, stderr, resize })
}

/// Copies messages of the client to the runtime; returns when the client sends no more.
async fn input(
    from: &mut SplitStream<Socket>,
    mut stdin: Option<SpdyStream>,
    resize: Option<SpdyStream>,
    active: &watch::Sender<Instant>,
) {
    while let Some(Ok(message)) = from.next().await {
        active.send_replace(Instant::now());
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text),
            Message::Close(_) => return,
            _ => continue,
        };
        // A process that no longer reads does not end the session; its exit is reported on the status channel.
        match channels::read(bytes) {
            Ok(ChannelMessage::Stdin(bytes)) => {
                if let Some(stdin) = &stdin {
                    let _ = stdin.write(bytes).await;
                }
            }
            Ok(ChannelMessage::StdinEnds) => {
                if let Some(stdin) = &mut stdin {
                    let _ = stdin.finish().await;
                }
            }
            Ok(ChannelMessage::Resize(bytes)) => {
                if let Some(resize) = &resize {
                    let _ = resize.write(bytes).await;
                }
            }
            Ok(ChannelMessage::Nothing) => {}
            Err(channels::BadClose) => return,
        }
    }
}

struct OutputStreams {
    error: SpdyStream,
    stdout: Option<SpdyStream>,
    stderr: Option<SpdyStream>,
    heartbeat: Duration,
}

/// Copies output of the runtime to the client; returns when all streams have ended.
///
/// Between messages the client is pinged: otherwise a client that disconnects while its input waits for a process that
/// does not read would not be detected.
async fn output(
    to: &mut SplitSink<Socket, Message>,
    streams: OutputStreams,
    active: &watch::Sender<Instant>,
) -> TranslationResult {
    let OutputStreams { error, mut stdout, mut stderr, heartbeat } = streams;
    let (mut error, mut status_bytes, mut broken) = (Some(error), BytesMut::new(), None);
    let mut beat = tokio::time::interval(heartbeat);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beat.reset();
    while stdout.is_some() || stderr.is_some() || error.is_some() {
        // Whichever stream is ready; an ended stream is not polled again.
        let (channel, read) = tokio::select! {
            read = next(&mut stdout) => (Channel::Stdout, read),
            read = next(&mut stderr) => (Channel::Stderr, read),
            read = next(&mut error) => (Channel::Status, read),
            _ = beat.tick() => {
                if to.send(Message::Ping(Bytes::new())).await.is_err() {
                    return TranslationResult::Disconnected;
                }
                continue;
            }
        };
        active.send_replace(Instant::now());
        match (channel, read) {
            (Channel::Status, Ok(Some(bytes))) => {
                let room = STATUS.saturating_sub(status_bytes.len());
                status_bytes.extend_from_slice(bytes.get(..bytes.len().min(room)).unwrap_or_default());
            }
            (channel, Ok(Some(bytes))) => {
                if to.send(Message::Binary(channels::message(channel, &bytes))).await.is_err() {
                    return TranslationResult::Disconnected;
                }
            }
            (Channel::Stdout, _) => stdout = None,
            (Channel::Stderr, _) => stderr = None,
            (_, read) => {
                broken = read.err();
                error = None;
            }
        }
    }
    match broken {
        // A runtime that disconnects without a status is an error.
        Some(why) if status_bytes.is_empty() => {
            TranslationResult::Status(status::internal(&format!("error reading from error stream: {why}")))
        }
        _ => TranslationResult::Status(status::of_error_stream(&status_bytes)),
    }
}

async fn next(stream: &mut Option<SpdyStream>) -> Result<Option<Bytes>, StreamClosed> {
    match stream {
        Some(stream) => stream.read().await,
        None => std::future::pending().await,
    }
}

/// Idle timeout: returns once no frame has moved for `limit`.
pub async fn idle_timeout(limit: Option<Duration>, active: watch::Receiver<Instant>) {
    let Some(limit) = limit else { return std::future::pending().await };
    loop {
        let due = *active.borrow() + limit;
        if due <= Instant::now() {
            return;
        }
        sleep_until(due).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_is_asked_for_spdy() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (header::CONNECTION, "keep-alive, Upgrade"),
            (header::UPGRADE, "websocket"),
            (header::SEC_WEBSOCKET_KEY, "x"),
            (header::SEC_WEBSOCKET_PROTOCOL, "v5.channel.k8s.io"),
            (header::USER_AGENT, "kubectl"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let sent = toward_runtime(headers);
        let pairs: Vec<(&str, &str)> =
            sent.iter().map(|(name, value)| (name.as_str(), value.to_str().expect("text"))).collect();
        assert_eq!(sent.len(), 4, "{pairs:?}");
        assert_eq!(
            (&sent["upgrade"], &sent["connection"]),
            (&HeaderValue::from_static("SPDY/3.1"), &HeaderValue::from_static("Upgrade"))
        );
        assert_eq!(sent[handshake::PROTOCOL], "v4.channel.k8s.io");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_it_after_the_last_frame() {
        let (active, seen) = watch::channel(Instant::now());
        let began = Instant::now();
        let limit = Duration::from_secs(4 * 3600);
        let frame = async {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            active.send_replace(Instant::now());
        };
        tokio::join!(idle_timeout(Some(limit), seen), frame);
        assert_eq!(began.elapsed(), Duration::from_secs(5 * 3600));
    }
}
