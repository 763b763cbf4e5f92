//! The plainest exchange over HTTP/1: the same request as ever, and an answer that lies there in one piece.
//!
//! Nearly all that probes come to hear is of this kind, hundreds of times a minute, and a client that is made for every
//! other as well costs more than all else a probe does outside the kernel. Whatever is not plain is left to that client,
//! from the first byte. Behaviour: spec 05 §1.8.

use std::{
    future::poll_fn,
    io::{self, Cursor},
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures::FutureExt;
use http::Request;
use http_body_util::Empty;
use httparse::{EMPTY_HEADER, Response, Status, parse_chunk_size};
use hyper::client::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Chain, ReadBuf},
    task::coop::unconstrained,
};

/// Bytes of an answer that may be plain: fewer than a client has room for.
pub const MOST_HEARD: usize = 2048;
/// Lines of its head.
const MOST_LINES: usize = 32;
/// Bytes of a request that a new connection takes at once, whether its peer reads them or not.
pub const MOST_SAID: usize = 8 << 10;

/// Says that, and returns what is heard first: nothing, where that is the end.
///
/// # Errors
/// Of the stream.
pub async fn exchange(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), said: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(said).await?;
    stream.flush().await?;
    let mut heard = Vec::with_capacity(MOST_HEARD);
    stream.read_buf(&mut heard).await?;
    Ok(heard)
}

/// The status of an answer of at most [`MOST_HEARD`] bytes that ends where it says, and leads nowhere else; `None` for
/// every other.
pub fn status(heard: &[u8]) -> Option<u16> {
    let mut lines = [EMPTY_HEADER; MOST_LINES];
    let mut answer = Response::new(&mut lines);
    let Ok(Status::Complete(head)) = answer.parse(heard) else { return None };
    let body = heard.get(head..)?;
    let status = answer.code.filter(|code| matches!(code, 200..=203 | 205..=299 | 400..=599))?;
    let of =
        |name| answer.headers.iter().filter(move |line| line.name.eq_ignore_ascii_case(name)).map(|line| line.value);
    let (mut lengths, mut codings) = (of("content-length"), of("transfer-encoding"));
    let is_whole = match (lengths.next(), lengths.next(), codings.next(), codings.next()) {
        (Some(length), None, None, None) => number(length) == Some(body.len()),
        (None, None, Some(b"chunked"), None) => answer.version == Some(1) && is_chunked(body),
        _ => false,
    };
    is_whole.then_some(status)
}

fn number(digits: &[u8]) -> Option<usize> {
    let is_plain = digits.iter().all(u8::is_ascii_digit); // no sign
    std::str::from_utf8(digits).ok().filter(|_| is_plain)?.parse().ok()
}

/// Whether these are chunks up to the last, and nothing else.
fn is_chunked(mut body: &[u8]) -> bool {
    loop {
        match chunk(body) {
            Some((0, rest)) => return rest.is_empty(),
            Some((_, rest)) => body = rest,
            None => return false,
        }
    }
}

/// The size of the first chunk, and what comes after it.
fn chunk(body: &[u8]) -> Option<(u64, &[u8])> {
    let Ok(Status::Complete((head, size))) = parse_chunk_size(body) else { return None };
    // The parser takes lines without a digit, too, and any extension.
    let digits = body.get(..head)?.strip_suffix(b"\r\n")?;
    let is_plain = !digits.is_empty() && digits.iter().all(u8::is_ascii_hexdigit);
    let rest = body.get(head..)?.get(usize::try_from(size).ok()?..)?.strip_prefix(b"\r\n")?;
    is_plain.then_some((size, rest))
}

/// What a client of that kind says to ask for that, in bytes.
///
/// # Errors
/// It says nothing.
pub fn said(client: &Builder, request: Request<Empty<Bytes>>) -> Result<Box<[u8]>, String> {
    let (silence, _who_is_silent) = tokio::io::duplex(1);
    let made = client.handshake(TokioIo::new(tokio::io::join(silence, Vec::new()))).now_or_never();
    let (mut sender, mut connection) = made.ok_or("it waits for somebody")?.map_err(|e| e.to_string())?;
    let _answer = sender.send_request(request);
    // Whatever the task whose future this is part of has done before.
    let _waits = unconstrained(poll_fn(|context| connection.poll_without_shutdown(context))).now_or_never();
    let (_, said) = connection.into_parts().io.into_inner().into_inner();
    if said.is_empty() { Err("it cannot be asked for".to_owned()) } else { Ok(said.into()) }
}

/// What was exchanged with a server, told to a client: it hears all once it has asked, and asks nobody. It ends the rest.
pub struct Retold<S> {
    heard: Chain<Cursor<Vec<u8>>, S>,
    has_asked: bool,
    /// A client that listens before it asks. One that heard something then would hang up.
    listens: Option<Waker>,
}

impl<S: AsyncRead> Retold<S> {
    /// With what was heard, and the rest as it comes.
    pub fn new(heard: Vec<u8>, rest: S) -> Self {
        Self { heard: Cursor::new(heard).chain(rest), has_asked: false, listens: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Retold<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.has_asked {
            self.listens = Some(context.waker().clone());
            return Poll::Pending;
        }
        Pin::new(&mut self.heard).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Retold<S> {
    fn poll_write(mut self: Pin<&mut Self>, _context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.has_asked = true;
        if let Some(listens) = self.listens.take() {
            listens.wake();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.heard.get_mut().1).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_that_is_whole_and_leads_nowhere_is_judged() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", Some(200)),
            ("HTTP/1.0 299 \r\ncontent-length: 0\r\n\r\n", Some(299)),
            ("HTTP/1.1 404 No\r\nX: y\r\nContent-Length:  3 \r\n\r\nno\n", Some(404)),
            ("HTTP/1.1 599 Oh\r\nContent-Length: 0\r\n\r\n", Some(599)),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0A\r\n0123456789\r\n0\r\n\r\n",
                Some(200),
            ),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", Some(200)),
            // It is not all there, or there is more.
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nok", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok!!0\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nMore: 1\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nok", None),
            ("", None),
            // It breaks off, or is not said plainly, whatever the parser says.
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n;x\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0;a\nb\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0 \r\n\r\n", None),
            // It ends where the connection does.
            ("HTTP/1.1 200 OK\r\n\r\n", None),
            ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
            // It is not said plainly where.
            ("HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok", None),
            ("HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
            // There are rules of their own for these.
            ("HTTP/1.1 100 Go\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 204 None\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 302 There\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 304 Same\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 999 Ha\r\nContent-Length: 0\r\n\r\n", None),
            // This is nothing of the kind.
            ("HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n", None),
            ("SSH-2.0-OpenSSH_9.7\r\n", None),
        ] {
            assert_eq!(status(answer.as_bytes()), expected, "{answer}");
        }
        let lines = |number| format!("HTTP/1.1 200 OK\r\n{}Content-Length: 0\r\n\r\n", "X: y\r\n".repeat(number));
        assert_eq!(status(lines(MOST_LINES - 1).as_bytes()), Some(200));
        assert_eq!(status(lines(MOST_LINES).as_bytes()), None);
    }

    fn request(value: &str) -> Request<Empty<Bytes>> {
        let made = Request::get("/x?y=z").header("host", "h:1").header("a-b", value).body(Empty::new());
        made.expect("a request")
    }

    fn client() -> Builder {
        let mut client = Builder::new();
        client.title_case_headers(true).max_buf_size(MOST_SAID);
        client
    }

    #[test]
    fn what_a_client_says_is_known_before_there_is_a_server() {
        let heard = said(&client(), request("c")).expect("it says something");
        assert_eq!(String::from_utf8_lossy(&heard), "GET /x?y=z HTTP/1.1\r\nHost: h:1\r\nA-B: c\r\n\r\n");
        let long = "d".repeat(1 << 20);
        let heard = said(&client(), request(&long)).expect("it says something");
        assert!(heard.ends_with(format!("A-B: {long}\r\n\r\n").as_bytes()), "all of it: {}", heard.len());
    }

    #[tokio::test]
    async fn it_is_known_as_well_to_a_task_that_has_done_much() {
        let turn = poll_fn(|context| {
            let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
            loop {
                sender.send(()).expect("it is there");
                if receiver.poll_recv(context).is_pending() {
                    break;
                }
            }
            Poll::Ready(said(&client(), request("c")))
        });
        assert!(turn.await.is_ok());
    }
}
