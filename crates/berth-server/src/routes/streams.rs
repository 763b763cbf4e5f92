//! Shared steps of exec, attach, and port-forward handlers: pod lookup, flags, limits, connection.

use std::sync::Arc;

use axum::{
    body::Body,
    http::{Method, Request, StatusCode, header},
    response::Response,
};

use crate::{
    ports::streams::{StreamError, StreamSet},
    routing::PodPath,
    streaming::{
        Permit, StreamingContext, bare, failed, line,
        query::{self, QueryForm, RequestedStreams},
        server::serve_target,
        upgrade_protocol,
        upgrade_proxy::splice,
        websocket,
    },
};
use berth_config::text::quote;
use berth_types::Pod;

/// Maximum length of a form-encoded body, in bytes.
const FORM: usize = 64 << 10;

/// Finds the pod of a path; otherwise returns the response, also where the UID differs.
#[allow(clippy::result_large_err, reason = "an answer is sent at once")]
pub fn pod(streaming: &StreamingContext, path: &PodPath) -> Result<Arc<Pod>, Response> {
    let found = streaming.pods().pod(&path.namespace, &path.pod);
    let found = found.ok_or_else(|| bare(StatusCode::NOT_FOUND, "pod-not-found", "pod does not exist"))?;
    if path.uid.as_deref().is_some_and(|uid| uid != found.uid().as_str()) {
        return Err(bare(StatusCode::NOT_FOUND, "pod-not-found", "pod not found"));
    }
    Ok(found)
}

/// Response for a container that does not run.
pub fn no_container(name: &str) -> Response {
    let text = format!("container not found ({})", quote(name));
    bare(StatusCode::INTERNAL_SERVER_ERROR, "container-not-found", &text)
}

/// Parses the stream flags of exec and attach from body and query; otherwise returns the response.
#[allow(clippy::result_large_err, reason = "an answer is sent at once")]
pub async fn flags(mut request: Request<Body>) -> Result<(Request<Body>, QueryForm, RequestedStreams), Response> {
    let form = QueryForm::parse(request.uri().query().unwrap_or_default());
    let mut all = form.clone();
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let is_form = kind.split(';').next().is_some_and(|kind| kind.trim() == "application/x-www-form-urlencoded");
    if request.method() == Method::POST && is_form {
        let body = std::mem::take(request.body_mut());
        let Ok(body) = axum::body::to_bytes(body, FORM).await else {
            return Err(bare(StatusCode::BAD_REQUEST, "bad-form", "failed to read form-encoded body"));
        };
        all = QueryForm::parse(&String::from_utf8_lossy(&body)).followed_by(&form);
    }
    match query::requested_streams(&all) {
        Ok(wanted) => Ok((request, form, wanted)),
        Err(error) => Err(bare(StatusCode::BAD_REQUEST, "no-stream", &error.to_string())),
    }
}

/// Checks that the request asks for an upgrade and that its caller may open another stream; otherwise returns the
/// response.
///
/// Called before the runtime, so that no one-time URL is wasted.
#[allow(clippy::result_large_err, reason = "an answer is sent at once")]
pub fn admitted(streaming: &StreamingContext, request: Request<Body>) -> Result<(Request<Body>, Permit), Response> {
    if !upgrade_protocol::is_upgrade(request.headers()) {
        return Err(line(StatusCode::INTERNAL_SERVER_ERROR, "upgrade-required", "Upgrade request required"));
    }
    let permit = streaming.admit(&request)?;
    Ok((request, permit))
}

/// Converts the requested streams for the runtime.
pub fn set(wanted: RequestedStreams) -> StreamSet {
    let RequestedStreams { stdin, stdout, stderr, tty } = wanted;
    StreamSet { stdin, stdout, stderr, tty }
}

/// Stream that the runtime prepared.
pub struct PreparedStream {
    /// Its URL, or the runtime's error.
    pub url: Result<String, StreamError>,
    /// Requested streams.
    pub set: RequestedStreams,
    /// Metric label.
    pub subresource: &'static str,
}

/// Connects the client with the prepared stream.
pub async fn connect(
    streaming: &StreamingContext,
    prepared: PreparedStream,
    request: Request<Body>,
    permit: Permit,
) -> Response {
    let PreparedStream { url, set, subresource } = prepared;
    let url = match url {
        Ok(url) => url,
        Err(error) => return failed(&error),
    };
    match streaming.here(&url) {
        Some(Ok(target)) => return serve_target(streaming, target, request, permit),
        Some(Err(gone)) => return *gone,
        None => {}
    }
    match upgrade_protocol::command(request.headers(), streaming.config().terminate_web_sockets) {
        upgrade_protocol::CommandUpgrade::Translate => {
            let command = websocket::WebSocketCommand { url, wanted: set, subresource };
            websocket::translate(streaming, command, request, permit)
        }
        _ => splice(streaming, &url, request, permit).await,
    }
}
