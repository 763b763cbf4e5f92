//! SPDY connection: driver task, stream table, writer queue, idle timeout, and keep-alive pings.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    Headers, SpdyError, StreamId,
    frames::{self, Decoder, Encoder, ResetStatus, SpdyEvent},
    stream::{QUEUE, SpdyStream, StreamClosed, StreamEvent, cost},
};

/// Capacity of the writer queue in frames; 256 KiB with data frames of 32 KiB.
const WAITING: u32 = 8;
/// Read buffer size, in bytes.
const READ: usize = 64 << 10;
/// Data shorter than this is copied out of the read buffer, so that it does not keep the buffer alive.
const COPIED: usize = 4 << 10;
/// Timeout for the last frames in either direction when the connection ends.
const FAREWELL: Duration = Duration::from_secs(10);

/// Side of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens streams, with odd IDs.
    Client,
    /// Accepts streams.
    Server,
}

/// Timeouts and maximum number of streams of one SPDY connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Idle timeout: the connection is closed after this long without a frame; `None` for never.
    pub idle: Option<Duration>,
    /// Interval of keep-alive pings; `None` for never.
    pub ping: Option<Duration>,
    /// Maximum number of open streams; further streams are refused.
    pub streams: usize,
}

/// Error that ended a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The peer violated the protocol.
    #[error(transparent)]
    Protocol(#[from] SpdyError),
    /// I/O error of the transport.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Idle timeout.
    #[error("the connection was idle for {0:?}")]
    Idle(Duration),
}

/// Frame to write.
pub(super) enum OutgoingFrame {
    Open(StreamId, Headers),
    Accept(StreamId),
    Data { stream: StreamId, bytes: Bytes, fin: bool },
    Reset(StreamId, ResetStatus),
    Ping(u32),
}

/// Entry of the writer queue.
pub(super) struct QueuedFrame {
    frame: OutgoingFrame,
    /// Permit of the queue bound ([`WAITING`]); a reset has none.
    _place: Option<OwnedSemaphorePermit>,
}

struct StreamEntry {
    arrived: mpsc::UnboundedSender<StreamEvent>,
    room: Arc<Semaphore>,
    replied: Option<oneshot::Sender<()>>,
    peer_finished: bool,
    we_finished: bool,
}

#[derive(Default)]
struct StreamTable {
    streams: HashMap<StreamId, StreamEntry>,
    /// Highest stream ID opened by the peer.
    last_of_peer: StreamId,
    /// Highest stream ID opened by us.
    last_of_ours: StreamId,
    over: bool,
}

/// State shared by streams, connection, and driver task.
pub(super) struct SessionState {
    role: Role,
    limit: usize,
    table: Mutex<StreamTable>,
    /// A single queue for all frames, so that a reset never overtakes data sent before it.
    outgoing: mpsc::UnboundedSender<QueuedFrame>,
    /// Semaphore that bounds the queue.
    queue_permits: Arc<Semaphore>,
    closed: CancellationToken,
    last_frame: Mutex<Instant>,
}

impl SessionState {
    fn table(&self) -> MutexGuard<'_, StreamTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn send(&self, frame: OutgoingFrame) -> Result<(), StreamClosed> {
        let place = self.queue_permits.clone().acquire_owned().await.map_err(|_| StreamClosed::Gone)?;
        self.outgoing.send(QueuedFrame { frame, _place: Some(place) }).map_err(|_| StreamClosed::Gone)
    }

    /// Queues a reset without waiting for a permit: destructors send resets, and there is at most one per stream.
    pub(super) fn send_reset(&self, stream: StreamId, status: ResetStatus) {
        let frame = OutgoingFrame::Reset(stream, status);
        let _ = self.outgoing.send(QueuedFrame { frame, _place: None }); // fails only when the connection has ended
    }

    /// Records that we send nothing more on this stream.
    pub(super) fn finished(&self, stream: StreamId) {
        let mut table = self.table();
        if let Some(entry) = table.streams.get_mut(&stream) {
            entry.we_finished = true;
            if entry.peer_finished {
                table.streams.remove(&stream);
            }
        }
    }

    /// Removes a stream that has no reader any more; returns whether the peer must be notified with a reset.
    pub(super) fn forget(&self, stream: StreamId) -> bool {
        self.table().streams.remove(&stream).is_some()
    }

    fn record_activity(&self) {
        *self.last_frame.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn enter(self: &Arc<Self>, table: &mut StreamTable, id: StreamId, headers: Headers, ours: bool) -> SpdyStream {
        let (arrived, queue) = mpsc::unbounded_channel();
        let room = Arc::new(Semaphore::new(QUEUE));
        let (reply, replied) = oneshot::channel();
        let entry = StreamEntry {
            arrived,
            room: room.clone(),
            replied: ours.then_some(reply),
            peer_finished: false,
            we_finished: false,
        };
        table.streams.insert(id, entry);
        SpdyStream {
            id,
            headers,
            arrived: queue,
            capacity: room,
            replied: ours.then_some(replied),
            shared: self.clone(),
            ended: None,
            finished: false,
        }
    }
}

/// Handle of a connection: opens streams and closes the connection. Dropping it closes the connection.
pub struct SpdyConnection(Arc<SessionState>);

impl SpdyConnection {
    /// Opens a stream, without waiting for the peer to accept it.
    ///
    /// # Errors
    /// If the connection ended, or has reached its stream limit.
    pub async fn open(&self, headers: Headers) -> Result<SpdyStream, StreamClosed> {
        // The queue permit is acquired before the ID is assigned: IDs must reach the wire in order.
        let place = self.0.queue_permits.clone().acquire_owned().await.map_err(|_| StreamClosed::Gone)?;
        let mut table = self.0.table();
        if table.over || table.streams.len() >= self.0.limit {
            return Err(StreamClosed::Gone);
        }
        let id = match (self.0.role, table.last_of_ours) {
            (Role::Client, 0) => 1,
            (Role::Server, 0) => 2,
            (_, last) => last + 2,
        };
        table.last_of_ours = id;
        let stream = self.0.enter(&mut table, id, headers.clone(), true);
        let queued = QueuedFrame { frame: OutgoingFrame::Open(id, headers), _place: Some(place) };
        self.0.outgoing.send(queued).map_err(|_| StreamClosed::Gone)?;
        Ok(stream)
    }

    /// Waits until all queued frames have been written to the transport.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn flushed(&self) -> Result<(), StreamClosed> {
        // All permits are available only while the queue is empty.
        self.0.queue_permits.acquire_many(WAITING).await.map(drop).map_err(|_| StreamClosed::Gone)
    }

    /// Closes the connection after the queued frames are written.
    pub fn close(&self) {
        self.0.closed.cancel();
    }
}

impl Drop for SpdyConnection {
    fn drop(&mut self) {
        self.close();
    }
}

/// Streams opened by the peer.
pub type IncomingStreams = mpsc::Receiver<SpdyStream>;

/// Driver of a connection; does nothing until [`ConnectionDriver::run`] is polled.
pub struct ConnectionDriver<T> {
    io: T,
    shared: Arc<SessionState>,
    limits: ConnectionLimits,
    outgoing: mpsc::UnboundedReceiver<QueuedFrame>,
    incoming: mpsc::Sender<SpdyStream>,
}

/// Creates a connection over `io`.
pub fn session<T>(
    io: T,
    role: Role,
    limits: ConnectionLimits,
) -> (SpdyConnection, IncomingStreams, ConnectionDriver<T>) {
    let (to_wire, outgoing) = mpsc::unbounded_channel();
    let (to_server, incoming) = mpsc::channel(limits.streams.max(1));
    let shared = Arc::new(SessionState {
        role,
        limit: limits.streams,
        table: Mutex::default(),
        outgoing: to_wire,
        queue_permits: Arc::new(Semaphore::new(WAITING as usize)),
        closed: CancellationToken::new(),
        last_frame: Mutex::new(Instant::now()),
    });
    let driver = ConnectionDriver { io, shared: shared.clone(), limits, outgoing, incoming: to_server };
    (SpdyConnection(shared), incoming, driver)
}

impl<T: AsyncRead + AsyncWrite + Send> ConnectionDriver<T> {
    /// Runs the connection until either side ends it.
    ///
    /// # Errors
    /// The error that ended it; a close by either side is no error.
    pub async fn run(self) -> Result<(), ConnectionError> {
        let Self { io, shared, limits, outgoing, incoming } = self;
        let (reader, writer) = tokio::io::split(io);
        let mut writing = std::pin::pin!(write(writer, &shared, outgoing));
        let watching = async {
            tokio::select! {
                biased;
                () = shared.closed.cancelled() => Ok(()),
                ended = read(reader, &shared, incoming) => ended,
                ended = idle(&shared, limits.idle) => ended,
                () = ping(&shared, limits.ping) => Ok(()),
            }
        };
        let mut watching = std::pin::pin!(watching);
        let ended = tokio::select! {
            ended = &mut writing => {
                if ended.is_err() {
                    // A peer that reads nothing more may still have sent the reason before it closed: read it.
                    let _ = timeout(FAREWELL, watching).await;
                }
                return finish(&shared, ended);
            }
            ended = &mut watching => ended,
        };
        shared.closed.cancel();
        let _ = timeout(FAREWELL, writing).await; // best effort
        finish(&shared, ended)
    }
}

/// Closes all streams and semaphores, which wakes up every waiter.
fn finish(shared: &SessionState, ended: Result<(), ConnectionError>) -> Result<(), ConnectionError> {
    shared.closed.cancel();
    shared.queue_permits.close();
    let mut table = shared.table();
    table.over = true;
    for (_, entry) in table.streams.drain() {
        entry.room.close();
    }
    ended
}

async fn idle(shared: &SessionState, limit: Option<Duration>) -> Result<(), ConnectionError> {
    let Some(limit) = limit else { return std::future::pending().await };
    loop {
        let due = *shared.last_frame.lock().unwrap_or_else(PoisonError::into_inner) + limit;
        if due <= Instant::now() {
            return Err(ConnectionError::Idle(limit));
        }
        sleep_until(due).await;
    }
}

async fn ping(shared: &SessionState, every: Option<Duration>) {
    let Some(every) = every else { return std::future::pending().await };
    let mut id = if shared.role == Role::Client { 1u32 } else { 2 };
    loop {
        sleep(every).await;
        if shared.send(OutgoingFrame::Ping(id)).await.is_err() {
            return std::future::pending().await; // the writer reports the error
        }
        id = id.wrapping_add(2);
    }
}

async fn read<T: AsyncRead>(
    mut reader: ReadHalf<T>,
    shared: &Arc<SessionState>,
    incoming: mpsc::Sender<SpdyStream>,
) -> Result<(), ConnectionError> {
    let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
    loop {
        while let Some(event) = decoder.decode(&mut input)? {
            shared.record_activity();
            take(shared, &incoming, event).await;
        }
        input.reserve(READ);
        if reader.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
}

/// Applies an event of the peer.
async fn take(shared: &Arc<SessionState>, incoming: &mpsc::Sender<SpdyStream>, event: SpdyEvent) {
    match event {
        SpdyEvent::SynStream { stream, fin, headers } => {
            opened(shared, incoming, stream, headers);
            if fin {
                end(shared, stream);
            }
        }
        SpdyEvent::SynReply { stream, fin } => {
            let replied = shared.table().streams.get_mut(&stream).and_then(|entry| entry.replied.take());
            if let Some(replied) = replied {
                let _ = replied.send(()); // the receiver may be dropped
            }
            if fin {
                end(shared, stream);
            }
        }
        SpdyEvent::Headers { stream, fin } => {
            if fin {
                end(shared, stream);
            }
        }
        SpdyEvent::Data { stream, bytes, fin } => {
            data(shared, stream, bytes).await;
            if fin {
                end(shared, stream);
            }
        }
        SpdyEvent::Reset { stream, status } => {
            if let Some(entry) = shared.table().streams.remove(&stream) {
                let _ = entry.arrived.send(StreamEvent::Reset(status)); // the receiver may be dropped
            }
        }
        // IDs of the peer's parity are its pings, which we return; IDs of our parity are replies to ours.
        SpdyEvent::Ping(id) => {
            if (id % 2 == 1) == (shared.role == Role::Server) {
                let _ = shared.send(OutgoingFrame::Ping(id)).await; // the writer reports the error
            }
        }
        SpdyEvent::GoAway | SpdyEvent::Ignored => {}
    }
}

fn opened(shared: &Arc<SessionState>, incoming: &mpsc::Sender<SpdyStream>, id: StreamId, headers: Headers) {
    let mut table = shared.table();
    let in_order = (id % 2 == 1) == (shared.role == Role::Server) && id > table.last_of_peer;
    if !in_order {
        drop(table);
        return shared.send_reset(id, ResetStatus::ProtocolError);
    }
    table.last_of_peer = id;
    if table.streams.len() >= shared.limit {
        drop(table);
        return shared.send_reset(id, ResetStatus::RefusedStream);
    }
    let stream = shared.enter(&mut table, id, headers, false);
    drop(table);
    // On failure (queue full or no receiver) the stream is dropped, which resets it.
    let _ = incoming.try_send(stream);
}

/// Appends data to a stream's queue and waits while the queue is full. Data of unknown streams is dropped.
async fn data(shared: &SessionState, id: StreamId, bytes: Bytes) {
    if bytes.is_empty() {
        return;
    }
    let found = {
        let table = shared.table();
        table.streams.get(&id).filter(|entry| !entry.peer_finished).map(|e| (e.arrived.clone(), e.room.clone()))
    };
    let Some((arrived, room)) = found else { return };
    let Ok(permits) = room.acquire_many(cost(bytes.len())).await else { return }; // no reader
    permits.forget();
    let bytes = if bytes.len() < COPIED { Bytes::copy_from_slice(&bytes) } else { bytes };
    let _ = arrived.send(StreamEvent::Data(bytes)); // fails only without a reader
}

fn end(shared: &SessionState, id: StreamId) {
    let mut table = shared.table();
    let Some(entry) = table.streams.get_mut(&id) else { return };
    if !std::mem::replace(&mut entry.peer_finished, true) {
        let _ = entry.arrived.send(StreamEvent::End); // the receiver may be dropped
    }
    if entry.we_finished {
        table.streams.remove(&id);
    }
}

async fn write<T: AsyncWrite>(
    mut writer: WriteHalf<T>,
    shared: &SessionState,
    mut outgoing: mpsc::UnboundedReceiver<QueuedFrame>,
) -> Result<(), ConnectionError> {
    let (mut encoder, mut buffer) = (Encoder::default(), BytesMut::new());
    loop {
        let queued = tokio::select! {
            biased;
            () = shared.closed.cancelled() => break,
            Some(queued) = outgoing.recv() => queued,
        };
        shared.record_activity();
        put(&mut writer, &mut encoder, &mut buffer, queued.frame).await?;
        if outgoing.is_empty() {
            writer.flush().await?;
        }
    }
    outgoing.close();
    while let Ok(queued) = outgoing.try_recv() {
        put(&mut writer, &mut encoder, &mut buffer, queued.frame).await?;
    }
    encode_shutdown(shared, &mut buffer);
    writer.write_all_buf(&mut buffer).await?;
    writer.shutdown().await?;
    Ok(())
}

fn encode_shutdown(shared: &SessionState, buffer: &mut BytesMut) {
    let table = shared.table();
    for stream in table.streams.keys() {
        frames::reset(*stream, ResetStatus::Cancel, buffer);
    }
    frames::go_away(table.last_of_peer, buffer);
}

async fn put<W: AsyncWrite + Unpin>(
    writer: &mut W,
    encoder: &mut Encoder,
    buffer: &mut BytesMut,
    frame: OutgoingFrame,
) -> Result<(), ConnectionError> {
    buffer.clear();
    let mut payload = Bytes::new();
    match frame {
        OutgoingFrame::Open(stream, headers) => encoder.syn_stream(stream, &headers, buffer)?,
        OutgoingFrame::Accept(stream) => encoder.syn_reply(stream, buffer)?,
        OutgoingFrame::Reset(stream, status) => frames::reset(stream, status, buffer),
        OutgoingFrame::Ping(id) => frames::ping(id, buffer),
        OutgoingFrame::Data { stream, bytes, fin } => {
            frames::data_head(stream, bytes.len(), fin, buffer);
            payload = bytes;
        }
    }
    if payload.len() < COPIED {
        buffer.extend_from_slice(&payload);
        payload.clear();
    }
    writer.write_all_buf(buffer).await?;
    writer.write_all_buf(&mut payload).await?;
    Ok(())
}
