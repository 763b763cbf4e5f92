//! One stream of a connection: a bounded queue in, a share of the writer out.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::{
    Headers, StreamId,
    frames::{CHUNK, ResetStatus},
    session::{Outgoing, Shared},
};

/// Bytes that may wait in a stream's queue.
pub(super) const QUEUE: usize = 256 << 10;
/// What a piece of data costs beyond its bytes, so that many small ones are bounded too.
const PIECE: usize = 64;

/// Why a stream can be used no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The peer ended it, with this status.
    #[error("the stream was reset with status {0}")]
    Reset(u32),
    /// The connection ended first.
    #[error("the connection ended")]
    Gone,
}

/// What came in on a stream.
pub(super) enum Arrived {
    Data(Bytes),
    End,
    Reset(u32),
}

/// The cost of a piece of data in a queue.
pub(super) fn cost(length: usize) -> u32 {
    u32::try_from((length + PIECE).min(QUEUE)).unwrap_or(u32::MAX)
}

/// One stream. Dropping it resets it, unless both sides have finished.
pub struct Stream {
    pub(super) id: StreamId,
    pub(super) headers: Headers,
    pub(super) arrived: mpsc::UnboundedReceiver<Arrived>,
    pub(super) room: Arc<Semaphore>,
    pub(super) replied: Option<oneshot::Receiver<()>>,
    pub(super) shared: Arc<Shared>,
    pub(super) ended: Option<Result<(), Closed>>,
    pub(super) finished: bool,
}

impl Stream {
    /// Its number on the wire.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// What it was opened for.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Waits until the peer has accepted a stream we opened.
    ///
    /// # Errors
    /// If it was refused, or the connection ended.
    pub async fn accepted(&mut self) -> Result<(), Closed> {
        let Some(replied) = self.replied.take() else { return Ok(()) };
        match replied.await {
            Ok(()) => Ok(()),
            Err(_) => match self.arrived.try_recv() {
                Ok(Arrived::Reset(status)) => Err(Closed::Reset(status)),
                _ => Err(Closed::Gone),
            },
        }
    }

    /// Accepts a stream the peer opened.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn accept(&self) -> Result<(), Closed> {
        self.sender().accept().await
    }

    /// The next bytes; `None` once the peer has finished. Cancel-safe.
    ///
    /// # Errors
    /// If the stream was reset or the connection ended.
    pub async fn read(&mut self) -> Result<Option<Bytes>, Closed> {
        if let Some(ended) = self.ended {
            return ended.map(|()| None);
        }
        let ended = match self.arrived.recv().await {
            Some(Arrived::Data(bytes)) => {
                self.room.add_permits(cost(bytes.len()) as usize);
                return Ok(Some(bytes));
            }
            Some(Arrived::End) => Ok(()),
            Some(Arrived::Reset(status)) => Err(Closed::Reset(status)),
            None => Err(Closed::Gone),
        };
        self.ended = Some(ended);
        ended.map(|()| None)
    }

    /// Sends bytes, in frames of at most 32 KiB, each waiting for its turn.
    ///
    /// # Errors
    /// If the stream was finished, or the connection ended.
    pub async fn write(&self, bytes: Bytes) -> Result<(), Closed> {
        if self.finished { Err(Closed::Gone) } else { self.sender().write(bytes).await }
    }

    /// Says that nothing more will be sent. Repeating it does nothing.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn finish(&mut self) -> Result<(), Closed> {
        if std::mem::replace(&mut self.finished, true) {
            return Ok(());
        }
        self.sender().finish().await
    }

    /// Another handle, for whoever writes while the stream is read. Then this one is not to be finished.
    pub fn sender(&self) -> Sender {
        Sender { id: self.id, shared: self.shared.clone() }
    }

    /// Ends the stream for both sides.
    pub fn reset(self) {} // by being dropped
}

/// The sending side of a stream. Dropping it does nothing to the stream.
#[derive(Clone)]
pub struct Sender {
    id: StreamId,
    shared: Arc<Shared>,
}

impl Sender {
    /// As [`Stream::accept`].
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn accept(&self) -> Result<(), Closed> {
        self.shared.send(Outgoing::Accept(self.id)).await
    }

    /// Sends bytes, in frames of at most 32 KiB, each waiting for its turn.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn write(&self, mut bytes: Bytes) -> Result<(), Closed> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(CHUNK));
            self.shared.send(Outgoing::Data { stream: self.id, bytes: piece, fin: false }).await?;
        }
        Ok(())
    }

    /// Says that nothing more will be sent.
    ///
    /// # Errors
    /// If the connection ended.
    pub async fn finish(self) -> Result<(), Closed> {
        self.shared.send(Outgoing::Data { stream: self.id, bytes: Bytes::new(), fin: true }).await?;
        self.shared.finished(self.id);
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.room.close(); // who waits to give us data waits no more
        if self.shared.forget(self.id) {
            self.shared.send_reset(self.id, ResetStatus::Cancel);
        }
    }
}
