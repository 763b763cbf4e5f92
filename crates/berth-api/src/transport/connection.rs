//! One connection: what is sent on it, and how it ends.

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

/// What is sent.
pub type Body = Full<Bytes>;

/// Takes requests.
pub enum Sender {
    /// Many at once, up to that number, which the peer may change.
    Http2(http2::SendRequest<Body>, Arc<AtomicUsize>),
    /// One at a time: who has it takes it out.
    Http1(Mutex<Option<http1::SendRequest<Body>>>),
}

/// A connection.
pub struct Connection {
    /// Which of all there ever were.
    pub id: u64,
    /// Takes requests.
    pub sender: Sender,
    /// Which identity and authorities it was made with.
    pub epoch: u64,
    /// No more requests; watches end soon.
    pub condemned: CancellationToken,
    /// It is closed, whatever is under way.
    pub closed: CancellationToken,
    /// It takes no more requests: it is lost, or the server has said so.
    pub over: CancellationToken,
}

/// A request came to nothing.
#[derive(Debug, PartialEq, Eq)]
pub enum SendError {
    /// The server has not seen it.
    NotSent,
    /// It may have been carried out.
    Lost(String),
}

impl Connection {
    /// Whether it speaks HTTP/2.
    pub fn is_http2(&self) -> bool {
        matches!(self.sender, Sender::Http2(..))
    }

    /// How many requests the peer takes at once.
    pub fn limit(&self) -> usize {
        match &self.sender {
            Sender::Http2(_, limit) => limit.load(Ordering::Relaxed),
            Sender::Http1(_) => 1,
        }
    }

    /// Whether nothing can be sent any more.
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

    /// Sends and waits for the head of the answer. `turn` keeps an HTTP/1.1 connection until the
    /// answer was read.
    ///
    /// # Errors
    /// It came to nothing.
    pub async fn send(&self, request: Request<Body>, turn: &mut Turn) -> Result<Response<Incoming>, SendError> {
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

    /// The answer was read whole: an HTTP/1.1 connection can be used again.
    pub fn give_back(&self, turn: &mut Turn) {
        if let Sender::Http1(place) = &self.sender {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = turn.0.take();
        }
    }
}

/// What keeps an HTTP/1.1 connection until its answer was read.
#[derive(Default)]
pub struct Turn(Option<http1::SendRequest<Body>>);

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).field("is_http2", &self.is_http2()).finish_non_exhaustive()
    }
}

fn failure(was_returned: bool, error: &hyper::Error) -> SendError {
    if was_returned || is_untouched(error) { SendError::NotSent } else { SendError::Lost(chain(error)) }
}

/// The server says that it has not looked at the request: it goes away, or refuses the stream.
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

/// An error with its causes, each once.
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
