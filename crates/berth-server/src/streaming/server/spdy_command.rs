//! In-process streaming server: exec and attach over SPDY (spec 04b §3.1).

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite},
    time::{Instant, timeout, timeout_at},
};
use tracing::debug;

use super::{
    ServeOptions,
    process::{FIRST_SIZE, Input, OutputReader},
    resize_parser::ResizeParser,
    status::{self, StatusFormat},
};
use crate::{
    ports::{
        stream_targets::{CommandKind, ProcessStreams, ProcessTarget, Size, Terminal},
        streams::StreamSet,
    },
    streaming::spdy::{
        ConnectionLimits, IncomingStreams, Role, SpdyConnection, SpdyStream, StreamClosed,
        command::{self, CommandStreams, ExpectedStreams},
        session,
    },
};

/// Limit of open streams: those of a command, and a margin for streams that are refused.
const STREAMS: usize = 16;
/// Timeout for the client to close the connection after everything was sent.
const GOODBYE: Duration = Duration::from_secs(10);

/// Requested command and negotiated protocol.
pub struct SpdyCommandRequest {
    /// Exec or attach.
    pub verb: CommandKind,
    /// Requested streams.
    pub set: StreamSet,
    /// Starts or joins the process.
    pub process: Box<dyn ProcessTarget>,
    /// Negotiated subprotocol.
    pub protocol: &'static str,
}

/// Serves a connection to its end.
pub async fn serve<T: AsyncRead + AsyncWrite + Send + Unpin>(io: T, request: SpdyCommandRequest, manner: ServeOptions) {
    let limits = ConnectionLimits { idle: manner.idle, ping: None, streams: STREAMS };
    serve_connection(io, limits, async |connection, incoming| {
        run(&connection, incoming, request).await;
        // The driver detects a client that no longer reads.
        let _ = connection.flushed().await;
    })
    .await;
}

/// Runs a SPDY server on the connection; `serving` is canceled when the connection ends.
pub async fn serve_connection<T, F>(mut io: T, limits: ConnectionLimits, serving: F)
where
    T: AsyncRead + AsyncWrite + Send + Unpin,
    F: AsyncFnOnce(SpdyConnection, IncomingStreams),
{
    {
        let (connection, incoming, driver) = session(&mut io, Role::Server, limits);
        let mut driving = std::pin::pin!(driver.run());
        let ended = tokio::select! {
            ended = &mut driving => ended,
            () = serving(connection, incoming) => driving.await,
        };
        if let Err(cause) = ended {
            debug!(err = %cause, "Streaming connection failed");
        }
    }
    // Drains the input: closing with unread data resets the connection, and the client would lose output.
    let read_out = async {
        let mut dropped = [0; 4 << 10];
        while let Ok(1..) = io.read(&mut dropped).await {}
    };
    let _ = timeout(GOODBYE, read_out).await;
}

async fn run(connection: &SpdyConnection, mut incoming: IncomingStreams, request: SpdyCommandRequest) {
    let SpdyCommandRequest { verb, set, process, protocol } = request;
    let (style, knows_sizes) = match protocol {
        "v4.channel.k8s.io" => (StatusFormat::Json, true),
        "v3.channel.k8s.io" => (StatusFormat::Text, true),
        _ => (StatusFormat::Text, false),
    };
    let StreamSet { stdin, stdout, stderr, tty } = set;
    let expected = ExpectedStreams { stdin, stdout, stderr, resize: tty && knows_sizes };
    let mut streams = match command::accept(&mut incoming, expected).await {
        Ok(streams) => streams,
        Err(cause) => return debug!(err = %cause, "Client did not create its streams"),
    };
    drop(incoming); // refuses further streams
    // Clients of the first version expect these two streams to close at once, as its first server did.
    let error = if protocol == "channel.k8s.io" {
        if let Some(stdin) = &mut streams.stdin {
            let _ = stdin.finish().await;
        }
        drop(streams.error);
        None
    } else {
        Some(streams.error)
    };
    let CommandStreams { stdin, stdout, stderr, resize, .. } = streams;
    let mut resize = resize.map(|stream| Resizes { stream, sizes: ResizeParser::default() });
    let size = match &mut resize {
        Some(resize) if verb == CommandKind::Exec => resize.first().await,
        _ => None,
    };
    let end = match process.start(size).await {
        Ok(running) => moving(running, ClientStreams { stdin, stdout, stderr, resize }).await,
        Err(why) => Some(Err(why)),
    };
    if let (Some(mut error), Some(end)) = (error, end) {
        if let Some(words) = status::exit_message(style, verb, &end) {
            let _ = error.write(Bytes::from(words)).await; // fails only when the connection has ended
        }
        let _ = error.finish().await;
        let _ = connection.flushed().await;
    }
}

/// Client-side streams of a process.
struct ClientStreams {
    stdin: Option<SpdyStream>,
    stdout: Option<SpdyStream>,
    stderr: Option<SpdyStream>,
    resize: Option<Resizes>,
}

/// Moves bytes until the process has ended and all its output is sent; `None` where the client disconnected.
async fn moving(running: ProcessStreams, ends: ClientStreams) -> Option<Result<i32, String>> {
    let ProcessStreams { stdin: input, stdout: printed, stderr: complained, terminal, end } = running;
    let ClientStreams { stdin, stdout, stderr, resize } = ends;
    let outward = async {
        let (out, err) = tokio::join!(deliver(printed, stdout), deliver(complained, stderr));
        let result = end.await;
        out.and(err).ok().map(|()| result)
    };
    let inward = async {
        tokio::join!(feed(stdin, Input::new(input)), adapt(resize, terminal));
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        result = outward => result,
        never = inward => match never {},
    }
}

/// Sends the output of a process; output that was not requested is read and discarded.
async fn deliver(
    from: Option<crate::ports::stream_targets::Reader>,
    mut to: Option<SpdyStream>,
) -> Result<(), StreamClosed> {
    let mut output = OutputReader::new(from);
    while let Some(piece) = output.next().await {
        if let Some(to) = &to {
            to.write(piece).await?;
        }
    }
    match &mut to {
        Some(to) => to.finish().await,
        None => Ok(()),
    }
}

/// Copies the client's input to a process until either side ends.
async fn feed(from: Option<SpdyStream>, mut to: Input) {
    let Some(mut from) = from else { return };
    while let Ok(Some(bytes)) = from.read().await {
        to.write(&bytes).await;
    }
    to.end();
    // Keeps the stream until all output is sent: dropping it would reset it.
    std::future::pending::<()>().await;
}

/// Applies terminal sizes sent by the client.
async fn adapt(resize: Option<Resizes>, terminal: Option<Box<dyn Terminal>>) {
    let Some(mut resize) = resize else { return };
    while let Some(size) = resize.next().await {
        if let Some(terminal) = &terminal {
            terminal.resize(size).await;
        }
    }
}

struct Resizes {
    stream: SpdyStream,
    sizes: ResizeParser,
}

impl Resizes {
    /// Next terminal size; `None` after the last one. Cancel-safe.
    async fn next(&mut self) -> Option<Size> {
        loop {
            let bytes = self.stream.read().await.ok()??;
            if let Some(size) = self.sizes.push(&bytes) {
                return Some(size);
            }
        }
    }

    /// First terminal size, if it arrives within [`FIRST_SIZE`].
    async fn first(&mut self) -> Option<Size> {
        timeout_at(Instant::now() + FIRST_SIZE, self.next()).await.ok().flatten()
    }
}
