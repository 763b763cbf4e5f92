//! SPDY tunneled in a WebSocket: port-forward for WebSocket-only clients (spec 04b §4.3).
//!
//! The runtime is called first, over SPDY; the client's WebSocket is accepted only if the runtime accepts.

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header},
    response::Response,
};
use bytes::{Bytes, BytesMut};
use futures::{SinkExt, StreamExt};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split},
    time::timeout,
};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::handshake::{Handshake, Socket};
use crate::streaming::{
    StreamingContext,
    error_response::line,
    runtime_dialer::RuntimeResponse,
    spdy::handshake,
    stream_limit::Permit,
    upgrade_protocol::{subprotocols, tunnel_of, tunnelled},
    upgrade_proxy,
};

/// Maximum size of a message that we send, in bytes.
const PIECE: usize = 64 << 10;
/// Timeout of the close handshake, and for the rest of the runtime's output.
const GOODBYE: std::time::Duration = std::time::Duration::from_secs(10);

/// Calls the runtime, responds to the client, and copies bytes in a background task.
pub async fn tunnel(streaming: &StreamingContext, url: &str, mut request: Request<Body>, permit: Permit) -> Response {
    let offered: Vec<String> =
        subprotocols(request.headers()).into_iter().filter_map(tunnelled).map(str::to_owned).collect();
    if offered.is_empty() {
        let text = "unable to upgrade: no tunneling spdy protocols provided";
        return line(StatusCode::BAD_REQUEST, "bad-websocket", text);
    }
    let client = match Handshake::of(&mut request) {
        Ok(client) => client,
        Err(response) => return response,
    };
    streaming.metrics().web_socket("portforward");
    let from = upgrade_proxy::client_address(&request);
    let headers = toward_runtime(upgrade_proxy::forwarded(std::mem::take(request.headers_mut()), from), &offered);
    let answered = match streaming.dialer().send_request(url, Method::POST, headers).await {
        Ok(answered) => answered,
        Err(error) => return upgrade_proxy::unreachable(&error),
    };
    if answered.response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return upgrade_proxy::refused(answered).await;
    }
    let RuntimeResponse { response, connection } = answered;
    let chosen = response.headers().get(handshake::PROTOCOL).and_then(|value| value.to_str().ok());
    let chosen = chosen.or(offered.first().map(String::as_str)).unwrap_or_default();
    let (answer, socket) = client.complete(&tunnel_of(chosen));
    streaming.spawn(async move {
        let (socket, runtime) = tokio::join!(socket, hyper::upgrade::on(response));
        if let (Some(socket), Ok(runtime)) = (socket, runtime) {
            copy(socket, TokioIo::new(runtime)).await;
        }
        drop((permit, connection));
    });
    answer
}

/// Converts the client's headers: without WebSocket headers, with the tunneled SPDY protocols.
pub fn toward_runtime(mut headers: HeaderMap, offered: &[String]) -> HeaderMap {
    for name in [
        header::SEC_WEBSOCKET_KEY,
        header::SEC_WEBSOCKET_VERSION,
        header::SEC_WEBSOCKET_PROTOCOL,
        header::SEC_WEBSOCKET_EXTENSIONS,
        header::ORIGIN,
    ] {
        headers.remove(name);
    }
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(handshake::SPDY));
    headers.remove(handshake::PROTOCOL);
    for protocol in offered.iter().filter_map(|protocol| HeaderValue::from_str(protocol).ok()) {
        headers.append(handshake::PROTOCOL, protocol);
    }
    headers
}

/// Copies bytes until either side ends.
pub async fn copy<T: AsyncRead + AsyncWrite>(socket: Socket, runtime: T) {
    let (mut to_client, mut from_client) = socket.split();
    let (mut from_runtime, mut to_runtime) = split(runtime);
    let inward = async {
        while let Some(Ok(message)) = from_client.next().await {
            match unwrapped(message) {
                TunnelMessage::Bytes(bytes) => {
                    if to_runtime.write_all(&bytes).await.is_err() || to_runtime.flush().await.is_err() {
                        return None;
                    }
                }
                TunnelMessage::Nothing => {}
                TunnelMessage::End => return Some(CloseCode::Normal),
                TunnelMessage::Wrong => return Some(CloseCode::Unsupported),
            }
        }
        Some(CloseCode::Normal)
    };
    let outward = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(PIECE);
            match from_runtime.read_buf(&mut buffer).await {
                Ok(read) if read > 0 => {}
                _ => return CloseCode::Normal,
            }
            if to_client.send(Message::Binary(buffer.split().freeze())).await.is_err() {
                return CloseCode::Normal;
            }
        }
    };
    let code = {
        let mut outward = std::pin::pin!(outward);
        tokio::select! {
            code = inward => match code {
                Some(code) => code,
                // A runtime that reads nothing more may still have sent output before it closed.
                None => timeout(GOODBYE, outward).await.unwrap_or(CloseCode::Normal),
            },
            code = &mut outward => code,
        }
    };
    let goodbye = async {
        let frame = CloseFrame { code, reason: Default::default() };
        let _ = to_client.send(Message::Close(Some(frame))).await; // the client may be gone
        let _ = to_client.close().await;
        let _ = to_runtime.shutdown().await;
    };
    let _ = timeout(GOODBYE, goodbye).await;
}

/// Decoded message of the client.
#[derive(Debug, PartialEq, Eq)]
enum TunnelMessage {
    Bytes(Bytes),
    Nothing,
    End,
    Wrong,
}

fn unwrapped(message: Message) -> TunnelMessage {
    match message {
        Message::Binary(bytes) => TunnelMessage::Bytes(bytes),
        Message::Text(_) => TunnelMessage::Wrong,
        Message::Close(_) => TunnelMessage::End,
        Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => TunnelMessage::Nothing,
    }
}
