//! Request bodies: read timeout, and draining of unread bodies before the response.
//!
//! Over HTTP/1.1 the next request follows the body. The part that the handler did not read is drained before the
//! response starts, as Go's server does; where it is too long or does not arrive in time, the response announces the
//! end of the connection. Closing the connection without that would fail a request that the client has already sent on
//! it.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep, timeout};

/// Timeout of a request body; bodies here are forms and numbers, all of them short.
const LIMIT: Duration = Duration::from_secs(90);
/// Maximum number of drained bytes (kubelet's value).
const MOST: usize = 256 << 10;
/// Timeout of draining.
const PATIENCE: Duration = Duration::from_secs(5);

/// Part of a body that a handler did not read.
#[derive(Clone, Debug, Default)]
pub struct UnreadBody(Arc<Mutex<Option<Incoming>>>);

impl UnreadBody {
    /// Drains the rest, if any; returns whether the connection can be reused.
    pub async fn drain(&self) -> bool {
        let rest = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(rest) = rest else { return true };
        let mut rest = Limited::new(rest, MOST);
        let all = async {
            while let Some(frame) = rest.frame().await {
                if frame.is_err() {
                    return false;
                }
            }
            true
        };
        timeout(PATIENCE, all).await.unwrap_or(false)
    }

    /// Whether an unread rest exists; it is not drained where the client still waits for `100 Continue`.
    pub fn has_unread(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Request body with a read timeout.
pub struct TimedBody {
    body: Option<Incoming>,
    /// Deadline of the read; starts with the first pending poll.
    until: Option<Pin<Box<Sleep>>>,
    unread: UnreadBody,
}

impl TimedBody {
    /// Wraps a body; the rest that is not read is moved to the [`UnreadBody`] when the body is dropped.
    pub fn new(body: Incoming) -> (Self, UnreadBody) {
        let unread = UnreadBody::default();
        (Self { body: Some(body), until: None, unread: unread.clone() }, unread)
    }
}

impl Drop for TimedBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.unread.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(LIMIT)));
        ready!(until.as_mut().poll(context));
        let text = format!("timed out reading request body after {LIMIT:?}");
        Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, text).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}
