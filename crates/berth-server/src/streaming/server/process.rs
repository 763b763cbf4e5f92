//! Input and output of a process, as used by all stream protocols.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::ports::stream_targets::{Reader, Writer};

/// Timeout for the first terminal size before the process starts without one. Clients send it immediately.
pub const FIRST_SIZE: Duration = Duration::from_millis(50);
/// Read buffer size in bytes, for an idle and for a busy stream.
const IDLE: usize = 4 << 10;
const BUSY: usize = 32 << 10;

/// Output of a process, read in chunks.
pub struct OutputReader {
    from: Option<Reader>,
    buffer: BytesMut,
    size: usize,
}

impl OutputReader {
    /// Wraps a stream; `None` is at its end.
    pub fn new(from: Option<Reader>) -> Self {
        Self { from, buffer: BytesMut::new(), size: IDLE }
    }

    /// Whether the output has ended.
    pub fn is_over(&self) -> bool {
        self.from.is_none()
    }

    /// Next chunk; `None` at the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        let from = self.from.as_mut()?;
        self.buffer.reserve(self.size);
        match from.read_buf(&mut self.buffer).await {
            Ok(count @ 1..) => {
                self.size = if count >= self.size { BUSY } else { IDLE };
                Some(self.buffer.split().freeze())
            }
            // A read error ends the stream: the exit status is reported separately.
            Ok(_) | Err(_) => {
                self.from = None;
                None
            }
        }
    }
}

/// Input of a process. Where the process no longer reads, bytes are discarded without an error.
pub struct Input(Option<Writer>);

impl Input {
    /// Wraps a stream.
    pub fn new(to: Option<Writer>) -> Self {
        Self(to)
    }

    /// Writes bytes; waits where the process does not read.
    pub async fn write(&mut self, bytes: &[u8]) {
        let Some(to) = &mut self.0 else { return };
        if to.write_all(bytes).await.is_err() || to.flush().await.is_err() {
            self.0 = None;
        }
    }

    /// Closes the input.
    pub fn end(&mut self) {
        self.0 = None;
    }
}
