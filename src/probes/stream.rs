//! A socket of which a bounded number of bytes is read.
//!
//! A server may send what is no answer for as long as it is read: informational responses, pings, records without content.
//! So a connection is closed on whoever sends more than an answer may have.

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

/// Bytes that are read of one connection: the longest head twice over, and a body as far as it is read.
const MOST_READ: usize = 1 << 20;

/// A socket of which at most [`MOST_READ`] bytes are read.
///
/// Nothing is written after an answer, so closing it is all the shutdown there is.
pub struct Limited {
    socket: TcpStream,
    left: usize,
    first: [u8; 5],
}

impl Limited {
    /// Nothing of it was read yet.
    pub fn new(socket: TcpStream) -> Self {
        Self { socket, left: MOST_READ, first: [0; 5] }
    }

    /// The socket.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The first bytes that were read; zeros where they are not there yet.
    pub fn first(&self) -> &[u8; 5] {
        &self.first
    }

    fn count(&mut self, read: &[u8]) -> io::Result<()> {
        let at = MOST_READ - self.left;
        self.first.iter_mut().skip(at).zip(read).for_each(|(place, byte)| *place = *byte);
        self.left = self.left.checked_sub(read.len()).ok_or_else(|| io::Error::other("the server says too much"))?;
        Ok(())
    }
}

impl AsyncRead for Limited {
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

impl AsyncWrite for Limited {
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

/// TLS whose end need not be announced: many servers just close, and nobody whom a probe asks would cut an answer short.
/// One that says how long it is and is shorter is found out by whoever reads it.
pub struct Secure(TlsStream<Limited>);

impl Secure {
    /// After the handshake.
    pub fn new(stream: TlsStream<Limited>) -> Self {
        Self(stream)
    }

    /// Whether HTTP/2 was agreed on.
    pub fn is_http2(&self) -> bool {
        self.0.get_ref().1.alpn_protocol() == Some(b"h2")
    }
}

impl AsyncRead for Secure {
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

impl AsyncWrite for Secure {
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
