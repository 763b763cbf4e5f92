//! WebSocket opening handshake, server side (RFC 6455 §4.2).

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        handshake::derive_accept_key,
        protocol::{Role, WebSocketConfig},
    },
};

use crate::streaming::error_response::line;

/// Maximum size of a message, in bytes.
const MESSAGE: usize = 32 << 20;
/// Read buffer size, in bytes.
const READ: usize = 32 << 10;

/// WebSocket of a client.
pub type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Validated WebSocket request.
pub struct Handshake {
    upgrade: OnUpgrade,
    accept: String,
}

impl Handshake {
    /// Validates a request.
    ///
    /// # Errors
    /// The response, where the request is invalid.
    #[allow(clippy::result_large_err, reason = "an answer is sent at once")]
    pub fn of(request: &mut Request<Body>) -> Result<Self, Response> {
        let bad = |text| line(StatusCode::BAD_REQUEST, "bad-websocket", text);
        if request.method() != Method::GET {
            return Err(line(StatusCode::METHOD_NOT_ALLOWED, "bad-websocket", "bad method"));
        }
        let headers: &HeaderMap = request.headers();
        if headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
            let mut response = bad("missing or bad WebSocket Version");
            response.headers_mut().insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
            return Err(response);
        }
        let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|key| !key.is_empty());
        let accept = derive_accept_key(key.ok_or_else(|| bad("missing Sec-WebSocket-Key"))?.as_bytes());
        let upgrade = request.extensions_mut().remove::<OnUpgrade>();
        Ok(Self { upgrade: upgrade.ok_or_else(|| bad("connection does not support upgrade"))?, accept })
    }

    /// The 101 response, and the socket that is available once it is sent. An empty subprotocol is omitted.
    pub fn complete(self, subprotocol: &str) -> (Response, impl Future<Output = Option<Socket>> + Send + 'static) {
        let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
        let headers = response.headers_mut();
        headers.clear();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        for (name, text) in
            [(header::SEC_WEBSOCKET_ACCEPT, self.accept.as_str()), (header::SEC_WEBSOCKET_PROTOCOL, subprotocol)]
        {
            if let Ok(value) = HeaderValue::from_str(text)
                && !text.is_empty()
            {
                headers.insert(name, value);
            }
        }
        let upgrade = self.upgrade;
        let socket = async move {
            let upgraded = upgrade.await.ok()?;
            Some(WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(limits())).await)
        };
        (response, socket)
    }
}

/// Size limits of the WebSocket.
pub fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ)
        .write_buffer_size(0)
        .max_write_buffer_size(MESSAGE)
        .max_message_size(Some(MESSAGE))
        .max_frame_size(Some(MESSAGE))
}
