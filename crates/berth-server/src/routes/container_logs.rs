//! Handler of `/containerLogs/{namespace}/{pod}/{container}` (spec 04 §5.3).
//!
//! The response starts before the first line is available; its body streams what the log reader writes, as fast as the
//! client reads. A client that reads nothing for [`STALL`] is disconnected.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, HttpBody},
    http::StatusCode,
    response::Response,
};
use bytes::Bytes;
use futures::{Sink, SinkExt, future::BoxFuture};
use http_body::Frame;
use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::PollSemaphore;

use crate::{
    ports::{ContainerLogs, LogError, LogQuery, LogSource, LogStream},
    routing::ContainerPath,
    streaming::{CallerLimit, Permit, bare, busy, line},
};

/// Chunks in transit to the client, in this queue or in the connection, which would buffer a megabyte. A chunk is as
/// large as the log reader's output buffer.
const PIECES: u32 = 4;
/// Stall timeout of a client. kubelet ends every response after four hours instead; here a follower that keeps reading
/// may stay (spec 04 §11).
const STALL: Duration = Duration::from_secs(300);
/// Maximum number of logs that one caller may follow at a time (spec 04 §11).
pub const FOLLOWS: usize = 256;

/// Log request and its caller.
pub struct LogRequest<'a> {
    /// The container.
    pub path: &'a ContainerPath,
    /// Query string, percent-encoded.
    pub query: Option<&'a str>,
    /// User name of the caller.
    pub caller: &'a str,
    /// Limit of followed logs per caller.
    pub follows: &'a Arc<CallerLimit>,
}

/// Responds with a container's log.
pub async fn read(logs: &Arc<dyn ContainerLogs>, split_streams: bool, asked: LogRequest<'_>) -> Response {
    let LogRequest { path, query, caller, follows } = asked;
    let query = match parse(query.unwrap_or_default()) {
        Ok(query) => query,
        Err(QueryError::Decode) => {
            return refuse(StatusCode::BAD_REQUEST, r#"{"message": "Unable to decode query."}"#, "bad-query");
        }
        Err(QueryError::Invalid) => {
            return refuse(StatusCode::UNPROCESSABLE_ENTITY, r#"{"message": "Invalid request."}"#, "invalid-query");
        }
    };
    let (namespace, pod) = (&path.pod.namespace, &path.pod.pod);
    let source = match logs.find(namespace, pod, &path.container).await {
        Ok(source) => source,
        Err(LogError::NotFound(text)) => return refuse(StatusCode::NOT_FOUND, &text, "not-found"),
        Err(LogError::Other(text)) => return refuse(StatusCode::BAD_REQUEST, &text, "bad-request"),
    };
    if !split_streams && let Some(stream) = query.stream.filter(|stream| *stream != LogStream::All) {
        let text = format!(
            "unable to return the given log stream: \"{}\". Please enable PodLogsQuerySplitStreams feature gate in kubelet",
            stream.name()
        );
        return refuse(StatusCode::BAD_REQUEST, &text, "feature-gate");
    }
    let instance = match logs.instance(&source, &path.container, query.previous) {
        Ok(instance) => instance,
        Err(text) => return refuse(StatusCode::BAD_REQUEST, &text, "no-instance"),
    };
    let permit = if query.follow { follows.take(caller) } else { None };
    if query.follow && permit.is_none() {
        let text = format!("too many followed logs: limit of {caller:?} is {FOLLOWS}");
        return busy(line(StatusCode::TOO_MANY_REQUESTS, "too-many-follows", &text));
    }
    stream(logs.clone(), instance, query, permit)
}

fn refuse(status: StatusCode, body: &str, code: &'static str) -> Response {
    bare(status, code, body)
}

fn stream(logs: Arc<dyn ContainerLogs>, instance: LogSource, query: LogQuery, permit: Option<Permit>) -> Response {
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut out = LogWriter::new(sender.clone());
    let reading = async move {
        if let Err(why) = logs.read(&instance, &query, &mut out).await {
            // The status is already sent: the text is appended for people, and the missing end of the body signals
            // programs that the log is incomplete.
            let _ = out.send(why.clone().into_bytes()).await;
            out.sent().await;
            let _ = sender.send(Err(io::Error::other(why))); // the client may be gone
        }
    };
    Response::new(Body::new(LogBody { receiver, reading: Some(Box::pin(reading)), _permit: permit }))
}

/// Response body fed by the log reader. The task that sends the body also polls the reader: a separate task would be
/// woken on another CPU for each chunk, which costs more than the chunk.
struct LogBody {
    receiver: mpsc::UnboundedReceiver<io::Result<Bytes>>,
    /// Log reader; `None` once it has ended.
    reading: Option<BoxFuture<'static, ()>>,
    /// Permit of a follower.
    _permit: Option<Permit>,
}

impl HttpBody for LogBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let mut piece = self.receiver.poll_recv(context);
        if piece.is_pending()
            && let Some(reading) = &mut self.reading
        {
            if reading.as_mut().poll(context).is_ready() {
                self.reading = None;
            }
            piece = self.receiver.poll_recv(context);
        }
        piece.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

/// Sink of the log reader: accepts a chunk once a permit is available.
struct LogWriter {
    sender: mpsc::UnboundedSender<io::Result<Bytes>>,
    room: PollSemaphore,
    /// Permit for the next chunk.
    next: Option<OwnedSemaphorePermit>,
    stall: Pin<Box<tokio::time::Sleep>>,
    waits: bool,
}

impl LogWriter {
    fn new(sender: mpsc::UnboundedSender<io::Result<Bytes>>) -> Self {
        let room = PollSemaphore::new(Arc::new(Semaphore::new(PIECES as usize)));
        Self { sender, room, next: None, stall: Box::pin(tokio::time::sleep(STALL)), waits: false }
    }

    /// Waits until all chunks are sent: an error queued after them closes the connection and would discard what is
    /// still buffered there.
    async fn sent(&self) {
        let room = self.room.clone_inner();
        let _ = tokio::time::timeout(STALL, room.acquire_many(PIECES)).await; // the connection is closed in either case
    }
}

/// Chunk that releases its permit when the connection has sent it.
struct LogChunk {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for LogChunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Sink<Vec<u8>> for LogWriter {
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.next.is_some() {
            return Poll::Ready(Ok(()));
        }
        if let Poll::Ready(room) = self.room.poll_acquire(context) {
            self.waits = false;
            self.next = room;
            return Poll::Ready(self.next.as_ref().map(drop).ok_or_else(gone));
        }
        if !self.waits {
            self.waits = true;
            let until = tokio::time::Instant::now() + STALL;
            self.stall.as_mut().reset(until);
        }
        ready!(self.stall.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn start_send(mut self: Pin<&mut Self>, bytes: Vec<u8>) -> io::Result<()> {
        let piece = LogChunk { bytes, _room: self.next.take().ok_or_else(gone)? };
        self.sender.send(Ok(Bytes::from_owner(piece))).map_err(|_| gone())
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn gone() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

/// Rejection of a log query: 400 for `Decode`, 422 for `Invalid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueryError {
    /// A value cannot be parsed.
    Decode,
    /// A value is out of range, or parameters exclude each other.
    Invalid,
}

fn parse(query: &str) -> Result<LogQuery, QueryError> {
    let value = |name: &str| {
        form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
    };
    // Only "0" and "false" are false; a parameter without a value is true.
    let flag = |name| value(name).is_some_and(|v| v != "0" && !v.eq_ignore_ascii_case("false"));
    let number = |text: Option<String>| text.map(|v| v.parse::<i64>().map_err(|_| QueryError::Decode)).transpose();
    let tail = match value("tail").filter(|tail| !tail.is_empty()) {
        Some(all) if all == "all" => None,
        Some(tail) => number(Some(tail))?,
        None => number(value("tailLines"))?,
    };
    let (since, limit) = (number(value("sinceSeconds"))?, number(value("limitBytes"))?);
    let since_time = value("sinceTime").map(|v| v.parse::<Timestamp>().map_err(|_| QueryError::Decode)).transpose()?;
    let stream = match value("stream").as_deref() {
        None => None,
        Some("All") => Some(LogStream::All),
        Some("Stdout") => Some(LogStream::Stdout),
        Some("Stderr") => Some(LogStream::Stderr),
        Some(_) => return Err(QueryError::Invalid),
    };
    let is_one_stream = stream.is_some_and(|stream| stream != LogStream::All);
    let out_of_range = tail.is_some_and(|n| n < 0) || since.is_some_and(|n| n < 1) || limit.is_some_and(|n| n < 1);
    if out_of_range || (since.is_some() && since_time.is_some()) || (is_one_stream && tail.is_some()) {
        return Err(QueryError::Invalid);
    }
    Ok(LogQuery {
        follow: flag("follow"),
        previous: flag("previous"),
        timestamps: flag("timestamps"),
        tail: tail.and_then(|n| u64::try_from(n).ok()),
        since_seconds: since,
        since_time,
        limit_bytes: limit.and_then(|n| u64::try_from(n).ok()),
        stream,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read_as_the_reference_reads_them() {
        // AC-04-13, AC-04-14
        let plain = LogQuery::default();
        for (query, wanted) in [
            ("", Ok(plain.clone())),
            ("follow&previous=0&timestamps=FALSE", Ok(LogQuery { follow: true, ..plain.clone() })),
            ("follow=&timestamps=no", Ok(LogQuery { follow: true, timestamps: true, ..plain.clone() })),
            ("tailLines=5", Ok(LogQuery { tail: Some(5), ..plain.clone() })),
            ("tailLines=5&tail=7", Ok(LogQuery { tail: Some(7), ..plain.clone() })),
            ("tailLines=5&tail=all", Ok(plain.clone())),
            ("tail=-1", Err(QueryError::Invalid)),
            ("tailLines=x", Err(QueryError::Decode)),
            ("tailLines=", Err(QueryError::Decode)),
            ("sinceSeconds=0", Err(QueryError::Invalid)),
            ("sinceSeconds=1&sinceTime=2020-01-01T00:00:00Z", Err(QueryError::Invalid)),
            ("sinceTime=yesterday", Err(QueryError::Decode)),
            ("limitBytes=0", Err(QueryError::Invalid)),
            ("limitBytes=99999999999999999999", Err(QueryError::Decode)),
            ("stream=Stdout", Ok(LogQuery { stream: Some(LogStream::Stdout), ..plain.clone() })),
            ("stream=stdout", Err(QueryError::Invalid)),
            ("stream=Stderr&tailLines=1", Err(QueryError::Invalid)),
            ("stream=All&tailLines=1", Ok(LogQuery { stream: Some(LogStream::All), tail: Some(1), ..plain })),
        ] {
            assert_eq!(parse(query), wanted, "{query}");
        }
    }
}
