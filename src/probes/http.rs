//! HTTP probe: sends a GET request, follows redirects, and evaluates the status code.
//!
//! Implements spec 05 §1.8.
//!
//! One deadline covers connecting, redirects, and body. Each request has a connection of its own, which ends with it.
//! The size of a response is bounded: by hyper's limits for heads, [`MOST_OUTPUT`] for the body, and the stream's limit
//! for all of it.

use std::{
    error::Error,
    pin::{Pin, pin},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Empty};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, timeout_at},
};

use super::{
    connector::{ConnectErrorKind, DialError, PodConnector, Spawner, go_error_text},
    outcome::{ErrorState, MOST_OUTPUT, Outcome, text_of},
    target::{HttpRequest, MOST_REDIRECTS},
};

/// Maximum size of a response head, in bytes.
const MOST_HEAD: usize = 512 << 10;
/// Maximum number of header lines in the retry after a response with more than hyper's default of 100.
const MOST_HEADERS: usize = 1024;
/// Like `MOST_HEAD`, for HTTP/2, whose heads are compressed.
const MOST_HEADER_LIST: u32 = 512 << 10;
/// Bytes of a body that an HTTP/2 server may send ahead: the protocol's initial window, the smallest possible one.
const WINDOW: u32 = (64 << 10) - 1;

/// Transport of requests and responses.
trait ProbeStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ProbeStream for S {}

/// Result of one request.
enum ProbeResponse {
    /// A redirect to follow.
    Redirect(Box<HttpRequest>),
    /// The final response: status code and body.
    Final(u16, Vec<u8>),
}

/// Why a request failed.
enum RequestError {
    /// No response arrived: a failure.
    Transport(String),
    /// As before; the response head was longer than the limit.
    LongHead(String),
    /// The response is incomplete: an error.
    Body(String),
    /// A local limit prevented the request: an error.
    LocalLimit(String),
}

/// Sends the request, follows redirects to the same host, and evaluates the response.
pub async fn probe(dialler: PodConnector<'_>, first: &HttpRequest, timeout: Duration) -> Outcome {
    let deadline = Instant::now() + timeout;
    let host = first.url.host.as_str();
    let (mut moved, mut redirects, mut is_long) = (None::<Box<HttpRequest>>, 0, false);
    loop {
        let ask = moved.as_deref().unwrap_or(first);
        match exchange(dialler, ask, host, is_long, deadline).await {
            Ok(ProbeResponse::Final(status, body)) => return verdict(status, &body),
            Ok(ProbeResponse::Redirect(next)) if redirects < MOST_REDIRECTS => {
                moved = Some(next);
                redirects += 1;
            }
            Ok(ProbeResponse::Redirect(next)) => {
                let url = next.url.to_string();
                return Outcome::Failure(format!("Get {url:?}: stopped after {MOST_REDIRECTS} redirects"));
            }
            // Few heads are that long, and a larger header table costs every probe more than retrying for these
            // servers.
            Err(RequestError::LongHead(_)) if !is_long => is_long = true,
            Err(RequestError::Transport(text) | RequestError::LongHead(text)) => {
                return Outcome::Failure(format!("Get {:?}: {text}", ask.url.to_string()));
            }
            Err(RequestError::Body(text)) => return Outcome::Error { state: ErrorState::Failure, text },
            Err(RequestError::LocalLimit(text)) => {
                return Outcome::unknown(format!("Get {:?}: {text}", ask.url.to_string()));
            }
        }
    }
}

fn verdict(status: u16, body: &[u8]) -> Outcome {
    match status {
        200..=299 => Outcome::Success,
        300..=399 => Outcome::Warning(format!("Probe terminated redirects, Response body: {}", text_of(body))),
        _ => Outcome::Failure(format!("HTTP probe failed with statuscode: {status}")),
    }
}

const AWAITING_HEADERS: &str = "(Client.Timeout exceeded while awaiting headers)";
const READING_BODY: &str = "(Client.Timeout or context cancellation while reading body)";

async fn exchange(
    dialler: PodConnector<'_>,
    ask: &HttpRequest,
    host: &str,
    is_long: bool,
    deadline: Instant,
) -> Result<ProbeResponse, RequestError> {
    let dialled = |error: DialError| match error.why {
        ConnectErrorKind::Refused => RequestError::Transport(error.text),
        ConnectErrorKind::TimedOut => RequestError::Transport(format!("{} {AWAITING_HEADERS}", error.text)),
        ConnectErrorKind::LocalLimit => RequestError::LocalLimit(error.text),
    };
    let port = ask.url.dialled_port();
    if ask.url.scheme == "https" {
        // Boxed: plain HTTP does not have to carry this large future.
        let secure = async {
            let stream = dialler.tls(&ask.url.host, port, deadline).await.map_err(dialled)?;
            if stream.is_http2() {
                return over_http2(stream, ask, host, deadline).await;
            }
            over_http1(Box::new(stream), ask, host, is_long, deadline).await
        };
        return Box::pin(secure).await;
    }
    let stream = dialler.tcp(&ask.url.host, port, deadline).await.map_err(dialled)?;
    over_http1(Box::new(stream), ask, host, is_long, deadline).await
}

async fn over_http1(
    stream: Box<dyn ProbeStream>,
    ask: &HttpRequest,
    host: &str,
    is_long: bool,
    deadline: Instant,
) -> Result<ProbeResponse, RequestError> {
    let handshake = client(is_long).handshake::<_, Empty<Bytes>>(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|e| transport(&e))?;
    let request = over_one(ask).map_err(RequestError::Transport)?;
    let (answer, connection) = (pin!(sender.send_request(request)), pin!(connection));
    driven(connection, pin!(read(answer, ask, host, deadline))).await
}

/// Builder of HTTP/1 clients; `is_long` raises the limit of header lines.
fn client(is_long: bool) -> http1::Builder {
    let mut builder = http1::Builder::new();
    // Like Go, which accepts a header name with a space.
    builder.title_case_headers(true).ignore_invalid_headers_in_responses(true).max_buf_size(MOST_HEAD);
    if is_long {
        builder.max_headers(MOST_HEADERS);
    }
    builder
}

async fn over_http2<S>(
    stream: S,
    ask: &HttpRequest,
    host: &str,
    deadline: Instant,
) -> Result<ProbeResponse, RequestError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (spawner, _guard) = Spawner::new();
    let mut builder = http2::Builder::new(spawner);
    builder.timer(TokioTimer::new()).max_header_list_size(MOST_HEADER_LIST);
    builder.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let handshake = builder.handshake::<_, Empty<Bytes>>(TokioIo::new(stream));
    let (mut sender, connection) = match timeout_at(deadline, handshake).await {
        Ok(made) => made.map_err(|e| transport(&e))?,
        Err(_) => return Err(RequestError::Transport(format!("context deadline exceeded {AWAITING_HEADERS}"))),
    };
    let authority = ask.host.as_ref().and_then(|h| h.to_str().ok()).map_or_else(|| ask.url.authority(), str::to_owned);
    let request = request(ask, format!("https://{authority}{}", ask.url.target()));
    let mut request = request.map_err(RequestError::Transport)?;
    // Connection-specific headers are not allowed in HTTP/2.
    for name in [header::CONNECTION, header::UPGRADE, header::HeaderName::from_static("keep-alive")] {
        request.headers_mut().remove(name);
    }
    let (answer, connection) = (pin!(sender.send_request(request)), pin!(connection));
    driven(connection, pin!(read(answer, ask, host, deadline))).await
}

/// Builds the HTTP/1 request.
fn over_one(ask: &HttpRequest) -> Result<Request<Empty<Bytes>>, String> {
    let mut request = request(ask, ask.url.target())?;
    let authority = HeaderValue::try_from(ask.url.authority()).map_err(|e| e.to_string())?;
    request.headers_mut().insert(header::HOST, ask.host.clone().unwrap_or(authority));
    request.headers_mut().entry(header::CONNECTION).or_insert(HeaderValue::from_static("close"));
    Ok(request)
}

fn request(ask: &HttpRequest, uri: String) -> Result<Request<Empty<Bytes>>, String> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = uri.try_into().map_err(|e: http::uri::InvalidUri| e.to_string())?;
    *request.headers_mut() = ask.headers.clone();
    Ok(request)
}

/// Reads a response, up to the body's limit.
async fn read(
    answer: impl Future<Output = hyper::Result<Response<Incoming>>>,
    ask: &HttpRequest,
    host: &str,
    deadline: Instant,
) -> Result<ProbeResponse, RequestError> {
    let answer = match timeout_at(deadline, answer).await {
        Ok(answer) => answer.map_err(|e| transport(&e))?,
        Err(_) => return Err(RequestError::Transport(format!("context deadline exceeded {AWAITING_HEADERS}"))),
    };
    let status = answer.status().as_u16();
    let location = answer.headers().get(header::LOCATION).map(|l| String::from_utf8_lossy(l.as_bytes()).into_owned());
    if let Some(next) = ask.redirected(host, status, location.as_deref()).map_err(RequestError::Transport)? {
        return Ok(ProbeResponse::Redirect(Box::new(next)));
    }
    match timeout_at(deadline, read_body(answer.into_body())).await {
        Ok(body) => Ok(ProbeResponse::Final(status, body?)),
        // kubelet treats this as an error, and never counts a server whose responses are too slow.
        Err(_) => Err(RequestError::Transport(format!("context deadline exceeded {READING_BODY}"))),
    }
}

async fn read_body(mut body: Incoming) -> Result<Vec<u8>, RequestError> {
    let mut read = Vec::new();
    while read.len() < MOST_OUTPUT
        && let Some(frame) = body.frame().await
    {
        let frame = frame.map_err(|e| RequestError::Body(error_chain(&e)))?;
        if let Ok(data) = frame.into_data() {
            let room = MOST_OUTPUT - read.len();
            read.extend_from_slice(data.get(..room).unwrap_or(&data));
        }
    }
    Ok(read)
}

/// Drives `work` while its connection lives, and afterwards with the data that has arrived.
async fn driven<T>(mut connection: Pin<&mut impl Future>, mut work: Pin<&mut impl Future<Output = T>>) -> T {
    let mut ended = false;
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            _ = &mut connection, if !ended => ended = true, // `work` receives the error
        }
    }
}

fn transport(error: &hyper::Error) -> RequestError {
    if error.is_parse_too_large() {
        RequestError::LongHead(error_chain(error))
    } else {
        RequestError::Transport(error_chain(error))
    }
}

/// Error of a connection with its causes, worded like Go where Go has a text for it.
fn error_chain(error: &hyper::Error) -> String {
    if error.is_incomplete_message() {
        return "EOF".to_owned();
    }
    let mut texts = vec![error.to_string()];
    let mut next = error.source();
    while let Some(cause) = next {
        texts.push(cause.downcast_ref::<std::io::Error>().map_or_else(|| cause.to_string(), go_error_text));
        next = cause.source();
    }
    texts.dedup();
    texts.join(": ")
}
