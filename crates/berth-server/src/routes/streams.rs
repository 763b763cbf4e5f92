//! What the stream endpoints have in common: which pod, which streams, and the last step.

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
        Permit, Streaming, bare, decide, failed, line,
        query::{self, Form, Wanted},
        serve::hand_over,
        splice::splice,
        websocket,
    },
};
use berth_config::text::quote;
use berth_types::Pod;

/// Longest form-encoded body, in bytes.
const FORM: usize = 64 << 10;

/// The pod of a path, or the answer where there is none, or another one of its name.
#[allow(clippy::result_large_err, reason = "an answer is sent at once")]
pub fn pod(streaming: &Streaming, path: &PodPath) -> Result<Arc<Pod>, Response> {
    let found = streaming.pods().pod(&path.namespace, &path.pod);
    let found = found.ok_or_else(|| bare(StatusCode::NOT_FOUND, "pod-not-found", "pod does not exist"))?;
    if path.uid.as_deref().is_some_and(|uid| uid != found.uid().as_str()) {
        return Err(bare(StatusCode::NOT_FOUND, "pod-not-found", "pod not found"));
    }
    Ok(found)
}

/// The answer for a container that does not run.
pub fn no_container(name: &str) -> Response {
    let text = format!("container not found ({})", quote(name));
    bare(StatusCode::INTERNAL_SERVER_ERROR, "container-not-found", &text)
}

/// The flags of exec and attach, from body and query; or the answer where no stream is asked for.
#[allow(clippy::result_large_err, reason = "an answer is sent at once")]
pub async fn flags(mut request: Request<Body>) -> Result<(Request<Body>, Form, Wanted), Response> {
    let form = Form::parse(request.uri().query().unwrap_or_default());
    let mut all = form.clone();
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let is_form = kind.split(';').next().is_some_and(|kind| kind.trim() == "application/x-www-form-urlencoded");
    if request.method() == Method::POST && is_form {
        let body = std::mem::take(request.body_mut());
        let Ok(body) = axum::body::to_bytes(body, FORM).await else {
            return Err(bare(StatusCode::BAD_REQUEST, "bad-form", "the form cannot be read"));
        };
        all = Form::parse(&String::from_utf8_lossy(&body)).followed_by(&form);
    }
    match query::wanted(&all) {
        Ok(wanted) => Ok((request, form, wanted)),
        Err(error) => Err(bare(StatusCode::BAD_REQUEST, "no-stream", &error.to_string())),
    }
}

/// The request, if it can become a stream and its caller may have one more; else the answer.
///
/// Comes before the runtime is asked, so that none of its one-time URLs is wasted.
#[allow(clippy::result_large_err, reason = "an answer is sent at once")]
pub fn admitted(streaming: &Streaming, request: Request<Body>) -> Result<(Request<Body>, Permit), Response> {
    if !decide::is_upgrade(request.headers()) {
        return Err(line(StatusCode::INTERNAL_SERVER_ERROR, "upgrade-required", "Upgrade request required"));
    }
    let permit = streaming.admit(&request)?;
    Ok((request, permit))
}

/// The streams, as the runtime is asked for them.
pub fn set(wanted: Wanted) -> StreamSet {
    let Wanted { stdin, stdout, stderr, tty } = wanted;
    StreamSet { stdin, stdout, stderr, tty }
}

/// What the runtime has prepared.
pub struct Prepared {
    /// Where it is met.
    pub url: Result<String, StreamError>,
    /// What was asked for.
    pub set: Wanted,
    /// For metrics.
    pub subresource: &'static str,
}

/// Connects the client with what the runtime has prepared.
pub async fn connect(streaming: &Streaming, prepared: Prepared, request: Request<Body>, permit: Permit) -> Response {
    let Prepared { url, set, subresource } = prepared;
    let url = match url {
        Ok(url) => url,
        Err(error) => return failed(&error),
    };
    match streaming.here(&url) {
        Some(Ok(target)) => return hand_over(streaming, target, request, permit),
        Some(Err(gone)) => return *gone,
        None => {}
    }
    match decide::command(request.headers(), streaming.config().terminate_web_sockets) {
        decide::CommandUpgrade::Translate => {
            let command = websocket::Command { url, wanted: set, subresource };
            websocket::translate(streaming, command, request, permit)
        }
        _ => splice(streaming, &url, request, permit).await,
    }
}
