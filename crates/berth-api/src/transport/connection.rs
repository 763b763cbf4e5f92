//! Connection to the API server: sends requests over HTTP/2 or HTTP/1.1 and tracks its life cycle.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use tokio_util::sync::CancellationToken;

/// Request body.
pub type Body = Full<Bytes>;

/// Request sender by HTTP version.
pub enum Sender {
    /// Multiplexed; the number is the peer's limit of concurrent streams, which may change.
    Http2(http2::SendRequest<Body>, Arc<AtomicUsize>),
    /// One request at a time: a request takes the sender out.
    Http1(Mutex<Option<http1::SendRequest<Body>>>),
}

/// Connection to the API server.
pub struct ApiConnection {
    /// Number of the connection attempt, unique per dialer.
    pub id: u64,
    /// Request sender.
    pub sender: Sender,
    /// Version of the credentials and authorities it was established with.
    pub epoch: u64,
    /// Cancelled when it is draining: no new requests, and watches end soon.
    pub draining: CancellationToken,
    /// Cancelled when it is closed, regardless of requests in flight.
    pub closed: CancellationToken,
    /// Cancelled when it accepts no more requests: it is lost, or the server is closing it.
    pub over: CancellationToken,
}

/// Why a request has no response.
#[derive(Debug, PartialEq, Eq)]
pub enum SendError {
    /// The server has not processed it.
    NotSent,
    /// The server may have processed it.
    Lost(String),
}

impl ApiConnection {
    /// Whether it uses HTTP/2.
    pub fn is_http2(&self) -> bool {
        matches!(self.sender, Sender::Http2(..))
    }

    /// Maximum number of concurrent requests.
    pub fn limit(&self) -> usize {
        match &self.sender {
            Sender::Http2(_, limit) => limit.load(Ordering::Relaxed),
            Sender::Http1(_) => 1,
        }
    }

    /// Whether it accepts no more requests.
    pub fn is_over(&self) -> bool {
        self.over.is_cancelled()
            || match &self.sender {
                Sender::Http2(sender, _) => sender.is_closed(),
                Sender::Http1(sender) => {
                    let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
                    sender.as_ref().is_some_and(http1::SendRequest::is_closed)
                }
            }
    }

    /// Sends a request and waits for the response head. `turn` occupies an HTTP/1.1 connection until the response has
    /// been read.
    ///
    /// # Errors
    /// There is no response.
    pub async fn send(&self, request: Request<Body>, turn: &mut Http1Lease) -> Result<Response<Incoming>, SendError> {
        match &self.sender {
            Sender::Http2(sender, _) => {
                let sending = sender.clone().try_send_request(request);
                sending.await.map_err(|mut failed| failure(failed.take_message().is_some(), failed.error()))
            }
            Sender::Http1(place) => {
                let taken = place.lock().unwrap_or_else(PoisonError::into_inner).take();
                let mut sender = taken.ok_or(SendError::NotSent)?;
                sender.ready().await.map_err(|_| SendError::NotSent)?;
                let sending = sender.try_send_request(request);
                turn.0 = Some(sender);
                sending.await.map_err(|mut failed| failure(failed.take_message().is_some(), failed.error()))
            }
        }
    }

    /// Releases an HTTP/1.1 connection after its response was read completely.
    pub fn give_back(&self, turn: &mut Http1Lease) {
        if let Sender::Http1(place) = &self.sender {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = turn.0.take();
        }
    }
}

/// Occupies an HTTP/1.1 connection until its response has been read.
#[derive(Default)]
pub struct Http1Lease(Option<http1::SendRequest<Body>>);

impl fmt::Debug for ApiConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).field("is_http2", &self.is_http2()).finish_non_exhaustive()
    }
}

fn failure(was_returned: bool, error: &hyper::Error) -> SendError {
    if was_returned || is_untouched(error) { SendError::NotSent } else { SendError::Lost(chain(error)) }
}

/// Whether the server reports that it has not processed the request: GOAWAY, or REFUSED_STREAM.
fn is_untouched(error: &hyper::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let is_refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            return error.is_remote() && (is_refused || error.is_go_away());
        }
        cause = error.source();
    }
    false
}

/// Formats an error with its causes, each once.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
