//! HTTP connection: per-client limits, idle and stall timeouts, and graceful shutdown.
//!
//! hyper bounds request heads and header lists, and limits the number of streams. This module closes the connections
//! that hyper would keep open: one without requests (an HTTP/2 client may stay silent, or only answer pings), one whose
//! client reads nothing of its responses, and one that cancels requests too fast (rapid reset, CVE-2023-44487). The
//! body of a request has a deadline, too. hyper considers a response finished when it is in a buffer; a client that
//! still reads from it is not idle. Implements spec 04 §2, §10, §11.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, HttpBody},
    http::{
        HeaderValue, Method, Request, Response, StatusCode,
        header::{CONNECTION, CONTENT_LENGTH, EXPECT},
    },
};
use bytes::Bytes;
use futures::FutureExt;
use http_body::{Frame, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::debug;

use super::{ListenerService, body::TimedBody, pipeline::Peer};
use berth_sys::token_bucket::TokenBucket;

/// Longest wait for the head of a request, including idle time (spec 04 §2).
const IDLE_LIMIT: Duration = Duration::from_secs(90);
/// Stall timeout of a client that reads nothing of all its open responses. kubelet ends every response after four hours
/// instead (spec 04 §11).
const STALL_LIMIT: Duration = Duration::from_secs(300);
/// Stall timeout of one response while others on the connection make progress: an API server multiplexes many users
/// over one connection, and nobody should lose a log because another user paused a pager.
const LONG_STALL_LIMIT: Duration = Duration::from_secs(4 * 3600);
/// Largest request head of HTTP/1, in bytes.
const HEAD_BYTES: usize = 1 << 20;
/// Largest header list of HTTP/2, in bytes.
const HEADER_LIST: u32 = 64 << 10;
/// Concurrent streams of one HTTP/2 connection.
const STREAMS: u32 = 100;
/// Largest frame handed to HTTP/2 at once, in bytes: hyper accepts any size and does not report for which stream it
/// waits.
const PIECE: usize = 64 << 10;
/// Interval of HTTP/2 keep-alive pings, and the timeout of a reply.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(30));
/// Token bucket for requests that the client cancels: burst, and refill interval per request.
const GIVEN_UP: (u32, Duration) = (101, Duration::from_millis(100));
/// Grace period for open requests and streams during a graceful shutdown.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// HTTP version of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpVersion {
    /// HTTP/1.1.
    One,
    /// HTTP/2.
    Two,
}

/// Serves a connection until it ends or `stop` is canceled.
pub async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    protocol: HttpVersion,
    peer: Peer,
    serves: ListenerService,
    stop: &CancellationToken,
) {
    let (account, address) = (ConnectionAccounting::open(), peer.address);
    let counting = account.clone();
    let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
        let (serves, peer, mut asked) = (serves.clone(), peer.clone(), counting.asked());
        let is_head = request.method() == Method::HEAD;
        async move {
            let awaits_word = request.headers().contains_key(EXPECT);
            let (parts, body) = request.into_parts();
            let (body, unread) = TimedBody::new(body);
            let mut request = Request::from_parts(parts, Body::new(body));
            let place = peer.slot.clone();
            request.extensions_mut().insert(peer);
            let mut response = match serves {
                ListenerService::Site(site) => site.answer(request).await,
                ListenerService::Router(router) => {
                    place.authenticated(); // no authentication on this listener
                    router.oneshot(request).await?
                }
            };
            // A client that expects `100 Continue` never sends a body that was not requested.
            let ends =
                protocol == HttpVersion::One && if awaits_word { unread.has_unread() } else { !unread.drain().await };
            if ends && response.status() != StatusCode::SWITCHING_PROTOCOLS {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            if is_head {
                asked.is_over = true;
                drop(asked);
                return Ok::<_, Infallible>(head_only(response));
            }
            asked.waits_for_client();
            let most = if protocol == HttpVersion::Two { PIECE } else { usize::MAX };
            Ok(response.map(|body| Body::new(AccountedBody { body, asked, most, rest: Bytes::new() })))
        }
        .boxed()
    });
    let io = TokioIo::new(StallDetector { stream, account: account.clone(), is_stuck: false });
    let ended = match protocol {
        HttpVersion::One => drive(http1().serve_connection(io, service).with_upgrades(), &account, stop).await,
        HttpVersion::Two => drive(http2().serve_connection(io, service), &account, stop).await,
    };
    match ended {
        Some(Ok(())) => {}
        Some(Err(error)) => debug!(srcIP = %address, err = %error, "HTTP connection ended"),
        None => {
            debug!(srcIP = %address, "Closing connection: idle or stalled, or too many canceled requests")
        }
    }
}

/// Drives a connection to its end; `None` where it was closed forcibly.
async fn drive<C: Graceful>(
    connection: C,
    account: &ConnectionAccounting,
    stop: &CancellationToken,
) -> Option<hyper::Result<()>> {
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return Some(ended),
        () = account.excess.cancelled() => return None,
        () = first_of(stop.cancelled(), account.idle_or_stalled()) => connection.as_mut().end_soon(),
    }
    timeout(SHUTDOWN_LIMIT, connection).await.ok() // a slower connection is closed forcibly
}

async fn first_of(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    tokio::select! {
        () = one => {}
        () = other => {}
    }
}

/// Connection that supports a graceful shutdown.
trait Graceful: Future<Output = hyper::Result<()>> {
    fn end_soon(self: Pin<&mut Self>);
}

impl<I, S> Graceful for http1::UpgradeableConnection<I, S>
where
    Self: Future<Output = hyper::Result<()>>,
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    S: hyper::service::HttpService<hyper::body::Incoming, ResBody = Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn end_soon(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl<I, S> Graceful for http2::Connection<I, S, TokioExecutor>
where
    Self: Future<Output = hyper::Result<()>>,
    I: hyper::rt::Read + hyper::rt::Write + Unpin,
    S: hyper::service::HttpService<hyper::body::Incoming, ResBody = Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    TokioExecutor: hyper::rt::bounds::Http2ServerConnExec<S::Future, Body>,
{
    fn end_soon(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// Disables hyper's head timeout: it would start before the client has read the previous response.
fn http1() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.header_read_timeout(None).max_buf_size(HEAD_BYTES);
    builder
}

fn http2() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADER_LIST)
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1);
    builder
}

/// Response to a HEAD request without a body: over HTTP/2 hyper would send the body, which fails the stream.
fn head_only(response: Response<Body>) -> Response<Body> {
    let length = response.body().size_hint().exact();
    let (mut parts, _) = response.into_parts();
    if let Some(length) = length {
        parts.headers.entry(CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    Response::from_parts(parts, Body::empty())
}

/// Open requests and progress of one connection.
struct ConnectionAccounting {
    state: Mutex<AccountingState>,
    /// Canceled once the client has canceled too many requests.
    excess: CancellationToken,
}

struct AccountingState {
    next: u64,
    open: usize,
    quiet_since: Instant,
    /// Start of the current write stall: written data waits for the client to read.
    stuck: Option<Instant>,
    /// Responses that wait for the client to read, with the start of the wait.
    waiting: HashMap<u64, Instant>,
    /// Limits canceled requests.
    cancellations: TokenBucket,
}

impl ConnectionAccounting {
    fn open() -> Arc<Self> {
        let now = Instant::now();
        let cancellations = TokenBucket::new(GIVEN_UP.1, GIVEN_UP.0, now.into_std());
        let state =
            AccountingState { next: 0, open: 0, quiet_since: now, stuck: None, waiting: HashMap::new(), cancellations };
        Arc::new(Self { state: Mutex::new(state), excess: CancellationToken::new() })
    }

    fn asked(self: &Arc<Self>) -> OpenRequest {
        let mut state = self.state();
        state.open += 1;
        state.next += 1;
        OpenRequest { id: state.next, account: self.clone(), is_over: false }
    }

    fn record_canceled(&self) {
        if !self.state().cancellations.try_take(Instant::now().into_std()) {
            self.excess.cancel();
        }
    }

    /// Returns once the idle timeout or a stall timeout has expired.
    async fn idle_or_stalled(&self) {
        loop {
            let (now, due) = (Instant::now(), self.due());
            if due <= now {
                return;
            }
            // Re-evaluated at least once per idle timeout: when requests end meanwhile, an earlier deadline applies.
            sleep_until(due.min(now + IDLE_LIMIT)).await;
        }
    }

    fn due(&self) -> Instant {
        let state = self.state();
        if state.open == 0 {
            return state.stuck.map_or(state.quiet_since + IDLE_LIMIT, |since| since + STALL_LIMIT);
        }
        let (first, last) = (state.waiting.values().min(), state.waiting.values().max());
        let of_one = first.map_or_else(Instant::now, |first| *first) + LONG_STALL_LIMIT;
        let of_all = last.filter(|_| state.waiting.len() == state.open).map(|last| *last + STALL_LIMIT);
        of_all.map_or(of_one, |of_all| of_all.min(of_one))
    }

    fn stuck(&self) {
        self.state().stuck.get_or_insert_with(Instant::now);
    }

    fn moved(&self) {
        let mut state = self.state();
        state.stuck = None;
        state.quiet_since = Instant::now();
    }

    fn state(&self) -> MutexGuard<'_, AccountingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open request, from its head to the last byte of its response.
struct OpenRequest {
    account: Arc<ConnectionAccounting>,
    id: u64,
    /// Whether the response was handed to hyper completely.
    is_over: bool,
}

impl OpenRequest {
    fn waits_for_client(&mut self) {
        self.account.state().waiting.insert(self.id, Instant::now());
    }

    fn waits_for_us(&mut self) {
        self.account.state().waiting.remove(&self.id);
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let mut state = self.account.state();
        state.open = state.open.saturating_sub(1);
        state.quiet_since = Instant::now();
        state.waiting.remove(&self.id);
        drop(state);
        if !self.is_over {
            self.account.record_canceled();
        }
    }
}

/// Response body that accounts for stalls and cancellation.
struct AccountedBody {
    body: Body,
    asked: OpenRequest,
    /// Largest frame, in bytes.
    most: usize,
    /// Rest of a frame that exceeded the limit.
    rest: Bytes,
}

impl AccountedBody {
    /// Returns the allowed part of a frame and keeps the rest.
    fn cut(&mut self, frame: Frame<Bytes>) -> Frame<Bytes> {
        match frame.into_data() {
            Ok(mut data) => {
                if data.len() > self.most {
                    self.rest = data.split_off(self.most);
                }
                Frame::data(data)
            }
            Err(trailers) => trailers,
        }
    }
}

impl HttpBody for AccountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.asked.waits_for_us();
        let rest = std::mem::take(&mut self.rest);
        let frame = match rest.is_empty() {
            true => ready!(Pin::new(&mut self.body).poll_frame(context)),
            false => Some(Ok(Frame::data(rest))),
        };
        let frame = frame.map(|frame| frame.map(|frame| self.cut(frame)));
        if matches!(frame, Some(Ok(_))) {
            self.asked.waits_for_client(); // the last frame too: hyper keeps it until the flow-control window opens
        }
        self.asked.is_over = !matches!(frame, Some(Ok(_))) || self.is_end_stream();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), u64::try_from(self.rest.len()).unwrap_or_default());
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower().saturating_add(rest));
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper.saturating_add(rest));
        }
        whole
    }
}

impl Drop for AccountedBody {
    fn drop(&mut self) {
        self.asked.is_over |= self.is_end_stream();
    }
}

/// Transport wrapper that detects write stalls.
struct StallDetector<S> {
    stream: S,
    account: Arc<ConnectionAccounting>,
    is_stuck: bool,
}

impl<S> StallDetector<S> {
    fn seen<T>(&mut self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match (&written, self.is_stuck) {
            (Poll::Pending, false) => self.account.stuck(),
            (Poll::Ready(_), true) => self.account.moved(),
            (Poll::Pending, true) | (Poll::Ready(_), false) => {}
        }
        self.is_stuck = written.is_pending();
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallDetector<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallDetector<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, from);
        self.seen(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, from);
        self.seen(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let written = Pin::new(&mut self.stream).poll_flush(context);
        self.seen(written)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pause_in_one_answer_is_not_the_end_of_the_others() {
        let (account, began) = (ConnectionAccounting::open(), Instant::now());
        let due = || account.due().duration_since(began).as_secs();
        assert_eq!(due(), 90, "no request is open");
        let (mut paged, mut followed) = (account.asked(), account.asked());
        paged.waits_for_client();
        assert_eq!(due(), 4 * 3600, "the other one is still made");
        tokio::time::advance(Duration::from_secs(200)).await;
        followed.waits_for_client();
        assert_eq!(due(), 500, "nothing is taken of either");
        followed.waits_for_us();
        assert_eq!(due(), 4 * 3600, "something was");
        tokio::time::advance(Duration::from_secs(4 * 3600)).await;
        followed.waits_for_client();
        assert_eq!(due(), 4 * 3600, "but not for ever");
        drop((paged, followed));
        assert_eq!(due(), 4 * 3600 + 200 + 90);
    }
}
