//! Exec and attach over a WebSocket (spec 04b §4.1).

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
    Manner,
    codec::{Heard, Protocol},
    process::{FIRST_SIZE, Input, Output},
    sizes::Sizes,
    status,
};
use crate::{
    ports::{
        streams::StreamSet,
        targets::{Process, Running, Size, Terminal, Verb},
    },
    streaming::websocket::{
        accept::Socket,
        channels::{self, Channel, Said},
        translate::{last_words, silent},
    },
};

/// What a client wants to run, and how it speaks.
pub struct Wish {
    /// Whose process.
    pub verb: Verb,
    /// Its streams.
    pub set: StreamSet,
    /// How it comes about.
    pub process: Box<dyn Process>,
    /// The protocol.
    pub protocol: Protocol,
}

/// Serves a WebSocket to its end.
pub async fn serve(socket: Socket, wish: Wish, manner: Manner) {
    let Wish { verb, set, process, protocol } = wish;
    let (mut to, from) = socket.split();
    // Tells the client that it is connected, on the lowest channel it reads.
    let lowest = match set {
        StreamSet { stdout: true, .. } => Channel::Stdout,
        StreamSet { stderr: true, .. } => Channel::Stderr,
        _ => Channel::Status,
    };
    if to.send(protocol.write(lowest as u8, b"")).await.is_err() {
        return;
    }
    let active = watch::channel(Instant::now()).0;
    let mut client = Client { from, protocol, sizes: Sizes::default(), active: active.clone(), early: None };
    let size = if set.tty && verb == Verb::Exec { client.first_size().await } else { None };
    let end = match process.start(size).await {
        Err(why) => Some(Err(why)),
        Ok(running) => {
            let Running { stdin, stdout, stderr, terminal, end } = running;
            let output = Outputs { stdout: Output::new(stdout), stderr: Output::new(stderr), set, manner };
            let outward = async {
                output.send(&mut to, protocol, &active).await.ok()?;
                Some(end.await)
            };
            tokio::select! {
                told = outward => told,
                () = client.pass_on(Input::new(stdin.filter(|_| set.stdin)), terminal) => None,
                () = silent(manner.idle, active.subscribe()) => None,
            }
        }
    };
    let words = end.and_then(|end| status::told(protocol.style, verb, &end));
    let words = words.map(|words| protocol.write(Channel::Status as u8, words.as_bytes()));
    last_words(to, client.from, words).await;
}

/// What a client says.
struct Client {
    from: SplitStream<Socket>,
    protocol: Protocol,
    sizes: Sizes,
    active: watch::Sender<Instant>,
    /// What it said before there was somebody to tell.
    early: Option<Said>,
}

impl Client {
    /// What it says next; `None` where it leaves. Cancel-safe.
    async fn next(&mut self) -> Option<Said> {
        if let Some(early) = self.early.take() {
            return Some(early);
        }
        let message = self.from.next().await?.ok()?;
        self.active.send_replace(Instant::now());
        match self.protocol.read(message) {
            Heard::Channel(bytes) => channels::read(bytes).ok(),
            Heard::Nothing => Some(Said::Nothing),
            Heard::End => None,
        }
    }

    /// The first size of its terminal, where it comes at once and first.
    async fn first_size(&mut self) -> Option<Size> {
        let until = Instant::now() + FIRST_SIZE;
        loop {
            match timeout_at(until, self.next()).await.ok()? {
                Some(Said::Nothing) => {}
                Some(Said::Resize(bytes)) => return self.sizes.push(&bytes),
                early => {
                    self.early = early;
                    return None;
                }
            }
        }
    }

    /// Passes on all it says; ends when it leaves.
    async fn pass_on(&mut self, mut input: Input, terminal: Option<Box<dyn Terminal>>) {
        while let Some(said) = self.next().await {
            match said {
                Said::Stdin(bytes) => input.write(&bytes).await,
                Said::StdinEnds => input.end(),
                Said::Resize(bytes) => {
                    if let (Some(terminal), Some(size)) = (&terminal, self.sizes.push(&bytes)) {
                        terminal.resize(size).await;
                    }
                }
                Said::Nothing => {}
            }
        }
    }
}

/// What a process says.
struct Outputs {
    stdout: Output,
    stderr: Output,
    set: StreamSet,
    manner: Manner,
}

impl Outputs {
    /// Sends all of it.
    ///
    /// Between its words the client is pinged: one that has gone while its input waits for a process that does not
    /// read would not be noticed otherwise.
    ///
    /// # Errors
    /// The client has gone.
    async fn send(
        self,
        to: &mut SplitSink<Socket, Message>,
        protocol: Protocol,
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
