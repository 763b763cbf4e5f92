//! Proxies an upgraded client connection to the runtime's streaming server (spec 04b §2.1).
//!
//! Redirects are not followed: a response without an upgrade ends the request, and an error response is passed on. The
//! runtime gets only the method and headers of the client's request.

use std::{net::IpAddr, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;

use super::{
    StreamingContext,
    byte_copy::copy_bidirectional,
    error_response::line,
    runtime_dialer::{BackendError, RuntimeResponse},
    stream_limit::Permit,
};
use crate::Peer;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Timeout for reading the body of an error response, and its maximum length in bytes.
const ERROR_LIMIT: Duration = Duration::from_secs(10);
const ERROR_BYTES: usize = 1 << 20;

/// Connects the client with the runtime's URL.
pub async fn splice(streaming: &StreamingContext, url: &str, mut request: Request<Body>, permit: Permit) -> Response {
    let client = request.extensions_mut().remove::<OnUpgrade>();
    let from = client_address(&request);
    let method = request.method().clone();
    let headers = forwarded(std::mem::take(request.headers_mut()), from);
    let answered = match streaming.dialer().send_request(url, method, headers).await {
        Ok(answered) => answered,
        Err(error) => return unreachable(&error),
    };
    if answered.response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return refused(answered).await;
    }
    let Some(client) = client else {
        return line(StatusCode::INTERNAL_SERVER_ERROR, "no-upgrade", "connection does not support upgrade");
    };
    let RuntimeResponse { mut response, connection } = answered;
    let head = std::mem::take(response.headers_mut());
    streaming.spawn(async move {
        let upgraded = tokio::try_join!(client, hyper::upgrade::on(response));
        if let Ok((client, runtime)) = upgraded {
            copy_bidirectional(TokioIo::new(client), TokioIo::new(runtime)).await;
        }
        drop((permit, connection));
    });
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    *response.headers_mut() = head;
    response
}

/// Client address of a request.
pub fn client_address(request: &Request<Body>) -> Option<IpAddr> {
    request.extensions().get::<Peer>().map(|peer| peer.address.ip())
}

/// Response where the runtime cannot be reached.
pub fn unreachable(error: &BackendError) -> Response {
    line(StatusCode::INTERNAL_SERVER_ERROR, "runtime-unreachable", &error.to_string())
}

/// Response where the runtime refuses the upgrade: its own, if that is an error.
pub async fn refused(answered: RuntimeResponse) -> Response {
    let RuntimeResponse { response, connection } = answered;
    let status = response.status();
    if status.as_u16() < 400 {
        let text = format!("invalid upgrade response: status code {}", status.as_u16());
        return line(StatusCode::INTERNAL_SERVER_ERROR, "invalid-upgrade", &text);
    }
    let (mut head, body) = response.into_parts();
    let body = timeout(ERROR_LIMIT, Limited::new(body, ERROR_BYTES).collect()).await;
    drop(connection);
    let body = body.ok().and_then(Result::ok).map(|body| body.to_bytes()).unwrap_or_default();
    for hop in [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::UPGRADE] {
        head.headers.remove(hop);
    }
    // A connection that was nearly a tunnel must not be reused for another request (CVE-2018-1002105).
    head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    Response::from_parts(head, Body::from(body))
}

/// Body of an error response, for callers that report it in another form.
pub async fn error_text(answered: RuntimeResponse) -> Bytes {
    let body = Limited::new(answered.response.into_body(), ERROR_BYTES).collect();
    let body = timeout(ERROR_LIMIT, body).await;
    drop(answered.connection);
    body.ok().and_then(Result::ok).map(|body| body.to_bytes()).unwrap_or_default()
}

/// Filters the client's headers for the runtime, and extends `X-Forwarded-For`.
pub fn forwarded(mut headers: HeaderMap, from: Option<IpAddr>) -> HeaderMap {
    let ours = [header::AUTHORIZATION, header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::EXPECT];
    for name in ours {
        headers.remove(name);
    }
    if let Some(from) = from {
        let before = headers.get(FORWARDED_FOR).and_then(|value| value.to_str().ok());
        let chain = before.map_or_else(|| from.to_string(), |before| format!("{before}, {from}"));
        if let Ok(chain) = HeaderValue::from_str(&chain) {
            headers.insert(FORWARDED_FOR, chain);
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_stay_here_and_the_client_is_named() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer x"),
            ("host", "node"),
            ("content-length", "5"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-stream-protocol-version", "v4.channel.k8s.io"),
            ("x-stream-protocol-version", "v3.channel.k8s.io"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let sent = forwarded(headers, "127.0.0.1".parse().ok());
        assert_eq!(sent.len(), 3);
        assert_eq!(sent["x-forwarded-for"], "10.0.0.1, 127.0.0.1");
        assert_eq!(sent.get_all("x-stream-protocol-version").iter().count(), 2);
        assert_eq!(forwarded(HeaderMap::new(), "::1".parse().ok())["x-forwarded-for"], "::1");
    }
}
