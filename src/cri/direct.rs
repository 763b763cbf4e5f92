//! A connection for calls that are made again and again on a node at rest: commands that probe.
//!
//! tonic's channel hands a call from task to task: to the one that connects, to that of the connection, to one for the
//! request's body and one for the answer. Here the caller writes its request into the connection, in one piece, and reads
//! its answer. What tonic makes of it is the same. One connection at a time; it is made when a call finds none.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use h2::{RecvStream, client::SendRequest};
use http::{Request, Response, Uri, uri};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::{Status, body::Body};
use tower::Service;

/// What a connection runs over.
pub(super) trait Pipe: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Pipe for T {}

/// Makes what a connection runs over. The error is told as it is.
pub(super) type MakePipe = Arc<dyn Fn() -> BoxFuture<'static, Result<Box<dyn Pipe>, String>> + Send + Sync>;

/// Several may wait for the same one.
type Connecting = Shared<BoxFuture<'static, Result<SendRequest<Bytes>, Status>>>;

/// A transport of tonic's clients. Clones share the connection.
#[derive(Clone)]
pub(super) struct Direct {
    make: MakePipe,
    connecting: Arc<Mutex<Option<Connecting>>>,
}

impl Direct {
    /// Connects when it is first used, and again when it must.
    pub(super) fn new(make: MakePipe) -> Self {
        Self { make, connecting: Arc::default() }
    }

    /// Where the next request may be written.
    async fn sender(&self) -> Result<SendRequest<Bytes>, Status> {
        let connecting = self.connecting();
        let sender = match connecting.peek().cloned() {
            None => return ready_on(connecting.await?).await,
            Some(Ok(sender)) => sender.ready().await.ok(),
            Some(Err(_)) => None,
        };
        match sender {
            Some(sender) => Ok(sender),
            // That one is gone, or there never was one.
            None => ready_on(self.another(&connecting).await?).await,
        }
    }

    fn connecting(&self) -> Connecting {
        let mut slot = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert_with(|| connect(self.make.clone())).clone()
    }

    /// Instead of that one, unless somebody else has asked for another already.
    fn another(&self, gone: &Connecting) -> Connecting {
        let mut slot = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *slot {
            Some(other) if !other.ptr_eq(gone) => other.clone(),
            slot => slot.insert(connect(self.make.clone())).clone(),
        }
    }
}

async fn ready_on(sender: SendRequest<Bytes>) -> Result<SendRequest<Bytes>, Status> {
    sender.ready().await.map_err(broken)
}

/// Runs the connection beside its callers, until the last of them has let go of it.
fn connect(make: MakePipe) -> Connecting {
    let connecting = async move {
        let pipe = make().await.map_err(Status::unavailable)?;
        let (sender, connection) = h2::client::handshake(pipe).await.map_err(broken)?;
        tokio::spawn(connection); // its callers are told what ends it
        Ok(sender)
    };
    connecting.boxed().shared()
}

fn broken(error: h2::Error) -> Status {
    Status::from_error(Box::new(error))
}

impl Service<Request<Body>> for Direct {
    type Response = Response<Answer>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Response<Answer>, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let direct = self.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            head.uri = addressed(head.uri)?;
            let body = body.collect().await?.to_bytes();
            let mut sender = direct.sender().await?;
            let (response, mut rest) = sender.send_request(Request::from_parts(head, ()), false).map_err(broken)?;
            rest.send_data(body, true).map_err(broken)?;
            Ok(response.await.map_err(broken)?.map(Answer))
        })
    }
}

/// The same, of a host: HTTP/2 wants one.
fn addressed(uri: Uri) -> Result<Uri, Status> {
    let mut parts = uri.into_parts();
    parts.scheme = Some(uri::Scheme::HTTP);
    parts.authority = Some(uri::Authority::from_static("localhost"));
    Uri::from_parts(parts).map_err(|error| Status::internal(error.to_string()))
}

/// The body of an answer.
pub(super) struct Answer(RecvStream);

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match ready!(self.0.poll_data(context)) {
            Some(Ok(data)) => {
                let read = self.0.flow_control().release_capacity(data.len());
                Poll::Ready(Some(read.map(|()| Frame::data(data)).map_err(broken)))
            }
            // Whoever has said all may end it so.
            Some(Err(error)) if matches!(error.reason(), Some(h2::Reason::NO_ERROR | h2::Reason::CANCEL)) => {
                Poll::Ready(None)
            }
            Some(Err(error)) => Poll::Ready(Some(Err(broken(error)))),
            None => {
                let trailers = ready!(self.0.poll_trailers(context)).map_err(broken).transpose();
                Poll::Ready(trailers.map(|trailers| trailers.map(Frame::trailers)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}
