//! The bodies of requests: nobody waits for one for ever, and one that nobody reads does not cost its client the
//! connection.
//!
//! Over HTTP/1.1 the next request comes behind the body. What the handler left of it is read and thrown away before
//! the answer begins, as Go's server does; where there is too much of it or it does not come, the answer says that the
//! connection ends. A connection that just ended would fail the request that the client has sent on it by then.

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

/// How long the body of a request may take: forms and numbers, all of them short.
const LIMIT: Duration = Duration::from_secs(90);
/// How much of what nobody reads is thrown away, in bytes (the reference's number).
const MOST: usize = 256 << 10;
/// How long that may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a handler did not read.
#[derive(Clone, Debug, Default)]
pub struct Unread(Arc<Mutex<Option<Incoming>>>);

impl Unread {
    /// Reads the rest, if there is one; whether the next request may follow.
    pub async fn is_taken(&self) -> bool {
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

    /// It is not to be read: the client waits to be asked for it.
    pub fn is_there(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// The body of a request. A wait for it has an end, whoever waits.
pub struct Awaited {
    body: Option<Incoming>,
    /// The end of the wait, once there is one.
    until: Option<Pin<Box<Sleep>>>,
    unread: Unread,
}

impl Awaited {
    /// A body; what is not read of it is to be found in the other.
    pub fn new(body: Incoming) -> (Self, Unread) {
        let unread = Unread::default();
        (Self { body: Some(body), until: None, unread: unread.clone() }, unread)
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.unread.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}

impl HttpBody for Awaited {
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
        let text = format!("the body did not come within {LIMIT:?}");
        Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, text).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}
