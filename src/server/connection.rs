//! One HTTP connection: how much a client may make of it, and when it ends though the client would go on.
//!
//! hyper bounds heads and header lists and counts streams. Here ends what it lets live: a
//! connection on which nothing is asked (a client of HTTP/2 may say nothing at all, or answer pings
//! for ever), one whose client takes nothing of its answers, and one whose requests are given up
//! faster than anybody changes his mind (CVE-2023-44487). What a request carries has to come in
//! time, too. Spec 04 §2, §10, §11.

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
    http::{Method, Request},
};
use bytes::Bytes;
use futures::FutureExt;
use http_body::{Frame, SizeHint};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, Sleep, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::debug;

use super::{Serves, pipeline::Peer};

/// Longest wait for the head of a request; also ends idle connections (spec 04 §2).
const IDLE_LIMIT: Duration = Duration::from_secs(90);
/// How long the body of a request may take: forms and numbers, all of them short.
const BODY_LIMIT: Duration = Duration::from_secs(90);
/// How long a client may take nothing of all it has asked for. The reference cuts every answer
/// after four hours instead (spec 04 §11).
const STALL_LIMIT: Duration = Duration::from_secs(300);
/// How long it may take nothing of one answer while others go on: an API server asks over one
/// connection for many people, and none shall lose a log because another has paused a pager.
const LONG_STALL_LIMIT: Duration = Duration::from_secs(4 * 3600);
/// Largest request head, HTTP/1.
const HEAD_BYTES: usize = 1 << 20;
/// Largest list of headers, HTTP/2.
const HEADER_LIST: u32 = 64 << 10;
/// Streams of one HTTP/2 connection at a time.
const STREAMS: u32 = 100;
/// How often a silent HTTP/2 client is asked whether it is there, and how long it may take to say so.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(30));
/// Requests that may be given up at once after a pause, and the time after which one more may.
const GIVEN_UP: (u32, Duration) = (100, Duration::from_millis(100));
/// How long open requests and streams may take once the connection is to end.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// What is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    One,
    /// HTTP/2.
    Two,
}

/// Serves a connection to its end, or until stopped.
pub async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    protocol: Protocol,
    peer: Peer,
    serves: Serves,
    stop: &CancellationToken,
) {
    let (account, address) = (Account::open(), peer.address);
    let counting = account.clone();
    let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
        let (serves, peer, mut asked) = (serves.clone(), peer.clone(), counting.asked());
        let has_body = request.method() != Method::HEAD;
        async move {
            let mut request = request.map(|body| Body::new(Awaited { body, until: None }));
            request.extensions_mut().insert(peer);
            let response = match serves {
                Serves::Site(site) => site.answer(request).await,
                Serves::Router(router) => router.oneshot(request).await?,
            };
            asked.waits_for_client();
            asked.is_over = !has_body;
            Ok::<_, Infallible>(response.map(|body| Body::new(Held { body, asked })))
        }
        .boxed()
    });
    let builder = builder(protocol);
    let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = account.excess.cancelled() => {
            return debug!(srcIP = %address, "Requests are given up too fast; the connection is closed");
        }
        () = first_of(stop.cancelled(), account.outstayed()) => {
            connection.as_mut().graceful_shutdown();
            match timeout(SHUTDOWN_LIMIT, connection).await {
                Ok(ended) => ended,
                Err(_) => return, // who is slower is cut off
            }
        }
    };
    if let Err(error) = ended {
        debug!(srcIP = %address, err = error, "HTTP connection ended");
    }
}

async fn first_of(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    tokio::select! {
        () = one => {}
        () = other => {}
    }
}

fn builder(protocol: Protocol) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_LIMIT).max_buf_size(HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADER_LIST)
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1);
    match protocol {
        Protocol::One => builder.http1_only(),
        Protocol::Two => builder.http2_only(),
    }
}

/// What a client has going on one connection.
struct Account {
    state: Mutex<State>,
    /// Cancelled once too many requests were given up.
    excess: CancellationToken,
}

struct State {
    next: u64,
    open: usize,
    quiet_since: Instant,
    /// Answers of which the client has to take something, since when.
    waiting: HashMap<u64, Instant>,
    /// When as many requests may be given up at once as ever.
    forgiven: Instant,
}

impl Account {
    fn open() -> Arc<Self> {
        let now = Instant::now();
        let state = State { next: 0, open: 0, quiet_since: now, waiting: HashMap::new(), forgiven: now };
        Arc::new(Self { state: Mutex::new(state), excess: CancellationToken::new() })
    }

    fn asked(self: &Arc<Self>) -> Asked {
        let mut state = self.state();
        state.open += 1;
        state.next += 1;
        Asked { id: state.next, account: self.clone(), is_over: false }
    }

    fn give_up(&self) {
        let now = Instant::now();
        let mut state = self.state();
        let base = state.forgiven.max(now);
        if base.saturating_duration_since(now) > GIVEN_UP.1 * GIVEN_UP.0 {
            self.excess.cancel();
        }
        state.forgiven = base + GIVEN_UP.1;
    }

    /// Returns once the client has asked nothing, or taken nothing, for too long.
    async fn outstayed(&self) {
        loop {
            let (now, due) = (Instant::now(), self.due());
            if due <= now {
                return;
            }
            // Looked at again in time for what may end meanwhile.
            sleep_until(due.min(now + IDLE_LIMIT)).await;
        }
    }

    fn due(&self) -> Instant {
        let state = self.state();
        if state.open == 0 {
            return state.quiet_since + IDLE_LIMIT;
        }
        let (first, last) = (state.waiting.values().min(), state.waiting.values().max());
        let of_one = first.map_or_else(Instant::now, |first| *first) + LONG_STALL_LIMIT;
        let of_all = last.filter(|_| state.waiting.len() == state.open).map(|last| *last + STALL_LIMIT);
        of_all.map_or(of_one, |of_all| of_all.min(of_one))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request, from its head to the last byte of its answer.
struct Asked {
    account: Arc<Account>,
    id: u64,
    /// Whether the answer was told to its end.
    is_over: bool,
}

impl Asked {
    fn waits_for_client(&mut self) {
        self.account.state().waiting.insert(self.id, Instant::now());
    }

    fn waits_for_us(&mut self) {
        self.account.state().waiting.remove(&self.id);
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let mut state = self.account.state();
        state.open = state.open.saturating_sub(1);
        state.quiet_since = Instant::now();
        state.waiting.remove(&self.id);
        drop(state);
        if !self.is_over {
            self.account.give_up();
        }
    }
}

/// The body of a request. A wait for it has an end, whoever waits.
struct Awaited {
    body: hyper::body::Incoming,
    /// The end of the wait, once there is one.
    until: Option<Pin<Box<Sleep>>>,
}

impl HttpBody for Awaited {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(BODY_LIMIT)));
        ready!(until.as_mut().poll(context));
        let text = format!("the body did not come within {BODY_LIMIT:?}");
        Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, text).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer.
struct Held {
    body: Body,
    asked: Asked,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.asked.waits_for_us();
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if matches!(frame, Some(Ok(_))) {
            self.asked.waits_for_client(); // the last piece too: it is kept until there is a window for it
        }
        self.asked.is_over = !matches!(frame, Some(Ok(_))) || self.body.is_end_stream();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.asked.is_over |= self.body.is_end_stream();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pause_in_one_answer_is_not_the_end_of_the_others() {
        let (account, began) = (Account::open(), Instant::now());
        let due = || account.due().duration_since(began).as_secs();
        assert_eq!(due(), 90, "nothing is asked");
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
