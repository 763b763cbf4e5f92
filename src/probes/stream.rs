//! What is read of a server, in bytes: never more than an answer may have, and never so much at once that others wait.
//!
//! A server may send what is no answer for as long as it is asked: promises of one, pings, records without content.
//! Nobody who reads them counts them, and attempts share a thread. So whoever says more than an answer may have is hung
//! up on, and whoever has something to say each time it is read lets others have a turn now and then.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use rustix::{
    io::Errno,
    net::{SendFlags, send},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

/// Bytes that are read of one connection: the longest head twice over, and a body as far as it is read.
const MOST_READ: usize = 1 << 20;
/// So many reads in a row, or bytes, and then others have a turn.
const IN_A_ROW: u8 = 16;
const BYTES_IN_A_ROW: usize = 64 << 10;

/// A socket of which at most [`MOST_READ`] bytes are read.
///
/// A new connection has room for what is written to it first, but the runtime would only know so after it has asked: that
/// is written without asking. And nothing is written after an answer, so that closing is all the end there has to be.
pub struct Limited {
    socket: TcpStream,
    has_written: bool,
    left: usize,
    in_a_row: u8,
    /// What was left when others had their last turn.
    left_then: usize,
    first: [u8; 5],
}

impl Limited {
    /// Nothing of it was read yet.
    pub fn new(socket: TcpStream) -> Self {
        Self { socket, has_written: false, left: MOST_READ, in_a_row: 0, left_then: MOST_READ, first: [0; 5] }
    }

    /// The socket.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The first bytes that were read; zeros where they are not there yet.
    pub fn first(&self) -> &[u8; 5] {
        &self.first
    }

    /// Writes as much of the very first bytes as there is room for; `None` where that must be waited for.
    fn begin(&mut self, bytes: &[u8]) -> Option<io::Result<usize>> {
        if std::mem::replace(&mut self.has_written, true) {
            return None;
        }
        match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
            Err(Errno::AGAIN | Errno::INTR) => None,
            sent => Some(sent.map_err(io::Error::from)),
        }
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
        if self.in_a_row == IN_A_ROW || self.left_then - self.left >= BYTES_IN_A_ROW {
            (self.in_a_row, self.left_then) = (0, self.left);
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(context, buffer);
        if read.is_ready() {
            self.in_a_row += 1;
        } else {
            (self.in_a_row, self.left_then) = (0, self.left);
        }
        read.map(|read| read.and_then(|()| self.count(buffer.filled().get(before..).unwrap_or_default())))
    }
}

impl AsyncWrite for Limited {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.begin(bytes) {
            Some(begun) => Poll::Ready(begun),
            None => Pin::new(&mut self.socket).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first = pieces.iter().find(|piece| !piece.is_empty());
        match first.and_then(|first| self.begin(first)) {
            Some(begun) => Poll::Ready(begun),
            None => Pin::new(&mut self.socket).poll_write_vectored(context, pieces),
        }
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        task::unconstrained,
    };

    use super::*;

    /// Reads until others have a turn: how often, and how much.
    async fn turn(limited: &mut Limited, piece: &mut [u8]) -> (u8, usize) {
        let (mut reads, mut bytes) = (0, 0);
        let until_pending = poll_fn(|context| {
            let mut buffer = ReadBuf::new(piece);
            while let Poll::Ready(read) = Pin::new(&mut *limited).poll_read(context, &mut buffer) {
                read.expect("there is something to read");
                (reads, bytes) = (reads + 1, bytes + buffer.filled().len());
                buffer.clear();
            }
            Poll::Ready(())
        });
        unconstrained(until_pending).await;
        (reads, bytes)
    }

    #[tokio::test]
    async fn what_is_written_first_does_not_wait_until_the_runtime_knows_that_there_is_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let there = listener.local_addr().expect("bound");
        let said: Vec<u8> = (0_u32..4 << 20).map(|number| u8::try_from(number % 251).unwrap_or(0)).collect();
        for is_vectored in [false, true] {
            let socket = std::net::TcpStream::connect(there).expect("connected");
            socket.set_nonblocking(true).expect("a socket");
            let (mut peer, _) = listener.accept().await.expect("accepted");
            let mut limited = Limited::new(TcpStream::from_std(socket).expect("a runtime"));
            let once = poll_fn(|context| {
                let limited = Pin::new(&mut limited);
                let pieces = [io::IoSlice::new(&[]), io::IoSlice::new(&said)];
                Poll::Ready(match is_vectored {
                    false => limited.poll_write(context, &said),
                    true => limited.poll_write_vectored(context, &pieces),
                })
            });
            let Poll::Ready(Ok(written)) = once.await else { panic!("there is room") };
            assert!((1..said.len()).contains(&written), "not for all of it: {written}");
            let rest = said.get(written..).unwrap_or_default().to_vec();
            let writing = tokio::spawn(async move {
                limited.write_all(&rest).await?;
                limited.shutdown().await
            });
            let mut heard = Vec::new();
            peer.read_to_end(&mut heard).await.expect("an end");
            writing.await.expect("no panic").expect("written");
            assert!(heard == said, "{is_vectored}: {} bytes", heard.len());
        }
    }

    #[tokio::test]
    async fn who_always_has_something_to_say_lets_others_have_a_turn() {
        for size in [1, 16 << 10] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let socket = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
            let (mut peer, _) = listener.accept().await.expect("accepted");
            let (mut limited, mut piece, mut left) = (Limited::new(socket), vec![0; size], 40 * size);
            let said = vec![b'x'; left];
            let writing = tokio::spawn(async move { peer.write_all(&said).await.map(|()| peer) });
            while left > 0 {
                limited.socket.readable().await.expect("open");
                let (reads, bytes) = turn(&mut limited, &mut piece).await;
                assert!(reads <= IN_A_ROW && bytes < BYTES_IN_A_ROW + size, "{size}: {reads} reads, {bytes} bytes");
                left -= bytes;
            }
            let _open = writing.await.expect("no panic").expect("written");
        }
    }
}
