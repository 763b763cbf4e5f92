//! Socket with a limit on the bytes that are read.
//!
//! A server may send data that is no response for as long as it is read: informational responses, pings, empty records.
//! A connection is therefore closed once the server sends more than a response may contain.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

/// Maximum bytes read per connection: twice the longest head, and the retained part of a body.
const MOST_READ: usize = 1 << 20;

/// Socket of which at most [`MOST_READ`] bytes are read.
///
/// Nothing is written after a response, so shutdown is a no-op and closing suffices.
pub struct LimitedStream {
    socket: TcpStream,
    left: usize,
    first: [u8; 5],
}

impl LimitedStream {
    /// Wraps a socket of which nothing has been read.
    pub fn new(socket: TcpStream) -> Self {
        Self { socket, left: MOST_READ, first: [0; 5] }
    }

    /// The underlying socket.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The first bytes that were read; zeros for those that have not arrived.
    pub fn first(&self) -> &[u8; 5] {
        &self.first
    }

    fn count(&mut self, read: &[u8]) -> io::Result<()> {
        let at = MOST_READ - self.left;
        self.first.iter_mut().skip(at).zip(read).for_each(|(place, byte)| *place = *byte);
        self.left =
            self.left.checked_sub(read.len()).ok_or_else(|| io::Error::other("response exceeds the size limit"))?;
        Ok(())
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(context, buffer);
        read.map(|read| read.and_then(|()| self.count(buffer.filled().get(before..).unwrap_or_default())))
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// TLS stream that accepts an end without `close_notify`: many servers just close, and truncation is no threat to a
/// probe. A response that is shorter than its declared length is detected by its reader.
pub struct LenientTlsStream(TlsStream<LimitedStream>);

impl LenientTlsStream {
    /// Wraps a stream after the handshake.
    pub fn new(stream: TlsStream<LimitedStream>) -> Self {
        Self(stream)
    }

    /// Returns whether HTTP/2 was negotiated.
    pub fn is_http2(&self) -> bool {
        self.0.get_ref().1.alpn_protocol() == Some(b"h2")
    }
}

impl AsyncRead for LenientTlsStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer).map(|read| match read {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            read => read,
        })
    }
}

impl AsyncWrite for LenientTlsStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
