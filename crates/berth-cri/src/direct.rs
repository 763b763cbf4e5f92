//! Minimal unary gRPC client over h2, for frequent calls on an idle node: exec probes.
//!
//! tonic's channel passes a call from task to task: one that connects, one for the connection, one for the request
//! body, and one for the response; its clients wrap the single message in a stream each way. This client writes the
//! request to the connection in one piece and reads the response in the caller's task. It uses one connection at a
//! time, which a call establishes when there is none. It supports only uncompressed unary calls of gRPC over HTTP/2.

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

/// Length of the gRPC message prefix, in bytes: compression flag and message length.
const HEAD: usize = 5;

/// Transport of a connection.
pub(super) trait Pipe: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Pipe for T {}

/// Creates the transport of a connection. The error text is returned unchanged.
pub(super) type MakePipe = Arc<dyn Fn() -> BoxFuture<'static, Result<Box<dyn Pipe>, String>> + Send + Sync>;

/// Connection attempt that several callers may await.
type Connecting = Shared<BoxFuture<'static, Result<SendRequest<Bytes>, Status>>>;

/// Unary gRPC client. Clones share the connection.
#[derive(Clone)]
pub(super) struct Direct {
    make: MakePipe,
    connecting: Arc<Mutex<Option<Connecting>>>,
}

impl Direct {
    /// Creates a client that connects on first use, and reconnects when needed.
    pub(super) fn new(make: MakePipe) -> Self {
        Self { make, connecting: Arc::default() }
    }

    /// Sender of the current connection, ready for a request; reconnects if necessary.
    async fn sender(&self) -> Result<SendRequest<Bytes>, Status> {
        let connecting = self.connecting();
        let sender = match connecting.peek().cloned() {
            None => return ready_on(connecting.await?).await,
            Some(Ok(sender)) => sender.ready().await.ok(),
            Some(Err(_)) => None,
        };
        match sender {
            Some(sender) => Ok(sender),
            // That connection ended, or the attempt failed.
            None => ready_on(self.another(&connecting).await?).await,
        }
    }

    fn connecting(&self) -> Connecting {
        let mut slot = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert_with(|| connect(self.make.clone())).clone()
    }

    /// Replaces the failed connection `gone`, unless another caller has already replaced it.
    fn another(&self, gone: &Connecting) -> Connecting {
        let mut slot = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *slot {
            Some(other) if !other.ptr_eq(gone) => other.clone(),
            slot => slot.insert(connect(self.make.clone())).clone(),
        }
    }

    /// Makes a unary call of the method at `address`.
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

/// Establishes a connection and drives it in a task until its last sender is dropped.
fn connect(make: MakePipe) -> Connecting {
    let connecting = async move {
        let pipe = make().await.map_err(Status::unavailable)?;
        // Start with one stream: before the runtime's settings arrive its stream limit is unknown, and it would refuse
        // more.
        let mut builder = h2::client::Builder::new();
        let (sender, connection) = builder.initial_max_send_streams(1).handshake(pipe).await.map_err(broken)?;
        tokio::spawn(connection); // callers get the error that ends it
        Ok(sender)
    };
    connecting.boxed().shared()
}

fn broken(error: h2::Error) -> Status {
    Status::from_error(Box::new(error))
}

/// Encodes a message with the gRPC prefix: uncompressed flag and length.
fn framed(message: &impl Message) -> Result<Bytes, Status> {
    let length = u32::try_from(message.encoded_len()).map_err(|_| Status::out_of_range("the message is too long"))?;
    let mut framed = BytesMut::with_capacity(HEAD + message.encoded_len());
    framed.put_u8(0);
    framed.put_u32(length);
    message.encode(&mut framed).map_err(|error| Status::internal(error.to_string()))?;
    Ok(framed.freeze())
}

/// Decodes the message of a response.
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

/// gRPC status in headers or trailers; `None` where they contain none.
fn verdict(headers: &HeaderMap) -> Option<Result<(), Status>> {
    let status = Status::from_header_map(headers)?;
    Some(if status.code() == Code::Ok { Ok(()) } else { Err(status) })
}

/// Read result, `None` at the end. A server may end a complete response with a reset.
fn before_end<T>(read: Result<Option<T>, h2::Error>) -> Result<Option<T>, Status> {
    match read {
        Err(error) if matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL)) => Ok(None),
        read => read.map_err(broken),
    }
}

/// Reads a response to its end.
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
