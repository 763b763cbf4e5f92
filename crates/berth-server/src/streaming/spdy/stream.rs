//! SPDY stream: bounded receive queue, and a sender into the connection's writer queue.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::{
    Headers, StreamId,
    frames::{CHUNK, ResetStatus},
    session::{OutgoingFrame, SessionState},
};

/// Capacity of a stream's receive queue, in bytes.
pub(super) const QUEUE: usize = 256 << 10;
/// Overhead of a chunk in bytes, added to its length so that the queue also bounds many small chunks.
const PIECE: usize = 64;

/// Reason why a stream is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamClosed {
    /// The peer reset the stream with this status.
    #[error("the stream was reset with status {0}")]
    Reset(u32),
    /// The connection ended, or the stream was already finished.
    #[error("the connection ended")]
    Gone,
}

/// Received event of a stream.
pub(super) enum StreamEvent {
    Data(Bytes),
    End,
    Reset(u32),
}

/// Permits that a chunk takes in the receive queue.
pub(super) fn cost(length: usize) -> u32 {
    u32::try_from((length + PIECE).min(QUEUE)).unwrap_or(u32::MAX)
}

/// SPDY stream. Dropping it resets it, unless both sides have finished.
pub struct SpdyStream {
    pub(super) id: StreamId,
    pub(super) headers: Headers,
    pub(super) arrived: mpsc::UnboundedReceiver<StreamEvent>,
    pub(super) capacity: Arc<Semaphore>,
    pub(super) replied: Option<oneshot::Receiver<()>>,
    pub(super) shared: Arc<SessionState>,
    pub(super) ended: Option<Result<(), StreamClosed>>,
    pub(super) finished: bool,
}

impl SpdyStream {
    /// Stream ID on the wire.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Headers with which the stream was opened.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Waits until the peer accepts a stream that we opened.
    ///
    /// # Errors
    /// If the peer refused it, or the connection ended.
    pub async fn accepted(&mut self) -> Result<(), StreamClosed> {
        let Some(replied) = self.replied.take() else { return Ok(()) };
        match replied.await {
            Ok(()) => Ok(()),
            Err(_) => match self.arrived.try_recv() {
                Ok(StreamEvent::Reset(status)) => Err(StreamClosed::Reset(status)),
                _ => Err(StreamClosed::Gone),
            },
        }
    }

    /// Accepts a stream that the peer opened.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn accept(&self) -> Result<(), StreamClosed> {
        self.sender().accept().await
    }

    /// Reads the next chunk; `None` once the peer has finished. Cancel-safe.
    ///
    /// # Errors
    /// If the stream was reset or the connection ended.
    pub async fn read(&mut self) -> Result<Option<Bytes>, StreamClosed> {
        if let Some(ended) = self.ended {
            return ended.map(|()| None);
        }
        let ended = match self.arrived.recv().await {
            Some(StreamEvent::Data(bytes)) => {
                self.capacity.add_permits(cost(bytes.len()) as usize);
                return Ok(Some(bytes));
            }
            Some(StreamEvent::End) => Ok(()),
            Some(StreamEvent::Reset(status)) => Err(StreamClosed::Reset(status)),
            None => Err(StreamClosed::Gone),
        };
        self.ended = Some(ended);
        ended.map(|()| None)
    }

    /// Sends bytes in frames of at most 32 KiB; each waits for a slot of the writer queue.
    ///
    /// # Errors
    /// If the stream was finished, or the connection ended.
    pub async fn write(&self, bytes: Bytes) -> Result<(), StreamClosed> {
        if self.finished { Err(StreamClosed::Gone) } else { self.sender().write(bytes).await }
    }

    /// Half-closes the stream: nothing more is sent. Repeated calls do nothing.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn finish(&mut self) -> Result<(), StreamClosed> {
        if std::mem::replace(&mut self.finished, true) {
            return Ok(());
        }
        self.sender().finish().await
    }

    /// Returns a separate sender, to write while the stream is being read. Do not call [`SpdyStream::finish`] then.
    pub fn sender(&self) -> Sender {
        Sender { id: self.id, shared: self.shared.clone() }
    }

    /// Resets the stream for both sides.
    pub fn reset(self) {} // by drop
}

/// Sending half of a stream. Dropping it does not affect the stream.
#[derive(Clone)]
pub struct Sender {
    id: StreamId,
    shared: Arc<SessionState>,
}

impl Sender {
    /// Accepts the stream, as [`SpdyStream::accept`] does.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn accept(&self) -> Result<(), StreamClosed> {
        self.shared.send(OutgoingFrame::Accept(self.id)).await
    }

    /// Sends bytes in frames of at most 32 KiB; each waits for a slot of the writer queue.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn write(&self, mut bytes: Bytes) -> Result<(), StreamClosed> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(CHUNK));
            self.shared.send(OutgoingFrame::Data { stream: self.id, bytes: piece, fin: false }).await?;
        }
        Ok(())
    }

    /// Half-closes the stream: nothing more is sent.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn finish(self) -> Result<(), StreamClosed> {
        self.shared.send(OutgoingFrame::Data { stream: self.id, bytes: Bytes::new(), fin: true }).await?;
        self.shared.finished(self.id);
        Ok(())
    }
}

impl Drop for SpdyStream {
    fn drop(&mut self) {
        self.capacity.close(); // wakes up a task that waits to queue data
        if self.shared.forget(self.id) {
            self.shared.send_reset(self.id, ResetStatus::Cancel);
        }
    }
}
