//! In-process streaming server: exec and attach over WebSocket (spec 04b §4.1).

use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, timeout_at},
};
use tokio_tungstenite::tungstenite::Message;

use super::{
    ServeOptions,
    codec::{ChannelProtocol, ClientMessage},
    process::{FIRST_SIZE, Input, OutputReader},
    resize_parser::ResizeParser,
    status,
};
use crate::{
    ports::{
        stream_targets::{CommandKind, ProcessStreams, ProcessTarget, Size, Terminal},
        streams::StreamSet,
    },
    streaming::websocket::{
        channels::{self, Channel, ChannelMessage},
        handshake::Socket,
        translator::{close_with_message, idle_timeout},
    },
};

/// Requested command and negotiated protocol.
pub struct SocketCommandRequest {
    /// Exec or attach.
    pub verb: CommandKind,
    /// Requested streams.
    pub set: StreamSet,
    /// Starts or joins the process.
    pub process: Box<dyn ProcessTarget>,
    /// Negotiated channel protocol.
    pub protocol: ChannelProtocol,
}

/// Serves a WebSocket to its end.
pub async fn serve(socket: Socket, request: SocketCommandRequest, manner: ServeOptions) {
    let SocketCommandRequest { verb, set, process, protocol } = request;
    let (mut to, from) = socket.split();
    // An empty message on the lowest channel that the client reads signals that it is connected.
    let lowest = match set {
        StreamSet { stdout: true, .. } => Channel::Stdout,
        StreamSet { stderr: true, .. } => Channel::Stderr,
        _ => Channel::Status,
    };
    if to.send(protocol.write(lowest as u8, b"")).await.is_err() {
        return;
    }
    let active = watch::channel(Instant::now()).0;
    let mut client =
        CommandClient { from, protocol, sizes: ResizeParser::default(), active: active.clone(), early: None };
    let size = if set.tty && verb == CommandKind::Exec { client.first_size().await } else { None };
    let end = match process.start(size).await {
        Err(why) => Some(Err(why)),
        Ok(running) => {
            let ProcessStreams { stdin, stdout, stderr, terminal, end } = running;
            let output = Outputs { stdout: OutputReader::new(stdout), stderr: OutputReader::new(stderr), set, manner };
            let outward = async {
                output.send(&mut to, protocol, &active).await.ok()?;
                Some(end.await)
            };
            tokio::select! {
                result = outward => result,
                () = client.pass_on(Input::new(stdin.filter(|_| set.stdin)), terminal) => None,
                () = idle_timeout(manner.idle, active.subscribe()) => None,
            }
        }
    };
    let words = end.and_then(|end| status::exit_message(protocol.style, verb, &end));
    let words = words.map(|words| protocol.write(Channel::Status as u8, words.as_bytes()));
    close_with_message(to, client.from, words).await;
}

/// Receiving half of the client's WebSocket.
struct CommandClient {
    from: SplitStream<Socket>,
    protocol: ChannelProtocol,
    sizes: ResizeParser,
    active: watch::Sender<Instant>,
    /// Message that was received before the process started.
    early: Option<ChannelMessage>,
}

impl CommandClient {
    /// Next message; `None` where the client disconnects or sends an invalid message. Cancel-safe.
    async fn next(&mut self) -> Option<ChannelMessage> {
        if let Some(early) = self.early.take() {
            return Some(early);
        }
        let message = self.from.next().await?.ok()?;
        self.active.send_replace(Instant::now());
        match self.protocol.read(message) {
            ClientMessage::Channel(bytes) => channels::read(bytes).ok(),
            ClientMessage::Nothing => Some(ChannelMessage::Nothing),
            ClientMessage::End => None,
        }
    }

    /// First terminal size, if it arrives within [`FIRST_SIZE`] and before any other message.
    async fn first_size(&mut self) -> Option<Size> {
        let until = Instant::now() + FIRST_SIZE;
        loop {
            match timeout_at(until, self.next()).await.ok()? {
                Some(ChannelMessage::Nothing) => {}
                Some(ChannelMessage::Resize(bytes)) => return self.sizes.push(&bytes),
                early => {
                    self.early = early;
                    return None;
                }
            }
        }
    }

    /// Passes all messages on to the process; returns when the client disconnects.
    async fn pass_on(&mut self, mut input: Input, terminal: Option<Box<dyn Terminal>>) {
        while let Some(message) = self.next().await {
            match message {
                ChannelMessage::Stdin(bytes) => input.write(&bytes).await,
                ChannelMessage::StdinEnds => input.end(),
                ChannelMessage::Resize(bytes) => {
                    if let (Some(terminal), Some(size)) = (&terminal, self.sizes.push(&bytes)) {
                        terminal.resize(size).await;
                    }
                }
                ChannelMessage::Nothing => {}
            }
        }
    }
}

/// Outputs of a process.
struct Outputs {
    stdout: OutputReader,
    stderr: OutputReader,
    set: StreamSet,
    manner: ServeOptions,
}

impl Outputs {
    /// Sends both outputs until they end.
    ///
    /// Between messages the client is pinged: otherwise a client that disconnects while its input waits for a process
    /// that does not read would not be detected.
    ///
    /// # Errors
    /// If the client has disconnected.
    async fn send(
        self,
        to: &mut SplitSink<Socket, Message>,
        protocol: ChannelProtocol,
        active: &watch::Sender<Instant>,
    ) -> Result<(), tokio_tungstenite::tungstenite::Error> {
        let Self { mut stdout, mut stderr, set, manner } = self;
        let mut beat = tokio::time::interval(manner.heartbeat);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        beat.reset();
        while !(stdout.is_over() && stderr.is_over()) {
            let (channel, is_wanted, piece) = tokio::select! {
                piece = stdout.next(), if !stdout.is_over() => (Channel::Stdout, set.stdout, piece),
                piece = stderr.next(), if !stderr.is_over() => (Channel::Stderr, set.stderr, piece),
                _ = beat.tick() => {
                    to.send(Message::Ping(Bytes::new())).await?;
                    continue;
                }
            };
            let Some(piece) = piece.filter(|_| is_wanted) else { continue };
            active.send_replace(Instant::now());
            to.send(protocol.write(channel as u8, &piece)).await?;
        }
        Ok(())
    }
}
