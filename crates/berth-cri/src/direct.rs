//! A connection for calls that are made again and again on a node at rest: commands that probe.
//!
//! tonic's channel hands a call from task to task: to the one that connects, to that of the connection, to one for the
//! request's body and one for the answer; its clients make a stream of the one message there is each way. Here the caller
//! writes its request into the connection, in one piece, and reads its answer. One connection at a time; it is made when a
//! call finds none. Only calls with one message each way that are not compressed can be made, as gRPC over HTTP/2 has them.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use h2::{Reason, RecvStream, client::SendRequest};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::{Code, Status};

use super::client::MAX_MESSAGE;

/// Bytes before a message: whether it is compressed, and its length.
const HEAD: usize = 5;

/// What a connection runs over.
pub(super) trait Pipe: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Pipe for T {}

/// Makes what a connection runs over. The error is told as it is.
pub(super) type MakePipe = Arc<dyn Fn() -> BoxFuture<'static, Result<Box<dyn Pipe>, String>> + Send + Sync>;

/// Several may wait for the same one.
type Connecting = Shared<BoxFuture<'static, Result<SendRequest<Bytes>, Status>>>;

/// Makes calls. Clones share the connection.
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

    /// Makes a call that has one message there and one back, of the method at that address.
    pub(super) async fn unary<M, A>(
        &self,
        address: &'static str,
        call: tonic::Request<M>,
    ) -> Result<tonic::Response<A>, Status>
    where
        M: Message,
        A: Message + Default,
    {
        let (told, _, message) = call.into_parts();
        let mut request = Request::new(());
        (*request.method_mut(), *request.version_mut()) = (Method::POST, Version::HTTP_2);
        *request.uri_mut() = Uri::from_static(address);
        let mut headers = told.into_headers();
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        *request.headers_mut() = headers;
        let message = framed(&message)?;
        let (response, mut rest) = self.sender().await?.send_request(request, false).map_err(broken)?;
        rest.send_data(message, true).map_err(broken)?;
        Ok(tonic::Response::new(unframed(read(response.await.map_err(broken)?).await?)?))
    }
}

async fn ready_on(sender: SendRequest<Bytes>) -> Result<SendRequest<Bytes>, Status> {
    sender.ready().await.map_err(broken)
}

/// Runs the connection beside its callers, until the last of them has let go of it.
fn connect(make: MakePipe) -> Connecting {
    let connecting = async move {
        let pipe = make().await.map_err(Status::unavailable)?;
        // Until the runtime's settings are here nobody knows how many streams it takes: it would refuse the others.
        let mut builder = h2::client::Builder::new();
        let (sender, connection) = builder.initial_max_send_streams(1).handshake(pipe).await.map_err(broken)?;
        tokio::spawn(connection); // its callers are told what ends it
        Ok(sender)
    };
    connecting.boxed().shared()
}

fn broken(error: h2::Error) -> Status {
    Status::from_error(Box::new(error))
}

/// A call, as it is sent: its message behind the byte that says it is not compressed, and its length.
fn framed(message: &impl Message) -> Result<Bytes, Status> {
    let length = u32::try_from(message.encoded_len()).map_err(|_| Status::out_of_range("the message is too long"))?;
    let mut framed = BytesMut::with_capacity(HEAD + message.encoded_len());
    framed.put_u8(0);
    framed.put_u32(length);
    message.encode(&mut framed).map_err(|error| Status::internal(error.to_string()))?;
    Ok(framed.freeze())
}

/// The message of an answer.
fn unframed<A: Message + Default>(mut answer: Bytes) -> Result<A, Status> {
    if answer.is_empty() {
        return Err(Status::internal("Missing response message."));
    }
    match (answer.try_get_u8(), answer.try_get_u32()) {
        (Ok(0), Ok(length)) if usize::try_from(length) == Ok(answer.len()) => {}
        _ => return Err(Status::internal("the answer is not one message that is not compressed")),
    }
    A::decode(answer).map_err(|error| Status::internal(error.to_string()))
}

/// What is said of the call there: an error, that there is none, or nothing.
fn verdict(headers: &HeaderMap) -> Option<Result<(), Status>> {
    let status = Status::from_header_map(headers)?;
    Some(if status.code() == Code::Ok { Ok(()) } else { Err(status) })
}

/// What was read, `None` at the end. Whoever has said all may end it with a reset.
fn before_end<T>(read: Result<Option<T>, h2::Error>) -> Result<Option<T>, Status> {
    match read {
        Err(error) if matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL)) => Ok(None),
        read => read.map_err(broken),
    }
}

/// Reads an answer to its end.
async fn read(response: Response<RecvStream>) -> Result<Bytes, Status> {
    let (head, mut body) = response.into_parts();
    let mut told = verdict(&head.headers).transpose()?;
    let mut answer = BytesMut::new();
    while let Some(data) = body.data().await {
        let Some(data) = before_end(data.map(Some))? else { break };
        body.flow_control().release_capacity(data.len()).map_err(broken)?;
        if answer.len() + data.len() > HEAD + MAX_MESSAGE {
            return Err(Status::out_of_range(format!("the answer is longer than {MAX_MESSAGE} bytes")));
        }
        answer.extend_from_slice(&data);
    }
    if told.is_none()
        && let Some(trailers) = before_end(body.trailers().await)?
    {
        told = verdict(&trailers).transpose()?;
    }
    match told {
        None if head.status != StatusCode::OK => Err(Status::unknown(format!("HTTP status {}", head.status))),
        _ => Ok(answer.freeze()),
    }
}

#[cfg(test)]
mod tests;
