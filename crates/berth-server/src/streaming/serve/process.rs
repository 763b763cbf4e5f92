//! The streams of a process, as all protocols need them.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::ports::targets::{Reader, Writer};

/// How long a client that has a terminal may take to tell its size before the process starts without. Clients tell it
/// at once.
pub const FIRST_SIZE: Duration = Duration::from_millis(50);
/// Bytes read at once, at first and where there are many.
const IDLE: usize = 4 << 10;
const BUSY: usize = 32 << 10;

/// What a process prints, in pieces as they come.
pub struct Output {
    from: Option<Reader>,
    buffer: BytesMut,
    size: usize,
}

impl Output {
    /// Over a stream; none has ended.
    pub fn new(from: Option<Reader>) -> Self {
        Self { from, buffer: BytesMut::new(), size: IDLE }
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.from.is_none()
    }

    /// The next piece; `None` at the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        let from = self.from.as_mut()?;
        self.buffer.reserve(self.size);
        match from.read_buf(&mut self.buffer).await {
            Ok(count @ 1..) => {
                self.size = if count >= self.size { BUSY } else { IDLE };
                Some(self.buffer.split().freeze())
            }
            // A stream that cannot be read has ended: how the process did is told otherwise.
            Ok(_) | Err(_) => {
                self.from = None;
                None
            }
        }
    }
}

/// What a process reads. One that reads no more is no reason to end: what comes for it is dropped.
pub struct Input(Option<Writer>);

impl Input {
    /// Over a stream.
    pub fn new(to: Option<Writer>) -> Self {
        Self(to)
    }

    /// Passes bytes on; waits where the process does not read.
    pub async fn write(&mut self, bytes: &[u8]) {
        let Some(to) = &mut self.0 else { return };
        if to.write_all(bytes).await.is_err() || to.flush().await.is_err() {
            self.0 = None;
        }
    }

    /// Nothing more comes.
    pub fn end(&mut self) {
        self.0 = None;
    }
}
